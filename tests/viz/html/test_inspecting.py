"""The inspector: what it says of nodes, values, sites, structures, kernels, lines and groups, and that all of it can be followed."""

import dataclasses
import re
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab.device import Device
from fusionlab.errors import ArgumentError
from fusionlab.evidence.attribution import SiteShare, SiteShares
from fusionlab.evidence.instruments.timing import Runs, seconds
from fusionlab.evidence.roofline import roofline
from fusionlab.graph.program.trace import trace
from fusionlab.kernels.launch.compile import KERNELS
from fusionlab.models import transformer
from fusionlab.viz.html.inspector import inspect
from fusionlab.viz.html.kernel_sources import RECORDED_ARCH, kernel_source, kernels_html, registers

from ..conftest import findings_of, linear_nodes


class Parsed(HTMLParser):
    """Text, and the names that can be picked; fails on what is not closed."""

    VOID = ("br",)

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.text, self.picks, self._open = "", [], []
        self.feed(html)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self._open += [tag] if tag not in self.VOID else []
        given = dict(attrs)
        if "data-fl-pick" in given:
            assert (tag, given["type"]) == ("button", "button")
            self.picks.append(given["data-fl-pick"])

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data + " "


def said(found):
    return re.sub(r"\s+", " ", Parsed(found.html).text)


@dataclasses.dataclass
class Model:
    graph: object
    found: object
    compiled: object


@pytest.fixture(scope="module")
def model():
    """A differentiated layer with a scan, on no GPU: one site fused with its backward pass, one declined."""

    def loss(p, x):
        with jax.named_scope("layer"):
            h = jax.nn.gelu(x @ p["w"] + p["b"])
        scores = h @ h.T
        attended = jax.nn.softmax(scores) @ h
        y, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c) * 2.0, None), attended, None, length=7)
        return (y**2).sum() + scores.mean()

    params = {"w": jnp.ones((16, 16)), "b": jnp.ones(16)}
    found = fl.find(jax.value_and_grad(loss), params, jnp.ones((8, 16)))
    assert found.candidates
    return Model(found.graph, found, found.xla())


def node_of(graph, primitive):
    return next(n for n in graph.nodes() if n.primitive == primitive)


@pytest.mark.parametrize("spelling", [lambda n: n, lambda n: n.id, lambda n: f"n{n.id}", lambda n: n.outputs[0].name])
def test_a_node_may_be_named_in_any_way(case, spelling):
    node = linear_nodes(case.graph)[0][0]
    found = inspect(case.graph, case.findings, spelling(node))
    assert found.title == f"dot_general {node.outputs[0].name}"
    assert found == inspect(case.graph, case.findings, node)


def test_a_node_tells_shapes_cost_source_and_who_makes_and_reads_what(case):
    dot, broadcast, add, _ = linear_nodes(case.graph)[0]
    found = inspect(case.graph, case.findings, dot)
    text, picks = said(found), Parsed(found.html).picks
    assert "f32[4,8]" in text  # the result
    assert "f32[16,8]" in text  # an operand
    assert f"read by n{add.id} add" in text
    assert {f"n{add.id}", dot.outputs[0].name, dot.source.short, *(a.name for a in dot.inputs)} <= set(picks)
    cost = case.findings.cost().of(dot)
    assert cost.flops == 2 * 4 * 16 * 8
    assert "1.02 kflop" in text
    assert "768 B read, 128 B written" in text
    assert f"{cost.intensity:.3g} flop/byte" in text
    assert dot.source.text in text
    assert "layer_0" in text
    assert f"{dot.outputs[0].name} :f32[4,8] = dot_general" in text
    reader = said(inspect(case.graph, case.findings, add))
    assert f"← n{dot.id} dot_general" in reader
    assert f"← n{broadcast.id} broadcast_in_dim" in reader


