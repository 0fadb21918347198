"""The cost of a program: operations and bytes of every node, times its number of runs.

XLA's own analysis counts the body of a loop once; here every node counts for each trip of the scans around it. The trip count of a while
loop is unknown: its body counts once, and `trips` is None, unless the caller gives it. Of the branches of a cond, the most expensive
counts. Inside a shard_map, shapes and costs are those of one device.

Bytes are counted twice over. *Unfused*, every node reads its operands and writes its results; a view moves nothing, a slice or a gather
reads its result's size, and an update in place moves the updated entries. *Fused*, some nodes run as one kernel: values from
outside are read once, values read outside are written once (`Costs.fused`).

The count follows the program as written: causal attention written as a product, a mask and a softmax computes the whole matrix.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import ArgumentError
from ...showing import Shown, Table, table_of
from ...tracebacks import errors_for_users
from ..program.graph import Graph
from ..program.ir import Block, Node
from ..program.symbolic import needs_numbers
from ..program.text import node_text
from .rules import COST_RULES, ROUGH, Arithmetic, entries_of
from .traffic import COMBINES, ideal_traffic, is_region, reads, writes

_SOLVE = "jaxprs[2]"  # of those of a linear solve (matvec, vecmat, solve, transpose_solve), the one that runs


@dataclass(frozen=True, repr=False)
class Cost(Shown):
    """Operations and bytes of all trips together.

    Attributes:
      flops: operations without transcendentals; None for a node with an unknown primitive. A sum includes only the known ones.
      transcendentals: exp, tanh, sqrt and the like.
      bytes_read, bytes_written: of memory.
      trips: the number of runs; 0 in a branch that is not counted, None inside a while loop of unknown length, 1 for a sum.
      known: False if it contains an unknown primitive, so that `flops` is a lower bound.
    """

    flops: int | None = 0
    transcendentals: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    trips: int | None = 1
    known: bool = True

    @property
    def operations(self) -> int:
        """Operations and transcendentals, each counted as one; unknown ones count 0."""
        return (self.flops or 0) + self.transcendentals

    @property
    def bytes_moved(self) -> int:
        """Bytes read and bytes written together."""
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float:
        """Operations per byte moved; infinite if nothing is moved, 0 if nothing is computed either."""
        if not self.bytes_moved:
            return float("inf") if self.operations else 0.0
        return self.operations / self.bytes_moved

    def __add__(self, other: Cost) -> Cost:
        """The sum of both; of one trip that does both."""
        parts = ((a or 0) + (b or 0) for a, b in zip(_numbers(self), _numbers(other), strict=True))
        return Cost(*parts, known=self.known and other.known)

    def times(self, count: int, trips: int | None) -> Cost:
        """The cost of so many trips; `trips` is the recorded number."""
        numbers = (None if n is None else n * count for n in _numbers(self))
        return Cost(*numbers, trips=trips, known=self.known or not count)  # pyright: ignore[reportArgumentType]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, JSON-able."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        some = "" if self.known else "at least "
        text = f"{some}{quantity(self.flops or 0)}flop"
        text += f", {quantity(self.transcendentals).strip()} transcendentals" if self.transcendentals else ""
        text += f", reads {_bytes(self.bytes_read)}, writes {_bytes(self.bytes_written)}"
        text += f", {self.intensity:.3g} flop/byte" if self.bytes_moved else ""
        return text if self.trips == 1 else f"{text}, {trips_text(self.trips)}"


def trips_text(trips: int | None) -> str:
    """ "300 trips"."""
    if trips is None:
        return "in a loop of unknown length: counted for one trip"
    return "in a branch that is not counted" if not trips else f"{trips} trip{'s' if trips != 1 else ''}"


def _numbers(cost: Cost) -> tuple[int | None, int, int, int]:
    return cost.flops, cost.transcendentals, cost.bytes_read, cost.bytes_written


def total_of(costs: Iterable[Cost]) -> Cost:
    """The sum."""
    return functools.reduce(Cost.__add__, costs, Cost())


@errors_for_users
@dataclass(frozen=True, eq=False)
class Costs(Shown):
    """The cost of every node of a graph.

    Attributes:
      graph: the program.
      nodes: node id -> cost of all its trips, unfused. A region itself (scan, cond, ...) costs nothing: its inner nodes do.
      each: node id -> cost of one trip.
      notes: node id -> what its cost omits or assumes, in a sentence.
    """

    graph: Graph
    nodes: Mapping[int, Cost]
    each: Mapping[int, Cost]
    notes: Mapping[int, str]

    @functools.cached_property
    def total(self) -> Cost:
        """The cost of the whole program."""
        return total_of(self.nodes.values())

    def of(self, node: Node | int | Iterable[int]) -> Cost:
        """The cost of a node with its contents, or of several nodes, unfused. A single node keeps its trips."""
        if isinstance(node, Node | int):
            node = self._node(node)
            return self._inside(node) if node.blocks else self.nodes[node.id]
        return total_of(self._inside(self._node(i)) for i in node)

    def _node(self, node: Node | int) -> Node:
        nid = node if isinstance(node, int) else node.id
        if nid not in self.graph.node_by_id:
            raise ArgumentError(f"node: got {nid}, needed the id of a node of {self.graph!r}")
        return self.graph.node_by_id[nid]

    def _inside(self, node: Node) -> Cost:
        cost, stack = Cost(), [node]
        while stack:
            inner = stack.pop()
            cost += self.nodes[inner.id]
            stack += [n for b in inner.blocks for n in b.nodes]
        return dataclasses.replace(cost, trips=self.nodes[node.id].trips)

    def fused(self, nodes: Iterable[Node | int]) -> Cost:
        """The cost of some nodes of one block as one kernel: values from outside are read once, values read outside are written once.

        Raises:
          ArgumentError: no node, or nodes of several blocks.
        """
        chosen = {n.id: n for n in map(self._node, nodes)}
        blocks = {self.graph.block_of[i].path: self.graph.block_of[i] for i in chosen}
        if len(blocks) != 1:
            raise ArgumentError(f"nodes: got nodes of {len(blocks)} blocks, needed nodes of a single block")
        ((_, block),) = blocks.items()
        trips = next(self.nodes[i].trips for i in chosen)
        read, written = ideal_traffic(block, chosen)
        inner = self.of(chosen)
        count = 1 if trips is None else trips
        return Cost(inner.flops, inner.transcendentals, read * count, written * count, trips, inner.known)

    def by_scope(self, depth: int | None = None) -> dict[str, Cost]:
        """Module scope, cut to `depth` names (None: whole) -> cost; their sum is the total."""
        found: dict[str, Cost] = {}
        for node in self.graph.nodes():
            scope = "/".join(node.scope.split("/")[:depth])
            found[scope] = found.get(scope, Cost()) + self.nodes[node.id]
        return found

    def by_region(self) -> dict[str, Cost]:
        """Block path ("" = top, "n12.jaxpr" = the body of node 12) -> cost of its own nodes; their sum is the total."""
        return {b.path: total_of(self.nodes[n.id] for n in b.nodes) for b in self.graph.blocks()}

    @property
    def unknown(self) -> tuple[int, ...]:
        """Ids of the nodes whose operations are not known."""
        return tuple(i for i, c in self.nodes.items() if not c.known)

    def table(self, depth: int | None = 2, most: int = 40) -> str:
        """One line per scope, the most expensive first, and the total."""
        found = sorted(self.by_scope(depth).items(), key=lambda kv: -kv[1].bytes_moved - kv[1].operations)
        rows = [(scope or "(top)", *_cells(c)) for scope, c in found[:most]]
        rows += [("(the rest)", *_cells(total_of(c for _, c in found[most:])))] if len(found) > most else []
        heads = ("scope", "flop", "transcendentals", "read", "written", "flop/byte")
        return _aligned([heads, *rows, ("total", *_cells(self.total))])

    def summary(self, node: Node | int) -> str:
        """The cost of a node with its note, on one line."""
        found = self._node(node)
        note = self.notes.get(found.id)
        return f"{self.of(found)}{f' ({note})' if note else ''}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, JSON-able."""
        return {
            "total": self.total.to_dict(),
            "scopes": {k: c.to_dict() for k, c in self.by_scope().items()},
            "regions": {k: c.to_dict() for k, c in self.by_region().items()},
            "nodes": {str(i): c.to_dict() for i, c in self.nodes.items()},
            "notes": {str(i): text for i, text in self.notes.items()},
        }

    def __str__(self) -> str:
        lines = [self.table()]
        notes = dict.fromkeys(f"{self.graph.node_by_id[i].primitive}: {text}" for i, text in self.notes.items())
        return "\n".join([*lines, *(f"note: {text}" for text in notes)])

    def __repr__(self) -> str:
        return f"Costs({self.graph.name!r}, {self.total})"

    def _table(self) -> Table:
        scopes = ((scope or "(top)", cost) for scope, cost in self.by_scope().items())
        return table_of((*scopes, ("total", self.total)))

    def _sentence(self) -> str:
        return f"{self.graph.name}: {self.total}"


