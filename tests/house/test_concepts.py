"""The glossary, docs/concepts.md: its terms, the modules and names that it points to, its examples."""

import doctest
import functools
import re
from pathlib import Path

import pytest

import fusionlab as fl

PAGE = Path(__file__).parents[2] / "docs" / "concepts.md"
TEXT = PAGE.read_text(encoding="utf-8")
HEAD, *CHAPTERS = re.split(r"^## ", TEXT, flags=re.M)
WORDS = {entry.partition("\n")[0]: entry for entry in re.split(r"^### ", TEXT, flags=re.M)[1:]}


def test_some_thirty_terms_are_defined_once_each():
    headings = re.findall(r"^###? (.*)$", TEXT, re.M)
    assert len(set(map(str.lower, headings))) == len(headings)
    assert 25 <= len(WORDS) <= 40


def test_each_word_has_its_module_and_an_example():
    for word, entry in WORDS.items():
        definition, fence, example = entry.partition("```python\n")
        assert "Code: " in definition, word
        assert "](../fusionlab/" in definition, word
        assert fence, word
        assert ">>> " in example, word


def test_a_definition_is_short():
    lengths = {word: len(entry.partition("\n")[2].partition("Code: ")[0].split()) for word, entry in WORDS.items()}
    assert max(lengths.values()) <= 80, lengths


def test_a_link_is_called_what_it_leads_to():
    for name, link in re.findall(r"\[([^\]]+)\]\(([^)]+)\)", TEXT):
        assert link.removesuffix("/__init__.py").endswith(name), name


def test_the_names_of_fusionlab_exist():
    for dotted in sorted(set(re.findall(r"\bfl((?:\.\w+)+)", TEXT))):
        functools.reduce(getattr, dotted.split(".")[1:], fl)


def test_every_module_that_the_examples_import_is_linked_or_an_ops_own():
    imported = set(re.findall(r"from fusionlab\.([\w.]+) import", TEXT))
    linked = {link.removeprefix("../fusionlab/").removesuffix(".py") for link in re.findall(r"\]\(([^)#]+)\)", TEXT)}
    assert {m for m in imported if m.replace(".", "/") not in linked and not m.startswith("kernels.ops.")} == set()


@pytest.mark.whole
@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda c: c.partition("\n")[0].replace(" ", "_").lower())
def test_the_examples_print_what_the_page_says(chapter):
    examples = doctest.DocTestParser().get_doctest(HEAD + chapter, {}, "concepts", str(PAGE), 0)
    printed: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(examples, out=printed.append)
    assert result.failed == 0, "".join(printed)
