"""The outcome of a search at one site: a candidate, or a rejection with its reason. Declining is data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ...graph.canonical.nodes import FoldedNodes
from ...graph.matching.region import Region, escapes
from ...graph.program.ir import Block, Value
from ...graph.program.scopes import Source
from ...kernels.op.implementation import BackendVerdict as Backend
from ...kernels.op.implementation import ChoiceKind, ImplementationChoice
from ...kernels.op.implementation import Residual as Residual
from ...showing import Shown
from .origin import declined_at
from .pairs import Pair
from .wording import plain

# Codes of sites that are whole, and are left to XLA's code.
LEFT_TO_XLA = frozenset(kind.value for kind in ChoiceKind if kind.leaves_it_to_xla)


@dataclass(frozen=True, eq=False)
class Candidate(Shown):
    """A site that matched and was certified; it can be replaced by one fused op.

    Attributes:
      id: stable name, "gemm_epilogue@encoder/layer_3/mlp#1" (pass, scope, ordinal within the scope).
      pass_name, op: the pass that found it; the fused op it becomes.
      attrs: the fused op's attributes at this site (activation, scale, is_causal, ...), JSON-able.
      node_ids: raw nodes the fused op replaces.
      root: the raw value it produces, or the first of several.
      others: the further ones.
      leaves: the raw values it reads, by argument name.
      block_path: the block that contains it ("" = top).
      nodes_before, nodes_after: node count of the site and of its replacement.
      source: the user's line of its anchor.
      formula: what this site computes ("gelu_tanh(x @ w + b)").
      arithmetic: the arithmetic of its products on the given device ("bfloat16, summed in float32"); "" if it is the site's dtype.
      residuals: the values that the fused forward pass saves for the backward pass when differentiated.
      backends: every implementation with its verdict.
      left_to_xla: why it is left as written unless it or its pass is requested; None if it is fused.
      waits: whether it is XLA's code because what else can run it was not measured on the device: `fusionlab.tune` measures it.
      notes: sentences worth reading (fallbacks taken, ...).
      concepts: the concepts recognised here ("linear", "gelu_tanh", "attention_causal", "layer_norm", ...).
      program: the replacement, as a function of the leaves' values in the order in which the site reads them.
      site: the rewriter's own record (opaque to readers).
      region: the site's nodes and values (opaque to readers).
      plan: how the region becomes a call of the op (opaque to readers).
      backward: its backward pass, in a program that is differentiated already.
      plain: the site without the extra work that the op can include (such as the sum a norm reads), if there is any.
      alone: whether its gradients, where the program has them, are sites of their own.
      takes_the_rest: whether it yields to every overlapping site, except one that would run XLA's own code.
      alternatives: during a search, the outcomes to fall back on, best first, if it cannot be fused with the backward pass that reads its
        inner values. The first feasible one is taken, and the last one in any case; rejections before it are reported.
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
    arithmetic: str = ""
    residuals: tuple[Residual, ...] = ()
    backends: tuple[Backend, ...] = ()
    left_to_xla: ImplementationChoice | None = None
    waits: bool = False
    notes: tuple[str, ...] = ()
    concepts: tuple[str, ...] = ()
    program: Block | None = dataclasses.field(default=None, repr=False)
    site: Any = dataclasses.field(default=None, repr=False)
    region: Region | None = dataclasses.field(default=None, repr=False)
    plan: Any = dataclasses.field(default=None, repr=False)
    backward: Pair | None = None
    alternatives: tuple[Candidate | Rejection, ...] = dataclasses.field(default=(), repr=False)
    others: tuple[Value, ...] = ()
    plain: Candidate | None = dataclasses.field(default=None, repr=False)
    alone: bool = False
    takes_the_rest: bool = False

    @property
    def seen(self) -> Candidate:
        """The form that the search for larger structures folds: without the extra work of the op."""
        return self.plain or self

    @property
    def roots(self) -> tuple[Value, ...]:
        """All the raw values it produces."""
        return self.root, *self.others

    @property
    def scope(self) -> str:
        """The module scope it stands in ("encoder/layer_3/mlp"); "" at the top."""
        return self.id.partition("@")[2].rpartition("#")[0]

    @property
    def all_node_ids(self) -> frozenset[int]:
        """`node_ids`, and those of its backward pass that are fused with it."""
        return self.node_ids | (self.backward.node_ids if self.backward else frozenset())

    @property
    def backend(self) -> Backend | None:
        """The backend it would run on, with the reason; None if no backend was considered."""
        return next((b for b in self.backends if b.verdict in (ChoiceKind.CHOSEN, ChoiceKind.SAME_CODE)), None)

    @property
    def idle(self) -> str:
        """Why it is left as written unless it or its pass is requested; "" if it is fused."""
        return self.left_to_xla.reason if self.left_to_xla else ""

    @property
    def choice(self) -> ChoiceKind:
        """The implementation that runs here by default."""
        if self.left_to_xla is not None:
            return self.left_to_xla.kind
        return ChoiceKind.SAME_CODE if self.same_code else ChoiceKind.CHOSEN

    @property
    def same_code(self) -> bool:
        """True if the chosen backend runs the code that XLA runs anyway."""
        return self.backend is not None and self.backend.verdict == ChoiceKind.SAME_CODE

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"{self.id}: {self.formula}{where}, {self.nodes_before} nodes -> {self.nodes_after}"

    __repr__ = __str__  # a list of them is to be read, and their nodes are many

    def to_dict(self) -> dict[str, Any]:
        """Plain data, JSON-able."""
        return plain(
            self,
            "id pass_name op formula arithmetic attrs node_ids nodes_before nodes_after source residuals idle backends notes concepts",
        )

    def _row(self) -> dict[str, Any]:
        backend = self.backend
        found = {"state": "left as it is" if self.idle else "can be fused", "id": self.id, "formula": self.formula}
        return found | {
            "source": self.source,
            "backend": backend and backend.name,
            "why": self.idle or (backend and backend.reason),
        }