def cost_of(graph: Graph, *, trips: Mapping[int, int] | None = None) -> Costs:
    """The cost of every node.

    Args:
      graph: the program.
      trips: node id of a while loop -> its number of trips.

    Raises:
      ArgumentError: `trips` names a node that is not a while loop, or a negative number; or sizes are symbolic.
    """
    needs_numbers(graph, "a count of operations")
    trips = dict(trips or {})
    for nid, n in trips.items():
        node = graph.node_by_id.get(nid)
        if node is None or node.primitive != "while" or n < 0:
            label = node_text(node, sources=False) if node is not None else "no node"
            raise ArgumentError(f"trips: got {n} for {nid} ({label}), needed trips of a while loop, 0 or more")
    counter = _Counter(trips)
    counter.block(graph.top, 1, True)
    return Costs(graph, counter.nodes, counter.each, counter.notes)


def arithmetic_of(block: Block) -> Arithmetic:
    """Operations and transcendentals of a block by itself."""
    counter = _Counter({})
    counter.block(block, 1, True)
    whole = total_of(counter.nodes.values())
    return whole.flops or 0, whole.transcendentals


class _Counter:
    """Walks a tree of blocks once; `moves` is False in blocks whose values never reach memory."""

    def __init__(self, trips: Mapping[int, int]) -> None:
        self.trips = trips
        self.nodes: dict[int, Cost] = {}
        self.each: dict[int, Cost] = {}
        self.notes: dict[int, str] = {}

    def block(self, block: Block, count: int, known: bool, moves: bool = True) -> None:
        for node in block.nodes:
            cost = _each(node, moves)
            self.each[node.id] = cost
            self.nodes[node.id] = cost.times(count, count if known or not count else None)
            if (note := _note(node)) is not None:
                self.notes[node.id] = note
            if node.primitive == "cond":
                self._branches(node, count, known)
                continue
            inside = moves and node.primitive not in COMBINES
            for child, times in self._children(node):
                self.block(child, count * (1 if times is None else times), known and times is not None, inside)

    def _branches(self, node: Node, count: int, known: bool) -> None:
        """Counts the most expensive branch, by operations and bytes; the others get zero trips."""
        counters = [_Counter(self.trips) for _ in node.blocks]
        for counter, branch in zip(counters, node.blocks, strict=True):
            counter.block(branch, count, known)
        sums = [total_of(c.nodes.values()) for c in counters]
        dearest = max(range(len(sums)), key=lambda i: sums[i].operations + sums[i].bytes_moved)
        for i, counter in enumerate(counters):
            kept = counter.nodes if i == dearest else {k: c.times(0, 0) for k, c in counter.nodes.items()}
            self.nodes.update(kept)
            self.each.update(counter.each)
            self.notes.update(counter.notes)
        self.notes[node.id] = f"only the most expensive of {len(sums)} branches is counted: number {dearest}"

    def _children(self, node: Node) -> list[tuple[Block, int | None]]:
        """The blocks of a region and how often each runs for one run of the region; None: unknown."""
        return [(block, self._runs(node, block)) for block in node.blocks]

    def _runs(self, node: Node, block: Block) -> int | None:
        name = node.primitive
        if name == "scan":
            return int(node.params["length"])
        if name == "while":
            n = self.trips.get(node.id)
            # The test runs once more than the body.
            return n if n is None else n + block.label.startswith("cond")
        if name == "custom_linear_solve":
            return int(block.label == _SOLVE)
        if name in COMBINES:
            return _combinations(node, block)
        return 0 if name == "pallas_call" or _own_arithmetic(node) is not None else 1


