"""`fusionlab plans`: what plan files hold, and several joined to one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..device import Device
from ..kernels.choose.plan_files import Measured, existing, is_of, staleness
from ..showing import Shown, plural
from ..verbs.tuning import merge_plans


@dataclass(frozen=True, repr=False)
class PlanSets(Shown):
    """The sets of measurements of plan files; prints a line for each.

    Attributes:
      sets: (file, architecture, set) for each.
      path: the file that they were joined in; None where none was asked for.
    """

    sets: tuple[tuple[str, str, Measured], ...]
    path: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, JSON-able; the cases as their number."""
        found = [
            {"file": file, "arch": arch, "device": one.device, "versions": dict(one.versions), "calls": len(one.cases)}
            for file, arch, one in self.sets
        ]
        return {"sets": found, "path": None if self.path is None else str(self.path)}

    def __str__(self) -> str:
        lines = [f"{file}: {_set_line(arch, one)}" for file, arch, one in self.sets]
        return "\n".join([*lines, *([f"written to {self.path}"] if self.path else [])])

    __repr__ = __str__


def _set_line(arch: str, one: Measured) -> str:
    """ "NVIDIA L4 (sm_89), 12 calls, 5 of them with an implementation faster than XLA's; driver 570.1, jax 0.11.2; another card"."""
    faster, n = sum(case.implementation != "xla" for case in one.cases.values()), len(one.cases)
    calls = f"{n} {plural('call', n)}, {faster} of them with an implementation faster than XLA's"
    versions = ", ".join(f"{name} {version}" for name, version in sorted(one.versions.items()))
    here = Device.current()
    fit = "stale here" if staleness(one, here) else "used here"
    if here.arch != arch or not is_of(one, here):
        fit = "another card"
    return f"{one.device or 'an unnamed card'} ({arch}), {calls}; {versions or 'no versions'}; {fit}"


def plans(paths: Sequence[str], into: str | None = None) -> PlanSets:
    """What plan files hold; with `into` they are joined there, as by `fusionlab.merge_plans`.

    Raises:
      ArgumentError: one of the files does not exist, or is not a plan file. OutputError: `into` cannot be written.
    """
    found = {path: existing(Path(path)) for path in paths}
    sets = [(path, arch, one) for path, by_arch in found.items() for arch, ones in by_arch.items() for one in ones]
    return PlanSets(tuple(sets), merge_plans(list(paths), into) if into else None)
