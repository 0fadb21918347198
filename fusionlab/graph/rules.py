"""How each primitive enters the canonical view: a table primitive -> rule. An unknown primitive is an opaque node.

Each rule takes the view, the raw node and the Refs of its inputs, and returns one Ref per output. Values are preserved in
real arithmetic; rounding and gradients are not this layer's business (certification checks both on the raw nodes).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .canonical import ONE, Coef, Operand, Ref, View, nonunit, tidy
from .compat import rule_functions, scan_counts
from .evaluate import is_float as is_floating
from .ir import Node
from .literals import fold
from .scopes import defined_in_jax, is_jax_file

Rule = Callable[[View, Node, list[Ref]], list[Ref]]
Aligned = tuple[Ref, tuple[int | None, ...]]  # a Ref, and for each non-unit output axis its node axis or None

UNARY = frozenset(
    "tanh exp exp2 expm1 log log1p erf erfc erf_inv logistic abs sign not is_finite sin cos tan floor ceil round cbrt sinh cosh "
    "asinh acosh atanh asin acos atan one_minus_square population_count".split()
)
BINARY = frozenset("max min eq ne gt ge and or xor rem atan2 pow nextafter shift_left shift_right_logical".split())
COMMUTATIVE = frozenset("max min eq ne and or xor iadd imul".split())
TRANSPARENT = frozenset("copy copy_p pvary device_put".split())
_PLACES = frozenset("broadcast_in_dim reshape squeeze expand_dims transpose".split())  # their own rules keep the shape


def apply_rule(view: View, node: Node, ins: list[Ref]) -> list[Ref]:
    """The Refs of a node's outputs."""
    if not node.outputs:
        return []
    folded = _fold(view, node, ins)
    if folded is not None:
        return [folded]
    rule = RULES.get(node.primitive)
    return rule(view, node, ins) if rule else view.opaque(node, ins)


# -- helpers ----------------------------------------------------------------------------------------------------------


def is_float(node: Node) -> bool:
    return is_floating(node.outputs[0].dtype)


def aligned(node: Node, i: int, ref: Ref) -> Aligned:
    """Input i of an elementwise node against the output's non-unit axes (same rank, or a scalar)."""
    in_shape, out_shape = node.inputs[i].shape, node.outputs[0].shape
    dims = iter(ref.dims)
    full: list[int | None] = [next(dims) if s != 1 else None for s in in_shape]
    full = [None] * (len(out_shape) - len(full)) + full
    return ref, tuple(f if f is not None and f >= 0 else None for f, s in zip(full, out_shape, strict=True) if s != 1)


def elementwise(
    view: View, op: str, params: Any, operands: Sequence[Aligned], sizes: Sequence[int], commutative: bool = False
) -> Ref:
    """A node whose operands meet axis by axis; its own axes are the ones any operand has, in the operands' order."""
    items = list(operands)
    order_params = params
    if commutative:
        order = sorted(range(len(items)), key=lambda i: (items[i][0].nid, str(items[i][0].coef), str(items[i][1])))
        items = [items[i] for i in order]
        if isinstance(params, tuple) and len(params) == len(order):
            order_params = tuple(params[i] for i in order)
    slots: dict[int, int] = {}
    for _, al in items:
        for _, d in sorted((a, d) for d, a in enumerate(al) if a is not None):
            slots.setdefault(d, len(slots))
    edges = []
    for ref, al in items:
        axes = [0] * len(view.nodes[ref.nid].shape)
        for d, a in enumerate(al):
            if a is not None:
                axes[a] = slots[d]
        edges.append(Operand(tidy(ref.coef), ref.nid, tuple(axes)))
    by_slot = sorted(slots, key=slots.__getitem__)
    nid = view.node(op, order_params, edges, [sizes[d] for d in by_slot])
    return Ref(1.0, nid, tuple(slots.get(d, ~s) for d, s in enumerate(sizes)))


def placed(ref: Ref, al: tuple[int | None, ...], sizes: Sequence[int]) -> Ref:
    """The same Ref seen at the output's shape (broadcast where it has no axis)."""
    return Ref(ref.coef, ref.nid, tuple(a if a is not None else ~s for a, s in zip(al, sizes, strict=True)))


