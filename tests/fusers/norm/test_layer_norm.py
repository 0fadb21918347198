"""Pass layer_norm: every spelling of LayerNorm and RMSNorm is found; near misses are declined with reasons."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import fusionlab as fl
from fusionlab.kernels import OPS
from fusionlab.models import transformer

from ..checks import EVERYWHERE, agree, as_exact, counts_everywhere, forward_counts, normal, primitives
from ..libraries import NORMS
from ..test_libraries import varied

X, G, B = normal((3, 5, 24), (24,), (24,))  # B T N, N, N
NORM = "layer_norm"
EPS = 1e-5


def sites(found):
    return [c for c in found.candidates if c.pass_name == NORM]


def fused(fn, *args, **options):
    """The one site, with values and gradients checked and nothing declined."""
    found = agree(fn, *args, passes=NORM, factor=4, **options)
    assert not found.rejections, found.rejections
    (site,) = found.candidates
    assert not {"rsqrt", "sqrt"} & set(primitives(found.apply()))
    return site


def declined(fn, *args):
    found = fl.find(fn, *args, passes=NORM)
    assert not found.candidates, found.candidates
    (rejection,) = found.rejections
    assert "(test_layer_norm.py:" in rejection.sentence
    return rejection


def mean(x, axis: int | tuple[int, ...] = -1):
    return x.mean(axis, keepdims=True)


# -- spellings --------------------------------------------------------------------------------------------------------

VARIANCES = {
    "jnp.var": lambda x: x.var(-1, keepdims=True),
    "mean of squares of the centred": lambda x: mean((x - mean(x)) ** 2),
    "square": lambda x: mean(jnp.square(x - mean(x))),
    "a product": lambda x: mean((x - mean(x)) * (x - mean(x))),
    "E[x^2] - E[x]^2": lambda x: mean(x * x) - mean(x) ** 2,
    "max(0, E[x^2] - E[x]^2)": lambda x: jnp.maximum(0.0, mean(x**2) - mean(x) * mean(x)),
    "max(0, var)": lambda x: jnp.maximum(x.var(-1, keepdims=True), 0.0),
    "sum / N": lambda x: ((x - mean(x)) ** 2).sum(-1, keepdims=True) / x.shape[-1],
    "sum * (1 / N)": lambda x: ((x - mean(x)) ** 2).sum(-1, keepdims=True) * (1 / x.shape[-1]),
    "without keepdims": lambda x: x.var(-1)[..., None],
}
DIVISIONS = {
    "* rsqrt": lambda c, v: c * lax.rsqrt(v + EPS),
    "/ sqrt": lambda c, v: c / jnp.sqrt(v + EPS),
    "* (1 / sqrt)": lambda c, v: c * (1 / jnp.sqrt(v + EPS)),
    "reciprocal": lambda c, v: jnp.reciprocal(jnp.sqrt(EPS + v)) * c,
    "** -0.5": lambda c, v: c * (v + EPS) ** -0.5,
    "/ ** 0.5": lambda c, v: c / (v + EPS) ** 0.5,
}


@pytest.mark.parametrize("variance", VARIANCES)
def test_every_spelling_of_the_variance_is_found(variance):
    site = fused(lambda x: (x - mean(x)) * lax.rsqrt(VARIANCES[variance](x) + EPS) * G + B, X)
    assert site.attrs == {"kind": "layer", "epsilon": 1e-5, "axis": 2}
    assert site.formula == "layer_norm(x) * scale + bias"
    assert set(site.leaves) == {"x", "scale", "bias"}


@pytest.mark.parametrize("division", DIVISIONS)
def test_every_spelling_of_the_division_is_found(division):
    assert fused(lambda x: DIVISIONS[division](x - mean(x), x.var(-1, keepdims=True)), X).attrs["kind"] == "layer"
    assert fused(lambda x: DIVISIONS[division](x, mean(x * x)), X).attrs["kind"] == "rms"


INVERSE = lambda x: lax.rsqrt(x.var(-1, keepdims=True) + EPS)  # noqa: E731
SPREAD_OUT = {
    "x * inv + (bias - mean * inv)": (lambda x, g, b: (lambda i: x * i + (b - mean(x) * i))(INVERSE(x) * g), "gb"),
    "x * inv + (-mean * inv + bias)": (lambda x, g, b: (lambda i: x * i + (-mean(x) * i + b))(INVERSE(x) * g), "gb"),
    "x * inv - mean * inv + bias": (lambda x, g, b: (lambda i: x * i - mean(x) * i + b)(INVERSE(x) * g), "gb"),
    "without a bias": (lambda x, g, b: (lambda i: x * i - mean(x) * i)(g * INVERSE(x)), "g"),
    "without a scale": (lambda x, g, b: (lambda i: x * i + (b - mean(x) * i))(INVERSE(x)), "b"),
    "without either": (lambda x, g, b: (lambda i: i * x - i * mean(x))(INVERSE(x)), ""),
    "the scale behind": (lambda x, g, b: (lambda i: (x * i - mean(x) * i) * g + b)(INVERSE(x)), "gb"),
    "the scale twice": (lambda x, g, b: (lambda i: x * i * g + (b - mean(x) * g * i))(INVERSE(x)), "gb"),
    "two roots": (lambda x, g, b: x * INVERSE(x) * g - mean(x) * INVERSE(x) * g + b, "gb"),
    "quotients": (lambda x, g, b: (lambda s: x / s - mean(x) / s + b)(jnp.sqrt(x.var(-1, keepdims=True) + EPS)), "b"),
    "E[x^2] - E[x]^2": (
        lambda x, g, b: (lambda i: x * i + (b - mean(x) * i))(lax.rsqrt(mean(x * x) - mean(x) ** 2 + EPS) * g),
        "gb",
    ),
    "parameters of x's rank": (
        lambda x, g, b: (lambda i: x * i + (b[None, None] - mean(x) * i))(INVERSE(x) * g.reshape(1, 1, -1)),
        "gb",
    ),
    "in float32": (
        lambda x, g, b: (lambda y: y * (i := INVERSE(y) * g) + (b - mean(y) * i))(x.astype("float32")).astype(x.dtype),
        "gb",
    ),
    "a residual behind": (lambda x, g, b: x + (lambda i: x * i + (b - mean(x) * i))(INVERSE(x) * g), "gb"),
    "parameters of other ranks": (
        lambda x, g, b: (x - mean(x)) * INVERSE(x) * jnp.moveaxis(g[:, None], 0, 1) + b[None, None, :],
        "gb",
    ),
}


@pytest.mark.parametrize("name", SPREAD_OUT)
def test_a_norm_as_a_scale_and_a_shift_of_x_is_a_norm(name):
    fn, vectors = SPREAD_OUT[name]
    found = as_exact(fn, X, G, B, passes=NORM)
    (site,) = found.candidates
    assert not found.rejections
    assert site.attrs["kind"] == "layer"
    assert set(site.leaves) == {"x", *({"g": "scale", "b": "bias"}[v] for v in vectors)}
    assert not {"rsqrt", "sqrt"} & set(primitives(found.apply()))
    assert counts_everywhere(fn, (X, G, B), NORM) == EVERYWHERE


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_scale_and_a_shift_in_16_bits_is_a_norm(dtype):
    fn, _ = SPREAD_OUT["x * inv + (bias - mean * inv)"]
    args = tuple(a.astype(dtype) for a in (X, G, B))
    assert len(agree(fn, *args, passes=NORM, factor=4).candidates) == 1


BY_PRODUCTS = {
    "einsum": lambda x: x * lax.rsqrt(jnp.einsum("...d,...d->...", x, x)[..., None] / 24 + EPS),
    "vecdot": lambda x: x / jnp.sqrt(jnp.vecdot(x, x)[..., None] * (1 / 24) + EPS),
    "dot_general": lambda x: (
        x * lax.rsqrt(lax.dot_general(x, x, (((2,), (2,)), ((0, 1), (0, 1))))[..., None] / 24 + EPS)
    ),
    "einsum of the centred": lambda x: (
        (c := x - mean(x)) * lax.rsqrt(jnp.einsum("btd,btd->bt", c, c)[..., None] / 24 + EPS)
    ),
    "a product with ones": lambda x: x * lax.rsqrt((x * x) @ jnp.ones((24, 1)) / 24 + EPS),
    "a product with shares": lambda x: x * lax.rsqrt((x * x) @ jnp.full((24, 1), 1 / 24) + EPS),
    "a mean by a product": lambda x: (c := x - x @ jnp.ones((24, 1)) / 24) * lax.rsqrt(mean(c * c) + EPS),
}


@pytest.mark.parametrize("name", BY_PRODUCTS)
def test_means_by_products_are_means(name):
    fn = lambda x, g: BY_PRODUCTS[name](x) * g  # noqa: E731
    found = as_exact(fn, X, G, passes=NORM)
    (site,) = found.candidates
    assert set(site.leaves) == {"x", "scale"}
    assert not {"rsqrt", "sqrt", "dot_general"} & set(primitives(found.apply()))
    assert counts_everywhere(fn, (X, G), NORM) == EVERYWHERE


def xhat(x):
    return (x - mean(x)) / jnp.sqrt(x.var(-1, keepdims=True) + EPS)


AFFINE = {
    "scale last, then bias": (lambda x, g, b: xhat(x) * g + b, " * scale + bias"),
    "bias first in the add": (lambda x, g, b: b + g * xhat(x), " * scale + bias"),
    "scale folded into the root": (
        lambda x, g, b: (x - mean(x)) * (lax.rsqrt(x.var(-1, keepdims=True) + EPS) * g) + b,
        " * scale + bias",
    ),
    "scale on the centred first": (
        lambda x, g, b: g * (x - mean(x)) * lax.rsqrt(x.var(-1, keepdims=True) + EPS) + b,
        " * scale + bias",
    ),
    "1 + scale": (lambda x, g, b: xhat(x) * (1 + g) + b, " * scale + bias"),
    "a scale made of two": (lambda x, g, b: xhat(x) * (g * b) + b, " * scale + bias"),
    "scale alone": (lambda x, g, b: xhat(x) * g, " * scale"),
    "bias alone": (lambda x, g, b: xhat(x) + b, " + bias"),
    "one vector as scale and bias": (lambda x, g, b: xhat(x) * g + g, " * scale + bias"),
    "neither": (lambda x, g, b: xhat(x), ""),
    "a number after": (lambda x, g, b: 2 * (xhat(x) * g), " * scale"),
    "a scale of each row": (lambda x, g, b: xhat(x) * x[:, :1, :1] + b, ""),
    "a full tensor added": (lambda x, g, b: xhat(x) * g + jnp.cos(x), " * scale"),
    "a residual": (lambda x, g, b: x + (xhat(x) * g + b), " * scale + bias"),
}


@pytest.mark.parametrize("name", AFFINE)
def test_scale_and_bias_are_part_of_the_site_where_they_are_vectors_of_features(name):
    fn, after = AFFINE[name]
    assert fused(fn, X, G, B).formula == "layer_norm(x)" + after


def llama(x, g, before):
    h = x.astype(jnp.float32)
    h = h * lax.rsqrt(mean(h**2) + 1e-6)
    return (g * h).astype(x.dtype) if before else g * h.astype(x.dtype)


RMS = {
    "x * rsqrt": lambda x, g: x * lax.rsqrt(mean(x**2) + 1e-6) * g,
    "x / sqrt": lambda x, g: g * (x / jnp.sqrt(mean(jnp.square(x)) + 1e-6)),
    "scale first": lambda x, g: (x * g) * lax.rsqrt(mean(x * x) + 1e-6),
    "Gemma, 1 + scale": lambda x, g: x * lax.rsqrt(mean(jnp.square(x)) + 1e-6) * (1 + g),
    "Llama, scale before the cast": functools.partial(llama, before=True),
    "Llama, scale after the cast": functools.partial(llama, before=False),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", RMS)
def test_every_spelling_of_rms_norm_is_found_in_f32_and_in_bf16(name, dtype):
    site = fused(RMS[name], X.astype(dtype), G.astype(dtype))
    assert (site.attrs["kind"], site.formula) == ("rms", "rms_norm(x) * scale")
    assert site.leaves["x"].dtype == site.leaves["scale"].dtype == site.root.dtype == dtype


def test_float32_parameters_of_a_bf16_model_are_read_as_they_are():
    site = fused(RMS["Llama, scale before the cast"], X.astype(jnp.bfloat16), G)
    assert {n: str(v.dtype) for n, v in site.leaves.items()} == {"x": "bfloat16", "scale": "float32"}
    assert site.root.dtype == jnp.bfloat16
    site = fused(lambda x: xhat(x.astype(jnp.float32)) * G + B, X.astype(jnp.bfloat16))
    assert (site.leaves["x"].dtype, site.root.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_norm_computed_in_16_bits_is_a_site(dtype):
    site = fused(lambda x, g, b: xhat(x) * g + b, *(a.astype(dtype) for a in (X, G, B)))
    assert site.root.dtype == dtype


def test_jax_nn_standardize_is_found():
    assert fused(jax.nn.standardize, X).formula == "layer_norm(x)"


def test_what_makes_x_is_no_part_of_it():
    """A product, a multiple, a power: a norm of squares must not mix its own square with theirs."""
    for make in (lambda x: x * jax.nn.sigmoid(x), lambda x: 0.3 * x, lambda x: x**2, lambda x: x * x * jnp.cos(x)):
        for norm in (lambda h: RMS["x * rsqrt"](h, G), lambda h: jax.nn.standardize(h) * G):
            site = fused(lambda x, make=make, norm=norm: norm(make(x)), X)
            assert site.leaves["x"].shape == X.shape
            assert "scale" in site.leaves


def test_a_difference_of_two_is_an_x_like_any_other():
    assert fused(lambda x, y: RMS["x * rsqrt"](x - y, G), X, 2 * X[::-1]).attrs["kind"] == "rms"
    assert fused(lambda x, y: xhat(x - y), X, 2 * X[::-1]).attrs["kind"] == "layer"


# -- axes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_any_one_axis_may_be_normalised_over(axis):
    n = X.shape[axis]
    vector = G[:n].reshape([n if d == axis else 1 for d in range(3)])

    def norm(x):
        return (x - mean(x, axis)) * lax.rsqrt(x.var(axis, keepdims=True) + EPS) * vector + vector

    site = fused(norm, X)
    assert site.attrs["axis"] == axis
    assert site.formula == "layer_norm(x) * scale + bias"


def test_the_last_axes_are_merged():
    def norm(x, g):
        axes = (-2, -1)
        return (x - mean(x, axes)) * lax.rsqrt(x.var(axes, keepdims=True) + EPS) * g

    site = fused(norm, X, *normal((5, 24), seed=3))
    assert site.formula == "layer_norm(x) * scale"


def test_several_axes_that_are_not_the_last_are_declined():
    rejection = declined(lambda x: (x - mean(x, (0, 1))) * lax.rsqrt(x.var((0, 1), keepdims=True) + EPS), X)
    assert rejection.code == "axes"
    assert "over axes (0, 1) of [3, 5, 24]" in rejection.sentence


@pytest.mark.parametrize("shape", [(24,), (1, 24), (24, 24), (2, 1, 24), (2, 3, 4, 24)])
def test_any_number_of_rows(shape):
    fused(lambda x: xhat(x) * G + B, *normal(shape, seed=4))


def test_a_transposed_x_is_normalised_over_the_axis_it_is_read_along():
    site = fused(lambda x: xhat(x.swapaxes(0, 2)) * G[:3] + B[:3], X)
    assert site.attrs["axis"] == 2


def test_vmap_scan_and_remat_around_a_norm_keep_it_a_site():
    fused(jax.vmap(jax.vmap(lambda x: xhat(x) * G + B)), X)
    fused(jax.checkpoint(lambda x: xhat(x) * G + B), X)

    def scanned(x, gs):
        return lax.scan(lambda h, g: (xhat(h) * g + h, ()), x, gs)[0]

    found = agree(scanned, X, *normal((3, 24), seed=5), passes=NORM, factor=20)
    assert [c.formula for c in found.candidates] == ["layer_norm(x) * scale"]
    assert found.candidates[0].block_path


# -- near misses ------------------------------------------------------------------------------------------------------


def normed(centred=lambda x: x - mean(x), variance=lambda x: x.var(-1, keepdims=True), epsilon=EPS):
    return lambda x: centred(x) * lax.rsqrt(variance(x) + epsilon) * G


def other_square():
    @jax.custom_jvp
    def square(x):
        return x * x

    square.defjvp(lambda x, t: (x[0] * x[0], 3 * x[0] * t[0]))
    return square


NEAR_MISSES = {
    "epsilon outside the root": (lambda x: (x - mean(x)) / (x.std(-1, keepdims=True) + EPS), "structure"),
    "epsilon outside, of squares": (lambda x: x / (jnp.sqrt(mean(x * x)) + EPS) * G, "structure"),
    "no epsilon": (lambda x: (x - mean(x)) / x.std(-1, keepdims=True), "structure"),
    "ddof=1": (normed(variance=lambda x: x.var(-1, keepdims=True, ddof=1)), "scalar"),
    "1/(N - 1) in both": (
        normed(
            lambda x: x - x.sum(-1, keepdims=True) / 23,
            lambda x: ((x - x.sum(-1, keepdims=True) / 23) ** 2).sum(-1, keepdims=True) / 23,
        ),
        "scalar",
    ),
    "1/(N + 1) of squares": (lambda x: x * lax.rsqrt((x * x).sum(-1, keepdims=True) / 25 + EPS), "scalar"),
    "twice the variance": (normed(variance=lambda x: 2 * x.var(-1, keepdims=True)), "scalar"),
    "a large epsilon": (normed(epsilon=1e-2), "scalar"),
    "a negative epsilon": (normed(epsilon=-1e-5), "scalar"),
    "mean over another axis": (normed(lambda x: x - mean(x, 1)), "axes"),
    "variance over another axis": (normed(variance=lambda x: x.var(1, keepdims=True)), "axes"),
    "half the mean": (normed(lambda x: x - 0.5 * mean(x)), "structure"),
    "twice x less its mean": (normed(lambda x: 2 * x - mean(x)), "scalar"),
    "a variance floor": (normed(variance=lambda x: jnp.maximum(1e-3, x.var(-1, keepdims=True))), "scalar"),
    "the fourth root": (lambda x: (x - mean(x)) * (x.var(-1, keepdims=True) + EPS) ** -0.25, "structure"),
    "mean of the absolute": (lambda x: x / jnp.sqrt(mean(jnp.abs(x)) + EPS), "structure"),
    "gradient stopped at the variance": (
        normed(variance=lambda x: lax.stop_gradient(x.var(-1, keepdims=True))),
        "stop_gradient",
    ),
    "gradient stopped at the mean": (normed(lambda x: x - lax.stop_gradient(mean(x))), "stop_gradient"),
    "gradient stopped at the root": (
        lambda x: (x - mean(x)) * lax.stop_gradient(lax.rsqrt(x.var(-1, keepdims=True) + EPS)),
        "stop_gradient",
    ),
    "a named variance": (normed(variance=lambda x: checkpoint_name(x.var(-1, keepdims=True), "v")), "named_residual"),
    "a square with a derivative of its own": (lambda x: x * lax.rsqrt(mean(other_square()(x)) + EPS), "custom_rule"),
    "a traced epsilon": (lambda x: (x - mean(x)) * lax.rsqrt(x.var(-1, keepdims=True) + x[0, 0, 0] ** 2), "structure"),
}


@pytest.mark.whole
@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_near_miss_is_declined_and_stays_right(name):
    fn, code = NEAR_MISSES[name]
    found = agree(fn, X, passes=NORM, factor=4)
    assert not found.candidates
    assert [r.code for r in found.rejections] == [code], found.rejections
    (rejection,) = found.rejections
    assert rejection.sentence.count("(test_layer_norm.py:") >= 1


@pytest.mark.parametrize("size", [512, 4096])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_sample_variance_is_declined_at_any_size(size, dtype):
    """1/(N - 1) is nearer to 1/N than a bfloat16 tells: the constant itself is looked at."""
    x = jax.ShapeDtypeStruct((2, size), dtype)
    assert declined(lambda x: (x - mean(x)) * lax.rsqrt(x.var(-1, keepdims=True, ddof=1) + EPS), x).code == "scalar"
    assert len(sites(fl.find(lambda x: (x - mean(x)) * lax.rsqrt(x.var(-1, keepdims=True) + EPS), x))) == 1


def test_rows_as_many_as_features_are_told_apart_without_computing_at_full_size():
    x = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)
    (site,) = sites(fl.find(lambda x: xhat(x), x))
    assert site.attrs["axis"] == 1


READ_ELSEWHERE = {
    "the mean": (lambda x: (xhat(x), mean(x))[0], 1),
    "the variance returned": (lambda x: ((x - mean(x)) * lax.rsqrt((v := x.var(-1, keepdims=True)) + EPS), v), 0),
    "the root read again": (lambda x: ((x - mean(x)) * (r := lax.rsqrt(x.var(-1, keepdims=True) + EPS))) + r, 0),
    "the centred returned": (lambda x: ((c := x - mean(x)) * lax.rsqrt(mean(c**2) + EPS), c), 0),
}


@pytest.mark.parametrize("name", READ_ELSEWHERE)
def test_statistics_that_are_read_elsewhere_decline_the_site(name):
    fn, count = READ_ELSEWHERE[name]
    found = fl.find(fn, X, passes=NORM)
    assert len(found.candidates) == count
    assert [r.code for r in found.rejections] == ["escapes"] * (1 - count)


def test_what_is_read_after_the_norm_does_not_escape():
    """The normalised value, read twice: the scale stays outside the site."""

    def norm(x):
        h = xhat(x)
        return h * G + B, jnp.tanh(h)

    assert fused(norm, X).formula == "layer_norm(x)"


def test_statistics_rounded_more_than_x_are_declined():
    def norm(x):
        variance = x.var(-1, keepdims=True).astype(jnp.bfloat16).astype(jnp.float32)
        return (x - mean(x)) * lax.rsqrt(variance + EPS) * G.astype(jnp.bfloat16)

    rejection = declined(norm, X)
    assert rejection.code == "dtype"
    assert "rounds to bfloat16" in rejection.sentence


def test_a_custom_derivative_around_a_norm_keeps_it_from_being_fused():
    @jax.custom_vjp
    def norm(x):
        return xhat(x)

    norm.defvjp(lambda x: (xhat(x), x), lambda x, ct: (2 * ct,))
    found = agree(norm, X, passes=NORM, factor=4)
    assert [r.code for r in found.rejections] == ["custom_rule"]


NO_SITES = {
    "a standard deviation": lambda x: x.std(-1) + 1.0,
    "the variance of another": lambda x: (x - mean(x)) * lax.rsqrt(jnp.cos(x).var(-1, keepdims=True) + EPS),
    "a root of x": lambda x: x * lax.rsqrt(jnp.abs(x) + EPS),
    "clipping by the global norm": lambda x: x * jnp.minimum(1.0, 1.0 / jnp.sqrt(jnp.sum(x * x) + 1e-6)),
    "inference of a batch norm": lambda x: (x - B) * lax.rsqrt(G**2 + EPS) * G + B,
    "an Adam step": lambda x: x / (jnp.sqrt(0.999 * x + 0.001 * x * x) + 1e-8),
}


@pytest.mark.parametrize("name", NO_SITES)
def test_what_is_no_norm_is_not_mentioned(name):
    found = fl.find(NO_SITES[name], X, passes=NORM)
    assert not found.candidates
    assert not found.rejections


@pytest.mark.parametrize(
    "length",
    [lambda x: jnp.sqrt((x * x).sum(-1, keepdims=True) + EPS), lambda x: jnp.linalg.norm(x, axis=-1, keepdims=True)],
    ids=["by hand", "linalg"],
)
def test_rows_of_length_one_are_told_from_those_of_mean_square_one(length):
    (told,) = fl.find(lambda x: x / length(x), X, passes=NORM).rejections
    assert (told.code, "the root of a sum of squares, not of their mean" in told.sentence) == ("scalar", True)
    assert "jnp.mean" in told.edit


# -- whole models -----------------------------------------------------------------------------------------------------

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("library", NORMS)
def test_a_library_norm_is_found_with_its_scale(library, kind, dtype):
    fn, args = NORMS[library](kind, DTYPES[dtype])
    found = agree(fn, *varied(args), passes=NORM, factor=4)
    (site,) = found.candidates
    assert not found.rejections
    assert site.attrs["kind"] == kind
    assert site.leaves["x"].dtype == site.root.dtype == DTYPES[dtype]
    assert {"x", "scale"} <= set(site.leaves)


def test_a_transformer_block_shows_its_two_norms_beside_its_products_and_its_attention():
    params = transformer.init(jax.random.key(0), 2, 24)
    x = transformer.inputs(jax.random.key(1), 2, 10, 24)
    encoder = functools.partial(transformer.encoder, heads=3)
    found = agree(encoder, params, x, factor=20)
    assert forward_counts(found) == {"gemm_epilogue": 12, "dot_product_attention": 2, NORM: 4}
    assert [c.id for c in sites(found)] == [f"layer_norm@layer_{i}/ln{k}#1" for i in (0, 1) for k in (1, 2)]
    assert not found.rejections
    again = fl.find(found.apply([c.id for c in found.candidates]))
    assert not again.candidates
    assert not again.rejections


def test_a_differentiated_program_is_told_to_fuse_before_that():
    """Where its backward pass cannot be replaced with it: in another branch than its forward."""
    norm = fl.find(jax.grad(lambda x: (xhat(x) * G + B).sum() ** 2), X, passes=NORM)
    assert norm.counts() == {NORM: 1, f"{NORM}_grad": 1}
    branch = lambda x: jax.lax.cond(x.sum() > 0, lambda x: xhat(x) * G + B, jnp.sin, x)  # noqa: E731
    found = fl.find(jax.grad(lambda x: branch(x).sum() ** 2), X, passes=NORM)
    (rejection,) = found.rejections
    assert rejection.code == "escapes"
    assert "before it is differentiated" in str(rejection.edit)


def test_a_post_norm_after_a_layer_overlaps_with_nothing():
    w, b = normal((24, 24), (24,), seed=6)

    def layer(x):
        h = x + jax.nn.gelu(x @ w + b)
        return xhat(h) * G + B

    found = agree(layer, X, factor=20)
    assert forward_counts(found) == {"gemm_epilogue": 1, "dot_product_attention": 0, NORM: 1}
    assert not found.rejections


def test_residuals_and_backends_are_those_of_the_op():
    site = fused(lambda x: xhat(x) * G + B, X)
    assert [(r.name, r.shape) for r in site.residuals] == [("mean", (3, 5)), ("rstd", (3, 5))]
    assert site.same_code
    assert {v.name: v.verdict for v in site.backends} == dict.fromkeys(
        OPS["layer_norm"].implementations, "unavailable"
    ) | {"xla": "same code"}


def test_f64_is_a_site():
    with jax.enable_x64(True):
        x = np.random.default_rng(0).normal(size=(3, 24))
        (site,) = sites(fl.find(lambda x: xhat(x), x))
        assert site.attrs["epsilon"] == pytest.approx(EPS, rel=1e-12)
        np.testing.assert_allclose(fl.fuse(xhat)(x), xhat(jnp.asarray(x)), rtol=1e-12)


def test_a_variance_that_cancels_is_named_in_a_note_and_a_two_pass_one_is_not():
    def by_squares(x):
        centre = mean(x)
        return (x - centre) * jax.lax.rsqrt(mean(x * x) - centre * centre + 1e-5)

    (site,) = fl.find(by_squares, X, passes=NORM).candidates
    assert "cancels" in site.notes[0]
    (site,) = fl.find(
        lambda x: (x - mean(x)) * jax.lax.rsqrt(mean((x - mean(x)) ** 2) + 1e-5), X, passes=NORM
    ).candidates
    assert not [n for n in site.notes if "cancels" in n]
