"""group_norm against plain jnp code: values, gradients, transformations, residuals, errors."""

from __future__ import annotations

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab.kernels.ops.group_norm.op as module
from fusionlab.device import Device
from fusionlab.errors import ArgumentError, BackendError, UnknownNameError
from fusionlab.kernels import OPS
from fusionlab.kernels.ops.group_norm import choosing
from fusionlab.ops import group_norm
from fusionlab.testing.tolerances import tolerance

from ..transformations import TRANSFORMATIONS, assert_agree, assert_same, loss, primitives

OP = OPS["group_norm"]
DTYPES = ("float32", "bfloat16", "float16", "float64")
EPS = 1e-3
ARGS = ((2, 3, 2, 6), (6,), (6,))
SMALL = ((2, 2, 4), (4,), (4,))  # second derivatives


def data(*shapes, dtype="float64", seed=0):
    """Normal, with a mean and a spread of its own for each array."""
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(0.3 * i, 1 + 0.2 * i, s), dtype) for i, s in enumerate(shapes))


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def plain(groups=2, activation="silu", batch_axes=1):
    """What a user writes, of x and whichever of scale and bias there are."""

    def norm(x, scale=1.0, bias=0.0):
        grouped = x.reshape(*x.shape[:batch_axes], -1, groups, x.shape[-1] // groups)
        mean = grouped.mean((-3, -1), keepdims=True)
        xhat = (grouped - mean) / jnp.sqrt(((grouped - mean) ** 2).mean((-3, -1), keepdims=True) + EPS)
        h = xhat.reshape(x.shape) * scale + bias
        return h / (1 + jnp.exp(-h)) if activation == "silu" else h

    return norm


def fused(groups=2, activation="silu", batch_axes=1):
    return lambda *a: group_norm(*a, groups=groups, activation=activation, batch_axes=batch_axes, epsilon=EPS)


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_every_transformation_equals_plain_code(name, x64):
    assert_agree(fused(), plain(), data(*SMALL), (name,), 1e-11)


@pytest.mark.parametrize("name", ["value_and_grad_jit", "jvp", "hessian", "grad_of_grad", "vmap_all", "vmap_of_grad"])
def test_without_an_activation_it_takes_the_transformations_too(name, x64):
    assert_agree(fused(2, "none"), plain(2, "none"), data(*SMALL), (name,), 1e-11)


@pytest.mark.parametrize("activation", ["silu", "none"])
@pytest.mark.parametrize("slots", ["none", "scale", "bias"])
def test_scale_and_bias_are_optional_each_by_itself(slots, activation, x64):
    x, scale, bias = data(*ARGS)
    f, p = fused(3, activation), plain(3, activation)
    names = ("value_and_grad_jit", "jvp", "vmap_of_grad")
    if slots == "bias":
        assert_agree(lambda x, b: f(x, None, b), lambda x, b: p(x, 1.0, b), (x, bias), names, 1e-11)
    else:
        assert_agree(f, p, (x, scale) if slots == "scale" else (x,), names, 1e-11)


@pytest.mark.parametrize(
    ("shape", "groups", "batch_axes"),
    [
        ((2, 5, 6), 3, 1),
        ((3, 6), 2, 1),
        ((1, 4, 3, 2, 8), 4, 1),
        ((2, 5, 7), 1, 1),
        ((2, 5, 7), 7, 1),
        ((5, 6), 3, 0),
        ((6,), 2, 0),
        ((2, 3, 4, 6), 2, 2),
        ((2, 3, 6), 2, 2),
    ],
)
def test_any_rank_number_of_groups_and_axes_of_the_batch(shape, groups, batch_axes, x64):
    args = data(shape, shape[-1:], shape[-1:])
    settings = (groups, "silu", batch_axes)
    assert_agree(fused(*settings), plain(*settings), args, ("value_and_grad_jit", "jvp", "vmap_of_grad"), 1e-11)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "none"])
def test_values_and_gradients_are_as_near_float64_as_the_dtype_allows(activation, dtype, x64):
    args = tuple(a.astype(dtype) for a in data((3, 20, 16), (16,), (16,), (3, 20, 16)))

    def run(f):
        def out_and_gradients(*a):
            out, pull = jax.vjp(f, *a[:-1])
            return out, *pull(a[-1])

        return jax.jit(out_and_gradients)

    # The float64 reference reads the rounded operands: the rounding of the inputs is not the op's error.
    exacts = run(plain(4, activation))(*(a.astype("float64") for a in args))
    row = tolerance(dtype, 128)
    for got, exact in zip(run(fused(4, activation))(*args), exacts, strict=True):
        assert got.dtype == dtype
        np.testing.assert_allclose(
            np.asarray(got, np.float64), exact, rtol=row.rtol, atol=row.atol * np.abs(exact).max()
        )


