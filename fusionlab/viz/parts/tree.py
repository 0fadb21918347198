"""From a graph and what was found in it to cards: `overview` makes all that a picture of the program can show."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fusionlab.fusers.engine.outcomes import Candidate
from fusionlab.fusers.report.findings import Findings
from fusionlab.graph.cost.cost import Costs, cost_of
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.ir import Block, Node, all_nodes, type_text

from ..cards.card import PHASES, Amount, Card, Overview, Row, Site, Strip
from ..draw.dot import dom_id
from ..model.sites import is_applied
from ..palette import pass_of_op
from .flows import Flows
from .frames import frames_of
from .groups import Group, grouped, products_in
from .instances import as_forward, told_apart
from .items import Item, items_of
from .names import (
    computes,
    item_name,
    lines_text,
    parameter_name,
    ribbon,
    run_name,
    shared_parameter,
)
from .nodes import PRODUCTS
from .phases import BACKWARD, FORWARD, UPDATE, Stretch
from .places import Places, rows_of
from .sites import Found, sites_of

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
        self.argument_of = self.flows.parameter_names(parameter_name)

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
    ) -> tuple[Overview, dict[int, tuple[str, ...]]]:
        """The overview with these sites applied and these copies shown, and node id -> the cards around it, outermost first.

        A node of a copy that is not shown ends in a name of its own, "CARD~5" for the sixth copy of CARD.
        """
        drawing = _Drawing(self, self._found(enabled), copies or {})
        return drawing.overview(), drawing.chains

    def _found(self, enabled: Collection[str] | None) -> list[Found]:
        if self.findings is None:
            return []
        backward = {i for i, phase in self.phases.items() if phase == BACKWARD}
        states = [(c, "applied" if is_applied(c, enabled) else "candidate") for c in self.findings.candidates]
        declined = [(r, "declined") for r in self.findings.rejections]
        return sites_of(self.graph, [*states, *declined], backward)


class _Drawing:
    """One overview in the making."""

    def __init__(self, maker: Maker, sites: list[Found], copies: Mapping[str, int]) -> None:
        self.maker, self.sites, self.copies = maker, sites, copies
        self.used: dict[str, int] = {}
        self.chains: dict[int, tuple[str, ...]] = {}  # node id -> ids of the cards around it, outermost first

    def overview(self) -> Overview:
        graph = self.maker.graph
        lanes = {phase: self._items(phase) for phase in PHASES}
        self._tell_apart(lanes)
        places = rows_of(lanes, self.maker.flows, self.maker.weights)
        phases = tuple(p for p in PHASES if lanes[p]) or (FORWARD,)
        rows = tuple(self._row(place, phases) for place in places)
        totals = {p: self._amount(i.nodes for i in lanes[p]) for p in phases}
        top = {c.id: (row.name, phase) for row in rows for phase, c in row.cards.items()}
        rows, edges, inputs, results = self.maker.flows.between(rows, self.chains, top, graph)
        kept = sum(e.bytes for e in edges if e.kind == "kept")
        gradients = sum(e.bytes for e in edges if e.kind == "gradients")
        return Overview(graph.name, phases, rows, inputs, results, edges, totals, kept, gradients)

    def _items(self, phase: str) -> list[Item]:
        phases = self.maker.phases
        nodes = [n for n in self.maker.stretch.nodes if phases[n.id] == phase]
        items = items_of(nodes, self.sites, self.maker.weights)
        # The backward pass is read from where it ends, so that it stands as the forward pass does.
        return items[::-1] if phase == BACKWARD else items

    def _tell_apart(self, lanes: Mapping[str, Sequence[Item]]) -> None:
        families = told_apart(lanes[FORWARD], self._reads)
        if families and lanes[BACKWARD]:
            told_apart(lanes[BACKWARD], self._reads, families)
            as_forward(lanes[BACKWARD], lanes[FORWARD])

    def _reads(self, item: Item) -> list[str]:
        read = self.maker.flows.parameters_read(n.id for n in all_nodes(item.nodes))
        return [parameter_name(p) for p in read]

    # Cards -----------------------------------------------------------------------------------------------------------
    def _row(self, place: Places, phases: Sequence[str]) -> Row:
        cards = {p: self._top(place, p) for p in phases if place.groups.get(p)}
        return Row(next((c.name for c in cards.values()), place.name), cards)

    def _top(self, place: Places, phase: str) -> Card:
        groups = place.groups[phase]
        name = place.name or self._group_name(place.groups.get(FORWARD, groups)[0])
        card_id = self._fresh(f"{phase}/{name}")
        prefix = _PREFIX[phase] if place.groups.get(FORWARD) else ""
        return self._stack(card_id, name, prefix, groups, ())

    def _stack(self, card_id: str, name: str, prefix: str, groups: Sequence[Group], around: tuple[str, ...]) -> Card:
        """Equal groups as one card: the costs of all, the inside of one."""
        copy = min(self.copies.get(card_id, 0), len(groups) - 1)
        here = (*around, card_id)
        for k, group in enumerate(groups):
            if k != copy:
                for item in group.items:
                    self._place(item.nodes, (*here, f"{card_id}~{k}"))
        shown = self._part(card_id, name, prefix, groups[copy], around)
        if len(groups) == 1:
            return shown
        items = [i for g in groups for i in g.items]
        return replace(
            shown,
            count=len(groups),
            copy=copy,
            cost=self._amount(i.nodes for i in items),
            params=self.maker.flows.parameters(n.id for i in items for n in all_nodes(i.nodes)),
            strips=self._strips(items),
        )

    def _part(self, card_id: str, name: str, prefix: str, group: Group, around: tuple[str, ...]) -> Card:
        nodes = [n for i in group.items for n in i.nodes]
        regions = [i for i in group.items if i.is_region]
        single = group.items[0] if len(group.items) == 1 else regions[0] if group.key[0] == "region" else None
        if single is not None and (single.site is not None or single.is_region):
            card = self._item(single, around, card_id)
            self._place(nodes, (*around, card_id))  # of a loop, also the trifles that it alone reads
            return replace(
                card, name=name if single.site is None or group.key[0] == "scope" else card.name, prefix=prefix
            )
        children = self._children(group, (*around, card_id)) if self._opens(group) else ()
        self._place(nodes, (*around, card_id))
        return self._card(
            card_id, name, nodes, group.items, kind="part" if children else "nodes", prefix=prefix, children=children
        )

    def _opens(self, group: Group) -> bool:
        """Whether its inside says more than its name: several products, a site, a loop."""
        items = group.items
        return len(group.children) > 1 and (
            products_in(group) > 1 or any(i.sites or i.is_region for i in items) or len({i.scope for i in items}) > 1
        )

    def _children(self, group: Group, around: tuple[str, ...]) -> tuple[Card, ...]:
        return self._cards(_runs(_boxes(group.children)), around)

    def _cards(self, runs: Iterable[list[Group | Item]], around: tuple[str, ...]) -> tuple[Card, ...]:
        cards = []
        for run in runs:
            first = run[0]
            if isinstance(first, Item) and len(run) == 1:
                cards.append(self._item(first, around))
                continue
            groups = [g if isinstance(g, Group) else Group(("item",), "", [g], [g]) for g in run]
            names = [
                self._group_name(g) if isinstance(p, Group) else self._item_name(p)
                for p, g in zip(run, groups, strict=True)
            ]
            name = run_name(names[0], names[-1])
            cards.append(self._stack(self._fresh(f"{around[-1]}/{name}"), name, "", groups, around))
        return tuple(cards)

    def _item(self, item: Item, around: tuple[str, ...], card_id: str = "") -> Card:
        name = self._item_name(item)
        card_id = card_id or self._fresh(f"{around[-1] if around else ''}/{item.site.record.id if item.site else name}")
        children: tuple[Card, ...] = ()
        turns = 0
        if item.is_region and item.site is None:
            children, turns = self._inside(item.main, (*around, card_id)), self._turns(item.main)
        site = self._site(item)
        kind = "site" if site is not None else "region" if children else "nodes"
        self._place(item.nodes, (*around, card_id))
        return self._card(card_id, name, item.nodes, [item], kind=kind, children=children, turns=turns, site=site)

    def _item_name(self, item: Item) -> str:
        if item.is_region and item.site is None:
            return self._group_name(Group(("region",), "", [item]))
        if item.site is None and self.maker.phases[item.main.id] == BACKWARD and item.main.primitive in PRODUCTS:
            return self._gradient_name(item)
        return item_name(item, self.maker.argument_of)

    def _gradient_name(self, item: Item) -> str:
        """A product of the backward pass by the parameter whose gradient it is, or that it is multiplied by."""
        name = item_name(item, self.maker.argument_of)
        if not name.startswith("product "):
            return f"backward of {name}"
        shape = sorted(item.main.outputs[0].shape)
        place = item.main.scope, item.frames
        found = {p for p, s in self._weights.get(place, ()) if s == shape} or {
            p for p, s in self._weights.get(place, ())
        }
        return f"gradient of {found.pop()}" if len(found) == 1 else "gradient of a weight" if found else name

    @functools.cached_property
    def _weights(self) -> dict[Any, list[tuple[str, list[int]]]]:
        """Where a product of the forward pass stands -> the parameters it multiplies by, with their sorted shapes."""
        found: dict[Any, list[tuple[str, list[int]]]] = {}
        for node in self.maker.graph.nodes():
            if node.primitive in PRODUCTS and self.maker.phases.get(node.id) != BACKWARD:
                for value in node.values:
                    if name := self.maker.argument_of.get(value.id):
                        short = re.split(r"[.\]]", name.rstrip("]"))[-1] or name
                        found.setdefault((node.scope, frames_of(node)), []).append((short, sorted(value.shape)))
        return found

    def _inside(self, region: Node, around: tuple[str, ...]) -> tuple[Card, ...]:
        """What is in a loop or a choice; of a choice, each branch as a part."""
        bodies = [b for b in region.blocks if b.label not in ("cond", "cond_jaxpr") and b.nodes]
        if len(bodies) == 1:
            return self._of_block(bodies[0], around)
        cards = []
        for body in bodies:
            card_id = self._fresh(f"{around[-1]}/{body.label}")
            children = self._of_block(body, (*around, card_id))
            items = [Item(list(body.nodes), body.nodes[-1])]
            cards.append(self._card(card_id, body.label, list(body.nodes), items, children=children))
        return tuple(cards)

    def _of_block(self, block: Block, around: tuple[str, ...]) -> tuple[Card, ...]:
        nodes = list(self.maker.stretch.flat(block))
        items = items_of(nodes, self.sites, self.maker.weights)
        if nodes and self.maker.phases.get(nodes[0].id) == BACKWARD:
            items = items[::-1]
        told_apart(items, self._reads)
        depth = min((len(i.scope) for i in items), default=0)
        while depth and len({i.scope[:depth] for i in items}) > 1:
            depth -= 1
        found = grouped(items, depth)
        while len(found) == 1 and isinstance(found[0], Group) and found[0].opens:
            found = found[0].children
        return self._cards(_runs(_boxes(found)), around)

    def _turns(self, region: Node) -> int:
        if region.primitive == "scan":
            return int(region.params.get("length", -1))
        return -1 if region.primitive == "while" else 0

    def _card(
        self,
        card_id: str,
        name: str,
        nodes: Sequence[Node],
        items: Sequence[Item],
        *,
        children: tuple[Card, ...] = (),
        **fields: Any,
    ) -> Card:
        every = list(all_nodes(nodes))
        sources = [n.source for n in every if n.source is not None] if not children else []
        return Card(
            id=card_id,
            name=name,
            nodes=tuple(sorted(n.id for n in every)),
            cost=self._amount([nodes]),
            params=self.maker.flows.parameters(n.id for n in every),
            where=lines_text(sources),
            type=self._type(nodes),
            strips=self._strips(items),
            children=children,
            **fields,
        )

    def _type(self, nodes: Sequence[Node]) -> str:
        """The type of what is read outside, where it is one value."""
        results = self.maker.flows.results(n.id for n in nodes)
        return type_text(results[0].aval) if len(results) == 1 else ""

    def _site(self, item: Item) -> Site | None:
        if item.site is None:
            return _fused(item.main)
        record, solid = item.site.record, item.nodes
        note = record.formula if isinstance(record, Candidate) else record.sentence
        words = ribbon(solid, self.maker.argument_of)
        return Site(record.id, record.pass_name, item.site.state, item.site.backward, words, note)

    def _strips(self, items: Sequence[Item]) -> tuple[Strip, ...]:
        """Sites by pass and state, those inside loops and branches too."""
        found: dict[int, Found] = {}
        for item in items:
            found.update((id(s), s) for s in item.sites)
            if item.is_region:
                inside = {n.id for n in all_nodes([item.main])}
                found.update((id(s), s) for s in self.sites if s.nodes and not inside.isdisjoint(s.nodes))
        strips: dict[tuple[str, str, bool], list[Found]] = {}
        for site in found.values():
            strips.setdefault((site.record.pass_name, site.state, site.backward), []).append(site)
        cost = self.maker.cost
        drawn = [
            Strip(name, state, len(sites), backward, sum((cost[i] for s in sites for i in s.nodes), Amount()))
            for (name, state, backward), sites in strips.items()
        ]
        return (*drawn, *self._fused_strips(items))

    def _fused_strips(self, items: Sequence[Item]) -> list[Strip]:
        """Fused ops by pass, in a program whose sites are fused already."""
        found: dict[tuple[str, bool], list[Node]] = {}
        for node in (n for i in items if i.site is None for n in all_nodes(i.nodes)):
            if (site := _fused(node)) is not None:
                found.setdefault((site.pass_name, site.backward), []).append(node)
        return [
            Strip(name, "applied", len(nodes), backward, self._amount([nodes]))
            for (name, backward), nodes in found.items()
        ]

    # Small things ----------------------------------------------------------------------------------------------------
    def _amount(self, several: Iterable[Iterable[Node]]) -> Amount:
        cost = self.maker.cost
        return sum((cost[n.id] for nodes in several for n in all_nodes(nodes)), Amount())

    def _group_name(self, group: Group) -> str:
        """A scope or a function has its name; a turn of a loop has the parameters' that it reads."""
        label = group.label
        if group.key[0] in ("turn", "region") or not label:
            read = self.maker.flows.parameters_read(n.id for i in group.items for n in all_nodes(i.nodes))
            named = shared_parameter([parameter_name(p) for p in read])
            if any(c.isalpha() for c in named):
                return named
        if group.key[0] == "region":
            return item_name(group.items[0], {})
        return label or computes([n for i in group.items for n in i.nodes])

    def _fresh(self, wanted: str) -> str:
        number = self.used[wanted] = self.used.get(wanted, 0) + 1
        return dom_id(wanted if number == 1 else f"{wanted}~{number}")

    def _place(self, nodes: Iterable[Node], chain: tuple[str, ...]) -> None:
        """Nodes inside a region that opens have their places already."""
        for node in all_nodes(nodes):
            self.chains.setdefault(node.id, chain)


