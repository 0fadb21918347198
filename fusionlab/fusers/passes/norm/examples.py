"""Norms by example, and near misses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ....graph.canonical.view import CanonicalView
from ....graph.matching.pattern import Example


def _two_pass(x: Any, mean: Any, share: Any) -> Any:
    return jnp.sum((x - mean) ** 2, -1, keepdims=True) * share


def _by_squares(x: Any, mean: Any, share: Any) -> Any:
    return jnp.sum(x * x, -1, keepdims=True) * share - mean * mean


def _no_less_than_zero(variance: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, mean, share: jnp.maximum(0.0, variance(x, mean, share))


_VARIANCES: dict[str, Callable[..., Any]] = {  # those that are asked of fewer programs first
    "max(0, var(x))": _no_less_than_zero(_two_pass),
    "max(0, mean(x^2) - mean(x)^2)": _no_less_than_zero(_by_squares),
    "var(x)": _two_pass,
    "mean(x^2) - mean(x)^2": _by_squares,
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


def _may_be_in(name: str) -> Callable[[CanonicalView], bool]:
    """Whether a view has the sums, and the maximum, of the norm of this name."""
    alone, nested = (1, 0) if name.startswith("rms") else (2, 0) if "mean(x)^2" in name else (1, 1)
    clamped = "max(0," in name

    def fits(view: CanonicalView) -> bool:
        sums = view.by_op.get("reduce_sum", ())
        of_sums = sum(_derives_from_sum(view, nid) for nid in sums)
        return len(sums) - of_sums >= alone and of_sums >= nested and (not clamped or "max" in view.by_op)

    return fits


def _derives_from_sum(view: CanonicalView, nid: int) -> bool:
    """Whether a sum depends on another sum, as that of (x - mean)^2 does."""
    level = [o.nid for o in view.nodes[nid].operands]
    for _ in range(_STEPS):
        if any(view.nodes[n].op == "reduce_sum" for n in level):
            return True
        level = [o.nid for n in level for o in view.nodes[n].operands]
    return False


# Leaves, the root, what is done to the normalised x.
_Affine = tuple[dict[str, str], tuple[str, int], Callable[..., Any]]
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
_STEPS = 3  # from a sum back to the mean in what it is of: a power, a difference, a cast that stays


def _examples() -> Iterator[Example]:
    for after, (leaves, root, affine) in _AFFINE.items():
        for name, norm in _norms(lambda variance, epsilon: jnp.sqrt(variance + epsilon)).items():

            def fn(x: Any, *rest: Any, norm: Any = norm, affine: Any = affine) -> Any:
                *vectors, share, epsilon = rest
                return affine(norm(x, share, epsilon), *vectors)

            options = {"bare": True, "root": root, "may_be_in": _may_be_in(name)}
            yield Example(name + after, fn, {"x": "mn", **leaves}, _SCALARS, **options)


EXAMPLES = tuple(_examples())
PLAIN_NORM = next(e for e in EXAMPLES if e.name == "layer_norm by var(x), scale and bias")


@dataclass(frozen=True)
class Near:
    """A near miss of a norm: its examples, and the rejection of a site that matches one."""

    examples: tuple[Example, ...]
    problem: str
    edit: str


def _near(name: str, root: Callable[..., Any], problem: str, edit: str) -> Near:
    def example(norm: str, fn: Callable[..., Any]) -> Example:
        options = {"bare": True, "root": ("prod", 2), "may_be_in": _may_be_in(norm)}
        return Example(f"{norm}, {name}", fn, {"x": "mn"}, _SCALARS, **options)

    return Near(tuple(example(*named) for named in _norms(root).items()), problem, edit)


NEAR = (
    _near(
        "epsilon outside",
        lambda variance, epsilon: jnp.sqrt(variance) + epsilon,
        "has epsilon added outside the root, to the standard deviation; the fused op adds it inside, to the variance",
        "divide by jnp.sqrt(variance + epsilon) if that is meant",
    ),
    _near(
        "no epsilon",
        lambda variance, epsilon: jnp.sqrt(variance),
        "has no epsilon: a row of zero variance divides by 0",
        "add a small epsilon to the variance, inside the root",
    ),
)
