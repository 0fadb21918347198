"""One test base for every implementation of lerp: each is held to float64 numpy. Not a test module.

Inherit, and set `implementation`; `turns` says which cases are held in which dtypes.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fusionlab.ops import lerp

DTYPES = ("float32", "bfloat16", "float16", "float64")
SLOTS = ("x", "y", "w")
N = None
EVERY_WANTED = [w for n in (1, 2, 3) for w in itertools.combinations(SLOTS, n)]


def _of_rank(rank):
    """The axes of x, y and w in turns, so that no two of them are one."""
    sizes = ((2, 3, 2, 5, 2, 3, 2, 4)[i] for i in range(rank))
    given = [[n if slot != i % 3 else 1 for slot in range(3)] for i, n in enumerate(sizes)]
    return tuple(tuple(axis[slot] for axis in given) for slot in range(3))


# Shapes of x, y and w.
CASES = {
    "alike": ((5, 24), (5, 24), (5, 24)),
    "a number": ((4, 130), (4, 130), ()),
    "w [1]": ((16, 33), (16, 33), (1,)),
    "w of one element and of more axes": ((6, 8), (6, 8), (1, 1, 1)),
    "w along the last axis": ((7, 6), (7, 6), (6,)),
    "w along the first axis": ((3, 8), (3, 8), (3, 1)),
    "a vector of three is no number": ((5, 2, 2, 3), (5, 2, 2, 3), (3,)),
    "w wider than x and y": ((2, 5), (2, 5), (3, 2, 5)),
    "w wider, x and y short": ((3,), (1,), (2, 4, 3)),
    "ranks that differ": ((3, 4), (2, 3, 4), (1,)),
    "ranks that differ, leading": ((2, 3, 4), (2, 2, 3, 4), (1,)),
    "sum over leading": ((1, 40), (77, 40), (77, 1)),
    "sum over the middle": ((3, 1, 20), (3, 50, 20), (1, 50, 1)),
    "sum over trailing": ((33, 1), (33, 300), (1, 300)),
    "sum over both ends": ((1, 5, 1), (19, 5, 37), (1, 1, 1)),
    "sum of everything": ((1, 1), (31, 52), (31, 52)),
    "two sums": ((18, 1, 24), (1, 21, 24), (1, 1, 1)),
    "three sums": ((1, 5, 6, 8), (7, 1, 6, 8), (7, 5, 1, 8)),
    "rows and columns": ((40, 1), (1, 36), (1, 1)),
    "channels": ((2, 1, 1, 1), (2, 3, 12, 20), (3, 1, 20)),
    "rows of 3": ((150, 1), (150, 3), (1,)),
    **{f"rank {n}": _of_rank(n) for n in range(9)},
    "empty": ((0, 3), (3,), (1,)),
    "sums of nothing": ((1, 3), (0, 3), (1,)),
    # No 16 bytes fit: a row begins anywhere.
    "7": ((7,), (7,), (7,)),
    "1001": ((1001,), (1001,), (1,)),
    "7 x 33 x 1001": ((7, 1, 101), (7, 33, 101), (33, 1)),
}
# Many tiles of each kernel, several stages of shared memory, partial sums.
LARGE = {
    "large, alike": ((129, 4099), (129, 4099), (129, 4099)),
    "large, w along the last axis": ((130, 4100), (130, 4100), (4100,)),
    "large, w [1]": ((515, 4096), (515, 4096), (1,)),
    "large, sum over leading": ((1, 1024), (4097, 1024), (1,)),
    "large, sum over leading, odd": ((1001,), (4097, 1001), (4097, 1)),
    "large, sum over the middle": ((64, 1, 512), (64, 300, 512), (300, 1)),
    "large, sum over the middle, odd": ((33, 1, 333), (33, 301, 333), (301, 1)),
    "large, sum over trailing": ((4097, 1), (4097, 1024), (1,)),
    "large, sum over trailing, odd": ((1001, 1), (1001, 3333), (3333,)),
    "large, sum of everything": ((), (1001, 4099), (1001, 1)),
    "large, sum over both ends": ((129, 1), (257, 129, 131), (1,)),
    "large, two sums": ((129, 1, 512), (1, 130, 512), (1,)),
    "large, two sums, odd": ((129, 1, 333), (1, 131, 333), (1,)),
    "large, three sums": ((1, 33, 64, 40), (65, 1, 64, 40), (65, 33, 1, 40)),
    "large, rows and columns": ((2049, 1), (1, 2050), (1,)),
    "large, images": ((16, 1, 1, 1), (16, 3, 224, 224), (1,)),
    "large, channels": ((16, 1, 1, 1), (16, 3, 121, 244), (3, 1, 244)),
    "large, w wider than both": ((1024,), (1024,), (3, 700, 1024)),
}


def turns(cases, every=()):
    """(case, dtype): one dtype of four each, all of them for those in `every`."""
    given = ((c, DTYPES if c in every else (DTYPES[i % 4],)) for i, c in enumerate(cases))
    return [(case, dtype) for case, dtypes in given for dtype in dtypes]


def ulp(value, dtype):
    """The distance of neighbours of `dtype` around |value|."""
    info = ml_dtypes.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(value), float(info.smallest_normal))))
    return 2.0 ** (exponent - info.nmant)


def operands(shapes, dtype, seed=0, positive=False):
    """x, y, w and a cotangent of the result's shape. With `positive` no term of a result or a sum cancels another."""
    rng = np.random.default_rng(seed)
    whole = np.broadcast_shapes(*shapes)
    if positive:
        low = {"x": (0.5, 1), "y": (2, 3), "w": (0.25, 0.75), "ct": (0.5, 1)}
        return tuple(jnp.asarray(rng.uniform(*low[n], s), dtype) for n, s in zip(low, (*shapes, whole), strict=True))
    return tuple(jnp.asarray(rng.standard_normal(s), dtype) for s in (*shapes, whole))


