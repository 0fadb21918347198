"""The same small models in flax.linen, flax.nnx, equinox and haiku: (function, arguments) pairs. Not a test module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
from flax import nnx

Case = tuple[Callable[..., Any], tuple[Any, ...]]
ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu_tanh": jax.nn.gelu,
    "gelu_erf": lambda h: jax.nn.gelu(h, approximate=False),
}
KEY = jax.random.key(0)


def linen_mlp(act: Callable, dtype: Any) -> Case:
    class MLP(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            h = act(nn.Dense(24, dtype=dtype, param_dtype=dtype)(x))
            return nn.Dense(10, dtype=dtype, param_dtype=dtype)(h)

    x = jnp.ones((6, 12), dtype)
    model = MLP()
    return model.apply, (model.init(KEY, x), x)


def nnx_mlp(act: Callable, dtype: Any) -> Case:
    class MLP(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first = nnx.Linear(12, 24, dtype=dtype, param_dtype=dtype, rngs=rngs)
            self.second = nnx.Linear(24, 10, dtype=dtype, param_dtype=dtype, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.second(act(self.first(x)))

    return _nnx_case(MLP(nnx.Rngs(0)), jnp.ones((6, 12), dtype))


def _nnx_case(model: Any, *args: Any) -> Case:
    definition, state = nnx.split(model)
    return (lambda state, *args: nnx.merge(definition, state)(*args)), (state, *args)


def equinox_mlp(act: Callable, dtype: Any) -> Case:
    model = eqx.nn.MLP(12, 10, 24, 1, activation=act, dtype=dtype, key=KEY)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    return (lambda p, x: jax.vmap(eqx.combine(p, static))(x)), (params, jnp.ones((6, 12), dtype))


def haiku_mlp(act: Callable, dtype: Any) -> Case:
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([24, 10], activation=act)(x)))
    x = jnp.ones((6, 12), dtype)
    return model.apply, (model.init(KEY, x), x)


MLPS = {"linen": linen_mlp, "nnx": nnx_mlp, "equinox": equinox_mlp, "haiku": haiku_mlp}


def linen_attention(causal: bool, dtype: Any) -> Case:
    model = nn.MultiHeadDotProductAttention(num_heads=3, qkv_features=24, dtype=dtype, param_dtype=dtype)
    x = jnp.ones((2, 10, 12), dtype)

    def apply(params: Any, x: Any) -> Any:
        return model.apply(params, x, x, mask=nn.make_causal_mask(x[..., 0]) if causal else None)

    return apply, (model.init(KEY, x, x), x)


def nnx_attention(causal: bool, dtype: Any) -> Case:
    model = nnx.MultiHeadAttention(
        num_heads=3, in_features=12, qkv_features=24, dtype=dtype, param_dtype=dtype, decode=False, rngs=nnx.Rngs(0)
    )
    definition, state = nnx.split(model)

    def apply(state: Any, x: Any) -> Any:
        mask = nnx.make_causal_mask(x[..., 0]) if causal else None
        return nnx.merge(definition, state)(x, mask=mask)

    return apply, (state, jnp.ones((2, 10, 12), dtype))


def equinox_attention(causal: bool, dtype: Any) -> Case:
    model = eqx.nn.MultiheadAttention(3, 12, dtype=dtype, key=KEY)
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def apply(p: Any, x: Any) -> Any:
        mask = jnp.tril(jnp.ones((10, 10), bool)) if causal else None
        return jax.vmap(lambda x: eqx.combine(p, static)(x, x, x, mask=mask))(x)

    return apply, (params, jnp.ones((2, 10, 12), dtype))


def haiku_attention(causal: bool, dtype: Any) -> Case:
    def forward(x: Any) -> Any:
        mask = jnp.tril(jnp.ones((1, 1, 10, 10))) if causal else None
        return hk.MultiHeadAttention(3, 8, w_init=hk.initializers.VarianceScaling())(x, x, x, mask=mask)

    model = hk.without_apply_rng(hk.transform(forward))
    x = jnp.ones((2, 10, 12), dtype)
    return model.apply, (model.init(KEY, x), x)


ATTENTIONS = {"linen": linen_attention, "nnx": nnx_attention, "equinox": equinox_attention, "haiku": haiku_attention}


def linen_cross(dtype: Any) -> Case:
    model = nn.MultiHeadDotProductAttention(num_heads=3, qkv_features=24, dtype=dtype, param_dtype=dtype)
    x, memory = jnp.ones((2, 10, 12), dtype), jnp.ones((2, 7, 12), dtype)
    return model.apply, (model.init(KEY, x, memory), x, memory)


def nnx_cross(dtype: Any) -> Case:
    model = nnx.MultiHeadAttention(
        num_heads=3, in_features=12, qkv_features=24, dtype=dtype, param_dtype=dtype, decode=False, rngs=nnx.Rngs(0)
    )
    return _nnx_case(model, jnp.ones((2, 10, 12), dtype), jnp.ones((2, 7, 12), dtype))


def equinox_cross(dtype: Any) -> Case:
    model = eqx.nn.MultiheadAttention(3, 12, dtype=dtype, key=KEY)
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def apply(p: Any, x: Any, memory: Any) -> Any:
        return jax.vmap(lambda x, m: eqx.combine(p, static)(x, m, m))(x, memory)

    return apply, (params, jnp.ones((2, 10, 12), dtype), jnp.ones((2, 7, 12), dtype))


def haiku_cross(dtype: Any) -> Case:
    def forward(x: Any, memory: Any) -> Any:
        return hk.MultiHeadAttention(3, 8, w_init=hk.initializers.VarianceScaling())(x, memory, memory)

    model = hk.without_apply_rng(hk.transform(forward))
    x, memory = jnp.ones((2, 10, 12), dtype), jnp.ones((2, 7, 12), dtype)
    return model.apply, (model.init(KEY, x, memory), x, memory)


CROSS_ATTENTIONS = {"linen": linen_cross, "nnx": nnx_cross, "equinox": equinox_cross, "haiku": haiku_cross}


def linen_norm(kind: str, dtype: Any) -> Case:
    norm = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}[kind]
    model, x = norm(dtype=dtype), jnp.ones((6, 12), dtype)  # float32 parameters
    return model.apply, (model.init(KEY, x), x)


def nnx_norm(kind: str, dtype: Any) -> Case:
    norm = {"layer": nnx.LayerNorm, "rms": nnx.RMSNorm}[kind]
    return _nnx_case(norm(12, dtype=dtype, rngs=nnx.Rngs(0)), jnp.ones((6, 12), dtype))


def equinox_norm(kind: str, dtype: Any) -> Case:
    norm = {"layer": eqx.nn.LayerNorm, "rms": eqx.nn.RMSNorm}[kind]
    params, static = eqx.partition(norm(12, dtype=dtype), eqx.is_inexact_array)
    return (lambda p, x: jax.vmap(eqx.combine(p, static))(x)), (params, jnp.ones((6, 12), dtype))


def haiku_norm(kind: str, dtype: Any) -> Case:
    def forward(x: Any) -> Any:
        return hk.RMSNorm(-1)(x) if kind == "rms" else hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)

    model, x = hk.without_apply_rng(hk.transform(forward)), jnp.ones((6, 12), dtype)
    return model.apply, (model.init(KEY, x), x)


NORMS = {"linen": linen_norm, "nnx": nnx_norm, "equinox": equinox_norm, "haiku": haiku_norm}


def linen_dropping(shared: bool, dtype: Any) -> Case:
    model = nn.MultiHeadDotProductAttention(
        num_heads=3, qkv_features=24, dtype=dtype, param_dtype=dtype, dropout_rate=0.1, broadcast_dropout=shared
    )
    x = jax.random.normal(KEY, (2, 10, 12), dtype)

    def apply(params: Any, x: Any, key: Any) -> Any:
        return model.apply(params, x, deterministic=False, rngs={"dropout": key})

    return apply, (model.init(KEY, x, deterministic=True), x, jax.random.key(5))


def nnx_dropping(shared: bool, dtype: Any) -> Case:
    model = nnx.MultiHeadAttention(
        num_heads=3,
        in_features=12,
        qkv_features=24,
        dtype=dtype,
        param_dtype=dtype,
        dropout_rate=0.1,
        broadcast_dropout=shared,
        decode=False,
        rngs=nnx.Rngs(0),
        keep_rngs=False,
    )
    definition, state = nnx.split(model)

    def apply(state: Any, x: Any, key: Any) -> Any:
        return nnx.merge(definition, state)(x, deterministic=False, rngs=nnx.Rngs(dropout=key))

    return apply, (state, jax.random.normal(KEY, (2, 10, 12), dtype), jax.random.key(5))


def equinox_dropping(shared: bool, dtype: Any) -> Case:
    """Its Dropout on the weights."""

    def apply(x: Any, key: Any) -> Any:
        p = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", x, x))
        return jnp.einsum("bhts,bshd->bthd", eqx.nn.Dropout(0.1)(p, key=key), x)

    return apply, (jax.random.normal(KEY, (2, 10, 3, 8), dtype), jax.random.key(5))


def haiku_dropping(shared: bool, dtype: Any) -> Case:
    def apply(x: Any, key: Any) -> Any:
        p = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", x, x))
        p = hk.dropout(key, 0.1, p, broadcast_dims=(0, 1) if shared else ())
        return jnp.einsum("bhts,bshd->bthd", p, x)

    return apply, (jax.random.normal(KEY, (2, 10, 3, 8), dtype), jax.random.key(5))


DROPPING = {
    ("linen", True): linen_dropping,
    ("linen", False): linen_dropping,
    ("nnx", True): nnx_dropping,
    ("nnx", False): nnx_dropping,
    ("equinox", False): equinox_dropping,
    ("haiku", True): haiku_dropping,
    ("haiku", False): haiku_dropping,
}


def equinox_dropping_heads(dtype: Any) -> Case:
    """Its attention draws each head's mask of a key of its own."""
    model = eqx.nn.MultiheadAttention(3, 12, dropout_p=0.1, dtype=dtype, key=KEY)
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def apply(p: Any, x: Any, key: Any) -> Any:
        return eqx.combine(p, static)(x, x, x, key=key)

    return apply, (params, jax.random.normal(KEY, (10, 12), dtype), jax.random.key(5))
