"""Concatenations in the canonical view: a slice that picks a part, and reductions over the axis by the parts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab.graph.canonical.view import CanonicalView
from fusionlab.graph.program.trace import trace

from ..canonical_interpreter import check_block

X, Y, ONE = (
    jnp.asarray(np.random.default_rng(i).normal(size=s)) for i, s in enumerate([(3, 4, 5), (3, 4, 2), (3, 4, 1)])
)


def rows():
    return jnp.arange(4.0)[:, None]


def both(x, y):
    return jnp.concatenate([x, y], -1)


def refs(fns, *args):
    """What each function's result is in one shared view of all of them."""
    graph = trace(lambda *a: [f(*a) for f in fns], *args)
    view = CanonicalView(graph.top)
    return [view.read(a) for a in graph.top.outputs]


SAME = {
    "a part": [
        lambda x, y, o: x,
        lambda x, y, o: both(x, y)[..., :5],
        lambda x, y, o: both(y, x)[..., 2:],
        lambda x, y, o: jnp.split(both(x, y), [5], -1)[0],
        lambda x, y, o: jax.lax.dynamic_slice_in_dim(both(y, x), 2, 5, -1),
        lambda x, y, o: both(x.swapaxes(0, 1), y.swapaxes(0, 1))[..., :5].swapaxes(0, 1),
        lambda x, y, o: jnp.concatenate([x, y[..., :0]], -1),
        lambda x, y, o: jnp.pad(x, ((0, 0), (0, 0), (1, 2)))[..., 1:6],
    ],
    "a function of a part": [
        lambda x, y, o: jnp.exp(2 * x - rows()),
        lambda x, y, o: jnp.exp(both(2 * x, y) - rows())[..., :5],
        lambda x, y, o: jnp.exp(both(y, x) * 2 - rows())[..., 2:],
    ],
    "a selection and a product": [
        lambda x, y, o: jnp.where(x > 0, x * rows(), 1.0),
        lambda x, y, o: jnp.where(both(x, y) > 0, both(x, y) * rows(), 1.0)[..., :5],
    ],
    "a part of one entry": [
        lambda x, y, o: jnp.tanh(o)[..., 0] * 3,
        lambda x, y, o: jnp.tanh(both(x, o))[..., 5] * 3,
    ],
    "a maximum": [
        lambda x, y, o: jnp.maximum(x.max(-1), o[..., 0]),
        lambda x, y, o: both(x, o).max(-1),
        lambda x, y, o: both(o, x).max(-1),
    ],
    "a sum of exponentials": [
        lambda x, y, o: jnp.exp(x).sum(-1) + jnp.exp(o)[..., 0],
        lambda x, y, o: jnp.exp(both(x, o)).sum(-1),
        lambda x, y, o: jnp.exp(both(o, x)).sum(-1),
    ],
    "below its own maximum twice": [
        lambda x, y, o: jax.nn.softmax(x),
        lambda x, y, o: jax.nn.softmax(x - x.max(-1, keepdims=True)),
    ],
}
OTHER = {
    "another part": (lambda x, y, o: both(x, y)[..., 1:6], lambda x, y, o: both(x, y)[..., 2:7]),
    "beyond a part": (lambda x, y, o: both(x, y)[..., :6], lambda x, y, o: both(x, y)[..., 1:]),
    "with what has the axis itself": (
        lambda x, y, o: (both(x, y) * jnp.arange(7.0))[..., :5],
        lambda x, y, o: x * jnp.arange(5.0),
    ),
    "of two other splits": (
        lambda x, y, o: (both(x, y) * both(y, x))[..., :5],
        lambda x, y, o: x * both(y, x)[..., :5],
    ),
    "along another axis": (lambda x, y, o: jnp.concatenate([x, x], 0)[:, :2], lambda x, y, o: x[:, :2]),
    "with a step": (lambda x, y, o: both(x, y)[..., :5:2], lambda x, y, o: x),
    "of the maximum of another": (
        lambda x, y, o: jax.nn.softmax(x - (2 * x).max(-1, keepdims=True)),
        lambda x, y, o: jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_these_are_one_value(name):
    first, *others = refs(SAME[name], X, Y, ONE)
    assert all(other == first for other in others)


@pytest.mark.parametrize("name", OTHER)
def test_these_are_two_values(name):
    first, other = refs(OTHER[name], X, Y, ONE)
    assert first != other


@pytest.mark.parametrize("name", [*SAME, *OTHER])
def test_the_view_has_the_values_of_the_program(name):
    fns = (SAME | OTHER)[name]
    found = check_block(trace(lambda *a: [f(*a) for f in fns], X, Y, ONE).top, (X, Y, ONE))
    assert not found.wrong
    assert not found.unknown


def test_a_mean_over_what_is_concatenated_stays_one_sum():
    """Of a norm, where there are no exponentials."""
    graph = trace(lambda x, o: jnp.square(both(x, o)).sum(-1), X, ONE)
    view = CanonicalView(graph.top)
    assert view.nodes[view.read(graph.top.outputs[0]).nid].op == "reduce_sum"
