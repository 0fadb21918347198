"""What a record is of: the work of the program, by which two records are known to be of the same, and the sites that were in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from fusionlab.fusers import Candidate, Findings
from fusionlab.graph.program.ir import all_nodes, type_text
from fusionlab.graph.program.text import block_fingerprint, digest, node_text
from fusionlab.graph.program.trace import block_of_jaxpr
from fusionlab.showing import Shown

PRODUCTS = frozenset({"dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"})


@dataclass(frozen=True, repr=False)
class Workload(Shown):
    """The work of a program, whatever it and its parts are named and wherever its lines are.

    Attributes:
      arguments: fingerprint of the shapes and dtypes of all arguments.
      products: fingerprint of all matrix products and convolutions, with shapes and dtypes, in any order.
      program: fingerprint of all equations in order.
      nodes: how many equations there are.
    """

    arguments: str
    products: str
    program: str
    nodes: int

    def __str__(self) -> str:
        return f"{self.nodes} nodes, program {self.program}, products {self.products}, arguments {self.arguments}"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | None) -> Workload | None:
        """Reads a record back; None of None, as in records from before there were fingerprints."""
        return None if data is None else cls(**{f.name: data[f.name] for f in fields(cls)})


def workload_of(closed: Any) -> Workload:
    """The work of a closed jaxpr."""
    block = block_of_jaxpr(closed)
    nodes = list(all_nodes(block.nodes))
    products = sorted(
        f"{n.primitive} {', '.join(type_text(a.aval) for a in n.inputs)} {node_text(n, sources=False).partition('[')[2]}"
        for n in nodes
        if n.primitive in PRODUCTS
    )
    arguments = [type_text(v.aval) for v in block.inputs]
    return Workload(digest(arguments), digest(products), block_fingerprint(block), len(nodes))


@dataclass(frozen=True, repr=False)
class SiteState(Shown):
    """A site of the program that was measured.

    Attributes:
      site: its id.
      state: "fused", "can be fused" or "declined".
      why: the backend that runs it; why it is left as it is; or the code of the rejection.
      saved_s: seconds that fusing it saves, given all the others; None where that was not measured.
    """

    _says = "{0.site}: {0.state}, {0.why}"

    site: str
    state: str
    why: str = ""
    saved_s: float | None = None


def site_states(found: Findings, fused: Iterable[Candidate]) -> tuple[SiteState, ...]:
    """The state of every site of a search, of which those in `fused` are."""
    chosen = {c.id for c in fused}
    candidates = (
        SiteState(c.id, "fused", c.backend.name if c.backend is not None else "")
        if c.id in chosen
        else SiteState(c.id, "can be fused", c.idle or "left out")
        for c in found.candidates
    )
    return (*candidates, *(SiteState(r.id, "declined", r.code) for r in found.rejections))


def read_sites(data: Sequence[Mapping[str, Any]]) -> tuple[SiteState, ...]:
    """Reads the sites of a record back."""
    return tuple(SiteState(**{f.name: site[f.name] for f in fields(SiteState)}) for site in data)
