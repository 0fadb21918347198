"""Whole layers whose stream is a number times another value, whose rows are joined between the halves, whose factors cancel, and whose
norms have scale and shift behind their own site.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import fusionlab as fl

from .checks import agree, as_exact, differentiated, in_a_loop, normal

ENCODERS = ["multi_transformer_encoder", "multi_transformer_encoder_fuse_qkv"]
E, H, D, F = 32, 2, 16, 48
SHAPES = {
    "q": (E, E), "k": (E, E), "v": (E, E), "qkv": (E, 3 * E), "o": (E, E), "ob": (E,),
    "up": (E, F), "ub": (F,), "gate": (E, F), "down": (F, E), "db": (E,), "g1": (E,), "b1": (E,), "g2": (E,), "b2": (E,),
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


def packed(p, h, queries=lambda q: q):
    q, k, v = (y.reshape(*h.shape[:2], H, D) for y in jnp.split(h @ p["qkv"], 3, -1))
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
    "scale by einsum": lambda p, x: before(p, x, by_einsum),
    "scale and shift by einsum": lambda p, x: before(p, x, shifted_by_einsum),
    "scale and shift by einsum, norms behind": lambda p, x: behind(p, x, shifted_by_einsum),
    "positions of masks and tables": lambda p, x: before(p, x, attend=one_angle_for_each),
    "weight times a number": lambda p, x: before(p, x, weight=lambda w: w * 2.0),
}
FUSED = {"packed, queries times a number": lambda p, x: before(p, x, attend=packed, queries=lambda q: q * 1.5)}


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
