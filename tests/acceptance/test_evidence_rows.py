"""Row 60: apply and revert by hand, with an honest before and after."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl

from .reference import uniform

X, W, B = (jnp.asarray(a, jnp.float32) for a in uniform((16, 8), (8, 8), (8,), seed=4))


def model(x, w, b):
    h = jax.nn.gelu(x @ w + b)
    q = h.reshape(16, 2, 4)
    p = jax.nn.softmax(jnp.einsum("thd,shd->hts", q, q) * 0.5)
    return jnp.einsum("hts,shd->thd", p, q), h.sum(0)


@pytest.fixture(scope="module")
def lab():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fusionlab.viz.html.tabs._figures", lambda evidence: {})  # no plots: the row is about numbers
        patch.setattr("fusionlab.evidence.instruments.timing.PATIENCE_S", 0.0)  # no more samples than a verdict needs
        yield fl.explore(model, X, W, B, implementation="xla_blockwise", passes="dot_product_attention")


@pytest.fixture(scope="module")
def result(lab):
    return lab.measure()


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_row_60_revert_gives_bit_identical_output():
    original = jax.jit(model)(X, W, B)
    ids = [c.id for c in fl.find(model, X, W, B).candidates]
    assert len(ids) == 2
    assert bits(fl.fuse(model, only=[])(X, W, B)) == bits(original)
    assert bits(fl.fuse(model, skip=ids)(X, W, B)) == bits(original)
    explorer = fl.explore(model, X, W, B)
    applied = str(explorer.findings.apply(explorer.enabled))
    for pass_name in ("gemm_epilogue", "dot_product_attention"):
        explorer.toggles[pass_name] = False
    assert explorer.enabled == frozenset()
    reverted = str(explorer.findings.apply(explorer.enabled))
    assert reverted == str(explorer.graph) != applied


def test_row_60_ticking_a_site_off_and_on_changes_the_program_and_measures_nothing(lab):
    explorer = fl.explore(model, X, W, B)
    (first, second) = sorted(explorer.enabled)
    explorer.toggles[first] = False
    assert explorer.enabled == {second}
    assert explorer.evidence is None
    assert explorer.status == "not measured"
    explorer.toggles[first] = True
    assert explorer.enabled == {first, second}


def test_row_60_timing_has_warm_up_samples_spread_and_compile_time_apart(result):
    for timing in (result.timing, result.timing_grad):
        for runs in (timing.before, timing.after):
            assert len(runs.samples_s) >= 20
            assert min(runs.samples_s) > 0
            low, high = runs.quartiles_s
            assert low <= runs.median_s <= high
            assert runs.compile_s > 0
            assert runs.compile_s > runs.median_s  # compiling is not part of any sample
        low, high = timing.interval
        assert low <= timing.ratio <= high
        assert timing.ratio == pytest.approx(timing.before.median_s / timing.after.median_s)
        assert str(timing.verdict).split(":")[0] in ("faster", "slower", "no difference", "undecided")
    assert (result.timing.what, result.timing_grad.what) == ("call", "gradient of the call")


def test_row_60_flags_versions_and_the_compiled_baseline_are_recorded(result):
    environment = result.to_dict()["environment"]
    assert environment["versions"]["jax"] == jax.__version__
    assert "xla_flags" in environment
    assert environment["hardware"]
    assert "jax_default_matmul_precision" in environment["settings"]
    assert set(result.hlo) == {"before", "after"}
    assert all("ENTRY" in text for text in result.hlo.values())
    assert result.hlo["before"] != result.hlo["after"]


def test_row_60_errors_are_of_outputs_and_gradients_against_float64_without_residuals(result):
    leaves = result.numerics.leaves
    assert [leaf.kind for leaf in leaves] == ["output"] * 2 + [
        "gradient"
    ] * 3  # what is saved for backward is no output
    assert [leaf.shape for leaf in leaves] == [(16, 2, 4), (8,), (16, 8), (8, 8), (8,)]
    for leaf in leaves:
        for error in (leaf.before, leaf.after):
            assert 0 < error.max_abs < 1e-4
            assert error.max_rel >= 0
            assert error.over_tolerance == 0
        assert leaf.ok
    rows = result.to_dataframe()
    assert {"time", "max abs error", "relative L2 error"} <= set(rows.quantity)
    assert set(rows.version) == {"before", "after"}


def test_row_60_a_wrong_program_is_shown_as_wrong_and_the_original_is_not_blamed():
    def wrong(x, w, b):
        out, total = model(x, w, b)
        return out * 1.01, total

    result = fl.compare(model, wrong, X, W, B, timing=False, memory=False)
    bad = {leaf.name: leaf for leaf in result.numerics.leaves if not leaf.ok}
    assert bad
    first = result.numerics.leaves[0]
    assert first.after.over_tolerance > 100
    assert first.before.over_tolerance == 0
    assert first.after.max_abs == pytest.approx(0.01 * float(jnp.max(jnp.abs(model(X, W, B)[0]))), rel=0.05)
    assert "WORSE" in str(result)
    assert result.numerics.leaves[1].ok
