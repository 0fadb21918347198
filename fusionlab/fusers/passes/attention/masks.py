"""What is done to an attention's scores, told by values: which masks are causal or none, and which the op takes as operands."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ....graph.canonical.view import CanonicalView
from ....graph.declined import Declined
from ....graph.matching.match import Match
from ....graph.matching.region import constant_array
from ....graph.program.ir import Value
from ....graph.program.signature import Memo
from ...engine.layout import BROADCAST, AxisClasses, constant_with_axes
from .scores import Step, Steps

MASK_FILL = -1e4  # a fill at or below this leaves a masked key no weight, as long as no score is as low
_VANISHES = -103.0  # exp of less is 0 in float32


@dataclass(frozen=True)
class Constant:
    """What a constant mask says.

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
        """The band that both leave."""
        lefts = [left for left in (self.band[0], other.band[0]) if left is not None]
        band = min(lefts, default=None), min(self.band[1], other.band[1])
        return replace(self, fill=max(self.fill, other.fill), band=band)

    @property
    def is_blind(self) -> bool:
        """Whether it leaves a row no key."""
        rows, keys = self.shape
        return self.band[0] is not None and rows - 1 - self.band[0] > keys - 1


@dataclass(frozen=True)
class Masking:
    """The masks and biases of a site, as the op takes them.

    Attributes:
      row: as in `Constant`; None without a causal mask or a local window.
      fill: the weakest score a key gets that those hide.
      window: (left, right) of a local window; with right 0 it is causal as well, and None without one.
      masks: leaf -> whether True is hidden, of the masks that are operands; all of them put `mask_value`.
      biases: leaves that are added to the scores.
      dropped: leaves that say nothing, or no more than `row`.
      causal_outside: whether the operands come to a causal mask that is made outside the block (a scan's body is given it).
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


@dataclass(frozen=True)
class _MaskedMatch:
    """A match whose masks are read.

    Attributes: `view` (of the block), `found` (the match), `leaves` (leaf name -> the raw value bound to it), `steps` (outermost first),
    `memo` (remembers constants).
    """

    view: CanonicalView
    found: Match
    leaves: Mapping[str, Value]
    steps: Steps
    memo: Memo

    def constant(self, step: Step, outside: bool = False) -> Constant | None:
        return constant_mask(self.view, self.found, step, self.leaves[step.leaf or ""], self.memo, outside)

    def constants(self) -> dict[Step, Constant | None]:
        """Each mask and bias -> what it says, None of one that is data."""
        return {s: self.constant(s) for s in self.steps if s.leaf and (s.masks or s.kind == "added")}

    @property
    def gates(self) -> list[Step]:
        return [s for s in self.steps if s.kind == "gated"]

    def loose_gate(self) -> str | None:
        """The sentence for a factor on the scores that is more than a mask written twice."""
        args = self.steps, self.leaves, self.memo
        loose = next((g for g in self.gates if not _is_filled(self.view, self.found, g, *args)), None)
        if loose is None:
            return None
        gate = self.leaves[loose.leaf or ""]
        return (
            f"the scores are multiplied by {gate!r}, which has an entry for each key: needed is a constant of ones and zeros, and that "
            "what is added hides the keys where it is 0"
        )

    def operands(self, constants: Mapping[Step, Constant | None], fixed: Sequence[Step]) -> dict[str, Step]:
        """Leaf -> step, of what the op takes as an operand: data, and bands that it does not do itself."""
        data = (s for s, c in constants.items() if c is None or (c.row is not None and s not in fixed))
        return {s.leaf: s for s in data if s.leaf}

    def fills(self, operands: Mapping[str, Step]) -> list[float]:
        """The scores that operands put, each once, the lowest first."""
        return sorted({self.found.scalars[s.scalar] for s in operands.values() if s.scalar})

    def needless(self, constants: Sequence[Step], operands: Sequence[Step]) -> frozenset[str]:
        """The leaves that are no operands: constants that are read, and gates."""
        return frozenset(s.leaf for s in (*constants, *self.gates) if s.leaf and s not in operands)

    def band(self, constants: Mapping[Step, Constant | None]) -> tuple[list[Step], Constant]:
        """The steps that the op does as one band, and what they say together; no steps, and what hides nothing, where there is none."""
        data = [s for s, c in constants.items() if c is None]
        bands = {s: c for s, c in constants.items() if c is not None and c.row is not None}

        def is_free(step: Step, constant: Constant) -> bool:
            """Whether a row all of whose visible keys the data hides gets the same weights with the band done by the op."""
            return not data or (constant.fill == -math.inf and not _hidden_later(self.found, step, data))

        fixed, chosen = _merged_band({s: c for s, c in bands.items() if is_free(s, c)})
        return fixed, chosen or Constant()

    def is_causal_outside(self, operands: Sequence[Step]) -> bool:
        """Whether all operands are constants of the block around, and those that are bands are causal masks."""
        outside = [self.constant(s, outside=True) for s in operands]
        return all(outside) and {c.band for c in outside if c and c.row is not None} == {(None, 0)}


def read_masks(
    view: CanonicalView, found: Match, leaves: Mapping[str, Value], steps: Steps, memo: Memo
) -> Masking | str:
    """The masks and biases that `steps` apply, or a sentence that says why the op has no such order.

    Bands along one axis of rows are one band together. One with a finite fill is an operand where there are other masks or biases: a row
    all of whose visible keys they hide would otherwise not get the weights the program gives it.

    Args:
      view: of the block.
      found: a match of the example that the steps make.
      leaves: leaf name -> the raw value bound to it.
      steps: outermost first.
      memo: remembers constants.
    """
    site = _MaskedMatch(view, found, leaves, steps, memo)
    constants = site.constants()
    problem = site.loose_gate()
    if problem is not None:
        return problem
    fixed, band = site.band(constants)
    operands = site.operands(constants, fixed)
    fills = site.fills(operands)
    problem = _order(found, steps, [*operands.values()], fixed) or _different(fills)
    if problem is not None:
        return problem
    left, right = band.band
    return Masking(
        row=band.row,
        fill=band.fill,
        window=(left, right) if left is not None else None,
        masks={leaf: s.kind == "hidden" for leaf, s in operands.items() if s.kind != "added"},
        mask_value=next(iter(fills), -math.inf),
        biases=tuple(leaf for leaf, s in operands.items() if s.kind == "added"),
        dropped=site.needless([*constants], [*operands.values()]),
        causal_outside=site.is_causal_outside([*operands.values()]),
    )


def _different(fills: Sequence[float]) -> str | None:
    """Why the op, whose masks all put one score, cannot put several; None of one or none."""
    return f"its masks put different scores ({', '.join(f'{f:g}' for f in fills)})" if len(fills) > 1 else None


def bias_factor(view: CanonicalView, found: Match, name: str, value: Value) -> float:
    """What scores are given of a bias of this name, bound to `value`: -1 where it is subtracted, 1/4 where the sum is divided by 4."""
    leaf = found.leaf_id(name)
    sums = (p for p, n in enumerate(found.pattern.nodes) if n.op == "sum" and any(o.nid == leaf for o in n.operands))
    target = view.nodes[found.nodes[next(sums)]]
    on_edge = next(o.coef for o in target.operands if o.nid == found.nodes[leaf])
    gain = found.scalars.get(name.replace("bias", "gain"), 1.0)
    return gain * float(on_edge) / float(view.ref[value.id].coef)


def _as_added(view: CanonicalView, found: Match, step: Step, value: Value, array: np.ndarray) -> np.ndarray:
    """A constant bias as it comes to the softmax; infinite where the program's is."""
    with np.errstate(over="ignore"):
        return array * np.asarray(bias_factor(view, found, step.leaf or "", value), array.dtype)


