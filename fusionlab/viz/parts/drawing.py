"""Cards of one place of a picture: what is in it, equal neighbours as one, regions opened."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fusionlab.graph.program.ir import Block, Node, type_text

from ..cards.card import Amount, Card
from ..markup import dom_id
from .flows import Flows
from .groups import Group, grouped, products_in
from .instances import told_apart
from .items import Item, items_of
from .names import lines_text, run_name, sent
from .naming import Naming
from .phases import BACKWARD, Stretch, turns_of
from .runs import boxed, runs_of, shallow
from .sites import Found
from .strips import Mark, Marks, site_of

Chain = tuple[str, ...]  # ids of the cards around something, outermost first


@dataclass(frozen=True)
class Known:
    """The facts about a program that do not depend on the applied sites or the shown copies."""

    stretch: Stretch
    flows: Flows
    naming: Naming
    cost: Mapping[int, Amount]  # node id -> its own cost; a region itself has none
    weights: Mapping[int, int]  # node id -> bytes moved by it and all that is inside it
    sites: Sequence[Found]
    marks: Marks

    def amount(self, items: Iterable[Item]) -> Amount:
        """The total cost of items."""
        operations, moved, seconds = 0, 0, 0.0
        for item in items:
            for nid in item.ids:
                own = self.cost[nid]
                operations += own.operations
                moved += own.bytes
                seconds += own.seconds
        return Amount(operations, moved, seconds)


@dataclass
class Names:
    """Ids of cards, each given once."""

    used: dict[str, int] = field(default_factory=dict)

    def fresh(self, wanted: str) -> str:
        """An id that nothing else has: the wanted one, or the wanted one with a number."""
        number = self.used[wanted] = self.used.get(wanted, 0) + 1
        return dom_id(wanted if number == 1 else f"{wanted}~{number}")


@dataclass(frozen=True)
class Title:
    """The title of the outermost card of a place."""

    card_id: str
    name: str
    prefix: str


class Drawing:
    """The outermost card of one place in one lane, with all that is inside.

    Attributes:
      card: the card; its sites are those of a program in which nothing is applied.
      chains: node id -> ids of the cards around it, outermost first.
      marks: card id -> the sites inside it.
    """

    def __init__(self, known: Known, title: Title, groups: Sequence[Group], copies: Mapping[str, int]) -> None:
        self.known, self.naming = known, known.naming
        self.chains: dict[int, Chain] = {}
        self.marks: dict[str, Sequence[Mark]] = {}
        self._copies, self._asked = copies, dict[str, int]()
        self._names = Names()
        self.card = shallow(self._stack(title.card_id, title.name, title.prefix, groups, ()))
        self._forget_replaced()

    def _forget_replaced(self) -> None:
        """Parts that their inside has taken the place of are around nothing."""
        replaced = self.marks.keys() - {card.id for card in self.card.walk()}
        if replaced:
            self.marks = {k: m for k, m in self.marks.items() if k not in replaced}
            self.chains = {n: tuple(c for c in chain if c not in replaced) for n, chain in self.chains.items()}

    def is_of(self, copies: Mapping[str, int]) -> bool:
        """Whether it shows these copies."""
        return all(copies.get(card_id, 0) == copy for card_id, copy in self._asked.items())

    def _stack(self, card_id: str, name: str, prefix: str, groups: Sequence[Group], around: Chain) -> Card:
        """Equal groups as one card: the costs of all, the inside of one."""
        asked = self._asked[card_id] = self._copies.get(card_id, 0)
        copy = min(asked, len(groups) - 1)
        for k, group in enumerate(groups):
            if k != copy:
                self._place(group.items, (*around, card_id, f"{card_id}~{k}"))
        shown = self._part(card_id, name, prefix, groups[copy], around)
        if len(groups) == 1:
            return shown
        if not around and not shown.children:
            shown = self._one_inside(shown, groups[copy])
        items = [i for g in groups for i in g.items]
        self.marks[card_id] = self.known.marks.inside(items)
        params = self.known.flows.parameters(nid for i in items for nid in i.ids)
        return replace(shown, count=len(groups), copy=copy, cost=self.known.amount(items), params=params)

    def _one_inside(self, card: Card, group: Group) -> Card:
        """A stack of what does not open by itself opens to the one of them that it shows."""
        single = _single(group)
        name = self.naming.item(single) if single is not None else self.naming.group(group)
        inner = replace(card, id=self._names.fresh(f"{card.id}/{name}"), name=name, prefix="")
        self.marks[inner.id] = self.marks[card.id]
        self.chains |= dict.fromkeys(inner.nodes, (card.id, inner.id))
        return replace(card, kind="part", site=None, where="", children=(inner,))

    def _part(self, card_id: str, name: str, prefix: str, group: Group, around: Chain) -> Card:
        here = (*around, card_id)
        single = _single(group)
        if single is not None:
            card = self._item(single, around, name if single.site is None or group.key[0] == "scope" else "", card_id)
            card = replace(card, prefix=prefix)
            if len(group.items) > 1:  # a loop, with the trifles that it alone reads
                ids = tuple(sorted(nid for i in group.items for nid in i.ids))
                card = replace(card, nodes=ids, cost=self.known.amount(group.items))
        else:
            children = self._cards(_without_echo(group), here, name) if _opens(group) else ()
            kind = "part" if children else "nodes"
            card = self._card(card_id, name, group.items, kind=kind, prefix=prefix, children=children)
        self._place(group.items, here)
        return card

    def _cards(self, parts: Iterable[Group | Item], around: Chain, parent: str = "") -> tuple[Card, ...]:
        """Adjacent parts and items, equal neighbours as one card."""
        boxes = boxed(parts)
        return told_from_each_other([self._run(run, boxes, around, parent) for run in runs_of(boxes)])

    def _run(self, run: Sequence[Group | Item], beside: Sequence[Group | Item], around: Chain, parent: str) -> Card:
        names = [
            self.naming.group(part) if isinstance(part, Group) else self.naming.item(part, beside, parent)
            for part in (run[0], run[-1])
        ]
        if isinstance(run[0], Item) and len(run) == 1:
            return self._item(run[0], around, names[0])
        name = run_name(*names)
        groups = [part if isinstance(part, Group) else Group(("item",), "", [part], [part]) for part in run]
        return self._stack(self._names.fresh(f"{around[-1]}/{name}"), name, "", groups, around)

    def _item(self, item: Item, around: Chain, name: str = "", card_id: str = "") -> Card:
        name = name or self.naming.item(item)
        card_id = card_id or self._names.fresh(
            f"{around[-1] if around else ''}/{item.site.record.id if item.site else name}"
        )
        here = (*around, card_id)
        children, turns = (), 0
        if item.is_region and item.site is None:
            children, turns = self._inside(item.main, here), turns_of([item.main])
        site = site_of(item)
        kind = "site" if site is not None else "region" if children else "nodes"
        self._place([item], here)
        return self._card(card_id, name, [item], kind=kind, children=children, turns=turns, site=site)

    def _inside(self, region: Node, around: Chain) -> tuple[Card, ...]:
        """The content of a loop or a choice; of a choice, each branch as a part."""
        bodies = [b for b in region.blocks if b.label not in ("cond", "cond_jaxpr") and b.nodes]
        if len(bodies) == 1:
            return self._of_block(bodies[0], around)
        cards = []
        for body in bodies:
            card_id = self._names.fresh(f"{around[-1]}/{body.label}")
            children = self._of_block(body, (*around, card_id))
            items = items_of(list(self.known.stretch.flat(body)), self.known.sites, self.known.weights)
            cards.append(self._card(card_id, body.label, items, children=children))
        return tuple(cards)

    def _of_block(self, block: Block, around: Chain) -> tuple[Card, ...]:
        nodes = list(self.known.stretch.flat(block))
        items = items_of(nodes, self.known.sites, self.known.weights)
        if nodes and self.known.stretch.phases.get(nodes[0].id) == BACKWARD:
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
        self.marks[card_id] = self.known.marks.inside(items)
        sources = [n.source for i in items for n in i.every if n.source is not None] if not children else []
        return Card(
            id=card_id,
            name=name,
            nodes=tuple(ids),
            cost=self.known.amount(items),
            params=self.known.flows.parameters(ids),
            sends=sent(n for i in items for n in i.every),
            where=lines_text(sources),
            type=self._type(items),
            children=children,
            **fields,
        )

    def _type(self, items: Iterable[Item]) -> str:
        """The type of what is read outside, where it is one value."""
        results = self.known.flows.results(n.id for i in items for n in i.nodes)
        return type_text(results[0].aval) if len(results) == 1 else ""

    def _place(self, items: Iterable[Item], chain: Chain) -> None:
        """Nodes inside a region that opens have their places already."""
        for item in items:
            for nid in item.ids:
                self.chains.setdefault(nid, chain)


def told_from_each_other(cards: Sequence[Card]) -> tuple[Card, ...]:
    """Adjacent single operations under one name, with their lines, else their types, else numbers."""
    same: dict[str, list[Card]] = {}
    for card in cards:
        if card.kind == "nodes":
            same.setdefault(card.name, []).append(card)
    names: dict[str, str] = {}
    for name, several in same.items():
        if len(several) > 1:
            marks = _distinct([f":{c.where.rpartition(':')[2]}" for c in several]) or _distinct(
                [c.type for c in several]
            )
            for k, card in enumerate(several):
                names[card.id] = f"{name} {marks[k] if marks else f'({k + 1})'}"
    return tuple(replace(c, name=names[c.id]) if c.id in names else c for c in cards)


def _distinct(marks: Sequence[str]) -> Sequence[str]:
    """The marks, if each exists and differs from the others."""
    return marks if all(m.strip(":") for m in marks) and len(set(marks)) == len(marks) else ()


def _single(group: Group) -> Item | None:
    """The site or the region that a group is, where it is one."""
    items = group.items
    found = [i for i in items if i.is_region] if group.key[0] == "region" else items if len(items) == 1 else []
    return next((i for i in found[:1] if i.site is not None or i.is_fused or i.is_region), None)


def _opens(group: Group) -> bool:
    """Whether its inside shows more than its name: several products, a site, a loop."""
    items = group.items
    return len(group.children) > 1 and (
        products_in(group) > 1
        or any(i.sites or i.is_fused or i.is_region for i in items)
        or len({i.scope for i in items}) > 1
    )


def _without_echo(group: Group) -> Iterator[Group | Item]:
    """The content of a group; an inner group of the same name is not a separate level."""
    for child in group.children:
        if isinstance(child, Group) and child.label == group.label:
            yield from _without_echo(child)
        else:
            yield child
