"""The result of `fusionlab.tune`: the choices, and what is left to measure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...device import Device
from ...showing import Shown, Table, plural, seconds_text, table_of
from .plan_files import Choice, Measured

_MOST = 5  # of the calls that are left, which a printed result names


@dataclass(frozen=True, repr=False)
class Untried(Shown):
    """A call that was not measured, as the budget ended or the device has too little memory for it.

    Attributes:
      call: its text, as in the plan file.
      at_stake_s: seconds in a step by the roofline, at most what an implementation can save.
      why: of a call that is too large, the error; else "".
    """

    call: str
    at_stake_s: float
    why: str = ""

    def __str__(self) -> str:
        return f"{case_for_readers(self.call)}: at most {seconds_text(self.at_stake_s)} of a step"


@dataclass(frozen=True, repr=False)
class Tuned(Shown):
    """The result of `fusionlab.tune`; prints as a table.

    Attributes:
      measured: the cases of the program with their choices, also those measured before, and cuBLASLt's algorithms.
      path: the plan file they are in; None if there was nothing to measure.
      calls: how many calls of fused ops the program has.
      device: the measured device.
      before: how many calls were measured before, on this card with these versions.
      left: the calls for which the budget was too short, the most time at stake first.
      seconds: that the whole took.
      left_s: seconds that the rest may take; None where nothing is left.
      too_large: the calls for which the device has too little memory.
    """

    measured: Measured
    path: Path | None
    calls: int
    device: Device
    before: int = 0
    left: tuple[Untried, ...] = ()
    seconds: float = 0.0
    left_s: float | None = None
    too_large: tuple[Untried, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, JSON-able; the cases as in the plan file."""
        path = None if self.path is None else str(self.path)
        left = [{"call": one.call, "at_stake_s": one.at_stake_s} for one in self.left]
        more = {"before": self.before, "left": left, "left_s": self.left_s, "seconds": self.seconds}
        more |= {"too_large": [{"call": one.call, "why": one.why} for one in self.too_large]}
        return self.measured.to_dict() | {"device": str(self.device), "path": path, "calls": self.calls} | more

    def _table(self) -> Table:
        cases = self.measured.cases.items()
        return table_of({"call": case_for_readers(text), **choice._row()} for text, choice in cases)

    def __str__(self) -> str:
        if self.path is None and not self.left:
            why = "each has only one implementation there" if self.calls else "there is nothing to choose"
            return f"tune: {self.calls} calls of fused ops on {self.device}; {why}, nothing measured, nothing written"
        cases = len(self.measured.cases)
        where = f", written to {self.path}" if self.path is not None else ", nothing written"
        known = f", {self.before} calls measured before" if self.before else ""
        lines = [f"tune: {cases} {plural('case', cases)} on {self.device}{known}{where}"]
        lines += [f"  {case_for_readers(text)}: {_with_times(choice)}" for text, choice in self.measured.cases.items()]
        large = [f"too little memory for {case_for_readers(one.call)}" for one in self.too_large]
        return "\n".join([*lines, *large, *self._rest()])

    __repr__ = __str__

    def _rest(self) -> list[str]:
        """What the budget left."""
        if not self.left:
            return []
        n, stake = len(self.left), sum(one.at_stake_s for one in self.left)
        about = f", about {self.left_s:.0f} s of measuring" if self.left_s is not None else ""
        head = f"the budget ended: {n} {plural('call', n)} left, at most {seconds_text(stake)} of a step{about}; tune again to go on"
        more = [f"  ... and {n - _MOST} more: .left"] if n > _MOST else []
        return [head, *(f"  {one}" for one in self.left[:_MOST]), *more]


def case_for_readers(text: str) -> str:
    """A case for a reader: the op, its sizes, its options."""
    c = json.loads(text)
    op, role = c.pop("op"), {"call": "forward", "cotangent": "backward"}[c.pop("role")]
    role += ", keeping residuals" if c.pop("residuals", False) else ""
    if op == "gemm_epilogue":
        shape = "x".join(str(c[k]) for k in ("rows", "inner", "columns"))
        return f"{op} {c['activation']} {shape} {c['dtype']} {role}" + (", mask in bits" if c["packed"] else "")
    c |= {name: f"{dtype} {'x'.join(map(str, shape))}".strip() for name, (dtype, *shape) in _operands_of(c)}
    c |= {name: value for name, value in c.pop("settings", {}).items() if value not in (None, False, [], "none")}
    settings = (f"{k} {_value_text(v)}" for k, v in c.items() if v is not False)
    return f"{op} {', '.join(settings)}, {role}"


def _operands_of(content: dict[str, Any]) -> list[tuple[str, Any]]:
    """The operands that a case names with their types, taken from its content."""
    given = content.get("operands")
    return list(content.pop("operands").items()) if isinstance(given, dict) else []


def _value_text(value: Any) -> str:
    """A setting for a reader: a list of numbers as sizes."""
    if not isinstance(value, list):
        return str(value)
    return (" " if all(isinstance(item, str) for item in value) else "x").join(map(str, value))


def _with_times(choice: Choice) -> str:
    times = ", ".join(f"{n} {t:.4g} µs" for n, t in sorted(choice.times_us.items(), key=lambda i: i[1]))
    return f"{choice.implementation} ({times})"