@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("p_dtype", ["bfloat16", "float32"])
def test_parameters_of_another_dtype_keep_it_and_the_result_has_that_of_x(x_dtype, p_dtype, x64):
    x, scale, bias = data((2, 8, 32), (32,), (32,))
    args = x.astype(x_dtype), scale.astype(p_dtype), bias.astype(p_dtype)

    def run(*a):
        grads = jax.grad(lambda *a: fused()(*a).astype("float64").sum() ** 2, (0, 1, 2))(*a)
        return fused()(*a), jax.jvp(fused(), a, tuple(jnp.ones_like(b) for b in a))[1], grads

    out, moved, grads = jax.jit(run)(*args)
    want = jax.jit(jax.grad(lambda *a: plain()(*a).sum() ** 2, (0, 1, 2)))(*(a.astype("float64") for a in args))
    assert out.dtype == moved.dtype == x_dtype
    assert [str(g.dtype) for g in grads] == [x_dtype, p_dtype, p_dtype]
    for got, w in zip(grads[1:], want[1:], strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), w, rtol=0.05, atol=0.05 * np.abs(w).max())


def test_constant_images_have_the_values_and_gradients_of_plain_code():
    x = jnp.stack([jnp.zeros((3, 4)), jnp.full((3, 4), 3.0), jnp.arange(12.0).reshape(3, 4)])
    run = lambda f: jax.jit(jax.value_and_grad(loss(f), (0, 1, 2)))(x, jnp.linspace(1, 2, 4), jnp.linspace(-1, 1, 4))  # noqa: E731
    assert_same(run(fused()), run(plain()), 1e-5)


def test_silu_far_from_zero_has_no_nan():
    bias = jnp.asarray([-200.0, -30.0, 30.0, 200.0])
    out, pull = jax.vjp(lambda b: group_norm(jnp.ones((1, 2, 4)), None, b, groups=2, activation="silu"), bias)
    np.testing.assert_allclose(out[0, 0], [0, -30 * np.exp(-30.0), 30, 200], rtol=1e-6)
    np.testing.assert_allclose(pull(jnp.ones_like(out))[0], [0, 2 * np.exp(-30.0) * -29, 2, 2], rtol=1e-5)


def test_residuals_are_the_statistics_of_a_group_with_bytes_and_readers():
    x, v = jax.ShapeDtypeStruct((2, 8, 4), jnp.bfloat16), jax.ShapeDtypeStruct((4,), jnp.float32)
    mean, rstd = OP.residuals(x, v, v, groups=2)
    assert (mean.name, mean.shape, mean.dtype, mean.nbytes) == ("mean", (2, 2), "f32", 16)
    assert (rstd.name, rstd.shape, rstd.readers) == ("rstd", (2, 2), ("dx", "dscale"))
    assert OP.residuals(x, v, v, groups=2, activation="silu")[0].readers == ("dx", "dscale", "dbias")


@pytest.mark.parametrize("activation", ["silu", "none"])
def test_only_what_the_wanted_gradients_read_is_kept(activation):
    args = data((3, 2, 6), (6,), (6,), dtype="float32")
    x, v, s = (3, 2, 6), (6,), (3, 2)
    active = activation == "silu"
    for wanted, operands in (
        ((0,), [x, v, v, s, s, x] if active else [x, v, s, s, x]),
        ((1,), [x, v, v, s, s, x] if active else [x, s, s, x]),
        ((2,), [x, v, v, s, s, x] if active else [x]),
        ((0, 1, 2), [x, v, v, s, s, x] if active else [x, v, s, s, x]),
    ):
        jaxpr = jax.make_jaxpr(jax.grad(lambda *a: fused(2, activation)(*a).sum(), wanted))(*args).jaxpr
        (node,) = [e for e in jaxpr.eqns if e.primitive.name == "group_norm_cotangent"]
        assert [var.aval.shape for var in node.invars] == operands
        assert len(node.outvars) == len(wanted)


def test_a_differentiated_op_is_one_named_node_each_way_and_inference_saves_nothing():
    args = data(*ARGS, dtype="float32")
    names = primitives(jax.grad(loss(fused()), (0, 1, 2)), *args)
    assert (names.count("group_norm"), names.count("group_norm_cotangent")) == (1, 1)
    assert not {"rsqrt", "logistic", "group_norm_tangent"} & set(names)
    (eqn,) = jax.make_jaxpr(fused())(*args).jaxpr.eqns
    assert eqn.params["residuals"] is False
    assert len(eqn.outvars) == 1


def test_a_batch_of_images_stays_one_node_and_a_batch_of_scales_does_not():
    x, scale, bias = data(*ARGS, dtype="float32")
    f, images = fused(), jnp.stack([x, x])
    assert primitives(jax.vmap(f, (0, None, None)), images, scale, bias) == ["group_norm"]
    names = primitives(jax.vmap(jax.grad(loss(f)), (0, None, None)), images, scale, bias)
    assert (names.count("group_norm"), names.count("group_norm_cotangent")) == (1, 1)
    assert "group_norm" not in primitives(jax.vmap(f, (None, 0, None)), x, jnp.stack([scale, scale]), bias)
    each = jax.vmap(lambda x: group_norm(x, scale, bias, groups=2, batch_axes=0))(x)
    np.testing.assert_allclose(each, group_norm(x, scale, bias, groups=2), rtol=1e-6)


