"""The number of kernels a program was compiled to, before and after, counted in XLA's optimised HLO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fusionlab.graph.xla.hlo_text import kernel_counts
from fusionlab.showing import Shown

from .program import Program


@dataclass(frozen=True, repr=False)
class KernelCounts(Shown):
    """Kind of kernel -> how many, in each version's forward call: `before` and `after`.

    Kinds are those of `fusionlab.graph.xla.modules.ModuleKernel`: "fusion", "library", "custom", "copy", "collective", "unfused".
    The body of a loop is counted once however often it runs; a fused op's custom call counts as one, whatever it launches.
    """

    before: Mapping[str, int] = field(default_factory=dict)
    after: Mapping[str, int] = field(default_factory=dict)

    @property
    def versions(self) -> tuple[tuple[str, Mapping[str, int]], ...]:
        """(name, kind -> count) of "before", then of "after"."""
        return ("before", self.before), ("after", self.after)

    @property
    def total(self) -> tuple[int, int]:
        """All kinds together, before and after."""
        return sum(self.before.values()), sum(self.after.values())

    def __str__(self) -> str:
        """ "XLA kernels: 14 -> 9 (fusion 10 -> 4, library 4 -> 4, custom 0 -> 1), loop bodies counted once"."""
        kinds = dict.fromkeys((*self.before, *self.after))
        counts = ", ".join(f"{kind} {self.before.get(kind, 0)} -> {self.after.get(kind, 0)}" for kind in kinds)
        before, after = self.total
        return f"XLA kernels: {before} -> {after}{f' ({counts})' if counts else ''}, loop bodies counted once"


def kernels_of(programs: Sequence[Program] | None) -> KernelCounts | None:
    """The counts of both programs of a comparison; None where nothing was compiled, or the backend shows no HLO."""
    if programs is None or not all(p.hlo for p in programs):
        return None
    return KernelCounts(*(kernel_counts(p.module) for p in programs))
