"""Where a fused program parts from its original, value by value, and how the values are run and judged."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.errors import ArgumentError, SideEffectError
from fusionlab.evidence.blame import drift
from fusionlab.evidence.blame.drift import NodeDrift
from fusionlab.evidence.errors.reduction_sizes import Roughness, roughness_of
from fusionlab.graph.interpret import observe
from fusionlab.graph.interpret.observe import Own, Wide, count_of, observed
from fusionlab.graph.interpret.promote import promote
from tests.evidence.blame.planting import LINE, looped, planted, unrolled


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# A planted factor is named at its site, its node and its line.


@pytest.mark.dear
def test_a_factor_in_one_of_24_layers_is_named_at_its_site_and_line():
    step, args, of_layer = unrolled(24, 7)
    found = fl.drift(step, *args)
    assert found.first is None
    assert {v.site for v in found.sites} == {f"gemm_epilogue@layer_{i}#1" for i in range(24)}
    with planted(1.001, of_layer):
        found = fl.drift(step, *args)
    first = found.first
    assert (first.site, first.source) == ("gemm_epilogue@layer_7#1", LINE)
    assert first.before < 1e-6 < 9e-4 < first.after < 1.2e-3
    root = fl.find(step, *args)["gemm_epilogue@layer_7#1"].root
    assert (first.value, first.shape) == (root.name, root.shape)
    # The gradients of all layers inherit it through the loss.
    assert {v.site for v in found.sites if v.parts} == {v.site for v in found.sites}


@pytest.mark.dear
def test_a_factor_in_the_body_of_a_scan_of_24_steps_is_named_in_its_first_step():
    step, args = looped(24)
    assert fl.drift(step, *args).first is None
    with planted(1.001):
        first = fl.drift(step, *args).first
    assert (first.steps, first.site, first.source) == ((0,), "gemm_epilogue@#1", LINE)
    assert first.after == pytest.approx(1e-3, rel=0.2)


@pytest.mark.dear
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounding_alone_is_no_drift(dtype):
    """An optimizer divides by roots of almost 0, dropout draws, a checkpoint computes twice."""

    def block(x, p):
        h = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * p["g"]
        return x + jax.nn.gelu(h @ p["w"] + p["b"]) @ p["v"]

    def loss(ps, x, key):
        x = jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0).astype(x.dtype)
        x = jax.lax.scan(lambda x, p: (jax.checkpoint(block)(x, p), None), x, ps)[0]
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(ps, m, v, x, key):
        g = jax.grad(loss)(ps, x, key)
        m, v = jax.tree.map(lambda m, g: 0.9 * m + g, m, g), jax.tree.map(lambda v, g: 0.9 * v + g * g, v, g)
        return jax.tree.map(lambda p, m, v: p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), ps, m, v), m, v

    ps = {"g": np.ones((3, 8)), "w": normal(3, 8, 16) / 3, "b": np.zeros((3, 16)), "v": normal(3, 16, 8) / 4}
    ps = jax.tree.map(lambda p: jnp.asarray(p, dtype), ps)
    zeros = jax.tree.map(jnp.zeros_like, ps)
    found = fl.drift(step, ps, zeros, zeros, jnp.asarray(normal(4, 8), dtype), jax.random.key(0))
    assert found.sites
    assert not [v for v in found.values if v.parts]


@pytest.mark.dear
def test_a_map_prints_saves_and_draws_itself(tmp_path):
    def f(x, w, b):
        return jax.nn.relu(x @ w + b) * 2

    args = normal(4, 6), normal(6, 5), normal(5)
    with planted(1.001):
        found = fl.drift(f, *args)
    first = found.first
    assert str(found).splitlines()[1] == f"  first differ by more than rounding at {first}"
    assert repr(found) == "<Drift f: 6 values compared, 1 of them results of fused sites>"
    data = json.loads(json.dumps(found.to_dict()))
    assert data["first"]["site"] == "gemm_epilogue@#1"
    assert len(data["values"]) == 6
    head, *rows = found.save(tmp_path / "drift.csv").read_text().splitlines()
    assert head.startswith("value,primitive,source,step,site,before,after")
    assert len(rows) == 6
    assert 'class="drift"' in found.save(tmp_path / "drift.svg").read_text()
    ax = found.plot()
    assert len(ax.lines) == 4  # before, after, tolerated, and where they part
    lab = fl.explore(f, *args)
    lab.show_drift(found)
    assert "data-drift=" in lab.scene["svg"]
    lab.show_drift(None)
    assert "data-drift=" not in lab.scene["svg"]
    with pytest.raises(ArgumentError, match="show_drift: got the map of f, which is another program"):
        fl.explore(lambda x: jnp.tanh(x), args[0]).show_drift(found)
    with pytest.raises(ArgumentError, match=r"needed one of .csv, .html, .json, .pdf, .png, .svg, .txt"):
        found.save("drift.xyz")


@pytest.mark.dear
def test_it_can_be_watched_and_cancelled_and_refuses_what_it_cannot_run():
    def f(x, w):
        return jnp.sum(jax.nn.relu(x @ w))

    args, told = (normal(4, 4), normal(4, 4)), []
    fl.drift(f, *args, progress=lambda *step: told.append(step))
    steps = [(done, total) for task, done, total in told if task == "drift, value by value"]
    assert steps == [(done, 4) for done in range(5)]
    found = fl.drift(f, *args, cancel=lambda: len(told) > 0)
    assert (found.stopped, len(found.values)) == ("cancelled", 0)
    assert "stopped: cancelled" in str(found)
    asked = iter([False] * 4 + [True] * 9)
    assert len(fl.drift(f, *args, cancel=lambda: next(asked)).values) in (1, 2)
    with pytest.raises(ArgumentError, match="got a shape"):
        fl.drift(f, args[0], jax.ShapeDtypeStruct((4, 4), "float32"))
    with pytest.raises(SideEffectError, match="debug"):
        fl.drift(lambda x: (jax.debug.print("{}", x), x * 2)[1], args[0])


# How a difference is measured and judged.


@pytest.mark.dear
def test_arrays_are_measured_alike_on_the_host_and_on_a_device():
    want = np.random.default_rng(0).standard_normal((64, 64))
    got = (want * (1 + 1e-3)).astype(np.float32)
    got[3, 4], want[5, 6], got[7, 8], want[7, 8] = np.nan, np.inf, np.inf, np.inf
    with np.errstate(all="ignore"):
        on_host = [float(n) for n in drift._measured(np, got, want)]
    with jax.enable_x64(True):
        on_device = [float(n) for n in drift._measured_on_device(got, want)]
    assert on_host == pytest.approx(on_device, rel=1e-12)
    assert on_host[0] / on_host[1] == pytest.approx(1e-3, rel=1e-3)
    assert on_host[-1] == 2  # where both are infinite they agree


def value(**changed):
    given = {
        "node": 0,
        "value": "%1",
        "primitive": "mul",
        "scope": "",
        "source": "",
        "steps": (),
        "site": "s",
        "shape": (4,),
    }
    given |= {"dtype": "float32", "before": 1e-7, "after": 1e-7, "before_l2": 1e-7, "after_l2": 1e-7, "tolerated": 1e-5}
    return NodeDrift(**given | changed)


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        ({}, False),
        ({"after": 9e-6, "after_l2": 9e-6}, False),  # within what rounding explains
        ({"after": 1e-3, "after_l2": 1e-3}, True),
        ({"after": 1e-3}, False),  # in one entry alone
        ({"before": 8e-4, "before_l2": 8e-4, "after": 1e-3, "after_l2": 1e-3}, False),  # the original is off as much
        ({"before": 0.5, "before_l2": 0.5, "after": 5.0, "after_l2": 5.0}, False),  # no digit of the original is right
        ({"after": 1e-3, "after_l2": 1e-3, "same_code": True}, False),  # rounding, enlarged
        ({"mismatches": 1}, True),
        ({"after": None, "after_l2": None}, False),
    ],
)
def test_a_difference_is_judged_by_the_dtype_the_sums_and_the_original_s_own_error(changed, parts):
    assert value(**changed).parts == parts


@pytest.mark.dear
def test_the_rounding_of_a_value_depends_on_what_is_behind_it():
    def f(x, w):
        short = x.sum(0)
        rough = (x @ w).astype(jnp.bfloat16).astype(jnp.float32)
        return short, rough, jax.lax.scan(lambda c, _: (c * 2, c @ w), rough, None, length=2)[1]

    closed = jax.make_jaxpr(f)(jnp.ones((4, 64)), jnp.ones((64, 64)))
    found = roughness_of(closed)
    given = [found[v] for v in closed.jaxpr.outvars]
    assert given == [Roughness(4, "float32"), Roughness(64, "bfloat16"), Roughness(64, "bfloat16")]


# How values are run.


def branchy(key, w, x):
    def body(c, row):
        c = jax.nn.silu(c @ w) + row  # a custom rule
        return c, jnp.where(row > 0, c, 0).sum()

    x = x * jax.random.bernoulli(key, 0.5, x.shape)
    c, ys = jax.lax.scan(jax.checkpoint(body), x, jnp.stack([x, -x, x * 2]), reverse=True)
    return jax.lax.cond(ys.sum() > 0, jnp.sin, jnp.cos, c), ys, jax.lax.fori_loop(0, 3, lambda i, c: c * 1.5, c)


@pytest.mark.dear
def test_values_are_those_of_the_program_and_of_its_reference(monkeypatch):
    monkeypatch.setattr(observe, "_LATER", 1)  # values wait on the host
    args = jax.random.key(3), normal(5, 5) / 2, normal(2, 5)
    closed, leaves = jax.make_jaxpr(branchy)(*args), list(args)
    jitted, reference = jax.jit(branchy)(*args), promote(branchy, *args).values(*args)
    for arithmetic, wanted, rtol in ((Own(closed), jitted, 2e-5), (Wide(), reference, 1e-12)):
        made = list(observed(closed, leaves, arithmetic))
        assert len(made) == count_of(closed)
        last = {m.variable: m.value for m in made if not m.steps}
        for v, want in zip(closed.jaxpr.outvars, wanted, strict=True):
            np.testing.assert_allclose(np.asarray(last[v]), np.asarray(want), rtol=rtol, atol=rtol)
        steps = [m.steps for m in made if m.steps]
        assert list(dict.fromkeys(steps)) == [(2,), (1,), (0,)]


def test_a_scan_of_no_steps_is_run_as_a_whole():
    def f(x):
        return jax.lax.scan(lambda c, y: (c + y, c * y), x, jnp.zeros((0, 3)))

    closed = jax.make_jaxpr(f)(normal(3))
    made = list(observed(closed, [normal(3)], Own(closed)))
    assert len(made) == count_of(closed)
    assert made[-1].value.shape == (0, 3)


@pytest.mark.dear
def test_only_floats_are_compared_and_what_a_site_swallows_has_no_fused_error():
    def f(x, w, b):
        hidden = jax.nn.relu(x @ w + b)
        return hidden[jnp.argmax(hidden.sum(1))]

    found = fl.drift(f, normal(3, 4), normal(4, 4), normal(4))
    (site,) = found.sites
    inside = [v for v in found.values if v.after is None]
    assert {v.primitive for v in inside} >= {"dot_general", "add"}
    assert site.after is not None
    assert "argmax" not in {v.primitive for v in found.values}
    assert site.node in found.by_node()
    assert not {v.node for v in inside} & set(found.by_node())
    assert "not computed" in str(inside[0])
    assert dataclasses.replace(site, mismatches=2).excess == np.inf
