"""Sites that are found and left as they are: what was measured slower on a device is off by default."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.commands.demo import _choices
from fusionlab.fusers.engine.overlaps import settle
from fusionlab.viz.html.report import report_html
from fusionlab.viz.model.summaries import summary
from tests.asked import by_name


def layer(x, w, v, scale, bias):
    h = x + jax.nn.relu(x @ w) @ v
    mean = h.mean(-1, keepdims=True)
    normed = (h - mean) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)
    return normed * scale + bias


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


ARGS = (f32(8, 16), f32(16, 32), f32(32, 16), f32(16), f32(16))


def names(closed):
    return str(closed).count("fusionlab.layer_norm") + str(closed).count("layer_norm")


def found(**options):
    return fl.find(layer, *ARGS, **options)


@pytest.mark.parametrize("device", ["sm_80", "sm_90", "sm_120"])
def test_on_a_gpu_a_norm_is_found_and_left_as_it_is(device):
    f = found(device=device)
    (norm,) = [c for c in f.candidates if c.pass_name == "layer_norm"]
    assert ("below 1048576" if device == "sm_90" else f"not on {device}") in norm.idle
    assert norm.id not in {c.id for c in f.select()}
    assert f.line("layer_norm").startswith(
        "layer_norm: 1 subgraph can be fused, of which 1 is left as it is, 0 declined"
    )
    assert "left as it is unless asked for" in f.report()
    assert norm.to_dict()["idle"] == norm.idle
    assert not names(f.rewritten())
    assert any(s.kind == "residual_norm" for s in f.structures)  # what it is part of is seen all the same


def test_a_norm_of_a_million_elements_is_fused_on_a_gpu_it_was_measured_on():
    args = [f32(2048, 1024), f32(1024, 32), f32(32, 1024), f32(1024), f32(1024)]
    for device, idle in (("sm_90", False), ("sm_80", True)):
        f = fl.find(layer, *args, device=device)
        (norm,) = [c for c in f.candidates if c.pass_name == "layer_norm"]
        assert bool(norm.idle) == idle
        assert (norm.id in {c.id for c in f.select()}) != idle


@pytest.mark.parametrize("asked", ["layer_norm", "id"])
def test_it_is_fused_where_it_is_asked_for(asked):
    f = found(device="sm_90")
    (norm,) = [c for c in f.candidates if c.pass_name == "layer_norm"]
    assert names(f.rewritten([norm.id if asked == "id" else asked]))
    assert norm.id not in {c.id for c in f.select(skip="gemm_epilogue")}


@pytest.mark.parametrize(
    "options", [{"passes": ["layer_norm"]}, {"passes": fl.Strategy(layer_norm=True)}, {"implementation": "xla"}]
)
def test_a_pass_or_implementation_that_is_named_is_asked_for(options):
    f = found(device="sm_90", **options)
    (norm,) = [c for c in f.candidates if c.pass_name == "layer_norm"]
    assert not norm.idle
    assert norm in f.select()
    assert not any("left as it is" in n for n in norm.notes)


def test_on_a_cpu_it_is_left_as_it_is_too_and_fused_where_it_is_asked_for():
    f = found()
    assert {c.pass_name: c.idle.partition(" ")[0] for c in f.candidates} == {"gemm_epilogue": "", "layer_norm": "on"}
    assert "left as it is" in f.line("layer_norm")
    assert not names(f.rewritten())
    fused = fl.fuse(layer, passes=by_name())
    assert names(jax.make_jaxpr(fused)(*ARGS))
    args = [jnp.asarray(np.random.default_rng(i).standard_normal(a.shape), jnp.float32) for i, a in enumerate(ARGS)]
    np.testing.assert_allclose(fused(*args), layer(*args), rtol=2e-5, atol=2e-5)


def blend(x, y, w):
    return x + w * (y - x)


@pytest.mark.parametrize(
    ("shapes", "fused"),
    [
        (((1024, 1, 1024), (1, 1024, 1024), (1,)), True),  # measured: the kernels are faster
        (((2000, 1, 1024), (1, 512, 1024), (1,)), True),  # near that
        (((16, 1, 1, 1), (16, 3, 224, 224), (1,)), True),  # forward not, backward
        (((64, 1024, 1024), (64, 1024, 1024), (1,)), False),  # measured: XLA's code is
        (((16, 1, 16), (1, 16, 16), (1,)), False),  # nothing near it was measured
        (((1000, 1, 1001), (1, 1000, 1001), (1,)), False),
    ],
)
def test_a_blend_is_fused_on_a_gpu_where_something_near_it_was_measured_faster(shapes, fused):
    args = [f32(*s) for s in shapes]
    (site,) = fl.find(blend, *args, device="sm_90").candidates
    assert (site.idle == "") == fused
    assert "fusionlab.tune" in site.idle or fused
    (named,) = fl.find(blend, *args, device="sm_90", passes="lerp").candidates
    assert not named.idle
    (here,) = fl.find(blend, *args).candidates
    assert not here.idle


def test_it_is_drawn_as_a_candidate_and_not_as_applied():
    f = found(device="sm_90")
    (norm,) = [c for c in f.candidates if c.pass_name == "layer_norm"]
    for enabled, state, on in ((None, "candidate", "off"), ([norm.id], "applied", "on")):
        view = summary(f.graph, f, enabled=enabled)
        assert {s["pass"]: s["state"] for s in view["sites"]}["layer_norm"] == state
        assert {p["name"]: p["state"] for p in view["passes"]}["layer_norm"] == on


def test_no_gradient_of_it_is_said_to_be_fused():
    """Neither in a program that is differentiated later on nor in one that is already."""
    assert "gemm_epilogue_grad: runs under jax.grad" in found(device="sm_90").report().splitlines()
    step = jax.value_and_grad(lambda *a: (layer(*a) ** 2).mean(), (0, 1, 2, 3, 4))
    f = fl.find(step, *ARGS, device="sm_90")
    (norm,) = [c for c in f.candidates if c.idle]
    assert f.counts()["layer_norm_grad"] == 0
    assert "layer_norm_grad: 0 subgraphs can be fused" in f.report().splitlines()
    assert norm.backward.text.endswith("fused with the site if requested")
    assert not norm.backward.to_dict()["fused"]
    assert f"  {norm.id}: dx, dscale, dbias; fused with the site if requested" in f.report().splitlines()
    told = report_html(f.graph, f)
    assert "Can be fused with its backward pass" in told
    assert "rstd" not in told.partition("<h2>Residuals")[2].partition("<h2>")[0]
    assert norm.backward.node_ids <= norm.all_node_ids
    assert names(f.rewritten("layer_norm"))
    g = fl.find(step, *ARGS, device="sm_90", passes="layer_norm")
    assert g.counts() == {"layer_norm": 1, "layer_norm_grad": 1}


def test_it_takes_no_node_from_a_site_that_is_fused():
    f = found(device="sm_90")
    (norm,) = [c for c in f.candidates if c.idle]
    other = dataclasses.replace(norm, pass_name="mine", left_to_xla=None, nodes_before=norm.nodes_before - 1)
    for order in ([norm, other], [other, norm]):
        kept, (lost,) = settle(order)
        assert [c.pass_name for c in kept] == ["mine"]
        assert (lost.pass_name, lost.code) == ("layer_norm", "overlap")


def test_a_larger_site_that_is_left_as_it_is_says_so_where_a_smaller_one_has_its_nodes():
    f = found(device="sm_90")
    (norm,) = [c for c in f.candidates if c.idle]
    small = dataclasses.replace(
        norm, pass_name="mine", formula="mine", left_to_xla=None, nodes_before=norm.nodes_before - 1
    )
    _, (lost,) = settle([norm, small])
    assert f"mine of mine, which is fused by default, while this one is left as it is: {norm.idle}" in lost.sentence
    assert lost.edit == "name the pass: passes=['layer_norm']"
    smaller = dataclasses.replace(small, left_to_xla=norm.left_to_xla)  # both are left as they are
    _, (lost,) = settle([norm, smaller])
    assert lost.sentence.endswith("which is larger")
    assert lost.edit is None
    larger = dataclasses.replace(small, nodes_before=norm.nodes_before + 1)
    assert settle([norm, larger])[1][0].edit == "name the pass: passes=['layer_norm']"


def test_the_demo_does_not_say_that_it_would_run():
    assert ["layer_norm", "1 site", "left as it is"] in [row[:3] for row in _choices(found(device="sm_90"))]
