"""Masks that are bands of positions: told by their values as local windows, or else operands as any other mask."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl

from ..checks import agree, close, jit, normal, primitives

ATTENTION = "dot_product_attention"
T, S = 12, 14
Q, K, V = normal((2, T, 4, 4), (2, S, 4, 4), (2, S, 4, 4))
ROW, COLUMN = np.arange(T, dtype=np.int32)[:, None], np.arange(S, dtype=np.int32)
AWAY = COLUMN - ROW
KEYS = np.arange(S) < np.array([11, 14])[:, None, None, None]


def attention(*changes):
    def attend(q, k, v, *more):
        s = jnp.einsum("bthd,bshd->bhts", q, k) * 0.5
        for change in changes:
            s = change(s, *more)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), v)

    return attend


def keeps(seen, fill=-jnp.inf):
    return lambda s, *_: jnp.where(seen, s, fill)


def of_jax(window, is_causal=False, heads=4):
    def attend(q, k, v):
        k, v = k[:, :, :heads], v[:, :, :heads]
        return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal, local_window_size=window)

    return attend


# name -> (program, further arguments, is_causal, window, the formula's words)
LOCAL = {
    "both sides": (attention(keeps((AWAY >= -3) & (AWAY <= 2))), (), False, (3, 2), "local window of 6 keys"),
    "one comparison": (attention(keeps(np.abs(AWAY) <= 3)), (), False, (3, 3), "local window of 7 keys"),
    "hidden where true": (
        attention(lambda s: jnp.where((AWAY < -3) | (AWAY > 0), -1e9, s)),
        (),
        True,
        (3, 0),
        "causal, local window of 4 keys",
    ),
    "added": (attention(lambda s: s + jnp.where(np.abs(AWAY) <= 3, 0.0, -1e9)), (), False, (3, 3), "local window"),
    "two masks, causal and a window": (
        attention(keeps(np.abs(AWAY) <= 3, -1e9), keeps(AWAY <= 0, -1e9)),
        (),
        True,
        (3, 0),
        "causal, local window of 4 keys",
    ),
    "two windows": (
        attention(keeps((AWAY >= -5) & (AWAY <= 2)), keeps((AWAY >= -3) & (AWAY <= 7))),
        (),
        False,
        (3, 2),
        "local window of 6 keys",
    ),
    "two keys": (attention(keeps((AWAY == 0) | (AWAY == -1))), (), True, (1, 0), "causal, local window of 2 keys"),
    "beside padding": (
        attention(keeps(np.abs(AWAY) <= 3), lambda s, m: jnp.where(m, s, -jnp.inf)),
        (KEYS | (COLUMN < 11),),
        False,
        (3, 3),
        "mask, local window of 7 keys",
    ),
    "jax.nn": (of_jax(3), (), False, (3, 3), "local window of 7 keys"),
    "jax.nn, causal": (of_jax((4, 9), True), (), True, (4, 0), "causal, local window of 5 keys"),
    "jax.nn, key heads shared": (
        of_jax((4, 0), heads=2),
        (),
        True,
        (4, 0),
        "causal, local window of 5 keys) @ v, 2 query heads a key head",
    ),
}


@pytest.mark.parametrize("name", LOCAL)
def test_a_band_is_a_local_window(name):
    fn, more, is_causal, window, words = LOCAL[name]
    found = agree(fn, Q, K, V, *more, passes=ATTENTION, factor=2)
    assert not found.rejections
    (site,) = found.candidates
    assert (site.attrs["is_causal"], site.attrs["window"]) == (is_causal, window)
    assert words in site.formula
    assert site.concepts == ("attention", "attention_masked")
    assert "select_n" not in primitives(found.apply()) or more
    (eqn,) = [n.eqn for n in found.apply().top.nodes if n.primitive == ATTENTION]
    assert eqn.params["window"] == window
    assert len(eqn.invars) == 3 + len(more)


HOLE = np.abs(AWAY) <= 3
HOLE[5, 5] = False
MORE = np.abs(AWAY) <= 3
MORE[7, 0] = True
# What is nearly a band, reaches the other way, or would leave a row nothing.
OTHER = {
    "a hole": HOLE,
    "one key more": MORE,
    "a first key for all": (np.abs(AWAY) <= 3) | (COLUMN == 0),
    "shifted by one": (AWAY >= -4) & (AWAY <= 2) & (COLUMN > 0) | ((ROW == 0) & (COLUMN == 1)),
    "without the row's own": (AWAY <= -1) | (ROW == 0),
    "aligned at the end": jnp.abs(AWAY - (S - T)) <= 1,
    "strided": (np.abs(AWAY) <= 6) & (AWAY % 2 == 0),
    "blocks": ROW // 4 == COLUMN // 4,
    "only what comes": AWAY >= 0,
    "one key after": AWAY <= 1,
    "of another axis": jnp.arange(4)[:, None, None] >= np.abs(AWAY),
}


@pytest.mark.parametrize("name", OTHER)
def test_what_is_no_band_is_a_mask(name):
    found = agree(attention(keeps(jnp.asarray(OTHER[name]), -1e9)), Q, K, V, passes=ATTENTION, factor=2)
    (site,) = found.candidates
    assert "window" not in site.attrs
    assert site.attrs["is_causal"] is False
    assert ", mask" in site.formula


def test_a_window_that_leaves_a_row_nothing_is_a_mask():
    seen = jnp.abs(AWAY[:, :5]) <= 3
    found = agree(attention(keeps(seen, -1e9)), Q, K[:, :5], V[:, :5], passes=ATTENTION, factor=2)
    (site,) = found.candidates
    assert "window" not in site.attrs
    two = attention(keeps(AWAY[:, :5] <= 0, -1e9), keeps((AWAY[:, :5] >= -3) & (AWAY[:, :5] <= 2), -1e9))
    close(jit(fl.fuse(two, passes=ATTENTION))(Q, K[:, :5], V[:, :5]), jit(two)(Q, K[:, :5], V[:, :5]), 2)


@pytest.mark.parametrize("fill", [-1e9, -jnp.inf])
def test_a_finite_window_beside_data_stays_an_operand(fill):
    fn = attention(keeps(np.abs(AWAY) <= 3, fill), lambda s, m: jnp.where(m, s, fill))
    hides_all = jnp.ones((2, 1, T, S), bool).at[0, 0, 2].set(COLUMN > 9)  # all that row 2 sees of its window
    args = (Q, K, V, hides_all)
    (site,) = fl.find(fn, *args, passes=ATTENTION).candidates
    assert site.attrs.get("window") == (None if fill == -1e9 else (3, 3))
    if fill == -1e9:
        close(jit(fl.fuse(fn, passes=ATTENTION))(*args), jit(fn)(*args), 2)


@pytest.mark.parametrize("name", ["one comparison", "two masks, causal and a window", "jax.nn, key heads shared"])
def test_a_train_step_with_a_local_window_is_one_op_each_way(name):
    fn = LOCAL[name][0]

    def step(q, k, v):
        return jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(fn(*a))), (0, 1, 2))(q, k, v)

    (site,) = fl.find(step, Q, K, V, passes=ATTENTION).candidates
    assert site.attrs["window"] == LOCAL[name][3]
    assert site.backward is not None
    assert site.backward.stays is None
    close(jit(fl.fuse(step, passes=ATTENTION))(Q, K, V), jit(step)(Q, K, V), 4)


def test_a_window_of_many_rows_is_fused_by_blocks():
    fn = attention(keeps(np.abs(AWAY) <= 3))
    fused = jit(fl.fuse(fn, passes=ATTENTION, implementation="xla_blockwise"))
    close(fused(Q, K, V), jit(fn)(Q, K, V), 2)
