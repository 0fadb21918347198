"""Rows 37 to 42 of multi_transformer: the op against layers written in float64 numpy, which know nothing of caches.

What a cache holds is compared with the keys and values of the whole text, what a step gives with the text computed anew.
"""

from __future__ import annotations

import functools
import math
from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab.errors import ArgumentError
from fusionlab.kernels.ops.multi_transformer import MULTI_TRANSFORMER
from fusionlab.ops import (
    TransformerLayer,
    multi_transformer,
    pack_keys,
    pack_qkv,
    pack_qkv_bias,
    rotary_tables,
    unpack_keys,
    unpack_qkv,
    unpack_qkv_bias,
)

from .reference import VALUE

TOLERANCE = {"float32": 1e-4, "float16": 1e-2}
HEADS, SIZE, TOKENS = 16, 64, 128


# The reference: float64, plain numpy, a whole text at a time.


def drawn(rng, *shape, spread=1.0):
    """Numbers that float16 holds, so that every dtype computes the same."""
    return (spread * rng.standard_normal(shape, np.float32)).astype(np.float16).astype(np.float64)


@functools.lru_cache(maxsize=8)
def parameters_of(index, heads, kv_heads):
    """One layer of heads x 64 with a feed-forward four times as wide, as float64 numpy."""
    rng, e = np.random.default_rng(index), heads * SIZE
    f, inner, hidden = 4 * e, 1 / math.sqrt(e), 1 / math.sqrt(4 * e)
    return TransformerLayer(
        norm1_scale=1 + drawn(rng, e, spread=0.1),
        norm1_bias=drawn(rng, e, spread=0.1),
        q=drawn(rng, e, heads, SIZE, spread=inner),
        k=drawn(rng, e, kv_heads, SIZE, spread=inner),
        v=drawn(rng, e, kv_heads, SIZE, spread=inner),
        q_bias=drawn(rng, heads, SIZE, spread=0.1),
        k_bias=drawn(rng, kv_heads, SIZE, spread=0.1),
        v_bias=drawn(rng, kv_heads, SIZE, spread=0.1),
        out=drawn(rng, heads, SIZE, e, spread=inner),
        out_bias=drawn(rng, e, spread=0.1),
        norm2_scale=1 + drawn(rng, e, spread=0.1),
        norm2_bias=drawn(rng, e, spread=0.1),
        up=drawn(rng, e, f, spread=inner),
        up_bias=drawn(rng, f, spread=0.1),
        down=drawn(rng, f, e, spread=hidden),
        down_bias=drawn(rng, e, spread=0.1),
    )


def parameters(count, heads=HEADS, kv_heads=None):
    return tuple(parameters_of(i, heads, kv_heads or heads) for i in range(count))


def as_dtype(tree, dtype):
    return jax.tree.map(lambda a: jnp.asarray(a, dtype), tree)


def norm(x, scale, bias, epsilon=1e-5):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon) * scale + bias


def turned(a, cos, sin, parts):
    """[B, S, N, D] by the angles of each pair: complex numbers, a pair being entry j of either half of one of the parts."""
    pieces = []
    for piece, c, s in zip(*(np.split(t, parts, -1) for t in (a, cos, sin)), strict=True):
        half = piece.shape[-1] // 2
        pairs = (piece[..., :half] + 1j * piece[..., half:]) * (c[..., :half] + 1j * s[..., :half])[..., None, :]
        pieces += [pairs.real, pairs.imag]
    return np.concatenate(pieces, -1)


