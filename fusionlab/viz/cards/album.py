"""The pictures of one program as a reader clicks through them: which cards are open, where a node is shown, what a card contains."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from fusionlab.fusers.report.findings import Findings
from fusionlab.graph.program.graph import Graph

from ..parts.tree import Maker
from .beside import beside
from .card import Card, Fused, Overview
from .layout.picture import Picture
from .plan import described, plan, shown
from .svg import svg

PANE = (932.0, 700.0)  # px: the pane of a notebook 1440 px wide, and what a picture without one is drawn for
_ONE_LANE = 460.0  # px: the width of a still picture of a program that is not differentiated
_AROUND, _ROW = 170.0, 115.0  # px: the height of a still picture, without rows and for each
Chains = Mapping[int, tuple[str, ...]]


class Album:
    """Pictures of a graph and its findings.

    The first picture reads the whole program; opening a card costs what is drawn.

    Attributes:
      opened: ids of the cards that are open.
      copies: id of a card of several equal parts -> which of them it shows, from 0.
      pane: width and height in px.
      times: node id -> seconds, if the kernels were timed; they replace bytes, except in a before/after picture.
      drift: node id -> the error of the fused program as a multiple of what rounding explains (`Drift.by_node`): a stripe on each card.
      fused: the program with the sites fused, drawn next to this one; None draws this one alone, lane by lane.
    """

    def __init__(self, graph: Graph, findings: Findings | None = None) -> None:
        self.graph, self.findings = graph, findings
        self.opened: set[str] = set()
        self.copies: dict[str, int] = {}
        self._pane = PANE
        self._times: Mapping[int, float] = {}
        self.drift: Mapping[int, float] = {}
        self.fused: Graph | None = None
        self._maker: Maker | None = None
        self._made: tuple[Any, Overview, Chains] | None = None
        self._weighed: tuple[Any, Fused] | None = None
        self._fitted: tuple[Any, Overview, dict[str, Card], dict[str, str]] | None = None

    @property
    def pane(self) -> tuple[float, float]:
        return self._pane

    @pane.setter
    def pane(self, size: tuple[float, float]) -> None:
        """Sets the pane; a width or height that is not a finite number becomes that of the usual pane."""
        width, height = (s if math.isfinite(s) else usual for s, usual in zip(size, PANE, strict=True))
        self._pane = width, height

    @property
    def times(self) -> Mapping[int, float]:
        return self._times

    @times.setter
    def times(self, seconds: Mapping[int, float]) -> None:
        if seconds is not self._times:
            self._times, self._maker, self._made = seconds, None, None

    # What is drawn -----------------------------------------------------------------------------------------------------
    def overview(self, enabled: Collection[str] | None) -> Overview:
        """The lanes and rows with these sites applied, as they fit into the pane."""
        return self._fit(enabled)[0]

    def svg(
        self,
        enabled: Collection[str] | None,
        id_prefix: str = "fl-",
        notes: Mapping[int, str] | None = None,
        caption: str = "",
    ) -> str:
        """The picture with the open cards.

        Args:
          enabled: ids of the applied sites; None means all that are not idle.
          id_prefix: before the ids of the cards.
          notes: node id -> the text that replaces the source line in boxes whose nodes all have it.
          caption: one line below, for a file of its own.
        """
        return svg(self.picture(enabled, notes), id_prefix, caption, self._drift(enabled))

    def picture(self, enabled: Collection[str] | None, notes: Mapping[int, str] | None = None) -> Picture:
        """The layout: the position of everything in the picture."""
        drawn = self.overview(enabled)
        return plan(drawn if notes is None else _noted(drawn, notes), *self.pane, self.opened)

    def still(self, enabled: Collection[str] | None, id_prefix: str = "fl-", caption: str = "") -> str:
        """The picture for a page that cannot be clicked: no larger than the program needs, with `caption` below it."""
        drawn = self.overview(enabled)
        lanes, rows = len(drawn.phases), len(drawn.rows)
        width = _ONE_LANE if lanes == 1 else PANE[0]
        return svg(
            plan(drawn, width, min(PANE[1], _AROUND + _ROW * rows), self.opened),
            id_prefix,
            caption,
            self._drift(enabled),
        )

    def _drift(self, enabled: Collection[str] | None) -> dict[str, float]:
        """Card id -> the largest error of its nodes, those of all copies."""
        found: dict[str, float] = {}
        for nid, card in ((n, c) for n, chain in self._make(enabled)[1].items() if n in self.drift for c in chain):
            found[card] = max(found.get(card, 0.0), self.drift[nid])
        return found

    def items(self, enabled: Collection[str] | None) -> dict[str, dict[str, Any]]:
        """Card id -> spoken label, kind and whether it opens, of all that can be selected now."""
        found = described(self.overview(enabled), self.opened)
        return {k: v for k, v in found.items() if v["kind"] not in ("input", "output")}

    def card(self, enabled: Collection[str] | None, card_id: str) -> Card | None:
        """The card with this id."""
        return self._fit(enabled)[1].get(card_id)

    def lane(self, enabled: Collection[str] | None, phase: str) -> tuple[int, ...]:
        """Ids of the nodes in a lane, those of all copies."""
        made, chains = self._make(enabled)
        tops = {row.cards[phase].id for row in made.rows if phase in row.cards}
        return tuple(nid for nid, chain in chains.items() if chain and chain[0] in tops)

    def _fit(self, enabled: Collection[str] | None) -> tuple[Overview, dict[str, Card], dict[str, str]]:
        made, _ = self._make(enabled)
        key = made, self.pane, self.fused
        if self._fitted is None or any(a is not b and a != b for a, b in zip(self._fitted[0], key, strict=True)):
            fitted = self._beside(made, enabled) if self.fused is not None else shown(made, self.pane[1])
            parents = {child.id: card.id for card in fitted.cards() for child in card.children}
            self._fitted = key, fitted, {card.id: card for card in fitted.cards()}, parents
        return self._fitted[1], self._fitted[2], self._fitted[3]

    def _beside(self, made: Overview, enabled: Collection[str] | None) -> Overview:
        """The program in one lane, and in a second one as it is with the sites fused."""
        assert self._maker is not None
        assert self.fused is not None
        key = made, self.fused
        if self._weighed is None or any(a is not b for a, b in zip(self._weighed[0], key, strict=True)):
            self._weighed = key, self._maker.fused(enabled, self.fused, self.copies)
        return beside(made.counted(), self._weighed[1], *self.pane)

    def _make(self, enabled: Collection[str] | None) -> tuple[Overview, Chains]:
        key = (None if enabled is None else frozenset(enabled), tuple(sorted(self.copies.items())))
        if self._made is None or self._made[0] != key:
            if self._maker is None:
                self._maker = Maker(self.graph, self.findings, times=self._times)
            self._made = key, *self._maker.overview(enabled, self.copies)
        return self._made[1], self._made[2]

    # Opening -----------------------------------------------------------------------------------------------------------
    def toggle(self, enabled: Collection[str] | None, card_id: str) -> None:
        """Opens a closed card, closes an open one, with nothing else opened or closed; what does not open stays."""
        card = self.card(enabled, card_id)
        if card is None or not card.children:
            return
        self.opened ^= {card_id}

    def open_all(self, enabled: Collection[str] | None) -> None:
        """Opens every card."""
        self.opened = {name for name, card in self._fit(enabled)[1].items() if card.children}

    def step(self, enabled: Collection[str] | None, card_id: str, by: int) -> None:
        """Shows the next or the last one of several equal parts."""
        card = self.card(enabled, card_id)
        if card is not None and card.count > 1:
            self.copies[card_id] = (card.copy + by) % card.count

    def reveal(self, enabled: Collection[str] | None, nodes: Iterable[int]) -> None:
        """Opens the cards around these nodes, and shows the copies that they are in."""
        nodes = [*nodes]
        for nid in nodes:
            self._show_copy(enabled, nid)
        for nid in nodes:
            self.open_around(enabled, self._innermost(enabled, nid) or "")

    def open_around(self, enabled: Collection[str] | None, card_id: str) -> None:
        """Opens the cards around a card."""
        self.opened.update(self.around(enabled, card_id))

    def around(self, enabled: Collection[str] | None, card_id: str) -> tuple[str, ...]:
        """Ids of the cards around a card, innermost first."""
        _, _, parents = self._fit(enabled)
        found = []
        while (card_id := parents.get(card_id, "")) != "":
            found.append(card_id)
        return tuple(found)

    def _show_copy(self, enabled: Collection[str] | None, nid: int) -> None:
        for _ in range(8):  # a copy within a copy, at most so deep
            chain = self._make(enabled)[1].get(nid, ())
            card, sign, number = chain[-1].rpartition("~") if chain else ("", "", "")
            if not sign or card not in chain or not number.isdigit():
                return
            self.copies[card] = int(number)

    # Where things are ----------------------------------------------------------------------------------------------------
    def place(self, enabled: Collection[str] | None, nid: int) -> str | None:
        """The card in which a node is seen now: the innermost one around it that is drawn."""
        card = self._innermost(enabled, nid)
        return None if card is None else self.seen(enabled, card)

    def homes(self, enabled: Collection[str] | None) -> dict[int, str]:
        """Node id -> the innermost card that it is in, open or not; of a copy that is not shown, the one in which its twin is."""
        _, cards, _ = self._fit(enabled)
        found: dict[int, str] = {}
        hidden: dict[str, list[int]] = {}
        for nid, chain in sorted(self._make(enabled)[1].items()):
            if chain and "~" in chain[-1]:
                hidden.setdefault(chain[-1], []).append(nid)
            elif (card := self._innermost(enabled, nid)) is not None:
                found[nid] = card
        for copy, nodes in hidden.items():
            stack = copy.rpartition("~")[0]
            twins = cards[stack].nodes if stack in cards else ()
            same = len(twins) == len(nodes)
            found |= {
                nid: found.get(twins[k], stack) if same else stack for k, nid in enumerate(nodes) if stack in cards
            }
        return found

    def seen(self, enabled: Collection[str] | None, card_id: str) -> str:
        """A card that is drawn: this one, or the closed one that it is in."""
        _, _, parents = self._fit(enabled)
        card = seen = card_id
        while card in parents:
            card = parents[card]
            if card not in self.opened:
                seen = card
        return seen

    def _innermost(self, enabled: Collection[str] | None, nid: int) -> str | None:
        _, cards, _ = self._fit(enabled)
        chain = self._make(enabled)[1].get(nid, ())
        return next((c for c in reversed(chain) if c in cards), None)


def _noted(overview: Overview, notes: Mapping[int, str]) -> Overview:
    rows = tuple(
        replace(row, cards={phase: _with_note(card, notes) for phase, card in row.cards.items()})
        for row in overview.rows
    )
    return replace(overview, rows=rows)


def _with_note(card: Card, notes: Mapping[int, str]) -> Card:
    if card.children:
        return replace(card, children=tuple(_with_note(c, notes) for c in card.children))
    said = [notes[nid] for nid in card.nodes if nid in notes]
    different = [*dict.fromkeys(said)]
    return replace(
        card, where=different[0] if len(different) == 1 else f"{len(different)} kernels" if different else ""
    )
