"""Which phase of a training step each node is in: forward, backward or update."""

from __future__ import annotations

from collections.abc import Iterator

from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.ir import Block, Node, all_nodes, values_in
from fusionlab.graph.program.scopes import in_backward

from .card import PHASES

FORWARD, BACKWARD, UPDATE = PHASES
# Regions that only say how what is in them is differentiated, stored or placed: a reader sees through them.
SEEN_THROUGH = frozenset(
    {
        "checkpoint",
        "remat",
        "remat2",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
        "closed_call",
        "core_call",
        "custom_lin",
        "jit",
        "pjit",
    }
)


def flat(block: Block) -> Iterator[Node]:
    """The nodes of a block in program order; of regions that are seen through, what is inside in their place."""
    for node in block.nodes:
        if node.blocks and node.primitive in SEEN_THROUGH:
            for inner in node.blocks:
                yield from flat(inner)
        else:
            yield node


def phases_of(graph: Graph) -> dict[int, str]:
    """Node id -> its phase, nodes inside regions included.

    Backward is what JAX names so. Update is what reads of it without being part of it, and what is computed for that alone.
    A program that nothing is differentiated in has the forward phase alone.
    """
    phases: dict[int, str] = {}
    late: set[int] = set()  # ids of values that backward or update makes
    for node in graph.top.nodes:
        phase = BACKWARD if _is_backward(node) else FORWARD
        if phase == FORWARD and any(v.id in late for v in _read(node)):
            phase = UPDATE
        phases[node.id] = phase
        if phase != FORWARD:
            late.update(v.id for v in node.outputs)
    _for_the_update(graph.top, phases)
    for node in graph.top.nodes:
        for block in node.blocks:
            phases.update((inner.id, phases[node.id]) for inner in all_nodes(block.nodes))
    return phases


def _is_backward(node: Node) -> bool:
    """Whether JAX derived it, or everything in it: `jit` inside a region hides its names."""
    return in_backward(node)


def _read(node: Node) -> list:
    return values_in(node.inputs)


def _for_the_update(top: Block, phases: dict[int, str]) -> None:
    """Step counts and rates that only the update reads belong to it, although they read nothing of the backward pass."""
    for node in reversed(top.nodes):
        if phases[node.id] != FORWARD or any(v.id in top.returned for v in node.outputs):
            continue
        readers = [n for v in node.outputs for n in top.users.get(v.id, ())]
        if readers and all(phases[n.id] == UPDATE for n in readers):
            phases[node.id] = UPDATE
