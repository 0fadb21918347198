"""Random small programs: planted sites, right and wrong, random glue around them, wrapped in control flow and transformations.

`program(seed)` is a function of the seed alone. Nothing here knows what fusionlab does with a program.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .pieces.attention_sites import attention
from .pieces.glue import glue
from .pieces.linear_sites import linear
from .pieces.norm_sites import norm
from .pieces.piece import Array, Draft, Param, Piece, chain, elements, joined, wider
from .pieces.wrappers import WRAPPERS

SIZES = (1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8)
DTYPES = (
    *(("float32", "float32"),) * 6,
    *(("bfloat16", "bfloat16"), ("bfloat16", "float32")) * 2,
    ("float16", "float16"),
)
# Where there is x64: as above, and what a program computes in a wider dtype on purpose it computes in float64.
WIDE_DTYPES = (*(("float64", "float64"), ("float32", "float32")) * 3, ("float32", "float64"), ("bfloat16", "float32"))
DRAWS = ("normal", "zeros", "large", "constant", "edge")
_LARGEST_ARRAY = 400


@dataclass(frozen=True)
class Program:
    """A random program.

    Attributes:
      seed: what it was made from.
      fn: (x, *params) -> list of arrays.
      params: shapes, dtypes and roles of all arguments.
      text: what is in it.
      outer: a transformation that both the original and the fused function are put through.
      largest, differentiable: as of a Piece.
      outputs: what its outputs are called; () for "output 0", "output 1", ... The first word is the group an output is measured in.
      baseline: of the same arguments: what is of no interest in the outputs and large beside what is; it is taken off in float64.
    """

    seed: int
    fn: Callable[..., list[Array]]
    params: tuple[Param, ...]
    text: str
    outer: str
    largest: float
    differentiable: bool
    outputs: tuple[str, ...] = ()
    baseline: Callable[..., list[Array]] | None = None

    @property
    def avals(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in self.params]

    def arguments(self, draw: str, seed: int = 0) -> list[np.ndarray]:
        """One set of arguments, floats in float64: "normal", "zeros" (zeros and ties among them), "large", "constant" (rows of
        one number: without variance) or "edge" (some near the largest number of their dtype)."""
        rng = np.random.default_rng((self.seed, DRAWS.index(draw), seed))
        return [_argument(rng, p, draw, self.largest) for p in self.params]


def _argument(rng: np.random.Generator, p: Param, draw: str, largest: float) -> np.ndarray:
    if p.dtype == "bool":
        kept = rng.random(p.shape) < (0.5 if draw == "zeros" else 0.7)
        return kept if draw == "zeros" else kept | (np.arange(p.shape[-1]) == 0)  # zeros: rows that see nothing, too
    x = rng.normal(size=p.shape)
    if p.role == "weight" and p.shape:
        x *= 1.0 / np.sqrt(max(1, p.shape[0]))
    if draw == "zeros":
        x = np.where(rng.random(p.shape) < 0.2, 0.0, x)
        if p.shape:
            x = x * (rng.random((*p.shape[:-1], 1)) < 0.7)  # whole rows of zeros: ties in every sum over them
        if p.role == "bias" or rng.random() < 0.1:
            x = np.zeros_like(x)
    if draw == "constant" and p.shape:
        x = np.broadcast_to(x[..., :1], p.shape)
    if draw == "edge" and jnp.issubdtype(p.dtype, jnp.floating):
        far = float(jnp.finfo(p.dtype).max) * rng.uniform(0.3, 1.0, p.shape)
        x = np.where(rng.random(p.shape) < 0.1, np.sign(x) * far, x)
    if draw == "large":
        hit = rng.random(p.shape) < 0.15
        x = np.where(hit, np.sign(x) * largest, x)
    return _representable(x, p.dtype)


def _representable(x: np.ndarray, dtype: str) -> np.ndarray:
    """Numbers the program's dtype holds, so that every way of running it starts from the same."""
    return np.asarray(x).astype(jnp.dtype(dtype)).astype(np.float64)


def _shape(rng: random.Random) -> tuple[int, ...]:
    rank = rng.choice([1, 2, 2, 2, 3, 3, 3, 4])
    if rng.random() < 0.2:
        return (rng.choice(SIZES[1:]),) * rank if rank < 4 else (2, 3, 3, 3)
    while True:
        shape = tuple(rng.choice(SIZES) for _ in range(rank))
        if elements(shape) <= _LARGEST_ARRAY // 2:
            return shape


