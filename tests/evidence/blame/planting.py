"""A planted error: a fused op whose result is off by a factor where it runs, and right where it is certified."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fusionlab.kernels.op.primitive import FusedPrimitive


@contextlib.contextmanager
def planted(
    factor: float, wanted: Callable[..., bool] = lambda *operands: True, op: str = "gemm_epilogue", role: str = "call"
) -> Iterator[None]:
    """Within it, that op's first result is off by `factor` where `wanted(*operands)`."""
    right = FusedPrimitive._function

    def planted_function(self: FusedPrimitive, params: Any, implementation: str, device: Any) -> Any:
        fn = right(self, params, implementation, device)
        if device is None or (self.op.name, self.role) != (op, role):  # without a device it is the op's meaning
            return fn

        @functools.wraps(fn)
        def wrong(*operands: Any) -> list[Any]:
            first, *rest = fn(*operands)
            return [first * factor if wanted(*operands) else first, *rest]

        return wrong

    jax.clear_caches()  # the right op may have been compiled
    FusedPrimitive._function = planted_function
    try:
        yield
    finally:
        FusedPrimitive._function = right
        jax.clear_caches()


LAYER = (16, 12)  # features of all layers, and those that the planted one multiplies


def _gelu_layer(x: Any, w: Any, b: Any) -> Any:
    return jax.nn.gelu(x @ w + b)


LINE = f"planting.py:{_gelu_layer.__code__.co_firstlineno + 1}"  # where each layer's site is


def _step_of(model: Callable[..., Any]) -> Callable[..., Any]:
    def loss(weights: Any, x: Any, y: Any) -> Any:
        return jnp.mean((model(weights, x) - y) ** 2)

    def step(weights: Any, x: Any, y: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, x, y)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, weights, gradients)

    return step


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def unrolled(layers: int, planted: int) -> tuple[Callable[..., Any], tuple[Any, ...], Callable[..., bool]]:
    """(a train step of so many layers, its arguments, whether an op's operands are those of one of the layers)."""
    many, few = LAYER
    widths = [few if i == planted else many for i in range(layers + 1)]

    def model(weights: Any, x: Any) -> Any:
        for i, (w, b) in enumerate(weights):
            with jax.named_scope(f"layer_{i}"):
                x = _gelu_layer(x, w, b)
        return x

    weights = [(_normal(a, b) * 1.5 / a**0.5, np.zeros(b, np.float32)) for a, b in itertools.pairwise(widths)]
    args = (weights, _normal(8, widths[0]), _normal(8, widths[-1]))
    return _step_of(model), args, lambda x, w, *rest: w.shape[0] == few


def looped(layers: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(the same as a scan, its arguments)."""
    many, _ = LAYER

    def model(weights: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, layer: (_gelu_layer(x, *layer), None), x, weights)[0]

    weights = _normal(layers, many, many) * 1.5 / many**0.5, np.zeros((layers, many), np.float32)
    return _step_of(model), (weights, _normal(8, many), _normal(many, 8).T)
