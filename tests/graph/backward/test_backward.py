"""The backward pass of a region is found by differentiating the region and looking the result up."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex_core

import fusionlab as fl
from fusionlab.graph.backward.find import Derivatives, SumTerms, find_backward
from fusionlab.graph.canonical.view import CanonicalView
from fusionlab.graph.program.equations import slice_jaxpr

X, W, B = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(6, 8), (8, 8), (8,)]))

WEIGHTS = jnp.arange(1.0, 9.0)


def norm(x, scale):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale


def attention(q, k, v):
    return jax.nn.softmax(q @ k.swapaxes(-1, -2) * 0.3) @ v


SITES = {
    "linear": (lambda x, w, b: x @ w + b, (X, W, B)),
    "relu": (lambda x, w, b: jax.nn.relu(x @ w + b), (X, W, B)),
    "gelu, tanh": (lambda x, w, b: jax.nn.gelu(x @ w + b), (X, W, B)),
    "gelu, erf": (lambda x, w, b: jax.nn.gelu(x @ w + b, approximate=False), (X, W, B)),
    "silu": (lambda x, w, b: jax.nn.silu(x @ w + b), (X, W, B)),
    "layer norm": (norm, (X, B)),
    "attention": (attention, (X[None], X[None] + 1, X[None] * 2)),
}


def of(fn, *args):
    """(the site's region, its backward) of a program with one site that is whole."""
    found = fl.find(fn, *args)
    sites = [x for x in (*found.candidates, *found.rejections) if x.region is not None]
    region = max((x.region for x in sites), key=lambda r: len(r.nodes))
    view = CanonicalView(found.graph.top)
    return region, find_backward(view, region, Derivatives(), SumTerms(view))


@pytest.mark.parametrize("name", SITES)
@pytest.mark.parametrize(
    "after", [lambda y: jnp.sum(y * WEIGHTS), lambda y: jnp.sum(jnp.sin(y) * 3)], ids=["weights", "function"]
)
def test_every_gradient_of_a_site_is_found_and_is_what_it_is_said_to_be(name, after):
    fn, args = SITES[name]
    program = jax.value_and_grad(lambda *a: after(fn(*a)), range(len(args)))
    region, back = of(program, *args)
    assert back is not None
    assert back.absent == ()
    graph = fl.trace(program, *args)
    values = evaluated(
        graph, [*(share.value for share in back.gradients.values()), back.cotangent, region.root, *region.inputs], args
    )
    *gradients, ct, root = values[: len(back.gradients) + 2]
    leaves = values[len(back.gradients) + 2 :]
    made, pull = jax.vjp(lambda *a: jex_core.jaxpr_as_fun(region.jaxpr())(*a)[0], *leaves)
    np.testing.assert_allclose(made, root, rtol=1e-6, atol=1e-6)
    names = {v.id: n for n, v in region.leaves.items()}
    want = {names[v.id]: g for v, g in zip(region.inputs, pull(ct), strict=True)}
    for leaf, got in zip(back.gradients, gradients, strict=True):
        np.testing.assert_allclose(got, want[leaf], rtol=1e-5, atol=1e-5 * float(np.abs(want[leaf]).max()))


def evaluated(graph, values, args):
    """The values (by their names in another trace of the same program), computed."""
    of_name = {v.name: v for n in graph.top.nodes for v in n.outputs} | {v.name: v for v in graph.top.inputs}
    found = []
    for value in values:
        closed = slice_jaxpr(graph.top, graph.top.nodes, graph.top.inputs, of_name[value.name])
        found.append(np.asarray(jex_core.jaxpr_as_fun(closed)(*args)[0]))
    return found


@pytest.mark.parametrize("name", SITES)
def test_a_program_that_is_not_differentiated_has_none(name):
    fn, args = SITES[name]
    _, back = of(lambda *a: jnp.sum(fn(*a)), *args)
    assert back is None


def test_what_is_not_asked_for_is_absent():
    _, back = of(jax.grad(lambda x, w, b: jnp.sum(jnp.sin(x @ w + b)), 1), X, W, B)
    assert list(back.gradients) == ["w"]
    assert set(back.absent) == {"x", "b"}


def test_a_value_that_is_read_elsewhere_too_has_its_gradient_in_a_sum():
    def loss(x, s):
        h = jnp.sin(x)
        return jnp.sum(jnp.cos(norm(h, s)) + 2 * h)

    region, back = of(jax.grad(loss, (0, 1)), X, B)
    assert set(back.gradients) == set(region.leaves)


@pytest.mark.parametrize(
    "changed",
    [
        lambda h: jnp.where(h > 0, h, 0.01 * h),
        lambda h: jax.nn.gelu(h) * h,
        lambda h: jnp.abs(h),
    ],
)
def test_the_gradient_of_another_function_is_not_taken_for_it(changed):
    """The forward pass is a site; what is computed behind is the gradient of something else."""

    def wrong(x, w, b):
        h = x @ w + b
        y, _ = jax.vjp(jax.nn.gelu, h)
        _, pull = jax.vjp(changed, h)
        (ct,) = pull(jnp.cos(y))
        return y, ct @ w.T, x.T @ ct

    found = fl.find(wrong, X, W, B)
    view = CanonicalView(found.graph.top)
    for item in (*found.candidates, *found.rejections):
        if item.region is None or "gelu" not in getattr(item, "sentence", ""):
            continue
        back = find_backward(view, item.region, Derivatives(), SumTerms(view))
        assert back is None or "x" not in back.gradients or "w" not in back.gradients


def test_the_cotangent_of_a_plain_sum_is_a_literal():
    region, back = of(jax.value_and_grad(lambda x, w, b: jnp.sum(x @ w + b), (0, 1, 2)), X, W, B)
    assert set(back.gradients) == set(region.leaves)


def test_the_view_is_as_it_was():
    fn, args = SITES["attention"]
    found = fl.find(jax.grad(lambda *a: jnp.sin(fn(*a)).sum(), (0, 1, 2)), *args)
    view = CanonicalView(found.graph.top)
    before = len(view.nodes), len(view._table), dict(view.ref)
    (item,) = found.candidates
    assert find_backward(view, item.region, Derivatives(), SumTerms(view)) is not None
    assert (len(view.nodes), len(view._table), view.ref) == before


def test_layers_share_a_derivative():
    def deep(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w + B)
        return x.sum()

    found = fl.find(jax.grad(deep), [W, W + 1, W + 2, W + 3], X)
    view, derivatives = CanonicalView(found.graph.top), Derivatives()
    sums = SumTerms(view)
    regions = [x.region for x in (*found.candidates, *found.rejections) if x.region is not None]
    assert all(find_backward(view, r, derivatives, sums) for r in regions)
    kinds = derivatives.misses / 2  # of each the program, and the block made of it
    assert kinds <= 2
    assert derivatives.hits + kinds == len(regions)
