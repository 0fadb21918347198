"""The canonical form of each primitive: a table primitive -> rule. An unknown primitive becomes an opaque node.

Each rule takes the view, the raw node and the Refs of its inputs, and returns one Ref per output. Values are preserved in
real arithmetic; this layer ignores rounding and gradients (certification checks both on the raw nodes).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ..dtypes import is_float
from ..jax_compat import has_side_effects, rule_functions, scan_counts
from ..primitives import BINARY, COMMUTATIVE, UNARY, having
from ..program.ir import Atom, Block, Node, Value
from ..program.literals import scalar_result
from ..program.scopes import defined_in_jax, is_jax_file
from .algebra import aligned, compose, elementwise, gives_float, monomial, placed, reduced, total
from .concatenated import concatenate, reduced_by_parts, sliced, split, unstacked
from .einsum import convolution, dot, split_rows
from .fused_nodes import fused
from .nodes import Coef, Operand, Ref, node_axes, nonunit, tidy
from .regroup import regrouped

if TYPE_CHECKING:
    from .view import CanonicalView

CanonicalRule: TypeAlias = "Callable[[CanonicalView, Node, list[Ref]], list[Ref]]"

TRANSPARENT = having("copy", "variance") | {"device_put"}
_NUMBERS: dict[str, type[Any]] = {"b": bool, "i": int, "u": int}  # kind of a dtype -> what a number of it is in Python
_PLACES = having("layout")  # their own rules keep the shape


def apply_rule(view: CanonicalView, node: Node, ins: list[Ref]) -> list[Ref]:
    """The Refs of a node's outputs."""
    if not node.outputs:
        return []
    folded = _fold(view, node, ins)
    if folded is not None:
        return [folded]
    rule = CANONICAL_RULES.get(node.primitive)
    if rule is not None:
        return rule(view, node, ins)
    return fused(view, node, ins) or view.opaque(node, ins)


def _fold(view: CanonicalView, node: Node, ins: list[Ref]) -> Ref | None:
    """Arithmetic on literals, in the program's own dtypes."""
    if not ins or not all(view.is_literal(r) for r in ins) or node.primitive in _PLACES:
        return None
    out = node.outputs[0]
    operands = [(r.coef, a.dtype) for r, a in zip(ins, node.inputs, strict=True)]
    if any(jnp.issubdtype(d, jax.dtypes.extended) for _, d in (*operands, (0, out.dtype))):
        return None  # PRNG keys
    value = scalar_result(node.primitive, node.params, operands, out.dtype)
    if value is None:
        return None
    return view.literal(_NUMBERS.get(value.dtype.kind, float)(value), out.shape)


# -- the rules --------------------------------------------------------------------------------------------------------


def _same(view: CanonicalView, node: Node, ins: list[Ref]) -> list[Ref]:
    return list(ins[: len(node.outputs)])


def _reshard(view: CanonicalView, node: Node, ins: list[Ref]) -> list[Ref]:
    """The identity if it names no mesh: JAX writes one into the derivative, traced on no mesh, of a program that was traced on one."""
    return [ins[0]] if node.params["dst_sharding"].mesh.empty else view.opaque(node, ins)


def _stop_gradient(view: CanonicalView, node: Node, ins: list[Ref]) -> list[Ref]:
    """Transparent only on the maximum that softmax subtracts (of a row, with or without one more logit), whose gradient cancels; elsewhere
    it changes gradients."""
    operand = view.nodes[ins[0].nid]
    if operand.op == "reduce_max" or (
        operand.op == "max" and any(view.nodes[o.nid].op == "reduce_max" for o in operand.operands)
    ):
        return [ins[0]]
    return [_unary_ref(view, "stop_gradient", node, ins[0])]


def _convert(view: CanonicalView, node: Node, ins: list[Ref]) -> list[Ref]:
    src, dst = node.inputs[0].dtype, node.outputs[0].dtype
    if (is_float(src) and is_float(dst)) or src == dst:
        return [ins[0]]
    name = "float" if is_float(dst) else np.dtype(dst).name
    sizes = nonunit(node.outputs[0].shape)
    return [elementwise(view, "cast", name, [aligned(node, 0, ins[0])], sizes)]


