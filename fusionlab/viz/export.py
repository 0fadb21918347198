"""What an explorer can be saved as, by the file's suffix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from fusionlab.errors import ArgumentError
from fusionlab.graph.text import graph_text

from .dot import dot_of_view
from .hulls import hulls, with_hulls
from .render import to_pdf, to_png, to_svg

if TYPE_CHECKING:
    from .session import Session


def export(
    session: Session,
    suffix: str,
    name: str,
    formulas: Mapping[str, str],
    engine: str | None,
    saved: Callable[[], str],
) -> str | bytes:
    """The content of a file of this kind: the picture as it is folded now, the whole page, or the state.

    Args:
      session: what is on, shown and measured.
      suffix: ".json" (the state), ".html" (the page), ".svg", ".png", ".pdf", ".dot" or ".txt" (the picture, and the program as text).
      name: of the file, for the error.
      formulas, engine: as for `report_html`.
      saved: makes the state's text.

    Raises:
      ArgumentError: another suffix. MissingDependencyError: PNG or PDF without the extra.
    """

    def svg() -> str:
        drawn = to_svg(dot(), engine=engine)
        compiled = session.compiled_shown
        shown = hulls(compiled, view) if session.stage.hulls and compiled is not None else []
        return with_hulls(drawn, shown, "fl-") if shown else drawn

    def dot() -> str:
        return dot_of_view(view)

    def page() -> str:
        from .html import report_html

        after = session.fused_graph() if session.can_fuse else None
        return report_html(
            session.graph,
            session.findings,
            enabled=session.enabled,
            evidence=session.evidence,
            after=after,
            formulas=formulas,
            engine=engine,
        )

    makers: dict[str, Callable[[], str | bytes]] = {
        ".json": saved,
        ".html": page,
        ".svg": svg,
        ".png": lambda: to_png(svg()),
        ".pdf": lambda: to_pdf(svg()),
        ".dot": dot,
        ".txt": lambda: graph_text(session.shown_graph) + "\n",
    }
    if suffix not in makers:
        raise ArgumentError(f"path: got the suffix {suffix!r} in {name!r}, needed one of {', '.join(sorted(makers))}")
    view = session.view()
    return makers[suffix]()
