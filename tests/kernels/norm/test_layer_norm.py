"""layer_norm against plain jnp code: values, gradients, transformations, residuals, errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab.device import Device
from fusionlab.errors import ArgumentError, BackendError, UnknownNameError
from fusionlab.kernels import OPS
from fusionlab.kernels.ops.layer_norm import choosing
from fusionlab.ops import layer_norm, layer_norm_and_sum
from fusionlab.testing.tolerances import tolerance

from ..transformations import TRANSFORMATIONS, adding, assert_agree, assert_same, loss, primitives

OP = OPS["layer_norm"]
KINDS = ("layer", "rms")
DTYPES = ("float32", "bfloat16", "float16", "float64")
EPS = 1e-3


def data(*shapes, dtype="float64", seed=0):
    """Normal, with a mean and a spread of its own for each array."""
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(0.3 * i, 1 + 0.2 * i, s), dtype) for i, s in enumerate(shapes))


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def plain(kind, axis=-1, epsilon=EPS):
    """What a user writes, of x and whichever of scale and bias there are."""

    def norm(x, scale=1.0, bias=0.0):
        mean = x.mean(axis, keepdims=True) if kind == "layer" else 0.0
        xhat = (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(axis, keepdims=True) + epsilon)
        return jnp.moveaxis(jnp.moveaxis(xhat, axis, -1) * scale + bias, -1, axis)

    return norm


def fused(kind, axis=-1, epsilon=EPS):
    return lambda *a: layer_norm(*a, kind=kind, epsilon=epsilon, axis=axis)


ARGS = ((3, 5), (5,), (5,))


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_every_transformation_equals_plain_code(name, x64):
    assert_agree(fused("layer"), plain("layer"), data(*ARGS), (name,), 1e-11)


def test_rms_takes_the_transformations_too(x64):
    names = ("no_jit", "value_and_grad_jit", "linearize", "jacfwd", "jacrev", "hessian", "grad_of_grad", "vmap_all")
    names += ("vmap_second", "vmap_of_grad", "grad_of_vmap", "scan", "checkpoint")
    assert_agree(fused("rms"), plain("rms"), data(*ARGS), names, 1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_scale_and_bias_are_optional_each_by_itself(kind, x64):
    x, scale, bias = data(*ARGS)
    names = ("jit", "value_and_grad_jit", "jvp", "hessian", "vmap_first", "vmap_of_grad")
    assert_agree(fused(kind), plain(kind), (x,), ("jit", "value_and_grad_jit", "jvp", "hessian"), 1e-11)
    assert_agree(fused(kind), plain(kind), (x, scale), names, 1e-11)
    shifted = lambda x, bias: layer_norm(x, None, bias, kind=kind, epsilon=EPS)  # noqa: E731
    assert_agree(shifted, lambda x, bias: plain(kind)(x, 1.0, bias), (x, bias), names, 1e-11)


@pytest.mark.parametrize("axis", [0, 1, 2, -3])
@pytest.mark.parametrize("kind", KINDS)
def test_any_axis_is_normalised_over(kind, axis, x64):
    shape = [2, 3, 4]
    shape[axis] = 5
    args = data(tuple(shape), (5,), (5,))
    names = ("jit", "value_and_grad_jit", "jvp", "vmap_first", "grad_of_vmap", "vmap_of_grad")
    assert_agree(fused(kind, axis), plain(kind, axis), args, names, 1e-11)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (2, 1, 3, 5), (0, 5), (4, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_any_rank_and_number_of_rows(kind, shape, x64):
    assert_agree(fused(kind), plain(kind), data(shape, shape[-1:], shape[-1:]), ("jit", "value_and_grad_jit"), 1e-11)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_as_near_float64_as_the_dtype_allows(kind, dtype, x64):
    args = tuple(a.astype(dtype) for a in data((8, 96), (96,), (96,), (8, 96)))

    def run(f):
        def out_and_gradients(*a):
            out, pull = jax.vjp(f, *a[:-1])
            return out, *pull(a[-1])

        return jax.jit(out_and_gradients)

    # The float64 reference reads the rounded operands: the rounding of the inputs is not the op's error.
    exacts = run(plain(kind))(*(a.astype("float64") for a in args))
    row = tolerance(dtype, 128)
    for got, exact in zip(run(fused(kind))(*args), exacts, strict=True):
        assert got.dtype == dtype
        largest = np.abs(exact).max()
        np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=row.rtol, atol=row.atol * largest)


def test_a_large_mean_costs_no_accuracy():
    """The variance is of x - mean: E[x^2] - E[x]^2 would be all rounding here."""
    (x,) = data((4, 64), dtype="float32")
    shifted = x + 2.0**12
    exact = plain("layer")(np.asarray(shifted, np.float64))
    np.testing.assert_allclose(layer_norm(shifted, epsilon=EPS), exact, atol=2e-3)
    fast = (shifted**2).mean(-1) - shifted.mean(-1) ** 2
    assert np.abs(fast - np.var(np.asarray(x, np.float64), -1)).max() > 0.1


@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("p_dtype", ["bfloat16", "float32"])
def test_parameters_of_another_dtype_keep_it_and_the_result_has_that_of_x(x_dtype, p_dtype, x64):
    x, scale, bias = data((8, 32), (32,), (32,))
    args = x.astype(x_dtype), scale.astype(p_dtype), bias.astype(p_dtype)
    grad = jax.jit(jax.value_and_grad(lambda *a: layer_norm(*a, epsilon=EPS).astype("float64").sum() ** 2, (0, 1, 2)))
    exact = jax.value_and_grad(lambda *a: plain("layer")(*a).sum() ** 2, (0, 1, 2))(
        *(a.astype("float64") for a in args)
    )
    assert layer_norm(*args).dtype == x_dtype
    _, grads = grad(*args)
    assert [str(g.dtype) for g in grads] == [x_dtype, p_dtype, p_dtype]
    for got, want in zip(grads[1:], exact[1][1:], strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0.05, atol=0.05 * np.abs(want).max())
    moved = jax.jvp(layer_norm, args, tuple(jnp.ones_like(a) for a in args))[1]
    assert moved.dtype == x_dtype
    only_bias = jax.jvp(lambda b: layer_norm(*args[:2], b), args[2:], (jnp.ones_like(args[2]),))[1]
    assert only_bias.dtype == x_dtype


def test_the_arithmetic_of_16_bit_operands_is_float32_rounded_once():
    x, scale, bias = data((4, 200), (200,), (200,), dtype="bfloat16")
    wide = plain("layer")(*(a.astype("float32") for a in (x, scale, bias)))
    np.testing.assert_allclose(layer_norm(x, scale, bias, epsilon=EPS).astype("float32"), wide, rtol=2**-8)


@pytest.mark.parametrize("kind", KINDS)
def test_constant_rows_and_rows_of_zeros_have_the_values_and_gradients_of_plain_code(kind):
    x = jnp.stack([jnp.zeros(6), jnp.full(6, 3.0), jnp.arange(6.0)])
    scale, bias = jnp.linspace(1, 2, 6), jnp.linspace(-1, 1, 6)
    run = lambda f: jax.value_and_grad(loss(f), (0, 1, 2))(x, scale, bias)  # noqa: E731
    assert_same(run(fused(kind)), run(plain(kind)), 1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_infinity_spoil_their_own_row_as_in_plain_code(kind, value):
    x = data((3, 6), dtype="float32")[0].at[1, 2].set(value)
    got, want = (jax.vjp(f, x) for f in (fused(kind), plain(kind)))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    assert np.isfinite(np.asarray(got[0])[[0, 2]]).all()
    np.testing.assert_allclose(got[1](x * 0 + 1)[0][::2], want[1](x * 0 + 1)[0][::2], atol=1e-5)


def test_residuals_are_the_statistics_of_a_row_with_bytes_and_readers():
    x, v = jax.ShapeDtypeStruct((2, 8, 4), jnp.bfloat16), jax.ShapeDtypeStruct((4,), jnp.float32)
    mean, rstd = OP.residuals(x, v, v)
    assert (mean.name, mean.shape, mean.dtype, mean.nbytes) == ("mean", (2, 8), "f32", 64)
    assert (rstd.name, rstd.shape, rstd.readers) == ("rstd", (2, 8), ("dx", "dscale"))


def test_residuals_of_rms_lack_the_mean():
    x, v = jax.ShapeDtypeStruct((4, 6), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.float32)
    assert [(r.name, r.shape) for r in OP.residuals(x, v, kind="rms", axis=0)] == [("rstd", (6,))]


def test_only_what_the_wanted_gradients_read_is_kept():
    x, scale, bias = data(*ARGS, dtype="float32")
    f = fused("layer")
    for wanted, operands in (
        ((0,), [(3, 5), (5,), (3,), (3,), (3, 5)]),
        ((1,), [(3, 5), (3,), (3,), (3, 5)]),
        ((2,), [(3, 5)]),
        ((0, 1, 2), [(3, 5), (5,), (3,), (3,), (3, 5)]),
    ):
        jaxpr = jax.make_jaxpr(jax.grad(lambda *a: f(*a).sum(), wanted))(x, scale, bias).jaxpr
        (node,) = [e for e in jaxpr.eqns if e.primitive.name == "layer_norm_cotangent"]
        assert [v.aval.shape for v in node.invars] == operands
        assert len(node.outvars) == len(wanted)


def test_a_differentiated_op_is_one_named_node_each_way():
    names = primitives(jax.grad(loss(fused("layer")), (0, 1, 2)), *data(*ARGS, dtype="float32"))
    assert (names.count("layer_norm"), names.count("layer_norm_cotangent")) == (1, 1)
    assert not {"rsqrt", "layer_norm_tangent"} & set(names)


def test_a_batch_of_rows_stays_one_node_and_a_batch_of_scales_does_not():
    x, scale, bias = data(*ARGS, dtype="float32")
    f, rows = fused("layer"), jnp.stack([x, x])
    assert primitives(jax.vmap(f, (0, None, None)), rows, scale, bias) == ["layer_norm"]
    names = primitives(jax.vmap(jax.grad(loss(f)), (0, None, None)), rows, scale, bias)
    assert (names.count("layer_norm"), names.count("layer_norm_cotangent")) == (1, 1)
    assert "layer_norm" not in primitives(jax.vmap(f, (None, 0, None)), x, jnp.stack([scale, scale]), bias)


def test_inference_saves_nothing():
    (eqn,) = jax.make_jaxpr(layer_norm)(*data(*ARGS, dtype="float32")).jaxpr.eqns
    assert eqn.params["residuals"] is False
    assert len(eqn.outvars) == 1


BAD = {
    "x a scalar": (((), None, None), {}, ArgumentError, ["x is a scalar", "rank 1"]),
    "no features": (((3, 0), None, None), {}, ArgumentError, ["x has shape (3, 0)", "one feature"]),
    "scale of rank 2": (((2, 4), (1, 4), None), {}, ArgumentError, ["scale has shape (1, 4)", "(4,)"]),
    "scale of length M": (((2, 4), (2,), None), {}, ArgumentError, ["scale has shape (2,)", "x (2, 4)"]),
    "bias of length M": (((2, 4), (4,), (2,)), {}, ArgumentError, ["bias has shape (2,)", "axis -1"]),
    "unknown kind": (((2, 4), None, None), {"kind": "layers"}, UnknownNameError, ["'layers'", "Did you mean 'layer'"]),
    "axis out of range": (((2, 4), None, None), {"axis": 2}, ArgumentError, ["axis is 2", "-2 and 1"]),
    "several axes": (((2, 4), None, None), {"axis": (0, 1)}, ArgumentError, ["axis is (0, 1)", "reshape"]),
    "epsilon below 0": (((2, 4), None, None), {"epsilon": -1e-5}, ArgumentError, ["epsilon is -1e-05", "0 or more"]),
    "epsilon infinite": (((2, 4), None, None), {"epsilon": np.inf}, ArgumentError, ["epsilon is inf"]),
    "epsilon no number": (((2, 4), None, None), {"epsilon": "small"}, ArgumentError, ["epsilon is 'small'"]),
    "unknown implementation": (((2, 4), None, None), {"implementation": "xl"}, UnknownNameError, ["'xl'", "xla"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_argument_is_refused_by_name(case):
    shapes, attrs, error, parts = BAD[case]
    with pytest.raises(error) as caught:
        layer_norm(*(None if s is None else jnp.ones(s) for s in shapes), **attrs)
    for part in parts:
        assert part in str(caught.value)


def test_a_traced_epsilon_is_refused():
    with pytest.raises(ArgumentError, match="known when tracing"):
        jax.jit(lambda x, e: layer_norm(x, epsilon=e))(jnp.ones((2, 4)), 1e-5)


def test_dtypes_it_does_not_compute_in_are_refused(x64):
    x, scale = data((2, 4), (4,))
    with pytest.raises(ArgumentError, match="x has dtype int32"):
        layer_norm(jnp.ones((2, 4), jnp.int32))
    with pytest.raises(ArgumentError, match="scale has dtype complex64"):
        layer_norm(x, scale.astype("complex64"))
    with pytest.raises(ArgumentError, match="scale has dtype float64, wider than the float32 that x of dtype bfloat16"):
        layer_norm(x.astype("bfloat16"), scale)


def test_shapes_and_other_objects_are_refused_where_arrays_are_needed():
    with pytest.raises(ArgumentError, match="x: got ShapeDtypeStruct"):
        layer_norm(jax.ShapeDtypeStruct((2, 4), jnp.float32))
    with pytest.raises(ArgumentError, match="x is missing"):
        layer_norm(None)


def test_backends_say_same_code_and_formulas_read_as_the_code_does():
    verdict, *kernels = OP.backends(*data(*ARGS, dtype="float32"), device="cpu")
    assert (verdict.name, verdict.verdict) == ("xla", "same code")
    assert {kernel.verdict for kernel in kernels} == {"unavailable"}
    assert OP.formula() == "layer_norm(x) * scale + bias"
    assert OP.formula(kind="rms", bias=False) == "rms_norm(x) * scale"
    assert OP.formula(bias=False, residual=True) == "layer_norm(x + residual) * scale"
    whole = OP.formula(kind="rms", bias=False, shift=True, residual=True, gives_sum=True)
    assert whole == "rms_norm(x + shift + residual) * scale, and x + shift + residual"


# -- a sum before the norm ------------------------------------------------------------------------------------------------

SUMMED = ((3, 5), (5,), (5,), (5,), (3, 5))  # x, scale, bias, shift, residual
NAMES = ("no_jit", "value_and_grad_jit", "jvp", "linear_transpose_of_vjp", "hessian", "grad_of_grad", "vmap_all")
NAMES += ("vmap_second", "vmap_of_grad", "grad_of_vmap", "scan", "checkpoint")


def plain_sum(kind):
    def norm(x, scale, bias, shift, residual):
        total = x + shift + residual
        return jnp.concatenate([plain(kind)(total, scale, bias), total], -1)

    return norm


def fused_sum(kind):
    """Both results, so that each has a cotangent."""

    def norm(x, scale, bias, shift, residual):
        both = layer_norm_and_sum(x, scale, bias, shift=shift, residual=residual, kind=kind, epsilon=EPS)
        return jnp.concatenate(both, -1)

    return norm


@pytest.mark.parametrize("name", NAMES)
def test_two_results_equal_plain_code_under_every_transformation(name, x64):
    assert_agree(fused_sum("layer"), plain_sum("layer"), data(*SUMMED), (name,), 1e-11)


@pytest.mark.parametrize("which", [0, 1])
def test_one_of_two_results_has_the_gradients_of_plain_code(which, x64):
    part = slice(0, 5) if which == 0 else slice(5, 10)
    names = ("value_and_grad_jit", "jvp", "grad_of_grad", "vmap_of_grad", "scan")
    f, p = (lambda *a, g=g: g(*a)[..., part] for g in (fused_sum("rms"), plain_sum("rms")))
    assert_agree(f, p, data(*SUMMED), names, 1e-11)


def test_a_sum_that_is_not_given_has_the_gradients_of_plain_code(x64):
    names = ("value_and_grad_jit", "jvp", "hessian", "vmap_of_grad")

    def residual_alone(x, residual):
        return layer_norm(x, residual=residual, epsilon=EPS)

    assert_agree(residual_alone, lambda x, r: plain("layer")(x + r), data((3, 5), (3, 5)), names, 1e-11)
    shifted = lambda x, v: layer_norm(x, v, shift=v, kind="rms", epsilon=EPS)  # noqa: E731
    assert_agree(shifted, lambda x, v: plain("rms")(x + v, v), data((3, 5), (5,)), names, 1e-11)


def cotangent_of(fn, *args, wanted):
    jaxpr = jax.make_jaxpr(jax.grad(fn, wanted))(*args).jaxpr
    (node,) = [e for e in jaxpr.eqns if e.primitive.name == "layer_norm_cotangent"]
    return node


def test_backward_reads_the_sum_in_place_of_what_was_added_up():
    x, scale, _, shift, residual = data(*SUMMED, dtype="float32")
    node = cotangent_of(lambda x, r: layer_norm(x, scale, shift=shift, residual=r).sum(), x, residual, wanted=(0, 1))
    assert node.primitive.operand_names(node.params) == ("scale", "sum", "mean", "rstd", "ct")
    node = cotangent_of(lambda x: layer_norm(x, shift=shift).sum(), x, wanted=0)
    assert node.primitive.operand_names(node.params) == ("x", "shift", "mean", "rstd", "ct")


def test_only_the_cotangents_there_are_are_given():
    x, scale, _, _, residual = data(*SUMMED, dtype="float32")

    def run(pick):
        return lambda x: pick(layer_norm_and_sum(x, scale, residual=residual))

    node = cotangent_of(run(lambda both: both[0].sum() + jnp.sin(both[1]).sum()), x, wanted=0)
    assert (node.params["given"], node.primitive.operand_names(node.params)[-2:]) == ((True, True), ("ct", "ct_sum"))
    node = cotangent_of(run(lambda both: both[0].sum()), x, wanted=0)
    assert (node.params["given"], node.primitive.operand_names(node.params)[-1]) == ((True, False), "ct")
    node = cotangent_of(run(lambda both: jnp.sin(both[1]).sum()), x, wanted=0)
    assert (node.params["given"], node.primitive.operand_names(node.params)[-1]) == ((False, True), "ct_sum")


def sums_of_cotangents(norm):
    """The gradients of a norm for a cotangent that is a sum, as one array."""

    def gradients(x, scale, a, b, c):
        dx, dscale = jax.vjp(norm, x, scale)[1]((a + b) + c)
        return dx * dscale

    return gradients


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_a_cotangent_given_as_a_sum_takes_every_transformation(name, x64):
    args = data((3, 5), (5,), (3, 5), (3, 5), (3, 5))
    f = adding(sums_of_cotangents(fused("layer")))
    (node,) = [e for e in jax.make_jaxpr(f)(*args).jaxpr.eqns if e.primitive.name == "layer_norm_cotangent"]
    assert node.params["given"] == (3,)
    assert node.primitive.operand_names(node.params)[-4:] == ("rstd", "ct", "ct", "ct")
    assert_agree(f, sums_of_cotangents(plain("layer")), args, (name,), 1e-10)


@pytest.mark.parametrize(
    "name", ["jit", "jvp", "jvp_of_last", "linear_transpose_of_vjp", "jacfwd", "jacrev", "vmap_all"]
)
def test_of_two_cotangents_one_may_be_given_as_a_sum(name, x64):
    def of(norm):
        def gradients(x, scale, shift, residual, a, b, c):
            return jax.vjp(lambda x: norm(x, scale, None, shift, residual), x)[1]((a + b, c))[0]

        return gradients

    x, scale, _, shift, residual = data(*SUMMED)
    args = x, scale, shift, residual, *data(*(x.shape,) * 3, seed=1)

    def own(x, scale, bias, shift, residual):
        return layer_norm_and_sum(x, scale, bias, shift=shift, residual=residual, epsilon=EPS)

    def jnps(x, scale, bias, shift, residual):
        total = x + shift + residual
        return plain("layer")(total, scale), total

    assert_agree(adding(of(own)), of(jnps), args, (name,), 1e-10)


def test_a_batch_of_cotangents_given_as_a_sum_is_more_rows():
    x, scale, *cts = data((3, 5), (5,), (3, 5), (3, 5), dtype="float32")

    def dx(x, scale, a, b):
        return jax.vjp(lambda x: layer_norm(x, scale), x)[1](a + b)[0]

    f = adding(dx)
    rows = jnp.stack([cts[0], -cts[0]])
    names = primitives(jax.vmap(f, (None, None, 0, None)), x, scale, rows, cts[1])
    assert names.count("layer_norm_cotangent") == 1
    got = jax.vmap(f, (None, None, 0, None))(x, scale, rows, cts[1])
    assert_same(got, jnp.stack([dx(x, scale, a, cts[1]) for a in rows]), 1e-6)


def test_a_batch_of_residuals_is_more_rows():
    x, scale, _, _, residual = data(*SUMMED, dtype="float32")
    f = lambda x, r: layer_norm_and_sum(x, scale, residual=r)  # noqa: E731
    rows = jnp.stack([x, x])
    assert primitives(jax.vmap(f), rows, jnp.stack([residual, residual])).count("layer_norm") == 1
    names = primitives(jax.vmap(f, (None, 0)), x, jnp.stack([residual, residual]))
    assert names.count("layer_norm") == 1
    grad = jax.grad(lambda r, x: sum(o.sum() for o in f(x, r)))
    names = primitives(jax.vmap(grad, (0, None)), jnp.stack([residual, residual]), x)
    assert (names.count("layer_norm"), names.count("layer_norm_cotangent")) == (1, 1)


def test_the_result_is_the_norm_of_the_sum_as_it_is_rounded():
    x, scale, _, shift, residual = data((8, 96), (96,), (96,), (96,), (8, 96), dtype="bfloat16")
    out, total = jax.jit(lambda *a: layer_norm_and_sum(*a[:2], shift=a[2], residual=a[3]))(x, scale, shift, residual)
    wide = sum(a.astype("float32") for a in (x, shift, residual))
    np.testing.assert_array_equal(np.asarray(total, np.float32), np.asarray(wide.astype("bfloat16"), np.float32))
    exact = plain("layer", epsilon=1e-5)(np.asarray(total, np.float64), np.asarray(scale, np.float64))
    error = np.abs(np.asarray(out, np.float64) - exact).max()
    assert error < 0.02 * np.abs(exact).max()


def test_residuals_of_a_norm_of_a_sum_hold_the_sum():
    x, v = jax.ShapeDtypeStruct((8, 4), jnp.bfloat16), jax.ShapeDtypeStruct((4,), jnp.float32)
    total, mean, _ = OP.residuals(x, v, None, None, x)
    assert (total.name, total.shape, total.dtype) == ("sum", (8, 4), "bf16")
    assert total.readers == ("dx", "dscale", "dresidual")
    assert mean.readers == total.readers
    assert [r.name for r in OP.residuals(x, v, None, v, None)] == ["mean", "rstd"]
    assert "sum" in {r.name for r in OP.residuals(x, v, None, v, None, gives_sum=True)}


def test_bad_summands_are_refused_by_name():
    x = jnp.ones((2, 4))
    for more, part in (
        ({"shift": jnp.ones(3)}, "shift has shape (3,), needed (4,)"),
        ({"residual": jnp.ones((1, 4))}, "residual has shape (1, 4), needed (2, 4)"),
        ({"residual": x.astype("bfloat16")}, "residual has dtype bfloat16 but x has float32"),
    ):
        with pytest.raises(ArgumentError) as caught:
            layer_norm(x, **more)
        assert part in str(caught.value)
    with pytest.raises(ArgumentError, match="the sum of x alone is asked for, needed a shift or a residual"):
        layer_norm_and_sum(x)


def test_a_named_implementation_runs_or_says_why_it_cannot():
    x = jnp.ones((2, 4))
    with pytest.raises(BackendError, match="implementation 'cuda' cannot run this call"):
        layer_norm(x, implementation="cuda")


# -- what is taken where nothing is named -----------------------------------------------------------------------------------


def chosen(shape, device="sm_90", dtype="bfloat16", role="call", saves=False):
    x, v = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[-1:], dtype)
    shapes, full = OP._prepared((x, v, None, None, x), {}, Device.of(device))
    if role == "cotangent":
        shapes, full["live"] = {"sum": x, "scale": v, "ct": x}, (True, True, True)
    found = OP.decide(role, shapes, Device.of(device), residuals=saves, **full)
    return found.implementation, found.reason


def test_the_kernels_are_taken_where_they_were_measured_faster():
    for shape in ((32768, 1024), (8, 4096, 1024), (4096, 8192)):
        assert chosen(shape)[0] == chosen(shape, role="cotangent")[0] == "cuda"
    assert chosen((2048, 16384))[0] == "cuda"
    assert chosen((2048, 16384), role="cotangent")[0] == "xla"
    assert "below 1048576" in chosen((128, 1024))[1]
    assert "one by one" in chosen((16384, 1023))[1]
    assert chosen((16384, 1023), saves=True)[0] == "cuda"
    assert chosen((1024, 65536))[0] == "xla"
    for device in ("cpu", "sm_80", "sm_120"):
        assert chosen((32768, 1024), device)[0] == "xla"
    assert "measured on sm_90 only, not on sm_80" in chosen((32768, 1024), "sm_80")[1]
    assert chosen((32768, 1024), dtype="float32")[0] == "cuda"


def test_a_site_is_left_as_it_is_where_one_way_loses():
    def idle(*shape, device="sm_90"):
        x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        left = OP.left_to_xla(x, device=device)
        return f"{left.kind}: {left.reason}" if left else ""

    assert idle(32768, 1024) == idle(4096, 8192) == idle(16384, 1023) == ""
    assert idle(32768, 1024, device="cpu") == f"slower: {choosing.AS_FAST_ON_A_CPU}"
    assert "more than 8192 entries (16384)" in idle(2048, 16384)
    assert "below 1048576" in idle(128, 1024)
    assert "not on sm_80" in idle(32768, 1024, device="sm_80")
    assert idle(128, 1024).startswith("slower: ")
    assert idle(32768, 1024, device="sm_80").startswith("unmeasured: ")
