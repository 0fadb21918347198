"""The benchmark of lerp at tiny sizes on a CPU: what its record holds, what it repeats, and the tilings it tries."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks.ops import lerp as bench
from benchmarks.ops import lerp_tiling
from fusionlab.kernels.choose import choices
from fusionlab.kernels.ops.lerp import cuda, plan, tiling
from tests.kernels.emulated import kernels_on_the_cpu


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    path = tmp_path_factory.mktemp("record") / "lerp.json"
    assert bench.main(["--quick", "-o", str(path)]) == 0
    return json.loads(path.read_text())


def test_a_record_says_what_it_was_measured_with(record):
    assert (record["benchmark"], record["command"]) == ("lerp", "python -m benchmarks lerp --quick")
    assert set(record["environment"]) >= {"hardware", "driver", "versions", "xla_flags", "settings", "commit", "time"}
    assert set(record["peaks"]) == {"copy_bytes_per_s"}


@pytest.mark.parametrize("part", bench.PARTS)
def test_a_record_has_every_rival_s_samples_and_ratio(record, part):
    assert len(record["cases"]) == len(bench.TINY)
    for case in record["cases"].values():
        found = case[part]
        rivals = {"jax.jit", "fusionlab", "broadcast, then sum"}
        for name in rivals:
            assert len(found[name]["samples_s"]) == 3
            low, high = found[name]["interval"]
            assert low <= found[name]["ratio"] <= high
            assert found["difference to jax.jit"][name] < 1e-6
        assert set(found["fusionlab against"]) == {"jax.jit", "broadcast, then sum"}
        assert "needs a CUDA device" in found["left out"]["op by cuda"]
        assert {r["role"] for r in found["routes"]} == ({"call"} if part == "forward" else {"call", "cotangent"})


def test_torch_s_times_are_among_the_rivals():
    times = {n: {"samples_s": [t, t, t]} for n, t in (("fusionlab", 1.0), ("jax.jit", 2.0), ("op by cuda", 1.0))}
    found = bench.against(times | {"torch": {"torch eager": {"samples_s": [4.0] * 3}}})
    assert {n: r["ratio"] for n, r in found.items()} == {"jax.jit": 2.0, "torch eager": 4.0}


def test_the_cases_are_those_asked_for_and_their_bytes_the_floors():
    floors = [case.backward_bytes for case in bench.CASES[:3]]
    np.testing.assert_allclose(floors, np.array([999, 1001, 187]) * (floors[0] / 999), rtol=5e-3)
    assert [case.bar for case in bench.CASES] == [1.10, 1.10, 1.12, None, None, None, None]
    assert [case.repeats for case in bench.CASES] == [1, 1, 1, 8, 8, 8, 8]


@pytest.mark.parametrize("part", bench.PARTS)
def test_what_is_repeated_follows_what_was_before(part):
    ct, x, y, w = bench.operands(bench.TINY[0])
    args = (x, y, w) if part == "forward" else (ct, x, y, w)
    fn = bench.PARTS[part](bench.blend)
    got = jax.tree.leaves(jax.jit(bench.repeated(part, fn, 3))(*args))
    sums = []
    for _ in range(3):
        if part == "forward":
            y = fn(x, y, w)
        else:
            *out, dx, ct = fn(ct, x, y, w)
            y = out[0] if out else y
            sums.append(dx)
    want = [y] if part == "forward" else [y, *sums, ct]
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_the_naive_rival_is_right():
    ct, x, y, w = bench.operands(bench.TINY[0])
    want = bench.total_of(bench.blend)(ct, x, y, w)
    for a, b in zip(bench.total_of(bench.naive)(ct, x, y, w), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


# Tilings.


def test_the_shipped_way_is_first_and_all_differ():
    for case in bench.CASES:
        made = lerp_tiling.ways(lerp_tiling.shapes_of(case), case.dtype)
        assert made[0].labels[0] == lerp_tiling.SHIPPED
        assert len({tuple(one.plan for one in way.passes) for way in made}) == len(made) > 1
        for name, values in lerp_tiling.SWEEP.items():
            labels = [label for way in made for label in way.labels if label.startswith(name)]
            assert sorted(labels) == sorted(f"{name}={v}" for v in values)


def test_constants_are_as_they_were_afterwards():
    shapes = lerp_tiling.shapes_of(bench.CASES[0])
    before = plan.backward_passes(shapes, ("x", "y"), "float32")
    with lerp_tiling.constants(IN_FLIGHT=2, FLAT_ITEMS=1):
        assert (tiling.IN_FLIGHT, plan.FLAT_ITEMS) == (2, 1)
        assert plan.backward_passes(shapes, ("x", "y"), "float32") != before
    assert (tiling.IN_FLIGHT, plan.FLAT_ITEMS) == (8, 2)
    assert plan.backward_passes(shapes, ("x", "y"), "float32") == before


def test_every_way_is_timed_and_right(emulator):
    """The kernels emulated: a run on a GPU is this one with its own clock."""
    case = bench.Case("small", (6, 1, 36), (6, 40, 36), (40, 1))
    made = lerp_tiling.ways(lerp_tiling.shapes_of(case), case.dtype)[:4]
    ct, x, y, w = bench.operands(case)
    want = bench.backward_of(bench.blend)(ct, x, y, w)
    with kernels_on_the_cpu(emulator, cuda):
        lerp_tiling.time_ways(case, made, 2)
        assert all(way.us > 0 for way in made)
        for way in made:
            for a, b in zip(jax.jit(lerp_tiling.program_of(case, way.passes))(ct, x, y, w), want, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)


def test_the_summary_is_the_mean_and_the_worst_of_all_cases():
    labels = [f"{name}={value}" for name, values in lerp_tiling.SWEEP.items() for value in values]
    one = [lerp_tiling.Way((), [lerp_tiling.SHIPPED, *labels[1:]], 10.0), lerp_tiling.Way((), labels[:1], 20.0)]
    two = [lerp_tiling.Way((), [lerp_tiling.SHIPPED, *labels], 5.0)]
    found = lerp_tiling.summary({"one": one, "two": two})
    assert found[0] == (labels[0], pytest.approx(math.sqrt(2)), 2.0)
    assert all(row[1:] == (1.0, 1.0) for row in found[1:])
    assert [way.us for way in lerp_tiling.shown(one)] == [10.0, 20.0]


def test_the_command_lists_them_without_a_gpu(capsys):
    assert bench.main(["--tune", "--quick"]) == 0
    told = capsys.readouterr().out
    assert told.count("<- as shipped") == len(bench.CASES)
    assert "not timed" in told


@pytest.mark.parametrize("alone", ["--of", "--table"])
def test_a_record_and_a_table_go_together(tmp_path, capsys, alone):
    with pytest.raises(SystemExit):
        bench.main(["--quick", alone, str(tmp_path / "lerp.json")])
    assert "--table and --of go together" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_shipped_table_is_what_the_record_holds_for_best(tmp_path):
    shipped = choices.TABLES / "sm_90.json"
    mine = tmp_path / "sm_90.json"
    results = Path(bench.__file__).parents[1] / "results" / "h200"
    assert bench.main(["--table", str(mine), "--of", str(max(results.glob("lerp_*.json")))]) == 0
    made, known = (choices.read_plan_file(path, "")["sm_90"].cases for path in (mine, shipped))
    assert len(made) == 2 * len(bench.CASES)
    assert made == {text: one for text, one in known.items() if json.loads(text)["op"] == "lerp"}
