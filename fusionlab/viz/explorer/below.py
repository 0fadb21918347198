"""The tabs below the picture: measurements of the enabled sites, and facts known without measuring."""

from __future__ import annotations

from html import escape
from typing import Any

from fusionlab.device import Device
from fusionlab.evidence.bisection import Bisection
from fusionlab.evidence.comparison import Evidence
from fusionlab.evidence.node_times import NodeTimes
from fusionlab.evidence.record_diff import diff_records
from fusionlab.evidence.roofline import Roofline
from fusionlab.evidence.scopes.scope_times import ScopeTimes, scope_times
from fusionlab.fusers import Findings, Strategy
from fusionlab.graph.program.graph import Graph

from ..html.blame import TAB, sentence_html
from ..html.measured.records import records_html
from ..html.measured.scopes import scopes_html
from ..html.shares import shares_html
from ..html.tabs import AWAITED, HOW_TO_RATE, Tab, evidence_tabs, roofline_of, tab
from ..markup import code, quiet
from ..model.setting import Setting
from .decided import Decided

_MEASURED = ("Timing", "Errors", "Sites", "Memory")
_TABS_KEPT = 8  # settings whose plots are kept, for undo and for going back and forth
_DIFFED_AT_ONCE = 3000  # nodes; the fused graph of a larger program is made when it is shown
_RATES = (
    '<p><button type="button" data-fl="rates" data-msg="{&quot;type&quot;:&quot;rates&quot;}">Measure this device\'s rates</button> '
    "takes a few seconds; the roof is drawn from them.</p>"
)
_TUNE = (
    '<p>{}. <button type="button" data-fl="tune" data-msg="{{&quot;type&quot;:&quot;tune&quot;}}">Tune</button> '
    "measures them on this device, writes the plan file and searches again.</p>"
)
_TUNE_THERE = "<p>{}, on that device.</p>"


