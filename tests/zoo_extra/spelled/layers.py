"""What the layers are made of that several libraries write the same way, and how one becomes a model with its truth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from zoo.config import Composite, Part, Sizes
from zoo.model import Built, Model, Shape, activations, assemble, struct, structs

Array = jax.Array
Params = dict[str, Array]
Layer = Callable[..., Any]
STACKED = 6  # layers in a scan
Inputs = Callable[[Sizes, Any], list[Any]]


def spelled(
    of: str,
    layer: Layer,
    shapes: Mapping[str, Shape],
    part: Part,
    sizes: Sizes | None = None,
    inputs: Inputs = lambda sizes, dtype: [],
    wide: bool = False,
    times: int = 0,
) -> Model:
    """A layer of the model `of`: `layer(sizes, dtype, params, x, *inputs)`.

    `wide` parameters are f32 whatever the dtype. With `times` it is several layers, and their parameters are a list.
    """
    config = Composite(parts=((times or 1, part),), sizes=sizes or Sizes(), optimizer="sgd")
    return Model(of.replace("/", "_"), "spelled", config, partial(_build, layer, shapes, inputs, wide, times, config))


def _build(layer: Layer, shapes: Any, inputs: Inputs, wide: bool, times: int, config: Composite, dtype: Any) -> Built:
    given = [activations(config, dtype), *inputs(config.sizes, dtype)]
    one = structs(shapes, jnp.float32 if wide else dtype)
    params = [dict(one) for _ in range(times)] if times else one
    return assemble(partial(layer, config.sizes, dtype), params, given, config)


def products(bias: bool = True, **weights: Sequence[int]) -> dict[str, Shape]:
    """The shapes of weights, each with a bias along its last axis."""
    shapes: dict[str, Shape] = {name: tuple(shape) for name, shape in weights.items()}
    return shapes | ({f"{name}_b": shape[-1:] for name, shape in shapes.items()} if bias else {})


def norms(width: int, *names: str, shift: bool = True) -> dict[str, Shape]:
    """The shapes of the scales of norms, and of their shifts."""
    shapes: dict[str, Shape] = dict.fromkeys(names, (width,))
    return shapes | ({f"{name}_b": (width,) for name in names} if shift else {})


def padding(sizes: Sizes, dtype: Any) -> list[Any]:
    return [struct((sizes.batch, sizes.length), jnp.int32)]


def scanned(layer: Layer) -> Layer:
    """A layer whose weights are stacked for several, in a scan."""

    def layers(c: Sizes, dtype: Any, p: Params, x: Array, *rest: Array) -> Array:
        return lax.scan(lambda x, one: (layer(c, dtype, one, x, *rest), None), x, p)[0]

    return layers


def stacked(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    return {name: (STACKED, *shape) for name, shape in shapes.items()}


# -- as Flax's linen writes it ----------------------------------------------------------------------------------------------


def dense(p: Params, name: str, x: Array, dtype: Any) -> Array:
    x, w = x.astype(dtype), p[name].astype(dtype)
    y = lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())))
    bias = p.get(f"{name}_b")
    return y if bias is None else y + jnp.reshape(bias.astype(dtype), (1,) * (y.ndim - 1) + (-1,))


def layer_norm(p: Params, name: str, x: Array, dtype: Any, epsilon: float = 1e-6) -> Array:
    """The variance as the mean square less the squared mean; the scale times the root's inverse first."""
    wide, shape = x.astype(jnp.float32), (1,) * (x.ndim - 1) + (-1,)
    mean, square = wide.mean(-1), lax.square(wide).mean(-1)
    variance = jnp.maximum(0.0, square - lax.square(mean))
    mean, variance = jnp.expand_dims(mean, -1), jnp.expand_dims(variance, -1)
    factor = lax.rsqrt(variance + epsilon) * p[name].reshape(shape)
    return ((x - mean) * factor + p[f"{name}_b"].reshape(shape)).astype(dtype)


def attention_weights(q: Array, k: Array, bias: Array, dtype: Any) -> Array:
    """Queries over the root of their width, which is computed; a bias; the softmax."""
    q, k = q.astype(dtype), k.astype(dtype)
    q = q / jnp.sqrt(q.shape[-1]).astype(dtype)
    return jax.nn.softmax(jnp.einsum("...qhd,...khd->...hqk", q, k) + bias).astype(dtype)


def causal_positions(length: int) -> Array:
    """A causal mask, `[1, 1, length, length]`, of positions that are compared."""
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (1, length))
    return jnp.greater_equal(positions[..., :, None], positions[..., None, :])[:, None]


def causal_and_padding(causal: Array, mask: Array, longest: int, dtype: Any) -> Array:
    """The bias that transformers makes of a causal mask, cut from one of the longest text, and of the padding's."""
    batch, length = mask.shape
    causal = causal[:, :, :length, :length]
    causal = jnp.broadcast_to(causal, (batch, *causal.shape[1:]))
    seen = jnp.broadcast_to(jnp.expand_dims(mask, (-3, -2)), causal.shape)
    return mask_bias(jnp.logical_and(seen, causal), dtype)


def mask_bias(mask: Array, dtype: Any) -> Array:
    zeros, low = (jnp.full(mask.shape, value).astype(dtype) for value in (0.0, jnp.finfo(dtype).min))
    return lax.select(mask > 0, zeros, low)


def split_heads(x: Array, heads: int) -> Array:
    return x.reshape(*x.shape[:2], heads, -1)


def merge_heads(x: Array) -> Array:
    return x.reshape(*x.shape[:2], -1)


def rotate_half(x: Array) -> Array:
    half = x.shape[-1] // 2
    return jnp.concatenate((-x[..., half:], x[..., :half]), -1)
