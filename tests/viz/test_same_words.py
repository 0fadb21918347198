"""One measurement says the same in every place that tells of it: explorer, page, terminal, report, demo."""

from __future__ import annotations

import re
from html import unescape

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab.commands.demo import Demo
from fusionlab.evidence.instruments.timing import seconds
from fusionlab.fusers.engine.grouping import STATE_WORDS
from fusionlab.viz.model.evidence_view import evidence_dict, evidence_tables

W, B = jnp.ones((8, 16)) / 7, jnp.linspace(-1, 1, 16)
X = jax.random.normal(jax.random.key(0), (4, 8))


def layer(x, w, b):
    centred = x - x.mean(-1, keepdims=True)
    normal = centred / jnp.sqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)
    heads = (normal @ w + b).reshape(1, 4, 2, 8)  # fused, attention compiles to other instructions: something is timed
    scores = jnp.einsum("bqhd,bkhd->bhqk", heads, heads) / 8**0.5
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), heads).reshape(4, 16)


@pytest.fixture(scope="module")
def measured():
    """(explorer, its measurement)."""
    lab = fl.explore(layer, X, W, B, budget_s=0.4)
    return lab, lab.measure()


@pytest.fixture(scope="module")
def places(measured, tmp_path_factory):
    """Place -> what a reader sees there."""
    lab, result = measured
    page = lab.save(tmp_path_factory.mktemp("page") / "page.html").read_text()
    demo = Demo(4, lab.findings, lab.findings, result, None, "demo", (), 1.0)
    said = {
        "explorer": lab.head["sentence"],
        "page": page,
        "terminal": str(result),
        "report": result.to_html(),
        "notebook": result._repr_html_(),
        "demo": str(demo),
    }
    return {place: unescape(re.sub(r"<[^>]+>", "\n", text)) for place, text in said.items()}


def test_the_worst_error_is_told_in_the_same_words_everywhere(measured, places):
    _, result = measured
    sentence = result.numerics.sentence
    assert re.fullmatch(
        r"worst error (under )?[\d.]+ % of its tolerance: \d\.\d\de-\d\d in .+, against float64", sentence
    )
    assert not [place for place, text in places.items() if sentence not in text]


def test_the_times_are_told_in_the_same_numbers_everywhere(measured, places):
    _, result = measured
    assert [t.what for t in result.timings] == ["call", "gradient of the call"]
    for timing in result.timings:
        low, high = timing.interval
        said = [
            timing.what,
            seconds(timing.before.median_s),
            seconds(timing.after.median_s),
            f"[{low:.2f}, {high:.2f}]",
        ]
        assert not [(place, words) for place, text in places.items() for words in said if words not in text]


def test_the_first_line_of_the_errors_is_the_one_that_the_sentence_tells(measured):
    _, result = measured
    (rows,) = [rows for name, _, rows, _ in evidence_tables(evidence_dict(result)) if name == "Errors"]
    share, error = rows[0][3], rows[0][5]
    assert f"worst error {share} of its tolerance: {error} in {rows[0][0]}," in result.numerics.sentence
    assert [r[0] for r in rows] == [leaf.called for leaf in result.numerics.ranked]


def test_no_two_columns_of_a_table_share_a_name(measured, tmp_path):
    lab, result = measured
    for text in (lab.save(tmp_path / "page.html").read_text(), result.to_html(), result._repr_html_()):
        for head in re.findall(r"<thead>.*?</thead>|<tr>(?:<th[^>]*>[^<]*</th>)+</tr>", text, re.S):
            names = re.findall(r"<th[^>]*>([^<]*)</th>", head)
            assert len(names) == len(set(names)), names


def test_a_site_can_be_fused_until_something_is_fused(measured):
    lab, _ = measured
    found, fused = fl.find(layer, X, W, B), fl.fuse(layer)
    assert str(found).startswith("gemm_epilogue: 1 subgraph can be fused, 0 declined, ")
    assert str(fused.findings(X, W, B)).startswith("gemm_epilogue: 1 subgraph fused, 0 declined, ")
    assert repr(found) == "<Findings layer: 3 can be fused, 0 declined>"
    assert "3 can be fused · 0 declined" in found.to_html()
    assert "2 fused · 1 can be fused · 0 declined" in lab.head["sentence"]  # one is left as it is unless asked for
    for name in ("gemm_epilogue", "dot_product_attention"):
        lab.toggles[name] = False
    assert "3 can be fused · 0 declined" in lab.head["sentence"]
    lab.undo()
    assert set(STATE_WORDS.values()) == {"fused", "can be fused", "declined"}


@pytest.mark.dear
def test_a_train_step_is_measured_as_the_step_it_is():
    def step(w, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.square(layer(x, w, B)).mean())(w)
        return loss, w - 0.1 * grad

    result = fl.compare(step, fl.fuse(step), W, X, samples=2, budget_s=0.1, same_code=False)
    assert ([t.what for t in result.timings], result.memory_grad) == (["step"], None)
    assert {leaf.kind for leaf in result.numerics.leaves} == {"output"}
    asked = fl.compare(
        step, fl.fuse(step), W, X, grad=True, samples=2, budget_s=0.1, numerics=False, memory=False, same_code=False
    )
    assert [t.what for t in asked.timings] == ["step", "gradient of the step"]


def test_what_has_no_gradient_is_measured_without_one_unasked():
    def looped(x):
        return jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (jnp.tanh(c[0]), c[1] + 1), (x, 0))[0]

    quick = {"samples": 2, "budget_s": 0.1, "same_code": False, "numerics": False, "memory": False}
    result = fl.compare(looped, fl.fuse(looped), X, **quick)
    assert [t.what for t in result.timings] == ["call"]
    (note,) = [n for n in result.notes if n.startswith("no gradient was measured: ")]
    assert "Reverse-mode differentiation does not work for lax.while_loop" in note
    with pytest.raises(fl.errors.TraceError, match="Reverse-mode"):
        fl.compare(looped, fl.fuse(looped), X, grad=True, **quick)
