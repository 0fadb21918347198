"""Pass gemm_epilogue: every way to write act(x @ w + b) is found and right; what only looks like it is declined with a reason."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import fusionlab as fl

from ..checks import agree, codes, normal, primitives

X, W, B = normal((6, 4), (4, 10), (10,))
X3, X4 = normal((2, 3, 4), (2, 3, 5, 4), seed=1)
RELU = jax.nn.relu


def find(fn, *args, **options):
    return fl.find(fn, *args, passes=fl.Strategy(gemm_epilogue=options or True))


def only(fn, *args, **options):
    """The one candidate, nothing being declined."""
    found = find(fn, *args, **options)
    assert not found.rejections, found.rejections
    (site,) = found.candidates
    return site


def declined(fn, *args, **options):
    """The one rejection, nothing being fused."""
    found = find(fn, *args, **options)
    assert not found.candidates, found.candidates
    (rejection,) = found.rejections
    return rejection


# -- products ---------------------------------------------------------------------------------------------------------

PRODUCTS = {
    "x @ w": (lambda x, w: x @ w, X, W),
    "jnp.dot": (jnp.dot, X, W),
    "x @ w.T": (lambda x, w: x @ w.T, X, W.T),
    "x.T @ w": (lambda x, w: x.T @ w, X.T, W),
    "x.T @ w.T": (lambda x, w: x.T @ w.T, X.T, W.T),
    "(w.T @ x.T).T": (lambda x, w: (w.T @ x.T).T, X, W),
    "einsum mk,kn": (lambda x, w: jnp.einsum("mk,kn->mn", x, w), X, W),
    "einsum kn,mk": (lambda x, w: jnp.einsum("kn,mk->mn", w, x), X, W),
    "einsum mk,nk": (lambda x, w: jnp.einsum("mk,nk->mn", x, w), X, W.T),
    "einsum km,kn": (lambda x, w: jnp.einsum("km,kn->mn", x, w), X.T, W),
    "dot_general": (lambda x, w: lax.dot_general(x, w, (((1,), (0,)), ((), ()))), X, W),
    "rows of rank 2": (lambda x, w: x @ w, X3, W),
    "rows of rank 3": (lambda x, w: x @ w, X4, W),
    "leading contraction": (lambda x, w: jnp.einsum("kabc,kn->abcn", x, w), jnp.moveaxis(X4, -1, 0), W),
    "middle contraction": (lambda x, w: jnp.einsum("akb,kn->abn", x, w), jnp.moveaxis(X3, -1, 1), W),
    "vmap over rows": (lambda x, w: jax.vmap(lambda row: row @ w)(x), X, W),
    "vmap over rows, weight [out, in]": (lambda x, w: jax.vmap(lambda row: w @ row)(x), X, W.T),
    "weight of shape [1, K, N]": (lambda x, w: x @ w[None], X3, W),
    "two contracted axes": (
        lambda x, w: jnp.einsum("thd,hdn->tn", x.reshape(3, 2, 8), w.reshape(2, 8, 10)),
        *normal((3, 16), (16, 10), seed=2),
    ),
    "two contracted axes, in another order": (
        lambda x, w: jnp.einsum("thd,dhn->tn", x, w),
        *normal((3, 2, 4), (4, 2, 10), seed=3),
    ),
    "flattened by hand": (lambda x, w: (x.reshape(-1, 4) @ w).reshape(2, 3, 10), X3, W),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_every_way_to_write_the_product_is_one_site_with_the_same_values_and_gradients(name):
    product, x, w = PRODUCTS[name]

    def layer(x, w, b):
        y = product(x, w)
        return RELU(y + b) if name != "flattened by hand" else RELU(x.reshape(-1, 4) @ w + b).reshape(2, 3, 10)

    found = agree(layer, x, w, B, passes="gemm_epilogue", factor=2)
    assert not found.rejections
    (site,) = found.candidates
    assert site.attrs["activation"] == "relu"
    assert {"dot_general", "add", "max"}.isdisjoint(primitives(found.apply()))


def test_operands_that_fit_are_passed_as_they_are_with_the_contracted_axis_named():
    assert only(lambda x, w, b: x @ w.T + b, X, W.T, B).attrs["w_contract"] == 1
    site = only(lambda x, w, b: jnp.einsum("kabc,kn->abcn", x, w) + b, jnp.moveaxis(X4, -1, 0), W, B)
    assert (site.attrs["x_contract"], site.attrs["w_contract"], site.nodes_after) == (0, 0, 1)


def test_heads_made_by_the_projection_itself_are_one_site():
    """flax's DenseGeneral: kernel [E, H, D], bias [H, D]."""
    x, w, b = normal((2, 3, 4), (4, 2, 5), (2, 5), seed=4)
    found = agree(lambda x, w, b: jnp.einsum("bte,ehd->bthd", x, w) + b, x, w, b, passes="gemm_epilogue")
    assert len(found.candidates) == 1
    assert not found.rejections


