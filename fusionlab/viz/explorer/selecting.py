"""What an explorer offers at a Python prompt: how it prints, what the tab key completes; selecting and searching, as a click does."""

from __future__ import annotations

import functools

from fusionlab.errors import ArgumentError
from fusionlab.showing import Facts, Records
from fusionlab.tracebacks import errors_for_users

from ..cards.layout.opened import opened_name
from .observed import Observed
from .toggles import Sites

# What the browser draws, and what only this package calls.
_NOT_OFFERED = frozenset(
    "busy export head hits inspector marks outline panel problem refresh scene session tabs trail".split()
)
_OF_THE_WIDGET = ("close", "observe", "unobserve")
_HERE = __name__.rpartition(".")[0]


@errors_for_users
class Selecting(Observed):
    """The part of an `Explorer` that a person at a prompt meets, and that selects and searches."""

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

    def refresh(self) -> None:
        """Hands to the browser what has changed."""
        raise NotImplementedError

    def select(self, what: object) -> Facts:
        """Selects a node ("%143", "n12", an id), a site, a kernel of XLA's, a source line ("model.py:41"), a lane ("backward") or nothing
        (""); tells what it is.

        Raises:
          ArgumentError: nothing of that name is in the graph shown.
        """
        info = self.session.select(what)
        self.refresh()
        return Facts(info)

    def search(self, text: str) -> Records[Facts]:
        """Looks for words in names, ops, shapes, scopes, source lines, sites and reasons; marks and returns what it finds."""
        rows = self.session.search(text)["rows"]
        self.refresh()
        return Records(map(Facts, rows))

    def hit(self, index: int) -> None:
        """Selects a hit of the last search, from 0; ArgumentError where there are not so many."""
        self.session.walk.hit(index)
        self.refresh()

    def step(self, card: str = "", by: int = 1) -> str:
        """Shows another one of equal parts, `by` after the one that is shown; tells its name ("layer 18 of 24").

        `card` is the id or the name of their card or of one inside it; "" is what is selected, which is then selected in the other part.

        Raises:
          ArgumentError: no card is called that, or it is no one of equal parts.
        """
        walk = self.session.walk
        shown = walk.step(walk.named(card), by)
        if shown is None:
            raise ArgumentError(f"step: {card or 'what is selected'} is not one of equal parts")
        self.refresh()
        return opened_name(shown)
