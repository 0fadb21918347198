"""What the calls that led to nodes (`scopes.frames_of`) have in common, and the turns of loops, distinguished by the order of calls."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from fusionlab.graph.program.scopes import Source


@dataclass(frozen=True)
class Turn:
    """A turn of a loop, counted from 0, that begins with a call of `first`."""

    first: Hashable
    number: int


def shared(paths: Sequence[tuple[Source, ...]]) -> int:
    """How many outermost calls all paths share."""
    if not paths:
        return 0
    first, least = paths[0], min(map(len, paths))
    for k in range(least):
        if any(p[k] != first[k] for p in paths):
            return k
    return max(0, least - 1)


def turns(keys: Sequence[Hashable]) -> list[Turn | None]:
    """For a sequence of calls, the turn of a loop that each is in; None for what is in no loop.

    A loop is where a call comes again after others: `a b a b` are two turns of (a, b), and so are `a a` under different
    occurrences only if another call was between them.
    """
    runs = _runs(keys)
    marks: list[Turn | None] = [None] * len(keys)
    position = 0
    while position < len(runs):
        period, count = _loop_at(runs, position)
        if count < 2:
            position += 1
            continue
        first = runs[position][0]
        for k in range(count):
            for key_run in runs[position + k * period : position + (k + 1) * period]:
                for i in range(key_run[1], key_run[2]):
                    marks[i] = Turn(first, k)
        position += period * count
    return marks


def _runs(keys: Sequence[Hashable]) -> list[tuple[Hashable, int, int]]:
    """(key, first, behind the last) of neighbours that are equal."""
    runs: list[tuple[Hashable, int, int]] = []
    for i, key in enumerate(keys):
        if runs and runs[-1][0] == key:
            runs[-1] = (key, runs[-1][1], i + 1)
        else:
            runs.append((key, i, i + 1))
    return runs


def _loop_at(runs: Sequence[tuple[Hashable, int, int]], start: int) -> tuple[int, int]:
    """(period, count) of the longest repetition that begins here; (1, 1) where nothing repeats."""
    first = runs[start][0]
    again = next((k for k in range(start + 2, len(runs)) if runs[k][0] == first), None)
    if again is None:
        return 1, 1
    period = again - start
    body = [r[0] for r in runs[start:again]]
    count = 1
    while [r[0] for r in runs[start + count * period : start + (count + 1) * period]] == body:
        count += 1
    return period, count
