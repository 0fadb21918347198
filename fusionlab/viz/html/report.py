"""One self-contained HTML report: no script, style, font or picture is loaded from anywhere.

The widget's own module draws it: picture, inspector, search and recorded measurements work without a kernel, from
`file://`; switching sites and measuring need a kernel, which the page states. Without scripts it is a picture and tables.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from html import escape as _escape
from types import MappingProxyType
from typing import Any

from fusionlab.fusers.report.findings import Findings
from fusionlab.graph.program.graph import Graph

from ..browser import asset, module
from ..cards.album import Album
from ..export import LIVE
from ..gpu_record import record_html
from ..markup import ID_PREFIX, aligned, dom_id, inline_svg, table
from ..model.evidence_view import environment_dict, evidence_dict, evidence_tables, headline, measured_on
from ..model.summaries import summary
from .page import AFTER_ID_PREFIX, page_data
from .sections import candidates_html, declined_html, legend, lints_html, passes_html, residuals_html, structures_html
from .tabs import Tab, evidence_tabs, tab

_LIVE = f"Switching sites on and off and measuring again need a live kernel: <code>{LIVE}</code> in a notebook."

_PANE = (800.0, 640.0)  # px: the graph's room in a page in a window of 1440 x 900
_LIVE_PICTURE = f"To open these cards, switch sites on and off and measure them: <code>{LIVE}</code>."


def report_html(
    graph: Graph,
    findings: Findings | None = None,
    *,
    enabled: Collection[str] | None = (),
    evidence: Any = None,
    after: Graph | None = None,
    environment: Mapping[str, Any] | None = None,
    formulas: Mapping[str, str] | None = None,
    record: Mapping[str, Any] | None = None,
    title: str | None = None,
    tabs: Sequence[Tab] | None = None,
    panel: Mapping[str, Any] | None = None,
    times: Mapping[int, float] = MappingProxyType({}),
) -> str:
    """A whole HTML page about a graph, what was found in it and what was measured.

    Args:
      graph, findings, enabled, evidence, formulas: as for `view_model`.
      after: the graph with the enabled sites fused, drawn below the original.
      environment: what to print under "Environment": name -> value.
      record: of `python -m benchmarks gemm_epilogue` on a GPU, shown below what was measured here (see `gpu_record`).
      title: the page's title; the graph's name without it.
      tabs: those of a live explorer, with its ledger and code (`Session.tabs`); without them what was measured and is known.
      panel: that of a live explorer (`Session.panel`), with what its sites gain or cost; without it what was found.
      times: seconds of the graph's nodes, shown in place of bytes; {} where they were not measured.
    """
    album = _album(graph, findings)
    album.times = times
    view = summary(graph, findings, enabled, evidence, formulas)
    title = title or f"FusionLab: {view['title']}"
    later = _album(after) if after is not None else None

    body = [
        f"<h1>{_e(title)}</h1>",
        f'<div id="fl-app"><p class="lead">{_e(view["header"])}</p>{legend(view)}'
        f'<div class="fl-graph" id="fl-before" tabindex="0" role="group" aria-label="graph">{inline_svg(album.svg(enabled, ID_PREFIX))}'
        '</div><noscript><p class="quiet">Without scripts this page is a picture and tables: nothing can be opened, '
        "searched or selected.</p></noscript></div>",
    ]
    if later is not None:
        body += [
            f'<section id="fl-after"><h2>After fusion: {len(graph):,} nodes → {len(later.graph):,}</h2>'
            f'<div class="fl-graph">{inline_svg(later.svg(None, AFTER_ID_PREFIX))}</div></section>'
        ]
    if tabs is None:
        tabs = evidence_tabs(evidence, findings, enabled=enabled, after=after)
    shown = [*_recorded(tabs, evidence is not None), *_found(view, findings)]
    shown += [tab("GPU record", record_html(record))] if record is not None else []
    shown += [tab("Environment", _environment({**environment_dict(evidence), **(environment or {})}, findings))]
    body += _sections(shown)
    body.append(f"<footer>A record made by FusionLab. {_LIVE}</footer>")
    whole = "\n".join(body)
    used = len(_page(title, whole, {}).encode())
    return _page(title, whole, page_data(album, enabled, view, later, used, panel))


def _album(graph: Graph, findings: Findings | None = None) -> Album:
    album = Album(graph, findings)
    album.pane = _PANE
    return album


def evidence_html(evidence: Any, *, title: str = "FusionLab: before and after") -> str:
    """A whole HTML page about a measurement alone: headline, plots, tables, environment."""
    measured = evidence_dict(evidence)
    body = [
        f"<h1>{_e(title)}</h1>",
        f'<p class="lead">{_e(headline(measured))}</p>',
        *_sections(_recorded(evidence_tabs(evidence, None), True)),
        _environment(environment_dict(evidence), None),
        "<footer>A record made by FusionLab; measuring again needs the program itself.</footer>",
    ]
    return _page(title, "\n".join(body))


def graph_html(graph: Graph, findings: Findings | None = None, *, enabled: Collection[str] | None = ()) -> str:
    """A static picture with header, for `_repr_html_`: no script, nothing to install. Its ids start with "fl-"."""
    view, svg = summary(graph, findings, enabled), Album(graph, findings).still(enabled)
    # Ids must not meet those of another picture in the same notebook; the content tells them apart.
    prefix = dom_id(f"fl {view['header']} {len(svg)}")
    own = inline_svg(svg).replace(' id="fl-', f' id="{prefix}-')
    live = f'<p class="quiet">{_LIVE_PICTURE}</p>' if findings is not None else ""
    return (
        f'<div class="fl">{style()}<p class="fl-header">{_e(view["header"])}</p>'
        f'<div class="fl-graph" style="max-height:900px">{own}</div>{live}'
        f"{_reasons(view, findings)}</div>"
    )


def _reasons(view: Mapping[str, Any], findings: Findings | None) -> str:
    """Below a picture: why sites were declined, the lints, and the notes on the search."""
    if findings is None:
        return ""
    declined = declined_html(view) if findings.rejections else ""
    notes = "".join(f'<p class="quiet">{_e(note)}</p>' for note in findings.notes)
    parts = (("Declined", declined), ("Lints", lints_html(view)))
    return "".join(f'<p class="fl-header">{name}</p>{html}' for name, html in parts if html) + notes


def evidence_summary_html(evidence: Any) -> str:
    """A measurement in a few tables, for `_repr_html_`: no script, nothing to install; of the errors the worst ones."""
    measured = evidence_dict(evidence)
    assert measured is not None
    named = {(kind, leaf.name) for kind in ("output", "gradient") if (leaf := _worst(evidence, kind)) is not None}
    rows = [e for e in measured["errors"] if (e["kind"], e["name"]) in named or not e["ok"]]
    left = len(measured["errors"]) - len(rows)
    body = [f"<p><b>{_e(evidence.titled)}</b></p>", _where(evidence)]
    body += [f"<p>{_e(measured['worst'])}</p>"] if measured["worst"] else []
    for name, heads, cells, numeric in evidence_tables({**measured, "errors": rows}):
        body.append(f"<p><b>{_e(name)}</b></p>{aligned(table(heads, cells, numeric))}")
    body += [f'<p class="quiet">{left} more results, no worse: .to_html("report.html")</p>'] if left else []
    body += [f'<p class="quiet">{_e(note)}</p>' for note in measured["notes"]]
    return "".join(body)  # a notebook's own style: an untrusted one leaves ours out


def _worst(evidence: Any, kind: str) -> Any:
    return evidence.numerics.worst(kind) if evidence.numerics is not None else None


def _where(evidence: Any) -> str:
    return f'<p class="quiet">Measured on {_e(measured_on(evidence))}.</p>'


def whole_page(title: str, body: str) -> str:
    """A page with a title and a body of HTML, which loads nothing."""
    return _page(title, f"<h1>{_e(title)}</h1>{body}<footer>A record made by FusionLab.</footer>")


def _page(title: str, body: str, data: Mapping[str, Any] | None = None) -> str:
    """A page that loads nothing; with `data`, its explorer: the widget's module and the page's stand-in for a kernel."""
    scripts = ""
    if data is not None:
        text = json.dumps(data).replace("<", "\\u003c")
        code = "\n".join([module(), asset("address.js"), asset("report.js")])
        scripts = (
            f'<script type="application/json" id="fl-data">{text}</script>\n<script type="module">\n{code}\n</script>\n'
        )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_e(title)}</title>\n<style>\n{asset('explorer.css')}\n{asset('report.css')}\n</style>\n</head>\n"
        f'<body class="fl">\n<main>\n{body}\n</main>\n{scripts}</body>\n</html>\n'
    )


def style() -> str:
    """The style sheet all pictures share, as an HTML element."""
    return f"<style>{asset('explorer.css')}</style>"


def _e(value: Any) -> str:
    return _escape(str(value))


def _recorded(tabs: Sequence[Tab], measured: bool) -> list[Tab]:
    """The tabs of an explorer that have something to show in a record; Timing states that nothing was measured."""
    timing = next((t for t in tabs if t["name"] == "Timing" and (measured or not t.get("empty"))), None)
    others = [t for t in tabs if t["name"] != "Timing" and not t.get("empty")]
    return [timing or tab("Timing", "<p>Nothing was measured.</p>", empty=True), *others]


def _found(view: Mapping[str, Any], findings: Findings | None) -> list[Tab]:
    """The findings as HTML; empty for a graph that was not searched."""
    if findings is None:
        return []
    return [
        tab("Sites", candidates_html(view)),
        tab("Passes", passes_html(view)),
        tab("Declined", declined_html(view)),
        tab("Structures", structures_html(view)),
        tab("Lints", lints_html(view)),
        tab("Residuals", residuals_html(view)),
    ]


def _sections(tabs: Sequence[Tab]) -> list[str]:
    """Tabs below each other; those of one name in one."""
    named: dict[str, list[Tab]] = {}
    for each in tabs:
        if each["html"]:
            named.setdefault(each["name"], []).append(each)
    return [
        f'<section data-fl-section="{name}"{" data-fl-empty" if all(t.get("empty") for t in same) else ""}>'
        f"<h2>{_e(name)}</h2>{''.join(t['html'] for t in same)}</section>"
        for name, same in named.items()
    ]


def _environment(environment: Mapping[str, Any], findings: Findings | None) -> str:
    rows = [[k, v] for k, v in environment.items()]
    if findings is not None:
        rows += [[f"seconds in {phase}", f"{s:.3f}"] for phase, s in findings.seconds.items()]
    return table(["what", "value"], rows)
