"""A picture as Graphviz DOT text, for other tools: lanes and opened cards are clusters, closed cards boxes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from fusionlab.errors import unknown_name
from fusionlab.fusers.engine.grouping import STATE_WORDS

from ..markup import printable
from ..palette import INK, LINE, PAPER, colour_of, tint_of
from .card import Card, Edge, Overview
from .layout.faces import chip_text, opens
from .layout.measure import bytes_text
from .layout.opened import opened_name

DIRECTIONS = ("TB", "LR", "BT", "RL")
_FONT = "Helvetica"


def dot(overview: Overview, opened: Collection[str] = (), direction: str = "TB") -> str:
    """DOT text of a program with these cards open.

    Args:
      overview: the program.
      opened: ids of cards.
      direction: "TB" (top to bottom), "LR", "BT" or "RL".

    Raises:
      UnknownNameError: `direction` is not one of the four.
    """
    if direction not in DIRECTIONS:
        raise unknown_name("direction", direction, DIRECTIONS)
    return _Dot(overview, opened, direction).text()


class _Dot:
    """One DOT text in the making."""

    def __init__(self, overview: Overview, opened: Collection[str], direction: str) -> None:
        import graphviz

        self.overview, self.opened = overview, opened
        self.graph = graphviz.Digraph(
            printable(overview.title),
            graph_attr={"rankdir": direction, "compound": "true", "fontname": _FONT, "fontsize": "11"},
            node_attr={"shape": "box", "fontname": _FONT, "fontsize": "10", "fontcolor": INK, "color": LINE},
            edge_attr={"fontname": _FONT, "fontsize": "9", "fontcolor": INK, "color": LINE},
        )

    def text(self) -> str:
        shown = self.overview
        for card in (*shown.inputs, *shown.results):
            self.graph.node(card.id, _label((card.name, card.type)), style="rounded")
        for phase in shown.phases:
            with self.graph.subgraph(name=f"cluster_{phase}") as lane:  # pyright: ignore[reportOptionalContextManager]
                lane.attr(label=phase, style="filled", color="#f5f7f9")
                for row in shown.rows:
                    if phase in row.cards:
                        self.card(lane, row.cards[phase])
        self.edges(shown.edges, {c.id: c for c in (*shown.inputs, *shown.results, *_tops(shown))})
        return self.graph.source

    def card(self, into: Any, card: Card) -> None:
        """A box, or of an opened card a cluster of its parts."""
        if card.id not in self.opened or not opens(card):
            into.node(card.id, _label(_lines(card)), **_look(card))
            return
        with into.subgraph(name=f"cluster_{card.id}") as frame:
            frame.attr(label=_label([_name(card, True)]), style="filled", color=LINE, fillcolor=PAPER)
            for child in card.children:
                self.card(frame, child)
        self.edges(card.edges, {c.id: c for c in card.children})

    def edges(self, edges: Iterable[Edge], cards: dict[str, Card]) -> None:
        for edge in edges:
            start, end = cards.get(edge.start), cards.get(edge.end)
            if start is None or end is None:
                continue
            clusters = {"ltail": self.cluster(start), "lhead": self.cluster(end)}
            words = " ".join(
                filter(None, (edge.type or bytes_text(edge.bytes), edge.kind if edge.kind != "flow" else ""))
            )
            self.graph.edge(
                self.inner(start, -1), self.inner(end, 0), _label([words]), **{k: v for k, v in clusters.items() if v}
            )

    def cluster(self, card: Card) -> str:
        return f"cluster_{card.id}" if card.id in self.opened and opens(card) else ""

    def inner(self, card: Card, index: int) -> str:
        """The box at which an edge of a card begins or ends: DOT knows no edges of clusters."""
        while self.cluster(card):
            card = card.children[index]
        return card.id


def _tops(overview: Overview) -> list[Card]:
    return [card for row in overview.rows for card in row.cards.values()]


def _name(card: Card, is_open: bool = False) -> str:
    named = replace(card, name=opened_name(card), count=1) if is_open else card
    return " ".join(filter(None, (card.prefix, named.name, chip_text(named))))


def _lines(card: Card) -> list[str]:
    sites = [f"{s.count:,} {s.pass_name} {STATE_WORDS[s.state]}" for s in card.strips] if card.site is None else []
    own = f"{card.site.pass_name}: {STATE_WORDS[card.site.state]}" if card.site is not None else ""
    return [_name(card), own, *sites, card.where, " ".join(filter(None, (card.type, bytes_text(card.cost.bytes))))]


def _look(card: Card) -> dict[str, str]:
    """State is the form, the pass its hue."""
    site = card.site
    if site is None:
        return {"style": "filled", "fillcolor": PAPER}
    style = {"applied": "filled", "declined": "dashed"}.get(site.state, "solid")
    fill = {"fillcolor": tint_of(site.pass_name)} if site.state == "applied" else {}
    return {"style": style, "color": colour_of(site.pass_name), "penwidth": "1.6"} | fill


def _label(lines: Iterable[str]) -> str:
    import graphviz

    return graphviz.nohtml("\\n".join(graphviz.escape(printable(line)) for line in lines if line))
