"""Every implementation of gated_matmul on a CUDA device, against float64; gated pairs that are asked for; how many kernels they take."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab import ops
from fusionlab.kernels.ops.gated_matmul.plan import CODES
from fusionlab.kernels.ops.gemm_epilogue.elementwise import KERNEL_ACTIVATIONS
from tests.kernels.matmul.gated_suite import GatedSuite


class TestCuda(GatedSuite):
    implementation = "cuda"
    dtypes = tuple(CODES)
    activations = KERNEL_ACTIVATIONS


class TestConcatenated(GatedSuite):
    implementation = "concatenated"
    slack = 3.0


class TestXla(GatedSuite):
    implementation = "xla"
    slack = 3.0


def arrays(*shapes, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=s) / np.sqrt(s[0]), dtype) for s in shapes)


def feed_forward(x, w, v, d):
    return (jax.nn.silu(x @ w) * (x @ v)) @ d


@pytest.mark.parametrize(("gated", "products", "launches"), [(None, 3, 0), ("concatenated", 2, 0), ("kernel", 1, 1)])
def test_products_go_from_three_to_two_to_one_and_a_kernel(gated, products, launches):
    args = arrays((512, 256), (256, 1024), (256, 1024), (1024, 256))
    fused = fl.fuse(
        feed_forward, passes=fl.Strategy(gated_matmul={"prefer": gated}, matmul_schedule={"library": False})
    )
    lowered = jax.jit(fused).lower(*args)
    assert lowered.as_text().count("dot_general") == products
    text = lowered.compile().as_text()
    assert len(re.findall(r"custom_call_target=\"fusionlab", text)) == launches
    got, want = (np.asarray(jax.jit(f)(*args), np.float32) for f in (fused, feed_forward))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-2 * np.abs(want).max())


@pytest.mark.parametrize("shape", [(4096, 4096, 11008), (1, 4096, 11008), (333, 1001, 2047)], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_the_sizes_of_models(shape, turned):
    """One element in a hundred against float64."""
    m, k, n = shape
    x, w, v = arrays((m, k), (n, k) if turned else (k, n), (n, k) if turned else (k, n))
    x = x * np.sqrt(m).astype(x.dtype)
    got = jax.jit(lambda *a: ops.gated_matmul(*a, w_contract=int(turned), implementation="cuda"))(x, w, v)
    rows, columns = np.unique(np.linspace(0, m - 1, 32, dtype=int)), np.unique(np.linspace(0, n - 1, 97, dtype=int))
    a = np.asarray(x, np.float64)[rows]
    b, c = ((one.T if turned else one)[:, columns] for one in (np.asarray(w, np.float64), np.asarray(v, np.float64)))
    gate = a @ b
    want = gate / (1 + np.exp(-gate)) * (a @ c)
    found = np.asarray(got, np.float64)[np.ix_(rows, columns)]
    np.testing.assert_allclose(found, want, rtol=0, atol=6e-3 * np.abs(want).max())


def test_twice_is_the_same_to_the_bit():
    x, w, v = arrays((1000, 1000), (1000, 1000), (1000, 1000))
    f = jax.jit(lambda *a: ops.gated_matmul(*a, implementation="cuda"))
    assert (f(x, w, v) == f(x, w, v)).all()


def test_a_train_step_with_the_kernel_in_it():
    args = arrays((256, 128), (128, 512), (128, 512), (512, 128))

    def step(f):
        return jax.jit(jax.value_and_grad(lambda *a: (f(*a).astype(jnp.float32) ** 2).mean(), (0, 1, 2, 3)))

    fused = fl.fuse(feed_forward, passes=fl.Strategy(gated_matmul={"prefer": "kernel"}))
    got, want = step(fused)(*args), step(feed_forward)(*args)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = float(jnp.abs(w.astype(jnp.float32)).max())
        np.testing.assert_allclose(np.asarray(g, np.float32), np.asarray(w, np.float32), rtol=0, atol=3e-2 * scale)
