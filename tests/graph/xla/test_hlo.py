"""What XLA made of a program, by its nodes: exact where the nodes' numbers went through the compiler, and those change nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex_core

import fusionlab as fl
from benchmarks.search.xla_mapping import SHARE, Outcome, outcome, share, total, zoo
from fusionlab.evidence.instruments.instructions import code_of
from fusionlab.graph.program.trace import block_of_jaxpr, trace
from fusionlab.graph.rewriting.rewrite import to_jaxpr
from fusionlab.graph.xla.modules import compiled_text, metadata_of_its_own, read_hlo, xla_view
from fusionlab.graph.xla.tagging import tag_in, tagged_graph, tagged_jaxpr

W, B, X = jnp.ones((16, 16)), jnp.ones(16), jnp.ones((8, 16))


def mlp(x, w, b):
    h = jnp.tanh(x @ w + b)
    return jnp.sin(h @ w) * 2


def nested(x, w, b):
    @jax.jit
    def layer(x):
        return jnp.tanh(x @ w + b)

    return layer(layer(x))  # one jaxpr, called twice


def scanned(x, w, b):
    def body(c, _):
        return jnp.tanh(c @ w + b), jnp.sum(c)

    return jax.lax.scan(jax.checkpoint(body), x, None, length=3)


def looped(x, w, b):
    return jax.lax.while_loop(lambda c: jnp.sum(c) > 1, lambda c: jnp.tanh(c @ w + b) * 0.001, x)


def branched(x, w, b):
    return jax.lax.cond(x[0, 0] > 0, lambda x: jnp.tanh(x @ w), lambda x: jnp.sin(x) + b, x)


def grad_of_all(x, w, b):
    return jax.value_and_grad(lambda w: jnp.sum(mlp(scanned(x, w, b)[0], w, b) ** 2))(w)


@jax.custom_vjp
def own(x):
    return jnp.sin(x) * 3


own.defvjp(lambda x: (own(x), x), lambda x, g: (g * jnp.cos(x) * 3,))


def with_own_rule(x, w, b):
    return jax.grad(lambda x: jnp.sum(own(x @ w) + jax.nn.silu(b)))(x), own(x)


PROGRAMS = (mlp, nested, scanned, looped, branched, grad_of_all, with_own_rule)


def fusion_of(view, node):
    """The first fusion that computes (a part of) a node."""
    return next(k for k in view.kernels_of(node) if k.kind == "fusion" and not k.inferred)


def plain_text(fn, *args):
    with metadata_of_its_own():
        return jax.jit(fn).lower(*args).compile().as_text()


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda f: f.__name__)
def test_the_numbers_change_no_instruction(fn):
    graph = trace(fn, X, W, B)
    text = compiled_text(tagged_jaxpr(graph), graph)
    assert "fusionlab.n" in text
    assert code_of(text) == code_of(plain_text(fn, X, W, B))


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda f: f.__name__)
def test_every_equation_gets_the_number_of_its_own_node_and_computes_the_same(fn):
    graph = trace(fn, X, W, B)
    tagged = tagged_jaxpr(graph)
    again = {n.id: n for n in block_of_jaxpr(tagged).nodes}
    assert [n.primitive for n in again.values()] == [n.primitive for n in graph.top.nodes]
    assert [tag_in(str(n.eqn.source_info.name_stack)) for n in again.values()] == [n.id for n in graph.top.nodes]
    results = jex_core.jaxpr_as_fun(tagged)(X, W, B)
    for got, want in zip(results, jax.tree.leaves(jax.jit(fn)(X, W, B)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4)  # one is run equation by equation, the other as one program


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda f: f.__name__)
def test_a_kernel_computes_what_its_nodes_compute(fn):
    """By XLA's own instruction names, which begin with the primitive or the opcode: tanh.5 is in a kernel of a tanh node, and so on."""
    graph = trace(fn, X, W, B)
    view = read_hlo(compiled_text(tagged_jaxpr(graph), graph), graph)
    assert view.tagged
    assert all(k.nodes and k.sources for k in view.kernels if k.kind in ("fusion", "library"))
    made = {graph.node_by_id[i].primitive for k in view.kernels if not k.inferred for i in k.nodes}
    assert {n.primitive for n in graph.nodes()} & {"tanh", "sin", "cos", "dot_general", "scan", "while", "cond"} <= made
    for kernel in view.kernels:
        primitives = {graph.node_by_id[i].primitive for i in kernel.nodes}
        assert kernel.kind != "library" or "dot_general" in primitives
        assert kernel.target != "while" or primitives <= {"scan", "while"}


