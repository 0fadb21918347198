"""What belongs to a repository beside its code: NOTICE, CITATION.cff, the changelog, the hooks, the forms of issues, the ends of files."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from . import files, notice

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
VERSION = PYPROJECT["project"]["version"]


def test_notice_names_each_dependency_with_a_licence():
    lines = dict(re.findall(r"^  ([\w.-]+): (.+)$", notice.NOTICE.read_text(encoding="utf-8"), re.M))
    assert set(notice.base()) <= lines.keys()
    assert set(notice.extras()) <= lines.keys()
    assert "NOTICE" in PYPROJECT["project"]["license-files"]


def test_the_version_is_the_same_everywhere():
    assert re.search(rf"^version: {re.escape(VERSION)}$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M)
    newest = re.search(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert newest is not None
    assert newest[1] == VERSION


def test_the_changelog_names_every_pass_of_today():
    import fusionlab as fl

    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    by_default = {p.name for p in fl.passes() if not p.named_only}
    assert {name for name in by_default if f"`{name}`" not in text} == set()


def test_the_package_is_typed():
    assert (ROOT / "fusionlab" / "py.typed").is_file()
    assert "Typing :: Typed" in PYPROJECT["project"]["classifiers"]


def test_the_hooks_are_local():
    text = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert re.findall(r"^  - repo: (\S+)$", text, re.M) == ["local"]
    for module in re.findall(r"python -m (tests\.[\w.]+)", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file()


@pytest.mark.parametrize("name", ["bug", "missed-fusion", "wrong-result"])
def test_a_form_of_an_issue_asks_for_the_doctor(name):
    text = (ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text(encoding="utf-8")
    assert "fusionlab doctor" in text
    assert re.search(r"^name: .+\ndescription: .+\n", text)


def test_files_end_as_text_does():
    assert files.faulty(files.ours()) == []


def test_faults_of_a_file_are_seen():
    assert files.faults("a\n") == []
    assert len(files.faults("a \nb")) == 2
    assert files.faults("<<<<<<< x\n") == ["a mark of a merge in line 1"]
