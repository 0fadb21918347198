"""The explorer at a Python prompt: how it prints, what <tab> completes, how a line selects and searches."""

from __future__ import annotations

import functools
from collections.abc import Callable, ItemsView, Iterator, Mapping

from fusionlab.errors import ArgumentError, unknown_name
from fusionlab.fusers import Candidate, Findings, Rejection
from fusionlab.fusers.engine.grouping import states_said
from fusionlab.showing import Facts, Records, Shown, Table
from fusionlab.tracebacks import errors_for_users

from ..cards.layout.opened import opened_name
from .observed import Observed

Site = Candidate | Rejection
# What the browser draws, and what only this package calls.
_NOT_OFFERED = frozenset(
    "busy export head hits inspector marks outline panel problem refresh scene session tabs trail".split()
)
_OF_THE_WIDGET = ("close", "observe", "unobserve")
_HERE = __name__.rpartition(".")[0]


@errors_for_users
class Sites(Mapping[str, Site], Shown):
    """Site id -> the candidate or rejection found there; prints each with its state."""

    def __init__(self, findings: Callable[[], Findings], enabled: Callable[[], frozenset[str]]) -> None:
        self._findings, self._enabled = findings, enabled
        self._known: tuple[Findings | None, dict[str, Site]] = (None, {})

    @property
    def _found(self) -> dict[str, Site]:
        found = self._findings()
        if self._known[0] is not found:
            self._known = found, {site.id: site for site in (*found.candidates, *found.rejections)}
        return self._known[1]

    def __getitem__(self, name: str) -> Site:
        if name not in self._found:
            raise unknown_name("site", name, self._found)
        return self._found[name]

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self._found)

    def state(self, name: str) -> str:
        """ "fused", "can be fused" (it is off), or "declined".

        Raises:
          UnknownNameError: there is no such site.
        """
        if isinstance(self[name], Rejection):
            return "declined"
        return "fused" if name in self._enabled() else "can be fused"

    def __repr__(self) -> str:
        return "\n".join([self._sentence(), *(f"  {self.state(name):<12}  {site}" for name, site in self.items())])

    def items(self) -> ItemsView[str, Site]:
        return self._found.items()

    def _sentence(self) -> str:
        found, on = self._findings(), self._enabled()
        fused = sum(c.id in on for c in found.candidates)
        return ", ".join(states_said(fused, len(found.candidates) - fused, len(found.rejections)))

    def _table(self) -> Table:
        heads = ("state", "site", "what", "source", "why")
        return Table(heads, tuple((self.state(name), name, *_told(site)) for name, site in self.items()))

    def to_dict(self) -> dict[str, object]:
        """Plain data, JSON-able: id -> the site, with its state."""
        return {name: {"state": self.state(name)} | site.to_dict() for name, site in self.items()}


def _told(site: Site) -> tuple[object, object, str]:
    if isinstance(site, Rejection):
        return f"[{site.code}]", site.source, site.sentence
    return site.formula, site.source, site.idle


class Offering(Observed):
    """The part of an `Explorer` that a person at a prompt meets first."""

    # No property: IPython completes the keys of an attribute that it can read without running code of ours.
    @functools.cached_property
    def sites(self) -> Sites:
        """Site id -> the candidate or the rejection; prints each with its state."""
        return Sites(lambda: self.findings, lambda: self.enabled)

    def __dir__(self) -> list[str]:
        own = {name for cls in type(self).__mro__ if cls.__module__.startswith(_HERE) for name in vars(cls)}
        return sorted({name for name in own - _NOT_OFFERED if not name.startswith("_")} | set(_OF_THE_WIDGET))

    def __repr__(self) -> str:
        return (
            f"Explorer of {self.graph.name!r}, {self.graph.node_count} nodes: {self.sites._sentence()}; {self.status}. "
            "In a notebook it shows itself as the last line of a cell; here: lab.save('x.html'), lab.measure(), lab.sites, "
            "lab.toggles['<pass or site>'] = False, lab.select('<site>'), lab.code()"
        )


@errors_for_users
class Selecting(Offering):
    """The part of an `Explorer` that selects and searches."""

    def refresh(self) -> None:
        """Hands to the browser what has changed."""
        raise NotImplementedError

    def select(self, what: object) -> Facts:
        """Selects a node ("%143", "n12", an id), a site, a kernel of XLA's, a source line ("model.py:41"), a lane ("backward") or nothing
        (""); returns its facts.

        Raises:
          ArgumentError: nothing of that name is in the graph shown.
        """
        info = self.session.select(what)
        self.refresh()
        return Facts(info)

    def search(self, text: str) -> Records[Facts]:
        """Looks for words in names, ops, shapes, scopes, source lines, sites and reasons; marks and returns the hits."""
        rows = self.session.search(text)["rows"]
        self.refresh()
        return Records(map(Facts, rows))

    def hit(self, index: int) -> None:
        """Selects a hit of the last search, from 0; ArgumentError where there are not so many."""
        self.session.walk.hit(index)
        self.refresh()

    def step(self, card: str = "", by: int = 1) -> str:
        """Shows another one of equal parts, `by` after the one that is shown; returns its name ("layer_18, 19 of 24").

        `card` is the id or the name of their card or of one inside it; "" is the selection, which moves to the other part.

        Raises:
          ArgumentError: no card has that name, or it is not one of several equal parts.
        """
        walk = self.session.walk
        shown = walk.step(walk.named(card), by)
        if shown is None:
            raise ArgumentError(f"step: {card or 'what is selected'} is not one of equal parts")
        self.refresh()
        return opened_name(shown)
