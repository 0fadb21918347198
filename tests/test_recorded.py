"""What earlier versions wrote is read by this one: strategies, plan files, snapshots, saved explorers and comparisons."""

from __future__ import annotations

import importlib
from pathlib import Path

import jax
import pytest

import fusionlab as fl
from fusionlab.testing.snapshots import snapshot_text
from tests.recorded.program import ARGS, layer

RECORDED = Path(__file__).parent / "recorded"


def test_a_strategy():
    strategy = fl.Strategy.from_json((RECORDED / "strategy.json").read_text(encoding="utf-8"))
    assert dict(strategy) == {"gemm_epilogue": True, "layer_norm": False, "lerp": {"reassociate": True}}
    counts = fl.find(layer, *ARGS, passes=strategy).counts()
    assert (counts["gemm_epilogue"], counts["lerp"]) == (1, 0)
    assert "layer_norm" not in counts


def test_a_plan_file(monkeypatch):
    (site,) = fl.find(layer, *ARGS, passes="gemm_epilogue", device="sm_90").candidates
    assert site.backend.name != "cuda"
    monkeypatch.setenv("FUSIONLAB_PLAN_FILE", str(RECORDED / "plans.json"))
    (site,) = fl.find(layer, *ARGS, passes="gemm_epilogue", device="sm_90").candidates
    assert site.backend.name == "cuda"
    assert "measured: cuda 5 µs, xla 10 µs" in site.backend.reason


def test_a_snapshot():
    stored = (RECORDED / "snapshot.txt").read_text(encoding="utf-8")
    findings, program = stored.split("graph:\n")
    got = snapshot_text(fl.find(layer, *ARGS, device="cpu"))
    assert got.split("graph:\n")[0] == findings
    if jax.__version__.startswith("0.10."):  # whose text the program's is
        assert got.split("graph:\n")[1] == program


def test_an_explorer():
    saved = fl.load(RECORDED / "explorer.json")
    lab = saved.explore(layer, *ARGS)
    assert sorted(lab.setting.enabled) == ["gemm_epilogue@#1", "layer_norm@#1"]
    assert len(saved.decisions) == 2
    assert len(lab.ledger) == 3  # and that it was opened again
    assert saved.measured[lab.setting].verdict == "no difference"


def test_a_comparison():
    comparison = fl.load(RECORDED / "comparison.json")
    assert isinstance(comparison, fl.Comparison)
    assert comparison.environment.versions["jax"] == "0.10.2"
    assert "layer" in str(comparison)


# What README, the notebooks and the documents import.
NAMES = {
    "fusionlab.viz.plots": ("plot_timing", "plot_errors", "plot_ulps", "new_axes", "evidence_figures", "figure_svg"),
    "fusionlab.viz.route_plots": ("plot_routes", "plot_route_record"),
    "fusionlab.viz.roofline_plots": ("plot_roofline", "plot_predicted"),
    "fusionlab.viz.gpu_record": ("plot_record", "ratios", "where"),
    "fusionlab.evidence.roofline": ("Roofline",),
    "fusionlab.models": (),
    "fusionlab.models.gpt": (),
    "fusionlab.kernels.lerp.plan": ("backward_passes",),
    "fusionlab.testing": ("assert_fused",),
    "fusionlab.ops": ("gemm_epilogue",),
}


@pytest.mark.parametrize("module", NAMES)
def test_a_module_that_users_import_keeps_its_name(module):
    found = importlib.import_module(module)
    for name in NAMES[module]:
        assert hasattr(found, name), name
