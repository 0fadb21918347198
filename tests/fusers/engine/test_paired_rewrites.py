"""Forward sites rewritten together with their backward passes, in programs that are differentiated already."""

from __future__ import annotations

import functools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex_core

import fusionlab as fl
from fusionlab.graph import jax_compat as compat
from fusionlab.models import transformer
from tests.asked import by_name

from ..checks import forward_counts, normal, primitives
from .test_pairs import REGIONS as ANALYSED
from .test_pairs import layer, scanned, step

X, W, B = normal((8, 8), (8, 8), (8,))
INNER = {"tanh", "rsqrt", "dot_general"}  # what a fused forward and its old backward are made of


def jitted(w, x):
    """A jit that stays a region, since it says where its operands are."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.jit(layer, in_shardings=(here, here))(w, x)


REGIONS = {
    "plain": layer,
    "scan": scanned,
    "scan, reversed": partial(scanned, reverse=True),
    "scan of a shared weight": lambda w, x: jax.lax.scan(lambda h, _: (layer(w, h), None), x, None, length=3)[0],
    "scan with results": lambda w, x: sum(jax.lax.scan(lambda h, v: (layer(v, h), h), x, jnp.stack([w, w]))[1]),
    "scan in a scan": lambda w, x: jax.lax.scan(lambda h, _: (scanned(w, h), None), x, None, length=2)[0],
    "jit with shardings": jitted,
    "vmap": lambda w, x: jax.vmap(lambda row: layer(w, row[None])[0])(x),
    "checkpoint": lambda w, x: jax.checkpoint(layer)(w, jnp.sin(x)),
    "scan of a checkpoint": lambda w, x: jax.lax.scan(
        lambda h, _: (jax.checkpoint(layer)(w, h), None), x, None, length=3
    )[0],
}


def step_of(fn):
    def loss(w, x):
        return jnp.sum(jnp.sin(fn(w, x)))

    return jax.value_and_grad(loss, (0, 1))


def same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=5e-5, atol=5e-5 * max(1e-3, float(jnp.abs(b).max())))


def fused(found):
    """Sites by whether they are fused with their backward pass."""
    return [c for c in found.candidates if c.backward is not None and c.backward.stays is None]


@pytest.mark.parametrize("name", REGIONS)
def test_a_pair_is_rewritten_across_regions(name):
    fn = step_of(REGIONS[name])
    found = fl.find(fn, W, X, passes=by_name())
    assert not found.rejections, found
    assert {c.pass_name for c in fused(found)} >= {"gemm_epilogue"}
    after = primitives(found.apply())
    for pass_name in {c.pass_name for c in fused(found)}:
        mine = sum(c.pass_name == pass_name for c in fused(found))
        assert after.count(f"{pass_name}_cotangent") == mine
    same(fl.fuse(fn, passes=by_name())(W, X), jax.jit(fn)(W, X))


@pytest.mark.parametrize("name", ["plain", "scan", "scan in a scan", "shard_map", "jit with shardings"])
def test_the_old_backward_pass_and_what_it_kept_are_gone(name):
    """Nothing of either is computed any more, and no more bytes leave the forward region than before."""
    fn = step_of((REGIONS | ANALYSED)[name])  # what runs on several devices is run by sharded.py
    found = fl.find(fn, W, X, passes=by_name())
    after = found.apply()
    assert set(primitives(found.graph)) >= INNER
    # A scan that runs back makes the activation again from what it is given of the product anyway.
    again = primitives(after).count("tanh") if "scan" in name else 0
    assert primitives(after).count("tanh") == again <= 1
    assert (INNER - {"tanh"}).isdisjoint(primitives(after))
    assert leaving(after) <= leaving(found.graph)


def leaving(graph):
    """Bytes of the results of all regions."""
    return sum(v.nbytes for n in graph.nodes() if n.blocks for v in n.outputs)


def test_in_a_sum_with_other_terms_a_gradient_takes_its_own_place():
    """A norm's gradient has several terms; those of the residual stream and of a second norm are added in between."""

    def norm(x, s):
        centred = x - x.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * s

    def loss(x, s, t):
        h = jnp.sin(x)
        return jnp.sum(jnp.cos(norm(h, s)) + jnp.sin(norm(h, t)) + h * 3)

    fn = jax.value_and_grad(loss, (0, 1, 2))
    found = fl.find(fn, X, B, B + 1, passes=by_name())
    assert len(fused(found)) == 2
    assert "rsqrt" not in primitives(found.apply())
    for chosen in ([c.id for c in found.candidates], *([c.id] for c in found.candidates)):
        same(fl.fuse(fn, only=chosen)(X, B, B + 1), jax.jit(fn)(X, B, B + 1))


def test_two_layers_that_read_the_same_data_have_each_its_own_backward():
    """Of data no gradient is asked: that of each weight could then be told as the other's."""

    def loss(p, q, b):
        return jnp.sum(jnp.sin(X @ p + b) * jnp.cos(X @ q + b))

    fn = jax.value_and_grad(loss, (0, 1, 2))
    found = fl.find(fn, W, W.T, B)
    assert len(fused(found)) == 2
    cotangents = {c.region.leaves["w"].name: c.backward.gradients["w"] for c in found.candidates}
    assert len(set(cotangents.values())) == 2
    assert [cotangents["%0"], cotangents["%1"]] == list(found.graph.top.outputs[1:3])
    same(fl.fuse(fn)(W, W.T, B), jax.jit(fn)(W, W.T, B))


