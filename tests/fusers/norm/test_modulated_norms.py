"""Norms of diffusion models that data scales and shifts (adaLN): one site each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from ..checks import EVERYWHERE, as_exact, counts_everywhere, normal, primitives

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
