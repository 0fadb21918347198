"""Ops that multiply operands of 16 bits and sum in float32, batched along any operand: XLA's CPU backend lacks some of these products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab import ops
from fusionlab.kernels.ops.gemm_epilogue.op import GEMM_EPILOGUE

ROWS, E, V = 6, 8, 16
LABELS = jnp.arange(ROWS)
MEAN = jnp.full(ROWS, 1 / ROWS)
COLUMNS = (((0,), (1,)), ((), ()))


def summed(y):
    return jnp.sum(jnp.sin(y.astype(jnp.promote_types(y.dtype, jnp.float32))))


def mean_loss(x, w):
    return jnp.sum(jax.nn.logsumexp(x @ w, -1) - (x @ w)[LABELS, LABELS]) / ROWS


def epilogue(x, w, x_contract=1, w_contract=0, out=None):
    how = {"activation": "gelu_tanh", "x_contract": x_contract, "w_contract": w_contract, "wide": "product", "out": out}
    return summed(GEMM_EPILOGUE.call_by_name(x=x, w=w, bias=None, **how))


def loss(x, w, **how):
    return ops.linear_cross_entropy(x, w, LABELS, **how)


# name -> (the op in a scalar, the same in plain code, the shapes of its operands)
CALLS = {
    "mean": (lambda x, w: loss(x, w, weights=MEAN), mean_loss, ((ROWS, E), (E, V))),
    "mean, logits of 16 bits": (
        lambda x, w: loss(x, w, weights=MEAN, logits_dtype=x.dtype),
        mean_loss,
        ((ROWS, E), (E, V)),
    ),
    "mean, chunked": (
        lambda x, w: loss(x, w, weights=MEAN, chunk=2, implementation="xla_chunked"),
        mean_loss,
        ((ROWS, E), (E, V)),
    ),
    "loss by row": (
        lambda x, w: jnp.mean(loss(x, w, transposed=True)),
        lambda x, w: mean_loss(x, w.T),
        ((ROWS, E), (V, E)),
    ),
    "gated": (
        lambda x, w, v: summed(ops.gated_matmul(x, w, v, activation="gelu_tanh")),
        lambda x, w, v: summed(jax.nn.gelu(x @ w) * (x @ v)),
        ((ROWS, E), (E, V), (E, V)),
    ),
    "gated, transposed": (
        lambda x, w, v: summed(ops.gated_matmul(x, w, v, activation="gelu_tanh", w_contract=1)),
        lambda x, w, v: summed(jax.nn.gelu(x @ w.T) * (x @ v.T)),
        ((ROWS, E), (V, E), (V, E)),
    ),
    "epilogue": (epilogue, lambda x, w: summed(jax.nn.gelu(x @ w)), ((ROWS, E), (E, V))),
    "epilogue, transposed": (
        lambda x, w: epilogue(x, w, 0, 1, "float32"),
        lambda x, w: summed(jax.nn.gelu(x.T @ w.T)),
        ((E, ROWS), (V, E)),
    ),
    "matmul, transposed": (
        lambda a, b: summed(ops.matmul(a, b, product="float32", dimensions=COLUMNS)),
        lambda a, b: summed(a.T @ b.T),
        ((E, ROWS), (V, E)),
    ),
    "attention": (
        lambda q, k, v: summed(ops.dot_product_attention(q, k, v)),
        lambda q, k, v: summed(jax.nn.dot_product_attention(q, k, v)),
        ((2, ROWS, 4, E), (2, ROWS, 2, E), (2, ROWS, 2, E)),
    ),
}


def batches(count):
    """The axes along which the operands are batched: each alone, at its front and behind; all of them."""
    for i in range(count):
        for axis in (0, 1):
            yield tuple(axis if j == i else None for j in range(count))
    yield (0,) * count
    yield (1, *(0,) * (count - 1))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CALLS)
def test_a_batch_along_any_operand_runs_and_has_the_right_gradients(name, dtype):
    op, plain, shapes = CALLS[name]
    operands = [(0.4 * jax.random.normal(jax.random.key(i), shape)).astype(dtype) for i, shape in enumerate(shapes)]
    every = tuple(range(len(operands)))
    for axes in batches(len(operands)):
        given = [a if k is None else jnp.stack([a, -a], k) for a, k in zip(operands, axes, strict=True)]
        run = jax.jit(jax.vmap(lambda *a: (op(*a), jax.value_and_grad(op, every)(*a)), axes))
        with jax.enable_x64(True):
            wide = [np.asarray(a, np.float64) for a in given]
            value, gradients = jax.jit(jax.vmap(jax.value_and_grad(plain, every), axes))(*wide)
        for got, want in zip(jax.tree.leaves(run(*given)), jax.tree.leaves((value, (value, gradients))), strict=True):
            want = np.asarray(want)
            np.testing.assert_allclose(
                np.asarray(got, np.float64), want, rtol=0, atol=0.03 * np.abs(want).max(), err_msg=f"{axes}"
            )
