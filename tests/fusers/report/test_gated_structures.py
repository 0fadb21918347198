"""Structures with a gate, as models of proteins have them: gated attention with a bias of pairs, triangle multiplication."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import fusionlab as fl

from ..checks import agree, normal

ROWS, N, C, H, D, Z, M = 3, 7, 12, 2, 4, 5, 6
X, PAIR = normal((ROWS, N, C), (N, N, Z))
MASK = jnp.arange(N) < jnp.array([5, 7, 6])[:, None, None, None]
Q, K, V, GATE, GB, OUTWARD, OB, OF_PAIR = normal(
    (C, H, D), (C, H, D), (C, H, D), (C, H, D), (H, D), (H, D, C), (C,), (Z, H), seed=1
)
Q, K = Q * 0.3, K * 0.3
GATED, TRIANGLE = "gated_attention", "triangle_multiplication"


def told(fn, *args):
    return {s.kind: s for s in fl.find(fn, *args).structures}


def attention(change=lambda s: s, gate=jax.nn.sigmoid, masked=True):
    def fn(x, pair):
        q, k, v = (jnp.einsum("bqa,ahc->bqhc", x, w) for w in (Q * D**-0.5, K, V))
        scores = jnp.einsum("bqhc,bkhc->bhqk", q, k)
        scores = change(scores, jnp.einsum("qkc,ch->hqk", pair, OF_PAIR))
        scores = jnp.where(MASK, scores, -1e9) if masked else scores
        a = jnp.einsum("bhqk,bkhc->bqhc", jax.nn.softmax(scores), v)
        a = a * gate(jnp.einsum("bqc,chv->bqhv", x, GATE) + GB)
        return jnp.einsum("bqhc,hco->bqo", a, OUTWARD) + OB

    return fn


def biased(s, pair):
    return s + pair


@pytest.mark.parametrize("masked", [True, False])
def test_a_gated_attention_with_a_bias_of_pairs_is_told_and_its_attention_is_a_site(masked):
    fn = attention(biased, masked=masked)
    found = agree(fn, X, PAIR, factor=8)
    assert found.counts()["dot_product_attention"] == 1
    (structure,) = [s for s in found.structures if s.kind == GATED]
    assert "a product among its biases" in structure.text
    (site,) = [c for c in found.candidates if c.pass_name == "dot_product_attention"]
    assert site.id in structure.sites
    assert site.node_ids <= structure.node_ids


CLIPS = {
    "before the bias": lambda s, pair: jnp.clip(s, -50, 50) + pair,
    "behind the bias": lambda s, pair: jnp.clip(s + pair, -1e4, 1e4),
    "from below": lambda s, pair: jnp.maximum(s + pair, -20.0),
    "by lax.clamp": lambda s, pair: lax.clamp(-50.0, s, 50.0),
}


@pytest.mark.parametrize("name", CLIPS)
def test_clipped_scores_are_declined_by_that_name_and_the_structure_is_told(name):
    found = agree(attention(CLIPS[name]), X, PAIR, factor=8)
    assert found.counts()["dot_product_attention"] == 0
    (rejection,) = [r for r in found.rejections if r.pass_name == "dot_product_attention"]
    assert "clips the scores" in rejection.sentence
    assert "tanh" in str(rejection.edit)
    (structure,) = [s for s in found.structures if s.kind == GATED]
    assert "its scores clipped" in structure.text


def test_a_gated_attention_is_told_in_loops_maps_and_train_steps():
    fn = attention(biased)
    xs = jnp.stack([X, X[::-1]])
    assert GATED in told(lambda xs, p: lax.map(lambda x: fn(x, p), xs), xs, PAIR)
    assert GATED in told(jax.vmap(fn, (0, None)), xs, PAIR)
    assert GATED in told(jax.grad(lambda x, p: jnp.sin(fn(x, p)).sum(), (0, 1)), X, PAIR)


@pytest.mark.parametrize("gate", [jnp.tanh, lambda h: h, jax.nn.relu])
def test_another_gate_is_no_gated_attention(gate):
    assert GATED not in told(attention(biased, gate), X, PAIR)


# -- triangle multiplication ----------------------------------------------------------------------------------------------

L, LB, R, RB, LG, RG, ON, OUT = normal((Z, M), (M,), (Z, M), (M,), (Z, M), (Z, M), (M,), (M, Z), seed=2)
BOTH, GATES = normal((Z, 2 * M), (Z, 2 * M), seed=3)
SEEN = jnp.ones((N, N)).at[2].set(0.0)


def norm(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def triangle(equation="ikc,jkc->ijc", gate=jax.nn.sigmoid, other=lambda z: z):
    def fn(pair):
        z = norm(pair)
        left, right = SEEN[..., None] * (z @ L + LB), SEEN[..., None] * (other(z) @ R + RB)
        left, right = left * gate(z @ LG), right * gate(other(z) @ RG)
        made = norm(jnp.einsum(equation, left, right)) * ON
        return (made @ OUT) * jax.nn.sigmoid(z @ normal((Z, Z), seed=4)[0])

    return fn


def packed(pair):
    """Both projections by one product, split behind their gates."""
    z = norm(pair)
    both = jnp.moveaxis(z @ BOTH, -1, 0) * SEEN * jax.nn.sigmoid(jnp.moveaxis(z @ GATES, -1, 0))
    a, b = (y.squeeze(1) for y in jnp.split(both.reshape(M, 2, N, N), 2, 1))
    return norm(jnp.moveaxis(jnp.einsum("ckj,cki->cij", a, b), 0, -1)) @ OUT


TRIANGLES = {"outgoing": triangle(), "incoming": triangle("kjc,kic->ijc"), "packed": packed}


@pytest.mark.parametrize("name", TRIANGLES)
def test_a_triangle_multiplication_is_told(name):
    found = fl.find(TRIANGLES[name], PAIR)
    (structure,) = [s for s in found.structures if s.kind == TRIANGLE]
    assert "a triangle multiplication" in structure.text
    pairs = jnp.stack([PAIR, PAIR[::-1]])
    assert TRIANGLE in told(jax.vmap(TRIANGLES[name]), pairs)
    assert TRIANGLE in told(lambda p: lax.map(TRIANGLES[name], p), pairs)
    assert TRIANGLE in told(jax.grad(lambda p: jnp.sin(TRIANGLES[name](p)).sum()), PAIR)


def over_channels(pair):
    z = norm(pair)
    return jnp.einsum("ikc,kjc->ijk", (z @ L) * jax.nn.sigmoid(z @ LG), (z @ R) * jax.nn.sigmoid(z @ RG))


NO_TRIANGLES = {
    "no gates": triangle(gate=lambda h: h),
    "of two values": triangle(other=jnp.cos),
    "over the channels": over_channels,
    "over both axes": lambda p: jnp.einsum("ikc,jkc->ij", norm(p) @ L, norm(p) @ R),
}


@pytest.mark.parametrize("name", NO_TRIANGLES)
def test_what_is_no_triangle_multiplication_is_not_told(name):
    assert TRIANGLE not in told(NO_TRIANGLES[name], PAIR)
