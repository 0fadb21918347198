"""The forms in which attention is written, composed of a softmax's spelling and the steps on the scores.

A site is read from the outside in. First one of the spellings of `softmax(z) @ v` must match, with the scores `z` as a leaf. Then
steps are peeled off the scores (`scores`) until the product of queries and keys is left. The reading yields one example, and that
example is then matched: the reading only selects the example to try.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ....graph.matching.match import Match
from ....graph.matching.pattern import Example
from .scores import Steps
from .sinks import Spelling, weigh

LEAVES = {"q": "btc", "k": "bsc", "v": "bsd"}
_NOISE = 1 + 1e-9  # the view has 12 digits of a number


@dataclass(frozen=True)
class WeightChange:
    """A change of the probabilities before they weigh the values.

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
    """A spelling of softmax(z) @ v: the softmax's own, and the changes of the probabilities, innermost first."""

    spelling: Spelling
    kinds: tuple[str, ...] = ()

    def __call__(self, z: Any, v: Any, given: Mapping[str, Any]) -> Any:
        sink, changes = self.spelling.sink_of(given), self.changes
        if self.spelling.after:
            return self.spelling.fn(z, v, sink)
        if self.of_some_keys:
            p, changes = jax.nn.softmax(z, where=given[changes[0].leaf]), changes[1:]
        else:
            p = self.spelling.fn(z, sink)
        for change in changes:
            p = change(p, given[change.leaf], given.get(change.scalar or ""))
        return weigh(p, v)

    @property
    def sink(self) -> str | None:
        """The sink of its spelling."""
        return self.spelling.sink

    @property
    def changes(self) -> tuple[WeightChange, ...]:
        return tuple(WeightChange(kind, i) for i, kind in enumerate(self.kinds))

    @property
    def of_some_keys(self) -> bool:
        """Whether the softmax itself excludes keys, by the first of its changes."""
        return self.kinds[:1] == ("where",)

    @property
    def name(self) -> str:
        return ", ".join([self.spelling.name, *(f"weights {kind}" for kind in self.kinds)])

    @property
    def leaves(self) -> dict[str, str]:
        """The operands of its changes and its sink, with their axes in an example."""
        return dict.fromkeys(self.changed_by, "bts") | ({"sink": "bt"} if self.sink == "data" else {})

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
        return (*self.shares, *(("sink_number",) if self.sink == "number" else ()))

    @property
    def bools(self) -> frozenset[str]:
        """Its leaves of dtype bool."""
        return frozenset(c.leaf for c in self.changes if c.kind != "factors")


@dataclass(frozen=True)
class Reading:
    """A site as read: the parts of its example, and the example's match.

    c (s + b) is c s + c b, and likewise for masks: the match's numbers are those of a site whose numbers all multiply the product. The fill
    and the cap are given so too; the factor of a bias is named as the gain of its step.
    """

    tail: Tail
    steps: Steps
    match: Match

    @classmethod
    def of(cls, tail: Tail, steps: Steps, found: Match, largest: float) -> Reading:
        """The reading of a match; numbers beyond `largest` are infinite in the program."""
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
    shared, may_be_in = {"b": frozenset("v")}, tail.spelling.may_be_in
    return Example(tail.name, fn, leaves, tail.scalars, tail.bools, optional, shared, may_be_in=may_be_in)


@functools.cache
def whole_example(tail: Tail, steps: Steps) -> Example:
    """Attention from queries, keys and values: the scores made by `steps`, then `tail`."""
    beside = {s.leaf: "bt" if s.scales else "bts" for s in steps if s.leaf} | tail.leaves
    numbers = [name for s in steps for name in (s.scalar, s.gain) if name]
    scalars = ("scale", *numbers, *tail.scalars)
    bools = frozenset(s.leaf for s in steps if s.masks) | tail.bools

    def fn(*args: Any) -> Any:
        given = dict(zip((*LEAVES, *beside, *scalars), args, strict=True))
        z = jnp.einsum("btc,bsc->bts", given["q"], given["k"]) * given["scale"]
        for step in reversed(steps):
            leaf = given[step.leaf][..., None] if step.scales else given.get(step.leaf)
            z = step(z, leaf, given.get(step.scalar or ""))
            z = z * given[step.gain] if step.gain else z
        return tail(z, given["v"], given)

    optional = dict.fromkeys("bts", frozenset(beside))
    name = ", ".join([tail.name, *(f"scores {s.kind}" + ", times a number" * s.has_gain for s in steps)])
    return Example(name, fn, LEAVES | beside, scalars, bools, optional, {"b": frozenset("qkv")})
