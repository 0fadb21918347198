"""The gradients of a head that is differentiated in the program: of one rounding, without a copy in float32."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab.graph.unit_cotangent import has_unit_cotangent
from fusionlab.kernels import OPS
from tests.fusers.checks import agree, same_bits

from .spellings import integer_labels

NAME = "linear_cross_entropy"


def operands(dtype="bfloat16", rows=64, features=32, size=512):
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (rows, features)).astype(dtype)
    w = (0.2 * jax.random.normal(keys[1], (features, size))).astype(dtype)
    return x, w, jax.random.randint(keys[2], (rows,), 0, size)


def mean_loss(x, w, y):
    return integer_labels((x @ w).astype(jnp.float32), y).mean()


def three_times(x, w, y):
    """The factor belongs to the weights of the rows."""
    return 3 * mean_loss(x, w, y)


def step_of(loss):
    return jax.value_and_grad(loss, (0, 1))


def forward_of(step, *args):
    """The call that makes the gradients, in a step that is fused."""
    graph = fl.trace(fl.fuse(step, passes=NAME), *args)
    (call,) = [n.eqn for n in graph.nodes() if n.params.get("residuals")]
    return call


def kept(call):
    """The dtypes of the arrays that a call gives."""
    return [v.aval.dtype.name for v in call.outvars if v.aval.ndim == 2]


@pytest.mark.parametrize("step", [jax.grad(mean_loss, (0, 1)), step_of(mean_loss), step_of(three_times)])
def test_gradients_of_a_loss_that_the_program_differentiates_are_kept_rounded(step):
    call = forward_of(step, *operands())
    assert call.params["rounded"]
    assert kept(call) == ["bfloat16", "bfloat16"]
    assert not has_unit_cotangent()


@pytest.mark.parametrize("loss", [mean_loss, three_times])
def test_they_are_the_numbers_of_a_loss_that_is_fused_before_it_is_differentiated(loss):
    args = operands()
    inside, outside = fl.fuse(step_of(loss), passes=NAME), step_of(fl.fuse(loss, passes=NAME))
    same_bits(jax.jit(inside)(*args), jax.jit(outside)(*args))


@pytest.mark.parametrize(
    ("dtype", "loss"),
    [
        ("bfloat16", lambda x, w, y: jnp.square(mean_loss(x, w, y))),
        ("float16", mean_loss),
        ("float32", mean_loss),
    ],
    ids=["squared", "float16", "float32"],
)
def test_with_another_cotangent_or_dtype_they_are_kept_in_float32(dtype, loss):
    args = operands(dtype)
    call = forward_of(step_of(loss), *args)
    assert not call.params.get("rounded")
    assert kept(call) == ["float32", "float32"]


def test_a_call_on_its_own_keeps_float32():
    x, w, y = operands()
    op = OPS[NAME]
    traced = jax.make_jaxpr(lambda *a: op.call(*a, None, jnp.ones(64)))(x, w, y)
    assert "rounded" not in traced.jaxpr.eqns[-1].params


def with_bias(summed, x, w, b, y):
    return integer_labels(((x @ w).astype(summed) + b.astype(summed)).astype(jnp.float32), y).mean()


def graded_with_bias(summed):
    return jax.value_and_grad(functools.partial(with_bias, summed), (0, 1, 2))


@pytest.mark.parametrize(
    ("kept", "summed", "count"),
    [("float32", "bfloat16", 1), ("bfloat16", "float32", 0)],
    ids=["a parameter in float32", "a sum in float32"],
)
def test_a_kernel_that_rounds_the_sum_with_a_bias_is_for_programs_that_do(kept, summed, count):
    shapes = {
        "x": ((8192, 512), "bfloat16"),
        "w": ((512, 32768), "bfloat16"),
        "b": ((32768,), kept),
        "y": ((8192,), "int32"),
    }
    args = [jax.ShapeDtypeStruct(*of) for of in shapes.values()]
    assert fl.find(graded_with_bias(summed), *args, device="h200").counts()[NAME] == count


@pytest.mark.dear
@pytest.mark.parametrize("summed", ["bfloat16", "float32"])
@pytest.mark.parametrize("kept", ["bfloat16", "float32"])
def test_a_bias_in_another_dtype_than_its_sum_has_the_gradients_of_the_program(kept, summed):
    x, w, y = operands()
    b = jax.random.normal(jax.random.key(3), (512,)).astype(kept)
    found = agree(graded_with_bias(summed), x, w, b, y, passes=[NAME], factor=4)
    assert found.counts() == {NAME: 1, f"{NAME}_grad": 1}
