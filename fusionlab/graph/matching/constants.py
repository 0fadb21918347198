"""Values of a program that depend on no input: which they are, and what they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..canonical.nodes import ONE, CNode
from ..canonical.rules import passed_whole
from ..canonical.view import CanonicalView
from ..interpret.constants import computed
from ..program.captured import read, readable
from ..program.equations import slice_jaxpr
from ..program.ir import Node, Value, values_in
from ..program.signature import Memo, node_signature

_LIMIT = 1 << 26  # elements that are computed; a mask of 8192 x 8192 still fits
# Views of what they read, in numpy too: a mask is often broadcast to all the scores.
_COMPUTES_NOTHING = frozenset("broadcast_in_dim transpose squeeze expand_dims slice".split())


def is_constant(view: CanonicalView, value: Value) -> bool:
    """Whether a value is computed only from literals and iotas: such values are shared freely and never claimed."""
    ref = view.ref[value.id]
    return ref.nid == ONE or _is_constant_node(view, ref.nid, {})


def _is_constant_node(view: CanonicalView, nid: int, known: dict[int, bool]) -> bool:
    stack = [nid]
    while stack:
        top = stack[-1]
        node = view.nodes[top]
        if top in known:
            stack.pop()
        elif (alone := _constant_alone(node)) is not None:
            known[top] = alone
        elif pending := [o.nid for o in node.operands if o.nid not in known]:
            if any(known.get(o.nid) is False for o in node.operands):
                known[top] = False
            else:
                stack.extend(pending)
        else:
            known[top] = all(known[o.nid] for o in node.operands)
    return known[nid]


def _constant_alone(node: CNode) -> bool | None:
    """Whether a canonical node is a constant regardless of its operands; None if they matter."""
    if node.op in ("one", "iota"):
        return True
    return False if not node.operands or node.op == "dot" else None


def constant_array(view: CanonicalView, value: Value, memo: Memo, outside: bool = False) -> np.ndarray | None:
    """The value of a raw value that depends only on literals, iotas and concrete captured arrays; else None.

    Computed in the program's own dtypes: positions in bfloat16 merge 256 and 257, and a mask made of them is not
    the one its formula suggests. What is broadcast stays a view of what was computed (`distinct`). `memo` caches the
    result, because layers repeat their masks. With `outside`, operands of a scan or a remat may be such constants of the
    enclosing block, for classification only: they cannot be computed inside.
    """
    consts = {v.id: c for v, c in view.block.consts}
    makers = _makers(view, value, memo, consts, outside)
    if makers is None:
        return None
    if not makers.nodes and value.id not in view.known_inputs:
        if makers.given:
            return makers.given[value.id][1]
        return read(consts[value.id]) if value.id in consts and math.prod(value.shape) <= _LIMIT else None
    ordered = [makers.nodes[i] for i in sorted(makers.nodes)]
    key = _key(view, ordered, value, consts, makers.given)
    return memo.once(key, lambda: _compute(view, ordered, value, tuple(makers.given.values())))


def distinct(array: np.ndarray) -> np.ndarray:
    """One entry along each axis along which a broadcast repeats an array: every value of it, and no more memory than it has."""
    return array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)]


def _is_small(closed: Any) -> bool:
    """Whether no equation of a closed jaxpr computes, or computes from, more elements than the limit."""
    computing = [e for e in closed.jaxpr.eqns if e.primitive.name not in _COMPUTES_NOTHING]
    return all(math.prod(a.aval.shape) <= _LIMIT for e in computing for a in (*e.invars, *e.outvars))


def _key(
    view: CanonicalView,
    nodes: Sequence[Node],
    value: Value,
    consts: Mapping[int, Any],
    given: Mapping[int, tuple[Value, np.ndarray]],
) -> Any:
    """A key, equal for constants that are computed in the same way."""
    number: dict[int, Any] = {i: ("known", c) for i, c in view.known_inputs.items()}
    number.update((i, ("const", id(c))) for i, c in consts.items())
    number.update(
        (i, ("given", a.shape, str(a.dtype), distinct(a).shape, distinct(a).tobytes())) for i, (_, a) in given.items()
    )
    return "constant", tuple(node_signature(n, number) for n in nodes), number[value.id]


@dataclass(frozen=True)
class _Makers:
    """The makers of a constant: nodes by id, and inputs of the block with their values in the enclosing block, by value id."""

    nodes: Mapping[int, Node]
    given: Mapping[int, tuple[Value, np.ndarray]]


def _makers(view: CanonicalView, value: Value, memo: Memo, consts: Mapping[int, Any], outside: bool) -> _Makers | None:
    """The makers of a value that is computed only from constants; None for any other value."""
    given: dict[int, tuple[Value, np.ndarray]] = {}
    nodes: dict[int, Node] = {}
    stack = [value]
    while stack:
        v = stack.pop()
        if v.id in view.known_inputs:
            continue
        node = view.block.producer.get(v.id)
        if node is None and not readable(consts.get(v.id)):
            array = _from_outside(view, v, memo) if outside else None
            if array is None:
                return None
            given[v.id] = v, array
        elif node is not None and node.id not in nodes:
            if not _runs_alone(node):
                return None
            nodes[node.id] = node
            stack += values_in(node.inputs)
    return _Makers(nodes, given)


def _runs_alone(node: Node) -> bool:
    """Whether a node may be computed apart from its program."""
    if node.eqn.effects or (node.blocks and node.primitive != "custom_jvp_call"):
        return False
    # JAX: a pvary names a mesh axis, and does not run outside its shard_map.
    return not any(n.primitive == "pvary" for b in node.blocks for n in b.nodes)


def _from_outside(view: CanonicalView, value: Value, memo: Memo) -> np.ndarray | None:
    """The constant of the enclosing block that a block's input is, if any."""
    if view.outer is None:
        return None
    outer, node = view.outer
    index = next((i for i, v in enumerate(view.block.inputs[: passed_whole(node)]) if v.id == value.id), None)
    atom = None if index is None else node.inputs[index]
    if not isinstance(atom, Value) or atom.shape != value.shape:
        return None
    return constant_array(outer, atom, memo, outside=True)


def _compute(
    view: CanonicalView, nodes: list[Node], value: Value, given: tuple[tuple[Value, np.ndarray], ...]
) -> np.ndarray | None:
    inputs, arrays = tuple(v for v, _ in given), [a for _, a in given]
    closed = slice_jaxpr(view.block, nodes, inputs, value, view.known_inputs, constant=True)
    found = computed(closed, arrays) if _is_small(closed) else None
    # What views show of a captured array may be as large as that is.
    return found if found is not None and distinct(found).size <= _LIMIT else None
