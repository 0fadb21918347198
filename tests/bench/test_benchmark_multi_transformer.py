"""The benchmark of whole layers: what it holds a measurement to, tiny parts of it on a CPU, and what its record says of the bars."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.programs import multi_transformer as bench

RESULTS = Path(bench.__file__).parents[1] / "results" / "h200"
# What was asked for and is not reached so far. Forward norms without the sum would have to be faster than memory for it: see README.
MISSED = {
    "norms layer 32768x1024 bfloat16, forward: fusionlab against jax.jit",
    "norms layer 8192x4096 bfloat16, forward: fusionlab against jax.jit",
    "encoder: with layer_norm against torch.compile",
}


def newest(benchmark, device="h200"):
    return json.loads(max((RESULTS.parent / device).glob(f"{benchmark}_*.json")).read_text())


def test_a_bar_is_a_ratio_of_medians():
    found = {
        "jax.jit": {"samples_s": [4.0, 4.0, 4.0]},
        "fusionlab": {"samples_s": [2.0, 2.0, 2.0]},
        "torch": {"torch.compile": {"samples_s": [2.2, 2.2, 2.2]}},
    }
    reached = bench.at_most("a", "fusionlab", 0.5).reached(found)
    assert (reached["ratio"], reached["at_least"], reached["reached"]) == (2.0, 2.0, True)
    missed = bench.Bar("a", "fusionlab", "torch.compile", 1.2).reached(found)
    assert missed["ratio"] == pytest.approx(1.1)
    assert not missed["reached"]


@pytest.mark.parametrize("part", ["norms", "generate"])
def test_a_part_has_every_program_s_samples(part):
    for name, found in bench.parts(False, 2, part):
        assert name.startswith(part)
        for program in ("jax.jit", "fusionlab"):
            assert len(found[program]["samples_s"]) == 2
        if part == "generate":
            assert found["fusionlab"]["tokens_per_s"] > 0


def test_the_record_has_every_bar_and_says_which_are_missed():
    record = newest("multi_transformer")
    assert set(record["bars"]) == {f"{b.part}: {b.program} against {b.than}" for b in bench.BARS}
    assert {name for name, bar in record["bars"].items() if not bar["reached"]} == MISSED
    for bar in record["bars"].values():
        assert bar["reached"] == (bar["ratio"] >= bar["at_least"])


def test_what_the_tools_found_in_the_kernels():
    record = newest("sanitizer")
    one_kernel = record["calls"].pop("multi_transformer by one kernel")
    assert set(record["calls"]) == {"layer_norm", "multi_transformer"}
    for found in record["calls"].values():
        assert {tool: one["errors"] for tool, one in found.items()} == {"memcheck": 0, "racecheck": 0}
    # In that one racecheck reported each of the eight copies that fill a slot of a ring, of which one lane had said that it is read. Since
    # each lane says so for itself (kSpeakers of stream.cuh) there is nothing to report.
    assert one_kernel["memcheck"]["errors"] == 0
    later = newest("sanitizer", "h100")["calls"]["multi_transformer by one kernel"]
    assert {tool: one["errors"] for tool, one in later.items()} == {"memcheck": 0, "racecheck": 0}
