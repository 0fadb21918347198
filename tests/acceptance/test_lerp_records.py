"""Row 51 of lerp: what is on record of an H200 holds the bars; the record is made by `python -m benchmarks lerp`."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from benchmarks.ops.lerp import CASES, PARTS, RIVALS, Case
from fusionlab.evidence.instruments.record import newest_record

pytestmark = pytest.mark.whole

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200"
SAMPLES = 40
NOISE = 0.01  # of the time: what repetitions of one program differ by
RATE = 4e12  # bytes a second, made up


def misses(record):
    """Every bar that a record does not hold, in words."""
    cases = record["cases"]
    if missing := [case.name for case in CASES if case.name not in cases]:
        return [f"{name} was not measured" for name in missing]
    rate = record["peaks"]["copy_bytes_per_s"]
    return [line for c in CASES for line in (*_above(c, cases[c.name], rate), *_slower(c, cases[c.name]))]


def _above(case, found, copy_bytes_per_s):
    floor = case.backward_bytes / copy_bytes_per_s
    backward = found["backward"]["fusionlab"]["median_s"]
    if case.bar and backward > case.bar * floor:
        yield f"{case.name}: backward takes {backward / floor:.3f} of the bytes', at most {case.bar} was asked for"


def _slower(case, found):
    """The cases with a bar are held to jax.jit, backward; the others to every rival, forward, backward and both."""
    asked = {"backward": ("jax.jit",)} if case.bar else dict.fromkeys(PARTS, RIVALS)
    for part, rivals in asked.items():
        if len(found[part]["fusionlab"]["samples_s"]) < SAMPLES:
            yield f"{case.name}, {part}: fewer than {SAMPLES} samples"
        for rival in rivals:
            against = found[part]["fusionlab against"].get(rival)
            if against is None:
                yield f"{case.name}, {part}: {rival} was not measured"
            elif against["interval"][1] < 1 - NOISE * (rival == "jax.jit" and _all_xla_s(found[part]["routes"])):
                yield f"{case.name}, {part}: slower than {rival}, {against['ratio']:.3f} {against['interval']}"


def _all_xla_s(routes):
    """Whether what was timed is XLA's code of the same operations, as jax.jit's is."""
    return all(route["implementation"] == "xla" for route in routes)


@pytest.fixture(scope="module")
def record():
    return newest_record(RESULTS, "lerp")


def test_the_record_says_what_it_was_measured_with(record):
    environment = record["environment"]
    assert environment["hardware"] == "NVIDIA H200"
    assert len(environment["commit"].removesuffix("-dirty")) == 40
    assert {"jax", "torch"} <= set(environment["versions"])
    assert "/" not in record["command"]
    assert 1e12 < record["peaks"]["copy_bytes_per_s"] < 1e13


def test_row_51_the_bars_hold_on_record(record):
    assert misses(record) == []


def test_every_program_made_the_same_numbers(record):
    for case in record["cases"].values():
        for part in PARTS:
            assert max(case[part]["difference to jax.jit"].values()) < 1e-5


# The bars themselves, on records made up.


def made_up(case: Case):
    """What holds every bar: the backward at 1.05 of the bytes' time, each rival some percent slower."""
    floor = case.backward_bytes / RATE
    against = {rival: {"ratio": 1.02, "interval": [0.99, 1.05]} for rival in RIVALS}
    mine = {"samples_s": [1.05 * floor] * SAMPLES, "median_s": 1.05 * floor}
    part = {"fusionlab": mine, "fusionlab against": against, "routes": [{"implementation": "cuda"}]}
    return {name: copy.deepcopy(part) for name in PARTS}


@pytest.fixture
def holds():
    return {"peaks": {"copy_bytes_per_s": RATE}, "cases": {case.name: made_up(case) for case in CASES}}


def test_a_record_that_holds_every_bar_misses_none(holds):
    assert misses(holds) == []


@pytest.mark.parametrize("i", range(3))
def test_a_backward_beyond_its_bar_is_missed(holds, i):
    case = CASES[i]
    found = holds["cases"][case.name]["backward"]["fusionlab"]
    found["median_s"] *= (case.bar + 0.01) / 1.05
    (line,) = misses(holds)
    assert line.startswith(f"{case.name}: backward takes {case.bar + 0.01:.3f} of the bytes'")


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name.replace(" ", "_"))
@pytest.mark.parametrize("rival", RIVALS)
def test_slower_beyond_the_interval_is_missed_where_it_is_asked_for(holds, case, rival):
    for part in PARTS:
        holds["cases"][case.name][part]["fusionlab against"][rival] = {"ratio": 0.97, "interval": [0.95, 0.99]}
    count = 3 if not case.bar else int(rival == "jax.jit")
    found = misses(holds)
    assert len(found) == count
    assert all(f"slower than {rival}, 0.970" in line for line in found)


@pytest.mark.parametrize(("ratio", "count"), [(0.985, 1), (0.995, 0)])
def test_code_of_xla_s_alone_may_differ_by_noise(holds, ratio, count):
    part = holds["cases"][CASES[4].name]["forward"]
    part["fusionlab against"]["jax.jit"] = {"ratio": ratio, "interval": [ratio - 0.001, ratio + 0.001]}
    assert len(misses(holds)) == 1
    part["routes"] = [{"implementation": "xla"}]
    assert len(misses(holds)) == count


def test_what_was_not_measured_is_missed(holds):
    del holds["cases"][CASES[3].name]["total"]["fusionlab against"]["torch.compile"]
    holds["cases"][CASES[4].name]["forward"]["fusionlab"]["samples_s"] = [1.0] * 6
    assert misses(holds) == [
        f"{CASES[3].name}, total: torch.compile was not measured",
        f"{CASES[4].name}, forward: fewer than {SAMPLES} samples",
    ]
    del holds["cases"][CASES[0].name]
    assert misses(holds) == [f"{CASES[0].name} was not measured"]
