"""Pass dot_product_attention: a softmax over the keys and one logit more, whose weight is dropped, is the op with its sink."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl

from ..checks import agree, normal, primitives

Q, K, V = normal((2, 6, 3, 4), (2, 7, 3, 4), (2, 7, 3, 5))  # B T H D, B S H D, B S H Dv
SINK, OF_EACH, OF_KEYS = normal((3,), (2, 6, 3), (3, 7), seed=4)
BIAS, FACTORS = normal((3, 6, 7), (2, 3, 6, 7), seed=2)
SEEN = np.random.default_rng(0).random((2, 1, 6, 7)) < 0.6
SEEN[0, 0, 2] = False  # a row that sees nothing
CAUSAL = jnp.tril(jnp.ones((6, 7), bool))
ATTENTION = "dot_product_attention"


def scores(q, k):
    return jnp.einsum("bthd,bshd->bhts", q, k) * 0.5


def weigh(p, v):
    return jnp.einsum("bhts,bshd->bthd", p, v)


def beside(z, s):
    return jnp.concatenate([z, jnp.broadcast_to(s[:, None, None], (*z.shape[:-1], 1))], -1)


def before(z, s):
    return jnp.concatenate([jnp.broadcast_to(s[:, None, None], (*z.shape[:-1], 1)), z], -1)


def lse(z):
    return jax.nn.logsumexp(z, -1, keepdims=True)


def below(a):
    return a - a.max(-1, keepdims=True)


def below_both(z, s, maximum=jnp.maximum):
    s = s[:, None, None]
    m = maximum(z.max(-1, keepdims=True), s)
    e = jnp.exp(z - m)
    return e / (e.sum(-1, keepdims=True) + jnp.exp(s - m))


def by_hand(a):
    e = jnp.exp(a - jax.lax.stop_gradient(a.max(-1, keepdims=True)))
    return e / e.sum(-1, keepdims=True)


def one_plus(z):
    m = jnp.maximum(z.max(-1, keepdims=True), 0.0)
    e = jnp.exp(z - m)
    return e / (jnp.exp(-m) + e.sum(-1, keepdims=True))


def one_plus_below(z):
    m = z.max(-1, keepdims=True)
    e = jnp.exp(z - m)
    return e / (jnp.exp(-m) + e.sum(-1, keepdims=True))


def dropped(a):
    return jax.lax.slice_in_dim(jax.nn.softmax(a), 0, 7, axis=-1)


WEIGHTS = {
    "sliced off": lambda z, s: jax.nn.softmax(beside(z, s))[..., :-1],
    "first": lambda z, s: jax.nn.softmax(before(z, s))[..., 1:],
    "by length": lambda z, s: jax.nn.softmax(beside(z, s))[..., : z.shape[-1]],
    "lax.slice": lambda z, s: dropped(beside(z, s)),
    "dynamic slice": lambda z, s: jax.lax.dynamic_slice_in_dim(jax.nn.softmax(before(z, s)), 1, 7, axis=-1),
    "split": lambda z, s: jnp.split(jax.nn.softmax(beside(z, s)), [7], axis=-1)[0],
    "deleted": lambda z, s: jnp.delete(jax.nn.softmax(beside(z, s)), -1, axis=-1),
    "appended": lambda z, s: jax.nn.softmax(jnp.append(z, jnp.broadcast_to(s[:, None, None], (2, 3, 6, 1)), -1))[
        ..., :-1
    ],
    "maximum subtracted twice": lambda z, s: jax.nn.softmax(below(beside(z, s)))[..., :-1],
    "softmax by hand": lambda z, s: by_hand(beside(z, s))[..., :-1],
    "exponentials sliced": lambda z, s: (
        jnp.exp(below(beside(z, s)))[..., :-1] / jnp.exp(below(beside(z, s))).sum(-1, keepdims=True)
    ),
    "log_softmax": lambda z, s: jnp.exp(jax.nn.log_softmax(beside(z, s))[..., :-1]),
    "exp, then sliced": lambda z, s: jnp.exp(beside(z, s) - lse(beside(z, s)))[..., :-1],
    "in the sum": below_both,
    "in the sum, gradient of the maximum stopped": lambda z, s: below_both(
        z, s, lambda a, b: jax.lax.stop_gradient(jnp.maximum(a, b))
    ),
    "in the sum, below the scores' own maximum": lambda z, s: (
        jnp.exp(below(z))
        / (jnp.exp(below(z)).sum(-1, keepdims=True) + jnp.exp(s[:, None, None] - z.max(-1, keepdims=True)))
    ),
    "in the sum, no maximum": lambda z, s: jnp.exp(z) / (jnp.exp(z).sum(-1, keepdims=True) + jnp.exp(s)[:, None, None]),
    "logsumexp of both": lambda z, s: jnp.exp(z - lse(beside(z, s))),
    "logaddexp": lambda z, s: jnp.exp(z - jnp.logaddexp(lse(z), s[:, None, None])),
    "times a sigmoid": lambda z, s: jax.nn.softmax(z) * jax.nn.sigmoid(lse(z) - s[:, None, None]),
    "over 1 + exp": lambda z, s: jax.nn.softmax(z) / (1 + jnp.exp(s[:, None, None] - lse(z))),
    "a multiple": lambda z, s: jax.nn.softmax(beside(z, -0.3 * s))[..., :-1],
    "one for all": lambda z, s: jax.nn.softmax(beside(z, s[0] * jnp.ones(3)))[..., :-1],
    "one for all heads, in the sum": lambda z, s: below_both(z, s[1][None]),
}


def attention(weights, change=lambda z: z):
    return lambda q, k, v, *more: weigh(weights(change(scores(q, k)), *more), v)


def fused(fn, *more, args=(Q, K, V), words="sink"):
    found = agree(fn, *args, *more, passes=ATTENTION, factor=2)
    assert not found.rejections, found.rejections
    (site,) = found.candidates
    assert "exp" not in primitives(found.apply())
    assert site.formula.endswith(f"{words}) @ v"), site.formula
    return site


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_sink_is_found_however_it_is_written(name):
    site = fused(attention(WEIGHTS[name]), SINK)
    assert set(site.leaves) == {"q", "k", "v", "sink"}
    assert site.concepts == ("attention", "attention_unmasked")


# -- the product with the values, numbers in place of an operand ------------------------------------------------------------------------


def divided_after(q, k, v, s):
    z, s = scores(q, k), s[:, None, None]
    m = jnp.maximum(z.max(-1, keepdims=True), s)
    e = jnp.exp(z - m)
    total = e.sum(-1, keepdims=True) + jnp.exp(s - m)
    return weigh(e, v) / total.transpose(0, 2, 1, 3)


def gated_after(left):
    def attend(q, k, v, s):
        z = scores(q, k)
        return weigh(jax.nn.softmax(z), v) * left(lse(z), s[:, None, None]).transpose(0, 2, 1, 3)

    return attend


AFTER = {
    "divided": divided_after,
    "times a sigmoid": gated_after(lambda z, s: jax.nn.sigmoid(z - s)),
    "times 1 / (1 + exp)": gated_after(lambda z, s: 1 / (1 + jnp.exp(s - z))),
}


@pytest.mark.parametrize("name", AFTER)
def test_a_sink_is_found_behind_the_product(name):
    fused(AFTER[name], SINK)


NUMBERS = {
    "1 + sum": (lambda z: jnp.exp(z) / (1 + jnp.exp(z).sum(-1, keepdims=True)), 0.0),
    "0.3 + sum": (lambda z: jnp.exp(z) / (0.3 + jnp.exp(z).sum(-1, keepdims=True)), np.log(0.3)),
    "below 0 and all": (one_plus, 0.0),
    "below all": (one_plus_below, 0.0),
    "zeros beside": (lambda z: jax.nn.softmax(jnp.concatenate([z, jnp.zeros((2, 3, 6, 1))], -1))[..., :-1], 0.0),
    "padded": (lambda z: jax.nn.softmax(jnp.pad(z, ((0, 0), (0, 0), (0, 0), (0, 1))))[..., :-1], 0.0),
    "padded in front": (
        lambda z: jax.nn.softmax(jnp.pad(z, ((0, 0), (0, 0), (0, 0), (1, 0)), constant_values=0.7))[..., 1:],
        0.7,
    ),
    "a number beside": (lambda z: jax.nn.softmax(jnp.append(z, jnp.full((2, 3, 6, 1), -1.5), -1))[..., :-1], -1.5),
    "logsumexp with 0": (lambda z: jnp.exp(z - jnp.logaddexp(lse(z), 0.0)), 0.0),
    "sigmoid of logsumexp": (lambda z: jax.nn.softmax(z) * jax.nn.sigmoid(lse(z)), 0.0),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_sink_may_be_a_number(name):
    weights, number = NUMBERS[name]
    site = fused(attention(weights))
    assert set(site.leaves) == {"q", "k", "v"}
    want = fl.ops.dot_product_attention(Q, K, V, scale=0.5, sink=jnp.full(3, number))
    np.testing.assert_allclose(attention(weights)(Q, K, V), want, rtol=1e-5, atol=1e-6)


# -- beside all else -------------------------------------------------------------------------------------------------------------------

# name -> (what happens to the scores and to the weights, further arguments, words)
WITH = {
    "mask": (lambda z, m: jnp.where(m, z, -jnp.inf), (SEEN,), ", mask, sink"),
    "mask of a large number": (lambda z, m: jnp.where(m, z, -1e9), (SEEN,), ", mask, sink"),
    "causal": (lambda z: jnp.where(CAUSAL, z, -jnp.inf), (), ", causal, sink"),
    "causal, -1e9": (lambda z: jnp.where(CAUSAL, z, -1e9), (), ", causal, sink"),
    "bias": (lambda z, b: z + b, (BIAS,), " + bias, sink"),
    "cap": (lambda z: 20 * jnp.tanh(z / 20), (), ", sink"),
}


# Times a sigmoid, a row that sees no key is NaN.
BESIDE = [
    (s, n)
    for s in ("sliced off", "in the sum", "times a sigmoid")
    for n in WITH
    if (s, n) != ("times a sigmoid", "mask")
]


@pytest.mark.parametrize(("spelling", "name"), BESIDE)
def test_scores_are_masked_biased_and_capped_beside_a_sink(spelling, name):
    change, more, words = WITH[name]

    def attend(q, k, v, s, *more):
        return weigh(WEIGHTS[spelling](change(scores(q, k), *more), s), v)

    fused(attend, SINK, *more, words=words)


def test_a_row_that_sees_no_key_has_all_of_its_weight_in_the_sink():
    def attend(q, k, v, s, m):
        return weigh(WEIGHTS["sliced off"](jnp.where(m, scores(q, k), -jnp.inf), s), v)

    out = fl.fuse(attend, passes=ATTENTION)(Q, K, V, SINK, SEEN)
    assert not out[0, 2].any()
    assert np.isfinite(out).all()
    (site,) = fl.find(attend, Q, K, V, SINK, SEEN, passes=ATTENTION).candidates
    assert not site.notes


@pytest.mark.parametrize("spelling", ["sliced off", "in the sum"])
def test_weights_may_have_factors(spelling):
    def attend(q, k, v, s, f):
        return weigh(WEIGHTS[spelling](scores(q, k), s) * f, v)

    site = fused(attend, SINK, FACTORS, words="* factors")
    assert "sink" in site.leaves


def test_weights_may_be_dropped_by_a_key():
    def attend(q, k, v, s, key):
        p = WEIGHTS["sliced off"](scores(q, k), s)
        return weigh(jnp.where(jax.random.bernoulli(key, 0.8, p.shape), p / 0.8, 0.0), v)

    (site,) = fl.find(attend, Q, K, V, SINK, jax.random.key(1), passes=ATTENTION).candidates
    assert {"sink", "dropout_key"} <= set(site.leaves)
    agree(attend, Q, K, V, SINK, jax.random.key(1), passes=ATTENTION, factor=2)


def grouped(q, k, v, s, causal=True):
    """As gpt-oss: 2 heads of keys, 3 queries for each."""
    z = jnp.einsum("btkgc,bskc->bkgts", q, k) * 0.5
    z = jnp.where(jnp.tril(jnp.ones((6, 7), bool)), z, -jnp.inf) if causal else z
    a = jnp.concatenate([z, jnp.broadcast_to(s[:, :, None, None], (*z.shape[:-1], 1))], -1)
    return jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(a)[..., :-1], v)


@pytest.mark.parametrize("causal", [True, False])
def test_grouped_heads_have_a_sink_each(causal):
    args = normal((2, 6, 2, 3, 4), (2, 7, 2, 4), (2, 7, 2, 5), (2, 3))
    found = agree(lambda *a: grouped(*a, causal=causal), *args, passes=ATTENTION, factor=2)
    (site,) = found.candidates
    assert site.formula.endswith(", sink) @ v, 3 query heads a key head")


def test_a_sink_may_be_of_every_row():
    def attend(q, k, v, s):
        a = jnp.concatenate([scores(q, k), s.transpose(0, 2, 1)[..., None]], -1)
        return weigh(jax.nn.softmax(a)[..., :-1], v)

    fused(attend, OF_EACH)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("own", ["float32", "same"])
def test_of_16_bits(dtype, own):
    def attend(q, k, v, s):
        z = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) * 0.5
        return weigh(WEIGHTS["sliced off"](z, s.astype(jnp.float32)).astype(v.dtype), v)

    args = [a.astype(dtype) for a in (Q, K, V)]
    site = fused(attend, SINK.astype(dtype if own == "same" else own), args=args)
    assert "sink" in site.leaves


def in_float64(fn, *args):
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a), "float64") if np.asarray(a).dtype.kind == "f" else a for a in args]
        return jax.tree.map(np.asarray, jax.value_and_grad(fn, (0, 1, 2, 3))(*wide))


@pytest.mark.parametrize("name", ["sliced off", "in the sum", "times a sigmoid", "logaddexp"])
def test_values_and_gradients_are_those_of_float64(name):
    fn = attention(WEIGHTS[name])

    def total(q, k, v, s):
        return jnp.sum(fn(q, k, v, s) * jnp.cos(jnp.arange(2 * 6 * 3 * 5.0)).reshape(2, 6, 3, 5))

    want = in_float64(total, Q, K, V, SINK)
    got = jax.value_and_grad(fl.fuse(total, passes=ATTENTION), (0, 1, 2, 3))(Q, K, V, SINK)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-6 * max(1.0, np.abs(b).max()))


# -- in programs that are differentiated, scanned, mapped --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WEIGHTS)
def test_in_a_program_that_is_differentiated_it_is_fused_with_its_backward_pass(name):
    def loss(q, k, v, s):
        return jnp.sum(jnp.sin(attention(WEIGHTS[name])(q, k, v, s)))

    step = jax.value_and_grad(loss, (0, 1, 2, 3))
    found = fl.find(step, Q, K, V, SINK, passes=ATTENTION)
    (site,) = found.candidates
    assert site.backward is not None
    assert site.backward.is_fused, site.backward.text
    assert set(site.backward.gradients) == {"q", "k", "v", "sink"}
    got, want = fl.fuse(step, passes=ATTENTION)(Q, K, V, SINK), step(Q, K, V, SINK)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def scanned(name):
    def run(q, k, v, sinks):
        return jax.lax.scan(lambda x, s: (x + attention(WEIGHTS[name])(x, k, v, s), None), q, sinks)[0]

    return run


FORMS = ["sliced off", "in the sum", "times a sigmoid"]


@pytest.mark.parametrize("name", FORMS)
def test_in_a_loop(name):
    args = (Q, K, normal((2, 7, 3, 4))[0], normal((4, 3), seed=7)[0])
    found = agree(scanned(name), *args, passes=ATTENTION, factor=8)
    assert found.counts()[ATTENTION] == 1


@pytest.mark.parametrize("name", FORMS)
def test_in_a_loop_that_is_differentiated(name):
    args = (Q, K, normal((2, 7, 3, 4))[0], normal((4, 3), seed=7)[0])
    step = jax.grad(lambda *a: jnp.sum(jnp.sin(scanned(name)(*a))), (0, 1, 2, 3))
    found = fl.find(step, *args, passes=ATTENTION)
    assert found.counts()[ATTENTION] == 1, found.rejections
    for a, b in zip(fl.fuse(step, passes=ATTENTION)(*args), step(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("axes", [(0, 0, 0, None), (0, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_mapped(name, axes):
    def one(q, k, v, s):
        z = jnp.einsum("thd,shd->hts", q, k) * 0.5
        s = jnp.broadcast_to(s[:, None, None], (3, 6, 1))
        if name == "sliced off":
            p = jax.nn.softmax(jnp.concatenate([z, s], -1))[..., :-1]
        elif name == "in the sum":
            p = below_both(z, s[:, 0, 0])
        else:
            p = jax.nn.softmax(z) * jax.nn.sigmoid(lse(z) - s)
        return jnp.einsum("hts,shd->thd", p, v)

    full = (Q, K, V, normal((2, 3), seed=5)[0])
    args = [a if axis == 0 else a[0] for a, axis in zip(full, axes, strict=True)]
    fn = jax.vmap(one, axes)
    fused(fn, *args[3:], args=args[:3])


# -- near misses ---------------------------------------------------------------------------------------------------------------------------

TWO, OF_ONE, WIDER = normal((3, 2), (2, 1, 3, 5), (2, 1, 3, 4), seed=9)


def of_all(q, k, v, s):
    return jax.nn.softmax(beside(scores(q, k), s))


def two_beside(z, s):
    return jax.nn.softmax(jnp.concatenate([z, jnp.broadcast_to(s[:, None], (2, 3, 6, 2))], -1))


def not_below(z, s):
    e = jnp.exp(below(z))
    return e / (e.sum(-1, keepdims=True) + jnp.exp(s)[:, None, None])


def two_numbers(z, s):
    m = jnp.maximum(z.max(-1, keepdims=True), 2 * s[:, None, None])
    e = jnp.exp(z - m)
    return e / (e.sum(-1, keepdims=True) + jnp.exp(s[:, None, None] - m))


def of_each_key(z, s):
    e = jnp.exp(z)
    return e / (e.sum(-1, keepdims=True) + jnp.exp(s)[:, None])


def one_more_key(q, k, v, more):
    p = jax.nn.softmax(jnp.concatenate([scores(q, k), scores(q, more)], -1))
    return weigh(p[..., :-1], v) + weigh(p[..., -1:], OF_ONE)


# name -> (the site, its last argument, code, what is said)
NEAR = {
    "its weight is that of a value": (
        lambda q, k, v, s: weigh(of_all(q, k, v, s), jnp.concatenate([v, OF_ONE], 1)),
        SINK,
        "structure",
        "one more logit per row, whose weight is kept",
    ),
    "its weight goes into the result": (
        lambda q, k, v, s: weigh((p := of_all(q, k, v, s))[..., :-1], v) + weigh(p[..., -1:], OF_ONE),
        SINK,
        "escapes",
        "is also read by",
    ),
    "its weight is returned": (
        lambda q, k, v, s: (weigh((p := of_all(q, k, v, s))[..., :-1], v), p[..., -1]),
        SINK,
        "escapes",
        "is also read by",
    ),
    "two logits": (attention(lambda z, s: two_beside(z, s)[..., :-2]), TWO, "structure", "2 more logits per row"),
    "two sinks": (
        attention(lambda z, s: jax.nn.softmax(beside(beside(z, s), 2 * s))[..., :-2]),
        SINK,
        "structure",
        "more logit",
    ),
    "a sink of each key": (attention(of_each_key), OF_KEYS, "axes", "an axis of 7 entries"),
    "a key is dropped in its place": (
        lambda q, k, v, s: weigh(of_all(q, k, v, s)[..., 1:], v),
        SINK,
        "structure",
        "removes more than its weight",
    ),
    "a key is dropped, the sink is first": (
        attention(lambda z, s: jax.nn.softmax(before(z, s))[..., :-1]),
        SINK,
        "structure",
        "removes more than its weight",
    ),
    "masked with the sink": (
        attention(lambda z, s: jax.nn.softmax(jnp.where(np.tri(6, 8, dtype=bool), beside(z, s), -jnp.inf))[..., :-1]),
        SINK,
        "structure",
        "or does not follow the softmax directly",
    ),
    "not below the maximum": (attention(not_below), SINK, "structure", "is computed from the scores themselves"),
    "an epsilon below the maximum": (
        attention(lambda z, s: (e := jnp.exp(below(z))) / (e.sum(-1, keepdims=True) + 1e-6)),
        SINK,
        "structure",
        "is computed from the scores themselves",
    ),
    "two numbers of it": (
        attention(two_numbers),
        SINK,
        "structure",
        "multiplied by different numbers in different places",
    ),
    "a negative number in the sum": (
        attention(lambda z, s: jnp.exp(z) / (jnp.exp(z).sum(-1, keepdims=True) - 0.5)),
        SINK,
        "structure",
        "needed a number above 0",
    ),
    "logsumexp of other scores": (
        attention(lambda z, s: jax.nn.softmax(z) * jax.nn.sigmoid(lse(2 * z) - s[:, None, None])),
        SINK,
        "scalar",
        "",
    ),
    "weights whose gradient is stopped": (
        lambda q, k, v, s: weigh(jax.lax.stop_gradient(of_all(q, k, v, s)[..., :-1]), v),
        SINK,
        "stop_gradient",
        "",
    ),
    "the square of the weights": (
        lambda q, k, v, s: weigh(of_all(q, k, v, s)[..., :-1] ** 2, v),
        SINK,
        "structure",
        "",
    ),
    "a sink made of the scores": (
        attention(
            lambda z, s: jax.nn.softmax(jnp.append(z, z.mean(-1, keepdims=True) + s[:, None, None], -1))[..., :-1]
        ),
        SINK,
        "escapes",
        "",
    ),
    "the logit of a key that has a value": (one_more_key, WIDER, "escapes", "is also read by"),
}


@pytest.mark.parametrize("name", NEAR)
def test_a_near_miss_is_declined_and_stays_right(name):
    fn, last, code, words = NEAR[name]
    found = agree(fn, Q, K, V, last, passes=ATTENTION)
    assert not found.candidates
    (rejection,) = found.rejections
    assert rejection.code == code, rejection
    assert words in rejection.sentence


def test_a_number_for_each_head_that_every_score_has_is_a_bias():
    site = fused(attention(lambda z, s: jax.nn.softmax(z + s[:, None, None])), SINK, words="bias")
    assert "sink" not in site.leaves


def test_a_rotary_embedding_and_a_norm_of_what_is_concatenated_stay_what_they_are():
    def norm(x, y, g):
        both = jnp.concatenate([x, y], -1)
        return both * jax.lax.rsqrt(jnp.mean(both * both, -1, keepdims=True) + 1e-6) * g

    (x,), (y, g) = normal((4, 7)), normal((4, 1), (8,), seed=3)
    assert agree(norm, x, y, g, passes="layer_norm").counts()["layer_norm"] == 1
