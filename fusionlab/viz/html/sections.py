"""Pieces of HTML that report and widget share: tables, legend, cards of sites, inspector lines. All text is escaped."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape as _escape
from typing import Any

from fusionlab.errors import REJECTIONS
from fusionlab.evidence.units import binary_bytes
from fusionlab.fusers.engine.grouping import STATE_WORDS

from ..markup import table
from ..model.alike import SiteDict, alike
from ..palette import QUIET


def _e(value: Any) -> str:
    return _escape(str(value))


def legend(view: Mapping[str, Any]) -> str:
    """The legend of a view model as an HTML list; "" when there is no site."""
    asked = [p for p in view["passes"] if p["sites"] or p["declined"]]
    if not asked:
        return ""
    hue = "--pass:{}".format
    items = [(hue(p["colour"]), "applied", p["name"]) for p in asked]
    items += [(hue(QUIET), state, word) for state, word in STATE_WORDS.items()]
    inner = "".join(
        f'<li><span class="fl-swatch {state}" style="{style}"></span>{_e(word)}</li>' for style, state, word in items
    )
    return f'<ul class="fl-legend">{inner}</ul>'


def passes_html(view: Mapping[str, Any]) -> str:
    """Every pass asked, those without a site too."""
    rows = [
        [
            p["name"],
            (p["formula"], "mono"),
            p["applied"],
            p["sites"] - p["applied"],
            p["declined"],
        ]
        for p in view["passes"]
    ]
    return table(["pass", "computes", *STATE_WORDS.values()], rows, (2, 3, 4))


def _card(sites: list[SiteDict], colours: Mapping[str, str], inside: list[str]) -> str:
    first, where = sites[0], sites[0]["source"]
    title = f"{first['id']}" + (f" and {len(sites) - 1} more like it" if len(sites) > 1 else "")
    others = ", ".join(s["id"] for s in sites[1:])
    parts = [f"<h3>{_e(title)}</h3>"]
    parts += [f"<p><code>{_e(where['where'])}: {_e(where['text'])}</code></p>"] if where else []
    parts += [f"<div>{text}</div>" for text in inside]
    parts += [f"<details><summary>the others</summary><p>{_e(others)}</p></details>"] if others else []
    colour = colours.get(first["pass"], QUIET)
    return f'<div class="card {first["state"]}" style="border-left-color:{colour}">{"".join(parts)}</div>'


def _colours(view: Mapping[str, Any]) -> dict[str, str]:
    return {p["name"]: p["colour"] for p in view["passes"]}


def candidates_html(view: Mapping[str, Any]) -> str:
    """The sites that can be, or are, fused: formula, node counts, notes, backends with their verdicts."""
    sites = [s for s in view["sites"] if s["state"] != "declined"]
    if not sites:
        return "<h3>Can be fused</h3><p>Nothing: no pass asked matched a site.</p>"
    keys = (
        "pass",
        "text",
        "state",
        "source",
        "nodes_before",
        "nodes_after",
        "arithmetic",
        "notes",
        "backends",
        "paired",
    )
    groups = alike([s | {"paired": _backward_text(s)} for s in sites], keys)
    told = "".join(_card(group, _colours(view), _candidate(group[0])) for group in groups)
    return f"<h3>{_heading(sites)}</h3>{told}"


def _heading(sites: list[SiteDict]) -> str:
    """Of the sites that can be, or are, fused."""
    states = {s["state"] for s in sites}
    return " and ".join(STATE_WORDS[state] for state in ("applied", "candidate") if state in states).capitalize()


def _candidate(s: Mapping[str, Any]) -> list[str]:
    """The lines of a card about a candidate."""
    lines = [f"<code>{_e(s['text'])}</code>, {s['nodes_before']} nodes → {s['nodes_after']}, {STATE_WORDS[s['state']]}"]
    lines += [_e(s["paired"])] if s["paired"] else []
    remarks = ([f"products in {s['arithmetic']}"] if s["arithmetic"] else []) + s["notes"]
    lines += [f'<span class="quiet">{_e(n)}</span>' for n in remarks]
    rows = [[b["name"], b["verdict"], b["reason"]] for b in s["backends"]]
    return lines + ([table(["backend", "verdict", "reason"], rows)] if rows else [])


def _backward_text(site: Mapping[str, Any]) -> str:
    """The sentence about a site's backward pass; "" if the program does not contain it."""
    pair = site["backward"]
    if pair is None:
        return ""
    if pair["fused"]:
        fused = STATE_WORDS[site["state"]].capitalize()
        return f"{fused} with its backward pass here ({len(pair['nodes'])} of its nodes are replaced): {pair['text']}"
    return f"Its backward pass here ({pair['text']}) stays as it is: {pair['stays']}"


