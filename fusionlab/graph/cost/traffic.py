"""The bytes that nodes move, each by itself or several as one kernel."""

from __future__ import annotations

from collections.abc import Mapping

from ..primitives import having
from ..program.ir import Block, Node, Value, values_in
from .rules import FREE_VIEWS, entries_of

# Blocks that run once for each entry, on numbers that never reach memory: what a reduction or a scatter combines with.
COMBINES = frozenset(
    "reduce reduce_window select_and_scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max scatter_add scatter_mul".split()
)
ONCE = having("remat", "rule", "jit")
_READS_WHAT_IT_GIVES = having("slice") | {"gather"}


def is_region(node: Node) -> bool:
    """Whether a node consists only of its contents."""
    return node.primitive in ONCE or node.primitive in ("scan", "while", "cond", "shard_map", "custom_linear_solve")


def is_view(node: Node) -> bool:
    """Whether a node's results are its operands' entries in the same order, so that nothing has to move."""
    if node.primitive in FREE_VIEWS:
        return True
    if node.primitive == "broadcast_in_dim":
        return bool(node.inputs) and entries_of(node.inputs[0]) == entries_of(node.outputs[0])
    if node.primitive == "transpose":
        shape = node.inputs[0].shape
        kept = [int(i) for i in node.params["permutation"] if shape[int(i)] != 1]
        return kept == sorted(kept)
    return False


def _operands(node: Node) -> dict[int, int]:
    """Value id -> bytes of each value that a node is given."""
    return {v.id: v.nbytes for v in values_in(node.inputs)}


def reads(node: Node) -> dict[int, int]:
    """Value id -> bytes a node reads of it by itself; each value once, literals not at all."""
    if is_view(node) or is_region(node):
        return {}
    found = _operands(node)
    first = node.inputs[0] if node.inputs else None
    if not isinstance(first, Value):
        return found
    if node.primitive in _READS_WHAT_IT_GIVES:
        found[first.id] = min(first.nbytes, sum(v.nbytes for v in node.outputs))
    elif node.primitive == "dynamic_update_slice":
        found[first.id] = 0
    elif node.primitive.startswith("scatter"):
        found[first.id] = min(first.nbytes, _updates(node) if node.primitive != "scatter" else 0)
    return found


def writes(node: Node) -> dict[int, int]:
    """Value id -> bytes a node writes of it by itself."""
    if is_view(node) or is_region(node):
        return {}
    found = {v.id: v.nbytes for v in node.outputs}
    if node.primitive == "dynamic_update_slice" or node.primitive.startswith("scatter"):
        (result,) = node.outputs
        found[result.id] = min(result.nbytes, _updates(node))
    return found


def _updates(node: Node) -> int:
    """Bytes of the entries written into an array in place."""
    update = node.inputs[1 if node.primitive == "dynamic_update_slice" else 2]
    return entries_of(update) * int(getattr(update.dtype, "itemsize", 0))


def base_of(block: Block, value: Value) -> Value:
    """The value that `value` is a view of, or itself."""
    while (node := block.producer.get(value.id)) is not None and is_view(node):
        sources = values_in(node.inputs)
        if node.primitive == "optimization_barrier" and len(node.inputs) == len(node.outputs):
            sources = values_in(a for a, v in zip(node.inputs, node.outputs, strict=True) if v is value)
        if len(sources) != 1:
            break
        value = sources[0]
    return value


def ideal_traffic(block: Block, nodes: Mapping[int, Node]) -> tuple[int, int]:
    """Bytes read and written by nodes of a block (by id) that run as one kernel, in one trip.

    Values from outside are read once, and no more than the nodes read individually; values read outside, or returned, are written.
    Regions count with their operands and results.
    """
    return _read_from_outside(block, nodes), sum(_written_outside(block, node, nodes) for node in nodes.values())


def _taken(node: Node) -> dict[int, int]:
    return _operands(node) if is_region(node) else reads(node)


def _read_from_outside(block: Block, nodes: Mapping[int, Node]) -> int:
    """Bytes that nodes read of values from outside, for a value and its views together no more than its size."""
    own = {v.id for n in nodes.values() for v in n.outputs}
    read: dict[int, int] = {}
    whole: dict[int, int] = {}
    for node in nodes.values():
        taken = _taken(node)
        for a in {v.id: v for v in values_in(node.inputs)}.values():
            base = base_of(block, a)
            if base.id not in own and a.id not in own and a.id in taken:
                read[base.id] = read.get(base.id, 0) + taken[a.id]
                whole[base.id] = base.nbytes
    return sum(min(n, whole[i]) for i, n in read.items())


def _written_outside(block: Block, node: Node, nodes: Mapping[int, Node]) -> int:
    """Bytes that a node writes for readers other than `nodes`."""
    given = {v.id: v.nbytes for v in node.outputs} if is_region(node) else writes(node)
    return sum(n for i, n in given.items() if _read_outside(block, i, nodes))


def _read_outside(block: Block, value: int, nodes: Mapping[int, Node]) -> bool:
    """Whether a value, or a view of it, is read by a node that is not among `nodes`, or returned."""
    stack = [value]
    while stack:
        vid = stack.pop()
        if vid in block.returned:
            return True
        for user in block.users.get(vid, ()):
            if is_view(user):
                stack += [v.id for v in user.outputs]
            elif user.id not in nodes:
                return True
    return False
