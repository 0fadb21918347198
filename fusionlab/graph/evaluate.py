"""A numpy interpreter of jaxprs in float64, at reduced sizes: the machine behind certification.

Every float is evaluated in float64, float casts are the identity, so two programs that agree here agree as real functions.
Axis sizes may be mapped to smaller ones (8192 rows -> 3): the interpreter rewrites the shape parameters as it goes. The
entries along such an axis stand for as many that repeat, so a sum over it counts each of them 8192 / 3 times, and a literal
that holds the size, as the 1 / 8192 of a mean, keeps its meaning. A
primitive that is not in the table raises `CannotEvaluate`; nothing is guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core as jex_core

from .compat import split_closed
from .literals import fold
from .scopes import defined_in_jax
from .trace import FLATTENED

Array = np.ndarray
Inline = Callable[[Any], Callable | None]


class CannotEvaluate(Exception):  # noqa: N818 - it is an answer, not an error of the user's
    """The program holds something the interpreter does not know; the message says what."""


class Sizes:
    """A mapping from real axis sizes to reduced ones; unknown sizes map to themselves."""

    def __init__(self, table: Mapping[int, int] | None = None) -> None:
        self.table = dict(table or {})

    def __call__(self, size: int) -> int:
        return self.table.get(int(size), int(size))

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(self(s) for s in shape)

    def learn(self, real: int, reduced: int) -> None:
        if self.table.setdefault(int(real), int(reduced)) != reduced:
            raise CannotEvaluate(f"axis size {real} would reduce to {self.table[int(real)]} and to {reduced}")


def evaluate(
    closed: Any, args: Sequence[Array], sizes: Sizes | None = None, inline: Inline | None = None
) -> list[Array]:
    """Runs a jaxpr on numpy arrays already at reduced sizes, floats in float64.

    Args:
      closed: the jaxpr, at real sizes.
      args: one array an input.
      sizes: real size -> reduced size.
      inline: equation -> plain jnp function for primitives of ours, or None.

    Raises:
      CannotEvaluate: an unknown primitive, or sizes that do not reduce consistently.
    """
    jaxpr, consts = split_closed(closed)
    constvars = jaxpr.constvars if consts else ()
    run = _Run(sizes or Sizes(), inline or (lambda eqn: None))
    env: dict[Any, Array] = dict(zip(constvars, [run.const(c) for c in consts], strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    with np.errstate(all="ignore"):
        return run.block(jaxpr, env)


def promote(x: Array) -> Array:
    """Floats to float64; integers and booleans as they are."""
    return x.astype(np.float64) if is_float(x.dtype) else x


def is_float(dtype: Any) -> bool:
    """Whether a dtype is a floating one (numpy's `kind` does not tell ml_dtypes' floats from its narrow integers)."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def narrows(dtype: Any, other: Any) -> bool:
    """Whether the float `dtype` cannot hold every value of the float `other` (fewer mantissa or exponent bits)."""
    a, b = jnp.finfo(dtype), jnp.finfo(other)
    return a.nmant < b.nmant or a.maxexp < b.maxexp or a.minexp > b.minexp


