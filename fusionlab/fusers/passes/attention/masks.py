"""The masks and biases of an attention's scores, by value: which are causal or have no effect, and which the op takes as operands."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import numpy as np

from ....graph.canonical.view import CanonicalView
from ....graph.declined import Declined
from ....graph.matching.constants import constant_array, distinct
from ....graph.matching.match import Match
from ....graph.matching.region import Region
from ....graph.program.ir import Value
from ....graph.program.signature import Memo
from ...engine.layout import BROADCAST, constant_with_axes
from ...engine.site import Site
from ...engine.wording import anchor_text
from .forms import Reading
from .scores import Step

MASK_FILL = -1e4  # a fill at or below this leaves a masked key no weight, as long as no score is as low
_VANISHES = -103.0  # exp of less is 0 in float32


@dataclass(frozen=True)
class Constant:
    """The content of a constant mask.

    Attributes:
      row: the axis class that counts the rows of a band: row t sees keys t - left to t + right; None where every row sees every key.
      fill: the weakest score a masked key gets.
      band: (left, right) of the band, left None for one that begins at the first key: causal is (None, 0).
      shape: rows and keys of the band.
    """

    row: int | None = None
    fill: float = -math.inf
    band: tuple[int | None, int] = (None, 0)
    shape: tuple[int, int] = (0, 0)

    def with_band(self, other: Constant) -> Constant:
        """The intersection of both bands."""
        lefts = [left for left in (self.band[0], other.band[0]) if left is not None]
        band = min(lefts, default=None), min(self.band[1], other.band[1])
        return replace(self, fill=max(self.fill, other.fill), band=band)

    @property
    def is_blind(self) -> bool:
        """Whether it masks a row fully."""
        rows, keys = self.shape
        return self.band[0] is not None and rows - 1 - self.band[0] > keys - 1


@dataclass(frozen=True)
class Masking:
    """The masks and biases of a site, as the op takes them.

    Attributes:
      row: as in `Constant`; None without a causal mask or a local window.
      fill: the weakest score that those give to a hidden key.
      window: (left, right) of a local window; with right 0 it is causal as well, and None without one.
      masks: leaf -> whether True means hidden, of the masks that are operands; all of them fill with `mask_value`.
      biases: leaves that are added to the scores.
      dropped: leaves without effect, or without effect beyond `row`.
      causal_outside: whether the operands amount to a causal mask that is computed outside the block (a scan's body is given it).
    """

    row: int | None = None
    fill: float = -math.inf
    window: tuple[int, int] | None = None
    masks: Mapping[str, bool] = field(default_factory=dict)
    mask_value: float = -math.inf
    biases: tuple[str, ...] = ()
    dropped: frozenset[str] = frozenset()
    causal_outside: bool = False

    @property
    def is_causal(self) -> bool:
        return self.row is not None and (self.window is None or self.window[1] == 0)


class MaskReader:
    """Reads the steps of a matched site as masks and biases.

    Args:
      site: declines if the op has no equivalent.
      read: the steps, and the match of the example that they make.
      region: the site, with the raw value bound to each leaf.
    """

    def __init__(self, site: Site, read: Reading, region: Region) -> None:
        self.site, self.region, self.leaves = site, region, region.leaves
        self.found, self.steps, self.view, self.memo = read.match, read.steps, site.view, site.search.certifier

    def decline(self, sentence: str) -> NoReturn:
        self.site.decline("mask", f"{anchor_text(self.site.anchor)}: {sentence}", site=self.region.nodes)

    def masking(self) -> Masking:
        """The masks and biases that the steps apply.

        Bands along one axis of rows are merged into one band. A band with a finite fill is an operand if there are other masks or biases:
        a row whose visible keys these all hide would otherwise not get the program's weights.

        Raises:
          Declined: the op does not have this order.
        """
        constants = {s: self.constant(s) for s in self.steps if s.masks or s.kind == "added"}
        self.check_gates()
        fixed, band = self.band(constants)
        # data, and bands that the op does not do itself
        operands = [s for s, c in constants.items() if c is None or (c.row is not None and s not in fixed)]
        self.check_order(operands, fixed)
        return self.of_operands(operands, band)

    def of_operands(self, operands: Sequence[Step], band: Constant) -> Masking:
        """The op's masking: some steps as operands, and a band. Steps that are neither are not needed."""
        left, right = band.band
        return Masking(
            row=band.row,
            fill=band.fill,
            window=(left, right) if left is not None else None,
            masks={s.leaf: s.kind == "hidden" for s in operands if s.masks},
            mask_value=self.fill(operands),
            biases=tuple(s.leaf for s in operands if s.kind == "added"),
            dropped=frozenset(s.leaf for s in self.steps if s.leaf and not s.scales and s not in operands),
            causal_outside=self.is_causal_outside(operands),
        )

    def fill(self, operands: Sequence[Step]) -> float:
        """The one score with which operands fill."""
        fills = sorted({self.found.scalars[s.scalar] for s in operands if s.scalar})
        if len(fills) > 1:
            self.decline(f"its masks fill with different scores ({', '.join(f'{f:g}' for f in fills)})")
        return next(iter(fills), -math.inf)

    def band(self, constants: Mapping[Step, Constant | None]) -> tuple[list[Step], Constant]:
        """The steps that the op applies as one band, and that band; no steps and a band that hides nothing if there are none."""
        data = [s for s, c in constants.items() if c is None]
        bands = {s: c for s, c in constants.items() if c is not None and c.row is not None}
        return _merged_band({s: c for s, c in bands.items() if self.is_free(s, c, data)})

    def is_free(self, step: Step, constant: Constant, data: Sequence[Step]) -> bool:
        """Whether a row whose visible keys are all hidden by data gets the same weights if the op applies the band."""
        scalars = self.found.scalars
        # A mask outside of it puts a finite score also on keys that it has hidden, which a blind row then weighs.
        later = any(s.scalar and s.number < step.number and scalars[s.scalar] != -math.inf for s in data)
        return not data or (constant.fill == -math.inf and not later)

    def is_causal_outside(self, operands: Sequence[Step]) -> bool:
        """Whether all operands are constants of the enclosing block, and the bands among them are causal masks."""
        outside = [self.constant(s, outside=True) for s in operands]
        return all(outside) and {c.band for c in outside if c and c.row is not None} == {(None, 0)}

    def check_gates(self) -> None:
        """Declines a factor on the scores that is more than a mask written twice."""
        gate = next((s for s in self.steps if s.kind == "gated" and not self.is_filled(s)), None)
        if gate is not None:
            self.decline(
                f"the scores are multiplied by {self.leaves[gate.leaf]!r}, which has an entry per key: needed a constant of "
                "ones and zeros, and an added term that hides the keys where it is 0"
            )

    def is_filled(self, gate: Step) -> bool:
        """Whether a factor on the scores is a constant of ones and zeros, and the constant added next hides every key that it zeroes."""
        gated, added = self.varying(gate), self.varying(self.steps[gate.number - 1])
        if gated is None or added is None:
            return False
        number = {c: i for i, c in enumerate({*gated[1], *added[1]})}
        (factors, own), (scores, others) = ((x, [number[c] for c in classes]) for x, classes in (gated, added))
        seen = np.einsum(factors == 0, own, ~(scores <= MASK_FILL), others, [])
        return bool(np.all((factors == 0) | (factors == 1))) and not seen

    def check_order(self, operands: Sequence[Step], fixed: Sequence[Step]) -> None:
        """Declines steps that are not in the op's order: factor, cap, biases, masks, from the product on."""
        standing = {*operands, *fixed, *(s for s in self.steps if s.kind in ("times", "over", "capped"))}
        inner_first = [s for s in reversed(self.steps) if s in standing]
        for before, after in itertools.pairwise(inner_first):
            if _rank(before, fixed) > _rank(after, fixed) and not (after.kind == "added" and self.hides(before, fixed)):
                done = "masked" if before.kind != "added" else "biased"
                self.decline(f"the scores are {_ORDER[after.kind][1]} after they are {done}")

    def hides(self, step: Step, fixed: Sequence[Step]) -> bool:
        """Whether the keys that a step hides stay hidden under a later bias."""
        # Minus infinity plus a finite bias is minus infinity.
        return step in fixed or (step.masks and self.found.scalars[step.scalar or ""] == -math.inf)

    def are_blind(self, biases: Iterable[str]) -> bool:
        """Whether a constant among the biases leaves a row only scores whose exponentials are 0."""
        for name in biases:
            array = constant_array(self.view, self.leaves[name], self.memo)
            if array is not None:
                array, axes = constant_with_axes(self.found, self.view, name, self.leaves[name], array)
                array = distinct(array)
                keys = tuple(d for d, c in enumerate(axes) if c in self.found.letters["s"])
                if bool(np.any(np.all(array <= _VANISHES, axis=keys))):
                    return True
        return False

    def array(self, step: Step, outside: bool = False) -> np.ndarray | None:
        """The operand of a step as a constant, a bias as it reaches the softmax; `outside` as for `constant_array`."""
        value = self.leaves[step.leaf]
        array = constant_array(self.view, value, self.memo, outside)
        if array is None or step.kind != "added":
            return array
        with np.errstate(over="ignore"):  # infinite where the program's is
            biased = distinct(array) * np.asarray(bias_factor(self.view, self.found, step.leaf, value), array.dtype)
        return np.broadcast_to(biased, array.shape)

    def varying(self, step: Step) -> tuple[np.ndarray, list[int]] | None:
        """The constant of a step in the form of `_varying`; None if it is data."""
        array = self.array(step)
        return None if array is None else self.with_classes(step, array)

    def with_classes(self, step: Step, array: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """An array with the axes of a step's operand, in the form of `_varying`."""
        leaf = step.leaf
        return _varying(*constant_with_axes(self.found, self.view, leaf, self.leaves[leaf], array))

    def constant(self, step: Step, outside: bool = False) -> Constant | None:
        """The mask of a step if it is a constant that hides nothing or is a band, causal or local; None for any other.

        `step.kind` gives the meaning of its entries: "kept" or "blended" (True sees), "hidden" (True is hidden) or "added" (to the scores).
        """
        array = self.array(step, outside)
        if array is None:
            return None
        array, classes = self.with_classes(step, array)
        if step.kind == "added":
            if not np.all((array == 0) | (array <= MASK_FILL)):
                return None
            fill, kept = float(array.max(where=array != 0, initial=-math.inf)), array == 0
        else:
            fill, kept = self.found.scalars[step.scalar or ""], array.astype(bool) ^ (step.kind == "hidden")
        if not classes:
            return Constant() if kept.all() else None
        return _as_band(kept, classes, self.found, fill)


# Where a step stands in the op's order, masks behind all others; and what it does to the scores.
_ORDER = {"times": (0, "multiplied"), "over": (0, "divided"), "capped": (1, "capped"), "added": (2, "added to")}


def _rank(step: Step, fixed: Sequence[Step]) -> int:
    return 3 if step in fixed or step.masks else _ORDER[step.kind][0]


def bias_factor(view: CanonicalView, found: Match, name: str, value: Value) -> float:
    """The factor with which scores get the bias of this name, bound to `value`: -1 if it is subtracted, 1/4 if the sum is divided by 4."""
    leaf = found.leaf_id(name)
    sums = (p for p, n in enumerate(found.pattern.nodes) if n.op == "sum" and any(o.nid == leaf for o in n.operands))
    target = view.nodes[found.nodes[next(sums)]]
    on_edge = next(o.coef for o in target.operands if o.nid == found.nodes[leaf])
    gain = found.scalars.get(name.replace("bias", "gain"), 1.0)
    return gain * float(on_edge) / float(view.ref[value.id].coef)


def _merged_band(constants: Mapping[Step, Constant]) -> tuple[list[Step], Constant]:
    """The steps that form one band together, and that band: the first of them, and those that leave every row a key in addition to it."""
    steps: list[Step] = []
    whole = Constant()
    for step, constant in constants.items():
        both = constant if not steps else whole.with_band(constant) if whole.row == constant.row else None
        if both is not None and not both.is_blind:
            whole, steps = both, [*steps, step]
    return steps, whole


def _as_band(kept: np.ndarray, classes: list[int], found: Match, fill: float) -> Constant | None:
    """A mask that varies along these axis classes, if it is a band over an axis of rows and the axis of keys."""
    rows, keys = found.letters["t"], found.letters["s"]
    if len(keys) != 1 or len(classes) != 2 or not {keys[0]} < set(classes) <= {*rows, *keys}:
        return None
    row = next(c for c in classes if c != keys[0])
    grid = kept if classes == [row, keys[0]] else kept.T
    band = _band(grid)
    return None if band is None else Constant(row, fill, band, (grid.shape[0], grid.shape[1]))


def _band(grid: np.ndarray) -> tuple[int | None, int] | None:
    """(left, right) of the band that is True in rows x keys; None if there is no band, or one that is neither causal nor a local window."""
    rows, keys = grid.shape
    # how many keys the first row sees, and how many rows the first key
    right, left = (int(np.argmin(np.append(seen, False))) - 1 for seen in (grid[0], grid[:, 0]))
    distance = np.arange(keys) - np.arange(rows)[:, None]
    if min(left, right) < 0 or not np.array_equal(grid, (distance >= -left) & (distance <= right)):
        return None
    if left == rows - 1:
        return (None, 0) if right == 0 else None
    return (left, right) if right < keys - 1 else None


def is_ones(view: CanonicalView, value: Value, memo: Memo) -> bool:
    """Whether a value is a constant whose every entry is one."""
    array = constant_array(view, value, memo)
    return array is not None and bool(np.all(distinct(array) == 1))


def _varying(array: np.ndarray, axes: Sequence[int | None]) -> tuple[np.ndarray, list[int]]:
    """The array without the axes along which it is constant, and the classes of the remaining axes."""
    classes: list[int] = []
    index: list[slice | int] = []
    array = distinct(array)
    for d, c in enumerate(axes):
        if c is None or c == BROADCAST or bool(np.all(array == array.take([0], axis=d))):
            index.append(0)
        elif c in classes:
            raise Declined("a mask has one axis twice")
        else:
            index.append(slice(None))
            classes.append(c)
    return array[tuple(index)], classes