def declined_html(view: Mapping[str, Any]) -> str:
    """The declined sites by code: sentence, distance, and the edit that would help."""
    sites = [s for s in view["sites"] if s["state"] == "declined"]
    out = [] if sites else ["<p>None.</p>"]
    for same_code in alike(sites, ("code",)):
        code = same_code[0]["code"]
        out.append(f"<details open><summary>{_e(code)} ({len(same_code)}): {_e(REJECTIONS.get(code, ''))}</summary>")
        for group in alike(same_code, ("pass", "source", "edit", "matched", "total")):
            s = group[0]
            inside = [f"{_e(s['text'])} <span class='quiet'>({s['matched']} of {s['total']} matched)</span>"]
            inside += [f"Edit: {_e(s['edit'])}"] if s["edit"] else []
            inside += [f"Taken by {_e(s['winner'])}"] if s["winner"] else []
            out.append(_card(group, _colours(view), inside))
        out.append("</details>")
    return "".join(out)


def structures_html(view: Mapping[str, Any]) -> str:
    """The structures of the sites, alike ones in one row; "" without structures."""
    rows = []
    for group in alike(view["structures"], ("kind", "text")):
        where = list(dict.fromkeys(s["source"]["where"] for s in group if s["source"]))
        named = group[0]["id"] + (f" and {len(group) - 1} more" if len(group) > 1 else "")
        rows.append(
            [(named, "mono"), len(group), group[0]["text"], ", ".join(where[:3]) + (", ..." if where[3:] else "")]
        )
    heads = ["structure", "how many", "what it is", "where"]
    return table(heads, rows, (1,))


def lints_html(view: Mapping[str, Any]) -> str:
    """The lints, each with its edit; "" without lints."""
    rows = []
    for lint in view["lints"]:
        where = lint["source"]["where"] if lint["source"] else ""
        rows.append([(lint["id"], "mono"), lint["sentence"], lint["edit"], where])
    if not rows:
        return ""
    tried = "<p>Not measured, and no fusion: <code>fusionlab.advise(fn, *args)</code> tries each edit.</p>"
    return tried + table(["lint", "what it is", "edit", "where"], rows)


def residuals_html(view: Mapping[str, Any]) -> str:
    """The residuals that the fused forward keeps for the backward pass, alike sites in one row; "" when nothing is kept."""
    applied = [s for s in view["sites"] if s["state"] == "applied"]
    kept = [{"pass": s["pass"], "id": s["id"], "r": r} for s in applied for r in s["residuals"]]
    if not kept:
        return ""
    rows = []
    for group in alike(kept, ("pass", "r")):
        r, n = group[0]["r"], len(group)
        site = group[0]["id"] + (f" and {n - 1} more" if n > 1 else "")
        size, total = binary_bytes(r["bytes"]), binary_bytes(n * r["bytes"])
        rows.append([site, r["name"], (r["type"], "mono"), size, total, ", ".join(r["readers"])])
    heads = ["site", "residual", "type", "size", "together", "read by"]
    return "<h3>Kept for the backward pass</h3>" + table(heads, rows, (3, 4))
