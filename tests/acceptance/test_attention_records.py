"""Attention on an H200, on record: the bars that hold; the record is made by `python -m benchmarks attention`. Row 32."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.ops.attention import SHAPES, STEPS
from fusionlab.evidence.instruments.record import newest_record

pytestmark = pytest.mark.whole

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200"
SAMPLES = 20
# Times jax.jit's speed, forward and backward, where a bar was set.
BARS = {
    "B32 H16 S1024 D64 bfloat16 BTNH mask no": 4.2,
    "B32 H16 S1024 D64 bfloat16 BNTH mask no": 4.2,
    "B4 H16 S4096 D128 bfloat16 BTNH mask causal": 6.5,
    "B4 H16 S4096 D128 bfloat16 BNTH mask causal": 6.5,
}
OF_JAX_NN = 0.98


@pytest.fixture(scope="module")
def record():
    return newest_record(RESULTS, "attention")


def test_the_record_says_what_it_was_measured_with(record):
    environment = record["environment"]
    assert environment["hardware"] == "NVIDIA H200"
    assert len(environment["commit"].removesuffix("-dirty")) == 40
    assert {"jax", "torch"} <= set(environment["versions"])
    assert {shape.name for shape in SHAPES} <= set(record["attention"])
    assert {*list(STEPS)[:4]} <= set(record["encoder"]) <= set(STEPS)


@pytest.mark.parametrize("name", BARS)
def test_long_sequences_beside_jax_jit_and_cudnn_through_jax_nn(record, name):
    found = record["attention"][name]
    assert len(found["fusionlab"]["samples_s"]) >= SAMPLES
    assert found["fusionlab"]["ratio"] >= BARS[name]
    assert found["jax.nn cudnn"]["median_s"] >= OF_JAX_NN * found["fusionlab"]["median_s"]
    assert found["torch"]["torch sdpa"]["median_s"] > 0
    assert {route["implementation"] for route in found["routes"]} == {"cudnn"}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_nothing_is_slower_than_jax_jit_and_all_compute_the_same(record, shape):
    found = record["attention"][shape.name]
    assert found["fusionlab"]["interval"][1] >= 1
    assert found["difference to jax.jit"]["fusionlab"] < 0.02


def test_half_of_the_scores_masked_at_random_is_fused_and_faster(record):
    found = record["attention"]["B8 H16 S1024 D64 bfloat16 BTNH mask random"]
    assert {route["implementation"] for route in found["routes"]} == {"cudnn"}
    assert found["fusionlab"]["interval"][0] > 2
    assert found["difference to jax.jit"]["op by cuda"] < 0.02  # to 5e-3 of the largest: tests/gpu/test_attention.py


def test_row_32_an_encoder_s_step_of_a_library_s_own_attention(record):
    plain = record["encoder"]["dropout 0.0"]
    assert plain["fusionlab"]["interval"][0] >= 1.40
    for name, found in record["encoder"].items():
        assert found["fusionlab"]["interval"][1] >= 1, name
        assert found["fusionlab, as it comes"]["interval"][1] >= 1, name
    losses = plain["losses"].values()
    assert max(losses) - min(losses) < 1e-3 * max(losses)


def test_scratch_at_length_8192_is_less_than_an_eighth(record):
    assert record["memory"]["fusionlab"] < record["memory"]["jax.jit"] / 8
