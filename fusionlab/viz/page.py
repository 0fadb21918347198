"""What the standalone page tells the explorer: the traits of the widget, baked into plain data.

The page draws with the widget's own module (`explorer.js`); `report.js` stands in for the kernel. What needs one is
shown, switched off, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from fusionlab.errors import REJECTIONS
from fusionlab.fusers.findings import Findings
from fusionlab.graph.ir import Graph

from .dot import dom_id
from .inspector import node_dict
from .scenes import bake, folded_tree, index, pack, slim
from .sections import alike, node_rows, site_rows
from .view_model import view_model

PREFIX = "fl-"
AFTER = "fl-after-"
OFFLINE = "A record. Switching sites and measuring need a live kernel: fusionlab.explore(fn, *args)."
_SAME = ("pass", "text", "attrs", "nodes_before", "nodes_after", "backends", "residuals", "notes")
Draw = Callable[[Mapping[str, Any], str], str]


def page_data(
    graph: Graph,
    findings: Findings | None,
    enabled: Collection[str] | None,
    view: Mapping[str, Any],
    draw: Draw,
    after: tuple[Graph, Mapping[str, Any]] | None = None,
    **view_options: Any,
) -> dict[str, Any]:
    """The explorer's traits for a page, and the pictures it can open.

    Args:
      graph, findings, enabled: as for `view_model`.
      view: their view model, whose picture the page itself holds.
      draw: `(view model, prefix of ids) -> SVG text`.
      after: the fused graph and its view model, whose picture the page holds too.
      **view_options: of `view`.
    """

    def view_of(expanded: Collection[str], collapsed: Collection[str]) -> dict[str, Any]:
        options = view_options | {"expanded": expanded, "collapsed": collapsed}
        return view_model(graph, findings, enabled=enabled, **options)

    def scene_of(shown: Mapping[str, Any]) -> dict[str, Any]:
        told = inspector_data(graph, findings, enabled, shown, PREFIX)
        new = {k: v for k, v in told.items() if first.get(k) != v}
        return {"svg": slim(draw(shown, PREFIX)), "items": items(shown, PREFIX), "inspector": new}

    first = inspector_data(graph, findings, enabled, view, PREFIX)
    tree = folded_tree(graph, findings, enabled, view_options.get("max_nodes", 60))
    scenes = bake(view, tree, view_of, scene_of)
    later = inspector_data(after[0], None, None, after[1], AFTER) if after else {}
    return {
        "head": head(view, after is not None),
        "panel": panel(view),
        "items": items(view, PREFIX),
        "after": items(after[1], AFTER) if after else None,
        "inspector": first | later,
        "sites": {s["id"]: [dom_id(s["id"]), *s["nodes"][:1]] for s in view["sites"]},
        "index": pack(index(graph, tree, [g["id"] for g in view["groups"]])),
        "scenes": {_key(k): text for k, text in scenes.packed.items()},
    }


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
    told = {}
    for item in (*view["boxes"], *view["groups"]):
        if item["kind"] in ("input", "output"):
            continue
        words = [*item["lines"]] if "lines" in item else [item["label"]]
        words += [item["state"]] if item["state"] else []
        told[prefix + dom_id(item["id"])] = {
            "label": ", ".join(words),
            "kind": item["kind"],
            "closed": bool(item.get("closed")),
            "group": "lines" not in item or bool(item["closed"]),
        }
    return told


# Passes -------------------------------------------------------------------------------------------------------------
def panel(view: Mapping[str, Any]) -> dict[str, Any]:
    """The passes with their sites, identical ones together, and what was declined by code."""
    rows = []
    for p in view["passes"]:
        mine = [s for s in view["sites"] if s["pass"] == p["name"] and s["state"] != "declined"]
        keys = ("name", "colour", "tint", "formula", "state", "applied", "sites", "declined")
        rows.append({k: p[k] for k in keys} | {"options": [], "groups": [_group(g) for g in alike(mine, _SAME)]})
    declined = [s for s in view["sites"] if s["state"] == "declined"]
    return {"passes": rows, "declined": [_declined(group) for group in alike(declined, ("code",))]}


def _group(sites: list[Mapping[str, Any]]) -> dict[str, Any]:
    on = sum(s["state"] == "applied" for s in sites)
    first = sites[0]
    return {
        "key": first["id"],
        "label": _label(first),
        "where": first["source"]["where"] if first["source"] else "",
        "count": len(sites),
        "ids": [s["id"] for s in sites],
        "state": "on" if on == len(sites) else "partial" if on else "off",
        "sites": [
            {
                "id": s["id"],
                "label": _label(s),
                "on": s["state"] == "applied",
                "idle": False,
                "note": "",
                "losing": False,
            }
            for s in sites
        ],
    }


def _label(site: Mapping[str, Any]) -> str:
    return site["id"].partition("@")[2] or site["id"]


def _declined(sites: list[Mapping[str, Any]]) -> dict[str, Any]:
    code = sites[0]["code"]
    keys = ("id", "pass", "text", "edit", "matched", "total")
    rows = [{k: s[k] for k in keys} | {"where": s["scope"] or _label(s)} for s in sites]
    return {"code": code, "doc": REJECTIONS.get(code, ""), "rows": rows}


# Inspector ----------------------------------------------------------------------------------------------------------
def inspector_data(
    graph: Graph,
    findings: Findings | None,
    enabled: Collection[str] | None,
    view: Mapping[str, Any],
    prefix: str,
) -> dict[str, Any]:
    """SVG id -> {title, rows of (key, text, monospaced)} for every box and frame that can be clicked."""
    sites = {s["id"]: s for s in view["sites"]}
    data = {}
    for item in (*view["boxes"], *view["groups"]):
        if item["kind"] in ("input", "output"):
            continue
        rows: list[tuple[str, str, bool]] = []
        title = item["lines"][0] if "lines" in item else item["label"]
        if item["node"] is not None:
            info = view["inspector"].get(f"n{item['node']}") or node_dict(
                graph, graph.node_by_id[item["node"]], findings, enabled
            )
            title = f"{info['primitive']} {info['name']}"
            rows += node_rows(info)
        elif item["site"] is None:
            rows += [("group", item["id"], True), ("holds", f"{item['nodes']:,} nodes", False)]
        if item["site"] is not None and item["node"] is None:
            rows += site_rows(sites[item["site"]])
        data[prefix + dom_id(item["id"])] = {"title": title, "rows": rows}
    return data
