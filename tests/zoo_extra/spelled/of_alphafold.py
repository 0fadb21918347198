"""Of AlphaFold's Evoformer: attention around a node of the pairs, with a bias of the pairs, and triangle multiplication."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from zoo.config import Part, Sizes
from zoo.model import Model, struct

from ..haiku_models import ATTENTION, PAIR_BIAS, TRIANGLE
from ..parts import add, mlp
from .layers import Array, Params, norms, products, spelled

EDGES = 20  # features of an edge


def linear(p: Params, name: str, x: Array) -> Array:
    return jnp.einsum("...a, ah->...h", x, p[name]) + p[f"{name}_b"]


def norm(p: Params, name: str, x: Array) -> Array:
    """Haiku's: the factor of the root and the scale first."""
    wide = x.astype(jnp.float32)
    mean, variance = jnp.mean(wide, -1, keepdims=True), jnp.var(wide, -1, keepdims=True)
    scale, shift = (p[key].astype(jnp.float32).reshape(1, 1, -1) for key in (name, f"{name}_b"))
    inverse = jnp.broadcast_to(scale, wide.shape) * jax.lax.rsqrt(variance + 1e-5)
    return (inverse * (wide - mean) + jnp.broadcast_to(shift, wide.shape)).astype(x.dtype)


def attention(c: Sizes, p: Params, x: Array, mask: Array) -> Array:
    """Its output gated by a product of its input; the mask as a large number, the scores clipped."""
    bias = (1e9 * (mask - 1.0))[:, None, None, :]
    x = norm(p, "first", x)
    pairs = jnp.einsum("qkc,ch->hqk", x, p["pairs"])
    q = jnp.einsum("bqa,ahc->bqhc", x, p["query"]) * c.head ** (-0.5)
    k, v = (jnp.einsum("bka,ahc->bkhc", x, p[name]) for name in ("key", "value"))
    scores = jnp.einsum("bqhc,bkhc->bhqk", q, k) + bias + jnp.expand_dims(pairs, 0)
    w = jax.nn.softmax(jnp.clip(scores, -1e8, 1e8))
    o = jnp.einsum("bhqk,bkhc->bqhc", w, v)
    o *= jax.nn.sigmoid(jnp.einsum("bqc, chv->bqhv", x, p["gating"]) + p["gating_b"])
    return jnp.einsum("bqhc,hco->bqo", o, p["output"]) + p["output_b"]


def triangle(p: Params, x: Array, mask: Array) -> Array:
    """Outgoing edges."""
    seen = mask[..., None]
    x = norm(p, "edges", x)
    left, right = (seen * linear(p, name, x) for name in ("left", "right"))
    left_gate, right_gate = (jax.nn.sigmoid(linear(p, f"{name}_gate", x)) for name in ("left", "right"))
    left, right = left * left_gate, right * right_gate
    y = linear(p, "project", norm(p, "center", jnp.einsum("ikc,jkc->ijc", left, right)))
    return y * jax.nn.sigmoid(linear(p, "gate", x))


def transition(p: Params, x: Array) -> Array:
    return linear(p, "down", jax.nn.relu(linear(p, "up", norm(p, "second", x))))


def evoformer(c: Sizes, dtype: Any, p: Params, x: Array, mask: Array) -> Array:
    """What an iteration does to the pairs: edges, the starting node, the transition."""
    x = x + triangle(p, x, mask)
    x = x + attention(c, p, x, mask)
    return x + transition(p, x)


def shapes(c: Sizes) -> dict[str, Any]:
    heads = dict.fromkeys(("query", "key", "value", "gating"), (c.model, c.heads, c.head))
    edges = dict.fromkeys(("left", "right", "left_gate", "right_gate"), (c.model, EDGES))
    others = {"project": (EDGES, c.model), "gate": (c.model, c.model)}
    others |= {"up": (c.model, c.hidden), "down": (c.hidden, c.model), "output": (c.heads, c.head, c.model)}
    named = norms(c.model, "first", "second", "edges") | norms(EDGES, "center")
    return products(**edges, **others) | heads | named | {"pairs": (c.model, c.heads), "gating_b": (c.heads, c.head)}


PAIRS = Sizes(batch=7, length=7, model=24, heads=3, hidden=96)
MODELS: tuple[Model, ...] = (
    spelled(
        "alphafold-colabfold/evoformer",
        evoformer,
        shapes(PAIRS),
        add(TRIANGLE, ATTENTION, PAIR_BIAS, mlp("relu"), Part(layer_norms=1)),
        PAIRS,
        lambda c, dtype: [struct((c.batch, c.length), dtype)],
    ),
)
