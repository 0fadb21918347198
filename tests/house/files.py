"""Text files end in one newline, no line ends in a blank, and no mark of a merge is left.

python -m tests.house.files [FILE ...]   the faults of these files, or of all of the repository; 1 where there is one
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
MERGE = re.compile(r"^(<{7}|>{7}|\|{7}) ", re.MULTILINE)
BLANKS = re.compile(r"[ \t]+$", re.MULTILINE)
FOLDERS = (".ci", ".github", "benchmarks", "docs", "fusionlab", "notebooks", "tests")
KINDS = {".py", ".md", ".toml", ".yml", ".yaml", ".json", ".cu", ".cuh", ".c", ".h", ".cpp", ".js", ".css", ".cff", ""}


def faults(text: str) -> list[str]:
    """What is wrong with a text."""
    found = []
    if text and not text.endswith("\n"):
        found.append("no newline at its end")
    if text.endswith("\n\n"):
        found.append("empty lines at its end")
    if blank := BLANKS.search(text):
        found.append(f"blanks at the end of line {text.count(chr(10), 0, blank.start()) + 1}")
    if mark := MERGE.search(text):
        found.append(f"a mark of a merge in line {text.count(chr(10), 0, mark.start()) + 1}")
    if "\r" in text:
        found.append("carriage returns")
    return found


def faulty(paths: Iterable[Path]) -> list[str]:
    """A line for each fault of the files of these kinds."""
    lines = []
    for path in paths:
        if path.suffix in KINDS and path.is_file() and not path.is_symlink():
            lines += [f"{path}: {fault}" for fault in faults(path.read_text(encoding="utf-8"))]
    return lines


def ours() -> list[Path]:
    """The files of the repository, with git or without."""
    inside = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    return sorted(p for p in (*ROOT.glob("*"), *inside) if not {"__pycache__", "_build"} & set(p.parts))


def main() -> int:
    found = faulty(map(Path, sys.argv[1:]) if sys.argv[1:] else ours())
    print("\n".join(found), end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
