"""Routes of products as pictures."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab.errors import ArgumentError
from fusionlab.viz.route_plots import FILLS, plot_route_record, plot_routes


def program(x, w, v):
    return jax.nn.relu(x @ w) @ v, jnp.sin(x) @ w


SHAPES = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((64, 32), (32, 16), (16, 8))]
ON = fl.Strategy(matmul_schedule={"library": True})


def table(device, passes=ON):
    return fl.find(program, *SHAPES, device=device, passes=passes).routes()


def texts(ax):
    return [t.get_text() for t in ax.texts]


def fills(ax):
    from matplotlib.colors import to_hex

    return [to_hex(c.get_facecolor()[0]) for c in ax.collections]


def test_one_table_has_a_column_for_each_route_and_says_which_takes_a_product():
    ax = plot_routes(table("sm_90"))
    assert [t.get_text() for t in ax.get_xticklabels()] == ["library", "kernel", "xla"]
    assert texts(ax) == ["takes it: evaluate", "not asked", "not asked"] * 3
    assert fills(ax) == [FILLS["evaluate"], FILLS[""], FILLS[""]] * 3
    assert "sin before it" not in "".join(t.get_text() for t in ax.get_yticklabels())
    refused = texts(plot_routes(table("sm_90", fl.Strategy(matmul_schedule={"library": False}))))
    assert refused[:1] == ["switch"]
    assert "takes it: xla" in refused


def test_a_product_that_a_larger_fusion_claims_is_told_across_the_row():
    found = table("sm_90", fl.Strategy(gemm_epilogue=True, matmul_schedule=True))
    claimed = [i for i, row in enumerate(found) if not row.answers]
    assert claimed == [0]
    told = texts(plot_routes(found))
    assert told[:3] == ["", "claimed by gemm_epilogue, xla", ""]
    assert not any(t.startswith("claimed") for t in told[3:])


def test_several_tables_have_a_column_for_each_device():
    ax = plot_routes(*(table(d) for d in ("cpu", "sm_75", "sm_90")))
    assert [t.get_text() for t in ax.get_xticklabels()] == ["CPU", "sm_75", "sm_90"]
    assert texts(ax)[:3] == ["xla", "evaluate", "evaluate"]


def test_tables_that_cannot_be_drawn_are_refused():
    with pytest.raises(ArgumentError, match="no product to draw"):
        plot_routes()
    with pytest.raises(ArgumentError, match="no product to draw"):
        plot_routes(fl.find(jnp.sin, SHAPES[0]).routes())
    other = fl.find(lambda x, w: x @ w, *SHAPES[:2], device="sm_90").routes()
    with pytest.raises(ArgumentError, match="not of the same products"):
        plot_routes(table("sm_90"), other)


def test_a_record_is_drawn_case_by_case_in_the_colour_of_its_route():
    def case(ratio, tag):
        return {
            "fusionlab": {"ratio": ratio, "interval": [ratio - 0.01, ratio + 0.01]},
            "products": {"fusionlab": [[tag]]},
        }

    record = {"cases": {"a": case(1.0, "xla"), "b": case(1.5, "evaluate")}, "environment": {"hardware": "a GPU"}}
    ax = plot_route_record(record)
    assert [t.get_text() for t in ax.get_yticklabels()] == ["a", "b"]
    assert ax.get_title(loc="left") == "a GPU"
    points = [line for line in ax.lines if line.get_marker() == "D" and len(line.get_xdata())]
    assert [float(line.get_xdata()[0]) for line in points] == [1.0, 1.5]
    assert points[0].get_color() != points[1].get_color()
    record["cases"]["slow"] = case(0.5, "kernel")
    left, right = plot_route_record(record).get_xlim()
    assert left < 0.49  # what lost is drawn too
    assert right > 1.51
    record["cases"].pop("slow")
    assert [t.get_text() for t in plot_route_record(record, only=["b"]).get_yticklabels()] == ["b"]