def _fused(node: Node) -> Site | None:
    """A fused op, in a program whose sites are fused already."""
    name = pass_of_op(node.primitive)
    if name is None:
        return None
    return Site("", name.removesuffix("_grad"), "applied", name.endswith("_grad"))


def _boxes(children: Sequence[Group | Item]) -> list[Group | Item]:
    """Work of one line as one box, each product in one of its own."""
    out: list[Group | Item] = []
    for child in children:
        last = out[-1] if out else None
        if isinstance(child, Item) and isinstance(last, Item) and _joins(last, child):
            last = out[-1] = Item([*last.nodes, *child.nodes], last.main, None, [*last.sites, *child.sites])
            continue
        out.append(child)
    return out


def _joins(a: Item, b: Item) -> bool:
    if a.site or b.site or a.is_region or b.is_region:
        return False
    return a.frames[-1:] == b.frames[-1:] and not (_has_product(a) and _has_product(b))


def _has_product(item: Item) -> bool:
    return products_in(Group((), "", [item])) > 0


def signature(part: Group | Item) -> tuple:
    """Equal for parts that compute the same of the same types: casts and masks left out, states of sites too."""
    items = part.items if isinstance(part, Group) else [part]
    sites = tuple(getattr(s.record, "formula", s.record.pass_name) for i in items for s in i.sites)
    return sites, *(
        (n.primitive, type_text(n.outputs[0].aval) if n.outputs else "") for i in items for n in all_nodes([i.main])
    )


def _runs(parts: Sequence[Group | Item]) -> list[list[Group | Item]]:
    """Neighbours that are equal together."""
    runs: list[list[Group | Item]] = []
    before: tuple | None = None
    for part in parts:
        now = (isinstance(part, Group), signature(part))
        if runs and now == before:
            runs[-1].append(part)
        else:
            runs.append([part])
        before = now
    return runs
