"""The observable state of an explorer: the traits that the browser draws, and the state of its session."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import anywidget
import traitlets

from fusionlab.fusers.report.findings import Findings
from fusionlab.graph.program.graph import Graph

from ..browser import asset, module
from ..model.setting import Ledger, Setting
from .session import Session
from .toggles import Toggles

IDLE = {"running": False, "what": "", "done": 0, "total": 0}


class Observed(anywidget.AnyWidget):
    """The traits of an explorer (documented at `Explorer`) and its session, and how status and errors reach them."""

    _esm = module()
    _css = asset("explorer.css")

    enabled = traitlets.Instance(frozenset, args=())
    selected = traitlets.Unicode("")
    evidence = traitlets.Any(None, allow_none=True)
    shown = traitlets.Enum(["before", "after", "both"], "before")
    status = traitlets.Unicode("not measured")
    measuring = traitlets.Bool(False)
    hulls = traitlets.Bool(False)
    theme = traitlets.Enum(["auto", "light", "dark"], "auto").tag(sync=True)

    # What the browser draws.
    head: Any = traitlets.Dict().tag(sync=True)
    panel: Any = traitlets.Dict().tag(sync=True)
    scene: Any = traitlets.Dict().tag(sync=True)
    marks: Any = traitlets.Dict().tag(sync=True)
    inspector: Any = traitlets.Dict().tag(sync=True)
    outline: Any = traitlets.Dict().tag(sync=True)
    trail: Any = traitlets.List().tag(sync=True)
    tabs: Any = traitlets.List().tag(sync=True)
    hits: Any = traitlets.Dict().tag(sync=True)
    busy: Any = traitlets.Dict().tag(sync=True)
    problem: Any = traitlets.Any(None, allow_none=True).tag(sync=True)

    session: Session

    @property
    def graph(self) -> Graph:
        """The original program."""
        return self.session.graph

    @property
    def findings(self) -> Findings:
        """The findings in the program, with the current options."""
        return self.session.findings

    @functools.cached_property  # and no property: IPython completes its keys
    def toggles(self) -> Toggles:
        """Pass name or site id -> switched on?; assign to switch."""
        return self.session.toggles

    @property
    def setting(self) -> Setting:
        """The current setting: sites and options."""
        return self.session.setting

    @property
    def ledger(self) -> Ledger:
        """Every decision so far, with its measurements."""
        return self.session.ledger

    def _say(self, status: str, busy: Mapping[str, Any] = IDLE) -> None:
        self.status = status
        self.busy = {**busy, "status": status}

    def _tell(self, error: BaseException) -> None:
        self.problem = {"code": _code(error), "sentence": str(error)}


def _code(error: BaseException) -> str:
    return str(getattr(error, "code", "")) or type(error).__name__
