"""The number of kernels that XLA makes of each site, as written and fused. Both programs are compiled, and nothing is run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...graph.program.graph import Graph
from ...graph.rewriting.rewrite import Replacement, to_jaxpr
from ...graph.xla.modules import CompiledModule, ModuleKernel, compiled_text, read_hlo
from ...graph.xla.tagging import tagged_graph
from ...showing import Shown
from ..engine.grouping import grouped_by, which

if TYPE_CHECKING:
    from ..engine.outcomes import Candidate


@dataclass(frozen=True, repr=False)
class SiteKernels(Shown):
    """The kernels of one site.

    Attributes:
      site: the candidate's id.
      before: the kernels of its nodes (and of its backward pass if fused with it); they may contain other nodes too.
      after: the kernels of its replacement; None if it is not fused (it is idle, or was skipped).
    """

    _name = "site"
    _says = "{0.site}: {0.change} kernels, from {0.into}"
    _told = ("site", "change", "into")

    site: str
    before: tuple[ModuleKernel, ...]
    after: tuple[ModuleKernel, ...] | None

    @property
    def change(self) -> str:
        """ "3 -> 1"."""
        return f"{len(self.before)} -> {'not fused' if self.after is None else len(self.after)}"

    @property
    def into(self) -> str:
        """ "2 fusion (kLoop), 1 library (dot)": the kernels of its nodes, similar ones grouped."""
        return kinds(self.before)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, JSON-able: names of kernels."""
        after = None if self.after is None else [k.name for k in self.after]
        return {"site": self.site, "before": [k.name for k in self.before], "after": after}


def kinds(kernels: Iterable[ModuleKernel]) -> str:
    """ "2 fusion (kLoop), 1 library (dot)"."""
    counts = Counter(f"{k.kind} ({k.target})" for k in kernels)
    return ", ".join(f"{n} {kind}" for kind, n in counts.items()) or "none"


def fused_view(graph: Graph, replacements: Sequence[Replacement]) -> CompiledModule:
    """The compiled graph with its sites replaced; a replacement's kernels are attributed to its site's nodes."""
    return read_hlo(compiled_text(to_jaxpr(tagged_graph(graph), replacements), graph), graph)


def site_kernels(
    candidates: Iterable[Candidate], fused: Iterable[Candidate], before: CompiledModule, after: CompiledModule
) -> tuple[SiteKernels, ...]:
    """The kernels of each candidate; `fused` are those that `after` has replaced."""
    ids = {c.id for c in fused}
    return tuple(
        SiteKernels(
            c.id, before.kernels_of(*c.all_node_ids), after.kernels_of(*c.all_node_ids) if c.id in ids else None
        )
        for c in candidates
    )


def kernel_lines(
    candidates: Sequence[Candidate], found: Sequence[SiteKernels], before: CompiledModule, after: CompiledModule
) -> list[str]:
    """The kernels of the whole program, then of the sites, similar ones grouped."""
    of = {k.site: k for k in found}
    groups = grouped_by(candidates, lambda c: (c.pass_name, of[c.id].change, of[c.id].into, _after(of[c.id])))
    lines = [f"  {which(alike)}: {(k := of[alike[0].id]).change}: {k.into}{_after(k)}" for alike in groups]
    head = f"XLA kernels, loop bodies counted once: {before.launches} -> {after.launches}; per site, with the nodes that XLA fused to it:"
    return [head, *lines]


def _after(k: SiteKernels) -> str:
    return "" if k.after is None else f" -> {kinds(k.after)}"
