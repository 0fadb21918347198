"""Reads the built site: nothing in it comes from the network, links lead somewhere, pictures are pictures.

`python -m tests.docs.built docs/_build/html` prints what is wrong, and ends with 1 where something is; `bash .ci/run docs` calls it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What a page loads by itself, by the attribute that says from where; links that a reader follows are no part of it.
LOADS = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("object", "data"), ("source", "src")}
IN_STYLES = re.compile(r"""(?:url\(\s*["']?|@import\s+["'])((?:https?:)?//[^"')]+)""")
IN_SCRIPTS = re.compile(r"""(?:import\s*\(?\s*|importScripts\(|\.src\s*=\s*|fetch\(\s*)["'`]((?:https?:)?//[^"'`]+)""")
LOST = re.compile("model not found|Loading widget|application/vnd.jupyter.widget")
LONGEST = 1500  # characters of one paragraph; an SVG whose drawing is lost has thousands


class Page(HTMLParser):
    """A page's title, what it loads, its links and anchors, the number of its pictures, and its paragraphs."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.title, self.loads, self.links, self.anchors, self.alts = "", [], [], set(), []
        self.paragraphs: list[str] = []
        self._in: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.loads += [given[name] for of, name in LOADS if of == tag and name in given]
        self.loads += IN_STYLES.findall(given.get("style", ""))
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "img":
            self.alts.append(given.get("alt", ""))
        if tag in ("title", "p", "style", "script"):
            self._in.append(tag)
            if tag == "p":
                self.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        if self._in and self._in[-1] == tag:
            self._in.pop()

    def handle_data(self, data: str) -> None:
        inside = self._in[-1] if self._in else ""
        if inside == "title":
            self.title += data
        elif inside == "p":
            self.paragraphs[-1] += data
        elif inside == "style":
            self.loads += IN_STYLES.findall(data)
        elif inside == "script":
            self.loads += IN_SCRIPTS.findall(data)


def from_outside(addresses: Iterable[str]) -> list[str]:
    """Those of the addresses that are on another server."""
    return sorted({a for a in addresses if a.startswith("//") or urlsplit(a).scheme in ("http", "https")})


def faults_of(name: str, html: str) -> Iterator[str]:
    """What is wrong on a page by itself."""
    yield from _faults(name, html, Page(html))


def _faults(name: str, html: str, page: Page) -> Iterator[str]:
    if not page.title.strip():
        yield f"{name}: no title"
    for address in from_outside(page.loads):
        yield f"{name}: loads {address}"
    if lost := LOST.search(html):
        yield f"{name}: {lost[0]}"
    for paragraph in page.paragraphs:
        if len(paragraph) > LONGEST:
            yield f"{name}: a paragraph of {len(paragraph):,} characters: {paragraph[:60]}..."
    if "generated/notebooks/" in name:
        yield from (f"{name}: a picture without a text in its place" for alt in page.alts if not alt)
        if not page.alts:
            yield f"{name}: no picture"


def broken_links(pages: dict[str, Page], folder: Path) -> Iterator[str]:
    """Links within the site that lead nowhere."""
    for name, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or not (parts.path or parts.fragment):
                continue
            target = (folder / name).parent / unquote(parts.path) if parts.path else folder / name
            target = target.resolve()
            if not target.exists():
                yield f"{name}: a link to {link}, which does not exist"
            elif parts.fragment and target.suffix == ".html":
                there = pages.get(target.relative_to(folder).as_posix())
                if there and unquote(parts.fragment) not in there.anchors:
                    yield f"{name}: a link to {link}, where no such anchor is"


def faults(folder: Path) -> list[str]:
    """All that is wrong with a site."""
    folder = folder.resolve()
    texts = {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.html"))
    }
    pages = {name: Page(html) for name, html in texts.items()}
    found = [fault for name, html in texts.items() for fault in _faults(name, html, pages[name])]
    found += broken_links(pages, folder)
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".css", ".js"):
            what = IN_STYLES if path.suffix == ".css" else IN_SCRIPTS
            loaded = what.findall(path.read_text(encoding="utf-8"))
            found += [f"{path.relative_to(folder)}: loads {address}" for address in loaded]
    if len(texts) < 20:
        found.append(f"{len(texts)} pages, needed a site")
    return found


if __name__ == "__main__":
    wrong = faults(Path(sys.argv[1]))
    pages = len(list(Path(sys.argv[1]).rglob("*.html")))
    print(*wrong, f"{pages} pages, {len(wrong)} faults", sep="\n")
    sys.exit(bool(wrong))
