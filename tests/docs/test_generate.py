"""The generated pages: every pass, code and record is there, each link leads somewhere, each program prints what is shown."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import generate
import pytest
from generate.by_hand import WITHOUT, programs
from generate.examples import example
from generate.gpus import write_gpus
from generate.inline import Inlining
from generate.markdown import ROOT, plain, printed
from generate.near import near_misses
from generate.performance import TABLES, tables_about, write_performance
from generate.programs import as_function
from generate.records import CARDS, cell, duration, newest, ratio, records_of
from generate.rejections import examples

import fusionlab as fl
from fusionlab.commands.kernels_by_gpu import kernels_by_gpu
from fusionlab.errors import REJECTIONS, ROUTE_REASONS
from fusionlab.fusers.engine.base import COMMON_CODES

README = (ROOT / "README.md").read_text(encoding="utf-8")
PASSES = tuple(fl.passes())


def pages_in(folder: Path) -> dict[str, str]:
    return {page.relative_to(folder).as_posix(): page.read_text(encoding="utf-8") for page in folder.rglob("*.md")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where everything was written, once."""
    folder = tmp_path_factory.mktemp("generated")
    generate.write(folder)
    return folder


@pytest.fixture(scope="module")
def performance(tmp_path_factory):
    """The pages of measurements."""
    folder = tmp_path_factory.mktemp("performance")
    write_performance(folder)
    return pages_in(folder)


# -- what is written ----------------------------------------------------------------------------------------------------


@pytest.mark.dear
def test_every_pass_has_a_page_with_all_that_the_registry_says(folder):
    pages = pages_in(folder)
    for pass_ in PASSES:
        page = pages[f"passes/{pass_.name}.md"]
        assert f"(passes/{pass_.name}.md)" in pages["passes.md"]
        for sentence in (pass_.summary, pass_.needs, pass_.default, *pass_.spellings):
            assert plain(sentence) in page
        for key, option in pass_.declared.items():
            assert f"| `{key}` | `{option.default!r}` |" in page
        for code in pass_.codes:
            assert f"(#rejection-{code})" in page
        for implementation in pass_.fused_op.implementations:
            assert f"| `{implementation}` |" in page


@pytest.mark.dear
def test_every_code_has_its_meaning_and_a_program_or_why_there_is_none(folder):
    page = pages_in(folder)["rejections.md"]
    for code, meaning in REJECTIONS.items():
        chapter = re.split(r"^\([\w-]+\)=$", page.partition(f"(rejection-{code})=\n")[2], maxsplit=1, flags=re.M)[0]
        assert plain(meaning[1:]) in chapter
        assert f"[{code}]" in chapter or WITHOUT[code] in chapter, code
    for code, meaning in ROUTE_REASONS.items():
        assert f"| `{code}` | {plain(meaning)} |" in page


@pytest.mark.dear
def test_every_link_leads_to_a_file_or_an_anchor(folder):
    pages = pages_in(folder)
    anchors = {anchor for text in pages.values() for anchor in re.findall(r"^\(([\w.-]+)\)=$", text, re.M)}
    for name, text in pages.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.S)):
            if target.startswith("https://"):
                continue
            found = (
                target[1:] in anchors
                if target.startswith("#")
                else ((folder / name).parent / target).resolve().exists()
            )
            assert found, (name, target)


@pytest.mark.dear
def test_no_anchor_is_given_twice(folder):
    anchors = [anchor for text in pages_in(folder).values() for anchor in re.findall(r"^\(([\w.-]+)\)=$", text, re.M)]
    assert len(set(anchors)) == len(anchors)


def test_the_page_of_gpus_is_what_doctor_prints_and_what_is_measured_has_a_record(tmp_path):
    write_gpus(tmp_path)
    page = (tmp_path / "gpus.md").read_text(encoding="utf-8")
    for name, row in kernels_by_gpu().items():
        line = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert [cell.partition(":")[0].strip() for cell in line.split("|")[2:-1]] == [one.state.value for one in row]
        assert all(plain(why.removeprefix(f"{one.arch} ")) in page for one in row for why in one.refused.values())
        passes = {p.name for p in PASSES if p.op == row[0].op} or {"layer_norm"}  # which finds GroupNorm too
        on_gpus = {measured.card for one in passes for measured in tables_about(one)} - {"cpu"}
        assert bool(on_gpus) == any(one.state == "measured" for one in row), name


