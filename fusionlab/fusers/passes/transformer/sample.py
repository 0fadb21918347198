"""A small layer for each of the layer passes, for their before and after pictures."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

_E, _H, _D, _F, _T = 16, 2, 8, 32, 8
_SHAPES = dict.fromkeys(("q", "k", "v", "out"), (_E, _E)) | {"qkv": (_E, 3 * _E), "up": (_E, _F), "down": (_F, _E)}


def _norm(x: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)


def sample(decoder: bool, fused: bool, spread: bool = False) -> tuple[Any, tuple[Any, ...]]:
    """A function with one layer, and its arguments; of a decoder with a cache that keys and values are appended to; where it is `spread`
    over devices, over one, so that it runs anywhere.
    """
    total = (lambda a: jax.lax.psum(a, "tp")) if spread else (lambda a: a)

    def layer(w: Any, x: Any, *cache: Any) -> Any:
        h = _norm(x)
        products = jnp.split(h @ w["qkv"], 3, -1) if fused else (h @ w["q"], h @ w["k"], h @ w["v"])
        q, k, v = (p.reshape(*p.shape[:2], _H, _D) for p in products)
        if cache:
            k, v = jnp.concatenate([cache[0], k], 1), jnp.concatenate([cache[1], v], 1)
        weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) / _D**0.5, -1)
        x = x + total(jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape) @ w["out"])
        y = x + total(jax.nn.relu(_norm(x) @ w["up"]) @ w["down"])
        return (y, k, v) if cache else y

    names = ("qkv",) if fused else ("q", "k", "v")
    w = {n: jnp.zeros(_SHAPES[n]) for n in (*names, "out", "up", "down")}
    past = jnp.zeros((2, _T, _H, _D))
    if spread:
        kinds = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((1,), ("tp",), axis_types=kinds, devices=jax.devices()[:1])
        whole = jax.sharding.PartitionSpec()
        layer = jax.shard_map(layer, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    return layer, (w, jnp.zeros((2, 1 if decoder else _T, _E)), *((past, past) if decoder else ()))
