"""Pictures of what a reader of a page without a kernel can open: laid out beforehand, compressed, and found by group.

A page shows one picture at a time. Opening a closed group takes the picture that has this group and the groups around
it open; what the budget did not reach says that it opens in a live kernel.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fusionlab.fusers.report.findings import Findings
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.ir import type_text

from ..draw.dot import dom_id
from ..model.folding import fold_graph
from ..model.groups import Group, NodeBox, members
from ..model.sites import drawn_sites

View = Mapping[str, Any]
MAX_BYTES = 900_000  # of compressed pictures in one page, as base64
MAX_SECONDS = 5.0  # of laying them out
_MOST_BOXES = 400  # of a picture that is worth baking
_MOST_NODES = 60_000  # beyond this the index of all nodes would outweigh the pictures


@dataclass(frozen=True)
class BakedGroups:
    """A folded program: its groups, and in which group each node stands.

    Attributes:
      parents: group id -> id of the group around it, "" at the top.
      places: node id -> (id of the box it has when all is open, id of the group around that box). A hidden copy of a
        repeated block stands where the shown one stands.
      members: group id -> ids of the nodes in it, hidden copies left out.
    """

    parents: dict[str, str]
    places: dict[int, tuple[str, str]]
    members: dict[str, tuple[int, ...]]

    def around(self, gid: str) -> Iterator[str]:
        """The group itself, then the groups around it, innermost first."""
        while gid:
            yield gid
            gid = self.parents[gid]


@dataclass
class Scenes:
    """Pictures by the group they open ("-id": that they close), packed; `left` are the groups beyond the budget."""

    packed: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    size: int = 0


def folded_tree(
    graph: Graph, findings: Findings | None, enabled: Collection[str] | None, max_nodes: int
) -> BakedGroups:
    """The tree behind `view_model` with the same arguments."""
    root = fold_graph(graph, drawn_sites(graph, findings, enabled), max_nodes=max_nodes)
    tree = BakedGroups({}, {}, {})
    _walk(root, tree)
    return tree


def _walk(group: Group, tree: BakedGroups) -> None:
    for item in group.children:
        if isinstance(item, NodeBox):
            tree.places[item.node.id] = (f"n{item.node.id}", group.id)
            continue
        tree.parents[item.id] = group.id
        _walk(item, tree)
        if item.node is not None:
            tree.places.setdefault(item.node.id, (item.id, group.id))
        own = [item.node.id] if item.node and item.kind != "run" else []
        shown = own + list(members(item.children))
        tree.members[item.id] = tuple(shown)
        for unit in item.hidden:
            for twin, nid in zip(shown, members(unit), strict=False):
                if twin in tree.places:
                    tree.places.setdefault(nid, tree.places[twin])


def bake(
    first: View,
    tree: BakedGroups,
    view_of: Callable[[Collection[str], Collection[str]], View],
    scene_of: Callable[[View], dict[str, Any]],
    *,
    max_bytes: int = MAX_BYTES,
    max_seconds: float = MAX_SECONDS,
) -> Scenes:
    """Lays out what can be opened from the first picture, then from those, outermost groups first; then what can be closed.

    Args:
      first: the view model shown first.
      view_of: `(expanded, collapsed) -> view model`.
      scene_of: what the page needs to know of a view model: the picture and its texts.
      max_bytes, max_seconds: no further picture is begun beyond these.
    """
    scenes, deadline = Scenes(), time.monotonic() + max_seconds
    opened = frozenset(g["id"] for g in first["groups"])
    queue = _closed(first)
    seen = set(queue)
    for gid in queue:  # grows while it is walked
        view = _bake_scene(
            scenes, gid, deadline, max_bytes, lambda g=gid: view_of(opened.union(tree.around(g)), ()), scene_of
        )
        new = [g for g in _closed(view) if g not in seen] if view is not None else []
        queue += new
        seen.update(new)
    for gid in sorted(opened & tree.parents.keys(), key=lambda g: len([*tree.around(g)])):
        _bake_scene(scenes, f"-{gid}", deadline, max_bytes, lambda g=gid: view_of(opened - {g}, (g,)), scene_of)
    return scenes


def _bake_scene(
    scenes: Scenes,
    key: str,
    deadline: float,
    max_bytes: int,
    view_of: Callable[[], View],
    scene_of: Callable[[View], dict[str, Any]],
) -> View | None:
    """One picture, if there is room and time; its view model where it was kept."""
    if scenes.size < max_bytes and time.monotonic() < deadline:
        view = view_of()
        if len(view["boxes"]) <= _MOST_BOXES:
            text = packed_json(scene_of(view))
            if scenes.size + len(text) <= max_bytes:
                scenes.packed[key] = text
                scenes.size += len(text)
                return view
    scenes.left.append(key)
    return None


def _closed(view: View) -> list[str]:
    return [b["id"] for b in sorted(view["boxes"], key=lambda b: -b["nodes"]) if b["closed"]]


def index(graph: Graph, tree: BakedGroups, opened: Collection[str]) -> dict[str, Any]:
    """Every node in columns, for searching and for finding its box: strings once, then numbers into them.

    Keys: `groups` ([SVG name, index of the group around it or -1, open at first]), `strings`, `nodes` (rows of node id,
    box name, group, primitive, value name, type, scope, source).
    """
    numbers = {gid: k for k, gid in enumerate(tree.parents)}
    strings: dict[str, int] = {}

    def text(value: str) -> int:
        return strings.setdefault(value, len(strings))

    rows = []
    for node in graph.nodes() if graph.node_count <= _MOST_NODES else ():
        if node.id not in tree.places:
            continue
        box, group = tree.places[node.id]
        value = node.outputs[0] if node.outputs else None
        rows.append(
            [
                node.id,
                text(dom_id(box)),
                numbers.get(group, -1),
                text(node.primitive),
                text(value.name if value else ""),
                text(type_text(value.aval) if value else ""),
                text(node.scope),
                text(node.source.short if node.source else ""),
            ]
        )
    groups = [[dom_id(g), numbers.get(p, -1), int(g in opened)] for g, p in tree.parents.items()]
    return {"groups": groups, "strings": [*strings], "nodes": rows}


def packed_json(data: Any) -> str:
    """JSON, gzip, base64: what the browser's DecompressionStream opens. The same data always gives the same text."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def slim(svg: str) -> str:
    """An SVG picture without what only fattens it: titles of edges that repeat ids, and digits below a tenth of a point."""
    svg = re.sub(r'(<g id="[^"]*" class="(?:edge|node|cluster)[^"]*">)\s*<title>[^<]*</title>', r"\1", svg)
    svg = re.sub(
        r' (?:d|points|x|y|cx|cy|rx|ry|width|height)="[^"]*"',
        lambda m: re.sub(r"(\.\d)\d+", r"\1", m.group()),
        svg,
    )
    return re.sub(r">\s*\n\s*<", "><", svg)
