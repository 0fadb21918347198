"""Captured arrays: what may be read, what is a number, and which are equal."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.graph.canonical.blocks import views
from fusionlab.graph.matching.constants import constant_array
from fusionlab.graph.program.captured import Captured, number, readable
from fusionlab.graph.program.signature import Memo

NUMBERS = [jnp.float32(2), jnp.full((1, 1), 2.0), np.float32(2), np.array([2]), jnp.asarray(2, jnp.bfloat16), True]


@pytest.mark.parametrize("const", NUMBERS[:-1], ids=repr)
def test_arrays_of_one_entry_are_numbers(const):
    assert float(number(const)) == 2


def test_arrays_of_several_entries_and_keys_are_none():
    assert number(jnp.ones(2)) is None
    assert number(np.ones((0, 1))) is None
    assert number(jax.random.key(0)) is None
    assert number(None) is None


def test_what_is_traced_or_deleted_is_not_read():
    seen = []
    jax.vmap(lambda e: seen.append(readable(e)) or e)(jnp.ones(3))
    gone = jnp.ones(())
    gone.delete()
    assert [*seen, readable(gone), number(gone)] == [False, False, None]


def test_reading_is_no_transfer_of_the_program():
    fn = lambda x: x * jnp.float32(2) + jnp.ones((1, 4))  # noqa: E731
    x, two = jnp.ones((3, 4)), jax.device_put(np.float32(2))
    with jax.transfer_guard("disallow"):
        assert float(number(two)) == 2
        assert fl.find(lambda x: fn(x) * two, x).graph is not None


def one_of(*arrays):
    kept = Captured()
    return [kept.representative(a, jax.typeof(a)) for a in arrays]


def test_equal_arrays_are_one_and_others_are_not():
    a = np.arange(300.0, dtype=np.float32)
    b, other, narrow = a.copy(), a.copy(), a.astype(np.float16)
    other[299] += 1
    first, second, third, fourth, fifth = one_of(a, b, other, narrow, a.reshape(3, 100))
    assert first is second is a
    assert third is other
    assert fourth is narrow
    assert fifth.shape == (3, 100)


def test_zeros_of_two_signs_and_nan_are_told_by_their_bytes():
    plus, minus, nan, again = jnp.zeros(3), -jnp.zeros(3), jnp.full(3, jnp.nan), jnp.full(3, jnp.nan)
    representative, two, three, four = one_of(plus, minus, nan, again)
    assert representative is plus
    assert two is minus
    assert three is four


def test_parameters_as_they_begin_stay_apart():
    ones, again, zeros, more = jnp.ones(8), jnp.ones(8), np.zeros((3, 3)), np.zeros((3, 3))
    assert [a is b for a, b in zip(one_of(ones, again, zeros, more), (ones, again, zeros, more), strict=True)] == [
        True
    ] * 4


def test_an_array_on_another_device_is_another():
    a = jax.device_put(np.arange(3.0), jax.devices()[0])  # committed
    b = jnp.arange(3.0)
    assert one_of(a, b)[1] is b


def test_equal_constants_are_one_value_of_a_block_and_one_node_in_loops():
    def fn(x):
        def step(c, _):
            return c * jnp.asarray(np.arange(4.0, dtype=np.float32)), None

        x = x * jnp.asarray(np.arange(4.0, dtype=np.float32)) + jnp.asarray(np.arange(4.0, dtype=np.float32))
        return jax.lax.scan(step, x, None, length=2)[0]

    graph = fl.trace(fn, jnp.ones(4))
    assert len(graph.top.consts) == 1
    np.testing.assert_allclose(fl.fuse(fn)(jnp.ones(4)), fn(jnp.ones(4)))


def test_a_constant_mask_of_a_deleted_array_is_not_computed():
    gone = jnp.ones((2, 3))
    graph = fl.trace(lambda x: x + (gone > 0), jnp.ones((2, 3)))
    gone.delete()
    view, _ = next(views(graph))
    (mask,) = [n.outputs[0] for n in graph.top.nodes if n.primitive == "gt"]
    assert constant_array(view, mask, Memo()) is None
