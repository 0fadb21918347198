"""The traffic of a compiled program between devices: its collectives by kind, their numbers of runs, and their bytes.

Read from optimised HLO text, it includes both the collectives that XLA's partitioner adds for shardings and the program's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ...showing import Shown
from ..cost.cost import quantity
from .hlo_text import Instruction, Module, instruction_kind, parse_hlo

# Reductions of one value to all, and moves of data that a device lacks.
SUMS = ("all-reduce", "reduce-scatter")
COLLECTIVE_MOVES = ("all-gather", "all-to-all", "collective-permute")

_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=\s]*)\]")
_BITS = re.compile(r"[a-z]+(\d+)")
_RUN_WHAT_THEY_CALL = frozenset({"while", "conditional", "call", "async-start"})
_BITS_OF = {"pred": 8, "token": 0, "opaque": 0}


@dataclass(frozen=True)
class Collective:
    """One collective of a compiled module.

    Attributes:
      name, kind: "all-reduce.3", "all-reduce".
      bytes: of one device in one run: the larger of operands and results.
      runs: its runs per run of the program; a loop of unknown length counts once.
      computation: the computation that contains it.
      op_name: JAX's name for the original operation; "" if XLA kept none.
    """

    name: str
    kind: str
    bytes: int
    runs: int
    computation: str
    op_name: str = ""


@dataclass(frozen=True, repr=False)
class Traffic(Shown):
    """All collectives of a kind in one run of a program: their `count`, and the `bytes` of one device."""

    count: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.count} of {bytes_text(self.bytes)}"


def bytes_text(n: int) -> str:
    """ "312 B", "4.2 MB"."""
    return f"{quantity(n)}B"


def collectives(module: Module | str) -> tuple[Collective, ...]:
    """The collectives of a module, or of HLO text, in order."""
    module = parse_hlo(module) if isinstance(module, str) else module
    ends = {name: i for i in module.instructions.values() if i.opcode.endswith("-done") for name in i.operands}
    found = []
    for computation, instruction, runs in _running(module):
        if instruction_kind(instruction) != "collective":
            continue
        gives = sum(_bytes(module.instructions[n].type) for n in instruction.operands if n in module.instructions)
        gets = _bytes(ends.get(instruction.name, instruction).type)
        kind = instruction.opcode.removesuffix("-start")
        found.append(Collective(instruction.name, kind, max(gives, gets), runs, computation, instruction.op_name))
    return tuple(found)


def traffic(module: Module | str) -> dict[str, Traffic]:
    """Kind -> the collectives of that kind, in alphabetical order."""
    counts: dict[str, tuple[int, int]] = {}
    for collective in collectives(module):
        count, size = counts.get(collective.kind, (0, 0))
        counts[collective.kind] = count + collective.runs, size + collective.runs * collective.bytes
    return {kind: Traffic(*counts[kind]) for kind in sorted(counts)}


def _running(module: Module) -> Iterator[tuple[str, Instruction, int]]:
    """(computation, instruction, runs) of all that runs; a computation called from two places appears for each."""
    waiting = [(module.entry, 1, frozenset[str]())]
    while waiting:
        name, runs, above = waiting.pop()
        inner = []
        for instruction in module.computations.get(name, ()):
            yield name, instruction, runs
            if instruction.opcode in _RUN_WHAT_THEY_CALL:
                times = runs * max(instruction.trips, 1)
                inner += [(c, times, above | {name}) for cs in instruction.called.values() for c in cs]
        waiting += reversed([call for call in inner if call[0] not in call[2]])


def _bytes(text: str) -> int:
    """The bytes of a type in HLO text; a tuple's is the sum of its parts'."""
    total = 0
    for dtype, shape in _ARRAY.findall(text):
        bits = _BITS_OF.get(dtype)
        if bits is None:
            known = _BITS.match(dtype)
            bits = int(known.group(1)) if known else 0
        size = 1
        for extent in re.findall(r"\d+", shape):
            size *= int(extent)
        total += -(-size * bits // 8)
    return total
