"""Axes of a whole layer's values, told by what the fused op calls them, followed through a folded view.

Each axis of a canonical node is shown as the op's axes that it is made of, outer first: ("h", "c") for heads and features that are
merged. The letters: "b0", "b1", ... batch, "t" queries, "s" keys, "h" heads, "g" key heads where they are fewer, "c" and "d" features
of keys and of values, "e" the model's width, "f" the feed-forward's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ....graph.canonical.axes import merged_axes
from ....graph.canonical.fused_nodes import Labelled, node_labels
from ....graph.canonical.nodes import ONE, CNode
from ....graph.canonical.view import CanonicalView
from ....graph.declined import Declined
from ....graph.program.ir import Value


class Unread(Declined):
    """Declined for what a layer has in a place where the op has something else: at a canonical node, `nid`.

    `about` tells of a norm that is missing: "norm before" or "norm after" the value there.
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


@dataclass(frozen=True)
class Side:
    """A canonical node and what its axes are."""

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


def letters_in(atom: Any) -> tuple[str, ...]:
    """The letters of one atom: those inside of a cut."""
    return tuple(a for inner in atom.inner for a in letters_in(inner)) if isinstance(atom, AxisPart) else (atom,)


class Walk:
    """Steps from node to node of a view. `sizes` holds the length of every letter met, `halves` the letters of heads on two axes."""

    def __init__(self, view: CanonicalView) -> None:
        self.view = view
        self.sizes: dict[str, int] = {}
        self.halves: dict[str, tuple[str, ...]] = {}

    def node(self, nid: int) -> CNode:
        return self.view.nodes[nid]

    def users(self, nid: int) -> list[CNode]:
        """The nodes that read a node."""
        return [self.node(u) for u in self.view.users.get(nid, ())]

    def size(self, atom: Any) -> int:
        return atom.total if isinstance(atom, AxisPart) else self.sizes[atom]

    def length(self, atoms: Atoms) -> int:
        return math.prod(self.size(a) for a in atoms)

    # -- towards the operands -------------------------------------------------------------------------------------

    def up(self, side: Side, parts: bool = True) -> Side:
        """Through reshapes (and, with `parts`, splits and slices), to what they are made of."""
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
            atoms = tuple(a for axis in after for a in shown[axis])
            if self.are_shared(atoms, before, source):
                found[before[0]] = ("g",)
                continue
            for axis, part in zip(
                before, self.parted(atoms, [self._size(source, b) for b in before], node.id), strict=True
            ):
                if axis < 0:
                    raise Unread("a value is repeated along an axis before it is reshaped", node.id, "axes")
                found[axis] = part
        return Side(source.id, tuple(found))

    def are_shared(self, atoms: Atoms, before: Sequence[int], source: CNode) -> bool:
        """Whether heads are those of keys, each repeated for its neighbours; `before` are the axes that they are made of."""
        if atoms != ("h",) or len(before) != 2 or not before[0] >= 0 > before[1]:
            return False
        size = source.shape[before[0]]
        return size * ~before[1] == self.sizes["h"] and self.sizes.setdefault("g", size) == size

    def _size(self, node: CNode, axis: int) -> int:
        return node.shape[axis] if axis >= 0 else ~axis

    def parted(self, atoms: Atoms, sizes: Sequence[int], nid: int) -> list[Atoms]:
        """The letters of one axis, dealt to axes of these sizes, outer first."""
        rest, parts = list(atoms), []
        for size in sizes:
            part: list[Any] = []
            while (length := self.length(tuple(part))) < size and rest:
                if rest[0] == "h" and length * self.sizes["h"] > size:
                    rest[:1] = self.in_two(size // length)
                part.append(rest.pop(0))
            if self.length(tuple(part)) != size:
                raise Unread("axes are split or merged across those of heads, features or rows", nid, "axes")
            parts.append(tuple(part))
        if rest:
            raise Unread("axes are split or merged across those of heads, features or rows", nid, "axes")
        return parts

    def in_two(self, outer: int) -> tuple[str, ...]:
        """The heads as two axes, where the outer has this size: groups, and the heads of each."""
        if "h" not in self.halves and self.sizes["h"] % outer == 0:
            self.halves["h"] = "h0", "h1"
            self.sizes |= {"h0": outer, "h1": self.sizes["h"] // outer}
        return self.halves.get("h", ("h",))

    def before_part(self, node: CNode, shown: Shown) -> Side:
        """What a split or a slice takes a part of."""
        known, index = node.params
        if known[0] != "params":
            raise Unread(f"{node.op} of a value whose parts are not known", node.id)
        params, (shape, *_) = dict(known[2]), known[1]
        starts, lengths = axis_parts(node.op, params, shape, index)
        source = node.operands[0]
        found: list[Atoms] = [()] * len(self.node(source.nid).shape)
        own, theirs = iter(range(len(shown))), iter(source.axes)
        for size, start, length in zip(shape, starts, lengths, strict=True):
            atoms = shown[next(own)] if length != 1 else ()
            if size == 1:
                continue
            axis = next(theirs)
            if axis < 0:
                raise Unread(f"{node.op} of a value that is repeated along an axis", node.id, "axes")
            found[axis] = atoms if length == size else (AxisPart(start, size, atoms),)
        return Side(source.nid, tuple(found))

    def operand(self, node: CNode, shown: Shown, slot: int, new: Mapping[int, str] | None = None) -> Side:
        """What an operand's axes are, where those of the node are known; `new` names labels that the node has no axis of."""
        labels = node_labels(node)
        edge = node.operands[slot]
        found = []
        for axis, label in enumerate(edge.axes):
            own = labels.index(label) if labels is not None and label in labels else label if labels is None else None
            if own is not None:
                found.append(shown[own] if own >= 0 else ())
                continue
            name = (new or {}).get(label)
            if name is None:
                raise Unread("it is summed over an axis that the op does not sum over", node.id, "axes")
            self.sizes.setdefault(name, self.node(edge.nid).shape[axis])
            found.append((name,))
        return Side(edge.nid, tuple(found))

    # -- towards the result ---------------------------------------------------------------------------------------

    def after_reshape(self, node: CNode, shown: Shown) -> Side:
        found: list[Atoms] = [()] * len(node.shape)
        for before, after in merged_axes(node):
            atoms = tuple(a for axis in before if axis >= 0 for a in shown[axis])
            if any(axis < 0 for axis in before):
                raise Unread("a value is repeated along an axis before it is reshaped", node.id, "axes")
            for axis, part in zip(after, self.parted(atoms, [node.shape[a] for a in after], node.id), strict=True):
                found[axis] = part
        return Side(node.id, tuple(found))

    def slots(self, node: CNode, slot: int, shown: Shown) -> dict[int, Atoms]:
        """Label (or own axis, of a node without labels) -> letters, as one operand has them."""
        return {label: shown[axis] for axis, label in enumerate(node.operands[slot].axes)}

    def result(self, node: CNode, known: Mapping[int, Atoms]) -> Side:
        """The node's own axes, by its labels."""
        labels = node_labels(node)
        labels = tuple(range(len(node.shape))) if labels is None else labels
        if any(label not in known for label in labels):
            raise Unread("it has an axis that the layer does not have", node.id, "axes")
        return Side(node.id, tuple(known[label] for label in labels))


def axis_parts(op: str, params: Mapping[str, Any], shape: Sequence[int], index: int) -> tuple[list[int], list[int]]:
    """(starts, lengths) along each raw axis of what a split's result or a slice takes."""
    if op == "split":
        axis, sizes = int(params["axis"]), [int(n) for n in params["sizes"]]
        starts, lengths = [0] * len(shape), [int(n) for n in shape]
        starts[axis], lengths[axis] = sum(sizes[:index]), sizes[index]
        return starts, lengths
    strides = params.get("strides") or (1,) * len(shape)
    starts, limits = ([int(i) for i in params[name]] for name in ("start_indices", "limit_indices"))
    return starts, [-(-(b - a) // int(step)) for a, b, step in zip(starts, limits, strides, strict=True)]


def side_of(node: CNode, slot: int, known: Mapping[int, Atoms]) -> Side:
    """An operand of a node, the letters of whose labels are `known`."""
    edge = node.operands[slot]
    return Side(edge.nid, tuple(known[x] for x in edge.axes))


def slot_reading(node: CNode, nid: int) -> int:
    """Which operand of a node, the first, is another that it reads."""
    return next(i for i, o in enumerate(node.operands) if o.nid == nid)


def is_plain(node: CNode) -> bool:
    """Whether none of a node's operands is multiplied by a number."""
    return all(o.coef == 1 for o in node.operands)


def read_by(node: CNode) -> set[int]:
    """The nodes that a node reads."""
    return {o.nid for o in node.operands}


def is_product_of(node: CNode, count: int) -> bool:
    """Whether a node is a product of so many values, none of them to a power."""
    return node.op == "prod" and tuple(node.params) == (1.0,) * count


def slot_of(node: CNode, name: str) -> int | None:
    """Which operand of a fused op's node has this name."""
    return node.params.slots.index(name) if isinstance(node.params, Labelled) and name in node.params.slots else None


def number_of(node: CNode, name: str) -> float:
    """A number that a fused op's node has among its operands."""
    slot = slot_of(node, name)
    assert slot is not None
    assert node.operands[slot].nid == ONE
    return float(node.operands[slot].coef)


# -- arrays -----------------------------------------------------------------------------------------------------------


def raw_axes(view: CanonicalView, value: Value, shown: Shown) -> tuple[Atoms, ...]:
    """The letters of each axis of a raw value that shows a node with these; none for axes of 1."""
    dims = iter(view.ref[value.id].dims)
    found: list[Atoms] = []
    for size in value.shape:
        d = next(dims) if size != 1 else None
        if d is not None and d < 0:
            raise Unread(f"{value!r} is repeated along an axis of size {size}", view.ref[value.id].nid, "axes")
        found.append(() if d is None else shown[d])
    return tuple(found)


def check_groups(have: Sequence[Atoms], groups: Sequence[Sequence[str]], nid: int) -> None:
    """Whether axes made of the letters `have` can be dealt to these groups, as `arranged` and `restored` do.

    Raises:
      Unread: a letter is in none of the groups, stands twice, or is a part of an axis.
    """
    letters, known = all_letters(have), {*all_letters(groups)}
    if any(a not in known for a in letters) or len(set(letters)) < len(letters):
        raise Unread("one of its values has an axis that the op has no place for", nid, "axes")


def arranged(x: Any, have: Sequence[Atoms], groups: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> Any:
    """`x`, whose axes are made of the letters `have`, with one axis per group, each of its letters merged; of 1 for an empty group."""
    letters = all_letters(have)
    order = tuple(a for a in all_letters(groups) if a in letters)
    if order != letters:
        x = jnp.reshape(x, [sizes[a] for a in letters])
        x = jnp.transpose(x, [letters.index(a) for a in order])
    return jnp.reshape(x, [math.prod(sizes[a] for a in group if a in letters) for group in groups])


def restored(
    x: Any, groups: Sequence[Sequence[str]], want: Sequence[Atoms], shape: Sequence[int], sizes: Mapping[str, int]
) -> Any:
    """The inverse: from one axis per group to an array of `shape` whose axes are made of the letters `want`."""
    wanted = all_letters(want)
    order = tuple(a for a in all_letters(groups) if a in wanted)
    if order != wanted:
        x = jnp.reshape(x, [sizes[a] for a in order])
        x = jnp.transpose(x, [order.index(a) for a in wanted])
    return jnp.reshape(x, shape)
