"""Pass lerp: which blends become the op, which only where they are asked for, and which never."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl

from ..checks import agree, close, normal, primitives

X, Y, W = normal((3, 4), (2, 3, 4), (4,))
ASKED = fl.Strategy(lerp={"reassociate": True})

AS_THE_OP = {
    "x + w * (y - x)": lambda x, y, w: x + w * (y - x),
    "w * (y - x) + x": lambda x, y, w: w * (y - x) + x,
    "x - w * (x - y)": lambda x, y, w: x - w * (x - y),
    "transposed": lambda x, y, w: (x + w * (y - x)).transpose(2, 0, 1),
    "w along the rows": lambda x, y, w: x + w[:3, None] * (y - x),
    "a number": lambda x, y, w: x + 0.3 * (y - x) + 0 * w[0],
    "w a scalar": lambda x, y, w: x + w[0] * (y - x),
    "twice the weight": lambda x, y, w: x + 2 * w * (y - x),
    "x and y exchanged": lambda x, y, w: y + w * (x - y),
}
OTHERWISE = {
    "x * (1 - w) + y * w": lambda x, y, w: x * (1 - w) + y * w,
    "y * w + x * (1 - w)": lambda x, y, w: y * w + x * (1 - w),
    "x - w * x + w * y": lambda x, y, w: x - w * x + w * y,
}


@pytest.mark.parametrize("name", AS_THE_OP)
def test_a_blend_that_rounds_as_the_op_does_is_fused(name):
    found = agree(AS_THE_OP[name], X, Y, W, passes="lerp")
    (site,) = found.candidates
    assert site.concepts == ("lerp",)
    assert not site.notes
    assert "lerp" in primitives(found.apply())


@pytest.mark.parametrize("name", OTHERWISE)
def test_another_spelling_is_fused_where_it_is_asked_for_and_says_so(name):
    fn = OTHERWISE[name]
    (rejection,) = fl.find(fn, X, Y, W, passes="lerp").rejections
    assert rejection.code == "rounding"
    assert "rounds differently from x + w * (y - x)" in rejection.sentence
    assert "reassociate=True" in rejection.edit
    found = agree(fn, X, Y, W, passes=ASKED, factor=3)
    (site,) = found.candidates
    assert "the fused op rounds as x + w * (y - x) does" in site.notes[0]


def test_numbers_that_the_program_multiplies_by_are_told_and_fused_where_that_is_asked_for():
    moment = lambda x, y: 0.9 * x + 0.1 * y  # noqa: E731
    found = fl.find(moment, X, Y, passes="lerp")
    assert not found.candidates
    assert not found.rejections
    assert [s.kind for s in found.structures] == ["lerp"]
    (site,) = agree(moment, X, Y, passes=ASKED, factor=3).candidates
    assert site.formula == "x + 0.1 * (y - x)"
    assert "the fused op rounds as x + w * (y - x) does" in site.notes[0]


NO_BLEND = {
    "another end": lambda x, y, w: x + w * (y - 2 * x),
    "three values": lambda x, y, w: x + w * (y - jnp.sin(x)),
    "a sum": lambda x, y, w: x + w * (y + x),
    "the other way": lambda x, y, w: x - w * (y - x),
    "weights that are no pair": lambda x, y, w: x * (1 - w) + y * jnp.sin(w),
    "numbers that are no pair": lambda x, y, w: 0.9 * x + 0.2 * y,
    "a number above 1": lambda x, y, w: x + 1.5 * (y - x),
}


@pytest.mark.parametrize("name", NO_BLEND)
def test_what_is_no_blend_is_not_fused(name):
    fn = NO_BLEND[name]
    found = fl.find(fn, X, Y, W, passes=ASKED)
    assert not [c for c in found.candidates if c.nodes_before > 4], found.candidates
    close(fl.fuse(fn, passes=ASKED)(X, Y, W), fn(X, Y, W))


def test_a_difference_that_is_read_elsewhere_is_declined_by_name():
    def model(x, y, w):
        difference = y - x
        return x + w * difference, difference

    (rejection,) = fl.find(model, X, Y, W, passes="lerp").rejections
    assert rejection.code == "escapes"
    assert "is also returned" in rejection.sentence
    assert rejection.edit == "compute the outside use from x and y again"


def test_operands_that_are_widened_are_taken_and_a_result_that_rounds_inside_is_not():
    x, y, w = (a.astype(jnp.bfloat16) for a in (X, Y, W))
    (site,) = agree(lambda x, y, w: x + w.astype(x.dtype) * (y - x), X, Y, w, passes="lerp").candidates
    assert site.root.dtype == jnp.float32
    agree(AS_THE_OP["x + w * (y - x)"], x, y, w, passes="lerp", factor=2)
    rounding = lambda x, y, w: x + (w * (y - x)).astype(jnp.bfloat16).astype(jnp.float32)  # noqa: E731
    assert not fl.find(rounding, X, Y, W, passes="lerp").candidates


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1), (0, 1, 2)])
def test_a_program_that_is_differentiated_already_is_fused_with_its_backward(wanted):
    def step(x, y, w):
        return jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(AS_THE_OP["x + w * (y - x)"](*a))), wanted)(x, y, w)

    found = fl.find(step, X, Y, W, passes="lerp")
    assert found.counts() == {"lerp": 1, "lerp_grad": 1}
    fused = fl.fuse(step, passes="lerp")
    close(fused(X, Y, W), step(X, Y, W), factor=3)
    (backward,) = (n for n in found.apply().nodes() if n.primitive == "lerp_cotangent")
    assert len(backward.outputs) == len(wanted)


def test_in_a_scan_under_vmap_and_remat():
    def cell(h, x):
        z = jax.nn.sigmoid(x)
        return h + z * (jnp.tanh(x) - h), h

    xs, h = normal((5, 3, 4), (3, 4), seed=3)
    for fn in (
        lambda h, xs: jax.lax.scan(cell, h, xs),
        jax.vmap(lambda h, xs: cell(h, xs[0])[0], (0, 1)),
        jax.checkpoint(lambda h, xs: cell(h, xs[0])[0]),
    ):
        (site,) = agree(fn, h, xs, passes="lerp", factor=3).candidates
        assert site.concepts == ("lerp",)


def test_an_average_of_parameters_is_fused_leaf_by_leaf():
    def ema(average, params):
        return jax.tree.map(lambda a, p: a + 0.01 * (p - a), average, params)

    trees = [{"w": a, "b": b} for a, b in (normal((4, 3), (3,)), normal((4, 3), (3,), seed=1))]
    assert len(agree(ema, *trees, passes="lerp").candidates) == 2


def test_empty_and_integer_blends_are_left_alone():
    empty = jnp.zeros((0, 4))
    assert not fl.find(AS_THE_OP["x + w * (y - x)"], empty, empty, W, passes="lerp").candidates
    integers = jnp.arange(4)
    found = fl.find(AS_THE_OP["x + w * (y - x)"], integers, integers, integers, passes="lerp")
    assert not found.candidates
    assert np.array_equal(fl.fuse(AS_THE_OP["x + w * (y - x)"])(integers, integers + 1, integers), 2 * integers)


def test_what_is_rounded_inside_of_a_blend_keeps_it_as_it_is():
    """x in bfloat16, y and w in float32: JAX subtracts in float32, where the fused op would round y first."""
    x = X.astype(jnp.bfloat16)
    y = x.astype(jnp.float32) + 1e-3 * Y[0]
    wider = lambda x, y, w: x + (w * (y - x)).astype(x.dtype)  # noqa: E731
    (rejection,) = fl.find(wider, x, y, W, passes="lerp").rejections
    assert rejection.code == "dtype"
    assert "the fused op would" in rejection.sentence
    inner = lambda x, y, w: x + (w * (y - x)).astype(jnp.bfloat16).astype(jnp.float32)  # noqa: E731
    (rejection,) = fl.find(inner, X, Y, W.astype(jnp.bfloat16), passes="lerp").rejections
    assert rejection.code == "dtype"
    half = lambda x, y, w: x + w * (y - x).astype(jnp.float32)  # noqa: E731 - the difference is rounded to bfloat16
    (rejection,) = fl.find(half, x, y.astype(jnp.bfloat16), W, passes="lerp").rejections
    assert rejection.code == "dtype"
    assert "computed in bfloat16" in rejection.sentence
    switch = X > 0  # a bool is no float that is rounded
    agree(lambda x, y: x + switch.astype(jnp.float32) * (y - x), X, Y, passes="lerp")


def test_a_number_in_float64_is_taken_to_twelve_digits_and_says_so():
    with jax.enable_x64(True):
        x, y = (a.astype(jnp.float64) for a in (X, Y))
        (site,) = fl.find(lambda x, y: x + (1 / 3) * (y - x), x, y, passes="lerp").candidates
        assert site.notes == ("the number w is read to 12 digits",)
