"""The search takes every program of the extra zoo: it raises on none, keeps their results' types, and accepts nothing that is no site.

How much it accepts is what `python -m benchmarks recall --zoo extra` prints; its record stands in benchmarks/results/cpu.
"""

from __future__ import annotations

from collections import Counter

import jax
import pytest
from zoo.catalogue import Program
from zoo.test_truths import primitives

import fusionlab as fl
from benchmarks.search.recall import outcome

from . import equinox_models, keras_models, linen_models, nnx_models, transformers_models
from .catalogue import EVERY, LEFT_OUT
from .spelled.catalogue import MODELS
from .test_truths import alive

PROGRAMS = [Program(m, dtype, variant) for m in EVERY for dtype in ("f32", "bf16") for variant in ("forward", "train")]
IDS = {model.id.replace("/", "_"): model for model in EVERY}
# Models of layers that are all alike and share nothing but their input: what one more layer adds is one layer.
ALIKE = ("keras_bert", "keras_gpt", "keras_vit", "keras_grouped_decoder", "google-tunix_llama3", "flaxmodels_gpt2")
ALIKE += ("diffusers_spatial_transformer", "jax-models_masked_autoencoder", "nanodl_vit", "equimo_dinov2")
ALIKE += ("jaxonmodels_clip", "transformers_opt")
# Calls, and what says only how a value lies or that it stays.
LAYOUT = {"pjit", "jit", "custom_jvp_call", "custom_vjp_call", "closed_call", "broadcast_in_dim", "reshape", "squeeze"}
LAYOUT |= {"convert_element_type", "copy", "expand_dims", "stop_gradient"}


@pytest.fixture
def installed(program, require):
    require(program.model.id not in LEFT_OUT, LEFT_OUT.get(program.model.id))


@pytest.mark.extra
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.id)
def test_nothing_is_accepted_that_is_no_site(program: Program) -> None:
    assert not outcome(program).wrong
    function, args = program.make()
    shapes = [(a.shape, a.dtype) for a in fl.find(function, *args).rewritten().out_avals]
    assert shapes == [(x.shape, x.dtype) for x in jax.tree.leaves(jax.eval_shape(function, *args))]


def operations(model) -> Counter[str]:
    built = model.build(jax.numpy.float32)
    jaxpr = alive(jax.make_jaxpr(built.forward)(*built.args).jaxpr)
    return Counter(name for name in primitives(jaxpr) if name not in LAYOUT)


@pytest.mark.extra
@pytest.mark.parametrize("name", ALIKE)
def test_a_rewritten_layer_is_made_of_what_the_library_s_is(name: str, require, monkeypatch) -> None:
    model = IDS[name]
    require(model.id not in LEFT_OUT, LEFT_OUT.get(model.id))
    two = operations(model)
    for module in (equinox_models, keras_models, linen_models, nnx_models, transformers_models):
        monkeypatch.setattr(module, "LAYERS", 1)
    two.subtract(operations(model))
    (layer,) = (layer for layer in MODELS if layer.name == name)
    assert {n: k for n, k in two.items() if k} == operations(layer)