def layer(x, w, *, pre_norm, activation, scores=0.0, rotary=None, parts=1, before=None):
    """(y, k, v) of one layer; `scores` is added to the scores (-inf hides), `before` are keys and values in front of its own."""
    b, s, e = x.shape
    h, d, _ = w.out.shape
    inner = norm(x, w.norm1_scale, w.norm1_bias) if pre_norm else x
    q, k, v = (
        (inner.reshape(-1, e) @ weight.reshape(e, -1) + bias.reshape(-1)).reshape(b, s, -1, d)
        for weight, bias in ((w.q, w.q_bias), (w.k, w.k_bias), (w.v, w.v_bias))
    )
    if rotary is not None:
        q, k = (turned(a, *rotary, parts) for a in (q, k))
    if before is not None:
        k, v = (np.concatenate([first, own], 1) for first, own in zip(before, (k, v), strict=True))
    wide_k, wide_v = (np.repeat(a, h // a.shape[2], 2) for a in (k, v))
    weights = np.matmul(q.transpose(0, 2, 1, 3), wide_k.transpose(0, 2, 3, 1)) / math.sqrt(d) + scores
    weights = np.exp(weights - weights.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    read = np.matmul(weights, wide_v.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3).reshape(b * s, h * d)
    a = x + (read @ w.out.reshape(h * d, e) + w.out_bias).reshape(b, s, e)
    if not pre_norm:
        a = norm(a, w.norm1_scale, w.norm1_bias)
    inner = norm(a, w.norm2_scale, w.norm2_bias) if pre_norm else a
    hidden = VALUE[activation](inner.reshape(b * s, e) @ w.up + w.up_bias)
    y = a + (hidden @ w.down + w.down_bias).reshape(b, s, e)
    return (y if pre_norm else norm(y, w.norm2_scale, w.norm2_bias)), k, v


def row(x, layers, *, before=None, **how):
    """[(y, k, v) of each layer]."""
    found = []
    for i, w in enumerate(layers):
        found.append(layer(x, w, before=None if before is None else before[i], **how))
        x = found[-1][0]
    return found


def causal(rows, keys=None):
    keys = rows if keys is None else keys
    return np.where(np.arange(keys) <= keys - rows + np.arange(rows)[:, None], 0.0, -np.inf)


def hidden_beyond(lengths, keys, start=0):
    """[B, 1, 1, keys]: -inf at the keys that are not there."""
    return np.where(np.arange(keys) < start + lengths[:, None], 0.0, -np.inf)[:, None, None]


def close(got, want, tolerance):
    got, want = np.asarray(got, np.float64), np.asarray(want)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= tolerance * max(1.0, np.abs(want).max())


PRE = {"pre_norm": True, "activation": "gelu_tanh"}


def tokens(batch, count=TOKENS, heads=HEADS):
    return drawn(np.random.default_rng(1), batch, count, heads * SIZE)


@functools.lru_cache(maxsize=8)
def plain(index, batch, length, pre_norm, activation):
    """What the layer of this index gives, of some texts and without a mask."""
    how = {"pre_norm": pre_norm, "activation": activation}
    x = plain(index - 1, batch, length, **how) if index else tokens(batch, length)
    return layer(x, parameters(index + 1)[index], **how)[0]


@functools.lru_cache(maxsize=2)
def text(count):
    """A text of two rows with three layers, causal: what every step has to agree with."""
    return row(tokens(2, count), parameters(3), scores=causal(count), **PRE)


# Row 37.


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("count", [3, 4])
@pytest.mark.parametrize("activation", ["gelu_tanh", "relu"])
@pytest.mark.parametrize("pre_norm", [True, False])
@pytest.mark.parametrize("length", [24, TOKENS])
def test_row_37_numbers_of_three_and_four_layers(dtype, count, activation, pre_norm, length):
    want = plain(count - 1, 2, length, pre_norm, activation)
    layers = as_dtype(parameters(count), dtype)
    run = jax.jit(lambda x, w: multi_transformer(x, w, pre_norm=pre_norm, activation=activation))
    got = run(jnp.asarray(tokens(2, length), dtype), layers)
    assert got.dtype == dtype
    close(got, want, TOLERANCE[dtype])


@pytest.mark.parametrize("length", [24, TOKENS])
@pytest.mark.parametrize(("dtype", "count"), [("float32", 3), ("float16", 4)])
def test_row_37_eight_texts(length, dtype, count):
    got = multi_transformer(jnp.asarray(tokens(8, length), dtype), as_dtype(parameters(count), dtype))
    close(got, plain(count - 1, 8, length, True, "gelu_tanh"), TOLERANCE[dtype])


# Row 38.


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("length", [24, TOKENS])
def test_row_38_prefill_writes_the_cache(dtype, length):
    want = text(length)
    shape = (2, length + 32, HEADS, SIZE)
    empty = [(jnp.full(shape, 7, dtype), jnp.full(shape, 7, dtype)) for _ in want]
    y, caches = multi_transformer(jnp.asarray(tokens(2, length), dtype), as_dtype(parameters(3), dtype), cache=empty)
    close(y, want[-1][0], TOLERANCE[dtype])
    for (_, *own), pair in zip(want, caches, strict=True):
        for a, cache in zip(own, pair, strict=True):
            assert cache.dtype == dtype
            close(cache[:, :length], a, TOLERANCE[dtype])
            assert (cache[:, length:] == 7).all()


def test_row_38_filling_a_cache_without_causality_attends_to_the_text_alone():
    want = row(tokens(2, 16, 4), parameters(2, 4), **PRE)[-1][0]
    y, _ = multi_transformer(jnp.asarray(tokens(2, 16, 4), "float32"), small(), cache=small_caches(24), is_causal=False)
    close(y, want, 1e-4)


@pytest.mark.parametrize(("dtype", "x"), [("float32", 4), ("float16", 8), ("bfloat16", 8)])
def test_row_38_the_packed_layout_of_keys_round_trips(dtype, x):
    keys = jnp.asarray(np.random.default_rng(0).standard_normal((2, 10, 3, 64)), dtype)
    packed = pack_keys(keys)
    assert packed.shape == (2, 3, 64 // x, 10, x)
    for d in (0, 5, 63):  # the feature d of a key stands in the piece d // x
        assert (packed[1, 2, d // x, 4, d % x] == keys[1, 4, 2, d]).all()
    assert (unpack_keys(packed) == keys).all()
    with pytest.raises(ArgumentError, match=f"multiple of {x}"):
        pack_keys(keys[..., :6])


# Row 39.


@functools.lru_cache(maxsize=1)
def a_step():
    def step(x, layers, caches, at):
        return multi_transformer(x, layers, cache=caches, step=at)

    return jax.jit(step, donate_argnums=2)


@pytest.mark.parametrize(("dtype", "spare"), [("float32", 0), ("float16", 39)])
@pytest.mark.parametrize(("start", "steps"), [(24, 9), (TOKENS, 33)])
def test_row_39_decoding_equals_computing_anew(dtype, spare, start, steps):
    end = start + steps
    want = text(end)
    x, layers = jnp.asarray(tokens(2, end), dtype), as_dtype(parameters(3), dtype)
    empty = [(jnp.zeros((2, end + spare, HEADS, SIZE), dtype),) * 2 for _ in layers]
    _, caches = multi_transformer(x[:, :start], layers, cache=empty)
    for at in range(start, end):
        y, caches = a_step()(x[:, at : at + 1], layers, caches, jnp.int32(at))
        close(y, want[-1][0][:, at : at + 1], TOLERANCE[dtype])
    for (_, *own), pair in zip(want, caches, strict=True):
        for a, cache in zip(own, pair, strict=True):
            close(cache[:, :end], a, TOLERANCE[dtype])


@pytest.mark.parametrize(("start", "end"), [(24, 33), (TOKENS, TOKENS + 33)])
def test_row_39_decoding_by_concatenation_and_several_tokens_at_once(start, end):
    want, layers = text(end), as_dtype(parameters(3), "float32")
    x = jnp.asarray(tokens(2, end), "float32")
    past = [tuple(jnp.asarray(a[:, :start], "float32") for a in own) for _, *own in want]
    given = {f"{slot}.{i}": a for i, w in enumerate(layers) for slot, a in w.slots().items()}
    given |= {f"cache_{s}.{i}": a for i, pair in enumerate(past) for s, a in zip("kv", pair, strict=True)}
    given["x"] = x[:, start:]
    y, *made = MULTI_TRANSFORMER.call(*given.values(), present=tuple(given), layers=3, cache="append", is_causal=True)
    close(y, want[-1][0][:, start:], 1e-4)
    for a, (_, *own) in zip(made, (w for w in want for _ in "k"), strict=False):
        assert a.shape == own[0].shape
    close(made[4], want[-1][1], 1e-4)
    close(made[5], want[-1][2], 1e-4)
    caches = [tuple(jnp.pad(a, ((0, 0), (0, 40), (0, 0), (0, 0))) for a in pair) for pair in past]
    y, _ = multi_transformer(x[:, start:], layers, cache=caches, step=start)
    close(y, want[-1][0][:, start:], 1e-4)


def small(dtype="float32", count=2):
    return as_dtype(parameters(count, 4), dtype)


def small_caches(room, count=2, batch=2):
    return [(jnp.zeros((batch, room, 4, SIZE)),) * 2 for _ in range(count)]


@pytest.mark.parametrize("at", [0, -1, np.int32(0), jnp.asarray([3, 0])])
def test_row_39_a_step_of_nothing_is_refused(at):
    with pytest.raises(ArgumentError, match="nothing is cached yet; fill the caches first"):
        multi_transformer(jnp.ones((2, 1, 256)), small(), cache=small_caches(8), step=at)


@pytest.mark.parametrize(
    ("at", "count", "why"),
    [(8, 1, "the caches are full"), (jnp.asarray([3, 9]), 1, "full"), (6, 3, "there is room for 2")],
)
def test_row_39_a_step_that_leaves_no_room_is_refused(at, count, why):
    with pytest.raises(ArgumentError, match=why):
        multi_transformer(jnp.ones((2, count, 256)), small(), cache=small_caches(8), step=at)


def test_row_39_the_last_place_of_a_cache_is_used():
    x = jnp.asarray(tokens(2, 8, 4), "float32")
    want = row(tokens(2, 8, 4), parameters(2, 4), scores=causal(8), **PRE)[-1][0]
    _, caches = multi_transformer(x[:, :7], small(), cache=small_caches(8))
    close(multi_transformer(x[:, 7:], small(), cache=caches, step=7)[0], want[:, 7:], 1e-4)


# Row 40, with 4 heads of 64.

LENGTHS = np.random.default_rng(3).integers(1, TOKENS + 1, 4)


def valid(a, lengths):
    """The entries of [B, S, ...] that are there."""
    return np.concatenate([np.asarray(a, np.float64)[i, :n] for i, n in enumerate(lengths)])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("pre_norm", [True, False])
def test_row_40_lengths_of_texts(dtype, pre_norm):
    x, how = tokens(4, heads=4), {"pre_norm": pre_norm, "activation": "gelu_tanh"}
    want = row(x, parameters(2, 4), scores=hidden_beyond(LENGTHS, TOKENS), **how)[-1][0]
    got = multi_transformer(jnp.asarray(x, dtype), small(dtype), lengths=jnp.asarray(LENGTHS), pre_norm=pre_norm)
    close(valid(got, LENGTHS), valid(want, LENGTHS), TOLERANCE[dtype])
    alone = multi_transformer(jnp.asarray(x[:1, : LENGTHS[0]], dtype), small(dtype), pre_norm=pre_norm)
    close(alone, want[:1, : LENGTHS[0]], TOLERANCE[dtype])


@pytest.mark.parametrize("cache_layout", ["BSHD", "BHSD"])
def test_row_40_each_text_goes_on_from_its_own_length(cache_layout):
    x, more, room = tokens(4, heads=4), drawn(np.random.default_rng(4), 4, 3, 256), 140
    wants = []
    for i, n in enumerate(LENGTHS):  # each text by itself, with what is added to it
        whole = np.concatenate([x[i : i + 1, :n], more[i : i + 1]], 1)
        wants.append(row(whole, parameters(2, 4), scores=causal(n + 3), **PRE))
    shape = (4, room, 4, SIZE) if cache_layout == "BSHD" else (4, 4, room, SIZE)
    caches = [(jnp.zeros(shape),) * 2] * 2
    options = {"cache_layout": cache_layout}
    y, caches = multi_transformer(
        jnp.asarray(x, "float32"), small(), cache=caches, lengths=jnp.asarray(LENGTHS), **options
    )
    for i, n in enumerate(LENGTHS):
        close(y[i, :n], wants[i][-1][0][0, :n], 1e-4)
    for j in range(3):
        at = jnp.asarray(LENGTHS + j, jnp.int32)
        y, caches = multi_transformer(
            jnp.asarray(more[:, j : j + 1], "float32"), small(), cache=caches, step=at, **options
        )
        for i, n in enumerate(LENGTHS):
            close(y[i, 0], wants[i][-1][0][0, n + j], 1e-4)
    for i, n in enumerate(LENGTHS):
        for (_, *own), pair in zip(wants[i], caches, strict=True):
            for a, cache in zip(own, pair, strict=True):
                held = cache if cache_layout == "BSHD" else jnp.swapaxes(cache, 1, 2)
                close(held[i, : n + 3], a[0], 1e-4)


@pytest.mark.parametrize("is_causal", [True, False])
def test_row_40_a_prefix(is_causal):
    x, rng = tokens(2, heads=4), np.random.default_rng(5)
    before = [tuple(drawn(rng, 2, 64, 4, SIZE) for _ in "kv") for _ in range(2)]
    scores = causal(TOKENS, TOKENS + 64) if is_causal else 0.0
    want = row(x, parameters(2, 4), scores=scores, before=before, **PRE)
    prefix, given = as_dtype(before, "float32"), jnp.asarray(x, "float32")
    close(multi_transformer(given, small(), prefix=prefix, is_causal=is_causal), want[-1][0], 1e-4)
    y, caches = multi_transformer(given, small(), prefix=prefix, cache=small_caches(200), is_causal=is_causal)
    close(y, want[-1][0], 1e-4)
    for (_, *own), pair in zip(want, caches, strict=True):
        for a, cache in zip(own, pair, strict=True):
            close(cache[:, : TOKENS + 64], a, 1e-4)
            assert not cache[:, TOKENS + 64 :].any()
    if not is_causal:
        return
    more = drawn(rng, 2, 1, 256)
    longer = row(
        np.concatenate([x, more], 1), parameters(2, 4), scores=causal(TOKENS + 1, TOKENS + 65), before=before, **PRE
    )
    y, _ = multi_transformer(jnp.asarray(more, "float32"), small(), cache=caches, step=TOKENS + 64)
    close(y, longer[-1][0][:, -1:], 1e-4)


def test_row_40_a_prefix_before_texts_of_some_lengths():
    x, rng = tokens(4, heads=4), np.random.default_rng(5)
    before = [tuple(drawn(rng, 4, 64, 4, SIZE) for _ in "kv") for _ in range(2)]
    scores = hidden_beyond(LENGTHS, TOKENS + 64, start=64)
    want = row(x, parameters(2, 4), scores=scores, before=before, **PRE)[-1][0]
    got = multi_transformer(
        jnp.asarray(x, "float32"), small(), prefix=as_dtype(before, "float32"), lengths=jnp.asarray(LENGTHS)
    )
    close(valid(got, LENGTHS), valid(want, LENGTHS), 1e-4)


def angles(positions, dims, size=SIZE):
    """cos and sin of [*S, size]: pair j of m turns by position / 10000^(j / m), written out."""
    half = size // (2 * dims)
    tables = [p[..., None] * np.array([10000.0 ** (-j / half) for j in range(half)]) for p in positions[:dims]]
    whole = np.concatenate([a for t in tables for a in (t, t)], -1)
    return np.cos(whole), np.sin(whole)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("dims", [1, 2])
def test_row_40_rotary_angles_with_and_without_a_cache(dims, dtype):
    count = TOKENS + 4
    x = tokens(2, count, 4)
    positions = (np.arange(count), np.arange(count) // 3 + 5)[:dims]
    cos, sin = angles(positions, dims)
    tables = rotary_tables(*map(jnp.asarray, positions), size=SIZE)
    for ours, theirs in zip(tables, (cos, sin), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)  # float32 angles of up to 132

    def part(start, end):
        return {"rotary": tuple(t[start:end] for t in tables), "rotary_dims": dims}

    one = {"rotary": (cos, sin), "parts": dims}
    x32, layers = jnp.asarray(x, dtype), small(dtype)
    want = row(x, parameters(2, 4), **one, **PRE)[-1][0]
    close(multi_transformer(x32, layers, **part(0, count)), want, TOLERANCE[dtype])
    unturned = row(x, parameters(2, 4), **PRE)[-1][0]
    assert np.abs(want - unturned).max() > 0.1
    want = row(x, parameters(2, 4), scores=causal(count), **one, **PRE)
    caches = as_dtype(small_caches(150), dtype)
    y, caches = multi_transformer(x32[:, :TOKENS], layers, cache=caches, **part(0, TOKENS))
    close(y, want[-1][0][:, :TOKENS], TOLERANCE[dtype])
    for at in range(TOKENS, count):
        y, caches = multi_transformer(x32[:, at : at + 1], layers, cache=caches, step=at, **part(at, at + 1))
        close(y, want[-1][0][:, at : at + 1], TOLERANCE[dtype])
    close(caches[-1][0][:, :count], want[-1][1], TOLERANCE[dtype])


def test_row_40_a_part_of_a_head_and_positions_of_each_row():
    x, positions = tokens(2, 16, 4), np.stack([np.arange(16), 20 + np.arange(16)])
    cos, sin = angles((positions,), 1, 32)
    beside = np.ones((2, 16, 16)), np.zeros((2, 16, 16))  # features 32 to 64 are pairs that do not turn
    halves = [np.split(t, 2, -1) for t in (cos, sin)]
    # The pairs of the first 32 features are (j, j + 16); of a whole head they would be (j, j + 32).
    order = np.r_[0:16, 32:48, 16:32, 48:64]
    whole = [np.concatenate([a, o, b, o], -1) for (a, b), o in zip(halves, beside, strict=True)]
    layers = [
        replace(w, q=w.q[..., order], k=w.k[..., order], q_bias=w.q_bias[..., order], k_bias=w.k_bias[..., order])
        for w in parameters(2, 4)
    ]
    want = row(x, layers, rotary=whole, **PRE)[-1][0]
    got = multi_transformer(jnp.asarray(x, "float32"), small(), rotary=(jnp.asarray(cos), jnp.asarray(sin)))
    close(got, want, 1e-4)


# Row 41, with 4 heads of 64.


@pytest.mark.parametrize("kind", ["bool", "int32", "int8", "float32"])
@pytest.mark.parametrize("shape", [(2, 1), (2, 4), (1, 4), (1, 1)])
def test_row_41_masks_of_batch_and_heads(kind, shape):
    rng, x = np.random.default_rng(6), tokens(2, 32, 4)
    seen = rng.random((*shape, 32, 32)) < 0.5
    seen[..., 0] = True
    bias = drawn(rng, *seen.shape)
    scores = np.where(seen, bias if kind == "float32" else 0.0, -1e9)
    mask = jnp.asarray(scores if kind == "float32" else seen, kind)
    want = row(x, parameters(2, 4), scores=scores, **PRE)[-1][0]
    close(multi_transformer(jnp.asarray(x, "float32"), small(), mask=mask), want, 1e-4)
    want = row(x, parameters(2, 4), scores=scores + causal(32), **PRE)[-1][0]
    close(multi_transformer(jnp.asarray(x, "float32"), small(), mask=mask, is_causal=True), want, 1e-4)


@pytest.mark.parametrize("kind", ["bool", "int32", "float32"])
def test_row_41_a_mask_over_the_cache(kind):
    rng, x = np.random.default_rng(6), tokens(2, 32, 4)
    seen = rng.random((2, 4, 32, 40)) < 0.5
    seen[..., 0] = True
    scores = np.where(seen, 0.0, -1e9)
    want = row(x, parameters(2, 4), scores=scores[..., :32] + causal(32), **PRE)[-1][0]
    mask = jnp.asarray(scores if kind == "float32" else seen, kind)
    x32 = jnp.asarray(x, "float32")
    y, caches = multi_transformer(x32[:, :30], small(), cache=small_caches(40), mask=mask[:, :, :30, :30])
    close(y, want[:, :30], 1e-4)
    y, _ = multi_transformer(x32[:, 30:], small(), cache=caches, step=30, mask=mask[:, :, 30:])
    close(y, want[:, 30:], 1e-4)


@pytest.mark.parametrize("shape", [(2, 3, 32, 32), (2, 12, 32, 32), (3, 1, 32, 32), (2, 1, 32, 31), (2, 32, 32)])
def test_row_41_masks_of_other_sizes_are_refused(shape):
    with pytest.raises(ArgumentError, match=r"mask has shape .*, needed \[1 or 2, 1 or 4, 1 or 32, 32\]"):
        multi_transformer(jnp.ones((2, 32, 256)), small(), mask=jnp.ones(shape, bool))


# Row 42.


@pytest.mark.parametrize("layout", ["packed", "interleaved", "concatenated"])
@pytest.mark.parametrize("by_head", [True, False])
def test_row_42_weights_are_laid_out_anew_and_back(layout, by_head):
    rng, e, h, d = np.random.default_rng(7), 24, 3, 8
    three = [rng.standard_normal((e, h, d)).astype(np.float32) for _ in range(3)]
    biases = [rng.standard_normal((h, d)).astype(np.float32) for _ in range(3)]
    given = three if by_head else [a.reshape(e, h * d) for a in three]
    given_biases = biases if by_head else [a.reshape(h * d) for a in biases]
    copies = [a.copy() for a in (*given, *given_biases)]
    heads = {} if by_head else {"heads": h}
    packed = pack_qkv(*given, layout=layout, **heads)
    bias = pack_qkv_bias(*given_biases, layout=layout, **heads)
    expected = {"packed": (3, h, d, e), "interleaved": (e, h, 3, d), "concatenated": (e, 3 * h * d)}
    assert packed.shape == expected[layout]
    back = unpack_qkv(packed, layout=layout, heads=h)
    for a, b in zip((*back, *unpack_qkv_bias(bias, layout=layout, heads=h)), (*three, *biases), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip((*given, *given_biases), copies, strict=True):
        np.testing.assert_array_equal(a, b)


def test_row_42_each_layout_is_where_it_is_said_to_be():
    rng = np.random.default_rng(8)
    q, k, v = (rng.standard_normal((24, 3, 8)).astype(np.float32) for _ in range(3))
    packed, interleaved, side_by_side = (pack_qkv(q, k, v, layout=n) for n in ("packed", "interleaved", "concatenated"))
    for i, a in enumerate((q, k, v)):
        np.testing.assert_array_equal(packed[i], a.transpose(1, 2, 0))
        np.testing.assert_array_equal(interleaved[:, :, i], a)
        np.testing.assert_array_equal(side_by_side[:, 24 * i : 24 * (i + 1)], a.reshape(24, 24))
    np.testing.assert_array_equal(pack_qkv(*unpack_qkv(interleaved, layout="interleaved")), packed)
    np.testing.assert_array_equal(pack_qkv(*unpack_qkv(side_by_side, layout="concatenated", heads=3)), packed)


@pytest.mark.parametrize("layout", ["packed", "interleaved", "concatenated"])
def test_row_42_repacked_weights_compute_the_same_and_the_old_ones_still_do(layout):
    x, layers = jnp.asarray(tokens(2, 16, 4), "float32"), small()
    kept = [{f.name: getattr(w, f.name) for f in fields(w)} for w in layers]
    want = row(tokens(2, 16, 4), parameters(2, 4), **PRE)[-1][0]

    def repacked(w):
        one = {
            "qkv": pack_qkv(w.q, w.k, w.v, layout=layout),
            "qkv_bias": pack_qkv_bias(w.q_bias, w.k_bias, w.v_bias, layout=layout),
        }
        return replace(w, **one, **dict.fromkeys(("q", "k", "v", "q_bias", "k_bias", "v_bias")))

    packed = [repacked(w) for w in layers]
    assert [w.layout for w in packed] == [layout] * 2
    close(multi_transformer(x, packed), want, 1e-4)
    close(multi_transformer(x, layers), want, 1e-4)
    assert all(getattr(w, name) is a for w, before in zip(layers, kept, strict=True) for name, a in before.items())
    # A projection that is read elsewhere too.
    logits = jax.jit(lambda x, w: multi_transformer(x, repacked(w)) @ w.q.reshape(256, -1))(x, layers[0])
    alone = row(tokens(2, 16, 4), parameters(1, 4), **PRE)[-1][0]
    close(logits, alone @ parameters(1, 4)[0].q.reshape(256, -1), 1e-4)


def test_row_42_fewer_key_heads_lie_side_by_side():
    x, layers = tokens(2, 16, 4), parameters(2, 4, 2)
    want = row(x, layers, scores=causal(16), **PRE)[-1][0]
    separate = as_dtype(layers, "float32")
    close(multi_transformer(jnp.asarray(x, "float32"), separate, is_causal=True), want, 1e-4)
    packed = [
        replace(
            w,
            qkv=pack_qkv(w.q, w.k, w.v, layout="concatenated"),
            qkv_bias=pack_qkv_bias(w.q_bias, w.k_bias, w.v_bias, layout="concatenated"),
            **dict.fromkeys(("q", "k", "v", "q_bias", "k_bias", "v_bias")),
        )
        for w in separate
    ]
    close(multi_transformer(jnp.asarray(x, "float32"), packed, is_causal=True, kv_heads=2), want, 1e-4)
    with pytest.raises(ArgumentError, match="needed alike for layout='packed'"):
        pack_qkv(separate[0].q, separate[0].k, separate[0].v)
