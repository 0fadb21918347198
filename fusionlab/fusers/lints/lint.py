"""A lint: a place in a program that an edit of its source, or an option of the compiler, may make faster, with the program as it is after
the edit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...device import Device
from ...graph.cost.cost import Costs, cost_of
from ...graph.cost.kernel_model import kernels_of
from ...graph.program.graph import Graph
from ...graph.program.scopes import Source
from ...showing import Shown
from ..engine.wording import plain

LEAST = 0.1  # of the program's time: what an edit may save, and what it has to save to be advised
COPIES = 4  # a part of a scan's stack is read and written on its way in, and on its way out
# Operations of a large product in the time in which a large copy moves a byte (`measure_peaks`), for devices whose rates were not measured:
# bfloat16 on an H200 (795 Tflop/s, 4.23 TB/s), float32 on an AMD EPYC with 2 cores (178 Gflop/s, 5.9 GB/s).
_FLOP_PER_BYTE = {"cuda": 188.0, "cpu": 30.0}


@dataclass(frozen=True, eq=False)
class Lint(Shown):
    """A candidate for advice; nothing is rewritten for it, and nothing was measured.

    Attributes:
      id: stable name, "stacked_scan@decoder#1" (rule, scope, ordinal within the scope).
      rule: the name of its rule.
      sentence: the particulars.
      edit: the edit of the source.
      node_ids: the nodes that the edit changes.
      share: what the edit may save of the program's time by the roofline, between 0 and 1; None where that gives no estimate.
      source: the user's line of the first of them.
      edited: makes the program with the edit made, a closed jaxpr (opaque to readers).
      options: what the compiler is given for it, as `jax.jit(..., compiler_options=)` takes it.
      least: the share of the time that it has to save to be advised.
    """

    _told = ("id", "share", "sentence", "edit", "source")

    id: str
    rule: str
    sentence: str
    edit: str
    node_ids: frozenset[int]
    share: float | None
    source: Source | None
    edited: Callable[[], Any] = field(repr=False)
    options: Mapping[str, Any] = field(default_factory=dict)
    least: float = LEAST

    @property
    def scope(self) -> str:
        """The module scope it is in ("decoder"); "" at the top."""
        return self.id.partition("@")[2].rpartition("#")[0]

    @property
    def node(self) -> str:
        """The first node that the edit changes, by the name that selects it in an explorer: "n12"."""
        return f"n{min(self.node_ids)}"

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"{self.id}: {self.sentence}{where}. Edit: {self.edit}"

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """Plain data, JSON-able."""
        return plain(self, "id rule sentence edit node node_ids share source")


@dataclass(frozen=True, eq=False)
class Program:
    """What rules look at: a traced program, and the device it is to run on. Where it is to be fused, `fused` gives the time of the fused
    program, in the unit of `at_best`.
    """

    graph: Graph
    device: Device
    fused: Callable[[], float] | None = None

    @property
    def flop_per_byte(self) -> float:
        """Operations of a large product in the time in which a large copy moves a byte."""
        d = self.device
        if d.gemm_flop_per_s and d.copy_bytes_per_s:
            return d.gemm_flop_per_s / d.copy_bytes_per_s
        return _FLOP_PER_BYTE.get(d.platform, _FLOP_PER_BYTE["cuda"])

    @functools.cached_property
    def costs(self) -> Costs:
        """The cost of its nodes."""
        return cost_of(self.graph)

    @functools.cached_property
    def at_best(self) -> float:
        """Its time by the roofline, as the bytes that a copy moves meanwhile: the sum over the kernels that XLA is expected to make."""
        if self.fused is not None:
            return self.fused()
        kernels = kernels_of(self.costs)
        return sum(max(k.cost.operations / self.flop_per_byte, k.cost.bytes_moved) for k in kernels)


class Rule(Protocol):
    """What proposes lints of one kind. Where `before_fusing`, fused ops hide some of what it looks for."""

    before_fusing: bool

    @property
    def name(self) -> str:
        """The first part of the ids of its lints."""
        ...

    @property
    def text(self) -> str:
        """What it looks for, in a sentence."""
        ...

    def lints(self, program: Program, least: float = LEAST) -> Iterator[Lint]:
        """Its lints that may save more than `least` of the program's time, in program order, with ids that lack the ordinal."""
        ...


class Editing(Rule, Protocol):
    """A rule whose edits `fl.fuse` can make."""

    def edited(self, program: Program) -> Any | None:
        """The program with every edit made, however little it may save, a closed jaxpr; None without one."""
        ...
