"""One self-contained HTML report: no script, style, font or picture is loaded from anywhere.

The same view model as the widget: picture, inspector, ledger and recorded measurements. Clicking works without a
kernel; switching sites and measuring need one, and the page says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from functools import cache
from html import escape as _escape
from importlib.resources import files
from typing import Any

from fusionlab.errors import REJECTIONS
from fusionlab.fusers.findings import Findings
from fusionlab.graph.ir import Graph

from .dot import dom_id, dot_of_view
from .evidence_view import environment_dict, evidence_dict, evidence_tables, headline
from .inspector import bytes_text, node_dict
from .render import to_svg
from .view_model import view_model


def report_html(
    graph: Graph,
    findings: Findings | None = None,
    *,
    enabled: Collection[str] | None = (),
    evidence: Any = None,
    after: Graph | None = None,
    environment: Mapping[str, Any] | None = None,
    formulas: Mapping[str, str] | None = None,
    title: str | None = None,
    engine: str | None = None,
    **view_options: Any,
) -> str:
    """A whole HTML page about a graph, what was found in it and what was measured.

    Args:
      graph, findings, enabled, evidence, formulas: as for `view_model`.
      after: the graph with the enabled sites fused, drawn below the original.
      environment: what to print under "Environment": name -> value.
      title: the page's title; the graph's name without it.
      engine: layout engine, as for `to_svg`.
      **view_options: further options of `view_model`.
    """
    view = view_model(graph, findings, enabled=enabled, evidence=evidence, formulas=formulas, **view_options)
    inspector = _inspector_data(graph, findings, enabled, view, "fl-")
    title = title or f"FusionLab: {view['title']}"
    body = [
        f"<h1>{_e(title)}</h1>",
        f'<p class="lead">{_e(view["header"])}</p>',
        legend(view),
        "<h2>Graph</h2>",
        '<div class="split">',
        f'<div class="fl-graph" tabindex="0" role="group" aria-label="graph">{picture(view, "fl-", engine)}</div>',
        '<aside class="inspector" id="fl-inspector" aria-live="polite"><h3>Inspector</h3>'
        '<p class="quiet">Click a box, or reach it with the Tab key and press Enter.</p></aside>',
        "</div>",
    ]
    if after is not None:
        after_view = view_model(after, None, **view_options)
        inspector |= _inspector_data(after, None, None, after_view, "fl-after-")
        body += [
            f"<h2>After fusion: {len(graph):,} nodes → {len(after):,}</h2>",
            f'<div class="fl-graph">{picture(after_view, "fl-after-", engine)}</div>',
        ]
    if findings is not None:
        body += [_passes(view), _candidates(view), "<h2>Declined</h2>" + declined_html(view), _residuals(view)]
    body += [_evidence(view, evidence), _environment({**environment_dict(evidence), **(environment or {})}, findings)]
    body.append(
        "<footer>A record made by FusionLab. Switching sites on and off and measuring again need a live kernel: "
        "<code>fusionlab.explore(fn, *args)</code> in a notebook.</footer>"
    )
    return _page(title, "\n".join(body), inspector)


def evidence_html(evidence: Any, *, title: str = "FusionLab: before and after") -> str:
    """A whole HTML page about a measurement alone: headline, plots, tables, environment."""
    measured = evidence_dict(evidence)
    body = [
        f"<h1>{_e(title)}</h1>",
        f'<p class="lead">{_e(headline(measured))}</p>',
        _evidence({"evidence": measured}, evidence),
        _environment(environment_dict(evidence), None),
        "<footer>A record made by FusionLab; measuring again needs the program itself.</footer>",
    ]
    return _page(title, "\n".join(body), {})


def graph_html(
    graph: Graph, findings: Findings | None = None, *, enabled: Collection[str] | None = (), engine: str | None = None
) -> str:
    """A static picture with header and legend, for `_repr_html_`: no script, nothing to install."""
    view = view_model(graph, findings, enabled=enabled)
    # Ids must not meet those of another picture in the same notebook; the content tells them apart.
    prefix = dom_id(f"fl {view['header']} {len(view['boxes'])}") + "-"
    return (
        f'<div class="fl">{style()}<p class="fl-header">{_e(view["header"])}</p>'
        f'{legend(view)}<div class="fl-graph" style="max-height:640px">{picture(view, prefix, engine)}</div></div>'
    )


def picture(view: Mapping[str, Any], id_prefix: str = "fl-", engine: str | None = None) -> str:
    """The SVG of a view model, ready to stand inside HTML."""
    return inline_svg(to_svg(dot_of_view(view, id_prefix=id_prefix), engine=engine))


def inline_svg(svg: str) -> str:
    """An SVG text without XML prologue, comments, metadata and namespace declarations."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", svg, flags=re.S)
    return re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", svg)