def test_everything_that_can_be_picked_can_be_inspected(model):
    waiting, seen = [*(c.id for c in model.found.candidates), "n0"], set()
    waiting += [r.id for r in model.found.rejections] + [s.id for s in model.found.structures]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        found = inspect(model.graph, model.found, name, enabled=None, compiled=model.compiled)
        waiting += Parsed(found.html).picks
    lines = {n.source.short for n in model.graph.nodes() if n.source}
    kernels = {k.name for k in model.compiled.kernels}
    assert all(seen & some for some in (lines, kernels, {v.name for v in model.graph.top.inputs}))
    assert {f"n{n.id}" for n in model.graph.nodes()} - seen == set()


def test_a_node_in_a_loop_counts_its_trips_and_names_the_loop(model):
    scan = node_of(model.graph, "scan")
    inner = next(n for n in scan.blocks[0].nodes if n.primitive == "tanh")
    assert "7 trips" in said(inspect(model.graph, model.found, inner))
    assert f"← given to n{scan.id} scan" in said(inspect(model.graph, model.found, inner))
    assert "Inside" in said(inspect(model.graph, model.found, scan))


def test_an_argument_says_what_it_is_and_who_reads_it(case):
    value, name = case.graph.top.inputs[-1], case.graph.in_names[-1]
    found = inspect(case.graph, case.findings, value.name)
    first = linear_nodes(case.graph)[0][0]
    assert found.title == f"{value.name} {name}"
    assert f"argument {name}" in said(found)
    assert Parsed(found.html).picks == [f"n{first.id}"]


def test_a_node_tells_what_xla_fused_it_into_and_links_what_is_there_too(model):
    kernel = next(k for k in model.compiled.kernels if k.kind == "fusion" and len(k.nodes) > 1 and not k.inferred)
    node = kernel.nodes[0]
    found = inspect(model.graph, model.found, node, compiled=model.compiled)
    assert kernel.name in Parsed(found.html).picks
    assert f"fused into {kernel.name} {kernel.kind}, {kernel.target}, {len(kernel.nodes)} ops" in said(found)
    assert set(kernel.nodes) <= set(found.linked)
    removed = [n.id for n in model.graph.nodes() if not model.compiled.kernels_of(n)]
    assert removed
    assert model.compiled.fate(removed[0])[:7] in said(
        inspect(model.graph, model.found, removed[0], compiled=model.compiled)
    )


def test_without_a_compiled_module_it_says_where_to_get_one(case):
    found = inspect(case.graph, case.findings, 0)
    assert "findings.xla()" in said(found)
    assert found.linked == ()


def test_a_kernel_lists_its_ops_bytes_and_lines(model):
    kernel = next(k for k in model.compiled.kernels if k.kind == "fusion" and len(k.nodes) > 1 and not k.inferred)
    found = inspect(model.graph, model.found, kernel.name, compiled=model.compiled)
    assert found.title == kernel.name
    assert found.linked == kernel.nodes
    assert {f"n{i}" for i in kernel.nodes} <= set(Parsed(found.html).picks)
    assert {s.short for s in kernel.sources[:12]} <= set(Parsed(found.html).picks)
    assert "B read," in said(found)


def test_a_source_line_selects_its_equations_and_kernels(model):
    line = node_of(model.graph, "dot_general").source
    found = inspect(model.graph, model.found, line.short, compiled=model.compiled)
    wanted = tuple(n.id for n in model.graph.nodes() if n.source is not None and n.source.short == line.short)
    assert found.linked == wanted
    assert line.text in said(found)
    assert {k.name for k in model.compiled.kernels_of(*wanted)} <= set(Parsed(found.html).picks)


def test_a_declined_site_shows_its_nearest_miss_and_the_edit(case):
    (declined,) = case.findings.rejections
    found = inspect(case.graph, case.findings, declined.id)
    text = said(found)
    assert found.near == declined.node_ids
    for wanted in ("escapes", "17 of 19", declined.edit, f"nearest miss n{declined.node_ids[0]} tanh"):
        assert wanted in text
    assert "%7" in Parsed(found.html).picks  # named in the sentence
    touched = inspect(case.graph, case.findings, linear_nodes(case.graph)[2][0])
    assert touched.near == declined.node_ids
    assert "17 of 19" in said(touched)
    assert inspect(case.graph, case.findings, linear_nodes(case.graph)[0][0]).near == ()


