"""Sites of several results: certified result by result, settled with others, replaced and measured as one."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fusionlab as fl
from fusionlab.device import Device
from fusionlab.evidence.site_errors import local_errors
from fusionlab.fusers.engine.base import Search
from fusionlab.fusers.engine.overlaps import settle
from fusionlab.fusers.find import find_in
from fusionlab.fusers.registry import registry
from fusionlab.graph.canonical.view import CanonicalView
from fusionlab.graph.certify.certify import Certifier
from fusionlab.graph.program.trace import trace
from fusionlab.kernels import plain_meaning_of
from fusionlab.kernels.op.implementation import ChoiceKind, ImplementationChoice
from fusionlab.verbs.dump import write_dump
from fusionlab.viz.export import album
from fusionlab.viz.html.inspector import inspect
from fusionlab.viz.html.report import report_html
from fusionlab.viz.model.summaries import summary

from .checks import normal
from .several import GatePass, gate

X, Y, W, B = normal((5, 8), (5, 8), (8, 8), (8,))
W = W * 0.4
ARGS = X, W, B, Y


def search(fn, *args, pass_=None, beside=()):
    asked = [(registry()[name], {}) for name in beside]
    return find_in(trace(fn, *args), [*asked, (pass_ or GatePass(), {})], Device.of("cpu"))


def primitives(found, enabled=None):
    return [n.primitive for n in found.apply(enabled).nodes()]


def agree(fn, found, *args):
    """Values and gradients of the rewritten program."""
    run = jax.extend.core.jaxpr_as_fun(found.rewritten())

    def loss(call):
        return lambda *args: sum(
            (y * np.linspace(0.5, 1.5, y.size).reshape(y.shape)).sum() for y in jax.tree.leaves(call(*args))
        )

    wanted = tuple(range(len(args)))
    for call in (lambda f: f, lambda f: jax.grad(loss(f), wanted)):
        for want, got in zip(jax.tree.leaves(call(fn)(*args)), jax.tree.leaves(call(run)(*args)), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


# -- one site --------------------------------------------------------------------------------------------------------------


def test_a_site_of_two_results_is_found_and_replaced():
    found = search(gate, *ARGS)
    (site,) = found.candidates
    assert [v.shape for v in site.roots] == [(5, 8), (5, 8)]
    assert site.roots == (site.root, *site.others) == site.region.roots == site.site.roots
    assert len(site.program.outputs) == 2
    assert primitives(found).count("logistic") == 1
    assert "tanh" not in primitives(found)
    agree(gate, found, *ARGS)


def in_scan(x, w, b, y):
    def body(c, y):
        h, z = gate(c, w, b, y)
        return z, h

    return lax.scan(body, x, jnp.stack([y, -y, 0.5 * y]))


def in_cond(x, w, b, y):
    return lax.cond(x[0, 0] > 9, lambda: (x, y), lambda: gate(x, w, b, y))


def in_remat(x, w, b, y):
    return jax.checkpoint(gate, policy=jax.checkpoint_policies.dots_saveable)(x, w, b, y)


@pytest.mark.parametrize("fn", [in_scan, in_cond, in_remat], ids=lambda fn: fn.__name__)
def test_it_is_replaced_inside_regions(fn):
    found = search(fn, *ARGS)
    (site,) = found.candidates
    assert site.block_path
    assert "tanh" not in primitives(found)
    agree(fn, found, *ARGS)


@pytest.mark.parametrize(
    ("finish", "code", "told"),
    [
        (lambda out: (out[0], out[1] * 1.01), "value", "result 2 of 2: value differs"),
        (lambda out: (out[0] * 1.01, out[1]), "value", "result 1 of 2: value differs"),
        (
            lambda out: (out[0], lax.stop_gradient(out[1])),
            "gradient",
            "result 2 of 2: gradient of x differs",
        ),
        (
            lambda out: (lax.stop_gradient(out[0]), out[1]),
            "gradient",
            "result 1 of 2: gradient of x differs",
        ),
        (lambda out: out[::-1], "value", "result 1 of 2"),
    ],
)
def test_every_result_is_certified_in_value_and_gradient(finish, code, told):
    found = search(gate, *ARGS, pass_=GatePass(finish))
    assert not found.candidates
    (declined,) = found.rejections
    assert declined.code == code
    assert told in declined.sentence


def test_results_that_are_alike_are_each_certified():
    def fn(x, w, b, y):
        h, z = gate(x, w, b, y)
        return h, z, h * y

    right = search(fn, *ARGS, pass_=GatePass(lambda out: (*out, out[0]), also="mul"))
    assert len(right.candidates) == 1
    agree(fn, right, *ARGS)
    wrong = search(fn, *ARGS, pass_=GatePass(lambda out: (*out, out[0] * 1.01), also="mul"))
    assert not wrong.candidates
    assert {r.code for r in wrong.rejections} == {"value"}
    assert all("result 3 of 3" in r.sentence for r in wrong.rejections)


def test_proofs_are_remembered_for_sites_that_are_alike():
    def two(x, w, b, y):
        h1, z1 = gate(x, w, b, y)
        return h1, *gate(z1, w, b, y)

    calls = []
    found = search(two, *ARGS, pass_=GatePass(lambda out: calls.append(out) or out))
    once = len(calls)
    assert len(found.candidates) == 2
    calls.clear()
    search(gate, *ARGS, pass_=GatePass(lambda out: calls.append(out) or out))
    assert once == len(calls) > 0


def test_a_further_result_that_is_no_float_is_fused_and_its_site_keeps_its_gradient():
    def fn(x, w, b, y):
        h, z = gate(x, w, b, y)
        return h, z, h > 0.5

    found = search(fn, *ARGS, pass_=GatePass(lambda out: (*out, out[1] > 0.5), also="gt"))
    assert len(found.candidates) == 1
    agree(fn, found, *ARGS)


# -- with other sites ------------------------------------------------------------------------------------------------------


def test_what_reads_a_result_stands_beside_the_site_and_what_reads_an_inner_value_overlaps():
    def fn(x, w, b, y):
        h, z = gate(x, w, b, y)
        return jax.nn.relu(h @ w + b), z

    found = search(fn, *ARGS, beside=["gemm_epilogue"])
    assert {c.pass_name for c in found.candidates} == {"gemm_epilogue", "gate"}
    (lost,) = found.rejections
    assert lost.code == "overlap"
    assert found[lost.winner].pass_name == "gate"
    agree(fn, found, *ARGS)


def crossed(x, w, b, y):
    """Each site reads, at its end, what is made of the other's first result."""
    h1, h2 = jnp.tanh(x @ w + b), jnp.tanh(y @ w + b)
    return h1, h2, h1 * (h2 + 1.0), h2 * (h1 + 1.0)