def wide(a):
    return np.asarray(a, np.float64)


def summed(a, shape):
    """Over the axes along which an operand of that shape was broadcast."""
    padded = (1,) * (a.ndim - len(shape)) + tuple(shape)
    over = tuple(i for i, (n, m) in enumerate(zip(padded, a.shape, strict=True)) if n != m)
    return a.sum(over, keepdims=True).reshape(shape)


def exact(x, y, w, ct):
    """Name -> (the result, the sum of the sizes of its terms), in float64."""
    shapes = {"x": np.shape(x), "y": np.shape(y), "w": np.shape(w)}
    x, y, w, ct = (wide(a) for a in (x, y, w, ct))
    found = {"out": (x + w * (y - x), np.abs(x) + np.abs(w) * (np.abs(x) + np.abs(y)))}
    factors = {"x": (1 - w, 1 + np.abs(w)), "y": (w, np.abs(w)), "w": (y - x, np.abs(x) + np.abs(y))}
    for slot, (factor, size) in factors.items():
        whole = (factor * ct, size * np.abs(ct))
        found["d" + slot] = tuple(summed(np.broadcast_to(a, ct.shape), shapes[slot]) for a in whole)
    return {name: (np.broadcast_to(a, s.shape), s) for name, (a, s) in found.items()}


def close(name, got, want, dtype):
    """Within half an ulp of the result and some roundings of the arithmetic."""
    value, size = want
    assert got.dtype == jnp.dtype(dtype), name
    assert got.shape == value.shape, name
    if not value.size:
        return
    eps = np.finfo("float64" if dtype == "float64" else "float32").eps
    # Sums in trees of short chains: their errors grow slowly.
    limit = 0.505 * ulp(value, dtype) + 32 * eps * size
    error = np.abs(wide(got) - value)
    worst = np.unravel_index(np.argmax(error - limit), error.shape)
    assert error[worst] <= limit[worst], (name, worst, float(wide(got)[worst]), float(value[worst]))


