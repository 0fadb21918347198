"""Sums that the op which alone reads them adds up itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab.graph.rewriting.fold_sums import without_sums
from fusionlab.ops import layer_norm, layer_norm_and_sum
from tests.kernels.transformations import adding

X, A, B, C, D, E = (a.astype(jnp.bfloat16) for a in jax.random.normal(jax.random.key(0), (6, 5, 16)))


def backward(ct):
    return jax.vjp(layer_norm, X)[1](ct)[0]


def equations(fn, *args):
    """Additions and ops of the program with sums taken: (name, as how many arrays each cotangent is given)."""
    jaxpr = jax.make_jaxpr(adding(fn))(*args).jaxpr
    wanted = ("add", "add_any", "layer_norm_cotangent")
    return [(e.primitive.name, e.params.get("given")) for e in jaxpr.eqns if e.primitive.name in wanted]


def same(fn, *args):
    with jax.disable_jit():  # compiled, XLA may leave out the rounding between two additions
        got, want = adding(fn)(*args), fn(*args)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(g).tobytes() == np.asarray(w).tobytes()


CHAINS = {
    "two": (lambda a, b, c, d, e: a + b, 2),
    "from the left": (lambda a, b, c, d, e: ((a + b) + c) + d, 4),
    "from the right": (lambda a, b, c, d, e: a + (b + (c + d)), 4),
    "from both sides": (lambda a, b, c, d, e: d + ((a + b) + c), 4),
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_of_additions_is_taken_and_added_up_in_its_order(name):
    total, count = CHAINS[name]
    fn = lambda *terms: backward(total(*terms))  # noqa: E731
    assert equations(fn, A, B, C, D, E) == [("layer_norm_cotangent", (count,))]
    same(fn, A, B, C, D, E)


def test_what_is_more_than_the_op_takes_is_added_up_before_it():
    fn = lambda *terms: backward((((terms[0] + terms[1]) + terms[2]) + terms[3]) + terms[4])  # noqa: E731
    assert equations(fn, A, B, C, D, E) == [("add", None), ("layer_norm_cotangent", (4,))]
    same(fn, A, B, C, D, E)


def test_a_sum_of_two_sums_keeps_one_of_them():
    """(a + b) + (c + d) is not ((a + b) + c) + d once every sum is rounded."""
    fn = lambda a, b, c, d: backward((a + b) + (c + d))  # noqa: E731
    assert equations(fn, A, B, C, D) == [("add", None), ("layer_norm_cotangent", (3,))]
    same(fn, A, B, C, D)


READ_ELSEWHERE = {
    "returned": lambda a, b: (lambda total: (backward(total), total))(a + b),
    "read twice": lambda a, b: (lambda total: (backward(total), jnp.sin(total)))(a + b),
    "by two norms": lambda a, b: (lambda total: (backward(total), jax.vjp(layer_norm, D)[1](total)))(a + b),
}


@pytest.mark.parametrize("name", READ_ELSEWHERE)
def test_a_sum_that_is_read_elsewhere_stays(name):
    found = equations(READ_ELSEWHERE[name], A, B)
    assert found[0] == ("add", None)
    assert all(given is None for _, given in found)


def test_a_sum_inside_a_sum_that_is_read_elsewhere_is_a_term():
    def fn(a, b, c):
        inner = a + b
        return backward(inner + c), jnp.sin(inner)

    assert equations(fn, A, B, C) == [("add", None), ("layer_norm_cotangent", (2,))]
    same(fn, A, B, C)


def test_what_is_no_addition_of_two_arrays_of_one_type_stays():
    for fn in (
        lambda a: backward(a * 2),
        lambda a: backward(a - B),
        lambda a: backward((a + B).reshape(5, 4, 4).reshape(5, 16)),
        lambda a: backward((a.astype(jnp.float32) + a.astype(jnp.float32)).astype(a.dtype)),
    ):
        assert all(given is None for _, given in equations(fn, A))
    # One array twice is a sum of two as any other.
    assert equations(lambda a: backward(a + a), A) == [("layer_norm_cotangent", (2,))]
    same(lambda a: backward(a + a), A)


def test_of_two_results_only_the_cotangent_that_the_op_adds_up_is_taken():
    def fn(a, b, c, d):
        return jax.vjp(lambda x: layer_norm_and_sum(x, residual=E), X)[1]((a + b, c + d))[0]

    assert equations(fn, A, B, C, D) == [("add", None), ("layer_norm_cotangent", (2, True))]
    same(fn, A, B, C, D)


def test_a_program_without_such_ops_is_left_as_it_is():
    eqns = list(jax.make_jaxpr(lambda a, b: jnp.sin(a + b))(A, B).jaxpr.eqns)
    assert without_sums(eqns, []) is eqns
