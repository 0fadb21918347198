"""Two records of one comparison, an older and a newer: changes for the worse beyond measurement uncertainty.

Times of two runs are never compared with one another: clocks, neighbours and power differ. Instead the speed-up of the fused
version in its own run is compared, by the intervals of the two ratios.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from fusionlab.showing import Shown

from .comparison import Evidence
from .errors.numerics import LeafNumerics
from .instruments.memory import Memory
from .instruments.timing import Timing
from .instruments.verdicts import MIN_EFFECT

MEMORY_GROWTH = (
    0.01  # of the compiled peak, which does not vary from run to run: below, a version of XLA's differs by padding
)


@dataclass(frozen=True, repr=False)
class RecordChange(Shown):
    """One quantity of both records.

    Attributes:
      what: "time, call", "compiled peak memory, call", "output out float32[8]".
      old, new: the value in each record, in words; "" if a record has no value.
      verdict: "worse", "better", "same" or "not compared".
      why: the reason of "not compared".
    """

    what: str
    old: str
    new: str
    verdict: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.verdict}: {self.what}: {self.old or 'nothing'} -> {self.new or 'nothing'}{self.why and f' ({self.why})'}"


@dataclass(frozen=True, repr=False)
class RecordDiff(Shown):
    """The changes from one record to a newer one.

    Attributes:
      name: of the function measured.
      changes: one of each quantity that both records have.
      notes: what cannot be compared, in sentences.
    """

    _listed = "changes"

    name: str
    changes: tuple[RecordChange, ...]
    notes: tuple[str, ...] = ()

    @property
    def regressions(self) -> tuple[RecordChange, ...]:
        """The changes whose verdict is "worse"."""
        return tuple(c for c in self.changes if c.verdict == "worse")

    def __str__(self) -> str:
        worse, better = (sum(c.verdict == v for c in self.changes) for v in ("worse", "better"))
        head = f"{self.name}: {worse} worse, {better} better, of {len(self.changes)} quantities"
        shown = [c for c in self.changes if c.verdict != "same"]
        return "\n".join([head, *(f"  {c}" for c in shown), *(f"  note: {n}" for n in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """Plain data, JSON-able."""
        return {"name": self.name, "changes": [asdict(c) for c in self.changes], "notes": list(self.notes)}


def diff_records(old: Evidence, new: Evidence) -> RecordDiff:
    """The quantities that got better or worse from `old` to `new`."""
    notes = []
    if old.name != new.name:
        notes.append(f"the records are of two functions, {old.name} and {new.name}")
    for part in ("hardware", "versions", "xla_flags", "settings"):
        before, after = getattr(old.environment, part), getattr(new.environment, part)
        if before != after:
            notes.append(f"{part}: {_differing(before, after)}")
    changes = (*_times(old, new), *_memories(old, new), *_errors(old, new))
    return RecordDiff(new.name, changes, tuple(notes))


def _differing(old: Any, new: Any) -> str:
    if not isinstance(old, dict):
        return f"{old or 'none'} -> {new or 'none'}"
    keys = [k for k in (*old, *(k for k in new if k not in old)) if old.get(k) != new.get(k)]
    return ", ".join(f"{k} {old.get(k)} -> {new.get(k)}" for k in keys)


def _times(old: Evidence, new: Evidence) -> Iterator[RecordChange]:
    for part in ("timing", "timing_grad"):
        before, after = getattr(old, part), getattr(new, part)
        either = after or before
        if either is None:
            continue
        quantity = f"time, {either.what}"
        was, now = _time_text(before, old), _time_text(after, new)
        if before is None or after is None:
            yield RecordChange(quantity, was, now, "not compared", "timed in one of them only")
        elif before.hardware != after.hardware or before.clock != after.clock:
            yield RecordChange(quantity, was, now, "not compared", "measured on other hardware, or by another clock")
        else:
            yield RecordChange(quantity, was, now, _faster(before, after))


def _time_text(timing: Timing | None, record: Evidence) -> str:
    if timing is None:
        return "same code" if record.same_code else ""
    return f"{timing.ratio:.3f}x [{timing.interval[0]:.3f}, {timing.interval[1]:.3f}]"


def _faster(old: Timing, new: Timing) -> str:
    """By disjoint intervals, and an effect larger than that of recompiling the same program."""
    if abs(new.ratio / old.ratio - 1) < MIN_EFFECT:
        return "same"
    if new.interval[1] < old.interval[0]:
        return "worse"
    return "better" if new.interval[0] > old.interval[1] else "same"


def _memories(old: Evidence, new: Evidence) -> Iterator[RecordChange]:
    for part, call in zip(("memory", "memory_grad"), new.calls, strict=True):
        before, after = getattr(old, part), getattr(new, part)
        quantity = f"compiled peak memory of the fused version, {call}"
        if before is None and after is None:
            continue
        was, now = _peak(before), _peak(after)
        if before is None or after is None:
            yield RecordChange(quantity, was, now, "not compared", "known in one of them only")
        elif before.hardware != after.hardware:
            yield RecordChange(quantity, was, now, "not compared", "measured on other hardware")
        else:
            growth = after.after.peak / max(before.after.peak, 1) - 1
            verdict = "worse" if growth > MEMORY_GROWTH else "better" if growth < -MEMORY_GROWTH else "same"
            yield RecordChange(quantity, was, now, verdict)


def _peak(memory: Memory | None) -> str:
    return f"{memory.after.peak / 2**20:.2f} MiB" if memory else ""


def _errors(old: Evidence, new: Evidence) -> Iterator[RecordChange]:
    before, after = _leaves(old), _leaves(new)
    for name in (*before, *(n for n in after if n not in before)):
        first, second = before.get(name), after.get(name)
        was, now = _error(first), _error(second)
        if first is None or second is None:
            yield RecordChange(name, was, now, "not compared", "in one of them only")
        else:
            yield RecordChange(name, was, now, "same" if first.ok == second.ok else "better" if second.ok else "worse")


def _leaves(record: Evidence) -> dict[str, LeafNumerics]:
    """Every output and gradient with its errors, by kind and name."""
    return {f"{leaf.kind} {leaf.name}": leaf for leaf in (record.numerics.leaves if record.numerics else ())}


def _error(leaf: LeafNumerics | None) -> str:
    return f"max abs error {leaf.after.max_abs:.2e}, {'in tolerance' if leaf.ok else 'WORSE'}" if leaf else ""