# -- measurements -------------------------------------------------------------------------------------------------------


@pytest.mark.dear
def test_every_record_of_a_card_is_linked_on_its_page(performance):
    for card in CARDS:
        assert records_of(card)
        for record in records_of(card):
            assert f"benchmarks/results/{card}/{record.path.name})" in performance[f"performance/{card}.md"]


def readme_rows() -> Iterator[tuple[str, str]]:
    """Each row of README's tables that links a record, and the card of that record."""
    for row in re.findall(r"^\|.*\|$", README, re.M):
        if link := re.search(r"\]\(benchmarks/results/(\w+)/[^)]+\)", row):
            yield row, link[1]


@pytest.mark.dear
def test_every_number_of_readme_with_a_record_is_on_the_page_of_its_card(performance):
    rows = list(readme_rows())
    assert rows
    for row, card in rows:
        quantities = re.findall(r"(?<![\w.])(\d[\d.]*) (s|ms|us|µs|ns|MiB|GiB)\b", row)
        written = [f"{number}\N{NO-BREAK SPACE}{unit.replace('us', 'µs')}" for number, unit in quantities]
        written += re.findall(r"\d+\.\d+x \[\d+\.\d+, \d+\.\d+\]", row)
        assert len(written) >= 2, row
        assert [text for text in written if text not in performance[f"performance/{card}.md"]] == [], row


def test_a_table_is_of_the_newest_record_and_says_where_its_numbers_are_from():
    for measured in TABLES[:3]:
        text = measured.text(ROOT / "docs" / "generated" / "performance" / "page.md")
        record = newest(measured.card, measured.benchmark)
        assert record.time == max(r.time for r in records_of(measured.card) if r.benchmark == measured.benchmark)
        for said in (record.environment["hardware"], record.time[:10], record.command, record.path.name, "JAX "):
            assert said in text


@pytest.mark.dear
def test_every_table_has_numbers_in_all_of_its_rows():
    assert len({t.anchor for t in TABLES}) == len(TABLES)
    for measured in TABLES:
        assert set(measured.passes) <= set(fl.passes().names)
        for label, *cells in measured.lines():
            assert "–" not in cells[:3], (measured.title, label)
        if command := measured.record.command:
            assert f"`{command}`" in measured.text(ROOT / "docs" / "generated" / "performance" / "page.md")


def test_a_benchmark_without_a_record_is_a_lookup_error():
    with pytest.raises(LookupError, match="no record of nonesuch"):
        newest("h200", "nonesuch")


def test_numbers_are_written_with_units_that_stay_in_their_line():
    assert duration(372e-6) == "372\N{NO-BREAK SPACE}µs"
    assert cell({"median_s": 1.35e-3}) == cell([1e-3, 1.35e-3, 2e-3]) == "1.35\N{NO-BREAK SPACE}ms"
    assert cell({"temp": 64 << 20}) == cell([{"growth_bytes": 64 << 20}]) == "64.0\N{NO-BREAK SPACE}MiB"
    assert cell(34603776) == "33.0\N{NO-BREAK SPACE}MiB"
    assert cell(10 << 30) == "10.0\N{NO-BREAK SPACE}GiB"
    assert cell(None) == "–"
    assert ratio({"temp": 30}, {"temp": 20}, "before") == "1.50x"
    after = {"ratio_to": "jax.jit", "ratio": 1.5, "interval": [1.4, 1.6]}
    assert ratio({"median_s": 3.0}, after, "jax.jit") == "1.50x [1.40, 1.60]"


# -- codes --------------------------------------------------------------------------------------------------------------


def test_every_code_belongs_to_all_passes_or_to_some():
    of_some = {code for pass_ in PASSES for code in pass_.codes}
    assert of_some | set(COMMON_CODES) == set(REJECTIONS)


def test_a_pass_has_the_codes_that_programs_got_from_it():
    got = {(near.entry.pass_name, near.entry.code) for near in near_misses()}
    for name in ("random_programs", "random_train_steps"):
        record = json.loads((ROOT / "benchmarks" / "results" / "cpu" / f"{name}.json").read_text())
        got |= {tuple(pair.split(": ")) for pair in record["result"]["rejections"]}
    for name, code in got:
        assert code in {*fl.passes()[name].codes, *COMMON_CODES}, (name, code)


