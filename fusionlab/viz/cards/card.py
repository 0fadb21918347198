"""The content of a program's picture: cards in lanes and rows, and the values that flow between them: plain data, no sizes, no
colours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

PHASES = ("forward", "backward", "update")
BESIDE = ("before", "after")  # the lanes of a program beside the same program with its sites fused
AFTER = "after--"  # before the ids of the cards of the second


@dataclass(frozen=True)
class Amount:
    """The cost of work: operations, and bytes read and written, counted node by node; seconds if its kernels were timed, else 0."""

    operations: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.operations + other.operations, self.bytes + other.bytes, self.seconds + other.seconds)

    def __mul__(self, copies: int) -> Amount:
        return Amount(self.operations * copies, self.bytes * copies, self.seconds * copies)


@dataclass(frozen=True)
class Strip:
    """The sites of one pass in one state inside a card.

    Attributes:
      pass_name, state: the pass; "applied", "candidate" or "declined".
      count: how many sites, those of all copies.
      backward: whether it is the backward pass of sites that stand in the forward lane (not counted again).
      cost: of their nodes, all copies.
    """

    pass_name: str
    state: str
    count: int
    backward: bool = False
    cost: Amount = Amount()


@dataclass(frozen=True)
class Edge:
    """The values that flow from one card to another: distinct values, seen through casts, reshapes and broadcasts.

    Attributes:
      start, end: ids of cards.
      bytes: of all of them, all copies.
      type: of the value ("f32[8,1024]") where it is one, else "".
      values: how many.
      kind: "flow" inside a lane; "kept" from forward to backward or update; "gradients" from backward to update.
    """

    start: str
    end: str
    bytes: int
    type: str = ""
    values: int = 1
    kind: str = "flow"


@dataclass(frozen=True)
class Site:
    """The site that a card is.

    Attributes:
      id: the record's ("gemm_epilogue@layer_0#1").
      pass_name, state: as of a `Strip`.
      backward: whether this is the site's backward pass.
      note: one line: why it was chosen, stays or was declined.
    """

    id: str
    pass_name: str
    state: str
    backward: bool = False
    note: str = ""


@dataclass(frozen=True)
class Card:
    """A part of a program with a readable name.

    Attributes:
      id: the same in every process for the same program; never shown.
      name: "embed", "layer_0 … 23", "gelu_tanh(x @ w + b)", "layer_norm · model.py:19-21".
      prefix: "", "backward of" or "update of": said, muted, before the name.
      kind: "part" (opens), "region" (opens; a scan, a loop, a branch), "site", "nodes", "input" or "output".
      count: how many identical consecutive parts it represents.
      copy: which of them is shown opened, from 0.
      turns: how often a loop's body runs; 0 for what is no loop, -1 where the count is not known.
      nodes: ids of the nodes of the shown copy, ascending.
      cost: of all copies.
      params: bytes of the parameters it reads, all copies.
      sends: its collectives, of one copy ("2 × psum over tensor: 16.4 kB"); "" for none.
      where: source lines, "model.py:22-24"; "" where unknown.
      type: of its result, "f32[8,1024]"; "" where there are several.
      site: the site it is, else None.
      strips: its sites by pass and state.
      said: further lines in a site's box, in a before/after picture.
      children: what is inside, in program order; () for what does not open. Of several copies, what is inside one: its costs and
        strips are those of that copy.
      edges: between its children.
    """

    id: str
    name: str
    prefix: str = ""
    kind: str = "part"
    count: int = 1
    copy: int = 0
    turns: int = 0
    nodes: tuple[int, ...] = ()
    cost: Amount = Amount()
    params: int = 0
    sends: str = ""
    where: str = ""
    type: str = ""
    site: Site | None = None
    strips: tuple[Strip, ...] = ()
    said: tuple[str, ...] = ()
    children: tuple[Card, ...] = ()
    edges: tuple[Edge, ...] = ()

    def counted(self) -> Card:
        """The card without times."""
        strips = tuple(replace(s, cost=replace(s.cost, seconds=0.0)) for s in self.strips)
        children = tuple(child.counted() for child in self.children)
        return replace(self, cost=replace(self.cost, seconds=0.0), strips=strips, children=children)

    def times(self, copies: int) -> Card:
        """The card with the costs and sites of so many of it."""
        strips = tuple(replace(s, count=s.count * copies, cost=s.cost * copies) for s in self.strips)
        return replace(self, cost=self.cost * copies, params=self.params * copies, strips=strips)

    @property
    def inside(self) -> tuple[Card, ...]:
        """Its children with what all copies of them cost, so that shares inside a stack add up to its own; their sites are of one."""
        return self.children if self.count < 2 else tuple(child._of_all(self.count) for child in self.children)

    def _of_all(self, copies: int) -> Card:
        strips = tuple(replace(s, cost=s.cost * copies) for s in self.strips)
        children = tuple(child._of_all(copies) for child in self.children)
        return replace(self, cost=self.cost * copies, params=self.params * copies, strips=strips, children=children)

    def walk(self) -> Iterator[Card]:
        """The card and all cards inside it."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True)
class Row:
    """One module across the lanes: its card in each phase where it has work there."""

    name: str
    cards: dict[str, Card]


@dataclass(frozen=True)
class Overview:
    """A program as lanes and rows.

    Attributes:
      title: the program's name.
      phases: those it has, of `PHASES`; inference has "forward" alone.
      rows: from the program's beginning to its end.
      inputs, results: cards of kind "input" and "output" (none of parameters); `edges` name them by id.
      edges: between cards of the rows, inputs and results.
      totals: phase -> cost of the lane; in a before/after picture (`BESIDE`), each is the whole program's.
      kept, gradients: bytes that forward keeps for the backward pass; that backward hands to the update.
      turns: how often the loop runs that is the whole program, so that the rows are its body; 0 for a program that is no loop, -1 where
        the count is not known.
      mesh: of the shard_maps that the rows look through ("shard_map, mesh data=2 x tensor=4"); "" for none.
    """

    title: str
    phases: tuple[str, ...]
    rows: tuple[Row, ...]
    inputs: tuple[Card, ...] = ()
    results: tuple[Card, ...] = ()
    edges: tuple[Edge, ...] = ()
    totals: dict[str, Amount] | None = None
    kept: int = 0
    gradients: int = 0
    turns: int = 0
    mesh: str = ""

    @property
    def total(self) -> Amount:
        """The cost of the program, as written."""
        totals = self.totals or {}
        return totals[BESIDE[0]] if self.is_beside else sum(totals.values(), Amount())

    @property
    def is_beside(self) -> bool:
        """Whether its lanes are the program before and after."""
        return self.phases == BESIDE

    def cards(self) -> Iterator[Card]:
        """Every card, those inside others included."""
        for row in self.rows:
            for phase in self.phases:
                if phase in row.cards:
                    yield from row.cards[phase].walk()

    def counted(self) -> Overview:
        """The program without times."""
        rows = tuple(Row(row.name, {p: card.counted() for p, card in row.cards.items()}) for row in self.rows)
        totals = {p: replace(cost, seconds=0.0) for p, cost in (self.totals or {}).items()}
        return replace(self, rows=rows, totals=totals)


@dataclass(frozen=True)
class Fused:
    """A program with its sites fused.

    Attributes:
      cards: id of a card of the program as written -> the same card with what it costs fused.
      total: the cost of the fused program.
      written: id of a card that is a site -> its operations in program order.
      why: id of a site -> why it is fused or stays, in lines.
    """

    cards: Mapping[str, Card]
    total: Amount
    written: Mapping[str, str]
    why: Mapping[str, tuple[str, ...]]
