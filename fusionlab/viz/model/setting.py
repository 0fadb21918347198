"""The setting of an explorer, and the decisions that led to it: plain, frozen data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusionlab.errors import ArgumentError
from fusionlab.fusers import Strategy
from fusionlab.showing import Shown, Table, counted

from ..markup import table


@dataclass(frozen=True, repr=False)
class Setting(Shown):
    """A state that can be measured, undone, saved and written as a script.

    Attributes:
      enabled: ids of the sites that are on.
      strategy: the passes with their options; None for all as they are by default.
    """

    enabled: frozenset[str] = frozenset()
    strategy: Strategy | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, JSON-able."""
        return {"enabled": sorted(self.enabled), "strategy": None if self.strategy is None else dict(self.strategy)}

    @classmethod
    def from_dict(cls, data: Any) -> Setting:
        """Reads `to_dict` back.

        Raises:
          ArgumentError: it is anything else.
        """
        if not isinstance(data, Mapping) or set(data) != {"enabled", "strategy"}:
            raise ArgumentError("setting: needed a mapping with enabled and strategy")
        enabled, strategy = data["enabled"], data["strategy"]
        if not isinstance(enabled, list) or not all(isinstance(s, str) for s in enabled):
            raise ArgumentError(f"enabled: got {enabled!r:.80}, needed a list of site ids")
        if strategy is not None and not isinstance(strategy, Mapping):
            raise ArgumentError(f"strategy: got {strategy!r:.80}, needed None or pass names with their options")
        return cls(frozenset(enabled), None if strategy is None else Strategy(**strategy))

    def __str__(self) -> str:
        asked = self.strategy if self.strategy is not None else "all passes with their default options"
        return f"{counted(len(self.enabled), 'site')} on, {asked}"


@dataclass(frozen=True, repr=False)
class Decision(Shown):
    """One line of the ledger.

    Attributes:
      what: the action, in words.
      setting: the setting from then on.
    """

    _says = "{0.what}: {0.setting}"

    what: str
    setting: Setting

    def to_dict(self) -> dict[str, Any]:
        """Plain data, JSON-able."""
        return {"what": self.what, "setting": self.setting.to_dict()}

    @classmethod
    def from_dict(cls, data: Any) -> Decision:
        """Reads `to_dict` back; raises ArgumentError for anything else."""
        if not isinstance(data, Mapping) or not isinstance(data.get("what"), str):
            raise ArgumentError("ledger: needed decisions of what and setting")
        return cls(data["what"], Setting.from_dict(data.get("setting")))


_HEADS = ["#", "decision", "sites on", "before", "after", "ratio [95 %]", "verdict", "worst error", "measured on"]


class Ledger(Sequence[Decision], Shown):
    """Every decision taken in an explorer, in order, with its measurements; prints as a table."""

    def __init__(self, decisions: Sequence[Decision], measured: Mapping[Setting, Any]) -> None:
        self._decisions, self._measured = tuple(decisions), dict(measured)

    def __len__(self) -> int:
        return len(self._decisions)

    def __getitem__(self, index: Any) -> Any:
        return self._decisions[index]

    def __iter__(self) -> Iterator[Decision]:
        return iter(self._decisions)

    def rows(self) -> list[list[str]]:
        """A row for each decision: number, words, sites on, then what was measured with these sites ("" where nothing was)."""
        return [
            [str(k), d.what, str(len(d.setting.enabled)), *_numbers(self._measured.get(d.setting))]
            for k, d in enumerate(self._decisions)
        ]

    def html(self) -> str:
        """The table as HTML, its texts escaped."""
        return table(_HEADS, self.rows(), (0, 2, 3, 4, 5))

    def _sentence(self) -> str:
        return f"{counted(len(self), 'decision')}, {counted(len(self._measured), 'setting')} measured"

    def _table(self) -> Table:
        return Table(tuple(_HEADS), tuple(map(tuple, self.rows())))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, JSON-able: the decisions, and what was measured of each."""
        rows = (dict(zip(_HEADS, row, strict=True)) for row in self.rows())
        return {"decisions": [d.to_dict() | {"measured": row} for d, row in zip(self, rows, strict=True)]}

    def _repr_html_(self) -> str:
        return f'<div class="fl">{self.html()}</div>'

    def __repr__(self) -> str:
        rows = [_HEADS, *self.rows()]
        widths = [max(len(row[k]) for row in rows) for k in range(len(_HEADS))]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _numbers(evidence: Any) -> list[str]:
    from fusionlab.evidence.instruments.timing import seconds

    if evidence is None:
        return [""] * 6
    where = evidence.environment.hardware
    error = evidence.numerics.sentence.removeprefix("worst error ") if evidence.numerics is not None else ""
    if not evidence.timings:
        return ["", "", "", str(evidence.verdict), error, where]
    timing = evidence.timings[-1]
    low, high = timing.interval
    times = [seconds(timing.before.median_s), seconds(timing.after.median_s)]
    return [*times, f"{timing.ratio:.2f} [{low:.2f}, {high:.2f}]", f"{timing.what}: {timing.verdict}", error, where]
