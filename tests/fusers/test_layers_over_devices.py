"""Whole layers spread over devices: found, right against one device, with the collectives they had; and what is none.

The programs, and what is asserted of each, are in spread.py. They run in one process of their own, since the number of devices is fixed
when JAX starts. Row 36 of the acceptance list.
"""

from __future__ import annotations

import math

import jax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fusionlab as fl

from . import layer_parts as parts
from .processes import problems_of
from .spread import PASSES, PRE, spread, trials

NAMES = [trial.name for trial in trials()]


@pytest.fixture(scope="module")
def problems():
    """What went wrong with each trial, None where nothing did."""
    return problems_of("spread", 8)


@pytest.mark.parametrize("name", NAMES)
def test_row_36_layers_over_devices_are_sites_and_equal_one_device_with_the_same_collectives(problems, name):
    assert problems[name] is None, problems[name]


def found_in(layer, check_vma=True):
    """The findings of one layer of `[B, S, E]` on a mesh of one device."""
    p = parts.params()
    mesh = jax.make_mesh((1, 1), ("tp", "other"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:1])
    fn = jax.shard_map(layer, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=check_vma)
    return fl.find(fn, p, parts.inputs(), passes=PASSES)


def changed(out=None, mlp=None):
    how = spread(PRE, True)

    def layer(p, x):
        own = {"out": out and (lambda p, mixed: out(p, mixed.reshape(*mixed.shape[:-2], -1))), "mlp": mlp}
        return parts.encode(parts.Parts(out=own["out"] or how.out, mlp=own["mlp"] or how.mlp), p, x)

    return layer


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
        "sums over tp and over other",
    ),
    "a part of the devices": (
        changed(mlp=lambda p, h: lax.psum_scatter(inner(p, h) @ p["down"], "tp", scatter_dimension=2, tiled=True)),
        "region",
        "reduce_scatter is no sum over all devices",
    ),
    "the sum of a multiple": (
        changed(mlp=lambda p, h: lax.psum(2 * (inner(p, h) @ p["down"]), "tp") + p["down_bias"]),
        "region",
        "",
    ),
}


@pytest.mark.parametrize("name", MISSES)
def test_what_devices_sum_otherwise_is_declined_and_says_so(name):
    layer, code, says = MISSES[name]
    found = found_in(layer, check_vma=False)
    assert not found.candidates
    assert code in {r.code for r in found.rejections}, found.rejections
    assert any(says in r.sentence for r in found.rejections)


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
