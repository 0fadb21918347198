"""The float64 reference in pieces: the same numbers as in one piece, no piece larger than asked for, alike pieces compiled once."""

from __future__ import annotations

import functools
import itertools

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from fusionlab.graph.interpret.pieces import Loop, in_pieces, well_cut
from fusionlab.graph.interpret.promote import promote

SINGLE = 0  # bytes: every equation is a piece of its own
KEY = jax.random.key(0)


def at_most(size):
    return lambda jaxpr, consts: in_pieces(jaxpr, size, consts)


def normal(seed, *shape, dtype="float32"):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def mlp(x, w, b):
    for i in range(3):
        x = jax.nn.gelu(x @ w[i] + b[i])
    return x


def scanned(x, w, b, targets):
    """Reads entries in reverse, hands a counter on beside the floats, and stacks its results."""

    def body(carry, layer):
        x, count = carry
        w, b, t = layer
        x = jnp.tanh(x @ w + b)
        return (x, count + 1), (jnp.mean((x - t) ** 2), count)

    (x, _), (losses, counts) = jax.lax.scan(body, (x, jnp.int32(0)), (w, b, targets), reverse=True)
    return x.sum() + losses.sum(), losses, counts


def checkpointed(x, w, b):
    layer = jax.checkpoint(lambda x, w, b: jax.nn.silu(x @ w + b))
    return functools.reduce(lambda x, i: layer(x, w[i], b[i]), range(3), x)


@jax.custom_vjp
def halved(x):
    return x * 2


halved.defvjp(lambda x: (x * 2, None), lambda _, ct: (ct * 0.5,))


def with_rules(x, w, b):
    return jax.nn.relu(halved(x @ w[0])) + jax.nn.softplus(x @ w[1]) * b[0]


def dropped(x, w, b, key):
    """Draws in a loop, its key handed on; masks are those of the program's own dtype."""

    def body(carry, layer):
        x, key = carry
        key, now = jax.random.split(key)
        keep = jax.random.bernoulli(now, 0.7, x.shape)
        return (jnp.where(keep, x @ layer / 0.7, 0), key), jax.random.key_data(now)

    (x, _), keys = jax.lax.scan(body, (x, key), w)
    return x + b[0], keys


def drawn(x, w, b, key):
    """Draws alone in a loop, added up in float32: in float64 they would be other numbers."""
    total, _ = jax.lax.scan(
        lambda c, k: (c * 0.7 + jax.random.uniform(k, x.shape), None), jnp.zeros(x.shape), jax.random.split(key, 9)
    )
    return x * total


def train_step(x, w, b):
    loss, grads = jax.value_and_grad(lambda w, b: jnp.mean(mlp(x, w, b) ** 2), argnums=(0, 1))(w, b)
    return loss, jax.tree.map(lambda p, g: p - 0.1 * g, (w, b), grads)


def branched(x, w, b):
    x = jax.lax.cond(x.sum() > 0, lambda: x @ w[0], lambda: x @ w[1])
    return jax.lax.fori_loop(0, 3, lambda _, x: jnp.sin(x), x) + b[0]


TABLE = np.arange(64, dtype=np.float32).reshape(8, 8)


def captured(x, w, b):
    return jax.jit(lambda x: x @ jnp.asarray(TABLE) * 0.01)(x) @ w[0], jnp.float32(2.0), b


ARGS = (normal(1, 4, 8), normal(2, 3, 8, 8), normal(3, 3, 8))
PROGRAMS = {
    "unrolled": (mlp, ARGS),
    "bfloat16": (mlp, jax.tree.map(lambda x: x.astype("bfloat16"), ARGS)),
    "scanned": (scanned, (*ARGS, normal(4, 3, 4, 8))),
    "checkpointed": (checkpointed, ARGS),
    "custom rules": (with_rules, ARGS),
    "dropout": (dropped, (*ARGS, KEY)),
    "draws alone": (drawn, (*ARGS, KEY)),
    "a train step": (train_step, ARGS),
    "branches": (branched, ARGS),
    "captured": (captured, ARGS),
}


