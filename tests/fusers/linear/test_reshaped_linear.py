"""Pass gemm_epilogue where product, bias and activation have other shapes: heads that are joined, rows that are parted, windows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl

from ..checks import agree, jit, normal, weighed

X3, WH, C = normal((2, 6, 16), (16, 3, 4), (12,))
X4, W, B = normal((2, 3, 4, 16), (16, 20), (20,), seed=1)
TURNED = jnp.swapaxes(WH, 1, 2)

# name -> (program, arguments, activation)
FORMS = {
    "heads joined before the bias": (
        lambda x, w, c: jnp.einsum("btd,dnh->btnh", x, w).reshape(2, 6, 12) + c,
        (X3, WH, C),
        "none",
    ),
    "heads joined, biased, activated": (
        lambda x, w, c: jax.nn.silu(jnp.einsum("btd,dnh->btnh", x, w).reshape(2, 6, 12) + c),
        (X3, WH, C),
        "silu",
    ),
    "rows and heads joined before the bias": (
        lambda x, w, c: jnp.tanh(jnp.einsum("btd,dnh->btnh", x, w).reshape(12, 12) + c),
        (X3, WH, C),
        "tanh",
    ),
    "heads in another order than the weight's": (
        lambda x, w, c: jnp.einsum("btd,dhn->btnh", x, w).reshape(2, 6, 12) + c,
        (X3, TURNED, C),
        "none",
    ),
    "heads parted before the bias": (
        lambda x, w, c: (x @ w).reshape(2, 3, 4, 5, 4) + c.reshape(5, 4),
        (X4, W, B),
        "none",
    ),
    "rows apart again before the activation": (
        lambda x, w, c: jax.nn.gelu((x.reshape(24, 16) @ w + c).reshape(2, 3, 4, 20)),
        (X4, W, B),
        "gelu_tanh",
    ),
    "rows parted otherwise before the bias": (
        lambda x, w, c: jax.nn.relu((x.reshape(24, 16) @ w).reshape(4, 6, 20) + c),
        (X4, W, B),
        "relu",
    ),
    "windows before the activation": (
        lambda x, w, c: jax.nn.gelu((x @ w + c).reshape(2, 3, 2, 2, 20).swapaxes(1, 2).reshape(12, 2, 20)),
        (X4, W, B),
        "gelu_tanh",
    ),
    "windows before the bias": (
        lambda x, w, c: jax.nn.relu((x @ w).reshape(2, 3, 2, 2, 20).transpose(2, 0, 1, 3, 4) + c),
        (X4, W, B),
        "relu",
    ),
    "features first before the bias": (
        lambda x, w, c: jnp.tanh(jnp.moveaxis(x @ w, -1, 1).reshape(2, 20, 12) + c[:, None]),
        (X4, W, B),
        "tanh",
    ),
    "flattened before the activation": (lambda x, w, c: jax.nn.silu((x @ w + c).reshape(-1)), (X4, W, B), "silu"),
    "reshaped before both": (
        lambda x, w, c: jax.nn.relu(((x @ w).reshape(6, 4, 20) + c).reshape(24, 5, 4)),
        (X4, W, B),
        "relu",
    ),
    "without a bias": (lambda x, w: jax.nn.gelu((x @ w).reshape(6, 4, 20)), (X4, W), "gelu_tanh"),
    "of 16 bits, activated in float32": (
        lambda x, w, c: jax.nn.silu((x @ w + c).reshape(6, 4, 20).astype(jnp.float32)).astype(jnp.bfloat16),
        tuple(a.astype(jnp.bfloat16) for a in (X4, W, B)),
        "silu",
    ),
}  # fmt: skip


def site_of(fn, *args):
    found = agree(fn, *args, passes="gemm_epilogue", factor=2)
    assert not found.rejections, found.rejections
    (site,) = found.candidates
    return site


@pytest.mark.parametrize("name", FORMS)
def test_another_shape_between_is_a_view_of_the_ops_result(name):
    fn, args, act = FORMS[name]
    assert site_of(fn, *args).attrs["activation"] == act


@pytest.mark.parametrize("name", [n for n in FORMS if "16 bits" not in n])
def test_in_float64_its_values_and_gradients_are_the_programs_to_the_last_digits(name):
    fn, args, act = FORMS[name]
    with jax.enable_x64(True):
        assert site_of(fn, *(jnp.asarray(np.asarray(a, np.float64)) for a in args)).attrs["activation"] == act


@pytest.mark.parametrize("name", FORMS)
def test_differentiated_scanned_and_mapped_it_is_found_and_right(name):
    fn, (x, *weights), act = FORMS[name]

    def scanned(xs, *weights):
        return jax.lax.scan(lambda total, x: (total + fn(x, *weights).astype(jnp.float32).sum(), None), 0.0, xs)[0]

    def mapped(xs, *weights):
        return jax.vmap(lambda x: fn(x, *weights))(xs)

    for form in (scanned, mapped):
        found = agree(form, jnp.stack([x, -x, x + 1]), *weights, passes="gemm_epilogue", factor=3)
        assert [c.attrs["activation"] for c in found.candidates] == [act], (form, found.rejections)
    step = jax.value_and_grad(weighed(fn), tuple(range(len(weights) + 1)))
    found = fl.find(step, x, *weights, passes="gemm_epilogue")
    assert [c.attrs["activation"] for c in found.candidates] == [act], found.rejections
    got, want = (jit(f)(x, *weights) for f in (fl.fuse(step, passes="gemm_epilogue"), step))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        size = np.abs(np.asarray(w, np.float64)).max()
        np.testing.assert_allclose(
            np.asarray(g, np.float64), np.asarray(w, np.float64), atol=size * (2e-2 if "16" in name else 1e-5)
        )


NEAR = {
    "a bias of the rows": lambda x, w, c: (x @ w).reshape(6, 4, 20) + jnp.arange(4.0)[:, None] * c[0],
    "a bias of rows and features": lambda x, w, c: (x @ w).reshape(6, 4, 20) + jnp.outer(jnp.arange(4.0), c),
    "rows and features mixed": lambda x, w, c: (x @ w).reshape(12, 2, 20).reshape(12, 40) + jnp.concatenate([c, c]),
    "a number that is an argument": lambda x, w, c: (x @ w).reshape(6, 4, 20) + c[0],
    "a part of the features": lambda x, w, c: (x @ w).reshape(2, 3, 4, 5, 4) + c[:4],
    "features parted and turned": lambda x, w, c: (x @ w).reshape(2, 3, 4, 5, 4).swapaxes(-1, -2) + c[:5],
    "read in between": lambda x, w, c: (lambda h: (h.reshape(6, 4, 20) + c, h.sum()))(x @ w),
}


@pytest.mark.parametrize("name", NEAR)
def test_what_is_no_bias_behind_a_view_is_none(name):
    found = agree(NEAR[name], X4, W, B, passes="gemm_epilogue", factor=2)
    assert not found.candidates


def test_a_bias_whose_axes_have_another_order_behind_the_view_is_the_right_one():
    """[h, n] of a weight [k, h, n] is joined as n, h: the bias is turned with it, or the numbers are another function's."""
    x, w, c = normal((6, 16), (16, 3, 3), (9,), seed=3)
    found = agree(lambda x, w, c: jnp.einsum("td,dhn->tnh", x, w).reshape(6, 9) + c, x, w, c, passes="gemm_epilogue")
    assert len(found.candidates) == 1


@pytest.mark.parametrize("when", ["before", "behind"])
def test_a_reshape_that_transposes_first_is_no_other_reshape(when):
    x, w, b = normal((5, 5), (5, 5), (5,), seed=4)
    turned = lambda a: jax.lax.reshape(a, (5, 5), (1, 0))  # noqa: E731
    if when == "before":
        fn = lambda x, w, b: jax.nn.relu(turned(x) @ w + b)  # noqa: E731
    else:
        fn = lambda x, w, b: jax.nn.relu(turned(x @ w) + b)  # noqa: E731
    agree(fn, x, w, b, passes="gemm_epilogue")
