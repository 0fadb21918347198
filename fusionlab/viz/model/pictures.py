"""Pictures of one graph: folded, with some groups open. What no click changes is worked out once and kept."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Mapping
from typing import Any

from fusionlab.fusers.engine.outcomes import Candidate, Rejection
from fusionlab.fusers.report.findings import Findings
from fusionlab.graph.cost.cost import quantity
from fusionlab.graph.jax_compat import names_an_axis
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.ir import Literal, Node, Value, literal_text, type_text
from fusionlab.graph.program.meshes import collective_axes, collective_bytes, sharding_text

from ..markup import short
from ..palette import colour_of, pass_of_op, tint_of
from .flow import Flow, flow
from .folding import LAYOUT_OPS, FoldFacts, fold_graph
from .groups import Group, NodeBox, nodes_in
from .node_data import node_dict
from .opening import GroupTree, sites_inside
from .sites import ShownSite, drawn_sites, is_applied
from .summaries import summary

_LABEL = 48
_MAX_INPUTS = 12
_MAX_OUTPUTS = 6


class Pictures:
    """View models of one graph and what was found in it, as one clicks through them.

    The first view reads the whole program; another fold costs what is visible. Switching sites on and off folds the program again,
    because copies of a block are alike only while their sites are in the same state. Safe to use from several threads.
    """

    def __init__(self, graph: Graph, findings: Findings | None = None):
        self.graph, self.findings = graph, findings
        self._lock = threading.Lock()
        self._known = FoldFacts()
        self._flow: Flow | None = None
        self._touching: dict[int, list[Candidate | Rejection]] | None = None
        self._folded: tuple[Any, GroupTree, list[ShownSite]] | None = None

    def view(
        self,
        *,
        enabled: Collection[str] | None = (),
        evidence: Any = None,
        formulas: Mapping[str, str] | None = None,
        expanded: Collection[str] | str = (),
        collapsed: Collection[str] = (),
        reveal: Collection[int] = (),
        max_nodes: int = 60,
        structures: bool = False,
    ) -> dict[str, Any]:
        """The view model, as `view_model` gives it; its `structures` are left empty unless asked for: looking for them takes as long as
        the search itself."""
        with self._lock:
            tree, sites = self._tree(enabled, max_nodes)
            tree.open(expanded=expanded, collapsed=collapsed, reveal=reveal, max_nodes=max_nodes)
            picture = _Picture(self.graph, tree, sites)
            shown = [self.graph.node_by_id[b["node"]] for b in picture.boxes if b["node"] is not None]
            touching = self._touched()
            place, twin = picture.place, tree.twin
            revealed = {f"n{nid}": place[twin(nid)] for nid in reveal if twin(nid) in place}
            inspector = {
                f"n{n.id}": node_dict(self.graph, n, self.findings, enabled, touching.get(n.id, ())) for n in shown
            }
        return summary(self.graph, self.findings, enabled, evidence, formulas, structures) | {
            "groups": picture.groups,
            "boxes": picture.boxes,
            "edges": picture.edges,
            "revealed": revealed,
            "hidden_inputs": picture.hidden_inputs,
            "inspector": inspector,
        }

    def _tree(self, enabled: Collection[str] | None, max_nodes: int) -> tuple[GroupTree, list[ShownSite]]:
        """The folded program with these sites on, all that were asked for last if they are the same."""
        found = self.findings.candidates if self.findings is not None else ()
        key = (frozenset(c.id for c in found if is_applied(c, enabled)), max_nodes)
        if self._folded is None or self._folded[0] != key:
            if self._flow is None:
                self._flow = flow(self.graph)
            sites = drawn_sites(self.graph, self.findings, enabled)
            root = fold_graph(self.graph, sites, max_nodes=max_nodes, known=self._known)
            self._folded = key, GroupTree(root, self._flow), sites
        return self._folded[1], self._folded[2]

    def _touched(self) -> dict[int, list[Candidate | Rejection]]:
        """Node id -> the sites that touch it, as `Findings.of_node` says."""
        if self._touching is None:
            self._touching = {}
            for c in self.findings.candidates if self.findings is not None else ():
                for nid in c.all_node_ids:
                    self._touching.setdefault(nid, []).append(c)
            for r in self.findings.rejections if self.findings is not None else ():
                for nid in r.site_ids.union(r.node_ids):
                    self._touching.setdefault(nid, []).append(r)
        return self._touching


class _Picture:
    """Walks the opened tree: groups, boxes, then the edges between what is visible."""

    def __init__(self, graph: Graph, tree: GroupTree, sites: list[ShownSite]):
        self.graph, self.tree = graph, tree
        self.groups: list[dict[str, Any]] = []
        self.boxes: list[dict[str, Any]] = []
        self.edges: list[dict[str, Any]] = []
        self.place: dict[int, str] = {}
        self.opened: set[str] = set()
        self.hidden_inputs = 0
        taken = frozenset(nid for s in sites if isinstance(s.record, Candidate) for nid in s.record.node_ids)
        self.undrawn: dict[int, ShownSite] = {nid: s for s in sites if not s.drawn for nid in _marked(s, taken)}
        self.walk(tree.root)
        self.connect()

    def walk(self, group: Group, parent: str | None = None) -> None:
        for item in group.children:
            if isinstance(item, NodeBox):
                self.leaf(item, parent)
            elif item.open:
                self.frame(item, parent)
                self.walk(item, item.id)
            else:
                self.closed(item, parent)

    def frame(self, group: Group, parent: str | None) -> None:
        self.opened.add(group.id)
        self.groups.append(
            {
                "id": group.id,
                "parent": parent,
                "kind": group.kind,
                "label": _group_label(group),
                "node": group.node.id if group.node else None,
                "nodes": _size(group),
                "members": group.ranges,
                "count": group.count,
            }
            | _look(group.site or (self.undrawn.get(group.node.id) if group.node else None))
        )

    def closed(self, group: Group, parent: str | None) -> None:
        self.place.update(dict.fromkeys(group.shown, group.id))
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
                "members": group.ranges,
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

    def sites_inside(self, group: Group) -> list[ShownSite]:
        """The sites folded away in a closed group, hidden copies left out."""
        drawn = [s for c in group.children for s in sites_inside(c)]
        marked = {s.id: s for nid in group.shown if (s := self.undrawn.get(nid)) is not None} if self.undrawn else {}
        return drawn + [s for s in marked.values() if s not in drawn]

    def leaf(self, leaf: NodeBox, parent: str | None) -> None:
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
                "members": [[node.id, node.id]],
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

    def connect(self) -> None:
        inputs, outputs = self.ends()
        edges = self.visible_edges(inputs, outputs)
        used = set(itertools.chain.from_iterable(edges))
        for key, index in (*inputs.items(), *outputs.items()):
            if key in used:
                self.boxes.append(self.end_box(key, index))
        self.edges = [{"from": a, "to": b, "type": t, "count": n} for (a, b), (t, n) in edges.items()]

    def visible_edges(
        self, inputs: Mapping[str, int], outputs: Mapping[str, int]
    ) -> dict[tuple[str, str], tuple[str, int]]:
        """(box, box) -> the type of the first value that flows there, and how many do."""
        edges: dict[tuple[str, str], tuple[str, int]] = {}
        opened = self.opened
        for link in self.tree.links:
            if link.copies and not opened.isdisjoint(link.copies):
                continue  # a parameter of a hidden copy
            start, end = self.box_of(link.start, inputs), self.box_of(link.end, outputs)
            if start is None or end is None or start == end:
                continue
            type_, count = edges.get((start, end), (link.type, 0))
            edges[start, end] = type_, count + link.count
        return edges

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

    def box_of(self, key: Any, shown: Mapping[str, int]) -> str | None:
        if isinstance(key, int):
            return self.place.get(key)
        kind, index = key
        name = f"{kind}{index}"
        if kind == "out" and name not in shown:
            return "out0"
        return name if name in shown else None

    def end_box(self, key: str, index: int) -> dict[str, Any]:
        is_input = key.startswith("in")
        outs = self.graph.top.outputs
        if is_input:
            lines = [self.graph.in_names[index], type_text(self.graph.top.inputs[index].aval)]
            lines += (
                [sharding] if (sharding := sharding_text(next(iter(self.graph.in_shardings[index:]), None))) else []
            )
        elif len(outs) > _MAX_OUTPUTS:
            lines = [f"{len(outs)} results"]
        else:
            lines = ["returned" if len(outs) == 1 else f"result {index}", type_text(outs[index].aval)]
        return {
            "id": key,
            "parent": None,
            "kind": "input" if is_input else "output",
            "nodes": 0,
            "members": [],
            "lines": [short(x, _LABEL) for x in lines],
            "node": None,
            "tooltip": "argument" if is_input else "result",
            "fused": False,
            "quiet": False,
            "closed": False,
            "count": 1,
        } | _look(None)


def _marked(site: ShownSite, taken: frozenset[int]) -> frozenset[int]:
    """The nodes that stand for a declined site whose outline would cross another: the guilty ones, or where a candidate took them,
    the rest of it. None for what lost to a candidate."""
    record = site.record
    if isinstance(record, Candidate):
        return frozenset()
    return (frozenset(record.node_ids) - taken) or (site.members - taken if record.winner is None else frozenset())


def _look(site: ShownSite | None) -> dict[str, Any]:
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
    return sum(map(nodes_in, group.children))


def _inside_text(sites: list[ShownSite]) -> list[str]:
    """What a closed group hides: "2 sites, 1 declined inside"."""
    states = [s.state for s in sites]
    declined = states.count("declined")
    found = len(states) - declined
    parts = [f"{found} site" + ("s" if found != 1 else "")] if found else []
    parts += [f"{declined} declined"] if declined else []
    return [", ".join(parts) + " inside"] if parts else []


def _node_lines(node: Node) -> list[str]:
    constants = [literal_text(a.val) for a in node.inputs if isinstance(a, Literal)]
    first = " ".join([node.primitive, *constants, *_details(node)])
    if axes := collective_axes(node):
        first += f" over {', '.join(axes)}: {quantity(collective_bytes(node))}B"
    lines = [f"{v.name} {type_text(v.aval)}" for v in node.outputs[:1]]
    more = f" +{len(node.outputs) - 1}" if len(node.outputs) > 1 else ""
    return [short(first, _LABEL), *(short(line + more, _LABEL) for line in lines)]


def _details(node: Node) -> list[str]:
    """What a node's name does not tell of it: the mesh axes that it names, where it is no collective; which part of a layer it is."""
    plain = names_an_axis(node.eqn) and not collective_axes(node)
    axes = node.params.get("axes", node.params.get("axis_name", ())) if plain else ()
    named = axes if isinstance(axes, tuple | list) else (axes,)
    part = node.params.get("part") if pass_of_op(node.primitive) else None
    return [*map(str, named), *([str(part).replace("_", "-")] if part else [])]


def _tooltip(node: Node) -> str:
    inputs = ", ".join(f"{a.name}:{type_text(a.aval)}" if isinstance(a, Value) else repr(a) for a in node.inputs)
    where = f"{node.source.short}: {node.source.text}" if node.source else ""
    return "\n".join(short(x, 200) for x in (f"{node.primitive}({inputs})", node.scope, where) if x)
