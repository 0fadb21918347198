"""The meaning of each primitive in numpy, for `evaluate.py`: two tables by name; a third, of positions, is in `numpy_indexing.py`. A
primitive in none of them is unknown.

A rule of `PLAIN` takes only the operands. One of `SHAPED` takes the run (its `sizes`), the equation and the operands: axis sizes
may be reduced, and a rule that does not support that raises `CannotEvaluate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..canonical.convolutions import contraction
from ..dtypes import is_float
from ..jax_compat import draws_by_entry, enable_x64, split_closed, threefry_key
from ..program.explicit_axes import placeless
from ..settings import on_one_device
from .limits import CannotEvaluate, SizesDifferError, at_real_sizes, no_positions, unreduced
from .random_bits import Keys, as_jax, bits_by_entry, threefry2x32, words_of

Array = np.ndarray
NumpyRule = Callable[[Any, Any, list[Array]], Any]


# -- primitives without shape parameters ------------------------------------------------------------------------------


def _erf(x: Array) -> Array:
    return np.vectorize(math.erf, otypes=[np.float64])(x)


def _erfc(x: Array) -> Array:
    return np.vectorize(math.erfc, otypes=[np.float64])(x)


def _logistic(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _div(a: Array, b: Array) -> Array:
    return a / b if a.dtype.kind == "f" else np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))


def _shift_right_logical(x: Array, n: Array) -> Array:
    """Zeros come in from the left, also for a negative number."""
    x, n = np.asarray(x), np.asarray(n)
    return (x.view(f"u{x.itemsize}") >> n.view(f"u{n.itemsize}")).view(x.dtype)


def _max(a: Array, b: Array) -> Array:
    return np.maximum(a, b)  # NaN propagates, as in XLA


def _clamp(lo: Array, x: Array, hi: Array) -> Array:
    return np.minimum(np.maximum(x, lo), hi)


def _select(which: Array, *cases: Array) -> Array:
    if which.dtype.kind == "b":
        which = which.astype(np.int32)
    shape = np.broadcast_shapes(which.shape, *(c.shape for c in cases))
    return np.choose(np.broadcast_to(which, shape), [np.broadcast_to(c, shape) for c in cases])


def _identity(x: Array) -> Array:
    return x


PLAIN: dict[str, Callable[..., Any]] = {
    **dict.fromkeys("copy copy_p pvary stop_gradient reduce_precision name optimization_barrier reshard".split(), _identity),
    **{n: getattr(np, n) for n in "exp exp2 expm1 log log1p sin cos tan tanh sinh cosh floor ceil sign abs sqrt square".split()},
    "add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "div": _div, "neg": np.negative,
    "max": _max, "min": np.minimum, "pow": np.power, "rem": np.fmod, "atan2": np.arctan2, "rsqrt": lambda x: 1 / np.sqrt(x),
    "cbrt": np.cbrt, "erf": _erf, "erfc": _erfc, "logistic": _logistic, "one_minus_square": lambda x: 1 - x * x,
    "is_finite": np.isfinite, "not": lambda x: ~x, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "eq": np.equal, "ne": np.not_equal, "gt": np.greater, "ge": np.greater_equal, "lt": np.less, "le": np.less_equal,
    "clamp": _clamp, "select_n": _select, "sinh": np.sinh, "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh,
    "shift_right_logical": _shift_right_logical, "shift_left": lambda x, n: x << n,
    "shift_right_arithmetic": lambda x, n: x >> n, "nextafter": np.nextafter,
    "atan": np.arctan, "asin": np.arcsin, "acos": np.arccos, "mul_add": lambda a, b, c: a * b + c,
}  # fmt: skip


# -- primitives with parameters ---------------------------------------------------------------------------------------


def _convert(run: Any, eqn: Any, ins: list[Array]) -> Array:
    dst = np.dtype(eqn.params["new_dtype"])
    return ins[0].astype(np.float64) if is_float(dst) else ins[0].astype(dst)


def _broadcast_in_dim(run: Any, eqn: Any, ins: list[Array]) -> Array:
    real, where = eqn.params["shape"], [int(d) for d in eqn.params["broadcast_dimensions"]]
    shape = list(run.sizes.shape(real))
    expanded = [1] * len(shape)
    real_in = getattr(eqn.invars[0].aval, "shape", ())
    for d, r, s in zip(where, real_in, ins[0].shape, strict=True):
        expanded[d] = s
        if r == real[d]:
            shape[d] = s
    return np.broadcast_to(ins[0].reshape(expanded), shape)


def _reshape(run: Any, eqn: Any, ins: list[Array]) -> Array:
    real_in = [int(s) for s in eqn.invars[0].aval.shape]
    real_out = [int(s) for s in eqn.params["new_sizes"]]
    # `jax.lax.reshape` with `dimensions` transposes first.
    if (order := eqn.params["dimensions"]) is not None:
        ins, real_in = [np.transpose(ins[0], order)], [real_in[int(i)] for i in order]
    reduced = list(ins[0].shape)
    # An array without entries may take any shape without entries: no axes belong together.
    if 0 in real_in:
        return ins[0].reshape(run.sizes.shape(real_out))
    out: list[int] = []
    i = j = 0
    while i < len(real_in) or j < len(real_out):
        lo_i, lo_j = i, j
        a = b = 1
        while i == lo_i or j == lo_j or a != b:  # the smallest groups of input and output axes with the same elements
            if i < len(real_in) and (a <= b or j == len(real_out)):
                a, i = a * real_in[i], i + 1
            elif j < len(real_out):
                b, j = b * real_out[j], j + 1
            else:
                break
        out += _reshape_group(run, real_in[lo_i:i], reduced[lo_i:i], real_out[lo_j:j])
    return ins[0].reshape(out)


def _reshape_group(run: Any, real_in: list[int], reduced_in: list[int], real_out: list[int]) -> list[int]:
    elements = math.prod(reduced_in)
    big_in = [(r, s) for r, s in zip(real_in, reduced_in, strict=True) if r != 1]
    big_out = [r for r in real_out if r != 1]
    if [r for r, _ in big_in] == big_out:
        sizes = iter([s for _, s in big_in])
        return [next(sizes) if r != 1 else 1 for r in real_out]
    # Axes that are merged into one: it is reduced to what they are.
    if len(big_out) == 1:
        run.sizes.learn(big_out[0], elements)
        run.sizes.made_of.setdefault(big_out[0], tuple(r for r, _ in big_in))
    elif len(big_in) == 1:
        run.sizes.made_of.setdefault(big_in[0][0], tuple(big_out))
    shape = [run.sizes(r) if r != 1 else 1 for r in real_out]
    if math.prod(shape) != elements:
        if len(big_in) == 1:  # an axis that is split: it has to be reduced to what its parts are
            raise SizesDifferError(big_in[0][0], elements, math.prod(shape), unreduced(run.sizes, big_out))
        raise CannotEvaluate(f"reshape {real_in} -> {real_out} at reduced sizes {reduced_in}")
    return shape


def _counted(run: Any, eqn: Any, ins: list[Array], axes: Iterable[int]) -> tuple[Array, float]:
    """The first operand, for a sum over `axes`, and a factor of the sum: each entry counts as often as entries of the real array are like
    it."""
    x, times = ins[0], 1.0
    for axis, real in ((int(a), int(eqn.invars[0].aval.shape[int(a)])) for a in axes):
        if real == x.shape[axis]:
            continue
        repeats = run.sizes.repeats(real, x.shape[axis])
        if np.ndim(repeats):
            x = x * np.reshape(repeats, [-1 if d == axis else 1 for d in range(x.ndim)])
        else:
            times *= repeats
    return x, times


def _reduce_sum(run: Any, eqn: Any, ins: list[Array]) -> Array:
    axes = tuple(int(a) for a in eqn.params["axes"])
    x, times = _counted(run, eqn, ins, axes)
    total = np.asarray(np.sum(x, axis=axes))
    if x is ins[0] and times == 1:
        return total
    kind = np.sum(ins[0], axis=axes).dtype
    return total * times if is_float(kind) else np.rint(total * times).astype(kind)


def _dot_general(run: Any, eqn: Any, ins: list[Array]) -> Array:
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    lhs, rhs = ins
    letters = iter("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    left = [next(letters) for _ in lhs.shape]
    right = [next(letters) for _ in rhs.shape]
    for i, j in (*zip(lc, rc, strict=True), *zip(lb, rb, strict=True)):
        right[int(j)] = left[int(i)]
        size, other_size = lhs.shape[int(i)], rhs.shape[int(j)]
        if size != other_size:  # what one of them is made of was reduced apart
            real = eqn.invars[0].aval.shape[int(i)]
            raise SizesDifferError(real, size, other_size if size == run.sizes(real) else size)
    batch = [left[int(i)] for i in lb]
    free = _free(left, lc, lb) + _free(right, rc, rb)
    lhs, times = _counted(run, eqn, ins, lc)
    return np.einsum(f"{''.join(left)},{''.join(right)}->{''.join(batch + free)}", lhs, rhs) * times


def _free(letters: Sequence[str], contracted: Sequence[int], batch: Sequence[int]) -> list[str]:
    """The letters of a side's axes that only it has."""
    return [x for d, x in enumerate(letters) if d not in contracted and d not in batch]


