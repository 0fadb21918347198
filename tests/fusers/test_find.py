"""The search and its report: counts for every pass asked, stable ids, reasons, explanations, exports, strategies."""

from __future__ import annotations

import html
import json
import re
import threading
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab.errors import ArgumentError, TraceError, UnknownNameError
from fusionlab.fusers.engine.base import Pass
from fusionlab.fusers.engine.declining import reject
from fusionlab.fusers.engine.overlaps import settle
from fusionlab.fusers.find import _number, find_in
from fusionlab.fusers.registry import _built_in, registry
from tests.asked import by_name, counts

from .checks import forward_counts, normal, primitives

X, W, B = normal((6, 8), (8, 8), (8,))
PASSES = tuple(by_name())


def model(x):
    with jax.named_scope("encoder"):
        for i in range(2):
            with jax.named_scope(f"layer_{i}"):
                x = jax.nn.relu(x @ W + B)
                x = jnp.tanh(x @ W + B)
        q = x.reshape(6, 2, 4)
        p = jax.nn.softmax(jnp.einsum("thd,shd->hts", q, q))
    with jax.named_scope("head"):
        return jnp.einsum("hts,shd->thd", p, q), jax.nn.leaky_relu(x @ W + B)


@pytest.fixture(scope="module")
def found():
    return fl.find(model, X)


# -- counts, lines, ids -----------------------------------------------------------------------------------------------


def test_counts_have_every_pass_asked_even_at_zero():
    nothing = fl.find(lambda x: jnp.sin(x), X)
    assert {name: n for name, n in nothing.counts().items() if name in PASSES} == dict.fromkeys(PASSES, 0)
    assert forward_counts(fl.find(lambda x: jnp.sin(x), X, passes="gemm_epilogue")) == {"gemm_epilogue": 0}
    assert str(nothing).splitlines() == [
        f"{name}: 0 subgraphs can be fused, 0 declined, nodes 1 -> 1" for name in PASSES
    ]


def test_the_report_has_one_line_a_pass_with_reasons_and_node_counts(found):
    first, second, *_ = str(found).splitlines()
    before, one, other = found.graph.node_count, found.apply(["gemm_epilogue"]), found.apply(["dot_product_attention"])
    assert (
        first == f"gemm_epilogue: 5 subgraphs can be fused, 1 declined (activation), nodes {before} -> {one.node_count}"
    )
    assert second == f"dot_product_attention: 1 subgraph can be fused, 0 declined, nodes {before} -> {other.node_count}"
    assert one.node_count < before
    assert other.node_count < before


def test_below_the_lines_stands_why_sites_were_declined_where_and_what_to_edit(found):
    (r,) = found.rejections
    assert str(found).splitlines()[len(found.passes) :] == [
        "declined:",
        f"  [activation] {r.id} at {r.source}: {r.sentence}",
        f"    edit: {r.edit}",
    ]


def test_alike_reasons_are_said_once_with_their_number_and_long_lists_are_cut():
    def layers(x):
        for _ in range(12):
            x = jax.nn.leaky_relu(x @ W + B)
        return x

    found = fl.find(layers, X, passes="gemm_epilogue")
    assert len(found.rejections) == 12
    heading, reason, edit = str(found).splitlines()[1:]
    assert heading == "declined:"
    assert reason.startswith("  [activation] 12 sites, gemm_epilogue@#2 and more at test_find.py:")
    assert edit == f"    edit: {found.rejections[0].edit}"

    different = [replace(found.rejections[0], sentence=f"reason {n}") for n in range(15)]  # of two lines each
    found = replace(found, rejections=tuple(different))
    lines = str(found).splitlines()[2:]
    assert len(lines) == 21
    assert lines[18].endswith("reason 9")
    assert lines[20] == "  ... and 5 more: found.rejections"
    assert all(r.sentence in found.report() for r in found.rejections)


