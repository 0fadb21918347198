"""What a folded graph is made of: boxes of one node, and groups of them; and what is in an item, worked out once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fusionlab.graph.program.ir import Node

from .sites import ShownSite


@dataclass(eq=False, slots=True)
class NodeBox:
    """One node, drawn as one box."""

    node: Node
    site: ShownSite | None = None


@dataclass(eq=False, slots=True)
class Group:
    """Things drawn as one box while closed, and as a frame around them while open.

    `kind`: "root", "scope", "function", "region", "branch", "site", "run" or "chunk". It stands for `count` copies;
    `hidden` holds the others, each a list of items of the same shape as `children`.
    """

    id: str
    kind: str
    label: str
    children: list[Item]
    node: Node | None = None
    site: ShownSite | None = None
    count: int = 1
    hidden: list[list[Item]] = field(default_factory=list)
    open: bool = False
    # Worked out when asked for, and forgotten by `changed`.
    _size: int | None = field(default=None, repr=False)
    _signature: int | None = field(default=None, repr=False)
    _has_site: bool | None = field(default=None, repr=False)
    _shown: list[int] | None = field(default=None, repr=False)
    _ranges: list[list[int]] | None = field(default=None, repr=False)

    @property
    def size(self) -> int:
        """Node count, own node and hidden copies included."""
        if self._size is None:
            own = (self.node is not None) + sum(map(nodes_in, self.children))
            self._size = own + sum(nodes_in(i) for unit in self.hidden for i in unit)
        return self._size

    @property
    def shown(self) -> list[int]:
        """Node ids of its own node and of everything in it, hidden copies left out."""
        if self._shown is None:
            self._shown = [] if self.node is None else [self.node.id]
            for child in self.children:
                self._shown += [child.node.id] if isinstance(child, NodeBox) else child.shown
        return self._shown

    @property
    def ranges(self) -> list[list[int]]:
        """Node ids of everything in it, hidden copies included, as pairs (first, last) in ascending order."""
        if self._ranges is None:
            self._ranges = []
            for nid in sorted(members([self])):
                if self._ranges and self._ranges[-1][1] == nid - 1:
                    self._ranges[-1][1] = nid
                else:
                    self._ranges.append([nid, nid])
        return self._ranges

    def changed(self) -> None:
        """Forgets what was worked out, once copies were added."""
        self._size = self._signature = self._has_site = self._shown = self._ranges = None


Item = NodeBox | Group


def nodes_in(item: Item) -> int:
    """Node count of an item, hidden copies included."""
    return 1 if isinstance(item, NodeBox) else item.size


def members(items: Iterable[Item]) -> Iterator[int]:
    """Node ids of everything in the items, hidden copies included, in a fixed order."""
    for item in items:
        if isinstance(item, NodeBox):
            yield item.node.id
            continue
        if item.node is not None:
            yield item.node.id
        yield from members(item.children)
        for unit in item.hidden:
            yield from members(unit)


def has_site(item: Item) -> bool:
    """True around what has to stay visible: a candidate. What was declined shows while there is room."""
    if item.site is not None and item.site.state != "declined":
        return True
    if isinstance(item, NodeBox):
        return False
    if item._has_site is None:
        item._has_site = any(map(has_site, item.children))
    return item._has_site


def shown_nodes(items: Iterable[Item]) -> Iterator[Node]:
    """The nodes that are shown or folded away in the items, hidden copies left out."""
    for item in items:
        if isinstance(item, NodeBox):
            yield item.node
        else:
            yield from shown_nodes(item.children)
