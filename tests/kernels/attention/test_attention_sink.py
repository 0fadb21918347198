"""`dot_product_attention` with a sink: one more logit in each row, whose weight is dropped."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab.errors import ArgumentError
from fusionlab.kernels.ops.dot_product_attention import DOT_PRODUCT_ATTENTION, dot_product_attention
from fusionlab.kernels.ops.dot_product_attention.blockwise import attention as blockwise

B, T, S, N, K, H, HV = 2, 5, 7, 6, 3, 8, 4
DRAW = np.random.default_rng(0)
QUERY, KEY, VALUE, CT = (DRAW.normal(size=s) for s in ((B, T, N, H), (B, S, K, H), (B, S, K, HV), (B, T, N, HV)))
MASK = DRAW.random((B, 1, T, S)) < 0.6
MASK[0, 0, 2] = False  # a row that sees no key
SHAPES = {"heads": (N,), "heads, ranked": (N, 1, 1), "rows": (B, N, T, 1), "one": (), "rows of all heads": (T, 1)}
BESIDE = {
    "nothing": ({}, {}),
    "mask": ({}, {"mask": MASK}),
    "far mask": ({}, {"mask": MASK, "mask_value": -1e9}),
    "causal": ({}, {"is_causal": True}),
    "window": ({}, {"window": (2, 1)}),
    "softcap": ({}, {"softcap": 2.0}),
    "bias and factors": ({"bias": DRAW.normal(size=(N, T, S)), "factors": DRAW.random((B, N, T, S))}, {}),
    "all": ({"factors": DRAW.random((N, 1, 1))}, {"mask": MASK, "is_causal": True, "softcap": 3.0}),
}
IMPLEMENTATIONS = ["xla", "xla_blockwise"]


def meaning(q, k, v, sink, floats, mask=None, mask_value=-np.inf, is_causal=False, window=None, softcap=None):
    """In the dtype of what it is given."""
    k, v = (jnp.repeat(a, N // K, axis=2) for a in (k, v))
    s = jnp.einsum("btnh,bsnh->bnts", q, k) * H**-0.5
    if softcap is not None:
        s = softcap * jnp.tanh(s / softcap)
    s = s + floats.get("bias", 0.0)
    if mask is not None:
        s = jnp.where(mask, s, mask_value)
    distance = np.arange(S) - np.arange(T)[:, None]
    if is_causal:
        s = jnp.where(distance <= 0, s, -jnp.inf)
    if window is not None:
        s = jnp.where((distance >= -window[0]) & (distance <= window[1]), s, -jnp.inf)
    sink = jnp.broadcast_to(sink[:, None, None] if sink.ndim == 1 else sink, (B, N, T, 1))
    p = jax.nn.softmax(jnp.concatenate([s, sink], -1), -1)[..., :-1] * floats.get("factors", 1.0)
    return jnp.einsum("bnts,bsnh->btnh", p, v)


def with_gradients(fn, dtype, sink, floats):
    def cast(tree):
        return jax.tree.map(lambda a: jnp.asarray(a, dtype), tree)

    out, pull = jax.vjp(fn, *cast((QUERY, KEY, VALUE, sink, floats)))
    return [np.asarray(a, np.float64) for a in jax.tree.leaves((out, pull(cast(CT))))]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize(
    ("shape", "beside"), [*(("heads", one) for one in BESIDE), *((one, "all") for one in SHAPES if one != "heads")]
)
def test_values_and_gradients_are_those_of_float64(shape, beside, dtype, implementation):
    floats, attrs = BESIDE[beside]
    sink = np.random.default_rng(1).normal(size=SHAPES[shape])
    with jax.enable_x64(True):
        want = with_gradients(lambda *a: meaning(*a, **attrs), "float64", sink, floats)

        def op(q, k, v, sink, floats):
            return dot_product_attention(q, k, v, sink=sink, **floats, **attrs, implementation=implementation)

        got = with_gradients(op, dtype, sink, floats)
    allowed = {"float64": 1e-12, "float32": 4e-6, "bfloat16": 4e-2}[dtype]
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=0, atol=allowed * max(1.0, np.abs(b).max()))


@pytest.mark.dear
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_forward_mode_moves_the_sink_too(implementation):
    sink, moves = DRAW.normal(size=(2, N)).astype(np.float32)
    args = [jnp.asarray(a, jnp.float32) for a in (QUERY, KEY, VALUE)]

    def op(s):
        return dot_product_attention(*args, sink=s, implementation=implementation)

    _, got = jax.jvp(op, (sink,), (moves,))
    _, want = jax.jvp(lambda s: meaning(*args, s, {}), (sink,), (moves,))
    np.testing.assert_allclose(got, want, atol=1e-5)
    hessian = jax.hessian(lambda s: jnp.sum(jnp.sin(op(s))))(sink)
    np.testing.assert_allclose(hessian, jax.hessian(lambda s: jnp.sum(jnp.sin(meaning(*args, s, {}))))(sink), atol=1e-4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("number", [-np.inf, -1e30, 90.0, 1e4])
def test_sinks_far_from_the_scores(number, implementation):
    """With all weight in them, or none of it: no NaN, and rows that see no key are 0."""
    args = [jnp.asarray(a, jnp.float32) for a in (QUERY, KEY, VALUE)]

    def total(q, s, mask):
        return jnp.sum(dot_product_attention(q, *args[1:], sink=s, mask=mask, implementation=implementation))

    value, grads = jax.value_and_grad(total, (0, 1))(args[0], jnp.full(N, number, jnp.float32), jnp.asarray(MASK))
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in grads)
    plain = jnp.sum(dot_product_attention(*args, mask=jnp.asarray(MASK)))
    np.testing.assert_allclose(value, plain if number < 0 else 0.0, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("slot", ["sink", "bias"])
@pytest.mark.parametrize("axis", [None, 0])
def test_mapped_each_of_the_batch_has_a_gradient_of_its_own(axis, slot, implementation, monkeypatch):
    """Also of an operand they share, and in blocks of fewer heads than it has."""
    monkeypatch.setattr(blockwise, "_BACKWARD_SCORES", 2 * T * S)
    queries, k, v = (jnp.asarray(a, jnp.float32) for a in (DRAW.normal(size=(3, *QUERY.shape)), KEY, VALUE))
    operand = jnp.asarray(DRAW.normal(size=(3, *((N,) if slot == "sink" else (N, T, S)))), jnp.float32)
    operand = operand if axis == 0 else operand[0]

    def total(q, a):
        return jnp.sum(jnp.sin(dot_product_attention(q, k, v, **{slot: a}, implementation=implementation)))

    got = jax.vmap(jax.grad(total, 1), (0, axis))(queries, operand)
    want = [jax.grad(total, 1)(q, operand[i] if axis == 0 else operand) for i, q in enumerate(queries)]
    np.testing.assert_allclose(got, jnp.stack(want), atol=1e-5)


@pytest.mark.parametrize("name", ["cudnn", "cuda"])
def test_the_others_refuse_it_and_say_so(name):
    shapes = {s: jax.ShapeDtypeStruct((2, 512, 8, 64), jnp.bfloat16) for s in ("query", "key", "value")}
    shapes["sink"] = jax.ShapeDtypeStruct((8,), jnp.float32)
    operands = [shapes.get(slot) for slot in DOT_PRODUCT_ATTENTION.slots]
    verdicts = {v.name: v for v in DOT_PRODUCT_ATTENTION.backends(*operands, device="sm_90")}
    assert verdicts[name].verdict == "unavailable"
    assert "a sink next to the scores" in verdicts[name].reason
    assert verdicts["xla"].verdict == "same code"
    assert verdicts["xla_blockwise"].verdict == "possible"
    left = DOT_PRODUCT_ATTENTION.left_to_xla(*operands, device="sm_90")
    assert (left.kind, DOT_PRODUCT_ATTENTION.declines) == ("device", True)
    assert "a sink next to the scores" in left.reason


WRONG = {
    "of integers": (jnp.zeros(N, jnp.int32), r"sink has dtype int32, needed one of"),
    "too wide": (jax.ShapeDtypeStruct((N,), "float64"), r"sink has dtype float64, wider than"),
    "of other heads": (jnp.zeros(N + 1), r"sink has shape \(7, 1, 1\), which does not broadcast to the rows of"),
    "of each key": (jnp.zeros((T, S)), r"needed one for each head, or \*batch, heads, query length, 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_sink_is_an_error_that_says_so(name):
    sink, message = WRONG[name]
    q, k, v = (jnp.asarray(a, jnp.float32) for a in (QUERY, KEY, VALUE))
    with pytest.raises(ArgumentError, match=message):
        DOT_PRODUCT_ATTENTION.choose(q, k, v, None, None, None, None, sink)
