"""The view model: everything a picture shows, as plain JSON-able dicts. Widget, HTML, DOT and JSON all read this one.

Top keys: `format`, `version`, `title`, `header` (one sentence), `counts`, `passes`, `sites` (the ledger's rows), `structures`,
`groups`, `boxes`, `edges` (the visible, folded graph), `revealed`, `inspector` (node id -> dict), `hidden_inputs`,
`evidence`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fusionlab.fusers.findings import Candidate, Findings, Rejection
from fusionlab.graph.ir import Graph, Literal, Node, Value, literal_text, type_text

from .evidence_view import evidence_dict, headline
from .flow import flow
from .folding import LAYOUT_OPS, Group, Item, Leaf, fold, leaves, members
from .inspector import node_dict, short, site_dict, source_dict
from .palette import colour_of, pass_of_op, tint_of
from .sites import Site, drawn_sites, is_applied

FORMAT, VERSION = "fusionlab.view", 1
_LABEL = 48
_MAX_INPUTS = 12
_MAX_OUTPUTS = 6


def view_model(
    graph: Graph,
    findings: Findings | None = None,
    *,
    enabled: Collection[str] | None = (),
    evidence: Any = None,
    formulas: Mapping[str, str] | None = None,
    expanded: Collection[str] | str = (),
    collapsed: Collection[str] = (),
    reveal: Collection[int] = (),
    max_nodes: int = 60,
) -> dict[str, Any]:
    """Builds the view model of a graph and what was found in it.

    Args:
      graph: what is drawn.
      findings: candidates and rejections over this graph, or None.
      enabled: ids of the candidates that are applied; None means all of them that are not idle.
      evidence: a measured comparison, or None.
      formulas: pass name -> what it computes.
      expanded, collapsed: group ids to open or close ("all" opens everything).
      reveal: ids of nodes that have to be visible; `revealed` then says in which box each one is.
      max_nodes: about how many boxes may be visible; sites are shown beyond it.
    """
    sites = drawn_sites(graph, findings, enabled)
    root = fold(graph, sites, expanded=expanded, collapsed=collapsed, reveal=reveal, max_nodes=max_nodes)
    picture = _Picture(graph, sites)
    picture.walk(root)
    picture.connect()
    shown = [graph.node_by_id[b["node"]] for b in picture.boxes if b["node"] is not None]
    return summary(graph, findings, enabled, evidence, formulas) | {
        "groups": picture.groups,
        "boxes": picture.boxes,
        "edges": picture.edges,
        "revealed": {f"n{nid}": picture.place[nid] for nid in reveal if nid in picture.place},
        "hidden_inputs": picture.hidden_inputs,
        "inspector": {f"n{n.id}": node_dict(graph, n, findings, enabled) for n in shown},
    }


def summary(
    graph: Graph,
    findings: Findings | None = None,
    enabled: Collection[str] | None = (),
    evidence: Any = None,
    formulas: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The view model without the picture: header, counts, passes, sites and evidence."""
    counts = _counts(graph, findings, enabled)
    measured = evidence_dict(evidence)
    return {
        "format": FORMAT,
        "version": VERSION,
        "title": graph.name,
        "header": header(graph, counts, findings, measured),
        "counts": counts,
        "passes": _passes(findings, enabled, formulas or {}),
        "sites": _ledger(findings, enabled),
        "structures": _structures(findings),
        "evidence": measured,
    }


def _structures(findings: Findings | None) -> list[dict[str, Any]]:
    """What the sites are parts of: `to_dict` of each structure, its source as a dict."""
    found = findings.structures if findings is not None else ()
    return [s.to_dict() | {"source": source_dict(s.source)} for s in found]


def header(graph: Graph, counts: Mapping[str, int], findings: Findings | None, measured: Mapping | None) -> str:
    """One sentence that tells the whole truth: sizes, what can be and is fused, and a speed only with its interval."""
    parts = [f"{graph.name} · {counts['nodes']:,} nodes"]
    if findings is not None:
        device = getattr(findings, "device", "")
        parts += [device] if device else []
        applied, found = counts["applied"], counts["applied"] + counts["candidate"]
        here = f" ({'all' if applied == found else applied or 'none'} applied here)" if found else ""
        parts += [f"{found} subgraph{'s' if found != 1 else ''} can be fused{here} · {counts['declined']} declined"]
        parts += [headline(measured)]
    return " · ".join(parts)