def test_a_report_says_which_backend_each_candidate_would_run_on_and_why():
    passes = ["gemm_epilogue", "layer_norm"]
    here, there = (fl.find(model, X, passes=passes, device=d).report() for d in (None, "sm_90"))
    assert "declined:" in here
    start = here.splitlines().index(f"backends on {fl.Device.current()}:")
    sites = here.splitlines()[start + 1 :]
    assert any(
        line.startswith("  2 sites, gemm_epilogue@encoder/layer_0#1 and more at test_find.py:") for line in sites
    )
    assert any("relu(x @ w + b) -> xla (same code): what XLA runs anyway" in line for line in sites)
    assert "backends on a CUDA sm_90 device (simulated):" in there
    before = there.splitlines()[: start + 1]
    assert [line for line in before if "wait for fl.tune" not in line] == here.splitlines()[:start]


def test_no_passes_asked_is_said():
    assert str(fl.find(model, X, passes=[])) == "no passes requested"


def test_a_reason_met_twice_is_counted():
    def two(x):
        return jax.nn.leaky_relu(x @ W + B), jax.nn.softplus(x @ W - B), jnp.sin(x @ W + B)

    assert "3 declined (activation x2, bias)" in str(fl.find(two, X, passes="gemm_epilogue"))


def test_ids_are_pass_scope_and_ordinal_in_program_order(found):
    assert [x.id for x in (*found.candidates, *found.rejections)] == [
        "gemm_epilogue@encoder/layer_0#1",
        "gemm_epilogue@encoder/layer_0#2",
        "gemm_epilogue@encoder/layer_1#1",
        "gemm_epilogue@encoder/layer_1#2",
        "dot_product_attention@head#1",
        "gemm_epilogue@head#1",
        "gemm_epilogue@head#2",
    ]
    assert found.candidates[0].scope == "encoder/layer_0"


def test_ids_are_unique_and_the_same_on_every_search(found):
    ids = [x.id for x in (*found.candidates, *found.rejections)]
    assert len(set(ids)) == len(ids) == 7
    jax.clear_caches()
    again = fl.find(model, X)
    assert [x.id for x in (*again.candidates, *again.rejections)] == ids
    only = fl.find(model, X, passes="gemm_epilogue")
    assert [c.id for c in only.candidates] == [c.id for c in found.candidates if c.pass_name == "gemm_epilogue"]


def test_a_rejection_and_a_candidate_of_one_scope_are_numbered_together():
    def fn(x):
        a = x @ W
        return jax.nn.relu(a + B) + jnp.sum(a), jax.nn.relu(x @ (2 * W) + B)

    found = fl.find(fn, X, passes="gemm_epilogue")
    assert [r.id for r in found.rejections] == ["gemm_epilogue@#1"]
    assert [c.id for c in found.candidates] == ["gemm_epilogue@#2"]


def test_a_site_is_looked_up_by_id_and_a_wrong_id_lists_the_valid_ones(found):
    site = found.candidates[0]
    assert found[site.id] is site
    assert found[found.rejections[0].id] is found.rejections[0]
    with pytest.raises(UnknownNameError, match=r"unknown site 'gemm_epilogue@encoder/layer_0#9'.*Did you mean"):
        found["gemm_epilogue@encoder/layer_0#9"]


def test_every_rejection_code_has_a_sentence():
    from fusionlab.errors import REJECTIONS

    assert all(text and not text.endswith(".") for text in REJECTIONS.values())


# -- selection --------------------------------------------------------------------------------------------------------


def test_sites_are_selected_by_id_and_by_pass(found):
    ids = [c.id for c in found.candidates]
    assert [c.id for c in found.select()] == ids
    assert [c.id for c in found.select([ids[1]])] == [ids[1]]
    assert [c.id for c in found.select(skip=[ids[0], "dot_product_attention"])] == [
        i for i in ids[1:] if i.startswith("gemm")
    ]
    assert found.select([]) == ()
    assert [c.pass_name for c in found.select(["dot_product_attention"])] == ["dot_product_attention"]
    with pytest.raises(UnknownNameError, match="unknown site or pass 'gemm_epilogues'"):
        found.select(["gemm_epilogues"])
    assert found.select("dot_product_attention") == found.select(["dot_product_attention"])
    assert found.select(skip="gemm_epilogue") == found.select(["dot_product_attention"])


