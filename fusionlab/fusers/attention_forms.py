"""The forms attention is written in, composed: a softmax's spelling around the steps that scores went through.

A site is read from the outside in. First one of the spellings of `softmax(z) @ v` has to match, with the scores `z` as a leaf. Then
steps are peeled off the scores (a mask, a bias, a cap, a factor) until the product of queries and keys is left. What was read makes one
example, and that example is what is matched: the reading only says which example to try.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..graph.canonical import ONE, View
from ..graph.ir import Value
from ..graph.match import Match
from ..graph.pattern import Example

LEAVES = {"q": "btc", "k": "bsc", "v": "bsd"}
WITHOUT_MAX = "softmax without max"
_STEP_LIMIT = 12  # steps between a softmax and its product; models have up to 4


def _weigh(p: Any, v: Any) -> Any:
    return jnp.einsum("bts,bsd->btd", p, v)


def _by_max(z: Any) -> Any:
    return jax.nn.softmax(z)


def _plain(z: Any) -> Any:
    e = jnp.exp(z)
    return e / e.sum(-1, keepdims=True)


def _by_logsumexp(z: Any) -> Any:
    return jnp.exp(z - jax.nn.logsumexp(z, -1, keepdims=True))


def _by_log_softmax(z: Any) -> Any:
    return jnp.exp(jax.nn.log_softmax(z, -1))


def _divided_after(z: Any, v: Any) -> Any:
    e = jnp.exp(z - z.max(-1, keepdims=True))
    return _weigh(e, v) / e.sum(-1)[..., None]


SOFTMAXES: Mapping[str, Callable[[Any], Any]] = {
    "softmax": _by_max,
    WITHOUT_MAX: _plain,
    "exp(z - logsumexp(z))": _by_logsumexp,
    "exp(log_softmax(z))": _by_log_softmax,
}
AFTER = "division after the product"
# What may happen to the probabilities before they weigh the values: nothing, a factor (a dropout mask, weights on heads), a selection, or
# `jax.nn.softmax(z, where=m)`, which gives a row that sees nothing no weights at all.
_WORDS = {
    "": "",
    "factors": ", probabilities times factors",
    "kept": ", probabilities selected",
    "where": " of some keys",
}


@dataclass(frozen=True)
class Tail:
    """A spelling of softmax(z) @ v: the softmax's name, and what changes the probabilities (a key of `_WORDS`)."""

    softmax: str
    change: str = ""

    def __call__(self, z: Any, v: Any, factors: Any = None, factor: float = 1.0) -> Any:
        if self.softmax == AFTER:
            return _divided_after(z, v)
        if self.change == "where":
            return _weigh(jax.nn.softmax(z, where=factors), v)
        p = SOFTMAXES[self.softmax](z)
        if self.change == "factors":
            p = p * factors
        if self.change == "kept":
            p = jnp.where(factors, p * factor, 0.0)
        return _weigh(p, v)

    @property
    def name(self) -> str:
        return self.softmax + _WORDS[self.change]

    @property
    def bools(self) -> frozenset[str]:
        """Its leaves of dtype bool."""
        return frozenset({"factors"} if self.change in ("kept", "where") else ())


TAILS = (
    *(Tail(s, c) for c in ("", "factors", "kept") for s in (*SOFTMAXES, AFTER) if not (c and s == AFTER)),
    Tail("softmax", "where"),
)


@dataclass(frozen=True)
class Step:
    """One step from the product towards the softmax.

    Attributes:
      kind: "kept" (where(m, z, fill)), "hidden" (where(m, fill, z)), "added" (z + b), "capped" (c * tanh(z)), "times" (z * f) or
        "over" (z / f) or "negated" (-z; any other negative factor is a scale's).
      leaf, scalar: the names of its operand and of its number in an example.
    """

    kind: str
    number: int

    @property
    def leaf(self) -> str | None:
        prefix = {"kept": "mask", "hidden": "mask", "added": "bias", "times": "factor", "over": "factor"}.get(self.kind)
        return f"{prefix}{self.number}" if prefix else None

    @property
    def scalar(self) -> str | None:
        return {"kept": f"fill{self.number}", "hidden": f"fill{self.number}", "capped": "cap"}.get(self.kind)

    def __call__(self, z: Any, leaf: Any, scalar: Any) -> Any:
        match self.kind:
            case "kept":
                return jnp.where(leaf, z, scalar)
            case "hidden":
                return jnp.where(leaf, scalar, z)
            case "added":
                return z + leaf
            case "capped":
                return scalar * jnp.tanh(z)
            case "negated":
                return -z
            case "times":
                return z * leaf
            case _:
                return z / leaf


Steps = tuple[Step, ...]  # outermost first
NEGATED = (Step("negated", 0),)  # a maximum passes positive factors alone, so bare negated scores look different


@dataclass(frozen=True)
class Reading:
    """A site as it was read: the parts of its example, and the example's match."""

    tail: Tail
    steps: Steps
    match: Match


@functools.cache
def tail_example(tail: Tail) -> Example:
    """`softmax(z) @ v` with the scores as a leaf."""
    leaves, optional = {"z": "bts", "v": "bsd"}, {}
    if tail.change:
        leaves["factors"] = "bts"
        optional = {x: frozenset({"factors"}) for x in "bts"}
    kept = tail.change == "kept"
    bools, scalars = tail.bools, ("factor",) if kept else ()
    return Example(tail.name, lambda z, v, *rest: tail(z, v, *rest), leaves, scalars, bools, optional)


