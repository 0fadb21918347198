"""The measurements of an explorer, in the background and one at a time: the enabled sites, which of them are to blame, the device."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from fusionlab.device import Device
from fusionlab.errors import ArgumentError
from fusionlab.evidence.attribution import with_savings
from fusionlab.evidence.bisection import Bisection
from fusionlab.evidence.node_times import NodeTimes
from fusionlab.evidence.scopes.scope_times import ScopeTimes
from fusionlab.fusers.report.findings import Findings
from fusionlab.progress import Clock, Progress, Stopped, Watch, pass_on, watched

from ..html.blame import FAULTS, Fault, faults_of
from ..model.setting import Setting
from .background import Background, Cancel
from .observed import IDLE
from .offering import Selecting

Measure = Callable[[Setting, Watch, Cancel], Any]
Share = Callable[[Setting, Findings, Watch, Cancel], Any]
Scopes = Callable[[Setting, Findings, Watch], NodeTimes]
Which = Callable[[Setting, Fault, Watch, Cancel], Bisection]
_Job = Callable[[Setting, Watch, Cancel], Any]


class _Told(Watch):
    """Hands the stages of one job to the bar of the explorer, and to a line where the caller waits for it; once the job is cancelled, its
    next stage or step ends it."""

    def __init__(self, lab: Measuring, token: Cancel, line: Progress = False) -> None:
        self.lab, self.token, self.line = lab, token, line or None

    def __call__(
        self, task: str, done: int = 0, total: int = 0, budget_s: float = math.inf, expected_s: float = math.inf
    ) -> None:
        if self.token.is_set():
            raise Stopped(task)
        self.lab._stage(task, done, total, budget_s, expected_s)
        pass_on(self.line, task, done, total, budget_s, expected_s)


class Measuring(Selecting):
    """The part of an `Explorer` that measures; `Explorer` documents the functions it is given."""

    _measure_with: Measure | None
    _shares_with: Share | None
    _times_with: Callable[[Watch], NodeTimes] | None
    _scopes_with: Scopes | None
    _rates_with: Callable[[Watch], Device] | None
    _which_with: Which | None
    _tune_with: Measure | None
    _rates_at_once: bool
    _background: Background
    _clock: Clock
    _began = 0.0
    _tuned_in_part = False  # whether tuning ended early, and the sites were not searched again since

    def measure(self) -> Any:
        """Measures the enabled sites now, here, and returns the evidence (also kept in `evidence`); None where it was cancelled.

        Raises:
          ArgumentError: the explorer was made without something to measure with.
        """
        return self._now(self._measured, "measurement", self._measure_with)

    def start(self) -> threading.Thread:
        """Measures in a thread of its own, now and after every change; `status` and `evidence` tell how it goes.

        A measurement that runs is cancelled.
        """
        self.measuring = self._measure_with is not None
        return self._later(self._measured, "measurement", self._measure_with)

    def which_site(self, of: str | None = None) -> Bisection:
        """Finds the sites that make the program slower, or its results worse, than before: by halving, with one program per trial.

        Args:
          of: "time" or "error"; None takes whichever the measurement found.

        Returns:
          The result (as of `fusionlab.bisect`); it is kept with these sites, and marked on those to blame.

        Raises:
          ArgumentError: nothing was measured, or the program is neither slower nor worse; or the explorer was made without a
            function.
        """
        return self._now(functools.partial(self._blamed, self._fault(of)), "bisection", self._which_with)

    def start_which(self, of: str | None = None) -> threading.Thread:
        """`which_site` in a thread of its own."""
        return self._later(functools.partial(self._blamed, self._fault(of)), "bisection", self._which_with)

    def measure_rates(self) -> None:
        """Measures how fast this device copies and multiplies, for the roofline; takes a few seconds.

        Raises:
          ArgumentError: the explorer was made without something to measure with.
        """
        self._now(self._rated, "measuring rates", self._rates_with)

    def start_rates(self) -> threading.Thread:
        """`measure_rates` in a thread of its own."""
        return self._later(self._rated, "measuring rates", self._rates_with)

    def measure_scopes(self) -> ScopeTimes:
        """Measures the time of each module and scope now, as written and with the enabled sites fused; it is kept with these sites.

        Raises:
          ArgumentError: the explorer was made without something to measure with.
        """
        self._now(self._scoped, "time by scope", self._scopes_with)
        found = self.session.scopes()
        if found is None:
            raise ArgumentError("measure_scopes: it was cancelled, or the profiler gave no kernel; see `lab.problem`")
        return found

    def start_scopes(self) -> threading.Thread:
        """`measure_scopes` in a thread of its own."""
        return self._later(self._scoped, "time by scope", self._scopes_with)

    def tune(self) -> None:
        """Measures the calls of the program on this device, as `fusionlab.tune`, and searches again.

        Raises:
          ArgumentError: the explorer was made without a function.
        """
        self._now(self._tuned, "tuning", self._tune_with)

    def start_tune(self) -> threading.Thread:
        """`tune` in a thread of its own; cancelled, what was measured until then is kept, and the sites are searched again with it."""
        return self._later(self._tuned, "tuning", self._tune_with)

    def start_option(self, name: str, option: str, value: Any) -> threading.Thread:
        """`option` in a thread of its own: what was measured stays in sight until the search has ended, and a cancel changes nothing."""
        return self._later(functools.partial(self._looked_ahead, name, option, value), "search", True)

    def cancel(self) -> None:
        """Asks the running job to stop, and measures no more; the evidence stays as it was."""
        self.measuring = False
        self._stop()
        self.refresh()

    # The jobs ------------------------------------------------------------------------------------------------------
    def _measured(self, setting: Setting, told: Watch, token: Cancel) -> Any:
        assert self._measure_with is not None
        findings = self.session.findings_of(setting)
        told("measuring")
        self._await()
        evidence = self._measure_with(setting, told, token)
        if token.is_set():
            raise Stopped("the evidence")
        self.session.measured[setting] = evidence
        self.session.blamed.pop(setting, None)  # of a measurement that this one takes the place of
        told("drawing the measurements")
        self.refresh()
        if self._shares_with is not None:
            shares = self._shares_with(setting, findings, told, token)
            if shares is not None and not token.is_set():
                self.session.shares[setting] = shares
                if evidence is not None:
                    evidence = self.session.measured[setting] = with_savings(evidence, shares)
        if self._times_with is not None and self.session.node_times is None:
            told("time of each kernel")
            self._time_nodes(functools.partial(self._times_with, told))
        if self._rates_at_once and self.session.rates is None:
            self._rated(setting, told, token)
        told("drawing the measurements")
        return evidence

    def _await(self) -> None:
        """Shows in the tabs that their measurement runs."""
        raise NotImplementedError

    def _time_nodes(self, times_with: Callable[[], NodeTimes]) -> None:
        """Times take the place of bytes in the picture. What was measured before stays where the profiler gives none."""
        try:
            times = times_with()
            self.session.node_times, self.session.stage.times = times, times.seconds
        except Stopped:
            raise
        except Exception as error:  # the profiler's, of which JAX names no kinds
            self._tell(error)

    def _blamed(self, fault: Fault, setting: Setting, told: Watch, token: Cancel) -> Bisection:
        assert self._which_with is not None
        told("which site")
        found = self._which_with(setting, fault, told, token)
        if not token.is_set():
            self.session.blamed[setting] = {**self.session.blamed.get(setting, {}), fault.of: found}
        return found

    def _fault(self, of: str | None) -> Fault:
        if of not in (None, *FAULTS):
            raise ArgumentError(f"of: got {of!r:.40}, needed None or one of {', '.join(map(repr, FAULTS))}")
        faults = [f for f in faults_of(self.session.evidence) if of in (None, f.of)]
        if not faults:
            raise ArgumentError(
                "which_site: these sites were not measured as slower or worse than before, so there is no site to look for; "
                "call lab.measure() first, or fusionlab.bisect(fn, *args)"
            )
        return faults[0]

    def _rated(self, _: Setting, told: Watch, token: Cancel) -> None:
        assert self._rates_with is not None
        told("rates of this device")
        rates = self._rates_with(told)
        if not token.is_set():
            self.session.rates = rates
            told("drawing the roof")
            self.refresh()

    def _scoped(self, setting: Setting, told: Watch, token: Cancel) -> None:
        assert self._scopes_with is not None
        assert self._times_with is not None
        findings = self.session.findings_of(setting)
        told("time of each kernel")
        if self.session.node_times is None:
            self._time_nodes(functools.partial(self._times_with, told))
        if setting.enabled:
            times = self._scopes_with(setting, findings, told)
            if not token.is_set():
                self.session.fused_times[setting] = times

    def _compiled(self, _: Setting, told: Watch, token: Cancel) -> None:
        told("compiling, to list XLA's kernels")
        self.session.kernels()

    def _tuned(self, setting: Setting, told: Watch, token: Cancel) -> None:
        assert self._tune_with is not None
        try:
            self._tune_with(setting, told, token)
        except Exception:  # the calls measured until then are in the plan file, where `fuse` finds them
            self._tuned_in_part = True
            raise
        told("searching again")
        found = self.session.search_again(told)
        self._tuned_in_part = False
        if self._background.end(token):  # what the change does to a measurement is no matter of the search
            self.session.adopt(found)

    def _looked_ahead(self, name: str, option: str, value: Any, _: Setting, told: Watch, token: Cancel) -> None:
        told("searching again")
        self.session.look_ahead(name, option, value, told)
        if self._background.end(token):  # what the change does to a measurement is no matter of the search
            self.session.option(name, option, value)

    # How they run --------------------------------------------------------------------------------------------------
    def _now(self, job: _Job, what: str, needed: Any) -> Any:
        setting, token = self.setting, self._begin(needed)
        try:
            with watched(None) as line:
                return self._background.run(functools.partial(self._run, job, what, setting, line=line), token)
        except BaseException as error:  # also while it waits for its turn; what has ended is not ended twice
            self._finish(token, f"{what} failed: {_named(error)}")
            raise

    def _later(self, job: _Job, what: str, needed: Any) -> threading.Thread:
        setting, token = self.setting, self._begin(needed)
        return self._background.start(functools.partial(self._quietly, job, what, setting), token)

    def _begin(self, needed: Any = True) -> Cancel:
        if needed is None:
            raise ArgumentError("measure: this explorer has only a graph; make it with fusionlab.explore(fn, *args)")
        token = self._background.begin()
        awaited = self._background.awaited
        _Told(self, token)(f"waiting for {awaited} to end" if awaited else "measuring")
        return token

    def _run(self, job: _Job, what: str, setting: Setting, token: Cancel, line: Progress = False) -> Any:
        result = None
        try:
            result = job(setting, _Told(self, token, line), token)
        except Stopped:
            pass  # and said so, when it was cancelled
        except BaseException as error:
            self._finish(token, f"{what} failed: {_named(error)}", error)
            self._settle()
            raise
        self._finish(token, "measured")
        self._settle()
        return result

    def _settle(self) -> None:
        """Where tuning ended early, and nothing else waits to run: searches again with what it measured, and shows what that changes."""
        token = self._background.follow() if self._tuned_in_part else None
        if token is None:
            return
        status, told = self.status, _Told(self, token)
        try:
            told("searching again")
            found = self.session.search_again(told)
        except Stopped:
            return  # the next job to end searches
        except Exception as error:  # the user's function was traced; a plan file may be wrong
            self._finish(token, f"search failed: {_named(error)}", error)
            return
        self._tuned_in_part = False
        changed = _decided(found) != _decided(self.session.findings)
        if self._background.end(token) and changed:
            self.session.adopt(found)
        self._finish(token, "searched again with what tuning had measured" if changed else status)

    def _quietly(self, job: _Job, what: str, setting: Setting, token: Cancel) -> None:
        # The user's function runs here, so anything may come; the status line and the banner say what happened.
        try:
            self._run(job, what, setting, token)
        except Exception as error:
            if not token.is_set():
                self._tell(error)

    def _finish(self, token: Cancel, status: str, error: BaseException | None = None) -> None:
        if not self._background.end(token) and (token.is_set() or self._background.running):
            return  # cancelled, or beside another one that runs yet
        self._clock.end()
        self._say(status)
        if error is not None:
            self._tell(error)
        self.refresh()

    def _stop(self) -> None:
        task = self._clock.task
        if not self._background.cancel():
            return
        self._clock.drop()
        compiles = "a compilation cannot be interrupted: " if "compiling" in task else ""
        abandoned = f": the running job ({compiles}{task}) is abandoned and its result dropped"
        self._say("cancelled" + (abandoned if self._background.abandoned else ""))

    def _stage(
        self,
        task: str,
        done: int = 0,
        total: int = 0,
        budget_s: float = math.inf,
        expected_s: float = math.inf,
        can_cancel: bool = True,
    ) -> None:
        """Sends the running stage to the browser, with its start and expected duration: the clock there ticks by itself."""
        clock = self._clock
        if clock.tell(task, done, total, budget_s, expected_s):
            self._began = time.time()
        times = {"began": self._began, "seconds": clock.seconds, "left": clock.left_s}
        stage = {"running": True, "what": task, "done": done, "total": total, "cancel": can_cancel}
        self._say(clock.step, stage | times)

    @contextlib.contextmanager
    def _aside(self, task: str) -> Iterator[None]:
        """Wraps a task that keeps the kernel busy for a while, so that nothing else can run: shows its name and a clock meanwhile."""
        before = self.status
        if self._background.running:  # that goes on, and is told again by its next step
            yield
            return
        self._stage(task, can_cancel=False)  # a click would wait behind it; the kernel's own interrupt ends it
        try:
            yield
        finally:
            self._clock.end()
            if self.status == task and not self._background.running:
                self._say(before, IDLE)


def _decided(found: Findings) -> list[Any]:
    """What a search decided on each site: equal for two that decided alike."""
    return [site.to_dict() for site in (*found.candidates, *found.rejections)]


def _named(error: BaseException) -> str:
    return f"[{error.code}] {error}" if getattr(error, "code", "") else f"{type(error).__name__}: {error}"  # pyright: ignore[reportAttributeAccessIssue]
