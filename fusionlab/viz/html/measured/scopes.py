"""Where the time of a run goes, by module and named scope: a table that adds up to the run."""

from __future__ import annotations

from fusionlab.evidence.instruments.timing import seconds
from fusionlab.evidence.scopes.scope_times import ScopeTime, ScopeTimes
from fusionlab.showing import plural

from ...markup import Html, folded, quiet, table, text

_DIVIDED = "A kernel's time is divided among the scopes of its operations by the bytes they move."
_LEAST = 0.01  # of the run: rows of less are folded
_BUTTON = (
    '<p><button type="button" data-fl="scopes" data-msg="{&quot;type&quot;:&quot;scopes&quot;}" '
    'data-why="compile the program with these sites fused once more, and time its kernels">Time each scope after fusing</button></p>'
)


def scopes_html(times: ScopeTimes | None, can_fuse: bool = False) -> str:
    """The table as HTML, names escaped; "" without times.

    Args:
      times: of the program, before and, where measured, after.
      can_fuse: offers to measure it after fusing, if that was not done yet.
    """
    if times is None:
        return ""
    large, small = [], []
    for row in times.rows:
        weight = max(row.total_s, row.fused_total_s or 0.0)
        (large if weight >= _LEAST * times.whole_s else small).append(row)
    fused = times.after is not None
    backward = ["backward"] if times.has_backward else []
    heads = ["scope", "total", *(["with sites fused"] if fused else []), "itself", *backward, "share of the run"]
    numeric = tuple(range(1, len(heads) - 1))
    rest = folded(
        f"{len(small)} more {plural('row', len(small))} of less than {100 * _LEAST:.0f} %",
        table(heads, _rows(times, small), numeric),
    )
    button = _BUTTON if can_fuse and not fused else ""
    shown = table(heads, [*_rows(times, large), _whole(times)], numeric) + rest
    return button + shown + quiet(f"{times.how[0].upper()}{times.how[1:]}. {_DIVIDED}")


def _rows(times: ScopeTimes, rows: list[ScopeTime]) -> list[list[object]]:
    fused = times.after is not None
    return [
        [
            _name(row),
            seconds(row.total_s),
            *([seconds(row.fused_total_s or 0.0)] if fused else []),
            seconds(row.self_s),
            *([seconds(row.backward_s) if row.backward_s else ""] if times.has_backward else []),
            _share(row.total_s / (times.whole_s or 1.0)),
        ]
        for row in rows
    ]


def _name(row: ScopeTime) -> Html:
    return Html(f'<span style="padding-left:{1.2 * row.depth:.1f}em" title="{text(row.scope)}">{text(row.name)}</span>')


def _share(share: float) -> Html:
    return Html(f'{100 * share:.1f} %<span class="fl-share" style="--share:{share:.4f}"></span>')


def _whole(times: ScopeTimes) -> list[object]:
    fused = [] if times.fused_whole_s is None else [seconds(times.fused_whole_s)]
    return [
        Html("<b>whole run</b>"),
        seconds(times.whole_s),
        *fused,
        seconds(sum(r.self_s for r in times.rows)),
        *[""] * (1 + times.has_backward),
    ]
