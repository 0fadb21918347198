"""Times of nodes: every kernel's time is some nodes', and in the picture it takes the place of bytes."""

from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab.errors import ArgumentError
from fusionlab.evidence.instruments.program import Program, compile_program
from fusionlab.evidence.instruments.timeline import Launch, Timeline
from fusionlab.evidence.kernel_times import KernelTimes, kernels_in
from fusionlab.evidence.node_times import node_times, placed
from fusionlab.graph.cost.cost import cost_of
from fusionlab.graph.xla.hlo_text import parse_hlo
from fusionlab.graph.xla.modules import CompiledModule, ModuleKernel
from fusionlab.viz.cards.album import Album
from fusionlab.viz.html.dearest import dearest_html, dearest_title

SLICED = (Path(__file__).parents[1] / "graph/xla/hlo/sliced.txt").read_text()


def two(w, x):
    with jax.named_scope("first"):
        y = jnp.tanh(x @ w)
    with jax.named_scope("second"):
        return jnp.sin(y @ w).sum()


ARGS = jnp.ones((256, 256)), jnp.ones((512, 256))


def test_all_time_of_a_program_is_its_nodes():
    graph = fl.trace(two, *ARGS)
    times = node_times(graph, *ARGS, runs=2)
    ids = {n.primitive: n.id for n in graph.nodes()}
    assert set(times.seconds) <= set(graph.node_by_id)
    assert times.seconds[ids["dot_general"]] > 0
    runs = times.kernels.timelines
    assert sum(times.seconds.values()) + times.unplaced_s == pytest.approx(sum(r.busy_s for r in runs) / 2)
    assert times.whole_s == pytest.approx(sum(r.whole_s for r in runs) / 2)
    assert times.run in runs
    assert "of all kernels' time placed" in str(times)
    with pytest.raises(ArgumentError, match="needed the 2"):
        node_times(graph, ARGS[0])
    with pytest.raises(ArgumentError, match="runs: got 0"):
        node_times(graph, *ARGS, runs=0)


def test_a_kernels_time_is_shared_out_by_bytes_and_what_is_of_no_node_is_told():
    graph = fl.trace(two, *ARGS)
    dot, tanh = (next(n for n in graph.nodes() if n.primitive == p) for p in ("dot_general", "tanh"))
    run = Timeline(
        (
            Launch("fusion.1", "", "stream", 1.0, 4.0, 3.0, 3.0),
            Launch("gemm", "dot.7", "stream", 4.0, 5.0, 1.0, 1.0),
            Launch("copy", "", "stream", 5.25, 5.75, 0.5, 0.5),
        ),
        6.0,
    )
    module = CompiledModule(
        "two",
        (
            ModuleKernel("fusion.1", "fusion", "kLoop", (dot.id, tanh.id), (), "main"),
            ModuleKernel("dot.7", "library", "dot", (dot.id,), (), "main"),
        ),
        graph,
        True,
        {},
    )
    costs = cost_of(graph)
    timed = KernelTimes("two", kernels_in([run]), 1, "", "", (run,))
    times = placed(timed, module, costs, {"other": "gone"})
    dots, tanhs = (costs.nodes[n.id].bytes_moved + 1 for n in (dot, tanh))
    assert times.seconds[dot.id] == pytest.approx(3 * dots / (dots + tanhs) + 1)
    assert times.seconds[tanh.id] == pytest.approx(3 * tanhs / (dots + tanhs))
    assert (times.unplaced_s, times.between_s, times.around_s) == (0.5, 0.25, 1.25)
    assert times.whole_s == pytest.approx(6.0)
    assert set(times.nodes_of("gemm", "dot.7")) == {dot.id}
    assert not times.nodes_of("copy", "")
    aside = placed(timed, module, costs, {"copy": "dot.7"})  # what a copy engine does is named by what was started
    assert aside.unplaced_s == 0
    assert aside.seconds[dot.id] == pytest.approx(times.seconds[dot.id] + 0.5)


def test_times_take_the_place_of_bytes_and_move_nothing():
    graph = fl.trace(two, *ARGS)
    album = Album(graph)
    counted = album.picture(None)
    first = next(c for c in album.overview(None).cards() if c.name == "first")
    album.times = dict.fromkeys(first.nodes, 1e-3)
    timed = album.picture(None)
    assert [b.rect for b in timed.boxes] == [b.rect for b in counted.boxes]
    text = album.svg(None)
    assert f"{len(first.nodes)} ms · 100 %" in text
    assert "and time" in text or ", time" in text
    assert dearest_title(album.overview(None)) == "Where the time goes"
    assert "takes 100 % of that" in dearest_html(album.overview(None))
    assert album.overview(None).counted() == Album(graph).overview(None)


def test_a_place_that_takes_what_it_must_is_at_its_floor():
    graph = fl.trace(two, *ARGS)
    album = Album(graph)
    album.times = dict.fromkeys(graph.node_by_id, 1e-3)
    told = {
        share: dearest_html(album.overview(None), lambda card, share=share: share * card.cost.seconds)
        for share in (0.5, 0.9)
    }
    assert "at its floor" not in told[0.5]
    assert "at its floor: no kernel of this device takes less than" in told[0.9]
    assert "at its floor" not in dearest_html(album.overview(None))


def test_what_is_started_aside_has_the_name_that_a_profiler_gives_it():
    copied = SimpleNamespace(name="loop_dynamic_slice_fusion.25")
    instructions = (
        SimpleNamespace(name="fusion-start.3", async_wrapped_root=lambda: copied),
        SimpleNamespace(name="dot.7", async_wrapped_root=lambda: None),
        SimpleNamespace(name="copy-start"),  # of a jaxlib that has no such method
    )
    module = SimpleNamespace(computations=lambda: [SimpleNamespace(instructions=lambda: instructions)])
    executable = SimpleNamespace(hlo_modules=lambda: [module])
    program = SimpleNamespace(compiled=SimpleNamespace(runtime_executable=lambda: executable), module=parse_hlo(SLICED))
    assert Program.started.func(program) == {
        "loop_dynamic_slice_fusion.25": "fusion-start.3",
        "own.3": "dynamic_slice_fusion.2",
    }
    assert compile_program(two, ARGS, {}, name="two").started == {}
