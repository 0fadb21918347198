"""Which loss a region is, by value: it is evaluated on random operands, and its numbers follow from the logits it has there.

A loss of a row with the logits z and the label l is a lse(z) + b z[l] + c sum(z) + d lse(z)^2. It is tried on large logits too, where
one that clips is another function, and one whose softmax underflows is no number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from ....graph.certify.certify import with_vjp, without_device_sums
from ....graph.certify.inputs import Reduction, inputs_of, summed_with
from ....graph.certify.reduced_sizes import at_sizes
from ....graph.declined import Declined
from ....graph.interpret.evaluate import evaluate
from ....graph.interpret.limits import CannotEvaluate
from ....graph.matching.region import Region
from ....graph.program.equations import slice_jaxpr
from ....graph.program.in_shard_map import make_jaxpr
from ....graph.program.ir import Node, Value
from ....kernels import plain_meaning_of
from ...engine.layout import input_positions
from ...engine.wording import anchor_text
from .heads import Head
from .rows import RULES, Cut

_DRAWS, _DRAWS_OF_SUMS, _SPREAD = 6, 24, (0.3, 3.0)
_FAR = (30.0, 1e5, 1e30)  # of large logits, at which nearly every row is sure of a class
_FAR_LEFT = 1e-8  # as _LEFT, of such a draw
_LEFT = 1e-9  # of the largest loss: what the four terms may leave of it
_NONE = 1e-7  # a term of less is rounding
PLAIN = "write the loss as logsumexp(logits) - logits[label], and scale what is added to it apart"
APART = "compute what else the logits are needed for from x and w again, in a function of its own"
CLIP = "clip the loss of each row, and not what it is made of"
_ONE = 1e-5  # so far from 1 is the sum of targets that are written as float32 numbers


@dataclass(frozen=True)
class Numbers:
    """A loss.

    Attributes:
      factor: 1, or -1 for its negative; of a sum over all rows that of each.
      label_smoothing: the label smoothing.
      z_loss: the factor of lse^2.
      lost: whether it is infinite or NaN for some large logits, as the logarithm of a softmax that underflows is.
    """

    factor: float
    label_smoothing: float
    z_loss: float
    lost: bool = False


@dataclass(frozen=True)
class Beside:
    """A value by row that is loss * `loss` + lse * `lse` + lse^2 * `squared`; `stopped`: it has no gradient, by a rule of the user's."""

    loss: float
    lse: float
    squared: float
    stopped: bool = False


def numbers_of(cut: Cut, head: Head, slot: str | None = None) -> Numbers:
    """The numbers of a region's root: a loss, or the gradient of one by the operand in `slot`.

    Raises:
      Declined: it is no such loss, or cannot be evaluated.
    """
    root = cut.region.root
    found = coefficients(cut, head, slot)
    numbers = _read(*found, summed=slot is not None or is_total(root, head))
    if isinstance(numbers, str):
        raise Declined(f"{root!r} {numbers}", "scalar", edit=PLAIN)
    return replace(numbers, lost=_is_lost_far(cut, head, slot, found))


def coefficients(cut: Cut, head: Head, slot: str | None = None) -> list[float]:
    """The factors of lse, the label's logit, the mean of the logits and lse^2. Raises Declined as `numbers_of`."""
    columns, losses = map(np.concatenate, zip(*_evaluated(cut, head, slot), strict=True))
    found, *_ = np.linalg.lstsq(columns, losses, rcond=None)
    scale = max(float(np.max(np.abs(losses))), 1e-30)
    if np.max(np.abs(columns @ found - losses)) > _LEFT * scale:
        raise _other(cut.region.root)
    return list(map(float, found))


def _other(root: Value) -> Declined:
    what = f"{root!r} is another function of the logits and the labels than a cross-entropy"
    return Declined(what, "value", edit=APART)


