"""Small programs, and what is asked of their overviews."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import fusionlab as fl
from fusionlab.graph.program.trace import trace
from fusionlab.viz.cards.card import Card, Overview
from fusionlab.viz.parts.tree import Maker

WIDTH = 256


def shape(*sizes: int, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype)


def drawn(function: Any, *arguments: Any, find: bool = True) -> tuple[Maker, Overview, dict[int, tuple[str, ...]]]:
    """The overview of a program, and node id -> the cards around it."""
    graph = trace(function, *arguments)
    maker = Maker(graph, fl.find(graph, device="h100") if find else None)
    return maker, *maker.overview(())


def cards(overview: Overview, phase: str) -> list[Card]:
    """The cards of a lane, from above."""
    return [row.cards[phase] for row in overview.rows if phase in row.cards]


def stepped(model: Any) -> Any:
    """A training step of a model with a loss of squares and plain gradient descent."""

    def train(params: Any, x: Array) -> Any:
        loss, gradients = jax.value_and_grad(lambda p: (model(p, x) ** 2).mean())(params)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    return train


def dense(p: Any, x: Array) -> Array:
    return jax.nn.gelu(x @ p["up"] + p["bias"]) @ p["down"]


def dense_shapes(*leading: int) -> dict[str, Any]:
    return {
        "up": shape(*leading, WIDTH, 2 * WIDTH),
        "bias": shape(*leading, 2 * WIDTH),
        "down": shape(*leading, 2 * WIDTH, WIDTH),
    }


def attention(p: Any, x: Array) -> Array:
    q, k, v = x @ p["q"], x @ p["k"], x @ p["v"]
    weights = jax.nn.softmax(q @ k.swapaxes(-1, -2) / 16.0, axis=-1)
    return (weights @ v) @ p["out"]


def attention_shapes() -> dict[str, Any]:
    return {name: shape(WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
