"""Planted sites of every kind show that the detector of what looks like a site counts, and what is said of some.

That over the zoo nothing is passed over in silence is asserted where its programs are searched anyway, in `test_zoo_find`.

A planted program is searched by no pass, so that every site of it is one that nothing is said of.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl

from .looks_like_sites import KINDS, silent, spots


def softmax(x, w, b):
    return jax.nn.softmax(x)


def softmax_by_hand(x, w, b):
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e * (1 / e.sum(-1, keepdims=True))


def softmax_by_log(x, w, b):
    return jnp.exp(x - jax.nn.logsumexp(x, -1, keepdims=True))


def layer_norm(x, w, b):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def rms_norm(x, w, b):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def unit_length(x, w, b):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def scale_and_shift(x, w, b):
    mean = x.mean(-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.square(x - mean).mean(-1, keepdims=True) + 1e-3) * b
    return x * inverse + (b - mean * inverse)


def bias(x, w, b):
    return x @ w + b


def bias_in_heads(x, w, b):
    return (x @ w).reshape(4, 2, -1) + b.reshape(2, -1)


def relu(x, w, b):
    return jax.nn.relu(x @ w)


def swish_by_hand(x, w, b):
    h = x @ w
    return h / (1 + jnp.exp(-h))


def tanh_of_two(x, w, b):
    return jnp.tanh(x @ w + x[:, ::-1] @ w)


def relu_of_part(x, w, b):
    return jnp.maximum((x @ w)[:, :3], 0)


def gated(x, w, b):
    return jnp.tanh(x @ w) * (x @ (w * 2))


def packed(x, w, b):
    one, two = jnp.split(x @ w, 2, -1)
    return one * jax.nn.gelu(two)


PLANTED = {
    "softmax": (softmax, softmax_by_hand, softmax_by_log),
    "norm": (layer_norm, rms_norm, unit_length, scale_and_shift),
    "bias": (bias, bias_in_heads),
    "activation": (relu, swish_by_hand, tanh_of_two, relu_of_part),
    "gated": (gated, packed),
}
EXPECTED = {"gated": {"activation": 1, "gated": 1}}


def in_scan(f):
    return lambda x, w, b: jax.lax.scan(
        lambda c, _: (c + f(x, w, b).sum(), None), jnp.zeros((), x.dtype), None, length=2
    )[0]


def mapped(f):
    return lambda x, w, b: jax.vmap(f, (0, None, None))(jnp.stack([x, x]), w, b)


WAYS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "scan": in_scan,
    "vmap": mapped,
    "remat": jax.checkpoint,
    "bf16": lambda f: lambda *args: f(*(a.astype("bfloat16") for a in args)),
    "gradient": lambda f: jax.value_and_grad(lambda *args: f(*args).astype("float32").sum()),
}
ARGS = (jnp.ones((4, 8)), jnp.ones((8, 8)), jnp.ones(8))


@pytest.mark.whole
@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_site_of_each_kind_is_counted_in_every_spelling(kind):
    for f in PLANTED[kind]:
        for way, wrapped in WAYS.items():
            if way == "vmap" and f is bias_in_heads:
                continue
            graph = fl.trace(wrapped(f), *ARGS)
            counted = {k: n for k in KINDS if (n := sum(s.kind == k for s in spots(graph)))}
            assert counted == EXPECTED.get(kind, {kind: 1}), (f.__name__, way)


def test_what_no_pass_was_asked_for_is_silent():
    def model(x, w, b):
        return softmax(rms_norm(relu(bias(x, w, b), w, b), w, b), w, b)

    nothing = fl.find(model, *ARGS, passes=())
    assert {s.kind for s in silent(nothing)} == {"norm", "bias", "activation"}  # the softmax is a structure
    assert silent(fl.find(model, *ARGS)) == []


@pytest.mark.parametrize(
    ("f", "said"),
    [
        (tanh_of_two, "adds up"),
        (relu_of_part, "takes a part of"),
        (packed, "a gated pair with its weights packed"),
        (unit_length, "divides x by its length"),
        (lambda x, w, b: jax.nn.elu((x @ w + b).reshape(4, 2, 4)), "not a known activation"),
        (lambda x, w, b: jnp.tanh((x @ w) * b + 1), "comes between"),
    ],
)
def test_what_stands_between_is_said_once(f, said):
    found = fl.find(f, *ARGS)
    assert len(found.rejections) == 1
    assert said in found.rejections[0].sentence
    assert silent(found) == []


def test_a_convolution_of_one_point_is_said_where_something_stands_behind_it():
    x, w = jnp.ones((2, 4, 4, 8)), jnp.ones((1, 1, 8, 16))

    def layer(x, w, b, stride=2):
        return jax.lax.conv_general_dilated(x, w, (1, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) + b

    found = fl.find(lambda x, w, b: jax.nn.relu(layer(x, w, b, 1)), x, w, jnp.ones(16))
    assert [c.formula for c in found.candidates] == ["relu(x @ w + b)"]
    found = fl.find(lambda x, w, b: jax.nn.relu(layer(x, w, b)), x, w, jnp.ones(16))
    assert [r.code for r in found.rejections] == ["structure"]
    assert "a convolution with a window of one point" in found.rejections[0].sentence
    assert silent(found) == []
    assert fl.find(lambda x, w: layer(x, w, 0.0), x, w).rejections == ()


def test_weights_that_are_tested_for_nan_are_declined_by_name():
    q = jnp.ones((2, 3, 8, 16))
    mask = jnp.tril(jnp.ones((8, 8), bool))

    def attention(q, k, v, mask):
        scores = jnp.where(mask, q @ k.swapaxes(-1, -2), -jnp.inf)
        return jnp.nan_to_num(jax.nn.softmax(scores)) @ v

    found = fl.find(attention, q, q, q, mask)
    assert [r.code for r in found.rejections] == ["mask"]
    assert "tests the weights for NaN" in found.rejections[0].sentence