def sentence(counts: Mapping[str, int], measured: Mapping[str, Any] | None) -> str:
    """What stands on top of the explorer, beside the program's name and the device."""
    found = counts["applied"] + counts["candidate"]
    could = f"{counts['applied']} fused · {counts['candidate']} could be" if found else "nothing can be fused"
    return f"{counts['nodes']:,} nodes · {could} · {counts['declined']} declined · {headline(measured, brief=True)}"


def _counts(graph: Graph, findings: Findings | None, enabled: Collection[str] | None) -> dict[str, int]:
    found = findings.candidates if findings else ()
    applied = sum(is_applied(c, enabled) for c in found)
    declined = len(findings.rejections) if findings else 0
    return {
        "nodes": graph.node_count,
        "applied": applied,
        "candidate": len(found) - applied,
        "declined": declined,
    }


def _passes(
    findings: Findings | None, enabled: Collection[str] | None, formulas: Mapping[str, str]
) -> list[dict[str, Any]]:
    rows = []
    for name in findings.passes if findings else ():
        assert findings is not None
        mine = [c for c in findings.candidates if c.pass_name == name]
        ids, on = [c.id for c in mine], sum(is_applied(c, enabled) for c in mine)
        state = "none" if not ids else "on" if on == len(ids) else "partial" if on else "off"
        rows.append(
            {
                "name": name,
                "colour": colour_of(name),
                "tint": tint_of(name),
                "formula": formulas.get(name, ""),
                "sites": len(ids),
                "applied": on,
                "declined": sum(r.pass_name == name for r in findings.rejections),
                "state": state,
                "site_ids": ids,
            }
        )
    return rows


def _ledger(findings: Findings | None, enabled: Collection[str] | None) -> list[dict[str, Any]]:
    records: list[Candidate | Rejection] = [*findings.candidates, *findings.rejections] if findings else []
    return [site_dict(r, enabled) for r in records]


