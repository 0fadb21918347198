"""Runs the snippets of a page and holds its outputs against what they print.

    python -m tests.docs.snippets               every page: what differs
    python -m tests.docs.snippets --write       writes the outputs that differ into the pages; with --measured, the measured ones too

Paths of pages restrict all of them to these pages.

A page is README.md or a Markdown file of docs/. Its blocks run in their order, in a folder of their own:

- ```python: run in one namespace for the page. Together the blocks are the file `model.py`, so that lines are those a reader would
  have who pasted them one below the other. A block that begins with the comment `# name.py` is that file instead.
- ```sh: each command `fusionlab ...` is run; other commands are not.
- ```text: what the block before it prints. A line `...` is any number of lines, and ` ... ` within a line any text.

A comment in the line above a block changes that: `<!-- not run -->` for a block that needs something a test does not have,
`<!-- measured -->` for an output with times or details of the machine, `<!-- numbers vary -->` for one of which the words are compared,
and `<!-- not compared -->` for a text that is no output.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import linecache
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FENCE = re.compile(
    r"^(?:<!-- (?P<mark>[\w ]+) -->\n)?```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
NUMBER = re.compile(r"\d[\d,]*(\.\d+)?(e[+-]?\d+)?")
NAME = re.compile(r"# ([\w/]+\.py)\n")


@dataclass(frozen=True)
class Shown:
    """An output on a page beside what was printed.

    Attributes:
      text: the output on the page.
      printed: the output of the block before it.
      mark: what the page says above it: "measured", "numbers vary" or nothing.
      span: where the text is in the page.
    """

    text: str
    printed: str
    mark: str | None
    span: tuple[int, int]

    @property
    def measured(self) -> bool:
        return self.mark == "measured"

    @property
    def is_right(self) -> bool:
        text, printed = (NUMBER.sub("0", t) if self.mark == "numbers vary" else t for t in (self.text, self.printed))
        return self.measured or pattern_of(text).fullmatch(lines_of(printed)) is not None

    @property
    def difference(self) -> str:
        shown, printed = (lines_of(text).splitlines() for text in (self.text, self.printed))
        return "\n".join(difflib.unified_diff(shown, printed, "page", "printed", lineterm=""))


def lines_of(text: str) -> str:
    """The text without blanks at the ends of its lines and blank lines around it."""
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines()) + "\n"


def pattern_of(shown: str) -> re.Pattern[str]:
    """Matches what an output stands for."""
    parts = []
    for line in lines_of(shown).splitlines():
        if line.strip() == "...":
            parts.append(r"(?:.*\n)*?")
        else:
            parts.append(re.escape(line).replace(r"\.\.\.", ".*?") + r"\n")
    return re.compile("".join(parts))


def pages() -> list[Path]:
    """README and the pages of docs/ that people wrote."""
    written = (path for path in (ROOT / "docs").rglob("*.md") if not {"generated", "_build"} & set(path.parts))
    return [ROOT / "README.md", *sorted(written)]


@contextlib.contextmanager
def _folder_of_its_own() -> Iterator[Path]:
    """A temporary working folder from which modules are imported; passes and modules that a page adds go away again."""
    import fusionlab as fl

    before, passes, modules = os.getcwd(), {p.name for p in fl.passes()}, set(sys.modules)
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        sys.path.insert(0, name)
        try:
            yield Path(name)
        finally:
            sys.path.remove(name)
            os.chdir(before)
            for added in {p.name for p in fl.passes()} - passes:
                fl.unregister(added)
            for module in set(sys.modules) - modules:
                if str(getattr(sys.modules[module], "__file__", "")).startswith(name):
                    del sys.modules[module]


def _command(line: str) -> None:
    """One command of fusionlab, in this process."""
    from fusionlab import cli

    status = cli.main(shlex.split(re.sub(r"\s+# .*", "", line))[1:])
    assert status in (0, cli.WORSE), f"{line}: exit status {status}"


class _Page:
    """The state of a page's snippets: names, and the file that they make."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.model = ""

    def python(self, body: str) -> None:
        named = NAME.match(body)
        file = named[1] if named else "model.py"
        before = 0 if named else self.model.count("\n")
        if not named:
            self.model += body
        Path(file).write_text(body if named else self.model, encoding="utf-8")
        linecache.checkcache(file)
        exec(compile("\n" * before + body, file, "exec"), self.names)

    def shell(self, body: str) -> None:
        for line in body.replace("\\\n", " ").splitlines():
            if line.startswith("fusionlab "):
                _command(line)


def outputs(text: str) -> list[Shown]:
    """Runs a page: each output that it shows, with what was printed.

    Raises:
      Exception: what a snippet raises.
    """
    page, printed, found = _Page(), None, []
    runners = {"python": page.python, "sh": page.shell}
    with _folder_of_its_own():
        for fence in FENCE.finditer(text):
            language, body, mark = fence["language"], fence["body"], fence["mark"]
            if language == "text" and printed is not None and mark != "not compared":
                found.append(Shown(body, printed, mark, fence.span("body")))
                printed = None
            elif language in runners and mark != "not run" and not body.startswith(">>> "):
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    runners[language](body)
                printed = out.getvalue()
            else:
                printed = None
    return found


def written(text: str, measured: bool = False) -> str:
    """The page with every output that differs, and has no gap, written anew; `measured` ones too if asked."""
    for shown in reversed(outputs(text)):
        if "..." not in shown.text and (measured if shown.measured else not shown.is_right):
            start, end = shown.span
            text = text[:start] + lines_of(shown.printed) + text[end:]
    return text


def main(arguments: list[str]) -> int:
    named = [Path(a).resolve() for a in arguments if not a.startswith("--")] or pages()
    wrong = 0
    for path in named:
        text = path.read_text(encoding="utf-8")
        if "--write" in arguments:
            text = written(text, "--measured" in arguments)
            path.write_text(text, encoding="utf-8")
        for shown in outputs(text):
            if not shown.is_right:
                wrong += 1
                print(f"{path.relative_to(ROOT)}:\n{shown.difference}\n")
    print(f"{len(named)} pages, {wrong} outputs differ")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
