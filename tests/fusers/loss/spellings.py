"""The losses of language models as they are written, each with the numbers of the op that it becomes. Not a test module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

V, E, N = 32, 8, 12
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(N, E)).astype(np.float32)
W = DRAW.normal(size=(E, V)).astype(np.float32)
LABELS = DRAW.integers(0, V, N).astype(np.int32)
MASK = np.asarray([1, 0, 1, 1] * 3, np.float32)
BIAS = DRAW.normal(size=V).astype(np.float32)
integer_labels = optax.softmax_cross_entropy_with_integer_labels


@dataclass(frozen=True)
class Spelling:
    """A loss of x, w, labels and more arrays, and the attributes of the op other than its defaults."""

    fn: Callable[..., Any]
    out_of_range: str
    more: tuple[Any, ...] = ()
    attrs: dict[str, Any] = field(default_factory=dict)
    rows: bool = False
    weight: Any = None
    aux: bool = False

    @property
    def args(self) -> tuple[Any, ...]:
        """x, w, labels and the further arrays."""
        return (X, W if self.weight is None else self.weight, LABELS, *self.more)


def one_hot(labels: Any) -> Any:
    return jax.nn.one_hot(labels, V)


def log_softmax_at(logits: Any, labels: Any) -> Any:
    return jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)[..., 0]


def indexed(x, w, labels):
    z = x @ w
    return (jax.nn.logsumexp(z, axis=-1) - z[jnp.arange(N), labels]).mean()


def smoothed_by_hand(x, w, labels):
    p = jax.nn.log_softmax(x @ w)
    return -(0.9 * jnp.take_along_axis(p, labels[:, None], axis=-1)[:, 0] + 0.1 * p.mean(-1)).mean()


def maxtext(x, w, labels, mask):
    z = jnp.einsum("ne,ev->nv", x, w)
    lse = jax.scipy.special.logsumexp(z, axis=-1, keepdims=True)
    loss = -jnp.sum(one_hot(labels) * (z - lse), axis=-1) + 1e-4 * jnp.square(jnp.squeeze(lse, -1))
    return jnp.sum(loss * (mask != 0)) / (jnp.sum(mask != 0) + 1e-8)


def flax_causal(x, w, labels):
    z, targets = (x.reshape(2, 6, E) @ w)[..., :-1, :], labels.reshape(2, 6)[..., 1:]
    return optax.softmax_cross_entropy(z, one_hot(targets)).mean()


def torch_like(x, w, labels):
    labels = jnp.where(labels % 3 == 0, -100, labels).reshape(2, 6)[:, 1:].reshape(-1)
    z = (x.reshape(2, 6, E) @ w)[:, :-1].reshape(-1, V)
    counts = labels != -100
    loss = -log_softmax_at(z, jnp.where(counts, labels, 0))
    return jnp.where(counts, loss, 0.0).sum() / counts.sum()


def maximum_by_hand(x, w, labels):
    z = x @ w
    z = z - jax.lax.stop_gradient(z.max(-1, keepdims=True))
    p = z - jnp.log(jnp.sum(jnp.exp(z), axis=-1, keepdims=True))
    return -p[jnp.arange(N), labels].mean()


def with_accuracy(x, w, labels):
    z = x @ w
    return integer_labels(z, labels).mean(), jnp.mean(jnp.argmax(z, -1) == labels)


def by_sequence(x, w, labels, mask):
    loss, mask = integer_labels(x.reshape(2, 6, E) @ w, labels.reshape(2, 6)), mask.reshape(2, 6)
    return (jnp.sum(loss * mask, axis=1) / (jnp.sum(mask, axis=1) + 1)).mean()


def capped(x, w, labels, bias):
    return integer_labels(30 * jnp.tanh((x @ w + bias) / 30), labels).mean()


def in_bfloat16(x, w, labels):
    z = (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)
    return integer_labels(z, labels).mean()


def from_bfloat16(x, w, labels):
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    return integer_labels(jnp.einsum("ne,ev->nv", x, w, preferred_element_type=jnp.float32), labels).sum()


def compared(x, w, labels):
    z = x @ w
    return (jax.nn.logsumexp(z, -1) - jnp.sum(jnp.where(labels[:, None] == jnp.arange(V), z, 0), -1)).mean()


def squared_logarithm(x, w, labels):
    z = x @ w
    return (integer_labels(z, labels) + 1e-3 * jax.nn.logsumexp(z, -1) ** 2).mean()


def normalised(x, w, labels, mask):
    """As in flax's lm1b: less the constant that makes the least loss 0."""
    low = 0.1 / (V - 1)
    constant = -(0.9 * jnp.log(0.9) + (V - 1) * low * jnp.log(low + 1e-20))
    targets = jnp.where(jnp.arange(V) == labels[:, None], 0.9, low)
    loss = (-jnp.sum(targets * jax.nn.log_softmax(x @ w), -1) - constant) * mask
    return loss.sum() / mask.sum()


