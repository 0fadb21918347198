"""From canonical back to raw: the raw nodes of a match, its cuts, and whether anything escapes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from ...showing import Shown
from ..canonical.nodes import ONE
from ..canonical.view import CanonicalView
from ..declined import Declined
from ..dtypes import is_float, narrows
from ..jax_compat import has_side_effects
from ..primitives import having
from ..program.equations import slice_jaxpr
from ..program.identical import computed_alike
from ..program.in_shard_map import DeviceSums, make_jaxpr
from ..program.ir import Block, Node, Value, values_in
from ..program.order import waits_for_itself
from ..program.signature import Size, as_it_is, node_signature, type_key
from .constants import is_constant

# Views as matching sees them, which a match may stand behind: narrower than what costs nothing (`FREE_VIEWS` in `cost/rules`).
VIEWS = having("layout", "variance")
# With True, with False and with zeros: the view drops them, as masks are combined with a mask of ones.
IDENTITIES = frozenset("and or add sub".split())
SCALINGS = having("scaling")
CASTS = having("cast")


@dataclass(frozen=True, eq=False, repr=False)
class Region(Shown):
    """The raw side of a match.

    Attributes:
      block: the block that contains it.
      root: the value it computes, or the first of several.
      leaves: leaf name -> the raw value at the cut.
      nodes: nodes the fusion replaces, in program order.
      known: block inputs that are literals at the call, or made of constants, by value id.
      support: nodes needed to compute the region but not replaced: constants and views of leaves other nodes read too.
      others: further values it computes that are read outside.
      relus: nodes max(h, 0) to which JAX's own rule for relu, with derivative 0 at 0, applies: a differentiated scan retains only
        the maximum, whose own derivative there is 1/2.
      whole: the region of several roots of which it is the part of one root.
      positions: sizes of axes that a proof does not reduce, as positions along them count: of a vocabulary, whose entries labels name.
      aside: whether only the root is differentiated in the program, and other floats are reported with it.
    """

    block: Block
    root: Value
    leaves: Mapping[str, Value]
    nodes: tuple[Node, ...]
    support: tuple[Node, ...]
    known: Mapping[int, Any] = field(default_factory=dict)
    others: tuple[Value, ...] = ()
    whole: Region | None = None
    relus: frozenset[int] = frozenset()
    positions: frozenset[int] = frozenset()
    aside: bool = False

    @property
    def node_ids(self) -> frozenset[int]:
        return frozenset(n.id for n in self.nodes)

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The leaf values, each once, in leaf order."""
        return tuple({v.id: v for v in self.leaves.values()}.values())

    @property
    def roots(self) -> tuple[Value, ...]:
        """All the values it computes that are read outside."""
        return self.root, *self.others

    @property
    def sums(self) -> DeviceSums:
        """The mesh axes over which it, or the whole region, sums: the replacement of one root may sum for the others."""
        return DeviceSums.of((*self.nodes, *self.support)) if self.whole is None else self.whole.sums

    def of(self, root: Value) -> Region:
        """The region of only one of the roots. It has the same `inputs`, whether it reads them or not."""
        if not self.others:
            return self
        producers = {v.id: n for n in (*self.nodes, *self.support) for v in n.outputs}
        wanted = _makers(producers, root, {v.id for v in self.inputs})
        nodes, support = (tuple(n for n in ns if n.id in wanted) for ns in (self.nodes, self.support))
        return replace(self, root=root, others=(), nodes=nodes, support=support, whole=self)

    def jaxpr(self) -> Any:
        """The region as a closed jaxpr: a function of `inputs` that returns only the root."""
        nodes = sorted((*self.nodes, *self.support), key=lambda n: n.id)
        instead = {n.id: _relu_in_place_of(n) for n in nodes if n.id in self.relus}
        return slice_jaxpr(self.block, nodes, self.inputs, self.root, self.known, instead=instead)

    def __str__(self) -> str:
        return f"region of {len(self.nodes)} nodes that computes {', '.join(map(repr, self.roots))} from {len(self.inputs)} values"