def _is_filled(
    view: CanonicalView, found: Match, gate: Step, steps: Steps, leaves: Mapping[str, Value], memo: Memo
) -> bool:
    """Whether a factor on the scores is a constant of ones and zeros, and what is added after that, also one, hides each key of a 0."""
    arrays, axes = [], []
    for step in (gate, steps[gate.number - 1]):
        name = step.leaf or ""
        array = constant_array(view, leaves[name], memo)
        if array is None:
            return False
        array = array if step is gate else _as_added(view, found, step, leaves[name], array)
        array, own = constant_with_axes(found, view, name, leaves[name], array)
        arrays.append(array)
        axes.append(own)
    gated, added = _together(arrays[0], axes[0], arrays[1], axes[1])
    return bool(np.all((gated == 0) | (gated == 1)) and np.all((added <= MASK_FILL) | (gated != 0)))


def _together(a: np.ndarray, axes: AxisClasses, b: np.ndarray, others: AxisClasses) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays with the axes of both, in one order."""
    (a, mine), (b, theirs) = _varying(a, axes), _varying(b, others)
    order = sorted({*mine, *theirs})

    def placed(x: np.ndarray, classes: list[int]) -> np.ndarray:
        x = x.transpose(sorted(range(len(classes)), key=lambda d: classes[d]))
        return np.expand_dims(x, [i for i, c in enumerate(order) if c not in classes])

    return placed(a, mine), placed(b, theirs)


def _merged_band(constants: Mapping[Step, Constant]) -> tuple[list[Step], Constant | None]:
    """The steps that are one band together, and that band: the first of them, and those that leave every row a key beside it."""
    steps: list[Step] = []
    whole: Constant | None = None
    for step, constant in constants.items():
        both = constant if whole is None else whole.with_band(constant) if whole.row == constant.row else None
        if both is not None and not both.is_blind:
            whole, steps = both, [*steps, step]
    return steps, whole


def _hidden_later(found: Match, step: Step, data: Sequence[Step]) -> bool:
    """Whether a mask outside of `step` puts a finite score: also on keys that `step` has hidden, which a blind row then weighs."""
    return any(s.scalar and s.number < step.number and found.scalars[s.scalar] != -math.inf for s in data)


def _order(found: Match, steps: Steps, operands: Sequence[Step], fixed: Sequence[Step]) -> str | None:
    """Why the steps do not stand in the op's order (factor, cap, biases, masks, from the product on); None where they do."""
    rank = {"times": 0, "over": 0, "capped": 1, "added": 2, "kept": 3, "hidden": 3, "blended": 3}
    inner_first = [s for s in reversed(steps) if s.kind in ("times", "over", "capped") or s in operands or s in fixed]
    words = {"times": "multiplied", "over": "divided", "capped": "capped", "added": "added to"}
    for before, after in itertools.pairwise(inner_first):
        if _rank(rank, before, fixed) <= _rank(rank, after, fixed):
            continue
        if after.kind == "added" and _hides_for_good(found, before, fixed):
            continue
        return f"the scores are {words[after.kind]} after they are {'masked' if before.kind != 'added' else 'biased'}"
    return None


