"""Time by scope: every row's own seconds add up to the run; the trace that is written has them too."""

import dataclasses
import gzip
import json
from collections import defaultdict

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab.errors import ArgumentError
from fusionlab.evidence.instruments.timeline import Launch, Timeline
from fusionlab.evidence.kernel_times import KernelTimes, kernels_in
from fusionlab.evidence.node_times import NodeTimes
from fusionlab.evidence.scopes.scope_times import AROUND, BETWEEN, NO_NODE, NO_SCOPE, scope_times
from fusionlab.graph.program.scopes import place_of
from fusionlab.viz.explorer.widget import Explorer


class Net:
    def __call__(self, w, x):
        return norm(jnp.tanh(x @ w))


def norm(x):
    return x / jnp.abs(x).max()


def two(w, b, x):
    with jax.named_scope("net"):
        with jax.named_scope("up"):
            y = jax.nn.relu(x @ w + b)
        z = y * 2
        with jax.named_scope("down"):
            z = z @ w.T
    return z.sum()


W, B, X = jnp.ones((64, 64)), jnp.ones(64), jnp.ones((32, 64))


def made_up(graph, seconds, whole_s=10.0):
    """Times of nodes by primitive, each a kernel of its own, one after the other from 1 s on."""
    ids = {n.primitive: n.id for n in reversed(list(graph.nodes()))}
    launches, weights, end = [], {}, 1.0
    for name, s in seconds.items():
        launches.append(Launch(name, name, "stream", end, end + s, s, s))
        weights |= {name: {ids[name]: 1.0}} if name in ids else {}
        end += s
    run = Timeline(tuple(launches), whole_s)
    kernels = KernelTimes(graph.name, kernels_in([run]), 1, "made up", "a card", (run,))
    placed = {ids[name]: s for name, s in seconds.items() if name in ids}
    unplaced = sum(s for name, s in seconds.items() if name not in ids)
    return NodeTimes(placed, kernels, unplaced, run.between_s, run.around_s, weights)


def slices(data, cat):
    found = defaultdict(list)
    for e in data["traceEvents"]:
        if e.get("cat") == cat:
            found[e["pid"]].append(e)
    return found


def test_rows_are_a_tree_and_their_own_seconds_add_up_to_the_run():
    graph = fl.trace(two, W, B, X)
    found = scope_times(
        graph, made_up(graph, {"dot_general": 2.0, "add": 1.0, "mul": 0.5, "reduce_sum": 3.0, "copy": 0.25})
    )
    rows = {row.scope: row for row in found.rows}
    assert [*rows] == ["net", "net/up", "two()", NO_NODE, BETWEEN, AROUND]
    assert (rows["net"].total_s, rows["net"].self_s) == (3.5, 0.5)
    assert (rows["net/up"].total_s, rows["net/up"].self_s) == (3.0, 3.0)
    assert rows[NO_NODE].self_s == 0.25
    assert rows[AROUND].self_s == pytest.approx(10 - 6.75)
    assert sum(row.self_s for row in found.rows) == pytest.approx(10.0) == found.whole_s
    text = str(found)
    assert "two: 10 s a run, in 3 scopes" in text
    assert "    up" in text
    assert "1 more row of less than 0.5% each" in text


def test_before_and_after_are_one_tree_with_the_same_nodes():
    graph = fl.trace(two, W, B, X)
    found = fl.find(graph)
    before = made_up(graph, {"dot_general": 2.0, "add": 1.0})
    after = made_up(graph, {"dot_general": 1.0}, whole_s=8.0)
    times = scope_times(graph, before, after, found.candidates)
    (up,) = [row for row in times.rows if row.scope == "net/up"]
    assert (up.total_s, up.fused_total_s) == (3.0, 1.0)
    assert sum(row.fused_self_s for row in times.rows) == pytest.approx(8.0) == times.fused_whole_s
    assert "10 s -> 8 s a run" in str(times)
    assert times.to_dataframe()["with sites fused (s)"].sum() > 0


def test_a_trace_has_a_process_for_each_version_and_its_slices_carry_nodes_scopes_lines_and_sites(tmp_path):
    graph = fl.trace(two, W, B, X)
    found = fl.find(graph)
    before = made_up(graph, {"dot_general": 2.0, "add": 1.0, "copy": 0.5, "mul": 0.25})
    times = scope_times(graph, before, made_up(graph, {"dot_general": 1.0}, 8.0), found.candidates)
    data = json.loads(gzip.decompress(times.save(tmp_path / "x.perfetto.json.gz").read_bytes()))
    assert all({"ph", "name", "pid", "tid"} <= set(e) for e in data["traceEvents"])
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in data["traceEvents"] if e["ph"] == "X")
    named = {(e["pid"], e["args"]["name"]) for e in data["traceEvents"] if e["name"] == "process_name"}
    assert named == {(1, "before"), (2, "after")}
    kernels = slices(data, "kernel")
    assert [e["name"] for e in kernels[1]] == ["dot_general", "add", "copy", "mul"]
    dot = kernels[1][0]["args"]
    node = next(n for n in graph.nodes() if n.primitive == "dot_general")
    assert dot["nodes"] == {f"n{node.id}": 1.0}
    assert (dot["scope"], dot["primitive"], dot["source"]) == ("net/up", "dot_general", str(node.source))
    assert dot["site"] == "gemm_epilogue@net/up#1" == kernels[2][0]["args"]["site"]
    assert "scope" not in kernels[1][2]["args"]
    assert sum(e["dur"] for e in kernels[1]) == pytest.approx(3.75e6)
    around = [(e["name"], e["ts"], e["dur"]) for e in slices(data, "scope")[1]]
    assert around == [("net", 1e6, 3e6), ("up", 1e6, 3e6), ("net", 4.5e6, 0.25e6)]  # the outer one first


