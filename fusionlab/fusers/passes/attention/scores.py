"""The scores of an attention: the steps from the product of queries and keys to the softmax.

`readings` peels them off from the softmax inwards: a mask, a bias, a cap, a factor, until the product is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from ....graph.canonical.nodes import ONE, Coef, Operand
from ....graph.canonical.view import CanonicalView
from ....graph.matching.match import close
from .levels import below, is_dot, nearest_below

_STEP_LIMIT = 12  # steps between a softmax and its product; models have up to 4
_ON_SCORES = frozenset("select sum tanh prod".split())
_CLIP_STEPS = 12  # from the product with the values to that of queries and keys
_TO_EXPONENTIALS = frozenset("prod select cast sum max exp stop_gradient".split())
# Kind of a step -> what its operand is called in an example.
_LEAVES = {
    **dict.fromkeys(("kept", "hidden", "blended"), "mask"),
    **dict.fromkeys(("times", "over"), "factor"),
    "added": "bias",
    "gated": "gate",
}
_TO_CLIP = frozenset("exp sum select prod tanh cast reduce_max stop_gradient".split())


@dataclass(frozen=True)
class Step:
    """One step from the product towards the softmax.

    Attributes:
      kind: "kept" (where(m, z, fill)), "hidden" (where(m, fill, z)), "blended" (z * m + fill * (1 - m)), "added" (z + b), "gated"
        (z * m, and then added to), "capped" (c * tanh(z)), "times" (z * f) or "over" (z / f) or "negated" (-z; any other negative factor
        is a scale's).
      has_gain: whether its result is multiplied by a number right after it.
      lowered: whether it is written z * m + fill * (m - 1), with the fill's sign turned.
      leaf, scalar, gain: the names of its operand ("" where it has none), of its number and of that number in an example.
    """

    kind: str
    number: int
    has_gain: bool = False
    lowered: bool = False

    @property
    def leaf(self) -> str:
        prefix = _LEAVES.get(self.kind)
        return f"{prefix}{self.number}" if prefix else ""

    @property
    def masks(self) -> bool:
        """Whether it replaces scores by a number."""
        return _LEAVES.get(self.kind) == "mask"

    @property
    def scales(self) -> bool:
        """Whether its operand is a factor, of queries and heads."""
        return _LEAVES.get(self.kind) == "factor"

    @property
    def scalar(self) -> str | None:
        return "cap" if self.kind == "capped" else f"fill{self.number}" if self.masks else None

    @property
    def gain(self) -> str | None:
        return f"gain{self.number}" if self.has_gain else None

    def __call__(self, z: Any, leaf: Any, scalar: Any) -> Any:
        match self.kind:
            case "kept":
                return jnp.where(leaf, z, scalar)
            case "hidden":
                return jnp.where(leaf, scalar, z)
            case "blended":
                kept = leaf.astype(z.dtype)
                return z * kept + scalar * (kept - 1 if self.lowered else 1 - kept)
            case "added":
                return z + leaf
            case "capped":
                return scalar * jnp.tanh(z)
            case "negated":
                return -z
            case "times" | "gated":
                return z * leaf
            case _:
                return z / leaf


Steps = tuple[Step, ...]  # outermost first
NEGATED = (Step("negated", 0),)  # a maximum passes positive factors alone, so bare negated scores look different


def readings(view: CanonicalView, scores: int, factor: Coef = 1.0) -> Iterator[Steps]:
    """The ways to read the steps from a product to `factor` times canonical node `scores`, the likeliest first; at least one.

    The last may end at a node that is not a product: the place of the nearest miss.
    """
    ends = list(_ends(view, Operand(factor, scores, ()), ()))
    whole = [steps for steps, end in ends if is_dot(view, end)]
    yield from whole or [max((steps for steps, _ in ends), key=len)]


def _ends(view: CanonicalView, scores: Operand, steps: Steps) -> Iterator[tuple[Steps, int]]:
    """Where the ways end, and the steps peeled off until there."""
    inner = list(_inner(view, scores, steps))
    if not inner:
        yield steps, scores.nid
    for step, source in inner:
        yield from _ends(view, source, (*steps, step))


def _inner(view: CanonicalView, scores: Operand, outer: Steps) -> Iterator[tuple[Step, Operand]]:
    """The steps that a multiple of a canonical node may be, each with the scores before it; scores are capped once."""
    node = view.nodes[scores.nid]
    inner = _INNER.get((node.op, len(node.operands)))
    return iter(()) if inner is None or len(outer) == _STEP_LIMIT else inner(view, scores, outer)


def _step(kind: str, scores: Operand, outer: Steps) -> Step:
    has_gain = kind not in ("times", "over", "gated", "capped") and not close(scores.coef, 1.0)
    return Step(kind, len(outer), has_gain)


def _chosen(view: CanonicalView, scores: Operand, outer: Steps) -> Iterator[tuple[Step, Operand]]:
    _, first, second = view.nodes[scores.nid].operands
    if first.nid == ONE:
        yield _step("kept", scores, outer), second
    if second.nid == ONE:
        yield _step("hidden", scores, outer), first


def _capped(view: CanonicalView, scores: Operand, outer: Steps) -> Iterator[tuple[Step, Operand]]:
    if all(s.kind != "capped" for s in outer):
        yield _step("capped", scores, outer), view.nodes[scores.nid].operands[0]


def _summed(view: CanonicalView, scores: Operand, outer: Steps) -> Iterator[tuple[Step, Operand]]:
    operands = view.nodes[scores.nid].operands
    for i in (0, 1):
        for inner, lowered in _blended(view, operands[i], operands[1 - i]):
            yield replace(_step("blended", scores, outer), lowered=lowered), inner
    for i in _by_rank(view, operands):
        yield _step("added", scores, outer), operands[i]


def _multiplied(view: CanonicalView, scores: Operand, outer: Steps) -> Iterator[tuple[Step, Operand]]:
    node = view.nodes[scores.nid]
    for i in _by_rank(view, node.operands):
        if node.params[i] != 1 or node.params[1 - i] not in (1, -1):
            continue
        inner = node.operands[i]
        inner = inner._replace(coef=inner.coef * scores.coef)  # its numbers stand outside of it
        yield _step("times" if node.params[1 - i] == 1 else "over", scores, outer), inner
        if node.params[1 - i] == 1 and outer and outer[-1].kind == "added":
            yield _step("gated", scores, outer), inner


# (op, number of operands) of a canonical node -> the steps that it may be.
_INNER: Mapping[tuple[str, int], Callable[[CanonicalView, Operand, Steps], Iterator[tuple[Step, Operand]]]] = {
    ("select", 3): _chosen,
    ("tanh", 1): _capped,
    ("sum", 2): _summed,
    ("prod", 2): _multiplied,
}


def _blended(view: CanonicalView, kept: Operand, filled: Operand) -> Iterator[tuple[Operand, bool]]:
    """The scores z of z * m, if the term added to it is a number times 1 - m or m - 1 with a bool m; and whether it is m - 1."""
    product, rest = view.nodes[kept.nid], view.nodes[filled.nid]
    if product.op != "prod" or product.params != (1, 1) or rest.op != "sum" or len(rest.operands) != 2:
        return
    unit, mask = sorted(rest.operands, key=lambda o: o.nid != ONE)
    if unit.nid != ONE or not _is_of_bools(view, mask.nid) or (unit.coef, mask.coef) not in ((1, -1), (-1, 1)):
        return
    for i in (0, 1):
        if product.operands[i].nid == mask.nid:
            z = product.operands[1 - i]
            yield z._replace(coef=z.coef * kept.coef), unit.coef == -1


def _is_of_bools(view: CanonicalView, nid: int) -> bool:
    """Whether a canonical node is bools made floats."""
    cast = view.nodes[nid]
    values = view.values_of.get(cast.operands[0].nid, ()) if cast.op == "cast" and cast.params == "float" else ()
    return any(v.dtype == bool for v in values)


def _by_rank(view: CanonicalView, operands: Sequence[Operand]) -> list[int]:
    """Operand numbers, scores first: they have the axes of queries and of keys, and a product is near."""
    ids = [o.nid for o in operands]
    return sorted(range(len(ids)), key=lambda i: (not _near_product(view, ids[i]), -len(view.nodes[ids[i]].shape)))


def _near_product(view: CanonicalView, nid: int) -> bool:
    return nearest_below(view, nid, is_dot, _STEP_LIMIT - 1, _ON_SCORES) is not None


def clip_of(view: CanonicalView, product: int) -> int | None:
    """The canonical node that clips the scores before the exponentials with which a product weighs values; None if there is none.

    `product` is the canonical node of the weights' product with the values.
    """
    level = [o.nid for o in view.nodes[product].operands]
    past = False
    for _ in range(_CLIP_STEPS):
        found = next((n for n in level if past and _is_clip(view, n)), None)
        if found is not None:
            return found
        past = past or any(view.nodes[n].op == "exp" for n in level)
        level = below(view, level, _TO_CLIP if past else _TO_EXPONENTIALS)
    return None


def _is_clip(view: CanonicalView, nid: int) -> bool:
    node = view.nodes[nid]
    return node.op == "clamp" or (node.op in ("max", "min") and any(o.nid == ONE for o in node.operands))