def test_applying_everything_leaves_one_named_node_a_site(found):
    graph = found.apply()
    names = primitives(graph)
    assert names.count("gemm_epilogue") == 5
    assert names.count("dot_product_attention") == 1
    assert isinstance(graph, fl.Graph)
    assert graph.in_names == found.graph.in_names


# -- overlap ----------------------------------------------------------------------------------------------------------


def test_where_sites_overlap_the_larger_wins_and_the_smaller_names_it(found):
    a, b = found.candidates[0], found.candidates[1]
    larger = replace(a, node_ids=a.node_ids | b.node_ids, nodes_before=99, formula="both layers", pass_name="other")
    candidates, rejections = _number(*settle([b, larger]))
    (winner,), (loser,) = candidates, rejections
    assert winner.formula == "both layers"
    assert (loser.code, loser.winner) == ("overlap", winner.id)
    assert "shares nodes with both layers of other, which is larger" in loser.sentence
    assert set(loser.node_ids) == set(b.node_ids)


# -- explanations -----------------------------------------------------------------------------------------------------


def test_a_node_of_a_site_is_explained_with_backends_and_residuals(found):
    site = found.candidates[0]
    node = found.graph.node_by_id[min(site.node_ids)]
    for handle in (node, node.id, node.outputs[0].name, site.id):
        text = found.explain(handle)
        assert site.id in text
        assert "relu(x @ w + b)" in text
        assert "backend xla: same code, what XLA runs anyway" in text
        assert "saves mask bool[6, 8], 48 bytes, read by dx, dw, dbias" in text


def test_a_declined_site_is_explained_with_reason_distance_and_edit(found):
    (rejection,) = found.rejections
    text = found.explain(rejection.id)
    assert "declined [activation]" in text
    assert "not a known activation" in text
    assert f"({rejection.matched} of {rejection.total} matched)" in text
    assert "Edit: use relu, gelu" in text
    assert found.explain(rejection.node_ids[0]).count("declined [activation]") == 1


def test_a_node_in_no_site_says_which_passes_were_asked():
    found = fl.find(lambda x: jnp.sin(x), X)
    assert found.explain("%1").splitlines()[1] == (
        f"  in no site: none of the requested passes ({', '.join(PASSES)}) has its anchor here"
    )


@pytest.mark.parametrize(
    ("what", "message"),
    [("%999", "no node makes %999"), (12345, "needed a value"), (None, "needed a value"), ("sin", "needed a value")],
)
def test_what_cannot_be_explained_says_what_can(found, what, message):
    with pytest.raises(ArgumentError, match=message):
        found.explain(what)


# -- exports ----------------------------------------------------------------------------------------------------------


def test_the_report_is_plain_json_that_round_trips(found):
    data = json.loads(found.to_json())
    assert data == json.loads(json.dumps(found.to_dict()))
    forward = counts(gemm_epilogue=5, dot_product_attention=1)
    assert data["counts"] == forward | {f"{name}_grad": "runs under jax.grad" for name in forward}
    assert data["passes"] == list(PASSES)
    assert data["lines"] == [found.line(p) for p in found.passes]
    assert data["jax"] == jax.__version__
    assert {c["id"] for c in data["candidates"]} == {c.id for c in found.candidates}
    assert data["rejections"][0]["code"] == "activation"
    assert data["rejections"][0]["source"].startswith("test_find.py:")
    assert set(data["seconds"]) == {"canonicalise", *PASSES}
    assert all(s >= 0 for s in data["seconds"].values())


def test_the_table_has_one_row_a_candidate_and_a_rejection(found):
    table = found.to_dataframe()
    assert len(table) == 7
    assert list(table.state) == ["candidate"] * 6 + ["declined"]
    assert table[table.state == "declined"].code.tolist() == ["activation"]
    assert table.formula.tolist()[0] == "relu(x @ w + b)"
    assert table.backend.tolist()[0] == "xla"
    assert table.backends[0].startswith("xla: same code, what XLA runs anyway")
    assert table.notes.tolist()[5].startswith("linear part only: ")


