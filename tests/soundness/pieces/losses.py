"""Losses of the outputs of a random program: every float output has a part in it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from .piece import Array, Param


@dataclass(frozen=True)
class Loss:
    """A number made of a program's outputs.

    Attributes:
      fn: (outputs, values of `params`) -> a float scalar.
      params: targets and weights, which are arguments of the step.
      text: in words.
    """

    fn: Callable[[Sequence[Array], Sequence[Array]], Array]
    params: tuple[Param, ...]
    text: str


def _cross_entropy(y: Array, t: Array) -> Array:
    """Over the last axis; over all where that one has one entry, of which a softmax is 1 whatever it is."""
    if y.size < 2:
        return jnp.sum(jnp.square(y - t.astype(y.dtype)))
    axes = -1 if y.shape[-1] > 1 else tuple(range(y.ndim))
    likely = jax.nn.softmax(t.astype(y.dtype), axes)
    return -jnp.mean(jnp.sum(likely * jax.nn.log_softmax(y, axes), axes))


# Name -> (output, an array of its shape) -> number.
WITH_TARGET: dict[str, Callable[[Array, Array], Array]] = {
    "square error": lambda y, t: jnp.mean(jnp.square(y - t.astype(y.dtype))),
    "half square error": lambda y, t: 0.5 * jnp.sum((y - t) ** 2) / max(1, y.size),
    "weighted sum": lambda y, t: jnp.sum(y * t.astype(y.dtype)),
    "absolute error": lambda y, t: jnp.mean(jnp.abs(y - t.astype(y.dtype))),
    "cross-entropy": _cross_entropy,
}
# Name -> output -> number.
ALONE: dict[str, Callable[[Array], Array]] = {
    "mean": jnp.mean,
    "sum": jnp.sum,
    "mean of squares": lambda y: jnp.mean(y * y),
    "mean of sin": lambda y: jnp.mean(jnp.sin(y)),
    "sum of tanh": lambda y: jnp.sum(jnp.tanh(y)),
    "mean of softplus": lambda y: jnp.mean(jax.nn.softplus(y)),
    "smooth absolute": lambda y: jnp.mean(jnp.sqrt(1 + jnp.square(y)) - 1),
    "logsumexp": jax.nn.logsumexp,
}


def loss_of(rng: random.Random, outs: Sequence[jax.ShapeDtypeStruct]) -> Loss:
    """A random loss of outputs of these shapes and dtypes. Outputs of infinities are cut: one would make all gradients NaN."""
    params: list[Param] = []
    terms: list[tuple[int, str, bool, float]] = []
    for i, out in enumerate(outs):
        if not jnp.issubdtype(out.dtype, jnp.floating):
            continue
        name = rng.choice([*WITH_TARGET, *ALONE])
        wide = rng.random() < 0.7
        terms.append((i, name, wide, rng.choice([1.0, 1.0, 0.5])))
        if name in WITH_TARGET:
            params.append(Param(out.shape, "float32" if wide else str(out.dtype), "data"))

    def fn(ys: Sequence[Array], values: Sequence[Array]) -> Array:
        rest, total = iter(values), jnp.zeros((), jnp.float32)
        for i, name, wide, share in terms:
            y = ys[i].astype(jnp.float32) if wide else ys[i]
            if i:  # what escapes may be masked scores
                y = jnp.where(jnp.isfinite(y), y, 0)
            part = WITH_TARGET[name](y, next(rest)) if name in WITH_TARGET else ALONE[name](y)
            total = total + share * part.astype(jnp.float32)
        return total

    return Loss(fn, tuple(params), " + ".join(name for _, name, _, _ in terms))
