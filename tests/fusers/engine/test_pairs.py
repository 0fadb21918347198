"""Forward sites of a program that is differentiated already, with their backward passes."""

from __future__ import annotations

import json
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab.models import transformer
from tests.asked import by_name, counts

from ..checks import normal

X, W, B = normal((6, 8), (8, 8), (8,))


def step(layers):
    params = transformer.init(jax.random.key(0), layers, embed=32)
    x = transformer.inputs(jax.random.key(1), 2, 16, 32)
    adam = transformer.init_adam(params)
    return partial(transformer.train_step, heads=4), (params, adam, x, x)


def test_every_site_of_a_train_step_has_its_backward():
    fn, args = step(2)
    found = fl.find(fn, *args, passes=by_name())
    assert not found.rejections
    sites = {x.id: x for x in found.candidates}
    assert {p.site for p in found.pairs} == sites.keys()
    whole = {p.site: (set(p.gradients), set(p.absent)) for p in found.pairs}
    for name, (gradients, absent) in whole.items():
        leaves = set(sites[name].region.leaves)
        assert gradients | absent == leaves
        assert absent <= {"x"}, (name, absent)
    assert [name for name, (_, absent) in whole.items() if absent] == ["layer_norm@layer_0/ln1#1"]  # its input is data
    forward = counts(gemm_epilogue=12, dot_product_attention=2, layer_norm=4)
    assert found.counts() == forward | {f"{name}_grad": n for name, n in forward.items()}
    assert "gemm_epilogue_grad: 12 subgraphs can be fused" in str(found).splitlines()


def layer(w, x):
    h = jax.nn.gelu(x @ w + B)
    centred = h - h.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * B


MESH = jax.sharding.AbstractMesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
SPEC = jax.sharding.PartitionSpec


def scanned(w, x, reverse=False):
    return jax.lax.scan(lambda h, v: (layer(v, h), None), x, jnp.stack([w, w, w]), reverse=reverse)[0]


def sharded(w, x, checked):
    specs = {"in_specs": (SPEC(), SPEC("d", None)), "out_specs": SPEC("d", None)}
    return jax.shard_map(layer, mesh=MESH, check_vma=checked, **specs)(w, jnp.concatenate([x, x]))


REGIONS = {
    "plain": layer,
    "scan": scanned,
    "scan, reversed": partial(scanned, reverse=True),
    "scan of a shared weight": lambda w, x: jax.lax.scan(lambda h, _: (layer(w, h), None), x, None, length=3)[0],
    "scan in a scan": lambda w, x: jax.lax.scan(lambda h, _: (scanned(w, h), None), x, None, length=2)[0],
    "shard_map": partial(sharded, checked=False),
    "shard_map, checked": partial(sharded, checked=True),
    "cond": lambda w, x: jax.lax.cond(x.sum() > 0, layer, lambda w, x: x, w, x),
    "vmap": lambda w, x: jax.vmap(lambda row: layer(w, row[None])[0])(x),
    "scan of a checkpoint": lambda w, x: jax.lax.scan(
        lambda h, _: (jax.checkpoint(layer)(w, h), None), x, None, length=3
    )[0],
}


@pytest.mark.parametrize("name", REGIONS)
def test_a_backward_pass_is_found_across_regions(name):
    """That of the linear layer with its activation, and that of the norm; in a checkpoint that of what is computed again."""
    found = fl.find(jax.value_and_grad(lambda w, x: jnp.sum(jnp.sin(REGIONS[name](w, x))), (0, 1)), W, X)
    items = {x.id: x for x in (*found.candidates, *found.rejections) if x.region is not None}
    gradients = {c: set(p.gradients) for p in found.pairs for c in items[p.site].concepts}
    # Where types say what varies over devices, dw is summed over them by the program, and not by the site.
    assert gradients["gelu_tanh"] >= ({"x"} if "checked" in name else {"x", "w"})
    if "checkpoint" not in name:  # what ends a checkpoint is not computed again
        assert gradients["layer_norm"] >= {"x"}
    for p in found.pairs:
        assert set(p.gradients) | set(p.absent) == set(items[p.site].region.leaves)


