"""Counts the words of the stop list in what a person reads: docstrings and messages of the package, README, documents, notebooks.

    python -m tests.house.prose           the counts by word and by part
    python -m tests.house.prose told      where one word occurs
    python -m tests.house.prose --lower   writes the counts as the limits of test_prose.py, where they are lower

The list holds words that make English read translated: the thing should be named, and the sentence have a subject and a verb.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMITS = Path(__file__).with_name("prose_limits.json")
STOP = (
    *("told", "tells", "stands", "stood", "beside", "hangs? on", "is none", "are none", "is said", "are said", "says"),
    *("all the same", "as it comes", "as they come", "unasked", "what it is of", "who looks", "would do"),
)
# "is None" is Python, "is none" is not.
WORDS = {word: re.compile(rf"\b{word}\b", 0 if "none" in word else re.IGNORECASE) for word in STOP}
ANY = re.compile("|".join(STOP), re.IGNORECASE)  # a file without any of them need not be parsed


WITHOUT_TEXT = {ast.Name, ast.Load, ast.Store}


def strings(source: str) -> Iterator[str]:
    """Docstrings and messages: string constants of more than one word, the fixed parts of f-strings included."""
    # As `ast.walk`, but names, which hold no text, are passed over: that is faster.
    nodes: list[ast.AST] = [ast.parse(source)]
    for node in nodes:
        if type(node) is ast.Constant:
            if isinstance(node.value, str) and " " in node.value:
                yield node.value
            continue
        # By field: whoever annotates a tree (a node with its parent, say) annotates nodes that all trees share.
        for value in (getattr(node, field, None) for field in node._fields):
            if type(value) is list:
                nodes += [v for v in value if isinstance(v, ast.AST) and type(v) is not ast.Name]
            elif isinstance(value, ast.AST) and type(value) not in WITHOUT_TEXT:
                nodes.append(value)


def without_code(markdown: str) -> str:
    return re.sub(r"```.*?```|`[^`]*`", "", markdown, flags=re.DOTALL)


def read_by_people(root: Path = ROOT, holding: re.Pattern[str] | None = None) -> Iterator[tuple[str, str]]:
    """Each text with the part it belongs to; of modules, those of files that hold the pattern."""
    for path in sorted((root / "fusionlab").rglob("*.py")):
        source = path.read_text()
        if holding is None or holding.search(source):
            for text in strings(source):
                yield str(path.relative_to(root)), text
    for path in (*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))):
        if "generated" not in path.parts and "_build" not in path.parts:
            yield str(path.relative_to(root)), without_code(path.read_text())
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "markdown":
                yield str(path.relative_to(root)), without_code("".join(cell["source"]))


def counts(root: Path = ROOT) -> Counter[tuple[str, str]]:
    """How often each word of the list occurs in each part: the package, documents, notebooks."""
    found: Counter[tuple[str, str]] = Counter()
    for path, text in read_by_people(root, ANY):
        part = path.split("/")[0] if "/" in path else "README"
        for word, pattern in WORDS.items():
            found[part, word] += len(pattern.findall(text))
    return found


def by_part() -> dict[str, int]:
    """Part -> words of the list in it."""
    found: Counter[str] = Counter()
    for (part, _), n in counts().items():
        found[part] += n
    return dict(sorted(found.items()))


def limits() -> dict[str, int]:
    """Part -> words of the list that it may have; a part that is not among them may have none."""
    return json.loads(LIMITS.read_text(encoding="utf-8"))


def main() -> None:
    if sys.argv[1:] == ["--lower"]:
        held = limits()
        lower = {part: min(n, held.get(part, 0)) for part, n in by_part().items()}
        LIMITS.write_text(json.dumps(lower, indent=1) + "\n", encoding="utf-8")
        return
    if len(sys.argv) > 1:
        pattern = re.compile(rf"\b{sys.argv[1]}\b", re.IGNORECASE)
        for path, text in read_by_people():
            for line in text.splitlines():
                if pattern.search(line):
                    print(f"{path}: {line.strip()[:150]}")
        return
    found = counts()
    parts = sorted({part for part, _ in found})
    print(f"{'':16}" + "".join(f"{part:>12}" for part in parts))
    for word in STOP:
        print(f"{word:16}" + "".join(f"{found[part, word]:>12}" for part in parts))
    print(f"{'sum':16}" + "".join(f"{sum(n for (p, _), n in found.items() if p == part):>12}" for part in parts))


if __name__ == "__main__":
    main()
