"""What stands around sites: elementwise functions, cuts, joins, reductions, changes of layout. Each keeps floats finite."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .piece import Array, Draft, Piece, alone, wider


def _even(x: Array) -> Array:
    """Pairs of the last axis added, where they are even in number."""
    return x if x.shape[-1] % 2 else x.reshape(*x.shape[:-1], -1, 2).sum(-1)


def _row_of_three(x: Array) -> Array:
    return jnp.concatenate([x, jnp.ones_like(x[..., :1]), -x[..., -1:]], -1)


PLAIN: dict[str, Callable[[Array], Array]] = {
    "sin": jnp.sin,
    "times 2": lambda x: 2 * x,
    "negated": lambda x: -x,
    "over 3": lambda x: x / 3,
    "plus 1": lambda x: x + 1,
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "clipped": lambda x: jnp.clip(x, -2, 2),
    "exp of -x^2": lambda x: jnp.exp(-jnp.square(x)),
    "over 1 + abs": lambda x: x / (1 + jnp.abs(x)),
    "cut": lambda x: x[..., 1:] if x.shape[-1] > 1 else x,
    "every other": lambda x: x[..., ::2],
    "first rows": lambda x: x[: max(1, x.shape[0] - 1)],
    "joined to itself": lambda x: jnp.concatenate([x, jnp.sin(x)], -1),
    "joined": _row_of_three,
    "less its mean": lambda x: x - x.mean(-1, keepdims=True),
    "less its maximum": lambda x: x - x.max(-1, keepdims=True),
    "over its sum": lambda x: x / (1 + jnp.abs(x).sum(-1, keepdims=True)),
    "summed in pairs": _even,
    "turned": lambda x: jnp.swapaxes(x, -1, -2) if x.ndim > 1 else x,
    "axes reversed": lambda x: x.T,
    "flattened": lambda x: x.reshape(-1, x.shape[-1]),
    "unit axis": lambda x: x[None] if x.ndim < 4 else x,
    "unit axis, last": lambda x: x[..., None] if x.ndim < 4 else x,
    "split": lambda x: x.reshape(*x.shape[:-1], 2, -1) if x.shape[-1] % 2 == 0 and x.ndim < 4 else x,
    "merged": lambda x: x.reshape(*x.shape[:-2], -1) if x.ndim > 1 else x,
    "flipped": lambda x: jnp.flip(x, -1),
    "rolled": lambda x: jnp.roll(x, 1, -1),
    "padded": lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(1, 0)]),
    "cumulated": lambda x: jnp.cumsum(x, -1) * 0.5,
    "taken": lambda x: x[..., jnp.array([0, -1, 0])],
    "sliced dynamically": lambda x: lax.dynamic_slice_in_dim(x, 0, max(1, x.shape[0] - 1)),
    "rounded": lambda x: x.astype(jnp.bfloat16).astype(x.dtype),
    "widened": lambda x: jnp.sin(x.astype(wider())).astype(x.dtype),
    "frozen": lambda x: lax.stop_gradient(x) + 0 * x,
    "named": lambda x: checkpoint_name(x, "glue"),
    "barrier": lax.optimization_barrier,
    "softmax": lambda x: jax.nn.softmax(x, -1),
    "one of two": lambda x: jnp.where(x > 0.3, x, jnp.sin(x)),
    "reduced": lambda x: jnp.stack([x.sum(-1), x.max(-1), x.min(-1)], -1),
    "gram": lambda x: x @ jnp.swapaxes(x, -1, -2) / x.shape[-1] if x.ndim > 1 else x,
    "top gate": lambda x: x * jax.nn.sigmoid(x.sum(-1, keepdims=True)),
}


def glue(d: Draft) -> Piece:
    """One function of one array, without parameters, or a product of the array with a parameter of its shape."""
    if d.chance(0.15):
        w = d.param(*d.shape)
        return d.done(alone(lambda p, x: x * w(p).astype(x.dtype)), d.shape, "glue")
    fn = d.pick(PLAIN)
    shape = jax.eval_shape(fn, jax.ShapeDtypeStruct(d.shape, d.dtype)).shape
    if math.prod(shape) > 400:
        fn, shape = PLAIN["sin"], d.shape
    return d.done(alone(lambda p, x: fn(x)), shape, "glue")


# -- two values met: x and f(x), or f(x) and g(x) ---------------------------------------------------------------------

MEETINGS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": lambda a, b: a + b,
    "sum, turned": lambda a, b: b + a,
    "difference": lambda a, b: a - b,
    "product": lambda a, b: a * b,
    "gate": lambda a, b: a * jax.nn.silu(b),
    "joined": lambda a, b: jnp.concatenate([a, b], -1),
    "larger": jnp.maximum,
    "weighted": lambda a, b: a + 0.3 * (b - a),
}


def met(name: str, x: Array, y: Array) -> Array:
    """Two arrays of one shape made one; where the shapes differ, the second with the mean of the first added."""
    if x.shape != y.shape:
        return y + x.mean().astype(y.dtype)
    return MEETINGS[name](x, y.astype(x.dtype))
