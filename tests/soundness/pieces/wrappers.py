"""What a piece may stand inside: scan, loops, vmap, remat, cond, jit, and reuse of one piece or of its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .glue import MEETINGS, met
from .piece import Array, Param, Piece, joined

STEPS = 2


def _small(escaped: Sequence[Array]) -> Array:
    """What escapes, as one number: branches and steps must give the same shapes."""
    return sum((jnp.sum(e).astype(jnp.float32) for e in escaped), jnp.zeros((), jnp.float32))


def _keeps(piece: Piece, x: Param) -> bool:
    return piece.shape == x.shape


def _stacked(params: Sequence[Param], n: int) -> tuple[Param, ...]:
    return tuple(replace(p, shape=(n, *p.shape)) for p in params)


def scan_layers(rng: Any, x: Param, piece: Piece, other: Piece) -> Piece | None:
    """The piece as layers: x is the carry, weights are stacked; what escapes is stacked."""
    if not _keeps(piece, x):
        return None
    reverse = rng.random() < 0.2

    def fn(params: Sequence[Array], x: Array) -> tuple[Array, tuple[Array, ...]]:
        return lax.scan(lambda c, ws: piece.fn(ws, c), x, tuple(params), length=STEPS, reverse=reverse)

    return replace(joined([piece], fn, f"scan[{piece.text}]"), params=_stacked(piece.params, STEPS))


def scan_shared(rng: Any, x: Param, piece: Piece, other: Piece) -> Piece | None:
    """The same weights at every step: they are constants of the scan."""
    if not _keeps(piece, x):
        return None

    def fn(params: Sequence[Array], x: Array) -> tuple[Array, tuple[Array, ...]]:
        def step(c: Array, _: None) -> tuple[Array, Array]:
            y, escaped = piece.fn(params, c)
            return (c + y) * 0.5, _small(escaped)

        y, numbers = lax.scan(step, x, None, length=STEPS)
        return y, (numbers,)

    return joined([piece], fn, f"scan shared[{piece.text}]")


def scan_rows(rng: Any, x: Param, piece: Piece, other: Piece) -> Piece | None:
    """Several x, one a step; the results are ys, their sum is carried."""

    def fn(params: Sequence[Array], x: Array) -> tuple[Array, tuple[Array, ...]]:
        def step(total: Array, row: Array) -> tuple[Array, tuple]:
            y, escaped = piece.fn(params, row)
            return total + jnp.sum(y).astype(jnp.float32), (y, escaped)

        total, (ys, escaped) = lax.scan(step, jnp.zeros(()), jnp.stack([x, jnp.flip(x, -1)]))
        return ys.sum(0).astype(ys.dtype), (total, *escaped)

    return joined([piece], fn, f"scan rows[{piece.text}]")


def counted_loop(rng: Any, x: Param, piece: Piece, other: Piece) -> Piece | None:
    if not _keeps(piece, x):
        return None

    def fn(params: Sequence[Array], x: Array) -> tuple[Array, tuple[Array, ...]]:
        return lax.fori_loop(0, STEPS, lambda i, c: piece.fn(params, c)[0], x), ()

    return joined([piece], fn, f"loop[{piece.text}]")


def while_loop(rng: Any, x: Param, piece: Piece, other: Piece) -> Piece | None:
    if not _keeps(piece, x):
        return None

    def fn(params: Sequence[Array], x: Array) -> tuple[Array, tuple[Array, ...]]:
        def body(state: tuple) -> tuple:
            return state[0] + 1, piece.fn(params, state[1])[0]

        steps, y = lax.while_loop(lambda s: (s[0] < STEPS) & (jnp.sum(s[1]) < 1e6), body, (0, x))
        return y, (jnp.asarray(steps, jnp.float32),)

    return replace(joined([piece], fn, f"while[{piece.text}]"), differentiable=False)


def vmapped(rng: Any, x: Param, piece: Piece, other: Piece) -> Piece | None:
    """Mapped over a new axis of x, and of some parameters, wherever that axis stands in the result."""
    n, into = 2, rng.randrange(len(x.shape) + 1)
    mapped = [rng.random() < 0.4 for _ in piece.params]
    out = rng.choice([0, -1, rng.randrange(len(piece.shape) + 1)])

    def fn(params: Sequence[Array], x: Array) -> tuple[Array, tuple[Array, ...]]:
        several = jnp.stack([x, jnp.sin(x)], into)
        axes = [0 if m else None for m in mapped]
        y, escaped = jax.vmap(lambda p, x: piece.fn(p, x), (axes, into), (out, 0))(list(params), several)
        return y.sum(out).astype(y.dtype), escaped

    params = tuple(replace(p, shape=(n, *p.shape)) if m else p for p, m in zip(piece.params, mapped, strict=True))
    return replace(joined([piece], fn, f"vmap[{piece.text}]"), params=params)


def nested_vmap_of_weights(rng: Any, x: Param, piece: Piece, other: Piece) -> Piece | None:
    """One x against several sets of parameters."""
    if not piece.params:
        return None

    def fn(params: Sequence[Array], x: Array) -> tuple[Array, tuple[Array, ...]]:
        y, escaped = jax.vmap(lambda *p: piece.fn(p, x))(*params)
        return y.mean(0).astype(y.dtype), escaped

    return replace(joined([piece], fn, f"vmap weights[{piece.text}]"), params=_stacked(piece.params, 2))


POLICIES = {
    "": None,
    "dots saveable": jax.checkpoint_policies.dots_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "dots without batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "named": jax.checkpoint_policies.save_only_these_names("h", "y"),
}


def remat(rng: Any, x: Param, piece: Piece, other: Piece) -> Piece | None:
    name = rng.choice(list(POLICIES))
    prevent = rng.random() < 0.5

    def fn(params: Sequence[Array], x: Array) -> tuple[Array, tuple[Array, ...]]:
        again = jax.checkpoint(lambda p, x: piece.fn(p, x), policy=POLICIES[name], prevent_cse=prevent)
        return again(tuple(params), x)

    return joined([piece], fn, f"remat {name}[{piece.text}]")


def cond(rng: Any, x: Param, piece: Piece, other: Piece) -> Piece | None:
    """The piece in one branch; in the other another piece of the same result, or what is left of x."""
    second = other if other.shape == piece.shape else None
    turned = rng.random() < 0.5

    def fn(params: Sequence[Array], x: Array) -> tuple[Array, tuple[Array, ...]]:
        mine, theirs = params[: len(piece.params)], params[len(piece.params) :]

        def one(x: Array) -> tuple[Array, Array]:
            y, escaped = piece.fn(mine, x)
            return y, _small(escaped)

        def two(x: Array) -> tuple[Array, Array]:
            if second is None:
                return jnp.full(piece.shape, x.mean().astype(x.dtype)), jnp.zeros((), jnp.float32)
            y, escaped = second.fn(theirs, x)
            return y, _small(escaped)

        first = jnp.ravel(x)[0] > 0
        y, number = lax.cond(first != turned, one, two, x)
        return y, (number,)

    parts = [piece] if second is None else [piece, second]
    return joined(parts, fn, f"cond[{' | '.join(p.text for p in parts)}]")


def nested_jit(rng: Any, x: Param, piece: Piece, other: Piece) -> Piece | None:
    def fn(params: Sequence[Array], x: Array) -> tuple[Array, tuple[Array, ...]]:
        return jax.jit(lambda p, x: piece.fn(p, x))(tuple(params), x)

    return joined([piece], fn, f"jit[{piece.text}]")


def twice(rng: Any, x: Param, piece: Piece, other: Piece) -> Piece | None:
    """The same parameters used twice, in a row or side by side."""
    row = _keeps(piece, x) and rng.random() < 0.5

    def fn(params: Sequence[Array], x: Array) -> tuple[Array, tuple[Array, ...]]:
        y, escaped = piece.fn(params, x)
        z, more = piece.fn(params, y if row else jnp.sin(x))
        return (z if row else y * z), escaped + more

    return joined([piece], fn, f"twice{' in a row' * row}[{piece.text}]")


def residual(rng: Any, x: Param, piece: Piece, other: Piece) -> Piece | None:
    name = rng.choice(list(MEETINGS))

    def fn(params: Sequence[Array], x: Array) -> tuple[Array, tuple[Array, ...]]:
        y, escaped = piece.fn(params, x)
        return met(name, x, y), escaped

    shape = jax.eval_shape(lambda a, b: met(name, a, b), _aval(x.shape, x.dtype), _aval(piece.shape, x.dtype)).shape
    return joined([piece], fn, f"{name} with[{piece.text}]", shape)


def parallel(rng: Any, x: Param, piece: Piece, other: Piece) -> Piece | None:
    """Two pieces of one x, met."""
    name, n = rng.choice(list(MEETINGS)), len(piece.params)

    def fn(params: Sequence[Array], x: Array) -> tuple[Array, tuple[Array, ...]]:
        y, escaped = piece.fn(params[:n], x)
        z, more = other.fn(params[n:], x)
        return met(name, y, z), escaped + more

    shape = jax.eval_shape(lambda a, b: met(name, a, b), _aval(piece.shape, x.dtype), _aval(other.shape, x.dtype)).shape
    return joined([piece, other], fn, f"{name} of[{piece.text} | {other.text}]", shape)


def differentiated(rng: Any, x: Param, piece: Piece, other: Piece) -> Piece | None:
    """The gradient of the piece with respect to x: a program that is differentiated already."""
    if not piece.differentiable:
        return None

    def fn(params: Sequence[Array], x: Array) -> tuple[Array, tuple[Array, ...]]:
        def total(x: Array) -> Array:
            y, escaped = piece.fn(params, x)
            return jnp.sum(jnp.sin(y.astype(jnp.float32))) + _small(escaped)

        value, slope = jax.value_and_grad(total)(x)
        return slope, (value,)

    return joined([piece], fn, f"grad[{piece.text}]", x.shape)


def mapped_sequence(rng: Any, x: Param, piece: Piece, other: Piece) -> Piece | None:
    """lax.map, which is a scan whose body has no carry."""

    def fn(params: Sequence[Array], x: Array) -> tuple[Array, tuple[Array, ...]]:
        ys = lax.map(lambda row: piece.fn(params, row)[0], jnp.stack([x, 0.5 * x]))
        return ys[0] + ys[1], ()

    return joined([piece], fn, f"map[{piece.text}]")


def _aval(shape: Sequence[int], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


WRAPPERS = (
    scan_layers, scan_shared, scan_rows, counted_loop, while_loop, vmapped, nested_vmap_of_weights, remat, remat, cond, cond,
    nested_jit, twice, twice, residual, residual, residual, parallel, parallel, differentiated, mapped_sequence,
)  # fmt: skip
