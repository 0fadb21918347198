"""Matching a pattern in a canonical view: scalars captured, axes told by their part, and how far a miss got."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import pytest

from fusionlab.graph.canonical.view import CanonicalView
from fusionlab.graph.matching.match import Match, Miss, close, match
from fusionlab.graph.matching.pattern import Example, pattern_of
from fusionlab.graph.program.trace import trace

LINEAR = Example("linear", lambda x, w, b: x @ w + b, {"x": "mk", "w": "kn", "b": "n"})
SCALED = Example(
    "scaled", lambda q, k, s: jnp.exp(jnp.einsum("btc,bsc->bts", q, k) * s), {"q": "btc", "k": "bsc"}, ("s",)
)
ATTENTION = Example(
    "attention",
    lambda q, k, v, s: jnp.einsum("bts,bsd->btd", jax.nn.softmax(jnp.einsum("btc,bsc->bts", q, k) * s), v),
    {"q": "btc", "k": "bsc", "v": "bsd"},
    ("s",),
)
MASKED = Example(
    "masked",
    lambda q, k, m, s, fill: jnp.exp(jnp.where(m, jnp.einsum("btc,bsc->bts", q, k) * s, fill)),
    {"q": "btc", "k": "bsc", "m": "bts"},
    ("s", "fill"),
    frozenset({"m"}),
    {x: frozenset({"m"}) for x in "bts"},
)

X, W, B = jnp.zeros((4, 6)), jnp.zeros((6, 5)), jnp.zeros(5)
Q, K, V = jnp.zeros((2, 8, 3, 5)), jnp.zeros((2, 7, 3, 5)), jnp.zeros((2, 7, 3, 4))  # B T H D


def find(example, fn, *args):
    """(the view of fn, what matching at its result gives)."""
    view = CanonicalView(trace(fn, *args).top)
    return view, match(pattern_of(example), view, view.read(view.block.outputs[0]).nid)


def matched(example, fn, *args):
    view, found = find(example, fn, *args)
    assert isinstance(found, Match), found
    inputs = {view.ref[v.id].nid: i for i, v in enumerate(view.block.inputs)}
    return found, {name: inputs.get(nid) for name, nid in found.leaves.items()}


def missed(example, fn, *args):
    _, found = find(example, fn, *args)
    assert isinstance(found, Miss), found
    return found


def sizes(found, letter):
    return sorted(found.sizes[c] for c in found.letters[letter])


# -- leaves and axes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w, b: x @ w + b,
        lambda x, w, b: b + jnp.einsum("mk,kn->mn", x, w),
        lambda x, w, b: (w.T @ x.T).T + b[None],
        lambda x, w, b: jax.vmap(lambda row: row @ w + b)(x),
    ],
)
def test_a_linear_layer_matches_in_every_spelling(fn):
    found, leaves = matched(LINEAR, fn, X, W, B)
    assert leaves == {"x": 0, "w": 1, "b": 2}
    assert {x: sizes(found, x) for x in "mkn"} == {"m": [4], "k": [6], "n": [5]}


def test_any_number_of_row_axes_match_one_letter():
    found, _ = matched(LINEAR, lambda x, w, b: x @ w + b, jnp.zeros((2, 3, 4, 6)), W, B)
    assert sizes(found, "m") == [2, 3, 4]


def test_two_contracted_axes_match_one_letter():
    found, leaves = matched(
        LINEAR, lambda x, w, b: jnp.einsum("thd,hdn->tn", x, w) + b, jnp.zeros((8, 3, 2)), jnp.zeros((3, 2, 5)), B
    )
    assert leaves == {"x": 0, "w": 1, "b": 2}
    assert sizes(found, "k") == [2, 3]


def test_a_bias_along_the_rows_binds_the_weight_as_x():
    """(w.T @ x.T) + b is a linear layer with x and w exchanged: the match says so, and the pass must look."""
    _, leaves = matched(LINEAR, lambda x, w, b: x @ w + b[:, None], X, W, jnp.zeros(4))
    assert leaves == {"x": 1, "w": 0, "b": 2}


def test_heads_and_batch_are_both_batch_axes_of_attention():
    def attention(q, k, v):
        p = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) * 0.3)
        return jnp.einsum("bhts,bshd->bthd", p, v)

    found, leaves = matched(ATTENTION, attention, Q, K, V)
    assert leaves == {"q": 0, "k": 1, "v": 2}
    assert {x: sizes(found, x) for x in "btscd"} == {"b": [2, 3], "t": [8], "s": [7], "c": [5], "d": [4]}
    assert found.scalars["s"] == pytest.approx(0.3)


def test_one_value_may_be_query_key_and_value():
    def attention(x):
        return jnp.einsum("bts,bsd->btd", jax.nn.softmax(jnp.einsum("btc,bsc->bts", x, x) * 0.5), x)

    _, leaves = matched(ATTENTION, attention, jnp.zeros((2, 8, 5)))
    assert leaves == {"q": 0, "k": 0, "v": 0}


def test_a_mask_may_lack_any_axis_it_is_broadcast_along():
    def scores(q, k, m):
        return jnp.exp(jnp.where(m, jnp.einsum("bthd,bshd->bhts", q, k), -1e9))

    for shape in ((8, 7), (1, 1, 8, 7), (2, 1, 1, 7), (2, 3, 8, 7)):
        found, leaves = matched(MASKED, scores, Q, K, jnp.zeros(shape, bool))
        assert leaves["m"] == 2
        assert found.scalars["fill"] == -1e9


# -- scalars ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "scale"),
    [
        (lambda q, k: jnp.einsum("btc,bsc->bts", q, k) * 0.125, 0.125),
        (lambda q, k: jnp.einsum("btc,bsc->bts", q, k) / 8.0, 0.125),
        (lambda q, k: jnp.einsum("btc,bsc->bts", q / 2.0, k * 0.25), 0.125),
        (lambda q, k: jnp.einsum("btc,bsc->bts", q / jnp.sqrt(64.0), k), 0.125),
        (lambda q, k: jnp.einsum("btc,bsc->bts", q, k), 1.0),
        (lambda q, k: -jnp.einsum("btc,bsc->bts", q, k), -1.0),
    ],
    ids=["mul", "div", "both operands", "a root on q", "absent", "negated"],
)
def test_a_scale_is_captured_wherever_it_stands(fn, scale):
    found, _ = matched(SCALED, lambda q, k: jnp.exp(fn(q, k)), jnp.zeros((2, 8, 5)), jnp.zeros((2, 7, 5)))
    assert found.scalars["s"] == pytest.approx(scale, rel=1e-6)


def test_one_scalar_in_two_places_must_have_one_value():
    example = Example("twice", lambda x, y, s: jnp.exp(s * x) + jnp.sin(s * y), {"x": "m", "y": "m"}, ("s",))
    found, _ = matched(example, lambda x, y: jnp.exp(0.5 * x) + jnp.sin(y * 0.5), B, B + 1)
    assert found.scalars["s"] == 0.5
    miss = missed(example, lambda x, y: jnp.exp(0.5 * x) + jnp.sin(y * 0.25), B, B + 1)
    assert (miss.kind, miss.reason) == ("scalar", "a factor 0.25 where the pattern has s = 0.5")


def test_a_fixed_factor_must_be_met_to_two_units_in_the_last_place():
    example = Example("fixed", lambda x, y: x + 0.7 * jnp.exp(y), {"x": "m", "y": "m"})
    matched(example, lambda x, y: x + 0.7 * jnp.exp(y), B, B + 1)
    miss = missed(example, lambda x, y: x + 0.7001 * jnp.exp(y), B, B + 1)
    assert miss.kind == "scalar"


def test_close_is_two_units_of_float32():
    assert close(1.0, 1.0 + 2 * 2**-23)
    assert not close(1.0, 1.0 + 3 * 2**-23)
    assert not close(0.7978846, 0.8)
    assert not close(True, 1.5)
    assert close(float("-inf"), float("-inf"))


# -- misses -----------------------------------------------------------------------------------------------------------


def attention_with(score="bthd,bshd->bhts", axis=-1, weigh="bhts,bshd->bthd", middle=lambda s: s):
    def attention(q, k, v):
        p = jax.nn.softmax(middle(jnp.einsum(score, q, k) * 0.3), axis=axis)
        return jnp.einsum(weigh, p, v)

    return attention


@pytest.mark.parametrize("axis", [1, 2], ids=["over heads", "over queries"])
def test_a_softmax_over_another_axis_misses_on_axes(axis):
    square = jnp.zeros((2, 7, 3, 5))
    miss = missed(ATTENTION, attention_with(axis=axis), square, square + 1, square + 2)
    assert miss.kind == "axes"
    assert "plays no part in the pattern" in miss.reason


def test_weights_contracted_over_queries_miss_on_axes():
    square = jnp.zeros((2, 7, 3, 5))
    miss = missed(ATTENTION, attention_with(weigh="bhts,bthd->bshd"), square, square + 1, square + 2)
    assert miss.kind == "axes"


def test_the_nearest_miss_counts_the_nodes_that_fitted():
    total = pattern_of(ATTENTION).size
    far = missed(ATTENTION, lambda q, k, v: jnp.einsum("bts,bsd->btd", jnp.einsum("btc,bsc->bts", q, k), v),
                 jnp.zeros((2, 8, 5)), jnp.zeros((2, 7, 5)), jnp.zeros((2, 7, 4)))  # fmt: skip
    near = missed(ATTENTION, attention_with(middle=lambda s: jnp.tanh(s) * 30.0), Q, K, V)
    assert (far.total, near.total) == (total, total)
    assert far.matched == 1  # the outer product alone
    assert far.matched < near.matched < total
    assert near.reason == "tanh where the pattern has dot"


def test_two_uses_of_one_value_must_read_one_value():
    example = Example("square of sums", lambda x, y: jnp.sin(x + y) * jnp.exp(x + y), {"x": "m", "y": "m"})
    matched(example, lambda x, y: jnp.exp(y + x) * jnp.sin(x + y), B, B + 1)
    miss = missed(example, lambda x, y: jnp.sin(x + y) * jnp.exp(x + 2.0 * y), B, B + 1)
    assert miss.kind == "structure"
    assert miss.reason == "two uses of one value read different values"


def test_a_root_of_another_kind_is_a_miss_of_nothing():
    miss = missed(LINEAR, lambda x, w, b: jnp.tanh(x @ w + b), X, W, B)
    assert (miss.matched, miss.total) == (0, 2)
    assert miss.reason == "tanh where the pattern has sum"


def test_every_miss_is_logged_with_anchor_bound_nodes_and_first_failed_check(caplog):
    with caplog.at_level(logging.DEBUG, logger="fusionlab.match"):
        missed(ATTENTION, attention_with(middle=jnp.tanh), Q, K, V)
    (record,) = caplog.records
    assert record.getMessage().startswith("attention at c")
    assert "tanh where the pattern has" in record.getMessage()
    assert "bound [" in record.getMessage()
