"""A numpy interpreter of jaxprs in float64, at reduced sizes: the machine behind certification.

Every float is evaluated in float64, float casts are the identity, so two programs that agree here agree as real functions.
Axis sizes may be mapped to smaller ones (8192 rows -> 3): the interpreter rewrites the shape parameters as it goes. The
entries along such an axis represent repetitions, so a sum over it counts each of them 8192 / 3 times, and a literal
that holds the size, such as the 1 / 8192 of a mean, keeps its meaning. A
primitive that is not in the table raises `CannotEvaluate`; nothing is guessed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core as jex_core

from ..dtypes import is_float
from ..jax_compat import scan_counts, split_closed
from ..primitives import SUMS_OVER_DEVICES, having
from ..program.explicit_axes import make_typed_jaxpr
from ..program.literals import scalar_result
from ..program.scopes import defined_in_jax
from ..program.trace import FLATTENED
from .limits import CannotEvaluate, SizesDifferError, at_real_sizes, kept_ends, no_more_than
from .numpy_indexing import PLACED
from .numpy_rules import BOUND, OF_KEYS, PLAIN, SHAPED, Array, bound, random_bits
from .random_bits import as_jax

_ARRAYS: Any = (np.ndarray, np.generic, jax.Array)  # what a program captures and nothing changes

# Equation -> its meaning, a jnp function or a jaxpr; None for what is no primitive of ours.
Inline = Callable[[Any], Any]


class ReducedSizes:
    """A mapping from real axis sizes to reduced ones; unknown sizes map to themselves.

    Args:
      table: real size -> reduced size.
      parts: reduced sizes of axes that no operand has and that the program makes by splitting: positions along them are meaningless.
      most: the limit on entries of an array, and on terms summed for it, beyond which the program is not evaluated.
      cut: size -> how many entries a slice leaves out at the start of such an axis and at its end.
    """

    def __init__(
        self,
        table: Mapping[int, int] | None = None,
        parts: frozenset[int] = frozenset(),
        most: tuple[int, int] | None = None,
        cut: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        self.table, self.parts, self.most, self.cut = dict(table or {}), parts, most, dict(cut or {})
        # The size of an axis -> those of the axes of which a reshape makes it, or that it makes of it.
        self.made_of: dict[int, tuple[int, ...]] = {}

    def copy(self) -> ReducedSizes:
        return ReducedSizes(self.table, self.parts, self.most, self.cut)

    def __call__(self, size: int) -> int:
        return self.table.get(int(size), int(size))

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(self(s) for s in shape)

    def repeats(self, real: int, reduced: int) -> Any:
        """How many entries each represents in a sum over an axis, or an array of that; those cut off at its ends stand for such alone."""
        if (ends := self.cut.get(real)) is not None:
            return self._of_ends(real, reduced, ends)
        parts = self.made_of.get(real, ())
        if not self.cut.keys() & set(parts):
            return real / reduced
        each = (np.broadcast_to(self.repeats(n, self(n)), self(n)) for n in parts)
        return functools.reduce(np.multiply.outer, each).reshape(-1)

    def _of_ends(self, real: int, reduced: int, ends: tuple[int, int]) -> Array:
        """As `repeats`, of an axis of which entries are cut off; what is left of it may be cut again, or be made of parts."""
        (low, high), left = kept_ends(ends), real - sum(ends)
        fits = low + high + self.table.get(left, max(reduced - low - high, 2))
        if reduced != fits:  # a sum before the slice, which would tell
            raise SizesDifferError(real, reduced, fits)
        found = np.empty(reduced)
        found[low : reduced - high] = self.repeats(left, reduced - low - high)
        found[:low] = ends[0] / max(low, 1)
        found[reduced - high :] = ends[1] / max(high, 1)
        return found

    def learn(self, real: int, reduced: int) -> None:
        if self.table.setdefault(int(real), int(reduced)) != reduced:
            raise SizesDifferError(int(real), self.table[int(real)], int(reduced))


def evaluate(
    closed: Any,
    args: Sequence[Array],
    sizes: ReducedSizes | None = None,
    inline: Inline | None = None,
    rounded: bool = False,
    sums: Callable[[Any, list[Array]], list[Array]] | None = None,
) -> list[Array]:
    """Runs a jaxpr on numpy arrays already at reduced sizes, floats in float64.

    Args:
      closed: the jaxpr, at real sizes.
      args: one array per input.
      sizes: real size -> reduced size; not modified.
      inline: equation -> plain jnp function for primitives of ours, or None.
      rounded: round every result to the dtype the program gives it, as a program run equation by equation does (each is
        computed in float64 before, so a product rounds once); the arrays stay float64.
      sums: computes a sum over devices from the equation and this device's operands; without it such sums cannot be evaluated.

    Raises:
      CannotEvaluate: an unknown primitive, or sizes that do not reduce consistently (SizesDifferError), or not far enough
        (TooLargeError), or too far (PositionsError).
    """
    jaxpr, consts = split_closed(closed)
    constvars = jaxpr.constvars if consts else ()
    run = _Run(sizes.copy() if sizes else ReducedSizes(), inline or (lambda eqn: None), rounded, sums)
    env: dict[Any, Array] = dict(zip(constvars, [run.const(c) for c in consts], strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    with np.errstate(all="ignore"):
        return run.block(jaxpr, env)


def floats_to_float64(x: Array) -> Array:
    """Floats as float64; integers and booleans unchanged."""
    return x.astype(np.float64) if is_float(x.dtype) else x


class _Run:
    def __init__(self, sizes: ReducedSizes, inline: Inline, rounded: bool = False, sums: Any = None) -> None:
        self.sizes, self.inline, self.rounded, self.sums = sizes, inline, rounded, sums
        self.scalars: dict[Any, Array] = {}  # variables made of literals alone, in their own dtypes

    def block(self, jaxpr: Any, env: dict[Any, Array]) -> list[Array]:
        def read(a: Any) -> Array:
            if not isinstance(a, jex_core.Literal):
                return env[a]
            # A weakly typed literal holds the number as it was written: 0.1, where the program has float32(0.1).
            aval: Any = a.aval
            return floats_to_float64(np.asarray(a.val, aval.dtype))

        for eqn in jaxpr.eqns:
            number = self.of_literals(eqn)
            outs = [floats_to_float64(number)] if number is not None else self.eqn(eqn, [read(a) for a in eqn.invars])
            if self.rounded:
                outs = [_rounded(x, v.aval.dtype) for x, v in zip(outs, eqn.outvars, strict=True)]
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(a) for a in jaxpr.outvars]

    def of_literals(self, eqn: Any) -> Array | None:
        """The scalar that an equation computes from literals only, rounded as in the program."""
        if len(eqn.outvars) != 1 or eqn.outvars[0].aval.shape or not eqn.invars:
            return None
        numbers = [self.number(a) for a in eqn.invars]
        # A PRNG key is no number, whatever it is made of.
        if any(n is None for n in numbers) or any(
            jnp.issubdtype(a.aval.dtype, jax.dtypes.extended) for a in (*eqn.invars, *eqn.outvars)
        ):
            return None
        operands = [(n, a.aval.dtype) for n, a in zip(numbers, eqn.invars, strict=True)]
        number = scalar_result(eqn.primitive.name, eqn.params, operands, eqn.outvars[0].aval.dtype)
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
        if not isinstance(value, _ARRAYS):
            raise CannotEvaluate(f"a captured {type(value).__name__}, whose value may change")
        if jnp.issubdtype(value.dtype, jax.dtypes.extended):
            return value  # a key
        array = np.asarray(value)
        return floats_to_float64(array[tuple(slice(0, self.sizes(s)) for s in array.shape)])

    def eqn(self, eqn: Any, ins: list[Array]) -> list[Array]:
        name = eqn.primitive.name
        # On several devices at once a collective is not one device's own.
        if self.sums is not None and name in SUMS_OVER_DEVICES:
            return self.sums(eqn, ins)
        if self.sizes.most is not None:
            no_more_than(self.sizes.most, self.sizes, eqn)
        ours = self.inline(eqn)
        if ours is not None:
            return self.call(_traced(ours, eqn) if callable(ours) else ours, ins)
        # A function of JAX's own whose body splits the bit patterns of float32 is known by its name alone.
        if name == "custom_jvp_call" and defined_in_jax(eqn.params["call_jaxpr"]):
            known = _JAX_FUNCTIONS.get(_function_name(eqn.params["call_jaxpr"]))
            if known is not None:
                return [known(*ins)]
        # JAX keeps what a call runs in `jaxpr`, what a function with a rule of its own runs in `call_jaxpr`.
        if name in FLATTENED or name in _ENTERED:
            child = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            return self.call(child, ins, eqn.invars)
        # Its results are its operands, which XLA may not move other work across.
        if name == "optimization_barrier":
            return ins
        if name in _CONTROL_RULES or name in BOUND:
            return self.whole(eqn, ins)
        ins = [as_jax(x) for x in ins]
        rule = SHAPED.get(name) or PLACED.get(name)
        if rule is not None:
            outs = rule(self, eqn, ins)
            return outs if isinstance(outs, list) else [outs]
        plain = PLAIN.get(name)
        if plain is None:
            raise CannotEvaluate(f"primitive {name}")
        try:
            return [floats_to_float64(np.asarray(plain(*ins)))]
        except ValueError as error:  # shapes that no longer broadcast: the sizes did not reduce consistently
            raise CannotEvaluate(f"primitive {name} at reduced sizes ({error})") from error

    def whole(self, eqn: Any, ins: list[Array]) -> list[Array]:
        """The rules for equations with several results: control flow, and primitives run by JAX."""
        name = eqn.primitive.name
        if name == "random_bits":
            return random_bits(self.sizes, eqn, ins)
        at_real_sizes(self.sizes, eqn)
        if name in _CONTROL_RULES:
            return _CONTROL_RULES[name](self, eqn.params, [as_jax(x) for x in ins])
        return OF_KEYS.get(name, bound)(eqn, ins)

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


_ENTERED = having("remat", "rule")
# From jax 0.12 the derivative of erf calls this; its float32 body splits bit patterns, which has no meaning in float64.
_JAX_FUNCTIONS: dict[str, Callable[..., Array]] = {"exp_neg_sq": lambda x: np.exp(-x * x)}


def _function_name(jaxpr: Any) -> str:
    debug = getattr(jaxpr, "debug_info", None) or split_closed(jaxpr)[0].debug_info
    return str(debug.func_src_info or "").partition(" at ")[0]


def _traced(fn: Callable, eqn: Any) -> Any:
    def flat(*args: Any) -> list:
        return jax.tree.leaves(fn(*args))

    return make_typed_jaxpr(flat, [v.aval for v in eqn.invars])


def traced_once(inline: Inline) -> Inline:
    """`inline` with each equation's meaning traced only once, for programs that are evaluated several times."""
    known: dict[int, tuple[Any, Any]] = {}  # with the equation, so that its id stays its own

    def meaning(eqn: Any) -> Any:
        if id(eqn) not in known:
            ours = inline(eqn)
            known[id(eqn)] = eqn, (_traced(ours, eqn) if callable(ours) else ours)
        return known[id(eqn)][1]

    return meaning


