"""Programs that are one step from a site of the pass linear_cross_entropy. Not a test module."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .near_miss import NearMiss, normal

X, W = normal((6, 4), (4, 16))
LABELS = np.asarray([0, 3, 15, 7, 1, 2], np.int32)


def near(name: str, code: str, fn: Any, says: str, **rest: Any) -> NearMiss:
    return NearMiss(
        name, "linear_cross_entropy", code, fn, (X, W, LABELS), says=says, mapped=(0,), forms=("plain",), **rest
    )


def picked(z: Any, labels: Any) -> Any:
    return jnp.take_along_axis(z, labels[:, None], axis=-1)[:, 0]


def of_logits(loss: Any) -> Any:
    return lambda x, w, labels: loss(x @ w, labels)


CORPUS = (
    near("another base", "scalar", of_logits(lambda z, y: (jax.nn.logsumexp(z, -1) / np.log(2) - picked(z, y)).mean()), "lse"),
    near("twice the label's logit", "scalar", of_logits(lambda z, y: (jax.nn.logsumexp(z, -1) - 2 * picked(z, y)).mean()), "-2 logit"),
    near("the square", "value", of_logits(lambda z, y: (jax.nn.logsumexp(z, -1) - picked(z, y) ** 2).mean()), "another function"),
    near("half of the logits", "scalar", of_logits(
        lambda z, y: (jax.nn.logsumexp(z / 2, -1) - picked(z, y)).mean()), "-2 logit"),
    near("a stopped logarithm", "stop_gradient", of_logits(
        lambda z, y: (jax.lax.stop_gradient(jax.nn.logsumexp(z, -1)) - picked(z, y)).mean()), "another gradient"),
    near("log-probabilities from -1000 on", "value", of_logits(
        lambda z, y: -picked(jnp.maximum(jax.nn.log_softmax(z), -1000.0), y).mean()), "where logits are large"),
    near("a label's logit of at most 500", "value", of_logits(
        lambda z, y: (jax.nn.logsumexp(z, -1) - picked(jnp.minimum(z, 500.0), y)).mean()), "where logits are large"),
    near("a probability of at least 1e-37", "value", of_logits(
        lambda z, y: -jnp.log(picked(jnp.maximum(jax.nn.softmax(z), 1e-37), y)).mean()), "where logits are large"),
    near("a softmax of some classes", "mask", of_logits(
        lambda z, y: (jax.nn.logsumexp(z, -1, where=jnp.arange(16) < 12) - picked(z, y)).mean()), "of the sum alone"),
    near("logits returned", "escapes", of_logits(lambda z, y: ((jax.nn.logsumexp(z, -1) - picked(z, y)).mean(), z)), "is also returned"),
)  # fmt: skip