def _convolution(run: Any, eqn: Any, ins: list[Array]) -> Array:
    """A convolution equivalent to a product."""
    found = contraction(eqn.params, *(v.aval.shape for v in eqn.invars))
    if found is None:
        raise CannotEvaluate("primitive conv_general_dilated whose window moves")
    letters: dict[Any, str] = {}
    for name in (*found.left, *found.right):
        letters.setdefault(name, chr(ord("a") + len(letters)))
    left, right = ("".join(letters[x] for x in names) for names in (found.left, found.right))
    out = "".join(letters[x] for x in found.out if x is not None)
    lhs, times = _counted(run, eqn, ins, found.contracted)
    product = np.einsum(f"{left},{right}->{out}", lhs, *ins[1:]) * times
    return np.expand_dims(product, tuple(i for i, x in enumerate(found.out) if x is None))


def _reduce(fn: Callable) -> Callable:
    def rule(run: Any, eqn: Any, ins: list[Array]) -> Array:
        return np.asarray(fn(ins[0], axis=tuple(int(a) for a in eqn.params["axes"])))

    return rule


def _round(run: Any, eqn: Any, ins: list[Array]) -> Array:
    (x,) = ins
    if eqn.params["rounding_method"] == jax.lax.RoundingMethod.TO_NEAREST_EVEN:
        return np.round(x)
    return np.copysign(np.floor(np.abs(x) + 0.5), x)