def product(view: View, factors: Sequence[tuple[Ref, tuple[int | None, ...], float]], sizes: Sequence[int]) -> Ref:
    """A monomial: factors with exponents, flattened and merged; scalar factors go to the coefficient."""
    coef: Coef = 1.0
    flat: list[tuple[Ref, tuple[int | None, ...], float]] = []
    for ref, al, exponent in factors:
        power = _power(ref.coef, exponent)
        if power is None:  # cannot leave the edge (a root of a negative, a power of zero)
            flat.append((ref, al, exponent))
            continue
        if not math.isfinite(coef * power):
            flat.append((ref, al, exponent))
            continue
        coef *= power
        inner = view.nodes[ref.nid]
        if ref.nid == ONE:
            continue
        if inner.op == "prod" and float(exponent).is_integer():
            for edge, e in zip(inner.operands, inner.params, strict=True):
                flat.append((Ref(edge.coef, edge.nid, ()), _compose(edge.axes, al), e * exponent))
        else:
            flat.append((Ref(1.0, ref.nid, ref.dims), al, exponent))
    merged: dict[Any, float] = {}
    for ref, al, exponent in flat:
        key = (tidy(ref.coef), ref.nid, al)
        merged[key] = merged.get(key, 0) + exponent
    if any(e == 0 for e in merged.values()):  # x / x is 1 only where x is neither 0 nor NaN: keep it as it stands
        merged = {(tidy(r.coef), r.nid, al): e for r, al, e in flat}
    if not merged:
        return Ref(coef, ONE, tuple(~s for s in sizes))
    if len(merged) == 1:
        (c, nid, al), e = next(iter(merged.items()))
        if e == 1:
            return placed(Ref(coef * c, nid, ()), al, sizes)
    keys = list(merged)
    node = elementwise(
        view, "prod", tuple(tidy(merged[k]) for k in keys), [(Ref(k[0], k[1], ()), k[2]) for k in keys], sizes, True
    )
    return Ref(coef, node.nid, node.dims)


def _power(coef: Coef, exponent: float) -> float | None:
    if coef < 0 and not float(exponent).is_integer():
        return None
    if coef == 0 and exponent < 0:
        return None
    try:
        power = float(coef) ** exponent
    except OverflowError:
        return None
    return power if math.isfinite(power) or not math.isfinite(coef) else None


