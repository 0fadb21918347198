"""Values and derivatives of a function of one number, on points that distinguish functions, and how far two functions are apart."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..interpret.evaluate import Inline, ReducedSizes, evaluate
from ..program.ir import Value
from ..settings import unwrapped
from .certify import with_gradients, with_vjp

SMOOTH_POINTS = (
    -9.0,
    -4.0,
    -2.7,
    -2.02,
    -1.3,
    -0.9,
    -0.5,
    -0.1,
    -1e-3,
    1e-3,
    0.1,
    0.5,
    0.9,
    1.3,
    2.02,
    2.7,
    4.0,
    5.5,
    7.0,
    9.0,
)
HARD_POINTS = (0.0, -0.0, -1e4, 1e4, -100.0, 100.0, math.inf, -math.inf, math.nan)
_CHUNK_ELEMENTS = 2304
_GRID = np.geomspace(1e-6, 3e38, 1500)  # 34 points a decade
_NEAR, _FAR = 9.0, 100.0
_NOISE, _FAR_NOISE = 1e-13, 1e-30  # of 1 + tanh(h) near 0 in float64, for |h| up to _FAR; beyond that there is none


@dataclass(frozen=True)
class Profile:
    """Values of a function on `points`, and derivatives on `slope_points` (the second ones, if asked for, at the end)."""

    points: np.ndarray
    value: np.ndarray
    slope: np.ndarray
    slope_points: np.ndarray


@dataclass(frozen=True)
class Gap:
    """The difference between two functions: `size`, and the point where one is `got` and the other `want`."""

    # On ordinary numbers the largest, roughly, and the mean; the largest on all numbers.
    size: tuple[float, float, float]
    point: float
    got: float
    want: float

    def __str__(self) -> str:
        digits = next((d for d in (3, 6, 9) if f"{self.got:.{d}g}" != f"{self.want:.{d}g}"), None)
        if digits is None:
            return ", from which it differs in infinities or NaN, or by less than 1e-9"
        return f": at {self.point:.3g} that is {self.want:.{digits}g} and this is {self.got:.{digits}g}"


def gap(got: np.ndarray, want: np.ndarray, points: np.ndarray) -> Gap:
    """The differences where both are finite, relative to magnitudes above 1, and the largest, of ordinary numbers if there is one.

    A difference of 1e37 between two functions of 1e38 is not informative; 6 instead of 9 at the point 9 is.
    """
    with np.errstate(all="ignore"):
        both = np.isfinite(got) & np.isfinite(want)
        apart = np.where(both, np.abs(got - want) / np.maximum(1.0, np.abs(want)), 0.0)
    near = np.where(np.abs(points) <= _NEAR, apart, 0.0)
    at = int(np.argmax(near if near.any() else apart))
    size = float(f"{near.max(initial=0.0):.2g}"), float(near.mean()), float(apart.max(initial=0.0))
    return Gap(size, float(points[at]), float(got[at]), float(want[at]))


def distance(got: np.ndarray, want: np.ndarray, points: np.ndarray, noisy: bool = True) -> float:
    """The largest difference relative to `want`, however small that is; inf where NaN or infinities do not coincide.

    It is not relative to the largest value: a logarithm that follows distinguishes relu(h) + 1e-7 from relu. Two allowances: near the
    origin, where a function or its slope crosses 0, `min(1, |h|)` counts as its size; and in a tail exp(-u), where u's own error is
    multiplied by u, the size is |want| * (1 + |log |want||). `noisy` also allows for the cancellation of 1 + tanh(h).
    """
    if not np.array_equal(np.isnan(got), np.isnan(want)):
        return math.inf
    real = ~np.isnan(want)
    got, want, points = got[real], want[real], np.abs(points[real])
    special = ~np.isfinite(got) | ~np.isfinite(want)
    if not np.array_equal(got[special], want[special]):
        return math.inf
    got, want, points = got[~special], want[~special], points[~special]
    with np.errstate(all="ignore"):
        size = np.abs(want)
        size = np.where(size > 0, size * (1 + np.abs(np.log(size))), 0.0)
        size = np.maximum(size, np.where(points <= _NEAR, np.minimum(1.0, points), 0.0))
        excess = np.abs(got - want) - (np.where(points <= _FAR, _NOISE, _FAR_NOISE) if noisy else 0.0)
        ratio = np.where(excess <= 0, 0.0, excess / size)
    return float(np.max(ratio, initial=0.0))


def profile(fn: Callable[..., Any], like: Value, points: np.ndarray, inline: Inline, twice: bool = False) -> Profile:
    """Values and derivative of an elementwise `fn` traced at `like`'s real shape and dtype, evaluated in float64 on points.

    With `twice` the second derivative at the smooth points is appended to the slopes.
    """
    aval = like.aval
    with unwrapped():
        both = with_gradients(fn, [aval], aval, as_jax=twice)
    value, slope = on_points(both, like.shape, points, inline)
    if twice:

        def first(h: Any) -> Any:
            y, pull = jax.vjp(fn, h)
            return pull(jnp.ones_like(y))[0]

        _, curve = on_points(with_vjp(first, [aval], aval), like.shape, np.array(SMOOTH_POINTS), inline)
        slope = np.concatenate([slope, curve])
    return Profile(points, value, slope, np.concatenate([points, SMOOTH_POINTS])[: len(slope)])


def on_points(closed: Any, shape: Sequence[int], points: np.ndarray, inline: Inline) -> list[np.ndarray]:
    """Evaluates an elementwise program of one array, and maybe its cotangent, with the points laid along one axis."""
    axis = next((i for i in reversed(range(len(shape))) if shape[i] != 1), None)
    if axis is None:
        return _point_by_point(closed, shape, points, inline)
    # Axes of one real size reduce to one size: with a square shape every chunk of points becomes a square.
    alike = shape.count(shape[axis])
    chunk = len(points) if alike == 1 else max(2, int(_CHUNK_ELEMENTS ** (1 / alike)))
    chunks = [_along(closed, shape, axis, points[i : i + chunk], inline) for i in range(0, len(points), chunk)]
    return [np.concatenate(column) for column in zip(*chunks, strict=True)]


def _point_by_point(closed: Any, shape: Sequence[int], points: np.ndarray, inline: Inline) -> list[np.ndarray]:
    """As `on_points`, of an array of one entry."""
    ones = [np.ones(shape)] * (len(closed.in_avals) - 1)
    rows = [evaluate(closed, [np.full(shape, p), *ones], None, inline) for p in points]
    return [np.array([x.item() for x in column]) for column in zip(*rows, strict=True)]


def _along(closed: Any, shape: Sequence[int], axis: int, points: np.ndarray, inline: Inline) -> list[np.ndarray]:
    """As `on_points`, of as many points as are laid along an axis at once."""
    sizes = {s: 2 for s in shape if s != 1} | {shape[axis]: len(points)}
    reduced = tuple(sizes.get(s, s) for s in shape)
    line = points.reshape([-1 if i == axis else 1 for i in range(len(reduced))])
    args = [np.broadcast_to(line, reduced), *[np.ones(reduced)] * (len(closed.in_avals) - 1)]
    pick = tuple(slice(None) if i == axis else 0 for i in range(len(reduced)))
    return [np.broadcast_to(x, reduced)[pick] for x in evaluate(closed, args, ReducedSizes(sizes), inline)]


def points_of(switches: Sequence[float]) -> np.ndarray:
    steps = [2.0**-22 * max(abs(c), 2.0**-20) for c in switches]
    near = [c + sign * step for c, step in zip(switches, steps, strict=True) for sign in (-1, 0, 1)]
    ordered = sorted(switches)
    between_them = [(a + b) / 2 for a, b in itertools.pairwise(ordered)]
    return np.array([*SMOOTH_POINTS, *HARD_POINTS, *near, *between_them, *_GRID, *-_GRID])
