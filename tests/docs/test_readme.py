"""What README says is so: its length, commands, snippets, names, versions. Links and numbers: tests/docs/test_snippets.py."""

import re
import tomllib
from pathlib import Path

import pytest

import fusionlab as fl
from fusionlab import cli
from fusionlab.viz.export import CAPTION
from tests.docs.snippets import outputs

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.M | re.S)


def blocks(language):
    return [body for lang, body in BLOCKS if lang == language]


(TEN_LINES,) = [body for body in blocks("python") if "fl.compare(" in body]


def test_readme_is_short():
    assert README.count("\n") <= 120


def test_readme_has_exactly_the_two_set_up_commands():
    assert re.findall(r"^python3 -m venv .*$", README, re.M) == [
        "python3 -m venv .venv && .venv/bin/pip install . && .venv/bin/fusionlab demo -o demo",
        "python3 -m venv .venv && .venv/bin/pip install -e '.[dev]' && .venv/bin/python -m pytest",
    ]
    assert [line for body in blocks("sh") for line in body.splitlines() if line.startswith("python3")] == re.findall(
        r"^python3 .*$", README, re.M
    )


def test_what_the_tests_skip_without_is_named_where_they_are_installed():
    """Every tool and library whose absence skips a test: in the words of the skip, all but those that `dev` installs."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py") if "zoo" not in str(path)]
    pattern = r"""(?:\brequire\([^\n]+, "|pytest\.skip\("needs )(?:the extra )?([^\s"]+)|importorskip\("(\w+)"""
    needed = {word for source in sources for words in re.findall(pattern, source) for word in words if word}
    dev = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"][
        "dev"
    ]
    missing = {word for word in needed if not any(word.partition(".")[0].lower() in line for line in dev)}
    named = {
        "g++": "`g++`",
        "Graphviz's": "Graphviz's `dot`",
        "torch": "PyTorch",
        "two": "GPU",
        "pdf": "",
        "chromium": "Chromium",
    }
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for word in missing:
        for page in (README, contributing):
            assert named.get(word, word) in page, word


def test_the_first_screen_names_the_use_the_users_and_one_line_to_try():
    first = "\n".join(README.splitlines()[:25])
    for needed in (
        "JAX",
        "NVIDIA",
        "H100",
        "H200",
        "without a GPU",
        "fl.find(train_step",
        "python3 -m venv",
        "explorer.png",
    ):
        assert needed in first, needed


@pytest.fixture(scope="module")
def shown():
    """What the page says that its ten lines print, and what they print."""
    (only,) = outputs(README)
    return only


def test_the_snippet_has_ten_lines_at_most():
    lines = [line for line in TEN_LINES.splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) <= 10


def test_the_snippet_runs_and_prints_what_readme_shows(shown):
    assert shown.is_right, shown.difference


def test_the_snippet_fuses_a_flax_model_and_prints_a_rejection_with_its_edit(shown):
    assert "from flax import" in TEN_LINES
    assert "fl.fuse(" in TEN_LINES
    assert re.search(r"^gemm_epilogue: [1-9]\d* subgraphs can be fused", shown.printed, re.M)
    declined = shown.printed.partition("declined:\n")[2].splitlines()
    assert re.match(r"  \[\w+\] gemm_epilogue@#2 at model\.py:9: ", declined[0])
    assert declined[1].startswith("    edit: ")
    assert "compiled peak memory" in shown.printed


def table(text):
    """The passes in the first cells of a page's tables."""
    first_cells = re.findall(r"^\|([^|]*)\|", text, re.M)
    return {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}


def test_every_pass_is_named_and_none_is_invented():
    names = {p.name for p in fl.passes()}
    assert names == set(re.findall(r"^(?:###|-) `(\w+)`", DOCS["finding"].partition("## What was declined")[0], re.M))
    short = {name.removesuffix("_fuse_qkv") for name in names}
    assert short == table(README) - {""}


def test_every_op_is_named_and_none_is_invented():
    ops = {name for page in (README, *DOCS.values()) for name in re.findall(r"`fl\.ops\.(\w+)`", page)}
    assert ops == {n for n in fl.ops.__all__ if callable(getattr(fl.ops, n))}


def test_every_command_has_a_section_and_none_is_invented():
    listed = re.findall(r"^## fusionlab (\w+)$", DOCS["cli"], re.M)
    actions = cli._parser()._subparsers._group_actions  # type: ignore[union-attr]
    assert sorted(listed) == sorted(actions[0].choices)


def test_the_supported_versions_are_those_of_the_package():
    with open(ROOT / "pyproject.toml", "rb") as f:
        project = tomllib.load(f)["project"]
    assert project["requires-python"] == ">=3.11"
    assert "Python 3.11" in README
    assert "jax>=0.10" in project["dependencies"]
    assert "JAX 0.10" in README


def test_the_pictures_were_drawn_by_the_project():
    assert "](docs/explorer.png)" in README
    assert any("](overview.svg)" in page for page in DOCS.values())
    picture = (ROOT / "docs" / "overview.svg").read_text(encoding="utf-8")
    assert CAPTION in picture
    assert "dot_product_attention" in picture
