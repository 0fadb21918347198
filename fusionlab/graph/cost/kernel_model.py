"""A simple model of the kernels that a compiler like XLA makes of a program: the baseline for predicting a fused op's gain.

The model, node by node:
- a view (reshape, ...) costs nothing, and neither does a transpose next to a product, which takes any memory order;
- a product, a convolution, a sort, a gather, a scatter, a random draw, a collective and a fused op are one kernel each: their operands are
  read from memory, their results are written to memory;
- a reduction, and an update in place, end a kernel: they absorb the elementwise code that computes their operands;
- all other code (elementwise, broadcasts, slices, ...) joins the kernels that read its result, recomputed in each if there
  are several; it reaches memory if a kernel of the kinds above reads it, if it is returned, and, if several kernels read it,
  if it is a transcendental or computed from more bytes than it has itself;
- a scan, a while loop, a cond and a shard_map are borders; remat, custom_jvp and the like are not.

XLA does better in places (it merges reductions of the same operand, and may end a product with a bias) and worse in
others: the compiled module has XLA's actual kernels, and this model has the expected ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..program.ir import Atom, Block, Node, Value
from .cost import Cost, Costs
from .rules import DATA_MOVES, EXPANDED, REDUCTIONS, TRANSCENDENTAL, UNIT_COST_ELEMENTWISE
from .traffic import ONCE, is_region, is_view, reads, writes

_ENDS = REDUCTIONS | frozenset({"dynamic_update_slice", "reduce"})
_JOINS = (
    UNIT_COST_ELEMENTWISE | TRANSCENDENTAL | EXPANDED.keys() | DATA_MOVES | {"integer_pow", "polynomial"}
) - frozenset(
    "gather dynamic_update_slice ppermute all_gather all_gather_invariant all_to_all ragged_all_to_all device_put".split()
)
_DEAR = TRANSCENDENTAL | EXPANDED.keys()


@dataclass(frozen=True)
class ModelKernel:
    """One kernel of the model.

    Attributes:
      root: id of the node whose result it writes.
      primitive, scope: of that node.
      nodes: ids of the nodes counted with it; a node computed by several kernels is counted with the first.
      path: path of its block.
      cost: of all its trips; its bytes are those it reads from memory and writes.
    """

    root: int
    primitive: str
    scope: str
    nodes: tuple[int, ...]
    path: str
    cost: Cost


def kernels_of(costs: Costs) -> tuple[ModelKernel, ...]:
    """The kernels of a program, in program order; their operations sum to those of the program."""
    found: list[ModelKernel] = []
    stack: list[Block] = [costs.graph.top]
    while stack:
        flat = _Flat(stack.pop())
        found += flat.kernels(costs)
        stack += [b for n in flat.nodes if is_region(n) for b in n.blocks]
    counted = [k for k in found if k.cost.trips != 0]
    return tuple(sorted(counted, key=lambda k: k.root))


class _Flat:
    """A block with its calls, remats and custom rules inlined, in which views are resolved to their values."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.nodes: list[Node] = []
        self.alias: dict[int, Atom] = {}
        self._take(block)
        self.producer = {v.id: n for n in self.nodes for v in n.outputs}
        self._transposes()
        self.users = self._readers()
        self.returned = {a.id for a in map(self.of, block.outputs) if isinstance(a, Value)}
        self.roots = self._roots()

    def _take(self, block: Block) -> None:
        for node in block.nodes:
            if node.primitive in ONCE and len(node.blocks) == 1 and len(node.blocks[0].inputs) == len(node.inputs):
                child = node.blocks[0]
                self._rename(child.inputs, node.inputs)
                self._take(child)
                self._rename(node.outputs, child.outputs)
            elif is_view(node) and node.inputs and len(node.outputs) in (1, len(node.inputs)):
                self.alias.update((v.id, a) for v, a in zip(node.outputs, node.inputs, strict=False))
            else:
                self.nodes.append(node)

    def _rename(self, values: Sequence[Value], atoms: Sequence[Atom]) -> None:
        self.alias.update((v.id, a) for v, a in zip(values, atoms, strict=True))

    def _readers(self) -> dict[int, list[Node]]:
        """Value id -> the nodes that read it or a view of it."""
        found: dict[int, list[Node]] = {}
        for node in self.nodes:
            for a in self.operands(node):
                found.setdefault(a.id, []).append(node)
        return found

    def _transposes(self) -> None:
        """The transposes that are not nodes of their own, because a product computes their operand or only products read them."""
        readers = self._readers()
        kept = []
        for node in self.nodes:
            maker = self.producer.get(getattr(self.of(node.inputs[0]), "id", -1)) if node.inputs else None
            users = readers.get(node.outputs[0].id, []) if node.outputs else []
            to_products = bool(users) and all(n.primitive == "dot_general" for n in users)
            if node.primitive == "transpose" and (to_products or (maker and maker.primitive == "dot_general")):
                self.alias[node.outputs[0].id] = node.inputs[0]
            else:
                kept.append(node)
        self.nodes = kept

    def of(self, atom: Atom) -> Atom:
        """The value that an atom is a view of, or itself."""
        while isinstance(atom, Value) and atom.id in self.alias:
            atom = self.alias[atom.id]
        return atom

    def operands(self, node: Node) -> Iterator[Value]:
        """The values a node reads, each once."""
        yield from {a.id: a for a in map(self.of, node.inputs) if isinstance(a, Value)}.values()

    def _roots(self) -> dict[int, frozenset[int]]:
        """Node id -> the roots of the kernels that compute it; a root is alone with itself."""
        roots: dict[int, frozenset[int]] = {}
        for node in reversed(self.nodes):
            mine = frozenset({node.id})
            if node.primitive in _JOINS and len(node.outputs) == 1:
                vid = node.outputs[0].id
                users = self.users.get(vid, ())
                joined = frozenset().union(*(roots[u.id] for u in users)) if users else mine
                again = len(joined) < 2 or not self._is_dear(node)
                if vid not in self.returned and again and all(u.primitive in _JOINS | _ENDS for u in users):
                    mine = joined
            roots[node.id] = mine
        return roots

    def _is_dear(self, node: Node) -> bool:
        """Whether a node is not computed twice, once for each kernel that reads it."""
        return node.primitive in _DEAR or self._taken(node) > 1.5 * node.outputs[0].nbytes

    def _taken(self, node: Node) -> int:
        """Bytes of a node's operands, with a broadcast counted as its operand."""
        total = 0
        for a in self.operands(node):
            maker = self.producer.get(a.id)
            wide = maker is not None and maker.primitive in ("broadcast_in_dim", "iota")
            total += sum(b.nbytes for b in self.operands(maker)) if wide and maker else a.nbytes
        return total

    def kernels(self, costs: Costs) -> Iterator[ModelKernel]:
        members: dict[int, list[Node]] = {}  # every kernel that computes a node
        counted: dict[int, list[Node]] = {}  # the one it is counted with
        for node in self.nodes:
            if is_region(node):
                continue
            for root in self.roots[node.id]:
                members.setdefault(root, []).append(node)
            counted.setdefault(min(self.roots[node.id]), []).append(node)
        for root, mine in members.items():
            node = costs.graph.node_by_id[root]
            trips = costs.nodes[root].trips
            count = 1 if trips is None else trips
            read, written = self._traffic(mine, node)
            inner = costs.of(n.id for n in counted.get(root, ()))
            cost = Cost(inner.flops, inner.transcendentals, read * count, written * count, trips, inner.known)
            ids = tuple(n.id for n in counted.get(root, ()))
            yield ModelKernel(root, node.primitive, node.scope, ids, self.block.path, cost)

    def _traffic(self, members: Iterable[Node], root: Node) -> tuple[int, int]:
        members = list(members)
        own_values = {v.id for n in members for v in n.outputs}
        read: dict[int, int] = {}
        whole: dict[int, int] = {}
        for node in members:
            own = reads(node)
            for a in {a.id: a for a in node.inputs if isinstance(a, Value)}.values():
                base = self.of(a)
                if isinstance(base, Value) and base.id not in own_values:
                    read[base.id] = read.get(base.id, 0) + own.get(a.id, 0)
                    whole[base.id] = base.nbytes
        return sum(min(n, whole[i]) for i, n in read.items()), sum(writes(root).values())
