"""What is said of a program beside its picture: header, counts, passes and the ledger's rows."""

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
