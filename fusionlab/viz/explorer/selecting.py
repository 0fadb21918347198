"""What can be selected in an explorer by a line of Python, and found: each call is what a click does."""

from __future__ import annotations

from fusionlab.errors import ArgumentError
from fusionlab.showing import Facts, Records
from fusionlab.tracebacks import errors_for_users

from ..cards.layout.opened import opened_name
from .offering import Offering


@errors_for_users
class Selecting(Offering):
    """The part of an `Explorer` that selects and searches."""

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
