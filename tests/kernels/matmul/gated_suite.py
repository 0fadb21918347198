"""One test base for every implementation of gated_matmul: each is held to float64 numpy. Not a test module.

Inherit, and set `implementation`, `dtypes` and `activations`.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab import ops
from fusionlab.kernels.ops.gemm_epilogue.activations import ACTIVATIONS

# Of the largest entry: a result is rounded once; a gradient is that of products of rounded numbers, and rounded again.
TOLERANCE = {"float64": 1e-12, "float32": 3e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
SHAPES: dict[str, tuple[tuple[int, ...], int, int]] = {  # *M x K, N, w_contract
    "whole tiles": ((128, 64), 64, 0),
    "several blocks": ((130, 72), 136, 0),
    "several steps": ((24, 200), 72, 0),
    "odd sizes": ((7, 13), 5, 0),
    "odd columns": ((40, 64), 33, 0),
    "odd inner": ((40, 65), 32, 0),
    "one of each": ((1, 1), 1, 0),
    "rows of rows": ((3, 5, 24), 16, 0),
    "transposed": ((40, 72), 24, 1),
    "transposed, several blocks": ((200, 136), 80, 1),
    "transposed, odd": ((9, 67), 11, 1),
}


def operands_of(name: str, dtype: str) -> tuple[Any, ...]:
    x, columns, contract = SHAPES[name]
    weight = (columns, x[-1]) if contract else (x[-1], columns)
    rng = np.random.default_rng(len(name))
    scale = 2.0 / np.sqrt(x[-1])
    return tuple(jnp.asarray(rng.uniform(-1, 1, s) * f, dtype) for s, f in ((x, 1.0), (weight, scale), (weight, scale)))


def plain(activation: str, contract: int, x: Any, w: Any, v: Any) -> Any:
    """The meaning, in the operands' dtype."""
    if contract:
        w, v = w.T, v.T
    return ACTIVATIONS[activation].fn(x @ w) * (x @ v)


@functools.partial(jax.jit, static_argnums=0)
def pulled(f: Any, x: Any, w: Any, v: Any, ct: Any) -> tuple[Any, Any]:
    """A function's result and its gradients."""
    out, pull = jax.vjp(f, x, w, v)
    return out, pull(ct)


class GatedSuite:
    """Values and gradients of one implementation."""

    implementation: str
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16", "float16", "float32", "float64")
    activations: ClassVar[tuple[str, ...]] = tuple(ACTIVATIONS)
    slack = 1.0  # times the tolerances

    def check(self, name: str, dtype: str, activation: str) -> None:
        x, w, v = operands_of(name, dtype)
        contract = SHAPES[name][2]
        f = functools.partial(
            ops.gated_matmul,
            activation=activation,
            w_contract=contract,
            precision="highest",
            implementation=self.implementation,
        )
        exact = [np.asarray(a, np.float64) for a in (x, w, v)]
        # relu's derivative jumps at 0, where a product may be rounded to either side of it
        near = np.abs(exact[0] @ (exact[1].T if contract else exact[1])) < 0.02
        ct = jnp.asarray(np.where(near, 0.0, np.random.default_rng(1).uniform(-1, 1, near.shape)), dtype)
        with jax.enable_x64(True):
            want, grads = pulled(functools.partial(plain, activation, contract), *exact, np.asarray(ct, np.float64))
        self.close(jax.jit(f)(x, w, v), want, dtype)
        out, found = pulled(f, x, w, v, ct)
        self.close(out, want, dtype)
        for got, wanted in zip(found, grads, strict=True):
            self.close(got, wanted, dtype)

    def close(self, got: Any, want: Any, dtype: str) -> None:
        assert got.dtype == jnp.dtype(dtype)
        assert got.shape == want.shape
        want = np.asarray(want, np.float64)
        error = np.abs(np.asarray(got, np.float64) - want).max() / max(1.0, np.abs(want).max())
        assert error <= self.slack * TOLERANCE[dtype], error

    @pytest.mark.parametrize("name", SHAPES)
    def test_every_shape(self, name):
        self.check(name, self.dtypes[0], "silu")

    def test_every_dtype(self, dtype):
        with jax.enable_x64(dtype == "float64"):
            self.check("odd columns", dtype, "silu")

    def pytest_generate_tests(self, metafunc):
        for name, values in (("activation", self.activations), ("dtype", self.dtypes)):
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values)

    def test_every_activation(self, activation):
        self.check("several steps", self.dtypes[0], activation)

    def test_a_result_is_rounded_once(self):
        """Within half a unit in the last place of the exact result, and a little for the sums: the unfused program is not."""
        x, w, v = operands_of("several steps", self.dtypes[0])
        a, b, c = (np.asarray(one, np.float64) for one in (x, w, v))
        gate = a @ b
        exact = gate / (1 + np.exp(-gate)) * (a @ c)
        got = np.asarray(ops.gated_matmul(x, w, v, implementation=self.implementation), np.float64)
        unit = 2.0 ** (np.floor(np.log2(np.abs(exact))) - jnp.finfo(self.dtypes[0]).nmant)
        assert (np.abs(got - exact) <= 0.51 * unit + 1e-5).all()

    def test_under_vmap_and_scan(self):
        x, w, v = operands_of("rows of rows", self.dtypes[0])
        f = functools.partial(ops.gated_matmul, implementation=self.implementation)
        want = np.asarray(f(x, w, v), np.float64)
        self.close(jax.vmap(f, (0, None, None))(x, w, v), want, self.dtypes[0])
        self.close(jax.lax.scan(lambda c, a: (c, f(a, w, v)), 0, x)[1], want, self.dtypes[0])

    def test_infinities_and_nan_stay(self):
        x, w, v = operands_of("odd columns", self.dtypes[0])
        x = x.at[3, 5].set(jnp.nan).at[4, 5].set(jnp.inf)
        got = np.asarray(ops.gated_matmul(x, w, v, implementation=self.implementation), np.float32)
        assert np.isnan(got[3]).all()
        assert not np.isfinite(got[4]).any()
        assert np.isfinite(np.delete(got, (3, 4), 0)).all()