def test_the_repr_is_one_line(found):
    assert repr(found) == "<Findings model: 6 can be fused, 1 declined>"
    assert str(found.candidates[0]).startswith("gemm_epilogue@encoder/layer_0#1: relu(x @ w + b) (test_find.py:")


@pytest.fixture(scope="module")
def hostile():
    """A declined site whose sentence and edit hold what HTML takes for markup."""
    found = fl.find(lambda x, y: jax.nn.relu(x @ W + y), X, X)
    (r,) = found.rejections
    return replace(found, rejections=(replace(r, sentence="a <b> & 'c'", edit='use "<jax.nn>"'),))


def test_a_rejection_is_the_same_as_text_as_data_and_as_html(hostile, tmp_path):
    (r,) = hostile.rejections
    data = r.to_dict()
    assert json.loads(json.dumps(data)) == data == hostile.to_dict()["rejections"][0]
    assert (data["code"], data["sentence"], data["edit"]) == ("bias", r.sentence, r.edit)
    assert data["nodes"] == list(r.node_ids)
    assert set(data["nodes"]) <= set(data["site"]) == r.site_ids
    assert f"declined [bias]: {r.sentence} (1 of 2 matched) Edit: {r.edit}" in str(r)
    for page in (hostile._repr_html_(), hostile.to_html(tmp_path / "found.html")):
        words = html.unescape(re.sub(r"<[^>]*>", " ", page))
        for part in (
            "bias (1): the added term is no",
            r.sentence,
            "(1 of 2 matched)",
            f"Edit: {r.edit}",
            str(r.source),
        ):
            assert " ".join(part.split()) in " ".join(words.split()), part
        assert "<b>" not in page
    assert (tmp_path / "found.html").read_text(encoding="utf-8") == hostile.to_html()


def test_a_candidate_is_plain_data_of_its_own(found):
    site = found.candidates[0]
    data = site.to_dict()
    assert json.loads(json.dumps(data)) == json.loads(found.to_json())["candidates"][0]
    assert (data["id"], data["formula"], data["nodes"]) == (site.id, "relu(x @ w + b)", sorted(site.node_ids))


# -- passes and strategies --------------------------------------------------------------------------------------------


def test_a_misspelt_pass_lists_the_valid_ones_and_suggests_the_near_one():
    with pytest.raises(UnknownNameError) as caught:
        fl.find(model, X, passes=["gemm_epilog"])
    names = [p.name for p in fl.passes()] + [f"{p.name}_grad" for p in fl.passes() if not p.forward_only]
    assert str(caught.value) == (
        f"unknown pass 'gemm_epilog'; valid: {', '.join(sorted(names))}. Did you mean 'gemm_epilogue'?"
    )
    with pytest.raises(UnknownNameError, match="unknown pass 'attention'"):
        fl.fuse(model, passes="attention")


def test_a_misspelt_option_lists_the_valid_ones():
    with pytest.raises(
        UnknownNameError, match=r"unknown option of pass gemm_epilogue 'strict'; valid: grouping, strict_rank"
    ):
        fl.find(model, X, passes=fl.Strategy(gemm_epilogue={"strict": True}))


def test_passes_are_asked_in_the_registrys_order_however_they_are_named():
    assert fl.find(model, X, passes=["dot_product_attention", "gemm_epilogue"]).passes == PASSES[:2]
    assert fl.find(model, X, passes="dot_product_attention").passes == ("dot_product_attention",)
    assert fl.find(model, X, passes=fl.Strategy(dot_product_attention=True, gemm_epilogue=False)).passes == (
        "dot_product_attention",
    )
    assert fl.find(model, X, passes=[]).passes == ()


def test_an_option_reaches_its_pass():
    def layer(x, w):
        return jax.nn.relu(x @ w + B)

    for strict, count in ((False, 1), (True, 0)):
        strategy = fl.Strategy(gemm_epilogue={"strict_rank": strict})
        assert forward_counts(fl.find(layer, X[None], W[None], passes=strategy)) == {"gemm_epilogue": count}


