"""Which loss a region is, by value: it is evaluated on random operands, and its numbers follow from the logits it has there.

A loss of a row with the logits z and the label l is a lse(z) + b z[l] + c sum(z) + d lse(z)^2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....graph.certify.inputs import Reduction, inputs_of, summed_with
from ....graph.certify.reduced_sizes import at_sizes
from ....graph.declined import Declined
from ....graph.interpret.evaluate import CannotEvaluate, evaluate
from ....graph.matching.region import Region
from ....graph.program.equations import slice_jaxpr
from ....graph.program.ir import Value
from ....kernels import plain_meaning_of
from .heads import Head

_DRAWS, _DRAWS_OF_SUMS, _SPREAD = 6, 24, (0.3, 3.0)
_LEFT = 1e-9  # of the largest loss: what the four terms may leave of it
_NONE = 1e-7  # a term of less is rounding
_ONE = 1e-5  # so far from 1 is the sum of targets that are written as float32 numbers


@dataclass(frozen=True)
class Numbers:
    """A loss: `factor` (1, or -1 for its negative; of a sum over all rows that of each), label smoothing and the factor of lse^2."""

    factor: float
    label_smoothing: float
    z_loss: float


def numbers_of(region: Region, head: Head) -> Numbers:
    """The numbers of a region's root.

    Raises:
      Declined: it is no such loss, or cannot be evaluated.
    """
    try:
        columns, losses = _evaluated(region, head)
    except CannotEvaluate as error:
        raise Declined(f"{region.root!r} cannot be evaluated: {error}", "uncertified") from error
    found, *_ = np.linalg.lstsq(columns, losses, rcond=None)
    scale = max(float(np.max(np.abs(losses))), 1e-30)
    if not np.all(np.isfinite(losses)) or np.max(np.abs(columns @ found - losses)) > _LEFT * scale:
        raise Declined(
            f"{region.root!r} is another function of the logits and the labels than a cross-entropy", "value"
        )
    numbers = _read(*map(float, found), summed=is_total(region.root, head))
    if isinstance(numbers, str):
        raise Declined(f"{region.root!r} {numbers}", "scalar")
    return numbers


def _read(lse: float, picked: float, mean: float, squared: float, summed: bool) -> Numbers | str:
    """The numbers of a loss, from the factors of its four terms; `mean` is that of the mean of the logits."""
    size = abs(lse) if summed and lse else 1.0
    if abs(abs(lse) - size) > _ONE or abs(lse + picked + mean) > _ONE * size or abs(picked) <= _ONE * size:
        return f"is {lse:.6g} lse {picked:+.6g} logit of the label {mean:+.6g} mean of the logits {squared:+.6g} lse^2"
    factor = math.copysign(size, lse)
    smoothing, z_loss = _number(-mean / factor), _number(squared / factor)
    if not 0 <= smoothing < 1:
        return f"has the label smoothing {smoothing:.6g}"
    return Numbers(factor, smoothing, z_loss)


def _number(found: float) -> float:
    """A factor as it was written: the shortest decimal near enough."""
    if abs(found) < _NONE:
        return 0.0
    return next(x for digits in range(1, 17) if abs((x := float(f"{found:.{digits}g}")) - found) <= _NONE * abs(found))


def _evaluated(region: Region, head: Head) -> tuple[np.ndarray, np.ndarray]:
    """(lse, logit of the label, mean and lse^2 of each row drawn; its losses)."""
    nodes = sorted((*region.nodes, *region.support), key=lambda n: n.id)
    closed = slice_jaxpr(region.block, nodes, region.inputs, (region.root, head.logits), region.known)
    avals, names = [v.aval for v in region.inputs], {v.id: n for n, v in region.leaves.items()}
    weights = summed_with(closed)

    def attempt(reduction: Reduction) -> tuple[np.ndarray, np.ndarray]:
        count = _DRAWS if len(region.root.shape) else _DRAWS_OF_SUMS
        drawn = [_drawn(closed, avals, region, names, reduction, seed, weights, head) for seed in range(count)]
        columns, losses = zip(*drawn, strict=True)
        return np.concatenate(columns), np.concatenate(losses)

    return at_sizes(attempt, avals, region.positions)


def _drawn(
    closed: Any,
    avals: Sequence[Any],
    region: Region,
    names: dict[int, str],
    reduction: Reduction,
    seed: int,
    weights: Any,
    head: Head,
) -> tuple[np.ndarray, np.ndarray]:
    sizes, (*args, _) = inputs_of(avals, region.root.aval, reduction, seed, weights=weights)
    rng = np.random.default_rng(seed)
    for i, value in enumerate(region.inputs):
        if names[value.id] == "labels":
            args[i] = rng.integers(0, head.classes, args[i].shape).astype(args[i].dtype)
        elif names[value.id] == "x":
            args[i] = args[i] * rng.uniform(*_SPREAD)
    labels = args[next(i for i, v in enumerate(region.inputs) if names[v.id] == "labels")].reshape(-1)
    losses, logits = evaluate(closed, args, sizes, plain_meaning_of)
    logits = logits.reshape(-1, head.classes)
    top = logits.max(-1)
    lse = np.log(np.sum(np.exp(logits - top[:, None]), -1)) + top
    picked = logits[np.arange(len(labels)), labels]
    columns = np.stack([lse, picked, logits.mean(-1), lse * lse], -1)
    if is_total(region.root, head):
        columns = columns.mean(0, keepdims=True) * math.prod(head.rows)
    return columns, losses.reshape(-1)


def is_total(value: Value, head: Head) -> bool:
    """Whether a value is one number for several rows."""
    return math.prod(value.shape) == 1 and math.prod(head.rows) > 1
