"""`Explorer`: the widget behind `fusionlab.explore`. Switch passes and sites, look at the graph, measure on request.

Every action of the mouse has a call in Python: `lab.toggles["gemm_epilogue"] = False`, `lab.select("%143")`,
`lab.search("softmax")`, `lab.measure()`; and watched: `lab.observe(handler, "enabled")`. A `Session` computes the content as plain
data; this class passes it to the browser (`explorer.js` draws it) and the browser's clicks to the session.
"""

from __future__ import annotations

import base64
import functools
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import traitlets

from fusionlab.device import Device
from fusionlab.errors import ArgumentError, FusionLabError
from fusionlab.evidence.blame.drift import DriftMap
from fusionlab.evidence.comparison import Evidence
from fusionlab.evidence.node_times import NodeTimes
from fusionlab.evidence.record_diff import RecordDiff, diff_records
from fusionlab.evidence.scopes.scope_times import TRACE
from fusionlab.fusers import Strategy
from fusionlab.fusers.report.findings import Findings
from fusionlab.graph.program.graph import Graph
from fusionlab.progress import Clock, Watch, noticed
from fusionlab.showing import Text, suffix_of
from fusionlab.tracebacks import errors_for_users

from ..html.tabs import Tab
from ..model.setting import Setting
from ..notebook import explorer_outputs, frames_outputs, png_of, show
from .background import Background, Cancel
from .decided import Find
from .kept import Keeper
from .measuring import Measure, Measuring, Scopes, Share, Which
from .messages import act
from .observed import IDLE
from .session import Session
from .state_file import Saved, record_of, saved_text


