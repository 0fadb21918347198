"""A folded program with some of its groups open: which ones, and what then reads what.

Opening a group costs what is visible, not the program.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from fusionlab.graph.program.ir import Value, type_text

from .flow import FlowEnd
from .folding import function_name
from .groups import Group, Item, NodeBox, has_site, members
from .sites import ShownSite

# A picture beyond this many boxes is not readable; sites are opened up to here even above `max_nodes`.
SITES_LIMIT = 300
_NEVER = 5


@dataclass(eq=False)
class Link:
    """What flows from one node to another, the copies of a run taken for the one that is shown.

    Attributes:
      start, end: node ids, or ends of the program as in `flow`.
      copies: ids of the runs in a hidden copy of which an argument is read.
      type: of the first value; `count` of them flow there.
    """

    start: FlowEnd
    end: FlowEnd
    copies: frozenset[str]
    type: str
    count: int = 1


class GroupTree:
    """The groups of a folded program (`folding.fold`), and where each node stands.

    Attributes:
      root: the outermost group.
      links: what flows between nodes, in program order.
    """

    def __init__(self, root: Group, edges: Iterable[tuple[FlowEnd, FlowEnd, Value]]):
        self.root = root
        self._parent: dict[str, Group] = {}
        self._home: dict[int, Group] = {}
        self._twin: dict[int, int] = {}
        self._copies: dict[int, dict[str, int]] = {}
        self._opened: list[Group] = []
        self._enter(root)
        self.links = list(self._linked(edges))

    def twin(self, nid: int) -> int:
        """The shown node that a hidden copy's node is drawn as; any other node itself."""
        return self._twin.get(nid, nid)

    # What no fold changes ----------------------------------------------------------------------------------------------
    def _enter(self, group: Group) -> None:
        for child in group.children:
            if isinstance(child, NodeBox):
                self._home[child.node.id] = group
                continue
            self._parent.setdefault(child.id, group)
            if child.node is not None:
                self._home[child.node.id] = child
            self._enter(child)
        if group.hidden:
            self._copy(group)

    def _copy(self, group: Group) -> None:
        """Copies are drawn where the shown one stands; those of a run inside it are so already."""
        own = [group.node.id] if group.node and group.kind != "run" else []
        shown = own + list(members(group.children))
        before = [self._copies.get(nid, {}) for nid in shown]
        # Equal records are one object: there are as many as copies, not as nodes.
        shared: dict[tuple[int, int], dict[str, int]] = {}
        for k, unit in enumerate(itertools.chain([None], group.hidden)):
            for nid, twin, others in zip(shown if unit is None else members(unit), shown, before, strict=True):
                if unit is not None:
                    self._twin[nid] = self.twin(twin)
                self._copies[nid] = shared.setdefault((id(others), k) if others else (0, k), {**others, group.id: k})

    def _linked(self, edges: Iterable[tuple[FlowEnd, FlowEnd, Value]]) -> Iterator[Link]:
        found: dict[tuple[FlowEnd, FlowEnd, frozenset[str]], Link] = {}
        nothing: frozenset[str] = frozenset()
        copies, twins = self._copies, self._twin
        types: dict[int, str] = {}
        for producer, reader, value in edges:
            runs = nothing
            there = copies.get(reader) if isinstance(reader, int) else None
            if isinstance(producer, int):
                if there and _carried(copies.get(producer), there):
                    continue
                start: FlowEnd = twins.get(producer, producer)
            else:
                start = producer
                if there:
                    runs = _runs_of_copy(there)
            end: FlowEnd = twins.get(reader, reader) if isinstance(reader, int) else reader
            known = found.get((start, end, runs))
            if known is not None:
                known.count += 1
            elif start != end:
                found[start, end, runs] = Link(start, end, runs, _type_once(value, types))
        return iter(found.values())

    # Opening -----------------------------------------------------------------------------------------------------------
    def open(
        self,
        *,
        expanded: Collection[str] | str = (),
        collapsed: Collection[str] = (),
        reveal: Collection[int] = (),
        max_nodes: int = 60,
    ) -> frozenset[str]:
        """Opens groups until about `max_nodes` boxes are visible, sites beyond it, all others closed; the ids of the open ones.

        Args:
          expanded: ids of groups to open whatever their size; "all" opens every one.
          collapsed: ids of groups to keep closed.
          reveal: ids of nodes whose groups are opened, even collapsed ones.
        """
        for group in self._opened:
            group.open = False
        self._opened = []
        around = frozenset(g for nid in reveal for g in self._around(nid))
        wanted = None if expanded == "all" else self._with_parents(around.union(expanded))
        self._open(wanted, frozenset(collapsed) - around, max_nodes)
        return frozenset(g.id for g in self._opened)

    def _around(self, nid: int) -> Iterator[str]:
        """Ids of the groups around a node, found through hidden copies too."""
        group = self._home.get(self.twin(nid))
        while group is not None and group is not self.root:
            yield group.id
            group = self._parent.get(group.id)

    def _with_parents(self, ids: frozenset[str]) -> frozenset[str]:
        """A group asked for opens every group around it."""
        found = set(ids)
        for name in ids:
            group = self._parent.get(name)
            while group is not None:
                found.add(group.id)
                group = self._parent.get(group.id)
        return frozenset(found)

    def _open(self, wanted: frozenset[str] | None, collapsed: frozenset[str], max_nodes: int) -> None:
        visible = len(self.root.children)
        heap: list[tuple[tuple[int, int, int], Group]] = []
        order = itertools.count()

        def push(group: Group, depth: int) -> None:
            for child in group.children:
                if isinstance(child, Group) and child.id not in collapsed:
                    asked = wanted is None or child.id in wanted
                    heapq.heappush(heap, ((0 if asked else _rank(child), depth, next(order)), child))

        push(self.root, 1)
        while heap:
            (rank, depth, _), group = heapq.heappop(heap)
            grown = visible + len(group.children) - 1
            limit = math.inf if rank == 0 else max(SITES_LIMIT, max_nodes) if rank == 1 else max_nodes
            if grown > limit or rank == _NEVER:
                continue
            group.open = True
            self._opened.append(group)
            visible = grown
            push(group, depth + 1)


