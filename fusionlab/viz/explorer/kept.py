"""The browser's copy for the time without Python: a record of the explorer, sent once it is on screen and idle, and again after
changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..cards.album import Album
from ..html.page import items, record_data
from ..markup import ID_PREFIX
from .background import aside
from .session import Session

REST = 1.5  # seconds without a change before a record is made
MOST_BYTES = 1_500_000  # of a record
MOST_SECONDS = 1.0  # of drawing its pictures: a second of the interpreter, while nothing is measured


def kept(session: Session) -> dict[str, Any]:
    """The record of what an explorer shows now (`html.page.record_data`), with the picture of it, every card closed."""
    with session.lock:
        (graph, findings, enabled), view = session.drawn(), session.summary()
        album, decided = Album(graph, findings), len(session.ledger)
        album.pane, album.times = session.stage.pane, session.stage.times_shown
        album.drift = session.stage.drift_shown
    with aside():
        return _record(album, enabled, view) | {"decided": decided}


def _record(album: Album, enabled: frozenset[str], view: Mapping[str, Any]) -> dict[str, Any]:
    scene = {"svg": album.svg(enabled, ID_PREFIX), "items": items(album, enabled, ID_PREFIX)}
    record = record_data(album, enabled, view, room=MOST_BYTES, max_seconds=MOST_SECONDS)
    return {"scene": scene} | record


class Keeper:
    """Sends a record to the browser, in a thread of its own, once nothing has changed for `REST` seconds.

    Args:
      session: what is shown.
      busy: whether something is measured or compiled; a record waits for its end.
      send: hands a message to the browser.
    """

    def __init__(self, session: Session, busy: Callable[[], bool], send: Callable[[dict[str, Any]], None]) -> None:
        self._session, self._busy, self._send = session, busy, send
        self._timer: threading.Timer | None = None
        self._sent: set[Any] = set()
        self._rest = REST

    def ask(self) -> None:
        """The browser shows the explorer, and keeps nothing yet."""
        self._sent = set()
        self._wait()

    def touched(self) -> None:
        """Something has changed."""
        if self._timer is not None:
            self._wait()

    def stop(self) -> None:
        """No record is sent any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _wait(self) -> None:
        self.stop()
        self._timer = threading.Timer(self._rest, self._keep)
        self._timer.daemon = True
        self._timer.start()

    def _keep(self) -> None:
        session = self._session
        if self._busy():
            self._wait()
            return
        side = "after" if session.stage.shown == "after" else "before"
        key = side, session.setting, session.stage.pane, id(session.stage.times_shown), id(session.stage.drift_shown)
        if key not in self._sent:
            start = time.monotonic()
            self._send({"type": "kept", "side": side, "data": kept(session)})
            self._sent = {k for k in self._sent if k[0] != side} | {key}
            self._rest = max(REST, 3 * (time.monotonic() - start))  # a long program is not recorded after every click