def _makers(producers: Mapping[int, Node], root: Value, stop: Set[int]) -> set[int]:
    """The ids of the nodes of `producers` (by the ids of their results) that compute a value from the values `stop`."""
    wanted, stack = set[int](), [root.id]
    while stack:
        node = producers.get(stack.pop())
        if node is not None and node.id not in wanted:
            wanted.add(node.id)
            stack += [v.id for v in values_in(node.inputs) if v.id not in stop]
    return wanted


def _relu_in_place_of(node: Node) -> Any:
    """jax.nn.relu of the operand compared with 0, as a closed jaxpr of a maximum's operands."""
    at = next(i for i, a in enumerate(node.inputs) if a.shape == node.outputs[0].shape)
    return make_jaxpr(lambda *operands: jax.nn.relu(operands[at]), [a.aval for a in node.inputs])


@dataclass(frozen=True)
class Escape:
    """An inner value that is read outside the region: `value`, made by `node`, read by `user` (None: returned)."""

    value: Value
    node: Node
    user: Node | None


@dataclass(frozen=True)
class _Binding:
    """The binding of leaves to raw values; attributes as for `cut`."""

    through_scale: frozenset[str]
    as_read: frozenset[str]
    through_casts: frozenset[str]
    shapes: Mapping[str, tuple[int, ...]]

    def bound(self, view: CanonicalView, value: Value, names: Sequence[str]) -> tuple[Value, list[Node]]:
        """(the value to which leaves of these names are bound where `value` is read, the nodes between)."""
        if all(n in self.as_read for n in names):
            return value, []
        # Of one array for several leaves: whichever carries no factor itself tells by its own.
        scale = any(n in self.through_scale for n in names)
        casts = all(n in self.through_casts for n in names)
        return look_through(view, value, scale, casts, {self.shapes[n] for n in names if n in self.shapes})


class _RegionWalk:
    """The walk from the values of a match down to its leaves.

    Attributes:
      inner: nodes that the fusion replaces, by id.
      support: nodes that are needed to compute the region, and that others may read too.
      bound: canonical node of a leaf -> the raw values it is read as, by id.
    """

    def __init__(
        self, view: CanonicalView, roots: Sequence[Value], names_of: Mapping[int, Sequence[str]], binding: _Binding
    ) -> None:
        self.view, self.names_of, self.binding = view, names_of, binding
        self.roots = {v.id for v in roots}
        self.inner: dict[int, Node] = {}
        self.support: dict[int, Node] = {}
        self.bound: dict[int, dict[int, Value]] = {nid: {} for nid in names_of}
        stack, seen = [*roots], set[int]()
        while stack:
            value = stack.pop()
            if value.id not in seen:
                seen.add(value.id)
                stack += self.reads(value)

    def reads(self, value: Value) -> list[Value]:
        """Records the node of a value; returns its operands inside the region.

        Raises:
          Declined: the value is neither an operand nor a number, or its node has side effects.
        """
        view, node = self.view, self.view.block.producer.get(value.id)
        ref = view.ref.get(value.id)  # the view of some nodes alone has not all of them
        if ref is None:
            raise _no_operand(value)
        if ref.nid in self.names_of and value.id not in self.roots:
            return self.bind(value, ref.nid)
        if node is None and (ref.nid == ONE or (value.id in view.known_inputs and is_constant(view, value))):
            return []  # a number, known at the call or captured, or made of literals outside
        if node is None:
            raise _no_operand(value)
        if has_side_effects(node.eqn):
            raise Declined(f"{node!r} inside the site has side effects")
        target = self.support if is_constant(view, value) else self.inner
        target[node.id] = node
        return values_in(node.inputs)

    def bind(self, value: Value, nid: int) -> list[Value]:
        """Binds a leaf where it is read; returns the further operands of the views in between, which are numbers."""
        base, crossed = self.binding.bound(self.view, value, self.names_of[nid])
        self.bound[nid][base.id] = base
        self.support.update((n.id, n) for n in crossed)
        return [v for n in crossed for v in values_in(n.inputs) if self.view.ref[v.id].nid == ONE]


def _no_operand(value: Value) -> Declined:
    return Declined(f"{value!r} is read inside the site but is not one of its operands")


