"""`Explorer`: the widget behind `fusionlab.explore`. Tick passes and sites, look at the graph, measure when asked.

Everything a mouse can do can be done from Python: `lab.toggles["gemm_epilogue"] = False`, `lab.select("%143")`,
`lab.measure()`; and watched: `lab.observe(handler, "enabled")`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

import ipywidgets as widgets
import traitlets

from fusionlab.errors import ArgumentError, OutOfMemoryError
from fusionlab.fusers.findings import Findings
from fusionlab.graph.ir import Graph

from .dot import dom_id
from .evidence_view import evidence_tables
from .html import evidence_pictures, graph_html, picture, style
from .inspector import find_node, node_dict
from .palette import colour_of, tint_of
from .pane import GraphPane
from .sections import declined_html, legend, node_rows, site_rows, table
from .toggles import Toggles
from .view_model import summary, view_model

Progress = Callable[[str, int, int], None]


class Cancel(threading.Event):
    """Set to ask a running measurement to stop; calling it asks whether it was set."""

    def __call__(self) -> bool:
        return self.is_set()


class Explorer(widgets.VBox):
    """The first explorer: passes and sites on the left, the graph, an inspector, measurements below.

    Args:
      graph: the original program.
      findings: what was found in it.
      measure: `measure(enabled_ids, progress, cancel) -> Evidence`; called only when asked. It may call
        `progress(what, done, total)`, and should stop once `cancel()` is True.
      after: `after(enabled_ids) -> Graph`, the program with those sites fused.
      enabled: ids of the sites that are on at the start; None means all that are not idle.
      formulas: pass name -> what it computes.
      engine: layout engine, as for `to_svg`.

    Attributes (traits, `observe` them):
      enabled: frozenset of the site ids that are on.
      selected: the node or site selected, as text ("%143", "gemm_epilogue@mlp#1"); "" for none.
      evidence: the measurement that belongs to `enabled`, or None.
      shown: "before" or "after".
      status: what the measurement is doing, in words.
    """

    enabled = traitlets.Instance(frozenset, args=())
    selected = traitlets.Unicode("")
    evidence = traitlets.Any(None, allow_none=True)
    shown = traitlets.Enum(["before", "after"], "before")
    status = traitlets.Unicode("not measured")

    def __init__(
        self,
        graph: Graph,
        findings: Findings,
        *,
        measure: Callable[[frozenset[str], Progress, Cancel], Any] | None = None,
        after: Callable[[frozenset[str]], Graph] | None = None,
        enabled: frozenset[str] | None = None,
        formulas: Mapping[str, str] | None = None,
        engine: str | None = None,
    ):
        start = frozenset(c.id for c in findings.select()) if enabled is None else frozenset(enabled)
        self.graph, self.findings = graph, findings
        self.toggles = Toggles(findings, start, self._toggled)
        self._measure_with, self._after_with = measure, after
        self._formulas, self._engine = dict(formulas or {}), engine
        self._measured: dict[frozenset[str], Any] = {}
        self._expanded: set[str] = set()
        self._collapsed: set[str] = set()
        self._reveal: tuple[int, ...] = ()
        self._view: dict[str, Any] = {}
        self._running: Cancel | None = None
        self._lock = threading.Lock()
        self._syncing = False
        super().__init__(enabled=start)
        self._build()
        self._refresh()

    # Scripting -----------------------------------------------------------------------------------------------------
    def select(self, what: object) -> dict[str, Any]:
        """Selects a node ("%143", "n12", a node id) or a site (its id), opens the groups around it, tells what it is.

        Raises:
          ArgumentError: there is no such node or site in the graph shown.
        """
        graph = self._graph()
        record = next((r for r in (*self.findings.candidates, *self.findings.rejections) if r.id == what), None)
        if record is not None:
            if self.shown == "after":
                self.shown = "before"
            self._reveal = tuple(sorted(getattr(record, "site_ids", None) or record.node_ids))[:1]
            self.selected = record.id
        else:
            node = find_node(graph, what)
            if node is None:
                raise ArgumentError(
                    f"select: got {what!r}, needed a value of the {self.shown} graph such as "
                    f"{next(graph.nodes()).outputs[0].name!r}, a node id, or a site id"
                )
            self._reveal = (node.id,)
            self.selected = node.outputs[0].name if node.outputs else f"n{node.id}"
        self._refresh()
        return self._selected_info()

    def measure(self) -> Any:
        """Measures the enabled sites now, here, and returns the evidence (also kept in `evidence`).

        Raises:
          ArgumentError: the explorer was made without something to measure with.
        """
        return self._run(self.enabled, self._begin())

    def start(self) -> threading.Thread:
        """Measures in a thread of its own; `status` and `evidence` tell how it goes. A running one is cancelled."""
        thread = threading.Thread(target=self._background, args=(self.enabled, self._begin()), daemon=True)
        thread.start()
        return thread

    def cancel(self) -> None:
        """Asks the running measurement to stop; the evidence stays what it was."""
        with self._lock:
            self._stop()

    def _begin(self) -> Cancel:
        if self._measure_with is None:
            raise ArgumentError("measure: this explorer has only a graph; make it with fusionlab.explore(fn, *args)")
        with self._lock:
            self._stop()
            self._running = Cancel()
            return self._running

    def _stop(self) -> None:
        if self._running is not None:
            self._running.set()
            self._running = None
            self._idle("cancelled")

    # Measuring -----------------------------------------------------------------------------------------------------
    def _run(self, enabled: frozenset[str], running: Cancel) -> Any:
        assert self._measure_with is not None
        self._progress(running, "measuring", 0, 0)
        try:
            evidence = self._measure_with(enabled, functools.partial(self._progress, running), running)
        except BaseException as error:
            kind = f"[{error.code}]" if isinstance(error, OutOfMemoryError) else f"{type(error).__name__}:"
            self._finish(running, f"measurement failed: {kind} {error}")
            raise
        if not running.is_set():
            self._measured[enabled] = evidence
        self._finish(running, "measured")
        return evidence

    def _background(self, enabled: frozenset[str], running: Cancel) -> None:
        # The user's function runs here, so anything may come; the status line says what happened.
        with contextlib.suppress(Exception):
            self._run(enabled, running)

    def _progress(self, running: Cancel, what: str, done: int, total: int) -> None:
        if running.is_set():
            return
        self._bar.max = total or 1
        self._bar.value = min(done, total or 1)
        self._bar.layout.visibility = "visible"
        self._pane.dimmed = True
        self._cancel_button.disabled = False
        self._say(f"{what} {done}/{total}" if total else what)

    def _finish(self, running: Cancel, status: str) -> None:
        with self._lock:
            if self._running is not running:  # cancelled, and perhaps another one runs already
                return
            self._running = None
        self._idle(status)
        self._refresh_evidence()

    def _idle(self, status: str) -> None:
        self._bar.layout.visibility = "hidden"
        self._cancel_button.disabled = True
        self._pane.dimmed = False
        self._say(status)

    def _say(self, status: str) -> None:
        self.status = status
        self._status.value = f'<span class="fl quiet" role="status">{escape(status)}</span>'

    # Reacting ------------------------------------------------------------------------------------------------------
    def _toggled(self, enabled: frozenset[str]) -> None:
        if enabled != self.enabled:
            self.enabled = enabled

    @traitlets.observe("enabled")
    def _enabled_changed(self, _: Any) -> None:
        if not hasattr(self, "_pane"):
            return
        self.toggles.set(self.enabled)
        self.cancel()
        self._refresh()

    @traitlets.observe("shown")
    def _shown_changed(self, change: Any) -> None:
        if hasattr(self, "_pane"):
            self._shown_buttons.value = change["new"]
            self._reveal, self.selected = (), ""
            self._refresh()

    def _message(self, _: Any, content: Any, __: Any = None) -> None:
        """A click in the pane: `{"type": "select" | "fold", "id": SVG id}`."""
        by_dom = {"fl-" + dom_id(i["id"]): i for i in (*self._view["boxes"], *self._view["groups"])}
        item = by_dom.get(str(content.get("id", "")))
        if item is None or item["kind"] in ("input", "output"):
            return
        closed, is_group = item.get("closed"), item["kind"] != "node"
        if content.get("type") == "fold" and is_group:
            (self._expanded if closed else self._collapsed).add(item["id"])
            (self._collapsed if closed else self._expanded).discard(item["id"])
            self._reveal = ()
            self._refresh()
        elif item["site"] is not None and is_group:
            self.select(item["site"])
        elif item["node"] is not None:
            self.select(item["node"])

    def _graph(self) -> Graph:
        if self.shown == "before" or self._after_with is None:
            return self.graph
        return self._after_with(self.enabled)

    # Building ------------------------------------------------------------------------------------------------------
    def _build(self) -> None:
        self._style = widgets.HTML(style())
        self._header, self._legend, self._status = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self._inspector = widgets.HTML(layout=widgets.Layout(width="300px", max_height="560px", overflow="auto"))
        self._pane = GraphPane(layout=widgets.Layout(flex="1 1 auto", min_width="320px"))
        self._pane.on_msg(self._message)
        self._shown_buttons = widgets.ToggleButtons(
            options=["before", "after"], tooltips=["as written", "with the sites fused"]
        )
        self._shown_buttons.disabled = self._after_with is None
        self._shown_buttons.observe(lambda change: setattr(self, "shown", change["new"]), "value")
        self._bar = widgets.FloatProgress(min=0, max=1, layout=widgets.Layout(width="180px", visibility="hidden"))
        self._measure_button = widgets.Button(description="Measure", icon="play", disabled=self._measure_with is None)
        self._measure_button.on_click(lambda _: self.start())
        self._cancel_button = widgets.Button(description="Cancel", icon="stop", disabled=True)
        self._cancel_button.on_click(lambda _: self.cancel())
        self._search = widgets.Text(
            placeholder="%12, n7 or a site", continuous_update=False, layout=widgets.Layout(width="190px")
        )
        self._search.observe(self._searched, "value")
        self._timing, self._errors, self._ledger = widgets.HTML(), widgets.HTML(), widgets.HTML()
        tabs = widgets.Tab(children=[self._timing, self._errors, self._ledger], titles=("Timing", "Errors", "Ledger"))
        bar = widgets.HBox(
            [self._shown_buttons, self._measure_button, self._cancel_button, self._bar, self._status, self._search]
        )
        middle = widgets.HBox([self._switches(), self._pane, self._inspector])
        self.children = (self._style, self._header, bar, self._legend, middle, tabs)

    def _switches(self) -> widgets.VBox:
        self._boxes: dict[str, widgets.Checkbox] = {}
        rows: list[widgets.Widget] = []
        for name in self.findings.passes:
            sites = self.toggles.sites(name)
            colours = f"background:{tint_of(name)};border-color:{colour_of(name)}"
            swatch = widgets.HTML(f'<span class="fl"><span class="fl-swatch" style="{colours}"></span></span>')
            rows.append(widgets.HBox([swatch, self._switch(name, f"{name} ({len(sites)})", not sites)]))
            rows += [self._switch(site, site.partition("@")[2] or site, False, "0 0 0 34px") for site in sites]
        on, off = widgets.Button(description="All on"), widgets.Button(description="All off")
        on.on_click(lambda _: self.toggles.set(frozenset(c.id for c in self.findings.candidates)))
        off.on_click(lambda _: self.toggles.set(frozenset()))
        found = summary(self.graph, self.findings, self.enabled)
        declined = widgets.Accordion(children=[widgets.HTML(f'<div class="fl">{declined_html(found)}</div>')])
        declined.titles = (f"Declined ({len(self.findings.rejections)})",)
        declined.selected_index = None
        layout = widgets.Layout(width="300px", max_height="560px", overflow="auto", flex="0 0 auto")
        return widgets.VBox([*rows, widgets.HBox([on, off]), declined], layout=layout)

    def _switch(self, name: str, label: str, disabled: bool, margin: str = "0") -> widgets.Checkbox:
        box = widgets.Checkbox(
            value=self.toggles[name] is not False,
            description=label,
            tooltip=name,
            disabled=disabled,
            indent=False,
            layout=widgets.Layout(margin=margin, width="auto"),
        )
        box.observe(lambda change, name=name: self._ticked(name, change["new"]), "value")
        self._boxes[name] = box
        return box

    def _ticked(self, name: str, on: bool) -> None:
        if not self._syncing:
            self.toggles[name] = on

    def _searched(self, change: Any) -> None:
        if not change["new"]:
            return
        try:
            self.select(change["new"].strip())
        except ArgumentError as error:
            self._inspector.value = f'<div class="fl"><p class="warn">{escape(str(error))}</p></div>'

    # Drawing -------------------------------------------------------------------------------------------------------
    def _refresh(self) -> None:
        self._syncing = True
        for name, box in self._boxes.items():
            box.value = self.toggles[name] is not False and not box.disabled
        self._syncing = False
        graph, before = self._graph(), self.shown == "before"
        self._view = view = view_model(
            graph,
            self.findings if before else None,
            enabled=self.enabled,
            expanded=tuple(self._expanded),
            collapsed=tuple(self._collapsed),
            reveal=self._reveal,
        )
        self._pane.labels = {
            "fl-" + dom_id(i["id"]): " ".join(i["lines"]) if "lines" in i else i["label"]
            for i in (*view["boxes"], *view["groups"])
            if i["kind"] not in ("input", "output")
        }
        self._pane.svg = picture(view, engine=self._engine)
        self._pane.selected_id = self._selected_dom()
        self._inspector.value = self._inspector_html()
        self._refresh_evidence()

    def _refresh_evidence(self) -> None:
        """Header and tables; the evidence shown is the one measured with just these sites, or none."""
        self.evidence = self._measured.get(self.enabled)
        if self._running is None and (self.evidence is not None or self.status == "measured"):
            self._say("measured" if self.evidence is not None else "not measured")
        whole = summary(self.graph, self.findings, self.enabled, self.evidence, self._formulas)
        self._header.value = f'<div class="fl"><p class="fl-header">{escape(whole["header"])}</p></div>'
        self._legend.value = f'<div class="fl">{legend(whole)}</div>'
        tables = {
            name: table(heads, rows, numeric) for name, heads, rows, numeric in evidence_tables(whole["evidence"])
        }
        pictures = evidence_pictures(self.evidence)
        for name, pane in (("Timing", self._timing), ("Errors", self._errors)):
            text = pictures.get(name, "") + tables.get(name, "")
            verdict = f"Not measured: {self.evidence.verdict}." if self.evidence is not None else ""
            missing = f'<p class="quiet">{verdict or "Nothing measured for these sites yet; press Measure."}</p>'
            pane.value = f'<div class="fl">{text or missing}</div>'
        rows = [[s["state"], s["id"], s["text"], (s["source"] or {}).get("where", "")] for s in whole["sites"]]
        self._ledger.value = f'<div class="fl">{table(["state", "site", "what", "source"], rows)}</div>'

    def _selected_dom(self) -> str:
        record = next((s for s in self._view["sites"] if s["id"] == self.selected), None)
        if record is not None:
            return "fl-" + dom_id(record["id"])
        place = self._view["revealed"].get(f"n{self._reveal[0]}") if self._reveal else None
        return "fl-" + dom_id(place) if place else ""

    def _selected_info(self) -> dict[str, Any]:
        record = next((s for s in self._view["sites"] if s["id"] == self.selected), None)
        if record is not None:
            return record
        graph = self._graph()
        node = find_node(graph, self.selected)
        before = self.findings if self.shown == "before" else None
        return node_dict(graph, node, before, self.enabled) if node is not None else {}

    def _inspector_html(self) -> str:
        info = self._selected_info() if self.selected else {}
        if not info:
            return (
                '<div class="fl"><p class="quiet">Select a box: click it, or Tab to it and press Enter. '
                "Double click or Space opens a group.</p></div>"
            )
        rows = node_rows(info) if "primitive" in info else site_rows(info)
        title = f"{info['primitive']} {info['name']}" if "primitive" in info else info["pass"]
        cells = [[name, (text, "mono" if mono else "")] for name, text, mono in rows]
        return f'<div class="fl"><b>{escape(title)}</b>{table(["", ""], cells)}</div>'

    # Showing -------------------------------------------------------------------------------------------------------
    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The live widget, and a static picture for where there is no kernel (GitHub, nbviewer, exported notebooks)."""
        bundle: Any = super()._repr_mimebundle_(**kwargs)
        data, rest = (bundle[0], bundle[1:]) if isinstance(bundle, tuple) else (bundle, ())
        still = graph_html(self.graph, self.findings, enabled=self.enabled, engine=self._engine)
        data = {**(data or {}), "text/html": still, "text/plain": repr(self)}
        return (data, *rest) if rest else data

    def __repr__(self) -> str:
        on = len(self.enabled)
        return f"Explorer({self.graph.name!r}, {on} of {len(self.findings.candidates)} sites on, {self.status})"