def beyond_32_bits(implementation, what, rows, columns):
    """Two big bfloat16 arrays at most, of numbers whose products and sums are exact, held in full to a formula.

    `what`: "forward", "sums" (the gradients of a row and a column) or "no sums" (that of a whole x).
    """
    op, half = functools.partial(lerp, implementation=implementation), jnp.asarray(0.5, "bfloat16")
    # No power of 2 is a period of them, so that rows told wrong by one differ.
    column = (7 * jnp.arange(rows) % 31 - 15).astype("bfloat16")[:, None]
    row = (3 * jnp.arange(columns) % 7 - 2).astype("bfloat16")[None]

    def holds(got, formula):
        return bool(jax.jit(lambda got, row, column: jnp.all(got == formula(row, column)))(got, row, column))

    if what == "forward":
        out = jax.jit(op)(row, column, half)
        assert out.shape == (rows, columns)
        assert holds(out, lambda row, column: (row + column) * half)
        return
    ct = jax.jit(jnp.multiply)(row, column)
    if what == "no sums":

        def alone(row, column, ct):
            return jax.vjp(lambda x: op(x, column, half), jnp.broadcast_to(row, ct.shape))[1](ct)[0]

        assert holds(jax.jit(alone)(row, column, ct), lambda row, column: row * column * half)
        return
    dx, dy = jax.jit(lambda row, column, ct: jax.vjp(lambda x, y: op(x, y, half), row, column)[1](ct))(row, column, ct)
    for got, along, other in ((dx, row, column), (dy, column, row)):
        total = 0.5 * np.asarray(along, np.float64) * np.asarray(other, np.float64).sum()
        assert np.abs(total).max() < 2**23, "float32 has all partial sums"
        np.testing.assert_array_equal(np.asarray(got), total.astype(got.dtype))


def _axes(axes):
    return "".join("-" if a is None else str(a) for a in axes)


