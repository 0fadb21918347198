"""Inputs on which a user's function is tested in addition to the ordinary numbers of every proof.

The package's own replacements are known; a user's is not. exp(x) / (1 + exp(x)) is a sigmoid on ordinary numbers but NaN on large
ones; with exp(min(x, 80)) it is a sigmoid in float64 but NaN in float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..dtypes import is_float
from ..interpret.evaluate import Inline, ReducedSizes, evaluate

# Where functions are only asked to hold: exp overflows at 1e4, a square at the last, its reciprocal at the first.
_HOLD = (1e-170, 1e170)
# Where they are compared, each input alone and all together, and where all together: zero is what padding is made of, and a bound, a
# window or a branch lies between any two of them.
_APART, _TOGETHER = (0.0, 30.0, 1e4), (1 / 512, 1 / 32, 1 / 4, 2.0, 4.0, 7.0, 12.0) * 2
_WHOLE = 4  # draws of whole numbers: ties, signs, zeros among others
_OFFSET = 30.0
_NEAR = 1e-3  # relative, of inputs as large as 30 and more: sin(x) moves by that where a literal is rounded
# What a program may add to the error that the other one has in the same dtypes, in which it may not lose `_WORSE` times as much. JAX runs
# programs of 16 bits with fewer roundings than are made here.
_ADDED = {"float64": 1e-9, "float32": 2e-5, "float16": 1e-2, "bfloat16": 8e-2}
_WORSE = 16


@dataclass(frozen=True)
class _Draw:
    """A change of the drawn inputs numbered `where`. `compared`: results must agree within `near`; else they only must be numbers."""

    seed: int
    where: tuple[int, ...]
    description: str
    of: Callable[[np.ndarray, Any], np.ndarray]
    compared: bool
    near: float


def _draws(floats: Sequence[int], tolerance: float) -> Iterator[_Draw]:
    every, seed = tuple(floats), itertools.count()

    def sized(size: float, where: tuple[int, ...], compared: bool) -> _Draw:
        near = max(tolerance * max(size, 1.0), _NEAR if size >= 30 else 0.0)
        description = f"inputs as large as {size:g}" if size else "inputs of 0"
        return _Draw(next(seed), where, description, lambda a, dtype: _fitting(a, size, dtype), compared, near)

    apart = dict.fromkeys([*((i,) for i in floats), every])
    yield from (sized(size, where, True) for size in _APART for where in apart)
    # A square may overflow, and the product of two operands not.
    yield from (sized(size ** (1 / max(len(where), 1)), where, False) for size in _HOLD for where in apart)
    yield from (sized(size, every, True) for size in _TOGETHER)
    for _ in range(_WHOLE):
        yield _Draw(next(seed), every, "inputs of whole numbers", lambda a, dtype: np.rint(2 * a), True, 4 * tolerance)
    yield _Draw(
        next(seed), every, f"inputs around {_OFFSET:g}", lambda a, dtype: a + _OFFSET, True, _OFFSET * tolerance
    )


def _fitting(a: np.ndarray, size: float, dtype: Any) -> np.ndarray:
    """Numbers of a size, or, if the dtype's range is smaller, of a size whose products and powers it still represents."""
    range_ = jnp.finfo(dtype)
    if size > 1e4 and dtype != np.float64:
        size = min(size, float(range_.max) ** 0.3)
    elif 0 < size < 1e-4 and dtype != np.float64:
        size = max(size, float(range_.tiny) ** 0.3)
    return np.clip(a * size, float(range_.min), float(range_.max))


