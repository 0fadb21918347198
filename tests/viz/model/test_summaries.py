"""What is said of a program beside its picture: header, counts, passes and the ledger's rows."""

import jax
import jax.numpy as jnp

import fusionlab as fl
from fusionlab.viz.html.inspector import inspect
from fusionlab.viz.html.report import report_html
from fusionlab.viz.model.panel import panel
from fusionlab.viz.model.summaries import summary
from fusionlab.viz.palette import colour_of, pass_of_op


def test_the_header_counts_fused_possible_and_declined_and_claims_no_speed(case):
    one = case.findings.candidates[0].id
    view = summary(case.graph, case.findings, enabled={one})
    assert view["header"] == "mlp · 12 nodes · cpu · 1 fused · 1 can be fused · 1 declined · not measured"
    for enabled, words in (((), "2 can be fused"), (None, "2 fused")):
        said = summary(case.graph, case.findings, enabled=enabled)["header"]
        assert f" · {words} · 1 declined · " in said
    assert view["counts"] == {"nodes": 12, "applied": 1, "candidate": 1, "declined": 1}


def test_passes_that_found_nothing_are_listed_too(case):
    rows = {p["name"]: p for p in summary(case.graph, case.findings)["passes"]}
    assert rows["gemm_epilogue"]["sites"] == 2
    assert rows["gemm_epilogue"]["declined"] == 1
    assert rows["lerp"] | {"sites": 0, "state": "none"} == rows["lerp"]


def test_a_pass_is_on_off_or_partly_on(case):
    ids = [c.id for c in case.findings.candidates]
    for enabled, state in (((), "off"), (ids[:1], "partial"), (ids, "on"), (None, "on")):
        assert summary(case.graph, case.findings, enabled=enabled)["passes"][0]["state"] == state


def test_a_declined_site_in_the_ledger_has_distance_reason_and_edit(case):
    row = summary(case.graph, case.findings)["sites"][-1]
    assert (row["code"], row["matched"], row["total"]) == ("escapes", 17, 19)
    assert row["edit"] == "return it only when asked"


def test_a_fused_op_wears_the_colour_of_its_pass():
    assert pass_of_op("gemm_epilogue") == "gemm_epilogue"
    assert pass_of_op("gemm_epilogue_cotangent") == "gemm_epilogue_grad"
    assert pass_of_op("dot_general") is None
    assert colour_of("gemm_epilogue") != colour_of("dot_product_attention")


def test_lints_are_a_group_of_their_own():
    def step(w, x):
        return jax.grad(lambda w: jnp.sum(jax.lax.scan(lambda x, w: (jnp.sin(jnp.tanh(x @ w)), None), x, w)[0]))(w)

    found = fl.find(
        step, jax.ShapeDtypeStruct((4, 16, 16), "float32"), jax.ShapeDtypeStruct((8, 16), "float32"), passes="lerp"
    )
    whole = summary(found.graph, found, structures=False)
    assert (whole["counts"]["declined"], whole["sites"]) == (0, [])
    (row,) = panel(whole, None, {})["lints"]
    assert row["id"] == found.lints[0].id
    assert row["edit"] == found.lints[0].edit
    assert row["where"].startswith("test_summaries.py:")
    shown = inspect(found.graph, found, row["pick"]).html
    assert "stacked_scan" in shown
    assert "unroll=4" in shown
    assert "fusionlab.advise(fn, *args)" in report_html(found.graph, found)