def cut(
    view: CanonicalView,
    root: Value,
    leaves: Mapping[str, int],
    through_scale: frozenset[str] = frozenset(),
    as_read: frozenset[str] = frozenset(),
    through_casts: frozenset[str] = frozenset(),
    others: Sequence[Value] = (),
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Region:
    """Cuts the raw nodes between `root` (and `others`) and the leaves.

    A leaf binds to the raw value that the boundary equation reads (or, for a reshape without a raw value, to its operand), seen
    through pure views and, for the leaves in `through_scale`, through multiplications by literals; a cast is passed only for the
    leaves in `through_casts`, and only if it widens.

    Args:
      view: the canonical view of the block.
      root: the raw value the match computes.
      leaves: leaf name -> canonical node id.
      through_scale: leaves whose literal factors belong to the region.
      as_read: leaves bound to the value that is read, including its views.
      through_casts: leaves bound in their dtype before widening.
      others: further raw values the match computes that are read outside.
      shapes: leaf name -> the shape in which it is bound if it occurs in that shape: earlier views stay outside.

    Raises:
      Declined: the region reads something that is not a leaf, two leaves are indistinguishable, a node of it has side effects, or a leaf
        is computed from one of several roots (or would move before side effects that precede it).
    """
    block = view.block
    leaves = {name: shown_below(view, nid) for name, nid in leaves.items()}
    walk = _RegionWalk(
        view, (root, *others), _names_of(leaves), _Binding(through_scale, as_read, through_casts, shapes or {})
    )
    chosen = {name: _leaf_value(view, walk.bound[nid], name) for name, nid in leaves.items()}
    inner = walk.inner | dead_with(block, walk.inner, walk.support, chosen.values())
    support = {i: n for i, n in walk.support.items() if i not in inner}
    support.update((n.id, n) for name, nid in leaves.items() for n in _copies(block, chosen[name], walk.bound[nid]))
    if others and (why := waits_for_itself(block, chosen.values(), (root, *others))) is not None:
        raise Declined(why)
    return Region(block, root, chosen, _by_id(inner), _by_id(support), view.known_inputs, tuple(others))


def _names_of(leaves: Mapping[str, int]) -> dict[int, list[str]]:
    """Canonical node -> the names of its leaves."""
    found: dict[int, list[str]] = {}
    for name, nid in leaves.items():
        found.setdefault(nid, []).append(name)
    return found


def _by_id(nodes: Mapping[int, Node]) -> tuple[Node, ...]:
    return tuple(nodes[i] for i in sorted(nodes))


def shown_below(view: CanonicalView, nid: int) -> int:
    """A canonical node with a raw value: the node itself, or the operand of a reshape that the program does elsewhere."""
    node = view.nodes[nid]
    return node.operands[0].nid if node.op == "reshape" and nid not in view.values_of else nid


# (through literal factors, through casts) -> the primitives that are passed.
_PASSED = {
    (False, False): VIEWS | IDENTITIES,
    (True, False): VIEWS | IDENTITIES | SCALINGS,
    (False, True): VIEWS | IDENTITIES | CASTS,
    (True, True): VIEWS | IDENTITIES | SCALINGS | CASTS,
}


def look_through(
    view: CanonicalView,
    value: Value,
    through_scale: bool = False,
    through_casts: bool = False,
    shapes: Collection[tuple[int, ...]] = (),
) -> tuple[Value, list[Node]]:
    """Through pure views of the same canonical node (and literal factors, and widening casts) to the value underneath, or to one that has
    one of the shapes.
    """
    crossed = []
    allowed = _PASSED[through_scale, through_casts]
    while (node := view.block.producer.get(value.id)) is not None and node.primitive in allowed:
        if value.shape in shapes and node.primitive in VIEWS:
            break
        source = _shown_again(view, node, value)
        if source is None or not (source.dtype == value.dtype or (through_casts and widens(node))):
            break
        crossed.append(node)
        value = source
    return value, crossed


def _shown_again(view: CanonicalView, node: Node, value: Value) -> Value | None:
    """The one operand of a node with the same canonical node as its result `value`, if the others are numbers."""
    read = values_in(node.inputs)
    if any(a.id not in view.ref for a in read):
        return None
    ref = view.ref[value.id]
    sources = [a for a in read if view.ref[a.id].nid == ref.nid]
    if len(sources) != 1 or any(view.ref[a.id].nid not in (ref.nid, ONE) for a in read):
        return None
    if node.primitive in IDENTITIES and view.ref[sources[0].id].coef != ref.coef:
        return None  # 0 - x
    return sources[0]


def widens(node: Node) -> bool:
    """Whether a node is a cast of a float to a float that holds all its values."""
    if node.primitive not in CASTS:
        return False
    before, after = node.inputs[0].dtype, node.outputs[0].dtype
    return is_float(before) and is_float(after) and not narrows(after, before)


def _leaf_value(view: CanonicalView, values: dict[int, Value], name: str) -> Value:
    """The value of an operand: the first of several equally computed ones."""
    first = values[min(values)] if values else None
    if first is not None and all(computed_alike(view.block, first, other, view.twins) for other in values.values()):
        return first
    raise Declined(f"operand {name} is read in {len(values)} different forms")


def _copies(block: Block, chosen: Value, values: dict[int, Value]) -> Iterator[Node]:
    """For each other value computed like an operand, a node that replaces it by the operand; these nodes are not in the program."""
    for value in values.values():
        if value.id != chosen.id:
            like = block.producer.get(value.id, block.nodes[0])  # its equation is of no account
            yield replace(like, primitive="copy", inputs=(chosen,), outputs=(value,), blocks=(), id=-1 - value.id)


def dead_with(
    block: Block, inner: dict[int, Node], support: dict[int, Node], leaves: Iterable[Value]
) -> dict[int, Node]:
    """Support nodes that nothing else reads: they disappear with the region."""
    kept = block.returned.union(v.id for v in leaves)
    dead: dict[int, Node] = {}
    for nid in sorted(support, reverse=True):
        node = support[nid]
        outs = [v.id for v in node.outputs]
        if nid < 0 or not kept.isdisjoint(outs):
            continue
        if all(u.id in inner or u.id in dead for i in outs for u in block.users.get(i, ())):
            dead[nid] = node
    return dead


def escapes(region: Region) -> list[Escape]:
    """Every inner value (other than roots) that is read outside the region or returned."""
    inside = {n.id for n in region.nodes} | {n.id for n in region.support}
    roots = {v.id for v in region.roots}
    found = []
    for node in region.nodes:
        for value in node.outputs:
            if value.id in roots:
                continue
            if value.id in region.block.returned:
                found.append(Escape(value, node, None))
            found += [Escape(value, node, u) for u in region.block.users.get(value.id, ()) if u.id not in inside]
    return found


def shared_casts(region: Region) -> Region:
    """The region without the casts of its leaves that are also read outside, such as bools that a backward pass reads as floats: casts are
    cheap, so these stay and the region makes its own.
    """
    leaves = {v.id for v in region.leaves.values()}
    read = {e.node.id for e in escapes(region)}
    shared = [n for n in region.nodes if n.id in read and _is_cast_of(n, leaves)]
    if not shared:
        return region
    support = sorted((*region.support, *shared), key=lambda n: n.id)
    return replace(region, nodes=tuple(n for n in region.nodes if n not in shared), support=tuple(support))


def _is_cast_of(node: Node, values: Set[int]) -> bool:
    return node.primitive in CASTS and isinstance(a := node.inputs[0], Value) and a.id in values


def region_signature(region: Region, size: Size = as_it_is) -> Any:
    """A key, equal for regions that compute the same thing in the same way: with this cache key, layers 2..N are free."""
    number: dict[int, Any] = {i: ("known", c) for i, c in region.known.items()}
    number.update((v.id, ("const", id(c))) for v, c in region.block.consts)
    # By their own place: a captured array has an entry already, and would not make `number` longer.
    number.update((value.id, ("input", i)) for i, value in enumerate(region.inputs))
    nodes = sorted((*region.nodes, *region.support), key=lambda n: n.id)
    leaves = tuple((name, number[v.id], *type_key(v, size)) for name, v in region.leaves.items())
    body = tuple(node_signature(n, number, size) for n in nodes)
    ruled = tuple(i for i, n in enumerate(nodes) if n.id in region.relus)
    return leaves, body, tuple(number.get(v.id) for v in region.roots), ruled
