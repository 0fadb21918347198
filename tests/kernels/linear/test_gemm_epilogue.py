"""gemm_epilogue against plain jnp code: values, gradients, transformations, residuals, errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab.errors import ArgumentError, BackendError, FusionLabError, UnknownNameError
from fusionlab.kernels import OPS
from fusionlab.kernels.ops.gemm_epilogue import ACTIVATIONS
from fusionlab.ops import gemm_epilogue
from fusionlab.testing.tolerances import tolerance

from ..transformations import TRANSFORMATIONS, assert_agree, assert_same, loss, primitives

OP = OPS["gemm_epilogue"]
# What a user writes for each activation, spelt without the table under test.
USER_CODE = {
    "none": lambda h: h,
    "relu": jax.nn.relu,
    "relu_tie": lambda h: jnp.maximum(h, 0),
    "relu_where": lambda h: jnp.where(h > 0, h, 0),
    "relu_unless": lambda h: jnp.where(h <= 0, 0, h),
    "relu_times": lambda h: h * (h > 0),
    "relu_abs": lambda h: (h + jnp.abs(h)) / 2,
    "silu_exp": lambda h: h / (1 + jnp.exp(-h)),
    "sigmoid_exp": lambda h: 1 / (1 + jnp.exp(-h)),
    "gelu_tanh": lambda h: 0.5 * h * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3))),
    "gelu_erf": lambda h: h * (1 + jax.lax.erf(h / np.sqrt(2))) / 2,
    "quick_gelu": lambda h: h * jax.lax.logistic(1.702 * h),
    "silu": lambda h: h / (1 + jnp.exp(-h)),
    "sigmoid": lambda h: 1 / (1 + jnp.exp(-h)),
    "tanh": jnp.tanh,
}
DTYPES = ("float32", "bfloat16", "float16", "float64")


def data(*shapes, dtype="float64", seed=0):
    """Uniform in [-0.5, 0.5), so that relu sees both signs."""
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.uniform(-0.5, 0.5, s), dtype) for s in shapes)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def out_and_gradients(f):
    def run(*args):
        out, pull = jax.vjp(f, *args[:-1])
        return out, *pull(args[-1])

    return jax.jit(run)


def both(activation):
    fused = lambda x, w, b: gemm_epilogue(x, w, b, activation=activation)  # noqa: E731
    plain = lambda x, w, b: USER_CODE[activation](x @ w + b)  # noqa: E731
    return fused, plain


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_every_transformation_equals_plain_code(name, x64):
    assert_agree(*both("gelu_tanh"), data((3, 4), (4, 5), (5,)), (name,), 1e-12)


def test_a_saved_mask_takes_the_transformations_too(x64):
    names = ("jit", "linearize", "jacfwd", "jacrev", "hessian", "vmap_of_grad", "grad_of_vmap", "scan", "checkpoint")
    assert_agree(*both("relu"), data((3, 4), (4, 5), (5,)), names, 1e-12)


def test_every_activation_has_a_user_spelling_here():
    assert set(USER_CODE) == set(ACTIVATIONS)


@pytest.mark.parametrize("activation", USER_CODE)
def test_every_activation_agrees_in_values_gradients_and_curvature(activation, x64):
    assert_agree(
        *both(activation), data((8, 4), (4, 6), (6,)), ("jit", "value_and_grad_jit", "jvp", "grad_of_grad"), 1e-12
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["none", "relu", "gelu_tanh", "gelu_erf"])
def test_values_and_gradients_are_as_near_float64_as_the_dtype_allows(activation, dtype, x64):
    fused, plain = both(activation)
    wide = data((8, 4), (4, 128), (128,))
    narrow = tuple(a.astype(dtype) for a in wide)
    # A pre-activation that rounding may carry across 0 has another mask in another dtype: no cotangent there.
    h = wide[0] @ wide[1] + wide[2]
    ct = jnp.where(jnp.abs(h) > 0.02, np.random.default_rng(1).integers(-20, 20, (8, 128)), 0).astype(dtype)
    # The float64 reference reads the rounded operands: the rounding of the inputs is not the op's error.
    results = out_and_gradients(fused)(*narrow, ct)
    exacts = out_and_gradients(plain)(*(a.astype("float64") for a in (*narrow, ct)))
    row = tolerance(dtype, 128)
    for got, exact in zip(results, exacts, strict=True):
        assert got.dtype == dtype
        exact = np.asarray(exact)
        np.testing.assert_allclose(
            np.asarray(got, np.float64), exact, rtol=row.rtol, atol=row.atol * np.abs(exact).max()
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ["relu", "gelu_tanh", "gelu_erf"])
def test_xla_is_bit_for_bit_what_the_user_wrote(activation, dtype):
    library = {"relu": jax.nn.relu, "gelu_tanh": jax.nn.gelu, "gelu_erf": lambda h: jax.nn.gelu(h, approximate=False)}
    x, w, b = data((16, 32), (32, 24), (24,), dtype=dtype)
    plain = jax.jit(lambda x, w, b: library[activation](x @ w + b))
    fused = jax.jit(lambda x, w, b: gemm_epilogue(x, w, b, activation=activation))
    assert np.array_equal(np.asarray(fused(x, w, b), np.float32), np.asarray(plain(x, w, b), np.float32))


@pytest.mark.parametrize("x_contract", [0, 1, 2, 3])
@pytest.mark.parametrize("w_contract", [0, 1])
def test_any_axes_contract(x_contract, w_contract, x64):
    x_shape = [2, 3, 4, 2]
    x_shape[x_contract] = 5
    x, w, b = data(tuple(x_shape), (5, 7) if w_contract == 0 else (7, 5), (7,))

    def fused(x, w, b):
        return gemm_epilogue(x, w, b, activation="tanh", x_contract=x_contract, w_contract=w_contract)

    def plain(x, w, b):
        return jnp.tanh(jnp.tensordot(x, w, ((x_contract,), (w_contract,))) + b)

    assert_agree(fused, plain, (x, w, b), ("jit", "value_and_grad_jit", "jvp", "vmap_first", "grad_of_vmap"), 1e-12)


def test_leading_contraction_keeps_the_other_axes_in_order():
    x, y, b = data((4, 2, 2, 8), (4, 128), (128,), dtype="float32")
    out = gemm_epilogue(x, y, b, activation="relu", x_contract=0)
    assert out.shape == (2, 2, 8, 128)
    want = np.maximum(np.einsum("kabc,kn->abcn", *(np.asarray(a, np.float64) for a in (x, y))) + np.asarray(b), 0)
    np.testing.assert_allclose(out, want, atol=1e-6)


def test_absent_bias_is_no_bias(x64):
    x, w = data((3, 4), (4, 5))
    fused = lambda x, w: gemm_epilogue(x, w, activation="silu")  # noqa: E731
    plain = lambda x, w: USER_CODE["silu"](x @ w)  # noqa: E731
    assert_agree(fused, plain, (x, w), ("jit", "value_and_grad_jit", "hessian", "vmap_of_grad"), 1e-12)


@pytest.mark.parametrize(
    ("activation", "slope"),
    [
        ("relu", 0.0),
        ("relu_where", 0.0),
        ("relu_tie", 0.5),
        ("relu_unless", 0.0),
        ("relu_times", 0.0),
        ("relu_abs", 1.0),
    ],
)
def test_gradients_at_rows_of_zeros_are_the_activations_own(activation, slope):
    x, (w,) = jnp.zeros((2, 3)), data((3, 4), dtype="float32")
    fused, plain = both(activation)
    ones = jnp.ones((2, 4))
    got = jax.vjp(fused, x, w, jnp.zeros(4))[1](ones)
    want = jax.vjp(plain, x, w, jnp.zeros(4))[1](ones)
    assert_same(got, want, 1e-6)
    np.testing.assert_allclose(got[0], np.broadcast_to(slope * np.sum(w, axis=1), (2, 3)), rtol=1e-5)
    np.testing.assert_array_equal(got[2], np.full(4, 2 * slope))


@pytest.mark.parametrize("activation", USER_CODE)
def test_nan_and_infinity_propagate_as_in_plain_code(activation):
    library = {"gelu_tanh": jax.nn.gelu, "gelu_erf": lambda h: jax.nn.gelu(h, approximate=False), "silu": jax.nn.silu}
    act = library.get(activation, jax.nn.sigmoid if activation == "sigmoid" else USER_CODE[activation])
    x = jnp.asarray([[jnp.nan], [jnp.inf], [-jnp.inf], [1e4], [-1e4], [0.0], [-0.0]])
    w, b = jnp.ones((1, 2)), jnp.zeros(2)
    ones = jnp.ones((7, 2))
    got = out_and_gradients(lambda x: gemm_epilogue(x, w, b, activation=activation))(x, ones)
    want = out_and_gradients(lambda x: act(x @ w + b))(x, ones)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(got[1], want[1], rtol=1e-6)


def test_residual_is_the_mask_for_relu_and_the_preactivation_for_gelu():
    x, w, b = data((6, 4), (4, 5), (5,), dtype="float32")
    h = x @ w + b
    out, mask = gemm_epilogue(x, w, b, activation="relu", return_residual=True)
    assert mask.dtype == bool
    np.testing.assert_array_equal(mask, h > 0)
    np.testing.assert_array_equal(out, jnp.maximum(h, 0))
    out, saved = gemm_epilogue(x, w, b, activation="gelu_tanh", return_residual=True)
    np.testing.assert_allclose(saved, h, rtol=1e-6)
    np.testing.assert_allclose(out, jax.nn.gelu(h), rtol=1e-6, atol=1e-7)


def test_a_returned_preactivation_is_differentiable(x64):
    args = data((3, 4), (4, 5), (5,))

    def fused(x, w, b):
        out, h = gemm_epilogue(x, w, b, activation="gelu_erf", return_residual=True)
        return out * jnp.cos(h)

    def plain(x, w, b):
        h = x @ w + b
        return USER_CODE["gelu_erf"](h) * jnp.cos(h)

    assert_agree(fused, plain, args, ("value_and_grad_jit", "jvp", "hessian"), 1e-12)


def test_residuals_are_listed_with_bytes_and_readers():
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((2, 8, 4), (4, 6), (6,))]
    (mask,) = OP.residuals(*shapes, activation="relu")
    assert (mask.name, mask.shape, mask.dtype, mask.nbytes) == ("mask", (2, 8, 6), "bool", 96)
    assert mask.readers == ("dx", "dw", "dbias")
    (saved,) = OP.residuals(*shapes[:2], None, activation="gelu_tanh")
    assert (saved.name, saved.dtype, saved.nbytes, saved.readers) == ("preactivation", "bf16", 192, ("dx", "dw"))
    (tie,) = OP.residuals(*shapes, activation="relu_tie")
    assert (tie.dtype, tie.nbytes) == ("i8", 96)
    assert OP.residuals(*shapes, activation="none") == ()


def test_only_what_the_wanted_gradients_read_is_kept():
    x, w, b = data((3, 4), (4, 5), (5,), dtype="float32")
    f = lambda x, w, b: gemm_epilogue(x, w, b, activation="relu")  # noqa: E731
    assert OP.reads(("x",), activation="relu") == {"w", "mask"}
    assert OP.reads(("w",), activation="relu") == {"x", "mask"}
    assert OP.reads(("bias",), activation="none") == set()
    for wanted, operands in (
        ((0,), [(4, 5), (3, 5), (3, 5)]),
        ((1,), [(3, 4), (3, 5), (3, 5)]),
        ((2,), [(3, 5), (3, 5)]),
    ):
        jaxpr = jax.make_jaxpr(jax.grad(lambda *a: f(*a).sum(), wanted))(x, w, b).jaxpr
        (node,) = [e for e in jaxpr.eqns if e.primitive.name == "gemm_epilogue_cotangent"]
        assert [v.aval.shape for v in node.invars] == operands
        assert len(node.outvars) == 1


def test_a_differentiated_op_is_one_named_node_each_way():
    x, w, b = data((3, 4), (4, 5), (5,), dtype="float32")
    f, _ = both("gelu_tanh")
    names = primitives(jax.grad(loss(f), (0, 1, 2)), x, w, b)
    assert names.count("gemm_epilogue") == 1
    assert names.count("gemm_epilogue_cotangent") == 1
    assert not {"dot_general", "tanh", "gemm_epilogue_tangent"} & set(names)


def test_a_batch_of_rows_stays_one_node_and_a_batch_of_weights_does_not():
    x, w, b = data((3, 4), (4, 5), (5,), dtype="float32")
    f, _ = both("relu")
    rows = jnp.stack([x, x])
    assert primitives(jax.vmap(f, (0, None, None)), rows, w, b) == ["gemm_epilogue"]
    names = primitives(jax.grad(loss(jax.vmap(f, (0, None, None))), (0, 1)), rows, w, b)
    assert (names.count("gemm_epilogue"), names.count("gemm_epilogue_cotangent")) == (1, 1)
    assert "dot_general" not in names
    names = primitives(jax.vmap(jax.grad(loss(f)), (0, None, None)), rows, w, b)
    assert (names.count("gemm_epilogue"), names.count("gemm_epilogue_cotangent")) == (1, 1)
    assert "gemm_epilogue" not in primitives(jax.vmap(f, (None, 0, None)), x, jnp.stack([w, w]), b)


def test_inference_saves_nothing():
    x, w, b = data((3, 4), (4, 5), (5,), dtype="float32")
    (eqn,) = jax.make_jaxpr(both("gelu_tanh")[0])(x, w, b).jaxpr.eqns
    assert eqn.params["residuals"] is False
    assert len(eqn.outvars) == 1


BAD = {
    "w of rank 3": (((2, 4), (4, 5, 1), (5,)), {}, ArgumentError, ["w has shape (4, 5, 1)", "rank 2"]),
    "x of rank 1": (((4,), (4, 5), (5,)), {}, ArgumentError, ["x has shape (4,)", "rank 2 or more"]),
    "bias of rank 2": (((2, 4), (4, 5), (1, 5)), {}, ArgumentError, ["bias has shape (1, 5)", "rank 1"]),
    "bias of length M": (((2, 4), (4, 5), (2,)), {}, ArgumentError, ["bias has length 2", "N = 5"]),
    "K mismatch": (((2, 3), (4, 5), (5,)), {}, ArgumentError, ["x (2, 3)", "w (4, 5)", "same K"]),
    "unknown activation": (((2, 4), (4, 5), (5,)), {"activation": "gelu"}, UnknownNameError, ["'gelu'", "gelu_erf"]),
    "residual with none": (
        ((2, 4), (4, 5), (5,)),
        {"return_residual": True},
        ArgumentError,
        ["return_residual", "'none'"],
    ),
    "axis out of range": (((2, 4), (4, 5), (5,)), {"x_contract": 2}, ArgumentError, ["x_contract is 2", "-2 and 1"]),
    "axis not a number": (((2, 4), (4, 5), (5,)), {"w_contract": "k"}, ArgumentError, ["w_contract is 'k'"]),
    "unknown implementation": (((2, 4), (4, 5), (5,)), {"implementation": "xl"}, UnknownNameError, ["'xl'", "xla"]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_argument_is_refused_by_name(case):
    shapes, attrs, error, parts = BAD[case]
    with pytest.raises(error) as caught:
        gemm_epilogue(*data(*shapes, dtype="float32"), **attrs)
    for part in parts:
        assert part in str(caught.value)


def test_the_errors_are_distinct():
    messages = set()
    for shapes, attrs, error, _ in BAD.values():
        with pytest.raises(error) as caught:
            gemm_epilogue(*data(*shapes, dtype="float32"), **attrs)
        messages.add(str(caught.value))
    assert len(messages) == len(BAD)


def test_mixed_and_integer_dtypes_are_refused():
    x, w = data((2, 4), (4, 5), dtype="float32")
    with pytest.raises(ArgumentError, match="w has dtype bfloat16 but x has float32"):
        gemm_epilogue(x, w.astype(jnp.bfloat16))
    with pytest.raises(ArgumentError, match="x has dtype int32"):
        gemm_epilogue(jnp.ones((2, 4), jnp.int32), w)


def test_shapes_and_other_objects_are_refused_where_arrays_are_needed():
    (w,) = data((4, 5), dtype="float32")
    with pytest.raises(ArgumentError, match="x: got ShapeDtypeStruct"):
        gemm_epilogue(jax.ShapeDtypeStruct((2, 4), jnp.float32), w)
    with pytest.raises(ArgumentError, match="x: got object"):
        gemm_epilogue(object(), w)
    with pytest.raises(ArgumentError, match="w is missing"):
        gemm_epilogue(w, None)


def test_backends_say_same_code_on_a_cpu_and_list_only_what_exists():
    args = data((2, 4), (4, 5), (5,), dtype="float32")
    verdict, *others = OP.backends(*args, device="cpu", activation="relu")
    assert (verdict.name, verdict.verdict) == ("xla", "same code")
    assert "CPU" in verdict.reason
    assert [(v.name, v.verdict) for v in others] == [("cublaslt", "unavailable"), ("cuda", "unavailable")]
    assert all("needs a CUDA device" in v.reason for v in others)
    verdicts = {v.name: v.verdict for v in OP.backends(*args, device="sm_89", activation="relu")}
    assert verdicts == {"xla": "same code", "cublaslt": "possible", "cuda": "possible"}
    assert OP.choose(*args, device="sm_90", implementation="xla") == "xla"
    with pytest.raises(UnknownNameError):
        OP.choose(*args, implementation="cublas")


def test_formulas_read_as_the_code_does():
    assert OP.formula(activation="gelu_tanh") == "gelu_tanh(x @ w + b)"
    assert OP.formula(activation="none", w_contract=1) == "x @ w.T + b"
    assert OP.formula(activation="relu", bias=False) == "relu(x @ w)"


def test_precision_set_around_the_call_is_kept():
    x, w = data((2, 4), (4, 5), dtype="float32")
    with jax.default_matmul_precision("highest"):
        eqn = jax.make_jaxpr(gemm_epilogue)(x, w).jaxpr.eqns[0]
        want = jax.make_jaxpr(jnp.matmul)(x, w).jaxpr.eqns[0]
    assert eqn.params["precision"] == want.params["precision"]
    assert eqn.params["precision"] is not None


def test_backend_errors_are_our_own():
    assert issubclass(BackendError, FusionLabError)


# -- the gradient taken beyond the activation that made x ---------------------------------------------------------------------


def beyond(name):
    """(the op behind an activation, with that activation's residual, of x's pre-activation; the same in plain jnp)."""
    act = ACTIVATIONS[name]

    def op(pre, w, b):
        x, saved = jax.lax.stop_gradient((act.fn(pre), act.save(pre)))
        # A tangent of x is that of its pre-activation here: give x one, and the value it has.
        moving = x + (pre - jax.lax.stop_gradient(pre))
        return OPS["gemm_epilogue"].call(moving, w, b, saved, activation="tanh", x_activation=name)

    def plain(pre, w, b):
        return jnp.tanh(act.fn(pre) @ w + b)

    return op, plain


@pytest.mark.parametrize("name", ["relu", "gelu_tanh", "gelu_erf", "silu", "tanh"])
def test_the_gradient_beyond_the_activation_before_is_that_of_both_layers(name):
    op, plain = beyond(name)
    keys = jax.random.split(jax.random.key(5), 4)
    pre, w, b, ct = (jax.random.normal(k, s) for k, s in zip(keys, ((2, 6, 8), (8, 4), (4,), (2, 6, 4)), strict=True))
    want, pull = jax.vjp(plain, pre, w, b)
    got, pulled = jax.vjp(op, pre, w, b)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    for g, v in zip(pulled(ct), pull(ct), strict=True):
        np.testing.assert_allclose(g, v, rtol=1e-5, atol=1e-5)
    moved = jax.jvp(op, (pre, w, b), (pre * 2, w, b))[1]
    np.testing.assert_allclose(moved, jax.jvp(plain, (pre, w, b), (pre * 2, w, b))[1], rtol=1e-5, atol=1e-5)
    names = [e.primitive.name for e in jax.make_jaxpr(lambda *a: jax.vjp(op, *a)[1](ct))(pre, w, b).eqns]
    assert names.count("gemm_epilogue_cotangent") == 1
    mapped = jax.vmap(lambda p: jax.vjp(op, p, w, b)[1](ct)[0])(jnp.stack([pre, -pre]))
    np.testing.assert_allclose(mapped[0], pull(ct)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("saved", "name", "message"),
    [
        (None, "relu", "needed both or neither"),
        (jnp.ones((6, 8), bool), None, "needed both or neither"),
        (jnp.ones((6, 8), bool), "none", "x_activation"),
        (jnp.ones((8, 6), bool), "relu", "needed that of x"),
    ],
)
def test_what_is_saved_of_x_and_its_activation_go_together(saved, name, message):
    with pytest.raises((ArgumentError, UnknownNameError), match=message):
        OPS["gemm_epilogue"].call(jnp.ones((6, 8)), jnp.ones((8, 4)), None, saved, x_activation=name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["silu", "sigmoid", "tanh"])
def test_the_derivative_of_an_activation_in_16_bits_is_rounded_once(name, dtype):
    """Also in its tails, where that of JAX's own code has no digit left."""
    act, h = ACTIVATIONS[name], jnp.linspace(-7, 7, 501).astype(dtype)
    with jax.enable_x64(True):
        want = np.asarray(jax.vmap(jax.grad(act.fn))(jnp.asarray(np.asarray(h, np.float64))))
    got = np.asarray(act.scale(act.save(h), jnp.ones_like(h)), np.float64)
    # float32 keeps no more of 1 - tanh(h)^2.
    np.testing.assert_allclose(got, want, float(jnp.finfo(dtype).eps) / 2 * 1.01, 1e-6)
