"""The forms attention is written in, composed: a softmax's spelling around the steps that scores went through.

A site is read from the outside in. First one of the spellings of `softmax(z) @ v` has to match, with the scores `z` as a leaf. Then
steps are peeled off the scores (`scores`) until the product of queries and keys is left. What was read makes one example, and that
example is what is matched: the reading only says which example to try.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ....graph.canonical.view import CanonicalView
from ....graph.matching.match import Match
from ....graph.matching.pattern import Example
from .scores import Steps
from .sinks import NO_MAXIMUM, Sink

LEAVES = {"q": "btc", "k": "bsc", "v": "bsd"}
WITHOUT_MAX = "softmax without max"
_NOISE = 1 + 1e-9  # the view has 12 digits of a number


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
DIVIDED_AFTER = "division after the product"
_WORDS = {
    "factors": ", probabilities times factors",
    "kept": ", probabilities selected",
    "hidden": ", probabilities selected",
    "where": " of some keys",
}


@dataclass(frozen=True)
class WeightChange:
    """What happens to the probabilities before they weigh the values.

    Attributes:
      kind: "factors" (p * f: a dropout mask, weights on heads), "kept" (where(m, p * number, 0)), "hidden" (where(m, 0, p * number)) or
        "where": `jax.nn.softmax(z, where=m)`, which gives a row that sees nothing no weights at all; only the first may be.
      leaf, scalar: the names of its operand and of its number in an example.
    """

    kind: str
    number: int

    @property
    def leaf(self) -> str:
        return f"factors{self.number or ''}"

    @property
    def scalar(self) -> str | None:
        return f"share{self.number or ''}" if self.kind in ("kept", "hidden") else None

    def __call__(self, p: Any, leaf: Any, scalar: Any) -> Any:
        match self.kind:
            case "kept":
                return jnp.where(leaf, p * scalar, 0.0)
            case "hidden":
                return jnp.where(leaf, 0.0, p * scalar)
            case _:
                return p * leaf


@dataclass(frozen=True)
class Tail:
    """A spelling of softmax(z) @ v: the softmax's name, what changes the probabilities, the innermost first, and its sink if it has one,
    whose spelling is the softmax's then."""

    softmax: str
    kinds: tuple[str, ...] = ()
    sink: Sink | None = None

    def __call__(self, z: Any, v: Any, given: Mapping[str, Any]) -> Any:
        if self.sink is not None and self.sink.after:
            return self.sink.result(z, v, given)
        if self.softmax == DIVIDED_AFTER:
            return _divided_after(z, v)
        changes = self.changes
        if self.of_some_keys:
            p, changes = jax.nn.softmax(z, where=given[changes[0].leaf]), changes[1:]
        else:
            p = SOFTMAXES[self.softmax](z) if self.sink is None else self.sink.weights(z, given)
        for change in changes:
            p = change(p, given[change.leaf], given[change.scalar] if change.scalar else None)
        return _weigh(p, v)

    @property
    def changes(self) -> tuple[WeightChange, ...]:
        return tuple(WeightChange(kind, i) for i, kind in enumerate(self.kinds))

    @property
    def of_some_keys(self) -> bool:
        """Whether the softmax itself leaves keys out, by the first of its changes."""
        return self.kinds[:1] == ("where",)

    @property
    def name(self) -> str:
        return self.softmax + "".join(_WORDS[kind] for kind in self.kinds)

    @property
    def leaves(self) -> dict[str, str]:
        """The operands of its changes and its sink, with their axes in an example."""
        return {c.leaf: "bts" for c in self.changes} | (self.sink.leaves if self.sink else {})

    @property
    def changed_by(self) -> tuple[str, ...]:
        """The operands of its changes."""
        return tuple(c.leaf for c in self.changes)

    @property
    def shares(self) -> tuple[str, ...]:
        """The numbers of its changes."""
        return tuple(c.scalar for c in self.changes if c.scalar)

    @property
    def scalars(self) -> tuple[str, ...]:
        return (*self.shares, *(self.sink.scalars if self.sink else ()))

    @property
    def holds(self) -> frozenset[str]:
        """Canonical ops that only its like have: see `Example`."""
        return self.sink.holds if self.sink else frozenset()

    @property
    def without_max(self) -> bool:
        """Whether the exponentials are of the scores themselves."""
        return self.softmax == WITHOUT_MAX or self.softmax in NO_MAXIMUM

    @property
    def bools(self) -> frozenset[str]:
        """Its leaves of dtype bool."""
        return frozenset(c.leaf for c in self.changes if c.kind != "factors")


