"""Two records of one comparison, an older and a newer, side by side: first whether they are of the same work, then what differs.

Times of two runs are never judged against one another: clocks, neighbours and power differ. Instead the speed-up of the fused
version in its own run is compared, by the intervals of the two ratios.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fusionlab.showing import Shown, plain

from .comparison import Evidence
from .errors.numerics import LeafNumerics
from .instruments.memory import Memory
from .instruments.timing import Timing, seconds
from .instruments.verdicts import MIN_EFFECT
from .instruments.workload import SiteState, Workload

MEMORY_GROWTH = (
    0.01  # of the compiled peak, which does not vary from run to run: below, a version of XLA's differs by padding
)
GROUPS = ("workload", "environment", "time", "memory", "kernels", "sites", "errors")
JUDGED = frozenset({"worse", "better", "same", "not compared"})
UNKNOWN = "unknown"
_OTHER_WORK = "the records are of other work"


@dataclass(frozen=True, repr=False)
class RecordChange(Shown):
    """One quantity of both records.

    Attributes:
      what: "time, call", "compiled peak memory, call", "output out float32[8]".
      old, new: the value in each record, in words; "" if a record has no value.
      verdict: "worse", "better", "same" or "not compared"; of what is only put side by side, "equal" or "differs", or "unknown".
      why: the reason of "not compared".
      group: "workload", "environment", "time", "memory", "kernels", "sites" or "errors".
    """

    _told = ("group", "what", "old", "new", "verdict", "why")

    what: str
    old: str
    new: str
    verdict: str
    why: str = ""
    group: str = ""

    def __str__(self) -> str:
        return f"{self.verdict}: {self.what}: {self.old or 'nothing'} -> {self.new or 'nothing'}{self.why and f' ({self.why})'}"


@dataclass(frozen=True, repr=False)
class RecordDiff(Shown):
    """Two records side by side.

    Attributes:
      name: of the function measured.
      changes: one of each quantity that either record has, by group.
      notes: what else is worth knowing, in sentences.
      old, new: the records.
    """

    _listed = "changes"

    name: str
    changes: tuple[RecordChange, ...]
    notes: tuple[str, ...] = ()
    old: Evidence | None = field(default=None, repr=False)
    new: Evidence | None = field(default=None, repr=False)

    @property
    def regressions(self) -> tuple[RecordChange, ...]:
        """The changes whose verdict is "worse"."""
        return tuple(c for c in self.changes if c.verdict == "worse")

    @property
    def same_work(self) -> bool | None:
        """Whether both records are of the same work; None where a record has no fingerprint."""
        return same_work(self.old and self.old.workload, self.new and self.new.workload)

    def of(self, group: str) -> tuple[RecordChange, ...]:
        """The changes of one group."""
        return tuple(c for c in self.changes if c.group == group)

    def __str__(self) -> str:
        lines = [self._sentence()]
        for group in GROUPS:
            shown = [c for c in self.of(group) if c.verdict not in ("same", "equal") or c.group == "workload"]
            lines += [f"  {c}" for c in shown]
        return "\n".join([*lines, *(f"  note: {n}" for n in self.notes)])

    def _sentence(self) -> str:
        judged = [c for c in self.changes if c.verdict in JUDGED]
        worse, better = (sum(c.verdict == v for c in judged) for v in ("worse", "better"))
        return f"{self.name}: {worse} worse, {better} better, of {len(judged)} quantities"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, JSON-able."""
        return {"name": self.name, "changes": [plain(asdict(c)) for c in self.changes], "notes": list(self.notes)}

    def to_dataframe(self) -> Any:
        """A pandas frame with a row for each quantity: group, what, old, new, verdict, why.

        Raises:
          MissingDependencyError: pandas is not installed.
        """
        return self._table().dataframe()


