"""What README says is so: its commands, its snippet, its names, its links, its numbers."""

import contextlib
import io
import json
import re
import tomllib
from pathlib import Path

import jax
import pytest

import fusionlab as fl
from fusionlab import cli
from fusionlab.demo import mebibytes
from fusionlab.evidence.timing import seconds

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.M | re.S)


def blocks(language):
    return [body for lang, body in BLOCKS if lang == language]


def test_readme_has_exactly_the_two_set_up_commands():
    assert re.findall(r"^python3 -m venv .*$", README, re.M) == [
        "python3 -m venv .venv && .venv/bin/pip install . && .venv/bin/fusionlab demo -o demo",
        "python3 -m venv .venv && .venv/bin/pip install -e '.[dev]' && .venv/bin/python -m pytest",
    ]
    assert [line for body in blocks("sh") for line in body.splitlines() if line.startswith("python3")] == re.findall(
        r"^python3 .*$", README, re.M
    )


@pytest.fixture(scope="module")
def snippet_output():
    """What the first Python block prints, run as it stands."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(blocks("python")[0], "README.md", "exec"), {})
    return out.getvalue()


def test_the_snippet_has_ten_lines_at_most():
    lines = [line for line in blocks("python")[0].splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) <= 10


def test_the_snippet_runs_and_prints_what_readme_shows(snippet_output):
    shown = blocks("text")[0].strip().splitlines()
    assert shown
    for line in shown:
        assert line in snippet_output.splitlines()


def test_every_pass_and_op_is_named_and_none_is_invented():
    names = {p.name for p in fl.passes()}
    table = re.findall(r"^\| `(\w+)` \|", README, re.M)
    assert names == set(table)
    ops = set(re.findall(r"`fl\.ops\.(\w+)`", README))
    assert ops == {n for n in fl.ops.__all__ if callable(getattr(fl.ops, n))}


def test_every_command_is_listed_and_none_is_invented():
    listed = re.findall(r"^fusionlab (\w+) ", README, re.M)
    actions = cli._parser()._subparsers._group_actions  # type: ignore[union-attr]
    assert sorted(set(listed)) == sorted(actions[0].choices)


def test_the_supported_versions_are_those_of_the_package():
    with open(ROOT / "pyproject.toml", "rb") as f:
        project = tomllib.load(f)["project"]
    assert project["requires-python"] == ">=3.11"
    assert "Python 3.11" in README
    assert "jax>=0.10" in project["dependencies"]
    assert "JAX 0.10" in README


def test_every_relative_link_and_picture_exists():
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert any(t.endswith(".svg") for t in targets)
    for target in targets:
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target


def test_the_picture_was_drawn_by_the_project():
    picture = (ROOT / "docs" / "overview.svg").read_text(encoding="utf-8")
    assert "layout: " in picture
    assert "dot_product_attention" in picture


def numbers_in(record):
    """Every number of a JSON record, at any depth."""
    if isinstance(record, dict | list):
        for inner in record.values() if isinstance(record, dict) else record:
            yield from numbers_in(inner)
    elif isinstance(record, int | float):
        yield float(record)


def test_every_number_of_a_table_stands_in_its_record():
    rows = re.findall(r"^(\|.*)\[record\]\((benchmarks/[^)]+\.json)\) \|$", README, re.M)
    assert len(rows) == README.count("[record](")
    for row, record in rows:
        cells = re.findall(r"\| ([\d.]+ (?:s|ms|us|ns|MiB)) (?=\|)", row)
        assert len(cells) >= 2, row
        numbers = list(numbers_in(json.loads((ROOT / record).read_text())))
        written = {form(n) for n in numbers for form in (seconds, mebibytes)}
        assert set(cells) <= written, record


def test_the_reason_shown_is_what_a_search_prints():
    names: dict = {}
    model = "import jax\n\n\ndef f(w, b, x):\n    h = x @ w + b\n    return jax.nn.relu(h), h\n"
    exec(compile(model, "model.py", "exec"), names)
    found = fl.find(names["f"], *(jax.ShapeDtypeStruct(s, "float32") for s in ((64, 32), (32,), (8, 64))))
    assert blocks("text")[1].strip() in str(found)
