"""Whole layers whose stream is a number times another value, whose rows are joined between the halves, whose factors cancel, whose
norms have scale and shift behind their own site, and whose heads are groups on an axis of their own.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import fusionlab as fl

from ..checks import agree, as_exact, differentiated, in_a_loop, normal

ENCODERS = ["multi_transformer_encoder", "multi_transformer_encoder_fuse_qkv"]
E, H, D, F = 32, 2, 16, 48
SHAPES = {
    "q": (E, E), "k": (E, E), "v": (E, E), "qkv": (E, 3 * E), "o": (E, E), "ob": (E,),
    "up": (E, F), "ub": (F,), "gate": (E, F), "down": (F, E), "db": (E,), "g1": (E,), "b1": (E,), "g2": (E,), "b2": (E,),
    "qkv_heads": (E, 3, H, D), "qkv_bias": (3 * E,),
}  # fmt: skip
P = {name: 0.2 * a for name, a in zip(SHAPES, normal(*SHAPES.values(), seed=5), strict=True)}
X = normal((2, 6, E))[0]


def rms(x, g, b):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * g


def norm(x, g, b):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * g + b


def attention(p, h, queries=lambda q: q, keys=lambda k: k, scale=D**-0.5, values=lambda v: v, weight=lambda w: w):
    q, k, v = (h @ w for w in (weight(p["q"]), p["k"], p["v"]))
    q, k, v = (y.reshape(*h.shape[:2], H, D) for y in (queries(q), keys(k), values(v)))
    s = jnp.einsum("bthd,bshd->bhts", q, k) * scale
    s = jnp.where(jnp.tril(jnp.ones((h.shape[1],) * 2, bool)), s, -1e9)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s, -1), v).reshape(h.shape)


def split_product(p, h):
    return jnp.split(h @ p["qkv"], 3, -1)


def product_by_heads(p, h):
    """The columns of the weight stand on three axes, and those of the bias on one."""
    return jnp.moveaxis(jnp.einsum("bte,eknd->btknd", h, p["qkv_heads"]) + p["qkv_bias"].reshape(3, H, D), 2, 0)


def packed(p, h, queries=lambda q: q, product=split_product):
    q, k, v = (y.reshape(*h.shape[:2], H, D) for y in product(p, h))
    w = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", queries(q), k) / math.sqrt(D), -1)
    return jnp.einsum("bhts,bshd->bthd", w, v).reshape(h.shape)


def mlp(p, h):
    return jax.nn.relu(h @ p["up"] + p["ub"]) @ p["down"] + p["db"]


def gated(p, h):
    return (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def before(p, x, norm=norm, attend=attention, mlp=mlp, **how):
    x = x + attend(p, norm(x, p["g1"], p["b1"]), **how) @ p["o"]
    return x + mlp(p, norm(x, p["g2"], p["b2"]))


def behind(p, x, norm=norm, attend=attention, mlp=mlp, **how):
    x = norm(x + (attend(p, x, **how) @ p["o"] + p["ob"]), p["g1"], p["b1"])
    return norm(x + mlp(p, x), p["g2"], p["b2"])


def rows(y):
    return y.reshape(-1, y.shape[-1])


def joined(p, x):
    """Everything behind the attention is of rows of all texts."""
    y = rows(x + attention(p, norm(x, p["g1"], p["b1"])) @ p["o"])
    return (y + mlp(p, norm(y, p["g2"], p["b2"]))).reshape(x.shape)


def joined_behind(p, x):
    y = rows(norm(x + attention(p, x) @ p["o"], p["g1"], p["b1"]))
    return norm(y + mlp(p, y), p["g2"], p["b2"]).reshape(x.shape)


def joined_for_the_products(p, x):
    """The norm is of each text apart, the products are of all, and so is the gate."""
    y = x + attention(p, rms(x, p["g1"], 0)) @ p["o"]
    return y + gated(p, rows(rms(y, p["g2"], 0))).reshape(x.shape)


def joined_and_left_so(p, x):
    return rows(x + attention(p, norm(x, p["g1"], p["b1"])) @ p["o"]), joined(p, x).reshape(-1, E)[:, :1]


def three_joined(p, x):
    y = rows(x) + rows(attention(p, norm(x, p["g1"], p["b1"]))) @ p["o"]
    return (y + mlp(p, norm(y, p["g2"], p["b2"]))).reshape(x.shape)


def by_einsum(x, g, b):
    return jnp.einsum("bte,e->bte", rms(x, 1, 0), g)


def shifted_by_einsum(x, g, b):
    return jnp.einsum("bte,e->bte", norm(x, 1, 0), g) + b


def one_angle_for_each(p, h):
    """Positions are one array of which the mask and the tables are made, those of queries and of keys by themselves."""
    at = jnp.arange(h.shape[1])
    q, k, v = ((h @ p[n]).reshape(*h.shape[:2], H, D) for n in "qkv")

    def turned(x):
        angle = at[:, None] / 1e4 ** (jnp.arange(0, D, 2) / D)
        c, s = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
        u, w = jnp.split(x, 2, -1)
        return jnp.concatenate([u * c - w * s, w * c + u * s], -1)

    s = jnp.einsum("bthd,bshd->bhts", turned(q), turned(k)) * D**-0.5
    w = jax.nn.softmax(jnp.where(at[:, None] >= at, s, -jnp.inf), -1)
    return jnp.einsum("bhts,bshd->bthd", w, v).reshape(h.shape)


def windowed(mask):
    def attend(p, h):
        q, k, v = ((h @ p[n]).reshape(*h.shape[:2], H, D) for n in "qkv")
        s = jnp.where(mask(), jnp.einsum("bthd,bshd->bhts", q, k) * D**-0.5, -1e30)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s, -1), v).reshape(h.shape)

    return attend


HEADS, KEYS = 6, 2  # of D // 2 features each
GROUPED = {
    n: 0.2 * a
    for n, a in zip(
        ("q", "k", "v", "o"), normal((E, HEADS, 8), (E, KEYS, 8), (E, KEYS, 8), (HEADS, 8, E), seed=9), strict=True
    )
}


def since():
    """How far behind a query's own position a key is."""
    return jnp.arange(6)[:, None] - jnp.arange(6)


