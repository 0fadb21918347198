"""One test base for every implementation of matmul: each is held to float64 numpy. Not a test module.

Inherit, and set `implementation`. A case that an implementation refuses is passed over, and each says how many it takes at least.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab import ops
from fusionlab.device import Device
from fusionlab.kernels.ops.matmul.axes import ProductAxes
from fusionlab.kernels.ops.matmul.op import MATMUL
from tests.acceptance.reference import SLOPE, VALUE

# Of the largest entry: a result is rounded once, a gradient for that of h and once more at the end.
TOLERANCE = {"float64": 1e-12, "float32": 3e-6, "float16": 2.5e-3, "bfloat16": 1.6e-2}
MATRICES = (((1,), (0,)), ((), ()))


@dataclass(frozen=True)
class Case:
    """Shapes and attributes of a call; `bias` is the bias's shape."""

    a: tuple[int, ...] = (24, 40)
    b: tuple[int, ...] = (40, 32)
    bias: tuple[int, ...] | None = None
    dimensions: Any = MATRICES
    product: str | None = None
    out: str | None = None
    attrs: dict[str, Any] = field(default_factory=dict)


PRODUCTS = {
    "NN": Case(),
    "TN": Case((40, 24), (40, 32), dimensions=(((0,), (0,)), ((), ()))),
    "NT": Case((24, 40), (32, 40), dimensions=(((1,), (1,)), ((), ()))),
    "TT": Case((40, 24), (32, 40), dimensions=(((0,), (1,)), ((), ()))),
    "a vector": Case((40,), (40, 32), dimensions=(((0,), (0,)), ((), ()))),
    "two vectors": Case((40,), (40,), dimensions=(((0,), (0,)), ((), ()))),
    "of one term": Case((24, 1), (1, 32)),
    "odd sizes": Case((7, 13), (13, 5)),
    "rows of rows": Case((3, 8, 40), (40, 32), dimensions=(((2,), (0,)), ((), ()))),
    "columns of columns": Case((24, 40), (40, 4, 8), dimensions=(((1,), (0,)), ((), ()))),
    "two contracted": Case((24, 5, 8), (5, 8, 32), dimensions=(((1, 2), (0, 1)), ((), ()))),
    "two contracted, the other way": Case((24, 5, 8), (5, 8, 32), dimensions=(((2, 1), (1, 0)), ((), ()))),
    "apart in b": Case((24, 5, 8), (8, 32, 5), dimensions=(((1, 2), (2, 0)), ((), ()))),
    "a batch": Case((3, 24, 40), (3, 40, 32), dimensions=(((2,), (1,)), ((0,), (0,)))),
    "a batch of vectors": Case((3, 40), (3, 40, 32), dimensions=(((1,), (1,)), ((0,), (0,)))),
    "heads between": Case((2, 24, 3, 8), (2, 16, 3, 8), dimensions=(((3,), (3,)), ((0, 2), (0, 2)))),
    "one head between": Case((24, 3, 8), (16, 3, 8), dimensions=(((2,), (2,)), ((1,), (1,)))),
    "the batch last": Case((24, 40, 3), (40, 32, 3), dimensions=(((1,), (0,)), ((2,), (2,)))),
}
BEHIND = {
    "columns": Case(bias=(32,)),
    "rows": Case(bias=(24, 1)),
    "as many rows as columns, along the rows": Case((32, 40), bias=(32, 1)),
    "as many rows as columns, along the columns": Case((32, 40), bias=(1, 32)),
    "a number": Case(bias=(1, 1)),
    "columns, of a batch": Case((3, 24, 40), (3, 40, 32), (32,), (((2,), (1,)), ((0,), (0,)))),
    "columns of each of a batch": Case((3, 24, 40), (3, 40, 32), (3, 1, 32), (((2,), (1,)), ((0,), (0,)))),
    "rows, of a batch": Case((3, 24, 40), (3, 40, 32), (24, 1), (((2,), (1,)), ((0,), (0,)))),
    "alpha": Case(attrs={"alpha": -0.75}),
    "alpha and columns": Case(bias=(32,), attrs={"alpha": 0.5}),
    "alpha, beta and columns": Case(bias=(32,), attrs={"alpha": 0.5, "beta": 0.5}),
    "alpha, beta and rows": Case(bias=(24, 1), attrs={"alpha": 2.0, "beta": -3.0}),
}
ACTIVATIONS = ("relu", "gelu_tanh", "gelu_erf")
MIXED = [  # whether the result has the operands' dtype, a case, its activation
    (own, name, activation)
    for own in (False, True)
    for name in ("columns", "TT", "rows", "alpha, beta and columns")
    for activation in ("relu", "none")
]


