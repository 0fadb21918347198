"""The findings of a search: candidates, rejections, and the report on both. Declining is data."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...device import Device
from ...errors import ArgumentError, MissingDependencyError, did_you_mean, unknown_name
from ...graph.cost.cost import Costs, cost_of
from ...graph.program.boundary import guarded
from ...graph.program.graph import Graph
from ...graph.program.ir import Node
from ...graph.program.text import node_text
from ...graph.program.trace import graph_of_jaxpr
from ...graph.rewriting.rewrite import to_jaxpr
from ...graph.xla.modules import CompiledModule, xla_view
from ...showing import Facts, Records, Shown, Text, plural
from ...tracebacks import errors_for_users
from ..engine.grouping import STATE_WORDS, code_counts, columns_of, states_said
from ..engine.outcomes import Candidate, Rejection
from ..engine.pairs import Pair
from ..lints.lint import Lint, Program
from ..lints.rules import lints_of
from ..passes.matmul.route_table import Routes
from .explaining import explained
from .sections import backend_lines, lint_lines, pair_lines, reason_lines, structure_lines
from .site_kernels import SiteKernels, fused_view, kernel_lines, site_kernels
from .structures import Structure, structures_of
from .waiting import Waiting, waiting_in

RUNS_UNDER_GRAD = "runs under jax.grad"
_LINES = 20  # of reasons that a printed report holds before it is cut short


@errors_for_users
@dataclass(frozen=True, eq=False)
class Findings(Shown):
    """All candidates and rejections of a search over one graph.

    Attributes: `graph`, `passes` (requested names, in order), `candidates`, `rejections`, `seconds` (phase -> s), `device` (for which
    backends are chosen), `notes` (sentences on the search), `gradients` (names of the `_grad` passes that are on), `differentiated` (the
    program contains a backward pass), `applied` (ids of the fused sites, for the findings of a fused function), `router`
    (finds the routes of the products; opaque to readers), `where` (the device as a record).
    """

    graph: Graph
    passes: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    device: str = ""
    notes: tuple[str, ...] = ()
    gradients: tuple[str, ...] = ()
    differentiated: bool = False
    applied: Collection[str] = ()
    router: Callable[[Findings], Routes] | None = dataclasses.field(default=None, repr=False)
    where: Device | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("candidates", "rejections"):
            object.__setattr__(self, name, Records(getattr(self, name)))

    _listed = "_sites"

    def _ipython_key_completions_(self) -> list[str]:
        return [site.id for site in self._sites]

    @property
    def _sites(self) -> tuple[Candidate | Rejection, ...]:
        return (*self.candidates, *self.rejections)

    def routes(self) -> Routes:
        """The route of every matrix product of the program, with the answer of each route: a table to print."""
        return self.router(self) if self.router is not None else Routes(self.device, ())

    def counts(self) -> dict[str, int | str]:
        """Pass name -> number of candidates; every requested pass is a key, zeros included.

        "<pass>_grad" is a key if the gradient is fused too: the number of candidates fused with their backward passes in an already
        differentiated program; in any other program the words "runs under jax.grad", because it is fused there.
        """
        found = Facts()
        for p in self.passes:
            mine = [c for c in self.candidates if c.pass_name == p]
            found[p] = len(mine)
            if f"{p}_grad" in self.gradients:
                fused = sum(c.backward is not None and c.backward.is_fused for c in mine)
                found[f"{p}_grad"] = fused if self.differentiated else RUNS_UNDER_GRAD
        return found

    def concepts(self) -> dict[str, int]:
        """Concept -> number of sites where it was recognised, fused or declined ("linear": 12, "gelu_tanh": 2, ...)."""
        return Facts(Counter(c for item in (*self.candidates, *self.rejections) for c in item.concepts))

    def cost(self, trips: Mapping[int, int] | None = None) -> Costs:
        """Operations and bytes of every node of the program as it is; `trips` gives the trip counts of while loops, by node id.

        Raises:
          ArgumentError: `trips` names a node that is not a while loop.
        """
        return self._costs if trips is None else cost_of(self.graph, trips=trips)

    @functools.cached_property
    def _costs(self) -> Costs:
        return cost_of(self.graph)

    @functools.cached_property
    def structures(self) -> tuple[Structure, ...]:
        """The larger structures of the sites (transformer layers, QKV siblings, ...), and the softmaxes and lerps that no pass fused."""
        return Records(self._structures_or_why[0])

    @functools.cached_property
    def _structures_or_why(self) -> tuple[tuple[Structure, ...], str]:
        """The structures, or none and the reason if FusionLab failed on them."""
        if self.graph.numbered is not None:
            return (), ""
        return guarded(lambda: (structures_of(self), ""), lambda fault: ((), f"none could be found: {fault}"))

    @functools.cached_property
    def lints(self) -> tuple[Lint, ...]:
        """Advice that no fusion gives, by the roofline of the device: `fusionlab.advise` tries each edit and measures it."""
        where = self.where
        if where is None:
            return Records(())
        fused = (lambda: Program(self.apply(), where).at_best) if self.select() else None
        return Records(guarded(lambda: lints_of(self.graph, where, fused=fused), lambda fault: ()))

    @functools.cached_property
    def waiting(self) -> Waiting | None:
        """The sites and matrix products that are XLA's code only because nothing was measured on the device, and what they may gain; None
        without any."""
        where = self.where
        if where is None or where.platform != "cuda":
            return None
        return guarded(lambda: waiting_in(self._sites, self.routes(), self._costs, where), lambda fault: None)

    @functools.cached_property
    def pairs(self) -> tuple[Pair, ...]:
        """The forward sites, fused or declined, whose gradient this already differentiated program computes as well."""
        items = sorted((*self.candidates, *self.rejections), key=lambda x: x.region.nodes[0].id if x.region else -1)
        return Records(item.backward for item in items if item.backward is not None)

    def of_node(self, node: Node | int) -> Records[Candidate | Rejection]:
        """Every candidate or rejection that touches a node."""
        nid = node if isinstance(node, int) else node.id
        hits: list[Candidate | Rejection] = [c for c in self.candidates if nid in c.all_node_ids]
        return Records(hits + [r for r in self.rejections if nid in r.node_ids or nid in r.site_ids])

    def __getitem__(self, site_id: str) -> Candidate | Rejection | Structure | Lint:
        """The candidate, rejection, structure or lint with this id."""
        items = {item.id: item for item in (*self.lints, *self.structures, *self.rejections, *self.candidates)}
        if site_id not in items:
            raise unknown_name("site", site_id, items)
        return items[site_id]

    def select(
        self, enabled: Iterable[str] | str | None = None, skip: Iterable[str] | str = ()
    ) -> tuple[Candidate, ...]:
        """Candidates by site id or pass name: those `enabled` (None: all that are not idle) and not in `skip`; either may be a single name.

        Raises:
          UnknownNameError: a name that is neither a site of this graph nor a requested pass.
        """
        wanted, left = _names(enabled or ()), _names(skip)
        known = {*(item.id for item in (*self.candidates, *self.rejections)), *self.passes}
        if unknown := sorted((wanted | left) - known):
            raise unknown_name("site or pass", unknown[0], known)
        chosen = (c for c in self.candidates if (not c.idle if enabled is None else _is_named(c, wanted)))
        return Records(c for c in chosen if not _is_named(c, left))

    def rewritten(self, enabled: Iterable[str] | str | None = None, skip: Iterable[str] | str = ()) -> Any:
        """A closed jaxpr of the program with the selected candidates applied (see `select`)."""
        return to_jaxpr(self.graph, [c.site for c in self.select(enabled, skip)])

    def apply(self, enabled: Iterable[str] | str | None = None, skip: Iterable[str] | str = ()) -> Graph:
        """The graph with the selected candidates applied (see `select`)."""
        g = self.graph
        closed = self.rewritten(enabled, skip)
        kept = {name: getattr(g, name) for name in ("name", "in_tree", "out_tree", "in_names", "in_shardings")}
        new = graph_of_jaxpr(closed, **kept)
        return type(g)(**{f.name: getattr(new, f.name) for f in dataclasses.fields(new)})

    def xla(self, fused: bool = False) -> CompiledModule:
        """The program as compiled by XLA, as written or `fused`: its kernels, and the nodes from which they come.

        It is compiled on first use, for this process's own device, whatever device the backends were chosen for; nothing is run.
        """
        return self._xla_fused if fused else self._xla

    @functools.cached_property
    def _xla(self) -> CompiledModule:
        return xla_view(self.graph)

    @functools.cached_property
    def _xla_fused(self) -> CompiledModule:
        return fused_view(self.graph, [c.site for c in self.select()])

    def kernels(self) -> tuple[SiteKernels, ...]:
        """The XLA kernels of each candidate, before and after; compiles the program both ways (see `xla`)."""
        return Records(site_kernels(self.candidates, self.select(), self.xla(), self.xla(fused=True)))

    def line(self, pass_name: str) -> str:
        """ "gemm_epilogue: 3 subgraphs can be fused, 1 declined (rank), nodes 31 -> 24"; "fused" for the sites in `applied`.

        "3 subgraphs can be fused, of which 1 is left as it is": not fused unless requested; the node count excludes it.
        """
        found = [c.id for c in self.candidates if c.pass_name == pass_name]
        mine = [c.id for c in self.candidates if c.pass_name == pass_name and not c.idle]
        idle = len(found) - len(mine)
        left = f", of which {idle} {'is left as it is' if idle == 1 else 'are left as they are'}" if idle else ""
        declined = [r.code for r in self.rejections if r.pass_name == pass_name]
        why = f" ({', '.join(code_counts(declined))})" if declined else ""
        before = self.graph.node_count
        after = self.apply(mine).node_count if mine else before
        return f"{pass_name}: {self._subgraphs(found)}{left}, {len(declined)} declined{why}, nodes {before} -> {after}"

    def _subgraphs(self, sites: Collection[str]) -> str:
        """ "3 subgraphs can be fused"; "2 subgraphs fused, 1 can be fused" where a function fuses some of them."""
        fused = sum(s in self.applied for s in sites)
        counted = [(n, STATE_WORDS[s]) for n, s in ((fused, "applied"), (len(sites) - fused, "candidate")) if n]
        counted = counted or [(0, STATE_WORDS["applied" if self.applied else "candidate"])]
        first = counted[0][0]
        return ", ".join(
            [f"{first} subgraph{'' if first == 1 else 's'} {counted[0][1]}", *(f"{n} {w}" for n, w in counted[1:])]
        )

    def lines(self) -> list[str]:
        """The line of every requested pass, in order, followed by the line of its gradient if there is one."""
        per_pass = ((self.line(p), *self._gradient_line(p)) for p in self.passes)
        return [line for lines in per_pass for line in lines] or ["no passes requested"]

    def _gradient_line(self, pass_name: str) -> list[str]:
        """ "gemm_epilogue_grad: 3 subgraphs can be fused", in a differentiated program; none if no forward site is fused."""
        counts = self.counts()
        has_fused = self.differentiated and f"{pass_name}_grad" in counts and counts[pass_name]
        with_backward = [
            c.id for c in self.candidates if c.pass_name == pass_name and c.backward is not None and c.backward.is_fused
        ]
        return [f"{pass_name}_grad: {self._subgraphs(with_backward)}"] if has_fused else []

    def _waiting_line(self) -> list[str]:
        return [str(self.waiting)] if self.waiting is not None else []

    def _under_grad(self) -> list[str]:
        """The words for the gradients of a program that is not differentiated."""
        names = [g for g in self.gradients if any(f"{c.pass_name}_grad" == g for c in self.select())]
        return [f"{', '.join(names)}: {RUNS_UNDER_GRAD}"] if names and not self.differentiated else []

    def __str__(self) -> str:
        """The lines of the passes, the reasons for declining, similar ones grouped, and the lints; long lists are truncated."""
        advice = lint_lines(self.lints)
        parts = (self.lines(), self._waiting_line(), self.reasons(_LINES), advice, (f"note: {n}" for n in self.notes))
        return "\n".join(line for part in parts for line in part)

    def report(self, xla: bool = False) -> Text:
        """The full report: `str()` with every reason, and the backend of each site, with its reason.

        With `xla`, also the number of kernels that XLA makes of each site, as written and fused; both are compiled for it (see `xla`).
        """
        kernels = kernel_lines(self.candidates, self.kernels(), self.xla(), self.xla(fused=True)) if xla else []
        chosen, structured = backend_lines(self.candidates, self.device), structure_lines(*self._structures_or_why)
        sections = (chosen, kernels, pair_lines(self.pairs), self._under_grad(), structured, lint_lines(self.lints))
        parts = (self.lines(), self._waiting_line(), self.reasons(), *sections, (f"note: {n}" for n in self.notes))
        return Text("\n".join(line for part in parts for line in part))

    def reasons(self, most: int | None = None) -> list[str]:
        """The reasons for declining, in at most so many lines (None: all); sites that differ only in names are grouped."""
        return reason_lines(self.rejections, most)

    def __repr__(self) -> str:
        fused = sum(c.id in self.applied for c in self.candidates)
        said = states_said(fused, len(self.candidates) - fused, len(self.rejections))
        said += [f"{len(self.lints)} {plural('lint', len(self.lints))}"] if self.lints else []
        return f"<{type(self).__name__} {self.graph.name}: {', '.join(said)}>"

    def explain(self, node: Node | int | str, origin: bool = False) -> Text:
        """The findings about a node ("%143", a node id, a Node), or about a site or a structure by its id, in sentences.

        With `origin`, a rejection also names the line of FusionLab that declined it.
        """
        if isinstance(node, str) and "@" in node:
            return Text(self._explained_site(node, origin))
        given = self._given(node)
        if given is not None:
            return Text(given)
        found = self._node(node)
        texts = [explained(i, origin).replace("\n", "\n  ") for i in self.of_node(found)]
        texts = texts or [f"in no site: none of the requested passes ({', '.join(self.passes)}) has its anchor here"]
        texts += [f"part of {s}" for s in (*self.structures, *self.lints) if found.id in s.node_ids]
        texts.append(f"costs {self.cost().summary(found)}")
        return Text("\n".join([node_text(found), *("  " + text for text in texts)]))

    def _explained_site(self, site: str, origin: bool) -> str:
        """A site or a structure, the cost of a candidate's nodes as they are and as one kernel, and its backward pass."""
        item = self[site]
        lines = [explained(item, origin)]
        if isinstance(item, Candidate):
            nodes, costs = item.node_ids, self.cost()
            lines += [f"  costs {costs.of(nodes)}, node by node", f"  costs {costs.fused(nodes)}, as one kernel"]
        return "\n".join([*lines, *(f"  {p.text}" for p in self.pairs if p.site == site)])

    def _given(self, name: Any) -> str | None:
        """The explanation of a value that no node computes: an argument, an input of a body, a captured array."""
        for block in self.graph.blocks() if isinstance(name, str) else ():
            for i, value in enumerate((*block.inputs, *(v for v, _ in block.consts))):
                if value.name == name:
                    named = block is self.graph.top and i < len(self.graph.in_names)
                    role = (
                        f"the argument {self.graph.in_names[i]}" if named else f"given to {block.path or 'the program'}"
                    )
                    readers = [f"  read by {node_text(n)}" for n in block.users.get(value.id, ())]
                    return "\n".join([f"{value!r} is {role}: no node makes it", *readers])
        return None

    def _node(self, node: Node | int | str) -> Node:
        if isinstance(node, Node):
            return node
        if isinstance(node, str) and node.startswith("%"):
            for n in self.graph.nodes():
                if any(v.name == node for v in n.outputs):
                    return n
            raise ArgumentError(f"explain: no node makes {node}; print(graph) lists the values")
        if isinstance(node, int) and node in self.graph.node_by_id:
            return self.graph.node_by_id[node]
        near = did_you_mean(node, [site.id for site in self._sites]) if isinstance(node, str) else ""
        raise ArgumentError(f"explain: got {node!r}, needed a value ('%12'), a node id, a Node or a site id.{near}")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, JSON-able: passes, counts, candidates, rejections, phase times."""
        return {
            "function": self.graph.name,
            "device": self.device,
            "jax": self.graph.jax_version,
            "nodes": self.graph.node_count,
            "passes": list(self.passes),
            "counts": self.counts(),
            "lines": self.lines(),
            "candidates": [c.to_dict() for c in self.candidates],
            "rejections": [r.to_dict() for r in self.rejections],
            "pairs": [p.to_dict() for p in self.pairs],
            "structures": [s.to_dict() for s in self.structures],
            "lints": [lint.to_dict() for lint in self.lints],
            "waiting": self.waiting.to_dict() if self.waiting is not None else None,
            "notes": list(self.notes),
            "seconds": {k: round(v, 4) for k, v in self.seconds.items()},
        }

    def to_json(self, indent: int | None = 2) -> str:
        """`to_dict` as JSON text; `indent` as for `json.dumps`."""
        return json.dumps(self.to_dict(), indent=indent)

    def to_dataframe(self, xla: bool = False) -> Any:
        """One row per candidate, rejection and lint, as a pandas DataFrame.

        `backend` is the one chosen, `backends` every one with its verdict and reason, `notes` the sentences on the site. With `xla`, which
        compiles the program as written and fused (see `xla`), `xla_fused_into` lists the kernels that XLA makes of a candidate's nodes,
        and `xla_kernels` is their number before and after ("3 -> 1").

        Raises:
          MissingDependencyError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise MissingDependencyError("to_dataframe needs pandas: pip install pandas") from error
        rows = [{"state": "candidate", **c.to_dict(), **columns_of(c)} for c in self.candidates]
        rows += [{"state": "declined", **r.to_dict()} for r in self.rejections]
        rows += [{"state": "lint", **lint.to_dict()} for lint in self.lints]
        columns = ["state", "id", "pass", "code", "sentence", "formula", "source", "matched", "total", "edit"]
        columns += ["backend", "backends", "notes"]
        if xla:
            columns += ["xla_fused_into", "xla_kernels"]
            for row, k in zip(rows, self.kernels(), strict=False):  # the candidates' rows come first
                row |= {"xla_fused_into": k.into, "xla_kernels": k.change}
        return pd.DataFrame(rows, columns=columns)


def _names(given: Iterable[str] | str) -> set[str]:
    """Names, given as several or as a single one."""
    return {given} if isinstance(given, str) else set(given)


def _is_named(candidate: Candidate, names: Collection[str]) -> bool:
    """Whether a candidate, or its pass, is among some names."""
    return candidate.id in names or candidate.pass_name in names