def _reduce_precision(view: CanonicalView, node: Node, ins: list[Ref]) -> list[Ref]:
    """The identity if it keeps all bits of its dtype, as remat marks the values it saves."""
    kept = jnp.finfo(node.outputs[0].dtype)
    if node.params["exponent_bits"] >= kept.nexp and node.params["mantissa_bits"] >= kept.nmant:
        return [ins[0]]
    return view.opaque(node, ins)


def _broadcast(view: CanonicalView, node: Node, ins: list[Ref]) -> list[Ref]:
    shape, in_shape = node.outputs[0].shape, node.inputs[0].shape
    full: list[int | None] = [None] * len(shape)
    dims = iter(ins[0].dims)
    for d, s in zip(node.params["broadcast_dimensions"], in_shape, strict=True):
        if s != 1:
            full[int(d)] = next(dims)
    new = tuple(f if f is not None else ~s for f, s in zip(full, shape, strict=True) if s != 1)
    return [Ref(ins[0].coef, ins[0].nid, new)]


def _transpose(view: CanonicalView, node: Node, ins: list[Ref]) -> list[Ref]:
    in_shape = node.inputs[0].shape
    dims = iter(ins[0].dims)
    full = [next(dims) if s != 1 else None for s in in_shape]
    new = [full[int(p)] for p in node.params["permutation"]]
    return [Ref(ins[0].coef, ins[0].nid, tuple(d for d in new if d is not None))]


def _reshape(view: CanonicalView, node: Node, ins: list[Ref]) -> list[Ref]:
    ref, sizes, whole = ins[0], nonunit(node.outputs[0].shape), node.inputs[0].shape
    order = node.params["dimensions"] if node.primitive == "reshape" else None
    if order is not None:  # it transposes first: jax.vmap of a convolution does
        axes = iter(ref.dims)
        full = [next(axes) if s != 1 else None for s in whole]
        ref = Ref(ref.coef, ref.nid, tuple(d for i in order if (d := full[int(i)]) is not None))
        whole = tuple(whole[int(i)] for i in order)
    old = nonunit(whole)
    return [ref if sizes == old else _reshaped(view, ref, sizes)]


def _reshaped(view: CanonicalView, ref: Ref, sizes: tuple[int, ...]) -> Ref:
    """A Ref in another shape, of these sizes without those that are 1."""
    if view.is_literal(ref):
        return view.literal(ref.coef, sizes)
    inner = view.nodes[ref.nid]
    if inner.op == "reshape" and ref.dims == tuple(range(len(inner.shape))):
        edge = inner.operands[0]
        base = Ref(ref.coef * edge.coef, edge.nid, edge.axes)
        if view.dim_sizes(base) == sizes:
            return base
        ref = base
    if inner.op == "dot" and (split := split_rows(view, ref, sizes)) is not None:
        return split
    groups = reshape_groups(view.dim_sizes(ref), sizes)
    if (known := regrouped(view, ref, groups, sizes)) is not None:
        return known
    nid = view.node("reshape", groups, (Operand(1.0, ref.nid, ref.dims),), sizes)
    return Ref(ref.coef, nid, tuple(range(len(sizes))))


def _tile(view: CanonicalView, node: Node, ins: list[Ref]) -> list[Ref]:
    """A broadcast over an axis of copies before each axis, and a reshape that merges the two."""
    dims = iter(ins[0].dims)
    copied: list[int] = []
    for size, count in zip(node.inputs[0].shape, map(int, node.params["reps"]), strict=True):
        copied += [~count] if count != 1 else []
        copied += [next(dims)] if size != 1 else []
    ref, sizes = Ref(ins[0].coef, ins[0].nid, tuple(copied)), nonunit(node.outputs[0].shape)
    return [ref if view.dim_sizes(ref) == sizes else _reshaped(view, ref, sizes)]


