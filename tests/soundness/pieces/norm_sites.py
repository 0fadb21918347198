"""Layer norms and RMS norms in many spellings, right ones and ones with something wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax, nn

from .piece import Array, Draft, Piece, elements, wider

Axes = tuple[int, ...]
Norm = Callable[[Array, Axes, float], Array]


def _mean(x: Array, axes: Axes) -> Array:
    return jnp.mean(x, axes, keepdims=True)


def _two_pass(x: Array, axes: Axes, eps: float) -> Array:
    mu = _mean(x, axes)
    return (x - mu) / jnp.sqrt(_mean((x - mu) ** 2, axes) + eps)


def _shared_difference(x: Array, axes: Axes, eps: float) -> Array:
    c = x - _mean(x, axes)
    return c * lax.rsqrt(_mean(c * c, axes) + eps)


def _fast(x: Array, axes: Axes, eps: float) -> Array:
    mu = _mean(x, axes)
    return (x - mu) * lax.rsqrt(_mean(x * x, axes) - mu * mu + eps)


def _fast_clamped(x: Array, axes: Axes, eps: float) -> Array:
    mu = _mean(x, axes)
    return (x - mu) * lax.rsqrt(jnp.maximum(0.0, _mean(jnp.square(x), axes) - jnp.square(mu)) + eps)


def _by_sums(x: Array, axes: Axes, eps: float) -> Array:
    n = elements([x.shape[a] for a in axes])
    mu = x.sum(axes, keepdims=True) / n
    return (x - mu) / (jnp.sum((x - mu) ** 2, axes, keepdims=True) / n + eps) ** 0.5


def _standardize(x: Array, axes: Axes, eps: float) -> Array:
    return nn.standardize(x, axes, epsilon=eps)


def _var(x: Array, axes: Axes, eps: float) -> Array:
    return (x - _mean(x, axes)) / jnp.sqrt(x.var(axes, keepdims=True) + eps)


def _eps_first(x: Array, axes: Axes, eps: float) -> Array:
    return (x - _mean(x, axes)) * (1 / jnp.sqrt(eps + x.var(axes, keepdims=True)))


def _in_float32(norm: Norm) -> Norm:
    return lambda x, axes, eps: norm(x.astype(wider()), axes, eps).astype(x.dtype)


def _rms(x: Array, axes: Axes, eps: float) -> Array:
    return x * lax.rsqrt(_mean(x * x, axes) + eps)


def _rms_divided(x: Array, axes: Axes, eps: float) -> Array:
    return x / jnp.sqrt(_mean(x**2, axes) + eps)


def _rms_by_norm(x: Array, axes: Axes, eps: float) -> Array:
    n = elements([x.shape[a] for a in axes])
    return x / jnp.sqrt(jnp.sum(jnp.abs(x) ** 2, axes, keepdims=True) / n + eps)


def _scale_and_shift(x: Array, axes: Axes, eps: float) -> Array:
    inv = lax.rsqrt(x.var(axes, keepdims=True) + eps)
    return x * inv + (-_mean(x, axes) * inv)


def _shifted_first(x: Array, axes: Axes, eps: float) -> Array:
    inv = 1 / jnp.sqrt(_mean((x - _mean(x, axes)) ** 2, axes) + eps)
    return inv * x - inv * _mean(x, axes)


def _squares_by_product(x: Array, axes: Axes, eps: float) -> Array:
    over = sorted(a % x.ndim for a in axes)
    rows = [a for a in range(x.ndim) if a not in over]
    total = lax.dot_general(x, x, ((over, over), (rows, rows)))
    kept = [1 if a in over else n for a, n in enumerate(x.shape)]
    return x * lax.rsqrt(total.reshape(kept) / elements([x.shape[a] for a in over]) + eps)


RIGHT: dict[str, Norm] = {
    "two passes": _two_pass,
    "shared difference": _shared_difference,
    "fast variance": _fast,
    "fast variance, clamped": _fast_clamped,
    "by sums": _by_sums,
    "standardize": _standardize,
    "x.var": _var,
    "epsilon first": _eps_first,
    "scale and shift": _scale_and_shift,
    "scale and shift, inverse first": _shifted_first,
    "rms, squares by a product": _squares_by_product,
    "two passes in f32": _in_float32(_two_pass),
    "fast variance in f32": _in_float32(_fast_clamped),
    "rms": _rms,
    "rms, divided": _rms_divided,
    "rms by norm": _rms_by_norm,
    "rms in f32": _in_float32(_rms),
}


def _layer(centre: Callable[..., Array], denominator: Callable[..., Array]) -> Norm:
    """A norm by what is taken from x and what it is divided by."""

    def norm(x: Array, axes: Axes, eps: float) -> Array:
        mu, var = _mean(x, axes), _mean((x - _mean(x, axes)) ** 2, axes)
        return (x - centre(x, mu, var, axes)) / denominator(x, mu, var, eps)

    return norm


def _mu(x: Array, mu: Array, var: Array, axes: Axes) -> Array:
    return mu


def _std(x: Array, mu: Array, var: Array, eps: float) -> Array:
    return jnp.sqrt(var + eps)


def _rounded(v: Array) -> Array:
    return v.astype(jnp.bfloat16).astype(v.dtype)


def _ddof(x: Array, axes: Axes, eps: float) -> Array:
    n = elements([x.shape[a] for a in axes])
    return (x - _mean(x, axes)) / jnp.sqrt(
        jnp.sum((x - _mean(x, axes)) ** 2, axes, keepdims=True) / max(n - 1, 1) + eps
    )


def _other_share(x: Array, axes: Axes, eps: float) -> Array:
    n = x.shape[0]
    mu = x.sum(axes, keepdims=True) / n
    return (x - mu) * lax.rsqrt(jnp.sum((x - mu) ** 2, axes, keepdims=True) / n + eps)


def _uneven(x: Array, axes: Axes, eps: float) -> Array:
    return (x - _mean(x, (0,))) * lax.rsqrt(x.var(axes, keepdims=True) + eps)


def _two_arrays(x: Array, axes: Axes, eps: float) -> Array:
    y = jnp.sin(x)
    return (x - _mean(x, axes)) * lax.rsqrt(y.var(axes, keepdims=True) + eps)


def _shifted(x: Array, axes: Axes, eps: float) -> Array:
    return (x - 1 - _mean(x, axes)) * lax.rsqrt(x.var(axes, keepdims=True) + eps)


def _squares_of_one(x: Array, axes: Axes, eps: float) -> Array:
    return x * lax.rsqrt(_mean(x * jnp.flip(x, axes), axes) + eps)


def _twice(x: Array, axes: Axes, eps: float) -> Array:
    return _rms(_two_pass(x, axes, eps), axes, eps)


def _spread_out(shift: Callable[..., Array]) -> Norm:
    """A scale and a shift, by what is taken away: of x, the inverse root, their axes and epsilon."""

    def norm(x: Array, axes: Axes, eps: float) -> Array:
        inv = lax.rsqrt(x.var(axes, keepdims=True) + eps)
        return x * inv - shift(x, inv, axes, eps)

    return norm


WRONG: dict[str, Norm] = {
    "epsilon outside": _layer(_mu, lambda x, mu, var, eps: jnp.sqrt(var) + eps),
    "epsilon twice": _layer(_mu, lambda x, mu, var, eps: jnp.sqrt(var + eps) + eps),
    "no epsilon": _layer(_mu, lambda x, mu, var, eps: jnp.sqrt(var)),
    "large epsilon": _layer(_mu, lambda x, mu, var, eps: jnp.sqrt(var + 0.5)),
    "epsilon taken": _layer(_mu, lambda x, mu, var, eps: jnp.sqrt(var - eps)),
    "at least epsilon": _layer(_mu, lambda x, mu, var, eps: jnp.sqrt(jnp.maximum(var, eps))),
    "at least 0.1": _layer(_mu, lambda x, mu, var, eps: jnp.sqrt(jnp.maximum(var, 0.1) + eps)),
    "the variance": _layer(_mu, lambda x, mu, var, eps: var + eps),
    "power 0.49": _layer(_mu, lambda x, mu, var, eps: (var + eps) ** 0.49),
    "mean deviation": _layer(_mu, lambda x, mu, var, eps: jnp.sqrt(jnp.abs(x - mu).mean(-1, keepdims=True) + eps)),
    "half the mean": _layer(lambda x, mu, var, axes: 0.5 * mu, _std),
    "twice the mean": _layer(lambda x, mu, var, axes: 2 * mu, _std),
    "its maximum": _layer(lambda x, mu, var, axes: x.max(axes, keepdims=True), _std),
    "mean frozen": _layer(lambda x, mu, var, axes: lax.stop_gradient(mu), _std),
    "std frozen": _layer(_mu, lambda x, mu, var, eps: lax.stop_gradient(jnp.sqrt(var + eps))),
    "variance frozen": _layer(_mu, lambda x, mu, var, eps: jnp.sqrt(lax.stop_gradient(var) + eps)),
    "mean rounds": _layer(lambda x, mu, var, axes: _rounded(mu), _std),
    "variance rounds": _layer(_mu, lambda x, mu, var, eps: jnp.sqrt(_rounded(var) + eps)),
    "difference rounds": lambda x, axes, eps: (
        _rounded(x - _mean(x, axes)) * lax.rsqrt(x.var(axes, keepdims=True) + eps)
    ),
    "a shift of half the mean": _spread_out(lambda x, inv, axes, eps: 0.5 * _mean(x, axes) * inv),
    "a shift, added": _spread_out(lambda x, inv, axes, eps: -_mean(x, axes) * inv),
    "a shift of another epsilon": _spread_out(
        lambda x, inv, axes, eps: _mean(x, axes) * lax.rsqrt(x.var(axes, keepdims=True) + 3 * eps)
    ),
    "a shift of another mean": _spread_out(lambda x, inv, axes, eps: _mean(jnp.tanh(x), axes) * inv),
    "a shift by the square": _spread_out(lambda x, inv, axes, eps: _mean(x, axes) * inv * inv),
    "ddof 1": _ddof,
    "another share": _other_share,
    "uneven": _uneven,
    "two arrays": _two_arrays,
    "shifted": _shifted,
    "rms of another order": _squares_of_one,
    "norm of norm": _twice,
    "l2": lambda x, axes, eps: x * lax.rsqrt(jnp.sum(x * x, axes, keepdims=True) + eps),
    "rms about the mean": lambda x, axes, eps: x * lax.rsqrt(x.var(axes, keepdims=True) + eps),
    "layer about zero": lambda x, axes, eps: (x - _mean(x, axes)) * lax.rsqrt(_mean(x * x, axes) + eps),
    "doubled rms": lambda x, axes, eps: 2 * _rms(x, axes, eps),
    "negated": lambda x, axes, eps: -_two_pass(x, axes, eps),
    "rms to the fourth": lambda x, axes, eps: x * lax.rsqrt(_mean(x**4, axes) + eps),
}


# -- scale and bias: (draft, axis sizes) -> (params, xhat, x) -> y -----------------------------------------------------


def _affine(spelling: Callable[..., Array], count: int, rows: bool = False) -> Callable[..., Any]:
    def make(d: Draft, axes: Axes) -> Callable[[Sequence[Array], Array], Array]:
        along = [a % len(d.shape) for a in axes]
        keep = [0] if rows else along
        shape = tuple(s if i in keep else 1 for i, s in enumerate(d.shape))
        given = [d.param(*shape, role="scale" if i == 0 else "bias") for i in range(count)]
        return lambda p, xhat: spelling(xhat, *(g(p).astype(xhat.dtype) for g in given))

    return make


AFFINES = {
    "": _affine(lambda xhat: xhat, 0),
    "scale": _affine(lambda xhat, g: xhat * g, 1),
    "scale first": _affine(lambda xhat, g: g * xhat, 1),
    "bias": _affine(lambda xhat, b: xhat + b, 1),
    "scale, bias": _affine(lambda xhat, g, b: xhat * g + b, 2),
    "bias + scaled": _affine(lambda xhat, g, b: b + g * xhat, 2),
    "1 + scale": _affine(lambda xhat, g: xhat * (1 + g), 1),
    "bias, then scale": _affine(lambda xhat, g, b: (xhat + b) * g, 2),
    "scale twice": _affine(lambda xhat, g: xhat * g * g, 1),
    "scale is bias": _affine(lambda xhat, g: xhat * g + g, 1),
    "divided by scale": _affine(lambda xhat, g: xhat / (2 + g * g), 1),
    "less bias": _affine(lambda xhat, b: xhat - b, 1),
    "scale by rows": _affine(lambda xhat, g: xhat * g, 1, True),
    "bias by rows": _affine(lambda xhat, g: xhat + g, 1, True),
    "3 scale": _affine(lambda xhat, g: 3 * xhat * g, 1),
    "scale frozen": _affine(lambda xhat, g: xhat * lax.stop_gradient(g), 1),
}
ESCAPES = {
    "mean escapes": lambda x, axes, y: (y, (_mean(x, axes),)),
    "variance escapes": lambda x, axes, y: (y, (x.var(axes),)),
    "y escapes": lambda x, axes, y: (y, (y,)),
    "the mean put back": lambda x, axes, y: (y + _mean(x, axes), ()),
    "residual": lambda x, axes, y: (x + y, ()),
    "gated by x": lambda x, axes, y: (y * x, ()),
    "relu": lambda x, axes, y: (nn.relu(y), ()),
    "silu": lambda x, axes, y: (nn.silu(y), ()),
}


def _axes(d: Draft) -> Axes:
    rank = len(d.shape)
    choices: list[Axes] = [(-1,)] * 5
    if rank > 1:
        choices += [(-2,), (0,), (rank - 1,), (-2, -1)]
    if rank > 2:
        choices += [(0, -1), (0, 1), (1,)]
    axes = d.rng.choice(choices)
    d.words.append(f"axes {axes}")
    return axes


def _in_groups(norm: Norm, groups: int, first: int, interleaved: bool) -> Norm:
    """A norm of groups of the last axis, over the axes from `first` on as well."""

    def of_groups(x: Array, axes: Axes, eps: float) -> Array:
        *rest, channels = x.shape
        parts, group = ((channels // groups, groups), -2) if interleaved else ((groups, channels // groups), -1)
        over = (*range(first, len(rest)), len(rest) + 2 + group)
        return norm(x.reshape(*rest, *parts), over, eps).reshape(x.shape)

    return of_groups


def _maybe_in_groups(d: Draft, norm: Norm) -> tuple[Norm, Axes]:
    rank, channels = len(d.shape), d.shape[-1]
    divisors = [g for g in range(2, channels) if channels % g == 0]
    if rank < 2 or not divisors or not d.chance(0.3):
        return norm, _axes(d)
    groups, first = d.rng.choice(divisors), d.rng.randrange(rank)
    d.words.append(f"{groups} groups from axis {first}")
    return _in_groups(norm, groups, first, d.chance(0.1)), (-1,)


def norm(d: Draft) -> Piece:
    """A norm with or without scale and bias, of groups of channels or of whole axes, at times with one thing wrong."""
    body, axes = _maybe_in_groups(d, d.pick(RIGHT if d.chance(0.6) else WRONG))
    eps = d.rng.choice([1e-5, 1e-6, 1e-3, 1e-12, jnp.asarray(1e-5, np.float32), np.float32(1e-6)])
    affine = d.pick(AFFINES)(d, axes)
    escape = d.pick(ESCAPES) if d.chance(0.2) else None
    cast = d.chance(0.2)

    def fn(p: Sequence[Array], x: Array) -> tuple[Array, tuple[Array, ...]]:
        xhat = body(x, axes, eps)
        y = affine(p, xhat.astype(wider()) if cast else xhat).astype(x.dtype)
        return (y, ()) if escape is None else escape(x, axes, y)

    return d.done(fn, d.shape, "norm")
