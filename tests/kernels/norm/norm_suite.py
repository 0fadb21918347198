"""One test base for every implementation of layer_norm: each is held to float64 numpy. Not a test module.

Inherit, and set `implementation`; `turns` says which cases are held in which dtypes.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fusionlab.ops import layer_norm, layer_norm_and_sum

DTYPES = ("bfloat16", "float32", "float16")
EPSILON = 1e-5
ALL = ("scale", "bias", "shift", "residual")
SUMMANDS = ("x", "shift", "residual")


@dataclass(frozen=True)
class Case:
    """A call: the shape of x, the other operands, whether the sum is given too, and the dtype of the vectors (None: that of x)."""

    shape: tuple[int, ...]
    slots: tuple[str, ...] = ("scale", "bias")
    kind: str = "layer"
    gives_sum: bool = False
    vectors: str | None = None


CASES = {
    "plain": Case((5, 24), ()),
    "rms": Case((5, 24), (), "rms"),
    "scale and bias": Case((3, 7, 40)),
    "rms, scale": Case((6, 100), ("scale",), "rms"),
    "everything": Case((7, 200), ALL),
    "everything and the sum": Case((7, 200), ALL, gives_sum=True),
    "rms, everything and the sum": Case((5, 136), ALL, "rms", gives_sum=True),
    "residual": Case((6, 56), ("residual",)),
    "shift": Case((6, 56), ("scale", "bias", "shift")),
    "shift and the sum": Case((6, 56), ("scale", "shift"), gives_sum=True),
    "float32 vectors": Case((5, 72), ALL, vectors="float32"),
    "float32 vectors, the sum": Case((5, 33), ALL, gives_sum=True, vectors="float32"),
    "one row": Case((136,), ALL),
    "one column": Case((9, 1), ALL),
    "many rows": Case((131, 8), ALL),
    "no rows": Case((0, 16), ALL),
    "7": Case((3, 7), ALL),
    "513": Case((4, 513), ALL, gives_sum=True),
    "1023": Case((3, 1023), ALL),
    "1026, more than a warp": Case((3, 1026), ("scale", "bias", "residual")),
    "2056, several warps": Case((2, 2056), ALL),
    "9001, two passes": Case((2, 9001), ALL),
    "16392, two passes": Case((2, 16392), ALL, gives_sum=True),
    "40001, read again": Case((1, 40001), ALL, gives_sum=True),
}
# Many blocks, several rows of each.
LARGE = {
    "large": Case((3001, 1000), ALL),
    "large, the sum": Case((3001, 1000), ALL, gives_sum=True),
    "large, rms": Case((3000, 1536), ("scale", "residual"), "rms", gives_sum=True),
    "large, odd": Case((2003, 1023), ALL),
    "large, narrow": Case((70_001, 24), ALL),
    "large, 4096": Case((1030, 4096), ALL, gives_sum=True),
    "large, 5120": Case((700, 5120), ("scale",), "rms"),
    "large, 12288": Case((300, 12288), ALL),
    "large, 65535": Case((41, 65535), ALL, gives_sum=True),
    "large, 65536": Case((41, 65536), ALL, gives_sum=True),
    "large, float32 vectors": Case((3001, 1000), ALL, gives_sum=True, vectors="float32"),
}


def turns(cases, every=()):
    """(case, dtype): one dtype of three each, all of them for those in `every`."""
    given = ((c, DTYPES if c in every else (DTYPES[i % 3],)) for i, c in enumerate(cases))
    return [(case, dtype) for case, dtypes in given for dtype in dtypes]


def wide(a):
    return np.asarray(a, np.float64)


def ulp(value, dtype):
    """The distance of neighbours of `dtype` around |value|."""
    info = ml_dtypes.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(value), float(info.smallest_normal))))
    return 2.0 ** (exponent - info.nmant)


def operands(case, dtype, seed=0):
    """Slot -> array, and the cotangents of the results."""
    rng = np.random.default_rng(seed)
    given = {"x": jnp.asarray(rng.normal(0.5, 1.5, case.shape), dtype)}
    for slot in case.slots:
        shape = case.shape if slot == "residual" else case.shape[-1:]
        mean = 1.0 if slot == "scale" else 0.2
        given[slot] = jnp.asarray(rng.normal(mean, 0.7, shape), dtype if slot == "residual" else case.vectors or dtype)
    names = ("out", "sum") if case.gives_sum else ("out",)
    return given, {n: jnp.asarray(rng.normal(0.1, 1.0, case.shape), dtype) for n in names}


def exact(case, given, cts):
    """Name -> (the value, the sum of the sizes of its terms), in float64; s is not rounded."""
    dtype = str(given["x"].dtype)
    rows = tuple(range(len(case.shape) - 1))
    g, ct = ({n: wide(a) for n, a in side.items()} for side in (given, cts))
    s = sum(g[slot] for slot in SUMMANDS if slot in g)
    centred = s - s.mean(-1, keepdims=True) * (case.kind == "layer")
    rstd = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + EPSILON)
    xhat, scale = centred * rstd, g.get("scale", np.ones(case.shape[-1:]))
    size = np.sqrt((s**2).mean(-1, keepdims=True)) + np.abs(s)
    # What the rounding of s, and of the arithmetic, moves xhat by: through s itself, the mean and the deviation.
    summed = len([slot for slot in SUMMANDS if slot in g]) > 1
    step = ulp(s, dtype) * summed
    of_row = step.mean(-1, keepdims=True)
    moved = rstd * (step + of_row * (1 + np.abs(xhat)) + 2.0**-23 * 4 * size)
    found = {
        "out": (
            xhat * scale + g.get("bias", 0.0),
            (moved + 2.0**-22 * np.abs(xhat)) * np.abs(scale) + 2.0**-22 * np.abs(g.get("bias", 0.0)),
        )
    }
    if "sum" in ct:
        found["sum"] = (s, 2.0**-22 * sum(np.abs(g[slot]) for slot in SUMMANDS if slot in g))
    inner = ct["out"] * scale

    def mean(a):
        return a.mean(-1, keepdims=True)

    through = xhat * mean(inner * xhat) + mean(inner) * (case.kind == "layer")
    worst = moved.max(initial=0.0) + 2.0**-20
    dx = (inner - through) * rstd + ct.get("sum", 0.0)
    terms = rstd * (np.abs(inner) + np.abs(xhat) * mean(np.abs(inner * xhat)) + mean(np.abs(inner)))
    of_dx = 6 * worst * (1 + np.abs(xhat)) * terms + 2.0**-22 * np.abs(ct.get("sum", 0.0))
    found |= {"dx": (dx, of_dx), "dresidual": (dx, of_dx)}
    # norm_columns adds up dx as it was rounded.
    rounded = of_dx + ulp(dx, dtype) if dx.size else of_dx
    found["dshift"] = dx.sum(rows), rounded.sum(rows) + 2.0**-20 * np.abs(dx).sum(rows)
    found["dscale"] = (ct["out"] * xhat).sum(rows), (np.abs(ct["out"]) * (moved + 2.0**-20 * np.abs(xhat))).sum(rows)
    found["dbias"] = ct["out"].sum(rows), 2.0**-20 * np.abs(ct["out"]).sum(rows)
    return found


def close(name, got, want):
    """Within half an ulp of the result and what the arithmetic is allowed."""
    value, allowed = want
    assert got.shape == value.shape, name
    if not value.size:
        return
    limit = 0.505 * ulp(value, str(got.dtype)) + allowed
    error = np.abs(wide(got) - value)
    worst = np.unravel_index(np.argmax(error - limit), error.shape)
    assert error[worst] <= limit[worst], (
        name,
        worst,
        float(wide(got)[worst]),
        float(value[worst]),
        float(limit[worst]),
    )


class NormSuite:
    """Forward and gradients of one implementation."""

    implementation: str
    turns = turns(CASES, every=("everything", "everything and the sum", "1023"))
    repeatable = True  # promises the same bits every time

    def pytest_generate_tests(self, metafunc):
        if "turn" in metafunc.fixturenames:
            metafunc.parametrize("turn", self.turns, ids=lambda t: "-".join(t).replace(" ", "_"))

    def op(self, case, **given):
        x, scale, bias = (given.pop(n, None) for n in ("x", "scale", "bias"))
        attrs = {"kind": case.kind, "epsilon": EPSILON, "implementation": self.implementation}
        if case.gives_sum:
            return dict(zip(("out", "sum"), layer_norm_and_sum(x, scale, bias, **given, **attrs), strict=True))
        return {"out": layer_norm(x, scale, bias, **given, **attrs)}

    def step(self, case, wanted=None):
        """(results by name, the gradients wanted by name) of operands and cotangents, jitted."""

        def of(given, cts):
            moving = {slot: given[slot] for slot in wanted or given}
            outs, pull = jax.vjp(lambda moved: self.op(case, **{**given, **moved}), moving)
            return outs, {"d" + slot: g for slot, g in pull(cts)[0].items()}

        return jax.jit(of)

    def test_values_and_gradients(self, turn):
        name, dtype = turn
        case = {**CASES, **LARGE}[name]
        given, cts = operands(case, dtype)
        outs, grads = self.step(case)(given, cts)
        wants = exact(case, given, cts)
        assert set(outs) | set(grads) == set(cts) | {"d" + slot for slot in given}
        for slot, got in grads.items():
            assert got.dtype == given[slot.removeprefix("d")].dtype
        for slot, got in {**outs, **grads}.items():
            close(slot, got, wants[slot])
        plain = jax.jit(lambda given: self.op(case, **given))(given)  # saves nothing: another launch
        for slot, got in plain.items():
            np.testing.assert_allclose(
                wide(got), wide(outs[slot]), rtol=2.0**-7 if dtype != "float32" else 1e-5, atol=1e-5
            )

    @pytest.mark.parametrize(
        "wanted",
        [("x",), ("residual",), ("shift",), ("scale",), ("bias",), ("scale", "bias"), ("x", "bias")],
        ids="+".join,
    )
    @pytest.mark.parametrize("name", ["everything", "everything and the sum"])
    def test_only_the_gradients_asked_for(self, name, wanted):
        case = CASES[name]
        given, cts = operands(case, "float32")
        wants = exact(case, given, cts)
        _, grads = self.step(case, wanted)(given, cts)
        assert set(grads) == {"d" + slot for slot in wanted}
        for slot, got in grads.items():
            close(slot, got, wants[slot])

    @pytest.mark.parametrize("given_of", ["out", "sum"])
    def test_one_cotangent_of_two(self, given_of):
        case = CASES["everything and the sum"]
        given, cts = operands(case, "float32")
        ct = cts[given_of]

        @jax.jit
        def grads(given):
            return jax.vjp(lambda given: self.op(case, **given)[given_of], given)[1](ct)[0]

        wants = exact(case, given, {n: a if n == given_of else a * 0 for n, a in cts.items()})
        for slot, got in grads(given).items():
            close("d" + slot, got, wants["d" + slot])

    def same_bits(self, case, dtype):
        given, cts = operands(case, dtype)
        step = self.step(case)
        first, second = (jax.tree.leaves(step(given, cts)) for _ in range(2))
        for a, b in zip(first, second, strict=True):
            if self.repeatable:
                assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
            else:
                one, two = (np.asarray(v, np.float64) for v in (a, b))
                np.testing.assert_allclose(one, two, rtol=1e-2, atol=1e-2 * float(np.abs(one).max()))

    def test_twice_is_the_same_to_the_bit(self):
        self.same_bits(CASES["many rows"], "float32")

    def test_a_row_of_nan_or_infinity_spoils_no_other(self):
        case = CASES["everything"]
        given, cts = operands(case, "float32")
        given["x"] = given["x"].at[1, 3].set(jnp.nan).at[4, 0].set(jnp.inf)
        outs, grads = self.step(case, ("x",))(given, cts)
        for a in (outs["out"], grads["dx"]):
            assert np.isnan(a[1]).all()
            assert not np.isfinite(a[4]).all()
            assert np.isfinite(np.asarray(a)[[0, 2, 3, 5, 6]]).all()

    def test_a_large_mean_costs_no_accuracy(self):
        case = Case((4, 200), ("scale",))
        given, _ = operands(case, "float32")
        given["x"] = given["x"] + 4096.0
        wants = exact(case, given, {"out": given["x"]})
        got = wide(self.op(case, **given)["out"])
        assert np.abs(got - wants["out"][0]).max() < 2e-3

    def test_under_vmap_and_scan_it_is_the_same(self):
        case = CASES["everything and the sum"]
        given, _ = operands(case, "float32")
        want = self.op(case, **given)
        rows = {slot: a[:, None] if slot in ("x", "residual") else a for slot, a in given.items()}
        axes = ({slot: 0 if slot in ("x", "residual") else None for slot in rows},)
        got = jax.jit(jax.vmap(lambda given: self.op(case, **given), axes))(rows)
        looped = jax.jit(lambda given: jax.lax.scan(lambda c, _: (c, self.op(case, **given)), 0, length=2)[1])(given)
        for name, a in want.items():
            np.testing.assert_allclose(got[name][:, 0], a, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(looped[name][1], a, rtol=1e-5, atol=1e-5)
