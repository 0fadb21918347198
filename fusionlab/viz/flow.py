"""Who reads what, looking through region boundaries: the edges of a picture."""

from __future__ import annotations

from fusionlab.graph.ir import Block, Graph, Node, Value

Key = int | tuple[str, int]


def flow(graph: Graph) -> list[tuple[Key, Key, Value]]:
    """Who reads from whom, looking through region boundaries: (producer, reader, value).

    A key is a node id, ("in", k) for the k-th argument of the program or ("out", k) for its k-th result.
    """
    edges: list[tuple[Key, Key, Value]] = []
    origin: dict[int, tuple[Key, ...]] = {v.id: (("in", k),) for k, v in enumerate(graph.top.inputs)}
    _flow_block(graph.top, origin, edges)
    for k, atom in enumerate(graph.top.outputs):
        if isinstance(atom, Value):
            edges.extend((o, ("out", k), atom) for o in origin.get(atom.id, ()))
    return edges


def _flow_block(block: Block, origin: dict[int, tuple[Key, ...]], edges: list[tuple[Key, Key, Value]]) -> None:
    for node in block.nodes:
        if node.blocks:
            _flow_region(node, origin, edges)
            continue
        for atom in node.inputs:
            if isinstance(atom, Value):
                edges.extend((o, node.id, atom) for o in origin.get(atom.id, ()))
        for value in node.outputs:
            origin[value.id] = (node.id,)


def _flow_region(node: Node, origin: dict[int, tuple[Key, ...]], edges: list[tuple[Key, Key, Value]]) -> None:
    results: list[set[Key]] = [set() for _ in node.outputs]
    taken = max(len(b.inputs) for b in node.blocks)
    for block in node.blocks:
        # Operands line up with a block's inputs from the right: what comes before is the branch index, or the
        # constants of a while loop's other block.
        operands = node.inputs[max(0, len(node.inputs) - len(block.inputs)) :]
        for inner, outer in zip(block.inputs, operands, strict=False):
            origin[inner.id] = origin.get(outer.id, ()) if isinstance(outer, Value) else ()
        _flow_block(block, origin, edges)
        if len(block.outputs) == len(node.outputs):
            for result, atom in zip(results, block.outputs, strict=True):
                result.update(origin.get(atom.id, ()) if isinstance(atom, Value) else ())
    for atom in node.inputs[: max(0, len(node.inputs) - taken)]:
        if isinstance(atom, Value):
            edges.extend((o, node.id, atom) for o in origin.get(atom.id, ()))
    for value, result in zip(node.outputs, results, strict=True):
        origin[value.id] = tuple(sorted(result, key=str)) or (node.id,)
