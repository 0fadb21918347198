"""Attention written with heads before length, or after it, stays so: the fused op takes the layout that permutes the fewest arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.kernels.op.labels import labels_of

from ..checks import normal, primitives, weighed
from .test_dot_product_attention import einsum_form

ATTENTION = "dot_product_attention"
ALL = (0, 1, 2)
BNTH = normal((2, 3, 6, 4), (2, 3, 7, 4), (2, 3, 7, 5))
BTNH = tuple(a.swapaxes(1, 2) for a in BNTH)
SAME = normal((2, 3, 6, 4), (2, 3, 6, 4), (2, 3, 6, 4), seed=1)


def written(q, k, v, out):
    """Attention on arrays whose axes are named so: b, t (queries), s (keys), n (heads), h (features), d (the values')."""

    def attend(query, key, value):
        weights = jax.nn.softmax(jnp.einsum(f"{q},{k}->bnts", query, key) * 0.5)
        return jnp.einsum(f"bnts,{v}->{out}", weights, value)

    return attend


heads_first = written("bnth", "bnsh", "bnsd", "bntd")


def by_matmul(q, k, v):
    return jax.nn.softmax(q @ k.swapaxes(-1, -2) * 0.5) @ v


def exchanged_and_back(q, k, v):
    return by_matmul(*(a.swapaxes(1, 2) for a in (q, k, v))).swapaxes(1, 2)


def masked_causal_biased(q, k, v):
    s = jnp.einsum("bnth,bnsh->bnts", q, k) * 0.5 + jnp.sin(jnp.arange(3.0)[:, None, None] * jnp.arange(7.0))
    s = jnp.where(jnp.tril(jnp.ones((6, 7), bool)), s, -jnp.inf)
    return jnp.einsum("bnts,bnsd->bntd", jax.nn.softmax(s), v)


def scaled_by_rows(q, k, v):
    s = jnp.einsum("bnth,bnsh->bnts", q, k) * (1 + jnp.arange(6.0))[:, None]
    return jnp.einsum("bnts,bnsd->bntd", jax.nn.softmax(s), v)


def shared_keys(q, k, v):
    """Three query heads to the same keys: more rows to them."""
    return jnp.einsum("bnts,bsd->bntd", jax.nn.softmax(jnp.einsum("bnth,bsh->bnts", q, k) * 0.5), v)


def heads_in_batch(q, k, v):
    return jax.nn.softmax(jnp.einsum("xth,xsh->xts", q, k) * 0.5) @ v


# name -> function, arguments, layout, how many of q, k, v and the result have to be permuted in it
FORMS = {
    "lengths first": (einsum_form, BTNH, "BTNH", 0),
    "heads first": (heads_first, BNTH, "BNTH", 0),
    "heads first, matmul": (by_matmul, BNTH, "BNTH", 0),
    "heads first, masked and biased": (masked_causal_biased, BNTH, "BNTH", 0),
    "heads first, scaled by rows": (scaled_by_rows, BNTH, "BNTH", 0),
    "heads first, keys shared": (shared_keys, (BNTH[0], BNTH[1][:, 0], BNTH[2][:, 0]), "BNTH", 0),
    "heads merged into the batch": (heads_in_batch, tuple(a.reshape(6, *a.shape[2:]) for a in BNTH), "BNTH", 0),
    "exchanged and back": (exchanged_and_back, BTNH, "BTNH", 0),
    "one head": (heads_first, tuple(a[:, :1] for a in BNTH), "BNTH", 0),  # the batch is its heads
    "queries otherwise": (written("btnh", "bnsh", "bnsd", "bntd"), (BTNH[0], *BNTH[1:]), "BNTH", 1),
    "keys otherwise": (written("btnh", "bnsh", "bsnd", "btnd"), (BTNH[0], BNTH[1], BTNH[2]), "BTNH", 1),
    "result otherwise": (written("bnth", "bnsh", "bnsd", "btnd"), BNTH, "BNTH", 1),
    "keys and values otherwise": (written("btnh", "bnsh", "bnsd", "btnd"), (BTNH[0], *BNTH[1:]), "BTNH", 2),
}


def transposes(fn, *args):
    """Transposes around the fused op, equal ones once; the op has to be there, and its implementation is not looked into."""
    graph = fl.trace(fn, *args)
    found = primitives(graph)
    assert any(p.startswith(ATTENTION) for p in found)
    assert "exp" not in found
    turned = [n for n in graph.nodes() if n.primitive == "transpose"]
    return len({(n.inputs[0].id, n.params["permutation"]) for n in turned})


def same(got, want):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=1e-5 * max(1.0, float(jnp.abs(w).max())))


def step_of(fn):
    return jax.value_and_grad(weighed(fn), ALL)


