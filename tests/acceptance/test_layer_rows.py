"""Acceptance rows 33 to 35 and 43 to 45: whole layers recognised, declined with a reason, told by position, merged."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.models import transformer
from tests.fusers.transformer.layer_misses import MISSES

PASSES = tuple(f"multi_transformer_{kind}{fused}" for kind in ("encoder", "decoder") for fused in ("", "_fuse_qkv"))
FULL = (2, 128, 1024, 16, 64, 4096)  # B, S, E, H, D, F of the original
SMALL = (2, 16, 64, 4, 16, 128)


DTYPES = {"float32": 1e-4, "float16": 1e-2}  # the largest error allowed, relative to the largest number


def layer(form, pre=True, past=0, activation=jax.nn.gelu, sizes=FULL, dtype="float32"):
    """(function, arguments): a layer of the original's sizes; `form` says how queries, keys and values are projected."""
    rng = np.random.default_rng(0)
    B, S, E, H, D, F = sizes

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), dtype)

    w = {"out": array(E, E), "up": array(E, F), "down": array(F, E), "qkv": array(E, 3 * E), "b": array(3 * E) / 30}
    w |= {
        "g1": 1 + array(E) / 9,
        "c1": array(E),
        "g2": 1 + array(E) / 9,
        "c2": array(E),
        "bo": array(E),
        "bu": array(F),
        "bd": array(E),
    }

    def norm(x, g, c):
        mean = x.mean(-1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(jnp.square(x - mean).mean(-1, keepdims=True) + 1e-5) * g + c

    def project(w, h):
        heads = (*h.shape[:2], H, D)
        if form == "separate":
            parts = zip(jnp.split(w["qkv"], 3, 1), jnp.split(w["b"], 3), strict=True)
            return [(h @ a + b).reshape(heads) for a, b in parts]
        both = h @ w["qkv"] + w["b"]
        if form == "concatenated":
            return [a.reshape(heads) for a in jnp.split(both, 3, -1)]
        return jnp.split(both.reshape(*h.shape[:2], H, 3 * D), 3, -1)

    def attend(w, h, cache):
        q, k, v = project(w, h)
        if cache:
            k, v = jnp.concatenate([cache[0], k], 1), jnp.concatenate([cache[1], v], 1)
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / math.sqrt(D)
        mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v).reshape(h.shape)
        return mixed @ w["out"] + w["bo"], (k, v)

    def feed(w, h):
        return activation(h @ w["up"] + w["bu"]) @ w["down"] + w["bd"]

    def fn(w, x, *cache):
        if pre:
            mixed, kept = attend(w, norm(x, w["g1"], w["c1"]), cache)
            x = x + mixed
            y = x + feed(w, norm(x, w["g2"], w["c2"]))
        else:
            mixed, kept = attend(w, x, cache)
            x = norm(x + mixed, w["g1"], w["c1"])
            y = norm(x + feed(w, x), w["g2"], w["c2"])
        return (y, *kept) if cache else y

    tokens = 1 if past else S
    cache = [array(B, past, H, D) for _ in range(2 if past else 0)]
    return fn, (w, array(B, tokens, E), *cache)


def one_block(fn, args, name):
    found = fl.find(fn, *args, passes=PASSES)
    assert {n: c for n, c in found.counts().items() if c} == {name: 1}, found
    (site,) = found.candidates
    # What only the site read goes with it.
    assert found.apply().node_count <= found.graph.node_count - site.nodes_before + site.nodes_after
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), args)
    fused = fl.fuse(fn, passes=PASSES)(*args)
    for want, got in zip(jax.tree.leaves(jax.jit(fn)(*wide)), jax.tree.leaves(fused), strict=True):
        error = np.max(np.abs(np.asarray(want) - np.asarray(got, np.float32)))
        assert error <= DTYPES[got.dtype.name] * max(1.0, np.max(np.abs(want)))
    return site


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_33_a_pre_norm_block_with_separate_projections(record_property, dtype):
    site = one_block(*layer("separate", dtype=dtype), "multi_transformer_encoder")
    record_property("nodes removed", site.nodes_before - site.nodes_after)
    assert site.nodes_before - site.nodes_after >= 56
    assert f"{site.nodes_before} nodes -> {site.nodes_after}" in str(site)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["concatenated", "interleaved"])
def test_row_34_one_projection_and_a_split(form, dtype):
    site = one_block(*layer(form, dtype=dtype), "multi_transformer_encoder_fuse_qkv")
    assert site.attrs["qkv"] == form
    assert site.nodes_before - site.nodes_after >= 46


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("form", "removed"), [("separate", 60), ("concatenated", 52), ("interleaved", 52)])
def test_row_35_decoding_with_a_cache(form, removed, dtype):
    fn, args = layer(form, past=127, dtype=dtype)
    site = one_block(fn, args, f"multi_transformer_decoder{'' if form == 'separate' else '_fuse_qkv'}")
    assert site.attrs["cache"] == "append"
    assert len(site.roots) == 3
    # Weights that are split in the program are read outside the site.
    assert site.nodes_before - site.nodes_after >= removed - 16