def test_a_candidate_tells_backends_residuals_cost_and_state(case):
    site = case.findings.candidates[0]
    for enabled, state in (((), "can be fused"), (None, "fused"), ((site.id,), "fused")):
        assert f"state {state}" in said(inspect(case.graph, case.findings, site.id, enabled=enabled))
    text = said(inspect(case.graph, case.findings, site.id))
    for wanted in (
        "cublaslt unavailable no CUDA device",
        "pre_activation f32[4,16] 256 B, read by dx dw",
        "4 → 1",
        "a note worth reading",
        "as one kernel",
    ):
        assert wanted in text
    costs = case.findings.cost()
    saved = costs.of(site.node_ids).bytes_moved - costs.fused(site.node_ids).bytes_moved
    assert f"{saved} B less" in text


def test_residuals_name_the_gradients_of_this_program_that_read_them(model):
    site = next(c for c in model.found.candidates if c.backward is not None and c.backward.gradients)
    found = inspect(model.graph, model.found, site.id)
    assert {v.name for v in site.backward.gradients.values()} <= set(Parsed(found.html).picks)
    kept = [
        (r.name, k, v.name) for r in site.residuals for k, v in site.backward.gradients.items() if f"d{k}" in r.readers
    ]
    assert kept
    assert all(f"d{k} {v}" in said(found) for _, k, v in kept)


def test_measured_and_predicted_gains_are_told_and_a_loss_is_marked(case):
    site, other = case.findings.candidates
    runs = Runs("x", (1e-3, 1e-3, 1e-3), 1, 0.0, 0.0, 0.0)
    shares = SiteShares((SiteShare(site.id, runs, -2e-4, (0.8, 0.9)),), runs, runs, "cpu", (other.id,))
    found = inspect(case.graph, case.findings, site.id, shares=shares)
    assert f"-{seconds(2e-4)} per call, 0.800x to 0.900x" in said(found)
    assert "⚠" in said(found)
    assert "runs what XLA runs anyway" in said(inspect(case.graph, case.findings, other.id, shares=shares))
    assert "⚠" not in said(inspect(case.graph, case.findings, site.id))


def test_a_predicted_gain_comes_from_a_roofline(model):
    device = dataclasses.replace(Device.of("sm_90"), copy_bytes_per_s=4e12, gemm_flop_per_s=8e14)
    known = roofline(model.found, device)
    predicted = known.predictions[0]
    text = said(inspect(model.graph, model.found, predicted.site, roofline=known))
    assert str(predicted).partition(": ")[2] in text


def test_a_group_sums_its_nodes_and_lists_its_sites(case):
    ids = [n.id for site in linear_nodes(case.graph)[:2] for n in site]
    found = inspect(case.graph, case.findings, ids)
    costs = case.findings.cost()
    assert found.title == "8 nodes"
    assert f"{sum(costs.nodes[i].bytes_read for i in ids) / 1e3:.3g} kB read" in said(found)
    assert [p for p in Parsed(found.html).picks if "@" in p] == [c.id for c in case.findings.candidates]
    whole = inspect(case.graph, case.findings, (n.id for n in case.graph.nodes()))
    assert whole.near == case.findings.rejections[0].node_ids


