"""Random inputs on which certification compares two programs."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from ..dtypes import is_float
from ..interpret.evaluate import ReducedSizes
from ..interpret.limits import KEPT_SIZES, CannotEvaluate
from ..interpret.random_bits import Keys
from ..jax_compat import split_closed, threefry_key

STEPS = 3  # a site that is told a number, as where to write into a cache, is looked at with each of 0, 1 and 2
# What hands an input on to a product: views and casts, and the parts it is split into.
_VIEWS_AND_SPLITS = frozenset(
    "reshape transpose convert_element_type broadcast_in_dim squeeze expand_dims slice split unstack copy".split()
)


def is_number(aval: Any) -> bool:
    return not aval.shape and not jnp.issubdtype(aval.dtype, jax.dtypes.extended) and np.dtype(aval.dtype).kind in "iu"


@dataclass(frozen=True)
class Reduction:
    """How sizes are reduced: some to given sizes, the other sizes of the operands to a few; none if `real`. `parts`, `most` and `cut` are
    as in `ReducedSizes`."""

    known: Mapping[int, int] = field(default_factory=dict)
    parts: frozenset[int] = frozenset()
    most: tuple[int, int] | None = None
    real: bool = False
    cut: Mapping[int, tuple[int, int]] = field(default_factory=dict)


def inputs_of(
    avals: Sequence[Any],
    out: Any,
    reduction: Reduction,
    seed: int = 0,
    true: float = 0.5,
    weights: Mapping[int, Sequence[int]] | None = None,
) -> tuple[ReducedSizes, list[np.ndarray]]:
    """Random inputs and a cotangent at reduced sizes; equal real sizes stay equal, different ones stay different.

    Of two or more booleans, both kinds are drawn. `true` is the share of booleans that are True, and `weights` as in `summed_with`: inputs
    scaled so that sums are of the order of 1.
    """
    table = _reduced_sizes((*avals, out), reduction)
    rng = np.random.default_rng(seed)
    number = itertools.count(seed)
    args = []
    for i, a in enumerate((*avals, out)):
        shape = tuple(table.get(int(s), int(s)) for s in a.shape)
        if jnp.issubdtype(a.dtype, jax.dtypes.extended):
            args.append(_keys(a, rng))
        elif is_float(a.dtype):
            args.append(rng.normal(size=shape) * _scale((weights or {}).get(i, ()), table))
        elif np.dtype(a.dtype).kind == "b":
            args.append(_mixed(rng.random(size=shape) < true))
        elif is_number(a):  # another one in each draw, and another than the next operand's
            args.append(np.asarray(next(number) % STEPS, a.dtype))
        else:
            args.append(rng.integers(0, 3, size=shape).astype(a.dtype))
    return ReducedSizes(table, reduction.parts, reduction.most, reduction.cut), args


def _reduced_sizes(avals: Sequence[Any], reduction: Reduction) -> dict[int, int]:
    """Size -> its reduced size, for the reduced sizes of some types."""
    table = dict(reduction.known)
    if reduction.real:
        return table
    every = {int(s) for a in avals for s in a.shape}
    kept = {s for s in every if s <= KEPT_SIZES}
    used = kept.union(table.values())
    for size in sorted(every - kept - table.keys()):
        table[size] = next(s for s in itertools.count(3) if s not in used)
        used.add(table[size])
    return table


def _keys(aval: Any, rng: np.random.Generator) -> Any:
    """Random keys of JAX's default generator; there is no proof for any other."""
    if aval.dtype != threefry_key():
        raise CannotEvaluate(f"an operand of dtype {aval.dtype}")
    return Keys(rng.integers(0, 1 << 32, (*aval.shape, 2), np.uint32), aval.dtype)


def _mixed(drawn: np.ndarray) -> np.ndarray:
    """Booleans of both kinds, if there are two or more."""
    if drawn.size > 1 and (drawn.all() or not drawn.any()):
        drawn.flat[0] = not drawn.flat[0]
    return drawn


def _scale(summed: Sequence[int], table: Mapping[int, int]) -> float:
    """1 / the size of a sum over axes of these sizes, of random numbers each of which stands for several (see evaluate.py)."""
    real, reduced = math.prod(summed), math.prod(table.get(n, n) for n in summed)
    return math.sqrt(reduced) / real if summed and real else 1.0


def summed_with(closed: Any) -> dict[int, tuple[int, ...]]:
    """Weight -> the sizes of the axes over which it is first summed. Weights are inputs multiplied by a computed value, or by another input
    that is read more often or has more axes, like the tokens from which queries, keys and values are computed.

    With weights of the order of 1, the scores of an attention after a projection would be so large that their softmax selects one key
    and hardly depends on anything: factors and masks could not be distinguished, and gradients would be rounding noise.
    """
    jaxpr, _ = split_closed(closed)
    products, reads = _products_of_inputs(jaxpr)

    def order_of(source: int) -> tuple[int, int]:
        return reads[source], len(jaxpr.invars[source].aval.shape)

    found: dict[int, tuple[int, ...]] = {}
    for eqn, sources in products:
        for side, source in enumerate(sources):
            if source is None:
                continue
            other = sources[1 - side]
            weight = other is None or order_of(source) < order_of(other)
            axes = eqn.params["dimension_numbers"][0][side] if weight else ()  # the first product that reads it counts
            found.setdefault(source, tuple(int(eqn.invars[side].aval.shape[int(d)]) for d in axes))
    return found


def _products_of_inputs(jaxpr: Any) -> tuple[list[tuple[Any, list[int | None]]], Counter[int | None]]:
    """(each product, with the inputs that its operands are views of or None), (input -> how often it or a view of it is read)."""
    came_from: dict[Any, int] = {v: i for i, v in enumerate(jaxpr.invars)}
    reads: Counter[int | None] = Counter()
    products: list[tuple[Any, list[int | None]]] = []
    for eqn in jaxpr.eqns:
        sources = [None if isinstance(a, jex_core.Literal) else came_from.get(a) for a in eqn.invars]
        name = eqn.primitive.name
        if name in _VIEWS_AND_SPLITS and sources[0] is not None:
            came_from.update((v, sources[0]) for v in eqn.outvars)
            continue
        reads.update(sources)
        if name == "dot_general":
            products.append((eqn, sources))
    return products, reads
