"""Rows and pieces of the inspector that no state of it is needed for: costs, devices, places, and what can be picked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from fusionlab.evidence.units import binary_bytes
from fusionlab.fusers.engine.outcomes import Candidate, Rejection
from fusionlab.graph.cost.cost import Cost, quantity, trips_text
from fusionlab.graph.program.ir import Block, Node, Value, type_text
from fusionlab.graph.program.meshes import collective_axes, collective_bytes, region_mesh_text
from fusionlab.graph.xla.modules import ModuleKernel

from ..markup import Fact, mono, pick, picks, text


def cost_rows(cost: Cost) -> list[Fact]:
    """Operations, bytes, intensity and trips in a line each."""
    some = "" if cost.known else "at least "
    rows: list[Fact] = [("operations", text(f"{some}{quantity(cost.flops or 0)}flop"))]
    if cost.transcendentals:
        rows.append(("transcendentals", text(quantity(cost.transcendentals))))
    moved = f"{quantity(cost.bytes_read)}B read, {quantity(cost.bytes_written)}B written"
    rows.append(("bytes", text(moved)))
    if cost.bytes_moved:
        rows.append(("intensity", text(f"{cost.intensity:.3g} flop/byte")))
    if cost.trips != 1:
        rows.append(("runs", text(trips_text(cost.trips))))
    return rows


def value_text(value: Value) -> str:
    return f"{pick(value.name)} {mono(type_text(value.aval))} {binary_bytes(value.nbytes)}"


def device_rows(node: Node) -> list[Fact]:
    """Of a shard_map its mesh, of a collective the axes and the bytes of one device in one run."""
    axes = collective_axes(node)
    rows: list[Fact] = [("region", text(mesh))] if (mesh := region_mesh_text(node)) else []
    return rows + ([("over", text(", ".join(axes))), ("bytes", binary_bytes(collective_bytes(node)))] if axes else [])


def place_rows(node: Node, block: Block) -> list[Fact]:
    return [("scope", mono(node.scope) if node.scope else ""), ("block", mono(block.path) if block.path else "")]


def nodes_of_kernels(kernels: Iterable[ModuleKernel]) -> tuple[int, ...]:
    return tuple(sorted({i for k in kernels if not k.inferred for i in k.nodes}))


def nearest_misses(sites: Iterable[Candidate | Rejection]) -> tuple[int, ...]:
    """Ids of the nodes that stopped the match of the declined ones, each once."""
    return tuple(dict.fromkeys(i for s in sites if isinstance(s, Rejection) for i in s.node_ids))


def pick_lines(nodes: Iterable[Node]) -> str:
    return picks([pick(line) for line in dict.fromkeys(n.source.short for n in nodes if n.source)], 8)


def pick_sites(sites: Iterable[Candidate | Rejection]) -> str:
    return picks([pick(s.id) for s in sites])


def sites_text(sites: list[Candidate | Rejection]) -> str:
    """How many of each pass, then each of them."""
    counts = counts_text(f"{s.pass_name}{', declined' if isinstance(s, Rejection) else ''}" for s in sites)
    return text("; ".join(counts)) + "<br>" + pick_sites(sites)


def primitives_text(nodes: Iterable[Node]) -> str:
    return text(", ".join(counts_text(n.primitive for n in nodes)))


def counts_text(names: Iterable[str], most: int = 8) -> list[str]:
    """ "12 dot_general", the most frequent first."""
    counts = Counter(names).most_common()
    shown = [f"{n} {name}" for name, n in counts[:most]]
    return [*shown, f"{len(counts) - most} more kinds"] if len(counts) > most else shown