def test_a_scan_over_other_entries_is_not_the_backward_pass():
    """What runs back reads the residuals of another scan: its entries are not those of this one."""

    def twice(w, x):
        (y, _), (z, pull) = (jax.vjp(lambda w, f=f: scanned(w, f * x), w) for f in (1.0, 2.0))
        return y, z, pull(jnp.cos(y))

    found = fl.find(twice, W, X)
    blocks = {p.site: p for p in found.pairs}
    first = next(x for x in (*found.candidates, *found.rejections) if x.region is not None)
    scans = [n for n in found.graph.top.nodes if n.primitive == "scan"]
    assert len(scans) == 3
    assert first.region.block.path == scans[0].blocks[0].path
    assert first.id not in blocks


def test_what_a_forward_pass_computes_is_no_backward_pass():
    """x.T @ v would be the gradient of x @ w if v were its cotangent; the gradient that is taken here is another function's."""

    def gram(x, w, v, u):
        return x @ w + B, x.T @ v, jax.grad(lambda u: jnp.sum(jnp.sin(u)))(u)

    found = fl.find(gram, X, W, X + 1, B)
    assert len(found.candidates) == 1
    assert found.pairs == ()


def test_regions_in_a_row_that_do_not_run_back_are_no_obstacle():
    def loops(w):
        step = (lambda c: c[0] < 3.0, lambda c: (c[0] + 1, c[1] * 2), (0.0, 1.0))
        once = jax.lax.while_loop(*step)
        solved = jax.lax.custom_linear_solve(lambda v: v * 2, once[1] * B, lambda _, b: b / 2, lambda _, b: b / 2)
        again = jax.lax.custom_linear_solve(lambda v: v * 2, solved, lambda _, b: b / 2, lambda _, b: b / 2)
        return jax.grad(lambda w: jnp.sum(jnp.tanh(X @ w)))(w), jax.lax.while_loop(*step[:2], once), again

    found = fl.find(loops, W)
    assert isinstance(found.pairs, tuple)
    assert found.to_dict()["pairs"] == [p.to_dict() for p in found.pairs]


def test_a_function_that_is_not_differentiated_has_no_pairs():
    found = fl.find(lambda x: jax.nn.relu(x @ W + B), X)
    assert found.pairs == ()
    assert "backward" not in found.report()


def test_a_pair_is_told_in_text_and_data():
    def loss(w, b):
        return jnp.sum(jax.nn.relu(X @ w + b) ** 2)

    found = fl.find(jax.value_and_grad(loss, (0, 1)), W, B)
    pairs = {p.site: p for p in found.pairs}
    (site,) = found.candidates
    pair = pairs[site.id]
    assert pair is site.backward
    assert (set(pair.gradients), pair.absent) == ({"w", "b"}, ("x",))
    data = found.to_dict()["pairs"]
    assert json.loads(json.dumps(data)) == data
    assert {d["site"] for d in data} == pairs.keys()
    assert f"dw = {pair.gradients['w']!r}" in found.explain(site.id)
    maker = found.graph.top.producer[pair.gradients["w"].id]
    assert maker.id in pair.node_ids - site.node_ids
    assert site in found.of_node(maker)
    assert "no gradient of x" in found.report()
    assert "backward passes in this program:" in found.report()


def test_a_gradient_of_an_inner_value_that_is_returned_declines_the_site_and_names_the_reader():
    """The gradient with respect to the pre-activation is a value of the old backward pass alone."""

    def step(w, b, ct):
        h, before = jax.vjp(lambda w, b: X @ w + b, w, b)
        y, act = jax.vjp(jax.nn.gelu, h)
        (inner,) = act(ct)
        return y, *before(inner), inner

    found = fl.find(step, W, B, jnp.cos(X))
    (problem,) = found.rejections
    assert problem.code == "escapes"
    assert "cannot be fused with its backward pass either" in problem.sentence
    assert problem.backward.stays
    assert [c.formula for c in found.candidates] == ["x @ w + b"]  # the linear part, which nothing reads inside
    assert found.candidates[0].backward.stays is None


def test_before_differentiation_the_gradient_runs_under_jax_grad():
    found = fl.find(lambda w: jnp.sum(jax.nn.relu(X @ w + B)), W)
    assert found.counts()["gemm_epilogue"] == 1
    assert found.counts()["gemm_epilogue_grad"] == "runs under jax.grad"
    assert "gemm_epilogue_grad: runs under jax.grad" in found.report().splitlines()


def test_sites_of_a_fused_and_differentiated_function_are_no_pairs():
    fused = jax.grad(lambda w: fl.fuse(lambda w: jnp.sum(jax.nn.relu(X @ w + B)))(w))
    found = fl.find(fused, W)
    assert not found.candidates
    assert found.pairs == ()
