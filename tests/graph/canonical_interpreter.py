"""A numpy interpreter of the canonical view: every value of a program in float64, from the view's nodes alone.

It reads operands, coefficients, axis maps and parameters of a `CanonicalView`. Only for a node that the view does not look into is the raw
equation asked, on operands that come from canonical values again. `check_block` compares with the raw values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from fusionlab.graph.canonical.nodes import ONE, CNode, Coef, Operand, Ref
from fusionlab.graph.canonical.view import CanonicalView
from fusionlab.graph.dtypes import is_float
from fusionlab.graph.interpret.widen import CONSTANT, RANDOM, Val, plain
from fusionlab.graph.jax_compat import enable_x64
from fusionlab.graph.program.ir import Atom, Block, Literal, Node, Value

from .raw_values import RawBlock, Unknown, is_key, to_numpy

# -- the canonical view ---------------------------------------------------------------------------------------------------


class RecordedView(CanonicalView):
    """A view that remembers which raw node each opaque node stands for, and which array each leaf without a name."""

    def _start(self, block: Block) -> None:
        super()._start(block)
        self.raw: dict[int, tuple[Node, int]] = {}
        self.arrays: dict[int, Literal] = {}

    def unread(self, node: Node, refs: Sequence[Ref], *named: Any) -> list[Ref]:
        out = super().unread(node, refs, *named)
        for i, ref in enumerate(out):
            self.raw.setdefault(ref.nid, (node, i))
        return out

    def read(self, atom: Atom) -> Ref:
        ref = super().read(atom)
        if isinstance(atom, Literal) and ref.nid != ONE:
            self.arrays[ref.nid] = atom
        return ref


def shown(coef: Coef, array: Any, dims: Sequence[int], sizes: Sequence[int]) -> Any:
    """`coef` times a node's value, each of the axes `dims` an axis of it, or `~size` where it is broadcast.

    Args:
      array: the node's value, without unit axes; None for the node of ones.
      sizes: of the result's axes.
    """
    if array is None:
        return np.broadcast_to(np.asarray(coef), sizes)
    axes = [d for d in dims if d >= 0]
    assert sorted(axes) == list(range(array.ndim)), "an axis of the node is shown twice, or not at all"
    placed = array.transpose(axes).reshape([s if d >= 0 else 1 for d, s in zip(dims, sizes, strict=True)])
    seen = (
        placed
        if len(axes) == len(dims)
        else jnp.broadcast_to(placed, sizes)
        if is_key(array)
        else np.broadcast_to(placed, sizes)
    )
    return seen if isinstance(coef, float) and coef == 1.0 else coef * seen


class Canonical:
    """Every node of a view. `values[nid]` is an array without unit axes, or None where it is out of reach."""

    def __init__(self, view: RecordedView, raw: RawBlock) -> None:
        self.view, self._raw = view, raw
        self.values: list[Any] = []
        with np.errstate(all="ignore"), enable_x64():
            for node in view.nodes:
                try:
                    self.values.append(self._node(node))
                except Unknown:
                    self.values.append(None)

    def value(self, value: Value) -> Any:
        """What the view says a raw value is.

        Raises:
          Unknown: the node is out of reach.
        """
        return self._ref(self.view.ref[value.id]).reshape(value.shape)

    def _of(self, nid: int) -> Any:
        if nid != ONE and self.values[nid] is None:
            raise Unknown(f"c{nid}")
        return None if nid == ONE else self.values[nid]

    def _ref(self, ref: Ref | Operand) -> Any:
        """A Ref, or an operand whose axes are given the way a Ref's are."""
        place = Ref(*ref)
        return shown(place.coef, self._of(place.nid), place.dims, self.view.dim_sizes(place))

    def _node(self, node: CNode) -> Any:
        if node.id == ONE:
            return None
        if node.op == "leaf":
            return self._leaf(node)
        if node.id in self.view.raw:
            return self._opaque(node)
        rule = RULES.get(node.op)
        if rule is None:
            raise AssertionError(f"{node.op}: a node that is neither opaque nor known to the interpreter")
        result = rule(self, node)
        assert result.shape == node.shape, (node, result.shape)
        return result

    def _leaf(self, node: CNode) -> Any:
        kind, number = node.params
        if node.id in self.view.arrays:
            array = self._raw.read(self.view.arrays[node.id])
        elif kind in ("in", "const"):
            value_id = self.view.block.inputs[number].id if kind == "in" else number
            if value_id not in self._raw.values:
                raise Unknown(str(node.params))
            array = self._raw.values[value_id]
        else:
            raise Unknown(str(node.params))
        return to_numpy(array).reshape(node.shape)

    def _opaque(self, node: CNode) -> Any:
        raw, i = self.view.raw[node.id]
        operands = []
        for operand, atom in zip(node.operands, raw.inputs, strict=True):
            array = self._ref(operand).reshape(atom.shape)
            operands.append(self._val(array, atom))
        return to_numpy(self._raw.equation(raw, operands)[i]).reshape(node.shape)

    def _val(self, array: Any, atom: Atom) -> Val:
        """An operand of an equation: of the raw operand's kind, in its dtype (floats in float64, but for draws)."""
        if is_key(array):
            return plain(array)
        kind = self._raw.read(atom).kind
        own = np.asarray(array).astype(atom.dtype)
        if kind == RANDOM:
            return Val(None, jnp.asarray(own), RANDOM)
        return Val(array if is_float(atom.dtype) else own, own if kind == CONSTANT else None, kind)

    # -- the axes of operands ---------------------------------------------------------------------------------------

    def framed(self, node: CNode) -> list[Any]:
        """The operands of an elementwise node, each with an axis (of its size or 1) for every axis of the node."""
        return [self._framed(operand, len(node.shape)) for operand in node.operands]

    def _framed(self, operand: Operand, rank: int) -> Any:
        array = self._of(operand.nid)
        if array is None:
            return np.asarray(operand.coef)
        assert len(set(operand.axes)) == array.ndim, "two axes meet in one"
        order = sorted(range(array.ndim), key=operand.axes.__getitem__)
        shape = [1] * rank
        for a in order:
            shape[operand.axes[a]] = array.shape[a]
        return _times(operand.coef, array.transpose(order).reshape(shape))


