"""The browser's messages to an explorer: each is the call that a script would make."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fusionlab.errors import ArgumentError

if TYPE_CHECKING:
    from .widget import Explorer

Message = Mapping[str, Any]
_MIME = {
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".pdf": "application/pdf",
    ".dot": "text/vnd.graphviz",
    ".json": "application/json",
    ".html": "text/html",
    ".txt": "text/plain",
}


def act(lab: Explorer, message: Message) -> None:
    """Performs the action of a message.

    Raises:
      ArgumentError: it is not a message of the explorer's. Also the errors of the call it makes.
    """
    kind = message.get("type")
    if kind not in _ACTIONS:
        raise ArgumentError(f"message: got the type {kind!r:.80}, needed one of {', '.join(_ACTIONS)}")
    _ACTIONS[kind](lab, message)


def _select(lab: Explorer, message: Message) -> None:
    session = lab.session
    item = str(message["id"])
    if message.get("reveal"):  # from outside the picture
        session.walk.visit(item)
        lab.refresh()
        return
    name = session.clicked(item)
    if name is not None:
        session.select(name, reveal=False)
        lab.refresh()


def _fold(lab: Explorer, message: Message) -> None:
    lab.session.fold(str(message["id"]))
    lab.refresh()


def _step(lab: Explorer, message: Message) -> None:
    lab.session.walk.step(str(message["id"]), int(message["by"]))
    lab.refresh()


def _outline(lab: Explorer, message: Message) -> None:
    lab.session.walk.expand(str(message["id"]))
    lab.refresh()


def _more(lab: Explorer, _: Message) -> None:
    lab.session.walk.more()
    lab.refresh()


def _pane(lab: Explorer, message: Message) -> None:
    if lab.session.stage.fit(float(message["width"]), float(message["height"])):
        lab.refresh()


def _toggle(lab: Explorer, message: Message) -> None:
    lab.toggles[str(message["name"])] = bool(message["on"])


def _all(lab: Explorer, message: Message) -> None:
    on = frozenset(c.id for c in lab.findings.candidates) if message["on"] else frozenset()
    lab.toggles.set(on)


def _download(lab: Explorer, message: Message) -> None:
    suffix = str(message["suffix"])
    content = lab.export(suffix, f"a file that ends in {suffix}")
    encoded = {"text": content} if isinstance(content, str) else {"base64": base64.b64encode(content).decode()}
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in lab.graph.name)[:60] or "graph"
    lab.send(
        {"type": "download", "name": name + suffix, "mime": _MIME.get(suffix, "application/octet-stream"), **encoded}
    )


def _dismiss(lab: Explorer, _: Message) -> None:
    lab.problem = None


_ACTIONS: dict[str, Callable[[Explorer, Message], Any]] = {
    "select": _select,
    "pick": lambda lab, m: lab.select(m["name"]),
    "fold": _fold,
    "step": _step,
    "outline": _outline,
    "hit": lambda lab, m: lab.hit(int(m["index"])),
    "keep": lambda lab, _: lab.keep(),
    "more": _more,
    "pane": _pane,
    "toggle": _toggle,
    "group": lambda lab, m: lab.session.group([str(i) for i in m["ids"]], bool(m["on"])),
    "option": lambda lab, m: lab.start_option(str(m["pass"]), str(m["name"]), m["value"]),
    "all": _all,
    "reset": lambda lab, _: lab.reset(),
    "undo": lambda lab, _: lab.undo(),
    "redo": lambda lab, _: lab.redo(),
    "search": lambda lab, m: lab.search(str(m["text"])),
    "shown": lambda lab, m: setattr(lab, "shown", m["value"]),
    "hulls": lambda lab, m: setattr(lab, "hulls", bool(m["on"])),
    "measure": lambda lab, _: lab.start(),
    "which": lambda lab, m: lab.start_which(m.get("of")),
    "rates": lambda lab, _: lab.start_rates(),
    "scopes": lambda lab, _: lab.start_scopes(),
    "tune": lambda lab, _: lab.start_tune(),
    "cancel": lambda lab, _: lab.cancel(),
    "export": _download,
    "dismiss": _dismiss,
}
