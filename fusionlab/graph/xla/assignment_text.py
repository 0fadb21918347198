"""XLA's buffer assignment of a compiled program from the text that it dumps, where the executable does not carry the message (on a GPU).

With `xla_dump_to` and `xla_dump_hlo_as_text` XLA writes two files for each module: `*buffer-assignment.txt` has the blocks of memory and
which value lies where in them, `*live-range.txt` from which instruction to which each value lives (https://openxla.org/xla/flags_guidance;
the forms are those of jaxlib 0.11.2).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .buffer_assignment import Allocation, Buffer

OPTIONS = {"xla_dump_hlo_as_text": True}  # with `xla_dump_to`
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (.*)")
_PARAMETER = re.compile(r"\bparameter (\d+)")
_VALUE = re.compile(r"^ value: <\d+ ([^\s{]+)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)")
_RANGE = re.compile(r"^    ([^\s{]+)\{([\d,]*)\}:(\d+)-(\d+)$")
_NAMES = (("constant", "constant"), ("parameter", "argument"), ("maybe-live-out", "output"), ("output", "output"))
_Name = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class _Placed:
    """A buffer from `start` to `end` in its block."""

    buffer: Buffer
    start: int

    @property
    def end(self) -> int:
        return self.start + self.buffer.size


def read_text(assignment: str, live_ranges: str) -> tuple[Allocation, ...]:
    """The blocks that a run reserves, in XLA's order, without those of threads.

    The peak is where most bytes of the blocks of temporaries are in use. Of values that share a place then, as an update in place does
    with what it updates, one is in it.

    Raises:
      ValueError: the texts are of another form.
    """
    ranges = _ranges(live_ranges)
    blocks = [b for b in _blocks(assignment) if "thread-local" not in b[1]]
    if not blocks or not ranges:
        raise ValueError("no allocations, or no live ranges")
    moment = _peak([placed for _, flags, placed in blocks if _kind(flags) == "temporary"], ranges)
    return tuple(_allocation(*block, ranges, moment) for block in blocks)


def _blocks(text: str) -> list[tuple[int, str, list[_Placed]]]:
    """Size, flags and values of each block."""
    found: list[tuple[int, str, list[_Placed]]] = []
    for line in text.splitlines():
        if head := _ALLOCATION.match(line):
            found.append((int(head.group(1)), head.group(2), []))
        elif found and (value := _VALUE.match(line)):
            name, index, size, offset = value.groups()
            found[-1][2].append(_Placed(Buffer(name, _numbers(index or ""), int(size)), int(offset)))
        elif line.startswith("Total bytes"):  # what follows tells the same again
            break
    return found


def _ranges(text: str) -> dict[_Name, tuple[int, int]]:
    matches = filter(None, map(_RANGE.match, text.splitlines()))
    return {(m.group(1), _numbers(m.group(2))): (int(m.group(3)), int(m.group(4))) for m in matches}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def _kind(flags: str) -> str:
    return next((kind for flag, kind in _NAMES if flag in flags), "temporary")


def _live(placed: Iterable[_Placed], ranges: Mapping[_Name, tuple[int, int]], moment: int) -> list[_Placed]:
    """Those that live then, the largest first, each place once."""
    chosen: list[_Placed] = []
    for one in sorted(placed, key=lambda p: -p.buffer.size):
        first, last = ranges.get((one.buffer.name, one.buffer.index), (0, -1))
        if first <= moment <= last and all(one.end <= c.start or c.end <= one.start for c in chosen):
            chosen.append(one)
    return chosen


def _peak(blocks: Iterable[list[_Placed]], ranges: Mapping[_Name, tuple[int, int]]) -> int:
    """The instruction at which most bytes of blocks are in use."""
    placed = list(itertools.chain.from_iterable(blocks))
    moments = sorted({ranges[key][0] for p in placed if (key := (p.buffer.name, p.buffer.index)) in ranges})
    return max(moments, key=lambda t: sum(p.buffer.size for p in _live(placed, ranges, t)), default=0)


def _allocation(
    size: int, flags: str, placed: list[_Placed], ranges: Mapping[_Name, tuple[int, int]], moment: int
) -> Allocation:
    kind = _kind(flags)
    number = _PARAMETER.search(flags)
    buffers = tuple(p.buffer for p in placed)
    # What is handed in or out has its place from start to end, whatever lies in it meanwhile.
    peak = tuple(p.buffer for p in _live(placed, ranges, moment)) if kind == "temporary" else ()
    whole = max(buffers, key=lambda b: b.size, default=None)
    return Allocation(
        size, kind, int(number.group(1)) if number else -1, buffers, peak or (() if whole is None else (whole,))
    )
