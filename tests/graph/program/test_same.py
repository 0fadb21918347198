"""A value made as a program makes its result: the same equations, dtypes and constants, and nothing that is merely equal in numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab.graph.canonical.view import CanonicalView
from fusionlab.graph.program.identical import computed_alike, computed_as
from fusionlab.graph.program.trace import block_of_jaxpr

KEY = jax.eval_shape(lambda: jax.random.key(0))
X = jax.ShapeDtypeStruct((3, 4), jnp.float32)


def block(fn, *args):
    return block_of_jaxpr(jax.make_jaxpr(fn)(*args))


def drawn(key, x):
    return jax.random.uniform(key, (3, 4)) * 0.5 + jnp.float32(3) * x


OTHERS = {
    "another number": lambda key, x: jax.random.uniform(key, (3, 4)) * 0.25 + jnp.float32(3) * x,
    "another order": lambda key, x: jnp.float32(3) * x + jax.random.uniform(key, (3, 4)) * 0.5,
    "an equation more": lambda key, x: jax.random.uniform(key, (3, 4)) * 0.5 * 1.0 + jnp.float32(3) * x,
    "another range": lambda key, x: jax.random.uniform(key, (3, 4), maxval=0.5) + jnp.float32(3) * x,
    "a cast there and back": lambda key, x: (
        jax.random.uniform(key, (3, 4)).astype(jnp.bfloat16).astype(jnp.float32) * 0.5 + jnp.float32(3) * x
    ),
}


@pytest.mark.parametrize("name", ["the same", "one value twice", *OTHERS])
def test_only_the_same_equations_are_the_same(name):
    program = block(drawn, KEY, X)
    fn = OTHERS.get(name, drawn)
    mine = block(lambda key, x: jnp.sin(fn(jax.random.fold_in(key, 3), jnp.cos(x))), KEY, X)
    value = mine.nodes[-1].inputs[0]
    found = computed_as(mine, value, program, CanonicalView(mine).known_inputs)
    if name in OTHERS:
        assert found is None
    else:
        assert found is not None
        assert [mine.producer[found[i].id].primitive for i in range(2)] == ["random_fold_in", "cos"]


def test_one_operand_is_one_value():
    program = block(lambda x: x * x, X)
    for fn, same in ((lambda x, y: x * x, True), (lambda x, y: x * y, False)):
        mine = block(fn, X, X)
        assert (computed_as(mine, mine.outputs[0], program, {}) is not None) is same


def test_numbers_that_were_worked_out_elsewhere_are_the_numbers():
    """As in the body of a loop of a program that is differentiated."""
    program = block(lambda x: x * (jnp.float32(1) - jnp.float32(0.25)), X)
    mine = block(lambda c, x: x * c, jax.ShapeDtypeStruct((), jnp.float32), X)
    number = mine.inputs[0].id
    assert computed_as(mine, mine.outputs[0], program, {number: 0.75}) is not None
    assert computed_as(mine, mine.outputs[0], program, {number: float(np.nextafter(np.float32(0.75), 1))}) is None
    assert computed_as(mine, mine.outputs[0], program, {}) is None


def _called(x, by):
    return jax.ffi.ffi_call("of_a_library", X)(x, by=by)


def _split(key, partitionable):
    with jax.threefry_partitionable(partitionable):
        return jax.random.split(key, 3)


@pytest.mark.parametrize(
    ("fn", "arg", "same", "other"),
    [
        (_called, X, np.zeros(3000), np.eye(1, 3000, 1500)[0]),  # printed, both are zeros with dots between
        (_called, X, np.array([1 / 3]), np.array([1 / 3 + 1e-12])),
        (_called, X, 0.0, -0.0),
        (_called, X, 2**60, 2**60 + 1),
        (_split, KEY, True, False),
    ],
)
def test_equations_with_other_parameters_are_not_the_same(fn, arg, same, other):
    made = block(
        lambda x: [fn(x, by) for by in (same, np.copy(same) if isinstance(same, np.ndarray) else same, other)], arg
    )
    first, second, third = made.outputs
    assert computed_alike(made, first, second)
    assert not computed_alike(made, first, third)