def _rounded(x: Array, dtype: Any) -> Array:
    return np.asarray(x).astype(dtype).astype(np.float64) if is_float(dtype) else x


# -- control flow, at real sizes --------------------------------------------------------------------------------------


def _scan(run: _Run, params: dict[str, Any], ins: list[Array]) -> list[Array]:
    body, length = params["jaxpr"], int(params["length"])
    n_consts, n_carry = scan_counts(params)
    consts, carry, xs = ins[:n_consts], ins[n_consts : n_consts + n_carry], ins[n_consts + n_carry :]
    avals = split_closed(body)[0].outvars[n_carry:]
    ys: list[list[Array]] = [[] for _ in avals]
    for i in reversed(range(length)) if params["reverse"] else range(length):
        outs = run.call(body, [*consts, *carry, *(x[i] for x in xs)])
        carry = outs[:n_carry]
        for column, y in zip(ys, outs[n_carry:], strict=True):
            column.append(y)
    if not length:
        return [*carry, *(np.zeros((0, *v.aval.shape)) for v in avals)]
    return [*carry, *(np.stack(c[::-1] if params["reverse"] else c) for c in ys)]


def _while(run: _Run, params: dict[str, Any], ins: list[Array]) -> list[Array]:
    n, m = params["cond_nconsts"], params["body_nconsts"]
    tested, fixed, carry = ins[:n], ins[n : n + m], ins[n + m :]
    for _ in range(_MOST_TRIPS):
        goes_on = run.call(params["cond_jaxpr"], [*tested, *carry])[0]  # batched: each entry stops by itself
        if not np.any(goes_on):
            return carry
        stepped = run.call(params["body_jaxpr"], [*fixed, *carry])
        which = [goes_on.reshape(goes_on.shape + (1,) * (np.ndim(x) - goes_on.ndim)) for x in stepped]
        carry = [np.where(w, new, old) for w, new, old in zip(which, stepped, carry, strict=True)]
    raise CannotEvaluate(f"a while loop of more than {_MOST_TRIPS} trips")


def _cond(run: _Run, params: dict[str, Any], ins: list[Array]) -> list[Array]:
    branches = params["branches"]
    return run.call(branches[min(max(int(ins[0]), 0), len(branches) - 1)], ins[1:])


_MOST_TRIPS = 10_000
_CONTROL_RULES: dict[str, Callable[[_Run, dict[str, Any], list[Array]], list[Array]]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
