"""Which cases run: the default tier, a rotating slice of the rest, everything.

The default tier has every test function with few of its cases: the first, and one in `ONE_IN` of the others, chosen by a
hash of the test's id, so that a case stays where it is when others come and go. The marker `whole` keeps all cases of a
test, `dear` keeps none; a case that is asked for by its name always runs. What is left over carries the marker `rest`: `pytest`
leaves it out, `pytest -m ""` runs all. With FUSIONLAB_SLICE set to the hash of a commit's tree, one part in so many of the rest
carries the marker `slice` too; `.ci/run` sets it.
"""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ONE_IN = 64  # of the cases of a test but the first
SLICE_SECONDS = 300.0  # of processor time that a slice of the rest may take
SLICE_VARIABLE = "FUSIONLAB_SLICE"
RECORD = Path(__file__).with_name("durations.json")
UNKNOWN_SECONDS = 0.5  # a case of a test that has no record


def function_of(case: str) -> str:
    """The test function of a case: its id without the parameters."""
    return case.partition("[")[0]


def is_drawn(case: str, parts: int, part: int = 0) -> bool:
    """Whether a stable hash of the id puts the case into this one of so many parts."""
    return zlib.crc32(case.encode()) % parts == part


def default_tier(cases: Iterable[str], least: Callable[[str], float], one_in: int = ONE_IN) -> set[str]:
    """The ids that run by default, of all ids in the order of their collection.

    `least` says how many of a function's first cases run whatever their hash is: one as a rule, infinity where all do.
    """
    seen: Counter[str] = Counter()
    kept = set()
    for case in cases:
        name = function_of(case)
        if seen[name] < least(case) or is_drawn(case, one_in):
            kept.add(case)
        seen[name] += 1
    return kept


@dataclass(frozen=True)
class Slice:
    """One part of the rest, which a commit's tree chooses.

    Attributes:
      index: which part.
      parts: how many there are; so many commits see everything, if each draws another.
      cases: the ids in it.
      seconds: of processor time, by the durations on record.
    """

    index: int
    parts: int
    cases: frozenset[str]
    seconds: float

    def __str__(self) -> str:
        # Trees draw at random: on average the last of n parts comes after n (1 + 1/2 + ... + 1/n) draws.
        expected = self.parts * sum(1 / i for i in range(1, self.parts + 1))
        return (
            f"slice {self.index + 1} of {self.parts}: {len(self.cases)} cases, about {self.seconds:.0f} s of processor "
            f"time on record; {self.parts} commits see everything if each draws another slice, {expected:.0f} on average"
        )


def slice_of(
    rest: Iterable[str], tree: str, seconds_of: Callable[[str], float], budget: float = SLICE_SECONDS
) -> Slice:
    """The part of the rest that runs with the commit of this tree.

    Raises:
      ValueError: `tree` is not a hash in hexadecimal digits.
    """
    try:
        number = int(tree, 16)
    except ValueError:
        raise ValueError(
            f"{SLICE_VARIABLE}: got {tree!r}, needed the hash of a tree (git rev-parse HEAD^{{tree}})"
        ) from None
    rest = list(rest)
    parts = max(1, math.ceil(sum(map(seconds_of, rest)) / budget))
    index = number % parts
    cases = frozenset(case for case in rest if is_drawn(case, parts, index))
    return Slice(index, parts, cases, sum(map(seconds_of, cases)))


def seconds_on_record(path: Path = RECORD) -> Callable[[str], float]:
    """What a case of the rest takes, by the mean over the cases that the record has of its function."""
    record: Mapping[str, Mapping[str, float]] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    mean = {
        name: seconds / record[cases][name]
        for total, cases in (("seconds", "cases"), ("rest_seconds", "rest_cases"))  # the rest's own where there is one
        for name, seconds in record.get(total, {}).items()
    }
    return lambda case: mean.get(function_of(case), UNKNOWN_SECONDS)