def _is_lost_far(cut: Cut, head: Head, slot: str | None, found: list[float]) -> bool:
    """Whether a region's root is no number for some large logits. Raises Declined if it is another number than that of these factors."""
    root, most = cut.region.root, max(map(abs, found))
    factors = np.asarray([x if abs(x) > _NONE * most else 0.0 for x in found])
    lost = False
    for columns, losses in _evaluated(cut, head, slot, _FAR):
        held = np.isfinite(losses)
        lost = lost or not held.all()
        most = float(np.max(np.abs(columns) @ np.abs(factors)))
        if np.any(np.abs(columns @ factors - losses)[held] > _FAR_LEFT * most):
            what = f"{root!r} is another function than a cross-entropy where logits are large"
            raise Declined(what, "value", edit=CLIP)
    return lost


def beside(cut: Cut, head: Head, value: Value, numbers: Numbers) -> Beside | None:
    """How a further value by row is made of a loss with these numbers and of lse; None if it is not."""
    own = replace(cut, region=replace(cut.region, others=(value,)).of(value), weights=None)
    try:
        found = coefficients(own, head)
        if _is_lost_far(own, head, None, found):
            return None
    except Declined:
        return None
    lse, picked, mean, squared = (x if abs(x) > _NONE else 0.0 for x in found)
    loss = -picked / (1 - numbers.label_smoothing)
    if abs(mean + loss * numbers.label_smoothing) > _ONE:
        return None
    stopped = any(n.primitive in RULES for n in own.region.nodes) and _is_stopped(own)
    return Beside(*map(_number, (loss, lse - loss, squared - loss * numbers.z_loss)), stopped=stopped)


def _is_stopped(cut: Cut) -> bool:
    """Whether a region's root has no gradient."""
    region = cut.region
    avals, fn = [v.aval for v in region.inputs], jex_core.jaxpr_as_fun(region.jaxpr())
    closed = with_vjp(lambda *a: fn(*a)[0], avals, region.root.aval)
    inline = without_device_sums(plain_meaning_of, region.sums.axes)

    def attempt(reduction: Reduction) -> bool:
        sizes, args = inputs_of(avals, region.root.aval, reduction, weights=summed_with(closed))
        return not any(map(np.any, evaluate(closed, args, sizes, inline)[1:]))

    return at_sizes(attempt, avals, region.positions)


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