def reshape_groups(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The least groups of neighbouring axes of the same number of entries: (axes before, axes after) for each."""
    if 0 in before:  # nothing is in it, whatever its other axes
        return ((len(before), len(after)),)
    groups: list[tuple[int, int]] = []
    i = j = 0
    while i < len(before) and j < len(after):
        start, old, new = (i, j), before[i], after[j]
        i, j = i + 1, j + 1
        while old != new:
            if (old < new and i < len(before)) or j == len(after):
                old, i = old * before[i], i + 1
            else:
                new, j = new * after[j], j + 1
        groups.append((i - start[0], j - start[1]))
    return tuple(groups)


def _rev(view: CanonicalView, node: Node, ins: list[Ref]) -> list[Ref]:
    """The identity along unit axes: the gradient of a convolution reverses its window."""
    turned = any(node.inputs[0].shape[int(d)] != 1 for d in node.params["dimensions"])
    return view.opaque(node, ins) if turned else [ins[0]]


def _add(sign: int) -> CanonicalRule:
    def rule(view: CanonicalView, node: Node, ins: list[Ref]) -> list[Ref]:
        sizes = nonunit(node.outputs[0].shape)
        if not gives_float(node):
            op = "iadd" if sign == 1 else "isub"
            return [elementwise(view, op, (), [aligned(node, i, r) for i, r in enumerate(ins)], sizes, sign == 1)]
        return [total(view, [(*aligned(node, i, r), (1, sign)[i]) for i, r in enumerate(ins)], sizes)]

    return rule


def _mul(exponents: tuple[float, ...]) -> CanonicalRule:
    def rule(view: CanonicalView, node: Node, ins: list[Ref]) -> list[Ref]:
        sizes = nonunit(node.outputs[0].shape)
        if not gives_float(node):
            op = "imul" if node.primitive == "mul" else node.primitive
            edges = [aligned(node, i, r) for i, r in enumerate(ins)]
            return [elementwise(view, op, str(node.params.get("y", "")), edges, sizes, op == "imul")]
        return [monomial(view, [(*aligned(node, i, r), exponents[i]) for i, r in enumerate(ins)], sizes)]

    return rule


def _integer_pow(view: CanonicalView, node: Node, ins: list[Ref]) -> list[Ref]:
    return _mul((float(node.params["y"]),))(view, node, ins)


def _pow(view: CanonicalView, node: Node, ins: list[Ref]) -> list[Ref]:
    """A power with a literal exponent is a monomial, as the square and the square root are."""
    if gives_float(node) and view.is_literal(ins[1]):
        return _mul((float(ins[1].coef),))(view, node, ins[:1])
    return _binary(view, node, ins)


def _neg(view: CanonicalView, node: Node, ins: list[Ref]) -> list[Ref]:
    if gives_float(node):
        return [Ref(-ins[0].coef, ins[0].nid, ins[0].dims)]
    return [_unary_ref(view, "neg", node, ins[0])]


def _unary_ref(view: CanonicalView, op: str, node: Node, ref: Ref) -> Ref:
    return elementwise(view, op, (), [aligned(node, 0, ref)], nonunit(node.outputs[0].shape))


def _unary(view: CanonicalView, node: Node, ins: list[Ref]) -> list[Ref]:
    return [_unary_ref(view, node.primitive, node, ins[0])]


_NEUTRAL: dict[str, Coef] = {"max": -math.inf, "min": math.inf, "and": True, "or": False}


def _is_number(coef: Coef, number: Coef) -> bool:
    """Whether both are the same number; a boolean does not count: `and` and `or` of integers are bitwise."""
    return coef == number and isinstance(coef, bool) == isinstance(number, bool)


def _binary(view: CanonicalView, node: Node, ins: list[Ref]) -> list[Ref]:
    op, order = node.primitive, [0, 1]
    sizes = nonunit(node.outputs[0].shape)
    edges = [aligned(node, i, ins[i]) for i in order]
    if op in _NEUTRAL:
        for i in order:
            if view.is_literal(ins[i]) and _is_number(ins[i].coef, _NEUTRAL[op]):
                return [placed(ins[1 - i], edges[1 - i][1], sizes)]
    if op in ("lt", "le"):
        op, edges = {"lt": "gt", "le": "ge"}[op], edges[::-1]
    return [elementwise(view, op, (), edges, sizes, op in COMMUTATIVE)]


def _select(view: CanonicalView, node: Node, ins: list[Ref]) -> list[Ref]:
    if len(ins) != 3:
        return view.opaque(node, ins)
    sizes = nonunit(node.outputs[0].shape)
    if view.is_literal(ins[0]):
        pick = 1 + int(ins[0].coef)
        return [placed(ins[pick], aligned(node, pick, ins[pick])[1], sizes)]
    edges = [aligned(node, i, r) for i, r in enumerate(ins)]
    which = view.nodes[ins[0].nid]
    if which.op == "not":  # the other way round
        (inner,) = which.operands
        edges = [(Ref(inner.coef, inner.nid, ()), compose(inner.axes, edges[0][1])), edges[2], edges[1]]
    return [elementwise(view, "select", (), edges, sizes)]


def _reduce(view: CanonicalView, node: Node, ins: list[Ref]) -> list[Ref]:
    ref, op = ins[0], node.primitive
    axes = {int(a) for a in node.params["axes"]}
    places = [d for d, s in enumerate(node.inputs[0].shape) if s != 1]
    gone = [d in axes for d in places]
    return [reduced(view, op, ref, gone, gives_float(node), lambda part, axis: _reduced_by_law(view, op, part, axis))]


def _reduced_by_law(view: CanonicalView, op: str, whole: Ref, axis: int) -> Ref | None:
    """The reduction of a node over one axis, with its other axes, if it reduces a concatenation by parts, or is 0: the maximum of a row
    minus its maximum. `whole` has no dims.
    """

    def reduce(part: Ref, axis: int) -> Ref:
        return reduced(view, op, part, [d == axis for d in range(len(part.dims))], by_law=by_law)

    def by_law(part: Ref, axis: int) -> Ref | None:
        return _reduced_by_law(view, op, part, axis)

    node = view.nodes[whole.nid]
    if op == "reduce_max" and node.op == "sum" and len(node.operands) == 2:
        for term, other in itertools.permutations(node.operands):
            below = view.nodes[other.nid].op in ("reduce_max", "max") and axis not in other.axes
            if below and _is_its_maximum(view, whole, axis, term, other, reduce):
                return view.literal(0.0, [n for a, n in enumerate(node.shape) if a != axis])
    return reduced_by_parts(view, op, whole, axis, reduce)


def _is_its_maximum(
    view: CanonicalView, whole: Ref, axis: int, term: Operand, other: Operand, reduce: Callable[[Ref, int], Ref]
) -> bool:
    """Whether, in a sum of two with all axes of the first, the second is minus the first's maximum over an axis."""
    every = range(len(view.nodes[whole.nid].shape))
    own = {slot: a for a, slot in enumerate(term.axes)}
    if set(own) != set(every):
        return False
    top = reduce(Ref(whole.coef * term.coef, term.nid, tuple(own[d] for d in every)), axis)
    if top.nid != other.nid or tidy(top.coef) != tidy(-whole.coef * other.coef):
        return False
    return node_axes(top) == compose(other.axes, tuple(d for d in every if d != axis))


def _iota(view: CanonicalView, node: Node, ins: list[Ref]) -> list[Ref]:
    shape, axis = node.outputs[0].shape, int(node.params["dimension"])
    kind = "float" if gives_float(node) else np.dtype(node.outputs[0].dtype).name
    nid = view.node("iota", kind, (), [shape[axis]] if shape[axis] != 1 else [])
    if shape[axis] == 1:
        return [view.literal(0.0 if kind == "float" else 0, shape)]
    return [Ref(1.0, nid, tuple(0 if d == axis else ~s for d, s in enumerate(shape) if s != 1))]


def _scatter_add(view: CanonicalView, node: Node, ins: list[Ref]) -> list[Ref]:
    """Without the addition, which JAX writes into its params as a program, another one each time."""
    given = tuple(sorted((k, v) for k, v in node.params.items() if k not in ("update_jaxpr", "update_consts")))
    shapes, sizes = tuple(a.shape for a in node.inputs), nonunit(node.outputs[0].shape)
    operands = tuple(Operand(tidy(r.coef), r.nid, r.dims) for r in ins)
    return [Ref(1.0, view.node("scatter-add", (shapes, given), operands, sizes), tuple(range(len(sizes))))]


def _custom_jvp(view: CanonicalView, node: Node, ins: list[Ref]) -> list[Ref]:
    """JAX's own activations are wrapped in custom_jvp: they are inlined. A user's rule is kept whole, because its gradient is theirs."""
    if not is_jax_rule(node):
        return view.opaque(node, ins)
    body = node.blocks[0]
    for value, ref in zip(body.inputs, ins, strict=True):
        view.bind_alias(value, ref)
    for value, const in body.consts:
        view.bind_alias(value, view.constant(value, const, body))
    for inner in body.nodes:
        for value, ref in zip(
            inner.outputs, apply_rule(view, inner, [view.read(a) for a in inner.inputs]), strict=True
        ):
            view.bind_alias(value, ref)
    return [view.read(a) for a in body.outputs]


def inline(view: CanonicalView, program: Block, ins: list[Ref]) -> list[Ref]:
    """The Refs of the results of another program over values of this view; that program's own values get none here."""
    env = {v.id: ref for v, ref in zip(program.inputs, ins, strict=True)}
    env.update((v.id, view.constant(v, const, program)) for v, const in program.consts)

    def read(atom: Atom) -> Ref:
        return env[atom.id] if isinstance(atom, Value) else view.read(atom)

    for node in program.nodes:
        refs = _foreign(view, node, [read(a) for a in node.inputs])
        env.update((v.id, ref) for v, ref in zip(node.outputs, refs, strict=True))
    return [read(a) for a in program.outputs]


def is_jax_rule(node: Node) -> bool:
    """True for a custom_jvp_call whose function and rule are JAX's own (jax.nn.relu and the like).

    A user may give a function of JAX's a rule of their own, and `defjvps` wraps it in a function of JAX's.
    """
    if node.primitive != "custom_jvp_call" or not node.blocks or not defined_in_jax(node.blocks[0].jaxpr):
        return False
    functions = rule_functions(node.params.get("jvp_jaxpr_fun"))
    return bool(functions) and all(is_jax_file(f.__code__.co_filename) for f in functions)


def _foreign(view: CanonicalView, node: Node, ins: list[Ref]) -> list[Ref]:
    """As `apply_rule`, for a node of another program, whose ids have a different meaning in the view."""
    if is_jax_rule(node):
        return inline(view, node.blocks[0], ins)
    if (node.blocks and node.primitive != "scatter-add") or has_side_effects(node.eqn):
        return [view.unique_leaf(node.primitive, v.shape) for v in node.outputs]
    return apply_rule(view, node, ins)


_GIVEN_WHOLE = having("remat", "mesh", "jit")


def passed_whole(node: Node) -> int:
    """The number of leading operands of a region that its body reads unchanged, and the same in every iteration."""
    if node.primitive == "scan":
        return scan_counts(node.params)[0]
    return len(node.inputs) if node.primitive in _GIVEN_WHOLE else 0


CANONICAL_RULES: dict[str, CanonicalRule] = {
    **dict.fromkeys(TRANSPARENT, _same),
    **dict.fromkeys(UNARY, _unary),
    **dict.fromkeys(BINARY | {"lt", "le"}, _binary),
    **dict.fromkeys(having("row reduction"), _reduce),
    **dict.fromkeys(having("shape"), _reshape),
    "concatenate": concatenate,
    **dict.fromkeys(having("slice"), sliced),
    "split": split,
    "unstack": unstacked,
    "reshard": _reshard,
    "stop_gradient": _stop_gradient,
    "convert_element_type": _convert,
    "reduce_precision": _reduce_precision,
    "broadcast_in_dim": _broadcast,
    "transpose": _transpose,
    "add": _add(1),
    "add_any": _add(1),
    "sub": _add(-1),
    "mul": _mul((1.0, 1.0)),
    "div": _mul((1.0, -1.0)),
    "square": _mul((2.0,)),
    "sqrt": _mul((0.5,)),
    "rsqrt": _mul((-0.5,)),
    "integer_pow": _integer_pow,
    "pow": _pow,
    "neg": _neg,
    "select_n": _select,
    "iota": _iota,
    "dot_general": dot,
    "conv_general_dilated": convolution,
    "rev": _rev,
    "tile": _tile,
    "scatter-add": _scatter_add,
    "custom_jvp_call": _custom_jvp,
}
