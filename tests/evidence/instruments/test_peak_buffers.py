"""The buffers at the peak: exact bytes of programs whose buffers are known, each with the node and the line that compute it."""

from __future__ import annotations

import dataclasses
import inspect

import jax
import numpy as np
import pytest
from jax import numpy as jnp

import fusionlab as fl
from fusionlab.evidence import Evidence, measure
from fusionlab.evidence.instruments import peak_buffers as peak_buffers_module
from fusionlab.evidence.instruments.memory import compiled_memory
from fusionlab.evidence.instruments.peak_buffers import PeakBuffer, PeakBuffers
from fusionlab.evidence.instruments.program import compile_program
from fusionlab.graph.xla import modules
from fusionlab.graph.xla.modules import Origins, metadata_of_its_own
from fusionlab.viz.html.tabs import evidence_tabs

LAYERS, ROWS, WIDTH = 5, 32, 48
STACKED = LAYERS * ROWS * WIDTH * 4


def loss(w, x):
    def layer(x, w):
        kept = jnp.tanh(x @ w)  # what the backward pass reads of each layer
        return kept, None

    return jnp.sum(jax.lax.scan(layer, x, w)[0])


def arguments():
    return jnp.full((LAYERS, WIDTH, WIDTH), 0.1), jnp.full((ROWS, WIDTH), 0.2)


def line_of(text):
    lines, first = inspect.getsourcelines(loss)
    return f"test_peak_buffers.py:{first + next(i for i, line in enumerate(lines) if text in line)}"


@pytest.fixture(scope="module", autouse=True)
def lines_of_this_file():
    """JAX's persistent cache leaves lines out of its key: an equal program compiled elsewhere would come with those of that place."""
    with metadata_of_its_own():
        yield


@pytest.fixture(scope="module")
def plan():
    return compiled_memory(compile_program(jax.grad(loss), arguments(), {}, name="before"), results=["out"])


def test_the_buffers_and_the_gaps_add_up_to_the_figure_of_xla(plan):
    peak = plan.buffers
    assert peak.total == plan.peak
    assert peak.bytes_of("argument") == plan.argument == (LAYERS * WIDTH * WIDTH + ROWS * WIDTH) * 4
    assert peak.bytes_of("output") == plan.output == LAYERS * WIDTH * WIDTH * 4
    assert peak.bytes_of("temporary") + peak.gaps == plan.temp
    assert [b.bytes for b in peak.buffers] == sorted((b.bytes for b in peak.buffers), reverse=True)


def test_what_a_scan_keeps_for_its_backward_pass_has_the_line_and_the_node_inside_of_it(plan):
    stacked = [b for b in plan.buffers.buffers if b.kind == "temporary" and b.bytes == STACKED]
    assert stacked
    tanh = next(b for b in stacked if any("tanh" in operation for operation in b.operations))
    assert tanh.line == line_of("jnp.tanh")
    assert "jnp.tanh(x @ w)" in tanh.code
    graph = fl.trace(jax.grad(loss), *arguments())
    assert [f"n{i} {graph.node_by_id[i].primitive}" for i in tanh.nodes] == list(tanh.operations)
    most = plan.buffers.lines[0]
    assert most.line == line_of("jnp.tanh")
    assert most.bytes >= STACKED


def test_arguments_and_results_have_their_names(plan):
    named = {(b.kind, b.name): b.bytes for b in plan.buffers.buffers if b.kind in ("argument", "output")}
    weights, inputs = LAYERS * WIDTH * WIDTH * 4, ROWS * WIDTH * 4
    assert named == {("argument", "w"): weights, ("argument", "x"): inputs, ("output", "out"): weights}


def branches(x):
    return jax.lax.cond(x[0, 0] > 0, lambda x: jnp.sin(x @ x), lambda x: jnp.cos(x @ x) @ x, x)


def repeats(x):
    return jax.lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, jnp.tanh(c[1] @ c[1])), (0, x))[1]


def captures(x):
    return x @ np.arange(64 * 64, dtype=np.float32).reshape(64, 64)


@pytest.mark.parametrize("fn", [branches, repeats, captures])
def test_branches_loops_and_captured_arrays_add_up_as_well(fn):
    plan = compiled_memory(compile_program(fn, (jnp.ones((64, 64)),), {}, name="before"))
    assert plan.buffers.total == plan.peak
    held = [b.bytes for b in plan.buffers.buffers if b.kind == "constant" and b.bytes > 4]
    assert held == ([64 * 64 * 4] if fn is captures else [])


def test_asking_for_origins_changes_none():
    program = compile_program(jax.grad(loss), arguments(), {}, name="before")
    text, graph = program.compiled.as_text(), fl.trace(jax.grad(loss), *arguments())
    origins = Origins(text, graph)
    names = [*origins.module.instructions]
    first = {name: origins.of(name) for name in names}
    assert {name: origins.of(name) for name in reversed(names)} == first


def test_donated_arguments_count_once():
    def step(w, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w, x))

    plan = compiled_memory(compile_program(step, arguments(), {}, name="before", donate_argnums=(0,)))
    assert plan.alias == LAYERS * WIDTH * WIDTH * 4
    assert plan.buffers.total == plan.peak
    assert plan.buffers.bytes_of("output") == 0


