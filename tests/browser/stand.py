"""The explorer in a bare page: its own module draws it, and a binding of the browser's stands in for Jupyter's messages.

`window.flJupyter` stands in for what Jupyter tells of a kernel: { emit, layout, kernel, manager }.
"""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import Page

from fusionlab.viz.browser import asset, module
from fusionlab.viz.explorer.widget import Explorer

TRAITS = (
    "theme",
    "head",
    "problem",
    "panel",
    "outline",
    "trail",
    "scene",
    "marks",
    "inspector",
    "tabs",
    "hits",
    "busy",
)
MOUNT = """first => {
    const watchers = new Map();
    const emit = (name, ...told) => { for (const f of [...watchers.get(name) || []]) f(...told); };
    const set = changes => {
        Object.assign(first, changes);
        for (const name of Object.keys(changes)) emit(`change:${name}`);
    };
    const layout = { comm_live: true, comm: { comm_id: "beside" } }, kernel = { id: "one", status: "idle", connectionStatus: "connected" };
    const manager = { kernel };
    window.flJupyter = { emit, layout, kernel, manager };
    (BEFORE)(first);
    window.flRender({ el: document.getElementById("home"), model: {
        get: name => name === "layout" ? layout : first[name], set: (name, value) => set({ [name]: value }), save_changes: () => {},
        on: (name, f) => watchers.set(name, (watchers.get(name) || new Set()).add(f)), off: (name, f) => watchers.get(name)?.delete(f),
        send: message => window.flSend(JSON.stringify(message)).then(changes => set(JSON.parse(changes))), widget_manager: manager,
    } });
    window.flPoll = () => window.flSend('null').then(changes => set(JSON.parse(changes)));
}"""
POLL = "ms => { setInterval(() => window.flPoll(), ms); }"


def stand(page: Page, lab: Explorer, live: bool = False, before: str = "() => {}") -> None:
    """Shows an explorer of this process in a fresh page, which talks with it until the page goes; `before` is done before it is drawn.

    `live`: what changes in the background is told as well, within a twentieth of a second; else what a message changed.
    """
    told = {name: getattr(lab, name) for name in TRAITS}
    first = json.loads(json.dumps(told))

    def send(_: Any, message: str) -> str:
        nonlocal told
        content = json.loads(message)
        if content is not None:
            lab._message(lab, content)
        before, told = told, {name: getattr(lab, name) for name in TRAITS}
        return json.dumps({name: value for name, value in told.items() if value is not before[name]})

    page.expose_binding("flSend", send)
    code = module().replace("export default", "const widget =").replace("export function", "function")
    page.set_content(
        f'<!DOCTYPE html><meta charset="utf-8"><style>{asset("explorer.css")} body {{ margin: 0; }}</style><div id="home"></div>'
        f'<script type="module">{code}\nwindow.flRender = widget.render;</script>'
    )
    page.wait_for_function("() => !!window.flRender")
    page.evaluate(MOUNT.replace("BEFORE", before), first)
    if live:
        page.evaluate(POLL, 50)