def test_a_strategy_round_trips_through_json_and_is_frozen():
    strategy = fl.Strategy(gemm_epilogue={"strict_rank": True}, dot_product_attention=False)
    again = fl.Strategy.from_json(strategy.to_json())
    assert dict(again) == dict(strategy)
    assert hash(again) == hash(strategy)
    assert repr(strategy) == "Strategy(gemm_epilogue={'strict_rank': True}, dot_product_attention=False)"
    with pytest.raises(AttributeError, match="frozen"):
        strategy.gemm_epilogue = False


@pytest.mark.parametrize("bad", ["[1, 2]", "not json", '{"gemm_epilogue": 3}'])
def test_what_is_no_strategy_is_refused(bad):
    with pytest.raises(ArgumentError, match="Strategy"):
        fl.Strategy.from_json(bad)


def test_the_list_of_passes_has_formula_needs_and_a_working_sample():
    passes = list(fl.passes())
    order = [p.name for p in passes]
    first = [
        order.index(name)
        for name in ("gemm_epilogue", "dot_product_attention", "layer_norm", "lerp", "matmul_schedule")
    ]
    assert first == sorted(first)
    places = [place for place, _ in _built_in()]
    assert len(set(places)) == len(places)
    for pass_ in passes:
        fn, args = pass_.sample()
        device, options = pass_.sample_for
        asked = fl.Strategy(**{pass_.name: dict(options)})
        assert forward_counts(fl.find(fn, *args, passes=asked, device=device)) == {pass_.name: 1}
        assert pass_.formula
        assert pass_.needs


# -- what is searched -------------------------------------------------------------------------------------------------


def test_a_graph_traced_before_is_searched_as_it_is():
    graph = fl.trace(model, X)
    assert fl.find(graph).counts() == fl.find(model, X).counts()
    with pytest.raises(ArgumentError, match="already traced"):
        fl.find(graph, X)


def test_shapes_alone_are_enough():
    assert forward_counts(fl.find(model, jax.ShapeDtypeStruct((6, 8), jnp.float32))) == {
        "gemm_epilogue": 5,
        "dot_product_attention": 1,
        "layer_norm": 0,
    }


def test_a_function_that_does_not_trace_is_one_clear_error():
    with pytest.raises(TraceError, match="model does not trace"):
        fl.find(model, X.T)


def test_sites_inside_a_users_custom_rule_are_declined_by_name():
    @jax.custom_vjp
    def own(x):
        return jax.nn.relu(x @ W + B)

    own.defvjp(lambda x: (own(x), x), lambda x, ct: (ct,))
    found = fl.find(lambda x: own(x) * 2.0, X)
    assert not found.candidates
    assert [r.code for r in found.rejections] == ["custom_rule"]
    assert "custom_vjp_call" in found.rejections[0].sentence
    assert "derivative is the user's own" in found.rejections[0].sentence


def test_a_simulated_device_only_changes_what_backends_say():
    here, there = fl.find(model, X), fl.find(model, X, device="sm_90")
    attention = {"dot_product_attention", "dot_product_attention_grad"}
    assert {n: c for n, c in here.counts().items() if n not in attention} == {
        n: c for n, c in there.counts().items() if n not in attention
    }
    # No kernel takes heads of 4 features: the attention stays as it is written there.
    assert [r.code for r in there.rejections if r.pass_name in attention and r not in here.rejections] == ["device"]
    assert "sm_90" in there.device
    assert "simulated" in there.device
    with pytest.raises(ArgumentError, match="needed None, 'cpu', 'sm_NN'"):
        fl.find(model, X, device="h101")


def test_a_named_implementation_asks_only_the_passes_that_have_it():
    found = fl.find(model, X, implementation="xla_blockwise")
    assert forward_counts(found) == {"gemm_epilogue": 0, "dot_product_attention": 1, "layer_norm": 0}
    (note,) = found.notes
    assert note.startswith("implementation='xla_blockwise': nothing fused for gemm_epilogue")
    assert f"note: {note}" in str(found).splitlines()
    assert fl.find(model, X, implementation="xla").notes == ()
    nothing = fl.fuse(lambda x: jax.nn.relu(x @ W + B), implementation="xla_blockwise").findings(X)
    assert nothing.notes[1] == "implementation='xla_blockwise' runs nowhere: no site was found that has it"
    with pytest.raises(UnknownNameError, match="unknown implementation 'xla_blockwize'"):
        fl.find(model, X, implementation="xla_blockwize")


