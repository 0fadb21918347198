"""Pass dot_product_attention: factors outside masks and biases, masks that are multiplied, weights set to 0, widened operands.

Each spelling is looked at as it stands, differentiated before it is searched, in a scan and in a vmap; each has the program's values
and gradients, judged in float64 against a plain reference of the same numbers where the dtype is 16 bits wide.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl

from ..checks import agree, normal, weighed

Q, K, V = normal((2, 3, 6, 4), (2, 3, 7, 4), (2, 3, 7, 5))  # B H T D, B H S D, B H S Dv
ATTENTION = "dot_product_attention"
BIAS, PER_HEAD = normal((2, 1, 6, 7), (3, 1, 7), seed=2)
SEEN = np.random.default_rng(0).random((2, 1, 6, 7)) < 0.6
SEEN[..., 0] = True
BLIND = SEEN.copy()
BLIND[0, 0, 2] = False  # a row that sees nothing
LENGTHS = np.array([5, 7])[:, None, None, None]
LOW = np.tril(np.ones((6, 7), bool))
FLOAT_LOW = LOW.astype(np.float32)
KEY = jax.random.key(3)


def scores(q, k):
    return jnp.einsum("bhtd,bhsd->bhts", q, k)


def weigh(p, v):
    return jnp.einsum("bhts,bhsd->bhtd", p, v)


def of_scores(change, softmax=jax.nn.softmax):
    return lambda q, k, v, *more: weigh(softmax(change(scores(q, k), *more)), v)


def of_weights(change, mask=lambda s, *m: s):
    return lambda q, k, v, *more: weigh(change(jax.nn.softmax(mask(scores(q, k) / 2, *more)), *more), v)


def seen(lengths):
    return (jnp.arange(7) < lengths).astype(jnp.float32)


def by_ones(s, ones):
    return s * ones - 1e4 * (1 - ones)


def kept(s, m, *rest):
    return jnp.where(m, s, -1e9)


def to_infinity(s, m, *rest):
    return jnp.where(m, s, -jnp.inf)


def drawn(p, key):
    return jnp.where(jax.random.bernoulli(key, 0.8, p.shape), p / 0.8, 0.0)


def without_max(z):
    e = jnp.exp(z)
    return e / e.sum(-1, keepdims=True)


def of_joined(change, after):
    """Attention over texts and heads in one axis."""

    def attend(q, k, v, *more):
        q, k, v = (a.reshape(6, *a.shape[2:]) for a in (q, k, v))
        p = after(jax.nn.softmax(change(jnp.einsum("ntd,nsd->nts", q, k), *more)))
        return jnp.einsum("nts,nsd->ntd", p, v)

    return attend


def parted(s):
    return s.reshape(2, 3, 6, 7)


def padding(lengths):
    return jnp.where(jnp.arange(7) < lengths, 0.0, -1e9)


def grouped(q, k, v, m):
    """Six query heads, of which two share a key head; their scores are joined for the mask and parted again."""
    s = jnp.einsum("bkgtd,bksd->bkgts", jnp.stack([q, 2 * q], 2), k).reshape(2, 6, 6, 7)
    p = jax.nn.softmax(jnp.where(m, s, -2e38)).reshape(2, 3, 2, 6, 7)
    return jnp.einsum("bkgts,bksd->bkgtd", p, v).reshape(2, 6, 6, 5)


# name -> (the program, its further arguments)
SPELLINGS = {
    "factor after a bias": (of_scores(lambda s, b: (s + b) / 4), (PER_HEAD,)),
    "factor after a bias that is subtracted": (of_scores(lambda s, b: 0.25 * (s - 2 * b)), (BIAS,)),
    "factor after a mask": (of_scores(lambda s, m: to_infinity(s, m) / 4), (SEEN,)),
    "factor after a mask, True is hidden": (of_scores(lambda s, m: jnp.where(m, -1e9, s) * 0.3), (~SEEN,)),
    "factor after a causal mask": (of_scores(lambda s: jnp.where(LOW, s, -1e9) * 0.125), ()),
    "factor after a causal bias": (of_scores(lambda s: (s + np.where(LOW, 0, -1e9).astype(np.float32)) * 0.5), ()),
    "factors between a bias and a mask": (
        of_scores(lambda s, b, m: kept((s * 0.5 + b) * 0.3, m) / 4),
        (PER_HEAD, SEEN),
    ),
    "factors of two biases": (of_scores(lambda s, b, c: ((s + b) * 0.5 + c) * 0.25), (PER_HEAD, BIAS)),
    "factor around a cap and a bias": (of_scores(lambda s, b: 0.5 * (3 * jnp.tanh(s / 3) + b)), (BIAS,)),
    "factor of data inside, a number outside": (of_scores(lambda s, f, b: (s * f + b) / 4), (BIAS[..., :1], PER_HEAD)),
    "factor after a bias, without a maximum": (of_scores(lambda s, b: (s + b) / 4, without_max), (PER_HEAD,)),
    "multiplied mask of a constant": (of_scores(lambda s: s * FLOAT_LOW - 1e10 * (1 - FLOAT_LOW)), ()),
    "multiplied mask of an iota": (
        of_scores(lambda s: s * jnp.tril(jnp.ones((6, 7))) + -1e9 * (1 - jnp.tril(jnp.ones((6, 7))))),
        (),
    ),
    "multiplied mask of lengths": (of_scores(lambda s, n: by_ones(s, seen(n))), (LENGTHS,)),
    "multiplied mask of lengths, turned, made twice": (
        of_scores(lambda s, n: (s * seen(n) + 1e6 * (seen(n) - 1)) / 2),
        (LENGTHS,),
    ),
    "weights set to 0 by the mask": (of_weights(lambda p, m: jnp.where(m, p, 0.0), kept), (BLIND,)),
    "weights set to 0 where hidden": (of_weights(lambda p, m: jnp.where(~m, 0.0, p), to_infinity), (BLIND,)),
    "weights set to 0 by a mask that is True where hidden": (
        lambda q, k, v, h: weigh(jnp.where(h, 0.0, jax.nn.softmax(jnp.where(h, -1e9, scores(q, k)))), v),
        (~BLIND,),
    ),
    "weights set to 0 by a causal mask": (of_weights(lambda p: jnp.where(LOW, p, 0.0), lambda s: kept(s, LOW)), ()),
    "weights set to 0 by another mask": (of_weights(lambda p, m, n: jnp.where(n, p, 0.0), kept), (SEEN, ~BLIND)),
    "weights of dead rows set to 0": (
        of_weights(lambda p, m: jnp.where(~m.any(-1, keepdims=True), 0.0, p), to_infinity),
        (BLIND,),
    ),
    "pruned heads": (of_weights(lambda p, f: p * f[:, None, None]), (np.array([1, 0, 1], np.float32),)),
    "masked weights, then dropout": (
        of_weights(lambda p, m, key: drawn(jnp.where(m, p, 0.0), key), kept),
        (BLIND, KEY),
    ),
    "dropout, then weights of heads": (
        of_weights(lambda p, key, f: drawn(p, key) * f[:, None, None]),
        (KEY, PER_HEAD[:, 0, 0]),
    ),
    "dropout as a choice of what is dropped": (
        of_weights(lambda p, key: jnp.where(jax.random.bernoulli(key, 0.2, p.shape), 0.0, p / 0.8)),
        (KEY,),
    ),
    "one weight of heads that is all ones, of integers": (
        of_weights(lambda p, key: jnp.einsum("bhts,h->bhts", drawn(p, key), jnp.ones(3, jnp.int32))),
        (KEY,),
    ),
    "queries that all texts share": (
        lambda q, k, v: weigh(jax.nn.softmax(jnp.einsum("htd,bhsd->bhts", q[0], k)), v),
        (),
    ),
    "keys that all texts share": (lambda q, k, v: weigh(jax.nn.softmax(jnp.einsum("bhtd,hsd->bhts", q, k[0])), v), ()),
    "values that all heads share": (
        lambda q, k, v: jnp.einsum("bhts,bsd->bhtd", jax.nn.softmax(scores(q, k)), v[:, 0]),
        (),
    ),
    "queries that all heads share, causal": (
        lambda q, k, v: weigh(jax.nn.softmax(jnp.where(LOW, jnp.einsum("btd,bhsd->bhts", q[:, 0], k), -1e9)), v),
        (),
    ),
    "a vmap over the keys and values of one text's queries": (
        lambda q, k, v: jax.vmap(
            lambda k, v: jnp.einsum("hts,hsd->htd", jax.nn.softmax(jnp.einsum("htd,hsd->hts", q[0], k)), v)
        )(k, v),
        (),
    ),
    "scores parted for a padding mask": (
        of_joined(lambda s, n: (parted(s) / 4 + padding(n)).reshape(6, 6, 7), lambda p: p),
        (LENGTHS,),
    ),
    "weights joined after the softmax": (
        of_joined(lambda s, n: parted(s) / 4 + padding(n), lambda p: p.reshape(6, 6, 7)),
        (LENGTHS,),
    ),
    "scores parted for a mask of each text": (
        of_joined(lambda s, m: jnp.where(m, parted(s), -1e9).reshape(6, 6, 7), lambda p: p),
        (SEEN,),
    ),
    "scores parted for a bias of each text and head": (
        of_joined(lambda s, b: (parted(s) + b[:, :, None] + b[..., None, :1]).reshape(6, 6, 7), lambda p: p),
        (normal((2, 3, 7), seed=4)[0],),
    ),
    "scores parted for a causal mask": (
        of_joined(lambda s: jnp.where(LOW, parted(s), -1e9).reshape(6, 6, 7), lambda p: p),
        (),
    ),
    "scores parted otherwise than into texts and heads": (
        of_joined(lambda s, n: (s.reshape(3, 2, 6, 7) + padding(n).reshape(1, 2, 1, 7)).reshape(6, 6, 7), lambda p: p),
        (LENGTHS,),
    ),
    "scores parted along their rows": (
        of_joined(lambda s: (s.reshape(6, 2, 3, 7) + BIAS[0, 0].reshape(2, 3, 7)[:, :1]).reshape(6, 6, 7), lambda p: p),
        (),
    ),
    "groups of heads joined for the mask": (grouped, (SEEN,)),
    "one array for all three": (lambda a: weigh(jax.nn.softmax(scores(a * 0.25, a)), a), None),
}


# A scan is given what its body closes over: factors that are data there, and may be anything but ones and zeros.
MADE_OUTSIDE = {"multiplied mask of a constant"}


def given(name):
    fn, more = SPELLINGS[name]
    return fn, (Q,) if more is None else (Q, K, V, *more)


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling_is_a_site_with_the_same_values_and_gradients(name):
    fn, args = given(name)
    found = agree(fn, *args, passes=ATTENTION, factor=2)
    assert (len(found.candidates), found.rejections) == (1, ()), found.rejections


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling_is_a_site_where_it_is_differentiated_already(name):
    fn, args = given(name)
    step = jax.value_and_grad(weighed(fn), tuple(range(min(3, len(args)))))
    found = agree(step, *args, passes=ATTENTION, factor=4)
    assert len(found.candidates) == ("made twice" not in name), found.rejections


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling_is_a_site_in_a_scan_and_in_a_vmap(name):
    fn, args = given(name)
    first, rest = args[0], args[1:]

    def scanned(xs, *rest):
        return jax.lax.scan(lambda c, x: (c, fn(x, *rest)), 0, xs)[1]

    two = jnp.stack([first, 2 * first])
    found = agree(scanned, two, *rest, passes=ATTENTION, factor=2)
    assert len(found.candidates) == (name not in MADE_OUTSIDE), found.rejections
    found = agree(jax.vmap(fn, (0, *[None] * len(rest))), two, *rest, passes=ATTENTION, factor=2)
    assert len(found.candidates) == 1, found.rejections


# name -> (what is no attention, or another, its further arguments, the code of its rejection)
NEAR = {
    "a negative factor after a mask": (of_scores(lambda s, m: to_infinity(s, m) * -0.25), (SEEN,), {"scalar", "mask"}),
    "a factor of data after a mask": (
        of_scores(lambda s, m, c: to_infinity(s, m) * c),
        (SEEN, np.float32(0.5)),
        {"mask"},
    ),
    "a negative factor after a mask, without a maximum": (
        of_scores(lambda s, m: jnp.where(m, s, -1e5) * -1e-3, without_max),
        (SEEN,),
        {"mask", "scalar"},
    ),
    "a factor that brings hidden scores near": (of_scores(lambda s, m: kept(s, m) * 1e-7), (SEEN,), {"scalar"}),
    "a multiplied mask of halves": (
        of_scores(lambda s: s * (FLOAT_LOW / 2) - 1e9 * (1 - FLOAT_LOW / 2)),
        (),
        {"mask"},
    ),
    "a multiplied mask of data": (of_scores(lambda s, b: s * b - 1e9 * (1 - b)), (FLOAT_LOW,), {"mask", "axes"}),
    "a multiplied mask whose complement is another": (
        of_scores(lambda s: s * FLOAT_LOW - 1e9 * (1 - FLOAT_LOW[::-1])),
        (),
        {"mask"},
    ),
    "a multiplied mask with no fill": (of_scores(lambda s: s * FLOAT_LOW), (), {"axes"}),
    "scores joined in another order than they are parted": (
        of_joined(lambda s, n: (parted(s) + padding(n)).swapaxes(0, 1).reshape(6, 6, 7), lambda p: p),
        (LENGTHS,),
        {"axes", "structure"},
    ),
    "scores whose keys are parted": (
        of_joined(lambda s: (s.reshape(6, 6, 7, 1) * jnp.ones(2)).reshape(6, 6, 14)[..., ::2], lambda p: p),
        (),
        {"structure"},
    ),
    "a mixture, whose rows have values of their own": (
        lambda q, k, v, w: jnp.einsum(
            "bhts,bhtsd->bhtd", jax.nn.softmax(jnp.einsum("bhtd,sd->bhts", q, w)), q[..., None, :] * w
        ),
        (normal((5, 4), seed=6)[0],),
        {"axes"},
    ),
    "the maximum less the scores": (
        of_scores(lambda s: s, lambda z: (e := jnp.exp(z.max(-1, keepdims=True) - z)) / e.sum(-1, keepdims=True)),
        (),
        {"structure"},
    ),
    "the minimum added to the scores": (
        of_scores(lambda s: s, lambda z: (e := jnp.exp(z - (-z).max(-1, keepdims=True))) / e.sum(-1, keepdims=True)),
        (),
        {"structure"},
    ),
    "weights set to 1 where hidden": (
        of_weights(lambda p, m: jnp.where(m, p, 1.0), kept),
        (BLIND,),
        {"mask", "structure"},
    ),
}


@pytest.mark.parametrize("name", NEAR)
def test_what_is_nearly_such_a_spelling_is_declined_and_says_why(name):
    fn, more, codes = NEAR[name]
    found = agree(fn, Q, K, V, *more, passes=ATTENTION)
    assert not found.candidates
    assert {r.code for r in found.rejections} <= codes, found.rejections
    assert found.rejections


def low(*arrays):
    return tuple(a.astype(jnp.bfloat16) for a in arrays)


# Scores in float32 of 16-bit operands that are widened first.
WIDENED = {
    "queries and keys, weights rounded": lambda q, k, v: weigh(
        jax.nn.softmax(scores(q.astype(jnp.float32) / 2, k.astype(jnp.float32))).astype(q.dtype), v
    ),
    "all three, the result rounded": lambda q, k, v: weigh(
        jax.nn.softmax(scores(*(a.astype(jnp.float32) for a in (q, k))) * 0.3), v.astype(jnp.float32)
    ).astype(q.dtype),
    "masked in float32": lambda q, k, v: weigh(
        jax.nn.softmax(jnp.where(LOW, scores(*(a.astype(jnp.float32) for a in (q, k))) * 0.3, -1e30)).astype(q.dtype), v
    ),
}


@pytest.mark.parametrize("name", WIDENED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_widened_operands_are_read_as_they_were_and_no_less_precisely(name, dtype):
    args = tuple(a.astype(dtype) for a in (Q, K, V))
    fn = WIDENED[name]
    fused = fl.fuse(fn, passes=ATTENTION)
    assert len(fused.findings(*args).candidates) == 1, fused.findings(*args).rejections
    before, after = (jax.value_and_grad(weighed(f), (0, 1, 2)) for f in (fn, fused))
    with jax.enable_x64(True):
        exact = before(*(a.astype(jnp.float64) for a in args))

    def errors(step):
        pairs = zip(jax.tree.leaves(step(*args)), jax.tree.leaves(exact), strict=True)
        return [float(np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b)))) for a, b in pairs]

    for old, new, want in zip(errors(before), errors(after), jax.tree.leaves(exact), strict=True):
        assert new <= 2 * old + 2e-3 * float(np.max(np.abs(want)))


def test_a_result_that_stays_in_float32_keeps_its_widened_operands():
    def attend(q, k, v):
        q, k, v = (a.astype(jnp.float32) for a in (q, k, v))
        return weigh(jax.nn.softmax(scores(q, k)), v)

    found = fl.find(attend, *low(Q, K, V), passes=ATTENTION)
    assert [str(v.dtype) for c in found.candidates for v in c.leaves.values()] in ([], ["float32"] * 3)
    agree(attend, *low(Q, K, V), passes=ATTENTION)


def test_why_a_pooling_is_no_attention_names_what_its_rows_share():
    """Each row is reduced by a learned query: there is one set of scores for each row, and one row of values each."""

    def pooled(x, query):
        return jnp.einsum("bs,bsd->bd", jax.nn.softmax(x @ query, axis=-1), x)

    (declined,) = fl.find(pooled, jnp.ones((4, 8, 16)), jnp.ones(16), passes="dot_product_attention").rejections
    assert declined.code == "axes"
    assert "one set of scores, from keys or a query that all rows share: a mixture or a pooling" in declined.sentence
