"""The passes of whole layers: what they find in real models, what they make of it, and why they decline what is nearly one."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.fusers.registry import registry
from fusionlab.models import transformer

from . import layer_parts as parts
from .layer_misses import MISSES
from .layer_models import CASES

PASSES = tuple(
    f"multi_transformer_{kind}{fused}" for kind in ("encoder", "decoder") for fused in ("", "_fuse_qkv")
)  # fmt: skip
STACKED = fl.Strategy(**{name: {"stacked": True} for name in PASSES})


def close(old, new, tolerance):
    for want, got in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        assert (want.shape, want.dtype) == (got.shape, got.dtype)
        want, got = np.asarray(want, np.float64), np.asarray(got, np.float64)
        assert np.max(np.abs(want - got), initial=0) <= tolerance * max(np.max(np.abs(want), initial=0), 1.0)


def counts(found):
    return {name: n for name, n in found.counts().items() if n}


@pytest.mark.parametrize("name", CASES)
def test_every_layer_is_one_site(name):
    case = CASES[name]
    if (why := case.missing()) is not None:
        pytest.skip(why)
    fn, args = case.build()
    found = fl.find(fn, *args, passes=PASSES)
    assert counts(found) == dict(case.sites), found
    assert all(c.nodes_before - c.nodes_after > 30 for c in found.candidates)
    if any(isinstance(a, jax.ShapeDtypeStruct) for a in jax.tree.leaves(args)):
        return
    old = jax.jit(fn)(*args)
    close(old, fl.fuse(fn, passes=PASSES)(*args), 1e-2 if "bf16" in name or "bfloat16" in name else 1e-4)


def misses(*codes):
    return pytest.mark.parametrize("name", [name for name, miss in MISSES.items() if miss.code in codes])


VALUES, INSIDE = ("scalar", "axes", "activation"), ("escapes", "dropout", "named_residual")


@misses("structure")
def test_what_is_nearly_built_like_a_layer_says_why_not(name):
    check_says_why_not(MISSES[name])


@misses(*VALUES)
def test_what_computes_nearly_a_layer_says_why_not(name):
    check_says_why_not(MISSES[name])


@misses(*INSIDE)
def test_a_layer_of_which_more_is_wanted_says_why_not(name):
    check_says_why_not(MISSES[name])


@misses("rotary")
def test_what_is_nearly_a_rotary_embedding_says_why_not(name):
    check_says_why_not(MISSES[name])


def test_every_near_miss_is_in_one_of_these():
    assert {miss.code for miss in MISSES.values()} == {"structure", "rotary", *VALUES, *INSIDE}


def check_says_why_not(miss):
    fn, args = miss.build()
    found = fl.find(fn, *args, passes=PASSES)
    mine = [r for r in found.rejections if r.pass_name == miss.pass_name]
    assert not found.candidates
    assert any(r.code == miss.code and miss.says.lower() in r.sentence.lower() for r in mine), found
    close(jax.jit(fn)(*args), fl.fuse(fn, passes=PASSES)(*args), 0.0)


@pytest.fixture(scope="module")
def encoder():
    params = transformer.init(jax.random.key(0), 3, embed=32)
    return functools.partial(transformer.encoder, causal=True), params, transformer.inputs(jax.random.key(1), 2, 8, 32)


def test_a_layer_is_one_node(encoder):
    fn, params, x = encoder
    found = fl.find(fn, params, x, passes=PASSES)
    graph = found.apply()
    assert [n.primitive for n in graph.nodes()] == ["multi_transformer"] * 3
    again = fl.find(fl.fuse(fn, passes=PASSES), params, x)
    assert not again.candidates
    assert not again.rejections


def test_layers_in_a_row_are_one_call(encoder):
    fn, params, x = encoder
    found = fl.find(fn, params, x, passes=STACKED)
    (site,) = found.candidates
    assert site.attrs["layers"] == 3
    assert site.formula.startswith("3 layers: ")
    assert [n.primitive for n in found.apply().nodes()] == ["multi_transformer"]
    close(jax.jit(fn)(params, x), fl.fuse(fn, passes=STACKED)(params, x), 1e-5)


def test_a_row_ends_where_a_layer_between_is_returned(encoder):
    _, params, x = encoder

    def fn(params, x):
        seen = []
        for p in params:
            x = transformer.block(p, x)
            seen.append(x)
        return x, seen[0]

    found = fl.find(fn, params, x, passes=STACKED)
    assert sorted(c.attrs["layers"] for c in found.candidates) == [1, 2]
    close(jax.jit(fn)(params, x), fl.fuse(fn, passes=STACKED)(params, x), 1e-5)


def test_a_row_ends_where_layers_differ(encoder):
    _, params, x = encoder

    def fn(params, x):
        for p, causal in zip(params, (True, False, False), strict=True):
            x = transformer.block(p, x, causal=causal)
        return x

    found = fl.find(fn, params, x, passes=STACKED)
    assert [(c.attrs["layers"], c.attrs["is_causal"]) for c in found.candidates] == [(1, True), (2, False)]
    close(jax.jit(fn)(params, x), fl.fuse(fn, passes=STACKED)(params, x), 1e-5)


def test_it_is_asked_by_name_alone(encoder):
    fn, params, x = encoder
    found = fl.find(fn, params, x)
    assert found.counts()["gemm_epilogue"] == 18
    assert not set(PASSES) & found.counts().keys()


def test_the_larger_fusion_wins_where_it_is_asked_for(encoder):
    fn, params, x = encoder
    found = fl.find(fn, params, x, passes=["gemm_epilogue", "dot_product_attention", "multi_transformer_encoder"])
    assert counts(found)["multi_transformer_encoder"] == 3
    assert "gemm_epilogue" not in counts(found)
    lost = {r.code for r in found.rejections if r.pass_name != "multi_transformer_encoder"}
    assert lost == {"overlap"}


def test_differentiated_it_is_its_pieces(encoder):
    fn, params, x = encoder
    fused = fl.fuse(fn, passes=PASSES)

    def loss(fn):
        return lambda params, x: jnp.mean(jnp.square(fn(params, x)))

    close(jax.jit(jax.grad(loss(fn)))(params, x), jax.grad(loss(fused))(params, x), 1e-6)
    names = [n.primitive for n in fl.trace(jax.grad(loss(fused)), params, x).nodes()]
    assert "multi_transformer" not in names
    assert "dot_product_attention_cotangent" in names
    assert "gemm_epilogue_cotangent" in names


def test_it_has_no_gradient_pass(encoder):
    fn, params, x = encoder
    with pytest.raises(fl.errors.UnknownNameError, match="multi_transformer_encoder_grad"):
        fl.find(fn, params, x, passes=["multi_transformer_encoder", "multi_transformer_encoder_grad"])


def test_of_a_train_step_it_says_what_to_do(encoder):
    fn, params, x = encoder
    step = jax.value_and_grad(lambda params, x: jnp.mean(fn(params, x)))
    found = fl.find(step, params, x, passes=PASSES)
    assert not found.candidates
    assert {r.code for r in found.rejections} == {"escapes"}
    assert "jax.grad(fl.fuse(loss))" in found.rejections[0].edit


def test_it_composes(encoder):
    fn, params, x = encoder
    fused = fl.fuse(fn, passes=PASSES)
    plain = jax.jit(fn)  # one program, also where what is around it is not compiled
    close(jax.checkpoint(plain)(params, x), jax.jit(jax.checkpoint(fused))(params, x), 1e-5)
    both = jnp.stack([x, 2 * x])
    close(jax.vmap(plain, (None, 0))(params, both), jax.vmap(fused, (None, 0))(params, both), 1e-5)
    _, old = jax.jvp(plain, (params, x), (params, x))
    _, new = jax.jvp(fused, (params, x), (params, x))
    close(old, new, 1e-4)


@pytest.mark.parametrize(("heads", "kv_heads"), [(16, 8), (16, 4), (12, 6)])
def test_heads_of_keys_may_be_as_many_as_a_head_is_long(heads, kv_heads):
    """Where sizes are reduced for the proof, 16 heads are 2 times what the 8 of the keys are reduced to, and those are as many as D."""
    how = parts.Parts(norm=parts.rms_norm, attend=parts.attend_grouped, mlp=parts.swiglu)
    p = {n: a for n, a in parts.params(heads=heads, kv_heads=kv_heads).items() if not n.startswith("qkv")}
    (cache,) = parts.caches(parts.T, 1, kv_heads)
    found = fl.find(functools.partial(parts.append, how), p, parts.inputs(parts.B, 1, parts.E), cache, passes=PASSES)
    assert len(found.candidates) == 1, found


@pytest.mark.parametrize("name", PASSES)
def test_the_sample_of_each_pass_has_a_site(name):
    fn, args = registry()[name].sample()
    assert counts(fl.find(fn, *args, passes=PASSES)) == {name: 1}


@pytest.mark.parametrize("implementation", ["xla", "composed"])
def test_the_implementation_may_be_named(encoder, implementation):
    fn, params, x = encoder
    fused = fl.fuse(fn, passes=PASSES, implementation=implementation)
    close(jax.jit(fn)(params, x), fused(params, x), 1e-5)
