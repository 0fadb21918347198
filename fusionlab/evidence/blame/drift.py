"""Where two programs part: the error of the original and of the fused program at every node, against float64, in program order.

Three programs run equation by equation, side by side: the original, the fused one, and the original with every float in float64. Values
are compared as they are made and then let go of.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from fusionlab.fusers import Candidate, Findings
from fusionlab.graph.interpret.observe import Made, Own, Wide, count_of, observed
from fusionlab.graph.interpret.widen import Interpreter, is_inexact
from fusionlab.graph.jax_compat import child_jaxprs, enable_x64, split_closed
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.ir import Node, Value
from fusionlab.graph.rewriting.rewrite import with_names
from fusionlab.graph.settings import jax_defaults
from fusionlab.kernels.op.op import meaning_of
from fusionlab.progress import SILENT, Stages, Stopped
from fusionlab.showing import Records, Shown
from fusionlab.testing.tolerances import tolerance

from ..errors.reduction_sizes import Roughness, roughness_of, sums_of
from ..instruments.out_of_memory import out_of_memory
from ..instruments.program import refuse_side_effects

_GROWTH = 2.0  # an error up to so many times the original's own is rounding of another order
_NOISE = 0.1  # where the original is off by this share of the largest entry, the value itself is rounding
_ON_DEVICE = 2**16  # entries from which arrays are compared where they are
_MOST_LINES = 12


@dataclass(frozen=True, repr=False)
class NodeDrift(Shown):
    """The errors of one value against float64, both as shares of the largest entry of the reference.

    Attributes:
      node: number of the node that makes it.
      value: its name, "%143".
      primitive, scope, source: of that node; the source is "model.py:41" or "".
      steps: the steps of the loops around it, outermost first, from 0.
      site: id of the fused site whose result it is; "" for none.
      dtype, shape: in the program.
      before, after: max |got - want| / max |want| of the original and of the fused program; None of a value that the fused program lacks.
      before_l2, after_l2: norm of the difference / norm of the reference.
      tolerated: what rounding explains, by the coarsest dtype and the longest sum behind the value (`fusionlab.testing.tolerance`).
      same_code: whether its node computes the same in both programs, from operands that do not differ by more than rounding: an error here
        is rounding that the node enlarges, as a division by almost 0 does.
      mismatches: entries that are finite in the fused program and not in the reference, or the reverse, and are not so in the original.
    """

    _name = "value"

    node: int
    value: str
    primitive: str
    scope: str
    source: str
    steps: tuple[int, ...]
    site: str
    dtype: str
    shape: tuple[int, ...]
    before: float
    after: float | None
    before_l2: float
    after_l2: float | None
    tolerated: float
    same_code: bool = False
    mismatches: int = 0

    @property
    def excess(self) -> float:
        """The error of the fused program as a multiple of what rounding explains: above 1 the two differ here by more than that."""
        if self.after is None or self.after_l2 is None:
            return 0.0
        if self.mismatches and not self.same_code:
            return math.inf
        if self.before > _NOISE:
            return 0.0
        excess = self.after / max(self.tolerated, _GROWTH * self.before)
        # An error of one entry alone may be larger by chance; one that is more than rounding shows in the norm as well.
        explained = self.same_code or self.after_l2 <= _GROWTH * self.before_l2
        return min(excess, 1.0) if explained else excess

    @property
    def parts(self) -> bool:
        """Whether the two programs differ here by more than rounding."""
        return self.excess > 1

    def __str__(self) -> str:
        step = f" in step {', '.join(map(str, self.steps))}" if self.steps else ""
        of = f", result of {self.site}" if self.site else ""
        after = "not computed" if self.after is None else f"{self.after:.1e}"
        new = f", {self.mismatches} entries not finite in one of them" if self.mismatches else ""
        where = f" at {self.source}" if self.source else ""
        return (
            f"{self.value} = {self.primitive} (n{self.node}){where}{step}{of}: error {self.before:.1e} -> {after}, "
            f"tolerated {self.tolerated:.1e}{new}"
        )

    def _row(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "primitive": self.primitive,
            "source": self.source,
            "step": ", ".join(map(str, self.steps)),
            "site": self.site,
            "before": self.before,
            "after": self.after,
            "tolerated": self.tolerated,
            "parts": self.parts,
        }


@dataclass(frozen=True, repr=False)
class DriftMap(Shown):
    """The errors of a program and of its fused version at every node.

    Attributes:
      name: the function's.
      values: every float value of the original, in the order in which they are made; those in a loop's body once for each step.
      notes: what has no float64 form.
      stopped: "", or "cancelled": then `values` are those up to there.
      findings: the search, with the sites that are fused in `applied`.
    """

    _listed = "values"

    name: str
    values: tuple[NodeDrift, ...]
    notes: tuple[str, ...] = ()
    stopped: str = ""
    findings: Findings | None = field(default=None, repr=False)

    @property
    def first(self) -> NodeDrift | None:
        """The first value at which the two programs part by more than rounding; None if they do not."""
        return next((v for v in self.values if v.parts), None)

    @property
    def sites(self) -> Records[NodeDrift]:
        """The results of fused sites alone."""
        return Records(v for v in self.values if v.site)

    def _worst(self) -> list[NodeDrift]:
        """Results of sites in which the two differ most, in program order, each in the step in which it is worst."""
        worst: dict[str, tuple[int, NodeDrift]] = {}
        for i, v in enumerate(self.sites):
            if v.value not in worst or v.excess > worst[v.value][1].excess:
                worst[v.value] = i, v
        most = sorted(worst.values(), key=lambda item: -item[1].excess)[:_MOST_LINES]
        return [v for _, v in sorted(most, key=lambda item: item[0])]

    def by_node(self) -> dict[int, float]:
        """Node -> the largest `excess` of its values, over all steps; no node that the fused program lacks."""
        found: dict[int, float] = {}
        for v in self.values:
            if v.after is not None:
                found[v.node] = max(found.get(v.node, 0.0), v.excess)
        return found

    def __str__(self) -> str:
        head = f"{self.name}: {len(self.values):,} values compared, {len(self.sites):,} of them results of fused sites"
        head += f"; stopped: {self.stopped}" if self.stopped else ""
        first = self.first
        if first is None:
            lines = ["  the two differ by no more than rounding"]
        else:
            lines = [f"  first differ by more than rounding at {first}"]
        lines += ["  the results of sites that differ most:"]
        lines += [f"    {v}" for v in self._worst()]
        return "\n".join([head, *lines, *(f"note: {n}" for n in self.notes)])

    def to_dict(self) -> dict[str, Any]:
        """Plain data, JSON-able."""
        return super().to_dict() | {"first": None if self.first is None else self.first.to_dict()}


def drift_of(found: Findings, chosen: Sequence[Candidate], arrays: Sequence[Any], stages: Stages = SILENT) -> DriftMap:
    """The errors of a program and of the same program with some sites fused, value by value.

    Args:
      found: the findings.
      chosen: the candidates that are fused.
      arrays: the leaves of the arguments that the graph was traced with.
      stages: called as the work begins and at each value; if cancelled, what was compared until then is returned.

    Raises:
      SideEffectError: the program prints or calls back into Python. TraceError: it has no float64 form. OutOfMemoryError: the device
        has too little memory.
    """
    graph, applied = found.graph, dataclasses.replace(found, applied=frozenset(c.id for c in chosen))
    refuse_side_effects(graph.name, split_closed(graph.top.jaxpr)[0])
    interpreter = Interpreter(meaning_of)
    values: list[NodeDrift] = []
    stopped = ""
    try:
        stages("rewriting")
        original, names = with_names(graph)
        fused, fused_names = with_names(graph, [c.site for c in chosen])
        tf32 = sums_of(original, jax.default_backend()).tf32
        drifting = _Drifting(graph, chosen, names, roughness_of(original), tf32)
        stage = stages("drift, value by value", count_of(original))
        with out_of_memory("running the programs equation by equation"):
            ours, reference = observed(original, arrays, Own(original)), observed(original, arrays, Wide(interpreter))
            theirs = _Matching(observed(fused, arrays, Own(fused)), fused_names, _variables(fused))
            for got, want in zip(ours, reference, strict=True):
                stages.check("drift")
                value = drifting.compared(got, want, theirs)
                values += [] if value is None else [value]
                stage.step()
    except Stopped:
        stopped = "cancelled"
    return DriftMap(graph.name, Records(values), tuple(interpreter.notes), stopped, applied)


class _Matching:
    """The values of the fused program by the original's ids: made on demand, kept from when they are made until they are asked for."""

    def __init__(self, made: Iterator[Made], names: Mapping[Any, tuple[int, ...]], variables: set[Any]) -> None:
        self._made, self._names = made, names
        self._known = {i for v, ids in names.items() if v in variables for i in ids}
        self._waiting: dict[tuple[int, tuple[int, ...]], Any] = {}

    def get(self, number: int, steps: tuple[int, ...]) -> Any:
        """The value of that id in that step; None if the program does not compute it."""
        if number not in self._known:
            return None
        while (number, steps) not in self._waiting:
            made = next(self._made, None)
            if made is None:
                return None
            self._waiting.update(((i, made.steps), made.value) for i in self._names.get(made.variable, ()))
        return self._waiting.pop((number, steps))