def _page(title: str, body: str, inspector: Mapping[str, Any]) -> str:
    data = json.dumps(inspector, sort_keys=True).replace("<", "\\u003c")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_e(title)}</title>\n<style>\n{_asset('explorer.css')}\n{_asset('report.css')}\n</style>\n</head>\n"
        f'<body class="fl">\n<main>\n{body}\n</main>\n'
        f'<script type="application/json" id="fl-data">{data}</script>\n<script>\n{_asset("report.js")}\n</script>\n'
        "</body>\n</html>\n"
    )


def style() -> str:
    """The style sheet all pictures share, as an HTML element."""
    return f"<style>{_asset('explorer.css')}</style>"


@cache
def _asset(name: str) -> str:
    return (files("fusionlab.viz") / name).read_text(encoding="utf-8")


def _e(value: Any) -> str:
    return _escape(str(value))


def table(heads: Collection[str], rows: Collection[Collection[Any]], numeric: Collection[int] = ()) -> str:
    """An HTML table of escaped texts; a cell that is a `(text, css class)` pair carries that class."""
    if not rows:
        return ""
    head = "".join(f'<th{_num(i, numeric)} scope="col">{_e(h)}</th>' for i, h in enumerate(heads))
    body = "".join("<tr>" + "".join(_cell(c, i, numeric) for i, c in enumerate(r)) + "</tr>" for r in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(value: Any, index: int, numeric: Collection[int]) -> str:
    text, css = value if isinstance(value, tuple) else (value, "num" if index in numeric else "")
    return f'<td class="{css}">{_e(text)}</td>' if css else f"<td>{_e(text)}</td>"


def _num(index: int, numeric: Collection[int]) -> str:
    return ' class="num"' if index in numeric else ""


def legend(view: Mapping[str, Any]) -> str:
    """The legend of a view model as an HTML list; "" when there is no site."""
    items = [
        f'<li><span class="fl-swatch" style="background:{p["tint"]};border-color:{p["colour"]}"></span>'
        f"{_e(p['name'])}</li>"
        for p in view["passes"]
        if p["sites"] or p["declined"]
    ]
    if not items:
        return ""
    grey = "border-color:#7b8794;color:#7b8794;background:#e4e9ee"
    items += [
        f'<li><span class="fl-swatch" style="{grey}"></span>candidate (filled)</li>',
        f'<li><span class="fl-swatch applied" style="{grey}"></span>applied (double border)</li>',
        f'<li><span class="fl-swatch declined" style="{grey}"></span>declined (dashed, matched/total)</li>',
    ]
    return f'<ul class="fl-legend">{"".join(items)}</ul>'


# Sections -----------------------------------------------------------------------------------------------------------
def _passes(view: Mapping[str, Any]) -> str:
    rows = [
        [
            p["name"],
            (p["formula"], "mono"),
            p["sites"],
            p["applied"],
            p["declined"],
            p["state"] if p["sites"] else "nothing found",
        ]
        for p in view["passes"]
    ]
    return "<h2>Passes</h2>" + table(["pass", "computes", "sites", "applied", "declined", "state"], rows, (2, 3, 4))


def _card(site: Mapping[str, Any], colour: str, inside: list[str]) -> str:
    where = site["source"]
    line = f"<p><code>{_e(where['where'])}: {_e(where['text'])}</code></p>" if where else ""
    return (
        f'<div class="card {site["state"]}" style="border-left-color:{colour}"><h3>{_e(site["id"])}</h3>'
        + line
        + "".join(f"<p>{text}</p>" for text in inside)
        + "</div>"
    )


def _colours(view: Mapping[str, Any]) -> dict[str, str]:
    return {p["name"]: p["colour"] for p in view["passes"]}


def _candidates(view: Mapping[str, Any]) -> str:
    sites = [s for s in view["sites"] if s["state"] != "declined"]
    if not sites:
        return "<h2>Candidates</h2><p>None: no site matched any pass asked.</p>"
    colours = _colours(view)
    cards = []
    for s in sites:
        inside = [
            f"<code>{_e(s['text'])}</code>, {s['nodes_before']} nodes → {s['nodes_after']}, "
            + ("applied" if s["state"] == "applied" else "not applied")
        ]
        inside += [f'<span class="quiet">{_e(n)}</span>' for n in s["notes"]]
        rows = [[b["name"], b["verdict"], b["reason"]] for b in s["backends"]]
        inside += [table(["backend", "verdict", "reason"], rows)] if rows else []
        cards.append(_card(s, colours.get(s["pass"], "#7b8794"), inside))
    return "<h2>Candidates</h2>" + "".join(cards)


def declined_html(view: Mapping[str, Any]) -> str:
    """The declined sites by code: sentence, distance, and the edit that would help."""
    sites = [s for s in view["sites"] if s["state"] == "declined"]
    colours = _colours(view)
    out = [] if sites else ["<p>None.</p>"]
    for code in dict.fromkeys(s["code"] for s in sites):
        group = [s for s in sites if s["code"] == code]
        out.append(f"<details open><summary>{_e(code)} ({len(group)}): {_e(REJECTIONS.get(code, ''))}</summary>")
        for s in group:
            inside = [f"{_e(s['text'])} <span class='quiet'>({s['matched']} of {s['total']} matched)</span>"]
            inside += [f"Edit: {_e(s['edit'])}"] if s["edit"] else []
            inside += [f"Taken by {_e(s['winner'])}"] if s["winner"] else []
            out.append(_card(s, colours.get(s["pass"], "#7b8794"), inside))
        out.append("</details>")
    return "".join(out)


def _residuals(view: Mapping[str, Any]) -> str:
    rows = [
        [s["id"], r["name"], (r["type"], "mono"), bytes_text(r["bytes"]), ", ".join(r["readers"])]
        for s in view["sites"]
        for r in s.get("residuals", ())
    ]
    if not rows:
        return ""
    return "<h2>Residuals kept for the backward pass</h2>" + table(
        ["site", "residual", "type", "size", "read by"], rows, (3,)
    )


def evidence_pictures(evidence: Any) -> dict[str, str]:
    """Name -> inline SVG of the plots a measurement allows; empty for None."""
    if evidence is None:
        return {}
    from .plots import evidence_figures, figure_svg  # matplotlib is imported only when there is something to plot

    return {
        name: f'<figure aria-label="{_e(name)}">{inline_svg(figure_svg(figure))}</figure>'
        for name, figure in evidence_figures(evidence)
    }


def _evidence(view: Mapping[str, Any], evidence: Any) -> str:
    if view["evidence"] is None:
        return "<h2>Measurements</h2><p>Nothing was measured.</p>"
    tables = [
        f"<h3>{_e(name)}</h3>" + table(heads, rows, numeric)
        for name, heads, rows, numeric in evidence_tables(view["evidence"])
    ]
    notes = [f'<p class="quiet">{_e(note)}</p>' for note in view["evidence"]["notes"]]
    return "<h2>Measurements</h2>" + "".join([*evidence_pictures(evidence).values(), *tables, *notes])


def _environment(environment: Mapping[str, Any], findings: Findings | None) -> str:
    rows = [[k, v] for k, v in environment.items()]
    if findings is not None:
        rows += [[f"seconds in {phase}", f"{s:.3f}"] for phase, s in findings.seconds.items()]
    return "<h2>Environment</h2>" + table(["what", "value"], rows) if rows else ""


# Inspector ----------------------------------------------------------------------------------------------------------
def _inspector_data(
    graph: Graph,
    findings: Findings | None,
    enabled: Collection[str] | None,
    view: Mapping[str, Any],
    prefix: str,
) -> dict[str, Any]:
    """SVG id -> {title, rows of (key, text, monospaced)} for every box and frame that can be clicked."""
    sites = {s["id"]: s for s in view["sites"]}
    data = {}
    for item in (*view["boxes"], *view["groups"]):
        if item["kind"] in ("input", "output"):
            continue
        rows: list[tuple[str, str, bool]] = []
        title = item["lines"][0] if "lines" in item else item["label"]
        if item["node"] is not None:
            info = view["inspector"].get(f"n{item['node']}") or node_dict(
                graph, graph.node_by_id[item["node"]], findings, enabled
            )
            title = f"{info['primitive']} {info['name']}"
            rows += node_rows(info)
        elif item["site"] is None:
            rows += [("group", item["id"], True), ("holds", f"{item['nodes']:,} nodes", False)]
        if item["site"] is not None and item["node"] is None:
            rows += site_rows(sites[item["site"]])
        data[prefix + dom_id(item["id"])] = {"title": title, "rows": rows}
    return data


def node_rows(info: Mapping[str, Any]) -> list[tuple[str, str, bool]]:
    """The inspector's lines for a node: (name, text, monospaced)."""
    rows = [("result", f"{o['name']} {o['type']}, {bytes_text(o['bytes'])}", True) for o in info["outputs"]]
    rows += [("operand", f"{i['name']} {i['type']} ← {i['from']}", True) for i in info["inputs"]]
    if info["params"]:
        rows.append(("params", info["params"], True))
    if info["scope"]:
        rows.append(("scope", info["scope"], True))
    if info["source"]:
        rows.append(("source", f"{info['source']['where']}  {info['source']['text']}", True))
    for site in info["sites"]:
        rows += site_rows(site)
    return rows


def site_rows(site: Mapping[str, Any]) -> list[tuple[str, str, bool]]:
    """The inspector's lines for a candidate or a rejection."""
    if site["state"] == "declined":
        rows = [("declined", f"{site['id']} [{site['code']}] {site['matched']}/{site['total']}: {site['text']}", False)]
        return rows + ([("edit", site["edit"], False)] if site["edit"] else [])
    rows = [(site["state"], f"{site['id']}: {site['text']}", False)]
    rows.append(("nodes", f"{site['nodes_before']} → {site['nodes_after']}", False))
    return rows + [(b["name"], f"{b['verdict']}: {b['reason']}", False) for b in site["backends"]]
