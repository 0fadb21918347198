"""The verbs: what they refuse, what they hand on, and how their results show themselves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.errors import ArgumentError, TraceError
from fusionlab.evidence import Verdict

X, W, B = (
    jnp.asarray(np.random.default_rng(i).standard_normal(s), jnp.float32) for i, s in enumerate(((6, 8), (8, 8), 8))
)
QUICK = {"samples": 2, "budget_s": 5.0, "numerics": False, "memory": False}


def layer(x):
    return jax.nn.relu(x @ W + B)


def stacked(x, times=1):
    for _ in range(times):
        x = layer(x)
    return x


def sampled(x, samples=1):
    return samples * layer(x)


# -- same code ---------------------------------------------------------------------------------------------------------


def test_the_same_code_is_what_compiles_to_the_same_instructions():
    result = fl.compare(layer, fl.fuse(layer), X, **QUICK)
    assert result.verdict is Verdict.SAME_CODE
    assert result.timings == ()
    assert "both compile to the same instructions (call, gradient of the call)" in result.notes


def attention(x):
    q = x.reshape(6, 2, 4)
    p = jax.nn.softmax(jnp.einsum("thd,shd->hts", q, q))
    return jnp.einsum("hts,shd->thd", p, q)


def test_sites_that_say_same_code_but_compile_otherwise_are_timed():
    fused = fl.fuse(attention)
    assert all(c.same_code for c in fused.findings(X).candidates)
    result = fl.compare(attention, fused, X, **QUICK)
    assert [t.what for t in result.timings] == ["call", "gradient of the call"]
    assert not result.same_code
    assert any(
        n.startswith("every fused site runs XLA's own code, but XLA compiled part of the fused version differently")
        for n in result.notes
    )


def test_what_is_skipped_has_no_say():
    fused = fl.fuse(attention, skip="dot_product_attention", implementation="xla_blockwise")
    assert fl.compare(attention, fused, X, grad=False, **QUICK).verdict is Verdict.SAME_CODE


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_static_arguments_are_those_the_fused_function_was_made_with():
    result = fl.compare(stacked, fl.fuse(stacked, static_argnums=1), X, 2, grad=False, **QUICK)
    assert result.verdict is Verdict.SAME_CODE
    result = fl.compare(stacked, fl.fuse(stacked, static_argnames="times"), X, times=2, grad=False, **QUICK)
    assert result.verdict is Verdict.SAME_CODE


def test_a_forgotten_static_argument_is_one_clear_error():
    def repeated(x, times):
        return jax.nn.relu(x @ W + B) * sum(range(times))

    for fused in (fl.fuse(repeated), repeated):
        with pytest.raises(TraceError, match=r"static_argnums or static_argnames"):
            fl.compare(repeated, fused, X, 3, **QUICK)


def test_a_keyword_that_may_be_the_functions_own_is_refused_not_swallowed():
    with pytest.raises(ArgumentError, match=r"samples: .* option of compare as well as a parameter of sampled"):
        fl.compare(sampled, fl.fuse(sampled), X, samples=3)
    with pytest.raises(ArgumentError, match=r"device: .* option of find as well as a parameter of <lambda>"):
        fl.find(lambda x, device: x + device, X, device=3)
    assert fl.find(sampled, X, samples=3).counts()["gemm_epilogue"] == 1


def test_a_named_implementation_that_runs_nowhere_is_noted_beside_the_measurement():
    fused = fl.fuse(layer, implementation="xla_blockwise")
    result = fl.compare(layer, fused, X, grad=False, **QUICK)
    assert "implementation='xla_blockwise' runs nowhere: no site was found that has it" in result.notes


# -- how results show themselves ---------------------------------------------------------------------------------------


def test_a_comparison_shows_a_line_or_a_few_tables():
    result = fl.compare(layer, lambda x: layer(x) * 1.0, X, samples=2, budget_s=5.0)
    few = "inconclusive: fewer than 40 samples"
    assert repr(result) == f"<Comparison layer: call: {few}; gradient of the call: {few}>"
    html = result._repr_html_()
    for wanted in (f"layer: call: {few}", "Timing", "Errors", "Compiled memory", result.environment.hardware):
        assert wanted in html
    assert html.count(result.environment.hardware) == 1
    assert "script" not in html


def test_a_plot_of_nothing_says_why_nothing_was_timed():
    result = fl.compare(layer, fl.fuse(layer), X, **QUICK)
    with pytest.raises(ArgumentError, match=r"nothing was timed \(same code: both compile to the same instructions"):
        result.plot()


def test_a_search_and_a_comparison_of_a_fused_function_say_where_its_sites_and_its_original_are():
    fused = fl.fuse(layer)
    note = "layer is fused already: layer.findings(...) lists its sites, and layer.original is the function before"
    assert fl.find(fused, X).notes == (note,)
    assert f"note: {note}" in str(fl.find(fused, X))
    assert not fl.find(fused.original, X).notes
    assert fl.compare(fused, fused, X, **QUICK).notes[-1] == note
    assert note not in fl.compare(layer, fused, X, **QUICK).notes


def test_findings_show_why_sites_were_declined():
    found = fl.find(lambda x: jax.nn.leaky_relu(x @ W + B), X)
    html = found._repr_html_()
    assert "1 can be fused · 1 declined" in html
    assert "not a known activation" in html
    assert f"Edit: {found.rejections[0].edit}" in html
    assert "Declined" not in fl.find(layer, X)._repr_html_()
