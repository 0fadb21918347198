"""Layers that look like the op, or like one another, and are not: what a review found, each of which was a wrong program or a crash."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fusionlab as fl

from . import layer_parts as parts
from . import layer_rotary as rotary
from .layer_parts import DECODER, ENCODER, Parts
from .test_multi_transformer import PASSES, STACKED, close, counts

BF16 = jnp.bfloat16
PRE = Parts()


def layer(p, x, mask=None):
    return parts.encode(PRE, p, x, mask)


def weights(count=2):
    return [parts.params(seed) for seed in range(count)]


def lengths(found):
    """How many layers each site is, in program order."""
    return [c.attrs["layers"] for c in found.candidates]


def declined(fn, args, code, says, passes=PASSES):
    found = fl.find(fn, *args, passes=passes)
    assert not found.candidates, found
    assert any(r.code == code and says in r.sentence for r in found.rejections), found
    close(jax.jit(fn)(*args), fl.fuse(fn, passes=passes)(*args), 0.0)


# -- layers in a row --------------------------------------------------------------------------------------------------


def in_turn(*layers):
    def fn(ws, x, *shared):
        for one, p in zip(layers, ws, strict=True):
            x = one(p, x, *shared)
        return x

    return fn


def over(axis):
    """A layer whose rows are another axis of `[.., S, E]` than the last but one."""
    return lambda p, x: jnp.swapaxes(layer(p, jnp.swapaxes(x, axis, -2)), axis, -2)


def batch_swapped(p, x):
    return jnp.swapaxes(layer(p, jnp.swapaxes(x, 0, 1)), 0, 1)


def turned(p, x):
    return layer(p, jnp.swapaxes(x, 0, 1))


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        ((layer, batch_swapped), (2, 3, 16, 32)),
        ((layer, over(1)), (2, 3, 16, 32)),
        ((layer, over(0)), (16, 16, 32)),
        ((turned, turned), (16, 16, 32)),
        ((layer, lambda p, x: layer(p, x.reshape(3, 32, 32)).reshape(6, 16, 32)), (6, 16, 32)),
    ],
    ids=["batch axes exchanged", "along another axis", "along another axis of the same length", "turned", "other rows"],
)
def test_a_row_ends_where_layers_lie_otherwise(layers, shape):
    args = weights(), parts.inputs(*shape)
    fn = in_turn(*layers)
    assert lengths(fl.find(fn, *args, passes=STACKED)) == [1, 1]
    close(jax.jit(fn)(*args), fl.fuse(fn, passes=STACKED)(*args), 1e-5)


MASK = np.random.default_rng(0).random((parts.S, parts.S)) < 0.5
BIAS = np.random.default_rng(1).normal(size=(parts.S, parts.S)).astype(np.float32)
PER_HEAD = np.random.default_rng(2).normal(size=(4, parts.S, parts.S)).astype(np.float32)


@pytest.mark.parametrize(
    ("mask", "one", "two"),
    [
        (MASK, lambda m: m, lambda m: m.T),
        (MASK, lambda m: m, lambda m: ~m),
        (BIAS, lambda m: m, lambda m: 2 * m),
        (BIAS, lambda m: m, lambda m: -m),
        (BIAS, lambda m: m, lambda m: m.T),
        (PER_HEAD, lambda m: m[None], lambda m: m[:, None]),
    ],
    ids=["transposed", "not", "twice", "negative", "a bias transposed", "of heads, of the batch"],
)
def test_a_row_ends_where_masks_are_read_otherwise(mask, one, two):
    fn = in_turn(lambda p, x, m: layer(p, x, one(m)), lambda p, x, m: layer(p, x, two(m)))
    args = weights(), parts.inputs(4, parts.S, parts.E), jnp.asarray(mask)
    assert lengths(fl.find(fn, *args, passes=STACKED)) == [1, 1]
    close(jax.jit(fn)(*args), fl.fuse(fn, passes=STACKED)(*args), 1e-5)


def test_layers_with_one_mask_are_a_row():
    fn = in_turn(layer, layer)
    args = weights(), parts.inputs(), jnp.asarray(MASK)
    assert lengths(fl.find(fn, *args, passes=STACKED)) == [2]
    close(jax.jit(fn)(*args), fl.fuse(fn, passes=STACKED)(*args), 1e-5)


def wide_norms(ws, x):
    """Layers of bf16 whose norms are float32, and what the norm of the second reads."""
    read = []
    for p in ws:
        read.append(x.astype(jnp.float32))
        q, k, v = parts.separate(p, parts.layer_norm(p, "norm1", read[-1]).astype(BF16))
        x = x + parts.out(p, parts.attend(q, k, v))
        x = x + parts.mlp(p, parts.layer_norm(p, "norm2", x.astype(jnp.float32)).astype(BF16))
    return x, read[1]


@pytest.mark.parametrize("read", [False, True])
def test_a_row_ends_where_a_cast_of_what_is_between_is_returned(read):
    args = parts.of_dtype((weights(), parts.inputs()), BF16)
    fn = wide_norms if read else lambda ws, x: wide_norms(ws, x)[0]
    assert lengths(fl.find(fn, *args, passes=STACKED)) == ([1, 1] if read else [2])
    close(jax.jit(fn)(*args), fl.fuse(fn, passes=STACKED)(*args), 3e-2)


# -- masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("passes", [PASSES, STACKED], ids=["", "stacked"])
@pytest.mark.parametrize(
    "mask",
    [
        np.arange(parts.S)[:, None] > 2,
        (np.arange(parts.B * parts.S).reshape(parts.B, 1, parts.S, 1) % 5) > 0,
        np.linspace(-1, 1, parts.S, dtype=np.float32)[:, None],
        np.ones((1, 1), bool),
    ],
    ids=["of queries", "of the batch's queries", "a bias of queries", "one number"],
)
def test_a_mask_that_is_the_same_for_all_keys(mask, passes):
    fn, args = in_turn(layer, layer), (weights(), parts.inputs(), jnp.asarray(mask))
    assert sum(lengths(fl.find(fn, *args, passes=passes))) == 2
    close(jax.jit(fn)(*args), fl.fuse(fn, passes=passes)(*args), 1e-5)


# -- steps ------------------------------------------------------------------------------------------------------------


def wrapped(cache, new, step):
    """Written at a step that counts from the end where it is negative, as of any index in JAX."""
    zero = jnp.zeros((), step.dtype)
    return lax.dynamic_update_slice(cache, new, (zero, step, zero, zero))


def clamped(cache, new, step):
    """Written at 0 where the step is negative."""
    zero = jnp.zeros((), step.dtype)
    return lax.dynamic_update_slice(cache, new, (zero, step, zero, zero), allow_negative_indices=False)


def written(keys, values, length=24):
    """A layer that writes its keys and values by functions, and sees what lies in a third of the cache."""
    seen = np.arange(length) % 3 != 1

    def fn(p, x, cache, step):
        def mix(q, k, v):
            k, v = keys(cache[0], k, step), values(cache[1], v, step)
            return parts.attend(q, k, v, seen), (k, v)

        return parts.run(PRE, p, x, mix)

    cache = tuple(parts.inputs(2, length, parts.H, parts.D, seed=seed) for seed in (0, 1))
    return fn, (parts.params(), parts.inputs(2, 1, parts.E), cache)


@pytest.mark.parametrize("keys", [wrapped, clamped])
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int16, jnp.int32, jnp.uint32])
def test_a_step_of_any_dtype_writes_where_the_program_does(dtype, keys):
    fn, args = written(keys, keys, length=300)  # which an integer of 8 bits does not count to
    no_room = dtype == jnp.int8 and keys is wrapped  # -1 + 300 is 43 there, and the program's business
    # Where there is no room, at the program's own index.
    assert counts(fl.find(fn, *args, dtype(3), passes=PASSES)) == {DECODER: 1}
    fused = jax.jit(fl.fuse(fn, passes=PASSES))
    for step in (0, 3, 100, *((-1, -100) if jnp.issubdtype(dtype, jnp.signedinteger) else (200,))):
        # At an index of 8 bits XLA itself may write elsewhere in 300 places (jaxlib 0.10, older emitters): the program as it is meant.
        meant = max(step + 300 - 256, 0) if no_room and step < 0 else step
        want = jax.jit(fn)(*args, jnp.int32(meant))
        close(want, fused(*args, dtype(step)), 1e-5)


@pytest.mark.parametrize(("keys", "values"), [(wrapped, clamped), (clamped, wrapped)])
def test_a_step_that_counts_from_the_end_for_one_of_the_two_is_declined(keys, values):
    fn, args = written(keys, values)
    declined(fn, (*args, jnp.int32(-3)), "structure", "keys and values are written at different positions")


# -- what the op does not take ----------------------------------------------------------------------------------------


def plain_weights(width, heads, size, ffn, value_size=None):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape) / math.sqrt(shape[0]), jnp.float32)

    made = {name: normal(width, heads, size) for name in "qk"}
    made |= {"v": normal(width, heads, value_size or size), "out": normal(heads, value_size or size, width)}
    return made | {"up": normal(width, ffn), "down": normal(ffn, width)}


def unscaled_norm(x):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)


def plain(w, x, causal=False):
    """A layer without biases on `[B, S, E]`, its heads an axis of each weight."""
    h = unscaled_norm(x)
    q, k, v = (jnp.einsum("bse,ehd->bshd", h, w[name]) for name in "qkv")
    scores = jnp.einsum("bshd,bthd->bhst", q, k) / math.sqrt(q.shape[-1])
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((x.shape[1],) * 2, bool)), scores, -1e9)
    mixed = jnp.einsum("bhst,bthd->bshd", jax.nn.softmax(scores, -1), v)
    x = x + jnp.einsum("bshd,hde->bse", mixed, w["out"])
    return x + jax.nn.relu(unscaled_norm(x) @ w["up"]) @ w["down"]


def test_values_of_another_size_than_keys_are_declined():
    args = plain_weights(16, 4, 4, 24, value_size=6), parts.inputs(3, 8, 16)
    declined(plain, args, "structure", "the op does not accept it: ")


def test_sizes_that_the_op_takes_are_found():
    args = plain_weights(16, 4, 4, 24), parts.inputs(3, 8, 16)
    assert counts(fl.find(plain, *args, passes=PASSES)) == {ENCODER: 1}


def test_a_result_of_another_dtype_than_the_input_is_declined():
    def fn(p, x):
        """Its last norm stays float32."""
        x = x + parts.out(p, parts.attend(*parts.separate(p, x)))
        x = parts.layer_norm(p, "norm1", x.astype(jnp.float32)).astype(x.dtype)
        return parts.layer_norm(p, "norm2", (x + parts.mlp(p, x)).astype(jnp.float32))

    args = parts.of_dtype((parts.params(), parts.inputs()), BF16)
    declined(fn, args, "dtype", "the op would return bfloat16")


@pytest.mark.parametrize("causal", [False, True])
def test_one_head_whose_rows_are_heads_is_declined(causal):
    args = plain_weights(8, 1, 8, 8), parts.inputs(8, 8, 8)
    declined(functools.partial(plain, causal=causal), args, "axes", "rows along an axis of heads")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("width", "heads", "size", "ffn", "batch", "rows"),
    [(16, 4, 4, 16, 16, 16), (4, 4, 4, 4, 4, 4), (8, 2, 4, 8, 8, 8), (12, 4, 4, 24, 1, 7)],
)
def test_axes_of_one_length_are_told_apart(width, heads, size, ffn, batch, rows, causal):
    fn, args = functools.partial(plain, causal=causal), (plain_weights(width, heads, size, ffn),)
    args = (*args, parts.inputs(batch, rows, width))
    assert counts(fl.find(fn, *args, passes=PASSES)) == {ENCODER: 1}
    close(jax.jit(fn)(*args), fl.fuse(fn, passes=PASSES)(*args), 1e-5)


# -- rounding ---------------------------------------------------------------------------------------------------------


def wide_branches(p, x):
    """A stream of bf16 whose branches are made in float32, of weights that are."""
    h = parts.layer_norm(p, "norm1", x.astype(jnp.float32))
    x = x + parts.out(p, parts.attend(*parts.separate(p, h))).astype(x.dtype)
    h = parts.layer_norm(p, "norm2", x.astype(jnp.float32))
    return x + parts.mlp(p, h).astype(x.dtype)


def test_queries_of_what_is_wider_than_the_input_are_declined():
    """A softmax that is sharp makes much of what queries and keys are rounded by."""
    args = parts.params(), parts.inputs().astype(BF16)
    declined(wide_branches, args, "rounding", "reads float32, where the op reads bfloat16")


# -- rotary embeddings ------------------------------------------------------------------------------------------------


def random(*shape):
    return jnp.asarray(np.random.default_rng(3).normal(size=shape), jnp.float32)


def halves_turned(x, cos, sin):
    left, right = jnp.split(x, 2, -1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)


def width_turned(x, cos, sin):
    left, right = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate([-right, left], -1) * sin


def turned_by(turn, *tables, how=PRE):
    return rotary.encode_program(rotary.turning(how, turn), tables, layers=1)


@pytest.mark.parametrize(
    ("cos", "sin", "turn"),
    [
        (1, parts.D // 2, halves_turned),
        (parts.D // 2, 1, halves_turned),
        (1, parts.D, width_turned),
        (1, 1, width_turned),
    ],
)
def test_a_table_of_one_angle_for_all_features_is_declined(cos, sin, turn):
    tables = random(parts.S, 1, cos), random(parts.S, 1, sin)
    declined(*turned_by(turn, *tables), "rotary", "one angle")


@pytest.mark.parametrize("turn", [halves_turned, width_turned])
@pytest.mark.parametrize(
    "shape", [(parts.S, 2, 1), (parts.S, 1, 4), (2, 1)], ids=["of each", "of heads", "of each alone"]
)
def test_queries_and_keys_that_are_turned_together_by_tables_of_their_own_are_declined(turn, shape):
    def project(p, h):
        both = parts.linear(p, "qkv", h).reshape(*h.shape[:2], 3, parts.H, parts.D)
        turned = turn(both[:, :, :2], p["cos"], p["sin"])
        return turned[:, :, 0], turned[:, :, 1], both[:, :, 2]

    tables = [random(*shape, parts.D // (2 if turn is halves_turned else 1)) for _ in range(2)]
    fn, args = rotary.encode_program(Parts(project=project), tuple(tables), layers=1)
    declined(fn, args, "rotary", "tables of its own")


def found_and_close(fn, args, count, tolerance=1e-5, kind=ENCODER, passes=PASSES):
    assert counts(fl.find(fn, *args, passes=passes)) == {kind: count}
    close(jax.jit(fn)(*args), fl.fuse(fn, passes=passes)(*args), tolerance)


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("turn", [rotary.by_width, rotary.by_halves])
def test_tables_of_a_position_of_each_batch_entry_are_read_as_views_of_what_is_gathered(turn, writes):
    how = rotary.turning(rotary.LLAMA, turn)
    step = parts.STEP if writes else parts.T

    def fn(ws, cos, sin, x, cache, step, positions):
        here = {"cos": cos[positions][:, None], "sin": sin[positions][:, None]}
        for p, pair in zip(ws, cache, strict=True):
            x = (
                parts.write(how, {**p, **here}, x, pair, step)[0]
                if writes
                else parts.append(how, {**p, **here}, x, pair)[0]
            )
        return x

    ws = [parts.params(seed, kv_heads=parts.G) for seed in range(2)]
    cache = parts.caches(parts.SMAX if writes else parts.T, heads=parts.G)
    args = (ws, *rotary.tables(), parts.inputs(parts.B, 1, parts.E), cache, jnp.int32(step), jnp.arange(parts.B) + 3)
    found_and_close(fn, args, 2, kind=DECODER)


@pytest.mark.parametrize("turn", [rotary.by_width, rotary.by_halves])
def test_narrow_tables_that_are_turned_and_widened_for_queries_and_for_keys_are_read(turn):
    tables = [a.T.astype(BF16) for a in rotary.tables(length=parts.S)]
    fn, args = turned_by(lambda x, cos, sin: turn(x, cos.T.astype(x.dtype), sin.T.astype(x.dtype)), *tables)
    found_and_close(fn, args, 1)


def test_a_number_that_tables_are_made_with_may_be_given_to_a_remat():
    @jax.checkpoint
    def one(p, x, positions, base):
        def turn(x, *_):
            angles = positions[:, None] * base ** (-jnp.arange(parts.D // 2, dtype=jnp.float32) / parts.D)
            return halves_turned(x, jnp.cos(angles)[:, None], jnp.sin(angles)[:, None])

        return parts.encode(rotary.turning(PRE, turn), {**p, "cos": x, "sin": x}, x)

    def fn(ws, x, positions):
        for p in ws:
            x = one(p, x, positions, 100.0)
        return x

    args = weights(), parts.inputs(), jnp.arange(parts.S, dtype=jnp.float32)
    found_and_close(fn, args, 2)
