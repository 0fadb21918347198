"""`Explorer`: the widget behind `fusionlab.explore`. Tick passes and sites, look at the graph, measure when asked.

Everything a mouse can do can be done from Python: `lab.toggles["gemm_epilogue"] = False`, `lab.select("%143")`,
`lab.search("softmax")`, `lab.measure()`; and watched: `lab.observe(handler, "enabled")`. What is shown is computed by a `Session`, in
plain data; this class hands it to the browser (`explorer.js` draws it) and the browser's clicks to the session.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import traitlets

from fusionlab.device import Device
from fusionlab.errors import ArgumentError, FusionLabError
from fusionlab.fusers import Strategy
from fusionlab.fusers.report.findings import Findings
from fusionlab.graph.program.graph import Graph
from fusionlab.showing import Text
from fusionlab.tracebacks import errors_for_users

from ..html.report import still_html
from ..model.setting import Setting
from .background import Background, Cancel
from .messages import act
from .observed import IDLE
from .selecting import Selecting
from .session import Session
from .state_file import Saved, saved_text

OnProgress = Callable[[str, int, int], None]


@errors_for_users
class Explorer(Selecting):
    """The explorer: passes and sites on the left, the graph, an inspector, measurements below.

    Args:
      graph: the original program.
      findings: what was found in it.
      measure: `measure(setting, progress, cancel) -> Evidence`; called only when asked. It may call
        `progress(task, done, total)`, and should stop once `cancel()` is True.
      shares: `shares(setting, findings, progress, cancel)`, what each site is worth in time (`SiteShares`), or None where nothing
        can be told apart; called after `measure`.
      times: `times() -> {node id: seconds}`, what each node of the program takes (`node_times`); shown in place of bytes once measured.
      rates: `rates() -> Device`, this process's device with measured rates (`measure_peaks`), for the roofline.
      rates_at_once: call it after the first measurement, not only by `measure_rates`.
      after: `after(setting, findings) -> Graph`, the program with those sites fused.
      find: `find(strategy) -> Findings` over the same graph, for when an option is changed.
      script: `script(setting, findings) -> str`, a program that does the same.
      enabled: ids of the sites that are on at the start; None means all that are not idle.
      strategy: the passes and options that `findings` come from; None for all by default.
      formulas: pass name -> what it computes.

    Attributes (traits, `observe` them):
      enabled: frozenset of the site ids that are on.
      selected: the node, site, kernel, line or group selected, as text ("%143", "gemm_epilogue@mlp#1"); "" for none.
      evidence: the measurement that belongs to `enabled`, or None.
      shown: "before", "after" or "both" beside each other.
      status: what the measurement is doing, in words.
      measuring: whether every change is measured again; `start` sets it, `cancel` clears it.
      hulls: whether the boxes name the kernels that XLA makes of them (compiles the program, in the background).
      theme: "auto", "light" or "dark".
    """

    def __init__(
        self,
        graph: Graph,
        findings: Findings,
        *,
        measure: Callable[[Setting, OnProgress, Cancel], Any] | None = None,
        shares: Callable[[Setting, Findings, OnProgress, Cancel], Any] | None = None,
        times: Callable[[], Mapping[int, float]] | None = None,
        rates: Callable[[], Device] | None = None,
        rates_at_once: bool = False,
        after: Callable[[Setting, Findings], Graph] | None = None,
        find: Callable[[Strategy | None], Findings] | None = None,
        script: Callable[[Setting, Findings], str] | None = None,
        enabled: frozenset[str] | None = None,
        strategy: Strategy | None = None,
        formulas: Mapping[str, str] | None = None,
    ):
        self._measure_with, self._shares_with, self._rates_with = measure, shares, rates
        self._script_with, self._times_with = script, times
        self._rates_at_once = rates is not None and rates_at_once
        self._formulas = dict(formulas or {})
        self._background = Background()
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
        super().__init__(enabled=self.session.enabled, busy=IDLE | {"status": "not measured"})
        self.on_msg(self._message)
        self._ready = True
        self.refresh()

    # Scripting -----------------------------------------------------------------------------------------------------
    def option(self, name: str, option: str, value: Any) -> None:
        """Sets an option of a pass, as `Strategy` takes it, and searches again.

        Raises:
          UnknownNameError: no such pass or option. ArgumentError: the value is none of its choices.
        """
        searching = "searching again"
        self._say(searching, {"running": True, "what": searching, "done": 0, "total": 0})  # seconds, for a long program
        try:
            self.session.option(name, option, value)
        finally:
            if self.status == searching:
                self._say("not measured" if self.evidence is None else "measured")

    def undo(self) -> bool:
        """Takes the last change of sites or options back; False where there is none."""
        return self.session.undo()

    def reset(self) -> bool:
        """Goes back to what was on when it was opened."""
        return self.session.reset()

    def code(self) -> Text:
        """A Python program that reproduces what is on.

        Raises:
          ArgumentError: the explorer was made without a function.
        """
        if self._script_with is None:
            raise ArgumentError("code: this explorer has only a graph; make it with fusionlab.explore(fn, *args)")
        return Text(self._script_with(self.setting, self.findings))

    def measure(self) -> Any:
        """Measures the enabled sites now, here, and returns the evidence (also kept in `evidence`).

        Raises:
          ArgumentError: the explorer was made without something to measure with.
        """
        setting, token = self.setting, self._begin()
        return self._background.run(functools.partial(self._run, setting), token)

    def start(self) -> threading.Thread:
        """Measures in a thread of its own, now and after every change; `status` and `evidence` tell how it goes.

        A measurement that runs is cancelled.
        """
        self.measuring = self._measure_with is not None
        setting, token = self.setting, self._begin()
        return self._background.start(functools.partial(self._quietly, self._run, setting), token)

    def measure_rates(self) -> None:
        """Measures how fast this device copies and multiplies, for the roofline: seconds, at its first measurement where it is no CPU.

        Raises:
          ArgumentError: the explorer was made without something to measure with.
        """
        if self._rates_with is None:
            raise ArgumentError(
                "measure_rates: this explorer has only a graph; make it with fusionlab.explore(fn, *args)"
            )
        self.session.rates = self._rates_with()
        self.refresh()

    def cancel(self) -> None:
        """Asks the running measurement to stop, and measures no more; the evidence stays what it was."""
        self.measuring = False
        self._stop()
        self.refresh()

    def close(self) -> None:
        """Takes the explorer off the page for good; a measurement that runs is cancelled."""
        self.cancel()
        super().close()

    def save(self, path: Any) -> Path:
        """Writes .json (all of the state: `fusionlab.load` reads it back), or a picture: .svg .png .pdf .dot .html .txt, by suffix.

        Raises:
          ArgumentError: another suffix. OutputError: the file cannot be written. MissingDependencyError: PNG or PDF without the extra.
        """
        from fusionlab.output import write_file

        target = Path(path)
        content = self.export(target.suffix.lower(), str(target))
        return write_file(target, content)

    def restore(self, saved: Saved) -> None:
        """Takes over what an explorer was saved with (see `fusionlab.load`): sites, options, ledger and measurements.

        Sites that are not in this program are left out, and `problem` says so.

        Raises:
          UnknownNameError: a pass or option that does not exist; nothing is changed.
        """
        lost = self.session.restore(saved)
        if lost:
            self.problem = {"code": "changed_program", "sentence": lost}
        self.refresh()

    # Measuring -----------------------------------------------------------------------------------------------------
    def _begin(self) -> Cancel:
        if self._measure_with is None:
            raise ArgumentError("measure: this explorer has only a graph; make it with fusionlab.explore(fn, *args)")
        token = self._background.begin()
        awaited = self._background.awaited
        self._progress(token, f"waiting for {awaited} to end" if awaited else "measuring", 0, 0)
        return token

    def _run(self, setting: Setting, token: Cancel) -> Any:
        assert self._measure_with is not None
        findings = self.session.findings_of(setting)
        progress = functools.partial(self._progress, token)
        progress("measuring", 0, 0)
        try:
            evidence = self._measure_with(setting, progress, token)
            if not token.is_set():
                self.session.measured[setting] = evidence
                self.refresh()
            if self._shares_with is not None and not token.is_set():
                shares = self._shares_with(setting, findings, progress, token)
                if shares is not None and not token.is_set():
                    self.session.shares[setting] = shares
            if self._times_with is not None and not self.session.stage.times and not token.is_set():
                progress("time of each kernel", 0, 0)
                self._time_nodes(self._times_with)
            if self._rates_at_once and self.session.rates is None and not token.is_set():
                progress("rates of this device", 0, 0)
                self.measure_rates()
        except BaseException as error:
            self._finish(token, f"measurement failed: {_named(error)}", error)
            raise
        self._finish(token, "measured")
        return evidence

    def _time_nodes(self, times_with: Callable[[], Mapping[int, float]]) -> None:
        """Times take the place of bytes in the picture. What was measured before stays where the profiler gives none."""
        try:
            self.session.stage.times = times_with()
        except Exception as error:  # the profiler's, of which JAX names no kinds
            self._tell(error)

    def _quietly(self, run: Callable[[Setting, Cancel], Any], setting: Setting, token: Cancel) -> None:
        # The user's function runs here, so anything may come; the status line and the banner say what happened.
        with contextlib.suppress(Exception):
            run(setting, token)

    def _progress(self, token: Cancel, task: str, done: int, total: int) -> None:
        if not token.is_set():
            status = f"{task} {done}/{total}" if total else task
            self._say(status, {"running": True, "what": task, "done": done, "total": total})

    def _finish(self, token: Cancel, status: str, error: BaseException | None = None) -> None:
        if not self._background.end(token):  # cancelled, and perhaps another one runs already
            return
        self._say(status)
        if error is not None:
            self._tell(error)
        self.refresh()

    def _stop(self) -> None:
        if self._background.cancel():
            abandoned = ": what was running (a compilation cannot be interrupted) is abandoned, its result dropped"
            self._say("cancelled" + (abandoned if self._background.abandoned else ""))

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
            self._background.start(functools.partial(self._quietly, self._compile, self.setting), token)
        self.refresh()

    def _compile(self, _: Setting, token: Cancel) -> None:
        self._progress(token, "compiling, to see what XLA makes of it", 0, 0)
        try:
            self.session.kernels()
        except BaseException as error:
            self._finish(token, f"compiling failed: {_named(error)}", error)
            raise
        self._finish(token, "measured" if self.session.evidence is not None else "not measured")
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
        """Hands to the browser what has changed; from whatever thread."""
        with self.session.lock, self.hold_sync():
            session = self.session
            session.follow()
            self.evidence = session.evidence
            if not self._background.running and (self.evidence is not None or self.status == "measured"):
                self._say("measured" if self.evidence is not None else "not measured")
            if self.shown != session.stage.shown:
                self.shown = session.stage.shown
            self.selected = session.selected
            head = session.head()
            self.head = head | {
                "can": head["can"] | {"measure": self._measure_with is not None, "xla": session.stage.shown == "before"}
            }
            self.panel, self.scene, self.marks = session.panel(), session.scene(), session.marks()
            self.outline, self.trail = session.walk.outline(), session.walk.trail()
            self.inspector, self.hits, self.tabs = session.inspector(), session.hits(), self._tabs()

    def _tabs(self) -> list[dict[str, str]]:
        script = self._script_with(self.setting, self.findings) if self._script_with is not None else ""
        return self.session.tabs(script, awaited=self.measuring and self._background.running)

    def export(self, suffix: str, name: str) -> str | bytes:
        """The content of a file of this kind (see `save`); `name` is the file's, for the error."""
        from .files import export  # draws with much that a first picture does not need

        return export(self.session, suffix, name, self._formulas, self._saved)

    def _saved(self) -> str:
        return saved_text(self.session)

    # Showing -------------------------------------------------------------------------------------------------------
    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The live widget, and a static picture for where there is no kernel (GitHub, nbviewer, exported notebooks)."""
        bundle: Any = super()._repr_mimebundle_(**kwargs)
        data, rest = (bundle[0], bundle[1:]) if isinstance(bundle, tuple) else (bundle, ())
        session = self.session
        still = still_html(session.summary(), session.scene()["svg"], session.shown_findings)
        data = {**(data or {}), "text/html": still, "text/plain": repr(self)}
        return (data, *rest) if rest else data


def _named(error: BaseException) -> str:
    return f"[{error.code}] {error}" if getattr(error, "code", "") else f"{type(error).__name__}: {error}"  # pyright: ignore[reportAttributeAccessIssue]
