"""Where the time of a program goes: its parts run alone against the whole, and the time that each fused site saves.

A program is cut where its module scope changes, in program order, and each part is compiled alone and run on the results of the
parts before it. Parts and whole are timed in turns by one clock (timing.py), together with an empty program: its time, one
dispatch, is in every part once and is subtracted. The remaining difference gets a name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from fusionlab.errors import ArgumentError
from fusionlab.fusers import Candidate, Findings
from fusionlab.graph.program.equations import slice_jaxpr
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.ir import Block, Node, Value
from fusionlab.graph.settings import as_function
from fusionlab.progress import Cancel, Progress, Stages, watched
from fusionlab.showing import Shown, counted, plural

from .comparison import Evidence
from .instruments.program import Program, compile_program
from .instruments.record import hardware
from .instruments.timing import Runs, ratio_interval, runs_of, seconds
from .reading import read_runs
from .reconcile import Reconciliation

SAMPLES = 40
LONGER = "costs of the whole alone: buffers between the parts, a larger working set"
SHORTER = "costs of the parts alone: they read, write or compute twice what XLA fuses or shares across their borders"
_DISPATCH = "(dispatch)"
_WHOLE = "(whole)"


@dataclass(frozen=True, repr=False)
class PartTiming(Shown):
    """A part of a program run alone.

    Attributes:
      name: its scope ("attention", "attention#2" for its second stretch; "(top)" outside any scope).
      nodes: ids of its nodes.
      runs: all samples.
      net_s: median without a dispatch; never below 0.
    """

    _told = ("name", "net_s")

    name: str
    nodes: tuple[int, ...]
    runs: Runs
    net_s: float

    def __str__(self) -> str:
        return f"{self.name}: {seconds(self.net_s)} without its dispatch"


@dataclass(frozen=True, repr=False)
class PartTimings(Shown):
    """The parts of a program, the whole, and the time of one dispatch; `hardware` is where they were measured."""

    _listed = "parts"

    parts: tuple[PartTiming, ...]
    whole: Runs
    dispatch: Runs
    hardware: str

    @property
    def reconciliation(self) -> Reconciliation:
        """The parts, each without its dispatch, and one dispatch, against the whole."""
        parts = (*((p.name, p.net_s) for p in self.parts), (_DISPATCH, self.dispatch.median_s))
        return Reconciliation(parts, self.whole.median_s, LONGER, SHORTER)

    def __str__(self) -> str:
        clock = f"medians of {len(self.whole.samples_s)} samples, {self.whole.clock}, on {self.hardware}"
        return f"{self.reconciliation}\n{clock}"

    def _sentence(self) -> str:
        return f"{counted(len(self.parts), 'part')} of a call of {seconds(self.whole.median_s)}, on {self.hardware}"


def parts_of(
    graph: Graph,
    *args: Any,
    depth: int = 1,
    samples: int = SAMPLES,
    budget_s: float = 60.0,
    progress: Progress = False,
    **kwargs: Any,
) -> PartTimings:
    """Times the parts of a program, each compiled alone, and the whole.

    Args:
      graph: the program: `fl.trace(fn, *args)`, or `found.apply()` for the fused one.
      *args, **kwargs: arrays, as it was traced with.
      depth: how many names of a module scope distinguish parts.
      samples, budget_s, progress: as in `time_pair`.

    Raises:
      ArgumentError: the arguments are not those of the graph, or it has no node.
      SideEffectError: it prints or calls back into Python.
    """
    leaves = jax.tree.leaves((args, kwargs))
    if len(leaves) != len(graph.top.inputs):
        raise ArgumentError(f"arguments: got {len(leaves)} arrays, needed the {len(graph.top.inputs)} of {graph!r}")
    if not graph.top.nodes:
        raise ArgumentError(f"graph: {graph!r} has no node, so there is nothing to time")
    cut = stretches(graph.top, depth)
    with watched(progress) as told:
        stages = Stages(told)
        compiling = stages("compiling parts", len(cut) + 1)
        programs = [*_compiled(graph.top, cut, leaves, compiling.step), _program(_WHOLE, _whole(graph.top), leaves)]
        programs.append(compile_program(lambda x: x, (jax.numpy.zeros(()),), {}, name=_DISPATCH))
        runs, _ = runs_of(programs, samples, budget_s, stages("timing parts", samples, budget_s).step)
    *of_parts, whole, dispatch = runs
    parts = (
        PartTiming(name, tuple(n.id for n in nodes), r, max(0.0, r.median_s - dispatch.median_s))
        for (name, nodes), r in zip(cut, of_parts, strict=True)
    )
    return PartTimings(tuple(parts), whole, dispatch, hardware())


def stretches(block: Block, depth: int = 1) -> list[tuple[str, list[Node]]]:
    """The nodes of a block, cut where the first `depth` names of their scope change; all names differ."""
    found: list[tuple[str, list[Node]]] = []
    for node in block.nodes:
        scope = "/".join(node.scope.split("/")[:depth]) or "(top)"
        if not found or found[-1][0] != scope:
            found.append((scope, []))
        found[-1][1].append(node)
    seen: dict[str, int] = {}
    named = []
    for scope, nodes in found:
        seen[scope] = seen.get(scope, 0) + 1
        named.append((f"{scope}#{seen[scope]}" if seen[scope] > 1 else scope, nodes))
    return named


def _whole(block: Block) -> Any:
    outputs = [a for a in block.outputs if isinstance(a, Value)]
    return slice_jaxpr(block, block.nodes, block.inputs, outputs)


def _compiled(
    block: Block, cut: Sequence[tuple[str, list[Node]]], leaves: Sequence[Any], step: Callable[[], Any]
) -> list[Program]:
    """Every part compiled, on the values that the parts before it gave."""
    known = dict(zip((v.id for v in block.inputs), leaves, strict=True))
    consts = {v.id for v, _ in block.consts}
    programs = []
    for name, nodes in cut:
        taken, given = _ends(block, nodes)
        inputs = [v for v in taken if v.id not in consts]
        program = _program(name, slice_jaxpr(block, nodes, inputs, given), [known[v.id] for v in inputs])
        known.update(zip((v.id for v in given), program.run(), strict=True))
        programs.append(program)
        step()
    return programs


def _ends(block: Block, nodes: Sequence[Node]) -> tuple[list[Value], list[Value]]:
    """The values that a part of a block reads from outside, and those that it makes for the rest."""
    outputs = {v.id: v for n in nodes for v in n.outputs}
    taken = {a.id: a for n in nodes for a in n.values if a.id not in outputs}
    inside = {n.id for n in nodes}
    given = [v for v in outputs.values() if v.id in block.returned or _leaves_part(block, v, inside)]
    return list(taken.values()), given


def _leaves_part(block: Block, value: Value, inside: set[int]) -> bool:
    return any(user.id not in inside for user in block.users.get(value.id, ()))


def _program(name: str, closed: Any, arrays: Sequence[Any]) -> Program:
    return compile_program(_function(closed), tuple(arrays), {}, name=name)


def _function(closed: Any) -> Callable[..., Any]:
    run = as_function(closed)

    def part(*arrays: Any) -> Any:
        return run(*arrays)

    return part


# -- by site ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class SiteShare(Shown):
    """The time that one site saves: the program with all others fused, against all of them fused.

    Attributes:
      site: id of the candidate.
      without: samples with only this site left as it is.
      saved_s: seconds by which fusing it shortens the program; negative where it lengthens it.
      interval: of the ratio without / with, 95 %.
    """

    site: str
    without: Runs
    saved_s: float
    interval: tuple[float, float]

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes 1."""
        return not self.interval[0] <= 1 <= self.interval[1]

    def __str__(self) -> str:
        low, high = self.interval
        sign = "-" if self.saved_s < 0 else ""
        verdict = "" if self.is_clear else ", no clear difference"
        return f"{self.site}: {sign}{seconds(abs(self.saved_s))} per call, {low:.3f}x to {high:.3f}x{verdict}"

    def _row(self) -> dict[str, Any]:
        low, high = self.interval
        return {
            "site": self.site,
            "saved_s": self.saved_s,
            "ratio, low": low,
            "ratio, high": high,
            "clear": self.is_clear,
        }


