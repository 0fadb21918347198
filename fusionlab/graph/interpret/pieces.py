"""Cuts a jaxpr into pieces that fit: runs of equations, and loops whose steps are cut in their turn.

What calls and checkpoints hold is taken as if it was written where they are. A cut is made where few bytes cross it, so that the
layers of an unrolled model, which are alike, give pieces that are alike.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from ..jax_compat import FLATTENED, child_jaxprs, scan_counts, split_closed
from ..primitives import having

_INLINED = FLATTENED | having("remat")
_A_PROGRAM, _A_RUN = 10, 0.5  # what they cost, in equations compiled: a program besides its equations, and a run of one
_NEAR = (
    300  # equations: a value that is read later than that crosses every cut nearby, and decides between none of them
)


@dataclass(frozen=True, eq=False)
class Literal:
    """A number in a program, in its own dtype."""

    value: np.ndarray


@dataclass(frozen=True, eq=False)
class Step:
    """An equation, with the numbers of the values that it reads and gives."""

    eqn: Any
    reads: tuple[int | Literal, ...]
    gives: tuple[int, ...]

    @functools.cached_property
    def bytes(self) -> int:
        """Of its results in float64."""
        return sum(_wide_bytes(v.aval) for v in self.eqn.outvars)

    @property
    def flop(self) -> float:
        """Of a matrix product, and of those in what it holds."""
        return _flop(self.eqn)


@dataclass(frozen=True, eq=False)
class Piece:
    """Steps that run as one program.

    Attributes:
      reads, gives: numbers of the values that cross its ends, each once.
      bytes: of what it reads and makes in float64, were nothing freed.
    """

    steps: tuple[Step, ...]
    reads: tuple[int, ...]
    gives: tuple[int, ...]
    bytes: int

    @functools.cached_property
    def form(self) -> tuple[Any, ...]:
        """Equal for pieces that are alike, and hardly ever for others: primitives, types, and who reads whose results."""
        names: dict[int, int] = {}
        steps = [
            (
                step.eqn.primitive.name,
                *(names.setdefault(n, len(names)) if isinstance(n, int) else str(n.value) for n in step.reads),
                *(names.setdefault(n, len(names)) for n in step.gives),
                *(_type_text(v.aval) for v in (*step.eqn.invars, *step.eqn.outvars)),
            )
            for step in self.steps
        ]
        return (*steps, *(names[n] for n in self.gives))


@dataclass(frozen=True, eq=False)
class Loop:
    """A scan that runs step by step.

    Attributes:
      eqn: the scan.
      constants, carries: how many of what it reads are the same in each step, and are handed on.
    """

    eqn: Any
    reads: tuple[int | Literal, ...]
    gives: tuple[int, ...]
    body: Program
    constants: int
    carries: int
    length: int
    reverse: bool

    @property
    def bytes(self) -> int:
        return self.body.bytes

    def held(self, taped: bool) -> int:
        """Bytes that wait while it runs: those of a step, and with `taped` what each step was handed on."""
        carried = sum(self.body.sizes[n] for n in self.body.inputs[self.constants : self.constants + self.carries])
        return self.body.held(taped) + carried * self.length * taped

    @property
    def times(self) -> range:
        """The indices of its steps, in the order in which they run."""
        return range(self.length - 1, -1, -1) if self.reverse else range(self.length)


@dataclass(frozen=True, eq=False)
class Program:
    """What a jaxpr computes, in order.

    Attributes:
      inputs, outputs: numbers of values; an output may be a literal.
      constants: arrays that it captured, by their numbers, with their types.
      last: by number, the index of the last item that reads a value.
      sizes: bytes of each value in float64, by its number.
    """

    items: tuple[Piece | Loop, ...]
    inputs: tuple[int, ...]
    constants: tuple[tuple[int, Any, Any], ...]
    outputs: tuple[int | Literal, ...]
    last: dict[int, int]
    sizes: Mapping[int, int]

    @property
    def bytes(self) -> int:
        """Of the largest piece in it."""
        return max((item.bytes for item in self.items), default=0)

    def held(self, taped: bool = False) -> int:
        """The most bytes of values that wait between its pieces; with `taped`, all that the way back needs wait until then."""
        most = alive = sum(self.sizes[n] for n in self.inputs)
        for i, item in enumerate(self.items):
            made = sum(self.sizes[n] for n in item.gives)
            alive += made
            # A loop's results wait step by step before they are stacked.
            inside = made + item.held(taped) if isinstance(item, Loop) else 0
            most = max(most, alive + inside)
            alive -= 0 if taped else sum(self.sizes.get(n, 0) for n in self.done_with(i))
        return most

    @property
    def flop(self) -> float:
        """Of its matrix products, those of loops once for each step."""
        loops = sum(item.length * item.body.flop for item in self.items if isinstance(item, Loop))
        return loops + sum(step.flop for item in self.items if isinstance(item, Piece) for step in item.steps)

    @property
    def pieces(self) -> Iterator[Piece]:
        """All of them, those of loops once."""
        for item in self.items:
            yield from item.body.pieces if isinstance(item, Loop) else (item,)

    @property
    def work(self) -> float:
        """What it takes to compile and run, in equations compiled: alike pieces are compiled once."""
        programs = {piece.form: len(piece.steps) + _A_PROGRAM for piece in self.pieces}
        return sum(programs.values()) + _A_RUN * self.runs()

    def read_later(self, i: int) -> bool:
        """Whether an item reads what the item of that index gives."""
        return any(i < self.last.get(n, -1) for n in self.items[i].gives)

    def done_with(self, i: int) -> list[int]:
        """The values that nothing needs after an item of that index: neither another item nor the caller."""
        item = self.items[i]
        seen = {n for n in (*item.reads, *item.gives) if isinstance(n, int)}.difference(self.outputs)
        return [n for n in seen if self.last.get(n, -1) <= i]

    def runs(self, taped: bool = False) -> int:
        """How many pieces run forward, those of loops once for each step; with `taped` those that the way back needs."""
        loops = sum(item.length * item.body.runs() for item in self.items if isinstance(item, Loop))
        pieces = [i for i, item in enumerate(self.items) if isinstance(item, Piece)]
        return loops + sum(not taped or self.read_later(i) for i in pieces)

    def runs_back(self) -> int:
        """How many pieces run on the way back, at most."""
        each = (
            item.length * (item.body.runs(taped=True) + item.body.runs_back()) if isinstance(item, Loop) else 1
            for item in self.items
        )
        return sum(each)


def in_pieces(closed: Any, most_bytes: float, consts: Sequence[Any] | None = None) -> Program:
    """The program cut so that, as far as single equations allow, no piece makes more than `most_bytes` in float64.

    Args:
      closed: a jaxpr, open or closed.
      consts: its constants, where it has them not itself.
    """
    return _Cutter(most_bytes).program(closed, consts)


@functools.lru_cache(maxsize=4096)
def _type_text(aval: Any) -> str:
    return str(aval)


def well_cut(
    closed: Any, most_bytes: float, least_bytes: float, held_bytes: float, consts: Sequence[Any] | None = None
) -> Program:
    """The program cut as in `in_pieces` at that size between `most_bytes` and `least_bytes` where it takes the least work.

    Args:
      held_bytes: what may wait between pieces on the way back; if more does at every size, the largest pieces are taken.
    """
    tried = [in_pieces(closed, most_bytes, consts)]
    size = min(most_bytes, tried[0].bytes) / 2
    while size >= least_bytes:
        tried.append(in_pieces(closed, size, consts))
        size /= 2
    return min((p for p in tried if p.held(taped=True) <= held_bytes), key=lambda p: p.work, default=tried[0])


@dataclass
class _Cutter:
    most_bytes: float
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _bytes: dict[int, int] = field(default_factory=dict)

    def program(self, closed: Any, consts: Sequence[Any] | None) -> Program:
        jaxpr, own = split_closed(closed)
        names: dict[Any, int | Literal] = {}
        inputs = tuple(self._named(names, jaxpr.invars))
        captured = list(self._captured(names, jaxpr, own if consts is None else consts))
        steps = list(self._steps(jaxpr, names, captured))
        outputs = tuple(self._read(names, v) for v in jaxpr.outvars)
        items = self._items(steps, outputs)
        last = {n: i for i, item in enumerate(items) for n in item.reads if isinstance(n, int)}
        return Program(items, inputs, tuple(captured), outputs, last, self._bytes)

    def _named(self, names: dict[Any, int | Literal], variables: Sequence[Any]) -> Iterator[int]:
        for v in variables:
            number = next(self._numbers)
            names[v], self._bytes[number] = number, _wide_bytes(v.aval)
            yield number

    def _captured(self, names: dict, jaxpr: Any, consts: Sequence[Any]) -> Iterator[tuple[int, Any, Any]]:
        numbers = self._named(names, jaxpr.constvars)
        for number, v, const in zip(numbers, jaxpr.constvars, consts, strict=True):
            yield number, const, v.aval

    def _read(self, names: dict, atom: Any) -> int | Literal:
        return Literal(np.asarray(atom.val, atom.aval.dtype)) if hasattr(atom, "val") else names[atom]

    def _steps(self, jaxpr: Any, names: dict, captured: list) -> Iterator[Step]:
        for eqn in jaxpr.eqns:
            reads = tuple(self._read(names, a) for a in eqn.invars)
            if eqn.primitive.name not in _INLINED:
                yield Step(eqn, reads, tuple(self._named(names, eqn.outvars)))
                continue
            inner, consts = split_closed(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")))
            inside: dict[Any, int | Literal] = dict(zip(inner.invars, reads, strict=True))
            captured += self._captured(inside, inner, consts)
            yield from self._steps(inner, inside, captured)
            names.update((v, self._read(inside, a)) for v, a in zip(eqn.outvars, inner.outvars, strict=True))

    def _items(self, steps: Sequence[Step], outputs: Sequence[int | Literal]) -> tuple[Piece | Loop, ...]:
        last = {n: i for i, step in enumerate(steps) for n in step.reads if isinstance(n, int)}
        last |= {n: len(steps) + _NEAR for n in outputs if isinstance(n, int)}
        items: list[Piece | Loop] = []
        start = 0
        for i, step in enumerate(steps):
            if step.eqn.primitive.name == "scan" and (loop := self._loop(step)) is not None:
                items += [*self._pieces(steps, start, i, last), loop]
                start = i + 1
        return (*items, *self._pieces(steps, start, len(steps), last))

    def _loop(self, step: Step) -> Loop | None:
        """A scan as a loop, where it does not fit as a piece of its own."""
        p = step.eqn.params
        jaxpr, _ = split_closed(p["jaxpr"])
        if p["length"] * _made(jaxpr) <= self.most_bytes:
            return None
        counts = scan_counts(p)
        return Loop(
            step.eqn, step.reads, step.gives, self.program(p["jaxpr"], None), *counts, p["length"], p["reverse"]
        )

    def _pieces(self, steps: Sequence[Step], start: int, end: int, last: dict[int, int]) -> Iterator[Piece]:
        crossing = self._crossing(steps, start, end, last)
        while start < end:
            stop = self._fits(steps, start, end)
            if stop < end:  # at the narrowest place of the second half of what fits
                stop = min(range((start + stop + 1) // 2 or 1, stop + 1), key=lambda i: (crossing[i], -i))
            yield self._piece(steps, start, max(stop, start + 1), last)
            start = max(stop, start + 1)

    def _fits(self, steps: Sequence[Step], start: int, end: int) -> int:
        total = 0
        for i in range(start, end):
            total += steps[i].bytes
            if total > self.most_bytes and i > start:
                return i
        return end

    def _crossing(self, steps: Sequence[Step], start: int, end: int, last: dict[int, int]) -> dict[int, int]:
        """Bytes that a cut before each step has to carry over, of values that are read soon after."""
        change = dict.fromkeys(range(start, end + 2), 0)
        for i in range(start, end):
            for n in steps[i].gives:
                until = last.get(n, i)
                if i < until < i + _NEAR:
                    change[i + 1] += self._bytes[n]
                    change[min(until, end) + 1] -= self._bytes[n]
        return dict(zip(change, itertools.accumulate(change.values()), strict=True))

    def _piece(self, steps: Sequence[Step], start: int, stop: int, last: dict[int, int]) -> Piece:
        taken = tuple(steps[start:stop])
        made = {n for step in taken for n in step.gives}
        reads = dict.fromkeys(n for s in taken for n in s.reads if isinstance(n, int) and n not in made)
        gives = tuple(n for step in taken for n in step.gives if last.get(n, -1) >= stop)
        total = sum(step.bytes for step in taken) + sum(self._bytes[n] for n in reads)
        return Piece(taken, tuple(reads), gives, total)


def _wide_bytes(aval: Any) -> int:
    if not hasattr(aval, "shape"):
        return 0
    inexact = jnp.issubdtype(aval.dtype, np.inexact)
    each = 16 if jnp.issubdtype(aval.dtype, np.complexfloating) else 8 if inexact else 4
    return math.prod(map(int, aval.shape)) * (
        each if inexact or jnp.issubdtype(aval.dtype, jax.dtypes.extended) else aval.dtype.itemsize
    )


def _made(jaxpr: Any) -> int:
    """Bytes that the equations of a jaxpr make in float64, those of what they hold included."""
    total = 0
    for eqn in jaxpr.eqns:
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        total += sum(_wide_bytes(v.aval) for v in eqn.outvars)
        if inner is not None:
            total += eqn.params.get("length", 1) * _made(split_closed(inner)[0])
    return total


def _flop(eqn: Any) -> float:
    if eqn.primitive.name == "dot_general":
        left, (out,) = eqn.invars[0].aval, eqn.outvars
        return 2.0 * out.aval.size * math.prod(left.shape[i] for i in eqn.params["dimension_numbers"][0][0])
    times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
    inner = (split_closed(child)[0].eqns for _, _, child in child_jaxprs(eqn))
    return float(times) * sum(_flop(e) for eqns in inner for e in eqns)
