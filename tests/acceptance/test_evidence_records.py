"""How far the evidence is to be trusted, on record: `python -m benchmarks timing_method`, `parts` and `xla_mapping` make them again."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.method.timing_method import ALARMS, BUSY_RUNS, DETECTED, RUNS, WRONG, rates, wrong_verdicts
from fusionlab.evidence.instruments.record import newest_record

pytestmark = pytest.mark.whole

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.fixture(scope="module")
def timing():
    return newest_record(RESULTS / "cpu", "timing_method")


def test_a_function_seldom_differs_from_itself_and_a_slowdown_of_10_percent_is_seen(timing):
    assert timing["environment"]["platform"] == "cpu"
    assert all(len(timing[kind]["runs"]) == RUNS for kind in ("A/A", "A/B"))
    alarms, detected = rates(timing)
    assert alarms <= ALARMS
    assert detected >= DETECTED


def test_no_verdict_is_wrong_beside_a_process_that_keeps_a_core_busy():
    record = newest_record(RESULTS / "cpu", "timing_busy")
    assert all(len(record[kind]["runs"]) == BUSY_RUNS for kind in WRONG)
    assert wrong_verdicts(record) == record["wrong verdicts"] == 0


def test_the_rates_are_those_of_the_verdicts():
    verdicts = [{"no difference": 180, "faster": 12, "slower": 8}, {"slower": 150, "no difference": 40, "faster": 10}]
    made = {kind: {"verdicts": of} for kind, of in zip(("A/A", "A/B"), verdicts, strict=True)}
    assert rates(made) == (0.1, 0.75)


@pytest.mark.parametrize("platform", ["cpu", "h200"])
def test_the_parts_of_a_transformer_block_sum_to_the_whole_within_10_percent(platform):
    record = newest_record(RESULTS / platform, "parts")
    assert abs(record["sum to whole"] - 1) <= 0.10
    assert [part["name"] for part in record["parts"]] == ["ln1", "attention", "ln2", "mlp"]
    assert record["remainder"].startswith("remainder ")


def test_what_xla_fused_is_known_by_node_and_line():
    record = newest_record(RESULTS / "cpu", "xla_mapping")
    total = record["total"]
    for kind in ("fusion", "library"):
        known = min(total["with_node"][kind], total["with_line"][kind])
        assert known >= 0.95 * total["kernels"][kind] > 1000