# -- biases -----------------------------------------------------------------------------------------------------------

BIASES = {
    "on the right": lambda y, b: y + b,
    "on the left": lambda y, b: b + y,
    "with a unit axis": lambda y, b: y + b[None],
    "reshaped": lambda y, b: y + b.reshape(1, 10),
    "broadcast": lambda y, b: jnp.broadcast_to(b, y.shape) + y,
}


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_is_found_on_either_side_and_in_every_shape(name):
    site = only(lambda x, w, b: RELU(BIASES[name](x @ w, b)), X, W, B)
    assert site.formula == "relu(x @ w + b)"
    assert set(site.leaves) == {"x", "w", "b"}


def test_a_bias_captured_as_a_constant_is_a_bias():
    assert only(lambda x, w: RELU(x @ w + B), X, W).formula == "relu(x @ w + b)"


def test_an_activation_without_a_bias_is_a_site_and_a_bare_product_is_none():
    site = only(lambda x, w: jnp.tanh(x @ w), X, W)
    assert (site.formula, set(site.leaves)) == ("tanh(x @ w)", {"x", "w"})
    found = find(lambda x, w: x @ w, X, W)
    assert (found.candidates, found.rejections) == ((), ())


def test_without_a_bias_the_weight_is_the_one_on_the_right_or_the_matrix():
    x, w = normal((6, 6), (6, 6), seed=5)
    for fn, right in ((lambda x, w: RELU(x @ w), 1), (lambda x, w: RELU(w @ x), 0)):
        found = agree(fn, x, w, passes="gemm_epilogue")
        assert found.candidates[0].leaves["w"].id == found.graph.top.inputs[right].id
    found = find(lambda w, x: RELU(jnp.einsum("kn,btk->btn", w, x)), W, X3)
    assert found.candidates[0].leaves["w"].id == found.graph.top.inputs[0].id


# -- activations and dtypes -------------------------------------------------------------------------------------------

