"""Axes of a whole layer's values, named as in the fused op and followed through a folded view.

Each axis of a canonical node is given as a tuple of the op's axes, outer first: ("h", "c") for merged heads and
features. The letters: "b0", "b1", ... batch, "t" queries, "s" keys, "h" heads, "g" key heads if they are fewer, "c" and "d" features
of keys and of values, "e" the model's width, "f" the feed-forward's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ....graph.canonical.axes import merged_axes
from ....graph.canonical.fused_nodes import Labelled, node_labels
from ....graph.canonical.nodes import CNode
from ....graph.canonical.view import CanonicalView
from ....graph.declined import Declined
from ....graph.program.ir import Value
from ...engine.layout import arrange, restore


class Unread(Declined):
    """A layer differs from the op at a canonical node, `nid`.

    `about` names a missing norm: "norm before" or "norm after" the value there.
    """

    def __init__(
        self, message: str, nid: int, code: str = "structure", edit: str | None = None, about: str = ""
    ) -> None:
        super().__init__(message, code, edit=edit)
        self.nid, self.about = nid, about


@dataclass(frozen=True)
class AxisPart:
    """A part of an axis of length `total`: from `start` on, the axes `inner`."""

    start: int
    total: int
    inner: tuple[Any, ...]


Atoms = tuple[Any, ...]  # letters and Cuts, outer first
Shown = tuple[Atoms, ...]  # for each axis of a node
Change = Callable[[Any], Any]  # of an array


@dataclass(frozen=True)
class Side:
    """A canonical node and its axes in letters."""

    nid: int
    shown: Shown

    @property
    def atoms(self) -> frozenset[Any]:
        return frozenset(all_letters(self.shown))


def all_letters(axes: Sequence[Sequence[Any]]) -> Atoms:
    """The letters and cuts of all axes, outer first."""
    return tuple(a for axis in axes for a in axis)


def renamed(side: Side, names: Mapping[str, str]) -> Side:
    return Side(side.nid, tuple(tuple(_rename(a, names) for a in axis) for axis in side.shown))


def _rename(atom: Any, names: Mapping[str, str]) -> Any:
    if isinstance(atom, AxisPart):
        return AxisPart(atom.start, atom.total, tuple(_rename(a, names) for a in atom.inner))
    return names.get(atom, atom)


def letters_in(atoms: Sequence[Any]) -> set[str]:
    """The letters of some atoms, including those inside cuts."""
    return {a for atom in atoms for a in (letters_in(atom.inner) if isinstance(atom, AxisPart) else (atom,))}


class Walk:
    """Steps from node to node of a view, starting at an attention.

    Attributes: `attention` (canonical node), `sizes` (the length of every letter met), `halves` (the letters of heads on two axes), `met`
    (the nodes that belong to the layer), `steps` (done so far), `decoder`, `is_fused` (as far as known), `held` (a node inside that a fused
    layer may not have, found on the way), `factor` (what queries times keys are multiplied by), `axes` (the mesh axes along which products
    are summed over devices), `alone` (the output projection, where no sum over devices reads it).
    """

    def __init__(self, view: CanonicalView, attention: int) -> None:
        self.view, self.attention = view, attention
        self.sizes: dict[str, int] = {}
        self.halves: dict[str, tuple[str, ...]] = {}
        self.met: list[int] = [attention]
        self.steps, self.factor = 0, 1.0
        self.decoder = self.is_fused = False
        self.held: int | None = None
        self.axes: tuple[str, ...] = ()
        self.alone: int | None = None

    def node(self, nid: int) -> CNode:
        return self.view.nodes[nid]

    def users(self, nid: int) -> list[CNode]:
        """The nodes that read a node."""
        return [self.node(u) for u in self.view.users.get(nid, ())]

    def size(self, atom: Any) -> int:
        return atom.total if isinstance(atom, AxisPart) else self.sizes[atom]

    def length(self, atoms: Sequence[Any]) -> int:
        return math.prod(self.size(a) for a in atoms)

    # -- towards the operands -------------------------------------------------------------------------------------

    def up(self, side: Side, parts: bool = True) -> Side:
        """The value under reshapes (and, with `parts`, splits and slices)."""
        while True:
            node = self.node(side.nid)
            if node.op == "reshape":
                side = self.before_reshape(node, side.shown)
            elif parts and node.op in ("split", "slice"):
                side = self.before_part(node, side.shown)
            else:
                return side

    def before_reshape(self, node: CNode, shown: Shown) -> Side:
        source = self.node(node.operands[0].nid)
        found: list[Atoms] = [()] * len(source.shape)
        for before, after in merged_axes(node):
            atoms = all_letters([shown[axis] for axis in after])
            if self.are_shared(atoms, before, source):
                found[before[0]] = ("g",)
                continue
            sizes = [source.shape[axis] if axis >= 0 else ~axis for axis in before]
            for axis, part in zip(before, self.parted(atoms, sizes, node.id), strict=True):
                _check_once(axis, node)
                found[axis] = part
        return Side(source.id, tuple(found))

    def are_shared(self, atoms: Atoms, before: Sequence[int], source: CNode) -> bool:
        """Whether heads are key heads, each repeated for its neighbours; `before` are the axes before the repetition."""
        if atoms != ("h",) or len(before) != 2 or not before[0] >= 0 > before[1]:
            return False
        size = source.shape[before[0]]
        return size * ~before[1] == self.sizes["h"] and self.sizes.setdefault("g", size) == size

    def parted(self, atoms: Atoms, sizes: Sequence[int], nid: int) -> list[Atoms]:
        """The letters of one axis, dealt to axes of these sizes, outer first."""
        rest, parts = list(atoms), []
        for size in sizes:
            part: list[Any] = []
            while (length := self.length(part)) < size and rest:
                if rest[0] == "h" and length * self.sizes["h"] > size:
                    rest[:1] = self.in_two(size // length)
                part.append(rest.pop(0))
            parts.append(tuple(part))
        if rest or [self.length(part) for part in parts] != list(sizes):
            raise Unread("a reshape splits or merges across the axes of heads, features or rows", nid, "axes")
        return parts

    def in_two(self, outer: int) -> tuple[str, ...]:
        """The heads as two axes, the outer of this size: groups, and the heads of each."""
        if "h" not in self.halves and self.sizes["h"] % outer == 0:
            self.halves["h"] = "h0", "h1"
            self.sizes |= {"h0": outer, "h1": self.sizes["h"] // outer}
        return self.halves.get("h", ("h",))

    def before_part(self, node: CNode, shown: Shown) -> Side:
        """The operand of a split or a slice."""
        taken = taken_by(node)
        if taken is None:
            raise Unread(f"{node.op} of a value whose parts are not known", node.id)
        ranges = zip(raw_letters(shown, taken.lengths), taken.starts, taken.lengths, taken.shape, strict=True)
        atoms = [own if length == size else (AxisPart(start, size, own),) for own, start, length, size in ranges]
        return self.raw_operand(node, 0, taken.shape, atoms, f"{node.op} of a value")

    def raw_operand(self, node: CNode, slot: int, shape: Sequence[int], atoms: Sequence[Atoms], what: str) -> Side:
        """An operand of this raw shape, whose raw axes have these letters; `what` names it in the reason if it is broadcast along one."""
        edge = node.operands[slot]
        found: list[Atoms] = [()] * len(self.node(edge.nid).shape)
        long = [own for size, own in zip(shape, atoms, strict=True) if size != 1]
        for axis, own in zip(edge.axes, long, strict=False):
            if axis < 0:
                raise Unread(f"{what} that is broadcast along an axis", node.id, "axes")
            found[axis] = own
        return Side(edge.nid, tuple(found))

    def operands(self, side: Side) -> list[Side]:
        """The operands of a node that refer to its axes by number, as those of a sum do."""
        edges = self.node(side.nid).operands
        return [Side(o.nid, tuple(side.shown[x] if x >= 0 else () for x in o.axes)) for o in edges]

    # -- towards the result ---------------------------------------------------------------------------------------

    def after_reshape(self, node: CNode, shown: Shown) -> Side:
        found: list[Atoms] = [()] * len(node.shape)
        for before, after in merged_axes(node):
            _check_once(min(before, default=0), node)
            atoms = all_letters([shown[axis] for axis in before])
            for axis, part in zip(after, self.parted(atoms, [node.shape[a] for a in after], node.id), strict=True):
                found[axis] = part
        return Side(node.id, tuple(found))

    def slots(self, node: CNode, slot: int, shown: Shown) -> dict[int, Atoms]:
        """Label (or own axis, of a node without labels) -> letters, as one operand has them."""
        return {label: shown[axis] for axis, label in enumerate(node.operands[slot].axes)}

    def beside(self, node: CNode, side: Side) -> tuple[dict[int, Atoms], Side]:
        """(the slots of a value read by a node of two operands, the other operand)."""
        mine = slot_reading(node, side.nid)
        known, other = self.slots(node, mine, side.shown), node.operands[mine - 1]
        return known, Side(other.nid, tuple(known.get(x, ()) for x in other.axes))

    def result(self, node: CNode, known: Mapping[int, Atoms]) -> Side:
        """The node's own axes, by its labels."""
        labels = node_labels(node)
        labels = tuple(range(len(node.shape))) if labels is None else labels
        if any(label not in known for label in labels):
            raise Unread("it has an axis that the layer does not have", node.id, "axes")
        return Side(node.id, tuple(known[label] for label in labels))


