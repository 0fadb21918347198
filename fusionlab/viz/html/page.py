"""The data of the standalone page: the traits of the widget, baked into plain data.

The page draws with the widget's own module (`explorer.js`); `record.js` replaces the kernel. Controls that need a kernel are
shown, switched off, with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from fusionlab.fusers.report.findings import Findings
from fusionlab.graph.cost.cost import cost_of

from ..cards.album import Album
from ..cards.card import Card
from ..cards.layout.opened import opened_name
from ..markup import ID_PREFIX
from ..model.panel import panel as panel_of
from .baked import MAX_BYTES, MAX_SECONDS, bake, index, packed_json
from .dearest import dearest_html, dearest_title
from .inspector import inspect
from .outline import outline

AFTER_ID_PREFIX = "fl-after-"
MAX_PAGE = 1_350_000  # bytes that a page is filled up to with pictures; measurements and tables come first
OFFLINE = "A record. Switching sites and measuring need a live kernel: fusionlab.explore(fn, *args)."
_MOST_NAMES = 400  # sites, and source lines, that are told of without being drawn


def page_data(
    album: Album,
    enabled: Collection[str] | None,
    view: Mapping[str, Any],
    after: Album | None = None,
    used: int = 0,
    panel: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The explorer's traits for a page, and the pictures it can open.

    Args:
      album, enabled: of the graph and what was found in it, closed: the page itself holds this picture.
      view: their `summary`.
      after: of the fused graph, whose picture the page holds too.
      used: bytes of the page without these data; pictures are baked until the page has `MAX_PAGE`.
      panel: of a live explorer (`Session.panel`); None for what was found.
    """
    findings = album.findings
    told = {
        "head": head(view, after is not None),
        "panel": panel or _found_panel(view, findings),
        "items": items(album, enabled, ID_PREFIX),
        "after": _after(after) if after is not None else None,
    }
    return told | record_data(album, enabled, view, room=MAX_PAGE - used - len(json.dumps(told)))


def _after(album: Album) -> dict[str, Any]:
    """The record of the fused graph: its own costs, texts and outline; none of its cards opens. Its ids are those of `record_data`, which
    differ in the page (`AFTER_ID_PREFIX`) only until the explorer draws one picture at a time."""
    return {"items": items(album, None, ID_PREFIX)} | record_data(album, None, {"sites": ()}, room=0)


def _found_panel(view: Mapping[str, Any], findings: Findings | None) -> dict[str, Any]:
    """The toggles of what was found. Findings do not hold the options that they were asked with, so none are shown."""
    told = panel_of(view, None, {}, [c.id for c in findings.candidates if c.idle] if findings else ())
    return told | {"passes": [each | {"options": []} for each in told["passes"]]}


def record_data(
    album: Album,
    enabled: Collection[str] | None,
    view: Mapping[str, Any],
    room: int = MAX_BYTES,
    max_seconds: float = MAX_SECONDS,
) -> dict[str, Any]:
    """The data that replaces Python (`record.js`): texts of the inspector, an index of all nodes, the outline, and the pictures of
    what can be opened.

    Args:
      album, enabled, view: as for `page_data`.
      room: bytes that it may have altogether; the pictures have what the rest leaves.
      max_seconds: of drawing pictures.
    """
    overview = album.overview(enabled)
    teller = Teller(album, enabled, ID_PREFIX)

    def scene() -> dict[str, Any]:
        panes = teller.shown()
        return {"svg": album.svg(enabled, ID_PREFIX), "items": items(album, enabled, ID_PREFIX), "inspector": panes}

    data = {
        "dearest": (shown := dearest_html(overview, searched=album.findings is not None)),
        "title": dearest_title(overview) if shown else "",
        "outline": outline(overview, [card.id for card in overview.cards()]),
        "inspector": packed_json({**teller.shown(), **teller.names()}),
        # Sites are of the program as written: a fused graph numbers other nodes.
        "sites": {s["id"]: s["nodes"][0] for s in view["sites"] if s["nodes"]} if album.findings is not None else {},
        "index": packed_json(index(album, enabled)),
    }
    left = min(MAX_BYTES, room - len(json.dumps(data)))
    return data | {"scenes": bake(album, enabled, scene, max_bytes=left, max_seconds=max_seconds).packed}


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


def items(album: Album, enabled: Collection[str] | None, prefix: str) -> dict[str, dict[str, Any]]:
    """SVG id -> spoken label, kind and whether it is a group, for all that can be selected."""
    return {prefix + name: item for name, item in album.items(enabled).items()}


# Inspector ----------------------------------------------------------------------------------------------------------
class Teller:
    """The inspector's pages for things of one graph, each text once: name in the page -> {title, html, near}."""

    def __init__(self, album: Album, enabled: Collection[str] | None, prefix: str) -> None:
        self.album, self.enabled, self.prefix = album, enabled, prefix
        findings = album.findings
        self._costs = findings.cost() if findings is not None else cost_of(album.graph)
        self._named: set[str] = set()

    def shown(self) -> dict[str, Any]:
        """For every card of the album's picture that was not included before."""
        panes: dict[str, Any] = {}
        for name in self.album.items(self.enabled):
            card = self.album.card(self.enabled, name)
            if card is not None:
                self._tell(panes, self.prefix + name, _told(card), f"{card.prefix} {opened_name(card)}".strip())
        return panes

    def names(self) -> dict[str, Any]:
        """Of lanes, and of the sites and source lines that a text can name, wherever they are drawn."""
        panes: dict[str, Any] = {}
        for phase in self.album.overview(self.enabled).phases:
            self._tell(panes, self.prefix + phase, tuple(self.album.lane(self.enabled, phase)), phase)
        found = self.album.findings
        for record in (*found.candidates, *found.rejections)[:_MOST_NAMES] if found is not None else ():
            self._tell(panes, record.id, record.id)
        for lint in found.lints if found is not None else ():
            self._tell(panes, lint.node, lint.node)
        lines = dict.fromkeys(n.source.short for n in self.album.graph.nodes() if n.source)
        for line in [*lines][:_MOST_NAMES]:
            self._tell(panes, line, line)
        return panes

    def _tell(self, panes: dict[str, Any], key: str, name: Any, title: str = "") -> None:
        if key in self._named or not name:
            return
        self._named.add(key)
        found = inspect(
            self.album.graph, self.album.findings, name, enabled=self.enabled, costs=self._costs, sources=False
        )
        title = title if isinstance(name, tuple) else found.title
        panes[key] = {"title": title, "html": found.html} | ({"near": list(found.near)} if found.near else {})


def _told(card: Card) -> Any:
    """The inspector's target for a card: its site, its only node, or all of its nodes."""
    if card.site is not None and card.site.id:
        return card.site.id
    return f"n{card.nodes[0]}" if len(card.nodes) == 1 else card.nodes
