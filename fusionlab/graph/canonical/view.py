"""The canonical view: one spelling per meaning, for matching only.

A raw value maps to a `Ref`: a scalar coefficient times a hash-consed `CNode`, seen through an axis view. Layout (transposes,
unit axes, broadcasts), scalar factors, float casts and no-ops disappear into the Ref; the algebra remains. The view
never becomes code: it drops casts and ignores rounding. The rules of the primitives are in `rules.py`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..jax_compat import has_side_effects
from ..program.captured import number
from ..program.equations import Made
from ..program.identical import computed_alike
from ..program.ir import Atom, Block, Node, Value, values_in
from .given import Known
from .nodes import ONE, CNode, Coef, FoldedNodes, Operand, Ref, as_number, as_scalar, nonunit, tidy
from .rules import apply_rule, inline, passed_whole


class CanonicalView:
    """The canonical view of one block.

    Attributes: `block`, `nodes`, `ref` (raw value id -> Ref), `values_of` (node id -> raw values of it, in program order),
    `tiles_at` (node id -> the tiles folded into it).
    """

    def __init__(
        self,
        block: Block,
        known: Mapping[int, Known] | None = None,
        outer: tuple[CanonicalView, Node] | None = None,
        tiles: Iterable[FoldedNodes] = (),
        apart: frozenset[int] = frozenset(),
    ) -> None:
        self._start(block)
        self.outer = outer
        self._apart = apart
        self._tiles = {block.producer[t.root.id].id: t for t in tiles}
        self.covered = frozenset(i for t in self._tiles.values() for i in t.node_ids)
        first = _given_alike(outer)
        for i, value in enumerate(block.inputs):
            given = (known or {}).get(i)
            if given is not None:
                self.known_inputs[value.id] = given
            if (given is None or isinstance(given, Made)) and first.get(i, i) != i:
                self.twins[value.id] = block.inputs[first[i]].id
            self._bind(value, self._at_call(given, first.get(i, i), value))
        for value, const in block.consts:
            self._bind(value, self.constant(value, const, block))
        self._run(block.nodes)

    def _start(self, block: Block) -> None:
        self.block = block
        self._held: dict[int, Any] = {}
        self.nodes: list[CNode] = [CNode(ONE, "one", (), (), ())]
        self.ref: dict[int, Ref] = {}
        self.values_of: dict[int, list[Value]] = {}
        self.outer: tuple[CanonicalView, Node] | None = (
            None  # the view of the block that holds this one's node, and that node
        )
        self.known_inputs: dict[int, Known] = {}  # value id of an input -> what the caller always passes for it
        self.twins: dict[int, int] = {}  # value id of an input that is given what an earlier one is -> that one's id
        self.tiles_at: dict[int, list[FoldedNodes]] = {}
        self._tiles: dict[int, FoldedNodes] = {}  # by the id of the node that makes the root
        self.covered: frozenset[int] = frozenset()
        self._apart: frozenset[int] = frozenset()  # ids of values that are nodes of their own where they are multiples
        self._table: dict[Any, int] = {("one", (), (), (), ()): ONE}
        self._unique = itertools.count()

    def over(self, leaves: Iterable[Value], nodes: Sequence[Node]) -> CanonicalView:
        """The view of only some nodes. The values `leaves` are its leaves, however they are computed: a product stays one leaf,
        and a leaf carries no factor. Other operands from elsewhere are leaves too, unless they are literals.
        """
        part = CanonicalView.__new__(CanonicalView)
        part._start(self.block)
        part.known_inputs, part.twins = self.known_inputs, self.twins
        for value in leaves:
            part._bind(value, part._given(value))
        for value in _read_beside(nodes):
            if value.id in part.ref:
                continue
            known = self.ref[value.id]
            part._bind(value, known if known.nid == ONE else part._given(value))
        part._run([n for n in nodes if not all(v.id in part.ref for v in n.outputs)])
        return part

    # -- building -------------------------------------------------------------------------------------------------

    def _run(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            if node.id in self.covered:
                if node.id in self._tiles:
                    self._fold(self._tiles[node.id])
                continue
            refs = apply_rule(self, node, [self.read(a) for a in node.inputs])
            for value, ref in zip(node.outputs, refs, strict=True):
                self._bind(value, ref)

    def _fold(self, tile: FoldedNodes) -> None:
        """The Ref of a tile's root, from its program; the values inside are not in the view."""
        (ref,) = inline(self, tile.program, [self.read(v) for v in tile.leaves])
        self._bind(tile.root, ref)
        nid = ref.nid
        while self.nodes[nid].op == "reshape":  # the op's own rows or features, apart again
            nid = self.nodes[nid].operands[0].nid
        self.tiles_at.setdefault(nid, []).append(tile)

    def _bind(self, value: Value, ref: Ref) -> None:
        if value.id in self._apart and ref.coef != 1 and ref.nid != ONE:
            shape = self.nodes[ref.nid].shape
            edge = Operand(1.0, ref.nid, tuple(range(len(shape))))
            ref = Ref(1.0, self.node("multiple", tidy(ref.coef), (edge,), shape), ref.dims)
        self.ref[value.id] = ref
        self.values_of.setdefault(ref.nid, []).append(value)

    def _at_call(self, given: Known | None, number: int, value: Value) -> Ref:
        """The Ref of an input of the block, what it is known to be, and its number (that of the first that is given the same)."""
        if given is None:
            return self.leaf(("in", number), value.shape)
        if isinstance(given, Made):
            return inline(self, given.block, [])[0]
        return self.literal(given, value.shape)

    def bind_alias(self, value: Value, ref: Ref) -> None:
        """Gives a value of an inlined child block its Ref, without offering it as a raw value of this block."""
        self.ref[value.id] = ref

    def read(self, atom: Atom) -> Ref:
        if isinstance(atom, Value):
            return self.ref[atom.id]
        scalar = as_scalar(atom)
        if scalar is not None:
            return self.literal(scalar, atom.shape)
        return self.constant(atom, atom.val) if atom.shape else self.unique_leaf("literal", atom.shape)

    def constant(self, value: Atom, const: Any, block: Block | None = None) -> Ref:
        """A captured array, or its number; in another program, such as a derivative, the same array is the same node."""
        known = None if block is not None and _is_parameter(block, value) else number(const)
        scalar = None if known is None else as_number(known, value.dtype)
        if scalar is not None:
            return self.literal(scalar, value.shape)
        self._held[id(const)] = const  # as long as its number is a name here, no other array may get it
        return self.leaf(("const", id(const)), value.shape)

    def node(self, op: str, params: Any, operands: Sequence[Operand], shape: Sequence[int]) -> int:
        """Hash-consing: the id of the node with this meaning."""
        ops = tuple(operands)
        key = (op, params, ops, tuple(shape), _kinds(ops))
        nid = self._table.get(key)
        if nid is None:
            nid = self._table[key] = len(self.nodes)
            self.nodes.append(CNode(nid, op, params, ops, tuple(shape)))
        return nid

    def literal(self, coef: Coef, shape: Sequence[int] = ()) -> Ref:
        return Ref(coef, ONE, tuple(~s for s in nonunit(shape)))

    def leaf(self, name: Any, shape: Sequence[int]) -> Ref:
        sizes = nonunit(shape)
        return Ref(1.0, self.node("leaf", name, (), sizes), tuple(range(len(sizes))))

    def _given(self, value: Value) -> Ref:
        return self.leaf(("given", self.twins.get(value.id, value.id)), value.shape)

    def unique_leaf(self, name: str, shape: Sequence[int]) -> Ref:
        return self.leaf((name, next(self._unique)), shape)

    def opaque(self, node: Node, refs: Sequence[Ref]) -> list[Ref]:
        """A node the view does not look into: equal only to itself, unless its params can be compared."""
        return self.unread(node, refs, node.primitive, node.params, [a.shape for a in node.inputs])

    def unread(
        self, node: Node, refs: Sequence[Ref], op: str, given: Mapping[str, Any], shapes: Sequence[tuple[int, ...]]
    ) -> list[Ref]:
        """`opaque`, by the name and params of another primitive with the same meaning for operands of these shapes."""
        params: Any = ("raw", node.id)
        if not node.blocks and not has_side_effects(node.eqn):
            try:
                items = tuple(sorted((k, v) for k, v in given.items() if v is not None))
                hash(items)
                # The params name axes of the raw operands, whose unit axes the operands here have lost.
                params = ("params", tuple(shapes), items)
            except TypeError:
                pass
        ops = tuple(Operand(tidy(r.coef), r.nid, r.dims) for r in refs)
        out = []
        for i, value in enumerate(node.outputs):
            sizes = nonunit(value.shape)
            nid = self.node(op, (params, i), ops, sizes)
            out.append(Ref(1.0, nid, tuple(range(len(sizes)))))
        return out

    # -- reading --------------------------------------------------------------------------------------------------

    @functools.cached_property
    def users(self) -> dict[int, tuple[int, ...]]:
        """Node id -> the nodes that have it as an operand, ascending."""
        users: dict[int, dict[int, None]] = {}
        for node in self.nodes:
            for operand in node.operands:
                users.setdefault(operand.nid, {})[node.id] = None
        return {nid: tuple(us) for nid, us in users.items()}

    @functools.cached_property
    def by_op(self) -> dict[str, tuple[int, ...]]:
        """Op -> the ids of its nodes, ascending."""
        table: dict[str, list[int]] = {}
        for node in self.nodes:
            table.setdefault(node.op, []).append(node.id)
        return {op: tuple(ids) for op, ids in table.items()}

    def maker(self, nid: int) -> Node | None:
        """The raw node of the block that first computes a canonical node's value; None for a given value."""
        return next((n for v in self.values_of.get(nid, ()) if (n := self.block.producer.get(v.id)) is not None), None)

    def is_literal(self, ref: Ref) -> bool:
        return ref.nid == ONE

    def dim_sizes(self, ref: Ref) -> tuple[int, ...]:
        shape = self.nodes[ref.nid].shape
        return tuple(shape[d] if d >= 0 else ~d for d in ref.dims)

    def __repr__(self) -> str:
        return f"View({self.block.path or 'top'!r}, {len(self.nodes)} canonical nodes of {len(self.block.nodes)} raw)"


