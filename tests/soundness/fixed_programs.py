"""Programs at which something was once wrong, written out: what the generator makes of a seed changes with each site it learns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from .generator import Program
from .pieces.piece import Param


def _exponentials(s: Array) -> Array:
    """A softmax without a maximum, of scores whose keys come first."""
    return jnp.exp(s) / jnp.exp(s).sum(-2, keepdims=True)


def _attended(x: Array, w: Array, scale: Array) -> Array:
    q, k, v = (a.reshape(-1, 3, 8) for a in jnp.split(x @ w.astype(x.dtype), 3, -1))
    s = jnp.einsum("thd,shd->hts", q, k) * scale.astype(x.dtype)
    weights = _exponentials(s.swapaxes(-1, -2)).swapaxes(-1, -2)
    return jnp.einsum("hts,shd->thd", weights, v).reshape(len(x), -1)


def unbounded() -> Program:
    """Attention without a maximum subtracted, on x and, with other weights, on sin(x). At large inputs the exponentials of the first
    overflow: in bfloat16 the original's gradient of those weights is NaN, in float64 it has lost a term. The fused op's is right, and the
    site has a note that says so.
    """

    def fn(x: Array, w: Array, scale: Array) -> list[Array]:
        both = jax.vmap(_attended, (0, 0, None))(jnp.stack([x, jnp.sin(x)]), w, scale)
        return [both.sum(0)]

    params = Param((6, 3), "bfloat16", "data"), Param((2, 3, 72), "float32", "weight"), Param((), "float32", "scale")
    return Program(2869, fn, params, "attention without max, on x and on sin(x)", "", 3.0, True)


def _gelu_by_sigmoid(h: Array) -> Array:
    return h * jax.nn.sigmoid(1.5957691 * (h + 0.044715 * h**3))


def _twice(x: Array, w: Array, b: Array) -> list[Array]:
    for _ in range(2):
        x = _gelu_by_sigmoid(x @ w + b)
    return [x]


def _over_two_axes(x: Array, w: Array, b: Array) -> list[Array]:
    return [_gelu_by_sigmoid(jnp.einsum("ab,abc->c", x[:, None], w) + b)]


_TWICE = Param((5, 5, 1), "bfloat16", "data"), Param((1, 1), "bfloat16", "weight"), Param((1,), "bfloat16", "bias")
_TWO_AXES = Param((4,), "bfloat16", "data"), Param((4, 1, 2), "bfloat16", "weight"), Param((2,), "bfloat16", "bias")
GELUS_BY_SIGMOID = {
    "twice in a row": Program(1010326, _twice, _TWICE, "gelu by sigmoid, twice", "jit", 1e4, True),
    "of a sum over two axes": Program(
        3030975, _over_two_axes, _TWO_AXES, "gelu by sigmoid, two axes", "remat", 1e4, True
    ),
}


def flattened_norm(args: tuple[Array, ...]) -> Array:
    """A norm over the first axes of a layer's result, and its rows joined: a reshape takes the norm's axes apart in the backward pass."""
    x, w, c, scale, bias = args
    h = jnp.einsum("abcd,cde->abe", x[:, :, None], w.astype(x.dtype)) + c.astype(x.dtype)
    h = jnp.where(h > 0, h, 0)
    variance = jnp.mean(lax.square(h - jnp.mean(h, (0, 1), keepdims=True)), (0, 1), keepdims=True)
    normed = (h - jnp.mean(h, (0, 1), keepdims=True)) / jnp.sqrt(jnp.maximum(variance, 1e-6))
    return (scale.astype(x.dtype) * normed + bias.astype(x.dtype)).reshape(9, 8)


FLATTENED = (
    Param((3, 3, 3), "bfloat16", "data"),
    Param((1, 3, 8), "float32", "weight"),
    Param((8,), "float32", "bias"),
    Param((3, 3, 1), "float32", "scale"),
    Param((3, 3, 1), "float32", "bias"),
)