def test_a_node_says_what_became_of_it():
    view = xla_view(mlp, X, W, B)
    by = {}
    for node in view.graph.nodes():
        by.setdefault(node.primitive, []).append(node)
    tanh, sin, bias = by["tanh"][0], by["sin"][0], by["broadcast_in_dim"][0]
    fusion = fusion_of(view, tanh)
    assert fusion is not None
    assert fusion.kind == "fusion"
    assert fusion_of(view, sin) != fusion, "a product stands between them"
    assert {view.graph.node_by_id[i].primitive for i in fusion.nodes} >= {"add", "tanh"}
    assert view.fate(tanh).startswith(f"in {fusion.name} (fusion, kLoop) with ")
    assert fusion in view.kernels_of(tanh, sin)
    assert len(view.kernels_of(*view.graph.nodes())) == view.launches == sum(view.counts.values())
    assert all(s.text for s in fusion.sources)
    assert any("tanh(x @ w + b)" in s.text for s in fusion.sources)
    lost = [n for n in view.graph.nodes() if not view.kernels_of(n)]
    assert all(view.fate(n).startswith(("removed", "no kernel of its own")) for n in lost)
    assert bias in lost or view.kernels_of(bias)


def test_what_is_folded_away_is_said_to_be():
    view = xla_view(lambda x: x * 1 + jnp.transpose(jnp.transpose(x)), X)
    transposes = [n for n in view.graph.nodes() if n.primitive == "transpose"]
    assert transposes
    assert all(view.kernels_of(n) == () for n in transposes)
    assert all(re.match("removed: folded|no kernel of its own: ", view.fate(n)) for n in transposes)


def test_two_calls_of_one_jitted_function_are_told_apart():
    view = xla_view(nested, X, W, B)
    first, second = (n for n in view.graph.nodes() if n.primitive == "tanh")
    assert {first.id} == {i for i in fusion_of(view, first).nodes if view.graph.node_by_id[i].primitive == "tanh"}
    assert fusion_of(view, first) != fusion_of(view, second)


def test_the_kernels_of_a_loop_are_those_of_the_nodes_inside_and_it_is_none_itself():
    view = xla_view(scanned, X, W, B)
    (scan,) = (n for n in view.graph.nodes() if n.primitive == "scan")
    (tanh,) = (n for n in view.graph.nodes() if n.primitive == "tanh")
    assert view.graph.block_of[tanh.id].path.startswith(f"n{scan.id}.")
    (loop,) = (k for k in view.kernels if k.kind == "loop control")
    assert loop.nodes == (scan.id,)
    assert loop not in view.kernels_of(scan)
    assert "loop control" not in view.counts
    assert fusion_of(view, tanh).computation != loop.computation


def test_what_has_no_metadata_is_for_its_reader():
    graph = trace(mlp, X, W, B)
    text = compiled_text(tagged_jaxpr(graph), graph)
    (first, _) = (n for n in graph.nodes() if n.primitive == "dot_general")
    bare = "\n".join(
        re.sub(r", metadata=\{[^}]*\}", "", line) if f"fusionlab.n{first.id}/" in line else line
        for line in text.splitlines()
    )
    assert bare != text
    told, inferred = (next(iter(k for k in read_hlo(t, graph).kernels if k.kind == "library")) for t in (text, bare))
    assert (told.inferred, told.nodes) == (False, (first.id,))
    tanh = next(n for n in graph.nodes() if n.primitive == "tanh")
    assert inferred.inferred
    assert tanh.id in inferred.nodes


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda f: f.__name__)
def test_a_module_without_numbers_is_mapped_by_primitive_line_and_scope(fn):
    graph = trace(fn, X, W, B)
    exact, near = xla_view(graph), read_hlo(plain_text(fn, X, W, B), graph)
    assert (exact.tagged, near.tagged) == (True, False)
    assert near.counts == exact.counts
    known = [(a, b) for a, b in zip(exact.kernels, near.kernels, strict=True) if a.kind in ("fusion", "library")]
    hits = sum(told.inferred or bool(set(told.nodes) & set(found.nodes)) for told, found in known)
    assert [a.name for a, _ in known] == [b.name for _, b in known]
    assert known
    assert hits >= 0.9 * len(known), "a fill that forward and backward share may be told as the other's"


def test_no_text_comes_out_of_the_cache_with_the_numbers_of_another_program(tmp_path):
    """JAX's persistent cache takes programs for equal that differ in metadata only: as written, with our numbers, with others."""
    program = f"""
import jax, jax.numpy as jnp
jax.config.update("jax_compilation_cache_dir", {str(tmp_path)!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
from fusionlab.graph.xla.modules import xla_view
def f(x): return jnp.tanh(x @ x)
x = jnp.ones((8, 8))
jax.jit(f)(x)
print(xla_view(f, x).tagged, jax.config.jax_compilation_cache_include_metadata_in_key)
"""
    env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]
    assert any(tmp_path.iterdir()), "nothing was cached"


