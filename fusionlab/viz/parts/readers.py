"""The readers of values, across region boundaries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from fusionlab.graph.cost.traffic import COMBINES
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.ir import Atom, Block, Node, Value

FlowEnd = int | tuple[str, int]


@dataclass(frozen=True, eq=False)
class Flow:
    """The pairs of maker and reader; iterated over as (producer, reader, value), in program order.

    Three lists rather than one of tuples: hundreds of thousands of tuples cost Python's garbage collector seconds.
    """

    producers: list[FlowEnd] = field(default_factory=list)
    readers: list[FlowEnd] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[FlowEnd, FlowEnd, Value]]:
        return zip(self.producers, self.readers, self.values, strict=True)

    def add(self, producers: tuple[FlowEnd, ...], reader: FlowEnd, value: Value) -> None:
        for producer in producers:
            self.producers.append(producer)
            self.readers.append(reader)
            self.values.append(value)


def flow(graph: Graph) -> Flow:
    """The pairs of maker and reader, across region boundaries.

    A key is a node id, ("in", k) for the k-th argument of the program or ("out", k) for its k-th result.
    """
    edges = Flow()
    origin: dict[int, tuple[FlowEnd, ...]] = {v.id: (("in", k),) for k, v in enumerate(graph.top.inputs)}
    _flow_block(graph.top, origin, edges)
    for k, atom in enumerate(graph.top.outputs):
        if isinstance(atom, Value):
            edges.add(origin.get(atom.id, ()), ("out", k), atom)
    return edges


def _flow_block(block: Block, origin: dict[int, tuple[FlowEnd, ...]], edges: Flow) -> None:
    for node in block.nodes:
        # What a scatter or a reduction combines entries with is no region: its block is given single numbers, not the operands.
        if node.blocks and node.primitive not in COMBINES:
            _flow_region(node, origin, edges)
            continue
        _flow_into(node, node.inputs, origin, edges)
        for value in node.outputs:
            origin[value.id] = (node.id,)


def _flow_into(node: Node, atoms: Iterable[Atom], origin: Mapping[int, tuple[FlowEnd, ...]], edges: Flow) -> None:
    for atom in atoms:
        if isinstance(atom, Value):
            edges.add(origin.get(atom.id, ()), node.id, atom)


def _makers(atom: Atom, origin: Mapping[int, tuple[FlowEnd, ...]]) -> tuple[FlowEnd, ...]:
    """Who makes what an atom holds; nobody makes a literal."""
    return origin.get(atom.id, ()) if isinstance(atom, Value) else ()


def _flow_region(node: Node, origin: dict[int, tuple[FlowEnd, ...]], edges: Flow) -> None:
    results: list[set[FlowEnd]] = [set() for _ in node.outputs]
    taken = max(len(b.inputs) for b in node.blocks)
    for block in node.blocks:
        # Operands line up with a block's inputs from the right: what comes before is the branch index, or the
        # constants of a while loop's other block.
        operands = node.inputs[max(0, len(node.inputs) - len(block.inputs)) :]
        for inner, outer in zip(block.inputs, operands, strict=False):
            origin[inner.id] = _makers(outer, origin)
        _flow_block(block, origin, edges)
        if len(block.outputs) == len(node.outputs):
            for result, atom in zip(results, block.outputs, strict=True):
                result.update(_makers(atom, origin))
    _flow_into(node, node.inputs[: max(0, len(node.inputs) - taken)], origin, edges)
    for value, result in zip(node.outputs, results, strict=True):
        origin[value.id] = tuple(sorted(result, key=str)) or (node.id,)