@pytest.fixture(scope="module")
def evidence():
    return measure(loss, loss, *arguments(), timing=False, numerics=False)


def test_a_comparison_tells_and_records_them(evidence):
    assert "before, most temporaries at the peak: " in str(evidence)
    gradient = evidence.memory_grad.before.buffers
    assert {b.name for b in gradient.buffers if b.kind == "output"} >= {"gradient of w", "gradient of x"}
    assert {b.name for b in gradient.buffers if b.kind == "argument"} >= {"w", "x"}
    again = Evidence.from_dict(evidence.to_dict())
    assert again.memory == evidence.memory
    assert again.memory_grad == evidence.memory_grad
    table = evidence.rows()
    values = [
        row[3] for row in table if row[0].endswith("at the peak") and row[0] != "temporaries of a line at the peak"
    ]
    assert sum(values) == sum(
        version.peak + version.buffers.bytes_of("constant")
        for _, memory in evidence.memories
        for version in (memory.before, memory.after)
    )


def test_older_records_have_none(evidence):
    older = evidence.to_dict()
    for version in ("before", "after"):
        del older["memory"][version]["buffers"]
    assert Evidence.from_dict(older).memory.before.buffers is None


def test_the_memory_tab_shows_them_and_selects_the_nodes_of_the_original(evidence):
    found = fl.find(loss, *arguments())
    html = next(tab["html"] for tab in evidence_tabs(evidence, found) if tab["name"] == "Memory")
    assert f'data-fl-pick="{line_of("jnp.tanh")}"' in html
    assert "gradient of the call: temporaries at the peak, by source line" in html
    alone = next(tab["html"] for tab in evidence_tabs(evidence, None) if tab["name"] == "Memory")
    assert line_of("jnp.tanh") in alone
    assert "data-fl-pick" not in alone


def test_a_buffer_says_what_it_holds():
    def buffer(*operations, kind="temporary", name=""):
        return PeakBuffer(2048, kind, "f32[512]", name, operations, "model.py:7", "y = x", "", "fusion.1")

    assert str(buffer("n3 exp")) == "2 KiB  temporary f32[512]: exp n3 at model.py:7: y = x"
    assert buffer("n3 exp", "n5 exp", "n6 mul").what == "exp n3 or n5 or mul n6"
    assert buffer(*(f"n{i} exp" for i in range(6))).what == "exp n0, n1, n2 or one of 3 more"
    assert buffer("n3 scan", name="w").what == "copy of w"
    assert buffer("n3 scan", name="w", kind="argument").what == "w"
    peak = PeakBuffers("before", (buffer("n3 exp"), buffer("n4 mul", kind="constant")), 100)
    assert (peak.live, peak.total, peak.bytes_of("constant")) == (2048, 2148, 2048)
    assert PeakBuffers.from_dict(peak.to_dict()) == peak


def test_a_backend_that_shows_no_buffers_gives_none(monkeypatch):
    program = compile_program(jnp.sin, (np.ones(4, np.float32),), {}, name="before")
    for broken in (b"", b"\x0b", b"\x0a\x7f"):
        module = "fusionlab.evidence.instruments.peak_buffers.read_assignment"
        from fusionlab.graph.xla.buffer_assignment import read_assignment

        monkeypatch.setattr(module, lambda message, names, broken=broken: read_assignment(broken, names))
        plan = compiled_memory(program)
        assert plan.peak == 32
        assert plan.buffers is None or plan.buffers.buffers == ()


def test_a_program_from_the_cache_with_the_lines_of_an_older_source_is_told(tmp_path, monkeypatch):
    def compiled(first_line):
        path = tmp_path / f"model_{first_line}.py"
        source = "\n" * first_line + "def f(x, w):\n    y = jnp.tanh(x @ w)\n    return (y @ w).sum()\n"
        path.write_text(source)
        names = {"jnp": jnp}
        exec(compile(source, str(tmp_path / "model.py"), "exec"), names)
        return compile_program(names["f"], (jnp.ones((8, 8)), jnp.ones((8, 8))), {}, name="before")

    old, new = compiled(0), compiled(4)
    from_cache = dataclasses.replace(new, compiled=old.compiled)
    for is_cached, program, stale in ((True, from_cache, True), (True, new, False), (False, from_cache, False)):
        monkeypatch.setattr(peak_buffers_module, "uses_cache", lambda is_cached=is_cached: is_cached)
        peak = compiled_memory(program).buffers
        assert peak.stale == stale
        assert ("lines of an older source, from the compilation cache" in peak.sentence) == stale
        assert PeakBuffers.from_dict(peak.to_dict()) == peak


def test_each_line_of_a_module_is_looked_up_once(monkeypatch):
    looked = []
    found = modules.source_among
    monkeypatch.setattr(modules, "source_among", lambda frames: looked.append(1) or found(frames))
    program = compile_program(jax.grad(loss), arguments(), {})
    buffers = compiled_memory(program).buffers
    instructions = program.module.instructions.values()
    assert buffers is not None
    assert 0 < len(looked) <= len({(i.frame, i.file, i.line) for i in instructions}) < len(instructions) / 2
