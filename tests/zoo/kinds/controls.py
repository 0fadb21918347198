"""Models that hold few of the concepts or none, and near misses: programs that look like a concept and are not one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..config import Control, Sizes
from ..model import Built, Model, Shape, activations, assemble, memory, structs
from .attend import scale_of, scores_of, weighted

Array = jax.Array
Params = dict[str, Array]
Weights = Callable[[Sizes], Mapping[str, Shape]]
INNER: Weights = lambda sizes: {"w": (sizes.model, sizes.hidden), "b": (sizes.hidden,)}  # noqa: E731
QUERY_KEY_VALUE: Weights = lambda sizes: dict.fromkeys("qkv", (sizes.model, sizes.model))  # noqa: E731


def heads(p: Params, x: Array, source: Array) -> tuple[Array, Array, Array]:
    """Queries, keys and values in four heads, of three products without bias."""
    split = lambda value: value.reshape(*value.shape[:2], 4, -1)  # noqa: E731
    return split(x @ p["q"]), split(source @ p["k"]), split(source @ p["v"])


def softmax_over_queries(p: Params, x: Array, source: Array) -> Array:
    q, k, v = heads(p, x, source)
    return weighted(jax.nn.softmax(scores_of(q, k) * scale_of(q), axis=2), v)


def softmax_over_heads(p: Params, x: Array, source: Array) -> Array:
    q, k, v = heads(p, x, source)
    return weighted(jax.nn.softmax(scores_of(q, k) * scale_of(q), axis=1), v)


def sigmoid_attention(p: Params, x: Array, source: Array) -> Array:
    q, k, v = heads(p, x, source)
    return weighted(jax.nn.sigmoid(scores_of(q, k) * scale_of(q)), v)


def relu_attention(p: Params, x: Array, source: Array) -> Array:
    q, k, v = heads(p, x, source)
    return weighted(jax.nn.relu(scores_of(q, k) * scale_of(q)), v)


def squared_scores(p: Params, x: Array, source: Array) -> Array:
    """Normalized squares in the place of a softmax."""
    q, k, v = heads(p, x, source)
    s = jnp.square(scores_of(q, k))
    return weighted(s / (s.sum(-1, keepdims=True) + 1e-3), v)


def linear_attention(p: Params, x: Array, source: Array) -> Array:
    q, k, v = heads(p, x, source)
    summary = jnp.einsum("bshd,bshe->bhde", jax.nn.elu(k) + 1, v)
    return jnp.einsum("bthd,bhde->bthe", jax.nn.elu(q) + 1, summary)


def gram(p: Params, x: Array) -> Array:
    h = x @ p["w"] + p["b"]
    return h @ h.swapaxes(1, 2)


def bilinear(p: Params, x: Array, source: Array) -> Array:
    return (x @ p["w"]) @ source.swapaxes(1, 2)


def bias_over_rows(p: Params, x: Array) -> Array:
    """The added vector runs along the length, not along the features."""
    return x @ p["w"] + p["b"][:, None]


def full_bias(p: Params, x: Array) -> Array:
    return x @ p["w"] + p["b"]


def relu_before_bias(p: Params, x: Array) -> Array:
    return jax.nn.relu(x @ p["w"]) + p["b"]


def relu_after_residual(p: Params, x: Array, more: Array) -> Array:
    """Both summands besides the product are of its full shape, but for the bias."""
    return jax.nn.relu((x @ p["w"] + p["b"]) + jnp.tile(more.mean(1, keepdims=True), (1, 1, 2))[..., : p["b"].shape[0]])


def relu_of_slice(p: Params, x: Array) -> Array:
    return jax.nn.relu((x @ p["w"] + p["b"])[..., :20])


def elementwise(p: Params, x: Array) -> Array:
    return jnp.sin(x * p["gain"]) + jnp.log1p(jnp.abs(x)) - p["offset"]


def reductions(p: Params, x: Array) -> Array:
    """Cumulative sums and sorts."""
    return jnp.cumsum(x * p["gain"], axis=1) - jnp.sort(x, axis=1) + p["offset"]


def linear_recurrence(p: Params, x: Array) -> Array:
    """A diagonal state space, by an associative scan."""
    decay = jnp.broadcast_to(jnp.exp(-jnp.abs(p["gain"])), x.shape)

    def combine(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
        return first[0] * second[0], second[0] * first[1] + second[1]

    return lax.associative_scan(combine, (decay, x * p["offset"]), axis=1)[1]


def two_gates(p: Params, x: Array) -> Array:
    """A blend whose weights do not add up to one."""
    keep, take = jnp.cos(x * p["gain"]), jnp.sin(x + p["offset"])
    return keep * x + (1 - take) * jnp.abs(x)


def convolution(p: Params, x: Array) -> Array:
    h = lax.conv_general_dilated(x, p["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    return jax.nn.relu(h + p["bias"])


def build(function: Callable[..., Array], weights: Weights, source: bool, config: Control, dtype: Any) -> Built:
    inputs = [activations(config, dtype), *([memory(config, dtype)] if source else [])]
    return assemble(function, structs(weights(config.sizes), dtype), inputs, config)


def _model(function: Callable[..., Array], weights: Weights, source: bool = False, **fields: Any) -> Model:
    config = Control(spelling=function.__name__, **fields)
    return Model(function.__name__, "controls", config, partial(build, function, weights, source, config))


def _pointwise(sizes: Sizes) -> Mapping[str, Shape]:
    return {"gain": (sizes.model,), "offset": (sizes.model,)}


def _attends(function: Callable[..., Array], softmax: int = 0) -> Model:
    """Three products without bias, and the two of the scores and the values."""
    return _model(function, QUERY_KEY_VALUE, True, no_bias=3, leaves=3, other_products=2, softmax=softmax)


MODELS: tuple[Model, ...] = (
    _attends(softmax_over_queries, softmax=1),
    _attends(softmax_over_heads, softmax=1),
    *(_attends(function) for function in (sigmoid_attention, relu_attention, squared_scores, linear_attention)),
    _model(gram, INNER, linear=1, leaves=2, other_products=1),
    _model(bilinear, lambda sizes: {"w": (sizes.model, sizes.model)}, True, no_bias=1, leaves=1, other_products=1),
    _model(bias_over_rows, lambda sizes: {"w": (sizes.model, sizes.hidden), "b": (sizes.length,)}, no_bias=1, leaves=2),
    _model(
        full_bias,
        lambda sizes: {"w": (sizes.model, sizes.hidden), "b": (sizes.length, sizes.hidden)},
        no_bias=1,
        leaves=2,
        optimizer="sgd",
    ),
    _model(relu_before_bias, INNER, no_bias=1, relu=1, leaves=2),
    _model(relu_after_residual, INNER, True, linear=1, leaves=2),
    _model(relu_of_slice, INNER, linear=1, leaves=2, optimizer="sgd"),
    *(_model(function, _pointwise, leaves=2) for function in (elementwise, reductions, linear_recurrence, two_gates)),
    _model(convolution, lambda sizes: {"kernel": (3, sizes.model, sizes.hidden), "bias": (sizes.hidden,)}, leaves=2),
)