def _iota(run: Any, eqn: Any, ins: list[Array]) -> Array:
    shape, axis = run.sizes.shape(eqn.params["shape"]), int(eqn.params["dimension"])
    no_positions(run.sizes, eqn, axis)
    line = np.arange(shape[axis]).reshape([-1 if d == axis else 1 for d in range(len(shape))])
    kind = np.dtype(eqn.params["dtype"])
    return np.broadcast_to(line, shape).astype(np.float64 if is_float(kind) else kind)


def _where_most(fn: Callable) -> NumpyRule:
    def rule(run: Any, eqn: Any, ins: list[Array]) -> Array:
        axis = int(eqn.params["axes"][0])
        no_positions(run.sizes, eqn, axis)
        return np.asarray(fn(ins[0], axis=axis), eqn.params["index_dtype"])

    return rule


def _squeeze(run: Any, eqn: Any, ins: list[Array]) -> Array:
    return np.squeeze(ins[0], axis=tuple(int(d) for d in eqn.params["dimensions"]))


def _pow_int(run: Any, eqn: Any, ins: list[Array]) -> Array:
    return ins[0] ** (ins[0].dtype.type(eqn.params["y"]) if ins[0].dtype.kind == "f" else eqn.params["y"])


def _cumulative(fn: Callable) -> NumpyRule:
    def rule(run: Any, eqn: Any, ins: list[Array]) -> Array:
        axis = int(eqn.params["axis"])
        if eqn.params["reverse"]:
            return np.flip(fn(np.flip(ins[0], axis), axis), axis)
        return fn(ins[0], axis)

    return rule


def _bitcast(run: Any, eqn: Any, ins: list[Array]) -> Array:
    source, dtype = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    if np.dtype(source).itemsize != np.dtype(dtype).itemsize:
        raise CannotEvaluate("primitive bitcast_convert_type to another width")
    bits = np.asarray(ins[0].astype(source), order="C").view(np.dtype(dtype))
    return bits.astype(np.float64) if is_float(dtype) else bits


def _empty(run: Any, eqn: Any, ins: list[Array]) -> Array:
    """The placeholder for a residual of a cond's branch that is not taken."""
    aval = eqn.outvars[0].aval
    return np.zeros(aval.shape, np.float64 if is_float(aval.dtype) else aval.dtype)


def _unreduced(rule: NumpyRule) -> NumpyRule:
    """A rule with positions as parameters, which have no meaning along a reduced axis."""

    def guarded(run: Any, eqn: Any, ins: list[Array]) -> Any:
        at_real_sizes(run.sizes, eqn)
        return rule(run, eqn, ins)

    return guarded


# Random bits: run by JAX itself.
BOUND = frozenset("random_seed random_bits random_wrap random_unwrap random_split random_fold_in threefry2x32".split())