class _Picture:
    """Walks the folded tree: groups, boxes, then the edges between what is visible."""

    def __init__(self, graph: Graph, sites: list[Site]):
        self.graph = graph
        self.groups: list[dict[str, Any]] = []
        self.boxes: list[dict[str, Any]] = []
        self.edges: list[dict[str, Any]] = []
        self.place: dict[int, str] = {}
        self.copies: dict[int, tuple[tuple[str, int], ...]] = {}
        self.hidden_inputs = 0
        taken = frozenset(nid for s in sites if isinstance(s.record, Candidate) for nid in s.record.node_ids)
        self.undrawn: dict[int, Site] = {nid: s for s in sites if not s.drawn for nid in _marked(s, taken)}

    def walk(self, group: Group, parent: str | None = None) -> None:
        for item in group.children:
            if isinstance(item, Leaf):
                self.leaf(item, parent)
            elif item.open:
                self.frame(item, parent)
                self.walk(item, item.id)
                self.copy(item)
            else:
                self.closed(item, parent)

    def frame(self, group: Group, parent: str | None) -> None:
        self.groups.append(
            {
                "id": group.id,
                "parent": parent,
                "kind": group.kind,
                "label": _group_label(group),
                "node": group.node.id if group.node else None,
                "nodes": _size(group),
                "count": group.count,
            }
            | _look(group.site or (self.undrawn.get(group.node.id) if group.node else None))
        )

    def closed(self, group: Group, parent: str | None) -> None:
        ids = list(members([group]))
        for nid in ids:
            self.place[nid] = group.id
        inside = self.sites_inside(group)
        # What was declined inside is outlined on the box it is folded into.
        shown = group.site or next((s for s in inside if s.state == "declined"), None)
        lines = [_group_label(group), f"{_size(group):,} node" + ("s" if _size(group) != 1 else "")]
        lines += _inside_text(inside) if group.site is None else []
        self.boxes.append(
            {
                "id": group.id,
                "parent": parent,
                "kind": group.kind,
                "nodes": _size(group),
                "lines": lines,
                "node": group.node.id if group.node else None,
                "tooltip": _tooltip(group.node) if group.node else short(group.id, 200),
                "fused": False,
                "quiet": False,
                "closed": True,
                "count": group.count,
            }
            | _look(shown)
        )

    def sites_inside(self, group: Group) -> list[Site]:
        """The sites folded away in a closed group, hidden copies left out."""
        drawn = [s for c in group.children for s in _sites_inside(c)]
        nodes = [*([group.node] if group.node else []), *leaves(group.children)]
        marked = {s.id: s for n in nodes if (s := self.undrawn.get(n.id)) is not None}
        return drawn + [s for s in marked.values() if s not in drawn]

    def leaf(self, leaf: Leaf, parent: str | None) -> None:
        node = leaf.node
        self.place[node.id] = f"n{node.id}"
        site = leaf.site or self.undrawn.get(node.id)
        fused = pass_of_op(node.primitive)
        look = _look(site)
        if fused and not look["pass"]:
            look |= {"pass": fused, "colour": colour_of(fused), "tint": tint_of(fused)}
        self.boxes.append(
            {
                "id": f"n{node.id}",
                "parent": parent,
                "kind": "node",
                "nodes": 1,
                "lines": _node_lines(node),
                "node": node.id,
                "tooltip": _tooltip(node),
                "fused": fused is not None,
                "quiet": node.primitive in LAYOUT_OPS,
                "closed": False,
                "count": 1,
            }
            | look
        )

    def copy(self, group: Group) -> None:
        """Hidden copies of an open run stand where the shown one stands."""
        own = [group.node.id] if group.node and group.kind != "run" else []
        shown = own + list(members(group.children))
        for k, unit in enumerate(([], *group.hidden)):
            for nid, twin in zip(members(unit) if k else shown, shown, strict=True):
                if twin in self.place:
                    self.place[nid] = self.place[twin]
                self.copies[nid] = (*self.copies.get(nid, ()), (group.id, k))

    def connect(self) -> None:
        edges: dict[tuple[str, str], tuple[str, int]] = {}
        inputs, outputs = self.ends()
        used: set[str] = set()
        for producer, reader, value in flow(self.graph):
            start, end = self.box_of(producer, inputs, reader), self.box_of(reader, outputs, None)
            if start is None or end is None or start == end or self.carried(producer, reader):
                continue
            used |= {start, end}
            text, n = edges.get((start, end), (type_text(value.aval), 0))
            edges[start, end] = (text, n + 1)
        for key, index in (*inputs.items(), *outputs.items()):
            if key in used:
                self.boxes.append(self.end_box(key, index))
        self.edges = [{"from": a, "to": b, "type": t, "count": n} for (a, b), (t, n) in edges.items()]

    def ends(self) -> tuple[dict[str, int], dict[str, int]]:
        """Arguments and results that get a box; a model's many parameters would hide it, so they get none."""
        names = self.graph.in_names
        wanted = range(len(names))
        if len(names) > _MAX_INPUTS:
            wanted = [k for k, name in enumerate(names) if name.isidentifier()]
            wanted = wanted if len(wanted) <= _MAX_INPUTS else []
        self.hidden_inputs = len(names) - len(wanted)
        outs = self.graph.top.outputs
        kept = range(len(outs)) if len(outs) <= _MAX_OUTPUTS else range(1)
        return {f"in{k}": k for k in wanted}, {f"out{k}": k for k in kept}

    def box_of(self, key: Any, shown: Mapping[str, int], reader: Any) -> str | None:
        if isinstance(key, int):
            return self.place.get(key)
        kind, index = key
        if kind == "in" and isinstance(reader, int) and any(k for _, k in self.copies.get(reader, ())):
            return None  # a parameter of a hidden copy
        name = f"{kind}{index}"
        if kind == "out" and name not in shown:
            return "out0"
        return name if name in shown else None

    def carried(self, producer: Any, reader: Any) -> bool:
        """From one copy of a run to the next: the frame says so, a line back to its own start would confuse."""
        if not isinstance(producer, int) or not isinstance(reader, int):
            return False
        here, there = dict(self.copies.get(producer, ())), dict(self.copies.get(reader, ()))
        return any(here[run] != there[run] for run in here.keys() & there.keys())

    def end_box(self, key: str, index: int) -> dict[str, Any]:
        is_input = key.startswith("in")
        outs = self.graph.top.outputs
        if is_input:
            lines = [self.graph.in_names[index], type_text(self.graph.top.inputs[index].aval)]
        elif len(outs) > _MAX_OUTPUTS:
            lines = [f"{len(outs)} results"]
        else:
            lines = ["returned" if len(outs) == 1 else f"result {index}", type_text(outs[index].aval)]
        return {
            "id": key,
            "parent": None,
            "kind": "input" if is_input else "output",
            "nodes": 0,
            "lines": [short(x, _LABEL) for x in lines],
            "node": None,
            "tooltip": "argument" if is_input else "result",
            "fused": False,
            "quiet": False,
            "closed": False,
            "count": 1,
        } | _look(None)