def easylm(x, w, labels, mask):
    z = x @ w
    picked = jnp.where(mask > 0, log_softmax_at(z, labels), jnp.array(0.0))
    right = jnp.where(mask > 0, jnp.argmax(z, -1) == labels, jnp.array(False))
    count = jnp.maximum(jnp.sum(mask), 1e-10)
    return -(jnp.sum(picked) / count), jnp.sum(right) / count


def weighted_targets(x, w, labels, mask):
    """As in Gemma's tutorial."""
    targets = one_hot(labels) * mask[:, None]
    return -jnp.sum(jax.nn.log_softmax(x @ w) * targets) / (jnp.sum(mask) + 1e-8)


def vmapped_with_bias(x, w, labels, bias):
    """As of an equinox.nn.Linear, which has V x E, mapped over tokens."""
    return jnp.mean(integer_labels(jax.vmap(lambda row: w @ row + bias)(x), labels))


def reported(x, w, labels, mask):
    """With the z-loss by itself."""
    z = x @ w
    lse = jax.nn.logsumexp(z, -1)
    z_loss = 1e-4 * lse**2
    loss = lse - jnp.take_along_axis(z, labels[:, None], -1)[:, 0] + z_loss
    return jnp.sum(loss * mask) / jnp.sum(mask), jnp.sum(z_loss * mask) / jnp.sum(mask)


@jax.custom_vjp
def _ruled(z, targets, factor):
    lse = jax.scipy.special.logsumexp(z, axis=-1, keepdims=True)
    z_loss = factor * jnp.square(lse[..., 0])
    return -jnp.sum(targets * (z - lse), -1) + z_loss, z_loss


def _ruled_forward(z, targets, factor):
    top = z.max(-1, keepdims=True)
    powers = jnp.exp(z - top)
    mass = powers.sum(-1, keepdims=True)
    lse = (jnp.log(mass) + top)[..., 0]
    log_softmax = z - top - jnp.log(mass)
    z_loss = factor * jnp.square(lse)
    saved = targets, factor, powers / mass, log_softmax, lse
    return (-jnp.sum(targets * log_softmax, -1) + z_loss, z_loss), saved


def _ruled_backward(saved, ct):
    targets, factor, p, log_softmax, lse = saved
    of_logits = (1 + 2 * factor * lse)[..., None] * p - targets
    return ct[0][..., None] * of_logits, -ct[0][..., None] * log_softmax, jnp.array(0.0)


_ruled.defvjp(_ruled_forward, _ruled_backward)


def ruled(x, w, labels, mask):
    """As in MaxText, whose loss has a derivative of its own."""
    loss, z_loss = _ruled(x @ w, one_hot(labels), 1e-4)
    return jnp.sum(loss * mask) / jnp.sum(mask), jnp.sum(z_loss * mask) / jnp.sum(mask)


def padded(x, w, labels):
    z = jnp.where(jnp.arange(V) < V - 3, x @ w, -1e10)
    return integer_labels(z, jnp.minimum(labels, V - 4)).mean()


def checkpointed(x, w, labels, mask):
    return (jax.checkpoint(lambda x, w: integer_labels(x @ w, labels))(x, w) * mask).sum()


def filled(x, w, labels):
    return integer_labels((x @ w).at[:, V - 3 :].set(-jnp.inf), jnp.minimum(labels, V - 4)).mean()


def filled_one_by_one(x, w, labels):
    z = (x.reshape(2, 6, E) @ w).at[..., jnp.arange(V - 3, V)].set(-1e9)
    return integer_labels(z, jnp.minimum(labels, V - 4).reshape(2, 6)).mean()


def kept(x, w, labels, mask):
    """A mean over the rows that optax is told to keep."""
    return integer_labels(x @ w, labels, where=mask != 0).sum() / (mask != 0).sum()