def bound(eqn: Any, ins: list[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """An equation run by JAX, eagerly, floats in float64; with `params` in place of its own, if they are given."""
    keys = [jnp.issubdtype(v.aval.dtype, jax.dtypes.extended) for v in eqn.invars]
    kinds = [np.dtype(float) if is_float(v.aval.dtype) else v.aval.dtype for v in eqn.invars]
    wide = any(str(kind).endswith("64") for kind in (*kinds, *(v.aval.dtype for v in eqn.outvars)))
    params = placeless(dict(eqn.params if params is None else params))

    def run() -> Any:
        with enable_x64(wide):  # JAX makes 32 bits of 64 unless 64-bit types are on
            given = [as_jax(x) if key else jnp.asarray(x, kind) for x, kind, key in zip(ins, kinds, keys, strict=True)]
            if params.get("update_jaxpr") is not None:  # a scatter's sum, written down for the program's dtype
                number = jax.ShapeDtypeStruct((), kinds[0])
                params["update_jaxpr"] = split_closed(jax.make_jaxpr(jax.lax.add)(number, number))[0]
            return eqn.primitive.bind(*given, **params)

    outs = on_one_device(run)
    # A primitive without `multiple_results` gives its one result bare.
    outs = outs if eqn.primitive.multiple_results else [outs]
    return [o if jnp.issubdtype(o.dtype, jax.dtypes.extended) else np.asarray(o) for o in outs]


def random_bits(sizes: Any, eqn: Any, ins: list[Any]) -> list[Any]:
    """Random bits of a key for the reduced entries. In such a draw, an entry's bits depend only on the key and its number, so that draws of
    different shapes agree at reduced sizes as they do at full size.

    Half of them are all ones, which any comparison with a probability distinguishes from the rest.
    """
    (key,), shape = eqn.invars, sizes.shape(eqn.params["shape"])
    reduced = shape != tuple(eqn.params["shape"])
    ours = not key.aval.shape and key.aval.dtype == threefry_key() and draws_by_entry(eqn)
    if not ours:
        if reduced:
            raise CannotEvaluate("primitive random_bits at reduced sizes")
        return bound(eqn, ins)
    bits = bits_by_entry(words_of(ins[0]), eqn.params["bit_width"], shape)
    return [np.where(bits & 1, np.iinfo(bits.dtype).max, bits) if reduced else bits]


def _unwrapped(eqn: Any, ins: list[Any]) -> list[Any]:
    return [words_of(ins[0])] if eqn.invars[0].aval.dtype == threefry_key() else bound(eqn, ins)


def _wrapped(eqn: Any, ins: list[Any]) -> list[Any]:
    dtype = eqn.outvars[0].aval.dtype
    return [Keys(np.asarray(ins[0]), dtype)] if dtype == threefry_key() else bound(eqn, ins)


# What is known of keys and their bits without JAX: a program that it compiles takes longer than all the rest of a proof.
OF_KEYS: dict[str, Callable[[Any, list[Any]], list[Any]]] = {
    "random_unwrap": _unwrapped,
    "random_wrap": _wrapped,
    "threefry2x32": lambda eqn, ins: list(threefry2x32(ins[:2], *ins[2:])),
}


SHAPED: dict[str, NumpyRule] = {
    "round": _round,
    "convert_element_type": _convert,
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "reduce_sum": _reduce_sum,
    "reduce_max": _reduce(np.max),
    "reduce_min": _reduce(np.min),
    "reduce_and": _reduce(np.all),
    "reduce_or": _reduce(np.any),
    "iota": _iota,
    "squeeze": _squeeze,
    "cumsum": _unreduced(_cumulative(np.cumsum)),
    "cumprod": _unreduced(_cumulative(np.cumprod)),
    "cummax": _unreduced(_cumulative(np.maximum.accumulate)),
    "cummin": _unreduced(_cumulative(np.minimum.accumulate)),
    "reduce_prod": _unreduced(_reduce(np.prod)),
    "bitcast_convert_type": _bitcast,
    "empty2": _empty,
    "integer_pow": _pow_int,
    "transpose": lambda run, eqn, ins: np.transpose(ins[0], [int(p) for p in eqn.params["permutation"]]),
    "expand_dims": lambda run, eqn, ins: np.expand_dims(ins[0], tuple(int(d) for d in eqn.params["dimensions"])),
    "argmax": _where_most(np.argmax),
    "argmin": _where_most(np.argmin),
}
