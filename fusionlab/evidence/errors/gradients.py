"""The compared gradient: that of a fixed random weighting of all float outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp


def random_cotangents(out_avals: Iterable[Any]) -> list[np.ndarray]:
    """One fixed standard-normal array per output leaf, in its dtype; a zero for integers, which carry no gradient."""
    rng = np.random.default_rng(0)
    cotangents = []
    for aval in out_avals:
        if jnp.issubdtype(aval.dtype, np.floating):
            cotangents.append(rng.standard_normal(aval.shape).astype(aval.dtype))
        elif jnp.issubdtype(aval.dtype, np.complexfloating):
            pair = rng.standard_normal((2, *aval.shape))
            cotangents.append((pair[0] + 1j * pair[1]).astype(aval.dtype))
        else:
            cotangents.append(np.zeros(()))
    return cotangents


def value_and_gradients(fn: Callable, chosen: Sequence[int]) -> Callable:
    """(cotangents, args, kwargs) -> (sum of cotangent * output, gradients of the chosen leaves of (args, kwargs)).

    The gradients are the vector-Jacobian product; the sum runs in float32 or wider, and adds no rounding to them.
    """

    def program(cotangents: list, args: tuple, kwargs: dict) -> tuple[Any, list]:
        flat, tree = jax.tree_util.tree_flatten((args, kwargs))

        def scalar(leaves: list) -> Any:
            full = list(flat)
            for i, leaf in zip(chosen, leaves, strict=True):
                full[i] = leaf
            a, k = jax.tree_util.tree_unflatten(tree, full)
            outs = jax.tree_util.tree_leaves(fn(*a, **k))
            return sum(
                (_weighted(o, c) for o, c in zip(outs, cotangents, strict=True) if jnp.issubdtype(o.dtype, np.inexact)),
                start=jnp.zeros(()),
            )

        return jax.value_and_grad(scalar)([flat[i] for i in chosen])

    return program


def _weighted(out: Any, cotangent: Any) -> Any:
    wide = jnp.promote_types(out.dtype, np.float32)
    return jnp.sum(out.astype(wide) * cotangent.astype(wide)).real