def test_the_same_layer_twice_is_added_twice():
    """Two sites that compute the same of the same: what one gives must not be counted for the other."""

    def loss(w, b):
        return jnp.sum(jax.nn.gelu(X @ w + b) * jax.nn.gelu(X @ w + b))

    fn = jax.value_and_grad(loss, (0, 1))
    same(fl.fuse(fn)(W, B), jax.jit(fn)(W, B))


def stepped(w, x):
    return w - 0.1 * step_of(scanned)(w, x)[1][0]


WHOLE_STEPS = {
    "a scan of train steps": lambda w, x: jax.lax.scan(lambda w, x: (stepped(w, x), None), w, jnp.stack([x, x + 1]))[0],
    "a train step that gives its weights away": lambda w, x: jax.jit(stepped, donate_argnums=0)(w * 1, x) * 2,
    "one loss differentiated twice": lambda w, x: (step_of(scanned)(w, x), step_of(scanned)(w, x)),
}


@pytest.mark.parametrize("name", WHOLE_STEPS)
def test_a_pair_is_found_in_a_step_that_is_itself_inside_something(name):
    fn = WHOLE_STEPS[name]
    found = fl.find(fn, W, X, passes=by_name())
    assert not found.rejections
    assert fused(found) == list(found.candidates)
    same(fl.fuse(fn, passes=by_name())(W, X), jax.jit(fn)(W, X))


def test_two_layers_with_one_cotangent_have_each_a_gradient():
    """The gradients of the two biases are the same numbers: two values of the program, one for each."""
    fn = jax.value_and_grad(lambda w, b, v, c: jnp.sum(jnp.sin((X @ w + b) + (X @ v + c))), (0, 1, 2, 3))
    assert len(fused(fl.find(fn, W, B, W.T, B))) == 2
    same(fl.fuse(fn)(W, B, W.T, B), jax.jit(fn)(W, B, W.T, B))


def test_what_travels_out_of_a_scan_hangs_on_no_setting_of_the_users():
    compat._scan_trees.cache_clear()
    with jax.enable_x64(True):
        found = fl.find(step_of(scanned), W, X)
        assert len(fused(found)) == 2
        with jax.disable_jit():
            closed = found.rewritten()
        same(jax.jit(jex_core.jaxpr_as_fun(closed))(W, X), jax.tree.leaves(jax.jit(step_of(scanned))(W, X)))


def test_backward_passes_that_would_wait_for_each_other_are_not_both_replaced():
    """Of a linear loss the gradients hang on no result: the weights of each layer may be made of the gradient of the other's."""

    def program(x, v, w, b):
        grads = [jax.vjp(lambda w: x @ w + b, v)[1](jnp.full((8, 8), c))[0] for c in (1.0, 2.0)]
        first, pull = jax.vjp(lambda w: x @ w + b, v - grads[1])
        second, push = jax.vjp(lambda w: x @ w + b, w - grads[0])
        return first, second, pull(jnp.full((8, 8), 1.0))[0], push(jnp.full((8, 8), 2.0))[0]

    same(fl.fuse(program)(X, W, W.T, B), jax.jit(program)(X, W, W.T, B))


def trained(layers):
    """A train step, and arguments in the midst of training: from moments of 0, Adam makes a step of the sign of a rounding error."""
    fn, (params, (first, second, count), x, y) = step(layers)
    moments = jax.tree.map(lambda m: m + 0.01, first), jax.tree.map(lambda v: v + 0.1, second), count + 10
    return fn, (params, moments, x, y)


@functools.cache
def found_in_a_train_step():
    """What is found in a step of one layer, the step's arguments, and what it gives."""
    fn, args = trained(1)
    return fl.find(fn, *args), args, jax.jit(fn)(*args)


@pytest.mark.parametrize("site", range(9))
def test_each_site_of_a_train_step_alone_leaves_the_rest_as_it_was(site):
    found, args, want = found_in_a_train_step()
    assert len(found.candidates) == 9
    out = jax.jit(jex_core.jaxpr_as_fun(found.rewritten([found.candidates[site].id])))(*jax.tree.leaves(args))
    same(out, jax.tree.leaves(want))


def test_a_train_step_keeps_loss_parameters_and_optimiser_state():
    fn, args = trained(2)
    same(fl.fuse(fn, passes=by_name())(*args), jax.jit(fn)(*args))
    assert {"exp", "tanh", "rsqrt"}.isdisjoint(primitives(fl.find(fn, *args, passes=by_name()).apply()))


def test_row_17_attention_is_found_forward_and_backward_in_a_two_layer_encoder():
    fn, args = step(2)
    counts = fl.find(fn, *args, passes="dot_product_attention").counts()
    assert counts == {"dot_product_attention": 2, "dot_product_attention_grad": 2}


