"""The loss curve of a function's training and of its fused version's, with the band of the original: the result, and its verdict."""

from __future__ import annotations

import enum
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from fusionlab.errors import ArgumentError
from fusionlab.output import write_file
from fusionlab.showing import Records, Shown, Table, content_as, plural, table_of
from fusionlab.tracebacks import errors_for_users

from ..instruments.record import Environment, load_json, to_json
from .kept import Kept, packed, unpacked

FORMAT = "fusionlab loss curve 1"
LOSS, TOTAL = "loss", "all floats of the state"  # what is judged besides the arrays of the state


class Band(enum.StrEnum):
    """Where a fused version's training is."""

    INSIDE = "inside the band"
    OUTSIDE = "outside the band"
    UNDECIDED = "undecided"


@dataclass(frozen=True, repr=False)
class StepRange(Shown):
    """A difference in one block of steps.

    Attributes:
      of: "loss", the name of an array of the state, or "all floats of the state".
      first, last: the block's steps, counted from 1.
      fused: the root mean square of the fused version's difference from the original; of the loss as it is, of an array the norm of the
        difference over the norm of the original's.
      band: the same of the runs of the original with other roundings, all together.
      limit: what `fused` may be.
      wide: of the original's difference from itself in float32; 0 where it computes in float32 anyway.
    """

    of: str
    first: int
    last: int
    fused: float
    band: float
    limit: float
    wide: float = 0.0

    @property
    def share(self) -> float:
        """`fused` over `limit`: above 1 it is outside."""
        if not math.isfinite(self.fused):
            return math.inf
        return self.fused / self.limit if self.limit else (math.inf if self.fused else 0.0)

    @property
    def outside(self) -> bool:
        """Whether the difference is above its limit."""
        return self.share > 1

    def __str__(self) -> str:
        where = f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"
        shares = f"{self.share:.2g} of its limit {self.limit:.2e}"
        wide = f", from itself in float32 {self.wide:.2e}" if self.wide else ""
        return f"{self.of}, {where}: {self.fused:.2e}, {shares} (the original from itself {self.band:.2e}{wide})"

    def _row(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"share": self.share, "outside": self.outside}