def _combinations(node: Node, block: Block) -> int:
    """How often a reduction, a window or a scatter applies its function."""
    name = node.primitive
    if name == "reduce":
        return max(0, entries_of(node.inputs[0]) - entries_of(node.outputs[0]))
    if name.startswith("scatter"):
        return entries_of(node.inputs[2])
    window = 1
    for n in node.params["window_dimensions"]:
        window *= int(n)
    if name == "select_and_scatter":
        source = entries_of(node.inputs[1])
        return source if "scatter" in block.label else source * (window - 1)
    return entries_of(node.outputs[0]) * (window - 1)


def _own_arithmetic(node: Node) -> Callable[..., Arithmetic] | None:
    """The operations of one of our primitives, such as a fused op, by its own method."""
    return getattr(node.eqn.primitive, "arithmetic", None)


def _each(node: Node, moves: bool) -> Cost:
    """The cost of one run of a node itself, without its contents."""
    computed = _arithmetic(node)
    flops, transcendentals = (None, 0) if computed is None else computed
    read, written = (sum(reads(node).values()), sum(writes(node).values())) if moves else (0, 0)
    return Cost(flops, transcendentals, read, written, known=computed is not None)


def _arithmetic(node: Node) -> Arithmetic | None:
    own = _own_arithmetic(node)
    if own is not None:
        return own(node.params, [a.aval for a in node.inputs])
    estimate = node.params.get("cost_estimate")  # what the writer of a Pallas kernel says of it
    if estimate is not None and hasattr(estimate, "flops"):
        return int(estimate.flops), int(getattr(estimate, "transcendentals", 0))
    if node.primitive == "pallas_call":
        return None
    if is_region(node) or node.primitive in COMBINES:
        return 0, 0
    rule = COST_RULES.get(node.primitive)
    return None if rule is None else rule(node)


def _note(node: Node) -> str | None:
    name = node.primitive
    if name == "while":
        return "the trip count of a while loop is unknown: its body is counted once unless you pass trips={node id: n}"
    if name == "shard_map":
        return "its contents are counted for one device"
    if name in ROUGH:
        return "a rough estimate"
    if _arithmetic(node) is None:
        return "its operations are unknown; only its bytes are counted"
    return None


# -- text -------------------------------------------------------------------------------------------------------------


def quantity(n: float) -> str:
    """ "65.5 k": a number with a decimal prefix, and the space before its unit."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if n >= factor:
            return f"{n / factor:.3g} {prefix}"
    return f"{n:.4g} "


def _bytes(n: float) -> str:
    return f"{quantity(n)}B"


def _cells(cost: Cost) -> tuple[str, ...]:
    counts = (
        f"{'' if cost.known else '>= '}{quantity(cost.flops or 0)}".strip(),
        quantity(cost.transcendentals).strip(),
    )
    return *counts, _bytes(cost.bytes_read), _bytes(cost.bytes_written), f"{cost.intensity:.3g}"


def _aligned(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = [first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(rest, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
