"""Search over a program: what is found by which words, in which order, and how many calls it takes."""

import cProfile
import gc
import json
import weakref

import jax
import jax.numpy as jnp
import pytest

from fusionlab.errors import REJECTIONS
from fusionlab.graph.program.trace import trace
from fusionlab.viz.model.search import SearchIndex, index_of, search

from ..conftest import findings_of, linear_nodes, mlp, mlp_args


def names(case, text, limit=50):
    return [row.name for row in search(case.graph, case.findings, text, limit).rows]


def node_names(nodes):
    return {f"n{n.id}" for n in nodes}


@pytest.mark.parametrize("text", ["tanh", "TANH", " tanh  ", "tan"])
def test_an_operation_is_found_whatever_its_case(case, text):
    wanted = node_names(n for n in case.graph.nodes() if n.primitive == "tanh")
    assert wanted <= set(names(case, text))


def test_every_word_has_to_be_there(case):
    layer = linear_nodes(case.graph)[1]
    assert set(names(case, "layer_1 dot_general")) == {f"n{layer[0].id}"}
    assert set(names(case, "dot_general layer_1")) == {f"n{layer[0].id}"}
    assert search(case.graph, case.findings, "layer_1 dot_general zzz").total == 0


def test_a_shape_may_be_typed_in_part(case):
    wide = linear_nodes(case.graph)[1]
    assert node_names([wide[0], *wide[2:]]) <= set(names(case, "f32[4,12"))
    assert not {f"n{n.id}" for n in linear_nodes(case.graph)[0]} & set(names(case, "f32[4,12"))


def test_a_source_line_is_found_by_its_place_and_by_its_text(case):
    dot = linear_nodes(case.graph)[0][0]
    for text in (dot.source.short, "jnp.tanh(x @ w", dot.source.function):
        assert f"n{dot.id}" in names(case, text)
    (row,) = [r for r in search(case.graph, case.findings, dot.source.short).rows if r.name == f"n{dot.id}"]
    assert row.where == dot.source.short


def test_an_exact_name_comes_first(stack):
    for node in list(stack.graph.nodes())[1:3]:
        assert names(stack, f"n{node.id}")[0] == f"n{node.id}"
        assert names(stack, node.outputs[0].name)[0] == f"n{node.id}"
    assert search(stack.graph, stack.findings, "n1").total > 1  # n10, n11, ...: while it is typed


def test_sites_are_found_by_id_pass_code_and_its_meaning_and_come_before_nodes(case):
    declined, *_ = case.findings.rejections
    for text in (declined.id, "escapes", REJECTIONS["escapes"], "declined", declined.edit):
        assert names(case, text)[0] == declined.id, text
    assert names(case, "gemm_epilogue")[:3] == [c.id for c in case.findings.candidates] + [declined.id]
    rows = search(case.graph, case.findings, "layer_2").rows
    assert rows[0].name == declined.id
    assert {r.name for r in rows[1:]} == node_names(linear_nodes(case.graph)[2])


def test_an_argument_is_found_by_its_own_name(case):
    hits = search(case.graph, case.findings, case.graph.in_names[-1])
    assert hits.rows[0].name == case.graph.top.inputs[-1].name
    assert hits.rows[0].where == "argument"


def test_the_limit_cuts_rows_and_not_the_total(stack):
    hits = search(stack.graph, stack.findings, "tanh", limit=5)
    assert (len(hits.rows), hits.total) == (5, 24 * 5)  # nodes and sites: all of that source line
    assert search(stack.graph, stack.findings, "tanh", limit=0).rows == ()


@pytest.mark.parametrize("text", ["", "  ", "\n", "no such thing", "(*", "[", "\\", "%", "\x00"])
def test_any_text_is_only_text(case, text):
    hits = search(case.graph, case.findings, text)
    assert bool(hits.total) == (text in ("%", "["))
    assert json.loads(json.dumps(hits.to_dict()))["query"] == text


def test_plain_data_has_the_keys_of_a_list(case):
    data = search(case.graph, case.findings, "tanh", limit=1).to_dict()
    assert data["query"] == "tanh"
    assert set(data["rows"][0]) == {"id", "label", "where"}


def test_long_labels_are_cut():
    def deep(x):
        with jax.named_scope("s" * 500):
            return jnp.tanh(x)

    (row,) = search(trace(deep, jnp.ones(3)), None, "tanh").rows
    assert len(row.label) <= 120


def test_a_graph_is_read_once_and_let_go_with_its_owner():
    graph = trace(mlp, *mlp_args(2))
    found = findings_of(graph)
    assert index_of(graph, found) is index_of(graph, found)
    assert index_of(graph) is not index_of(graph, found)
    assert len(index_of(graph)) == len(list(graph.nodes())) + len(graph.top.inputs)
    index = weakref.ref(index_of(graph, found))
    graph_ref = weakref.ref(graph)
    del graph, found
    gc.collect()
    assert index() is None
    assert graph_ref() is None


def test_findings_of_another_graph_add_no_sites(case):
    """The fused program is searched with the same findings at hand: their nodes are not its own."""
    other = trace(mlp, *mlp_args(2))
    assert all(row.name[0] in "n%" for row in search(other, case.findings, "layer").rows)


def test_a_query_calls_few_functions_for_each_text(stack):
    index = SearchIndex(stack.graph, stack.findings)
    for texts in (index._names, index._texts, index._labels, index._where):
        texts *= 2_000 // len(index) + 1
    for text in ("tanh", "layer_2 dot_general f32[4", "no such thing", "e a"):
        profile = cProfile.Profile()
        profile.runcall(index.find, text)
        calls = sum(entry.callcount for entry in profile.getstats())
        assert calls < 8 * len(index), f"{text!r}: {calls} calls over {len(index)} texts"


def test_an_operation_that_a_word_names_comes_before_those_that_have_it_in_a_text():
    def model(x):
        expected = jnp.reshape(x, (4, 2))  # the line has "exp" in it
        return jnp.exp(expected)

    graph = trace(model, jnp.ones(8))
    labels = [row.label for row in search(graph, None, "exp").rows]
    assert [label.split()[0] for label in labels] == ["exp", "reshape"]
