"""Rows 22, 27 and 30 of attention: rows that see no key, kernels that fail, and plans kept by their full key.

The kernels are attention.cu itself, as C++, launched by XLA's CPU backend; tests/gpu asks the same of a GPU.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.kernels.launch.kernel_plan import KernelPlan
from fusionlab.kernels.launch.plans import Prepared
from fusionlab.kernels.ops.dot_product_attention.own import backend as cuda
from fusionlab.ops import dot_product_attention
from tests.fusers.checks import normal
from tests.kernels.emulated import attention_on_the_cpu, poisoned

B, T, N, H = 1, 24, 2, 16
Q, K, V = normal(*[(B, T, N, H)] * 3, dtype=jnp.bfloat16)
SEEN = np.ones((B, 1, T, T), bool)
SEEN[0, 0, 5] = False
SEEN = jnp.asarray(SEEN)


@pytest.fixture
def book(emulator):
    with attention_on_the_cpu(emulator) as found:
        yield found


def attend(q, k, v, mask, fill=-jnp.inf):
    s = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.float32) / H**0.5
    p = jax.nn.softmax(jnp.where(mask, s, fill), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", p.astype(v.dtype), v)


def gradients(fn, *more):
    def step(q, k, v):
        out, pull = jax.vjp(lambda *a: fn(*a, *more), q, k, v)
        return out, *pull(jnp.ones_like(out))

    return step


@pytest.mark.parametrize("implementation", ["xla", "xla_blockwise", "cuda"])
@pytest.mark.parametrize("fill", [-np.inf, -1e9])
def test_row_22_a_query_that_sees_no_key_has_a_defined_value(implementation, fill, book):
    """0 where its mask is -inf; where it is a finite number the mean of the values, as the program says. Never NaN, forward or backward."""
    fn = functools.partial(attend, fill=fill)
    fused = fl.fuse(fn, implementation=implementation)
    assert fused.findings(Q, K, V, SEEN).counts()["dot_product_attention"] == 1
    out, *grads = gradients(fused, SEEN)(Q, K, V)
    want = jnp.zeros((N, H)) if fill == -np.inf else V[0].astype(jnp.float32).mean(0)
    np.testing.assert_allclose(np.asarray(out[0, 5], np.float32), want, rtol=0, atol=5e-3)
    assert all(np.isfinite(np.asarray(a, np.float32)).all() for a in (out, *grads))


def test_row_22_the_report_says_so_and_counts_the_rows():
    found = fl.find(attend, Q, K, V, SEEN)
    assert "a fully masked query row gives 0 in the fused op and NaN in the program" in str(found.candidates[0].notes)
    evidence = fl.compare(attend, fl.fuse(attend), Q, K, V, SEEN, timing=False, memory=False)
    assert f"{N * H} of {Q.size} elements ({N} whole rows) are NaN in the original" in str(evidence)
    assert not evidence.numerics.regressions


def fails_when_prepared(real, broken):
    def prepare(plan, device):
        if broken:
            raise OSError("the device has gone")
        return real(plan, device)

    return prepare


def fails_when_run(real, broken):
    def prepare(plan, device):
        run = real(plan, device).run

        def failing(*addresses):
            if broken:
                raise OSError("the device has gone")
            run(*addresses)

        return Prepared(failing)

    return prepare


@pytest.mark.parametrize("failing", [fails_when_prepared, fails_when_run])
def test_row_27_a_kernel_that_fails_raises_and_gives_no_result(failing, book, monkeypatch):
    step = jax.jit(gradients(fl.fuse(attend, implementation="cuda"), SEEN))
    broken = [True]
    monkeypatch.setattr(KernelPlan, "prepare", failing(KernelPlan.prepare, broken))
    with pytest.raises(jax.errors.JaxRuntimeError, match="the device has gone"):
        jax.block_until_ready(step(Q, K, V))
    broken.clear()  # once the cause is gone it can be run
    want = jax.jit(gradients(fl.fuse(attend, implementation="xla"), SEEN))(Q, K, V)
    for g, w in zip(step(Q, K, V), want, strict=True):
        np.testing.assert_allclose(np.asarray(g, np.float32), np.asarray(w, np.float32), atol=3e-2)


@pytest.mark.parametrize("t", [24, 100])
def test_row_27_no_result_is_returned_as_it_was(t, book, monkeypatch):
    """Every result is NaN before the kernels write it, and in no place after."""
    q, k, v = (jax.random.normal(jax.random.key(i), (B, t, N, H), jnp.bfloat16) for i in range(3))
    fused = gradients(functools.partial(dot_product_attention, is_causal=True, implementation="cuda"))
    monkeypatch.setattr(cuda, "launch", poisoned(cuda.launch))
    for got, want in zip(
        jax.jit(fused)(q, k, v),
        gradients(functools.partial(dot_product_attention, is_causal=True, implementation="xla"))(q, k, v),
        strict=True,
    ):
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=3e-2)


def test_row_27_the_test_above_sees_a_kernel_that_writes_nothing(book, monkeypatch):
    monkeypatch.setattr(cuda, "launch", poisoned(cuda.launch))
    monkeypatch.setattr(KernelPlan, "prepare", lambda plan, device: Prepared(lambda stream, operands, results: None))
    assert np.isnan(np.asarray(dot_product_attention(Q, K, V, implementation="cuda"), np.float32)).all()


def counted(book, *args, **attrs):
    """(hits, misses) that one more compiled call adds."""
    before = book.counters()
    jax.block_until_ready(jax.jit(lambda *a: dot_product_attention(*a, implementation="cuda", **attrs))(*args))
    after = book.counters()
    return after["hits"] - before["hits"], after["misses"] - before["misses"]


KEY = jnp.zeros(2, jnp.uint32)
CHANGED = {
    "shape": ((Q[:, :-1], K, V), {}),
    "scale": ((Q, K, V), {"scale": 0.3}),
    "dropout": ((Q, K, V), {"dropout_key": KEY, "keep": 0.9}),
    "rate of dropout": ((Q, K, V), {"dropout_key": KEY, "keep": 0.8}),
    "causal": ((Q, K, V), {"is_causal": True}),
    "mask as data": ((Q, K, V), {"mask": SEEN}),
    "dtype": (tuple(a.astype(jnp.float16) for a in (Q, K, V)), {}),
    "layout": ((Q, K, V), {"layout": "BNTH"}),
}


@pytest.mark.parametrize("names", [("mask as data", "dtype"), tuple(CHANGED)], ids=["two", "all"])
def test_row_30_plans_are_kept_by_their_full_key_and_the_counters_show_it(book, names):
    assert counted(book, Q, K, V) == (0, 1)
    for name in names:
        args, attrs = CHANGED[name]
        assert counted(book, *args, **attrs) == (0, 1), name
        assert counted(book, *args, **attrs) == (1, 0), name
    assert counted(book, Q, K, V) == (1, 0)
    seen = fl.doctor().caches["plans"]
    assert {name: seen[name] for name in ("hits", "misses")} == {
        name: book.counters()[name] for name in ("hits", "misses")
    }