@errors_for_users
class Explorer(Measuring):
    """The explorer: passes and sites on the left, the graph, an inspector, measurements below.

    Args:
      graph: the original program.
      findings: what was found in it.
      measure: `measure(setting, progress, cancel) -> Evidence`; called only when asked. It calls `progress(task, done, total)` as each
        stage begins and at each step, where a cancel ends it, and may ask `cancel()` besides.
      shares: `shares(setting, findings, progress, cancel)`, the time that each site saves (`SiteShares`), or None where nothing
        can be attributed; called after `measure`.
      times: `times(progress) -> NodeTimes`, the time of each node of the program (`node_times`); shown in place of bytes once measured.
      scopes: `scopes(setting, findings, progress) -> NodeTimes`, the same with those sites fused (`fused_node_times`).
      rates: `rates(progress) -> Device`, this process's device with measured rates (`measure_peaks`), for the roofline.
      rates_at_once: call it after the first measurement, not only by `measure_rates`.
      which: `which(setting, fault, progress, cancel) -> Bisection`, which sites are to blame for a measurement that is slower or worse.
      tune: `tune(setting, progress, cancel)`, which measures the program's calls and writes the plan file (`fusionlab.tune`).
      after: `after(setting, findings) -> Graph`, the program with those sites fused.
      find: `find(strategy, progress) -> Findings` over the same graph, for when an option is changed.
      script: `script(setting, findings) -> str`, a program that does the same.
      enabled: ids of the sites that are on at the start; None means all that are not idle.
      strategy: the passes and options that `findings` come from; None for all by default.
      formulas: pass name -> its formula.

    Attributes (traits, `observe` them):
      enabled: frozenset of the site ids that are on.
      selected: the node, site, kernel, line or group selected, as text ("%143", "gemm_epilogue@mlp#1"); "" for none.
      evidence: the measurement that belongs to `enabled`, or None.
      shown: "before", "after" or "both" side by side.
      status: the state of the measurement, in words.
      measuring: whether every change is measured again; `start` sets it, `cancel` clears it.
      hulls: whether the boxes name the kernels that XLA makes of them (compiles the program, in the background).
      theme: "auto", "light" or "dark".
    """

    def __init__(
        self,
        graph: Graph,
        findings: Findings,
        *,
        measure: Measure | None = None,
        shares: Share | None = None,
        times: Callable[[Watch], NodeTimes] | None = None,
        scopes: Scopes | None = None,
        rates: Callable[[Watch], Device] | None = None,
        rates_at_once: bool = False,
        which: Which | None = None,
        tune: Measure | None = None,
        after: Callable[[Setting, Findings], Graph] | None = None,
        find: Find | None = None,
        script: Callable[[Setting, Findings], str] | None = None,
        enabled: frozenset[str] | None = None,
        strategy: Strategy | None = None,
        formulas: Mapping[str, str] | None = None,
    ):
        self._measure_with, self._shares_with, self._rates_with = measure, shares, rates
        self._script_with, self._times_with, self._which_with = script, times, which
        self._tune_with = tune
        self._scopes_with = scopes if times is not None else None
        self._rates_at_once = rates is not None and rates_at_once
        self._formulas = dict(formulas or {})
        self._background, self._clock = Background(), Clock()
        self._ready = False
        self.session = Session(
            graph,
            findings,
            enabled=enabled,
            strategy=strategy,
            find=find,
            after=after,
            formulas=formulas,
            changed=self._setting_changed,
        )
        self._keeper = Keeper(self.session, lambda: self._background.running or self._background.abandoned, self.send)
        super().__init__(enabled=self.session.enabled, busy=IDLE | {"status": "not measured"})
        self.on_msg(self._message)
        self._ready = True
        self.refresh()

    # Scripting -----------------------------------------------------------------------------------------------------
    def option(self, name: str, option: str, value: Any) -> None:
        """Sets an option of a pass, as `Strategy` takes it, and searches again.

        Raises:
          UnknownNameError: no such pass or option. ArgumentError: the value is not one of its choices.
        """
        with self._aside("searching again"):
            self.session.option(name, option, value)

    def undo(self) -> bool:
        """Undoes the last change of sites or options; False if there is no change to undo."""
        return self.session.undo()

    def redo(self) -> bool:
        """Makes the change again that `undo` took back last; False if there is no such change, or another change was made since."""
        return self.session.redo()

    def reset(self) -> bool:
        """Restores the sites that were on when it was opened."""
        return self.session.reset()

    def code(self) -> Text:
        """A Python program that reproduces the current setting.

        Raises:
          ArgumentError: the explorer was made without a function.
        """
        if self._script_with is None:
            raise ArgumentError("code: this explorer has only a graph; make it with fusionlab.explore(fn, *args)")
        return Text(self._script_with(self.setting, self.findings))

    def show_drift(self, drift: DriftMap | None) -> None:
        """Marks each card with the error of the fused program there (`fusionlab.drift`); None takes the marks away.

        Raises:
          ArgumentError: the map is of another program.
        """
        if drift is not None and (drift.findings is None or str(drift.findings.graph) != str(self.session.graph)):
            raise ArgumentError(
                f"show_drift: got the map of {drift.name}, which is another program; needed fusionlab.drift(fn, *args)"
            )
        self.session.stage.drift = {} if drift is None else drift.by_node()
        self.refresh()

    def close(self) -> None:
        """Disconnects the explorer from the page, where it stays as a record; a running measurement is cancelled."""
        if sys.is_finalizing():  # ipywidgets closes what is left, when modules are gone already
            return
        self.cancel()
        self._keeper.stop()
        super().close()

    def save(self, path: Any) -> Path:
        """Writes .json (all of the state: `fusionlab.load` reads it back), a picture: .svg .png .pdf .dot .html .txt, or .perfetto.json.gz
        (a run for https://ui.perfetto.dev), by suffix.

        Raises:
          ArgumentError: another suffix; or a run is asked for, and none was measured. OutputError: the file cannot be written.
          MissingDependencyError: PDF without the extra.
        """
        from fusionlab.output import write_file

        if not isinstance(path, str | os.PathLike):
            raise ArgumentError(f"path: got {path!r:.80}, needed the name of a file, for instance 'explorer.html'")
        target = Path(path)
        with noticed(f"writing {target.name}"):
            content = self.export(suffix_of(target, [TRACE]), str(target))
            return write_file(target, content)

    def restore(self, saved: Saved) -> None:
        """Restores the saved state of an explorer (see `fusionlab.load`): sites, options, ledger and measurements.

        Sites that are not in this program are left out, and `problem` names them.

        Raises:
          UnknownNameError: a pass or option that does not exist; nothing is changed.
        """
        lost = self.session.restore(saved)
        if lost:
            self.problem = {"code": "changed_program", "sentence": lost}
        self.refresh()

    def against(self, record: Evidence | Saved | str | os.PathLike[str] | None) -> RecordDiff | None:
        """Compares what is measured here with an older record, in the tab Records: what changed, and what became worse.

        Args:
          record: what `compare` returned or `load` read, the path of a file of either, or None to take it away.

        Returns:
          Both side by side (as of `fusionlab.diff`); None while nothing is measured with the enabled sites.

        Raises:
          ArgumentError: there is no such file, it is neither, or nothing was measured in it.
        """
        self.session.other = other = None if record is None else record_of(record)
        self.refresh()
        return None if other is None or self.evidence is None else diff_records(other, self.evidence)

    def keep(self) -> None:
        """Has the browser keep a record of the explorer, updated after each change: the record answers once the kernel is gone."""
        self._keeper.ask()

    # Reacting ------------------------------------------------------------------------------------------------------
    def _setting_changed(self) -> None:
        """After every change of what is on, whoever made it."""
        if not self._ready:
            return
        again = self.measuring and self._measure_with is not None
        self._stop()
        try:
            if self.enabled != self.session.enabled:
                self.enabled = self.session.enabled  # a user's observers run here
        finally:
            if again and self.session.evidence is None:
                self.start()
            self.refresh()

    @traitlets.observe("enabled")
    def _enabled_changed(self, change: Any) -> None:
        if self._ready and change["new"] != self.session.enabled:
            try:
                self.toggles.set(change["new"])
            except FusionLabError:
                self.enabled = self.session.enabled
                raise

    @traitlets.observe("shown")
    def _shown_changed(self, change: Any) -> None:
        if self._ready:
            try:
                self.session.show(change["new"])
            except FusionLabError:
                self.shown = change["old"]
                raise
            self.refresh()

    @traitlets.observe("hulls")
    def _hulls_changed(self, change: Any) -> None:
        if not self._ready:
            return
        self.session.stage.hulls = change["new"]
        if change["new"] and self.session.compiled is None:
            # A measurement that runs is not disturbed: the two would slow each other down.
            token = Cancel() if self._background.running else self._background.begin()
            job = functools.partial(self._quietly, self._compiled, "compiling", self.setting)
            self._background.start(job, token)
        self.refresh()

    def _message(self, _: Any, content: Any, buffers: Any = None) -> None:
        """A click in the browser. Whatever goes wrong is shown there; the widget lives on."""
        try:
            act(self, content)
        # A user's observers and functions run in here: an error that went into a log nobody reads would be worse than the breadth.
        except Exception as error:
            self._tell(error)

    # Drawing -------------------------------------------------------------------------------------------------------
    def refresh(self) -> None:
        """Sends changes to the browser; may be called from any thread."""
        self._keeper.touched()
        with self.session.lock, self.hold_sync():
            session = self.session
            session.follow()
            self.evidence = session.evidence
            if not self._background.running and (self.evidence is not None or self.status == "measured"):
                self._say("measured" if self.evidence is not None else "not measured")
            if self.shown != session.stage.shown:
                self.shown = session.stage.shown
            self.selected = session.selected
            head, can = (
                session.head(),
                {
                    "measure": self._measure_with is not None,
                    "blame": self._which_with is not None,
                    "xla": session.stage.shown == "before",
                },
            )
            self.head = head | {"can": head["can"] | can, "decided": len(session.ledger)}
            self.panel, self.scene, self.marks = session.panel(), session.scene(), session.marks()
            self.outline, self.trail = session.walk.outline(), session.walk.trail()
            self.inspector, self.hits, self.tabs = session.inspector(), session.hits(), self._tabs()

    def _await(self) -> None:
        with self.session.lock:
            self.tabs = self._tabs(awaited=True)

    def _tabs(self, awaited: bool = False) -> list[Tab]:
        awaited = awaited or (self.measuring and self._background.running)
        can = {"rates": self._rates_with is not None, "scopes": self._scopes_with is not None}
        return self.session.tabs(self._script(), awaited=awaited, **can)

    def _script(self) -> str:
        return self._script_with(self.setting, self.findings) if self._script_with is not None else ""

    def export(self, suffix: str, name: str) -> str | bytes:
        """The content of a file of this kind (see `save`); `name` is the file's, for the error."""
        from .files import export  # draws with much that a first picture does not need

        with self._aside(f"drawing the {suffix} file"):
            return export(self.session, suffix, name, self._formulas, self._saved, self._script())

    def _saved(self) -> str:
        return saved_text(self.session)

    # Showing -------------------------------------------------------------------------------------------------------
    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The live widget and a still picture, for programs that choose one of them; `viz/notebook.py` lists which would not."""
        png, shown = png_of(self.session.still())
        return {**self._widget(), "image/png": base64.b64encode(png).decode()}, {"image/png": shown}

    def _ipython_display_(self) -> None:
        if frames_outputs():
            raise NotImplementedError  # the bundle above is what it takes
        head = self.session.head()
        show(explorer_outputs(self._widget(), head["title"], head["sentence"], self.session.still()))

    def _widget(self) -> dict[str, Any]:
        bundle: Any = super()._repr_mimebundle_()
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        return {**(data or {}), "text/plain": repr(self)}
