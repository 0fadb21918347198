"""Every path that a document names exists, and the names in the architecture's path of the data are where it has them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path
    for path in (*ROOT.glob("CONTRIBUTING.md"), *(ROOT / "docs").rglob("*.md"))
    if not {"_build", "generated"} & set(path.parts)
)
HOW_TO = ROOT / "docs" / "how-to"
# In backquotes, with a folder of the repository before it: a file, or a folder.
NAMED = re.compile(r"`((?:fusionlab|tests|benchmarks|docs|notebooks|\.ci|\.github)(?:/[\w.-]+)+)/?`")
LINKED = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def named_in(text: str) -> set[str]:
    """Paths from the root of the repository."""
    return set(NAMED.findall(text))


def linked_in(text: str) -> set[str]:
    """Targets of relative links."""
    without_code = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return {
        target for target in LINKED.findall(without_code) if "://" not in target and not target.startswith("mailto:")
    }


@pytest.mark.whole
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_path_that_a_document_names_exists(path):
    text = path.read_text(encoding="utf-8")
    assert not {name for name in named_in(text) if "/generated" not in name and not (ROOT / name).exists()}
    links = {link for link in linked_in(text) if "generated" not in Path(link).parts}  # made when the site is built
    assert not {link for link in links if not (path.parent / link).exists()}


def test_paths_are_seen():
    assert named_in("`fusionlab/cli.py`, `tests/docs/`, `a/b.py`") == {"fusionlab/cli.py", "tests/docs"}
    assert linked_in("[a](x.md#y) [b](https://c) ```\n[d](e)\n```") == {"x.md"}


@pytest.mark.whole
@pytest.mark.parametrize("name", sorted(p.stem for p in HOW_TO.glob("*.md") if p.stem != "index"))
def test_each_how_to_ends_in_its_files(name):
    text = (HOW_TO / f"{name}.md").read_text(encoding="utf-8")
    last = text.split("\n## ")[-1]
    assert last.startswith("Files\n")
    rows = [line for line in last.splitlines() if line.startswith("| ") and not line.startswith("| file")]
    assert rows
    assert all(re.search(r"`[\w./-]+`", row) for row in rows)


# What the page says is in a file, by name.
SAID = {
    "fusionlab/kernels/launch/ffi_call.py": "def launch def _handler",
    "fusionlab/kernels/op/lowering.py": "def run",
    "fusionlab/graph/matching/match.py": "def match",
    "fusionlab/graph/matching/region.py": "def cut",
    "fusionlab/fusers/engine/proposing.py": "def propose",
    "fusionlab/graph/declined.py": "class Declined",
    "fusionlab/fusers/engine/base.py": "class Pass class Substitution",
    "fusionlab/kernels/op/op.py": "class Op",
    "fusionlab/errors.py": "REJECTIONS",
    "fusionlab/kernels/ops/gemm_epilogue/activations.py": "ACTIVATIONS",
    "fusionlab/kernels/launch/architectures.py": "ARCHS",
}


def test_what_the_pages_name_in_a_file_is_there():
    for file, names in SAID.items():
        source = (ROOT / file).read_text(encoding="utf-8")
        for name in re.findall(r"(?:def |class )?\w+", names):
            assert re.search(rf"^{name}\b", source, re.M), f"{file}: {name}"
