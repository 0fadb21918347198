"""Programs that are nearly softmax(scale * q k^T) v, and what is wrong with each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .near_miss import NearMiss, normal

# Batch, length, heads and width all but the batch are of one size: sizes do not tell the axes apart.
QKV = normal((2, 4, 4, 4), (2, 4, 4, 4), (2, 4, 4, 4), seed=3)
HEADS, BIAS = normal((1, 4, 1, 1), (4, 4), seed=5)
TRIL = np.tril(np.ones((4, 4), bool))
DATA = np.array([[1, 0, 1, 1], [0, 1, 1, 1], [1, 1, 0, 1], [1, 1, 1, 1]], bool)
KEY = np.arange(2, dtype=np.uint32)
softmax = jax.nn.softmax


def scores(q: Any, k: Any, **rest: Any) -> Any:
    return jnp.einsum("bthd,bshd->bhts", q, k, **rest) * 0.5


def attend(weights: Any = softmax, weigh: str = "bhts,bshd->bthd") -> Any:
    """Attention with another function of the scores, or another product with v."""
    return lambda q, k, v: jnp.einsum(weigh, weights(scores(q, k)), v)


def unscaled(weights: Any = softmax) -> Any:
    """The same of q k^T itself."""
    return lambda q, k, v: jnp.einsum("bhts,bshd->bthd", weights(jnp.einsum("bthd,bshd->bhts", q, k)), v)


def exps(s: Any, shift: Any = None) -> Any:
    """Exponentials of the scores less their maximum, or less something else."""
    return jnp.exp(s - (s.max(-1, keepdims=True) if shift is None else shift))


def normalised(total: Any, shift: Any = lambda s: s.max(-1, keepdims=True)) -> Any:
    """Weights by hand, their sum and what is subtracted being given."""
    return lambda s: (e := exps(s, shift(s))) / total(e)


def last(e: Any) -> Any:
    return e.sum(-1, keepdims=True)


def masked(fill: Any, keep: Any = TRIL) -> Any:
    return attend(lambda s: softmax(jnp.where(keep, s, fill)))


@jax.custom_vjp
def reversed_gradient(h: Any) -> Any:
    return h


reversed_gradient.defvjp(lambda h: (h, None), lambda _, ct: (-ct,))


@jax.custom_jvp
def own_exp(s: Any) -> Any:
    return jnp.exp(s)


own_exp.defjvp(lambda p, t: (jnp.exp(p[0]), t[0]))


@jax.custom_vjp
def own_softmax(s: Any) -> Any:
    return jnp.exp(s) / jnp.exp(s).sum(-1, keepdims=True)


own_softmax.defvjp(lambda s: (own_softmax(s), None), lambda _, ct: (ct,))


def weights_returned(q: Any, k: Any, v: Any) -> Any:
    p = softmax(scores(q, k))
    return jnp.einsum("bhts,bshd->bthd", p, v), p


def scores_returned(q: Any, k: Any, v: Any) -> Any:
    s = scores(q, k)
    return jnp.einsum("bhts,bshd->bthd", softmax(s), v), s


def weights_summed(q: Any, k: Any, v: Any) -> Any:
    p = softmax(scores(q, k))
    return jnp.einsum("bhts,bshd->bthd", p, v) + jnp.sum(p)


def weights_weigh_twice(q: Any, k: Any, v: Any) -> Any:
    p = softmax(scores(q, k))
    return jnp.einsum("bhts,bshd->bthd", p, v) + jnp.einsum("bhts,bshd->bthd", p, jnp.sin(v))


def scores_dropped(q: Any, k: Any, v: Any, key: Any) -> Any:
    s = scores(q, k)
    keep = jax.random.bernoulli(key, 0.9, s.shape)
    return jnp.einsum("bhts,bshd->bthd", softmax(jnp.where(keep, s / 0.9, 0.0)), v)


def exponentials_dropped(q: Any, k: Any, v: Any, key: Any) -> Any:
    e = exps(scores(q, k))
    e = jnp.where(jax.random.bernoulli(key, 0.9, e.shape), e, 0.0)
    return jnp.einsum("bhts,bshd->bthd", e / last(e), v)


def beside(s: Any, sink: Any, first: bool = False) -> Any:
    """Scores with one logit more."""
    one = jnp.broadcast_to(sink, (*s.shape[:-1], 1))
    return jnp.concatenate([one, s] if first else [s, one], -1)


def sink_added(q: Any, k: Any, v: Any, sink: Any) -> Any:
    p = softmax(beside(scores(q, k), sink))
    return jnp.einsum("bhts,bshd->bthd", p[..., :-1], v) + p[..., -1:].swapaxes(1, 2)


def near(name: str, code: str | None, fn: Any, args: tuple[Any, ...] = QKV, **rest: Any) -> NearMiss:
    return NearMiss(name, "dot_product_attention", code, fn, args, mapped=rest.pop("mapped", (0, 1, 2)), **rest)


AXES = (
    near("softmax over the queries", "axes", attend(lambda s: softmax(s, axis=2)),
         says=", and their product with the values contracts axis "),
    near("softmax over the heads", "axes", attend(lambda s: softmax(s, axis=1))),
    near("softmax over queries and keys", "axes", attend(lambda s: softmax(s, axis=(2, 3)))),
    near("weights contracted over the queries", "axes", attend(weigh="bhts,bthd->bshd"),
         says=", and their product with the values contracts axis "),
    near("weights contracted over the heads too", "axes", attend(weigh="bhts,bshd->btd")),
    near("no width", "axes", attend(), tuple(a[..., :0] for a in QKV)),
    near("no batch", "axes", attend(), tuple(a[:0] for a in QKV)),
)  # fmt: skip

SOFTMAX = (
    near("exp(s - 2 max)", "scalar", attend(normalised(last, lambda s: 2 * s.max(-1, keepdims=True)))),
    near("twice the maximum", "structure", unscaled(normalised(last, lambda s: 2 * s.max(-1, keepdims=True))),
         says="subtracts the maximum of the scores 2 times", edit="subtract the maximum over the keys, once", repaired=unscaled()),
    near("half the maximum", "structure", unscaled(normalised(last, lambda s: lax.stop_gradient(s.max(-1, keepdims=True)) / 2)),
         says="subtracts the maximum of the scores 0.5 times", edit="subtract the maximum over the keys, once", repaired=unscaled()),
    near("the maximum of the queries", "structure", attend(normalised(last, lambda s: s.max(-2, keepdims=True))),
         says="is computed from the scores themselves", edit="subtract the maximum over the keys, once", repaired=attend()),
    near("normalised over the queries", "axes", attend(normalised(lambda e: e.sum(-2, keepdims=True)))),
    near("normalised by the sum of squares", "structure", attend(normalised(lambda e: (e * e).sum(-1, keepdims=True)))),
    near("normalised by the root of squares", "structure",
         attend(normalised(lambda e: jnp.sqrt((e * e).sum(-1, keepdims=True))))),
    near("not normalised", "structure", attend(lambda s: exps(s))),
    near("one plus the sum", "structure", attend(normalised(lambda e: 1 + last(e)))),
    near("an epsilon with the sum", "structure", attend(normalised(lambda e: last(e) + 1e-6))),
    near("sigmoid attention", "structure", attend(lambda s: jnp.exp(s) / (1 + jnp.exp(s)))),
    near("weights squared", "structure", attend(lambda s: softmax(s) ** 2)),
    near("the root of the weights", "structure", attend(lambda s: jnp.sqrt(softmax(s)))),
    near("weights and the identity", "structure", attend(lambda s: softmax(s) + jnp.eye(4))),
    near("weights less their mean", "structure", attend(lambda s: softmax(s) - 0.25)),
    near("weights above 0.1", "structure", attend(lambda s: jnp.maximum(softmax(s), 0.1))),
    near("scores clipped", "structure", attend(lambda s: softmax(jnp.clip(s, -1, 1)))),
    near("scores squared", "structure", attend(lambda s: softmax(s * s))),
    near("scores above 0", "structure", attend(lambda s: softmax(jax.nn.relu(s)))),
)  # fmt: skip

SCALARS = (
    near("a factor on the weights", "structure", attend(lambda s: 2 * softmax(s)), says="a factor that the values do not"),
    near("masked with 0.5", "scalar", masked(0.5), says="which still gives them weight", edit="fill with -jnp.inf",
         repaired=masked(-jnp.inf)),
    near("masked with 0", "scalar", masked(0.0), says="which still gives them weight", edit="fill with -jnp.inf",
         repaired=masked(-1e30)),
    near("masked with -100", "scalar", masked(-100.0), says="which still gives them weight", edit="fill with -jnp.inf",
         repaired=masked(-1e9)),
    near("masked with infinity", "scalar", masked(jnp.inf), says="which still gives them weight", edit="fill with -jnp.inf",
         repaired=masked(-jnp.inf)),
    near("masked keys lowered by 10", "mask", attend(lambda s: softmax(jnp.where(TRIL, s, s - 10)))),
)  # fmt: skip

MASKED = ("softmax(0.5 * q @ k.T, mask) @ v",)
MASKS = (
    near("scores multiplied after they are masked", "mask",
         lambda q, k, v, t: attend(lambda s: softmax(jnp.where(TRIL, s, -1e9) * t))(q, k, v), (*QKV, HEADS),
         mapped=(0, 1, 2), says="after they are masked"),
    near("scores capped after they are masked", "mask", attend(lambda s: softmax(30 * jnp.tanh(jnp.where(TRIL, s, -1e9) / 30))),
         says="after they are masked"),
    near("scores dropped at random", "scalar", scores_dropped, (*QKV, KEY), mapped=(0, 1, 2), says="which still gives them weight"),
    near("exponentials dropped at random", "dropout", exponentials_dropped, (*QKV, KEY), mapped=(0, 1, 2)),
    near("a bias after the mask", "mask",
         lambda q, k, v, b: attend(lambda s: softmax(jnp.where(DATA, s, -1e9) + b))(q, k, v), (*QKV, BIAS),
         mapped=(0, 1, 2), says="after they are masked"),
    near("two masks of different fills", "mask",
         lambda q, k, v, m: attend(lambda s: softmax(jnp.where(m, jnp.where(DATA, s, -1e9), -jnp.inf)))(q, k, v),
         (*QKV, DATA.T), mapped=(0, 1, 2), says="different scores"),
    near("causal, shifted by one", None, masked(-1e9, np.tri(4, k=1, dtype=bool)), also=MASKED),
    near("causal, turned around", None, masked(-1e9, TRIL.T), also=MASKED),
    near("causal, one entry missing", None, masked(-1e9, TRIL & ~np.eye(4, k=-2, dtype=bool)), also=MASKED),
)  # fmt: skip

GRADIENT = (
    near("gradient stopped at the weights", "stop_gradient", attend(lambda s: lax.stop_gradient(softmax(s)))),
    near("gradient stopped at the scores", "stop_gradient", attend(lambda s: softmax(lax.stop_gradient(s)))),
    near("gradient stopped at the sum", "stop_gradient", attend(normalised(lambda e: lax.stop_gradient(last(e))))),
    near("gradient reversed at the scores", "custom_rule", attend(lambda s: softmax(reversed_gradient(s)))),
    near("gradient reversed at the weights", "custom_rule", attend(lambda s: reversed_gradient(softmax(s)))),
    near("an exponential with a derivative of its own", "custom_rule", attend(lambda s: (e := own_exp(s)) / last(e))),
    near("a softmax with a derivative of its own", "custom_rule", attend(own_softmax)),
    near("weights that are named", "named_residual", attend(lambda s: checkpoint_name(softmax(s), "weights"))),
    near("scores that are named", "named_residual", attend(lambda s: softmax(checkpoint_name(s, "scores")))),
)  # fmt: skip

SINK = HEADS[0]  # one for each head


def sunk(weights: Any) -> Any:
    return lambda q, k, v, sink: attend(lambda s: weights(s, sink))(q, k, v)


SINKS = (
    near("a sink whose weight is kept", "structure",
         lambda q, k, v, z: jnp.einsum("bhts,bshd->bthd", softmax(beside(scores(q, k), z)), jnp.concatenate([v, v[:, :1]], 1)),
         (*QKV, SINK), says="whose weight is kept"),
    near("a sink whose weight is added", "escapes", sink_added, (*QKV, SINK), says="is also read by"),
    near("a key dropped in place of the sink", "structure", sunk(lambda s, z: softmax(beside(s, z))[..., 1:]), (*QKV, SINK),
         says="removes more than its weight", edit="apply dropout after slicing off the sink's weight"),
    near("two sinks", "structure", sunk(lambda s, z: softmax(beside(beside(s, z), -z))[..., :-2]), (*QKV, SINK), says="more logit"),
    near("a sink of each key", "axes", sunk(lambda s, z: (e := jnp.exp(s)) / (last(e) + jnp.exp(z))), (*QKV, BIAS)),
    near("a sink that is not below the maximum", "structure", sunk(lambda s, z: (e := exps(s)) / (last(e) + jnp.exp(z))), (*QKV, SINK)),
    near("a sink with two factors", "structure",
         sunk(lambda s, z: (e := exps(s, m := jnp.maximum(s.max(-1, keepdims=True), z))) / (last(e) + jnp.exp(2 * z - m))), (*QKV, SINK)),
    near("a sink whose gradient is that of frozen weights", "stop_gradient",
         sunk(lambda s, z: lax.stop_gradient(softmax(beside(s, z))[..., :-1])), (*QKV, SINK)),
    near("a sink that a scaled sum is compared with", "escapes",
         sunk(lambda s, z: softmax(s) * jax.nn.sigmoid(2 * jax.nn.logsumexp(s, -1, keepdims=True) - z)), (*QKV, SINK)),
)  # fmt: skip

ESCAPES_AND_DTYPES = (
    near("weights returned", "escapes", weights_returned, says="is also returned", edit="return or reuse the attention weights",
         repaired=lambda q, k, v: (attend()(q, k, v), softmax(scores(k, q)))),
    near("scores returned", "escapes", scores_returned, says="is also returned", edit="return or reuse",
         repaired=lambda q, k, v: (attend()(q, k, v), jnp.sum(q))),
    near("weights summed", "escapes", weights_summed, says="is also read by"),
    near("weights used twice", "escapes", weights_weigh_twice, says="is also read by"),
    near("values of another dtype", "dtype", attend(), (*QKV[:2], QKV[2].astype(jnp.bfloat16)), says="bfloat16, float32",
         edit="cast q, k and v", repaired=lambda q, k, v: attend()(q, k, v.astype(np.float32))),
    near("weights rounded to bf16", "dtype", attend(lambda s: softmax(s).astype(jnp.bfloat16).astype(np.float32))),
    near("scores rounded to bf16", "dtype", attend(lambda s: softmax(s.astype(jnp.bfloat16).astype(np.float32)))),
    near("two precisions", "structure",
         lambda q, k, v: jnp.einsum("bhts,bshd->bthd", softmax(scores(q, k, precision="highest")), v), says="different precisions"),
)  # fmt: skip

CORPUS = (*AXES, *SOFTMAX, *SINKS, *SCALARS, *MASKS, *GRADIENT, *ESCAPES_AND_DTYPES)
