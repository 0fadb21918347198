"""Plain float64 numpy: what act(X @ Y + b) and its gradients are. Not a test module."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

Array = np.ndarray
C = math.sqrt(2 / math.pi)


def none(h: Array) -> Array:
    return h


def relu(h: Array) -> Array:
    return np.maximum(h, 0)


def gelu_tanh(h: Array) -> Array:
    return 0.5 * h * (1 + np.tanh(C * (h + 0.044715 * h**3)))


def gelu_erf(h: Array) -> Array:
    return 0.5 * h * (1 + np.vectorize(math.erf)(h / math.sqrt(2)))


def gelu_tanh_slope(h: Array) -> Array:
    t = np.tanh(C * (h + 0.044715 * h**3))
    return 0.5 * (1 + t) + 0.5 * h * (1 - t * t) * C * (1 + 3 * 0.044715 * h**2)


def gelu_erf_slope(h: Array) -> Array:
    density = np.exp(-h * h / 2) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + np.vectorize(math.erf)(h / math.sqrt(2))) + h * density


VALUE: dict[str, Callable[[Array], Array]] = {"none": none, "relu": relu, "gelu_tanh": gelu_tanh, "gelu_erf": gelu_erf}
SLOPE: dict[str, Callable[[Array], Array]] = {
    "none": np.ones_like,
    "relu": lambda h: (h > 0).astype(h.dtype),
    "gelu_tanh": gelu_tanh_slope,
    "gelu_erf": gelu_erf_slope,
}


def uniform(*shapes: tuple[int, ...], seed: int = 0) -> list[Array]:
    """The seed's test data: uniform in [-0.5, 0.5)."""
    rng = np.random.default_rng(seed)
    return [rng.uniform(-0.5, 0.5, s) for s in shapes]
