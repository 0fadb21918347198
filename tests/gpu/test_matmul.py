"""Every implementation of matmul on a CUDA device, against float64; products routed by the switch; how many kernels each takes."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab import ops
from tests.kernels.matmul.matmul_suite import BEHIND, PRODUCTS, MatmulSuite

ON, OFF = (fl.Strategy(matmul_schedule={"library": on}) for on in (True, False))


class TestCublaslt(MatmulSuite):
    implementation = "cublaslt"
    least = 30
    slack = 2.0

    def test_it_takes_what_it_is_there_for(self):
        takes = {name for name, case in (PRODUCTS | BEHIND).items() if self.check(case, "bfloat16")}
        assert (PRODUCTS | BEHIND).keys() - takes == {"apart in b", "the batch last", "heads between"}


class TestCuda(MatmulSuite):
    implementation = "cuda"
    least = 4
    mixed = 1
    slack = 2.0


class TestXla(MatmulSuite):
    implementation = "xla"
    least = 45
    slack = 3.0


def single_mma_op(a, b):
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def mma_op_and_cast(a, b):
    return jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(jnp.float16)


def matmul_with_bias(a, b, bias):
    return (jnp.matmul(a, b, preferred_element_type=jnp.float32) + bias[:, None]).astype(jnp.float16)


ORIGINAL = {single_mma_op: 3.0, mma_op_and_cast: 3.0, matmul_with_bias: 4.0}


@pytest.mark.parametrize("fn", ORIGINAL)
def test_row_52_the_switch_changes_the_route(fn):
    args = [jnp.ones(s, jnp.float16) for s in ((2, 3), (3, 4), (2,))][: 3 if fn is matmul_with_bias else 2]
    for passes, tag in ((ON, "evaluate"), (OFF, "xla")):
        fused = fl.fuse(fn, passes=passes)
        assert [row.tag for row in fused.findings(*args).routes()] == [tag]
        assert (fused(*args) == ORIGINAL[fn]).all()
        text = jax.jit(fused).lower(*args).compile().as_text()
        assert len(re.findall(r"custom_call_target=\"fusionlab", text)) == (tag == "evaluate")


def test_one_kernel_a_route_in_the_compiled_module():
    """`x @ w` and what stands behind it: one call of the library, and no other product or kernel beside it."""
    x, w, b = (
        jnp.asarray(np.random.default_rng(0).normal(size=s), jnp.bfloat16) for s in ((256, 128), (128, 512), (512,))
    )
    fused = fl.fuse(lambda x, w, b: jax.nn.relu(0.5 * (x @ w) + b), passes=ON)
    text = jax.jit(fused).lower(x, w, b).compile().as_text()
    entry = text[text.index("ENTRY") :]
    assert len(re.findall(r"custom-call\(", entry)) == 1
    assert not re.findall(r" (fusion|dot)\(", entry)


def test_alpha_of_a_sum_against_float64():
    x, w, b = (
        jnp.asarray(np.random.default_rng(i).uniform(-1, 1, s), jnp.float32)
        for i, s in enumerate(((64, 128), (128, 96), (96,)))
    )
    with jax.default_matmul_precision("highest"):
        got = fl.fuse(lambda x, w, b: 0.37 * (x @ w + b), passes=ON)(x, w, b)
    want = 0.37 * (np.asarray(x, np.float64) @ np.asarray(w, np.float64) + np.asarray(b, np.float64))
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6 * np.abs(want).max())


def test_operands_that_are_only_widened_give_the_same_product():
    x, w = (
        jnp.asarray(np.random.default_rng(i).normal(size=s), jnp.bfloat16)
        for i, s in enumerate(((256, 384), (384, 128)))
    )

    def fn(x, w):
        return x.astype(jnp.float32) @ w.astype(jnp.float32)

    fused = fl.fuse(fn, passes="matmul_schedule")
    (site,) = fused.findings(x, w).candidates
    assert "without widening" in site.notes[0]
    want = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    for f in (fused, jax.jit(fn)):
        np.testing.assert_allclose(f(x, w), want, rtol=0, atol=2e-6 * np.abs(want).max())
    grads = [jax.grad(lambda *a, f=f: (f(*a) ** 2).mean(), (0, 1))(x, w) for f in (fused, fn)]
    for got, right in zip(*grads, strict=True):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(right, np.float32), rtol=2e-2, atol=1e-4)


def test_a_result_of_more_than_2_to_the_31_entries():
    """65,536 x 32,768, the original's own; 4 GiB in bfloat16."""
    device = jax.devices()[0]
    free = (device.memory_stats() or {}).get("bytes_limit", 0)
    if free < 20 << 30:
        pytest.skip(f"needs 20 GiB of device memory, this process may have {free >> 30}")
    m, k, n = 65536, 8, 32768
    x = jnp.asarray(np.random.default_rng(0).integers(-3, 4, (m, k)), jnp.bfloat16)
    w = jnp.asarray(np.random.default_rng(1).integers(-3, 4, (k, n)), jnp.bfloat16)
    bias = jnp.arange(n) % 7
    got = jax.jit(lambda *a: ops.matmul(*a, implementation="cublaslt"))(x, w, bias.astype(jnp.bfloat16))
    rows = [0, 1, m // 2, m - 1]  # whole numbers of at most 8 * 9 + 6: exact
    want = np.asarray(x, np.float64)[rows] @ np.asarray(w, np.float64) + np.asarray(bias)
    assert (np.asarray(got[jnp.asarray(rows)], np.float64) == want).all()
