"""A comment stands above its statement, never behind the lone bracket that the formatter leaves of a statement that was too long."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Pragmas stay where the tools that read them look for them.
SCAR = re.compile(r"^[ \t]*[])}]+[:,]?[ \t]+#(?! ?(?:fmt:|type:|noqa|pyright:|pragma))", re.M)


def scars(code: str) -> list[int]:
    """The lines on which a comment stands behind nothing but closing brackets."""
    return [code.count("\n", 0, found.start()) + 1 for found in SCAR.finditer(code)]


@pytest.mark.whole
@pytest.mark.parametrize("line", [")  # why", "    ]  # why", "}),  # why", "):  # why", "}  #why"])
def test_a_comment_behind_a_lone_bracket_is_seen(line):
    assert scars(f"x = f(\n    1\n{line}\n") == [3]


@pytest.mark.whole
@pytest.mark.parametrize(
    "line", [")", "x = f(1)  # why", ")  # fmt: skip", "]  # type: ignore", "# why", ").sum()  # why"]
)
def test_other_comments_and_pragmas_are_let_be(line):
    assert not scars(line)


@pytest.mark.whole
@pytest.mark.parametrize("tree", ["fusionlab", "tests", "benchmarks"])
def test_no_comment_was_pushed_behind_a_bracket(tree):
    files = sorted((ROOT / tree).rglob("*.py"))
    assert files
    left = [f"{path.relative_to(ROOT)}:{n}" for path in files for n in scars(path.read_text(encoding="utf-8"))]
    assert not left, "move the comment above the statement"