def test_two_threads_with_two_models_find_the_same_as_one():
    def other(x):
        return jax.nn.gelu(x @ W + B)

    want = {model: fl.find(model, X).counts(), other: fl.find(other, X).counts()}
    got: dict = {}

    def search(fn):
        got[fn] = [fl.find(fn, X).counts() for _ in range(3)]

    threads = [threading.Thread(target=search, args=(fn,)) for fn in want]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert got == {fn: [counts] * 3 for fn, counts in want.items()}


class _NoPass:
    name = "gemm_epilogue"


def test_a_registered_pass_must_be_whole_and_new():
    with pytest.raises(ArgumentError, match=r"_NoPass lacks op, formula, needs, options, sample, search"):
        fl.register(_NoPass())
    with pytest.raises(ArgumentError, match="a pass named 'gemm_epilogue' exists already"):
        fl.register(registry()["gemm_epilogue"])


class _Sines(Pass):
    """Declines every sine: the smallest pass there is."""

    name, op, formula, needs = "sines", "gemm_epilogue", "sin(x)", "nothing"

    def sample(self):
        return jnp.sin, (X,)

    def search(self, search):
        for node in search.block.nodes:
            if node.primitive == "sin":
                yield reject(self.name, "structure", "a sine", node, [node], [node])


def test_a_pass_of_ones_own_is_asked_like_the_built_in_ones():
    graph = fl.trace(lambda x: jnp.sin(jnp.sin(x)) + 1.0, X)
    found = find_in(graph, [(_Sines(), {})], fl.Device.current())
    assert [r.id for r in found.rejections] == ["sines@#1", "sines@#2"]
    assert str(found).splitlines()[0] == "sines: 0 subgraphs can be fused, 2 declined (structure x2), nodes 3 -> 3"
    assert str(found).splitlines()[2].startswith("  [structure] 2 sites, sines@#1 and more at test_find.py:")


def test_a_value_that_no_node_makes_is_explained_too():
    found = fl.find(
        lambda params, x: jax.lax.scan(lambda h, w: (jax.nn.relu(h @ w), None), x, params["w"])[0], {"w": W[None]}, X
    )
    assert "the argument params['w']" in found.explain("%0")
    assert "read by" in found.explain("%0")
    body = next(b for b in found.graph.blocks() if b.path)
    assert f"given to {body.path}" in found.explain(body.inputs[0].name)
    with pytest.raises(ArgumentError, match="no node makes %999"):
        found.explain("%999")


def test_the_edit_in_a_scan_of_a_differentiated_program_is_to_fuse_first():
    def loss(w, x):
        return jax.lax.scan(lambda h, v: (jax.nn.gelu(h @ v), None), x, w)[0].sum()

    def either(w, x):  # a backward pass in another branch than its forward is not replaced
        return jax.lax.cond(x[0, 0] > 0, loss, lambda w, x: x.sum(), w, x)

    found = fl.find(jax.grad(either), jnp.stack([W, W, W]), X)
    edits = {r.edit for r in found.rejections if r.code == "escapes"}
    assert edits == {"fuse the function before it is differentiated: jax.grad(fl.fuse(loss))"}


def test_what_the_user_returns_from_a_differentiated_program_is_not_blamed_on_the_backward_pass():
    def loss(w):
        h = X @ w + B
        return jax.nn.relu(h).sum(), h

    found = fl.find(lambda w: jax.value_and_grad(loss, has_aux=True)(w)[0], W)
    (declined,) = [r for r in found.rejections if r.code == "escapes"]
    assert declined.sentence.endswith("is also returned")
    assert "jax.grad(fl.fuse(loss))" not in declined.edit