def _site(rng: random.Random, shape: tuple[int, ...], dtype: str, param_dtype: str) -> Piece:
    kind = rng.choice(["linear", "linear", "linear", "attention", "attention", "norm", "norm", "glue"])
    if kind == "attention":
        flat = (1,) * (3 - len(shape)) + shape
        flat = (elements(flat[:-2]), *flat[-2:])
        if elements(flat) > 150:
            kind = "norm"
        else:
            draft = Draft(rng, flat, dtype, param_dtype)
            inner = attention(draft)
            if flat == shape:
                return inner
            return joined([inner], lambda p, x: inner.fn(p, x.reshape(flat)), inner.text)
    draft = Draft(rng, shape, dtype, param_dtype)
    if kind == "linear":
        return linear(draft, rng.choice([shape[-1], shape[-1], rng.choice(SIZES)]))
    return norm(draft) if kind == "norm" else glue(draft)


def _piece(rng: random.Random, shape: tuple[int, ...], dtype: str, param_dtype: str, depth: int) -> Piece:
    """One to three sites in a row, perhaps wrapped."""
    x = Param(shape, dtype, "data")
    pieces: list[Piece] = []
    for _ in range(rng.choice([1, 1, 1, 2] if depth else [1, 1, 2])):
        at = pieces[-1].shape if pieces else shape
        if depth and rng.random() < 0.35:
            pieces.append(_piece(rng, at, dtype, param_dtype, depth - 1))
        else:
            pieces.append(_site(rng, at, dtype, param_dtype))
        if elements(pieces[-1].shape) > _LARGEST_ARRAY:
            break
    if rng.random() < 0.3:
        pieces.append(glue(Draft(rng, pieces[-1].shape, dtype, param_dtype)))
    whole = chain(pieces)
    if rng.random() < 0.55:
        other = _site(rng, shape, dtype, param_dtype)
        wrapped = rng.choice(WRAPPERS)(rng, x, whole, other)
        whole = whole if wrapped is None else wrapped
    return whole


OUTER = ("", "", "", "", "", "vmap", "jit", "remat", "scan", "vmap of weights")


def transformed(fn: Callable[..., list[Array]], outer: str) -> Callable[..., list[Array]]:
    """A function of the same arguments: `fn` put through a transformation from outside."""
    if outer == "vmap":
        return lambda x, *ps: jax.vmap(lambda x: fn(x, *ps))(jnp.stack([x, jnp.flip(x)]))
    if outer == "vmap of weights":
        return lambda x, *ps: jax.vmap(lambda *ps: fn(x, *ps))(
            *(jnp.stack([p, p[..., ::-1] if p.ndim else p]) for p in ps)
        )
    if outer == "scan":
        return lambda x, *ps: jax.lax.scan(lambda c, x: (c, fn(x, *ps)), 0, jnp.stack([x, jnp.flip(x)]))[1]
    return {"jit": jax.jit, "remat": jax.checkpoint}.get(outer, lambda f: f)(fn)


def program(seed: int) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    dtype, param_dtype = rng.choice(WIDE_DTYPES if wider() == "float64" else DTYPES)
    shape = _shape(rng)
    piece = _piece(rng, shape, dtype, param_dtype, 1)
    params, fn = piece.params, _flat(piece)
    outer = rng.choice(OUTER)
    text = f"{dtype}{list(shape)}, parameters {param_dtype}: {piece.text}"
    if rng.random() < 0.1 and len(params) > 1:
        fn, params, text = _captured(seed, fn, params), params[:-1], text + "; the last parameter captured"
    if outer == "vmap of weights" and not params:
        outer = ""
    text += f"; {outer} outside" if outer else ""
    data = Param(shape, dtype, "data")
    return Program(seed, fn, (data, *params), text, outer, piece.largest, piece.differentiable)


def _captured(seed: int, fn: Callable[..., list[Array]], params: tuple[Param, ...]) -> Callable[..., list[Array]]:
    """`fn` with its last parameter an array of the program's own."""
    *_, last = params
    constant = jnp.asarray(_argument(np.random.default_rng(seed), last, "normal", 1.0), last.dtype)
    return lambda *args: fn(*args, constant)


def _flat(piece: Piece) -> Callable[..., list[Array]]:
    def fn(x: Array, *params: Array) -> list[Any]:
        y, escaped = piece.fn(params, x)
        return [y, *jax.tree.leaves(escaped)]

    return fn