def test_a_product_that_xla_transposed_is_still_its_node_s():
    view = xla_view(lambda x, w: (x @ w).T, X, W)
    product, transpose = view.graph.nodes()
    (kernel,) = (k for k in view.kernels if k.kind == "library")
    assert set(kernel.nodes) == {product.id, transpose.id}


def test_a_rewritten_program_has_the_numbers_of_the_sites_it_replaced():
    found = fl.find(lambda x, w, b: jax.nn.relu(x @ w + b) @ w, X, W, B, passes=["gemm_epilogue"])
    (site, *_) = found.candidates
    closed = to_jaxpr(tagged_graph(found.graph), [c.site for c in found.select()])
    assert code_of(compiled_text(closed, found.graph)) == code_of(compiled_text(found.rewritten(), found.graph))
    after = found.xla(fused=True)
    assert after.kernels_of(*site.node_ids)
    assert found.xla() is found.xla()
    of = {k.site: k for k in found.kernels()}
    assert of[site.id].before == found.xla().kernels_of(*site.node_ids)
    assert of[site.id].after == after.kernels_of(*site.node_ids)
    assert f"{site.id}" in found.report(xla=True)
    assert f"XLA kernels, loop bodies counted once: {found.xla().launches} -> {after.launches}" in found.report(
        xla=True
    )
    assert "XLA kernels" not in found.report()


def test_the_findings_table_has_a_column_only_when_asked():
    pytest.importorskip("pandas")
    found = fl.find(mlp, X, W, B)
    assert not [c for c in found.to_dataframe().columns if c.startswith("xla")]
    frame = found.to_dataframe(xla=True)
    for k in found.kernels():
        (row,) = frame[frame.id == k.site].to_dict("records")
        assert (row["xla_fused_into"], row["xla_kernels"]) == (k.into, k.change)
        assert re.match(r"\d+ (fusion|library|unfused) \(", row["xla_fused_into"])


def test_an_idle_site_is_not_fused_and_says_so():
    def norm(x, w, b):
        centred = x - x.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * b + b

    found = fl.find(norm, X, W, B, device="sm_90")
    (site,) = found.candidates
    assert site.idle
    (of,) = found.kernels()
    assert of.before
    assert (of.after, of.change) == (None, f"{len(of.before)} -> not fused")
    assert of.to_dict() == {"site": site.id, "before": [k.name for k in of.before], "after": None}


def test_searching_compiles_nothing(monkeypatch):
    monkeypatch.setattr("fusionlab.fusers.report.findings.xla_view", lambda *_: pytest.fail("compiled"))
    found = fl.find(mlp, X, W, B)
    str(found), found.report(), found.to_dict()


def test_the_view_is_plain_data_and_a_line():
    view = xla_view(mlp, X, W, B)
    data = json.loads(json.dumps(view.to_dict()))
    assert data["counts"] == view.counts
    assert [k["name"] for k in data["kernels"]] == [k.name for k in view.kernels]
    assert repr(view).startswith(f"<Compiled jit_mlp: {view.launches} kernels (")
    assert len(str(view).splitlines()) == len(view.kernels) + 1
    assert "test_hlo.py:" in str(view)


def test_text_that_is_no_hlo_gives_no_kernels():
    view = read_hlo("not a module", trace(mlp, X, W, B))
    assert (view.kernels, view.launches, view.tagged) == ((), 0, False)


ZOO = (
    *("handwritten/swiglu", "attention/causal_tril", "norms/highway_products", "linen/gru", "equinox/mlp_gelu_tanh"),
    *("structured/encoder_scan_remat", "structured/branches", "structured/decode_scanned", "structured/mixture"),
)


@pytest.mark.parametrize("variant", ["forward", "train"])
def test_fusions_of_the_zoo_are_known_by_node_and_line(variant):
    programs = [p for p in zoo().programs() if p.model.id in ZOO and (p.dtype, p.variant) == ("f32", variant)]
    assert len(programs) == len(ZOO)
    counts = total(outcome(p) for p in programs)
    assert counts["kernels"]["fusion"] > 50
    assert share(counts) >= SHARE
    assert share(counts, "library") >= SHARE
    told = counts["kernels"]["fusion"] - counts["inferred"].get("fusion", 0)
    assert told >= 0.9 * counts["kernels"]["fusion"], "most say it themselves"
    assert counts["by_metadata"]["near"] >= SHARE * counts["by_metadata"]["of"]


RECORDS = sorted((Path(__file__).parents[3] / "benchmarks" / "results" / "cpu").glob("xla_mapping_*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda p: p.stem)
def test_the_record_holds_what_is_asked(path):
    record = json.loads(path.read_text())
    counts = record["total"]
    assert record["share"] == share(counts) >= SHARE
    assert total(Outcome(**p) for p in record["programs"]) == counts
    assert len(record["programs"]) >= 150
    assert path.stem.endswith(record["environment"]["versions"]["jax"])