# -- programs -----------------------------------------------------------------------------------------------------------


@pytest.mark.dear
@pytest.mark.parametrize("pass_", PASSES, ids=lambda p: p.name)
def test_a_pass_finds_one_site_in_its_example(pass_):
    lines = [line for line in example(pass_).printed.splitlines() if "0 subgraphs can be fused, 0 declined" not in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"{pass_.name}: 1 subgraph can be fused, 0 declined")


@pytest.mark.dear
def test_every_code_has_an_example_or_a_reason_why_not():
    chosen, by_hand = examples(), programs()
    assert {*chosen, *by_hand, *WITHOUT} == set(REJECTIONS)
    assert not chosen.keys() & WITHOUT.keys()
    for code, program in by_hand.items():
        assert f"[{code}]" in program.printed


@pytest.mark.dear
@pytest.mark.parametrize("code", sorted(REJECTIONS))
def test_a_near_miss_gets_its_code_and_with_the_edit_it_matches(code):
    for near in examples().get(code, ()):
        assert f"[{code}] {near.entry.pass_name}" in near.declined.printed
        if near.repaired is not None:
            assert f"{near.entry.pass_name}: 1 subgraph can be fused, 0 declined" in near.repaired.printed


MODULE = ast.parse("""
relu = jax.nn.relu
EPS = 1e-05
def mean(x, axis=-1):
    return x.mean(axis, keepdims=True)
def scores(q, k, **rest):
    return jnp.dot(q, k, **rest)
def squared(x):
    return x * x
def attend(weights):
    return lambda q, k: weights(scores(q, k))
def named(s):
    return (e := s + 1) * e
""")


@pytest.mark.parametrize(
    ("code", "inlined"),
    [
        ("mean(x)", "x.mean(-1, keepdims=True)"),
        ("mean(x, axis=1)", "x.mean(1, keepdims=True)"),
        ("scores(a, b, precision='highest')", "jnp.dot(a, b, precision='highest')"),
        ("squared(a)", "a * a"),
        ("squared(f(a))", "squared(f(a))"),  # would be computed twice
        ("attend(lambda s: s + 1)", "lambda q, k: jnp.dot(q, k) + 1"),
        ("attend(lambda s: s + q)", "attend(lambda s: s + q)"),  # q would become another one
        ("named(a)", "named(a)"),
        ("mean(*a)", "mean(*a)"),
        ("other(a)", "other(a)"),
    ],
)
def test_a_small_function_is_written_out_where_that_changes_nothing(code, inlined):
    assert ast.unparse(Inlining(MODULE).visit(ast.parse(code, mode="eval").body)) == inlined


def test_a_lambda_becomes_a_function_that_reads_as_written_by_hand():
    node = ast.parse("lambda x, w: (lambda h: (relu(h + EPS) * h, 'a'))(x @ w)", mode="eval").body
    assert as_function(node, "program", MODULE) == [
        "def program(x, w):",
        "    h = x @ w",
        '    return jax.nn.relu(h + 1e-5) * h, "a"',
    ]


def test_a_long_line_is_written_in_two_steps():
    scores = "jnp.einsum('bthd,bshd->bhts', q, k) * 0.5"
    node = ast.parse(f"lambda q, k, v: jnp.einsum('bhts,bshd->bthd', jax.nn.softmax({scores}), v)", mode="eval").body
    assert as_function(node, "program") == [
        "def program(q, k, v):",
        '    s = jnp.einsum("bthd,bshd->bhts", q, k) * 0.5',
        '    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), v)',
    ]


def test_what_a_program_prints_is_wrapped_between_words():
    lines = printed("declined:\n  " + "word " * 40).splitlines()
    assert max(map(len, lines)) <= 90
    assert lines[:2] == ["```text", "declined:"]
    assert lines[2].startswith("  word")
    assert lines[3].startswith("      word")


def test_names_and_calls_in_a_sentence_become_code():
    assert plain("use fl.Strategy(lerp=dict(a=True)), x * y or jnp.tanh.") == (
        "use `fl.Strategy(lerp=dict(a=True))`, x \\* y or `jnp.tanh`."
    )
    assert plain("`origin` says where; a_b and _c_") == "`origin` says where; a_b and \\_c\\_"
