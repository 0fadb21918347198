"""What a norm looks like, by example, and what is nearly one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ..graph.pattern import Example


def _two_pass(x: Any, mean: Any, share: Any) -> Any:
    return jnp.sum((x - mean) ** 2, -1, keepdims=True) * share


def _by_squares(x: Any, mean: Any, share: Any) -> Any:
    return jnp.sum(x * x, -1, keepdims=True) * share - mean * mean


def _no_less_than_zero(variance: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, mean, share: jnp.maximum(0.0, variance(x, mean, share))


_VARIANCES: dict[str, Callable[..., Any]] = {
    "var(x)": _two_pass,
    "max(0, var(x))": _no_less_than_zero(_two_pass),
    "mean(x^2) - mean(x)^2": _by_squares,
    "max(0, mean(x^2) - mean(x)^2)": _no_less_than_zero(_by_squares),
}


def _layer(variance: Callable[..., Any], root: Callable[..., Any]) -> Callable[..., Any]:
    def norm(x: Any, share: Any, epsilon: Any) -> Any:
        mean = jnp.sum(x, -1, keepdims=True) * share
        return (x - mean) / root(variance(x, mean, share), epsilon)

    return norm


def _rms(numerator: Callable[[Any], Any], root: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, share, epsilon: numerator(x) / root(jnp.sum(x * x, -1, keepdims=True) * share, epsilon)


def _norms(root: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Name -> norm of (x, 1/N, epsilon), with `root` of the variance and epsilon."""
    norms = {f"layer_norm by {name}": _layer(variance, root) for name, variance in _VARIANCES.items()}
    norms["rms_norm"] = _rms(lambda x: x, root)
    return norms


def _holds(name: str) -> frozenset[str]:
    """Canonical ops that a norm of this name has, and most have not."""
    told = {"max(0,": "max"}
    return frozenset(op for words, op in told.items() if words in name)


_Affine = tuple[
    dict[str, str], tuple[str, int], Callable[..., Any]
]  # leaves, the root, what is done to the normalised x
_AFFINE: dict[str, _Affine] = {
    ", scale and bias": (
        {"scale": "n", "bias": "n"},
        ("sum", 2),
        lambda xhat, scale, bias: xhat * scale + bias,
    ),
    ", bias": ({"bias": "n"}, ("sum", 2), lambda xhat, bias: xhat + bias),
    ", scale": ({"scale": "n"}, ("prod", 3), lambda xhat, scale: xhat * scale),
    "": ({}, ("prod", 2), lambda xhat: xhat),
}
_SCALARS = ("1/N", "epsilon")


def _examples() -> Iterator[Example]:
    for after, (leaves, root, affine) in _AFFINE.items():
        for name, norm in _norms(lambda variance, epsilon: jnp.sqrt(variance + epsilon)).items():

            def fn(x: Any, *rest: Any, norm: Any = norm, affine: Any = affine) -> Any:
                *vectors, share, epsilon = rest
                return affine(norm(x, share, epsilon), *vectors)

            told = {"bare": True, "root": root, "holds": _holds(name)}
            yield Example(name + after, fn, {"x": "mn", **leaves}, _SCALARS, **told)


EXAMPLES = tuple(_examples())


@dataclass(frozen=True)
class Near:
    """What is nearly a norm: the examples, and what to say of a site that matches one."""

    examples: tuple[Example, ...]
    what: str
    edit: str


def _near(name: str, root: Callable[..., Any], what: str, edit: str) -> Near:
    def example(norm: str, fn: Callable[..., Any]) -> Example:
        told = {"bare": True, "root": ("prod", 2), "holds": _holds(norm)}
        return Example(f"{norm}, {name}", fn, {"x": "mn"}, _SCALARS, **told)

    return Near(tuple(example(*one) for one in _norms(root).items()), what, edit)


NEAR = (
    _near(
        "epsilon outside",
        lambda variance, epsilon: jnp.sqrt(variance) + epsilon,
        "has epsilon added outside the root, to the standard deviation; the fused op adds it inside, to the variance",
        "divide by jnp.sqrt(variance + epsilon) if that is what is meant",
    ),
    _near(
        "no epsilon",
        lambda variance, epsilon: jnp.sqrt(variance),
        "has no epsilon: a row without variance divides by 0",
        "add a small epsilon to the variance, inside the root",
    ),
)
