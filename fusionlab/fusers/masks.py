"""What an attention's mask says, told by its values: nothing, causal, or why it is neither."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..graph.canonical import View
from ..graph.ir import Value
from ..graph.match import Match
from ..graph.region import NotARegion, constant_array
from ..graph.signature import Memo
from .layout import BROADCAST, axes_of

MASK_FILL = -1e4  # a fill at or below this leaves a masked key no weight, as long as no score is as low


@dataclass(frozen=True)
class Mask:
    """A mask the op expresses.

    Attributes:
      causal: whether row t sees keys s <= t alone; else every row sees every key.
      row: the axis class that counts the rows of a causal mask; the query's other row axes are groups that share keys.
      fill: the weakest score a masked key gets; -inf without a mask.
    """

    causal: bool = False
    row: int | None = None
    fill: float = -math.inf


def read_mask(view: View, found: Match, value: Value, form: str, memo: Memo) -> Mask | str:
    """The mask that `value` is, or a sentence that says why it is none the op knows.

    Args:
      view: of the block.
      found: a match with a leaf "mask".
      value: the raw value bound to it.
      form: "kept" (booleans, True sees), "masked" (booleans, True is hidden) or "added" (floats added to the scores).
      memo: remembers constants.
    """
    what = f"what is added to the scores, {value!r}," if form == "added" else f"the mask {value!r}"
    array = constant_array(view, value, memo)
    if array is None:
        return f"{what} is data, known only when the function runs"
    axes = axes_of(found, view, found.leaf_id("mask"), value, broadcast=True)
    if form == "added" and not np.all((array == 0) | (array <= MASK_FILL)):
        return f"{what} is a constant bias, from {array.min():g} to {array.max():g}, and no mask"
    fill = float(array.max(where=array != 0, initial=-math.inf)) if form == "added" else -math.inf
    kept = {"added": array == 0, "masked": ~array.astype(bool), "kept": array.astype(bool)}[form]
    kept, classes = _varying(kept, axes)
    if not classes:
        return Mask(fill=fill) if kept.all() else f"{what} hides every key"
    rows, keys = found.letters["t"], found.letters["s"]
    if not set(classes) <= {*rows, *keys}:
        return f"{what} is constant but differs between batch entries or heads"
    if len(keys) != 1 or len(classes) != 2 or keys[0] not in classes:
        return f"{what} is constant but not causal"
    row = next(c for c in classes if c != keys[0])
    grid = kept if classes == [row, keys[0]] else kept.T
    if not np.array_equal(grid, np.tril(np.ones_like(grid))):
        return f"{what} is constant but not causal"
    return Mask(True, row, fill)


def _varying(array: np.ndarray, axes: Sequence[int | None]) -> tuple[np.ndarray, list[int]]:
    """The array without the axes along which it repeats itself, and the classes of those that are left."""
    classes: list[int] = []
    index: list[slice | int] = []
    for d, c in enumerate(axes):
        first = array.take([0], axis=d)
        repeats = c is None or c == BROADCAST or bool(np.all(array == first))
        index.append(0 if repeats else slice(None))
        if not repeats:
            if c in classes:
                raise NotARegion("a mask has one axis twice")
            classes.append(c if c is not None else BROADCAST)
    return array[tuple(index)], classes