def _evaluated(
    cut: Cut, head: Head, slot: str | None, far: Sequence[float] = ()
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(the four terms at each entry of the root, or their gradients; its entries) of each draw: of logits of ordinary sizes, or of those
    in `far`, with labels of which every other one is that of the largest logit.

    Raises:
      Declined: the region cannot be evaluated, or an entry is no number although the logits are of ordinary sizes.
    """
    region = cut.region.of(cut.region.root)
    logits, terms, wanted = _logits(cut, head), _terms(cut, head, slot), region.jaxpr()
    avals, weights = [v.aval for v in region.inputs], summed_with(wanted)
    at = input_positions(region)["labels"]
    draws = range(_DRAWS if len(region.root.shape) else _DRAWS_OF_SUMS)

    def flat(program: Any, sizes: Any, args: list[Any]) -> list[np.ndarray]:
        return [a.reshape(-1) for a in evaluate(program, args, sizes, plain_meaning_of)]

    def attempt(reduction: Reduction) -> list[tuple[np.ndarray, np.ndarray]]:
        found = list[tuple[np.ndarray, np.ndarray]]()
        for seed, spread in enumerate(far or [None] * len(draws)):
            sizes, args = _drawn(cut, head, reduction, seed, weights, spread)
            if spread is not None:
                (z,) = evaluate(logits, args, sizes, plain_meaning_of)
                args[at] = _often_largest(args[at], z[..., : head.counted or head.classes])
            with np.errstate(all="ignore"):
                (losses,) = flat(wanted, sizes, args)
                if spread is None and not np.isfinite(losses).all():
                    raise _other(region.root)
                found.append((np.stack(flat(terms, sizes, args), -1), losses))
        return found

    try:
        return at_sizes(attempt, avals, region.positions)
    except CannotEvaluate as error:
        raise unevaluated(region, error) from error


def unevaluated(region: Region, error: CannotEvaluate) -> Declined:
    """Why a region is declined that cannot be evaluated; rows that are cut off the logits may be cut off before the head."""
    cut = next((n for n in region.nodes if n.primitive == "slice" and _cuts_rows(n)), None)
    if cut is None:
        return Declined(f"{region.root!r} cannot be evaluated: {error}", "uncertified")
    sentence = f"{anchor_text(cut)} takes a part of {cut.inputs[0]!r}, for which there is no proof at reduced sizes"
    edit = "cut rows off before the head: x[:, :-1] @ w, in place of (x @ w)[:, :-1]"
    return Declined(sentence, "uncertified", [cut], edit)


def _cuts_rows(node: Node) -> bool:
    return bool(node.inputs[0].aval.shape[:-1] != node.outputs[0].aval.shape[:-1])


def _often_largest(labels: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Labels of which every other one is replaced by the class of the largest logit."""
    best = logits.argmax(-1).reshape(-1)
    if best.size != labels.size:
        return labels
    chosen = np.where(np.arange(best.size) % 2, best, labels.reshape(-1))
    return chosen.reshape(labels.shape).astype(labels.dtype)


def _logits(cut: Cut, head: Head) -> Any:
    """A jaxpr of the region's inputs that gives the logits."""
    region = cut.region
    nodes = sorted((*region.nodes, *region.support), key=lambda n: n.id)
    return slice_jaxpr(region.block, nodes, region.inputs, head.logits, region.known)


def _terms(cut: Cut, head: Head, slot: str | None) -> Any:
    """A jaxpr of the region's inputs that gives the four terms of a loss, weighted, by row or summed as the root; or their gradients."""
    region, where = cut.region, input_positions(cut.region)
    logits = jex_core.jaxpr_as_fun(_logits(cut, head))
    summed, counted = slot is not None or is_total(region.root, head), head.counted or head.classes

    def terms(*inputs: Any) -> list[Any]:
        z = head.of_taken(*logits(*inputs))
        labels = inputs[where["labels"]].reshape(head.rows)
        entries = jax.lax.broadcasted_iota(labels.dtype, z.shape, z.ndim - 1)
        top = jax.lax.stop_gradient(jnp.max(z, -1))
        lse = jnp.log(jnp.sum(jnp.exp(z - top[..., None]), -1)) + top
        found = [
            lse,
            jnp.sum(jnp.where(entries == labels[..., None], z, 0), -1),
            jnp.sum(jnp.where(entries < counted, z, 0), -1) / z.shape[-1],
            lse * lse,
        ]
        if cut.weights is not None:
            weights = inputs[where["weights"]].reshape(head.rows).astype(z.dtype)
            found = [a * weights for a in found]
        return [jnp.sum(a) for a in found] if summed else found

    def gradients(*inputs: Any) -> list[Any]:
        at = where[str(slot)]

        def gradient(term: int) -> Any:
            return jax.grad(lambda a: terms(*inputs[:at], a, *inputs[at + 1 :])[term])(inputs[at])

        # Of the root's shape; a gradient of w may be turned.
        return [a if a.shape == region.root.shape else a.T for a in map(gradient, range(4))]

    return make_jaxpr(terms if slot is None else gradients, [v.aval for v in region.inputs])


def _drawn(
    cut: Cut, head: Head, reduction: Reduction, seed: int, weights: Any, spread: float | None = None
) -> tuple[Any, list[Any]]:
    """(sizes, operands) as they are drawn, with labels in the vocabulary and logits of several sizes, or of one."""
    region = cut.region
    sizes, (*args, _) = inputs_of([v.aval for v in region.inputs], region.root.aval, reduction, seed, weights=weights)
    rng, where = np.random.default_rng(seed), input_positions(region)
    at = where["labels"]
    args[at] = rng.integers(0, head.counted or head.classes, args[at].shape).astype(args[at].dtype)
    args[where["x"]] = args[where["x"]] * (spread or rng.uniform(*_SPREAD))
    return sizes, args


def is_total(value: Value, head: Head) -> bool:
    """Whether a value is one number for several rows."""
    return math.prod(value.shape) == 1 and math.prod(head.rows) > 1
