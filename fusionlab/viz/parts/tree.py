"""From a graph and what was found in it to cards: `overview` makes all that a picture of the program can show."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from fusionlab.fusers.report.findings import Findings
from fusionlab.graph.cost.cost import Costs, cost_of
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.ir import all_nodes

from ..cards.card import PHASES, Amount, Card, Fused, Overview, Row
from ..model.sites import is_applied
from .drawing import Chain, Drawing, Known, Names, Title
from .flows import Flows
from .fused import fused_amounts, said_after, said_before
from .instances import as_forward, told_apart
from .items import Item, items_of
from .names import program_name
from .naming import Naming
from .phases import BACKWARD, FORWARD, UPDATE, Stretch, mesh_of, turns_of
from .places import Places, rows_of
from .sites import Found, declined_backward, sites_of
from .strips import Mark, Marks, stated

_PREFIX = {FORWARD: "", BACKWARD: "backward of", UPDATE: "update of"}


def overview(
    graph: Graph,
    findings: Findings | None = None,
    enabled: Collection[str] | None = (),
    *,
    copies: Mapping[str, int] | None = None,
    costs: Costs | None = None,
) -> Overview:
    """The program as lanes and rows of cards.

    Args:
      graph: the program.
      findings: candidates and rejections over this graph, or None.
      enabled: ids of the candidates that are applied; None means all of them that are not idle.
      copies: id of a card of several identical parts -> which of them is shown when it is opened, from 0.
      costs: of the graph; None counts them.
    """
    return Maker(graph, findings, costs).overview(enabled, copies)[0]


@dataclass(frozen=True)
class _Copies:
    """The overview while certain copies are shown, with no site applied; where each node is, and which sites each card has."""

    shown: Mapping[str, int]
    overview: Overview
    chains: dict[int, Chain]
    marks: Mapping[str, Sequence[Mark]]


class Maker:
    """Makes overviews of one graph.

    The layout is worked out once; showing another copy makes the card of its row anew, and a toggle changes only states.
    """

    def __init__(
        self,
        graph: Graph,
        findings: Findings | None = None,
        costs: Costs | None = None,
        times: Mapping[int, float] | None = None,
    ) -> None:
        self.graph, self.findings = graph, findings
        self.times = times or {}  # node id -> seconds, where its kernels were timed
        self.costs = costs or (findings.cost() if findings is not None else cost_of(graph))
        self._drawn: dict[Title, Drawing] = {}
        self._last: _Copies | None = None

    def overview(
        self, enabled: Collection[str] | None, copies: Mapping[str, int] | None = None
    ) -> tuple[Overview, dict[int, Chain]]:
        """The overview with these sites applied and these copies shown, and node id -> the cards around it, outermost first.

        A node of a copy that is not shown ends in a name of its own, "CARD~5" for the sixth copy of CARD.
        """
        shown = dict(copies or {})
        if self._last is None or self._last.shown != shown:
            self._last = self._with_copies(shown)
        return stated(self._last.overview, self._last.marks, self._applied(enabled)), self._last.chains

    def fused(self, enabled: Collection[str] | None, graph: Graph, copies: Mapping[str, int] | None = None) -> Fused:
        """The same cards with what they cost in `graph`, the program with these sites fused."""
        known = self.known
        amounts, total = fused_amounts(known.cost, known.sites, self._applied(enabled), self.costs, graph)
        after = Maker(self.graph, self.findings, self.costs)
        after.known = replace(known, cost=amounts, marks=Marks(known.sites, self.graph.nodes(), amounts))
        after._lanes, after._places = self._lanes, self._places
        overview = after.overview(enabled, copies)[0].counted()
        why = said_after(self.findings, enabled) if self.findings is not None else {}
        written = {c.id: said_before(self.graph, c.nodes) for c in overview.cards() if c.site is not None}
        return Fused({c.id: c for c in overview.cards()}, total, written, why)

    def _applied(self, enabled: Collection[str] | None) -> frozenset[str]:
        candidates = self.findings.candidates if self.findings is not None else ()
        return frozenset(c.id for c in candidates if is_applied(c, enabled))

    # What is known of the program ------------------------------------------------------------------------------------
    @functools.cached_property
    def known(self) -> Known:
        """All that neither copies nor toggles change."""
        times = self.times
        cost = {i: Amount(c.operations, c.bytes_moved, times.get(i, 0.0)) for i, c in self.costs.nodes.items()}
        weights = {
            n.id: sum(cost[i.id].bytes for i in all_nodes([n])) if n.blocks else cost[n.id].bytes
            for n in self.graph.nodes()
        }
        stretch, flows = Stretch(self.graph, weights), Flows(self.graph)
        sites = self._sites(frozenset(i for i, phase in stretch.phases.items() if phase == BACKWARD))
        marks = Marks(sites, self.graph.nodes(), cost)
        return Known(stretch, flows, Naming(self.graph, flows, stretch.phases), cost, weights, sites, marks)

    def _sites(self, backward: Collection[int]) -> list[Found]:
        if self.findings is None:
            return []
        found = sites_of(self.graph, [*self.findings.candidates, *self.findings.rejections], backward)
        return [*found, *declined_backward(self.graph, found, backward)]

    @functools.cached_property
    def _lanes(self) -> dict[str, list[Item]]:
        lanes = {phase: self._items(phase) for phase in PHASES}
        families = told_apart(lanes[FORWARD], self.known.naming.reads)
        if families and lanes[BACKWARD]:
            told_apart(lanes[BACKWARD], self.known.naming.reads, families)
            as_forward(lanes[BACKWARD], lanes[FORWARD])
        return lanes

    def _items(self, phase: str) -> list[Item]:
        stretch = self.known.stretch
        nodes = [n for n in stretch.nodes if stretch.phases[n.id] == phase]
        items = items_of(nodes, self.known.sites, self.known.weights)
        # The backward pass is read from where it ends, so that it stands as the forward pass does.
        return items[::-1] if phase == BACKWARD else items

    @functools.cached_property
    def _totals(self) -> dict[str, Amount]:
        """Phase -> cost of its lane, for those that the program has."""
        return {p: self.known.amount(self._lanes[p]) for p in PHASES if self._lanes[p]} or {FORWARD: Amount()}

    @functools.cached_property
    def _places(self) -> list[tuple[Places, dict[str, Title]]]:
        """Rows, with the titles of their cards."""
        names = Names()
        places = rows_of(self._lanes, self.known.flows, self.known.weights)
        return [
            (place, {p: self._title(place, p, names) for p in self._totals if place.groups.get(p)}) for place in places
        ]

    def _title(self, place: Places, phase: str, names: Names) -> Title:
        forward = place.groups.get(FORWARD)
        name = place.name or self.known.naming.group((forward or place.groups[phase])[0])
        return Title(names.fresh(f"{phase}/{name}"), name, _PREFIX[phase] if forward else "")

    # Cards -----------------------------------------------------------------------------------------------------------
    def _with_copies(self, copies: Mapping[str, int]) -> _Copies:
        rows, chains, marks = [], dict[int, Chain](), dict[str, Sequence[Mark]]()
        for place, titles in self._places:
            cards: dict[str, Card] = {}
            for phase, title in titles.items():
                drawing = self._drawing(title, place, phase, copies)
                cards[phase] = drawing.card
                chains |= drawing.chains
                marks |= drawing.marks
            rows.append(Row(next((c.name for c in cards.values()), place.name), cards))
        self._place_regions(chains)
        return _Copies(copies, self._joined(rows, chains), chains, marks)

    def _drawing(self, title: Title, place: Places, phase: str, copies: Mapping[str, int]) -> Drawing:
        drawing = self._drawn.get(title)
        if drawing is None or not drawing.is_of(copies):
            drawing = self._drawn[title] = Drawing(self.known, title, place.groups[phase], copies)
        return drawing

    def _joined(self, rows: Sequence[Row], chains: Mapping[int, Chain]) -> Overview:
        """Rows, and what flows between them."""
        drawn, edges, inputs, results = self.known.flows.between(rows, chains)
        kept, gradients = (sum(e.bytes for e in edges if e.kind == kind) for kind in ("kept", "gradients"))
        turns, mesh = turns_of(self.known.stretch.loops), mesh_of(self.graph)
        title, phases = program_name(self.graph), tuple(self._totals)
        return Overview(title, phases, drawn, inputs, results, edges, self._totals, kept, gradients, turns, mesh)

    def _place_regions(self, chains: dict[int, Chain]) -> None:
        """A region that is seen through is where all that is in it is."""
        for node in self.graph.nodes():
            if node.id not in chains:
                inside = [chains.get(n.id, ()) for n in all_nodes([node]) if n is not node and not n.blocks]
                chains[node.id] = _shared(inside)


def _shared(chains: Sequence[Chain]) -> Chain:
    """Their common prefix."""
    columns = zip(*chains, strict=False)
    return tuple(column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns))