@dataclass(frozen=True, repr=False)
class SiteShares(Shown):
    """The saving of each site, and of all together: `fused` has all, `unfused` none of them.

    `same_code` names the sites that run what XLA runs anyway: they are always fused, and not timed by themselves. `hardware` is the machine
    they were measured on.
    """

    _listed = "sites"

    sites: tuple[SiteShare, ...]
    fused: Runs
    unfused: Runs
    hardware: str
    same_code: tuple[str, ...] = ()

    @property
    def saved_s(self) -> float:
        """Seconds saved by all of them together."""
        return self.unfused.median_s - self.fused.median_s

    @property
    def interaction_s(self) -> float:
        """The saving of all sites together beyond the sum of what each saves given the others."""
        return self.saved_s - sum(s.saved_s for s in self.sites)

    def __str__(self) -> str:
        together = f"all together, per call: {seconds(self.unfused.median_s)} -> {seconds(self.fused.median_s)}"
        sign = "-" if self.interaction_s < 0 else ""
        rest = f"of that {sign}{seconds(abs(self.interaction_s))} belongs to no single site (sites that share reads, noise)"
        same = (
            [f"not timed by themselves, as they are what XLA runs anyway: {', '.join(self.same_code)}"]
            if self.same_code
            else []
        )
        return "\n".join([*map(str, self.sites), *same, together, rest, f"{self.fused.clock}, on {self.hardware}"])

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SiteShares:
        """Reads `dataclasses.asdict` of one back."""
        sites = (
            SiteShare(
                s["site"],
                read_runs(s["without"]),
                float(s["saved_s"]),
                (float(s["interval"][0]), float(s["interval"][1])),
            )
            for s in data["sites"]
        )
        versions = read_runs(data["fused"]), read_runs(data["unfused"])
        return cls(tuple(sites), *versions, str(data["hardware"]), tuple(map(str, data["same_code"])))

    def _sentence(self) -> str:
        sites = f"{len(self.sites)} {plural('site', len(self.sites))}"
        return f"{sites}, {seconds(self.unfused.median_s)} -> {seconds(self.fused.median_s)} together"