def sites_inside(item: Item) -> list[ShownSite]:
    """The sites of an item and of all that is in it, hidden copies left out."""
    own = [item.site] if item.site else []
    return own if isinstance(item, NodeBox) else own + [s for c in item.children for s in sites_inside(c)]


def _type_once(value: Value, known: dict[int, str]) -> str:
    """The text of a value's type, made once for all values of one `aval`."""
    known_text = known.get(id(value.aval))
    if known_text is None:
        known_text = known[id(value.aval)] = type_text(value.aval)
    return known_text


def _runs_of_copy(there: dict[str, int]) -> frozenset[str]:
    """The runs in a hidden copy of which a node is."""
    return frozenset(run for run, k in there.items() if k)


def _carried(here: dict[str, int] | None, there: dict[str, int]) -> bool:
    """From one copy of a run to the next: the frame says so, a line back to its own start would confuse."""
    if not here or here is there:
        return False
    return any(k != here.get(run, k) for run, k in there.items())


def _rank(group: Group) -> int:
    """What is opened first: 0 asked for, 1 the way to a site, 2 regions and scopes, 3 sites, 4 chunks, 5 nothing more.

    A custom rule with a known name (relu, logsumexp) says more as one box than its inside does.
    """
    if group.kind == "site":
        return 3
    if has_site(group):
        return 1
    if group.node is not None and group.node.primitive.startswith("custom_"):
        return _NEVER if function_name(group.node.blocks[0]) else 4
    return 4 if group.kind == "chunk" else 2
