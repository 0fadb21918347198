"""Optimisers of random train steps, by hand and from optax.

Each is steady: a rounding in a gradient stays one in the update. So Adam's epsilon is 1e-3, not 1e-8, at which the sign of a
gradient that is zero in theory would decide, and no update is a sign or divided by a norm.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .piece import Array, Param

EPSILON = 1e-3
Arrays = tuple[Array, ...]


@dataclass(frozen=True)
class Optimiser:
    """An optimiser of some arrays.

    Attributes:
      text: in words.
      init: arrays -> state.
      update: (gradients, state, arrays) -> updated arrays, state.
      state: the leaves of a state, as arguments.
      names: of those leaves ("first moment 0" is of the first array).
      unflatten: leaves -> state.
    """

    text: str
    init: Callable[[Arrays], Any]
    update: Callable[[Arrays, Any, Arrays], tuple[Arrays, Any]]
    state: tuple[Param, ...]
    names: tuple[str, ...]
    unflatten: Callable[[Sequence[Array]], Any]


def _less(p: Array, step: Array) -> Array:
    return (p - step).astype(p.dtype)


def _zeros(arrays: Arrays, dtype: Any = None) -> Arrays:
    return tuple(jnp.zeros(a.shape, dtype or a.dtype) for a in arrays)


def _sgd(rate: float, decay: float) -> tuple[Any, Any]:
    def update(gradients: Arrays, state: Any, arrays: Arrays) -> tuple[Arrays, Any]:
        return tuple(_less(p, rate * (g + decay * p)) for p, g in zip(arrays, gradients, strict=True)), state

    return lambda arrays: {}, update


def _momentum(rate: float, nesterov: bool) -> tuple[Any, Any]:
    def update(gradients: Arrays, state: Any, arrays: Arrays) -> tuple[Arrays, Any]:
        m = tuple(0.9 * m + g.astype(m.dtype) for m, g in zip(state["trace"], gradients, strict=True))
        steps = tuple(g + 0.9 * v for g, v in zip(gradients, m, strict=True)) if nesterov else m
        return tuple(_less(p, rate * s) for p, s in zip(arrays, steps, strict=True)), {"trace": m}

    return lambda arrays: {"trace": _zeros(arrays)}, update


def _adamw(rate: float, decay: float) -> tuple[Any, Any]:
    """With moments in float32, corrected for their start."""

    def update(gradients: Arrays, state: Any, arrays: Arrays) -> tuple[Arrays, Any]:
        count = state["count"] + 1
        wide = [g.astype(jnp.float32) for g in gradients]
        mu = tuple(0.9 * m + 0.1 * g for m, g in zip(state["mu"], wide, strict=True))
        nu = tuple(0.99 * v + 0.01 * jnp.square(g) for v, g in zip(state["nu"], wide, strict=True))
        first, second = (1 - b ** count.astype(jnp.float32) for b in (0.9, 0.99))
        steps = [m / first / (jnp.sqrt(v / second) + EPSILON) for m, v in zip(mu, nu, strict=True)]
        new = tuple(_less(p, rate * (s + decay * p)) for p, s in zip(arrays, steps, strict=True))
        return new, {"count": count, "mu": mu, "nu": nu}

    def init(arrays: Arrays) -> Any:
        wide = _zeros(arrays, jnp.float32)
        return {"count": jnp.zeros((), jnp.int32), "mu": wide, "nu": wide}

    return init, update


def _of_optax(made: Any) -> tuple[Any, Any]:
    def update(gradients: Arrays, state: Any, arrays: Arrays) -> tuple[Arrays, Any]:
        steps, state = made.update(gradients, state, arrays)
        return tuple(jax.tree.map(lambda p, s: (p + s).astype(p.dtype), arrays, steps)), state

    return made.init, update


# Without moments a gradient is judged by the update alone: the rate is large, so that an update is not lost in the parameter.
KINDS: Mapping[str, Callable[[], tuple[Any, Any]]] = {
    "sgd": lambda: _sgd(0.5, 0.0),
    "sgd with decay": lambda: _sgd(0.5, 0.01),
    "momentum": lambda: _momentum(0.05, False),
    "nesterov": lambda: _momentum(0.05, True),
    "adamw": lambda: _adamw(0.01, 0.1),
    "optax.sgd": lambda: _of_optax(optax.sgd(0.5)),
    "optax.sgd with momentum": lambda: _of_optax(optax.sgd(0.05, momentum=0.9, nesterov=True)),
    "optax.adam": lambda: _of_optax(optax.adam(0.01, b2=0.99, eps=EPSILON)),
    "optax.adamw": lambda: _of_optax(optax.adamw(0.01, b2=0.99, eps=EPSILON)),
}
_WORDS = {"mu": "first moment", "nu": "second moment", "trace": "momentum", "count": "count"}


def optimiser(rng: random.Random, params: Sequence[Param]) -> Optimiser:
    """A random optimiser of arguments of these shapes and dtypes."""
    kind = rng.choice(list(KINDS))
    init, update = KINDS[kind]()
    state = jax.eval_shape(init, tuple(jax.ShapeDtypeStruct(p.shape, p.dtype) for p in params))
    paths, tree = jax.tree_util.tree_flatten_with_path(state)
    leaves, names = [], []
    for path, leaf in paths:
        keys = [str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", "")))) for k in path]
        word = next(_WORDS[k] for k in keys if k in _WORDS)
        leaves.append(Param(leaf.shape, str(leaf.dtype), word))
        names.append(word if word == "count" else f"{word} {keys[-1]}")
    return Optimiser(kind, init, update, tuple(leaves), tuple(names), lambda given: jax.tree.unflatten(tree, given))
