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
    "one row": Spelling(lambda x, w, y: integer_labels(x[0] @ w, y[0]), "nan", rows=True),
}  # fmt: skip
