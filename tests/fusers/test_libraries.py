"""Every site of the common libraries' own modules is found, and an erf model is never given tanh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl

from .checks import agree, forward_counts
from .libraries import ACTIVATIONS, ATTENTIONS, CROSS_ATTENTIONS, MLPS

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