@dataclass(frozen=True, eq=False)
class Rejection(Shown):
    """A site with a pass's anchor that was declined, and why.

    Attributes:
      id, pass_name, source: as in Candidate.
      code: a key of `fusionlab.errors.REJECTIONS`.
      sentence: the particulars; names node, value and source line.
      node_ids: the guilty nodes.
      site_ids: all the nodes matched so far (what a picture outlines).
      matched, total: how far the match got ("17 of 19").
      edit: the source edit that would make it match, or None.
      winner: for `overlap`, the id of the candidate that took the nodes.
      concepts: the concepts recognised here nevertheless, as in Candidate; empty if the site is not what it looked like.
      region: the nodes and values of a site that is complete except that its inner values are read outside (opaque to readers).
      backward: its backward pass, which is not fused either.
      origin: the line of FusionLab that declined it ("fusers/engine/site.py:203 in near_miss"); if the search failed here, the line of
        FusionLab or of the user's code that raised the error.
      failed: for `uncertified`: an error was raised here, and the search went on.
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
    concepts: tuple[str, ...] = ()
    region: Region | None = dataclasses.field(default=None, repr=False)
    backward: Pair | None = None
    origin: str = ""
    failed: bool = False

    def __post_init__(self) -> None:
        if not self.origin:
            object.__setattr__(self, "origin", declined_at(self.sentence))

    @property
    def waits(self) -> bool:
        """Whether it is XLA's code because what else can run it was not measured on the device: `fusionlab.tune` measures it."""
        return self.code == ChoiceKind.UNMEASURED

    @property
    def scope(self) -> str:
        """The module scope it stands in ("encoder/layer_3/mlp"); "" at the top."""
        return self.id.partition("@")[2].rpartition("#")[0]

    def __str__(self) -> str:
        edit = f" Edit: {self.edit}" if self.edit else ""
        return f"{self.id} declined [{self.code}]: {self.sentence} ({self.matched} of {self.total} matched){edit}"

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """Plain data, JSON-able; `nodes` are the guilty ones, `site` those matched so far."""
        names = "id pass_name code sentence node_ids site_ids matched total source edit winner origin concepts"
        return plain(self, names) | {"origin": self.origin or None}

    def _row(self) -> dict[str, Any]:
        found = {
            "state": f"declined: {self.code}",
            "id": self.id,
            "formula": None,
            "source": self.source,
            "backend": None,
        }
        return found | {"why": self.sentence, "matched": f"{self.matched} of {self.total}", "edit": self.edit}


def declined(site: Candidate, code: str, sentence: str, **fields: Any) -> Rejection:
    """The rejection of a former candidate, with all its nodes unless `fields` (of the rejection) override them."""
    kept = {key: getattr(site, key) for key in ("id", "pass_name", "source", "concepts")}
    nodes, size = site.node_ids, site.nodes_before
    whole = {"node_ids": tuple(nodes), "site_ids": nodes, "matched": size, "total": size}
    return Rejection(code=code, sentence=sentence, **{**kept, **whole, **fields})


def folded(site: Candidate) -> FoldedNodes | None:
    """A site of one root, folded into the op that it becomes; None if its inner values are read outside, for example by a backward pass
    that is fused with it, because the view would not have them.
    """
    seen = site.seen
    if seen.program is None or seen.region is None or seen.others or escapes(seen.region):
        return None
    return FoldedNodes(seen.root, seen.site.leaves, seen.node_ids, seen.program, site)


OutcomeT = TypeVar("OutcomeT", Candidate, Rejection, Candidate | Rejection)


def with_concepts(outcome: OutcomeT, concepts: tuple[str, ...]) -> OutcomeT:
    """A candidate or rejection with the concepts recognised there, and its alternatives likewise."""
    if isinstance(outcome, Rejection):
        return dataclasses.replace(outcome, concepts=concepts)
    plain = outcome.plain and with_concepts(outcome.plain, concepts)
    others = tuple(with_concepts(other, concepts) for other in outcome.alternatives)
    return dataclasses.replace(outcome, concepts=concepts, plain=plain, alternatives=others)


def in_turn(outcomes: Iterable[Candidate | Rejection]) -> tuple[Candidate | Rejection, ...]:
    """Outcomes as the alternatives of a site: each candidate followed by its own alternatives."""
    return tuple(o for one in outcomes for o in (one, *(one.alternatives if isinstance(one, Candidate) else ())))


def or_else(site: Candidate, last: Candidate | Rejection) -> Candidate:
    """A site whose final rejection is replaced by another outcome; unchanged if none of its alternatives is a rejection."""
    kept = [other for other in site.alternatives if isinstance(other, Candidate)]
    if len(kept) == len(site.alternatives):
        return site
    plain = site.plain and or_else(site.plain, last)
    return dataclasses.replace(site, plain=plain, alternatives=(*kept, *in_turn([last])))