def _times(coef: Coef, array: Any) -> Any:
    return array if isinstance(coef, float) and coef == 1.0 else coef * array


# -- the meaning of a node, by its op ---------------------------------------------------------------------------------------

Rule = Callable[[Canonical, CNode], Any]


def _elementwise(fn: Callable[..., Any]) -> Rule:
    def rule(run: Canonical, node: CNode) -> Any:
        return np.broadcast_to(np.asarray(fn(*run.framed(node))), node.shape)

    return rule


def _product(run: Canonical, node: CNode) -> Any:
    powers = [np.power(x, e) for x, e in zip(run.framed(node), node.params, strict=True)]
    return np.broadcast_to(math.prod(powers[1:], start=powers[0]), node.shape)


def _sum(run: Canonical, node: CNode) -> Any:
    return np.broadcast_to(sum(run.framed(node)), node.shape)


def _dot(run: Canonical, node: CNode) -> Any:
    args: list[Any] = []
    for operand in node.operands:
        args += [_times(operand.coef, run._of(operand.nid)), list(operand.axes)]
    return np.einsum(*args, list(node.params))


def _reduce(fn: Callable[..., Any]) -> Rule:
    def rule(run: Canonical, node: CNode) -> Any:
        (operand,) = node.operands
        away = tuple(i for i, a in enumerate(operand.axes) if a == -1)
        kept = [a for a in operand.axes if a != -1]
        array = run._of(operand.nid)
        result = np.asarray(fn(_times(operand.coef, array), axis=away))
        return result.astype(array.dtype).transpose(np.argsort(kept))

    return rule


def _reshape(run: Canonical, node: CNode) -> Any:
    return run._ref(node.operands[0]).reshape(node.shape)


def _iota(run: Canonical, node: CNode) -> Any:
    return np.arange(*node.shape, dtype=np.float64 if node.params == "float" else node.params)


def _cast(run: Canonical, node: CNode) -> Any:
    (x,) = run.framed(node)
    return np.asarray(x).astype(np.float64 if node.params == "float" else node.params)


def _integer_division(a: Any, b: Any) -> Any:
    return (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))).astype(np.asarray(a).dtype)


def _shift_right_logical(a: Any, b: Any) -> Any:
    a = np.asarray(a)
    unsigned = np.dtype(f"u{a.dtype.name.removeprefix('u')}")
    return np.right_shift(a.astype(unsigned), np.asarray(b).astype(unsigned)).astype(a.dtype)


def _select(which: Any, *cases: Any) -> Any:
    return np.where(np.asarray(which).astype(bool), cases[1], cases[0])


def _integer_power(run: Canonical, node: CNode) -> Any:
    (x,) = run.framed(node)
    return x ** int(node.params)