def _hides_for_good(found: Match, step: Step, fixed: Sequence[Step]) -> bool:
    """Whether a bias behind a step leaves hidden what that hides."""
    # Minus infinity plus a finite bias is minus infinity.
    return step in fixed or (step.masks and found.scalars[step.scalar or ""] == -math.inf)


def _rank(rank: Mapping[str, int], step: Step, fixed: Sequence[Step]) -> int:
    return 3 if step in fixed else rank[step.kind]


def constant_mask(
    view: CanonicalView, found: Match, step: Step, value: Value, memo: Memo, outside: bool = False
) -> Constant | None:
    """What the mask of a step says, if it is a constant that hides nothing or is a band, causal or local; None for any other.

    What its entries say is told by `step.kind`: "kept" or "blended" (True sees), "hidden" (True is hidden) or "added" (to the scores).
    `outside` as for `constant_array`.
    """
    array = constant_array(view, value, memo, outside)
    if array is None:
        return None
    if step.kind == "added":
        array = _as_added(view, found, step, value, array)
        if not np.all((array == 0) | (array <= MASK_FILL)):
            return None
        fill, kept = float(array.max(where=array != 0, initial=-math.inf)), array == 0
    else:
        seen = array.astype(bool)
        fill, kept = found.scalars[step.scalar or ""], ~seen if step.kind == "hidden" else seen
    kept, classes = _varying(*constant_with_axes(found, view, step.leaf or "", value, kept))
    if not classes:
        return Constant() if kept.all() else None
    return _as_band(kept, classes, found, fill)


def _as_band(kept: np.ndarray, classes: list[int], found: Match, fill: float) -> Constant | None:
    """What a mask that differs along some axis classes says, if it is a band of an axis of rows and the one of keys."""
    rows, keys = found.letters["t"], found.letters["s"]
    if len(keys) != 1 or len(classes) != 2 or not {keys[0]} < set(classes) <= {*rows, *keys}:
        return None
    row = next(c for c in classes if c != keys[0])
    grid = kept if classes == [row, keys[0]] else kept.T
    band = _band(grid)
    return None if band is None else Constant(row, fill, band, (grid.shape[0], grid.shape[1]))


def _band(grid: np.ndarray) -> tuple[int | None, int] | None:
    """(left, right) of the band that is True in rows x keys; None where it is none, or one that causal masks and local windows are not."""
    rows, keys = grid.shape
    (right, *_), (down, *_) = (np.flatnonzero(~side) for side in (_and_end(grid[0]), _and_end(grid[:, 0])))
    right, left = int(right) - 1, int(down) - 1
    if min(left, right) < 0:
        return None
    distance = np.arange(keys) - np.arange(rows)[:, None]
    if not np.array_equal(grid, (distance >= -left) & (distance <= right)):
        return None
    if left == rows - 1:
        return (None, 0) if right == 0 else None
    return (left, right) if right < keys - 1 else None


def _and_end(seen: np.ndarray) -> np.ndarray:
    return np.append(seen.astype(bool), False)


def blind_rows(view: CanonicalView, found: Match, biases: Mapping[str, Value], memo: Memo) -> bool:
    """Whether a constant among the biases leaves a row nothing but scores whose exponentials are 0."""
    for name, value in biases.items():
        array = constant_array(view, value, memo)
        if array is None:
            continue
        array, axes = constant_with_axes(found, view, name, value, array)
        keys = tuple(d for d, c in enumerate(axes) if c in found.letters["s"])
        if bool(np.any(np.all(array <= _VANISHES, axis=keys))):
            return True
    return False


def is_ones(view: CanonicalView, value: Value, memo: Memo) -> bool:
    """Whether a value is a constant whose every entry is one."""
    array = constant_array(view, value, memo)
    return array is not None and bool(np.all(array == 1))


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
                raise Declined("a mask has one axis twice")
            classes.append(c if c is not None else BROADCAST)
    return array[tuple(index)], classes