@functools.cache
def whole_example(tail: Tail, steps: Steps) -> Example:
    """Attention from queries, keys and values on: the scores made by `steps`, then `tail`."""
    leaves = dict(LEAVES)
    leaves.update({s.leaf: "bts" if s.kind not in ("times", "over") else "bt" for s in steps if s.leaf})
    if tail.change:
        leaves["factors"] = "bts"
    extra = frozenset(leaves) - frozenset(LEAVES)
    scalars = ("scale", *(s.scalar for s in steps if s.scalar), *(("factor",) if tail.change == "kept" else ()))
    masks = {s.leaf for s in steps if s.leaf and s.leaf.startswith("mask")}
    bools = frozenset(masks | tail.bools)

    def fn(*args: Any) -> Any:
        given = dict(zip((*leaves, *scalars), args, strict=True))
        z = jnp.einsum("btc,bsc->bts", given["q"], given["k"]) * given["scale"]
        for step in reversed(steps):
            leaf = given[step.leaf] if step.leaf else None
            leaf = leaf[..., None] if step.kind in ("times", "over") and leaf is not None else leaf
            z = step(z, leaf, given[step.scalar] if step.scalar else None)
        return tail(z, given["v"], given.get("factors"), given.get("factor", 1.0))

    return Example(_name(tail, steps), fn, leaves, scalars, bools, dict.fromkeys("bts", extra))


def _name(tail: Tail, steps: Steps) -> str:
    words = {
        "kept": "masked",
        "hidden": "masked where true",
        "added": "bias",
        "capped": "capped",
        "times": "scaled",
        "over": "scaled",
        "negated": "negated",
    }
    return ", ".join([tail.name, *(words[s.kind] for s in steps)])


def readings(view: View, scores: int) -> Iterator[Steps]:
    """The ways to read what canonical node `scores` went through since a product, the likeliest first; at least one.

    The last may end at a node that is no product: the nearest miss stands there.
    """
    whole = list(_peel(view, scores, ()))
    yield from whole or [max(_ends(view, scores, ()), key=len)]


def _peel(view: View, nid: int, steps: Steps) -> Iterator[Steps]:
    if view.nodes[nid].op == "dot":
        yield steps
    if len(steps) < _STEP_LIMIT:
        for kind, inner in _inner(view, nid, steps):
            yield from _peel(view, inner, (*steps, Step(kind, len(steps))))


def _ends(view: View, nid: int, steps: Steps) -> Iterator[Steps]:
    inner = list(_inner(view, nid, steps)) if len(steps) < _STEP_LIMIT else []
    if not inner:
        yield steps
    for kind, below in inner:
        yield from _ends(view, below, (*steps, Step(kind, len(steps))))


def _inner(view: View, nid: int, outer: Steps) -> Iterator[tuple[str, int]]:
    """The steps that canonical node `nid` may be, each with the scores before it; scores are capped once."""
    node = view.nodes[nid]
    ids = [o.nid for o in node.operands]
    if node.op == "select" and len(ids) == 3:
        if ids[1] == ONE:
            yield "kept", ids[2]
        if ids[2] == ONE:
            yield "hidden", ids[1]
    elif node.op == "tanh" and all(s.kind != "capped" for s in outer):
        yield "capped", ids[0]
    elif node.op == "sum" and len(ids) == 2:
        for i in _by_rank(view, ids):
            yield "added", ids[i]
    elif node.op == "prod" and len(ids) == 2:
        for i in _by_rank(view, ids):
            if node.params[i] == 1 and node.params[1 - i] in (1, -1):
                yield ("times" if node.params[1 - i] == 1 else "over"), ids[i]


def _by_rank(view: View, ids: list[int]) -> list[int]:
    """Operand numbers, scores first: they have the axes of queries and of keys, and a product is near."""
    return sorted(range(len(ids)), key=lambda i: (not _near_product(view, ids[i]), -len(view.nodes[ids[i]].shape)))


def _near_product(view: View, nid: int) -> bool:
    level = {nid}
    for _ in range(_STEP_LIMIT):
        if any(view.nodes[n].op == "dot" for n in level):
            return True
        level = {
            o.nid
            for n in level
            if view.nodes[n].op in ("select", "sum", "tanh", "prod")
            for o in view.nodes[n].operands
        }
    return False


def crossed_axes(view: View, product: int) -> tuple[Value, int, int] | None:
    """(weights, the axis of their softmax, the axis that the product contracts), as the program numbers them, where those are two axes.

    `product` is a canonical node; None where it is no product of a softmax, or either is over several axes.
    """
    dot = view.nodes[product]
    for operand in dot.operands if dot.op == "dot" else ():
        weights = view.nodes[operand.nid]
        totals = (o for o in weights.operands if view.nodes[o.nid].op == "reduce_sum")
        total = next(totals, None) if weights.op == "prod" else None
        shown = view.values_of.get(operand.nid)
        if total is None or not shown:
            continue
        numbers = view.ref[shown[0].id].dims
        normalised = [i for i, c in enumerate(numbers) if c >= 0 and c not in total.axes]
        contracted = [i for i, c in enumerate(numbers) if c >= 0 and operand.axes[c] not in dot.params]
        if len(normalised) == len(contracted) == 1 and normalised != contracted:
            return shown[0], normalised[0], contracted[0]
    return None
