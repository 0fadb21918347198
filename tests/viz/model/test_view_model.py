"""The view model and its folding."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp

from fusionlab.graph.program.trace import trace
from fusionlab.viz.draw.dot import _box
from fusionlab.viz.model.view_model import view_model
from fusionlab.viz.palette import colour_of, pass_of_op

from ..conftest import candidate, findings_of, linear_nodes, mlp, mlp_args, rejection


def boxes(view, **wanted):
    return [b for b in view["boxes"] if all(b[k] == v for k, v in wanted.items())]


def groups(view, **wanted):
    return [g for g in view["groups"] if all(g[k] == v for k, v in wanted.items())]


def test_the_view_model_is_versioned_plain_json(case):
    view = view_model(case.graph, case.findings)
    assert (view["format"], view["version"]) == ("fusionlab.view", 2)
    assert json.loads(json.dumps(view)) == view


def test_the_same_program_gives_the_same_view_model(case):
    again = view_model(case.graph, case.findings)
    assert json.dumps(view_model(case.graph, case.findings)) == json.dumps(again)


def test_the_header_counts_fused_possible_and_declined_and_claims_no_speed(case):
    one = case.findings.candidates[0].id
    view = view_model(case.graph, case.findings, enabled={one})
    assert (
        view["header"] == "mlp · 12 nodes · cpu · 2 subgraphs can be fused (1 applied here) · 1 declined · not measured"
    )
    for enabled, words in (((), "none"), (None, "all")):
        said = view_model(case.graph, case.findings, enabled=enabled)["header"]
        assert f"2 subgraphs can be fused ({words} applied here) · 1 declined" in said
    assert view["counts"] == {"nodes": 12, "applied": 1, "candidate": 1, "declined": 1}


def test_passes_that_found_nothing_are_listed_too(case):
    rows = {p["name"]: p for p in view_model(case.graph, case.findings)["passes"]}
    assert rows["gemm_epilogue"]["sites"] == 2
    assert rows["gemm_epilogue"]["declined"] == 1
    assert rows["lerp"] | {"sites": 0, "state": "none"} == rows["lerp"]


def test_a_pass_is_on_off_or_partly_on(case):
    ids = [c.id for c in case.findings.candidates]
    for enabled, state in (((), "off"), (ids[:1], "partial"), (ids, "on"), (None, "on")):
        assert view_model(case.graph, case.findings, enabled=enabled)["passes"][0]["state"] == state


def test_every_node_of_a_small_program_has_its_own_box_inside_its_scope_and_site(case):
    view = view_model(case.graph, case.findings)
    nodes = boxes(view, kind="node")
    assert [b["node"] for b in nodes] == [n.id for n in case.graph.nodes()]
    sites = {g["id"]: g for g in groups(view, kind="site")}
    assert {s: (g["parent"], g["state"]) for s, g in sites.items()} == {
        "gemm_epilogue@layer_0#1": ("layer_0", "candidate"),
        "gemm_epilogue@layer_1#1": ("layer_1", "candidate"),
        "gemm_epilogue@layer_2#1": ("layer_2", "declined"),
    }
    assert all(len(boxes(view, parent=s)) == 4 for s in sites)
    assert sites["gemm_epilogue@layer_2#1"]["label"] == "gemm_epilogue  17/19"


def test_identical_layers_are_shown_once_with_their_count(stack):
    view = view_model(stack.graph, stack.findings)
    (run,) = groups(view, count=24)
    assert run["label"] == "layer_0 … layer_23  ×24 identical"
    assert len(boxes(view, kind="node")) == 4
    assert view["counts"]["candidate"] == 24


def test_one_layer_switched_off_is_no_longer_identical_to_its_neighbours(stack):
    ids = {c.id for c in stack.findings.candidates}
    view = view_model(stack.graph, stack.findings, enabled=ids - {"gemm_epilogue@layer_9#1"})
    assert [(g["label"], g["count"]) for g in view["groups"] if g["kind"] == "scope"] == [
        ("layer_0 … layer_8  ×9 identical", 9),
        ("layer_9", 1),
        ("layer_10 … layer_23  ×14 identical", 14),
    ]


def test_a_fold_hides_no_edge_to_the_outside_and_draws_none_back_to_its_own_start(stack):
    view = view_model(stack.graph, stack.findings)
    ends = {(e["from"], e["to"]) for e in view["edges"]}
    dot, tanh = boxes(view, kind="node")[0]["id"], boxes(view, kind="node")[-1]["id"]
    assert (tanh, "out0") in ends
    assert (tanh, dot) not in ends
    visible = {b["id"] for b in view["boxes"]}
    assert all({a, b} <= visible for a, b in ends)


def test_a_node_inside_a_fold_can_be_revealed_where_its_twin_stands(stack):
    wanted = linear_nodes(stack.graph)[13][2]
    view = view_model(stack.graph, stack.findings, reveal=[wanted.id])
    twin = linear_nodes(stack.graph)[0][2]
    assert view["revealed"] == {f"n{wanted.id}": f"n{twin.id}"}


def test_a_program_without_scopes_folds_into_repeats():
    def chain(x):
        for _ in range(40):
            x = jnp.tanh(x * 2.0 + 1.0) - x
        return x

    view = view_model(trace(chain, jnp.ones(4)))
    (run,) = groups(view, kind="run")
    assert run["label"] == "block  ×40 identical"
    assert len(boxes(view, kind="node")) == 4


def test_a_long_program_without_any_structure_is_cut_into_chunks_that_open_one_by_one():
    def long(x):
        for i in range(700):
            x = x + float(i * i)
        return x

    graph = trace(long, jnp.ones(4))
    view = view_model(graph)
    chunks = boxes(view, kind="chunk")
    assert len(chunks) > 5
    assert len(view["boxes"]) <= 62
    opened = view_model(graph, expanded=[chunks[0]["id"]])
    assert groups(opened, id=chunks[0]["id"])
    assert len(view_model(graph, expanded="all", max_nodes=1)["boxes"]) == 702


def test_groups_open_until_the_page_is_full():
    widths = [(jnp.ones((16 + i, 17 + i)), jnp.ones(17 + i)) for i in range(30)]
    graph = trace(mlp, widths, jnp.ones((4, 16)))
    for limit in (35, 60, 90):
        assert limit - 4 <= len(view_model(graph, max_nodes=limit)["boxes"]) - 2 <= limit


def test_sites_are_visible_even_when_the_page_is_full():
    widths = [(jnp.ones((16 + i, 17 + i)), jnp.ones(17 + i)) for i in range(30)]
    graph = trace(mlp, widths, jnp.ones((4, 16)))
    found = findings_of(graph, [candidate(graph, "gemm_epilogue@layer_28#1", linear_nodes(graph)[28])])
    view = view_model(graph, found, max_nodes=5)
    assert [b["site"] for b in view["boxes"] if b["site"]] == ["gemm_epilogue@layer_28#1"]


def test_regions_are_groups_and_edges_pass_through_their_borders():
    def scanned(x, w):
        y = jnp.sin(x)
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), y, None, length=12)[0] * 2.0

    graph = trace(scanned, jnp.ones((4, 4)), jnp.ones((4, 4)))
    view = view_model(graph)
    (region,) = groups(view, kind="region")
    assert region["label"] == "scan, 12 steps"
    names = {b["id"]: b["lines"][0] for b in view["boxes"]}
    arrows = {(names[e["from"]], names[e["to"]]) for e in view["edges"]}
    assert arrows == {
        ("x", "sin"),
        ("sin", "dot_general"),
        ("w", "dot_general"),
        ("dot_general", "tanh"),
        ("tanh", "mul 2"),
        ("mul 2", "returned"),
    }


def test_branches_and_loops_have_edges_too():
    def branches(p, x):
        y = jax.lax.cond(p, jnp.sin, jnp.cos, x)
        return jax.lax.while_loop(lambda c: c.sum() < 9.0, lambda c: c * 2.0, y)

    view = view_model(trace(branches, True, jnp.ones(4)))
    names = {b["id"]: b["lines"][0] for b in view["boxes"]}
    arrows = {(names[e["from"]], names[e["to"]]) for e in view["edges"]}
    assert {("sin", "mul 2"), ("cos", "mul 2"), ("mul 2", "returned")} <= arrows


def test_a_custom_rule_is_one_box_with_its_functions_name():
    view = view_model(trace(lambda x: jax.nn.relu(x) + 1.0, jnp.ones(4)))
    assert [b["lines"][0] for b in view["boxes"] if b["closed"]] == ["relu (custom_jvp)"]


def test_backward_scopes_say_so():
    graph = trace(jax.grad(lambda p, x: mlp(p, x).sum()), *mlp_args(1))
    labels = [g["label"] for g in view_model(graph)["groups"]]
    assert labels == ["layer_0", "layer_0 (backward)"]


def test_a_site_may_nest_in_a_declined_one_and_crossing_outlines_are_listed_only(case):
    graph = case.graph
    first, second = linear_nodes(graph)[:2]
    found = findings_of(
        graph,
        [candidate(graph, "gemm_epilogue@layer_0#1", first[:3])],
        [
            rejection("gemm_epilogue@layer_0#2", first),
            rejection("gemm_epilogue@layer_0#3", [*first[2:], *second[:1]]),
        ],
    )
    view = view_model(graph, found)
    parents = {g["id"]: g["parent"] for g in groups(view, kind="site")}
    assert parents == {"gemm_epilogue@layer_0#2": "layer_0", "gemm_epilogue@layer_0#1": "gemm_epilogue@layer_0#2"}
    assert len([s for s in view["sites"] if s["state"] == "declined"]) == 2


def test_a_declined_site_inside_a_fold_outlines_the_folded_box(case):
    folded = {b["id"]: b for b in view_model(case.graph, case.findings, collapsed=("layer_1", "layer_2"))["boxes"]}
    box = folded["layer_2"]
    assert (box["closed"], box["state"], box["site"]) == (True, "declined", "gemm_epilogue@layer_2#1")
    assert box["lines"][-1] == "1 declined inside"
    assert 'style="rounded,filled,dashed"' in _box(box, "fl-")
    assert folded["layer_1"]["state"] is None, "a candidate inside is said, not outlined"


def test_a_declined_site_without_an_outline_of_its_own_marks_the_fold_too(case):
    sites = linear_nodes(case.graph)
    crossing = [
        rejection("gemm_epilogue@layer_1#1", sites[1][1:3] + sites[2][:1]),
        rejection("lerp@layer_1#1", sites[1][:2], node_ids=(sites[1][0].id,)),
    ]
    found = findings_of(case.graph, [], crossing)
    boxes = view_model(case.graph, found, collapsed=("layer_1",))["boxes"]
    (box,) = [b for b in boxes if b["id"] == "layer_1"]
    assert (box["state"], box["site"]) == ("declined", "lerp@layer_1#1")


def test_where_a_candidate_took_the_guilty_node_the_rest_of_a_declined_site_is_outlined():
    """As for a pre-activation that is also returned: the linear part is fused, and the activation is what was declined."""
    graph = trace(lambda x, w: (jax.nn.relu(x @ w + 1.0), x @ w), jnp.ones((4, 8)), jnp.ones((8, 8)))
    dot, add, relu, *_ = graph.top.nodes
    (maximum,) = [n for n in graph.nodes() if n.primitive == "max"]
    found = findings_of(
        graph,
        [candidate(graph, "gemm_epilogue@#1", [dot, add])],
        [rejection("gemm_epilogue@#2", [dot, relu], node_ids=(add.id,))],
    )
    view = view_model(graph, found)
    (box,) = [b for b in view["boxes"] if b["node"] == relu.id]
    assert (box["closed"], box["state"], box["lines"][-1]) == (True, "declined", "1 declined inside")
    opened = view_model(graph, found, reveal=[maximum.id])
    assert [g["state"] for g in opened["groups"] if g["node"] == relu.id] == ["declined"]
    lost = findings_of(graph, found.candidates, [replace(found.rejections[0], winner="gemm_epilogue@#1")])
    assert [b["state"] for b in view_model(graph, lost)["boxes"] if b["node"] == relu.id] == [None]


def test_a_parameter_list_is_not_drawn_but_counted(stack):
    view = view_model(stack.graph, stack.findings)
    assert [b["lines"][0] for b in boxes(view, kind="input")] == ["x"]
    assert view["hidden_inputs"] == 48


def test_the_inspector_knows_operands_source_scope_and_sites(case):
    node = linear_nodes(case.graph)[0][2]
    info = view_model(case.graph, case.findings)["inspector"][f"n{node.id}"]
    assert info["primitive"] == "add"
    assert info["scope"] == "layer_0"
    assert info["outputs"] == [{"name": node.outputs[0].name, "type": "f32[4,8]", "bytes": 128}]
    assert [i["from"] for i in info["inputs"]] == ["n0 dot_general", "n1 broadcast_in_dim"]
    assert info["source"]["text"] == "x = jnp.tanh(x @ w + b)"
    assert [(s["id"], s["state"]) for s in info["sites"]] == [("gemm_epilogue@layer_0#1", "candidate")]


def test_a_declined_site_in_the_ledger_has_distance_reason_and_edit(case):
    row = view_model(case.graph, case.findings)["sites"][-1]
    assert (row["code"], row["matched"], row["total"]) == ("escapes", 17, 19)
    assert row["edit"] == "return it only when asked"


def test_a_fused_op_wears_the_colour_of_its_pass():
    assert pass_of_op("gemm_epilogue") == "gemm_epilogue"
    assert pass_of_op("gemm_epilogue_cotangent") == "gemm_epilogue_grad"
    assert pass_of_op("dot_general") is None
    assert colour_of("gemm_epilogue") != colour_of("dot_product_attention")