ACTIVATIONS = {
    "none": lambda h: h,
    "relu": jax.nn.relu,
    "relu_tie": lambda h: jnp.maximum(h, 0),
    "relu_where": lambda h: jnp.where(h > 0, h, 0),
    "relu_unless": lambda h: jnp.where(h <= 0, 0.0, h),
    "relu_times": lambda h: h * (h > 0),
    "relu_abs": lambda h: 0.5 * (h + jnp.abs(h)),
    "silu_exp": lambda h: h / (1 + jnp.exp(-h)),
    "sigmoid_exp": lambda h: 1 / (1 + jnp.exp(-h)),
    "gelu_tanh": jax.nn.gelu,
    "gelu_erf": lambda h: jax.nn.gelu(h, approximate=False),
    "quick_gelu": lambda h: h * jax.nn.sigmoid(1.702 * h),
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_every_activation_is_told_apart_in_every_dtype(act, dtype):
    site = only(lambda x, w, b: ACTIVATIONS[act](x @ w + b), *(a.astype(dtype) for a in (X, W, B)))
    assert site.attrs["activation"] == act
    assert site.formula == ("x @ w + b" if act == "none" else f"{act}(x @ w + b)")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("act", ["none", "relu", "gelu_tanh", "gelu_erf"])
def test_values_and_gradients_are_the_originals_in_every_dtype(act, dtype):
    args = [a.astype(dtype) for a in (X3, W, B)]
    found = agree(lambda x, w, b: ACTIVATIONS[act](x @ w + b), *args, passes="gemm_epilogue")
    assert len(found.candidates) == 1


def test_double_precision_is_fused_in_double_precision():
    with jax.enable_x64(True):
        args = [a.astype(jnp.float64) for a in (X, W, B)]
        for act in ("relu", "gelu_tanh", "gelu_erf"):
            found = agree(lambda x, w, b, act=act: ACTIVATIONS[act](x @ w + b), *args, passes="gemm_epilogue")
            assert [c.attrs["activation"] for c in found.candidates] == [act]


def test_a_bf16_layer_with_f32_parameters_is_found_behind_its_casts():
    half = jnp.bfloat16

    def layer(x, w, b):
        return jax.nn.gelu(x @ w.astype(half) + b.astype(half))

    found = agree(layer, X.astype(half), W, B, passes="gemm_epilogue")
    assert [c.attrs["activation"] for c in found.candidates] == ["gelu_tanh"]
    assert primitives(found.apply()).count("convert_element_type") == 2


def test_two_layers_that_share_weight_and_bias_are_two_sites():
    w, b = normal((4, 4), (4,), seed=6)
    found = agree(lambda x, w, b: RELU(RELU(x @ w + b) @ w + b), X, w, b, passes="gemm_epilogue")
    assert len(found.candidates) == 2


# -- declined, with reasons -------------------------------------------------------------------------------------------


def has_line(sentence):
    return "(test_gemm_epilogue.py:" in sentence


def test_a_returned_preactivation_leaves_the_linear_part_and_names_who_reads_it():
    def fn(x, w, b):
        h = x @ w + b
        return RELU(h), h

    found = agree(fn, X, W, B, passes="gemm_epilogue")
    (site,), (rejection,) = found.candidates, found.rejections
    assert site.attrs["activation"] == "none"
    assert site.notes == (f"linear part only: {rejection.sentence}",)
    assert rejection.code == "escapes"
    assert "relu is not fused" in rejection.sentence
    assert rejection.sentence.endswith("is also returned")
    assert has_line(rejection.sentence)
    assert rejection.edit
    assert "custom_jvp_call" in primitives(found.apply())


def test_a_preactivation_read_by_another_node_names_that_node():
    def fn(x, w, b):
        h = x @ w + b
        return RELU(h) + h.sum()

    (rejection,) = find(fn, X, W, B).rejections
    assert rejection.code == "escapes"
    assert "is also read by" in rejection.sentence
    assert "= reduce_sum" in rejection.sentence


def test_two_functions_of_one_linear_result_leave_the_linear_part():
    def fn(x, w, b):
        h = x @ w + b
        return RELU(h) + jnp.sin(h)

    found = agree(fn, X, W, B, passes="gemm_epilogue")
    assert [c.attrs["activation"] for c in found.candidates] == ["none"]
    assert codes(found) in (["escapes"], ["activation"])


def test_a_product_that_is_read_elsewhere_fuses_nothing():
    def fn(x, w, b):
        y = x @ w
        return RELU(y + b) * jnp.sum(y)

    rejection = declined(fn, X, W, B)
    assert rejection.code == "escapes"
    assert "dot_general" in rejection.sentence
    assert "is also read by" in rejection.sentence
    assert "reduce_sum" in rejection.sentence


def test_an_inner_value_of_the_activation_that_is_read_elsewhere_stops_at_the_linear_part():
    def fn(x, w, b):
        h = x @ w + b
        t = jnp.tanh(0.7978845608 * (h + 0.044715 * h**3))
        return 0.5 * h * (1 + t), t

    found = agree(fn, X, W, B, passes="gemm_epilogue")
    assert [c.attrs["activation"] for c in found.candidates] == ["none"]
    assert "escapes" in codes(found)


UNKNOWN = {
    "leaky_relu": (jax.nn.leaky_relu, "activation"),
    "relu6": (jax.nn.relu6, "activation"),
    "softplus": (jax.nn.softplus, "activation"),
    "gelu with 0.8": (lambda h: 0.5 * h * (1 + jnp.tanh(0.8 * (h + 0.044715 * h**3))), "activation"),
    "where(h < 0, 0, h)": (lambda h: jnp.where(h < 0, 0, h), "gradient"),
    "maximum with 0.1": (lambda h: jnp.maximum(h, 0.1), "activation"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_activation_leaves_the_linear_part_and_says_what_came_nearest(name):
    act, code = UNKNOWN[name]
    found = agree(lambda x, w, b: act(x @ w + b), X, W, B, passes="gemm_epilogue")
    (site,), (rejection,) = found.candidates, found.rejections
    assert site.attrs["activation"] == "none"
    assert rejection.code == code
    assert has_line(rejection.sentence)
    assert "nearest known function is" in rejection.sentence or "gradient is not" in rejection.sentence
    assert rejection.edit


def test_a_known_activation_followed_by_another_is_fused_up_to_the_known_one():
    found = agree(lambda x, w, b: jnp.square(RELU(x @ w + b)), X, W, B, passes="gemm_epilogue")
    assert [c.attrs["activation"] for c in found.candidates] == ["relu"]
    assert not found.rejections


X2, W3 = normal((5, 3, 4), (5, 4, 10), seed=7)
DECLINED = {
    "bias along the rows": (lambda x, w, b: x @ w + b[:, None], (X, W, B[:6]), "bias", "along the rows"),
    "full-tensor bias": (lambda x, w, y: x @ w + y, (X, W, X @ W), "bias", "adds a full tensor [6, 10]"),
    "scalar bias": (lambda x, w: x @ w + 0.5, (X, W), "bias", "adds a scalar"),
    "subtracted bias": (lambda x, w, b: b - x @ w, (X, W, B), "bias", "subtracts"),
    "weight of rank 3": (lambda x, w, b: x @ w + b, (X2, W3, B), "rank", "a weight of rank 3: a batch of matrices"),
    "a vector": (lambda x, w, b: x @ w + b, (X[0], W, B), "rank", "multiplies a vector"),
    "factor before the bias": (
        lambda x, w, b: 0.5 * (x @ w) + b,
        (X, W, B),
        "scalar",
        "multiplied by 0.5 before the bias",
    ),
    "float8": (
        lambda x, w, b: RELU(x @ w + b),
        tuple(a.astype(jnp.float8_e4m3fn) for a in (X, W, B)),
        "dtype",
        "computes in float8_e4m3fn",
    ),
    "integers": (
        lambda x, w, b: RELU(x @ w + b),
        tuple(a.astype(jnp.int8) for a in (X, W, B)),
        "dtype",
        "computes in int8",
    ),
    "a batch of weights and no bias": (lambda x, w: RELU(x @ w), (X2, W3), "rank", "a weight of rank 3"),
    "f32 bias on a bf16 product": (
        lambda x, w, b: x @ w + b,
        (X.astype(jnp.bfloat16), W.astype(jnp.bfloat16), B),
        "dtype",
        "mixes bfloat16, float32",
    ),
    "half in, float out": (
        lambda x, w, b: jnp.matmul(x, w, preferred_element_type=jnp.float32) + b,
        (X.astype(jnp.bfloat16), W.astype(jnp.bfloat16), B),
        "dtype",
        "mixes bfloat16, float32",
    ),
}


@pytest.mark.whole
@pytest.mark.parametrize("name", DECLINED)
def test_what_is_no_such_layer_is_declined_with_code_line_distance_and_node(name):
    fn, args, code, words = DECLINED[name]
    rejection = declined(fn, *args)
    assert rejection.code == code
    assert words in rejection.sentence
    assert has_line(rejection.sentence)
    assert rejection.node_ids
    assert set(rejection.node_ids) <= rejection.site_ids
    assert 0 < rejection.matched <= rejection.total
    assert rejection.source is not None
    assert rejection.source.function.endswith("<lambda>")


def test_a_declined_full_tensor_a_row_bias_and_a_subtraction_suggest_an_edit():
    for name in ("bias along the rows", "full-tensor bias", "subtracted bias"):
        fn, args, *_ = DECLINED[name]
        assert declined(fn, *args).edit


def test_a_residual_connection_is_no_declined_bias():
    """What is added was computed elsewhere: there is no layer with a bias here to decline."""
    found = find(lambda x, w: jnp.sin(x) + x @ w, *normal((6, 4), (4, 4)))
    assert (found.candidates, found.rejections) == ((), ())


def test_relu_before_the_bias_is_a_site_without_the_bias():
    found = agree(lambda x, w, b: RELU(x @ w) + b, X, W, B, passes="gemm_epilogue")
    assert [c.formula for c in found.candidates] == ["relu(x @ w)"]


def test_strict_rank_judges_the_weight_before_any_squeeze():
    def fn(x, w, b):
        return RELU(x @ w + b)

    assert only(fn, X3, W[None], B).attrs["activation"] == "relu"
    rejection = declined(fn, X3, W[None], B, strict_rank=True)
    assert rejection.code == "rank"
    assert "a weight of rank 3" in rejection.sentence
    assert only(fn, X3, W, B, strict_rank=True).attrs["activation"] == "relu"


# -- what a candidate says of itself ----------------------------------------------------------------------------------


def test_residuals_are_listed_with_type_bytes_and_readers():
    def saved_by(act):
        site = only(lambda x, w, b: ACTIVATIONS[act](x @ w + b), X, W, B)
        return [(r.name, r.shape, r.dtype, r.nbytes, r.readers) for r in site.residuals]

    saved = {act: saved_by(act) for act in ("none", "relu", "gelu_tanh")}
    everyone = ("dx", "dw", "dbias")
    assert saved == {
        "none": [],
        "relu": [("mask", (6, 10), "bool", 60, everyone)],
        "gelu_tanh": [("preactivation", (6, 10), "f32", 240, everyone)],
    }


def test_on_a_cpu_the_backend_is_what_xla_runs_anyway_and_says_so():
    site = only(lambda x, w, b: RELU(x @ w + b), X, W, B)
    assert site.same_code
    verdicts = {b.name: b.verdict for b in site.backends}
    assert verdicts == {"xla": "same code", "cublaslt": "unavailable", "cuda": "unavailable"}
    assert "XLA" in site.backends[0].reason


def test_a_candidate_counts_its_nodes_before_and_after():
    site = only(lambda x, w, b: RELU(x @ w + b), X, W, B)
    assert (site.nodes_before, site.nodes_after) == (4, 1)
    assert len(site.node_ids) == 4
    found = find(lambda x, w, b: RELU(x @ w + b), X, W, B)
    assert found.graph.node_count - found.apply().node_count == 4  # the custom_jvp's own inner node goes too


@pytest.mark.parametrize("eps", [1e-7, 1e-10])
def test_an_epsilon_after_an_activation_stays_outside_the_site(eps):
    found = agree(lambda x, w, b: jnp.log(RELU(x @ w + b) + eps), X, W, B, passes="gemm_epilogue")
    assert [c.attrs["activation"] for c in found.candidates] == ["relu"]


def test_a_rule_of_the_users_own_for_jax_nn_relu_keeps_its_gradient():
    straight = jax.custom_jvp(jax.nn.relu.__wrapped__)
    straight.defjvps(lambda g, ans, x: g)
    agree(lambda x, w, b: RELU(jnp.cos(x) @ w + b) + straight(jnp.sin(x) @ w + b), X, W, B, passes="gemm_epilogue")


@pytest.mark.parametrize("transform", [jax.grad, jax.value_and_grad])
def test_a_program_that_is_differentiated_already_is_told_to_fuse_before_that(transform):
    """Where its backward pass cannot be replaced with it: in another branch than its forward."""

    def branch(w, x, b):
        return jax.lax.cond(b[0] > 0, lambda: jax.nn.gelu(x @ w + b), lambda: jnp.sin(x @ w)).sum()

    found = fl.find(transform(branch), W, X, B, passes="gemm_epilogue")
    assert found.rejections
    assert all(
        r.edit == "fuse the function before it is differentiated: jax.grad(fl.fuse(loss))" for r in found.rejections
    )


def test_a_bias_that_a_loop_is_given_broadcast_is_told():
    """`jax.grad` hoists what does not change out of a scan, the broadcast of a bias too."""
    w, b = normal((4, 4), (4,))

    def loop(x):
        full = jnp.broadcast_to(b, x.shape)
        return jax.lax.scan(lambda h, _: (jnp.sin(h @ w + full), None), x, None, length=3)[0]

    found = fl.find(loop, *normal((5, 4)), passes="gemm_epilogue")
    (rejection,) = found.rejections
    assert (rejection.code, rejection.concepts) == ("bias", ("linear",))
    assert "was broadcast to every row before the surrounding loop" in rejection.sentence


def test_rows_that_repeat_themselves_are_rows():
    found = agree(lambda x, w, b: jnp.broadcast_to(x, (3, 6, 4)) @ w + b, X, W, B, passes="gemm_epilogue")
    assert len(found.candidates) + len(found.rejections) == 1


@pytest.mark.parametrize("gradient", [False, True])
def test_a_projection_to_heads_that_are_as_wide_together_as_its_input_is_certified_at_any_size(gradient):
    """768 is an axis here and 12 x 64 there: both have to be reduced alike where the proof is evaluated."""

    def project(x, w, b):
        return jnp.einsum("btk,khd->bthd", x, w) + b

    def back(x, w, b):
        return jnp.einsum("bthd,hdk->btk", x, w) + b

    shapes = {project: ((8, 1024, 768), (768, 12, 64), (12, 64)), back: ((8, 1024, 12, 64), (12, 64, 768), (768,))}
    for fn, sizes in shapes.items():
        args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in sizes]
        step = jax.grad(lambda *a, fn=fn: jnp.sin(fn(*a)).sum(), (0, 1, 2)) if gradient else fn
        found = fl.find(step, *args, passes="gemm_epilogue")
        assert found.counts()["gemm_epilogue"] == 1
        assert "uncertified" not in {r.code for r in found.rejections}
        assert not gradient or found.counts()["gemm_epilogue_grad"] == 1
