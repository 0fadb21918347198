"""Whole layers spread over devices: found, right against one device, with the collectives they had; and what is none.

The programs, and what is asserted of each, are in spread.py. Row 36 of the acceptance list. One of them by hand:

    python -m pytest "tests/fusers/transformer/test_layers_over_devices.py::test_row_36_layers_over_devices_are_sites_and_equal_one_device\
_with_the_same_collectives[post/4]"
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fusionlab as fl
from fusionlab.models import parallel, transformer

from ..spread import PASSES, PRE, TRIALS, spread
from . import layer_parts as parts


@pytest.mark.devices
@pytest.mark.parametrize("name", TRIALS)
def test_row_36_layers_over_devices_are_sites_and_equal_one_device_with_the_same_collectives(on_devices, name):
    on_devices("fusers.spread", name)


def found_in(layer, check_vma=True, passes=PASSES, dtype=jnp.float32):
    """The findings of one layer of `[B, S, E]` on a mesh of one device."""
    p, x = parts.of_dtype((parts.params(), parts.inputs()), dtype)
    mesh = jax.make_mesh((1, 1), ("tp", "other"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:1])
    fn = jax.shard_map(layer, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=check_vma)
    return fl.find(fn, p, x, passes=passes)


def changed(out=None, mlp=None):
    how = spread(PRE, True)

    def layer(p, x):
        own = {"out": out and (lambda p, mixed: out(p, mixed.reshape(*mixed.shape[:-2], -1))), "mlp": mlp}
        return parts.encode(parts.Parts(out=own["out"] or how.out, mlp=own["mlp"] or how.mlp), p, x)

    return layer


@jax.custom_vjp
def summed_once(x):
    """Megatron's g: a sum whose gradient is handed on as it is."""
    return lax.psum(x, "tp")


summed_once.defvjp(lambda x: (lax.psum(x, "tp"), None), lambda _, ct: (ct,))


def inner(p, h):
    return jax.nn.gelu(parts.linear(p, "up", h))


MISSES = {  # name -> (layer, code, what its sentence says)
    "a bias on each device": (
        changed(out=lambda p, m: lax.psum(parts.linear(p, "out", m), "tp")),
        "bias",
        "a bias is added before the sum over devices",
    ),
    "a bias of the feed-forward on each device": (
        changed(mlp=lambda p, h: lax.psum(parts.linear(p, "down", inner(p, h)), "tp")),
        "bias",
        "a bias is added before the sum over devices",
    ),
    "the feed-forward is not summed": (
        changed(mlp=lambda p, h: parts.linear(p, "down", inner(p, h))),
        "region",
        "is not summed over tp",
    ),
    "sums over different axes": (
        changed(mlp=lambda p, h: lax.psum(inner(p, h) @ p["down"], "other") + p["down_bias"]),
        "region",
        "summed over tp and the other over other",
    ),
    "a part of the devices": (
        changed(mlp=lambda p, h: lax.psum_scatter(inner(p, h) @ p["down"], "tp", scatter_dimension=2, tiled=True)),
        "region",
        "reduce_scatter is not a sum over all devices",
    ),
    "the sum of a multiple": (
        changed(mlp=lambda p, h: lax.psum(2 * (inner(p, h) @ p["down"]), "tp") + p["down_bias"]),
        "scalar",
        "the value summed over tp is the product times 2",
    ),
    "the mean of a part": (
        changed(out=lambda p, m: lax.psum(m @ p["out"] / 4, "tp") + p["out_bias"]),
        "scalar",
        "the value summed over tp is the product times 0.25",
    ),
    "the attention is not summed": (
        changed(out=lambda p, m: parts.linear(p, "out", m)),
        "region",
        "the output projection's result is not summed over tp, but the feed-forward's is",
    ),
    "the attention's is scattered": (
        changed(out=lambda p, m: lax.psum_scatter(m @ p["out"], "tp", scatter_dimension=2, tiled=True)),
        "region",
        "reduce_scatter is not a sum over all devices",
    ),
    "what all devices have, gathered": (
        changed(out=lambda p, m: lax.all_gather(m @ p["out"], "tp").sum(0) + p["out_bias"]),
        "structure",
        "all_gather reads the output projection's result",
    ),
    "a factor of each device": (
        changed(out=lambda p, m: lax.psum(m @ p["out"] * (1.0 + lax.axis_index("tp")), "tp") + p["out_bias"]),
        "structure",
        "prod reads the output projection's result",
    ),
    "a sum with a gradient of its own": (
        changed(out=lambda p, m: summed_once(m @ p["out"]) + p["out_bias"]),
        "custom_rule",
        "",
    ),
    "a residual on each device": (
        changed(mlp=lambda p, h: lax.psum(inner(p, h) @ p["down"] + h / 4, "tp") + p["down_bias"]),
        "scalar",
        "",
    ),
}


