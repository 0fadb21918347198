"""From a graph and what was found in it to cards: `overview` makes all that a picture of the program can show."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fusionlab.fusers.report.findings import Findings
from fusionlab.graph.cost.cost import Costs, cost_of
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.ir import Block, Node, all_nodes, type_text

from ..cards.card import PHASES, Amount, Card, Fused, Overview, Row
from ..draw.dot import dom_id
from ..model.sites import is_applied
from .flows import Flows
from .fused import fused_amounts, said_after, said_before
from .groups import Group, grouped, products_in
from .instances import as_forward, told_apart
from .items import Item, items_of
from .names import lines_text, run_name, sent
from .naming import Naming
from .phases import BACKWARD, FORWARD, UPDATE, Stretch, mesh_of, turns_of
from .places import Places, rows_of
from .runs import boxed, runs_of
from .sites import Found, declined_backward, sites_of
from .strips import site_of, strips_of

Chain = tuple[str, ...]  # ids of the cards around something, outermost first
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


class Maker:
    """Makes overviews of one graph; what no toggle changes is worked out once."""

    def __init__(self, graph: Graph, findings: Findings | None = None, costs: Costs | None = None) -> None:
        self.graph, self.findings = graph, findings
        self.costs = costs or (findings.cost() if findings is not None else cost_of(graph))
        self.stretch = Stretch(graph, self.weights)
        self.phases = self.stretch.phases
        self.flows = Flows(graph)
        self.naming = Naming(graph, self.flows, self.phases)

    @functools.cached_property
    def cost(self) -> dict[int, Amount]:
        """Node id -> its own cost; a region itself has none."""
        return {i: Amount(c.operations, c.bytes_moved) for i, c in self.costs.nodes.items()}

    @functools.cached_property
    def weights(self) -> dict[int, int]:
        """Node id -> bytes moved by it and all that is inside it."""
        return {n.id: sum(self.cost[i.id].bytes for i in all_nodes([n])) for n in self.graph.nodes()}

    def overview(
        self, enabled: Collection[str] | None, copies: Mapping[str, int] | None = None
    ) -> tuple[Overview, dict[int, Chain]]:
        """The overview with these sites applied and these copies shown, and node id -> the cards around it, outermost first.

        A node of a copy that is not shown ends in a name of its own, "CARD~5" for the sixth copy of CARD.
        """
        drawing = _Drawing(self, self._found(enabled), copies or {}, self.cost)
        return drawing.overview(), drawing.chains

    def fused(self, enabled: Collection[str] | None, graph: Graph, copies: Mapping[str, int] | None = None) -> Fused:
        """The same cards with what they cost in `graph`, the program with these sites fused."""
        found = self._found(enabled)
        amounts, total = fused_amounts(self.cost, found, self.costs, graph)
        overview = _Drawing(self, found, copies or {}, amounts).overview()
        why = said_after(self.findings, enabled) if self.findings is not None else {}
        written = {c.id: said_before(self.graph, c.nodes) for c in overview.cards() if c.site is not None}
        return Fused({c.id: c for c in overview.cards()}, total, written, why)

    def _found(self, enabled: Collection[str] | None) -> list[Found]:
        return [*self._recorded(enabled), *self._declined]

    def _recorded(self, enabled: Collection[str] | None) -> list[Found]:
        if self.findings is None:
            return []
        states = [(c, "applied" if is_applied(c, enabled) else "candidate") for c in self.findings.candidates]
        declined = [(r, "declined") for r in self.findings.rejections]
        return sites_of(self.graph, [*states, *declined], self._backward)

    @functools.cached_property
    def _declined(self) -> list[Found]:
        """The backward passes of declined sites; no toggle changes them."""
        return [*declined_backward(self.graph, self._recorded(()), self._backward)]

    @functools.cached_property
    def _backward(self) -> frozenset[int]:
        return frozenset(i for i, phase in self.phases.items() if phase == BACKWARD)


class _Drawing:
    """One overview in the making."""

    def __init__(self, maker: Maker, sites: list[Found], copies: Mapping[str, int], cost: Mapping[int, Amount]) -> None:
        self.maker, self.sites, self.copies, self.cost = maker, sites, copies, cost
        self.naming = maker.naming
        self.used: dict[str, int] = {}
        self.chains: dict[int, Chain] = {}  # node id -> ids of the cards around it, outermost first

    def overview(self) -> Overview:
        graph, flows = self.maker.graph, self.maker.flows
        lanes = {phase: self._items(phase) for phase in PHASES}
        self._tell_apart(lanes)
        places = rows_of(lanes, flows, self.maker.weights)
        phases = tuple(p for p in PHASES if lanes[p]) or (FORWARD,)
        rows = tuple(self._row(place, phases) for place in places)
        self._place_regions()
        rows, edges, inputs, results = flows.between(rows, self.chains)
        totals = {p: self._amount(lanes[p]) for p in phases}
        kept, gradients = (sum(e.bytes for e in edges if e.kind == kind) for kind in ("kept", "gradients"))
        turns = turns_of(self.maker.stretch.loops)
        return Overview(
            graph.name, phases, rows, inputs, results, edges, totals, kept, gradients, turns, mesh_of(graph)
        )

    def _items(self, phase: str) -> list[Item]:
        phases = self.maker.phases
        nodes = [n for n in self.maker.stretch.nodes if phases[n.id] == phase]
        items = items_of(nodes, self.sites, self.maker.weights)
        # The backward pass is read from where it ends, so that it stands as the forward pass does.
        return items[::-1] if phase == BACKWARD else items

    def _tell_apart(self, lanes: Mapping[str, Sequence[Item]]) -> None:
        families = told_apart(lanes[FORWARD], self.naming.reads)
        if families and lanes[BACKWARD]:
            told_apart(lanes[BACKWARD], self.naming.reads, families)
            as_forward(lanes[BACKWARD], lanes[FORWARD])

    # Cards -----------------------------------------------------------------------------------------------------------
    def _row(self, place: Places, phases: Sequence[str]) -> Row:
        cards = {p: self._top(place, p) for p in phases if place.groups.get(p)}
        return Row(next((c.name for c in cards.values()), place.name), cards)

    def _top(self, place: Places, phase: str) -> Card:
        groups = place.groups[phase]
        name = place.name or self.naming.group(place.groups.get(FORWARD, groups)[0])
        card_id = self._fresh(f"{phase}/{name}")
        prefix = _PREFIX[phase] if place.groups.get(FORWARD) else ""
        return self._stack(card_id, name, prefix, groups, ())

    def _stack(self, card_id: str, name: str, prefix: str, groups: Sequence[Group], around: Chain) -> Card:
        """Equal groups as one card: the costs of all, the inside of one."""
        copy = min(self.copies.get(card_id, 0), len(groups) - 1)
        for k, group in enumerate(groups):
            if k != copy:
                self._place(group.items, (*around, card_id, f"{card_id}~{k}"))
        shown = self._part(card_id, name, prefix, groups[copy], around)
        if len(groups) == 1:
            return shown
        items = [i for g in groups for i in g.items]
        return replace(
            shown,
            count=len(groups),
            copy=copy,
            cost=self._amount(items),
            params=self.maker.flows.parameters(nid for i in items for nid in i.ids),
            strips=strips_of(items, self.sites, self.cost),
        )

    def _part(self, card_id: str, name: str, prefix: str, group: Group, around: Chain) -> Card:
        here = (*around, card_id)
        single = _single(group)
        if single is not None:
            card = self._item(single, around, name if single.site is None or group.key[0] == "scope" else "", card_id)
            card = replace(card, prefix=prefix)
        else:
            children = self._cards(_without_echo(group), here, name) if _opens(group) else ()
            kind = "part" if children else "nodes"
            card = self._card(card_id, name, group.items, kind=kind, prefix=prefix, children=children)
        self._place(group.items, here)  # of a loop, also the trifles that it alone reads
        return card

    def _cards(self, parts: Iterable[Group | Item], around: Chain, parent: str = "") -> tuple[Card, ...]:
        """Parts and items that stand beside each other, equal neighbours as one card."""
        boxes = boxed(parts)
        return tuple(self._run(run, boxes, around, parent) for run in runs_of(boxes))

    def _run(self, run: Sequence[Group | Item], beside: Sequence[Group | Item], around: Chain, parent: str) -> Card:
        names = [
            self.naming.group(part) if isinstance(part, Group) else self.naming.item(part, beside, parent)
            for part in (run[0], run[-1])
        ]
        if isinstance(run[0], Item) and len(run) == 1:
            return self._item(run[0], around, names[0])
        name = run_name(*names)
        groups = [part if isinstance(part, Group) else Group(("item",), "", [part], [part]) for part in run]
        return self._stack(self._fresh(f"{around[-1]}/{name}"), name, "", groups, around)

    def _item(self, item: Item, around: Chain, name: str = "", card_id: str = "") -> Card:
        name = name or self.naming.item(item)
        card_id = card_id or self._fresh(f"{around[-1] if around else ''}/{item.site.record.id if item.site else name}")
        here = (*around, card_id)
        children, turns = (), 0
        if item.is_region and item.site is None:
            children, turns = self._inside(item.main, here), turns_of([item.main])
        site = site_of(item)
        kind = "site" if site is not None else "region" if children else "nodes"
        self._place([item], here)
        return self._card(card_id, name, [item], kind=kind, children=children, turns=turns, site=site)

    def _inside(self, region: Node, around: Chain) -> tuple[Card, ...]:
        """What is in a loop or a choice; of a choice, each branch as a part."""
        bodies = [b for b in region.blocks if b.label not in ("cond", "cond_jaxpr") and b.nodes]
        if len(bodies) == 1:
            return self._of_block(bodies[0], around)
        cards = []
        for body in bodies:
            card_id = self._fresh(f"{around[-1]}/{body.label}")
            children = self._of_block(body, (*around, card_id))
            items = items_of(list(self.maker.stretch.flat(body)), self.sites, self.maker.weights)
            cards.append(self._card(card_id, body.label, items, children=children))
        return tuple(cards)

    def _of_block(self, block: Block, around: Chain) -> tuple[Card, ...]:
        nodes = list(self.maker.stretch.flat(block))
        items = items_of(nodes, self.sites, self.maker.weights)
        if nodes and self.maker.phases.get(nodes[0].id) == BACKWARD:
            items = items[::-1]
        told_apart(items, self.naming.reads)
        depth = min((len(i.scope) for i in items), default=0)
        while depth and len({i.scope[:depth] for i in items}) > 1:
            depth -= 1
        found = grouped(items, depth)
        while len(found) == 1 and isinstance(found[0], Group) and found[0].opens:
            found = found[0].children
        return self._cards(found, around)

    def _card(
        self, card_id: str, name: str, items: Sequence[Item], *, children: tuple[Card, ...] = (), **fields: Any
    ) -> Card:
        ids = sorted(nid for i in items for nid in i.ids)
        sources = [n.source for i in items for n in i.every if n.source is not None] if not children else []
        return Card(
            id=card_id,
            name=name,
            nodes=tuple(ids),
            cost=self._amount(items),
            params=self.maker.flows.parameters(ids),
            sends=sent(n for i in items for n in i.every),
            where=lines_text(sources),
            type=self._type(items),
            strips=strips_of(items, self.sites, self.cost),
            children=children,
            **fields,
        )

    def _type(self, items: Iterable[Item]) -> str:
        """The type of what is read outside, where it is one value."""
        results = self.maker.flows.results(n.id for i in items for n in i.nodes)
        return type_text(results[0].aval) if len(results) == 1 else ""

    # Small things ----------------------------------------------------------------------------------------------------
    def _amount(self, items: Iterable[Item]) -> Amount:
        return sum((self.cost[nid] for item in items for nid in item.ids), Amount())

    def _fresh(self, wanted: str) -> str:
        number = self.used[wanted] = self.used.get(wanted, 0) + 1
        return dom_id(wanted if number == 1 else f"{wanted}~{number}")

    def _place(self, items: Iterable[Item], chain: Chain) -> None:
        """Nodes inside a region that opens have their places already."""
        for item in items:
            for nid in item.ids:
                self.chains.setdefault(nid, chain)

    def _place_regions(self) -> None:
        """A region that is seen through is where all that is in it is."""
        for node in self.maker.graph.nodes():
            if node.id not in self.chains:
                inside = [self.chains.get(n.id, ()) for n in all_nodes([node]) if n is not node and not n.blocks]
                self.chains[node.id] = _shared(inside)


def _shared(chains: Sequence[Chain]) -> Chain:
    """What all of them begin with."""
    columns = zip(*chains, strict=False)
    return tuple(column[0] for column in itertools.takewhile(lambda column: len(set(column)) == 1, columns))


def _single(group: Group) -> Item | None:
    """The site or the region that a group is, where it is one."""
    items = group.items
    found = [i for i in items if i.is_region] if group.key[0] == "region" else items if len(items) == 1 else []
    return next((i for i in found[:1] if i.site is not None or i.is_region), None)


def _opens(group: Group) -> bool:
    """Whether its inside says more than its name: several products, a site, a loop."""
    items = group.items
    return len(group.children) > 1 and (
        products_in(group) > 1 or any(i.sites or i.is_region for i in items) or len({i.scope for i in items}) > 1
    )


def _without_echo(group: Group) -> Iterator[Group | Item]:
    """What is in a group; what is called as the group itself is no level of its own."""
    for child in group.children:
        if isinstance(child, Group) and child.label == group.label:
            yield from _without_echo(child)
        else:
            yield child
