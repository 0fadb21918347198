"""Norms of diffusion models: scaled and shifted by data (adaLN), which are one site each, and of groups of channels, which are told."""

from __future__ import annotations

import flax.linen as linen
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import fusionlab as fl

from .checks import EVERYWHERE, agree, as_exact, codes, counts_everywhere, differentiated, normal, primitives

NORM = "layer_norm"
X, S, T, GATE, G, B = normal((2, 5, 24), (2, 24), (2, 24), (2, 24), (24,), (24,))
C, W, BIAS = normal((2, 6), (6, 72), (72,), seed=1)


def mean(x, axes=-1):
    return x.mean(axes, keepdims=True)


def xhat(x, axes=-1, epsilon=1e-6):
    return (x - mean(x, axes)) * lax.rsqrt(x.var(axes, keepdims=True) + epsilon)


def rms(x):
    return x * lax.rsqrt(mean(x * x) + 1e-6)


def conditioned(x, c, w, b):
    """As in a diffusion transformer: scale, shift and gate are a linear layer of what the model is conditioned on."""
    shift, scale, gate = jnp.split(jax.nn.silu(c) @ w + b, 3, -1)
    return x + gate[:, None] * jnp.sin(xhat(x) * (1 + scale[:, None]) + shift[:, None])


MODULATED = {
    "adaLN": (lambda x, s, t: xhat(x) * (1 + s[:, None]) + t[:, None], (X, S, T), 3),
    "adaLN with parameters": (
        lambda x, s, t, g, b: (xhat(x) * g + b) * (1 + s[:, None]) + t[:, None],
        (X, S, T, G, B),
        3,
    ),
    "adaLN of a root mean square": (lambda x, s, t: rms(x) * (1 + s[:, None]) + t[:, None], (X, S, T), 3),
    "a scale alone": (lambda x, s: xhat(x) * s[:, None], (X, S), 2),
    "a gate behind": (
        lambda x, s, t, z: x + z[:, None] * (xhat(x) * (1 + s[:, None]) + t[:, None]),
        (X, S, T, GATE),
        4,
    ),
    "of a linear layer": (conditioned, (X, C, W, BIAS), 2),
}


@pytest.mark.parametrize("name", MODULATED)
def test_a_norm_that_data_scales_and_shifts_is_one_site_of_the_plain_norm(name):
    fn, args, mapped = MODULATED[name]
    found = as_exact(fn, *args, passes=NORM)
    (site,) = found.candidates
    assert not found.rejections
    assert site.leaves["x"].shape == (2, 5, 24)
    assert not {leaf for leaf in site.leaves.values() if leaf.shape[:1] == (2,)} - {site.leaves["x"]}
    assert "rsqrt" not in primitives(found.apply())
    assert counts_everywhere(fn, args, NORM, mapped) == EVERYWHERE


# -- groups of channels ---------------------------------------------------------------------------------------------------

IMAGE, GAMMA, BETA = normal((2, 8, 8, 32), (32,), (32,), seed=2)
SQUARE = normal((2, 32, 32, 32), seed=3)[0]  # as many positions along an axis as channels


def grouped(x, groups=4):
    y = x.reshape(*x.shape[:3], groups, x.shape[3] // groups)
    return xhat(y, (1, 2, 4)).reshape(x.shape)


def shifted(x, groups=4):
    """As a scale and a shift, by statistics of the groups."""
    y = x.reshape(*x.shape[:3], groups, -1)
    inv = lax.rsqrt(y.var((1, 2, 4), keepdims=True) + 1e-3) * GAMMA.reshape(groups, -1)
    return (y * inv + (BETA.reshape(groups, -1) - mean(y, (1, 2, 4)) * inv)).reshape(x.shape)


def of_linen(x):
    module = linen.GroupNorm(num_groups=8)
    return module.apply({"params": {"scale": GAMMA, "bias": BETA}}, x)


GROUPED = {
    "by hand": (lambda x: grouped(x) * GAMMA + BETA, IMAGE, "4 groups of 8"),
    "flax linen": (of_linen, IMAGE, "8 groups of 4"),
    "a scale and a shift": (shifted, IMAGE, "4 groups of 8"),
    "silu behind": (lambda x: jax.nn.silu(of_linen(x)), IMAGE, "8 groups of 4"),
    "as many positions as channels": (lambda x: jax.nn.silu(grouped(x, 8)), SQUARE, "8 groups of 4"),
    "channels first": (
        lambda x: xhat(x.reshape(2, 2, 4, 8, 32), (2, 4)).reshape(x.shape),
        IMAGE,
        "2 groups of 4",
    ),
}


@pytest.mark.parametrize("name", GROUPED)
def test_a_norm_of_groups_is_told_by_its_name(name):
    fn, x, groups = GROUPED[name]
    found = fl.find(fn, x, passes=NORM)
    assert codes(found) == ["axes"]
    (rejection,) = found.rejections
    assert f"a GroupNorm, of {groups} channels" in rejection.sentence
    assert rejection.concepts == ("group_norm",)
    assert f"group_norm(x, scale, bias, groups={groups[0]})" in rejection.edit
    step = fl.find(differentiated(fn, (x,)), x, passes=NORM)
    assert [(r.code, "GroupNorm" in r.sentence) for r in step.rejections] == [("axes", True)]


@pytest.mark.parametrize(
    "near",
    [lambda x: xhat(x.reshape(2, 8, 8, 4, 8)).reshape(x.shape), lambda x: xhat(x, (1, 2, 3)), lambda x: grouped(x, 1)],
    ids=["of each head", "of a layer", "one group"],
)
def test_what_is_no_norm_of_groups_is_not_called_one(near):
    found = agree(near, IMAGE, passes=NORM, factor=4)
    assert found.candidates
    assert not any("GroupNorm" in r.sentence for r in found.rejections)
