"""Norms, gates and averages written by hand, each in several spellings."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..config import Gate, Mlp, Norm
from ..model import Built, Model, Shape, activations, assemble, structs

Array = jax.Array
EPS = 1e-5


def moments(x: Array) -> tuple[Array, Array]:
    mean = x.mean(-1, keepdims=True)
    return mean, jnp.square(x - mean).mean(-1, keepdims=True)


def two_pass(x: Array, g: Array, b: Array) -> Array:
    mean, variance = moments(x)
    return (x - mean) * lax.rsqrt(variance + EPS) * g + b


def with_var(x: Array, g: Array, b: Array) -> Array:
    return (x - jnp.mean(x, -1, keepdims=True)) / jnp.sqrt(jnp.var(x, -1, keepdims=True) + EPS) * g + b


def fast_variance(x: Array, g: Array, b: Array) -> Array:
    mean = x.mean(-1, keepdims=True)
    variance = jnp.maximum((x * x).mean(-1, keepdims=True) - mean * mean, 0)
    return (x - mean) * (lax.rsqrt(variance + EPS) * g) + b


def by_sums(x: Array, g: Array, b: Array) -> Array:
    centred = x - jnp.sum(x, -1, keepdims=True) / x.shape[-1]
    variance = jnp.sum(centred * centred, -1, keepdims=True) / x.shape[-1]
    return g * centred * (variance + EPS) ** -0.5 + b


def plus_one(x: Array, g: Array, b: Array) -> Array:
    mean, variance = moments(x)
    return (x - mean) * lax.rsqrt(variance + EPS) * (1 + g) + b


def eps_outside(x: Array, g: Array, b: Array) -> Array:
    mean, variance = moments(x)
    return (x - mean) / (jnp.sqrt(variance) + EPS) * g + b


def channel_first(x: Array, g: Array, b: Array) -> Array:
    """The normalized axis is the middle one of three."""
    x = x.swapaxes(1, 2)
    mean = x.mean(1, keepdims=True)
    variance = ((x - mean) ** 2).mean(1, keepdims=True)
    return ((x - mean) * lax.rsqrt(variance + EPS) * g[:, None] + b[:, None]).swapaxes(1, 2)


def stats_f32(x: Array, g: Array, b: Array) -> Array:
    wide = x.astype(jnp.float32)
    mean, variance = moments(wide)
    return ((wide - mean) * lax.rsqrt(variance + EPS)).astype(x.dtype) * g + b


def one_row(x: Array, g: Array, b: Array) -> Array:
    """A norm of one vector, mapped over rows and batch."""
    one = lambda row: (row - row.mean()) * lax.rsqrt(row.var() + EPS) * g + b  # noqa: E731
    return jax.vmap(jax.vmap(one))(x)


def bare(x: Array) -> Array:
    mean, variance = moments(x)
    return (x - mean) * lax.rsqrt(variance + EPS)


def no_shift(x: Array, g: Array) -> Array:
    mean, variance = moments(x)
    return (x - mean) * lax.rsqrt(variance + EPS) * g


def rms(x: Array, g: Array) -> Array:
    return x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + EPS) * g


def rms_divided(x: Array, g: Array) -> Array:
    return g * (x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + EPS))


def rms_plus_one(x: Array, g: Array) -> Array:
    """As Gemma and Llama write it: in f32, with a cast before the gain."""
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + EPS)).astype(x.dtype) * (1 + g)


def rms_bare(x: Array) -> Array:
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + EPS)


def unit_length(x: Array, g: Array) -> Array:
    """Divided by the length, not by the root mean square: neither norm."""
    return x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + EPS) * g


def uncentred(x: Array, g: Array) -> Array:
    """Divided by the deviation, but not centred: neither norm."""
    return x * lax.rsqrt(jnp.var(x, -1, keepdims=True) + EPS) * g


def over_batch(x: Array, g: Array, b: Array) -> Array:
    """A batch norm: each feature by its mean and variance over the rows, neither norm."""
    mean = x.mean((0, 1))
    variance = jnp.square(x - mean).mean((0, 1))
    return (x - mean) * lax.rsqrt(variance + EPS) * g + b


def build_norm(function: Callable[..., Array], config: Norm, dtype: Any) -> Built:
    """Blocks of a biased product and a norm."""
    sizes = config.sizes
    names = [name for name, wanted in (("scale", config.scale), ("shift", config.shift)) if wanted]
    shapes: dict[str, Shape] = {}
    for block in range(config.blocks):
        shapes |= {f"w{block}": (sizes.model, sizes.model), f"b{block}": (sizes.model,)}
        shapes |= {f"{name}{block}": (sizes.model,) for name in names}

    def forward(params: dict[str, Array], x: Array) -> Array:
        for block in range(config.blocks):
            h = x @ params[f"w{block}"] + params[f"b{block}"]
            x = x + function(h, *(params[f"{name}{block}"] for name in names))
        return x

    return assemble(forward, structs(shapes, dtype), [activations(config, dtype)], config)


# Spellings of the blend `a * (1 - w) + b * w`.
BLENDS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "products": lambda a, b, w: a * (1 - w) + b * w,
    "difference": lambda a, b, w: a + w * (b - a),
    "swapped": lambda a, b, w: w * b + (1.0 - w) * a,
    "minus": lambda a, b, w: a - w * (a - b),
    "expanded": lambda a, b, w: a - w * a + w * b,
}


def build_gate(config: Gate, dtype: Any) -> Built:
    """Highway layers: the input and its transform, blended by a gate."""
    sizes = config.sizes
    shapes: dict[str, Shape] = {}
    for block in range(config.blocks):
        shapes |= {f"{name}{block}": (sizes.model, sizes.model) for name in ("w", "v")}
        shapes |= {f"{name}{block}": (sizes.model,) for name in ("b", "c")}

    def forward(params: dict[str, Array], x: Array) -> Array:
        for block in range(config.blocks):
            change = jnp.tanh(x @ params[f"w{block}"] + params[f"b{block}"])
            gate = jax.nn.sigmoid(x @ params[f"v{block}"] + params[f"c{block}"])
            x = BLENDS[config.spelling](x, change, gate)
        return x

    return assemble(forward, structs(shapes, dtype), [activations(config, dtype)], config)


def build_averaged(config: Mlp, dtype: Any) -> Built:
    """Two products whose parameters the train step averages."""
    sizes = config.sizes
    shapes = {"w0": (sizes.model, sizes.hidden), "b0": (sizes.hidden,), "w1": (sizes.hidden, sizes.out)}

    def forward(params: dict[str, Array], x: Array) -> Array:
        return jax.nn.relu(x @ params["w0"] + params["b0"]) @ params["w1"]

    return assemble(forward, structs(shapes, dtype), [activations(config, dtype)], config)


def _norm(name: str, function: Callable[..., Array], **fields: Any) -> Model:
    fields.setdefault("spelling", name)
    config = Norm(**fields)
    return Model(name, "norms", config, partial(build_norm, function, config))


def _gate(spelling: str) -> Model:
    config = Gate(blocks=2, spelling=spelling)
    return Model(f"highway_{spelling}", "norms", config, partial(build_gate, config))


def _averaged(name: str, **fields: Any) -> Model:
    config = Mlp(biased="hidden", **fields)
    return Model(f"averaged_{name}", "norms", config, partial(build_averaged, config))


AFFINE = (two_pass, with_var, fast_variance, by_sums, plus_one, eps_outside, channel_first, stats_f32, one_row)
MODELS: tuple[Model, ...] = (
    *(_norm(function.__name__, function) for function in AFFINE),
    _norm("two_blocks", two_pass, blocks=2, optimizer="sgd"),
    _norm("bare", bare, scale=False, shift=False),
    _norm("no_shift", no_shift, shift=False),
    *(
        _norm(function.__name__, function, kind="rms_norm", shift=False)
        for function in (rms, rms_divided, rms_plus_one)
    ),
    _norm("rms_bare", rms_bare, kind="rms_norm", scale=False, shift=False),
    _norm("unit_length", unit_length, kind=None, shift=False),
    _norm("uncentred", uncentred, kind=None, shift=False),
    _norm("over_batch", over_batch, kind=None),
    *(_gate(spelling) for spelling in BLENDS),
    _averaged("products", ema="products", optimizer="sgd"),
    _averaged("difference", ema="difference", optimizer="sgd"),
    _averaged("traced", ema="traced", optimizer="adamw"),
)