class Below(Decided):
    """The part of a `Session` that fills the tabs.

    Attributes:
      shares: setting -> the time that each of its sites saves.
      blamed: setting -> the sites found to make it slower ("time") or worse ("error").
      rates: this process's device with measured rates, for the roofline.
      other: a record to compare the measurement with; None for none.
      node_times: of the program's nodes, as written.
      fused_times: setting -> times of the same nodes with its sites fused.
    """

    graph: Graph
    evidence: Any
    can_fuse: bool

    def __init__(self, *decided: Any) -> None:
        super().__init__(*decided)
        self.shares: dict[Setting, Any] = {}
        self.blamed: dict[Setting, dict[str, Bisection]] = {}
        self.rates: Device | None = None
        self.other: Evidence | None = None
        self.node_times: NodeTimes | None = None
        self.fused_times: dict[Setting, NodeTimes] = {}
        self._fused: dict[Setting, Graph] = {}
        self._roofs: dict[Strategy | None, Roofline] = {}
        self._drawn_tabs: dict[Any, list[Tab]] = {}
        self._last_tabs: dict[str, str] = {}  # of the last setting that was measured

    def adopt(self, found: Findings) -> None:
        with self.lock:
            for kept in (self.shares, self.blamed, self.fused_times, self._fused, self._roofs, self._drawn_tabs):
                kept.clear()
            self._last_tabs = {}
            super().adopt(found)

    def fused_graph(self) -> Graph:
        """The program with the enabled sites fused."""
        raise NotImplementedError

    def scopes(self) -> ScopeTimes | None:
        """Time by module and scope, as written and with the enabled sites fused, as far as measured; None where nothing was."""
        if self.node_times is None:
            return None
        chosen = self.findings.select(sorted(self.enabled))
        return scope_times(self.graph, self.node_times, self.fused_times.get(self.setting), chosen)

    def tabs(self, script: str = "", awaited: bool = False, rates: bool = False, scopes: bool = False) -> list[Tab]:
        """Name and HTML of the tabs: measurements, the graph before and after, the ledger and the program `script`.

        While a measurement is `awaited`, the previous one stays visible, dimmed, with a note that it is of other sites. `rates`,
        `scopes`: there is something to measure the device's rates, or the time of scopes after fusing, with.
        """
        after = self._fused_soon()
        shares, under = self.shares.get(self.setting), self._under()
        later = self.fused_times.get(self.setting)
        key = self.setting, *map(id, (self.evidence, shares, under, after, self.node_times, later)), scopes
        if key not in self._drawn_tabs:  # plots take longer to draw than anybody wants to wait after a click
            shown = evidence_tabs(self.evidence, self.findings, enabled=self.enabled, after=after, under=under)
            shown.insert(2, tab("Sites", shares_html(shares, self._own_code()), shares is None))
            if scoped := scopes_html(self.scopes(), scopes and bool(self.enabled)):
                shown.insert(3, tab("Scopes", scoped))
            self._drawn_tabs = dict([*self._drawn_tabs.items()][1 - _TABS_KEPT :]) | {key: shown}
        shown = self._drawn_tabs[key]
        if self.evidence is not None:
            self._last_tabs = {each["name"]: each["html"] for each in shown}
        elif awaited:
            shown = [self._awaited(each) for each in shown]
        rated = rates and self.rates is None
        shown = [each | {"html": self._above(each["name"], rated) + each["html"]} for each in shown]
        if rated:  # the button is there, so that nobody has to be told of the line of Python
            shown = [each | {"html": each["html"].replace(HOW_TO_RATE, "")} for each in shown]
        if self.other is not None:
            shown = [*shown, tab("Records", self._beside(self.other))]
        return [*shown, tab("Ledger", self.ledger.html()), *([tab("Code", code(script))] if script else [])]

    def _above(self, name: str, rated: bool) -> str:
        """The head of a tab: the sites to blame, and a button that measures missing rates, if that is possible."""
        if name == "Roofline" and rated:
            return _RATES
        waiting, where = self.findings.waiting, self.findings.where
        if name == "Sites" and waiting is not None and where is not None:
            return (_TUNE_THERE if where.simulated else _TUNE).format(escape(str(waiting)))
        return "".join(sentence_html(b) for of, b in self.blamed.get(self.setting, {}).items() if TAB[of] == name)

    def _beside(self, other: Evidence) -> str:
        if self.evidence is None:
            return quiet(f"A record of {other.name} is loaded; press Measure to compare it with these sites.")
        key = "records", id(other), id(self.evidence)
        if key not in self._drawn_tabs:
            drawn = records_html(diff_records(other, self.evidence))
            self._drawn_tabs = dict([*self._drawn_tabs.items()][1 - _TABS_KEPT :]) | {key: [tab("Records", drawn)]}
        return self._drawn_tabs[key][0]["html"]

    def _own_code(self) -> int:
        """The number of enabled sites with code other than XLA's own."""
        return sum(c.id in self.enabled and not c.same_code for c in self.findings.candidates)

    def _fused_soon(self) -> Graph | None:
        """The fused graph, if it is there or soon made."""
        after = self._fused.get(self.setting)
        if after is None and self.can_fuse and self.graph.node_count <= _DIFFED_AT_ONCE:
            return self.fused_graph()
        return after

    def _awaited(self, shown: Tab) -> Tab:
        """A tab during its measurement: the last measurement, dimmed, if there is one; a tab that is not measured as it is."""
        name = shown["name"]
        if name not in _MEASURED:
            return shown
        return tab(name, _stale(self._last_tabs[name])) if self._last_tabs else tab(name, quiet(AWAITED), empty=True)

    def _under(self) -> Roofline | None:
        """The findings under the roof of the device, once its rates were measured."""
        if self.rates is None:
            return None
        key = self.setting.strategy
        if key not in self._roofs:
            self._roofs[key] = roofline_of(self.findings, self.rates)
        return self._roofs[key]


def _stale(html: str) -> str:
    """A tab of another setting, while that of this one is measured."""
    return quiet("Measured before this change of sites; measuring again.") + f'<div class="fl-stale">{html}</div>'
