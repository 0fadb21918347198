"""Snapshots: a program and its findings as text that changes only if the computation or its fusions change.

A snapshot has no line numbers, paths, times or sentences (which name values and lines); sites are listed by their ids, which are made of
scopes, and reasons by their codes. It is made for a named device, by default a plain CPU, so that it is the same on every machine. The
program's own text is JAX's, and versions of JAX may write a function differently; findings alone (`graph=False`) do not depend on that.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from pathlib import Path

from ..errors import OutputError
from ..fusers import Findings, Rejection
from ..graph.program.text import graph_text
from ..output import write_file
from ..tracebacks import own_lines_hidden
from .asserts import fused_counts
from .messages import FusionAssertionError, nearest_lines

FOLDER = "__fusionlab__"
UPDATE = "--fusionlab-update"
DEVICE = "cpu"  # the device of a snapshot if none is named
_FORMAT = "# fusionlab snapshot, format 1"
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_LINES = 30  # of a diff
_LONGEST_NAME = 120  # characters; file systems take 255 bytes


@own_lines_hidden
def snapshot_text(found: Findings, graph: bool = True) -> str:
    """The text of a snapshot file: counts by pass, the sites with their formulas, the reasons for declining, and the program.

    Args:
      found: the findings; their device is left out, because its name depends on the machine.
      graph: include the program, one line per node with its types and scopes.
    """
    fused = {c.id for c in found.select()}
    left = [c.id for c in found.candidates if c.id not in fused]
    lines = [_FORMAT, f"function: {found.graph.name}", "fused:"]
    # Not those of 0 sites: a pass that a later version brings is no change of a program that it does nothing in.
    lines += [f"  {name}: {n}" for name, n in fused_counts(found).items() if isinstance(n, int) and n]
    lines += ["sites:", *(f"  {c.id}: {c.formula}" for c in found.candidates if c.id in fused)]
    lines += ["left as they are:", *(f"  {name}" for name in left)]
    lines += ["declined:", *map(_declined, found.rejections)]
    if graph:
        lines += ["graph:", *(f"  {line}" for line in graph_text(found.graph, sources=False, scopes=True).splitlines())]
    return _ADDRESS.sub("", "\n".join(lines)) + "\n"


def snapshot_path(test_file: Path, test: str, name: str = "") -> Path:
    """The path of a test's snapshot: `__fusionlab__/<test module>/<test>.txt` next to the test file.

    Args:
      test_file: the test's file.
      test: its name, with its classes and parameters ("TestMlp.test_sites[relu-8]").
      name: the name of one of several snapshots of a test; "" for the only one.
    """
    full = f"{test}.{name}" if name else test
    return test_file.parent / FOLDER / test_file.stem / f"{file_name(full)}.txt"


def file_name(text: str) -> str:
    """A file name for a text that is valid on every system; different texts never share one."""
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", text.replace("[", "-").removesuffix("]")).strip("_.")[:_LONGEST_NAME]
    plain = re.fullmatch(r"[A-Za-z0-9._]+", text) is not None and safe == text
    return safe if plain else f"{safe}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def check_snapshot(path: Path, text: str, update: bool, found: Findings | None = None) -> str:
    """Compares a text with the content of a file, or writes it.

    Args:
      path: the file.
      text: the current snapshot.
      update: write the file where it is missing or differs.
      found: the findings behind the text, for a failure's report.

    Returns:
      "equal", "written" or "rewritten".

    Raises:
      FusionAssertionError: it is missing or differs; the message lists newly declined sites and the difference.
      OutputError: it cannot be read or written.
    """
    __tracebackhide__ = True
    try:
        stored = path.read_text(encoding="utf-8") if path.exists() else None
    except (OSError, UnicodeDecodeError) as error:
        raise OutputError(f"cannot read the snapshot {str(path)!r} ({error}); delete it, and run {UPDATE}") from error
    if stored == text:
        return "equal"
    if update:
        write_file(path, text, folders=True)
        return "written" if stored is None else "rewritten"
    where = f"{FOLDER}/{path.parent.name}/{path.name}"
    if stored is None:
        raise FusionAssertionError(f"no snapshot {where} yet: run pytest {UPDATE}, read the file, and commit it", found)
    reasons = _newly_declined(found, stored) if found is not None else []
    advice = f"if the change is intended, run pytest {UPDATE} and commit the file"
    lines = [f"snapshot {where} differs; {advice}", *reasons, *_difference(stored, text)]
    raise FusionAssertionError("\n".join(lines), found)


def _newly_declined(found: Findings, stored: str) -> list[str]:
    """The sites that were not declined when the text was stored, as lines of a failure."""
    new = [r for r in found.rejections if _declined(r) not in stored]
    return nearest_lines(found, new) if new else []


def _difference(stored: str, text: str) -> list[str]:
    """The difference, truncated."""
    lines = list(difflib.unified_diff(stored.splitlines(), text.splitlines(), "stored", "now", lineterm="", n=1))
    more = len(lines) - _LINES
    return [*lines[:_LINES], f"... and {more} more lines"] if more > 0 else lines


def _declined(rejection: Rejection) -> str:
    return f"  {rejection.id} [{rejection.code}]"
