"""What an explorer offers at a Python prompt: how it prints, what `lab.<tab>` and `lab.sites["<tab>"]` complete."""

from __future__ import annotations

import functools
from collections.abc import Callable, ItemsView, Iterator, Mapping

from fusionlab.errors import unknown_name
from fusionlab.fusers import Candidate, Findings, Rejection
from fusionlab.showing import Shown, Table

from .observed import Observed

Site = Candidate | Rejection
# What the browser draws, and what only this package calls.
_NOT_OFFERED = frozenset(
    "busy export head hits inspector marks outline panel problem refresh scene session tabs trail".split()
)
_OF_THE_WIDGET = ("close", "observe", "unobserve")
_HERE = __name__.rpartition(".")[0]


class Sites(Mapping[str, Site], Shown):
    """Site id -> what was found there: a candidate, or a rejection that says why it is none; prints each with its state."""

    def __init__(self, findings: Callable[[], Findings], enabled: Callable[[], frozenset[str]]) -> None:
        self._findings, self._enabled = findings, enabled

    @property
    def _found(self) -> dict[str, Site]:
        found = self._findings()
        return {site.id: site for site in (*found.candidates, *found.rejections)}

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
        on = self._enabled()
        states = [
            "declined" if isinstance(s, Rejection) else "fused" if n in on else "can be fused" for n, s in self.items()
        ]
        return ", ".join(f"{states.count(state)} {state}" for state in ("fused", "can be fused", "declined"))

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
