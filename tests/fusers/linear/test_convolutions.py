"""Linear layers written as convolutions of one point are products. With a stride, padding, groups or a larger window they are none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.graph.canonical.convolutions import contraction
from fusionlab.graph.interpret.evaluate import evaluate

from ..checks import agree, jit, normal, weighed

X1, X2, W, B = normal((2, 5, 6), (2, 3, 4, 6), (6, 8), (8,))
NHWC, NCHW = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")


def conv(x, w, numbers, strides=None, padding="VALID", **more):
    strides = strides or (1,) * (x.ndim - 2)
    return jax.lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=numbers, **more)


def first(x):
    return jnp.moveaxis(x, -1, 1)


# name -> (program of x, w and b; x; activation)
FORMS = {
    "1-D, NWC": (lambda x, w, b: jax.nn.silu(conv(x, w[None], ("NWC", "WIO", "NWC")) + b), X1, "silu"),
    "1-D, NCW": (lambda x, w, b: jnp.tanh(conv(x, w.T[..., None], ("NCW", "OIW", "NCW")) + b[:, None]), first(X1), "tanh"),
    "2-D, NHWC": (lambda x, w, b: jax.nn.relu(conv(x, w[None, None], NHWC, padding="SAME") + b), X2, "relu"),
    "2-D, NCHW": (lambda x, w, b: jax.nn.gelu(conv(x, w.T[..., None, None], NCHW) + b[:, None, None]), first(X2), "gelu_tanh"),
    "without a bias": (lambda x, w: jax.nn.silu(conv(x, w[None, None], NHWC)), X2, "silu"),
    "a bias alone": (lambda x, w, b: conv(x, w[None, None], NHWC) + b, X2, "none"),
    "in another layout": (lambda x, w, b: jax.nn.relu(conv(x, w[None, None], ("NHWC", "HWIO", "NCHW")) + b[:, None, None]), X2, "relu"),
    "of 16 bits, in float32": (
        lambda x, w, b: jax.nn.silu((conv(x, w[None, None], NHWC) + b).astype(jnp.float32)).astype(x.dtype),
        X2.astype(jnp.bfloat16),
        "silu",
    ),
}  # fmt: skip


def arguments(name):
    fn, x, act = FORMS[name]
    args = (x, W, B)[: fn.__code__.co_argcount]
    return fn, tuple(a.astype(x.dtype) for a in args), act


def found_in(fn, args, **options):
    found = agree(fn, *args, passes="gemm_epilogue", factor=3, **options)
    assert not found.rejections, found.rejections
    return [c.attrs["activation"] for c in found.candidates]


@pytest.mark.parametrize("name", FORMS)
def test_a_convolution_of_one_point_is_a_product(name):
    fn, args, act = arguments(name)
    assert found_in(fn, args) == [act]
    assert not any(n.primitive.startswith("conv") for n in fl.find(fn, *args, passes="gemm_epilogue").apply().nodes())


@pytest.mark.parametrize("name", [n for n in FORMS if "16 bits" not in n])
def test_in_float64_its_values_and_gradients_are_the_programs_to_the_last_digits(name):
    fn, args, act = arguments(name)
    with jax.enable_x64(True):
        assert found_in(fn, tuple(jnp.asarray(np.asarray(a, np.float64)) for a in args)) == [act]


@pytest.mark.dear
def test_in_a_train_step_whose_backward_pass_reverses_the_window_it_is_fused_at_sizes_that_are_reduced():
    def loss(w, b, x):
        return jnp.sum(jnp.sin(jax.nn.gelu(conv(x, w, NHWC, padding="SAME") + b)))

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, 1, 64, 256), (256,), (32, 14, 14, 64))]
    found = fl.find(jax.grad(loss, argnums=(0, 1, 2)), *shapes, passes="gemm_epilogue")
    assert not found.rejections
    assert found.counts()["gemm_epilogue"] == found.counts()["gemm_epilogue_grad"] == 1
    assert any(n.primitive == "rev" for n in found.graph.nodes())


@pytest.mark.parametrize("name", FORMS)
def test_differentiated_scanned_and_mapped_it_is_found_and_right(name):
    fn, (x, *rest), act = arguments(name)

    def scanned(xs, *rest):
        return jax.lax.scan(lambda total, x: (total + fn(x, *rest).astype(jnp.float32).sum(), None), 0.0, xs)[0]

    assert found_in(scanned, (jnp.stack([x, -x]), *rest)) == [act]
    assert found_in(lambda xs, *rest: jax.vmap(lambda x: fn(x, *rest))(xs), (jnp.stack([x, -x]), *rest)) == [act]
    step = jax.value_and_grad(weighed(fn), tuple(range(len(rest) + 1)))
    found = fl.find(step, x, *rest, passes="gemm_epilogue")
    assert [c.attrs["activation"] for c in found.candidates] == [act], found.rejections
    assert found.candidates[0].backward is not None
    got, want = (jit(f)(x, *rest) for f in (fl.fuse(step, passes="gemm_epilogue"), step))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        np.testing.assert_allclose(g, w, rtol=0, atol=(1 + np.abs(w).max()) * (2e-2 if "16" in name else 3e-6))


def test_on_a_gpu_it_stays_a_convolution_unless_it_is_asked_for():
    fn, args, _ = arguments("2-D, NHWC")
    found = fl.find(fn, *args, device="sm_90")
    assert [r.code for r in found.rejections] == ["unmeasured"]
    assert not found.candidates
    assert len(fl.find(fn, *args, device="sm_90", passes="gemm_epilogue").candidates) == 1


W3 = jnp.stack([W] * 9).reshape(3, 3, 6, 8)
WG = W[None, None, :3]  # two groups
NEAR = {
    "a stride": (lambda x, w, b: jax.nn.relu(conv(x, w[None, None], NHWC, (1, 2)) + b), "structure"),
    "padding": (lambda x, w, b: jax.nn.relu(conv(x, w[None, None], NHWC, padding=((1, 0), (0, 0))) + b), "structure"),
    "negative padding": (lambda x, w, b: jax.nn.relu(conv(x, w[None, None], NHWC, padding=((0, 0), (-1, 0))) + b), "structure"),
    "input dilation": (
        lambda x, w, b: jax.nn.relu(conv(x, w[None, None], NHWC, padding=((0, 0),) * 2, lhs_dilation=(1, 2)) + b),
        "structure",
    ),
    "a window of 3 x 3": (lambda x, w, b: jax.nn.relu(conv(x, W3, NHWC, padding="SAME") + b), None),
    "a window of 3 x 3 that fits once along one axis": (lambda x, w, b: jax.nn.relu(conv(x, W3, NHWC) + b), None),
    "a window over everything": (
        lambda x, w, b: jax.nn.relu(conv(x, jnp.stack([w] * 12).reshape(3, 4, 6, 8), NHWC) + b),
        None,
    ),
    "groups of features": (lambda x, w, b: jax.nn.relu(conv(x, WG, NHWC, feature_group_count=2) + b), None),
    "groups of images": (lambda x, w, b: jax.nn.relu(conv(x, w[None, None], NHWC, batch_group_count=2)), None),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR)
def test_other_convolutions_are_none(name):
    fn, code = NEAR[name]
    found = agree(fn, X2, W, B, passes="gemm_epilogue", factor=3)
    assert not found.candidates
    assert [r.code for r in found.rejections] == ([code] if code else [])


@pytest.mark.parametrize("name", [*FORMS, *NEAR])
def test_what_is_a_product_is_evaluated_as_one_with_its_gradients(name):
    """Against XLA's own convolution: which convolutions are products, and along which axes."""
    fn, args, _ = arguments(name) if name in FORMS else (NEAR[name][0], (X2, W, B), None)
    if "16 bits" in name:
        return
    closed = jax.make_jaxpr(lambda *a: jax.vjp(fn, *a)[1](fn(*a)))(*args)
    for eqn in closed.eqns:
        if eqn.primitive.name != "conv_general_dilated":
            continue
        shapes = [v.aval.shape for v in eqn.invars]
        operands = normal(*shapes, seed=7)
        if contraction(eqn.params, *shapes) is None:
            assert name in NEAR
            continue
        one = jax.make_jaxpr(lambda a, b, eqn=eqn: eqn.primitive.bind(a, b, **eqn.params))(*operands)
        (got,) = evaluate(one, [np.asarray(a, np.float64) for a in operands], None)
        np.testing.assert_allclose(got, one.eqns[0].primitive.bind(*operands, **eqn.params), rtol=1e-5, atol=1e-5)