# -- a pass without its gradient ----------------------------------------------------------------------------------------------


def test_a_pass_without_its_grad_is_fused_forward_and_differentiated_as_jax_does():
    strategy = fl.Strategy(gemm_epilogue=True, gemm_epilogue_grad=False)
    assert fl.Strategy.from_json(strategy.to_json()) == strategy

    def loss(w, x):
        return jnp.sum(jax.nn.gelu(x @ w + B))

    alone, both = fl.fuse(loss, passes=strategy), fl.fuse(loss, passes="gemm_epilogue")
    assert alone.findings(W, X).counts() == {"gemm_epilogue": 1}
    (site,) = alone.findings(W, X).candidates
    assert site.attrs["gradient"] == "reference"
    assert site.residuals == ()
    for fused_loss, backward in ((alone, 0), (both, 1)):
        names = primitives(fl.trace(jax.value_and_grad(fused_loss), W, X))
        assert names.count("gemm_epilogue") == 1
        assert names.count("gemm_epilogue_cotangent") == backward
        same(jax.value_and_grad(fused_loss)(W, X), jax.value_and_grad(loss)(W, X))
    _, tangent = jax.jvp(alone, (W, X), (X, W))
    same(tangent, jax.jvp(loss, (W, X), (X, W))[1])


def test_in_a_differentiated_program_too():
    fn = step_of(layer)
    strategy = fl.Strategy(gemm_epilogue=True, gemm_epilogue_grad=False, layer_norm=True)
    found = fl.find(fn, W, X, passes=strategy)
    assert found.counts() == {"gemm_epilogue": 1, "layer_norm": 1, "layer_norm_grad": 1}
    names = primitives(found.apply())
    assert (names.count("gemm_epilogue"), names.count("gemm_epilogue_cotangent")) == (1, 0)
    assert "tanh" in names  # of the reference's own derivative
    same(fl.fuse(fn, passes=strategy)(W, X), jax.jit(fn)(W, X))


@pytest.mark.parametrize("passes", ["gemm_epilogue_grad", ["gemm_epilogue_grad", "layer_norm"]])
def test_a_grad_alone_is_refused(passes):
    with pytest.raises(fl.errors.ArgumentError, match="gemm_epilogue_grad without gemm_epilogue"):
        fl.find(layer, W, X, passes=passes)
    with pytest.raises(fl.errors.ArgumentError, match="needed both"):
        fl.fuse(layer, passes=fl.Strategy(gemm_epilogue=False, gemm_epilogue_grad=True))


def test_a_grad_takes_no_options_and_no_other_name():
    with pytest.raises(fl.errors.ArgumentError, match="follows the options of gemm_epilogue"):
        fl.find(layer, W, X, passes=fl.Strategy(gemm_epilogue=True, gemm_epilogue_grad={"strict_rank": True}))
    with pytest.raises(fl.errors.UnknownNameError, match="gemm_epilogue_grad"):
        fl.find(layer, W, X, passes="gemm_epilog_grad")
    assert forward_counts(fl.find(layer, W, X, passes=["gemm_epilogue", "gemm_epilogue_grad"])) == {"gemm_epilogue": 1}


# -- memory -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
def test_the_rewritten_step_keeps_no_more_between_the_passes_than_the_original(scan):
    """Bytes that compiled code holds beside arguments and results; the peak of a fresh process is a benchmark."""
    params = transformer.init(jax.random.key(0), 4, embed=64)
    x = transformer.inputs(jax.random.key(1), 4, 128, 64)

    def loss(params, x, y):
        if not scan:
            out = transformer.encoder(params, x, heads=4)
        else:
            stacked = jax.tree.map(lambda *a: jnp.stack(a), *params)
            out, _ = jax.lax.scan(lambda h, p: (transformer.block(p, h, heads=4), None), x, stacked)
        return jnp.mean((out - y) ** 2)

    fn = jax.value_and_grad(loss)
    found = fl.find(fn, params, x, x)
    assert len(fused(found)) == len(found.candidates) == (36 if not scan else 9)
    old, new = (jax.jit(f).lower(params, x, x).compile() for f in (fn, fl.fuse(fn)))
    before, after = (compiled.memory_analysis().temp_size_in_bytes for compiled in (old, new))
    print(f"temporary bytes: {before:,} and {after:,}, {after / before:.2f} of it")
    assert after <= 1.02 * before
    assert math.isfinite(float(new(params, x, x)[0]))


def test_a_backward_pass_that_asks_for_another_precision_keeps_it():
    def gradients(x, w, b):
        y, pull = jax.vjp(lambda x, w, b: jnp.tanh(x @ w + b), x, w, b)
        with jax.default_matmul_precision("highest"):
            return pull(jnp.ones_like(y))

    args = [jnp.ones(shape) for shape in ((8, 4), (4, 6), (6,))]
    texts = [jax.jit(f).lower(*args).as_text() for f in (gradients, fl.fuse(gradients))]
    assert [text.count("HIGHEST, HIGHEST") for text in texts] == [2, 2]
    assert fl.find(gradients, *args).counts()["gemm_epilogue_grad"] == 0
