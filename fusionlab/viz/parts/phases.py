"""Which phase of a training step each node is in: forward, backward or update; and which regions a reader sees through."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from fusionlab.graph.cost.traffic import is_region
from fusionlab.graph.primitives import having
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.ir import Block, Node, all_nodes, values_in
from fusionlab.graph.program.meshes import region_mesh_text
from fusionlab.graph.program.scopes import in_backward, in_differentiated

from ..cards.card import PHASES

FORWARD, BACKWARD, UPDATE = PHASES
_WHOLE = 0.9  # a loop with more of the program than this is the program: its body is what the rows show
# Regions that only say how what is in them is differentiated, stored or placed: a reader sees through them.
_SEEN_THROUGH = having("remat", "rule", "call", "mesh")
_LOOPS = having("loop")
_MESHES = having("mesh")


class Stretch:
    """The nodes of a program in the order one reads them, regions that are seen through opened.

    Attributes:
      nodes: in program order; of a loop that is the whole program, what is in its body.
      loops: the loops that were taken for the program, outermost first.
      phases: node id -> phase, nodes inside closed regions included.
    """

    def __init__(self, graph: Graph, weights: Mapping[int, int]) -> None:
        self.loops = _whole_loops(graph, weights)
        self._through = frozenset(n.id for n in self.loops)
        self.nodes = list(self.flat(graph.top))
        self.phases: dict[int, str] = {}
        self._late: set[int] = set()  # ids of values that backward or update makes
        self._walk(graph.top)
        self._for_the_update(graph)
        for node in self.nodes:
            for block in node.blocks:
                self.phases.update((inner.id, self.phases[node.id]) for inner in all_nodes(block.nodes))

    def flat(self, block: Block) -> Iterator[Node]:
        """The nodes of a block in program order; of regions that are seen through, what is inside in their place."""
        for node in block.nodes:
            if self._is_seen_through(node):
                for inner in node.blocks:
                    yield from self.flat(inner)
            else:
                yield node

    def _is_seen_through(self, node: Node) -> bool:
        return bool(node.blocks) and (node.primitive in _SEEN_THROUGH or node.id in self._through)

    def _walk(self, block: Block) -> None:
        """Backward is what JAX names so; update is what reads of it without being part of it."""
        for node in block.nodes:
            if self._is_seen_through(node):
                self._walk_into(node)
                continue
            reads_late = any(v.id in self._late for v in values_in(node.inputs))
            phase = BACKWARD if in_backward(node) else UPDATE if reads_late else FORWARD
            self.phases[node.id] = phase
            if phase != FORWARD:
                self._late.update(v.id for v in node.outputs)

    def _walk_into(self, node: Node) -> None:
        late = self._late
        for inner in node.blocks:
            pairs = zip(inner.inputs, node.inputs[len(node.inputs) - len(inner.inputs) :], strict=False)
            late.update(a.id for a, b in pairs if getattr(b, "id", None) in late)
            self._walk(inner)
            made = zip(node.outputs, inner.outputs, strict=False)
            late.update(a.id for a, b in made if in_backward(node) or getattr(b, "id", None) in late)

    def _for_the_update(self, graph: Graph) -> None:
        """Step counts and rates that only the update reads belong to it, although they read nothing of the backward pass."""
        if BACKWARD not in self.phases.values():
            return
        for node in reversed(self.nodes):
            if self.phases[node.id] == FORWARD and self._only_updates(node, graph.block_of[node.id]):
                self.phases[node.id] = UPDATE

    def _only_updates(self, node: Node, block: Block) -> bool:
        makers = (block.producer.get(v.id) for v in node.values)
        if any(m is not None and in_differentiated(m) for m in (node, *makers)):
            return False
        readers = (n for v in node.outputs for n in block.users.get(v.id, ()))
        return all(self.phases.get(n.id) == UPDATE for n in readers)


def turns_of(loops: Sequence[Node]) -> int:
    """How often the innermost of nested loops runs; 0 for no loop, -1 where nobody knows."""
    found = 1
    for node in loops:
        length = int(node.params.get("length", -1)) if node.primitive == "scan" else -1
        if node.primitive not in _LOOPS:
            return 0
        if length < 0:
            return -1
        found *= length
    return found if loops else 0


def mesh_of(graph: Graph) -> str:
    """The meshes of the shard_maps of a program, those inside others too; "" for a program without any."""
    meshes = (f"{n.primitive}, {region_mesh_text(n)}" for n in graph.nodes() if n.primitive in _MESHES)
    return "; ".join(dict.fromkeys(meshes))


def _whole_loops(graph: Graph, weights: Mapping[int, int]) -> tuple[Node, ...]:
    """The loop that is nearly the whole program, if there is one, and the one that is nearly all of its body."""
    total = sum(weights[n.id] for n in graph.top.nodes) or 1
    loops: list[Node] = []
    heavy = _heavy(graph.top.nodes, total, weights)
    while heavy is not None:
        if heavy.primitive in _LOOPS:
            loops.append(heavy)
        heavy = _heavy([n for block in heavy.blocks for n in block.nodes], total, weights)
    return tuple(loops)


def _heavy(nodes: Collection[Node], total: int, weights: Mapping[int, int]) -> Node | None:
    """The one region that is nearly the whole program."""
    found = [n for n in nodes if is_region(n) and weights[n.id] > _WHOLE * total]
    return found[0] if len(found) == 1 else None
