"""Whole layers whose norms are written as a scale and a shift, and whose rotary tables are made of numpy in each call."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fusionlab as fl

from .checks import agree, normal

pytestmark = pytest.mark.whole

ENCODERS = ["multi_transformer_encoder", "multi_transformer_encoder_fuse_qkv"]
E, H, D, F = 32, 2, 16, 48
SHAPES = {
    "q": (E, H, D), "k": (E, H, D), "v": (E, H, D), "qb": (H, D), "kb": (H, D), "vb": (H, D), "o": (H, D, E), "ob": (E,),
    "up": (E, F), "ub": (F,), "down": (F, E), "db": (E,), "g1": (E,), "b1": (E,), "g2": (E,), "b2": (E,),
}  # fmt: skip
P = {name: 0.2 * a for name, a in zip(SHAPES, normal(*SHAPES.values(), seed=5), strict=True)}
X = normal((2, 6, E))[0]


def norm(x, scale, bias):
    mean, inv = x.mean(-1, keepdims=True), lax.rsqrt(x.var(-1, keepdims=True) + 1e-3) * scale
    return x * inv + (-mean * inv + bias)


def tables(x):
    """A rotary embedding whose frequencies are made of numpy where it is called."""
    angles = jnp.arange(6.0)[:, None] * jnp.asarray(1e4 ** (-np.arange(0, D, 2, dtype=np.float32) / D))
    c, s = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    u, w = jnp.split(x, 2, -1)
    return jnp.concatenate([u * c - w * s, w * c + u * s], -1)


def attention(p, h, turn):
    q, k, v = (jnp.einsum("bte,ehd->bthd", h, p[n]) + p[f"{n}b"] for n in "qkv")
    s = jnp.einsum("bthd,bshd->bhts", turn(q) * D**-0.5, turn(k))
    return jnp.einsum("bhts,bshd,hde->bte", jax.nn.softmax(s, -1), v, p["o"]) + p["ob"]


def feed_forward(p, h):
    return jax.nn.relu(h @ p["up"] + p["ub"]) @ p["down"] + p["db"]


def before(p, x, turn):
    x = x + attention(p, norm(x, p["g1"], p["b1"]), turn)
    return x + feed_forward(p, norm(x, p["g2"], p["b2"]))


def behind(p, x, turn):
    x = norm(x + attention(p, x, turn), p["g1"], p["b1"])
    return norm(x + feed_forward(p, x), p["g2"], p["b2"])


LAYERS = {"norms before": (before, lambda q: q), "norms behind": (behind, lambda q: q), "rotary": (before, tables)}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_with_such_parts_is_one_layer(name):
    layer, turn = LAYERS[name]
    found = agree(lambda p, x: layer(p, x, turn), P, X, passes=ENCODERS, factor=16)
    assert found.counts()["multi_transformer_encoder"] == 1, found.rejections
    both = jnp.stack([X, X[::-1]])
    looped = fl.find(lambda p, xs: lax.map(lambda x: layer(p, x, turn), xs), P, both, passes=ENCODERS)
    assert looped.counts()["multi_transformer_encoder"] == 1


def test_tables_of_two_other_frequencies_are_no_embedding():
    def other(x):
        return tables(x * 1.0) if x is not None else None

    def layer(p, x):
        turns = iter((tables, lambda k: tables(k[:, ::-1])))
        return before(p, x, lambda y: next(turns)(y) if y.shape[2] == H else other(y))

    assert agree(layer, P, X, passes=ENCODERS, factor=16).counts()["multi_transformer_encoder"] == 0
