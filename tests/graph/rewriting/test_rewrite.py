"""Graph -> program: what no site touches is the traced equation itself, wherever the sites stand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import fusionlab as fl
from fusionlab.errors import RewriteError
from fusionlab.graph.program.text import graph_text
from fusionlab.graph.program.trace import graph_of_jaxpr, trace
from fusionlab.graph.rewriting.rewrite import Replacement, to_jaxpr
from tests.fusers.checks import normal

from ..on_four_devices import TRIALS

X, W, B = normal((5, 6), (6, 6), (6,))
W = W * 0.4


def layer(x):
    return jax.nn.relu(x @ W + B)


def run(closed, *args):
    return jaxpr_as_fun(closed)(*args)


def rewritten(fn, *args, **kwargs):
    """(findings, the rewritten program's results, the program's own, both jitted)."""
    found = fl.find(fn, *args, passes="gemm_epilogue")
    after = jax.jit(jaxpr_as_fun(found.rewritten(**kwargs)))(*jax.tree.leaves(args))
    return found, after, jax.tree.leaves(jax.jit(fn)(*args))


# -- sites in every kind of region ------------------------------------------------------------------------------------


def in_scan(x):
    return lax.scan(lambda c, s: (layer(c) * s, c.sum()), x, jnp.arange(1.0, 4.0))


def in_while(x):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, layer(c[1])), (0, x))


def in_cond(x):
    return lax.cond(x[0, 0] > 0, layer, lambda x: jnp.tanh(layer(-x)), x)


def in_remat(x):
    return jax.checkpoint(lambda x: jnp.sin(layer(x)), policy=jax.checkpoint_policies.dots_saveable)(x)


def nested(x):
    def body(c, _):
        return lax.cond(c.sum() > 0, jax.checkpoint(layer), lambda c: -layer(c), c), layer(c)

    return layer(lax.scan(body, x, None, length=2)[0])


SITES = {
    "scan": (in_scan, 1),
    "while": (in_while, 1),
    "cond": (in_cond, 2),
    "remat": (in_remat, 1),
    "nested": (nested, 4),
}


@pytest.mark.parametrize("name", SITES)
def test_a_site_inside_a_region_is_replaced_there(name):
    fn, count = SITES[name]
    found, after, before = rewritten(fn, X)
    assert len(found.candidates) == count
    assert {c.block_path != "" for c in found.candidates} == ({True} if name != "nested" else {True, False})
    for got, want in zip(after, before, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    graph = found.apply()
    fused = [n for n in graph.nodes() if n.primitive == "gemm_epilogue"]
    assert len(fused) == count
    assert not [n for n in graph.nodes() if n.primitive in ("dot_general", "custom_jvp_call")]


@pytest.mark.parametrize("name", SITES)
def test_with_no_site_applied_the_program_is_the_same_text_and_the_same_bits(name):
    fn, _ = SITES[name]
    found, after, before = rewritten(fn, X, enabled=[])
    assert graph_text(found.apply([])) == graph_text(found.graph)
    for got, want in zip(after, before, strict=True):
        np.testing.assert_array_equal(got, want)


def test_one_of_several_sites_is_replaced_and_the_others_are_left():
    found = fl.find(nested, X, passes="gemm_epilogue")
    one = found.candidates[1]
    graph = found.apply([one.id])
    assert [n.primitive for n in graph.nodes()].count("gemm_epilogue") == 1
    assert [n.primitive for n in graph.nodes()].count("dot_general") == 3
    assert graph.block_of[next(n.id for n in graph.nodes() if n.primitive == "gemm_epilogue")].label != "top"


# -- what is not touched ----------------------------------------------------------------------------------------------


def params_of(graph, primitive):
    return next(n for n in graph.nodes() if n.primitive == primitive).params


def test_an_untouched_region_keeps_its_own_parameter_objects():
    def fn(x):
        x = lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3, unroll=2, reverse=True)[0]
        x = jax.checkpoint(jnp.cos, policy=jax.checkpoint_policies.everything_saveable, prevent_cse=False)(x)
        return layer(x)

    found = fl.find(fn, X)
    before, after = found.graph, found.apply()
    for primitive in ("scan", next(n.primitive for n in before.nodes() if "policy" in n.params)):
        old, new = params_of(before, primitive), params_of(after, primitive)
        assert old.keys() == new.keys()
        assert all(old[k] is new[k] or old[k] == new[k] for k in old if k != "jaxpr")
        assert old["jaxpr"] is new["jaxpr"]


def test_a_rebuilt_scan_keeps_its_length_direction_and_unrolling():
    def fn(x):
        return lax.scan(lambda c, s: (layer(c) * s, c[0]), x, jnp.arange(1.0, 5.0), reverse=True, unroll=2)

    found = fl.find(fn, X)
    old, new = params_of(found.graph, "scan"), params_of(found.apply(), "scan")
    assert new["jaxpr"] is not old["jaxpr"]
    assert all(old[k] == new[k] for k in ("length", "reverse", "unroll", "linear") if k in old)


def test_precision_and_element_types_of_other_products_are_kept():
    def fn(x):
        y = lax.dot_general(x, x, (((1,), (1,)), ((), ())), precision="highest", preferred_element_type=jnp.float32)
        return layer(x), y

    found = fl.find(fn, X)
    (product,) = [n for n in found.apply().nodes() if n.primitive == "dot_general"]
    original = next(n for n in found.graph.nodes() if n.outputs[0].shape == (5, 5))
    assert product.params == original.params
    assert "HIGHEST" in str(product.params["precision"])


def test_a_fused_op_keeps_the_precision_of_its_product():
    found = fl.find(lambda x: jax.nn.relu(jnp.matmul(x, W, precision="highest") + B), X)
    assert "HIGHEST" in str(params_of(found.apply(), "gemm_epilogue")["precision"])


def test_source_lines_and_scopes_survive_flattening_and_rewriting():
    inner = jax.jit(lambda x: jnp.tanh(layer(x)))

    def fn(x):
        with jax.named_scope("encoder"):
            x = inner(x)
            with jax.named_scope("last"):
                return jnp.exp(x)

    found = fl.find(fn, X)
    before = {n.primitive: (n.scope, n.source) for n in found.graph.nodes()}
    after = {n.primitive: (n.scope, n.source) for n in found.apply().nodes()}
    assert after["tanh"] == before["tanh"]
    assert after["exp"] == before["exp"]
    assert after["exp"][0] == "encoder/last"
    assert after["gemm_epilogue"] == before["custom_jvp_call"]
    assert after["gemm_epilogue"][0] == "encoder"
    assert after["gemm_epilogue"][1].text.startswith("return jax.nn.relu(x @ W + B)")


def test_effects_happen_once_each_and_in_order():
    seen = []

    def fn(x):
        jax.debug.callback(lambda v: seen.append(("first", float(v))), x.sum(), ordered=True)
        y = layer(x)
        jax.debug.callback(lambda v: seen.append(("second", float(v))), y.sum(), ordered=True)
        z = layer(y)
        jax.debug.callback(lambda v: seen.append(("third", float(v))), z.sum(), ordered=True)
        return z

    found = fl.find(fn, X)
    assert len(found.candidates) == 2
    assert [n.primitive for n in found.apply().top.nodes].count("debug_callback") == 3
    jax.block_until_ready(jax.jit(fn)(X))
    jax.effects_barrier()
    want, seen[:] = list(seen), []
    jax.block_until_ready(fl.fuse(fn)(X))
    jax.effects_barrier()
    assert [name for name, _ in seen] == ["first", "second", "third"]
    np.testing.assert_allclose([v for _, v in seen], [v for _, v in want], rtol=1e-5)


def test_donation_stays_with_the_users_jit():
    def step(x, y):
        return layer(x) + y

    lowered = jax.jit(fl.fuse(step), donate_argnums=1).lower(X, X)
    assert "tf.aliasing_output" in lowered.as_text()
    donated = jnp.array(X)
    out = jax.jit(fl.fuse(step), donate_argnums=1)(X, donated)
    assert donated.is_deleted()
    np.testing.assert_allclose(out, step(X, X), rtol=1e-6)


def test_a_donating_jit_inside_is_kept_and_fused_inside():
    inner = jax.jit(layer, donate_argnums=0)
    found = fl.find(lambda x: inner(x * 2.0) + 1.0, X)
    (site,) = found.candidates
    assert site.block_path.endswith(".jaxpr")
    jit = next(n for n in found.apply().nodes() if n.primitive == "jit")
    assert jit.params["donated_invars"][0] is True


def test_an_integer_and_a_key_output_come_through():
    def fn(x, key):
        key, sub = jax.random.split(key)
        return layer(x) + jax.random.normal(sub, (5, 6)), jnp.argmax(x), key

    fused, plain = fl.fuse(fn)(X, jax.random.key(5)), fn(X, jax.random.key(5))
    np.testing.assert_allclose(fused[0], plain[0], rtol=1e-5, atol=1e-6)
    assert fused[1] == plain[1]
    assert jnp.array_equal(jax.random.key_data(fused[2]), jax.random.key_data(plain[2]))


# -- replacements by hand ---------------------------------------------------------------------------------------------


def by_hand(replace):
    """sin(x) + 1 with the sine replaced by `replace`."""
    graph = trace(lambda x: jnp.sin(x) + 1.0, X)
    sine = graph.top.nodes[0]
    return graph, Replacement("", (sine,), sine.outputs[0], graph.top.inputs, replace)


def test_a_replacement_computes_the_roots_value_in_its_place():
    graph, replacement = by_hand(lambda x: jnp.cos(x) * 2.0)
    (out,) = run(to_jaxpr(graph, [replacement]), X)
    np.testing.assert_allclose(out, np.cos(X) * 2 + 1, rtol=1e-6)


def test_a_replacement_that_captures_an_array_carries_it():
    graph, replacement = by_hand(lambda x: x @ W)
    (out,) = run(to_jaxpr(graph, [replacement]), X)
    np.testing.assert_allclose(out, X @ W + 1, rtol=1e-5)


@pytest.mark.parametrize("bad", [lambda x: x.T, lambda x: x.astype(jnp.bfloat16)], ids=["shape", "dtype"])
def test_a_replacement_of_another_shape_or_dtype_is_refused(bad):
    graph, replacement = by_hand(bad)
    with pytest.raises(RewriteError, match="needed the same shape and dtype"):
        to_jaxpr(graph, [replacement])


def test_equations_a_replacement_leaves_without_readers_are_dropped():
    graph = trace(lambda x: jnp.sin(jnp.exp(x) * 2.0) + x, X)
    sine = next(n for n in graph.top.nodes if n.primitive == "sin")
    replacement = Replacement("", (sine,), sine.outputs[0], graph.top.inputs, jnp.cos)
    closed = to_jaxpr(graph, [replacement])
    new = graph_of_jaxpr(closed, name="f", in_tree=graph.in_tree, out_tree=graph.out_tree, in_names=graph.in_names)
    assert [n.primitive for n in new.nodes()] == ["cos", "add"]


# -- several devices --------------------------------------------------------------------------------------------------


@pytest.mark.devices
@pytest.mark.parametrize("name", TRIALS)
def test_on_four_devices_sharded_jit_and_shard_map_give_the_same_values_and_gradients(on_devices, name):
    """One of them by hand, all on a line:

    python -m pytest "tests/graph/rewriting/test_rewrite.py::
      test_on_four_devices_sharded_jit_and_shard_map_give_the_same_values_and_gradients[checked Auto rows]"
    """
    on_devices("graph.on_four_devices", name)
