"""Files of a picture: SVG, DOT, PNG, PDF and plain data, each of the same cards."""

import dataclasses
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from PIL import Image

from fusionlab.errors import ArgumentError, MissingDependencyError, OutputError, UnknownNameError
from fusionlab.viz import convert
from fusionlab.viz.cards.svg import INK, PAPER
from fusionlab.viz.explorer.files import save
from fusionlab.viz.export import CAPTION, album, to_dot, to_svg, view_model
from fusionlab.viz.palette import colour_of

from .conftest import candidate, findings_of, linear_nodes, rejection

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


def test_a_file_says_the_way_to_the_explorer_and_has_paper_of_its_own(case):
    svg = ET.fromstring(to_svg(case.graph, case.findings))
    assert CAPTION in " ".join(svg.itertext())
    paper = next(e for e in svg.iter() if e.get("class") == "paper")
    assert (paper.get("width"), paper.get("height")) == (svg.get("width"), svg.get("height"))


@pytest.mark.parametrize("make", [to_svg, to_dot], ids=["svg", "dot"])
def test_what_is_asked_for_is_in_sight(stack, make):
    wanted = linear_nodes(stack.graph)[17][2]
    closed, opened = make(stack.graph, stack.findings), make(stack.graph, stack.findings, show=[f"n{wanted.id}"])
    assert "layer_17, 18 of 24" not in closed
    assert "layer_17, 18 of 24" in opened
    assert len(make(stack.graph, stack.findings, show="all")) > len(closed)
    with pytest.raises(ArgumentError, match="n99999"):
        make(stack.graph, stack.findings, show=["n99999"])


@pytest.mark.parametrize("make", [to_svg, to_dot], ids=["svg", "dot"])
def test_a_file_is_the_same_every_time_and_its_ids_are_unique(case, make):
    text = make(case.graph, case.findings, show="all")
    assert make(case.graph, case.findings, show="all") == text
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_dot_tells_states_by_form_and_passes_by_colour(case):
    boxes = [
        line for line in to_dot(case.graph, case.findings, {"gemm_epilogue@layer_0#1"}).splitlines() if "label=" in line
    ]
    applied, free, declined = (next(b for b in boxes if f"layer_{i}" in b) for i in range(3))
    assert all(colour_of("gemm_epilogue") in box for box in (applied, free, declined))
    assert "style=filled" in applied
    assert "style=solid" in free
    assert "style=dashed" in declined


def test_dot_frames_what_is_open_and_ends_edges_at_frames(stack):
    text = to_dot(stack.graph, stack.findings, show="all")
    pictures = album(stack.graph, stack.findings, (), "all")
    assert pictures.opened
    assert {"forward", *pictures.opened} == set(re.findall(r'subgraph "?cluster_([^"{]+?)"? \{', text))
    with pytest.raises(UnknownNameError, match="BT, LR, RL, TB"):
        to_dot(stack.graph, direction="up")


@pytest.mark.parametrize("make", [to_svg, to_dot], ids=["svg", "dot"])
def test_hostile_names_are_drawn(nasty, make):
    text = make(*nasty, show="all")
    assert len(text) < 100_000
    if make is to_svg:
        ET.fromstring(text)


def test_the_plain_data_is_versioned_json_with_the_cards(case):
    view = view_model(case.graph, case.findings)
    assert (view["format"], view["version"]) == ("fusionlab.view", 3)
    assert json.loads(json.dumps(view)) == view == view_model(case.graph, case.findings)
    cards = [row["cards"]["forward"] for row in view["picture"]["rows"]]
    assert [(c["name"], c["site"] and c["site"]["state"]) for c in cards] == [
        ("layer_0", "candidate"),
        ("layer_1", "candidate"),
        ("layer_2", "declined"),
    ]
    assert sum(c["cost"]["bytes"] for c in cards) == view["picture"]["totals"]["forward"]["bytes"]


def test_save_goes_by_the_suffix(case, tmp_path):
    kinds = {".svg": b"<svg", ".dot": b"digraph", ".json": b"{", ".html": b"<!DOCTYPE html>", ".txt": b"graph mlp("}
    for suffix, start in kinds.items():
        path = save(case.graph, tmp_path / f"picture{suffix}", case.findings)
        assert path.read_bytes().startswith(start), suffix
    assert json.loads((tmp_path / "picture.json").read_text())["title"] == "mlp"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(f"picture{s}" for s in kinds)


def test_save_makes_png_with_the_text_drawn(case, tmp_path):
    assert save(case.graph, tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    # A converter without the font asked for drops the text silently: a picture with text weighs more.
    svg = to_svg(case.graph)
    without = re.sub(r"<text.*?</text>", "", svg)
    assert len(convert.to_png(svg)) > 1.3 * len(convert.to_png(without))


def test_save_makes_pdf(case, tmp_path, require):
    require(convert.can_make_pdf(), "the extra pdf")
    assert save(case.graph, tmp_path / "p.pdf").read_bytes().startswith(b"%PDF")


def test_a_png_is_drawn_by_what_the_base_installation_has_in_the_colours_of_the_picture(case, monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    svg = to_svg(case.graph, case.findings)
    drawn = Image.open(io.BytesIO(convert.to_png(svg)))
    width, height = convert.size_of(svg)
    assert drawn.size == (math.ceil(2 * width), math.ceil(2 * height))
    assert drawn.mode == "P"  # a palette: half the bytes
    colours = [colour for _, colour in drawn.convert("RGB").getcolors()]
    for wanted in (colour_of("gemm_epilogue"), INK, PAPER):
        rgb = [int(wanted[k : k + 2], 16) for k in (1, 3, 5)]
        assert min(max(abs(a - b) for a, b in zip(rgb, c, strict=True)) for c in colours) <= 8, wanted


def test_a_png_of_a_huge_picture_has_fewer_pixels():
    svg = '<svg xmlns="http://www.w3.org/2000/svg" width="9000" height="40000"><rect width="9" height="9"/></svg>'
    width, height = Image.open(io.BytesIO(convert.to_png(svg, most=1e6))).size
    assert 0.95e6 < width * height < 1.05e6


def test_pdf_without_its_extra_names_the_extra(case, tmp_path, monkeypatch):
    real = convert.importlib.import_module

    def missing(name, *args):
        if name == "vl_convert":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(convert.importlib, "import_module", missing)
    with pytest.raises(MissingDependencyError, match=r"pip install 'fusionlab\[pdf\]'"):
        save(case.graph, tmp_path / "p.pdf")
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
    require(shutil.which("dot"), "Graphviz's dot")
    text = to_dot(case.graph, case.findings, {case.findings.candidates[0].id})
    done = subprocess.run(["dot", "-Tcanon"], input=text, capture_output=True, text=True, check=True)
    assert done.stderr == ""
