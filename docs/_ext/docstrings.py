"""Docstrings are plain text, which reads as well in `help()`: here they become reStructuredText, before napoleon reads their sections.

A name between backticks is code; `*`, `|` and `_` mean themselves; a paragraph that is set in by four spaces or more is code too. Errors
that share a line of "Raises:" get a line each, and so do attributes that share one. Classes whose objects FusionLab alone makes are
shown without the signature of their constructor.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

CODE = re.compile(r"(``.+?``|`[^`]+`)", re.DOTALL)
MARK = re.compile(r"([*|]|(?<=\w)_(?!\w)|\\)")
SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Yields):$")
ERRORS = r"(?:\w+(?:Error|Warning)(?:, | and )?)+: "
RAISED = re.compile(rf"(?<=[.;]) (?={ERRORS})")
SEVERAL = re.compile(r"(\w+(?:, \w+)+): (.*)", re.DOTALL)
MADE_BY_USERS = ("fusionlab.CudaKernel", "fusionlab.Strategy", "fusionlab.ops.TransformerLayer", "fusionlab.testing.")


def as_rst(lines: list[str]) -> list[str]:
    """The lines of a docstring as reStructuredText with napoleon's sections."""
    blocks, in_section = [], False
    for block in re.split(r"\n\n+", "\n".join(lines).strip("\n")):
        first, _, rest = block.partition("\n")
        in_section = bool(SECTION.match(first)) or (in_section and first.startswith(" "))
        if first.lstrip().startswith((">>>", "...")):
            blocks.append(block)
        elif first.startswith("    ") and not in_section:
            blocks.append("::\n\n" + block)
        elif first == "Raises:" and not re.match(rf"  {ERRORS}|  [\w.]+: ", rest):
            blocks.append(f"**Raises:** {_escaped(' '.join(rest.split()))}")
        elif first in ("Raises:", "Attributes:"):
            blocks.append(first + "\n" + _escaped("\n".join(_entries(first, rest))))
        else:
            blocks.append(_escaped(block))
    return "\n\n".join(blocks).split("\n")


def _entries(section: str, text: str) -> list[str]:
    """The entries of a section, each with one name and its further lines set in."""
    if section == "Raises:":
        joined = " ".join(line.strip() for line in text.split("\n"))
        return [f"  {entry}" for entry in RAISED.split(joined)]
    entries = []
    for entry in re.split(r"\n(?=  \S)", text):
        several = SEVERAL.match(entry.strip())
        entries += [f"  {name}: {several[2]}" for name in several[1].split(", ")] if several else [entry]
    return entries


def _escaped(text: str) -> str:
    parts = CODE.split(text)
    parts[::2] = [MARK.sub(r"\\\1", part) for part in parts[::2]]
    for k in range(1, len(parts), 2):
        before = "\\ " if parts[k - 1][-1:].isalnum() else ""  # code ends where a space or a mark follows
        after = "\\ " if parts[k + 1][:1].isalnum() else ""
        parts[k] = f"{before}``{parts[k].strip('`')}``{after}"
    return "".join(parts)


def _on_docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = [*as_rst(lines), ""]


def _on_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None] | None:
    is_result = what == "class" and signature and not name.startswith(MADE_BY_USERS)
    return ("", None) if is_result else None


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", _on_docstring, priority=100)
    app.connect("autodoc-process-signature", _on_signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