@dataclass(frozen=True)
class Reading:
    """A site as it was read: the parts of its example, and the example's match.

    c (s + b) is c s + c b, and so with masks: the match's numbers are those of a site whose numbers all stand at the product. Of the
    fill and the cap that is what it says; what a bias is multiplied by is called as the gain of its step.
    """

    tail: Tail
    steps: Steps
    match: Match

    @classmethod
    def of(cls, tail: Tail, steps: Steps, found: Match, largest: float) -> Reading:
        """What a match says; numbers beyond `largest` are infinite in the program."""
        gain, capped, scalars = 1.0, 1.0, dict(found.scalars)
        for step in steps:
            gain *= scalars.get(step.gain or "", 1.0)
            scalars[f"gain{step.number}"] = gain
            if step.kind == "capped":
                capped = gain
            if step.scalar:
                number = scalars[step.scalar] * (-gain if step.lowered else gain)
                infinite = abs(number) > largest * _NOISE
                scalars[step.scalar] = math.copysign(math.inf, number) if infinite else number
        # What is capped is divided by the cap as it stands.
        scalars["scale"] = scalars.get("scale", 1.0) * gain / capped
        return cls(tail, steps, replace(found, scalars=scalars))


@functools.cache
def tail_example(tail: Tail) -> Example:
    """`softmax(z) @ v` with the scores as a leaf."""
    leaves = {"z": "bts", "v": "bsd", **tail.leaves}

    def fn(z: Any, v: Any, *rest: Any) -> Any:
        return tail(z, v, dict(zip((*tail.leaves, *tail.scalars), rest, strict=True)))

    optional = dict.fromkeys("bts", frozenset(tail.leaves))
    shared = {"b": frozenset("v")}

    def may_be_in(view: CanonicalView) -> bool:
        return tail.holds <= view.by_op.keys()

    return Example(tail.name, fn, leaves, tail.scalars, tail.bools, optional, shared, may_be_in=may_be_in)


@functools.cache
def whole_example(tail: Tail, steps: Steps) -> Example:
    """Attention from queries, keys and values on: the scores made by `steps`, then `tail`."""
    beside = {s.leaf: "bts" if s.kind not in ("times", "over") else "bt" for s in steps if s.leaf} | tail.leaves
    numbers = [name for s in steps for name in (s.scalar, s.gain) if name]
    scalars = ("scale", *numbers, *tail.scalars)
    bools = frozenset(s.leaf for s in steps if s.leaf and s.masks) | tail.bools

    def fn(*args: Any) -> Any:
        given = dict(zip((*LEAVES, *beside, *scalars), args, strict=True))
        z = jnp.einsum("btc,bsc->bts", given["q"], given["k"]) * given["scale"]
        for step in reversed(steps):
            leaf = given[step.leaf] if step.leaf else None
            leaf = leaf[..., None] if step.kind in ("times", "over") and leaf is not None else leaf
            z = step(z, leaf, given[step.scalar] if step.scalar else None)
            z = z * given[step.gain] if step.gain else z
        return tail(z, given["v"], given)

    optional = dict.fromkeys("bts", frozenset(beside))
    return Example(_name(tail, steps), fn, LEAVES | beside, scalars, bools, optional, {"b": frozenset("qkv")})


def _name(tail: Tail, steps: Steps) -> str:
    words = {
        "kept": "masked",
        "hidden": "masked where true",
        "blended": "blended with a number",
        "added": "bias",
        "capped": "capped",
        "gated": "multiplied by a mask",
        "times": "scaled",
        "over": "scaled",
        "negated": "negated",
    }
    return ", ".join([tail.name, *(words[s.kind] + ", times a number" * s.has_gain for s in steps)])
