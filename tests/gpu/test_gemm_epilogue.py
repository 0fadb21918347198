"""Every implementation of gemm_epilogue on a CUDA device, against float64."""

from __future__ import annotations

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab import ops
from fusionlab.models import multi_fc
from tests.kernels.linear.gemm_suite import GemmEpilogueSuite


class TestCublaslt(GemmEpilogueSuite):
    implementation = "cublaslt"
    activations = ("none", "relu", "gelu_tanh")


class TestCuda(GemmEpilogueSuite):
    implementation = "cuda"
    shapes_each = 2


class TestXla(GemmEpilogueSuite):
    implementation = "xla"
    activations = ("none", "relu", "gelu_erf")
    shapes_each = 2
    slack = 2.0


def example(*shapes, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.uniform(-0.5, 0.5, s), dtype) for s in shapes]


@pytest.mark.parametrize(
    ("columns", "activation"), [(100, "relu"), (12, "gelu_tanh"), (100, "relu_tie"), (99, "gelu_erf")]
)
def test_row_06_columns_of_any_number(columns, activation):
    x, w, b = example((37, 24), (24, columns), (columns,))

    def loss(implementation):
        def of(*a):
            return jnp.sum(
                ops.gemm_epilogue(*a, activation=activation, implementation=implementation, precision="highest") ** 2
            )

        return jax.jit(jax.grad(of, (0, 1, 2)))(x, w, b)

    want = loss("xla")
    for implementation in ("cuda", *(["cublaslt"] if activation == "relu" else [])):
        for got, right in zip(loss(implementation), want, strict=True):
            np.testing.assert_allclose(got, right, rtol=2e-5, atol=2e-5)


@pytest.fixture
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


def test_row_08_chained_backward_is_two_products_a_layer_and_nothing_beside_them(full_precision):
    # float32 at full precision: in bfloat16 a pre-activation near 0 may round to either side of it, and a whole gradient hangs on that.
    x, w1, b1, w2, b2, ct = example((256, 128), (128, 256), (256,), (256, 128), (128,), (256, 128))

    def step(x, w1, b1, w2, b2, ct):
        out, back = jax.vjp(lambda *a: jax.nn.relu(a[0] @ a[1] + a[2]) @ a[3] + a[4], x, w1, b1, w2, b2)
        return out, back(ct)

    strategy = fl.Strategy(gemm_epilogue={"grouping": "chained"})
    fused = fl.fuse(step, passes=strategy, implementation="cublaslt")
    args = (x, w1, b1, w2, b2, ct)
    kernels = launched(fused, *args)
    assert [k["epilogue"] for k in kernels if k["kind"] == "cublaslt"].count("DRELU") == 1
    assert sum(k["epilogue"].startswith("BGRAD") for k in kernels if k["kind"] == "cublaslt") == 2
    assert all(k["kind"] == "cublaslt" for k in kernels)
    assert len(kernels) == 6  # two forward, four backward
    text = jax.jit(fused).lower(*args).compile().as_text()
    assert " dot(" not in text
    assert " reduce(" not in text
    want = jax.jit(step)(*args)
    for got, right in zip(jax.tree.leaves(fused(*args)), jax.tree.leaves(want), strict=True):
        got, right = np.asarray(got, np.float32), np.asarray(right, np.float32)
        assert np.linalg.norm(got - right) <= 1e-5 * np.linalg.norm(right)


def launched(fn, *args):
    """The plans that a program launches, as it is lowered for CUDA."""
    text = jax.jit(fn).lower(*args).as_text()
    return [json.loads(m.replace("\\22", '"')) for m in re.findall(r'plan = "((?:[^"])*)"', text)]


@pytest.mark.parametrize("activation", ["relu", "gelu_tanh"])
@pytest.mark.parametrize("implementation", ["cublaslt", None])
def test_row_12_multi_fc_trains_alike(activation, implementation):
    params = multi_fc.init(jax.random.key(0), 128, dtype=jnp.float16)
    inputs = multi_fc.inputs(jax.random.key(1), 16, 32, 128, dtype=jnp.float16)
    loss = functools.partial(multi_fc.loss, activation=activation)
    fused = fl.fuse(loss, passes=["gemm_epilogue"], implementation=implementation)
    got = jax.jit(jax.value_and_grad(fused))(params, *inputs)
    want = jax.jit(jax.value_and_grad(loss))(params, *inputs)
    for one, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.float32(one), np.float32(right), rtol=1e-2, atol=1e-3)
