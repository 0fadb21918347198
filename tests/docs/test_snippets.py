"""The pages of docs/: snippets run, outputs are those shown, links lead somewhere, numbers are on record."""

import re

import pytest

from tests.docs.numbers import quoted, with_records, without_record
from tests.docs.snippets import ROOT, lines_of, outputs, pages, pattern_of

PAGES = {str(path.relative_to(ROOT)): path for path in pages()}
# README's snippets run in test_readme.py. Pages of >>> examples, and those of frameworks, have tests of their own.
ELSEWHERE = ("README.md", "docs/frameworks/")
SNIPPET = re.compile(r"^```(python\n(?!>>>)|sh\n)", re.MULTILINE)
WITH_SNIPPETS = [n for n, path in PAGES.items() if not n.startswith(ELSEWHERE) and SNIPPET.search(path.read_text())]


@pytest.mark.dear
@pytest.mark.parametrize("name", WITH_SNIPPETS)
def test_the_snippets_of_a_page_run_and_print_what_it_shows(name):
    wrong = [shown.difference for shown in outputs(PAGES[name].read_text(encoding="utf-8")) if not shown.is_right]
    assert not wrong, "\n\n".join(wrong) + "\n\npython -m tests.docs.snippets --write writes them anew"


@pytest.mark.whole
@pytest.mark.parametrize("name", PAGES)
def test_the_links_of_a_page_lead_to_files(name):
    path = PAGES[name]
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link]
    # Generated pages are made where the site is built.
    assert [link for link in links if "generated/" not in link and not (path.parent / link).exists()] == []


@pytest.mark.whole
@pytest.mark.parametrize("name", PAGES)
def test_the_numbers_of_a_page_are_in_the_records_that_it_links(name):
    path = PAGES[name]
    for part, links in with_records(path.read_text(encoding="utf-8")):
        assert not without_record(part, links, path), part


def test_numbers_are_read_with_their_units():
    assert quoted("| 20.5 ms | 33 MiB, 1.95x [1.94, 1.96] | JAX 0.11.2, 24 layers |") == (
        {"20.5 ms", "33 MiB"},
        {"1.95", "1.94", "1.96"},
    )


@pytest.mark.parametrize(
    ("shown", "printed", "is_right"),
    [
        ("a\nb\n", "a  \nb\n", True),
        ("a\n", "a\nb\n", False),
        ("a\n...\n", "a\nb\nc\n", True),
        ("a\n...\n", "a\n", True),
        ("a\n...\nc\n", "a\nb\n", False),
        ("a ... c\n", "a b c\n", True),
        ("[a]\n", "a\n", False),
    ],
)
@pytest.mark.whole
def test_an_output_is_compared_line_by_line(shown, printed, is_right):
    assert (pattern_of(shown).fullmatch(lines_of(printed)) is not None) is is_right


def test_a_page_shares_one_namespace_and_its_lines_are_those_of_one_file():
    first, second = "x = 1\n\n\ndef f():\n    return x\n", "print(f() + x, f.__code__.co_firstlineno)\n"
    page = f"```python\n{first}```\ntext\n```python\n{second}```\n```text\n2 4\n```\n"
    (shown,) = outputs(page)
    assert shown.is_right


def test_a_block_with_a_name_is_a_file_that_others_import():
    page = "```python\n# my_library.py\nanswer = 42\n```\n```python\nfrom my_library import answer\nprint(answer)\n```\n```text\n42\n```\n"
    (shown,) = outputs(page)
    assert shown.is_right


def test_a_wrong_output_is_found_and_one_of_times_is_not_compared():
    page = "```python\nprint(1)\n```\n\n```text\n2\n```\n```python\nprint(1)\n```\n<!-- measured -->\n```text\n2\n```\n"
    assert [shown.is_right for shown in outputs(page)] == [False, True]


def test_what_is_marked_is_not_run():
    assert outputs("<!-- not run -->\n```python\nraise ValueError\n```\n") == []


def test_where_numbers_vary_a_number_is_any_number_and_a_word_is_itself():
    page = "```python\nprint('1,234 -> 5.6e-07 MiB')\n```\n<!-- numbers vary -->\n```text\n7 -> 8 {}\n```\n"
    (right,), (wrong,) = outputs(page.format("MiB")), outputs(page.format("GiB"))
    assert (right.is_right, wrong.is_right) == (True, False)
