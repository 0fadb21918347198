"""The losses that `linear_cross_entropy` stands for, as users write them, and their operands."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = Any


def operands(
    rows: tuple[int, ...], features: int, size: int, dtype: Any = "float32", seed: int = 0
) -> tuple[Array, Array, Array, Array, Array]:
    """x, w, labels, bias and weights; the first label is ignored, the second too large."""
    rng = np.random.default_rng(seed)
    x, bias, weights = rng.normal(size=(*rows, features)), rng.normal(size=size), rng.random(rows)
    w = 2 * rng.normal(size=(features, size)) / features**0.5
    labels = rng.integers(0, size, size=rows)
    if labels.size > 1:
        labels.flat[0], labels.flat[1], weights.flat[0] = -100, size + 2, 0
    return *(jnp.asarray(a, dtype) for a in (x, w)), jnp.asarray(labels), jnp.asarray(bias), jnp.asarray(weights)


def picked(h: Array, labels: Array, out_of_range: str) -> Array:
    size = h.shape[-1]
    inside = (labels >= 0) & (labels < size)
    if out_of_range == "zero":
        return jnp.sum(jax.nn.one_hot(labels, size, dtype=h.dtype) * h, -1)
    if out_of_range == "nan":
        return jnp.take_along_axis(h, jnp.where(labels < 0, size, labels)[..., None], -1)[..., 0]
    found = jnp.take_along_axis(h, jnp.clip(labels, 0, size - 1)[..., None], -1)[..., 0]
    return found if out_of_range == "clip" else jnp.where(inside, found, jax.lax.stop_gradient(found))


def original(
    x: Array,
    w: Array,
    labels: Array,
    bias: Array | None = None,
    weights: Array | None = None,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    classes: int | None = None,
    fill: float = -jnp.inf,
    transposed: bool = False,
    out_of_range: str = "nan",
    logits_dtype: Any = None,
    also: tuple[str, ...] = (),
) -> Any:
    """The loss with the logits of all rows."""
    asked = jnp.promote_types(x.dtype, jnp.float32) if logits_dtype is None else logits_dtype
    h = jnp.matmul(x, w.T if transposed else w, preferred_element_type=asked)
    h = h.astype(jnp.promote_types(x.dtype, jnp.float32))
    h = h if bias is None else h + bias
    h = h * scale
    h = h if softcap is None else softcap * jnp.tanh(h / softcap)
    h = h if classes is None else jnp.where(jnp.arange(h.shape[-1]) < classes, h, fill)
    lse, s = jax.nn.logsumexp(h, axis=-1), label_smoothing
    if out_of_range == "drop":
        targets = (1 - s) * jax.nn.one_hot(labels, h.shape[-1], dtype=h.dtype) + s / h.shape[-1]
        loss = -jnp.sum(targets * jax.nn.log_softmax(h), axis=-1)
    else:
        loss = lse - (1 - s) * picked(h, labels, out_of_range) - s * jnp.mean(h, axis=-1)
    loss = loss + z_loss * lse**2
    out = loss if weights is None else jnp.sum(jnp.where(weights == 0, 0, loss) * weights)
    more = {"lse": lse, "argmax": jnp.argmax(h, -1).astype(jnp.int32), "loss": loss}
    return (out, *(more[name] for name in also)) if also else out
