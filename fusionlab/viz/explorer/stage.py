"""The picture of an explorer between two changes: what is open, what has to be visible, and the drawing of it, made once."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from fusionlab.fusers.report.findings import Findings
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.xla.modules import CompiledModule

from ..draw.dot import dom_id
from ..draw.hulls import hulls, with_hulls
from ..html.page import ID_PREFIX, items
from ..html.report import picture
from ..model.pictures import Pictures
from ..model.selection import Selection
from ..model.view_model import members_of

_REVEALED = 3  # selections whose surroundings stay open
_MOST_REVEALED = 12  # nodes of one selection that are opened to

Drawn = tuple[Graph, Findings | None, frozenset[str]]


@dataclass
class _Folds:
    """What was opened and closed by hand, and the nodes of the last selections, which have to be visible."""

    expanded: set[str] = field(default_factory=set)
    collapsed: set[str] = field(default_factory=set)
    reveal: tuple[tuple[int, ...], ...] = ()


class Stage:
    """What is drawn. `shown` is "before" or "after"; `hulls` asks for the kernels that XLA made to be outlined."""

    def __init__(self, graph: Graph, engine: str | None = None) -> None:
        self.shown = "before"
        self.hulls = False
        self._groups: weakref.WeakKeyDictionary[Graph, dict[str, Collection[int]]] = weakref.WeakKeyDictionary()
        self._engine = engine
        self._hull_names: dict[str, str] = {}
        self._pictures: tuple[Any, Any] = (None, None)
        self._view: tuple[Any, dict[str, Any]] = (None, {})
        self._svg: tuple[Any, str] = (None, "")
        self._placed: tuple[Any, dict[int, str]] = (None, {})
        self._folds = {"before": _Folds(), "after": _Folds()}

    # What is open --------------------------------------------------------------------------------------------------
    def fold(self, drawn: Drawn, item: str) -> None:
        """Opens a closed group, closes an open one; anything else is no group and stays."""
        found = self._item(drawn, item)
        if found is None or found["kind"] in ("node", "input", "output"):
            return
        closed, group, folds = bool(found.get("closed")), found["id"], self._folds[self.shown]
        (folds.expanded if closed else folds.collapsed).add(group)
        (folds.collapsed if closed else folds.expanded).discard(group)
        if not closed:
            folds.reveal = ()

    def reveal(self, drawn: Drawn, nodes: Collection[int]) -> None:
        """Opens what lies around these nodes, unless they are all to be seen."""
        wanted = tuple(nodes)[:_MOST_REVEALED]
        place = self._place(drawn)
        closed = {b["id"] for b in self.view(drawn)["boxes"] if b["closed"] and b["node"] not in wanted}
        if any(place.get(n) in closed for n in wanted):
            folds = self._folds[self.shown]
            folds.reveal = (*folds.reveal, wanted)[-_REVEALED:]

    # The drawing ---------------------------------------------------------------------------------------------------
    def view(self, drawn: Drawn) -> dict[str, Any]:
        """The view model of what is visible; the same object until something changes."""
        graph, findings, enabled = drawn
        now = self._folds[self.shown]
        folds = (frozenset(now.expanded), frozenset(now.collapsed), now.reveal)
        key = (id(graph), id(findings), enabled, folds)
        if self._view[0] != key:
            pictures = self._of(graph, findings)
            reveal = tuple(n for nodes in now.reveal for n in nodes if n in graph.node_by_id)
            view = pictures.view(enabled=enabled, expanded=folds[0], collapsed=folds[1], reveal=reveal)
            self._view = key, view
        return self._view[1]

    def scene(self, drawn: Drawn, compiled: CompiledModule | None = None) -> dict[str, Any]:
        """SVG text, what can be clicked in it, and the names of the outlined kernels."""
        view = self.view(drawn)
        if self._svg[0] != self._view[0]:
            self._svg = self._view[0], picture(view, ID_PREFIX, self._engine)
        outlined = hulls(compiled, view) if self.hulls and compiled is not None else []
        self._hull_names = {ID_PREFIX + h["id"]: h["kernel"] for h in outlined}
        svg = with_hulls(self._svg[1], outlined, ID_PREFIX) if outlined else self._svg[1]
        return {
            "svg": svg,
            "items": items(view, ID_PREFIX),
            "hull_items": {ID_PREFIX + h["id"]: h["label"] for h in outlined},
        }

    def _of(self, graph: Graph, findings: Findings | None) -> Pictures:
        key = (id(graph), id(findings))
        if self._pictures[0] != key:
            self._pictures = key, Pictures(graph, findings)
        return self._pictures[1]

    # Names ---------------------------------------------------------------------------------------------------------
    def id_of(self, name: str) -> str:
        """The id in the picture of a box or group."""
        return ID_PREFIX + dom_id(name)

    def clicked(self, drawn: Drawn, item: str) -> str | None:
        """What a click on an id in the picture selects: a site's id, "n12", a kernel or a group's id; None for what is not there."""
        if item in self._hull_names:
            return self._hull_names[item]
        found = self._item(drawn, item)
        if found is None:
            return None
        if found["kind"] == "site" and found["site"] is not None:
            return found["site"]
        if found["node"] is not None:
            return f"n{found['node']}"
        self._groups.setdefault(drawn[0], {})[found["id"]] = members_of(found)
        return found["id"]

    def groups(self, graph: Graph) -> dict[str, Collection[int]]:
        """The groups of this graph that were clicked, as id -> node ids: they can be selected again."""
        return self._groups.get(graph, {})

    def ids(self, drawn: Drawn, chosen: Selection) -> list[str]:
        """Ids in the picture of what is selected: its own outline if it has one, else the boxes that hold its nodes."""
        view = self.view(drawn)
        names = {i["id"] for i in (*view["groups"], *view["boxes"])}
        if chosen.name in names:
            return [self.id_of(chosen.name)]
        return self.places(drawn, chosen.nodes)

    def places(self, drawn: Drawn, nodes: Iterable[int]) -> list[str]:
        """Ids in the picture of the boxes that hold these nodes, each once."""
        place, shown = self._place(drawn), self._of(drawn[0], drawn[1]).shown
        found = (place.get(n) or place.get(shown(n)) for n in nodes)
        return list(dict.fromkeys(self.id_of(box) for box in found if box is not None))

    def _place(self, drawn: Drawn) -> dict[int, str]:
        """Node id -> the box it is seen in; the frame of an open region for the region's own node."""
        view = self.view(drawn)
        if self._placed[0] is not view:
            place = {g["node"]: g["id"] for g in view["groups"] if g["node"] is not None}
            place |= {n: box["id"] for box in view["boxes"] if box["nodes"] for n in members_of(box)}
            self._placed = view, place
        return self._placed[1]

    def _item(self, drawn: Drawn, item: str) -> dict[str, Any] | None:
        view = self.view(drawn)
        return next((i for i in (*view["boxes"], *view["groups"]) if item in (i["id"], self.id_of(i["id"]))), None)