@dataclass(frozen=True)
class _Drifting:
    """What is known of the values of the original by its variables.

    Attributes:
      names: variable -> ids.
      roughness: variable -> what its rounding depends on.
      tf32: whether float32 products may run in TF32.
    """

    graph: Graph
    chosen: Sequence[Candidate]
    names: Mapping[Any, tuple[int, ...]]
    roughness: Mapping[Any, Roughness]
    tf32: bool
    parted: set[int] = field(default_factory=set)  # ids of the values that were found to differ by more than rounding

    @functools.cached_property
    def makers(self) -> dict[int, tuple[Node, Value]]:
        return {v.id: (node, v) for node in self.graph.nodes() for v in node.outputs}

    @functools.cached_property
    def sites(self) -> dict[int, str]:
        return {v.id: c.id for c in self.chosen for v in (*_gradients(c), *c.roots)}

    def compared(self, got: Made, want: Made, fused: _Matching) -> NodeDrift | None:
        number = self.names[got.variable][0]
        other = fused.get(number, got.steps)
        node, value = self.makers[number]
        if not is_inexact(value.dtype) or not got.value.size:
            return None
        before = _distance(got.value, want.value)
        after = None if other is None else _distance(other, want.value)
        rough = self.roughness[got.variable]
        row = tolerance(rough.dtype or value.dtype, rough.longest, tf32=self.tf32)
        site = self.sites.get(number, "")
        drift = NodeDrift(
            node=node.id,
            value=value.name,
            primitive=node.primitive,
            scope=node.scope,
            source=node.source.short if node.source else "",
            steps=got.steps,
            site=site,
            dtype=str(value.dtype),
            shape=value.shape,
            before=before.largest,
            after=None if after is None else after.largest,
            before_l2=before.l2,
            after_l2=None if after is None else after.l2,
            tolerated=row.rtol + row.atol,
            same_code=not site and not self._inherits(node),
            mismatches=0 if after is None else max(0, after.mismatches - before.mismatches),
        )
        if drift.parts:
            self.parted.add(number)
        return drift

    def _inherits(self, node: Node) -> bool:
        """Whether an operand of a node differs by more than rounding; those from outside a loop's body do if anything does."""
        block = self.graph.block_of[node.id]
        from_outside = bool(self.parted) and block is not self.graph.top
        return any(v.id in self.parted or (from_outside and v.id not in block.producer) for v in node.values)


