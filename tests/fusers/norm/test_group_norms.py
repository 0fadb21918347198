"""Pass layer_norm: a norm of groups of channels, as people write it, is one `group_norm` op; what is nearly one is none."""

from __future__ import annotations

import flax.linen as linen
import haiku
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import fusionlab as fl

from ..checks import (
    EVERYWHERE,
    agree,
    as_exact,
    codes,
    counts_everywhere,
    differentiated,
    in_float64,
    normal,
    primitives,
)

NORM = "layer_norm"
IMAGE, GAMMA, BETA = normal((2, 3, 5, 24), (24,), (24,), seed=2)
LINE = normal((3, 7, 24), seed=4)[0]
SQUARE, ALONG = normal((2, 24, 24, 24), (24,), seed=3)  # as many positions along an axis as channels
OF_IMAGE = normal((2, 24), seed=5)[0]


def mean(x, axes=-1):
    return x.mean(axes, keepdims=True)


def xhat(x, axes=-1, epsilon=1e-6):
    return (x - mean(x, axes)) * lax.rsqrt(x.var(axes, keepdims=True) + epsilon)


def parted(x, groups):
    return x.reshape(*x.shape[:-1], groups, -1)


def inner(x):
    """The axes of the statistics of x with its channels in groups: positions, and the channels of a group."""
    return (*range(1, x.ndim - 2), x.ndim - 1)


def grouped(x, groups=4):
    y = parted(x, groups)
    return xhat(y, inner(y)).reshape(x.shape)


def by_hand(x, g, b):
    return grouped(x) * g + b


def of_linen(x, g, b, groups=8, **options):
    return linen.GroupNorm(num_groups=groups, **options).apply({"params": {"scale": g, "bias": b}}, x)


def of_linen_of_4(x, g, b):
    return of_linen(x, g, b, groups=4)


def of_haiku(x, g, b):
    norm = haiku.without_apply_rng(haiku.transform(lambda x: haiku.GroupNorm(6)(x)))
    return norm.apply({"group_norm": {"scale": g, "offset": b}}, x)


def as_keras(x, g, b, groups=4):
    """Scale and shift made of the statistics, before the groups are joined again; as Keras writes its GroupNormalization."""
    y = parted(x, groups)
    inv = lax.rsqrt(y.var(inner(y), keepdims=True) + 1e-3) * g.reshape(groups, -1)
    return (y * inv + (b.reshape(groups, -1) - mean(y, inner(y)) * inv)).reshape(x.shape)


def divided(x, g, b):
    y = parted(x, 3)
    centred = y - mean(y, inner(y))
    y = centred / jnp.sqrt(mean(centred**2, inner(y)) + 1e-5)
    return b + g * y.reshape(x.shape)


def by_squares(x, g, b):
    y = parted(x, 12)
    m = mean(y, inner(y))
    return ((y - m) / jnp.sqrt(mean(y * y, inner(y)) - m * m + 1e-5)).reshape(x.shape) * g + b


