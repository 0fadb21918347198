"""Pieces of Markdown."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
_WIDTH = 90  # of a line of code on a page


def text_of(*blocks: str) -> str:
    """Blocks with an empty line between them; empty ones are left out."""
    return "\n\n".join(block.strip("\n") for block in blocks if block) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def code(text: str, language: str = "") -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def printed(text: str) -> str:
    """What a program prints, with its long lines wrapped."""
    return code("\n".join(map(_wrapped, text.splitlines())), "text")


def _wrapped(line: str) -> str:
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return textwrap.fill(line, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def bullets(sentences: Iterable[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)


def literal(text: str) -> str:
    """Code inside a line; a bar would end a table's cell."""
    return f"`{text}`".replace("|", "\\|")


# A name of FusionLab or JAX, with the arguments of a call.
_CODE = re.compile(
    r"(`[^`]+`|\b(?:fl|jax|jnp|found|fusionlab)\.\w[\w.]*\w(?:\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))?)"
)


def plain(sentence: str) -> str:
    """A sentence of FusionLab's as Markdown: names and calls as code, the rest without markup."""
    parts = _CODE.split(sentence)
    return "".join(literal(part.strip("`")) if i % 2 else _escaped(part) for i, part in enumerate(parts))


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*\[\]<>|]|(?<!\w)_|_(?!\w))", r"\\\1", text)


def link_to_file(path: Path, page: Path, text: str) -> str:
    """A link from a page to a file of the repository."""
    return f"[{text}]({Path(os.path.relpath(path, page.parent)).as_posix()})"
