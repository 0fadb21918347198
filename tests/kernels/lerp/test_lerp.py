"""lerp against plain jnp code: every broadcast, gradients, transformations, roundings, errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionlab.errors import ArgumentError, BackendError, UnknownNameError
from fusionlab.kernels import OPS
from fusionlab.ops import lerp

from ..transformations import TRANSFORMATIONS, assert_agree, assert_same, loss, primitives

OP = OPS["lerp"]


def plain(x, y, w):
    return x + w * (y - x)


def data(*shapes, dtype="float64", seed=0):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.standard_normal(s), dtype) for s in shapes)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_every_transformation_equals_plain_code(name, x64):
    assert_agree(lerp, plain, data((3, 4), (2, 1, 4), (3, 1)), (name,), 1e-12)


BROADCASTS = {
    "ranks that differ": ((3, 4), (2, 3, 4), (1,)),
    "ranks that differ, leading": ((2, 3, 4), (2, 2, 3, 4), (1,)),
    "numbers": ((), (), ()),
    "a number and arrays": ((), (2, 3), (3,)),
    "w of one entry": ((2, 3), (2, 3), (1, 1, 1)),
    "w along the last axis": ((2, 3), (2, 3), (3,)),
    "w as they are": ((2, 3), (2, 3), (2, 3)),
    "w wider": ((2, 5), (2, 2, 5), (2, 2, 2, 5)),
    "w wider than both": ((3,), (1,), (2, 4, 3)),
    "both narrower": ((2, 1, 3), (1, 4, 3), (1,)),
    "a vector of three is no number": ((5, 2, 2, 3), (5, 2, 2, 3), (3,)),
    "rank 8": ((2, 1, 2, 1, 2, 1, 2, 1), (1, 2, 1, 2, 1, 2, 1, 2), (2, 1, 1, 1, 1, 1, 1, 1)),
    "empty": ((0, 3), (3,), (1,)),
    "sums of nothing": ((1, 3), (0, 3), (1,)),
}


@pytest.mark.parametrize("name", BROADCASTS)
def test_every_broadcast_forward_backward_and_batched(name, x64):
    args = data(*BROADCASTS[name])
    names = ("jit", "value_and_grad_jit", "jvp", "vmap_first", "vmap_second", "vmap_of_grad", "vmap_all")
    assert_agree(lerp, plain, args, names, 1e-12)


@st.composite
def shapes(draw):
    whole = tuple(draw(st.lists(st.integers(1, 3), min_size=0, max_size=6)))

    def narrowed():
        start = draw(st.integers(0, len(whole)))
        return tuple(n if draw(st.booleans()) else 1 for n in whole[start:])

    return narrowed(), narrowed(), narrowed()


def check_shapes(three):
    with jax.enable_x64(True), jax.disable_jit():
        args = data(*three)
        want, pull = jax.vjp(plain, *args)
        got, pull_fused = jax.vjp(lerp, *args)
        ct = jnp.cos(jnp.arange(want.size, dtype=want.dtype)).reshape(want.shape)
        assert_same((got, pull_fused(ct)), (want, pull(ct)), 1e-12)


@pytest.mark.parametrize("examples", [10, 30, 300])
def test_any_shapes_have_the_gradients_of_jax_vjp(examples):
    settings(max_examples=examples)(given(shapes())(check_shapes))()


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_only_the_gradients_asked_for_are_computed_and_only_their_operands_kept(wanted, x64):
    args = data((2, 3), (2, 3), (3,))
    step = jax.grad(loss(lerp), wanted)
    jaxpr = jax.make_jaxpr(step)(*args).jaxpr
    (backward,) = (e for e in jaxpr.eqns if e.primitive.name == "lerp_cotangent")
    assert len(backward.outvars) == len(wanted)
    kept = {"w": bool({0, 1} & set(wanted)), "x": 2 in wanted, "y": 2 in wanted}
    assert len(backward.invars) - 1 == sum(kept.values())
    assert_same(step(*args), jax.grad(loss(plain), wanted)(*args), 1e-12)


def test_what_is_kept_is_told():
    a = jnp.ones((2, 3))
    assert not OP.residuals(a, a, a), "operands alone"
    assert "lerp" in primitives(lerp, a, a, a)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_numbers_are_rounded_once(dtype):
    args = data((64, 33), (64, 33), (33,), dtype=dtype)
    wide = tuple(a.astype(jnp.float32) for a in args)
    got, pull = jax.vjp(lerp, *args)
    want, pull_wide = jax.vjp(plain, *wide)
    ct = data(got.shape, dtype=dtype, seed=1)[0]
    for g, w in zip((got, *pull(ct)[:2]), (want, *pull_wide(ct.astype(jnp.float32))[:2]), strict=True):
        assert g.dtype == dtype
        # a sum that the compiler contracts differently may fall to the other side of a tie
        ulp = np.asarray(jnp.abs(w) * jnp.finfo(dtype).eps, np.float64)
        assert (np.abs(np.asarray(g, np.float64) - np.asarray(w, np.float64)) <= ulp + 1e-7).all()


def test_sums_of_16_bit_numbers_are_float32():
    """Rounded at each step, a sum of ones in bfloat16 would stop at 256."""
    x, y, w = jnp.zeros((1, 1), jnp.bfloat16), jnp.ones((4096, 1), jnp.bfloat16), jnp.zeros((), jnp.bfloat16)
    dx = jax.grad(lambda x: lerp(x, y, w).astype(jnp.float32).sum())(x)
    assert float(dx[0, 0]) == 4096.0


def test_a_number_for_w_is_taken_in_the_dtype_of_x():
    x, y = data((2, 3), (2, 3), dtype="bfloat16")
    assert lerp(x, y, 0.25).dtype == jnp.bfloat16
    assert_same(lerp(x, y, 0.25), lerp(x, y, jnp.asarray(0.25, jnp.bfloat16)), 0)
    np.testing.assert_array_equal(lerp(x, y, 0), x)


BAD = {
    "shapes that do not broadcast": (((2, 3), (4,), (1,)), "float32", "x (2, 3), y (4,), w (1,) do not broadcast"),
    "integers": (((2,), (2,), (2,)), "int32", "x has dtype int32"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_argument_is_refused_by_name(name):
    dims, dtype, text = BAD[name]
    with pytest.raises(ArgumentError) as caught:
        lerp(*(jnp.ones(d, dtype) for d in dims))
    assert text in str(caught.value)


def test_dtypes_that_differ_and_operands_that_are_missing_are_refused():
    a = jnp.ones(2)
    with pytest.raises(ArgumentError, match="w has dtype bfloat16 but x has float32"):
        lerp(a, a, a.astype(jnp.bfloat16))
    with pytest.raises(ArgumentError, match="w is missing"):
        OP.call(a, a, None)
    with pytest.raises((UnknownNameError, BackendError)):
        lerp(a, a, a, implementation="cublaslt")
