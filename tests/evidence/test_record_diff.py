"""An older and a newer record: what became worse, and what may not be compared."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.errors import ArgumentError
from fusionlab.evidence.instruments.timing import Runs, timing_of
from fusionlab.evidence.instruments.workload import SiteState, workload_of
from fusionlab.evidence.record_diff import GROUPS, JUDGED, diff_records
from fusionlab.evidence.training.curve import FORMAT as CURVE
from fusionlab.viz.explorer.widget import Explorer


@pytest.fixture(scope="module")
def record():
    def f(x, w, b):
        return jnp.maximum(x @ w + b, 0)

    args = jnp.ones((4, 8)), jnp.ones((8, 16)), jnp.ones(16)
    return fl.compare(f, fl.fuse(f), *args, timing=False)


def timed(record, before_s, after_s, spread=0.01, part="timing", **changed):
    """The record with made-up samples; `spread` is their relative width."""
    samples = [1 + spread * (i / 39 - 0.5) for i in range(40)]
    pairs = (("before", before_s, samples), ("after", after_s, samples[::-1]))
    runs = [Runs(name, tuple(t * s for s in drawn), 1, 0, 0, 0) for name, t, drawn in pairs]
    return dataclasses.replace(record, **{part: dataclasses.replace(timing_of("call", *runs), **changed)})


def verdicts(old, new):
    return {c.what: c.verdict for c in diff_records(old, new).changes}


def judged(found):
    return [c for c in found.changes if c.verdict in JUDGED]


def test_a_record_is_no_worse_than_itself(record):
    found = diff_records(timed(record, 2e-3, 1e-3), timed(record, 2e-3, 1e-3))
    assert found.regressions == ()
    assert {c.verdict for c in judged(found)} == {"same"}
    assert len(judged(found)) == 1 + 2 + 1 + 3  # time, two memories, an output, three gradients
    assert {c.verdict for c in found.changes} == {"same", "equal"}
    assert found.same_work is True
    assert {c.group for c in found.changes} == {*GROUPS}


@pytest.mark.parametrize(
    ("after_s", "spread", "verdict"),
    [
        (1e-3, 0.01, "same"),
        (1.2e-3, 0.01, "worse"),
        (0.8e-3, 0.01, "better"),
        (1.02e-3, 1e-4, "same"),
        (1.2e-3, 1.6, "same"),
    ],
)
def test_a_ratio_is_worse_where_its_interval_lies_below_the_older_one_s(record, after_s, spread, verdict):
    old, new = timed(record, 2e-3, 1e-3, spread), timed(record, 2e-3, after_s, spread)
    assert verdicts(old, new)["time, call"] == verdict


def test_a_machine_that_became_slower_is_no_regression(record):
    assert verdicts(timed(record, 2e-3, 1e-3), timed(record, 4e-3, 2e-3))["time, call"] == "same"


@pytest.mark.parametrize("changed", [{"hardware": "NVIDIA H200"}, {"hardware": ""}])
def test_times_of_other_hardware_are_not_compared(record, changed):
    found = diff_records(timed(record, 2e-3, 1e-3), timed(record, 2e-3, 2e-3, **changed))
    (change,) = [c for c in found.changes if c.what == "time, call"]
    assert (change.verdict, change.why) == ("not compared", "measured on other hardware, or by another clock")
    assert not found.regressions


def test_what_only_one_record_has_is_not_compared_and_told(record):
    found = diff_records(record, timed(record, 2e-3, 1e-3))
    assert "not compared: time, call: nothing -> 2.000x" in str(found)
    without = dataclasses.replace(record, numerics=None, memory=None)
    assert {c.verdict for c in judged(diff_records(record, without))} == {"not compared", "same"}


def test_errors_that_leave_the_tolerance_are_worse(record):
    first, *rest = record.numerics.leaves
    far = dataclasses.replace(first.after, max_abs=1.0, rel_l2=1.0, over_tolerance=3)
    spoilt = dataclasses.replace(record.numerics, leaves=(dataclasses.replace(first, after=far), *rest))
    found = diff_records(record, dataclasses.replace(record, numerics=spoilt))
    assert [c.what for c in found.regressions] == ["output out"]
    assert "max abs error 1.00e+00, WORSE" in str(found)
    assert verdicts(dataclasses.replace(record, numerics=spoilt), record)["output out"] == "better"


def test_more_memory_is_worse_and_less_is_better(record):
    more = dataclasses.replace(record.memory.after, peak=record.memory.after.peak + 4096)
    grown = dataclasses.replace(record, memory=dataclasses.replace(record.memory, after=more))
    what = "compiled peak memory of the fused version, call"
    assert verdicts(record, grown)[what] == "worse"
    assert verdicts(grown, record)[what] == "better"


def test_other_settings_and_functions_are_noted(record):
    here = record.environment
    other = dataclasses.replace(here, versions=here.versions | {"jax": "0.0"}, xla_flags="--x")
    found = diff_records(record, dataclasses.replace(record, name="g", environment=other))
    assert found.notes == ("the records are of two functions, f and g",)
    differing = {c.what: (c.old, c.new) for c in found.of("environment") if c.verdict == "differs"}
    assert differing == {"jax": (here.versions["jax"], "0.0"), "xla flags": (here.xla_flags, "--x")}
    assert f"differs: jax: {here.versions['jax']} -> 0.0" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["notes"] == list(found.notes)


def test_equal_programs_have_equal_fingerprints_whatever_they_are_called_and_wherever_they_are(record):
    def renamed(a, b, c):
        with jax.named_scope("layer"):
            product = a @ b

        return jnp.maximum(product + c, 0)

    args = jnp.ones((4, 8)), jnp.ones((8, 16)), jnp.ones(16)
    assert workload_of(jax.make_jaxpr(renamed)(*args)) == record.workload
    other = workload_of(jax.make_jaxpr(lambda x, w, b: jnp.tanh(x @ w + b))(*args))
    assert (other.arguments, other.products) == (record.workload.arguments, record.workload.products)
    assert other.program != record.workload.program
    larger = workload_of(jax.make_jaxpr(renamed)(jnp.ones((8, 8)), *args[1:]))
    assert larger.arguments != record.workload.arguments
    assert larger.products != record.workload.products
    in_loop = jax.make_jaxpr(lambda x, w: jax.lax.scan(lambda c, _: (c @ w, None), x, length=3)[0])(
        *[jnp.ones((8, 8))] * 2
    )
    assert workload_of(in_loop).products != workload_of(jax.make_jaxpr(jnp.add)(*[jnp.ones((8, 8))] * 2)).products


def test_records_of_other_work_are_not_judged_and_without_fingerprints_that_is_unknown(record):
    old, new = timed(record, 2e-3, 1e-3), timed(record, 2e-3, 2e-3)
    assert diff_records(old, new).regressions
    other = dataclasses.replace(new, workload=dataclasses.replace(record.workload, products="other"))
    found = diff_records(old, other)
    assert found.same_work is False
    assert not found.regressions
    assert {c.why for c in judged(found)} == {"the records are of other work"}
    rewritten = dataclasses.replace(new, workload=dataclasses.replace(record.workload, program="other", nodes=9))
    assert diff_records(old, rewritten).same_work is True
    assert diff_records(old, rewritten).regressions
    older = dataclasses.replace(old, workload=None, sites=())
    assert diff_records(older, new).same_work is None
    assert "unknown: work: nothing -> nothing (no fingerprint in the older record)" in str(diff_records(older, new))
    assert "note: the older record lists no sites" in str(diff_records(older, new))


def test_sites_and_kernels_are_put_side_by_side(record):
    (site,) = record.sites
    assert (site.state, site.why) == ("fused", "xla")
    lost = SiteState(site.site, "declined", "escapes")
    more = SiteState("lerp@#1", "fused", "xla", 1e-5)
    kernels = dataclasses.replace(record.kernels, after={"library": 7})
    found = diff_records(record, dataclasses.replace(record, sites=(lost, more), kernels=kernels))
    assert [(c.what, c.old, c.new, c.verdict) for c in found.of("sites")] == [
        (site.site, "fused (xla)", "declined (escapes)", "differs"),
        ("lerp@#1", "not found", "fused (xla), saves 10 µs", "differs"),
    ]
    assert ("library kernels, after", "7") in [(c.what, c.new) for c in found.of("kernels")]


def test_two_records_have_a_page_a_frame_and_a_place_in_the_explorer(record, tmp_path):
    old, new = timed(record, 2e-3, 1e-3), timed(record, 2e-3, 1.5e-3)
    found = fl.diff(old.save(tmp_path / "old.json"), new)
    assert [c.what for c in found.regressions] == ["time, call"]
    frame = found.to_dataframe()
    assert frame[frame["verdict"] == "worse"]["group"].tolist() == ["time"]
    page = found.save(tmp_path / "x.html").read_text()
    assert "Are they of the same work?" in page
    assert '<td class="warn">worse</td>' in page
    assert page.count("<figure") == 2
    assert "http" not in page.partition("<style>")[0]

    def f(x, w, b):
        return jnp.maximum(x @ w + b, 0)

    searched = fl.find(f, jnp.ones((4, 8)), jnp.ones((8, 16)), jnp.ones(16))
    lab = Explorer(searched.graph, searched, measure=lambda *_: new)
    assert lab.against(tmp_path / "old.json") is None
    assert "press Measure" in next(tab["html"] for tab in lab.tabs if tab["name"] == "Records")
    lab.measure()
    assert "1 worse" in next(tab["html"] for tab in lab.tabs if tab["name"] == "Records")
    assert lab.against(fl.load(lab.save(tmp_path / "lab.json"))).regressions == ()
    assert lab.against(None) is None
    assert "Records" not in [tab["name"] for tab in lab.tabs]
    with pytest.raises(ArgumentError, match="needed a comparison"):
        lab.against(3)
    with pytest.raises(ArgumentError, match="needed one with a measurement"):
        fl.diff(fl.load(Explorer(searched.graph, searched).save(tmp_path / "bare.json")), new)


def test_a_record_is_read_back_as_it_was(record, tmp_path):
    path = timed(record, 2e-3, 1e-3).save(tmp_path / "record.json")
    back = fl.Comparison.load(path)
    assert back == timed(record, 2e-3, 1e-3)
    assert back.to_json() == timed(record, 2e-3, 1e-3).to_json()


@pytest.mark.parametrize("text", ["[]", "{}", "3", '{"name": "f", "environment": {}}', "[" * 100_000, "\xff"])
def test_what_is_no_record_is_one_error(tmp_path, text):
    (tmp_path / "a.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ArgumentError, match=r"a\.json is no"):
        fl.Comparison.load(tmp_path / "a.json")


@pytest.mark.parametrize("name", ["curve.npz", "gone.npz", "curve.json"])
def test_a_loss_curve_in_place_of_a_record_is_one_error_that_says_what_to_give(record, tmp_path, name):
    path = tmp_path / name
    if name == "curve.npz":
        np.savez(path, losses=np.ones(3))
    if name == "curve.json":
        path.write_text(json.dumps({"format": CURVE}))
    needed = (
        r"needed the record of a comparison or an explorer: the \.json file that comparison\.save or lab\.save wrote"
    )
    with pytest.raises(ArgumentError, match=rf"^new: got .*{name}, a file of a loss curve or of arrays; {needed}"):
        fl.diff(record, path)