def _kinds(operands: Iterable[Operand]) -> tuple[tuple[int, str], ...]:
    """A key that distinguishes coefficients that compare equal: True, 1 and 1.0, and the two zeros."""
    odd = (
        (i, o.coef) for i, o in enumerate(operands) if o.coef == 0 or (o.coef == 1 and not isinstance(o.coef, float))
    )
    return tuple((i, repr(coef)) for i, coef in odd)


def _given_alike(outer: tuple[CanonicalView, Node] | None) -> dict[int, int]:
    """For body inputs that receive the same value whole in every iteration, or equally computed values: number -> that of the first such
    input.
    """
    if outer is None:
        return {}
    view, node = outer
    found: dict[int, int] = {}
    firsts: dict[Ref, list[int]] = {}
    atoms = node.inputs[: passed_whole(node)]
    for i, atom in enumerate(atoms):
        if isinstance(atom, Value):
            known = firsts.setdefault(view.ref[atom.id], [])
            same = (k for k in known if computed_alike(view.block, atoms[k], atom, view.twins))
            found[i] = next(same, i)
            if found[i] == i:
                known.append(i)
    return found


def _read_beside(nodes: Sequence[Node]) -> Iterator[Value]:
    """The values that some nodes read and do not compute."""
    own = {v.id for n in nodes for v in n.outputs}
    return (v for n in nodes for v in values_in(n.inputs) if v.id not in own)


