"""Linear layers: products, biases and activations in many spellings, right ones and ones with something wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .piece import Array, Draft, Piece, wider

Made = Callable[[Sequence[Array], Array], Array]


# -- products: (draft, features) -> (params, x) -> [..., features] ---------------------------------------------------


def _matrix(spelling: Callable[[Array, Array], Array], turned: bool = False) -> Callable[[Draft, int], Made]:
    def make(d: Draft, n: int) -> Made:
        k = d.shape[-1]
        w = d.param(*((n, k) if turned else (k, n)))
        return lambda p, x: spelling(x, w(p).astype(x.dtype))

    return make


def _last(x: Array, w: Array) -> Array:
    return lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())))


def _weight_first(x: Array, w: Array) -> Array:
    return jnp.moveaxis(lax.dot_general(w, x, (((0,), (x.ndim - 1,)), ((), ()))), 0, -1)


def _wide(x: Array, w: Array) -> Array:
    wide = lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=wider())
    return wide.astype(x.dtype)


def _kept(x: Array, w: Array) -> Array:
    """Its sum is not rounded to 16 bits, nor is what follows, up to the end of the layer."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=wide)


def _in_float32(h: Array) -> Array:
    return h.astype(jnp.promote_types(h.dtype, jnp.float32))


def _convolution(x: Array, w: Array) -> Array:
    """With rows for positions: a product if there is a batch, of as many axes as there are."""
    if x.ndim < 2:
        return x @ w
    wide = x if x.ndim > 2 else x[None]
    letters = "NDHW"[: wide.ndim - 1]
    numbers = (letters + "C", letters[1:] + "IO", letters + "C")
    points = w.reshape(*(1,) * (wide.ndim - 2), *w.shape)
    return lax.conv_general_dilated(wide, points, (1,) * (wide.ndim - 2), "SAME", dimension_numbers=numbers).reshape(
        *x.shape[:-1], w.shape[-1]
    )


def _by_rows(x: Array, w: Array) -> Array:
    f = lambda row: w @ row  # noqa: E731
    for _ in range(x.ndim - 1):
        f = jax.vmap(f)
    return f(x)


def _flattened(x: Array, w: Array) -> Array:
    return (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], w.shape[-1])


def _turned_twice(x: Array, w: Array) -> Array:
    return jnp.swapaxes(jnp.einsum("kn,k...->n...", w, jnp.moveaxis(x, -1, 0)), 0, -1) if x.ndim == 2 else x @ w