SPELLINGS = {
    "optax, labels": Spelling(lambda x, w, y: integer_labels(x @ w, y).mean(), "nan"),
    "optax, label smoothing": Spelling(
        lambda x, w, y: optax.softmax_cross_entropy(x @ w, optax.smooth_labels(one_hot(y), 0.1)).mean(),
        "drop", attrs={"label_smoothing": 0.1}),
    "log_softmax, take_along_axis": Spelling(lambda x, w, y: -jnp.mean(log_softmax_at(x @ w, y)), "drop"),
    "logsumexp, indexed": Spelling(indexed, "promise_in_bounds"),
    "indexed in vmap": Spelling(
        lambda x, w, y: -jax.vmap(lambda a, b: jax.nn.log_softmax(a @ w)[b])(x, y).mean(), "clip"),
    "indexed, clipped": Spelling(
        lambda x, w, y: -jax.nn.log_softmax(x @ w).at[jnp.arange(N), y].get(mode="clip").mean(), "clip"),
    "smoothed by hand": Spelling(smoothed_by_hand, "drop", attrs={"label_smoothing": 0.1}),
    "MaxText, z-loss, weights": Spelling(maxtext, "drop", (MASK,), {"z_loss": 1e-4}),
    "two logarithms": Spelling(squared_logarithm, "nan", attrs={"z_loss": 1e-3}),
    "flax, causal": Spelling(flax_causal, "drop"),
    "ignored labels": Spelling(torch_like, "drop", attrs={"masked": True}),
    "maximum by hand": Spelling(maximum_by_hand, "promise_in_bounds"),
    "compared with the classes": Spelling(compared, "zero"),
    "einsum with one_hot": Spelling(
        lambda x, w, y: -jnp.einsum("nv,nv->", jax.nn.log_softmax(x @ w), one_hot(y)) / N, "drop"),
    "einsum by row": Spelling(
        lambda x, w, y: -jnp.einsum("nv,nv->n", jax.nn.log_softmax(x @ w), one_hot(y)).mean(), "drop"),
    "accuracy": Spelling(with_accuracy, "nan", attrs={"also": ("argmax",)}, aux=True),
    "average": Spelling(lambda x, w, y, m: jnp.average(integer_labels(x @ w, y), weights=m), "nan", (MASK,)),
    "dot with weights": Spelling(lambda x, w, y, m: jnp.dot(m, integer_labels(x @ w, y)), "nan", (MASK,)),
    "by sequence": Spelling(by_sequence, "nan", (MASK,)),
    "perplexity": Spelling(lambda x, w, y: jnp.exp(integer_labels(x @ w, y).mean()), "nan"),
    "tied": Spelling(
        lambda x, e, y: integer_labels((e[y] * x) @ e.T, y).mean(), "nan", attrs={"transposed": True}, weight=W.T),
    "tied, einsum": Spelling(
        lambda x, e, y: integer_labels(jnp.einsum("ne,ve->nv", x, e), y).mean(), "nan",
        attrs={"transposed": True}, weight=W.T),
    "bias and cap": Spelling(capped, "nan", (BIAS,), {"softcap": 30.0}),
    "bfloat16, cast after it": Spelling(in_bfloat16, "nan", attrs={"logits_dtype": "bfloat16"}),
    "bfloat16, summed in float32": Spelling(from_bfloat16, "nan"),
    "rows": Spelling(lambda x, w, y: jnp.sin(integer_labels(x @ w, y)).sum(), "nan", rows=True),
    "lm1b, normalised": Spelling(normalised, "drop", (MASK,), {"label_smoothing": 0.1032258}),
    "EasyLM, accuracy": Spelling(easylm, "drop", (MASK,), {"masked": True, "also": ("argmax",)}, aux=True),
    "weighted targets": Spelling(weighted_targets, "drop", (MASK,)),
    "vmapped with a bias": Spelling(vmapped_with_bias, "nan", (BIAS,), {"transposed": True}, weight=W.T),
    "padded vocabulary": Spelling(padded, "nan", attrs={"classes": V - 3, "fill": -1e10}),
    "temperature, bias, cap": Spelling(
        lambda x, w, y, b: integer_labels(30 * jnp.tanh((x @ w + b) / 2 / 30), y).mean(),
        "nan", (BIAS,), {"softcap": 30.0, "scale": 0.5}),
    "optax, where": Spelling(kept, "nan", (MASK,), {"masked": True}),
    "optax, where, ignored labels": Spelling(
        lambda x, w, y: integer_labels(x @ w, y, axis=1, where=y % 3 != 0).mean(), "nan", attrs={"masked": True}),
    "optax, where, rows": Spelling(
        lambda x, w, y, m: jnp.sin(integer_labels(x @ w, y, where=m != 0)).sum(), "nan", (MASK,), rows=True),
    "optax, one_hot, where": Spelling(
        lambda x, w, y, m: optax.softmax_cross_entropy(x @ w, one_hot(y), where=m != 0).mean(),
        "drop", (MASK,), {"masked": True}),
    "logarithm of a softmax": Spelling(
        lambda x, w, y: -jnp.log(jax.nn.softmax(x @ w))[jnp.arange(N), y].mean(), "promise_in_bounds"),
    "logarithm of a softmax, one_hot": Spelling(
        lambda x, w, y: -jnp.mean(jnp.sum(one_hot(y) * jnp.log(jax.nn.softmax(x @ w)), -1)), "drop"),
    "logarithm of a probability": Spelling(
        lambda x, w, y: -jnp.log(jnp.take_along_axis(jax.nn.softmax(x @ w), y[:, None], -1)).mean(), "drop"),
    "classes overwritten": Spelling(filled, "nan", attrs={"classes": V - 3, "fill": -np.inf}),
    "classes overwritten one by one": Spelling(filled_one_by_one, "nan", attrs={"classes": V - 3, "fill": -1e9}),
    "one row": Spelling(lambda x, w, y: integer_labels(x[0] @ w, y[0]), "nan", rows=True),
}  # fmt: skip
# Losses whose backward pass is not the one that JAX would make of their forward pass.
APART = {
    "a z-loss reported": Spelling(reported, "nan", (MASK,), aux=True),
    "a rule of the user's own": Spelling(ruled, "zero", (MASK,), aux=True),
    "optax, safe": Spelling(lambda x, w, y: optax.safe_softmax_cross_entropy(x @ w, one_hot(y)).mean(), "drop"),
    "in a checkpoint": Spelling(checkpointed, "nan", (MASK,)),
}
