"""Links of a page to files of the repository that are no pages: they lead to the page of a notebook, or to the source, as a page too.

Documents link to files by their relative paths, so that the links work wherever the repository is read. A link to a notebook, or to one of
the files that docs/conf.py makes pages of, becomes a link to that page; one to a folder a link to its `__init__.py`; and every
source file that is linked to gets a page.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from docutils import nodes
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "generated/changelog.md",
    "CONTRIBUTING.md": "generated/contributing.md",
}
LINK = re.compile(
    r"\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]"  # a picture may stand in it
    r"\((?!\w+:|#)(?P<to>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)"
)
INDEXES = ("index.md", "__init__.py", "README.md")  # what a link to a folder leads to
SCHEME = "fusionlab-source:"
MOST_CHARACTERS = 300_000  # of a file that is shown as a page; a larger one is downloaded


def _rewritten(docname: str, text: str) -> str:
    """A page's Markdown with its links to the repository's files leading to pages, where there are some."""
    page = DOCS / docname
    read_from = ROOT if f"{docname}.md" in PAGES.values() and docname != "index" else page.parent

    def replaced(found: re.Match[str]) -> str:
        path = Path(os.path.normpath(read_from / found["to"]))
        if not path.is_relative_to(ROOT) or not path.exists():
            return found[0]
        inside = path.relative_to(ROOT).as_posix()
        if path.is_dir():
            path = next((path / name for name in INDEXES if (path / name).exists()), path)
            if path.is_dir():
                return found["text"]
        elif inside in PAGES:
            path = DOCS / PAGES[inside]
        elif path.suffix == ".ipynb" and path.parent == ROOT / "notebooks":
            path = DOCS / "generated" / "notebooks" / path.name
        to = Path(os.path.relpath(path, page.parent)).as_posix()
        return f"[{found['text']}]({to}{found['anchor'] or ''})"

    return LINK.sub(replaced, text)


def _on_source_read(app: Sphinx, docname: str, content: list[str]) -> None:
    if not docname.startswith("generated/notebooks/"):
        content[0] = _rewritten(docname, content[0])


def _on_doctree_read(app: Sphinx, doctree: nodes.document) -> None:
    """Links to source files, before Sphinx copies them for download."""
    for link in list(doctree.findall(addnodes.download_reference)):
        path = (DOCS / Path(app.env.docname).parent / link["reftarget"]).resolve()
        if not link["reftarget"].startswith("/") and path.is_relative_to(ROOT) and _lexer(path):
            inside = path.relative_to(ROOT).as_posix()
            link.replace_self(nodes.reference("", "", *link.children, internal=True, refuri=SCHEME + inside))
            app.env.fusionlab_sources.add(inside)  # type: ignore[attr-defined]


def _lexer(path: Path) -> str | None:
    """How a file is highlighted; None where it is to be downloaded."""
    if not path.is_file() or path.stat().st_size > MOST_CHARACTERS or path.suffix in (".html", ".svg", ".ipynb"):
        return None
    try:
        return get_lexer_for_filename(path.name).aliases[0]
    except ClassNotFound:
        return None


def _page_of(inside: str) -> str:
    return f"source/{PurePosixPath(inside)}"


def _on_doctree_resolved(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    for link in doctree.findall(nodes.reference):
        if link.get("refuri", "").startswith(SCHEME):
            inside = link["refuri"].removeprefix(SCHEME)
            link["refuri"] = app.builder.get_relative_uri(docname, _page_of(inside))


def _source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    for inside in sorted(app.env.fusionlab_sources):  # type: ignore[attr-defined]
        path = ROOT / inside
        text = path.read_text(encoding="utf-8")
        body = app.builder.highlighter.highlight_block(text, _lexer(path), linenos=False)  # type: ignore[attr-defined]
        yield _page_of(inside), {"title": inside, "body": f"<h1><code>{inside}</code></h1>{body}"}, "page.html"


def _on_builder_inited(app: Sphinx) -> None:
    app.env.fusionlab_sources = set()  # type: ignore[attr-defined]


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", _on_builder_inited)
    app.connect("source-read", _on_source_read)
    app.connect("doctree-read", _on_doctree_read, priority=100)
    app.connect("doctree-resolved", _on_doctree_resolved)
    app.connect("html-collect-pages", _source_pages)
    return {"parallel_read_safe": False, "parallel_write_safe": True}