class LerpSuite:
    """Forward and gradients of one implementation."""

    implementation: str
    turns = turns(CASES, every=("two sums", "sum over the middle", "1001"))
    repeatable = True  # promises the same bits every time

    def pytest_generate_tests(self, metafunc):
        if "turn" in metafunc.fixturenames:
            metafunc.parametrize("turn", self.turns, ids=lambda t: "-".join(t).replace(" ", "_"))

    @pytest.fixture(autouse=True)
    def _double(self):
        with jax.enable_x64(True):
            yield

    @property
    def op(self):
        return functools.partial(lerp, implementation=self.implementation)

    def step(self, wanted=SLOTS):
        """(out, the gradients wanted by name) of x, y, w and a cotangent, jitted."""

        def of(x, y, w, ct):
            given = {"x": x, "y": y, "w": w}
            out, pull = jax.vjp(lambda moved: self.op(**{**given, **moved}), {s: given[s] for s in wanted})
            return out, {"d" + slot: g for slot, g in pull(ct)[0].items()}

        return jax.jit(of)

    def test_values_and_gradients(self, turn):
        case, dtype = turn
        args = operands({**CASES, **LARGE}[case], dtype)
        wants = exact(*args)
        out, grads = self.step()(*args)
        for name, got in {"out": out, **grads}.items():
            close(name, got, wants[name], dtype)

    @pytest.mark.parametrize("wanted", EVERY_WANTED, ids="".join)
    @pytest.mark.parametrize("case", ["alike", "channels"])
    def test_only_the_gradients_asked_for(self, case, wanted):
        args = operands(CASES[case], "float32")
        step = self.step(wanted)
        traced = jax.make_jaxpr(step)(*args).jaxpr
        (backward,) = (e for e in _equations(traced) if e.primitive.name == "lerp_cotangent")
        assert len(backward.outvars) == len(wanted)
        wants = exact(*args)
        out, grads = step(*args)
        assert set(grads) == {"d" + slot for slot in wanted}
        for name, got in {"out": out, **grads}.items():
            close(name, got, wants[name], "float32")

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    @pytest.mark.parametrize("case", ["alike", "sum over leading", "two sums", "7 x 33 x 1001"])
    def test_half_is_within_an_ulp_of_float32(self, case, dtype):
        args = operands(CASES[case], dtype, positive=True)
        step = self.step()
        half = jax.tree.leaves(step(*args))
        full = jax.tree.leaves(step(*(a.astype("float32") for a in args)))
        for got, want in zip(half, full, strict=True):
            assert (got.dtype, want.dtype) == (jnp.dtype(dtype), jnp.dtype("float32"))
            assert np.all(np.abs(wide(got) - wide(want)) <= ulp(wide(want), dtype))

    def test_infinities_and_nan_are_those_of_the_formula(self):
        x, y, w, _ = operands(((9, 16), (9, 16), (16,)), "float32")
        x, y = x.at[1, 2].set(jnp.inf), y.at[3, 4].set(jnp.nan)
        with np.errstate(invalid="ignore"):
            want = wide(x) + wide(w) * (wide(y) - wide(x))
        np.testing.assert_allclose(jax.jit(self.op)(x, y, w), want, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("case", ["sum of everything", "two sums"])
    def test_twice_is_the_same_to_the_bit(self, case, dtype):
        if self.repeatable:
            self.same_bits(CASES[case], dtype)

    def same_bits(self, shapes, dtype):
        args = operands(shapes, dtype)
        step = self.step()
        first = jax.tree.leaves(step(*args))
        for _ in range(4):
            for a, b in zip(first, jax.tree.leaves(step(*args)), strict=True):
                assert np.asarray(a).tobytes() == np.asarray(b).tobytes()

    def test_in_a_scan_as_an_average_that_moves(self):
        rng = np.random.default_rng(0)
        x, y, w = (jnp.asarray(rng.standard_normal(s), "float32") for s in ((4, 24), (9, 4, 24), (24,)))
        ct = jnp.cos(jnp.arange(96.0, dtype="float32")).reshape(4, 24)

        def average(op, x, y, w):
            return jax.lax.scan(lambda c, y: (op(c, y, w), None), x, y)[0]

        def step(op, *args):
            out, pull = jax.vjp(functools.partial(average, op), *args)
            return out, pull(ct.astype(out.dtype))

        got = jax.jit(functools.partial(step, self.op))(x, y, w)
        want = step(lambda x, y, w: x + w * (y - x), *(a.astype("float64") for a in (x, y, w)))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * float(jnp.abs(b).max()))

    @pytest.mark.parametrize("axes", [(0, N, N, 0), (N, 0, 0, 0), (1, 0, N, N), (N, N, 1, N), (N, N, N, 0)], ids=_axes)
    @pytest.mark.parametrize("wanted", ["xyw", "y"])
    def test_a_batch_of_them(self, axes, wanted):
        """Of x, y, w and the cotangent: what is not batched is shared, and has a gradient for each of the batch."""
        shapes = ((3, 1, 8), (3, 5, 8), (5, 1), (3, 5, 8))
        rng = np.random.default_rng(0)
        batched = (s if a is None else (*s[:a], 4, *s[a:]) for s, a in zip(shapes, axes, strict=True))
        args = [jnp.asarray(rng.standard_normal(s), "float32") for s in batched]
        out, grads = jax.jit(jax.vmap(self.step(tuple(wanted)), axes))(*args)
        for i in range(4):
            wants = exact(*(a if axis is None else jnp.take(a, i, axis) for a, axis in zip(args, axes, strict=True)))
            for name, got in {"out": out, **grads}.items():
                close(name, got[i], wants[name], "float32")

    def test_a_batch_of_tangents_transposed(self):
        """The gradient with respect to a tangent that a batch of weights shares."""
        x, y, w, _ = operands(((3, 8), (3, 8), (4, 3, 1)), "float32")
        ct = jnp.sin(jnp.arange(96.0, dtype="float32")).reshape(4, 3, 8)

        def moved(t):
            return jax.vmap(lambda w: jax.jvp(lambda x: self.op(x, y, w), (x,), (t,))[1])(w)

        (got,) = jax.jit(lambda ct: jax.linear_transpose(moved, x)(ct))(ct)
        np.testing.assert_allclose(got, ((1 - wide(w)) * wide(ct)).sum(0), rtol=1e-5, atol=1e-5)


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in eqn.params.values():
            if hasattr(inner, "jaxpr"):
                yield from _equations(inner.jaxpr)