def _marked(site: Site, taken: frozenset[int]) -> frozenset[int]:
    """The nodes that stand for a declined site whose outline would cross another: the guilty ones, or where a candidate took them,
    the rest of it. None for what lost to a candidate."""
    record = site.record
    if isinstance(record, Candidate):
        return frozenset()
    return (frozenset(record.node_ids) - taken) or (site.members - taken if record.winner is None else frozenset())


def _look(site: Site | None) -> dict[str, Any]:
    """What a box or frame owes to its site."""
    if site is None:
        return {"site": None, "pass": None, "state": None, "colour": None, "tint": None}
    return {
        "site": site.id,
        "pass": site.pass_name,
        "state": site.state,
        "colour": colour_of(site.pass_name),
        "tint": tint_of(site.pass_name),
    }


def _group_label(group: Group) -> str:
    label = group.label
    if group.site is not None and isinstance(group.site.record, Rejection):
        label = f"{label}  {group.site.record.matched}/{group.site.record.total}"
    return short(label, _LABEL) + (f"  ×{group.count} identical" if group.count > 1 else "")


def _size(group: Group) -> int:
    """Node count of one copy, the region's own node not counted."""
    return sum(1 for _ in members(group.children))


def _inside_text(sites: list[Site]) -> list[str]:
    """What a closed group hides: "2 sites, 1 declined inside"."""
    states = [s.state for s in sites]
    declined = states.count("declined")
    found = len(states) - declined
    parts = [f"{found} site" + ("s" if found != 1 else "")] if found else []
    parts += [f"{declined} declined"] if declined else []
    return [", ".join(parts) + " inside"] if parts else []


def _sites_inside(item: Item) -> list[Site]:
    own = [item.site] if item.site else []
    return own if isinstance(item, Leaf) else own + [s for c in item.children for s in _sites_inside(c)]


def _node_lines(node: Node) -> list[str]:
    constants = [literal_text(a.val) for a in node.inputs if isinstance(a, Literal)]
    first = " ".join([node.primitive, *constants])
    lines = [f"{v.name} {type_text(v.aval)}" for v in node.outputs[:1]]
    more = f" +{len(node.outputs) - 1}" if len(node.outputs) > 1 else ""
    return [short(first, _LABEL), *(short(line + more, _LABEL) for line in lines)]


def _tooltip(node: Node) -> str:
    inputs = ", ".join(f"{a.name}:{type_text(a.aval)}" if isinstance(a, Value) else repr(a) for a in node.inputs)
    where = f"{node.source.short}: {node.source.text}" if node.source else ""
    return "\n".join(short(x, 200) for x in (f"{node.primitive}({inputs})", node.scope, where) if x)


class Pictures:
    def __init__(self, graph, findings):
        self.graph, self.findings = graph, findings
        self.place = {}

    def view(self, *, enabled=(), expanded=(), collapsed=(), reveal=()):
        sites = drawn_sites(self.graph, self.findings, enabled)
        root = fold(self.graph, sites, expanded=expanded, collapsed=collapsed, reveal=reveal)
        pic = _Picture(self.graph, sites)
        pic.walk(root)
        pic.connect()
        self.place = pic.place
        self._root = root
        return view_model(
            self.graph, self.findings, enabled=enabled, expanded=expanded, collapsed=collapsed, reveal=reveal
        )

    def members(self, gid):
        return tuple(n for n, p in self.place.items() if p == gid)
