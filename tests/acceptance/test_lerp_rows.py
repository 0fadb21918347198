"""Rows 46 to 49 of lerp, in float64 and float32 on a CPU; the kernels' own tests ask the same of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.ops import lerp


def blend(x, y, w):
    return x + w * (y - x)


def operands(shapes, dtype):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.standard_normal(s), dtype) for s in shapes)


def agree(shapes, dtype, rtol):
    """The fused function's value and gradients against plain float64 code differentiated by JAX."""
    with jax.enable_x64(True):
        args = operands(shapes, dtype)
        wide = tuple(a.astype("float64") for a in args)
        want, pull = jax.vjp(blend, *wide)
        ct = operands([want.shape], dtype)[0]
        fused = fl.fuse(blend, passes="lerp")
        counts = fused.findings(*args).counts()
        got, pull_fused = jax.vjp(fused, *args)
        for g, w in zip((got, *pull_fused(ct)), (want, *pull(ct.astype("float64"))), strict=True):
            assert g.dtype == dtype
            np.testing.assert_allclose(g, w, rtol=rtol, atol=rtol * max(1.0, float(np.abs(w).max())))
        return counts["lerp"]


SAME = [(100,), (2, 50), (2, 2, 25), (2, 2, 5, 5), (2, 1, 2, 5, 5), (2, 1, 2, 5, 1, 5)]


@pytest.mark.parametrize(("dtype", "rtol"), [("float64", 1e-7), ("float32", 1e-5)])
@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 1, 2, 50), (2, 2, 1, 50), (1,)),
        ((50, 2, 2, 3), (50, 2, 2, 3), (3,)),
        ((2, 2, 5), (3, 2, 1, 5), (1,)),
        ((2, 5), (2, 2, 5), (2, 2, 2, 5)),
        *((shape, shape, (1,)) for shape in SAME),
    ],
    ids=str,
)
def test_row_46_forward_and_both_gradients(shapes, dtype, rtol):
    assert agree(shapes, dtype, rtol) == 1


@pytest.mark.parametrize(
    "shapes",
    [
        ((3, 4), (2, 3, 4), (1,)),
        ((2, 3, 4), (2, 2, 3, 4), (1,)),
        ((), (), ()),
        ((), (2, 3), (3,)),
        ((2, 3), (2, 3), (1,)),
        ((2, 3), (2, 3), (3,)),
        ((2, 3), (2, 3), (2, 3)),
        ((3,), (1,), (2, 4, 3)),
    ],
)
def test_row_47_right_gradients_for_every_broadcast(shapes):
    """The original gives a wrong gradient where ranks differ: the first two."""
    assert agree(shapes, "float64", 1e-12) == 1


@pytest.mark.whole
@pytest.mark.parametrize(("wanted", "names"), [((0,), "x"), ((1,), "y"), ((2,), "w")])
def test_row_48_only_the_gradients_asked_for(wanted, names):
    x, y, w = operands([(2, 3)] * 3, "float32")

    def step(x, y, w):
        return jax.grad(lambda *a: blend(*a).sum(), wanted)(x, y, w)

    for fused in (fl.fuse(step, passes="lerp"), jax.grad(lambda *a: fl.fuse(blend)(*a).sum(), wanted)):
        np.testing.assert_allclose(fused(x, y, w)[0], step(x, y, w)[0], rtol=1e-6, atol=1e-6)
    traced = jax.make_jaxpr(jax.grad(lambda *a: lerp(*a).sum(), wanted))(x, y, w).jaxpr
    (backward,) = (e for e in traced.eqns if e.primitive.name == "lerp_cotangent")
    assert len(backward.outvars) == 1, names


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_row_49_half_precision_is_within_one_ulp_of_the_float32_result(dtype):
    args = operands([(64, 1, 33), (64, 5, 33), (33,)], dtype)
    wide = tuple(a.astype("float32") for a in args)
    got, pull = jax.vjp(fl.fuse(blend), *args)
    want, pull_wide = jax.vjp(blend, *wide)
    ct = operands([got.shape], dtype)[0]
    for g, w in zip((got, *pull(ct)), (want, *pull_wide(ct.astype("float32"))), strict=True):
        off = np.abs(np.asarray(g, np.float64) - np.asarray(w, np.float64))
        # where terms cancel, an ulp of the terms
        assert (off <= float(jnp.finfo(dtype).eps) * np.maximum(np.abs(np.asarray(w)), 1e-2 * np.abs(w).max())).all()