def _check_once(axis: int, node: CNode) -> None:
    """Raises Unread if a value is broadcast along an axis of a reshape's operand."""
    if axis < 0:
        raise Unread("a value is broadcast along an axis before it is reshaped", node.id, "axes")


def raw_params(node: CNode) -> tuple[Sequence[Any], Mapping[str, Any], int] | None:
    """(raw shapes of the operands, parameters, number of the result) of a node; None if they are not known."""
    known, index = node.params
    return (known[1], dict(known[2]), index) if known[0] == "params" else None


@dataclass(frozen=True)
class Taken:
    """A part of an array of `shape`: along each axis so many entries (`lengths`), from `starts` on, in `strides`."""

    shape: Sequence[int]
    starts: Sequence[int]
    lengths: Sequence[int]
    strides: Sequence[int]


def taken_by(node: CNode) -> Taken | None:
    """The part that a split's result or a slice takes; None for other nodes, and if it is not known."""
    known = raw_params(node) if node.op in ("split", "slice") else None
    if known is None:
        return None
    ((*shape,), *_), params, index = known
    ones = [1] * len(shape)
    if node.op == "split":
        axis, sizes = int(params["axis"]), [int(n) for n in params["sizes"]]
        starts, lengths = [0] * len(shape), list(shape)
        starts[axis], lengths[axis] = sum(sizes[:index]), sizes[index]
        return Taken(shape, starts, lengths, ones)
    starts, limits = ([int(i) for i in params[name]] for name in ("start_indices", "limit_indices"))
    strides = [int(step) for step in params.get("strides") or ones]
    lengths = [-(-(b - a) // step) for a, b, step in zip(starts, limits, strides, strict=True)]
    return Taken(shape, starts, lengths, strides)


def raw_letters(shown: Shown, shape: Sequence[int]) -> list[Atoms]:
    """The letters of each raw axis of a value with these letters and this shape; none for a unit axis."""
    own = iter(shown)
    return [next(own) if n != 1 else () for n in shape]


def side_of(node: CNode, slot: int, known: Mapping[int, Atoms]) -> Side:
    """An operand of a node, the letters of whose labels are `known`."""
    edge = node.operands[slot]
    return Side(edge.nid, tuple(known[x] for x in edge.axes))


def slot_reading(node: CNode, nid: int) -> int:
    """The number of the first operand of a node that reads a given node."""
    return next(i for i, o in enumerate(node.operands) if o.nid == nid)


def is_plain(node: CNode) -> bool:
    """Whether none of a node's operands is multiplied by a number."""
    return all(o.coef == 1 for o in node.operands)


def read_by(node: CNode) -> set[int]:
    """The nodes that a node reads."""
    return {o.nid for o in node.operands}


def is_product_of(node: CNode, count: int) -> bool:
    """Whether a node is a product of so many values without powers."""
    return node.op == "prod" and tuple(node.params) == (1.0,) * count


def slots_of(node: CNode) -> dict[str, int]:
    """Name -> number of the operand, for a fused op's node; empty for other nodes."""
    return {name: i for i, name in enumerate(node.params.slots)} if isinstance(node.params, Labelled) else {}


# -- arrays -----------------------------------------------------------------------------------------------------------


def raw_axes(view: CanonicalView, value: Value, shown: Shown) -> tuple[Atoms, ...]:
    """The letters of each axis of a raw value of a node with these letters; none for unit axes."""
    dims = iter(view.ref[value.id].dims)
    found: list[Atoms] = []
    for size in value.shape:
        d = next(dims) if size != 1 else None
        if d is not None and d < 0:
            raise Unread(f"{value!r} is broadcast along an axis of size {size}", view.ref[value.id].nid, "axes")
        found.append(() if d is None else shown[d])
    return tuple(found)


def dealt(have: Sequence[Atoms], groups: Sequence[Sequence[str]], nid: int) -> tuple[Atoms, list[Atoms]]:
    """(the letters of axes, those of each group among them), for `arranged` and `restored`.

    Raises:
      Unread: a letter is in none of the groups, occurs twice, or is a part of an axis.
    """
    letters, known = all_letters(have), {*all_letters(groups)}
    if any(a not in known for a in letters) or len(set(letters)) < len(letters):
        raise Unread("one of its values has an axis that the op has no place for", nid, "axes")
    return letters, [tuple(a for a in group if a in letters) for group in groups]


def arranged(have: Sequence[Atoms], groups: Sequence[Sequence[str]], sizes: Mapping[Any, int], nid: int) -> Change:
    """A function from an array whose axes have the letters `have` to one with an axis per group, with its letters merged, or of 1 for an
    empty group.
    """
    letters, kept = dealt(have, groups, nid)

    def arrange_letters(x: Any) -> Any:
        apart = x if letters == all_letters(kept) else jnp.reshape(x, [sizes[a] for a in letters])
        return arrange(apart, letters, kept, sizes)

    return arrange_letters


def restored(
    groups: Sequence[Sequence[str]], want: Sequence[Atoms], shape: Sequence[int], sizes: Mapping[Any, int], nid: int
) -> Change:
    """The inverse: from one axis per group to an array of `shape` whose axes have the letters `want`."""
    letters, kept = dealt(want, groups, nid)
    return lambda x: restore(x, kept, letters, shape, sizes)