def test_of_sites_that_wait_for_each_other_one_is_declined():
    found = search(crossed, *ARGS)
    assert len(found.candidates) == 1
    (declined,) = found.rejections
    assert declined.code == "order"
    assert "which in turn depends on a result of this site" in declined.sentence
    assert declined.id != found.candidates[0].id
    assert primitives(found).count("logistic") == 1
    agree(crossed, found, *ARGS)


def test_it_is_the_one_that_is_left_as_it_is_or_else_the_smaller_one():
    def of(one, other):
        (kept,), (lost,) = settle([one, other])
        return kept.node_ids, lost.code

    pass_ = GatePass()
    view = CanonicalView(trace(crossed, *ARGS).top)
    one, other = pass_.search(Search(trace(crossed, *ARGS), view, Device.of("cpu"), Certifier(plain_meaning_of)))
    larger = replace(other, nodes_before=other.nodes_before + 1)
    assert of(one, larger) == of(larger, one) == (other.node_ids, "order")
    assert of(one, replace(larger, left_to_xla=ImplementationChoice("xla", ChoiceKind.SLOWER, "slow"))) == (
        one.node_ids,
        "order",
    )


def test_where_a_site_gives_way_what_it_had_taken_is_free_again():
    found = search(crossed, *ARGS, beside=["gemm_epilogue"])
    assert sorted(c.pass_name for c in found.candidates) == ["gate", "gemm_epilogue"]
    assert sorted(r.code for r in found.rejections) == ["order", "overlap"]
    agree(crossed, found, *ARGS)


def test_a_leaf_made_of_a_result_is_declined():
    def fn(x, w, b, y):
        h = jnp.tanh(x @ w + b)
        return h, h * (jnp.exp(h) + y)

    found = search(fn, *ARGS)
    assert not found.candidates
    assert [r.code for r in found.rejections] == ["order"]


# -- programs that are differentiated already ------------------------------------------------------------------------------


