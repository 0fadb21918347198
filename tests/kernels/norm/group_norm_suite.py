"""One test base for every implementation of group_norm: each is held to float64 numpy. Not a test module.

Inherit, and set `implementation`; `turns` says which cases are held in which dtypes.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab.ops import group_norm
from tests.kernels.norm.norm_suite import close, turns, wide

EPSILON = 1e-5


@dataclass(frozen=True)
class Case:
    """A call: the shape of x, groups, activation, the vectors and their dtype (None: that of x), and the axes of the batch."""

    shape: tuple[int, ...]
    groups: int
    activation: str = "none"
    slots: tuple[str, ...] = ("scale", "bias")
    vectors: str | None = None
    batch_axes: int = 1


CASES = {
    "silu": Case((2, 3, 5, 24), 4, "silu"),
    "no activation": Case((2, 3, 5, 24), 4),
    "plain": Case((2, 9, 32), 4, slots=()),
    "silu, plain": Case((2, 9, 32), 4, "silu", ()),
    "silu, scale": Case((2, 9, 32), 8, "silu", ("scale",)),
    "silu, bias": Case((2, 9, 32), 2, "silu", ("bias",)),
    "float32 vectors": Case((2, 9, 40), 5, "silu", vectors="float32"),
    "one image": Case((1, 30, 40), 5, "silu"),
    "one group": Case((2, 7, 24), 1, "silu"),
    "a group for each channel": Case((2, 20, 12), 12, "silu"),
    "odd channels": Case((3, 5, 21), 7, "silu"),
    "no positions": Case((4, 32), 8),
    "several axes": Case((2, 3, 2, 5, 16), 2),
    "no batch": Case((11, 20), 5, "silu", batch_axes=0),
    "two axes of a batch": Case((2, 3, 6, 16), 4, "silu", batch_axes=2),
    "no images": Case((0, 4, 8), 2),
    "narrow": Case((2, 700, 4), 2, "silu"),
    "one channel": Case((2, 70, 1), 1),
    "320": Case((2, 64, 320), 32, "silu"),
    "1023": Case((1, 5, 1023), 3, "silu"),
    "4096": Case((1, 3, 4096), 32, "silu"),
}
# Many blocks.
LARGE = {
    "large": Case((4, 64, 64, 320), 32, "silu"),
    "large, no activation": Case((4, 64, 64, 320), 32),
    "large, float32 vectors": Case((4, 64, 64, 320), 32, "silu", vectors="float32"),
    "large, one image": Case((1, 128, 128, 512), 32, "silu"),
    "large, odd": Case((3, 50, 37, 1023), 11, "silu"),
    "large, wide": Case((2, 33, 33, 4096), 32, "silu"),
    "large, 4095": Case((2, 301, 4095), 5),
    "large, 2560": Case((2, 32, 32, 2560), 32, "silu"),
    "large, many images": Case((70, 49, 64), 64, "silu"),
    "large, narrow": Case((2, 40_000, 8), 2, "silu"),
    "large, one group": Case((5, 40, 40, 96), 1),
}


def operands(case, dtype, seed=0, mean=0.5):
    """Slot -> array, and the cotangent."""
    rng = np.random.default_rng(seed)
    given = {"x": jnp.asarray(rng.normal(mean, 1.5, case.shape), dtype)}
    for slot in case.slots:
        centre = 1.0 if slot == "scale" else 0.2
        given[slot] = jnp.asarray(rng.normal(centre, 0.7, case.shape[-1:]), case.vectors or dtype)
    return given, jnp.asarray(rng.normal(0.1, 1.0, case.shape), dtype)


def exact(case, given, ct):
    """Name -> (the value, what the arithmetic in float32 is allowed), in float64."""
    shape, batch = case.shape, case.shape[: case.batch_axes]
    channels, rows = shape[-1], tuple(range(len(shape) - 1))
    g, ct = {n: wide(a) for n, a in given.items()}, wide(ct)
    whole, active = (*batch, -1, case.groups, channels // case.groups), case.activation == "silu"

    def mean(a):
        if not a.size:
            return a
        over = a.reshape(whole).mean((-3, -1), keepdims=True)
        return np.broadcast_to(over, (*batch, a.size // (channels * int(np.prod(batch))), *whole[-2:])).reshape(shape)

    x, scale, bias = g["x"], g.get("scale", np.ones(channels)), g.get("bias", np.zeros(channels))
    centred = x - mean(x)
    rstd = 1 / np.sqrt(mean(centred**2) + EPSILON)
    xhat = centred * rstd
    h = xhat * scale + bias
    of_xhat = rstd * 2.0**-21 * (np.sqrt(mean(x**2)) + np.abs(x)) + 2.0**-20 * np.abs(xhat)
    of_h = of_xhat * np.abs(scale) + 2.0**-22 * (np.abs(xhat * scale) + np.abs(bias))
    sigma = 1 / (1 + np.exp(-h))
    out, slope = (h * sigma, sigma * (1 + h * (1 - sigma))) if active else (h, np.ones_like(h))
    u = ct * slope
    of_u = np.abs(ct) * (0.5 * of_h + 2.0**-20) * active
    inner, of_inner = u * scale, of_u * np.abs(scale)
    dx = (inner - mean(inner) - xhat * mean(inner * xhat)) * rstd
    terms = rstd * (np.abs(inner) + np.abs(xhat) * mean(np.abs(inner * xhat)) + mean(np.abs(inner)))
    worst = of_xhat.max(initial=0.0) + 2.0**-20
    of_dx = 6 * worst * (1 + np.abs(xhat)) * terms
    of_dx = of_dx + rstd * (of_inner + (1 + np.abs(xhat)) * mean(of_inner * (1 + np.abs(xhat))))
    of_dscale = np.abs(u) * of_xhat + of_u * np.abs(xhat) + 2.0**-20 * np.abs(u * xhat)
    return {
        "out": (out, 1.1 * of_h + 2.0**-21 * np.abs(out)),
        "dx": (dx, of_dx),
        "dscale": ((u * xhat).sum(rows), of_dscale.sum(rows)),
        "dbias": (u.sum(rows), (of_u + 2.0**-20 * np.abs(u)).sum(rows)),
    }


class GroupNormSuite:
    """Forward and gradients of one implementation."""

    implementation: str
    turns = turns(CASES, every=("silu", "odd channels"))
    repeatable = True  # promises the same bits every time

    def pytest_generate_tests(self, metafunc):
        if "turn" in metafunc.fixturenames:
            metafunc.parametrize("turn", self.turns, ids=lambda t: "-".join(t).replace(" ", "_"))

    def op(self, case, x, scale=None, bias=None):
        attrs = {"groups": case.groups, "activation": case.activation, "batch_axes": case.batch_axes}
        return group_norm(x, scale, bias, epsilon=EPSILON, implementation=self.implementation, **attrs)

    def step(self, case, wanted=None):
        """(out, the gradients wanted by name) of operands and a cotangent, jitted."""

        def of(given, ct):
            moving = {slot: given[slot] for slot in wanted or given}
            out, pull = jax.vjp(lambda moved: self.op(case, **{**given, **moved}), moving)
            return out, {"d" + slot: g for slot, g in pull(ct)[0].items()}

        return jax.jit(of)

    def test_values_and_gradients(self, turn):
        name, dtype = turn
        case = {**CASES, **LARGE}[name]
        given, ct = operands(case, dtype)
        out, grads = self.step(case)(given, ct)
        wants = exact(case, given, ct)
        assert set(grads) == {"d" + slot for slot in given}
        for slot, got in grads.items():
            assert got.dtype == given[slot.removeprefix("d")].dtype
        for slot, got in {"out": out, **grads}.items():
            close(slot, got, wants[slot])
        # Saves nothing: another launch.
        close("out", jax.jit(lambda given: self.op(case, **given))(given), wants["out"])

    @pytest.mark.parametrize("wanted", [("x",), ("scale",), ("bias",), ("scale", "bias"), ("x", "bias")], ids="+".join)
    @pytest.mark.parametrize("name", ["silu", "no activation"])
    def test_only_the_gradients_asked_for(self, name, wanted):
        case = CASES[name]
        given, ct = operands(case, "float32")
        wants = exact(case, given, ct)
        _, grads = self.step(case, wanted)(given, ct)
        assert set(grads) == {"d" + slot for slot in wanted}
        for slot, got in grads.items():
            close(slot, got, wants[slot])

    def same_bits(self, case, dtype):
        given, ct = operands(case, dtype)
        step = self.step(case)
        first, second = (jax.tree.leaves(step(given, ct)) for _ in range(2))
        for a, b in zip(first, second, strict=True):
            if self.repeatable:
                assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
            else:
                np.testing.assert_allclose(wide(a), wide(b), rtol=1e-2, atol=1e-2 * float(np.abs(a).max()))

    def test_twice_is_the_same_to_the_bit(self):
        self.same_bits(CASES["narrow"], "float32")

    def test_an_image_of_nan_or_infinity_spoils_its_own_groups(self):
        case = Case((4, 6, 8), 2)
        given, ct = operands(case, "float32")
        given["x"] = given["x"].at[1, 3, 0].set(jnp.nan).at[2, 0, 7].set(jnp.inf)
        out, grads = self.step(case, ("x",))(given, ct)
        for a in (np.asarray(out), np.asarray(grads["dx"])):
            assert np.isnan(a[1, :, :4]).all()
            assert not np.isfinite(a[2, :, 4:]).all()
            assert np.isfinite(a[[0, 3]]).all()
            assert np.isfinite(a[1, :, 4:]).all()
            assert np.isfinite(a[2, :, :4]).all()

    @pytest.mark.parametrize("first", ["as the others", "far from them"])
    def test_a_large_mean_costs_no_accuracy(self, first):
        """Also where the first position of an image is of another size than the rest: in one group of the two, which it is part of."""
        case = Case((2, 200, 16), 2, slots=("scale",))
        given, ct = operands(case, "float32", mean=4096.0)
        if first != "as the others":
            given["x"] = given["x"].at[:, 0, :8].set(0.0)
        wants = exact(case, given, ct)
        error = np.abs(wide(self.op(case, **given)) - wants["out"][0])
        print(f"errors {error.max():.2g}")
        assert error.max() < 2e-3

    def test_a_large_mean_of_each_channel_costs_no_accuracy(self):
        case = Case((1, 300, 12), 12, slots=())
        given, ct = operands(case, "float32")
        given["x"] = given["x"] + jnp.asarray([0.0, 4096.0, -4096.0] * 4)
        error = np.abs(wide(self.op(case, **given)) - exact(case, given, ct)["out"][0])
        assert error.max() < 2e-3

    def test_under_vmap_and_scan_it_is_the_same(self):
        case = CASES["silu"]
        given, _ = operands(case, "float32")
        want = self.op(case, **given)
        batch = {**given, "x": jnp.stack([given["x"], given["x"] * 2], 1)}
        axes = ({slot: 1 if slot == "x" else None for slot in batch},)
        got = jax.jit(jax.vmap(lambda given: self.op(case, **given), axes))(batch)
        looped = jax.jit(lambda given: jax.lax.scan(lambda c, _: (c, self.op(case, **given)), 0, length=2)[1])(given)
        np.testing.assert_allclose(got[0], want, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(looped[1], want, rtol=1e-5, atol=1e-5)