def try_out(
    old: Any,
    new: Any,
    given: Callable[[int], tuple[ReducedSizes, list[np.ndarray]]],
    avals: Sequence[Any],
    inline: Inline,
    names: Sequence[str],
    tolerance: float,
) -> str | None:
    """The fault of a program on extreme numbers; None if there is none.

    On all draws it must return a number where the old one does, in float64 and with every result rounded to the program's dtypes. On
    most draws it must return the same number, and, rounded, be not much farther from float64's than the old program.

    Args:
      old, new: jaxprs of (arguments, cotangent) -> (value, gradients).
      given: seed -> sizes and drawn inputs, as `evaluate` takes them; the last is the cotangent.
      avals: the types of the arguments.
      inline: as `evaluate` takes it.
      names: of the results.
      tolerance: of ordinary numbers, relative.

    Raises:
      CannotEvaluate: as `evaluate`.
    """
    floats = [i for i, a in enumerate(avals) if is_float(a.dtype)]
    draws = list(_draws(floats, tolerance))
    dtypes = [a.dtype for a in avals]
    for draw in draws:
        sizes, args = given(draw.seed)
        drawn = _changed(draw, args, [np.float64] * len(avals))
        want, got = (evaluate(program, drawn, sizes, inline) for program in (old, new))
        for name, a, b in zip(names, want, got, strict=True):
            if wrong := _other(a, b, draw):
                return f"its {name} is {wrong}"
    for draw in draws:
        sizes, args = given(draw.seed)
        drawn = _changed(draw, args, dtypes)
        if wrong := _rounded(old, new, drawn, sizes, avals, inline, names, draw):
            return wrong
    return None


def _changed(draw: _Draw, args: Sequence[np.ndarray], dtypes: Sequence[Any]) -> list[np.ndarray]:
    """Ordinary arguments changed by a draw, for a program that takes them in these dtypes."""
    return [draw.of(a, dtypes[i]) if i in draw.where else a for i, a in enumerate(args)]


def _other(want: np.ndarray, got: np.ndarray, draw: _Draw) -> str | None:
    """The fault of a program on a draw in float64."""
    held = np.isfinite(want)
    if (bad := held & ~np.isfinite(got)).any():
        return f"{got[bad][0]} for {draw.description}, where the program's is a number"
    a, b = want[held], got[held]
    if not draw.compared:
        return None
    allowed = draw.near * np.max(np.abs(a), initial=0.0) + 1e-12
    return f"different for {draw.description}" if np.any(np.abs(a - b) > allowed) else None


def _rounded(
    old: Any,
    new: Any,
    drawn: Sequence[np.ndarray],
    sizes: ReducedSizes,
    avals: Sequence[Any],
    inline: Inline,
    names: Sequence[str],
    draw: _Draw,
) -> str | None:
    """The fault of a program with every result rounded to the program's dtype."""
    args = [
        a.astype(v.dtype).astype(np.float64) if is_float(v.dtype) else a for a, v in zip(drawn, avals, strict=False)
    ]
    args.append(drawn[-1])
    true = evaluate(old, args, sizes, inline)
    given, replaced = (evaluate(program, args, sizes, inline, rounded=True) for program in (old, new))
    floats = [i for i, v in enumerate(avals) if is_float(v.dtype)]
    dtype = max((np.dtype(avals[i].dtype) for i in floats), key=lambda d: float(jnp.finfo(d).eps))
    for name, t, a, b in zip(names, true, given, replaced, strict=True):
        # What cancels is as large as the terms were: at most as the inputs or 1, of a gradient as the cotangent.
        terms = args[-1:] if name != "value" else [np.clip(args[i], -1, 1) for i in floats]
        if wrong := _farther(name, (t, a, b), terms, dtype, draw):
            return wrong
    return None


def _farther(
    name: str, results: tuple[np.ndarray, ...], terms: Sequence[np.ndarray], dtype: np.dtype, draw: _Draw
) -> str | None:
    """The fault of a rounded result, from those of float64, the old and the new program. `terms`: the values that may cancel."""
    true, was, now = results
    held = np.isfinite(was) & np.isfinite(true)
    if (bad := held & ~np.isfinite(now)).any():
        return f"its {name} is {now[bad][0]} in {dtype} for {draw.description}, where the program's is a number"
    # JAX runs 16 bits with fewer roundings than are made here (see `_ADDED`): gradients in them are not compared.
    if not draw.compared or not held.any() or (name != "value" and dtype.itemsize < 4):
        return None
    size = float(np.max(np.abs(true[held])))
    before, after = (float(np.max(np.abs(x[held] - true[held]))) for x in (was, now))
    noise = 8 * float(jnp.finfo(dtype).eps) * max(float(np.max(np.abs(a), initial=0.0)) for a in terms)
    added = max(_ADDED[dtype.name], draw.near) * size + noise + float(jnp.finfo(dtype).tiny)
    if after <= added + _WORSE * before:
        return None
    sentence = f"its {name}, computed in {dtype}, is off by {after / (size or 1):.1g} for {draw.description}"
    return f"{sentence}, where the program's is off by {before / (size or 1):.1g}"