def _logistic(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


ELEMENTWISE: dict[str, Callable[..., Any]] = {
    **{n: getattr(np, n) for n in "tanh exp exp2 expm1 log log1p abs sign sin cos tan floor ceil cbrt sinh cosh".split()},
    "erf": special.erf, "erfc": special.erfc, "erf_inv": special.erfinv, "logistic": _logistic,
    "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan,
    "one_minus_square": lambda x: 1 - x * x, "is_finite": np.isfinite, "not": np.invert, "neg": np.negative,
    "population_count": np.bitwise_count, "stop_gradient": np.asarray, "square": np.square,
    "max": np.maximum, "min": np.minimum, "rem": np.fmod, "atan2": np.arctan2, "pow": np.power, "nextafter": np.nextafter,
    "eq": np.equal, "ne": np.not_equal, "gt": np.greater, "ge": np.greater_equal,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "shift_left": np.left_shift, "shift_right_logical": _shift_right_logical,
    "iadd": np.add, "isub": np.subtract, "imul": np.multiply, "div": _integer_division, "select": _select,
}  # fmt: skip

RULES: dict[str, Rule] = {
    **{op: _elementwise(fn) for op, fn in ELEMENTWISE.items()},
    "prod": _product,
    "sum": _sum,
    "difference": _sum,
    "dot": _dot,
    "reduce_sum": _reduce(np.sum),
    "reduce_max": _reduce(np.max),
    "reduce_min": _reduce(np.min),
    "reshape": _reshape,
    "iota": _iota,
    "cast": _cast,
    "integer_pow": _integer_power,
}


# -- comparison ---------------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """How many values of a program were compared, how many were out of reach, and those that differ, as text."""

    compared: int = 0
    unknown: int = 0
    wrong: tuple[str, ...] = ()

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(self.compared + other.compared, self.unknown + other.unknown, self.wrong + other.wrong)

    @property
    def share(self) -> float:
        """Of the values, those compared."""
        return self.compared / max(1, self.compared + self.unknown)


def unread(view: CanonicalView) -> list[CNode]:
    """The nodes of which no value is made."""
    read, stack = {ONE}, [nid for nid, values in view.values_of.items() if values]
    while stack:
        nid = stack.pop()
        if nid not in read:
            read.add(nid)
            stack += [o.nid for o in view.nodes[nid].operands]
    return [n for n in view.nodes if n.id not in read]


def check_block(block: Block, inputs: Sequence[Any], by_jax: bool = False) -> Outcome:
    """Compares what the canonical view says of each value of a block with what its equations compute (see `RawBlock`)."""
    raw = RawBlock(block, inputs, by_jax)
    canonical = Canonical(RecordedView(block), raw)
    assert not (spare := unread(canonical.view)), f"made and read by nothing: {spare}"
    total = Outcome()
    with np.errstate(all="ignore"):
        for value in (v for node in block.nodes for v in node.outputs):
            total += _check_value(value, raw, canonical)
    return total


def _check_value(value: Value, raw: RawBlock, canonical: Canonical) -> Outcome:
    if value.id not in raw.values:
        return Outcome(unknown=1)
    try:
        got = canonical.value(value)
    except Unknown:
        return Outcome(unknown=1)
    expected = raw.values[value.id]
    difference = _difference(got, to_numpy(expected), 1e-5 if value.id in raw.drawn else 1e-9)
    return Outcome(1, 0, (f"{value!r}: {difference}",) if difference else ())


def _difference(got: Any, want: Any, tolerance: float) -> str:
    if is_key(want):
        got, want = np.asarray(jax.random.key_data(got)), np.asarray(jax.random.key_data(want))
    got = np.asarray(got)
    if got.shape != want.shape or (got.dtype == bool) != (want.dtype == bool):
        return f"got {got.dtype}{list(got.shape)}, needed {want.dtype}{list(want.shape)}"
    if want.dtype.kind not in "fc":
        return "" if np.array_equal(got, want) else f"{np.sum(got != want)} of {want.size} differ"
    finite = np.abs(want[np.isfinite(want)])
    scale = finite.max() if finite.size else 0.0
    with np.errstate(all="ignore"):
        close = np.isclose(got, want, rtol=tolerance, atol=tolerance * min(scale, 1.0), equal_nan=True)
    return (
        ""
        if close.all()
        else f"{np.sum(~close)} of {want.size} differ, the first {got[~close][0]!r} for {want[~close][0]!r}"
    )
