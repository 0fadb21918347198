"""The setting of an explorer, and every decision that led to it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from fusionlab.errors import ArgumentError, unknown_name
from fusionlab.fusers import Strategy
from fusionlab.fusers.report.findings import Findings
from fusionlab.progress import Progress

from ..model.panel import options_of, with_option
from ..model.setting import Decision, Ledger, Setting
from .toggles import Toggles

Find = Callable[[Strategy | None, Progress], Findings]


class Decided:
    """The sites and options that are on, with undo and a ledger; the args are those of `Session`."""

    def __init__(
        self,
        findings: Findings,
        enabled: frozenset[str] | None,
        strategy: Strategy | None,
        find: Find | None,
        changed: Callable[[], None],
    ) -> None:
        on = frozenset(c.id for c in findings.select()) if enabled is None else frozenset(enabled)
        self.lock = threading.RLock()  # held while the state changes, and by who reads much of it at once
        self.findings = findings
        self.toggles = Toggles(findings, on, self._toggled)
        self.setting = self.opened = Setting(on, strategy)
        self.measured: dict[Setting, Any] = {}
        self._found = {strategy: findings}
        self._find, self._changed = find, changed
        self._decisions = [Decision("opened", self.setting)]
        self._past: list[Setting] = []
        self._undone: list[Setting] = []

    @property
    def enabled(self) -> frozenset[str]:
        return self.setting.enabled

    @property
    def ledger(self) -> Ledger:
        """Every decision so far, with its measurements."""
        return Ledger(self._decisions, self.measured)

    @property
    def can_undo(self) -> bool:
        return bool(self._past)

    @property
    def can_redo(self) -> bool:
        return bool(self._undone)

    @property
    def can_reset(self) -> bool:
        return self.setting != self.opened

    def decide(self, words: str, setting: Setting) -> bool:
        """Makes this the setting and writes a line into the ledger; False where it is the setting already.

        Raises:
          UnknownNameError: a site, pass or option that is not there; nothing is changed.
        """
        if setting == self.setting:
            return False
        self._past.append(self.setting)
        try:
            self._become(setting)
        except BaseException:
            self._past.pop()
            raise
        self._undone = []
        self._decisions.append(Decision(words, setting))
        self._changed()
        return True

    def undo(self) -> bool:
        """Goes back to the setting before the last change; False if there is no such change. The ledger keeps both lines."""
        return self._step(self._past, self._undone, "undone", "before")

    def redo(self) -> bool:
        """Makes the change again that undo took back last; False if there is no such change, or another change was made since."""
        return self._step(self._undone, self._past, "redone", "after")

    def _step(self, taken: list[Setting], left: list[Setting], word: str, options: str) -> bool:
        if not taken:
            return False
        setting, was = taken[-1], self.setting
        self._become(setting)
        taken.pop()
        left.append(was)
        words = _words(self.findings, was.enabled, setting.enabled)
        self._decisions.append(Decision(f"{word}: {words or f'options as {options}'}", setting))
        self._changed()
        return True

    def reset(self) -> bool:
        """Restores the sites that were on when it was opened; undo brings the previous setting back."""
        return self.decide("reset", self.opened)

    def group(self, ids: list[str], on: bool) -> bool:
        """Switches sites on or off together, as one decision."""
        sites = frozenset(s for name in ids for s in self.toggles.sites(name))
        return self.toggles.set(self.enabled | sites if on else self.enabled - sites)

    def option(self, name: str, option: str, value: Any) -> bool:
        """Sets an option of a pass and searches again: enabled sites stay on, new ones are on unless idle.

        Raises:
          ArgumentError: this explorer cannot search again, or the option does not take the value. UnknownNameError: no such option.
        """
        strategy = self._with(name, option, value)
        found = self._findings(strategy)
        new = {c.id for c in found.select()} - {c.id for c in self.findings.candidates}
        on = self.enabled | new
        enabled = frozenset(c.id for c in found.candidates if c.id in on)
        return self.decide(f"{name}: {option}={value!r}", Setting(enabled, strategy))

    def search_again(self, progress: Progress = False) -> Findings:
        """The findings with the options of now, searched anew as the choices on this device have changed; nothing is changed."""
        assert self._find is not None
        return self._find(self.setting.strategy, progress)

    def adopt(self, found: Findings) -> None:
        """Takes over new findings, with the sites that are fused by default on. Those before are of other implementations: they are
        neither undone to nor what a reset restores, and what was measured with them is gone."""
        strategy = self.setting.strategy
        setting = Setting(frozenset(c.id for c in found.select()), strategy)
        with self.lock:
            self._found, self._past, self._undone, self.opened = {strategy: found}, [], [], setting
            self.measured.clear()
            self._become(setting)
        self._decisions.append(Decision("tuned", setting))
        self._changed()

    def look_ahead(self, name: str, option: str, value: Any, progress: Progress) -> None:
        """Searches with an option set, and keeps what it finds for `option`, which it raises as; nothing is changed."""
        self._findings(self._with(name, option, value), progress)

    def _with(self, name: str, option: str, value: Any) -> Strategy:
        if self._find is None:
            raise ArgumentError("option: this explorer has only findings; make it with fusionlab.explore(fn, *args)")
        known = {o["name"]: o for o in options_of(name, self.setting.strategy)}
        if option not in known:
            raise unknown_name(f"option of {name}", option, known)
        choices = known[option]["choices"]
        if not _is_choice(value, choices):
            raise ArgumentError(f"{name}.{option}: got {value!r}, needed one of {', '.join(map(repr, choices))}")
        return with_option(self.setting.strategy, self.findings.passes, name, option, value)

    def findings_of(self, setting: Setting) -> Findings:
        """The findings with the options of a setting."""
        return self._findings(setting.strategy)

    def _become(self, setting: Setting) -> None:
        found = self._findings(setting.strategy)
        unknown = setting.enabled - {c.id for c in found.candidates}
        if unknown:
            raise unknown_name("site", min(unknown), [c.id for c in found.candidates])
        with self.lock:
            self.findings, self.setting = found, setting
            self.toggles.adopt(found, setting.enabled)

    def _findings(self, strategy: Strategy | None, progress: Progress = False) -> Findings:
        if strategy not in self._found:
            if self._find is None:
                raise ArgumentError(
                    "strategy: this explorer has only findings; make it with fusionlab.explore(fn, *args)"
                )
            self._found[strategy] = self._find(strategy, progress)
        return self._found[strategy]

    def _toggled(self, enabled: frozenset[str]) -> None:
        setting = Setting(enabled, self.setting.strategy)
        self.decide(_words(self.findings, self.enabled, enabled), setting)


def _is_choice(value: Any, choices: Sequence[Any] | None) -> bool:
    """Whether an option takes a value: any where there are no choices, else an equal one of the same type (True is no 1)."""
    if choices is None:
        return True
    return any(value is c or (value == c and type(value) is type(c)) for c in choices)


def _words(findings: Findings, before: frozenset[str], after: frozenset[str]) -> str:
    """The difference between two sets of sites, in words: a site, a whole pass, or a number."""
    off, on = before - after, after - before
    changes = ("off", off, after), ("on", on, before)
    return ", ".join(_change(findings, word, changed, others) for word, changed, others in changes if changed)


def _change(findings: Findings, word: str, changed: frozenset[str], others: frozenset[str]) -> str:
    """Which sites are off now, where `others` are still on; or on now, where `others` were on already."""
    if len(changed) == 1:
        return f"{min(changed)} {word}"
    of = {c.pass_name for c in findings.candidates if c.id in changed}
    whole = {c.id for c in findings.candidates if c.pass_name in of}
    if len(of) != 1:
        return f"{len(changed)} sites {word}"
    if changed == whole or others.isdisjoint(whole):
        return f"{min(of)} {word} ({len(changed)} sites)"
    if changed < whole:
        return f"{min(of)}: {len(changed)} of {len(whole)} sites {word}"
    return f"{len(changed)} sites {word}"
