"""Keys and values with fewer heads than the queries: every spelling is the op without a copy of them, forward and in a train step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl

from ..checks import agree, close, jit, normal, primitives

ATTENTION = "dot_product_attention"
N, K = 6, 2
Q, KEY, VALUE = normal((2, 5, N, 4), (2, 7, K, 4), (2, 7, K, 3))
HEADS = ", 3 query heads a key head"


def repeat(a):
    return jnp.repeat(a, N // K, axis=2)


def broadcast(a):
    b, s, k, h = a.shape
    return jnp.broadcast_to(a[:, :, :, None], (b, s, k, N // K, h)).reshape(b, s, N, h)


def tiled(a):
    return jnp.tile(a, (1, 1, N // K, 1))


def axis_before(a):
    b, s, k, h = a.shape
    return jnp.broadcast_to(a[:, :, None], (b, s, N // K, k, h)).reshape(b, s, N, h)


def attend(q, k, v, is_causal=False, bias=None):
    s = jnp.einsum("bthd,bshd->bhts", q, k) * 0.5
    s = s if bias is None else s + bias
    s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf) if is_causal else s
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), v)


def heads_first(q, k, v, is_causal=False):
    q, k, v = (a.swapaxes(1, 2) for a in (q, k, v))
    k, v = (jnp.repeat(a, N // K, axis=1) for a in (k, v))
    s = q @ (0.5 * k).swapaxes(-1, -2)
    s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf) if is_causal else s
    return (jax.nn.softmax(s) @ v).swapaxes(1, 2)


def grouped(q, k, v, is_causal=False):
    b, t, _, h = q.shape
    s = jnp.einsum("btkgh,bskh->bkgts", q.reshape(b, t, K, N // K, h), k) * 0.5
    s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf) if is_causal else s
    return jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(s), v).reshape(b, t, N, v.shape[-1])


def of_jax(q, k, v, is_causal=False):
    v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, 1)))
    return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal)


SHARED = {
    "jnp.repeat": lambda q, k, v, c: attend(q, repeat(k), repeat(v), c),
    "broadcast and reshape": lambda q, k, v, c: attend(q, broadcast(k), broadcast(v), c),
    "repeated after a factor": lambda q, k, v, c: attend(q, repeat(0.25 * k), repeat(3 * v), c),
    "heads before length": heads_first,
    "grouped einsum": grouped,
    "jax.nn.dot_product_attention": of_jax,
    "with a bias": lambda q, k, v, c: attend(q, repeat(k), repeat(v), c, jnp.arange(N * 7.0).reshape(N, 1, 7) / 9),
    "one value as both": lambda q, k, v, c: attend(q, *[repeat(k)] * 2, c),
}


def the_op(fn, *args):
    """The equation of the op in the fused program."""
    found = fl.find(fn, *args, passes=ATTENTION)
    (eqn,) = [n.eqn for n in found.apply().top.nodes if n.primitive == ATTENTION]
    return eqn


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", SHARED)
def test_heads_that_share_keys_are_read_where_they_stand(name, is_causal):
    def fn(q, k, v):
        return SHARED[name](q, k, v, is_causal)

    found = agree(fn, Q, KEY, VALUE, passes=ATTENTION, factor=2)
    (site,) = found.candidates
    assert site.formula.endswith(HEADS)
    assert site.attrs["is_causal"] is is_causal
    shapes = [v.aval.shape for v in the_op(fn, Q, KEY, VALUE).invars[:3]]
    heads = 2 if site.attrs["layout"] == "BTNH" else 1
    assert [s[heads] for s in shapes] == [N, K, K]
    assert "broadcast_in_dim" not in primitives(found.apply()) or name in (
        "with a bias",
        "jax.nn.dot_product_attention",
    )


@pytest.mark.parametrize("name", SHARED)
def test_a_train_step_has_the_gradients_of_the_few_heads(name):
    def step(q, k, v):
        return jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(SHARED[name](*a, True))), (0, 1, 2))(q, k, v)

    found = fl.find(step, Q, KEY, VALUE, passes=ATTENTION)
    (site,) = found.candidates
    assert site.formula.endswith(HEADS)
    assert site.backward is not None
    assert site.backward.stays is None
    assert {int(np.prod(g.shape)) for n, g in site.backward.gradients.items() if n != "q"} <= {KEY.size, VALUE.size}
    close(jit(fl.fuse(step, passes=ATTENTION))(Q, KEY, VALUE), jit(step)(Q, KEY, VALUE), 4)


def one_head(q, k, v, is_causal):
    return attend(q, *(jnp.broadcast_to(a[:, :, :1], (*a.shape[:2], N, a.shape[-1])) for a in (k, v)), is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
def test_one_head_of_keys_for_all_queries_is_never_repeated(is_causal):
    def fn(q, k, v):
        return one_head(q, k, v, is_causal)

    found = agree(fn, Q, KEY, VALUE, passes=ATTENTION, factor=2)
    (site,) = found.candidates
    eqn = the_op(fn, Q, KEY, VALUE)
    assert eqn.invars[1].aval.size == KEY.size // K
    assert site.formula.endswith(", 6 query heads a key head") or not is_causal  # else they may be more rows


# What is not the op's grouping, or is needed repeated anyway, keeps the copies.
REPEATED = {
    "tiled": lambda q, k, v: attend(q, tiled(k), tiled(v)),
    "an axis before the heads": lambda q, k, v: attend(q, axis_before(k), axis_before(v)),
    "keys tiled, values repeated": lambda q, k, v: attend(q, tiled(k), repeat(v)),
    "keys repeated, values not": lambda q, k, v: attend(q, repeat(k), v[:, :, jnp.array([0, 1, 0, 1, 1, 0])]),
    "read elsewhere as well": lambda q, k, v: (lambda r: attend(q, r, repeat(v)) + r.sum())(repeat(k)),
    "returned as well": lambda q, k, v: (lambda r: (attend(q, r, repeat(v)), r))(repeat(k)),
    "keys and values of different groups": lambda q, k, v: attend(q, repeat(k), jnp.repeat(tiled(v)[:, :, :3], 2, 2)),
    "positions repeated": lambda q, k, v: attend(q, *(jnp.repeat(tiled(a), 2, axis=1) for a in (k, v))),
}


@pytest.mark.parametrize("name", REPEATED)
def test_other_copies_stay_and_the_site_is_as_right(name):
    found = agree(REPEATED[name], Q, KEY, VALUE, passes=ATTENTION, factor=2)
    (site,) = found.candidates
    assert "a key head" not in site.formula
    shapes = [v.aval.shape for v in the_op(REPEATED[name], Q, KEY, VALUE).invars[:3]]
    heads = 2 if site.attrs["layout"] == "BTNH" else 1
    assert [s[heads] for s in shapes] == [N, N, N]


def test_a_batch_that_is_repeated_for_beams_is_no_heads():
    def fn(q, k, v):
        return attend(q, *(jnp.repeat(tiled(a), 3, axis=0) for a in (k, v)))

    q = normal((6, 5, N, 4))[0]
    (site,) = agree(fn, q, KEY, VALUE, passes=ATTENTION, factor=2).candidates
    assert "a key head" not in site.formula
    assert [v.aval.shape[:3] for v in the_op(fn, q, KEY, VALUE).invars[:3]] == [(6, 5, N), (6, 7, N), (6, 7, N)]


def test_a_scan_over_layers_trains_with_few_heads():
    wk, wv = normal((3, N * 4, K * 4), (3, N * 4, K * 4), seed=2)
    x = normal((2, 5, N, 4), seed=3)[0]

    def loss(wk, wv, x):
        def layer(x, w):
            flat = x.reshape(2, 5, N * 4)
            k, v = ((flat @ one).reshape(2, 5, K, 4) * 0.2 for one in w)
            return x + attend(x, repeat(k), repeat(v), True), None

        return jnp.sum(jnp.sin(jax.lax.scan(layer, x, (wk, wv))[0]))

    step = jax.value_and_grad(loss, (0, 1, 2))
    found = fl.find(step, wk, wv, x, passes=ATTENTION)
    (site,) = found.candidates
    assert site.formula.endswith(HEADS)
    close(jit(fl.fuse(step, passes=ATTENTION))(wk, wv, x), jit(step)(wk, wv, x), 8)


def test_where_the_few_heads_cannot_be_fused_with_their_backward_pass_the_copies_may(monkeypatch):
    from fusionlab.graph.backward.pair import Pairer
    from fusionlab.graph.declined import Declined

    plan = Pairer.plan

    def refusing(self, region, *rest):
        if region.leaves["k"].shape[2] == K:
            raise Declined("for this test")
        return plan(self, region, *rest)

    monkeypatch.setattr(Pairer, "plan", refusing)

    def step(q, k, v):
        return jax.grad(lambda *a: jnp.sum(jnp.sin(attend(a[0], repeat(a[1]), repeat(a[2])))), (0, 1, 2))(q, k, v)

    (site,) = fl.find(step, Q, KEY, VALUE, passes=ATTENTION).candidates
    assert "a key head" not in site.formula
    assert site.backward.stays is None


def test_dropout_on_grouped_scores_is_drawn_again_of_its_key():
    key = jax.random.key(3)

    def fn(q, k, v, key):
        b, t, _, h = q.shape
        s = jnp.einsum("btkgh,bskh->bkgts", q.reshape(b, t, K, N // K, h), k) * 0.5
        p = jax.nn.softmax(s)
        p = jnp.where(jax.random.bernoulli(key, 0.8, p.shape), p / 0.8, 0.0)
        return jnp.einsum("bkgts,bskh->btkgh", p, v).reshape(b, t, N, v.shape[-1])

    (site,) = fl.find(fn, Q, KEY, VALUE, key, passes=ATTENTION).candidates
    assert site.formula.endswith(HEADS)
    assert "bernoulli" in site.formula
    close(jit(fl.fuse(fn, passes=ATTENTION))(Q, KEY, VALUE, key), jit(fn)(Q, KEY, VALUE, key), 2)