def both(fn, args, most_bytes, room=lambda size: False, ahead=False):
    """Outputs and gradients, flat."""
    promoted = promote(fn, *args, cut=at_most(most_bytes), room=room)
    values = promoted.values(*args)
    cotangents = jax.tree.map(lambda x: np.random.default_rng(7).normal(size=np.shape(x)), values)
    if ahead:
        promoted.compile_ahead(2, cotangents)
        programs = len(promoted._runs._compiled)
        result = promoted.values_and_gradients(cotangents, *args)
        assert programs == len(promoted._runs._compiled)
        return promoted, jax.tree.leaves(result)
    same, gradients = promoted.values_and_gradients(cotangents, *args)
    jax.tree.map(np.testing.assert_array_equal, same, values)
    return promoted, jax.tree.leaves((values, gradients))


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients_are_those_of_one_piece(name):
    fn, args = PROGRAMS[name]
    _, whole = both(fn, args, np.inf)
    promoted, pieces = both(fn, args, SINGLE)
    turns = itertools.cycle((True, True, False))  # some values stay on the device, some go to the host
    _, kept = both(fn, args, SINGLE, lambda size: next(turns), ahead=True)
    assert promoted.runs > 3
    for want, got, mixed in zip(whole, pieces, kept, strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12 * np.max(np.abs(want), initial=0))
        np.testing.assert_array_equal(mixed, got)


@pytest.mark.parametrize("name", ["scanned", "a train step"])
def test_values_alone_are_compiled_ahead_too(name):
    fn, args = PROGRAMS[name]
    promoted = promote(fn, *args, cut=at_most(SINGLE))
    promoted.compile_ahead(2)
    programs = len(promoted._runs._compiled)
    values = promoted.values(*args)
    assert programs == len(promoted._runs._compiled) > 1
    jax.tree.map(np.testing.assert_array_equal, values, promote(fn, *args, cut=at_most(SINGLE)).values(*args))


def layers_of(n, rows=16):
    def fn(x, layers):
        for up, down in layers:
            x = x + jax.nn.silu(x @ up) @ down
        return x

    return fn, (normal(1, rows, 8), [(normal(2 * i, 8, 8), normal(2 * i + 1, 8, 8)) for i in range(n)])


def test_alike_layers_are_alike_pieces_and_are_compiled_once():
    fn, args = layers_of(12)
    promoted = promote(fn, *args, cut=at_most(10_000))
    promoted.values(*args)
    assert promoted.runs >= 6
    assert len(promoted._runs._compiled) == 1


def test_no_piece_makes_more_than_it_may_and_a_loop_that_fits_stays_whole():
    fn, args = layers_of(12)
    program = promote(fn, *args, cut=at_most(10_000)).program
    assert all(sum(step.bytes for step in piece.steps) <= 10_000 for piece in program.items)
    jaxpr = jax.make_jaxpr(scanned)(*ARGS, normal(4, 3, 4, 8))
    (loop,) = [item for item in in_pieces(jaxpr, 1000).items if isinstance(item, Loop)]
    assert list(loop.times) == [2, 1, 0]
    assert not any(isinstance(item, Loop) for item in in_pieces(jaxpr, 1e9).items)


@pytest.mark.parametrize("name", ["scanned", "a train step"])
def test_each_piece_is_announced_as_planned_and_may_end_the_run(name):
    fn, args = PROGRAMS[name]
    promoted, seen = promote(fn, *args, cut=at_most(SINGLE)), []
    promoted.told = lambda: seen.append(None)
    values = promoted.values(*args)
    assert len(seen) == promoted.runs
    seen.clear()
    promoted.gradients(jax.tree.map(np.ones_like, values), *args)
    assert 3 < len(seen) <= promoted.runs_of_gradients

    def no_more():
        raise KeyboardInterrupt

    promoted.told = no_more
    with pytest.raises(KeyboardInterrupt):
        promoted.values(*args)


def test_the_plan_counts_what_waits_between_pieces():
    fn, args = layers_of(12)
    program = promote(fn, *args, cut=at_most(10_000)).program
    activations, weights = 16 * 8 * 8, 2 * 12 * 8 * 8 * 8  # bytes in float64: of x, and of all layers
    assert program.held() == weights + 2 * activations  # what a piece reads and what it makes
    assert program.held(taped=True) == weights + activations * (1 + len(program.items))


def test_a_program_is_cut_where_the_least_is_compiled():
    fn, args = layers_of(12)
    jaxpr = jax.make_jaxpr(fn)(*args)
    chosen = well_cut(jaxpr, np.inf, 1000, np.inf)
    assert len({piece.form for piece in chosen.pieces}) <= 2 < chosen.runs()
    assert well_cut(jaxpr, np.inf, 1000, held_bytes=0).runs() == 1
    assert well_cut(jaxpr, 10_000, np.inf, np.inf).runs() == in_pieces(jaxpr, 10_000).runs()