def value_of(activation: str, h: np.ndarray) -> np.ndarray:
    return h if activation == "none" else VALUE[activation](h)


def slope_of(activation: str, h: np.ndarray) -> np.ndarray:
    return np.ones_like(h) if activation == "none" else SLOPE[activation](h)


class MatmulSuite:
    """Values and gradients of one implementation."""

    implementation: str
    least = 0  # how many of all cases it takes in bfloat16
    mixed = 8  # of those whose results have other dtypes
    held = 0  # cases that a test ran
    # Every n-th case runs, n by dtype.
    every: ClassVar[dict[str, int]] = {"bfloat16": 1, "float32": 3, "float16": 5, "float64": 5}
    slack = 1.0  # times the tolerances

    def refusal(self, operands: dict[str, Any], attrs: dict[str, Any]) -> str | None:
        given, full = MATMUL.prepare(operands, {**attrs, "precision": jax.lax.Precision.HIGHEST})
        refuses = MATMUL.implementations[self.implementation].refuses
        return refuses(given, Device.current(), present=tuple(given), residuals=True, **full)

    def attributes(self, case: Case, activation: str) -> dict[str, Any]:
        return dict(case.attrs, dimensions=case.dimensions, product=case.product, out=case.out, activation=activation)

    def takes(self, case: Case, dtype: str, activation: str = "none") -> bool:
        shapes = {"a": case.a, "b": case.b, "bias": case.bias}
        given = {n: jax.ShapeDtypeStruct(s, jnp.dtype(dtype)) for n, s in shapes.items() if s is not None}
        return not self.refusal(given, self.attributes(case, activation))

    def check(self, case: Case, dtype: str, activation: str = "none") -> int:
        """1 where it holds, 0 where the implementation refuses the case."""
        if not self.takes(case, dtype, activation):
            return 0
        self.held += 1
        rng = np.random.default_rng(len(case.a))
        a, b, bias = (None if s is None else rng.uniform(-1, 1, s) for s in (case.a, case.b, case.bias))
        operands = {n: jnp.asarray(v, dtype) for n, v in (("a", a), ("b", b), ("bias", bias)) if v is not None}
        attrs = self.attributes(case, activation)
        plain = {n: np.asarray(v, np.float64) for n, v in operands.items()}
        out = jnp.dtype(case.out or case.product or dtype).name
        full = {**attrs, "precision": "highest", "implementation": self.implementation}
        f = jax.jit(lambda operands: ops.matmul(**operands, **full))
        h = self.linear(case, plain)
        self.close(f(operands), value_of(activation, h), out)
        ct = rng.uniform(-1, 1, h.shape)
        if activation == "relu":
            ct = ct * (np.abs(h) > 0.05)  # nearer to 0 it rounds to either side of it
        pulled = jax.jit(lambda operands, ct: jax.vjp(f, operands)[1](ct))(operands, jnp.asarray(ct, out))[0]
        wants = self.gradients(case, plain, slope_of(activation, h) * np.asarray(jnp.asarray(ct, out), np.float64))
        for name, got in pulled.items():
            self.close(got, wants[name], dtype, max(out, dtype, key=lambda d: TOLERANCE[d]))
        return 1

    def linear(self, case: Case, plain: dict[str, np.ndarray]) -> np.ndarray:
        made = np.asarray(case.attrs.get("alpha", 1.0)) * _einsum(case, plain["a"], plain["b"])
        return made + case.attrs.get("beta", 1.0) * plain["bias"] if "bias" in plain else made

    def gradients(self, case: Case, plain: dict[str, np.ndarray], dh: np.ndarray) -> dict[str, np.ndarray]:
        alpha, beta = case.attrs.get("alpha", 1.0), case.attrs.get("beta", 1.0)
        a, b, out = _letters(case)
        found = {
            "a": alpha * np.einsum(f"{out},{b}->{a}", dh, plain["b"]),
            "b": alpha * np.einsum(f"{out},{a}->{b}", dh, plain["a"]),
        }
        if "bias" in plain:
            shape = (1,) * (dh.ndim - plain["bias"].ndim) + plain["bias"].shape
            axes = tuple(i for i, n in enumerate(shape) if n == 1 and dh.shape[i] != 1)
            found["bias"] = beta * dh.sum(axes, keepdims=True).reshape(plain["bias"].shape)
        return found

    def close(self, got: Any, want: np.ndarray, dtype: str, rounded: str | None = None) -> None:
        assert got.dtype == jnp.dtype(dtype)
        assert got.shape == want.shape
        error = np.abs(np.asarray(got, np.float64) - want).max() / max(1.0, np.abs(want).max())
        assert error <= self.slack * TOLERANCE[rounded or dtype], error

    @pytest.fixture(autouse=True)
    def _double(self):
        before = jax.config.jax_enable_x64
        jax.config.update("jax_enable_x64", True)
        yield
        jax.config.update("jax_enable_x64", before)

    @classmethod
    def cases(cls, dtype: str) -> list[tuple[str, str]]:
        """Names and activations; first those of the activations, of which every implementation takes some."""
        pairs = itertools.product(("NN", "columns", "rows", "columns, of a batch", "odd sizes"), ACTIVATIONS)
        chosen = [*((name, "none") for name in PRODUCTS | BEHIND), *pairs][:: cls.every[dtype]]
        return sorted(chosen, key=lambda case: case[1] == "none")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "case" in metafunc.fixturenames:
            dtypes = ("float32", "bfloat16", "float16", "float64")
            cases = [(dtype, *case) for dtype in dtypes for case in self.cases(dtype)]
            metafunc.parametrize(("dtype", "case", "activation"), cases)
        if "mixed" in metafunc.fixturenames:
            metafunc.parametrize("mixed", MIXED, ids=lambda one: "-".join(map(str, one)))

    def test_values_and_gradients(self, dtype, case, activation):
        self.check((PRODUCTS | BEHIND)[case], dtype, activation)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
    def test_it_takes_as_many_cases_as_it_should(self, dtype):
        """What it refuses is checked of no case."""
        taken = [self.takes((PRODUCTS | BEHIND)[name], dtype, activation) for name, activation in self.cases(dtype)]
        assert sum(taken) >= self.least // self.every[dtype]

    def test_results_of_other_dtypes(self, mixed):
        self.check(*self.mixed_of(*mixed))

    def test_it_takes_as_many_results_of_other_dtypes_as_it_should(self):
        assert sum(self.takes(*self.mixed_of(*case)) for case in MIXED) >= self.mixed

    def mixed_of(self, own: bool, name: str, activation: str) -> tuple[Case, str, str]:
        """A case of a float32 product of bfloat16 operands, whose result has their dtype again or has not."""
        case = replace((PRODUCTS | BEHIND)[name], product="float32", out="bfloat16" if own else None)
        return case, "bfloat16", activation


def _letters(case: Case) -> tuple[str, str, str]:
    (lc, rc), (lb, rb) = case.dimensions
    names = iter("abcdefghijklmnopqrstuvwxyz")
    a, b = [""] * len(case.a), [""] * len(case.b)
    for i, j in (*zip(lb, rb, strict=True), *zip(lc, rc, strict=True)):
        a[i] = b[j] = next(names)
    a, b = [x or next(names) for x in a], [x or next(names) for x in b]
    free_a = [x for i, x in enumerate(a) if i not in (*lc, *lb)]
    free_b = [x for i, x in enumerate(b) if i not in (*rc, *rb)]
    return "".join(a), "".join(b), "".join([*(a[i] for i in lb), *free_a, *free_b])


def _einsum(case: Case, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    left, right, out = _letters(case)
    made = np.einsum(f"{left},{right}->{out}", a, b)
    assert made.shape == ProductAxes.of(case.a, case.b, case.dimensions).result
    return made