def test_post_norm_and_relu_as_well():
    fn, args = layer("separate", pre=False, activation=jax.nn.relu, sizes=SMALL)
    assert one_block(fn, args, "multi_transformer_encoder").attrs["activation"] == "relu"


ROW_43 = ("epsilon", "scale_traced", "softmax_over_queries", "norm1_returned", "heads_not_turned_back", "mixed_norms")


@pytest.mark.whole
@pytest.mark.parametrize("name", ROW_43)
def test_row_43_every_constraint_is_enforced(name):
    miss = MISSES[name]
    fn, args = miss.build()
    found = fl.find(fn, *args, passes=PASSES)
    assert not found.candidates
    assert miss.code in {r.code for r in found.rejections}


def test_row_43_a_transposed_weight_is_read_as_it_lies():
    """The original repacks it wrongly; here x @ w.T is the same site with a weight that is told to be turned."""
    params = transformer.init_block(jax.random.key(0), 32)
    x = transformer.inputs(jax.random.key(1), 2, 8, 32)

    def fn(params, x):
        turned = jax.tree.map(lambda a: a, params)
        turned["attention"]["q"]["w"] = params["attention"]["q"]["w"].T
        return transformer.block(turned, x)

    found = fl.find(fn, params, x, passes=PASSES)
    assert found.candidates[0].attrs["turned"] == ("q",)
    np.testing.assert_allclose(fl.fuse(fn, passes=PASSES)(params, x), jax.jit(fn)(params, x), rtol=1e-5, atol=1e-5)


def test_row_44_layers_are_told_by_position():
    """Other names, a norm before the first layer and behind the last, and 12 of 16 heads."""
    params = transformer.init(jax.random.key(0), 2, 64)
    keep = 12

    def prune(p):
        a = p["attention"]
        cut = {n: {"w": a[n]["w"][:, : keep * 4], "b": a[n]["b"][: keep * 4]} for n in "qkv"}
        return {"zeta": {**p, "attention": {**cut, "out": {"w": a["out"]["w"][: keep * 4], "b": a["out"]["b"]}}}}

    pruned = [prune(p) for p in params]
    x = transformer.inputs(jax.random.key(1), 2, 8, 64)

    def attend(p, h):
        q, k, v = ((h @ p[n]["w"] + p[n]["b"]).reshape(*h.shape[:2], keep, 4) for n in "qkv")
        weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) / 2)
        mixed = jnp.einsum("bhts,bshd->bthd", weights, v).reshape(*h.shape[:2], keep * 4)
        return mixed @ p["out"]["w"] + p["out"]["b"]

    def fn(pruned, x):
        x = transformer.layer_norm(params[0]["ln1"], x)
        for p in pruned:
            p = p["zeta"]
            x = x + attend(p["attention"], transformer.layer_norm(p["ln1"], x))
            x = x + transformer.mlp(p["mlp"], transformer.layer_norm(p["ln2"], x))
        return transformer.layer_norm(params[0]["ln2"], x)

    found = fl.find(fn, pruned, x, passes=PASSES)
    assert [c.attrs["heads"] for c in found.candidates] == [keep, keep]
    np.testing.assert_allclose(fl.fuse(fn, passes=PASSES)(pruned, x), jax.jit(fn)(pruned, x), rtol=1e-5, atol=1e-5)


def test_row_42_a_weight_used_elsewhere_still_works():
    """The original erases the keys' weight once it is packed; here it is an argument like any other, and nothing is written."""
    params = transformer.init_block(jax.random.key(0), 32)
    x = transformer.inputs(jax.random.key(1), 2, 8, 32)

    def fn(params, x):
        return transformer.block(params, x) @ params["attention"]["k"]["w"]

    kept = jax.tree.map(np.array, params)
    fused = fl.fuse(fn, passes=PASSES)
    np.testing.assert_allclose(fused(params, x), jax.jit(fn)(params, x), rtol=1e-4, atol=1e-5)
    assert fused.findings(params, x).counts()["multi_transformer_encoder"] == 1
    jax.tree.map(np.testing.assert_array_equal, kept, params)


def test_row_45_three_blocks_are_one_stacked_call():
    params = transformer.init(jax.random.key(0), 3, 32)
    x = transformer.inputs(jax.random.key(1), 2, 8, 32)
    fn = functools.partial(transformer.encoder, causal=True)
    stacked = fl.Strategy(multi_transformer_encoder={"stacked": True})
    graph = fl.find(fn, params, x, passes=stacked).apply()
    assert [(n.primitive, n.params["layers"]) for n in graph.nodes()] == [("multi_transformer", 3)]
    np.testing.assert_allclose(fl.fuse(fn, passes=stacked)(params, x), jax.jit(fn)(params, x), rtol=1e-5, atol=1e-5)
