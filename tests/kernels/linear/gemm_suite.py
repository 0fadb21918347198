"""One test base for every implementation of gemm_epilogue: each is held to float64 numpy. Not a test module.

Inherit, and set `implementation`. What an implementation refuses is skipped with its own reason, and counted by no test.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab import ops
from fusionlab.device import Device
from fusionlab.kernels.ops.gemm_epilogue.op import GEMM_EPILOGUE
from tests.acceptance.reference import SLOPE, VALUE

# Absolute, on values of order 1: the seed's own where there is one (fp16 1e-3, fp32 and fp64 1e-6), half a bf16 ulp of 2 for bf16.
FORWARD = {"float16": 1e-3, "float32": 2e-6, "float64": 1e-6, "bfloat16": 8e-3}
# Relative to the largest entry: a gradient is rounded once for the pre-activation's and once more at the end.
BACKWARD = {"float16": 2e-3, "float32": 5e-6, "float64": 1e-6, "bfloat16": 1.6e-2}

value_of = dict(VALUE)
slope_of = dict(SLOPE)


def _sigmoid(h):
    return np.exp(-np.logaddexp(0, -h))


value_of |= {
    "relu_tie": VALUE["relu"],
    "relu_where": VALUE["relu"],
    "silu": lambda h: h * _sigmoid(h),
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
}
slope_of |= {
    "relu_tie": lambda h: (h > 0) + 0.5 * (h == 0),
    "relu_where": SLOPE["relu"],
    "silu": lambda h: _sigmoid(h) * (1 + h * _sigmoid(-h)),
    "sigmoid": lambda h: _sigmoid(h) * _sigmoid(-h),
    "tanh": lambda h: 1 - np.tanh(h) ** 2,
}

LAYOUTS = {"NN": (1, 0), "TN": (0, 0), "NT": (1, 1), "TT": (0, 1)}  # x_contract, w_contract
SHAPES = [(8, 4, 128), (40, 24, 100), (33, 16, 12), (130, 72, 264), (1, 8, 8)]
DTYPES = ["float32", "float16", "bfloat16", "float64"]


def data(rows, inner, columns, layout, dtype, seed=0):
    """x, w, bias and a cotangent, as the dtype rounds them, and the same numbers as float64 matrices (rows x inner, inner x columns)."""
    rng = np.random.default_rng(seed)
    x, w, b = (rng.uniform(-0.5, 0.5, s) for s in ((rows, inner), (inner, columns), (columns,)))
    ct = rng.uniform(-1, 1, (rows, columns))
    x, w = x * 4 / np.sqrt(inner), w * 2
    x_first, w_first = layout[0] == "T", layout[1] == "T"
    made = [jnp.asarray(a, dtype) for a in (x.T if x_first else x, w.T if w_first else w, b, ct)]
    plain = [np.asarray(a, np.float64) for a in made]
    return made, (plain[0].T if x_first else plain[0], plain[1].T if w_first else plain[1], plain[2], plain[3])


def expected(x, w, b, ct, activation):
    h = x @ w + b
    dh = slope_of[activation](h) * ct
    return value_of[activation](h), h, (dh @ w.T, x.T @ dh, dh.sum(0))


def close(got, want, tolerance, dtype):
    assert got.dtype == np.dtype(jnp.dtype(dtype)), (got.dtype, dtype)
    got = np.asarray(got, np.float64)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= tolerance * max(1.0, np.abs(want).max())


class GemmEpilogueSuite:
    """Forward, residual and gradients of one implementation."""

    implementation: str
    activations = tuple(value_of)
    shapes_each = 5
    slack = 1.0  # times the tolerances: the reference on a CPU rounds to the operands' dtype between its steps

    @pytest.fixture(autouse=True)
    def _double(self):
        before = jax.config.jax_enable_x64
        jax.config.update("jax_enable_x64", True)
        yield
        jax.config.update("jax_enable_x64", before)

    def attrs(self, activation, layout="NN", **more):
        x_contract, w_contract = LAYOUTS[layout]
        return {
            "activation": activation,
            "x_contract": x_contract,
            "w_contract": w_contract,
            "precision": "highest",
            "implementation": self.implementation,
            **more,
        }

    def refusal(self, operands, activation, layout="NN"):
        """The implementation's own reason where it refuses the call."""
        full = self.attrs(activation, layout)
        return GEMM_EPILOGUE.implementations[self.implementation].refuses(
            dict(zip("x w bias".split(), operands, strict=False)),
            Device.current(),
            **{**full, "precision": jax.lax.Precision.HIGHEST, "present": ("x", "w", "bias"), "packed": True},
        )

    def runs(self, operands, activation, layout="NN"):
        """Skips where the implementation refuses the call."""
        if reason := self.refusal(operands, activation, layout):
            pytest.skip(reason)

    @classmethod
    def turns(cls):
        """Shapes, layouts and activations."""
        pairs = itertools.product(enumerate(cls.activations), range(cls.shapes_each))
        return [(SHAPES[(i + 2 * j) % len(SHAPES)], list(LAYOUTS)[(i + j) % 4], name) for (i, name), j in pairs]

    def pytest_generate_tests(self, metafunc):
        if "turn" in metafunc.fixturenames:
            metafunc.parametrize("turn", self.turns(), ids=lambda turn: "-".join(map(str, turn)))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_values_and_gradients_in_every_layout(self, dtype, turn):
        self.check(*turn, dtype)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_it_takes_as_many_cases_as_it_should(self, dtype):
        """What it refuses is checked of no case."""
        given = [(data(*shape, layout, dtype)[0][:3], activation, layout) for shape, layout, activation in self.turns()]
        assert sum(not self.refusal(*one) for one in given) >= 3

    def check(self, shape, layout, activation, dtype):
        (x, w, b, ct), plain = data(*shape, layout, dtype)
        if self.refusal((x, w, b), activation, layout):
            return 0
        out, h, grads = expected(*plain, activation)
        f = jax.jit(lambda x, w, b: ops.gemm_epilogue(x, w, b, **self.attrs(activation, layout)))
        close(f(x, w, b), out, self.slack * FORWARD[dtype], dtype)
        if activation.startswith("relu"):
            away = np.abs(h) > 4 * FORWARD[dtype]  # h rounds to either side of 0 nearer to it
            ct = jnp.asarray(np.asarray(ct, np.float64) * away, dtype)
            grads = expected(*plain[:3], np.asarray(ct, np.float64), activation)[2]
        pulled = jax.jit(lambda x, w, b, ct: jax.vjp(f, x, w, b)[1](ct))(x, w, b, ct)
        x_first, w_first = layout[0] == "T", layout[1] == "T"
        wants = (grads[0].T if x_first else grads[0], grads[1].T if w_first else grads[1], grads[2])
        for name, got, want in zip("x w b".split(), pulled, wants, strict=True):
            tolerance = self.slack * BACKWARD[dtype]
            assert got.shape == want.shape, name
            close(got, want, tolerance, dtype)
        return 1

    @pytest.mark.parametrize("activation", ["relu", "gelu_tanh", "gelu_erf", "none"])
    def test_only_the_gradients_asked_for_and_no_bias(self, activation):
        (x, w, _, ct), plain = data(40, 24, 96, "NN", "float32")
        self.runs((x, w), activation)
        zero = np.zeros(96)
        out, _, grads = expected(plain[0], plain[1], zero, plain[3], activation)
        f = lambda x, w: ops.gemm_epilogue(x, w, **self.attrs(activation))  # noqa: E731
        close(jax.jit(f)(x, w), out, FORWARD["float32"], "float32")
        close(jax.jit(lambda x, w: jax.vjp(lambda w: f(x, w), w)[1](ct)[0])(x, w), grads[1], 5e-6, "float32")
        close(jax.jit(lambda x, w: jax.vjp(lambda x: f(x, w), x)[1](ct)[0])(x, w), grads[0], 5e-6, "float32")

    def test_leading_axes_are_rows_and_a_batch_of_them_is_more_rows(self):
        (x, w, b, ct), plain = data(48, 24, 96, "NN", "float32")
        self.runs((x, w, b), "relu")
        out, _, grads = expected(*plain, "relu")
        f = lambda x: ops.gemm_epilogue(x, w, b, **self.attrs("relu", x_contract=-1))  # noqa: E731
        shaped = x.reshape(2, 6, 4, 24)
        for g in (f, jax.vmap(f), jax.jit(jax.vmap(f)), jax.vmap(jax.jit(f))):
            close(g(shaped).reshape(48, 96), out, 2e-6, "float32")
        loss = lambda x, ct: jnp.vdot(f(x), ct)  # noqa: E731
        dx = jax.jit(jax.vmap(jax.grad(loss)))(shaped, ct.reshape(2, 6, 4, 96))
        close(dx.reshape(48, 24), grads[0], 5e-6, "float32")

    def test_nan_and_infinity_as_the_reference_has_them(self):
        h = jnp.asarray([jnp.nan, jnp.inf, -jnp.inf, 0.0, -0.0, 1e30, -1e30, 3.0], jnp.float32)
        x, w = h[:, None] * jnp.ones((1, 8), jnp.float32), jnp.eye(8, dtype=jnp.float32)
        x = jnp.where(jnp.eye(8, dtype=bool), x, 0.0)  # a diagonal: no product of infinity with zero but those of w
        for activation in value_of:
            if self.refusal((x, w), activation):
                continue
            f = lambda x, a=activation: ops.gemm_epilogue(x, w, **self.attrs(a))  # noqa: E731
            g = lambda x, a=activation: GEMM_EPILOGUE.reference(  # noqa: E731
                x, w, **{**self.attrs(a), "implementation": None}
            )
            np.testing.assert_allclose(jax.jit(f)(x), jax.jit(g)(x), rtol=1e-6, err_msg=activation)

    def test_one_call_in_a_scan_a_remat_and_a_hessian(self):
        (x, w, b, _), _ = data(16, 24, 24, "NN", "float32")
        self.runs((x, w, b), "gelu_tanh")
        f = lambda x: ops.gemm_epilogue(x, w, b, **self.attrs("gelu_tanh"))  # noqa: E731
        r = lambda x: GEMM_EPILOGUE.reference(  # noqa: E731
            x, w, b, **{**self.attrs("gelu_tanh"), "implementation": None}
        )
        many = lambda f: lambda x: jnp.sum(jax.lax.scan(lambda c, _: (f(c), None), x, length=5)[0] ** 2)  # noqa: E731
        np.testing.assert_allclose(jax.jit(many(f))(x), jax.jit(many(r))(x), rtol=1e-5)
        for wrap in (lambda f: f, jax.checkpoint):
            got, want = jax.jit(jax.grad(many(wrap(f))))(x), jax.jit(jax.grad(many(r)))(x)
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())
        one = lambda f: lambda v: jnp.sum(f(x.at[0, 0].set(v)) ** 2)  # noqa: E731
        got, want = (jax.jit(jax.hessian(one(of)))(0.3) for of in (f, r))
        np.testing.assert_allclose(got, want, rtol=1e-4)
