"""The words of the stop list (prose.py) become fewer: no part has more of them than prose_limits.json allows.

`python -m tests.house.prose --lower` writes the counts of today as the limits, where they are lower.
"""

from __future__ import annotations

import subprocess

from .prose import ROOT, WORDS, by_part, limits


def new_lines(changes: str) -> list[str]:
    """The added lines of `git diff` that hold a word of the list."""
    added = [line[1:].strip() for line in changes.splitlines() if line.startswith("+") and not line.startswith("+++")]
    return [line for line in added if any(pattern.search(line) for pattern in WORDS.values())]


def changes() -> str:
    """The difference to the last commit; "" without git."""
    try:
        done = subprocess.run(["git", "diff", "-U0", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout


def test_no_part_has_more_words_of_the_stop_list_than_it_may():
    most = limits()
    over = [f"{part}: {n}, at most {most.get(part, 0)}" for part, n in by_part().items() if n > most.get(part, 0)]
    if over:
        new = [f"  new: {line:.150}" for line in new_lines(changes())]
        raise AssertionError("\n".join([*over, "where a word occurs: python -m tests.house.prose WORD", *new]))


def test_new_sentences_are_seen():
    assert new_lines("+++ b/x.md\n+As it was told.\n+All well.\n-told\n told") == ["As it was told."]
