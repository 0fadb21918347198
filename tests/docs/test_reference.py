"""The API reference: every public name has a docstring and a page, and the examples of its pages run."""

import doctest
import inspect

import pytest

import fusionlab as fl
from tests.docs.reference import API, imported, named, shown, without_docstring, without_page

WITH_EXAMPLES = sorted(page.name for page in API.glob("*.md") if ">>>" in page.read_text(encoding="utf-8"))


@pytest.mark.dear  # `.ci/run docs` asks the same
def test_every_public_name_has_a_docstring():
    assert without_docstring() == []


@pytest.mark.dear
def test_every_public_name_and_result_has_a_page():
    assert without_page() == []


def test_no_page_shows_a_name_twice():
    names = shown()
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("name", fl.ops.__all__)
@pytest.mark.whole
def test_a_fused_op_says_shapes_and_errors(name):
    doc = inspect.getdoc(getattr(fl.ops, name)) or ""
    if name == "TransformerLayer":
        assert "[E, F]" in doc
        return
    assert any(letters in doc for letters in (" x ", "[B", "[H", "[S", "[3", "axes", "shape", "ranks"))
    assert "Raises:" in doc


def test_the_names_that_documents_import_exist():
    assert all(named(name) is not None for name in imported())


@pytest.mark.parametrize("name", WITH_EXAMPLES)
@pytest.mark.dear
def test_the_examples_of_a_page_run(name):
    text = (API / name).read_text(encoding="utf-8")
    example = doctest.DocTestParser().get_doctest(text, {}, name, name, 0)
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert said == []