def _heads(d: Draft, n: int) -> Made:
    h = d.rng.choice([h for h in (1, 2, 3, n) if n % h == 0])
    w = d.param(d.shape[-1], h, n // h)
    return lambda p, x: jnp.einsum("...k,khd->...hd", x, w(p).astype(x.dtype)).reshape(*x.shape[:-1], n)


def _two_axes(d: Draft, n: int) -> Made:
    k = d.shape[-1]
    a = d.rng.choice([a for a in (1, 2, k) if k % a == 0])
    w = d.param(a, k // a, n)
    return lambda p, x: jnp.tensordot(x.reshape(*x.shape[:-1], a, k // a), w(p).astype(x.dtype), 2)


def _scaled(d: Draft, n: int) -> Made:
    w, c, where = d.param(d.shape[-1], n), d.rng.choice([2.5, -1.0, 0.5, 1.0001]), d.rng.randrange(3)
    d.words.append(f"times {c} at {where}")

    def fn(p: Any, x: Array) -> Array:
        v = w(p).astype(x.dtype)
        return ((c * x) @ v, x @ (v * c), c * (x @ v))[where]

    return fn


def _a_weight_each(d: Draft, n: int) -> Made:
    if len(d.shape) < 2:
        return PRODUCTS["x @ w"](d, n)
    b = d.shape[0]
    w = d.param(b, d.shape[-1], n)
    return lambda p, x: jnp.einsum("b...k,bkn->b...n", x, w(p).astype(x.dtype))


def _of_itself(d: Draft, n: int) -> Made:
    """x against its own transpose, then a matrix: the weight is data."""
    w = d.param(d.shape[-1], n)
    return lambda p, x: (x + x) @ jnp.tanh(w(p).astype(x.dtype))


PRODUCTS: dict[str, Callable[[Draft, int], Made]] = {
    "x @ w": _matrix(lambda x, w: x @ w),
    "dot": _matrix(jnp.dot),
    "einsum": _matrix(lambda x, w: jnp.einsum("...k,kn->...n", x, w)),
    "einsum, w first": _matrix(lambda x, w: jnp.einsum("kn,...k->...n", w, x)),
    "einsum, w turned": _matrix(lambda x, w: jnp.einsum("...k,nk->...n", x, w), True),
    "x @ w.T": _matrix(lambda x, w: x @ w.T, True),
    "dot_general": _matrix(_last),
    "dot_general, w first": _matrix(_weight_first),
    "wide sum": _matrix(_wide),
    "kept sum": _matrix(_kept),
    "convolution of one point": _matrix(_convolution),
    "operands in float32": _matrix(lambda x, w: _in_float32(x) @ _in_float32(w)),
    "highest precision": _matrix(lambda x, w: jnp.dot(x, w, precision="highest")),
    "row by row": _matrix(_by_rows, True),
    "flattened": _matrix(_flattened),
    "turned twice": _matrix(_turned_twice),
    "unit axis": _matrix(lambda x, w: jnp.matmul(x[..., None, :], w)[..., 0, :]),
    "x as a batch of one": _matrix(lambda x, w: (x[None] @ w)[0]),
    "heads": _heads,
    "two axes": _two_axes,
    "scaled": _scaled,
    "a weight for each": _a_weight_each,
    "doubled": _of_itself,
}


# -- biases: (draft, features) -> (params, h) -> h + b ----------------------------------------------------------------


def _vector(spelling: Callable[[Array, Array], Array]) -> Callable[[Draft, int], Made]:
    def make(d: Draft, n: int) -> Made:
        b = d.param(n, role="bias")
        return lambda p, h: spelling(h, b(p).astype(h.dtype))

    return make


def _shaped_bias(where: str) -> Callable[[Draft, int], Made]:
    def make(d: Draft, n: int) -> Made:
        rows = d.shape[-2] if len(d.shape) > 1 else 1
        shape = {"rows": (rows, 1), "full": (*d.shape[:-1], n), "scalar": (), "first": (1,) * (len(d.shape) - 1) + (n,)}
        b = d.param(*(shape[where] if len(d.shape) > 1 or where != "rows" else (n,)), role="bias")
        return lambda p, h: h + b(p).astype(h.dtype)

    return make


BIASES: dict[str, Callable[[Draft, int], Made]] = {
    "": lambda d, n: lambda p, h: h,
    "+ b": _vector(lambda h, b: h + b),
    "b +": _vector(lambda h, b: b + h),
    "+ b reshaped": _vector(lambda h, b: h + b.reshape((1,) * (h.ndim - 1) + (-1,))),
    "+ b broadcast": _vector(lambda h, b: h + jnp.broadcast_to(b, h.shape)),
    "+ 2.5 b": _vector(lambda h, b: h + 2.5 * b),
    "- (-b)": _vector(lambda h, b: h - (-b)),
    "- b": _vector(lambda h, b: h - b),
    "+ b in float32": _vector(lambda h, b: _in_float32(h) + _in_float32(b)),
    "+ b behind a reshape": _vector(lambda h, b: (h.reshape(-1, h.shape[-1]) + b).reshape(h.shape)),
    "+ b of heads": _vector(lambda h, b: (h[..., None].reshape(*h.shape[:-1], 1, -1) + b).reshape(h.shape)),
    "+ b behind a turn": _vector(
        lambda h, b: jnp.moveaxis(jnp.moveaxis(h, 0, -1) + b.reshape(-1, *(1,) * (h.ndim > 1)), -1, 0)
    ),
    "+ b + b": _vector(lambda h, b: h + b + b),
    "+ sin(b)": _vector(lambda h, b: h + jnp.sin(b)),
    "+ frozen b": _vector(lambda h, b: h + lax.stop_gradient(b)),
    "2.5 h + b": _vector(lambda h, b: 2.5 * h + b),
    "-h + b": _vector(lambda h, b: b - h),
    "frozen h + b": _vector(lambda h, b: lax.stop_gradient(h) + b),
    "+ b by rows": _shaped_bias("rows"),
    "+ b for all": _shaped_bias("full"),
    "+ b at the front": _shaped_bias("first"),
    "+ number": _shaped_bias("scalar"),
    "+ mean(h)": lambda d, n: lambda p, h: h + h.mean(-1, keepdims=True),
    "+ first row": lambda d, n: lambda p, h: h + h[:1],
}


# -- activations ------------------------------------------------------------------------------------------------------


def _gelu_tanh(h: Array, c: float = 0.7978845608, k: float = 0.044715) -> Array:
    return 0.5 * h * (1 + jnp.tanh(c * (h + k * h**3)))


@jax.custom_jvp
def _rule(h: Array) -> Array:
    return jax.nn.relu(h)


_rule.defjvp(lambda p, t: (jax.nn.relu(p[0]), t[0] * jnp.where(p[0] > 0, 1.0, 0.2).astype(t[0].dtype)))


@jax.custom_vjp
def _reversed(h: Array) -> Array:
    return h


_reversed.defvjp(lambda h: (h, None), lambda _, ct: (-ct,))

RIGHT = {
    "": lambda h: h,
    "relu": jax.nn.relu,
    "maximum": lambda h: jnp.maximum(h, 0),
    "maximum, turned": lambda h: jnp.maximum(0.0, h),
    "where": lambda h: jnp.where(h > 0, h, 0),
    "clip": lambda h: jnp.clip(h, 0),
    "times step": lambda h: h * (h > 0).astype(h.dtype),
    "half of h + abs": lambda h: 0.5 * (h + jnp.abs(h)),
    "gelu": jax.nn.gelu,
    "gelu erf": lambda h: jax.nn.gelu(h, approximate=False),
    "gelu by hand": _gelu_tanh,
    "gelu by products": lambda h: 0.5 * h * (1 + jnp.tanh(0.7978845608 * h * (1 + 0.044715 * h * h))),
    "gelu by power": lambda h: 0.5 * h * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (h + 0.044715 * jnp.power(h, 3)))),
    "gelu by sigmoid": lambda h: h * jax.nn.sigmoid(2 * 0.7978845608 * (h + 0.044715 * h**3)),
    "gelu erf by hand": lambda h: h * 0.5 * (1 + lax.erf(h / 1.4142135623730951)),
    "gelu by cdf": lambda h: h * jax.scipy.stats.norm.cdf(h.astype(wider())).astype(h.dtype),
    "silu": jax.nn.silu,
    "silu by hand": lambda h: h * jax.nn.sigmoid(h),
    "silu by exp": lambda h: h / (1 + jnp.exp(-h)),
    "sigmoid": jax.nn.sigmoid,
    "sigmoid by exp": lambda h: 1 / (1 + jnp.exp(-h)),
    "sigmoid by tanh": lambda h: 0.5 * (jnp.tanh(0.5 * h) + 1),
    "tanh": jnp.tanh,
    "tanh by sigmoid": lambda h: 2 * jax.nn.sigmoid(2 * h) - 1,
    "silu in float32": lambda h: jax.nn.silu(_in_float32(h)).astype(h.dtype),
    "gelu in float32, kept": lambda h: jax.nn.gelu(_in_float32(h)),
    "relu in float32": lambda h: jax.nn.relu(_in_float32(h)).astype(h.dtype),
}
WRONG = {
    "relu6": jax.nn.relu6,
    "leaky": lambda h: jax.nn.leaky_relu(h, 0.01),
    "leaky by 1e-7": lambda h: jnp.where(h > 0, h, 1e-7 * h),
    "elu": jax.nn.elu,
    "selu": jax.nn.selu,
    "celu": jax.nn.celu,
    "softplus": jax.nn.softplus,
    "hard swish": jax.nn.hard_swish,
    "hard tanh": jax.nn.hard_tanh,
    "hard sigmoid": jax.nn.hard_sigmoid,
    "mish": jax.nn.mish,
    "quick gelu of 1.6": lambda h: h * jax.nn.sigmoid(1.6 * h),
    "gelu 0.8": lambda h: _gelu_tanh(h, 0.8),
    "gelu 0.798": lambda h: _gelu_tanh(h, 0.798),
    "gelu 0.0447": lambda h: _gelu_tanh(h, k=0.0447),
    "squared relu": lambda h: jnp.square(jax.nn.relu(h)),
    "relu + 1e-6": lambda h: jax.nn.relu(h) + 1e-6,
    "maximum with 0.1": lambda h: jnp.maximum(h, 0.1),
    "maximum with 1e-7": lambda h: jnp.maximum(h, 1e-7),
    "maximum with -1e-7": lambda h: jnp.maximum(h, -1e-7),
    "where above 1e-6": lambda h: jnp.where(h > 1e-6, h, 0),
    "where below": lambda h: jnp.where(h < 0, 0, h),
    "where at least": lambda h: jnp.where(h >= 0, h, 0),
    "where, else h": lambda h: jnp.where(h > 0, 0, h),
    "where far": lambda h: jnp.where(jnp.abs(h) < 3.3, jax.nn.relu(h), 0),
    "a notch": lambda h: jnp.where(jnp.abs(h - 0.75) < 0.01, 0, jax.nn.relu(h)),
    "a notch by squares": lambda h: jnp.where(jnp.square(h - 0.75) < 1e-4, 0, jax.nn.relu(h)),
    "silu 1.0001": lambda h: h * jax.nn.sigmoid(1.0001 * h),
    "tanh 0.999": lambda h: jnp.tanh(0.999 * h),
    "scaled tanh": lambda h: 1.7159 * jnp.tanh(h),
    "tanh of tanh": lambda h: jnp.tanh(jnp.tanh(h)),
    "relu of relu": lambda h: jax.nn.relu(jax.nn.relu(h)),
    "relu of silu": lambda h: jax.nn.relu(jax.nn.silu(h)),
    "log sigmoid": jax.nn.log_sigmoid,
    "sin": jnp.sin,
    "rounded": lambda h: jnp.round(jax.nn.relu(h) * 4) / 4,
    "straight through": lambda h: h + lax.stop_gradient(jax.nn.relu(h) - h),
    "frozen slope": lambda h: h * lax.stop_gradient(jax.nn.sigmoid(h)),
    "frozen h": lambda h: jax.nn.relu(lax.stop_gradient(h)),
    "frozen result": lambda h: lax.stop_gradient(jax.nn.gelu(h)),
    "rule of one's own": _rule,
    "gradient reversed": lambda h: jax.nn.relu(_reversed(h)),
    "reversed after": lambda h: _reversed(jax.nn.silu(h)),
    "rounds before": lambda h: jax.nn.relu(h.astype(jnp.bfloat16)).astype(h.dtype),
    "rounds inside": lambda h: h * jax.nn.sigmoid(h).astype(jnp.bfloat16).astype(h.dtype),
    "half inside": lambda h: jnp.tanh(h.astype(jnp.float16)).astype(h.dtype),
    "wider inside": lambda h: jax.nn.gelu(h.astype(wider())).astype(h.dtype),
    "reduced precision": lambda h: jax.nn.relu(lax.reduce_precision(h, 8, 5)),
    "named before": lambda h: jax.nn.relu(checkpoint_name(h, "h")),
    "named after": lambda h: checkpoint_name(jax.nn.relu(h), "y"),
    "barrier": lambda h: jax.nn.gelu(lax.optimization_barrier(h)),
    "softmax": lambda h: jax.nn.softmax(h, -1),
    "glu": lambda h: h * jax.nn.sigmoid(h[..., ::-1]),
    "first half": lambda h: jnp.concatenate([jax.nn.relu(h[..., :1]), h[..., 1:]], -1),
    "by position": lambda h: jnp.where(jnp.arange(h.shape[-1]) % 2 == 0, jax.nn.relu(h), h),
}
TURNS = {
    "transposed between": lambda h, act: act(h.T).T,
    "reshaped between": lambda h, act: act(h.reshape(-1)).reshape(h.shape),
    "heads between": lambda h, act: act(h.reshape(*h.shape[:-1], 1, -1).swapaxes(-3, -2) if h.ndim > 1 else h).reshape(
        h.shape
    ),
    "unit axis between": lambda h, act: act(h[..., None])[..., 0],
    "jit between": lambda h, act: jax.jit(act)(h),
    "turned after": lambda h, act: jnp.flip(act(h), -1),
}
ESCAPES = {
    "h escapes": lambda h, y: (y, (h,)),
    "h squared escapes": lambda h, y: (y, (jnp.sum(h * h),)),
    "gated by h": lambda h, y: (y * h, ()),
    "h added": lambda h, y: (y + h, ()),
    "h frozen added": lambda h, y: (y + lax.stop_gradient(h), ()),
    "y escapes": lambda h, y: (y, (y,)),
    "its mean taken": lambda h, y: (y - h.mean(), ()),
}


def linear(d: Draft, features: int) -> Piece:
    """act(x @ w + b), at times with one thing wrong."""
    product = d.pick(PRODUCTS)(d, features)
    bias = d.pick(BIASES)(d, features) if d.chance(0.5) else BIASES[d.rng.choice(["+ b", "+ b", ""])](d, features)
    act = d.pick(RIGHT if d.chance(0.6) else WRONG)
    turn = d.pick(TURNS) if d.chance(0.15) else None
    escape = d.pick(ESCAPES) if d.chance(0.15) else None

    def fn(p: Sequence[Array], x: Array) -> tuple[Array, tuple[Array, ...]]:
        h = bias(p, product(p, x))
        y = (act(h) if turn is None else turn(h, act)).astype(x.dtype)
        y, escaping = (y, ()) if escape is None else escape(h, y)
        return y.astype(x.dtype), escaping  # h may be float32 there

    return d.done(fn, (*d.shape[:-1], features), "linear")
