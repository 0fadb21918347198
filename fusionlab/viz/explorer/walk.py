"""Navigation in an explorer: by the outline, the path above the graph, equal parts, and the hits of a search."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from fusionlab.errors import ArgumentError, did_you_mean

from ..cards.card import Card, Overview
from ..cards.layout.opened import opened_name
from ..html.outline import outline, trail, way_to
from ..model.search import Hit
from .stage import Drawn, Stage, card_id_of

PAGE = 60  # hits that the list shows at first, and by which it grows


class Walked(Protocol):
    """The object of the navigation: a `Session`."""

    stage: Stage

    @property
    def lock(self) -> AbstractContextManager[Any]: ...
    def drawn(self) -> Drawn: ...
    def chosen_ids(self) -> list[str]: ...
    def select(self, what: object, reveal: bool = True) -> dict[str, Any]: ...
    def follow(self) -> None: ...
    def found(self, most: int, start: int = 0) -> tuple[Hit, ...]: ...
    def hits(self) -> dict[str, Any]: ...


class Walk:
    """Ways through what a session shows. Cards go by their ids, with or without the picture's prefix.

    Attributes:
      listed: how many hits of the search the list shows.
    """

    def __init__(self, session: Walked) -> None:
        self.session = session
        self.listed = PAGE
        self._asked: set[str] = set()
        self._told: tuple[Overview | None, int, dict[str, Any]] = (None, 0, {})

    # As plain data -------------------------------------------------------------------------------------------------
    def outline(self) -> dict[str, Any]:
        """The cards of the picture as a tree (see `html.outline`)."""
        overview = self._overview()
        if self._told[0] is not overview or self._told[1] != len(self._asked):
            self._told = overview, len(self._asked), outline(overview, self._asked)
        return self._told[2]

    def trail(self) -> list[dict[str, Any]]:
        """The cards around what is selected."""
        return trail(self._overview(), [*dict.fromkeys(map(card_id_of, self.session.chosen_ids()))])

    # Going ---------------------------------------------------------------------------------------------------------
    def visit(self, item: str) -> None:
        """Selects a line of the outline and opens what lies around its card: a card, a lane, or the program ("")."""
        session, card_id = self.session, card_id_of(item)
        with session.lock:
            name = session.stage.clicked(session.drawn(), card_id)
            if name is not None:
                session.stage.reveal_card(session.drawn(), card_id)
            session.select(card_id if name is None else name, reveal=False)

    def expand(self, item: str) -> None:
        """Has the outline tell what is inside a card."""
        with self.session.lock:
            self._asked.add(card_id_of(item))

    def step(self, item: str, by: int) -> Card | None:
        """Shows another one of the equal parts of a card, or of the card around it; None if there are no equal parts.

        What is selected inside it is selected in the other part.
        """
        session = self.session
        with session.lock:
            stack = next((c for c in reversed(way_to(self._overview(), card_id_of(item))) if c.count > 1), None)
            if stack is None:
                return None
            inside = self._selected_in(stack)
            session.stage.step(session.drawn(), stack.id, by)
            session.follow()
            shown = way_to(self._overview(), stack.id)[-1]
            if inside:
                other = _at(shown, inside)
                if other is not None:
                    self.visit(other.id)
            return shown

    def named(self, what: str) -> str:
        """The id of a card by its id or name ("layer_0 … 23", "backward of head"); of what is selected for "".

        Raises:
          ArgumentError: no card is called that.
        """
        if not what:
            shown = self.session.chosen_ids()
            if shown:
                return card_id_of(shown[0])
            raise ArgumentError("card: nothing is selected; name one, or select it first")
        cards = [*self._overview().cards()]
        found = next((c for c in cards if c.id == card_id_of(what)), None) or next(
            (c for c in cards if what in _names(c)), None
        )
        if found is None:
            known = ", ".join(repr(c.name) for c in cards[:5])
            near = did_you_mean(what, (c.name for c in cards))
            raise ArgumentError(
                f"card: got {what!r:.120}, needed the name of a card in the picture ({known}, ...).{near}"
            )
        return found.id

    # Hits ----------------------------------------------------------------------------------------------------------
    def hit(self, index: int) -> None:
        """Selects a hit of the search, from 0.

        Raises:
          ArgumentError: there are not so many.
        """
        session = self.session
        found = session.found(1, index) if index >= 0 else ()
        if not found:
            raise ArgumentError(f"hit: got {index}, needed one of the {session.hits()['total']:,} hits, from 0")
        session.select(found[0].name)

    def more(self) -> None:
        """Has the list show more hits."""
        self.listed += PAGE

    # Small things --------------------------------------------------------------------------------------------------
    def _overview(self) -> Overview:
        return self.session.stage.overview(self.session.drawn())

    def _selected_in(self, stack: Card) -> list[int]:
        """Which child of which child of a stack is selected; [] if no part of it is."""
        shown = self.session.chosen_ids()
        way = way_to(self._overview(), card_id_of(shown[0])) if shown else ()
        ids = [c.id for c in way]
        if stack.id not in ids:
            return []
        below = way[ids.index(stack.id) :]
        return [card.children.index(child) for card, child in itertools.pairwise(below)]


def _at(card: Card, places: list[int]) -> Card | None:
    """The child of the child of a card that is at these places."""
    for place in places:
        if place >= len(card.children):
            return None
        card = card.children[place]
    return card


def _names(card: Card) -> Iterator[str]:
    for name in (card.name, opened_name(card)):
        yield name
        yield f"{card.prefix} {name}".strip()
