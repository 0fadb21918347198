"""Every site of the common libraries' own modules is found, and an erf model is never given tanh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl

from .checks import agree, close, forward_counts
from .libraries import ACTIVATIONS, ATTENTIONS, CROSS_ATTENTIONS, DROPPING, MLPS, equinox_dropping_heads

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("library", MLPS)
def test_both_layers_of_a_library_mlp_are_found_with_their_own_activation(library, act, dtype):
    fn, args = MLPS[library](ACTIVATIONS[act], DTYPES[dtype])
    found = fl.find(fn, *args, passes="gemm_epilogue")
    assert [c.attrs["activation"] for c in found.candidates] == [act, "none"], str(found.rejections)
    assert not found.rejections


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True], ids=["unmasked", "causal"])
@pytest.mark.parametrize("library", ATTENTIONS)
def test_a_library_attention_is_found_with_its_mask_told_truly(library, causal, dtype):
    fn, args = ATTENTIONS[library](causal, DTYPES[dtype])
    found = fl.find(fn, *args)
    sites = [c for c in found.candidates if c.pass_name == "dot_product_attention"]
    assert [c.attrs["is_causal"] for c in sites] == [causal], str(found.rejections)
    linear = [c for c in found.candidates if c.pass_name == "gemm_epilogue"]
    assert len(linear) == (0 if library == "equinox" else 4)  # equinox's projections have no bias


@pytest.mark.parametrize("library", CROSS_ATTENTIONS)
def test_a_library_attention_over_another_sequence_is_found(library):
    fn, args = CROSS_ATTENTIONS[library](jnp.float32)
    found = fl.find(fn, *args)
    products = 0 if library == "equinox" else 4
    assert forward_counts(found) == {"gemm_epilogue": products, "dot_product_attention": 1, "layer_norm": 0}
    (site,) = [c for c in found.candidates if c.pass_name == "dot_product_attention"]
    assert site.attrs["is_causal"] is False
    assert site.leaves["q"].shape != site.leaves["k"].shape


def varied(args):
    """The same arrays with values of their own in place of ones and zeros."""
    leaves, tree = jax.tree.flatten(args)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    new = [a + 0.3 * jax.random.normal(k, a.shape, a.dtype) for a, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, new)


@pytest.mark.parametrize("library", MLPS)
def test_a_library_mlp_keeps_its_values_and_gradients(library):
    fn, args = MLPS[library](ACTIVATIONS["gelu_tanh"], jnp.float32)
    assert len(agree(fn, *varied(args), factor=4).candidates) == 2


@pytest.mark.parametrize("library", CROSS_ATTENTIONS)
def test_a_library_attention_keeps_its_values_and_gradients(library):
    fn, args = CROSS_ATTENTIONS[library](jnp.float32)
    agree(fn, *varied(args), factor=8)


@pytest.mark.parametrize(("library", "shared"), DROPPING, ids=str)
def test_the_dropout_of_a_library_is_drawn_again_of_its_key(library, shared):
    fn, args = DROPPING[library, shared](shared, jnp.float32)
    found = agree(fn, *args, passes="dot_product_attention", factor=4)
    (site,) = found.candidates
    assert "dropout_key" in site.leaves, site.notes
    assert site.attrs.get("dropout_shape") == ((1, 1, 10, 10) if shared else None)
    assert site.attrs["factors_scale"] == pytest.approx(1 / 0.9)
    assert "random_bits" not in [n.primitive for n in found.apply().nodes()]


@pytest.mark.parametrize("shared", [True, False])
def test_a_train_step_of_linen_with_dropout_is_fused_both_ways(shared):
    fn, (params, x, key) = DROPPING["linen", shared](shared, jnp.float32)

    def step(params, x, key):
        return jax.value_and_grad(lambda p: jnp.sum(jnp.sin(fn(p, x, key))))(params)

    fused = fl.fuse(step)
    (site,) = (c for c in fused.findings(params, x, key).candidates if c.pass_name == "dot_product_attention")
    assert "dropout_key" in site.leaves, site.notes
    assert site.backward is not None
    assert site.backward.stays is None
    close(fused(params, x, key), step(params, x, key), 8)


def test_heads_with_keys_of_their_own_keep_their_masks():
    fn, args = equinox_dropping_heads(jnp.float32)
    (site,) = agree(fn, *args, passes="dot_product_attention", factor=4).candidates
    assert "factors" in site.leaves
    assert "dropout mask is an operand" in site.notes[0]