def test_slices_of_a_track_are_nested_or_apart(tmp_path):
    graph = fl.trace(two, W, B, X)
    times = made_up(graph, {"dot_general": 2.0, "add": 1.0})
    dot, add = times.run.launches
    copy = dataclasses.replace(dot, name="copy", hlo="copy", start_s=3.5, end_s=3.75)  # nested in the addition
    late = dataclasses.replace(dot, name="late", hlo="late", start_s=3.9, end_s=5.0)  # begins before that has ended
    run = Timeline((dot, add, copy, late), 10.0)
    times = dataclasses.replace(times, kernels=dataclasses.replace(times.kernels, timelines=(run,)))
    data = json.loads(gzip.decompress(scope_times(graph, times).trace()))
    drawn = [(e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in slices(data, "kernel")[1]]
    assert drawn == [("dot_general", 1, 3), ("add", 3, 4), ("copy", 3.5, 3.75), ("late", 4, 5)]
    assert [(e["name"], e["ts"], e["dur"]) for e in slices(data, "scope")[1]] == [("net", 1e6, 2e6), ("up", 1e6, 2e6)]


def test_where_a_program_names_no_scopes_calls_take_their_place():
    graph = fl.trace(lambda w, x: Net()(w, x), W, X)
    places = {n.primitive: place_of(n) for n in graph.nodes()}
    assert (places["tanh"], places["abs"]) == ("Net", "Net/norm()")
    assert NO_SCOPE not in places.values()


@pytest.mark.dear
def test_a_measured_program_adds_up_before_and_after_with_each_step_of_a_loop(tmp_path):
    def scanned(w, x):
        def step(h, w):
            with jax.named_scope("layer"):
                return jax.nn.gelu(h @ w), None

        return jax.lax.scan(step, x, w)[0].sum()

    args = jnp.ones((6, 128, 128)), jnp.ones((256, 128))
    times = fl.time_by_scope(fl.fuse(jax.grad(scanned)), *args, runs=4)
    for part, whole in (("self_s", times.whole_s), ("fused_self_s", times.fused_whole_s)):
        assert sum(getattr(row, part) for row in times.rows) == pytest.approx(whole, rel=1e-9)
    (layer,) = [row for row in times.rows if row.scope == "layer"]
    assert layer.total_s > 0.3 * times.whole_s
    assert 0 < layer.backward_s < layer.total_s
    data = json.loads(gzip.decompress(times.trace()))
    for pid, run in slices(data, "run").items():
        kernels = slices(data, "kernel")[pid]
        assert sum(e["args"]["share_us"] for e in kernels) == pytest.approx(run[0]["args"]["busy_us"])
        assert max(e["args"]["launch"] for e in kernels) >= 6
        assert max(e["ts"] + e["dur"] for e in kernels) <= run[0]["dur"] + 0.01
        assert all(e["dur"] > 0 for e in slices(data, "scope")[pid])
        assert sum(e["dur"] for e in slices(data, "scope")[pid] if e["name"] == "layer") > 0.3 * run[0]["dur"]


def test_a_function_that_is_not_fused_is_measured_alone_and_bad_arguments_are_named():
    times = fl.time_by_scope(two, W, B, X, runs=1)
    assert times.fused_whole_s is None
    assert {row.fused_total_s for row in times.rows} == {None}
    with pytest.raises(ArgumentError, match="runs: got 0"):
        fl.time_by_scope(two, W, B, X, runs=0)
    with pytest.raises(ArgumentError, match="needed arrays"):
        fl.time_by_scope(two, W, B, jax.ShapeDtypeStruct((32, 64), "float32"))


def test_the_explorer_shows_scopes_once_they_are_measured_and_writes_their_trace(tmp_path):
    graph = fl.trace(two, W, B, X)
    found, told = fl.find(graph), []
    before, after = made_up(graph, {"dot_general": 2.0, "add": 1.0}), made_up(graph, {"dot_general": 1.0}, 8.0)

    def scopes(setting, findings, progress):
        told.append(setting.enabled)
        return after

    lab = Explorer(graph, found, measure=lambda *_: None, times=lambda _: before, scopes=scopes, enabled=frozenset())
    assert "Scopes" not in [tab["name"] for tab in lab.tabs]
    with pytest.raises(ArgumentError, match=r"lab\.measure_scopes\(\) first"):
        lab.save(tmp_path / "x.perfetto.json.gz")
    lab.measure()
    lab.toggles["gemm_epilogue"] = True
    (html,) = [tab["html"] for tab in lab.tabs if tab["name"] == "Scopes"]
    assert 'data-fl="scopes"' in html
    assert "with sites fused" not in html
    lab.start_scopes().join(60)
    (html,) = [tab["html"] for tab in lab.tabs if tab["name"] == "Scopes"]
    assert told == [{"gemm_epilogue@net/up#1"}]
    assert 'data-fl="scopes"' not in html
    assert "with sites fused" in html
    assert lab.measure_scopes().fused_whole_s == pytest.approx(8.0)
    assert lab.session.stage.times == before.seconds
    data = json.loads(gzip.decompress(lab.save(tmp_path / "x.perfetto.json.gz").read_bytes()))
    assert len(slices(data, "kernel")) == 2
    assert "whole run" in lab.export(".html", "x.html")
