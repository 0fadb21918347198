"""Whole layers whose norms are written as a scale and a shift, and whose rotary tables are made of numpy in each call."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fusionlab as fl

from ..checks import agree, normal

ENCODERS = ["multi_transformer_encoder", "multi_transformer_encoder_fuse_qkv"]
E, H, D, F = 32, 2, 16, 48
SHAPES = {
    "q": (E, H, D), "k": (E, H, D), "v": (E, H, D), "qb": (H, D), "kb": (H, D), "vb": (H, D), "o": (H, D, E), "ob": (E,),
    "up": (E, F), "ub": (F,), "down": (F, E), "db": (E,), "g1": (E,), "b1": (E,), "g2": (E,), "b2": (E,), "s1": (E,), "s2": (E,),
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


def every_pair(x):
    return jnp.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)


def angles(which=lambda a: jnp.repeat(a, 2, -1)):
    return which(jnp.arange(6.0)[:, None] * jnp.asarray(1e4 ** (-np.arange(0, D, 2, dtype=np.float32) / D)))


def neighbours(x, pairs=every_pair, angle=angles):
    """A rotary embedding of neighbours."""
    a = angle()[:, None]
    return x * jnp.cos(a) + pairs(x) * jnp.sin(a)


def by_einsum(x):
    a = angles()
    return jnp.einsum("bthd,...td->bthd", x, jnp.cos(a)) + jnp.einsum("bthd,...td->bthd", every_pair(x), jnp.sin(a))


def attention(p, h, turn):
    q, k, v = (jnp.einsum("bte,ehd->bthd", h, p[n]) + p[f"{n}b"] for n in "qkv")
    s = jnp.einsum("bthd,bshd->bhts", turn(q) * D**-0.5, turn(k))
    return jnp.einsum("bhts,bshd,hde->bte", jax.nn.softmax(s, -1), v, p["o"]) + p["ob"]


def feed_forward(p, h):
    return jax.nn.relu(h @ p["up"] + p["ub"]) @ p["down"] + p["db"]


def quick(p, h, c=1.702):
    h = h @ p["up"] + p["ub"]
    return (h * jax.nn.sigmoid(c * h)) @ p["down"] + p["db"]


def scaled(p, x, turn, feed=feed_forward, around=lambda p, x: x * p["s2"]):
    """A vector along the features before each sum, without the biases of the output projection."""
    x = x + p["s1"] * attention(p | {"ob": 0.0}, norm(x, p["g1"], p["b1"]), turn)
    return x + around(p, feed(p, norm(x, p["g2"], p["b2"])))


def scaled_behind(p, x, turn):
    x = norm(x + attention(p, x, turn) * p["s1"], p["g1"], p["b1"])
    return norm(p["s2"][None] * quick(p, x, 1.5) + x, p["g2"], p["b2"])


def before(p, x, turn, feed=feed_forward):
    x = x + attention(p, norm(x, p["g1"], p["b1"]), turn)
    return x + feed(p, norm(x, p["g2"], p["b2"]))


def behind(p, x, turn):
    x = norm(x + attention(p, x, turn), p["g1"], p["b1"])
    return norm(x + feed_forward(p, x), p["g2"], p["b2"])


def late(p, x, turn, more=lambda y: y):
    """Biases that are added to the sum with the residual."""
    bare = p | {"ob": 0.0, "db": 0.0}
    x = more(x + attention(bare, norm(x, p["g1"], p["b1"]), turn) + p["ob"])
    return x + feed_forward(bare, norm(x, p["g2"], p["b2"])) + p["db"]


def late_behind(p, x, turn):
    bare = p | {"ob": 0.0, "db": 0.0}
    x = norm(attention(bare, x, turn) + x + p["ob"], p["g1"], p["b1"])
    return norm(p["db"] + (x + feed_forward(bare, x)), p["g2"], p["b2"])


LAYERS = {
    "biases behind the residuals": (late, lambda q: q),
    "biases and norms behind": (late_behind, tables),
    "norms before": (before, lambda q: q),
    "norms behind": (behind, lambda q: q),
    "rotary": (before, tables),
    "layer scale": (scaled, lambda q: q),
    "quick gelu": (lambda p, x, turn: scaled(p, x, turn, quick, lambda p, y: y), lambda q: q),
    "both, norms behind": (scaled_behind, tables),
    "neighbours": (before, neighbours),
    "neighbours by einsums, norms behind": (behind, by_einsum),
    "neighbours by two angles": (
        before,
        lambda x: neighbours(x, angle=lambda: angles(lambda a: jnp.concatenate([a, -a], -1))),
    ),
}
NEAR_ROTARY = {
    "the other way round": lambda x: neighbours(
        x, lambda x: jnp.stack([x[..., 1::2], -x[..., ::2]], -1).reshape(x.shape)
    ),
    "even before odd": lambda x: neighbours(x, lambda x: jnp.stack([-x[..., ::2], x[..., 1::2]], -1).reshape(x.shape)),
    "one after the other": lambda x: neighbours(x, lambda x: jnp.concatenate([-x[..., 1::2], x[..., ::2]], -1)),
    "stacked before": lambda x: neighbours(x, lambda x: jnp.stack([-x[..., 1::2], x[..., ::2]], -2).reshape(x.shape)),
    "no sign": lambda x: neighbours(x, lambda x: jnp.stack([x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)),
    "of other positions": lambda x: neighbours(x, lambda x: every_pair(x[:, ::-1])),
    "of other heads": lambda x: neighbours(x, lambda x: every_pair(x[:, :, ::-1])),
    "of the square": lambda x: neighbours(x, lambda x: every_pair(x * x)),
}
NEAR = {
    "a factor of each position": (lambda p, y: y * jnp.linspace(0.1, 1.0, 6)[:, None], feed_forward, "residual sum"),
    "a factor of each text and feature": (
        lambda p, y: y * jnp.stack([p["s1"], p["s2"]])[:, None],
        feed_forward,
        "residual sum",
    ),
    "a factor squared": (lambda p, y: y * y * p["s2"], feed_forward, "residual sum"),
    "a factor's inverse": (lambda p, y: y / p["s2"], feed_forward, "residual sum"),
    "a sigmoid of what falls": (lambda p, y: y, lambda p, h: quick(p, h, -1.702), "no activation known to the op"),
    "a sigmoid of almost nothing": (lambda p, y: y, lambda p, h: quick(p, h, 1e-30), "no activation known to the op"),
    "a sigmoid that is stopped": (
        lambda p, y: y,
        lambda p, h: (u := h @ p["up"], u * lax.stop_gradient(jax.nn.sigmoid(1.702 * u)))[1] @ p["down"],
        "",
    ),
    "a sigmoid of a number of the program": (
        lambda p, y: y,
        lambda p, h: quick(p, h, p["s1"][0]),
        "no activation known to the op",
    ),
    "a sigmoid along other axes": (
        lambda p, y: y,
        lambda p, h: (u := h @ p["up"], u * jax.nn.sigmoid(1.702 * u.swapaxes(0, 0)[:, ::-1]))[1] @ p["down"],
        "",
    ),
}


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


@pytest.mark.parametrize("name", NEAR)
def test_what_is_nearly_such_a_factor_is_no_layer(name):
    around, feed, said = NEAR[name]
    found = agree(lambda p, x: scaled(p, x, lambda q: q, feed, around), P, X, passes=ENCODERS, factor=16)
    assert found.counts()["multi_transformer_encoder"] == 0
    assert any(said in r.sentence for r in found.rejections), found.rejections


@pytest.mark.parametrize("texts", [1, pytest.param(2, marks=pytest.mark.dear)])
def test_biases_behind_the_residuals_of_a_decoding_step(texts):
    """The residual of one row has the form of a bias."""
    keys, values = (0.3 * a for a in normal((texts, 8, H, D), (texts, 8, H, D), seed=7))

    def step(p, x, keys, values, at):
        h = norm(x, p["g1"], p["b1"])
        q, k, v = (jnp.einsum("bte,ehd->bthd", h, p[n]) + p[f"{n}b"] for n in "qkv")
        keys, values = (lax.dynamic_update_slice(old, new, (0, at, 0, 0)) for old, new in ((keys, k), (values, v)))
        s = jnp.einsum("bthd,bshd->bhts", q, keys) * D**-0.5
        w = jax.nn.softmax(jnp.where(jnp.arange(8) <= at, s, jnp.finfo(s.dtype).min), -1)
        x = x + jnp.einsum("bhts,bshd,hde->bte", w, values, p["o"]) + p["ob"]
        return x + feed_forward(p | {"db": 0.0}, norm(x, p["g2"], p["b2"])) + p["db"], keys, values

    given = P, X[:texts, :1], keys, values, jnp.int32(5)
    found = fl.find(step, *given, passes=["multi_transformer_decoder"])
    assert len(found.candidates) == 1, found.rejections
    fused = fl.fuse(step, passes=["multi_transformer_decoder"])
    for a, b in zip(jax.jit(fused)(*given), jax.jit(step)(*given), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


LATE = {
    "two biases": (lambda p, x: late(p, x, lambda q: q, lambda y: y + p["s1"]), 1),
    "a vector that is no bias": (lambda p, x: late(p, x, lambda q: q, lambda y: y * p["s1"]), 1),
    "a factor of the product alone": (
        lambda p, x: x + p["s1"] * feed_forward(p, norm(x, p["g2"], p["b2"])) + p["db"],
        0,
    ),
    "the sum without the bias is read elsewhere": (
        lambda p, x: (lambda y: before(p, y + p["ob"], lambda q: q) + y)(
            x + attention(p, norm(x, p["g1"], p["b1"]), lambda q: q)
        ),
        1,
    ),
    "a second residual": (lambda p, x: late(p, x, lambda q: q, lambda y: y + x), 1),
}


@pytest.mark.dear
@pytest.mark.parametrize("name", LATE)
def test_what_is_nearly_a_bias_behind_a_residual_changes_nothing(name):
    layer, most = LATE[name]
    for x in (X, X[:1]):
        found = agree(layer, P, x, passes=ENCODERS, factor=16)
        assert found.counts()["multi_transformer_encoder"] <= most


@pytest.mark.parametrize("layer", [scaled, lambda p, x, turn: scaled(p, x, turn, quick, lambda p, y: y)])
def test_weights_of_16_bits_are_not_rounded_once_more(layer):
    p, x = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (P, X))
    found = fl.find(lambda p, x: layer(p, x, lambda q: q), p, x, passes=ENCODERS)
    assert not found.counts()["multi_transformer_encoder"]
    assert any(r.code == "rounding" and "once more than the program does" in r.sentence for r in found.rejections), (
        found.rejections
    )


def test_layers_with_such_factors_in_a_row_are_one_call():
    def two(p, other, x):
        for q in (p, other):
            x = scaled(q, x, lambda q: q, quick)
        return x

    strategy = fl.Strategy(multi_transformer_encoder={"stacked": True})
    other = {name: 0.9 * a for name, a in P.items()}
    (site,) = agree(two, P, other, X, passes=strategy, factor=32).candidates
    assert site.attrs["layers"] == 2


PACKED = {
    "split": (lambda u: jnp.split(u, 2, -1), jax.nn.silu, 1),
    "slices, the second activated": (lambda u: (u[..., F // 2 :], u[..., : F // 2]), jax.nn.silu, 1),
    "gelu": (lambda u: jnp.split(u, 2, -1), jax.nn.gelu, 0),
    "one half twice": (lambda u: (u[..., : F // 2], u[..., : F // 2]), jax.nn.silu, 0),
    "halves that share entries": (lambda u: (u[..., : F // 2], u[..., 4 : F // 2 + 4]), jax.nn.silu, 0),
    "every second": (lambda u: (u[..., ::2], u[..., 1::2]), jax.nn.silu, 0),
    "silu of the double": (lambda u: jnp.split(u, 2, -1), lambda g: jax.nn.silu(2 * g), 0),
    "silu of other rows": (lambda u: jnp.split(u, 2, -1), lambda g: jax.nn.silu(g[:, ::-1]), 0),
    "a gate by a sigmoid": (lambda u: jnp.split(u, 2, -1), jax.nn.sigmoid, 0),
}


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("name", PACKED)
def test_a_packed_gate_is_two_products(name, biased):
    halves, activation, sites = PACKED[name]

    def packed(p, h):
        g, u = halves(h @ p["up"] + p["ub"] if biased else h @ p["up"])
        return (activation(g) * u) @ p["down"][: F // 2] + p["db"]

    found = agree(lambda p, x: before(p, x, lambda q: q, packed), P, X, passes=ENCODERS, factor=16)
    assert found.counts()["multi_transformer_encoder"] == sites, found.rejections


@pytest.mark.parametrize("name", NEAR_ROTARY)
def test_what_is_nearly_a_rotary_embedding_of_neighbours_is_none(name):
    found = agree(lambda p, x: before(p, x, NEAR_ROTARY[name]), P, X, passes=ENCODERS, factor=16)
    assert found.counts()["multi_transformer_encoder"] == 0
    assert any(r.code == "rotary" for r in found.rejections), found.rejections


def test_neighbours_are_turned_alike_or_it_is_no_layer():
    """Queries by neighbours and keys by halves, each of its own right."""

    def layer(p, x):
        turns = iter((neighbours, tables))
        return before(p, x, lambda y: next(turns)(y))

    assert agree(layer, P, X, passes=ENCODERS, factor=16).counts()["multi_transformer_encoder"] == 0


def test_keys_whose_neighbours_are_turned_are_not_given_in_another_order():
    def layer(p, x):
        h = norm(x, p["g1"], p["b1"])
        q, k, v = (jnp.einsum("bte,ehd->bthd", h, p[n]) + p[f"{n}b"] for n in "qkv")
        q, k = neighbours(q), neighbours(k)
        w = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q * D**-0.5, k), -1)
        x = x + (jnp.einsum("bhts,bshd,hde->bte", w, v, p["o"]) + p["ob"])
        return x + feed_forward(p, norm(x, p["g2"], p["b2"])), k, v

    found = agree(layer, P, X, passes=ENCODERS, factor=16)
    assert found.counts()["multi_transformer_encoder"] == 0
    assert any("pairs neighbouring features" in r.sentence for r in found.rejections), found.rejections