def _is_parameter(block: Block, value: Atom) -> bool:
    """Whether an array of one entry is a weight or a bias of a product with one feature, and so not a number."""
    stack = [(block, value)] if value.shape and isinstance(value, Value) else []
    while stack:
        where, read = stack.pop()
        for user in where.users.get(read.id, ()):
            if _is_of_layer(where, user):
                return True
            if user.primitive in ("broadcast_in_dim", "reshape", "convert_element_type"):
                stack += [(where, v) for v in user.outputs]
            stack += _in_bodies(user, read)
    return False


def _is_of_layer(block: Block, node: Node) -> bool:
    """Whether a node is a product, an addition to one, or may contain one: bodies of `while` and `custom_vjp_call` are not examined."""
    if node.primitive == "dot_general" or node.primitive in ("while", "custom_vjp_call"):
        return True
    makers = (block.producer.get(v.id) for v in values_in(node.inputs))
    return node.primitive in ("add", "sub") and any(m is not None and m.primitive == "dot_general" for m in makers)


def _in_bodies(node: Node, value: Value) -> list[tuple[Block, Value]]:
    """(body, input) of each body of a node that is given a value."""
    # A cond is given its index before what its branches are.
    given = ((body, zip(body.inputs[::-1], node.inputs[::-1], strict=False)) for body in node.blocks)
    return [(body, mine) for body, pairs in given for mine, theirs in pairs if theirs is value]


def view_node_text(view: CanonicalView, nid: int) -> str:
    """One canonical node as text, for debugging and near-miss reports."""
    node = view.nodes[nid]
    ops = " ".join(f"{o.coef:g}*c{o.nid}{list(o.axes)}" for o in node.operands)
    return f"c{nid} = {node.op}{list(node.shape)} {ops}"
