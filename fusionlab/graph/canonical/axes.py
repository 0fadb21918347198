"""The equality of axes of canonical nodes.

An axis is (key, number), where `key` names a node; a contracted label of a product is (key, ("label", l)). A letter of a pattern
is a class of equal axes, identified by the places of its members (`places`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .fused_nodes import Labelled, node_labels
from .nodes import CNode

Axis = tuple[Any, Any]
AxisPlace = Any  # a node's key, or (key, what its fused op calls the axis)
Part = tuple[Any, str, int, int]  # (key of a reshape, "in" or "out", number of the group, number in the group)


def axis_links(node: CNode, key: Any, operand_keys: Sequence[Any]) -> list[tuple[Axis, Axis | None]]:
    """Pairs of axes that are the same axis: each operand axis with the node's own (None: reduced away, or merged or split, here).

    Args:
      node: the canonical node.
      key, operand_keys: names of the node and its operands in the result; operands with the name None are skipped.
    """
    if node.op == "reshape":
        return _reshape_links(node, key, operand_keys[0])
    links: list[tuple[Axis, Axis | None]] = []
    labels = node_labels(node)
    for operand, source in zip(node.operands, operand_keys, strict=True):
        if source is None:
            continue
        for axis, slot in enumerate(operand.axes):
            if labels is not None:
                mine: Any = labels.index(slot) if slot in labels else ("label", slot)
                links.append(((source, axis), (key, mine)))
            else:
                links.append(((source, axis), (key, slot) if slot >= 0 else None))
    return links


def _reshape_links(node: CNode, key: Any, source: Any) -> list[tuple[Axis, Axis | None]]:
    links: list[tuple[Axis, Axis | None]] = []
    for before, after in merged_axes(node):
        if len(before) == len(after) == 1:
            links.append(((key, after[0]), (source, before[0]) if before[0] >= 0 else None))
            continue
        links += [((source, axis), None) for axis in before if axis >= 0]
        links += [((key, axis), None) for axis in after]
    return links


def reshape_parts(node: CNode, key: Any, source: Any) -> Iterator[tuple[Part, Axis]]:
    """The axes that a reshape merges or splits, each by its role; the order of outer and inner matters."""
    changed = [(b, a) for b, a in merged_axes(node) if not len(b) == len(a) == 1]
    for number, (before, after) in enumerate(changed):
        yield from (((key, "in", number, i), (source, axis)) for i, axis in enumerate(before) if axis >= 0)
        yield from (((key, "out", number, i), (key, axis)) for i, axis in enumerate(after))


def reshape_kind(node: CNode) -> tuple[tuple[int, int], ...]:
    """The numbers of axes that a reshape merges or splits, before and after: equal for reshapes of different sizes."""
    return tuple(g for g in node.params if g != (1, 1))


def merged_axes(node: CNode) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """For each group of a reshape: the operand's axes (below 0: broadcast) and the node's own."""
    before = after = 0
    axes = node.operands[0].axes
    for old, new in node.params:
        yield axes[before : before + old], tuple(range(after, after + new))
        before, after = before + old, after + new


def axis_classes(links: Iterable[tuple[Axis, Axis | None]]) -> dict[Axis, int]:
    """Numbers the classes of equal axes."""
    parent: dict[Axis, Axis] = {}

    def find(x: Axis) -> Axis:
        parent.setdefault(x, x)
        while parent[x] != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    for axis, other in links:
        root = find(axis)
        if other is not None:
            parent[root] = find(other)
    numbers: dict[Axis, int] = {}
    return {key: numbers.setdefault(find(key), len(numbers)) for key in list(parent)}


def places(classes: Mapping[Axis, int], node_of: Mapping[Any, CNode]) -> dict[int, set[AxisPlace]]:
    """Class -> the places of its members. A node that labels its axes gives each its label's name, contracted ones too.

    `node_of` knows the nodes that are not leaves.
    """
    found: dict[int, set[AxisPlace]] = {}
    for (key, axis), number in classes.items():
        params = node_of[key].params if key in node_of else None
        if isinstance(params, Labelled):
            label = params.labels[axis] if isinstance(axis, int) else axis[1]
            found.setdefault(number, set()).add((key, params.names[label]))
        elif isinstance(axis, int):
            found.setdefault(number, set()).add(key)
    return found
