"""Rows 13, 14, 15 and 58: what the search finds, declines, and says."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import fusionlab as fl
from tests.asked import by_default

from .reference import uniform

X, W, B = (jnp.asarray(a, jnp.float32) for a in uniform((8, 4), (4, 12), (12,)))
PASS = "gemm_epilogue"


def fused_nodes(found):
    return [n.params["activation"] for n in found.apply().nodes() if n.primitive == PASS]


def test_row_13_a_returned_preactivation_leaves_linear_only_and_a_read_product_leaves_nothing():
    def returns_preactivation(x, w, b):
        h = x @ w + b
        return jax.nn.relu(h), h

    found = fl.find(returns_preactivation, X, W, B, passes=PASS)
    assert fused_nodes(found) == ["none"]
    (reason,) = found.rejections
    assert reason.code == "escapes"
    assert "add (test_find_rows.py:" in reason.sentence
    assert reason.sentence.endswith("is also returned")

    def reads_preactivation(x, w, b):
        h = x @ w + b
        return jax.nn.relu(h).sum() + jnp.sort(h)[0].sum()

    found = fl.find(reads_preactivation, X, W, B, passes=PASS)
    assert fused_nodes(found) == ["none"]
    assert "is also read by" in found.rejections[0].sentence
    assert "= sort (test_find_rows.py:" in found.rejections[0].sentence  # the consumer, by name and line

    def reads_product(x, w, b):
        y = x @ w
        return jax.nn.relu(y + b), y.sum()

    found = fl.find(reads_product, X, W, B, passes=PASS)
    assert (found.candidates, fused_nodes(found)) == ((), [])
    assert [r.code for r in found.rejections] == ["escapes"]
    assert "= reduce_sum (test_find_rows.py:" in found.rejections[0].sentence

    for fn in (returns_preactivation, reads_preactivation, reads_product):
        for got, want in zip(jax.tree.leaves(fl.fuse(fn)(X, W, B)), jax.tree.leaves(fn(X, W, B)), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_row_14_bias_on_either_side_and_contraction_by_dimension_numbers_give_the_same_group():
    contract = (((1,), (0,)), ((), ()))
    forms = [
        lambda x, w, b: x @ w + b,
        lambda x, w, b: b + x @ w,
        lambda x, w, b: jnp.einsum("mk,kn->mn", x, w) + b,
        lambda x, w, b: b + jnp.einsum("kn,mk->mn", w, x),
        lambda x, w, b: lax.dot_general(x, w, contract) + b,
        lambda x, w, b: jnp.tensordot(x, w, 1) + b[None, :],
        lambda x, w, b: b + lax.dot_general(w, x, (((0,), (1,)), ((), ()))).T,
        lambda x, w, b: jax.vmap(lambda row: b + row @ w)(x),
    ]
    want = np.maximum(np.asarray(X, np.float64) @ np.asarray(W, np.float64) + np.asarray(B, np.float64), 0)
    for form in forms:
        fn = lambda x, w, b, form=form: jax.nn.relu(form(x, w, b))  # noqa: E731
        found = fl.find(fn, X, W, B, passes=PASS)
        (site,) = found.candidates
        assert not found.rejections
        inputs = [v.id for v in found.graph.top.inputs]
        assert {role: inputs.index(v.id) for role, v in site.leaves.items()} == {"x": 0, "w": 1, "b": 2}
        assert (site.formula, site.attrs["activation"]) == ("relu(x @ w + b)", "relu")
        np.testing.assert_allclose(fl.fuse(fn)(X, W, B), want, rtol=0, atol=1e-6)


def test_row_15_two_models_in_two_threads_give_the_same_counts_and_a_fused_graph_gives_none():
    def first(x):
        return jax.nn.relu(jax.nn.gelu(x @ W + B) @ W.T)

    def second(x):
        q = jnp.einsum("mk,hkd->mhd", x, W.reshape(4, 3, 4).swapaxes(0, 1))
        return jnp.einsum("hts,shd->thd", jax.nn.softmax(jnp.einsum("thd,shd->hts", q, q)), q)

    none = {p.name + grad: n for p in by_default() for grad, n in (("", 0), ("_grad", "runs under jax.grad"))}
    want = {first: none | {PASS: 2}, second: none | {"dot_product_attention": 1}}
    barrier = threading.Barrier(4)
    seen: dict = {first: [], second: []}

    def search(fn):
        barrier.wait()
        for _ in range(2):
            fused = fl.fuse(fn)
            seen[fn].append((fl.find(fn, X).counts(), fl.find(fused, X).counts(), np.asarray(fused(X))))

    threads = [threading.Thread(target=search, args=(fn,)) for fn in (first, second) * 2]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for fn, counts in want.items():
        assert len(seen[fn]) == 4
        for before, after, out in seen[fn]:
            assert before == counts
            assert after == none
            np.testing.assert_allclose(out, fn(X), rtol=1e-5, atol=1e-6)
    found = fl.find(first, X)
    assert fl.find(found.apply()).counts() == none


def test_row_58_every_candidate_is_accepted_or_rejected_with_a_reason_in_order_and_zero_is_said():
    def near_misses(x, w, b, y):
        with jax.named_scope("leaky"):
            first = jax.nn.leaky_relu(x @ w + b)
        with jax.named_scope("rows"):
            second = x @ w + b[:8, None]
        with jax.named_scope("full"):
            third = x @ w + y
        with jax.named_scope("weights_over_queries"):
            q = x.reshape(8, 1, 4)
            p = jax.nn.softmax(jnp.einsum("thd,shd->hts", q, q), axis=1)
            fourth = jnp.einsum("hts,shd->thd", p, q)
        return first, second, third, fourth

    y = jnp.ones((8, 12))
    found = fl.find(near_misses, X, W, B, y)
    declined = {(r.pass_name, r.scope): r for r in found.rejections}
    assert {key: r.code for key, r in declined.items()} == {
        (PASS, "leaky"): "activation",
        (PASS, "rows"): "bias",
        (PASS, "full"): "bias",
        ("dot_product_attention", "weights_over_queries"): "axes",
    }
    for rejection in found.rejections:  # each names the node that failed first, and its line
        guilty = found.graph.node_by_id[rejection.node_ids[0]]
        assert guilty.outputs[0].name in rejection.sentence
        assert f"{guilty.primitive} (test_find_rows.py:{guilty.source.line})" in rejection.sentence
        assert rejection.scope == guilty.scope
    assert [c.id for c in found.candidates] == ["gemm_epilogue@leaky#1"]  # the linear part of the first
    # passes in priority order, one line each, reasons counted, zero said
    before, after = found.graph.node_count, found.apply().node_count
    assert str(found).splitlines()[:2] == [
        f"gemm_epilogue: 1 subgraph can be fused, 3 declined (activation, bias x2), nodes {before} -> {after}",
        f"dot_product_attention: 0 subgraphs can be fused, 1 declined (axes), nodes {before} -> {before}",
    ]
    assert all(r.sentence in str(found) for r in found.rejections)
    nothing = fl.find(lambda x: jnp.sin(x), X)
    assert {p.name: nothing.counts()[p.name] for p in by_default()} == {p.name: 0 for p in by_default()}
    assert str(nothing).count(": 0 subgraphs can be fused, 0 declined, nodes 1 -> 1") == len(by_default())