X = (2, 3, 4)
BAD = {
    "x a scalar": (((), None, None), {"batch_axes": 0}, ArgumentError, ["x is a scalar", "last axis"]),
    "no axis of channels": (((4,), None, None), {}, ArgumentError, ["batch_axes is 1", "0 to 0", "(4,)"]),
    "batch_axes below 0": ((X, None, None), {"batch_axes": -1}, ArgumentError, ["batch_axes is -1"]),
    "batch_axes no number": ((X, None, None), {"batch_axes": 1.5}, ArgumentError, ["batch_axes is 1.5", "whole"]),
    "no channels": (((2, 3, 0), None, None), {}, ArgumentError, ["divisor of the channels of x, 0"]),
    "no positions": (((2, 0, 4), None, None), {}, ArgumentError, ["(2, 0, 4)", "no positions"]),
    "groups no divisor": ((X, None, None), {"groups": 3}, ArgumentError, ["groups is 3", "divisor", "4 along"]),
    "groups 0": ((X, None, None), {"groups": 0}, ArgumentError, ["groups is 0"]),
    "groups no number": ((X, None, None), {"groups": "2"}, ArgumentError, ["groups is '2'", "whole number"]),
    "scale of rank 2": ((X, (1, 4), None), {}, ArgumentError, ["scale has shape (1, 4)", "(4,)"]),
    "bias of another length": ((X, (4,), (2,)), {}, ArgumentError, ["bias has shape (2,)", "(2, 3, 4)"]),
    "activation": ((X, None, None), {"activation": "sil"}, UnknownNameError, ["'sil'", "Did you mean 'silu'"]),
    "epsilon below 0": ((X, None, None), {"epsilon": -1e-5}, ArgumentError, ["epsilon is -1e-05", "0 or more"]),
    "epsilon no number": ((X, None, None), {"epsilon": "small"}, ArgumentError, ["epsilon is 'small'"]),
    "implementation": ((X, None, None), {"implementation": "xl"}, UnknownNameError, ["'xl'", "xla"]),
    "no kernels here": ((X, None, None), {"implementation": "cuda"}, BackendError, ["needs a CUDA device"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_argument_is_refused_by_name(case):
    shapes, attrs, error, parts = BAD[case]
    with pytest.raises(error) as caught:
        group_norm(*(None if s is None else jnp.ones(s) for s in shapes), **{"groups": 2, **attrs})
    for part in parts:
        assert part in str(caught.value)


def test_a_traced_epsilon_and_dtypes_it_does_not_compute_in_are_refused(x64):
    x, scale = data(X, (4,))
    with pytest.raises(ArgumentError, match="known when tracing"):
        jax.jit(lambda x, e: group_norm(x, groups=2, epsilon=e))(x, 1e-5)
    with pytest.raises(ArgumentError, match="x has dtype int32"):
        group_norm(jnp.ones(X, jnp.int32), groups=2)
    with pytest.raises(ArgumentError, match="scale has dtype float64, wider than the float32 that x of dtype bfloat16"):
        group_norm(x.astype("bfloat16"), scale, groups=2)
    with pytest.raises(ArgumentError, match="x is missing"):
        group_norm(None)


def test_backends_say_same_code_and_formulas_read_as_the_code_does():
    verdict, kernels = OP.backends(*data(*ARGS, dtype="float32"), device="cpu", groups=2)
    assert (verdict.name, verdict.verdict) == ("xla", "same code")
    assert (kernels.name, kernels.verdict) == ("cuda", "unavailable")
    assert OP.formula() == "group_norm(x) * scale + bias"
    assert OP.formula(bias=False, activation="silu") == "silu(group_norm(x) * scale)"


def test_the_kernels_are_taken_where_xlas_code_was_measured_slow():
    def chosen(shape, device, dtype="bfloat16"):
        x = jax.ShapeDtypeStruct(shape, dtype)
        attrs = {"batch_axes": 1, "groups": 8, "activation": "none", "present": ("x",), "dtypes": (dtype,)}
        found = OP.decide("call", {"x": x}, Device.of(device), **attrs)
        return found.implementation, found.reason

    assert chosen((2, 64, 64, 320), "sm_90") == ("cuda", choosing.FASTER)
    assert "below 1048576" in chosen((2, 32, 32, 320), "sm_90")[1]
    assert "not on sm_80" in chosen((2, 64, 64, 320), "sm_80")[1]
    assert "5000 channels" in chosen((2, 64, 64, 5000), "sm_90")[1]
    assert "70000 images" in chosen((70000, 64, 8), "sm_90")[1]
    assert chosen((2, 64, 64, 320), "cpu")[0] == "xla"


def test_the_example_of_its_docstring_runs():
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
