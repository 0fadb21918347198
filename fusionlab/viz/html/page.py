"""What the standalone page tells the explorer: the traits of the widget, baked into plain data.

The page draws with the widget's own module (`explorer.js`); `report.js` stands in for the kernel. What needs one is
shown, switched off, and says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from fusionlab.fusers.report.findings import Findings
from fusionlab.graph.cost.cost import cost_of
from fusionlab.graph.program.graph import Graph

from ..draw.dot import dom_id
from ..model.panel import panel
from ..model.pictures import Pictures
from .baked import MAX_BYTES, BakedGroups, bake, folded_tree, index, packed_json, slim
from .inspector import inspect

ID_PREFIX = "fl-"
AFTER_ID_PREFIX = "fl-after-"
MAX_PAGE = 1_350_000  # bytes that a page is filled up to with pictures; measurements and tables come first
OFFLINE = "A record. Switching sites and measuring need a live kernel: fusionlab.explore(fn, *args)."
_MOST_NAMES = 400  # sites, and source lines, that are told of without being drawn
DrawView = Callable[[Mapping[str, Any], str], str]


def page_data(
    pictures: Pictures,
    enabled: Collection[str] | None,
    view: Mapping[str, Any],
    draw: DrawView,
    after: tuple[Graph, Mapping[str, Any]] | None = None,
    used: int = 0,
    **view_options: Any,
) -> dict[str, Any]:
    """The explorer's traits for a page, and the pictures it can open.

    Args:
      pictures, enabled: of the graph and what was found in it.
      view: their view model, whose picture the page itself holds.
      draw: `(view model, prefix of ids) -> SVG text`.
      after: the fused graph and its view model, whose picture the page holds too.
      used: bytes of the page without these data; pictures are baked until the page has `MAX_PAGE`.
      **view_options: of `view`.
    """
    graph, findings = pictures.graph, pictures.findings

    def view_of(expanded: Collection[str], collapsed: Collection[str]) -> dict[str, Any]:
        options: dict[str, Any] = {**view_options, "expanded": expanded, "collapsed": collapsed}
        return pictures.view(enabled=enabled, **options)

    def scene_of(shown: Mapping[str, Any]) -> dict[str, Any]:
        return {"svg": slim(draw(shown, ID_PREFIX)), "items": items(shown, ID_PREFIX), "inspector": teller.view(shown)}

    tree = folded_tree(graph, findings, enabled, view_options.get("max_nodes", 60))
    teller = Teller(graph, findings, enabled, ID_PREFIX, tree)
    panes = teller.view(view) | teller.names()
    if after is not None:
        panes |= Teller(after[0], None, None, AFTER_ID_PREFIX, None).view(after[1])
    data = {
        "head": head(view, after is not None),
        "panel": panel(view, None, {}, [c.id for c in findings.candidates if c.idle] if findings else ()),
        "items": items(view, ID_PREFIX),
        "after": items(after[1], AFTER_ID_PREFIX) if after else None,
        "inspector": packed_json(panes),
        "sites": {s["id"]: [dom_id(s["id"]), *s["nodes"][:1]] for s in view["sites"]},
        "index": packed_json(index(graph, tree, [g["id"] for g in view["groups"]])),
    }
    room = MAX_PAGE - used - len(json.dumps(data))
    scenes = bake(view, tree, view_of, scene_of, max_bytes=min(MAX_BYTES, room))
    return data | {"scenes": {_key(k): text for k, text in scenes.packed.items()}}


def _key(gid: str) -> str:
    return f"-{dom_id(gid[1:])}" if gid.startswith("-") else dom_id(gid)


def head(view: Mapping[str, Any], after: bool) -> dict[str, Any]:
    """The header: the sentence without the title it starts with, and what is possible without a kernel."""
    return {
        "title": view["title"],
        "sentence": view["header"].removeprefix(f"{view['title']} · "),
        "counts": view["counts"],
        "shown": "before",
        "hulls": False,
        "can": {"after": after, "export": [".svg", ".png"]},
        "device": "",
        "offline": OFFLINE,
    }


def items(view: Mapping[str, Any], prefix: str) -> dict[str, dict[str, Any]]:
    """SVG id -> spoken label, kind and whether it is a group, for all that can be selected."""
    labels = {}
    for item in (*view["boxes"], *view["groups"]):
        if item["kind"] in ("input", "output"):
            continue
        words = [*item["lines"]] if "lines" in item else [item["label"]]
        words += [item["state"]] if item["state"] else []
        labels[prefix + dom_id(item["id"])] = {
            "label": ", ".join(words),
            "kind": item["kind"],
            "closed": bool(item.get("closed")),
            "group": "lines" not in item or bool(item["closed"]),
        }
    return labels


# Inspector ----------------------------------------------------------------------------------------------------------
class Teller:
    """What the inspector says of things of one graph, each said once: name in the page -> {title, html, near}."""

    def __init__(
        self,
        graph: Graph,
        findings: Findings | None,
        enabled: Collection[str] | None,
        prefix: str,
        tree: BakedGroups | None,
    ) -> None:
        self.graph, self.findings, self.enabled, self.prefix = graph, findings, enabled, prefix
        self._tree = tree
        self._costs = findings.cost() if findings is not None else cost_of(graph)
        self._named: set[str] = set()

    def view(self, view: Mapping[str, Any]) -> dict[str, Any]:
        """Of every box and frame of a picture that was not told of before."""
        panes: dict[str, Any] = {}
        for item in (*view["boxes"], *view["groups"]):
            if item["kind"] in ("input", "output"):
                continue
            name = f"n{item['node']}" if item["node"] is not None else item["site"] or self._members(item["id"])
            self._tell(panes, self.prefix + dom_id(item["id"]), name)
        return panes

    def names(self) -> dict[str, Any]:
        """Of the sites and source lines that a text can name, wherever they are drawn."""
        panes: dict[str, Any] = {}
        found = self.findings
        for record in (*found.candidates, *found.rejections)[:_MOST_NAMES] if found is not None else ():
            self._tell(panes, self.prefix + dom_id(record.id), record.id)
        lines = dict.fromkeys(n.source.short for n in self.graph.nodes() if n.source)
        for line in [*lines][:_MOST_NAMES]:
            self._tell(panes, line, line)
        return panes

    def _members(self, gid: str) -> tuple[int, ...]:
        return self._tree.members.get(gid, ()) if self._tree is not None else ()

    def _tell(self, panes: dict[str, Any], key: str, name: Any) -> None:
        if key in self._named or not name:
            return
        self._named.add(key)
        found = inspect(self.graph, self.findings, name, enabled=self.enabled, costs=self._costs, sources=False)
        panes[key] = {"title": found.title, "html": found.html} | ({"near": list(found.near)} if found.near else {})