def with_savings(evidence: Evidence, shares: SiteShares) -> Evidence:
    """The evidence with what each of its sites saves."""
    saved = {s.site: s.saved_s for s in shares.sites}
    return replace(evidence, sites=tuple(replace(s, saved_s=saved.get(s.site, s.saved_s)) for s in evidence.sites))


def sites_of(
    found: Findings,
    *args: Any,
    chosen: Sequence[Candidate] | None = None,
    samples: int = SAMPLES,
    budget_s: float = 60.0,
    progress: Progress = False,
    cancel: Cancel | None = None,
    **kwargs: Any,
) -> SiteShares:
    """Times a program with every site fused, with none, and with each one left out in turn.

    Args:
      found: what was found in it.
      chosen: the sites, None for those that are fused by default; those that run what XLA runs anyway are not timed.
      *args, **kwargs: arrays, as it was traced with.
      samples, budget_s, progress, cancel: as in `time_pair`; after a cancel, the result uses the samples taken until then.

    Raises:
      Stopped: it was cancelled before there were any. ArgumentError: every fused site is what XLA runs anyway. SideEffectError: it
        prints or calls back into Python.
    """
    chosen = found.select() if chosen is None else chosen
    toggled = [c.id for c in chosen if not c.same_code]
    if not toggled:
        raise ArgumentError(
            f"found: {found!r} fuses nothing that XLA would not run anyway, so there is nothing to attribute"
        )
    leaves = jax.tree.leaves((args, kwargs))
    names = [c.id for c in chosen]
    versions: dict[str, Callable[[], Any]] = {n: partial(found.rewritten, names, skip=[n]) for n in toggled}
    versions |= {"(all)": partial(found.rewritten, names), "(none)": partial(found.rewritten, [])}
    with watched(progress) as told:
        stages, programs = Stages(told, cancel), []
        compiling = stages("compiling a program for each site", len(versions))
        for name, version in versions.items():
            stages.check(name)
            programs.append(_program(name, version(), leaves))
            compiling.step()
        timing = stages("timing sites", samples, budget_s)
        runs, _ = runs_of(programs, samples, budget_s, timing.step, cancel)
    *without, fused, unfused = runs
    shares = (
        SiteShare(r.name, r, r.median_s - fused.median_s, ratio_interval(r.samples_s, fused.samples_s)) for r in without
    )
    return SiteShares(tuple(shares), fused, unfused, hardware(), tuple(c.id for c in chosen if c.same_code))
