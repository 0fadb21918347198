"""A program whose sums round otherwise, at random: what it computes under another order of summation.

The result of each sum (a product of matrices, a convolution, a reduction, a cumulative sum, a scatter that adds) is moved by a random
number of units in its last place. The numbers depend on a seed, so that one compiled program gives as many other roundings as are asked
for. This is Monte Carlo arithmetic at the sums alone (Parker, "Monte Carlo Arithmetic", UCLA CSD-970002, 1997; Denis, Castro and Petit,
"Verificarlo", ARITH 2016): sums are where another order, another kernel or another device rounds otherwise.

How far a result moves is a uniform number d between -a and a, rounded at random to a whole number of units:

    a = 1/2 * max(1, sqrt(n) * u / v)      n terms, added up with unit u, in a result of unit v

For a result narrower than its accumulator (bfloat16 of float32) a is 1/2: one in four moves by one unit, as often as stochastic rounding
and rounding to the nearest differ. For a float32 result the deviation of d is sqrt(n / 12) units, that of the difference of two orders in
which n terms of random sign are added one after another. A float32 product that the device computes in TF32 has TF32's unit. A reduction
whose partial sums the device rounds to a narrow dtype has an error of its own (`Arithmetic.narrow`).

Results of arithmetic in a dtype narrower than float32 move as well, with a = 1/2: a compiler computes a chain of them in float32 and rounds
where its kernel ends (XLA's `xla_allow_excess_precision`, on by default), so a program leaves it open which of them are rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from ..dtypes import is_float
from ..jax_compat import FLATTENED, scan_counts, split_closed
from ..primitives import SUMS_OVER_DEVICES, having

PRODUCTS = having("product", "ragged product")
SUMS = PRODUCTS | SUMS_OVER_DEVICES | frozenset("reduce_sum cumsum scatter-add reduce_window_sum".split())
# The arithmetic of single entries that rounds.
ROUNDED = having(
    *"addition difference scaling power root exponential logarithm trigonometric hyperbolic sigmoid cast".split(),
    "cube root",
) - {"neg"}
_TF32_BITS = 10  # of mantissa
_FEWEST_BITS = 7  # of mantissa: in the narrower types of quantised programs one unit is no rounding error
Seed = Any


TERMS = 8192  # of the sums that `Arithmetic.narrow` is about


@dataclass(frozen=True)
class Arithmetic:
    """What a device does that a program leaves to it.

    Attributes:
      tf32: whether float32 products run in TF32 where the program sets no precision.
      narrow: (dtype, how many times the error of one rounding a reduction of `TERMS` terms of that dtype has).
    """

    tf32: bool = False
    narrow: tuple[tuple[str, float], ...] = ()


def resummed(closed: Any, arithmetic: Arithmetic = Arithmetic()) -> Callable[..., list[Any]]:
    """A traced program as a function of (seed, *arrays) whose sums round otherwise.

    Args:
      closed: the program; its loops, branches, checkpoints, calls and `shard_map`s are entered.
      arithmetic: of the device that runs it.

    Returns:
      A function that can be traced: seed uint32[] and the program's arrays -> its results. Random draws and integers do not change.
    """

    def run(seed: Any, *args: Any) -> list[Any]:
        return _Resummed(jnp.asarray(seed, jnp.uint32), arithmetic).run(closed, args)

    return run


class _Resummed:
    """One run. `site` counts the sums, so that each has its own random numbers."""

    def __init__(self, seed: Seed, arithmetic: Arithmetic) -> None:
        self.seed, self.arithmetic, self.site = seed, arithmetic, 0

    def run(self, closed: Any, args: Sequence[Any], consts: Sequence[Any] | None = None) -> list[Any]:
        jaxpr, own = split_closed(closed)
        env: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
        env.update(zip(jaxpr.constvars, own if consts is None else consts, strict=True))

        def read(atom: Any) -> Any:
            return np.asarray(atom.val, atom.aval.dtype) if hasattr(atom, "val") else env[atom]

        for eqn in jaxpr.eqns:
            with eqn.ctx.manager:
                outs = self._equation(eqn, [read(a) for a in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(a) for a in jaxpr.outvars]

    def _equation(self, eqn: Any, ins: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if (region := _REGIONS.get(name)) is not None:
            return region(self, eqn, ins)
        outs = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(eqn.params))
        outs = list(outs) if eqn.primitive.multiple_results else [outs]
        return [self._moved(eqn, x) for x in outs] if name in SUMS or _rounds_narrowly(eqn) else outs

    def _moved(self, eqn: Any, x: Any) -> Any:
        if not (is_float(x.dtype) and jnp.finfo(x.dtype).nmant >= _FEWEST_BITS):
            return x
        if eqn.primitive.name == "reduce_sum" and _terms(eqn) == 1:  # of axes of size 1
            return x
        self.site += 1
        return moved(x, reach(eqn, self.arithmetic), self.seed + jnp.uint32(self.site * 0x9E3779B9 & 0xFFFFFFFF))

    def _call(self, eqn: Any, ins: list[Any]) -> list[Any]:
        return self.run(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")), ins)

    def _remat(self, eqn: Any, ins: list[Any]) -> list[Any]:
        if eqn.params["differentiated"] and eqn.params["prevent_cse"]:  # as it is lowered: computed again, not kept
            ins = lax.optimization_barrier(ins)
        return self.run(eqn.params["jaxpr"], ins)

    def _scan(self, eqn: Any, ins: list[Any]) -> list[Any]:
        p = eqn.params
        first, own = scan_counts(p)
        consts, init, xs = ins[:first], ins[first : first + own], ins[first + own :]

        def step(carry: list, x: list) -> tuple[list, list]:
            outs = self.run(p["jaxpr"], [*consts, *carry, *x])
            return outs[:own], outs[own:]

        carry, ys = lax.scan(step, init, xs, length=p["length"], reverse=p["reverse"], unroll=p["unroll"])
        return [*carry, *ys]

    def _shard_map(self, eqn: Any, ins: list[Any]) -> list[Any]:
        p = eqn.params
        names = p.get("newly_manual_axes", p.get("manual_axes"))
        specs = {"in_specs": tuple(p["in_specs"]), "out_specs": tuple(p["out_specs"]), "check_vma": p["check_vma"]}
        run = jax.shard_map(lambda *xs: tuple(self.run(p["jaxpr"], xs)), mesh=p["mesh"], axis_names=names, **specs)
        return list(run(*ins))

    def _while(self, eqn: Any, ins: list[Any]) -> list[Any]:
        p = eqn.params
        if split_closed(p["cond_jaxpr"])[0].outvars[0].aval.ndim:  # each element stops by itself, under vmap
            return eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(p))
        n, m = p["cond_nconsts"], p["cond_nconsts"] + p["body_nconsts"]
        test, body = ((lambda carry, c=c, own=own: self.run(c, [*own, *carry])) for c, own in (
            (p["cond_jaxpr"], ins[:n]), (p["body_jaxpr"], ins[n:m])))  # fmt: skip
        return lax.while_loop(lambda carry: test(carry)[0], body, ins[m:])

    def _cond(self, eqn: Any, ins: list[Any]) -> list[Any]:
        branches = [lambda *xs, b=b: self.run(b, xs) for b in eqn.params["branches"]]
        return lax.switch(ins[0], branches, *ins[1:])


_R = _Resummed
_REGIONS: dict[str, Callable[[_Resummed, Any, list[Any]], list[Any]]] = {
    **dict.fromkeys(FLATTENED | having("rule"), _R._call),
    **dict.fromkeys(having("remat"), _R._remat),
    "scan": _R._scan,
    "while": _R._while,
    "cond": _R._cond,
    "shard_map": _R._shard_map,
}


def reach(eqn: Any, arithmetic: Arithmetic) -> float:
    """How many units in the last place a result moves at most, before it is rounded to a whole number."""
    dtype = eqn.outvars[0].aval.dtype
    if eqn.primitive.name not in SUMS:
        return 0.5
    bits = int(jnp.finfo(dtype).nmant)
    of_sum = max(bits, int(jnp.finfo(jnp.float32).nmant))  # narrower ones are added up in float32
    if eqn.primitive.name in PRODUCTS and arithmetic.tf32 and dtype == jnp.float32 and _leaves_precision(eqn):
        return 0.5 * 2.0 ** (bits - _TF32_BITS)  # its operands' rounding, which is more than that of the sum
    own = dict(arithmetic.narrow).get(str(dtype), 1.0) if eqn.primitive.name == "reduce_sum" else 1.0
    if own > 1:  # the deviation of the difference of two such sums
        return max(0.5, own * math.sqrt(_terms(eqn) / TERMS / 2))
    return 0.5 * max(1.0, math.sqrt(_terms(eqn)) * 2.0 ** (bits - of_sum))


def _rounds_narrowly(eqn: Any) -> bool:
    """Whether its result is one of single entries, rounded to a dtype narrower than float32."""
    dtype = eqn.outvars[0].aval.dtype if eqn.primitive.name in ROUNDED else None
    if dtype is None or not is_float(dtype) or dtype.itemsize >= 4:
        return False
    given = getattr(eqn.invars[0].aval, "dtype", dtype)
    return eqn.primitive.name != "convert_element_type" or (is_float(given) and given.itemsize > dtype.itemsize)


def _leaves_precision(eqn: Any) -> bool:
    asked = eqn.params.get("precision")
    both = asked if isinstance(asked, tuple) else (asked,)
    return eqn.invars[0].aval.dtype == jnp.float32 and any(p in (None, lax.Precision.DEFAULT) for p in both)


def _terms(eqn: Any) -> int:
    """How many terms each entry of a sum's result has; 1 where its equation does not say."""
    shape = getattr(eqn.invars[0].aval, "shape", ())
    name = eqn.primitive.name
    if name == "dot_general":
        axes: Sequence[int] = eqn.params["dimension_numbers"][0][0]
    elif name == "reduce_sum":
        axes = eqn.params["axes"]
    elif name == "cumsum":
        axes = (eqn.params["axis"],)
    elif name == "conv_general_dilated":
        kernel = eqn.invars[1].aval
        return max(1, kernel.size // max(1, kernel.shape[eqn.params["dimension_numbers"].rhs_spec[0]]))
    else:
        return 1
    return max(1, math.prod(int(shape[i]) for i in axes))


def moved(x: Any, most: float, seed: Seed) -> Any:
    """`x` with each entry moved by a random number of units in its last place: uniform in [-most, most], rounded at random.

    Zeros, infinities and NaN stay as they are; nothing else becomes one of them or changes its sign. The random numbers are a hash of seed,
    position and value: as cheap as the arithmetic around them, and different in each step of a loop.
    """
    width = jnp.finfo(x.dtype).bits
    held = lax.bitcast_convert_type(x, jnp.dtype(f"int{width}"))
    held = held if width >= 32 else lax.convert_element_type(held, jnp.int32)
    whole = held.dtype.type
    h = _hashed(held, x.shape, seed)
    first, second = (
        lax.convert_element_type(half, jnp.float32) for half in (h >> np.uint32(16), h & np.uint32(0xFFFF))
    )
    # floor(most * (2 u - 1) + v), u and v being the halves over 2^16, each in the middle of its step
    by = lax.floor(first * np.float32(most * 2.0**-15) + (second * np.float32(2.0**-16) + np.float32(2.0**-17 - most)))
    # The bits of floats of one sign are in the order of the floats.
    magnitude = held & whole(2 ** (width - 1) - 1)
    endless = np.asarray(np.inf, x.dtype).view(f"int{width}").astype(whole)
    new = lax.clamp(whole(1), magnitude + lax.convert_element_type(by, held.dtype), endless - whole(1))
    new = jnp.where((magnitude == whole(0)) | (magnitude >= endless), magnitude, new) | (
        held & ~whole(2 ** (width - 1) - 1)
    )
    new = lax.convert_element_type(new, jnp.dtype(f"int{width}"))
    return lax.bitcast_convert_type(new, x.dtype)


def _hashed(held: Any, shape: Sequence[int], seed: Seed) -> Any:
    """32 random bits for each entry: the finaliser of MurmurHash3 (Appleby, 2011)."""
    low = lax.convert_element_type(held, jnp.uint32)
    where = lax.reshape(lax.iota(jnp.uint32, math.prod(shape)), shape)
    h = (low * np.uint32(0xCC9E2D51)) ^ (where * np.uint32(0x9E3779B1)) ^ seed
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))
