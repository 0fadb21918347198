"""The code of a page of Markdown, run in order; `python -m tests.docs.pages PAGE` runs one in a process of its own.

The ```python blocks of a page are one module, in a file of the page's name. The ```text block that follows one, if any, is what it
prints: compared word by word, with any number for a number and anything for a line of `...`.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import sys
import tempfile
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NUMBER = re.compile(r"\d[\d,]*(\.\d+)?(e[+-]?\d+)?")


@dataclass(frozen=True)
class Block:
    """A block of code: its source, and what the page says that it prints (None: the page does not say)."""

    code: str
    prints: str | None


def blocks(path: Path) -> list[Block]:
    """The ```python blocks of a page, in order."""
    fences = re.findall(r"^```(\w+)\n(.*?)^```$", path.read_text("utf-8"), re.M | re.S)
    following = [*fences[1:], ("", "")]
    return [
        Block(text, after if kind_after == "text" else None)
        for (kind, text), (kind_after, after) in zip(fences, following, strict=True)
        if kind == "python"
    ]


def run(path: Path) -> None:
    """Runs a page's blocks.

    Raises:
      AssertionError: of the page's own asserts, or what a block printed is not what the page says. Errors of a block come through.
    """
    all_blocks, line = blocks(path), 0
    with _module(path.stem, "".join(b.code for b in all_blocks)) as module:
        for block in all_blocks:
            printed = io.StringIO()
            code = compile("\n" * line + block.code, module.__file__, "exec", dont_inherit=True)
            with contextlib.redirect_stdout(printed):
                exec(code, vars(module))
            line += block.code.count("\n")
            got = printed.getvalue()
            assert block.prints is None or _agree(block.prints, got), f"{path}: printed\n{got}\nnot\n{block.prints}"


def _agree(want: str, got: str) -> bool:
    plain = (re.sub(r"[ ]+$", "", NUMBER.sub("0", text), flags=re.M) for text in (want, got))
    return doctest.OutputChecker().check_output(*plain, doctest.ELLIPSIS)


@contextlib.contextmanager
def _module(name: str, code: str) -> Iterator[types.ModuleType]:
    """An importable module of this code, whose lines tracebacks and FusionLab can show."""
    module = types.ModuleType(f"page_{name}")
    with tempfile.TemporaryDirectory() as folder:
        module.__file__ = str(Path(folder, "train.py"))
        Path(module.__file__).write_text(code, "utf-8")
        sys.modules[module.__name__] = module
        try:
            yield module
        finally:
            del sys.modules[module.__name__]


if __name__ == "__main__":
    for page in sys.argv[1:]:
        run(Path(page))
