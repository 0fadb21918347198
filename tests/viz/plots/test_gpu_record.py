"""A record of a GPU in a report: the newest one, its own numbers, and where they come from."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.commands import demo
from fusionlab.evidence import save_json
from fusionlab.evidence.instruments.record import newest_record
from fusionlab.viz.gpu_record import plot_record, ratio_range, ratios, record_html, where
from fusionlab.viz.html.report import report_html

ROOT = Path(__file__).parents[3]


def timed(scale, seed):
    samples = scale * (1 + np.random.default_rng(seed).exponential(0.05, 40))
    return {"samples_s": samples.tolist(), "median_s": float(np.median(samples))}


@pytest.fixture
def record():
    programs = {
        "jax.jit": timed(3e-4, 0),
        "fusionlab": timed(2e-4, 1),
        "bare products": timed(1e-4, 2),
        "floor_s": 1e-4,
    }
    environment = {
        "hardware": "NVIDIA <B>",
        "driver": "cuda 13000",
        "commit": "0123456789abcdef",
        "time": "2026-11-22T04:12:51",
    }
    environment["versions"] = {"jax": "0.11.2", "numpy": "2.5", "torch": "2.11"}
    return {
        "command": "python -m benchmarks gemm_epilogue",
        "environment": environment,
        "mlp": {
            "relu 8x4x16": {**programs, "torch": {"torch eager": timed(6e-4, 3), "torch.compile": timed(3e-4, 4)}},
            "gelu_erf 8x4x16": programs,
        },
    }


def test_ratios_are_jax_jit_s_time_over_each_rival_s(record):
    base, found = ratios(record)["relu 8x4x16"]
    assert base == record["mlp"]["relu 8x4x16"]["jax.jit"]["median_s"]
    assert {name: round(one.ratio, 1) for name, one in found.items()} == {
        "fusionlab": 1.5,
        "torch eager": 0.5,
        "torch.compile": 1.0,
        "bare products": 3.0,
    }
    assert all(one.interval[0] <= one.ratio <= one.interval[1] for one in found.values())
    assert set(ratios(record)["gelu_erf 8x4x16"][1]) == {"fusionlab", "bare products"}


def test_the_section_says_device_commit_and_every_ratio(record):
    page = record_html(record)
    assert "<h2>On a GPU: NVIDIA &lt;B&gt;</h2>" in page
    assert "NVIDIA &lt;B&gt;, cuda 13000, jax 0.11.2, torch 2.11, 2026-11-22, commit 0123456789ab." in page
    for base, rivals in ratios(record).values():
        assert f"{base * 1e6:.3g} µs" in page
        for one in rivals.values():
            assert f"{one.ratio:.2f}× [{one.interval[0]:.2f}, {one.interval[1]:.2f}]" in page
    assert "torch.compile" in page
    assert "<figure" in page
    assert ratio_range(record) == "1.50x to 1.50x of jax.jit's speed on 2 perceptrons, forward + backward"


def test_a_record_without_torch_has_no_column_of_it(record):
    del record["mlp"]["relu 8x4x16"]["torch"]
    assert not re.search("<th[^>]*>torch", record_html(record))


def test_the_plot_has_a_row_a_perceptron_and_a_point_a_program(record):
    ax = plot_record(record)
    assert [t.get_text() for t in ax.get_yticklabels()] == list(record["mlp"])
    points = {c.get_label(): len(c.lines[0].get_xdata()) for c in ax.containers}
    assert points == {"FusionLab": 2, "torch eager": 1, "torch.compile": 1, "its products alone": 2}


def test_a_report_shows_a_record_only_where_there_is_one(record):
    graph = fl.trace(jnp.tanh, jnp.ones(3))
    assert "On a GPU" not in report_html(graph)
    assert record_html(record) in report_html(graph, record=record)


def test_the_newest_record_is_the_benchmark_s_own_that_was_measured_last(record, tmp_path):
    assert newest_record(tmp_path, "gemm_epilogue") is None
    for name, day in (("a", 21), ("b", 23), ("c", 22), ("of attention", 24)):
        benchmark = "attention" if day == 24 else "gemm_epilogue"
        found = {"benchmark": benchmark, "day": day, "environment": {"time": f"2026-11-{day}T00:00:00"}}
        save_json(tmp_path / f"{name}.json", found)
    assert newest_record(tmp_path, "gemm_epilogue")["day"] == 23
    for day, cases in ((25, ["gpt2", "llama"]), (26, ["llama"])):
        found = {"benchmark": "models", "day": day, "cases": cases, "environment": {"time": f"2026-11-{day}T00:00:00"}}
        save_json(tmp_path / f"{day}.json", found)
    assert [newest_record(tmp_path, "models", case)["day"] for case in ("", "gpt2", "llama")] == [26, 25, 26]


def test_the_demo_s_record_is_the_repository_s_and_a_wheel_s(monkeypatch, tmp_path):
    shipped = demo.gpu_record()
    assert shipped["environment"]["hardware"] == "NVIDIA H200"
    assert shipped["environment"]["commit"][:12] in where(shipped)
    checkout, wheel = demo.GPU_RECORDS
    with open(ROOT / "pyproject.toml", "rb") as f:
        put = tomllib.load(f)["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert {(ROOT / source, ROOT / place) for source, place in put.items()} == {(checkout, wheel)}
    assert "H200" in record_html(shipped)
    monkeypatch.setattr(demo, "GPU_RECORDS", (tmp_path / "none", checkout))
    assert demo.gpu_record() == shipped
    monkeypatch.setattr(demo, "GPU_RECORDS", (tmp_path / "none",))
    assert demo.gpu_record() is None