@pytest.mark.whole
@pytest.mark.parametrize("name", MISSES)
def test_what_devices_sum_otherwise_is_declined_and_says_so(name):
    layer, code, says = MISSES[name]
    found = found_in(layer, check_vma=False)
    assert not found.candidates
    assert code in {r.code for r in found.rejections}, found.rejections
    assert any(says in r.sentence for r in found.rejections)


def test_a_sum_with_a_gradient_of_its_own_is_declined_by_every_pass():
    layer, _, _ = MISSES["a sum with a gradient of its own"]
    names = [p.name for p in fl.passes()]
    assert not [c for c in found_in(layer, False, names).candidates if c.op == "multi_transformer"]


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_sum_in_the_dtype_that_the_program_sums_in(check_vma):
    for dtype in (jnp.float32, jnp.bfloat16):

        def out(p, m, dtype=dtype):
            return lax.psum((m @ p["out"]).astype(dtype), "tp").astype(m.dtype) + p["out_bias"]

        found = found_in(changed(out=out), check_vma, dtype=jnp.bfloat16)
        sums = [n.outputs[0].dtype for n in found.apply().nodes() if n.primitive.startswith("psum")]
        assert len(found.candidates) == 1, found.rejections
        assert sums == [dtype, jnp.bfloat16]


@pytest.mark.parametrize("check_vma", [True, False])
def test_products_of_more_bits_than_the_layer_has_are_summed_by_the_program(check_vma):
    def out(p, m):
        return lax.psum(jnp.dot(m, p["out"], preferred_element_type=jnp.float32), "tp").astype(m.dtype) + p["out_bias"]

    found = found_in(changed(out=out), check_vma, dtype=jnp.bfloat16)
    assert not found.candidates
    (one,) = found.rejections
    assert one.code == "rounding"
    assert "devices sum products in float32, where the op sums in bfloat16" in one.sentence


def activated(p, h):
    """An activation that stops at the device's border, as Megatron's f does, inside a rule of its own."""

    @jax.custom_vjp
    def entered(x):
        return x

    entered.defvjp(lambda x: (x, None), lambda _, ct: (lax.psum(ct, "tp"),))

    @jax.custom_vjp
    def act(x):
        return jax.nn.gelu(entered(x))

    act.defvjp(lambda x: (act(x), None), lambda _, ct: (ct,))
    return lax.psum(act(parts.linear(p, "up", h)) @ p["down"], "tp") + p["down_bias"]


@pytest.mark.parametrize("width", [1024, 2048])
def test_a_layer_of_a_real_model_s_size_is_found_where_a_device_has_as_many_features_as_there_are_tokens(width):
    """16 heads, of 64 and of 128, and as many tokens as features: by the shapes alone, no array is made."""
    mesh = jax.make_mesh((1,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    arrays = jax.eval_shape(lambda: transformer.init(jax.random.key(0), 1, width))
    layer = parallel.encoder(mesh, arrays, heads=16, causal=True)
    counts = fl.find(layer, arrays, jax.ShapeDtypeStruct((8, width, width), jnp.float32), passes=PASSES).counts()
    assert counts["multi_devices_multi_transformer_encoder"] == 1


def test_a_rule_that_sums_in_its_derivative_alone_is_declined():
    found = found_in(changed(mlp=activated), check_vma=False)
    assert not found.candidates
    assert [r.code for r in found.rejections] == ["custom_rule"]


def test_a_layer_over_devices_is_no_layer_of_one_and_the_other_way_round():
    one = tuple(name.removeprefix("multi_devices_") for name in PASSES)
    over, alone = changed(), lambda p, x: parts.encode(PRE, p, x)
    p, x = parts.params(), parts.inputs()
    assert len(found_in(over).candidates) == 1
    assert not fl.find(alone, p, x, passes=PASSES).candidates
    mesh = jax.make_mesh((1,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    fn = jax.shard_map(over, mesh=mesh, in_specs=P(), out_specs=P())
    assert not fl.find(fn, p, x, passes=one).candidates


def test_collectives_stay_nodes_of_the_program():
    found = found_in(changed())
    kept = [n.primitive for n in found.apply().nodes() if n.primitive.startswith(("psum", "multi_transformer"))]
    assert kept == ["multi_transformer", "psum_invariant"] * 2
    (site,) = found.candidates
    assert "summed over tp" in site.formula
    assert math.isclose(site.attrs["scale"], parts.D**-0.5, rel_tol=1e-6)


@pytest.mark.parametrize("name", PASSES)
def test_the_picture_of_a_pass_tells_its_two_parts_and_what_they_are_summed_over(name):
    fn, args = next(p for p in fl.passes() if p.name == name).sample()
    found = fl.find(fn, *args, passes=[name])
    drawn = found.apply().to_dot(show="all")
    assert all(text in drawn for text in ("multi_transformer attention", "multi_transformer feed-forward"))
    assert drawn.count('label="psum over tp') == 2
    assert [n.primitive for n in found.apply().nodes()] == ["shard_map", *("multi_transformer", "psum", "add") * 2]