def joined_positions(x, g, b):
    """The positions as one axis, as in ports of PyTorch code."""
    y = x.reshape(x.shape[0], -1, 4, x.shape[-1] // 4)
    y = xhat(y, (1, 3)).reshape(x.shape[0], -1, x.shape[-1])
    return (y * g + b).reshape(x.shape)


def scaled_in_groups(x, g, b):
    y = parted(x, 4)
    return (xhat(y, inner(y)) * parted(g, 4) + parted(b, 4)).reshape(x.shape)


SPELLINGS = {
    "by hand": (by_hand, IMAGE, 4),
    "Flax": (of_linen, IMAGE, 8),
    "Flax, variance of differences": (lambda *a: of_linen(*a, use_fast_variance=False), IMAGE, 8),
    "Haiku": (of_haiku, IMAGE, 6),
    "Keras": (as_keras, IMAGE, 4),
    "divided by the root": (divided, IMAGE, 3),
    "by squares": (by_squares, IMAGE, 12),
    "scaled in groups": (scaled_in_groups, IMAGE, 4),
    "positions along one axis": (by_hand, LINE, 4),
    "one axis of positions, Flax": (of_linen, LINE, 8),
    "as many positions as channels": (by_hand, SQUARE, 4),
}


def site_of(found):
    assert not found.rejections, found.rejections
    (site,) = found.candidates
    assert (site.pass_name, site.op, site.concepts) == ("layer_norm", "group_norm", ("group_norm",))
    return site


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_norm_of_groups_is_found_however_it_is_written(name):
    fn, x, groups = SPELLINGS[name]
    found = as_exact(fn, x, GAMMA, BETA, passes=NORM)
    site = site_of(found)
    assert set(site.leaves) == {"x", "scale", "bias"}
    assert site.formula == "group_norm(x) * scale + bias"
    assert (site.attrs["groups"], site.attrs["batch_axes"], site.attrs["activation"]) == (groups, 1, "none")
    assert not {"rsqrt", "sqrt", "reduce_sum"} & set(primitives(found.apply()))
    assert counts_everywhere(fn, (x, GAMMA, BETA), NORM, 1) == EVERYWHERE


PARTS = {
    "alone": (lambda x: grouped(x), (), "group_norm(x)"),
    "a scale": (lambda x, g: grouped(x) * g, (GAMMA,), "group_norm(x) * scale"),
    "a bias": (lambda x, b: grouped(x) + b, (BETA,), "group_norm(x) + bias"),
    "silu": (lambda x: jax.nn.silu(grouped(x)), (), "silu(group_norm(x))"),
    "swish of all": (lambda *a: jax.nn.swish(of_linen(*a)), (GAMMA, BETA), "silu(group_norm(x) * scale + bias)"),
    "silu in groups": (
        lambda x, g, b: jax.nn.silu(xhat(parted(x, 4), (1, 2, 4)) * parted(g, 4) + parted(b, 4)).reshape(x.shape),
        (GAMMA, BETA),
        "silu(group_norm(x) * scale + bias)",
    ),
    "parameters of unit axes": (
        lambda x, g, b: grouped(x) * g[None, None, None] + b.reshape(1, 1, 1, -1),
        (GAMMA, BETA),
        "group_norm(x) * scale + bias",
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_what_follows_is_fused_with_it(name):
    fn, more, formula = PARTS[name]
    site = site_of(as_exact(fn, IMAGE, *more, passes=NORM))
    assert site.formula == formula
    assert counts_everywhere(fn, (IMAGE, *more), NORM, 1) == EVERYWHERE


OUTSIDE = {
    "gelu": (lambda x: jax.nn.gelu(grouped(x)), (), "tanh"),
    "scaled by data": (lambda x, s: grouped(x) * (1 + s[:, None, None]), (OF_IMAGE,), "mul"),
    "a scale for each group": (
        lambda x, g: (xhat(parted(x, 4), (1, 2, 4)) * g[:4, None]).reshape(x.shape),
        (GAMMA,),
        "mul",
    ),
    "a quick gelu": (lambda x: (y := grouped(x)) * jax.nn.sigmoid(1.702 * y), (), "logistic"),
    "a silu whose gradient overflows": (lambda x: (y := grouped(x)) / (1 + jnp.exp(-y)), (), "exp"),
    "two scales": (lambda x, g, b: grouped(x) * g * b, (GAMMA, BETA), "mul"),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_else_follows_stays_as_it_is(name):
    fn, more, left = OUTSIDE[name]
    found = as_exact(fn, IMAGE, *more, passes=NORM)
    assert site_of(found).attrs["activation"] == "none"
    assert left in primitives(found.apply())


def test_a_scale_along_positions_is_none_of_the_channels():
    fn = lambda x, along: grouped(x) * along[:, None]  # noqa: E731
    found = as_exact(fn, SQUARE, ALONG, passes=NORM)
    assert set(site_of(found).leaves) == {"x"}


def test_a_value_read_elsewhere_ends_the_site_before_it():
    found = as_exact(lambda x, g, b: ((y := by_hand(x, g, b)), jax.nn.silu(y)), IMAGE, GAMMA, BETA, passes=NORM)
    assert site_of(found).formula == "group_norm(x) * scale + bias"
    found = agree(lambda x: (parted(x, 4).sum(-1), grouped(x)), IMAGE, passes=NORM, factor=4)
    assert site_of(found).formula == "group_norm(x)"


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("wide", [False, True])
def test_images_of_16_bits(dtype, wide):
    """Flax takes the statistics in float32 and casts the result; with parameters in float32 or not."""
    x, g, b = (a.astype(dtype) for a in (IMAGE, GAMMA, BETA))
    more = (GAMMA, BETA) if wide else (g, b)
    fn = lambda *a: jax.nn.silu(of_linen(*a, dtype=dtype))  # noqa: E731
    site = site_of(as_exact(fn, x, *more, passes=NORM))
    assert (site.root.dtype, site.leaves["x"].dtype, site.leaves["scale"].dtype) == (dtype, dtype, more[0].dtype)
    assert counts_everywhere(fn, (x, *more), NORM, 1) == EVERYWHERE


def test_images_that_a_batch_of_models_reads():
    """Mapped over images and parameters the scale has no one entry for each channel: the norm alone is the site."""
    many = jax.vmap(by_hand)
    args = normal((3, 2, 3, 5, 24), (3, 24), (3, 24), seed=7)
    found = as_exact(many, *args, passes=NORM)
    assert set(site_of(found).leaves) == {"x"}
    assert site_of(found).attrs["batch_axes"] == 2


def of_variance(x, change, groups=4):
    y = parted(x, groups)
    return ((y - mean(y, inner(y))) * lax.rsqrt(change(y.var(inner(y), keepdims=True)))).reshape(x.shape)


@jax.custom_jvp
def at_least(v):
    return jnp.maximum(v, 0.1)


at_least.defjvp(lambda v, d: (at_least(*v), d[0]))


NEAR = {
    "a sum, not a mean": lambda x: (y := parted(x, 4)) * lax.rsqrt((y * y).sum((1, 2, 4), keepdims=True) + 1e-6),
    "no mean subtracted": lambda x: (y := parted(x, 4)) * lax.rsqrt(y.var((1, 2, 4), keepdims=True) + 1e-6),
    "a root mean square": lambda x: (y := parted(x, 4)) * lax.rsqrt(mean(y * y, (1, 2, 4)) + 1e-6),
    "the mean of another group": lambda x: (
        ((y := parted(x, 4)) - jnp.roll(mean(y, (1, 2, 4)), 1, 3)) * lax.rsqrt(y.var((1, 2, 4), keepdims=True) + 1e-6)
    ),
    "the variance of a layer": lambda x: (
        ((y := parted(x, 4)) - mean(y, (1, 2, 4))) * lax.rsqrt(y.var((1, 2, 3, 4), keepdims=True) + 1e-6)
    ),
    "a sample variance": lambda x: (
        ((y := parted(x, 4)) - mean(y, (1, 2, 4))) * lax.rsqrt(y.var((1, 2, 4), ddof=1, keepdims=True) + 1e-6)
    ),
    "statistics over the batch too": lambda x: (
        ((y := parted(x, 4)) - mean(y, (0, 1, 2, 4))) * lax.rsqrt(y.var((0, 1, 2, 4), keepdims=True) + 1e-6)
    ),
    "epsilon outside the root": lambda x: (
        ((y := parted(x, 4)) - mean(y, (1, 2, 4))) / (y.std((1, 2, 4), keepdims=True) + 1e-6)
    ),
    "a large epsilon": lambda x: xhat(parted(x, 4), (1, 2, 4), 0.5),
    "no epsilon": lambda x: xhat(parted(x, 4), (1, 2, 4), 0.0),
    "another shift": lambda x, g=GAMMA: (
        (y := parted(x, 4)) * (inv := lax.rsqrt(y.var((1, 2, 4), keepdims=True) + 1e-3))
        + (parted(g, 4) - 2 * mean(y, (1, 2, 4)) * inv)
    ),
    "a variance of at least 0.1": lambda x: of_variance(x, lambda v: jnp.maximum(v, 0.1) + 1e-6),
    "a variance of at least epsilon": lambda x: of_variance(x, lambda v: jnp.maximum(v, 1e-6)),
    "a variance of at least 0.1, by a choice": lambda x: of_variance(x, lambda v: jnp.where(v > 0.1, v, 0.1) + 1e-6),
    "a variance of at least 0.1, by a root of a square": lambda x: of_variance(
        x, lambda v: jnp.sqrt(jnp.square(v - 0.05)) + 0.05 + 1e-6
    ),
    "a variance that is clipped": lambda x: of_variance(x, lambda v: jnp.clip(v, 0.0, 50.0) + 1e-6),
    "a variance of at most 50": lambda x: of_variance(x, lambda v: jnp.minimum(v, 50.0) + 1e-6),
    "a variance without its sign": lambda x: of_variance(x, lambda v: jnp.abs(v) + 1e-6),
    "a variance by a function of the user's": lambda x: of_variance(x, lambda v: at_least(v) + 1e-6),
    "a variance with a name": lambda x: of_variance(x, lambda v: checkpoint_name(v, "v") + 1e-6),
    "x of at most 5": lambda x: grouped(jnp.minimum(parted(x, 4), 5.0).reshape(x.shape)) + 0 * x,
    "a difference of at most 5": lambda x: (
        jnp.minimum((y := parted(x, 4)) - mean(y, (1, 2, 4)), 5.0) * lax.rsqrt(y.var((1, 2, 4), keepdims=True) + 1e-6)
    ),
    "a result of at most 9": lambda x: jnp.minimum(
        ((y := parted(x, 4)) - mean(y, (1, 2, 4))) * lax.rsqrt(y.var((1, 2, 4), keepdims=True) + 1e-6), 9.0
    ),
    "a gradient that is stopped": lambda x: (
        ((y := parted(x, 4)) - lax.stop_gradient(mean(y, (1, 2, 4))))
        * lax.rsqrt(y.var((1, 2, 4), keepdims=True) + 1e-6)
    ),
    "positions along one axis alone": lambda x: xhat(parted(x, 4), (2, 4)),
}
# What is a norm all the same: of groups of each line of an image, of all images together, of what stands before it, before what follows.
STILL_ONE = {
    "positions along one axis alone": 2,
    "statistics over the batch too": 0,
    "x of at most 5": 1,
    "a result of at most 9": 1,
}


THRESHOLDS = [name for name in NEAR if name.startswith("a variance")]


@pytest.mark.parametrize("name", THRESHOLDS)
def test_what_has_a_threshold_is_told_by_it(name):
    """Numbers do not tell it: no variance of theirs is near it."""
    (rejection,) = fl.find(NEAR[name], IMAGE, passes=NORM).rejections
    assert rejection.code in ("structure", "custom_rule", "named_residual")
    assert "which the fused op does not have" in rejection.sentence
    assert "use mean and variance unchanged" in rejection.edit


@pytest.mark.parametrize("name", NEAR)
def test_what_is_nearly_one_is_not_taken(name):
    found = as_exact(NEAR[name], IMAGE, passes=NORM)
    if name in STILL_ONE:
        assert site_of(found).attrs["batch_axes"] == STILL_ONE[name]
        return
    assert not found.candidates
    (rejection,) = found.rejections
    assert "if the channels are the last axis" not in rejection.sentence  # they are


FIRST = {
    "split in two": lambda x: xhat(x.reshape(2, 4, 6, 3, 5), (2, 3, 4)).reshape(x.shape),
    "interleaved": lambda x: xhat(x.reshape(2, 6, 4, 3, 5), (1, 3, 4)).reshape(x.shape),
}


@pytest.mark.parametrize("name", FIRST)
def test_channels_first_are_no_site_of_it(name):
    """The op takes them last, and to transpose an image there and back costs more than it saves."""
    x = normal((2, 24, 3, 5), seed=6)[0]
    for c in as_exact(FIRST[name], x, passes=NORM).candidates:
        assert c.op == "layer_norm"


def test_its_rejection_says_what_it_is_and_what_is_taken():
    x = normal((2, 24, 3, 5), seed=6)[0]
    fn = lambda x: xhat(x.reshape(2, 4, 6, 3, 5), (2, 4)).reshape(x.shape)  # noqa: E731
    for program in (fn, differentiated(fn, (x,))):
        found = fl.find(program, x, passes=NORM)
        assert codes(found) == ["axes"]
        (rejection,) = found.rejections
        assert "belongs to a GroupNorm with 4 groups of 6 channels" in rejection.sentence
        assert "if the channels are the last axis" in rejection.sentence
        assert rejection.concepts == ("group_norm",)
        assert "group_norm(x, scale, bias, groups=4)" in rejection.edit


NO_GROUPS = {
    "of each head": lambda x: xhat(parted(x, 4)).reshape(x.shape),
    "of a layer": lambda x: xhat(x, (1, 2, 3)),
    "one group": lambda x: grouped(x, 1),
}


@pytest.mark.parametrize("name", NO_GROUPS)
def test_what_is_no_norm_of_groups_is_not_called_one(name):
    found = agree(NO_GROUPS[name], IMAGE, passes=NORM, factor=4)
    (site,) = found.candidates
    assert site.op == "layer_norm"


LARGE = jax.ShapeDtypeStruct((2, 64, 64, 320), jnp.bfloat16)


@pytest.mark.parametrize(
    ("device", "x", "why"),
    [
        ("sm_90", LARGE, ""),
        ("sm_90", jax.ShapeDtypeStruct((2, 8, 8, 320), jnp.bfloat16), "below"),
        ("sm_80", LARGE, "not on sm_80"),
        (None, LARGE, "on a CPU"),
    ],
)
def test_it_is_fused_where_that_was_measured_faster(device, x, why):
    norm = linen.GroupNorm(32, dtype=x.dtype)
    found = fl.find(lambda x: norm.init_with_output(jax.random.key(0), x)[0], x, device=device)
    (site,) = [c for c in found.candidates if c.op == "group_norm"]
    assert why in site.idle
    assert bool(site.idle) == bool(why)
    assert site.backend.name == ("cuda" if not why else "xla")


def test_the_note_says_what_the_fused_op_does_better():
    (site,) = fl.find(of_linen, IMAGE, GAMMA, BETA, passes=NORM).candidates
    assert any("cancels" in note for note in site.notes)
    far = (IMAGE + np.float32(3000), GAMMA, BETA)
    exact, _ = in_float64(by_hand, far)
    fused, program = (
        np.abs(np.asarray(f(*far), np.float64) - exact).max()
        for f in (fl.fuse(of_linen_of_4, passes=NORM), of_linen_of_4)
    )
    assert fused < 0.01 < program
    (plain,) = fl.find(by_hand, IMAGE, GAMMA, BETA, passes=NORM).candidates
    assert not plain.notes