@pytest.mark.parametrize("name", FORMS)
def test_the_layout_is_the_one_that_permutes_least(name):
    fn, args, layout, _ = FORMS[name]
    (site,) = fl.find(fn, *args).candidates
    assert site.attrs["layout"] == layout


@pytest.mark.parametrize("name", FORMS)
def test_nothing_else_is_permuted_forward_and_backward(name):
    """Each gradient is laid out as its operand, and the cotangent as the result."""
    fn, args, _, least = FORMS[name]
    assert transposes(fl.fuse(fn), *args) == least
    assert transposes(step_of(fl.fuse(fn)), *args) == 2 * least


@pytest.mark.parametrize("name", FORMS)
def test_nothing_else_is_permuted_in_a_step_that_is_differentiated_already(name):
    fn, args, layout, least = FORMS[name]
    step = fl.fuse(step_of(fn))
    found = step.findings(*args)
    assert [c.attrs["layout"] for c in found.candidates] == [layout]
    assert found.counts()[f"{ATTENTION}_grad"] == 1
    assert transposes(step, *args) == 2 * least
    same(step(*args), step_of(fn)(*args))


@pytest.mark.parametrize("implementation", ["xla", "xla_blockwise"])
@pytest.mark.parametrize("name", FORMS)
def test_values_and_gradients_are_those_of_the_original(name, implementation):
    fn, args, *_ = FORMS[name]
    fused = fl.fuse(fn, implementation=implementation)
    same((fused(*args), step_of(fused)(*args)), (fn(*args), step_of(fn)(*args)))


def stacked(args):
    return tuple(jnp.stack([a, 0.5 * a, -a]) for a in args)


def scanned(fn):
    """The result of each step is the next one's query."""

    def run(q, k, v):
        return jax.lax.scan(lambda h, kv: (fn(h, *kv), None), q, (k, v))[0]

    return run


def in_scan(args):
    return (args[0], *stacked(args[1:]))


AROUND = {"vmap": (jax.vmap, stacked), "scan": (scanned, in_scan)}
SQUARE = {
    "BNTH": (heads_first, SAME),
    "BTNH": (einsum_form, tuple(a.swapaxes(1, 2) for a in SAME)),
}


@pytest.mark.parametrize("layout", SQUARE)
@pytest.mark.parametrize("around", AROUND)
def test_under_vmap_and_in_a_scan_neither_layout_is_permuted(around, layout):
    """Whichever of the two is outside, and differentiated before or after."""
    fn, args = SQUARE[layout]
    transform, arguments = AROUND[around]
    args = arguments(args)
    plain = transform(fn)
    want = step_of(plain)(*args)
    programs = [step_of(fl.fuse(plain)), step_of(transform(fl.fuse(fn))), fl.fuse(step_of(plain))]
    for program in programs:
        assert transposes(program, *args) == 0
        same(program(*args), want)
    assert [c.attrs["layout"] for c in fl.find(plain, *args).candidates] == [layout]


def test_residuals_are_laid_out_as_the_op_says():
    (site,) = fl.find(heads_first, *BNTH, implementation="xla_blockwise").candidates
    saved = {r.name: r.shape for r in site.residuals}
    assert saved == {"out": (2, 3, 6, 5), "logsumexp": (2, 3, 6)}


# In the order of the operands and results; probabilities are what a small site saves.
RULES = {
    "BNTH": {
        "call": "b0 h t c, b0 h s c, b0 h s d -> b0 h t d, b0 h t s",
        "cotangent": "b0 h t c, b0 h s c, b0 h s d, b0 h t s, b0 h t d -> b0 h t c, b0 h s c, b0 h s d",
    },
    "BTNH": {
        "call": "b0 t h c, b0 s h c, b0 s h d -> b0 t h d, b0 h t s",
        "cotangent": "b0 t h c, b0 s h c, b0 s h d, b0 h t s, b0 t h d -> b0 t h c, b0 s h c, b0 s h d",
    },
}


@pytest.mark.parametrize(("fn", "args", "layout"), [(heads_first, BNTH, "BNTH"), (einsum_form, BTNH, "BTNH")])
def test_batch_and_heads_are_what_devices_may_split(fn, args, layout):
    nodes = fl.trace(step_of(fl.fuse(fn)), *args).nodes()
    ops = [n.eqn for n in nodes if n.primitive.startswith(ATTENTION)]
    found = {
        e.primitive.role: labels_of(e.primitive, e.params, *(_avals(v) for v in (e.invars, e.outvars))) for e in ops
    }
    assert {role: labels.rule()[0] for role, labels in found.items()} == RULES[layout]
    for labels in found.values():
        assert {x for x in ("b0", *"htscd") if x not in labels.whole} == {"b0", "h"}
        assert labels.sizes == {"b0": 2, "h": 3, "t": 6, "s": 7, "c": 4, "d": 5}


def _avals(atoms):
    return [a.aval for a in atoms]
