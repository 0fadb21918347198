"""Convolutions equivalent to products: their window is one point, or all positions, as in the gradient of a one-point weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Label = tuple[str, int]  # ("l", i) of the input alone, ("r", i) of the weight alone, ("c", i) summed over


@dataclass(frozen=True)
class Contraction:
    """The label of each axis of the input, the weight and the result; None for a unit axis without a counterpart."""

    left: tuple[Label | None, ...]
    right: tuple[Label | None, ...]
    out: tuple[Label | None, ...]

    @property
    def contracted(self) -> tuple[int, ...]:
        """The axes of the input that are summed over."""
        return tuple(i for i, x in enumerate(self.left) if x is not None and x[0] == "c")


def contraction(params: Any, left: Sequence[int], right: Sequence[int]) -> Contraction | None:
    """A convolution of two shapes as a product; None if it is not equivalent to one because of a moving window of more than one point, a
    stride, padding, a dilation or groups.
    """
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        return None
    numbers = params["dimension_numbers"]
    of_left, of_right, of_out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    names: tuple[list[Label | None], ...] = ([None] * len(left), [None] * len(left), [None] * len(left))
    names[0][of_left[0]] = names[2][of_out[0]] = ("l", 0)
    names[1][of_right[0]] = names[2][of_out[1]] = ("r", 0)
    names[0][of_left[1]] = names[1][of_right[1]] = ("c", 0)
    spatial = zip(of_left[2:], of_right[2:], of_out[2:], strict=True)
    for i, (a, b, c) in enumerate(spatial):
        if tuple(params["padding"][i]) != (0, 0) or params["lhs_dilation"][i] != 1:
            return None
        if right[b] == 1 and params["window_strides"][i] == 1:
            names[0][a] = names[2][c] = ("l", i + 1)
        elif right[b] == left[a] and params["rhs_dilation"][i] == 1:
            names[0][a] = names[1][b] = ("c", i + 1)
        else:
            return None
    return Contraction(*map(tuple, names))