def recent(keys=6):
    return lambda: (since() >= 0) & (since() < keys)


def turned(x):
    """A rotary embedding of [batch, length, .., features]."""
    angle = jnp.arange(x.shape[1])[:, None] / 1e4 ** (jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
    c, s = (jnp.expand_dims(f(angle), range(1, x.ndim - 2)) for f in (jnp.cos, jnp.sin))
    u, w = jnp.split(x, 2, -1)
    return jnp.concatenate([u * c - w * s, w * c + u * s], -1)


def grouped(mask, turn=lambda x: x):
    """Groups of heads have an axis of their own, in the weights too."""
    q, o = GROUPED["q"].reshape(E, KEYS, 3, 8), GROUPED["o"].reshape(KEYS, 3, 8, E)

    def attend(p, h):
        q_, k, v = (
            turn(jnp.einsum("bte,egrc->btgrc", h, q)),
            *(jnp.einsum("bte,egc->btgc", h, GROUPED[n]) for n in "kv"),
        )
        s = jnp.einsum("btgrc,bsgc->bgrts", q_, turn(k)) * 8**-0.5
        w = jax.nn.softmax(jnp.where(mask(), s, -1e30), -1)
        return jnp.einsum("btgrc,grce->bte", jnp.einsum("bgrts,bsgc->btgrc", w, v), o)

    def layer(p, x):
        y = x + attend(p, norm(x, p["g1"], p["b1"]))
        return y + mlp(p, norm(y, p["g2"], p["b2"]))

    return layer


def repeated(again, keys=lambda k: k):
    """Keys and values are repeated behind the rotary embedding, heads before positions."""

    def layer(p, x):
        h = norm(x, p["g1"], p["b1"])
        q, k, v = (jnp.einsum("bte,ehc->bhtc", h, GROUPED[n]) for n in "qkv")
        q, k = (turned(y.swapaxes(1, 2)).swapaxes(1, 2) for y in (q, k))
        s = jnp.einsum("bhtc,bhsc->bhts", q, again(keys(k))) * 8**-0.5
        y = x + jnp.einsum("bhts,bhsc,hce->bte", jax.nn.softmax(s, -1), again(v), GROUPED["o"])
        return y + mlp(p, norm(y, p["g2"], p["b2"]))

    return layer


SCALE = D**0.5
LAYERS = {
    "scaled": lambda p, x: before(p, x * 5.65, rms),
    "scaled, gated": lambda p, x: before(p, x * jnp.sqrt(jnp.float32(E)), rms, mlp=gated),
    "divided": lambda p, x: before(p, x / 3.0),
    "scaled, norms behind": lambda p, x: behind(p, 2.5 * x),
    "negated": lambda p, x: before(p, -x),
    "rows joined": joined,
    "rows joined, norms behind": joined_behind,
    "rows joined for the products": joined_for_the_products,
    "rows joined before the output": three_joined,
    "two of joined rows": lambda p, x: joined(p, joined(p, x)),
    "factors cancel": lambda p, x: before(p, x, queries=lambda q: q * SCALE, scale=1 / SCALE),
    "queries undivided": lambda p, x: before(p, x, queries=lambda q: q * SCALE, scale=1.0),
    "keys times a number": lambda p, x: behind(p, x, keys=lambda k: -0.5 * k),
    "both times numbers": lambda p, x: before(p, x, queries=lambda q: q * 1.5, keys=lambda k: k / 3.0),
    "groups on their own axis": grouped(recent()),
    "groups on their own axis, turned": grouped(recent(), turned),
    "groups in a window": grouped(recent(3), turned),
    "keys repeated": repeated(lambda k: jnp.repeat(k, 3, axis=1)),
    "keys broadcast": repeated(lambda k: jnp.broadcast_to(k[:, :, None], (2, 2, 3, 6, 8)).reshape(2, 6, 6, 8)),
    "in a window": lambda p, x: before(p, x, attend=windowed(recent(3))),
    "in a window on both sides": lambda p, x: behind(p, x, attend=windowed(lambda: jnp.abs(since()) < 3)),
    "scale by einsum": lambda p, x: before(p, x, by_einsum),
    "scale and shift by einsum": lambda p, x: before(p, x, shifted_by_einsum),
    "scale and shift by einsum, norms behind": lambda p, x: behind(p, x, shifted_by_einsum),
    "positions of masks and tables": lambda p, x: before(p, x, attend=one_angle_for_each),
    "weight times a number": lambda p, x: before(p, x, weight=lambda w: w * 2.0),
}
FUSED = {
    "packed, queries times a number": lambda p, x: before(p, x, attend=packed, queries=lambda q: q * 1.5),
    "packed, of a weight by heads": lambda p, x: before(p, x, attend=packed, product=product_by_heads),
}


def encoders(found):
    return sum(found.counts()[name] for name in ENCODERS)


@pytest.mark.parametrize("name", [*LAYERS, *FUSED])
def test_a_layer_so_written_is_one_layer(name):
    layer = (LAYERS | FUSED)[name]
    found = agree(layer, P, X, passes=ENCODERS, factor=16)
    assert encoders(found) == (2 if name.startswith("two") else 1), found.rejections


@pytest.mark.parametrize("name", LAYERS)
def test_as_near_to_float64_as_it_was(name):
    names, arrays = list(P), list(P.values())
    assert encoders(
        as_exact(
            lambda x, *ws: LAYERS[name](dict(zip(names, ws, strict=True)), x), X, *arrays, factor=32, passes=ENCODERS
        )
    )


@pytest.mark.parametrize("name", LAYERS)
def test_in_a_loop_and_over_several(name):
    layer, both = LAYERS[name], (jnp.stack([X, X[::-1]]),)
    assert encoders(fl.find(in_a_loop(lambda x: layer(P, x), 1), *both, passes=ENCODERS)) >= 1
    assert encoders(fl.find(jax.vmap(lambda x: layer(P, x)), *both, passes=ENCODERS)) >= 1


def twice(p, x):
    """What the products read in rows is added to in another order of them."""
    y = x + attention(p, norm(x, p["g1"], p["b1"])) @ p["o"]
    turned = y.swapaxes(0, 1).reshape(-1, E)
    return turned + mlp(p, rows(norm(y, p["g2"], p["b2"])))


def first_half(norm_of=lambda x: x, added=lambda x: x, **how):
    def layer(p, x):
        y = added(x) + attention(p, norm(norm_of(x), p["g1"], p["b1"]), **how) @ p["o"]
        return y + mlp(p, norm(y, p["g2"], p["b2"]))

    return layer


def scaled_again(x, g, b):
    return jnp.einsum("bte,e->bte", norm(x, g, b), g)


def scaled_by_rows(x, g, b):
    return jnp.einsum("bte,t->bte", norm(x, 1, 0), g[: x.shape[1]])


MISSES = {
    "keys tiled": repeated(lambda k: jnp.tile(k, (1, 3, 1, 1))),
    "keys repeated in another order": repeated(lambda k: jnp.repeat(k, 3, axis=1), lambda k: k[:, ::-1]),
    "two scales": lambda p, x: before(p, x, scaled_again),
    "a scale of rows": lambda p, x: before(p, x, scaled_by_rows),
    "only the norm reads the multiple": first_half(norm_of=lambda x: x * 5.65),
    "only the sum reads the multiple": first_half(added=lambda x: x * 5.65),
    "two multiples": first_half(lambda x: x * 5.65, lambda x: x * 2.0),
    "a multiple behind the first half": lambda p, x: rms(2.0 * (x + attention(p, x) @ p["o"]), p["g1"], 0),
    "values times a number": first_half(values=lambda v: 2.0 * v),
    "queries times a value": first_half(queries=lambda q: q * (1 + 0.1 * P["ob"])),
    "rows added in another order": twice,
}


@pytest.mark.parametrize("name", MISSES)
def test_what_is_nearly_so_is_no_layer(name):
    assert encoders(agree(MISSES[name], P, X, passes=ENCODERS, factor=16)) == 0


def test_of_values_times_a_number_it_says_so():
    found = fl.find(MISSES["values times a number"], P, X, passes=ENCODERS)
    assert any("its value is multiplied by 2" in r.sentence for r in found.rejections), found.rejections


@pytest.mark.parametrize("name", LAYERS)
def test_differentiated_already_it_is_none(name):
    step = differentiated(lambda x: LAYERS[name](P, x), (X,))
    found = fl.find(step, X, passes=ENCODERS)
    assert not encoders(found)
    assert {r.code for r in found.rejections} == {"escapes"}