@errors_for_users
@dataclass(frozen=True, repr=False)
class Curve(Shown):
    """Losses and states of a function's training and its fused version's, and the band that the original has.

    Attributes:
      name: of the step.
      environment: hardware, versions, settings.
      steps: how many were asked for.
      loss_name: of the loss in the step's result.
      state: the arrays that a step replaces, by name; fixed: the arguments that are the same at every step.
      losses: of the original at each step, before its update; fused_losses: of the fused version.
      loss_differences: of each further run of the original, with other roundings of its sums: its losses less the original's.
      wide_losses: of the original in float32; () where it computes in float32 anyway.
      distances: of the fused version's state from the original's after each step, relative L2 over all its floats.
      band_distances: the same of each further run of the original.
      stretches: the differences of the loss and of each array of the state by blocks of steps, with their limits.
      parted: the first step from which on nothing is judged, because the original's own runs are as far apart as different trainings,
        or not finite; 0 if every step is judged.
      seconds: stage -> seconds.
      stopped: "", or why it ended early ("cancelled", "budget", "no more batches").
      notes: sentences worth reading.
      kept: where it was stopped, to go on from; None where it was not. Not in `to_dict`, but in an .npz file.
    """

    _listed = "worst"

    name: str
    environment: Environment
    steps: int
    loss_name: str
    state: tuple[str, ...]
    fixed: tuple[str, ...]
    losses: tuple[float, ...]
    fused_losses: tuple[float, ...]
    loss_differences: tuple[tuple[float, ...], ...]
    distances: tuple[float, ...]
    band_distances: tuple[tuple[float, ...], ...]
    stretches: tuple[StepRange, ...]
    wide_losses: tuple[float, ...] = ()
    parted: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    stopped: str = ""
    notes: tuple[str, ...] = ()
    kept: Kept | None = field(default=None, repr=False, compare=False)

    @property
    def reached(self) -> int:
        """How many steps both have made."""
        return len(self.fused_losses)

    @property
    def runs(self) -> int:
        """How many further runs of the original there are."""
        return len(self.loss_differences)

    @property
    def outside(self) -> Records[StepRange]:
        """What is above its limit, in the order of the steps, then single arrays before all of them, then the farthest first."""
        above = (s for s in self.stretches if s.outside)
        return Records(sorted(above, key=lambda s: (s.first, s.of == TOTAL, -s.share)))

    @property
    def worst(self) -> Records[StepRange]:
        """Of the loss and of each array, the block in which it is farthest; the farthest first."""
        found: dict[str, StepRange] = {}
        for s in self.stretches:
            if s.of not in found or s.share > found[s.of].share:
                found[s.of] = s
        return Records(sorted(found.values(), key=lambda s: -s.share))

    @property
    def verdict(self) -> Band:
        """Inside where no difference is above its limit; undecided where nothing was measured, or not all steps can be judged."""
        if self.outside:
            return Band.OUTSIDE
        return Band.INSIDE if self.stretches and not self.parted else Band.UNDECIDED

    @property
    def loss_limits(self) -> tuple[float, ...]:
        """Half the width of the band of the loss at each step."""
        of_loss = [s for s in self.stretches if s.of == LOSS]
        return tuple(s.limit for s in of_loss for _ in range(s.first, s.last + 1))

    def __str__(self) -> str:
        lines = [f"{self.name}: {self._headline}"]
        if self.losses and self.fused_losses:
            ends = f"{self.losses[0]:.5g} -> {self.losses[len(self.fused_losses) - 1]:.5g}"
            lines += [
                f"  loss of the original {ends}, of the fused version {self.fused_losses[0]:.5g} -> {self.fused_losses[-1]:.5g}"
            ]
        lines += [f"  band: {self.runs} {plural('run', self.runs)} of the original whose sums round otherwise"]
        worst = self.worst
        if worst and not any(s.fused for s in worst):
            lines += ["  both have the same numbers at every step"]
        else:
            lines += [f"  farthest: {s}" for s in worst[:1] if not self.outside]
            lines += [f"  {s}" for s in worst if s.of == LOSS and s is not worst[0]]
        if self.outside:
            names = list(dict.fromkeys(s.of for s in self.outside))
            lines += [f"  outside: {len(names)} of {len(worst)}, first {self.outside[0]}"]
        if self.fixed:
            lines += [f"  the same at every step: {', '.join(self.fixed)}"]
        lines += [f"  note: {n}" for n in self.notes]
        if self.seconds:
            lines += [f"  {', '.join(f'{k} {v:.1f} s' for k, v in self.seconds.items())}"]
        return "\n".join([*lines, f"  measured on {self.environment}"])

    @property
    def _headline(self) -> str:
        verdict = self.verdict.upper() if self.verdict is Band.OUTSIDE else str(self.verdict)
        early = f" of {self.steps} ({self.stopped})" if self.stopped else ""
        steps = f"{self.reached}{early} {plural('step', self.steps if early else self.reached)}"
        # A block is as long as the number of its first step.
        finite = all(map(math.isfinite, self.losses[self.parted - 1 : 2 * self.parted - 1])) if self.parted else True
        why = "the original's own runs are apart" if finite else "the original's loss is not finite"
        parted = f": from step {self.parted} on {why}" if self.parted else ""
        return f"{verdict} over {steps}{parted}"

    def _sentence(self) -> str:
        return f"{self.name}: {self._headline}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data; `from_dict` reads it back."""
        data: dict[str, Any] = {"format": FORMAT, "verdict": str(self.verdict)}
        data |= {f.name: getattr(self, f.name) for f in fields(self) if f.repr}
        data["environment"] = self.environment.to_dict()
        data["stretches"] = [{f.name: getattr(s, f.name) for f in fields(s)} for s in self.stretches]
        return json.loads(to_json(data))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], kept: Kept | None = None) -> Self:
        """Reads `to_dict` back."""

        def numbers(values: Any) -> Any:  # NaN and the infinities are texts in a file
            return tuple(numbers(v) if isinstance(v, list) else float(v) for v in values)

        plain = {k: data[k] for k in ("name", "steps", "loss_name", "seconds", "stopped")} | {
            "parted": data.get("parted", 0)
        }
        names = {k: tuple(data[k]) for k in ("state", "fixed", "notes")}
        series = ("losses", "fused_losses", "loss_differences", "wide_losses", "distances", "band_distances")
        floats = ("fused", "band", "limit", "wide")
        stretches = tuple(StepRange(**(s | {k: float(s[k]) for k in floats if k in s})) for s in data["stretches"])
        return cls(
            environment=Environment.from_dict(data["environment"]),
            stretches=stretches,
            kept=kept,
            **plain,
            **names,
            **{k: numbers(data.get(k, ())) for k in series},
        )

    def _makers(self) -> dict[str, Callable[[], str | bytes]]:
        return {
            **super()._makers(),
            ".json": lambda: to_json(self.to_dict()) + "\n",
            ".csv": lambda: table_of_steps(self).csv(),
            ".npz": lambda: packed(to_json(self.to_dict()), self.kept),
        }

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes it by suffix: .json (the record: `load` reads it back), .npz (with the states where it was stopped: `load` reads it
        back, and `compare(..., resume=...)` goes on from it), .csv (a row for each step), .html or .txt.

        Raises:
          ArgumentError: another suffix. OutputError: the file cannot be written; no part of it is left.
        """
        name = Path(path)
        content = content_as(name.suffix.lower(), str(name), self._makers())
        return write_file(name, content, folders=True, advice="give a path you can write to")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads what `save` wrote as .json or .npz: plain data; nothing in it is run.

        Raises:
          ArgumentError: there is no such file, or it is not a loss curve.
        """
        file = Path(path)
        data, kept = unpacked(file) if file.suffix.lower() == ".npz" else (load_json(file), None)
        try:
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']!r}")
            curve = cls.from_dict(data, kept)
            if not len(curve.distances) == curve.reached <= len(curve.losses):
                found = f"{len(curve.losses)} losses, {curve.reached} of the fused version, {len(curve.distances)} distances"
                raise ValueError(found)
            return curve
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArgumentError(
                f"path: {path} is not a saved loss curve ({type(error).__name__}: {error}); needed one that its save() wrote"
            ) from error

    def to_dataframe(self) -> Any:
        """A pandas frame with a row for each step: the losses, their differences, the distances of the states.

        Raises:
          MissingDependencyError: pandas is not installed.
        """
        from fusionlab.errors import MissingDependencyError

        try:
            import pandas as pd
        except ImportError as error:
            raise MissingDependencyError(
                "to_dataframe needs pandas, which is not installed: pip install pandas"
            ) from error
        table = table_of_steps(self)
        return pd.DataFrame(list(table.rows), columns=list(table.heads))


def table_of_steps(curve: Curve) -> Table:
    """A row for each step: the losses of both, half the width of the band, and the distances of the states."""
    limits = curve.loss_limits
    rows = []
    for t, fused in enumerate(curve.fused_losses):
        row: dict[str, Any] = {"step": t + 1, "loss": curve.losses[t], "fused loss": fused}
        row |= {"loss limit": limits[t] if t < len(limits) else None, "distance": curve.distances[t]}
        row |= {f"distance of run {k + 1}": d[t] if t < len(d) else None for k, d in enumerate(curve.band_distances)}
        row |= {
            f"loss of run {k + 1}": curve.losses[t] + d[t] if t < len(d) else None
            for k, d in enumerate(curve.loss_differences)
        }
        if curve.wide_losses:
            row["loss in float32"] = curve.wide_losses[t] if t < len(curve.wide_losses) else None
        rows.append(row)
    return table_of(_Row(row) for row in rows)


class _Row(Shown):
    def __init__(self, row: dict[str, Any]) -> None:
        self.row = row

    def _row(self) -> dict[str, Any]:
        return self.row
