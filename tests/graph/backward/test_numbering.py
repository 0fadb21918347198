"""Values with one number are equal in the same trips of the loops around them, and others have numbers of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.graph.backward.numbering import Numbering

X = jax.ShapeDtypeStruct((4, 4), "float32")
TABLE = np.arange(16, dtype="float32").reshape(4, 4)


def groups(fn, *args, of="sin"):
    """How often each number occurs among the results of a primitive, largest first."""
    graph = fl.trace(fn, *args)
    numbers = Numbering(graph).of
    found = [numbers[v.id] for n in graph.nodes() if n.primitive == of for v in n.outputs]
    return sorted((found.count(n) for n in set(found)), reverse=True)


def over(body, xs, reverse=False, carry=0.0):
    return jax.lax.scan(lambda c, x: (c, body(x)), carry, xs, reverse=reverse)[1]


def both(first, second):
    return lambda *args: (first(*args), second(*args))


def chosen(x, at):
    return jax.lax.cond(x[at, at] > 0, jnp.cos, jnp.tanh, x)


def looped(x, times, to=jnp.cos):
    return jax.lax.fori_loop(0, times, lambda i, x: to(x), x)


def twice(x, added):
    """Two while loops, one in the other, that begin with the same."""
    times = x[0, 0].astype(int)
    return jax.lax.fori_loop(
        0, times, lambda i, v: jax.lax.fori_loop(0, times, lambda j, v: v + added(i, j).astype(float), v), x
    )


def halved(x, least):
    return jax.lax.while_loop(lambda x: x.sum() > least, lambda x: x / 2, x)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: (jnp.sin(x), jnp.sin(x), jnp.sin(x + 1)), [2, 1]),
        (lambda x: (jnp.sin(x * 2), jnp.sin(x * 2.5)), [1, 1]),  # literals
        (lambda x: (jnp.sin(x[:2]), jnp.sin(x[2:])), [1, 1]),  # parameters
        (lambda x: [jnp.sin(x.at[x[0].astype(int)].get(mode="fill", fill_value=f)) for f in (0.0, -0.0, 0.0)], [2, 1]),
        (lambda x: (jnp.sin(x @ TABLE), jnp.sin(x @ TABLE)), [2]),  # one captured array
        (lambda x: (jnp.sin(x @ TABLE), jnp.sin(x @ (2 * TABLE))), [1, 1]),  # two
        # One entry of one array, whichever way the scan runs.
        (both(lambda x: over(jnp.sin, x), lambda x: over(jnp.sin, x, reverse=True)), [2]),
        (both(lambda x: over(jnp.sin, x), lambda x: over(jnp.sin, x.T)), [1, 1]),
        # The results of a scan, entry by entry, in the next.
        (lambda x: over(lambda a: jnp.sin(a[0]), (over(jnp.cos, x), over(lambda a: jnp.sin(jnp.cos(a)), x))), [2]),
        # Checkpoints and branches are read through.
        (both(jnp.sin, jax.checkpoint(jnp.sin)), [2]),
        (both(jnp.sin, lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)), [2]),
        (both(lambda x: jnp.sin(chosen(x, 0)), lambda x: (jnp.sin(chosen(x, 0)), jnp.sin(chosen(x, 1)))), [2, 1]),
        # Loops that begin with the same and do the same.
        (lambda x: [jnp.sin(looped(x, 3)) for _ in range(2)], [2]),
        (lambda x: [jnp.sin(looped(x, n)) for n in (3, 4)], [1, 1]),
        (lambda x: [jnp.sin(looped(y, 3)) for y in (x, x.T)], [1, 1]),
        (lambda x: [jnp.sin(looped(x, 3, to)) for to in (jnp.cos, jnp.tanh)], [1, 1]),
        (lambda x: [jnp.sin(twice(x, add)) for add in (lambda i, j: i, lambda i, j: j)], [1, 1]),
        (lambda x: [jnp.sin(halved(x, 1.0)) for _ in range(2)], [2]),
        (lambda x: [jnp.sin(halved(x, least)) for least in (1.0, 2.0)], [1, 1]),
    ],
)  # fmt: skip
def test_what_is_computed_alike(fn, expected):
    assert groups(fn, X) == expected


def test_the_entry_of_an_outer_loop_is_not_that_of_an_inner_one():
    def fn(x):
        outer = over(lambda a: over(lambda _: jnp.sin(a), jnp.arange(4)), x)
        inner = over(lambda _: over(jnp.sin, x), jnp.arange(4))
        return outer, inner

    assert groups(fn, X) == [1, 1]


def test_a_carry_is_that_of_a_loop_that_does_the_same():
    def fn(x):
        def turned(c, a):
            return (c[1], c[0]), jnp.sin(c[0])

        def grown(c, a):
            return (c[0] + 1, c[1]), jnp.sin(c[0])

        start = x[0], x[1]
        runs = [
            (turned, start, False),
            (turned, start, False),
            (grown, start, False),
            (turned, start[::-1], False),
            (turned, start, True),
        ]
        return [jax.lax.scan(body, first, x, reverse=back)[1] for body, first, back in runs], jnp.sin(x[0])

    assert groups(fn, X) == [2, 1, 1, 1, 1]


def test_what_is_drawn_in_a_loop_is_equal_to_nothing():
    def drawn(x):
        def body(c, a):
            return c + jax.lax.rng_uniform(jnp.float32(0), jnp.float32(1), (4,)), jnp.sin(c)

        return jax.lax.scan(body, x[0], x)

    assert groups(both(drawn, drawn), X) == [1, 1]


def test_random_bits_of_one_key():
    def fn(key, x):
        a, b = jax.random.split(key)
        return [jnp.sin(jax.random.uniform(k, (4,))) for k in (a, a, b)]

    assert groups(fn, jax.random.key(0), X) == [2, 1]


def test_keys_that_are_split_in_two_ways():
    def fn(key):
        found = []
        for flag in (True, False, True):
            with jax.threefry_partitionable(flag):
                found.append(jnp.sin(jax.random.uniform(jax.random.split(key, 3)[1], (4,))))
        return found

    assert groups(fn, jax.random.key(0)) == [2, 1]


def test_what_is_no_function_of_its_operands_is_equal_to_nothing():
    def drawn():
        return jnp.sin(jax.lax.rng_uniform(jnp.float32(0), jnp.float32(1), (4,)))

    def called(by):
        return jnp.sin(jax.ffi.ffi_call("of_a_library", X)(TABLE, by=by))

    assert groups(lambda: (drawn(), drawn())) == [1, 1]
    assert groups(lambda: (called(np.zeros(3000)), called(np.eye(1, 3000, 1500)[0]))) == [1, 1]


def test_scatters_differ_by_name_and_reductions_by_their_programs():
    def fn(x):
        added, multiplied = x.at[0].add(2.0), x.at[0].multiply(2.0)
        reduced = [jax.lax.reduce(x, 1.0, to, (0,)) for to in (lambda a, b: a * b + 1, lambda a, b: a * b + 2)]
        return [jnp.sin(a) for a in (added, x.at[0].add(2.0), multiplied, *reduced)]

    assert groups(fn, X) == [2, 1, 1, 1]


def test_effects_are_not_shared():
    def called(x):
        return jax.experimental.io_callback(lambda x: np.asarray(x), X, x)

    assert groups(lambda x: (jnp.sin(called(x)), jnp.sin(called(x))), X) == [1, 1]