def test_in_a_differentiated_program_it_is_never_paired():
    def step(x, w, b, y):
        return jax.value_and_grad(lambda *a: sum((r**2).sum() for r in gate(*a)), (0, 1, 2, 3))(x, w, b, y)

    found = search(step, *ARGS, beside=["gemm_epilogue"])
    assert found.differentiated
    gates = [c for c in found.candidates if c.pass_name == "gate"]
    assert gates
    assert all(c.backward is None for c in gates)
    assert not any(p.is_fused for p in found.pairs if p.site.startswith("gate"))
    agree_values = jax.extend.core.jaxpr_as_fun(found.rewritten())(*ARGS)
    for want, got in zip(jax.tree.leaves(step(*ARGS)), agree_values, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


# -- searches --------------------------------------------------------------------------------------------------------------


def test_passes_of_wholes_are_searched_last_and_all_share_one_dictionary():
    def fn(x, w, b, y):
        return in_scan(x, w, b, y), gate(x, w, b, y)

    order = []

    class Told(GatePass):
        def search(self, search):
            order.append(self.name)
            search.shared.setdefault("seen", []).append((self.name, search.block.path))
            return iter(())

    graph = trace(fn, *ARGS)
    asked = [(Told(name="whole", whole=True), {}), (Told(name="first"), {}), (Told(name="second"), {})]
    found = find_in(graph, asked, Device.of("cpu"))
    blocks = len(order) // 3
    assert blocks == 2
    assert order == ["first"] * blocks + ["second"] * blocks + ["whole"] * blocks
    assert found.passes == ("whole", "first", "second")
    passes = [GatePass(), GatePass(name="other")]
    find_in(graph, [(p, {}) for p in passes], Device.of("cpu"))
    tables = {id(s.shared) for p in passes for s in p.searches}
    assert len(tables) == 1
    find_in(graph, [(passes[0], {})], Device.of("cpu"))
    assert passes[0].searches[-1].shared is not passes[0].searches[0].shared


def test_a_dump_applies_passes_of_wholes_first(tmp_path):
    asked = [(registry()["gemm_epilogue"], {}), (GatePass(whole=True), {})]
    write_dump(tmp_path / "dump", trace(gate, *ARGS), asked, Device.of("cpu"))
    assert "logistic" in (tmp_path / "dump" / "00_gate.after.txt").read_text()
    assert "tanh" not in (tmp_path / "dump" / "01_gemm_epilogue.before.txt").read_text()


def test_it_is_no_tile_of_a_structure_and_the_rest_is_seen():
    def fn(x, w, b, y):
        h, z = gate(x, w, b, y)
        return h, jax.nn.softmax(z)

    found = search(fn, *ARGS)
    assert len(found.candidates) == 1
    assert "softmax" in {s.kind for s in found.structures}


# -- shown and measured ----------------------------------------------------------------------------------------------------


@pytest.fixture
def registered():
    fl.register(GatePass())
    yield
    fl.unregister("gate")


def whole(x, w, b, y):
    h, z = gate(jnp.sin(x), w, b, y)
    return jnp.cos(z), h.sum(), z


def test_fuse_runs_it(registered):
    fused = jax.jit(fl.fuse(in_scan, passes="gate"))
    for want, got in zip(jax.tree.leaves(in_scan(*ARGS)), jax.tree.leaves(fused(*ARGS)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_the_errors_of_a_site_are_those_of_all_its_results_and_gradients(registered):
    (one,) = fl.errors_by_site(whole, *ARGS, passes="gate", local=True)
    assert [leaf.name for leaf in one.leaves] == ["out[0]", "out[1]", "x", "w", "b", "y"]
    assert one.ok
    found = fl.find(whole, *ARGS, passes="gate")
    (site,) = found.candidates
    wrong = replace(
        site, site=replace(site.site, fn=lambda *given: (site.site.fn(*given)[0], site.site.fn(*given)[1] * 1.01))
    )
    leaves = {leaf.name: leaf.ok for leaf in local_errors(found, wrong, list(ARGS), True).leaves}
    assert leaves["out[0]"]
    assert not leaves["out[1]"]
    assert not leaves["w"]
    (alone,) = fl.errors_by_site(whole, *ARGS, passes="gate")
    assert alone.ok
    assert len([leaf for leaf in alone.leaves if leaf.kind == "output"]) == 3


def test_the_site_left_out_is_timed(registered):
    shares = fl.time_by_site(whole, *ARGS, passes="gate", samples=2, budget_s=2.0)
    assert [s.site for s in shares.sites] == ["gate@#1"]
    assert not fl.bisect(whole, *ARGS, passes="gate", samples=2, budget_s=2.0).causes


def test_its_kernels_are_told_before_and_after(registered):
    found = fl.find(whole, *ARGS, passes="gate")
    (kernels,) = found.kernels()
    assert kernels.before
    assert kernels.after


def test_all_its_results_are_told(registered):
    found = fl.find(whole, *ARGS, passes="gate")
    (site,) = found.candidates
    z, h = site.roots
    assert f"gives {z!r}, {h!r}" in found.explain(site.id)
    html = inspect(found.graph, found, site.id).html
    for value in (z, h):
        assert f'data-fl-pick="{value.name}"' in html.partition("gives")[2].partition("nodes")[0]
    (record,) = summary(found.graph, found)["sites"]
    assert (record["root"], record["others"]) == (z.name, [h.name])


@pytest.mark.parametrize("fn", [whole, in_scan])
def test_it_is_one_card_however_many_results_it_has(registered, fn):
    found = fl.find(fn, *ARGS, passes="gate")
    for enabled, state in ((None, "applied"), ([], "candidate")):
        pictures = album(found.graph, found, enabled, "all")
        (site,) = [c for c in pictures.overview(enabled).cards() if c.site]
        assert (site.site.state, set(site.nodes)) == (state, set(found.candidates[0].node_ids))
    after = found.apply()
    assert "tanh" not in {c.name for c in album(after, None, None, "all").overview(None).cards()}
    assert "gate@" in report_html(found.graph, found)