class _Run:
    def __init__(self, sizes: Sizes, inline: Inline) -> None:
        self.sizes, self.inline = sizes, inline
        self.scalars: dict[Any, Array] = {}  # variables made of literals alone, in their own dtypes

    def block(self, jaxpr: Any, env: dict[Any, Array]) -> list[Array]:
        def read(a: Any) -> Array:
            return promote(np.asarray(a.val)) if isinstance(a, jex_core.Literal) else env[a]

        for eqn in jaxpr.eqns:
            number = self.of_literals(eqn)
            outs = [promote(number)] if number is not None else self.eqn(eqn, [read(a) for a in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(a) for a in jaxpr.outvars]

    def of_literals(self, eqn: Any) -> Array | None:
        """The scalar an equation makes of literals alone, rounded as the program rounds it."""
        if len(eqn.outvars) != 1 or eqn.outvars[0].aval.shape or not eqn.invars:
            return None
        numbers = [self.number(a) for a in eqn.invars]
        if any(n is None for n in numbers) or any(
            jnp.issubdtype(a.aval.dtype, jax.dtypes.extended) for a in (*eqn.invars, *eqn.outvars)
        ):
            return None
        operands = [(n, a.aval.dtype) for n, a in zip(numbers, eqn.invars, strict=True)]
        number = fold(eqn.primitive.name, eqn.params, operands, eqn.outvars[0].aval.dtype)
        if number is not None:
            self.scalars[eqn.outvars[0]] = number
        return number

    def number(self, atom: Any) -> Any:
        """The scalar an atom is known to be, in its own dtype; None for anything else."""
        number = atom.val if isinstance(atom, jex_core.Literal) else self.scalars.get(atom)
        return number if number is not None and np.ndim(number) == 0 else None

    def const(self, value: Any) -> Array:
        """A captured array, its leading corner when sizes are reduced."""
        if isinstance(value, Tracer):
            raise CannotEvaluate("a captured value that an enclosing transformation is tracing")
        array = np.asarray(value)
        return promote(array[tuple(slice(0, self.sizes(s)) for s in array.shape)])

    def eqn(self, eqn: Any, ins: list[Array]) -> list[Array]:
        name = eqn.primitive.name
        ours = self.inline(eqn)
        if ours is not None:
            return self.call(_traced(ours, tuple(_shaped(v.aval) for v in eqn.invars)), ins)
        if name == "custom_jvp_call" and defined_in_jax(eqn.params["call_jaxpr"]):
            known = _JAX_FUNCTIONS.get(_function_name(eqn.params["call_jaxpr"]))
            if known is not None:
                return [known(*ins)]
        if name in FLATTENED or name in ("remat2", "remat", "checkpoint", "custom_jvp_call", "custom_vjp_call"):
            child = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            return self.call(child, ins, eqn.invars)
        rule = _SHAPED.get(name)
        if rule is not None:
            return [rule(self, eqn, ins)]
        plain = _PLAIN.get(name)
        if plain is None:
            raise CannotEvaluate(f"primitive {name}")
        try:
            return [promote(np.asarray(plain(*ins)))]
        except ValueError as error:  # shapes that no longer broadcast: the sizes did not reduce consistently
            raise CannotEvaluate(f"primitive {name} at reduced sizes ({error})") from error

    def call(self, child: Any, ins: list[Array], operands: Sequence[Any] = ()) -> list[Array]:
        """Runs a child jaxpr, which may be shared by calls with other operands."""
        jaxpr, consts = split_closed(child)
        env = dict(zip(jaxpr.constvars if consts else (), [self.const(c) for c in consts], strict=True))
        env.update(zip(jaxpr.invars, ins, strict=True))
        outer = self.scalars
        known = [(v, self.number(a)) for v, a in zip(jaxpr.invars, operands, strict=False)]
        self.scalars = {v: n for v, n in known if n is not None}
        try:
            return self.block(jaxpr, env)
        finally:
            self.scalars = outer


# From jax 0.12 the derivative of erf calls this; its float32 body splits bit patterns, which has no meaning in float64.
_JAX_FUNCTIONS: dict[str, Callable[..., Array]] = {"exp_neg_sq": lambda x: np.exp(-x * x)}


def _function_name(jaxpr: Any) -> str:
    debug = getattr(jaxpr, "debug_info", None) or split_closed(jaxpr)[0].debug_info
    return str(debug.func_src_info or "").partition(" at ")[0]


def _shaped(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _traced(fn: Callable, avals: tuple) -> Any:
    def flat(*args: Any) -> list:
        return jax.tree.leaves(fn(*args))

    return jax.make_jaxpr(flat)(*avals)


# -- primitives without shape parameters ------------------------------------------------------------------------------


def _erf(x: Array) -> Array:
    return np.vectorize(math.erf, otypes=[np.float64])(x)


def _erfc(x: Array) -> Array:
    return np.vectorize(math.erfc, otypes=[np.float64])(x)


def _logistic(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _div(a: Array, b: Array) -> Array:
    return a / b if a.dtype.kind == "f" else np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))


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


_PLAIN: dict[str, Callable[..., Any]] = {
    **dict.fromkeys("copy copy_p pvary stop_gradient reduce_precision name optimization_barrier".split(), _identity),
    **{n: getattr(np, n) for n in "exp exp2 expm1 log log1p sin cos tan tanh sinh cosh floor ceil sign abs sqrt square".split()},
    "add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "div": _div, "neg": np.negative,
    "max": _max, "min": np.minimum, "pow": np.power, "rem": np.fmod, "atan2": np.arctan2, "rsqrt": lambda x: 1 / np.sqrt(x),
    "cbrt": np.cbrt, "erf": _erf, "erfc": _erfc, "logistic": _logistic, "one_minus_square": lambda x: 1 - x * x,
    "is_finite": np.isfinite, "not": lambda x: ~x, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "eq": np.equal, "ne": np.not_equal, "gt": np.greater, "ge": np.greater_equal, "lt": np.less, "le": np.less_equal,
    "clamp": _clamp, "select_n": _select, "sinh": np.sinh, "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh,
    "atan": np.arctan, "asin": np.arcsin, "acos": np.arccos, "round": np.round, "mul_add": lambda a, b, c: a * b + c,
}  # fmt: skip


# -- primitives with parameters ---------------------------------------------------------------------------------------


def _convert(run: _Run, eqn: Any, ins: list[Array]) -> Array:
    dst = np.dtype(eqn.params["new_dtype"])
    return ins[0].astype(np.float64) if is_float(dst) else ins[0].astype(dst)


def _broadcast_in_dim(run: _Run, eqn: Any, ins: list[Array]) -> Array:
    real, where = eqn.params["shape"], [int(d) for d in eqn.params["broadcast_dimensions"]]
    shape = list(run.sizes.shape(real))
    expanded = [1] * len(shape)
    real_in = getattr(eqn.invars[0].aval, "shape", ())
    for d, r, s in zip(where, real_in, ins[0].shape, strict=True):
        expanded[d] = s
        if r == real[d]:
            shape[d] = s
    return np.broadcast_to(ins[0].reshape(expanded), shape)


def _reshape(run: _Run, eqn: Any, ins: list[Array]) -> Array:
    real_in = [int(s) for s in eqn.invars[0].aval.shape]
    real_out = [int(s) for s in eqn.params["new_sizes"]]
    reduced = list(ins[0].shape)
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


def _reshape_group(run: _Run, real_in: list[int], reduced_in: list[int], real_out: list[int]) -> list[int]:
    elements = math.prod(reduced_in)
    big_in = [(r, s) for r, s in zip(real_in, reduced_in, strict=True) if r != 1]
    big_out = [r for r in real_out if r != 1]
    if [r for r, _ in big_in] == big_out:
        sizes = iter([s for _, s in big_in])
        return [next(sizes) if r != 1 else 1 for r in real_out]
    if len(big_out) == 1:
        run.sizes.learn(big_out[0], elements)
    shape = [run.sizes(r) if r != 1 else 1 for r in real_out]
    if math.prod(shape) != elements:
        raise CannotEvaluate(f"reshape {real_in} -> {real_out} at reduced sizes {reduced_in}")
    return shape


def _repeats(eqn: Any, ins: list[Array], axes: Iterable[int]) -> float:
    """How many entries of the real array each entry stands for in a sum of the first operand over `axes`."""
    real, reduced = eqn.invars[0].aval.shape, ins[0].shape
    return math.prod(real[int(a)] / reduced[int(a)] for a in axes if real[int(a)] != reduced[int(a)])


def _reduce_sum(run: _Run, eqn: Any, ins: list[Array]) -> Array:
    axes = tuple(int(a) for a in eqn.params["axes"])
    total, times = np.asarray(np.sum(ins[0], axis=axes)), _repeats(eqn, ins, axes)
    if times == 1:
        return total
    return total * times if is_float(total.dtype) else np.rint(total * times).astype(total.dtype)


def _dot_general(run: _Run, eqn: Any, ins: list[Array]) -> Array:
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    lhs, rhs = ins
    letters = iter("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    left = [next(letters) for _ in lhs.shape]
    right = [next(letters) for _ in rhs.shape]
    for i, j in (*zip(lc, rc, strict=True), *zip(lb, rb, strict=True)):
        right[int(j)] = left[int(i)]
    batch = [left[int(i)] for i in lb]
    free = [x for d, x in enumerate(left) if d not in lc and d not in lb]
    free += [x for d, x in enumerate(right) if d not in rc and d not in rb]
    return np.einsum(f"{''.join(left)},{''.join(right)}->{''.join(batch + free)}", lhs, rhs) * _repeats(eqn, ins, lc)


def _reduce(fn: Callable) -> Callable:
    def rule(run: _Run, eqn: Any, ins: list[Array]) -> Array:
        return np.asarray(fn(ins[0], axis=tuple(int(a) for a in eqn.params["axes"])))

    return rule


def _iota(run: _Run, eqn: Any, ins: list[Array]) -> Array:
    shape, axis = run.sizes.shape(eqn.params["shape"]), int(eqn.params["dimension"])
    line = np.arange(shape[axis]).reshape([-1 if d == axis else 1 for d in range(len(shape))])
    kind = np.dtype(eqn.params["dtype"])
    return np.broadcast_to(line, shape).astype(np.float64 if is_float(kind) else kind)


def _squeeze(run: _Run, eqn: Any, ins: list[Array]) -> Array:
    return np.squeeze(ins[0], axis=tuple(int(d) for d in eqn.params["dimensions"]))


def _slice(run: _Run, eqn: Any, ins: list[Array]) -> Array:
    p = eqn.params
    steps = p["strides"] or (1,) * ins[0].ndim
    if run.sizes.shape(eqn.invars[0].aval.shape) != tuple(eqn.invars[0].aval.shape):
        raise CannotEvaluate("primitive slice at reduced sizes")
    return ins[0][tuple(map(slice, p["start_indices"], p["limit_indices"], steps))]


def _pow_int(run: _Run, eqn: Any, ins: list[Array]) -> Array:
    return ins[0] ** (ins[0].dtype.type(eqn.params["y"]) if ins[0].dtype.kind == "f" else eqn.params["y"])


_SHAPED: dict[str, Callable[[_Run, Any, list[Array]], Array]] = {
    "convert_element_type": _convert,
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "dot_general": _dot_general,
    "reduce_sum": _reduce_sum,
    "reduce_max": _reduce(np.max),
    "reduce_min": _reduce(np.min),
    "reduce_and": _reduce(np.all),
    "reduce_or": _reduce(np.any),
    "iota": _iota,
    "squeeze": _squeeze,
    "slice": _slice,
    "integer_pow": _pow_int,
    "transpose": lambda run, eqn, ins: np.transpose(ins[0], [int(p) for p in eqn.params["permutation"]]),
    "expand_dims": lambda run, eqn, ins: np.expand_dims(ins[0], tuple(int(d) for d in eqn.params["dimensions"])),
    "argmax": lambda run, eqn, ins: np.argmax(ins[0], axis=int(eqn.params["axes"][0])),
}
