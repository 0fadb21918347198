"""The explorer without a screen: setting, view and selection, and everything that a screen shows, as plain data.

The widget (`widget.py`) mirrors what these methods give; a script, a test or another front end can use them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fusionlab.errors import ArgumentError
from fusionlab.evidence.roofline import attainable
from fusionlab.fusers import Strategy
from fusionlab.fusers.report.findings import Findings
from fusionlab.graph.program.graph import Graph

from ..cards.card import Card
from ..convert import exported
from ..html.blame import blamed_sites, faults_of, site_html
from ..html.dearest import dearest_html, dearest_title
from ..html.inspector import Inspected, inspect
from ..markup import quiet
from ..model.panel import panel
from ..model.search import Hit, search
from ..model.selection import Selection, selection
from ..model.setting import Decision, Setting
from ..model.summaries import sentence, summary
from .below import Below
from .decided import Find
from .stage import SHOWN, Stage
from .state_file import Saved, program_digest
from .walk import PAGE, Walk

Changed = Callable[[], None]
_FUSED_KEPT = 8  # settings whose fused programs are kept
_HINT = "Select a box: click it, or reach it by keyboard and press Enter. Space or a double click opens a card."


class Session(Below):
    """The setting, the view and the selection.

    Args:
      graph: the original program.
      findings: what was found in it.
      enabled: ids of the sites that are on at the start; None means all that are not idle.
      strategy: the passes and options that `findings` come from; None for all by default.
      find: `find(strategy, progress) -> Findings` over the same graph, for when an option is changed; None where options are fixed.
      after: `after(setting, findings) -> Graph`, the program with those sites fused; None where it cannot be shown.
      formulas: pass name -> what it computes.
      changed: called after every change of the setting.
    """

    def __init__(
        self,
        graph: Graph,
        findings: Findings,
        *,
        enabled: frozenset[str] | None = None,
        strategy: Strategy | None = None,
        find: Find | None = None,
        after: Callable[[Setting, Findings], Graph] | None = None,
        formulas: Mapping[str, str] | None = None,
        changed: Changed = lambda: None,
    ) -> None:
        super().__init__(findings, enabled, strategy, find, changed)
        self.graph = graph
        self.compiled: Any = None
        self.selected, self.query = "", ""
        self._after = after
        self._formulas = dict(formulas or {})
        self._last_summary: tuple[Any, dict[str, Any]] = (None, {})
        self._selection, self._turn = Selection(), 0
        self._chosen_of: Graph | None = None  # the program that the selection is of
        self.stage = Stage(graph, self.fused_graph if after is not None else None)
        self.walk = Walk(self)

    def adopt(self, found: Findings) -> None:
        with self.lock:
            self._last_summary = (None, {})
            super().adopt(found)

    # What is shown -------------------------------------------------------------------------------------------------
    @property
    def evidence(self) -> Any:
        """The measurement with exactly these sites, or None."""
        return self.measured.get(self.setting)

    def show(self, which: str) -> None:
        """ "before" or "after": the program as written, or with the enabled sites fused; "both": side by side.

        Raises:
          ArgumentError: none of these, or this explorer cannot fuse.
        """
        if which not in SHOWN:
            raise ArgumentError(f"shown: got {which!r}, needed 'before', 'after' or 'both'")
        if which != "before" and self._after is None:
            raise ArgumentError("shown: this explorer has only findings; make it with fusionlab.explore(fn, *args)")
        if which != self.stage.shown:
            with self.lock:
                graph = self.shown_graph
                self.stage.shown = which
                if self.shown_graph is not graph:
                    self._selection, self.selected = Selection(), ""

    @property
    def shown_graph(self) -> Graph:
        """The graph that is drawn."""
        return self.graph if self.stage.shown != "after" else self.fused_graph()

    @property
    def shown_findings(self) -> Findings | None:
        """The findings drawn over it; none over the fused graph."""
        return self.findings if self.stage.shown != "after" else None

    def fused_graph(self) -> Graph:
        """The program with the enabled sites fused."""
        assert self._after is not None
        if self.setting not in self._fused:
            fused = self._after(self.setting, self.findings)
            self._fused = dict([*self._fused.items()][1 - _FUSED_KEPT :]) | {self.setting: fused}
        return self._fused[self.setting]

    def select(self, what: object, reveal: bool = True) -> dict[str, Any]:
        """Selects a node ("%143", "n12", an id), a site or structure, a kernel of XLA's, a group, a line ("model.py:41"), nothing ("").

        Opens the groups around it, unless `reveal` is False (a clicked box is visible already), and returns its facts as plain data
        (`Selection.info`).

        Raises:
          ArgumentError: the graph shown contains nothing of that name.
        """
        records = (*self.findings.candidates, *self.findings.rejections)
        if self.stage.shown == "after" and any(r.id == what for r in records):
            self.show("before")
        with self.lock:
            group = self.stage.group(self.drawn(), what)
            known = self.shown_graph, self.shown_findings, what, self.compiled_shown, group
            found = Selection() if what == "" else selection(*known)
            self._selection, self.selected = found, found.name
            self._chosen_of = self.shown_graph
            self._turn += 1
            if reveal and found.kind == "group":
                self.stage.reveal_card(self.drawn(), found.name)
            elif reveal:
                self.stage.reveal(self.drawn(), found.nodes)
        return found.info(self.shown_graph, self.shown_findings, self.enabled)

    def fold(self, item: str) -> None:
        """Opens a closed card, closes an open one, by its id in the picture; anything else does not open and stays."""
        with self.lock:
            self.stage.fold(self.drawn(), item)

    def follow(self) -> None:
        """Updates the selection after the shown program or copy has changed: a card of the same name, with its current nodes;
        nothing if it is gone."""
        chosen, graph = self._selection, self.shown_graph
        if chosen.kind == "group":
            nodes = self.stage.group(self.drawn(), chosen.name).get(chosen.name)
            if nodes is not None and tuple(nodes) != chosen.nodes:
                self._selection = Selection(chosen.name, "group", tuple(nodes), tuple(nodes))
                return
            if nodes is not None:
                return
        if self._chosen_of is not graph and chosen.name and self.stage.shown == "after":
            self._selection, self.selected = Selection(), ""

    def clicked(self, item: str) -> str | None:
        """The name that a click on an id in the picture selects; None for what is not there."""
        with self.lock:
            return self.stage.clicked(self.drawn(), item)

    def search(self, text: str) -> dict[str, Any]:
        """Looks for words in names, ops, shapes, scopes, source lines, sites and reasons; the hits are marked in the picture."""
        self.query, self.walk.listed = text, PAGE
        return self.hits()

    def kernels(self) -> Any:
        """XLA's kernels of the program, which is compiled on the first call; `stage.hulls` draws it."""
        if self.compiled is None:
            self.compiled = self.findings.xla()
        return self.compiled

    @property
    def can_fuse(self) -> bool:
        """Whether the program with its sites fused can be drawn."""
        return self._after is not None

    @property
    def compiled_shown(self) -> Any:
        """XLA's kernels of the drawn graph, if it was compiled."""
        return self.compiled if self.stage.shown != "after" else None

    def drawn(self) -> tuple[Graph, Findings | None, frozenset[str]]:
        return self.shown_graph, self.shown_findings, self.enabled

    def restore(self, saved: Saved) -> str:
        """Takes over the ledger of an explorer that was saved, what was on in it, and its measurements.

        Returns:
          What could not be taken over since the program has changed, in a sentence; "" where all was.

        Raises:
          UnknownNameError: a pass or option that does not exist; nothing is changed.
        """
        found, wanted = self._findings(saved.setting.strategy), saved.setting.enabled
        enabled = frozenset(c.id for c in found.candidates if c.id in wanted)
        self._become(Setting(enabled, saved.setting.strategy))
        lost = []
        if saved.program != program_digest(self.graph):
            lost = [
                f"this is another program than the one that was saved ({saved.function}): its measurements are left out"
            ]
        else:
            self.measured.update(saved.measured)
            self.shares.update(saved.shares)
            self.blamed.update({s: dict(found) for s, found in saved.blamed.items()})
        if gone := sorted(wanted - enabled):
            lost += [
                f"{len(gone)} of {len(wanted)} sites are not in it: {', '.join(gone[:5])}{', ...' if gone[5:] else ''}"
            ]
        self._decisions = [*saved.decisions, Decision("loaded", self.setting)]
        self._past, self._undone = [], []
        self._changed()
        return "; ".join(lost)

    # As plain data -------------------------------------------------------------------------------------------------
    def head(self) -> dict[str, Any]:
        """The line on top, and what can be done."""
        whole = self.summary()
        return {
            "title": whole["title"],
            "sentence": sentence(whole["counts"], whole["evidence"]),
            "counts": whole["counts"],
            "shown": self.stage.shown,
            "hulls": self.stage.hulls,
            "device": str(getattr(self.findings, "device", "")),
            "can": {
                "after": self._after is not None,
                "both": self._after is not None,
                "options": self._find is not None,
                "undo": self.can_undo,
                "redo": self.can_redo,
                "reset": self.can_reset,
                "export": exported(),
                "which": [f.of for f in faults_of(self.evidence) if f.of not in self.blamed.get(self.setting, {})],
            },
        }

    def panel(self) -> dict[str, Any]:
        """Passes, options, sites, identical ones together, declined sites, and lints."""
        shares = self.shares.get(self.setting)
        named = {s.site: s for s in shares.sites} if shares is not None else {}
        idle = {c.id for c in self.findings.candidates if c.idle}
        return panel(
            self.summary(), self.setting.strategy, named, idle, blamed_sites(self.blamed.get(self.setting, {}))
        )

    def svg(self) -> str:
        """The picture as the text of an SVG file."""
        with self.lock:
            return self.stage.file(self.drawn(), self.compiled_shown)

    def still(self) -> str:
        """The picture, as SVG, for a notebook that shows it without the explorer."""
        with self.lock:
            return self.stage.still(self.drawn())

    def dot(self) -> str:
        """The picture as Graphviz DOT text."""
        with self.lock:
            return self.stage.dot(self.drawn())

    def scene(self) -> dict[str, Any]:
        """The picture and what can be clicked in it."""
        return self.stage.scene(self.drawn(), self.compiled_shown)

    def marks(self) -> dict[str, list[str]]:
        """Ids in the picture of what is selected, of its nearest miss, of what shares its kernel or line, of the search's hits."""
        info = self._inspected()
        hits = self._hits().rows if self.query else ()
        return {
            "selected": self.chosen_ids(),
            "near": [] if self._selection.kind == "group" else self.stage.places(self.drawn(), info.near),
            "linked": self.stage.places(self.drawn(), info.linked),
            "found": self.stage.places(self.drawn(), [n for hit in hits for n in self._nodes_of(hit.name)]),
        }

    def chosen_ids(self) -> list[str]:
        """Ids in the picture of what is selected."""
        return self.stage.ids(self.drawn(), self._selection)

    def inspector(self) -> dict[str, Any]:
        """The facts about the selection: the name that selects it again, title, and HTML whose texts are escaped.

        `turn` counts selections, so that the screen notices when the same thing is selected again.
        """
        info = self._inspected()
        title = self.stage.name(self.drawn(), self._selection.name) or info.title
        return {"name": self.selected, "turn": self._turn, "title": title, "html": info.html}

    def hits(self) -> dict[str, Any]:
        """The hits of the search: the first of them as `rows`, and how many can be reached by number."""
        if not self.query:
            return {"query": "", "total": 0, "rows": [], "reach": 0}
        found = self._hits()
        return found.to_dict() | {"reach": found.total}

    def found(self, most: int, start: int = 0) -> tuple[Hit, ...]:
        """So many hits of the search from the one with this number on."""
        return search(self.shown_graph, self.shown_findings, self.query, most, start).rows

    def summary(self) -> dict[str, Any]:
        """The view model without its picture."""
        key = self.setting, id(self.evidence)
        if self._last_summary[0] != key:
            # Structures are left out: looking for them takes as long as the search itself.
            facts = summary(self.graph, self.findings, self.enabled, self.evidence, self._formulas, structures=False)
            self._last_summary = key, facts
        return self._last_summary[1]

    def _hits(self) -> Any:
        return search(self.shown_graph, self.shown_findings, self.query, self.walk.listed)

    def _nodes_of(self, name: str) -> tuple[int, ...]:
        return selection(self.shown_graph, self.shown_findings, name, self.compiled_shown, {}).nodes

    def _floor(self, card: Card) -> float:
        """Seconds that a card takes at best as one kernel of this device; 0 if its rates were not measured, or it is not the work
        of one kernel."""
        blocks = {self.graph.block_of[i].path for i in card.nodes}
        if self.rates is None or self.stage.shown != "before" or len(blocks) != 1:
            return 0.0
        return attainable(self.findings.cost().fused(card.nodes), self.rates)[0]

    def _inspected(self) -> Any:
        self.follow()
        chosen, shares = self._selection, self.shares.get(self.setting)
        if not chosen.name:
            overview = self.stage.overview(self.drawn())
            return Inspected(
                dearest_title(overview),
                dearest_html(overview, self._floor, self.shown_findings is not None) + quiet(_HINT),
            )
        found = inspect(
            self.shown_graph,
            self.shown_findings,
            chosen.target,
            enabled=self.enabled,
            compiled=self.compiled_shown,
            shares=shares,
            roofline=self._under() if self.stage.shown != "after" else None,
        )
        return replace(found, html=site_html(self.blamed.get(self.setting, {}), chosen.name) + found.html)
