"""The picture of an explorer between two changes: the open cards, the parts that must be visible, and the drawing, made once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from fusionlab.fusers.report.findings import Findings
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.xla.modules import CONTROL, CompiledModule

from ..cards.album import PANE, Album
from ..cards.card import AFTER, PHASES, Card, Overview
from ..cards.dot import dot
from ..cards.layout.opened import opened_name
from ..cards.plan import both_sides
from ..export import CAPTION
from ..markup import ID_PREFIX
from ..model.selection import Selection

SHOWN = ("before", "after", "both")
_MOST_REVEALED = 12  # nodes of one selection that are opened to
_LEAST_PANE = 240.0  # px
_NONE: Mapping[int, float] = {}

Drawn = tuple[Graph, Findings | None, frozenset[str]]


class Stage:
    """The drawing.

    `shown` is "before", "after", or "both" side by side; `hulls` asks for the kernels that XLA made, named in the boxes. `fused` gives
    the program with the sites fused that are on; None where it cannot be shown.
    """

    def __init__(self, graph: Graph, fused: Callable[[], Graph] | None = None) -> None:
        self._fused = fused
        self.shown = "before"
        self.hulls = False
        self._albums: dict[str, Album] = {"before": Album(graph)}
        self.pane = PANE
        self.times = _NONE  # seconds of the nodes of the program as written
        self.drift = _NONE  # errors of the fused program at the nodes of the program as written, as `Album` takes them
        self._clicked: Card | None = None
        self._svg: tuple[Any, str] = (None, "")

    # What is open --------------------------------------------------------------------------------------------------
    def fold(self, drawn: Drawn, item: str) -> None:
        """Opens a closed card, closes an open one; anything else does not open and stays."""
        self._album(drawn).toggle(drawn[2], card_id_of(item))

    def step(self, drawn: Drawn, item: str, by: int) -> None:
        """Shows the next or the last one of the equal parts that a card represents."""
        self._album(drawn).step(drawn[2], card_id_of(item), by)

    def reveal(self, drawn: Drawn, nodes: Collection[int]) -> None:
        """Opens the cards around these nodes."""
        self._album(drawn).reveal(drawn[2], tuple(nodes)[:_MOST_REVEALED])

    def reveal_card(self, drawn: Drawn, card_id: str) -> None:
        """Opens the cards around a card."""
        self._album(drawn).open_around(drawn[2], card_id_of(card_id))

    def overview(self, drawn: Drawn) -> Overview:
        """The lanes and rows that are drawn."""
        return self._album(drawn).overview(drawn[2])

    def fit(self, width: float, height: float) -> bool:
        """Draws for a pane of this size from now on; False where it is that already."""
        pane = max(_LEAST_PANE, float(width)), max(_LEAST_PANE, float(height))
        changed, self.pane = pane != self.pane, pane
        return changed

    # The drawing ---------------------------------------------------------------------------------------------------
    def scene(self, drawn: Drawn, compiled: CompiledModule | None = None) -> dict[str, Any]:
        """SVG text and what can be clicked in it."""
        album, enabled = self._album(drawn), drawn[2]
        noted = compiled if self.hulls else None
        key = (
            id(album),
            id(album.fused),
            id(album.times),
            id(album.drift),
            enabled,
            frozenset(album.opened),
            tuple(album.copies.items()),
            album.pane,
            id(noted),
        )
        if self._svg[0] != key:
            notes = kernel_notes(noted) if noted is not None else None
            self._svg = key, album.svg(enabled, ID_PREFIX, notes)
        items = {ID_PREFIX + name: item for name, item in album.items(enabled).items()}
        return {"svg": self._svg[1], "items": items}

    @property
    def times_shown(self) -> Mapping[int, float]:
        """Seconds of the nodes that are drawn."""
        return self.times if self.shown != "after" else _NONE

    @property
    def drift_shown(self) -> Mapping[int, float]:
        """Errors at the nodes that are drawn."""
        return self.drift if self.shown == "before" else _NONE

    def file(self, drawn: Drawn, compiled: CompiledModule | None = None) -> str:
        """The picture as the text of an SVG file."""
        notes = kernel_notes(compiled) if compiled is not None and self.hulls else None
        return self._album(drawn).svg(drawn[2], ID_PREFIX, notes, CAPTION)

    def still(self, drawn: Drawn) -> str:
        """The picture for where it cannot be clicked: no larger than the program needs."""
        return self._album(drawn).still(drawn[2], ID_PREFIX)

    def dot(self, drawn: Drawn) -> str:
        """The picture as Graphviz DOT text."""
        album = self._album(drawn)
        overview = album.overview(drawn[2])
        return dot(overview, both_sides(overview, album.opened))

    def _album(self, drawn: Drawn) -> Album:
        graph, findings, _ = drawn
        side = "after" if self.shown == "after" else "before"  # what is open before is open beside it
        album = self._albums.get(side)
        if album is None or album.graph is not graph or album.findings is not findings:
            old, album = album, Album(graph, findings)
            if old is not None:  # the same program with other findings, or fused otherwise: what was open stays open
                album.opened, album.copies = old.opened, old.copies
            self._albums[side] = album
        album.pane = self.pane
        album.times, album.drift = self.times_shown, self.drift_shown
        album.fused = self._fused() if self.shown == "both" and self._fused is not None else None
        return album

    # Names ---------------------------------------------------------------------------------------------------------
    def clicked(self, drawn: Drawn, item: str) -> str | None:
        """The target of a click on an id in the picture: a site's id, "n12", or a card's id; None for an unknown id."""
        card = self._card(drawn, item)
        if card is None:
            return None
        self._clicked = card
        if card.site is not None and card.site.id:
            return card.site.id
        if len(card.nodes) == 1:
            return f"n{card.nodes[0]}"
        return card.id

    def group(self, drawn: Drawn, name: object) -> dict[str, Collection[int]]:
        """The card with this id and its nodes, or the lane of this name, if there is one: it can be selected by that."""
        card, album = self._card(drawn, str(name)), self._album(drawn)
        if card is not None:
            return {card.id: card.nodes}
        return {str(name): album.lane(drawn[2], str(name))} if name in PHASES else {}

    def name(self, drawn: Drawn, card_id: str) -> str:
        """The name of a card, for equal parts that of the shown one; "" for other ids."""
        card = self._card(drawn, card_id)
        if card is None and card_id in PHASES:
            return card_id
        return "" if card is None else f"{card.prefix} {opened_name(card)}".strip()

    def ids(self, drawn: Drawn, chosen: Selection) -> list[str]:
        """Ids in the picture of what is selected: its own card if it has one, else the cards that hold its nodes."""
        last = self._clicked  # of a site and its backward pass, the one that was clicked
        own = last.id if last is not None and last.site is not None and last.site.id == chosen.name else chosen.name
        if self._card(drawn, own) is not None:
            return self._sides([self._album(drawn).seen(drawn[2], own)])
        return self.places(drawn, chosen.nodes)

    def places(self, drawn: Drawn, nodes: Iterable[int]) -> list[str]:
        """Ids in the picture of the cards that hold these nodes, each once."""
        album = self._album(drawn)
        found = (album.place(drawn[2], n) for n in nodes)
        return self._sides(dict.fromkeys(card for card in found if card is not None))

    def _sides(self, cards: Iterable[str]) -> list[str]:
        """Ids of these cards in the picture: in a before/after picture, those of both sides."""
        sides = ("", AFTER) if self.shown == "both" else ("",)
        return [ID_PREFIX + side + card for card in cards for side in sides]

    def _card(self, drawn: Drawn, item: str) -> Card | None:
        return self._album(drawn).card(drawn[2], card_id_of(item))


def card_id_of(item: str) -> str:
    """The card of an id in the picture: an id of the after side gives the same card."""
    return item.removeprefix(ID_PREFIX).removeprefix(AFTER)


def kernel_notes(compiled: CompiledModule) -> dict[int, str]:
    """Node id -> the name of the kernel of XLA's that it runs in, where that is known."""
    return {
        nid: kernel.name
        for kernel in compiled.kernels
        if kernel.kind != CONTROL and not kernel.inferred
        for nid in kernel.nodes
    }