def _compose(axes: tuple[int, ...], al: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """Operand axes of an inner node, seen at the outer output: inner axis -> consumer slot -> output axis."""
    position = {slot: i for i, slot in enumerate(axes)}
    return tuple(position.get(a) if a is not None else None for a in al)


def total(view: View, terms: Sequence[tuple[Ref, tuple[int | None, ...], int]], sizes: Sequence[int]) -> Ref:
    """A sum with absolute coefficients on its edges and coefficient 1 outside (an outer factor would leak into context)."""
    merged: dict[Any, Coef] = {}
    for ref, al, sign in terms:
        key = (ref.nid, al)
        merged[key] = merged.get(key, 0) + sign * ref.coef
    if any(c == 0 for c in merged.values()):  # x - x is 0 only where x is finite: keep it as it stands
        edges = [(Ref(sign * ref.coef, ref.nid, ref.dims), al) for ref, al, sign in terms]
        return elementwise(view, "difference", (), edges, sizes)
    if len(merged) == 1:
        (nid, al), coef = next(iter(merged.items()))
        return placed(Ref(coef, nid, ()), al, sizes)
    return elementwise(view, "sum", (), [(Ref(c, nid, ()), al) for (nid, al), c in merged.items()], sizes, True)


def _fold(view: View, node: Node, ins: list[Ref]) -> Ref | None:
    """Arithmetic on literals, in the program's own dtypes."""
    if not ins or not all(view.is_literal(r) for r in ins) or node.primitive in _PLACES:
        return None
    out = node.outputs[0]
    operands = [(r.coef, a.dtype) for r, a in zip(ins, node.inputs, strict=True)]
    if any(jnp.issubdtype(d, jax.dtypes.extended) for _, d in (*operands, (0, out.dtype))):
        return None  # PRNG keys
    value = fold(node.primitive, node.params, operands, out.dtype)
    if value is None:
        return None
    kind = bool if value.dtype.kind == "b" else int if value.dtype.kind in "iu" else float
    return view.literal(kind(value), out.shape)


# -- the rules --------------------------------------------------------------------------------------------------------


def _same(view: View, node: Node, ins: list[Ref]) -> list[Ref]:
    return list(ins[: len(node.outputs)])


def _stop_gradient(view: View, node: Node, ins: list[Ref]) -> list[Ref]:
    """Transparent only on the maximum that softmax subtracts, whose gradient cancels; anywhere else it changes gradients."""
    if view.nodes[ins[0].nid].op == "reduce_max":
        return [ins[0]]
    return [_unary_ref(view, "stop_gradient", node, ins[0])]


def _convert(view: View, node: Node, ins: list[Ref]) -> list[Ref]:
    src, dst = node.inputs[0].dtype, node.outputs[0].dtype
    if (is_floating(src) and is_floating(dst)) or src == dst:
        return [ins[0]]
    name = "float" if is_floating(dst) else np.dtype(dst).name
    sizes = nonunit(node.outputs[0].shape)
    return [elementwise(view, "cast", name, [aligned(node, 0, ins[0])], sizes)]


def _broadcast(view: View, node: Node, ins: list[Ref]) -> list[Ref]:
    shape, in_shape = node.outputs[0].shape, node.inputs[0].shape
    full: list[int | None] = [None] * len(shape)
    dims = iter(ins[0].dims)
    for d, s in zip(node.params["broadcast_dimensions"], in_shape, strict=True):
        if s != 1:
            full[int(d)] = next(dims)
    new = tuple(f if f is not None else ~s for f, s in zip(full, shape, strict=True) if s != 1)
    return [Ref(ins[0].coef, ins[0].nid, new)]


def _transpose(view: View, node: Node, ins: list[Ref]) -> list[Ref]:
    in_shape = node.inputs[0].shape
    dims = iter(ins[0].dims)
    full = [next(dims) if s != 1 else None for s in in_shape]
    new = [full[int(p)] for p in node.params["permutation"]]
    return [Ref(ins[0].coef, ins[0].nid, tuple(d for d in new if d is not None))]


def _reshape(view: View, node: Node, ins: list[Ref]) -> list[Ref]:
    sizes, old = nonunit(node.outputs[0].shape), nonunit(node.inputs[0].shape)
    ref = ins[0]
    if sizes == old or (0 in sizes and sizes == old):
        return [ref]
    if view.is_literal(ref):
        return [view.literal(ref.coef, node.outputs[0].shape)]
    inner = view.nodes[ref.nid]
    if inner.op == "reshape" and ref.dims == tuple(range(len(inner.shape))):
        edge = inner.operands[0]
        base = Ref(ref.coef * edge.coef, edge.nid, edge.axes)
        if view.dim_sizes(base) == sizes:
            return [base]
        ref = base
    nid = view.node("reshape", (), (Operand(1.0, ref.nid, ref.dims),), sizes)
    return [Ref(ref.coef, nid, tuple(range(len(sizes))))]


def _add(sign: int) -> Rule:
    def rule(view: View, node: Node, ins: list[Ref]) -> list[Ref]:
        sizes = nonunit(node.outputs[0].shape)
        if not is_float(node):
            op = "iadd" if sign == 1 else "isub"
            return [elementwise(view, op, (), [aligned(node, i, r) for i, r in enumerate(ins)], sizes, sign == 1)]
        return [total(view, [(*aligned(node, i, r), (1, sign)[i]) for i, r in enumerate(ins)], sizes)]

    return rule


def _mul(exponents: tuple[float, ...]) -> Rule:
    def rule(view: View, node: Node, ins: list[Ref]) -> list[Ref]:
        sizes = nonunit(node.outputs[0].shape)
        if not is_float(node):
            op = "imul" if node.primitive == "mul" else node.primitive
            edges = [aligned(node, i, r) for i, r in enumerate(ins)]
            return [elementwise(view, op, str(node.params.get("y", "")), edges, sizes, op == "imul")]
        return [product(view, [(*aligned(node, i, r), exponents[i]) for i, r in enumerate(ins)], sizes)]

    return rule


def _integer_pow(view: View, node: Node, ins: list[Ref]) -> list[Ref]:
    return _mul((float(node.params["y"]),))(view, node, ins)


def _pow(view: View, node: Node, ins: list[Ref]) -> list[Ref]:
    """A power with a literal exponent is a monomial, as the square and the square root are."""
    if is_float(node) and view.is_literal(ins[1]):
        return _mul((float(ins[1].coef),))(view, node, ins[:1])
    return _binary(view, node, ins)


def _neg(view: View, node: Node, ins: list[Ref]) -> list[Ref]:
    if is_float(node):
        return [Ref(-ins[0].coef, ins[0].nid, ins[0].dims)]
    return [_unary_ref(view, "neg", node, ins[0])]


def _unary_ref(view: View, op: str, node: Node, ref: Ref) -> Ref:
    return elementwise(view, op, (), [aligned(node, 0, ref)], nonunit(node.outputs[0].shape))


def _unary(view: View, node: Node, ins: list[Ref]) -> list[Ref]:
    return [_unary_ref(view, node.primitive, node, ins[0])]


def _binary(view: View, node: Node, ins: list[Ref]) -> list[Ref]:
    op, order = node.primitive, [0, 1]
    sizes = nonunit(node.outputs[0].shape)
    edges = [aligned(node, i, ins[i]) for i in order]
    if op in ("max", "min"):
        neutral = -math.inf if op == "max" else math.inf
        for i in order:
            if view.is_literal(ins[i]) and ins[i].coef == neutral:
                return [placed(ins[1 - i], edges[1 - i][1], sizes)]
    if op in ("lt", "le"):
        op, edges = {"lt": "gt", "le": "ge"}[op], edges[::-1]
    if op in ("and", "or"):
        for i in order:
            if view.is_literal(ins[i]) and ins[i].coef is (op == "and"):
                return [placed(ins[1 - i], edges[1 - i][1], sizes)]
    return [elementwise(view, op, (), edges, sizes, op in COMMUTATIVE)]


def _select(view: View, node: Node, ins: list[Ref]) -> list[Ref]:
    if len(ins) != 3:
        return view.opaque(node, ins)
    sizes = nonunit(node.outputs[0].shape)
    if view.is_literal(ins[0]):
        pick = 1 + int(ins[0].coef)
        return [placed(ins[pick], aligned(node, pick, ins[pick])[1], sizes)]
    return [elementwise(view, "select", (), [aligned(node, i, r) for i, r in enumerate(ins)], sizes)]


def _reduce(view: View, node: Node, ins: list[Ref]) -> list[Ref]:
    """Scalar factors leave a sum, positive ones a max; summing a broadcast axis is a factor."""
    ref, op = ins[0], node.primitive
    axes = {int(a) for a in node.params["axes"]}
    dims = iter(ref.dims)
    full = [next(dims) if s != 1 else None for s in node.inputs[0].shape]
    coef, reduced, kept = ref.coef, [], []
    for d, f in enumerate(full):
        if f is None:
            continue
        if d not in axes:
            kept.append(f)
        elif f >= 0:
            reduced.append(f)
        elif op == "reduce_sum":
            coef = coef * ~f
    inner: Coef = 1.0
    if not is_float(node) or (op != "reduce_sum" and not coef > 0):
        inner, coef = ref.coef, coef / ref.coef if ref.coef else 1.0
    if not reduced:
        return [Ref(coef * inner, ref.nid, tuple(kept))]
    shape = view.nodes[ref.nid].shape
    rest = [a for a in range(len(shape)) if a not in reduced]
    slot = {a: i for i, a in enumerate(rest)}
    edge = Operand(tidy(inner), ref.nid, tuple(slot.get(a, -1) for a in range(len(shape))))
    nid = view.node(op, (), (edge,), [shape[a] for a in rest])
    return [Ref(coef, nid, tuple(slot[k] if k >= 0 else k for k in kept))]


def _iota(view: View, node: Node, ins: list[Ref]) -> list[Ref]:
    shape, axis = node.outputs[0].shape, int(node.params["dimension"])
    kind = "float" if is_float(node) else np.dtype(node.outputs[0].dtype).name
    nid = view.node("iota", kind, (), [shape[axis]] if shape[axis] != 1 else [])
    if shape[axis] == 1:
        return [view.literal(0.0 if kind == "float" else 0, shape)]
    return [Ref(1.0, nid, tuple(0 if d == axis else ~s for d, s in enumerate(shape) if s != 1))]


def _dot(view: View, node: Node, ins: list[Ref]) -> list[Ref]:
    """Einsum form: every axis is a label; batch, contracted and free follow from where a label occurs."""
    if not is_float(node):
        return view.opaque(node, ins)
    (lc, rc), (lb, rb) = node.params["dimension_numbers"]
    shapes = [node.inputs[0].shape, node.inputs[1].shape]
    labels = [_labels(shapes[0], lc, lb, "l"), _labels(shapes[1], rc, rb, "r")]
    size = {label: s for side in (0, 1) for label, s in zip(labels[side], shapes[side], strict=True)}
    on_axes = [_labels_on_node(view, ins[i], labels[i], shapes[i]) for i in (0, 1)]
    if on_axes[0] is None or on_axes[1] is None:
        return view.opaque(node, ins)
    out = [("b", i) for i in range(len(lb))]
    out += [x for x in labels[0] if x[0] == "l"] + [x for x in labels[1] if x[0] == "r"]
    out = [x for x in out if size[x] != 1]
    first, second = sorted(
        ((ins[0].nid, on_axes[0]), (ins[1].nid, on_axes[1])), key=lambda p: (p[0], [str(x) for x in p[1]])
    )
    number: dict[Any, int] = {}
    for _, axes in (first, second):
        for label in axes:
            number.setdefault(label, len(number))
    edges = [Operand(1.0, nid, tuple(number[x] for x in axes)) for nid, axes in (first, second)]
    present = sorted((x for x in number if x in out), key=number.__getitem__)
    nid = view.node("dot", tuple(number[x] for x in present), edges, [size[x] for x in present])
    position = {x: i for i, x in enumerate(present)}
    return [Ref(ins[0].coef * ins[1].coef, nid, tuple(position.get(x, ~size[x]) for x in out))]


def _labels(shape: Sequence[int], contract: Any, batch: Any, side: str) -> list[tuple]:
    c, b = [int(i) for i in contract], [int(i) for i in batch]
    return [("b", b.index(d)) if d in b else ("c", c.index(d)) if d in c else (side, d) for d in range(len(shape))]


def _labels_on_node(view: View, ref: Ref, labels: list[tuple], shape: Sequence[int]) -> list[tuple] | None:
    """A label for each axis of the operand's node; None when a contracted axis is a broadcast (left opaque)."""
    out: list[Any] = [None] * len(view.nodes[ref.nid].shape)
    dims = iter(ref.dims)
    for label, s in zip(labels, shape, strict=True):
        if s == 1:
            continue
        d = next(dims)
        if d >= 0:
            out[d] = label
        elif label[0] == "c":
            return None
    return out if all(x is not None for x in out) else None


def _custom_jvp(view: View, node: Node, ins: list[Ref]) -> list[Ref]:
    """JAX's own activations are wrapped in custom_jvp: look inside. A user's rule is kept whole, its gradient is theirs."""
    if not is_jax_rule(node):
        return view.opaque(node, ins)
    body = node.blocks[0]
    for value, ref in zip(body.inputs, ins, strict=True):
        view.bind_alias(value, ref)
    for value, _ in body.consts:
        view.bind_alias(value, view.unique_leaf("const", value.shape))
    for inner in body.nodes:
        for value, ref in zip(
            inner.outputs, apply_rule(view, inner, [view.read(a) for a in inner.inputs]), strict=True
        ):
            view.bind_alias(value, ref)
    return [view.read(a) for a in body.outputs]


def is_jax_rule(node: Node) -> bool:
    """True for a custom_jvp_call whose function and rule are JAX's own (jax.nn.relu and the like).

    A user may give a function of JAX's a rule of their own, and `defjvps` wraps it in a function of JAX's.
    """
    if node.primitive != "custom_jvp_call" or not node.blocks or not defined_in_jax(node.blocks[0].jaxpr):
        return False
    functions = rule_functions(node.params.get("jvp_jaxpr_fun"))
    return bool(functions) and all(is_jax_file(f.__code__.co_filename) for f in functions)


def literal_inputs(view: View, node: Node) -> dict[int, Coef]:
    """Which inputs of a region's body are scalars known at the call: scan constants, and all operands of remat, jit, shard_map."""
    if node.primitive == "scan":
        count = scan_counts(node.params)[0]
    elif node.primitive in ("remat2", "remat", "checkpoint", "shard_map", "jit", "pjit"):
        count = len(node.inputs)
    else:
        return {}
    refs = [view.read(a) for a in node.inputs[:count]]
    return {i: r.coef for i, r in enumerate(refs) if view.is_literal(r) and not r.dims and not node.inputs[i].shape}


RULES: dict[str, Rule] = {
    **dict.fromkeys(TRANSPARENT, _same),
    **dict.fromkeys(UNARY, _unary),
    **dict.fromkeys(BINARY | {"lt", "le"}, _binary),
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min"), _reduce),
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _reshape),
    "stop_gradient": _stop_gradient,
    "convert_element_type": _convert,
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
    "dot_general": _dot,
    "custom_jvp_call": _custom_jvp,
}
