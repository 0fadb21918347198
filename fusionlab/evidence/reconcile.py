"""Parts against the whole: their sum, and a name for the remainder."""

from __future__ import annotations

from dataclasses import dataclass

from fusionlab.showing import Shown, Table

from .instruments.timing import seconds

WITHIN = 0.10  # a remainder below this needs no explanation


@dataclass(frozen=True, repr=False)
class Reconciliation(Shown):
    """Seconds of the parts, and of the whole.

    Attributes:
      parts: (name, seconds), in order.
      whole_s: of the whole, measured.
      cause: the name of a positive remainder (the whole takes longer than its parts).
      excess: the name of a negative one (the parts take longer than the whole).
    """

    parts: tuple[tuple[str, float], ...]
    whole_s: float
    cause: str = "work outside the parts"
    excess: str = "work the parts do twice"

    @property
    def sum_s(self) -> float:
        """Seconds of all parts together."""
        return sum(s for _, s in self.parts)

    @property
    def remainder_s(self) -> float:
        """Whole minus parts; negative if the parts take longer than the whole."""
        return self.whole_s - self.sum_s

    @property
    def share(self) -> float:
        """The remainder as a part of the whole."""
        return self.remainder_s / self.whole_s

    @property
    def closes(self) -> bool:
        """Whether the parts sum to the whole within 10 %."""
        return abs(self.share) <= WITHIN

    @property
    def remainder(self) -> str:
        """ "remainder 12 %: dispatch, and effects outside the model"."""
        name = self.cause if self.remainder_s >= 0 else self.excess
        return f"remainder {self.share:+.0%} of the whole: {name}"

    def __str__(self) -> str:
        width = max((len(name) for name, _ in self.parts), default=5)
        rows = [f"{name.ljust(width)}  {seconds(s):>8}  {s / self.whole_s:6.1%}" for name, s in self.parts]
        total = f"{'sum'.ljust(width)}  {seconds(self.sum_s):>8}  {self.sum_s / self.whole_s:6.1%}"
        return "\n".join([*rows, total, f"{'whole'.ljust(width)}  {seconds(self.whole_s):>8}", self.remainder])

    def _sentence(self) -> str:
        return f"parts of {seconds(self.sum_s)}, the whole takes {seconds(self.whole_s)}; {self.remainder}"

    def _table(self) -> Table:
        rows = (*self.parts, ("sum", self.sum_s), ("whole", self.whole_s))
        return Table(("part", "time (s)", "share"), tuple((name, s, s / self.whole_s) for name, s in rows))
