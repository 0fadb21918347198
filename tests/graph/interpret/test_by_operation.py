"""The float64 reference operation by operation: the same values as the compiled one, of every primitive; and when it is taken."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

from fusionlab.evidence.errors.reference import planned
from fusionlab.graph.interpret.by_operation import seconds_by_operation
from fusionlab.graph.interpret.promote import promote
from tests.graph.every_primitive import programs

X = np.linspace(0.2, 0.8, 24, dtype=np.float32).reshape(4, 6)
PROGRAMS = [p for p in programs() if not any(jnp.issubdtype(a.dtype, jax.dtypes.extended) for a in p.args)]


def both(fn, *args):
    """The values of the compiled reference and of that by operation; None where there is no reference, or only a compiled one."""
    try:
        promoted = promote(fn, *args)
        compiled = jax.tree.leaves(promoted.values(*args))
    except Exception:
        return None
    if not math.isfinite(seconds_by_operation(promoted.program)):
        return None
    promoted.run_by_operation()
    return compiled, jax.tree.leaves(promoted.values(*args))


def check_equal(compiled, by_operation):
    assert len(compiled) == len(by_operation)
    for want, got in zip(compiled, by_operation, strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        if want.dtype.kind in "fc":
            np.testing.assert_allclose(got, want, rtol=2e-13, atol=1e-14)
        else:
            np.testing.assert_array_equal(got, want)


def compilations(promoted, *args):
    """How many programs are compiled for the values."""
    compiled = []

    def heard(name, *_, **__):
        compiled.append(name)

    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(heard)
    promoted.values(*args)
    jax.monitoring.unregister_event_duration_listener(heard)
    return sum("backend_compile" in name for name in compiled)


@pytest.mark.dear
def test_every_primitive_has_the_same_values_by_operation():
    compared = 0
    for program in PROGRAMS:
        if (found := both(program.fn, *program.args)) is not None:
            check_equal(*found)
            compared += 1
    assert compared > 180


def test_loops_branches_and_rules_run_without_being_compiled():
    @jax.custom_jvp
    def cube(x):
        return x**3

    cube.defjvp(lambda primals, tangents: (cube(*primals), 5 * tangents[0]))  # not its derivative

    def body(carry, x):
        return carry * 0.5 + cube(x), carry.sum()

    def program(x, n):
        carry, sums = lax.scan(body, x[0], x, reverse=True)
        last = lax.while_loop(lambda c: c[1] < n, lambda c: (jnp.sqrt(c[0] + 1), c[1] + 1), (carry, 0))[0]
        branch = lax.switch(n, [jnp.sin, jnp.cos, jnp.tanh], last)
        return sums, branch, jax.grad(lambda y: cube(y).sum())(x), lax.fori_loop(0, n, lambda i, y: y @ y.T @ y, x)

    found = both(program, X, np.int32(2))
    assert found is not None
    check_equal(*found)
    np.testing.assert_array_equal(found[1][2], np.full((4, 6), 5.0))  # the user's own rule
    promoted = promote(program, X, np.int32(2))
    promoted.run_by_operation()
    assert not compilations(promoted, X, np.int32(2))


def test_integers_that_numpy_makes_otherwise_are_made_by_jax():
    x = np.array([np.nan, np.inf, -np.inf, 3e30, -2.5], np.float32)
    n, m = np.array([7, -7, 5], np.int32), np.array([0, 2, 40], np.int32)
    found = both(
        lambda x, n, m: (x.astype(jnp.int32), x.astype(bool), n // m, lax.div(n, m), lax.rem(n, m), n << m), x, n, m
    )
    assert found is not None
    check_equal(*found)


def test_what_numpy_makes_of_integers_of_nothing_and_of_complex_numbers_is_made_by_jax():
    x = np.linspace(0.2, 0.8, 6, dtype=np.float32)
    n = (np.arange(-64, 64, dtype=np.int8) * 3).reshape(2, 64)

    def program(x, n):
        wide = lax.dot_general(n, n, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
        counts = lax.dot_general(n > 0, n > 0, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
        bits = jnp.bitwise_and.reduce(n | 12, axis=1), jnp.bitwise_or.reduce(n & 12, axis=1)
        return wide, counts, bits, n.astype(jnp.uint8) ** 300, jnp.max(x[:0], initial=0.5), jnp.sin(x) * 2j

    found = both(program, x, n)
    assert found is not None
    check_equal(*found)


def test_a_long_while_loop_goes_on_compiled():
    def program(x, n):
        return lax.while_loop(lambda c: c[1] < n, lambda c: (jnp.sin(c[0]) + 1, c[1] + 1), (x, 0))

    found = both(program, X, np.int32(1000))
    assert found is not None
    check_equal(*found)
    promoted = promote(program, X, np.int32(1000))
    promoted.run_by_operation()
    assert compilations(promoted, X, np.int32(1000))
    assert not compilations(promoted, X, np.int32(50))


def test_small_operations_are_not_compiled_and_others_are():
    def many(x):
        for i in range(50):
            x = jnp.tanh(x * (1 + i))
        return x

    def large(x):
        for _ in range(3):
            x = x @ x
        return x

    def drawn(x):
        return many(x) * jax.random.normal(jax.random.key(0), x.shape)

    def by_operation(fn, x, grad=False):
        promoted, plan = planned(fn, (x,), {}, grad)
        return not promoted._runs.compiles, plan

    taken, plan = by_operation(many, X)
    assert taken
    assert plan.seconds < 0.1
    assert not by_operation(many, X, grad=True)[0]
    assert not by_operation(drawn, X)[0]
    assert not by_operation(large, np.zeros((1500, 1500), np.float32))[0]


def test_a_stop_ends_it_between_pieces():
    promoted, _ = planned(lambda x: jnp.tanh(x * 2), (X,), {}, False)

    def stop():
        raise KeyboardInterrupt

    promoted.told = stop
    with pytest.raises(KeyboardInterrupt):
        promoted.values(X)