def _gradients(candidate: Candidate) -> list[Value]:
    part = candidate.site.backward
    return [] if part is None else [share.value for _, share in part.gradients]


def _variables(closed: Any) -> set[Any]:
    """Those that a program makes, in its loops and calls as well."""
    eqns = split_closed(closed)[0].eqns
    inside = (_variables(child) for eqn in eqns for _, _, child in child_jaxprs(eqn))
    return {v for eqn in eqns for v in eqn.outvars}.union(*inside)


@dataclass(frozen=True)
class _Distance:
    """`largest`: max |got - want| / max |want|; `l2`: the same of norms; `mismatches`: entries of which one alone is finite."""

    largest: float
    l2: float
    mismatches: int


def _distance(got: Any, want: Any) -> _Distance:
    on_host = jax.default_backend() == "cpu" or want.size < _ON_DEVICE
    if on_host:
        with np.errstate(all="ignore"):
            numbers = _measured(np, np.asarray(got), np.asarray(want))
    else:
        with jax_defaults(), enable_x64(True):
            numbers = jax.device_get(_measured_on_device(got, want))
    largest, top, squares, total, mismatches = (float(n) for n in numbers)
    return _Distance(_over(largest, top), _over(math.sqrt(squares), math.sqrt(total)), int(mismatches))


def _measured(xp: Any, got: Any, want: Any) -> tuple[Any, ...]:
    got, finite = got.astype(want.dtype), xp.isfinite(got) & xp.isfinite(want)
    difference = xp.where(finite, xp.abs(got - want), 0.0)
    size = xp.where(finite, xp.abs(want), 0.0)
    mismatches = ~finite & ~((got == want) | (xp.isnan(got) & xp.isnan(want)))
    return difference.max(), size.max(), (difference**2).sum(), (size**2).sum(), mismatches.sum()


_measured_on_device = jax.jit(functools.partial(_measured, jnp))


def _over(part: float, whole: float) -> float:
    return part / whole if whole else math.inf if part else 0.0