def test_a_structure_lists_its_sites_and_what_is_in_it_says_so():
    params, x = transformer.init(jax.random.key(0), 1, embed=32), transformer.inputs(jax.random.key(1), 2, 16, 32)
    found = fl.find(lambda p, x: transformer.block(p[0], x, heads=4), params, x)
    site = found.candidates[0]
    # Looking for structures takes long: nobody asked.
    assert "Part of" not in said(inspect(found.graph, found, site.id))
    structure = next(s for s in found.structures if site.id in s.sites)
    shown = inspect(found.graph, found, structure.id)
    assert structure.text in said(shown)
    assert set(structure.sites) <= set(Parsed(shown.html).picks)
    assert set(shown.linked) == structure.node_ids
    for inside in (site.id, min(site.node_ids)):
        assert structure.id in Parsed(inspect(found.graph, found, inside).html).picks


def test_a_graph_that_was_not_searched_can_be_inspected_with_the_findings_of_another(case, model):
    fused = model.found.apply()
    for node in fused.nodes():
        text = said(inspect(fused, model.found, node, compiled=model.compiled))
        assert "No pass" not in text
        assert "anchor here" not in text
    with pytest.raises(ArgumentError, match="what: got"):
        inspect(fused, model.found, model.found.candidates[0].id)


@pytest.mark.parametrize("what", ["", "n9999", "%9999", "no@site#1", "nothing.py:7", "fusion.12", "n", "%", "n1x", ()])
def test_what_is_not_there_is_an_error_that_says_what_would_do(case, what):
    with pytest.raises(ArgumentError, match="what: got"):
        inspect(case.graph, case.findings, what)


# Kernels -------------------------------------------------------------------------------------------------------------
def test_every_op_with_a_cuda_file_shows_its_source():
    with_code = {f.relative_to(KERNELS).parts[0] for f in KERNELS.rglob("*.cu")} - {"clock"}
    for op in with_code:
        source = kernel_source(op)
        assert source is not None, op
        assert (KERNELS / source.path).read_text() == next(iter(source.texts.values()))
        assert all(entry in source.texts[source.path.rpartition("/")[2]] for entry in source.entries)
    assert {"layer_norm", "multi_transformer"} <= with_code
    assert kernel_source("softmax") is None
    assert "has no CUDA kernel" in kernels_html("softmax")
    assert "has no CUDA kernel" in kernels_html("../../etc")


def test_registers_are_those_on_record_for_the_dtype_and_activation():
    arch, found = registers("gemm_epilogue", "bfloat16", {"activation": "relu"}, "sm_90")
    assert arch == "sm_90"
    assert found["bfloat16 relu: forward"]["epilogue_forward"] > 0
    assert all(name.startswith("bfloat16 relu") and "relu_" not in name for name in found)
    assert registers("gemm_epilogue", "bfloat16", {"activation": "relu"}, "sm_42")[0] == RECORDED_ARCH
    assert registers("gemm_epilogue", "int8", {"activation": "relu"})[1] == {}
    for op in ("lerp", "dot_product_attention"):
        assert registers(op, "bfloat16", {})[1]
    text = Parsed(kernels_html("gemm_epilogue", "bfloat16", {"activation": "relu"}, "sm_90")).text
    assert "bfloat16 relu: forward" in text
    assert "kernel_resources" in text  # where the rest is told
    assert 'extern "C"' in text


def test_of_many_variants_the_first_are_shown_and_all_are_counted():
    count = sum(len(entries) for entries in registers("layer_norm", "bfloat16", {}, "sm_90")[1].values())
    shown = kernels_html("layer_norm", "bfloat16", {}, "sm_90")
    assert count > 12
    assert f"the first 12 of {count}" in Parsed(shown).text
    assert shown.count("<tr>") == 12 + 1  # and the heading


def test_the_kernels_source_is_left_out_where_it_is_not_wanted(case):
    site = case.findings.candidates[0].id
    whole, short = (inspect(case.graph, case.findings, site, sources=s).html for s in (True, False))
    assert len(whole) > len(short) + 5000
    assert "__global__" in whole
    assert "__global__" not in short


def test_a_program_of_no_pass_at_all_can_be_inspected():
    graph = trace(jnp.sin, 1.0)
    assert inspect(graph, None, 0).title.startswith("sin")
    assert inspect(graph, findings_of(graph), 0).html
