"""What a search found: candidates, rejections, and the report over both. Declining is data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..graph.ir import Graph, Node, Value
from ..graph.scopes import Source


@dataclass(frozen=True)
class Residual:
    """A value the fused forward saves for the fused backward.

    Attributes: `name`, `shape`, `dtype` (text, "f32"), `nbytes`, and `readers`: the gradients that read it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    readers: tuple[str, ...]


@dataclass(frozen=True)
class Backend:
    """One implementation of a fused op at one site: what it is, whether it can run, and why (not).

    `verdict` is one of "chosen", "possible", "same code" (what XLA runs anyway), "unavailable".
    """

    name: str
    verdict: str
    reason: str


@dataclass(frozen=True, eq=False)
class Candidate:
    """A site that matched and was certified; it can be replaced by one fused op.

    Attributes:
      id: stable name, "gemm_epilogue@encoder/layer_3/mlp#1" (pass, scope, ordinal within the scope).
      pass_name, op: the pass that found it; the fused op it becomes.
      attrs: the fused op's attributes at this site (activation, scale, is_causal, ...), JSON-able.
      node_ids: raw nodes the fused op replaces.
      root: the raw value it produces.
      leaves: the raw values it reads, by argument name.
      block_path: the block it stands in ("" = top).
      nodes_before, nodes_after: node count of the site and of what replaces it.
      source: the user's line of its anchor.
      formula: what it computes, in words of this site ("gelu_tanh(x @ w + b)").
      residuals: what the fused forward saves for backward when differentiated.
      backends: every implementation with its verdict.
      notes: sentences worth reading (fallbacks taken, ...).
      site: the rewriter's own record (opaque to readers).
    """

    id: str
    pass_name: str
    op: str
    attrs: Mapping[str, Any]
    node_ids: frozenset[int]
    root: Value
    leaves: Mapping[str, Value]
    block_path: str
    nodes_before: int
    nodes_after: int
    source: Source | None
    formula: str
    residuals: tuple[Residual, ...] = ()
    backends: tuple[Backend, ...] = ()
    notes: tuple[str, ...] = ()
    site: Any = dataclasses.field(default=None, repr=False)

    @property
    def scope(self) -> str:
        return self.id.partition("@")[2].rpartition("#")[0]

    @property
    def same_code(self) -> bool:
        """True when the chosen backend is what XLA runs anyway: nothing to time."""
        return any(b.verdict == "same code" for b in self.backends)

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"{self.id}: {self.formula}{where}, {self.nodes_before} nodes -> {self.nodes_after}"


@dataclass(frozen=True, eq=False)
class Rejection:
    """A site with a pass's anchor that was declined, and why.

    Attributes:
      id, pass_name, source: as for a candidate.
      code: a key of `fusionlab.errors.REJECTIONS`.
      sentence: the particulars; names node, value and source line.
      node_ids: the guilty nodes.
      site_ids: all the nodes matched so far (what a picture outlines).
      matched, total: how far the match got ("17 of 19").
      edit: the source edit that would make it match, or None.
      winner: for `overlap`, the id of the candidate that took the nodes.
    """

    id: str
    pass_name: str
    code: str
    sentence: str
    node_ids: tuple[int, ...]
    site_ids: frozenset[int]
    matched: int
    total: int
    source: Source | None
    edit: str | None = None
    winner: str | None = None

    @property
    def scope(self) -> str:
        return self.id.partition("@")[2].rpartition("#")[0]

    def __str__(self) -> str:
        edit = f" Edit: {self.edit}" if self.edit else ""
        return f"{self.id} declined [{self.code}]: {self.sentence} ({self.matched} of {self.total} matched){edit}"


@dataclass(frozen=True, eq=False)
class Findings:
    """All candidates and rejections of a search over one graph.

    Attributes: `graph`, `passes` (names asked, in order), `candidates`, `rejections`, `seconds` (phase -> s).
    """

    graph: Graph
    passes: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    device: str = ""

    def counts(self) -> dict[str, int]:
        """Pass name -> number of candidates; every pass asked is a key, zeros too."""
        return {p: sum(c.pass_name == p for c in self.candidates) for p in self.passes}

    def of_node(self, node: Node | int) -> list[Candidate | Rejection]:
        """Every candidate or rejection that touches a node."""
        nid = node if isinstance(node, int) else node.id
        hits: list[Candidate | Rejection] = [c for c in self.candidates if nid in c.node_ids]
        return hits + [r for r in self.rejections if nid in r.node_ids or nid in r.site_ids]
