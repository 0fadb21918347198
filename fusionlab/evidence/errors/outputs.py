"""The outputs of two versions of a function: their names, and whether they can be compared at all."""

from __future__ import annotations

from typing import Any

import jax

from fusionlab.errors import ArgumentError
from fusionlab.graph.calls.parts import CallResult, fixed_difference


def named_outputs(outputs: Any) -> list[str]:
    """A name for each output leaf: "out['loss']"; for a value changed in place "model.layers[0].kernel"."""
    if isinstance(outputs, CallResult):
        return list(outputs.leaf_names)
    return ["out" + jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(outputs)[0]]


def check_same_outputs(before: Any, after: Any) -> None:
    """Raises ArgumentError if two trees of arrays (or shapes) differ in structure, shape or dtype."""
    difference = fixed_difference(before, after)
    if difference is not None:
        raise ArgumentError(f"fused: {difference}")
    (first, tree), (second, other) = map(jax.tree_util.tree_flatten, (before, after))
    if tree != other:
        raise ArgumentError(f"fused: got outputs of structure {other}, needed the original's, {tree}")
    for b, a in zip(first, second, strict=True):
        if (b.shape, b.dtype) != (a.shape, a.dtype):
            raise ArgumentError(
                f"fused: got an output {a.dtype}{list(a.shape)}, needed the original's, {b.dtype}{list(b.shape)}"
            )
