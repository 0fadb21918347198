"""Every site of the common libraries' own modules is found, and an erf model is never given tanh."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import fusionlab as fl

from .libraries import ACTIVATIONS, ATTENTIONS, MLPS

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