def diff_records(old: Evidence, new: Evidence) -> RecordDiff:
    """Two records side by side, with a verdict on what got better or worse from `old` to `new`.

    Where they are of other work, nothing is judged.
    """
    notes = [f"the records are of two functions, {old.name} and {new.name}"] if old.name != new.name else []
    if bool(old.sites) != bool(new.sites):
        notes.append(f"the {'newer' if old.sites else 'older'} record lists no sites")
    judged: list[RecordChange] = [
        *_in("time", _times(old, new)),
        *_in("memory", _memories(old, new)),
        *_in("kernels", _kernels(old, new)),
        *_in("sites", _sites(old, new)),
        *_in("errors", _errors(old, new)),
    ]
    if same_work(old.workload, new.workload) is False:
        judged = [replace(c, verdict="not compared", why=_OTHER_WORK) if c.verdict in JUDGED else c for c in judged]
    facts = (*_in("workload", _work(old, new)), *_in("environment", _environments(old, new)))
    return RecordDiff(new.name, (*facts, *judged), tuple(notes), old, new)


def _in(group: str, changes: Iterable[RecordChange]) -> Iterator[RecordChange]:
    return (replace(c, group=group) for c in changes)


def _side(what: str, old: str, new: str) -> RecordChange:
    """Two values side by side, without a judgement."""
    return RecordChange(what, old, new, "equal" if old == new else "differs")


def same_work(old: Workload | None, new: Workload | None) -> bool | None:
    """Whether arguments, matrix products and convolutions are the same; None where one is not known."""
    if old is None or new is None:
        return None
    return (old.arguments, old.products) == (new.arguments, new.products)


def _work(old: Evidence, new: Evidence) -> Iterator[RecordChange]:
    before, after = old.workload, new.workload
    if before is None or after is None:
        which = "both records" if before is after else "the older record" if before is None else "the newer record"
        yield RecordChange("work", "", "", UNKNOWN, f"no fingerprint in {which}")
        return
    for name, words in (("arguments", "shapes and dtypes of the arguments"), ("products", "matrix products")):
        yield _side(words, getattr(before, name), getattr(after, name))
    texts = (f"{w.program}, {w.nodes} nodes" for w in (before, after))
    yield _side("equations of the original", *texts)


def _environments(old: Evidence, new: Evidence) -> Iterator[RecordChange]:
    before, after = _flat(old), _flat(new)
    for name in {**before, **after}:
        yield _side(name, before.get(name, ""), after.get(name, ""))


def _flat(record: Evidence) -> dict[str, str]:
    """The environment, name -> value; the time of the measurement is no part of it."""
    found: dict[str, str] = {}
    for name, value in record.environment.to_dict().items():
        entries: Mapping[str, Any] = value if isinstance(value, dict) else {name.replace("_", " "): value}
        found |= {k: str(v) for k, v in entries.items() if name != "time" and v not in ("", None)}
    return found


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
        for version in ("before", "after"):
            yield _side(f"median, {either.what}, {version}", _median(before, version), _median(after, version))


def _median(timing: Timing | None, version: str) -> str:
    return seconds(getattr(timing, version).median_s) if timing is not None else ""


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
        yield _side(f"compiled peak memory of the original, {call}", _peak(before, "before"), _peak(after, "before"))


def _peak(memory: Memory | None, version: str = "after") -> str:
    return f"{getattr(memory, version).peak / 2**20:.2f} MiB" if memory else ""


def _kernels(old: Evidence, new: Evidence) -> Iterator[RecordChange]:
    """The kernels of each version by kind."""
    for version in ("before", "after"):
        before, after = (getattr(r.kernels, version) if r.kernels is not None else None for r in (old, new))
        for kind in {**(before or {}), **(after or {})}:
            was, now = ("" if counts is None else str(counts.get(kind, 0)) for counts in (before, after))
            yield _side(f"{kind} kernels, {version}", was, now)


def _sites(old: Evidence, new: Evidence) -> Iterator[RecordChange]:
    """Every site of either record; none where a record lists none."""
    before, after = ({site.site: site for site in r.sites} for r in (old, new))
    for name in {**before, **after} if before and after else ():
        yield _side(name, _state(before.get(name)), _state(after.get(name)))


def _state(site: SiteState | None) -> str:
    if site is None:
        return "not found"
    told = f"{site.state}{site.why and f' ({site.why})'}"
    if site.saved_s is None:
        return told
    return f"{told}, {'saves' if site.saved_s >= 0 else 'loses'} {seconds(abs(site.saved_s))}"


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
