"""Ways through an explorer: lines of the outline, equal parts, hits of a search."""

import json

import jax
import jax.numpy as jnp
import pytest

from fusionlab.errors import ArgumentError
from fusionlab.graph.program.trace import trace
from fusionlab.viz.explorer.messages import act
from fusionlab.viz.explorer.walk import PAGE
from fusionlab.viz.explorer.widget import Explorer

from ..conftest import candidate, findings_of, linear_nodes

LAYERS = 24


@pytest.fixture(scope="module")
def equal():
    """Equal layers of two products, of which the first and what follows it is a site; then a head."""

    def layers(params, x):
        for i, (w, v, b) in enumerate(params):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(x @ w + b) @ v
        with jax.named_scope("head"):
            return x @ params[0][1].T

    params = [(jnp.ones((8, 16)), jnp.ones((16, 8)), jnp.ones(16))] * LAYERS
    graph = trace(layers, params, jnp.ones((4, 8)))
    sites = [candidate(graph, f"gemm_epilogue@layer_{i}#1", s) for i, s in enumerate(linear_nodes(graph)[:-1:2])]
    return graph, findings_of(graph, sites)


@pytest.fixture
def lab(equal):
    graph, findings = equal
    return Explorer(graph, findings)


def names(lab):
    return [step["name"] for step in lab.trail]


def stack_line(lab):
    return next(line for line in lab.outline["line"]["lines"] if line.get("count") == LAYERS)


def test_a_line_of_the_outline_selects_its_card_and_opens_what_is_around_it(lab):
    line = stack_line(lab)
    inner = line["lines"][0]
    act(lab, {"type": "select", "id": inner["id"], "reveal": True})
    assert lab.marks["selected"] == [inner["id"]]
    assert names(lab)[-1] == inner["name"]
    assert lab.trail[-2]["of"] == LAYERS
    act(lab, {"type": "select", "id": "", "reveal": True})
    assert (lab.selected, lab.marks["selected"], names(lab)) == ("", [], [lab.graph.name])
    assert lab.inspector["title"] == "Where the bytes go"


def test_a_lane_is_selected_by_its_name(lab):
    lab.select("forward")
    assert lab.inspector["title"] == "forward"
    assert set(lab.marks["selected"]) >= {stack_line(lab)["id"]}
    with pytest.raises(ArgumentError):
        lab.select("sideways")


def test_a_step_shows_the_next_of_equal_parts_with_the_same_place_selected_in_it(lab):
    inner = stack_line(lab)["lines"][0]
    act(lab, {"type": "select", "id": inner["id"], "reveal": True})
    site = lab.selected
    assert lab.step() == lab.trail[-2]["name"] == "layer_1, 2 of 24"
    assert lab.selected != site
    assert names(lab)[-1] == inner["name"]
    assert lab.step(by=-3) == "layer_22, 23 of 24"
    act(lab, {"type": "step", "id": stack_line(lab)["id"], "by": 2})
    assert lab.selected == site
    assert lab.step("layer_0 … 23") == "layer_1, 2 of 24"
    with pytest.raises(ArgumentError, match="needed the name of a card"):
        lab.step("nothing")
    lab.select("")
    with pytest.raises(ArgumentError, match="nothing is selected"):
        lab.step()


def test_every_hit_is_reached_by_its_number(lab):
    rows = lab.search("layer")
    total = lab.hits["total"]
    assert len(rows) == PAGE < total == lab.hits["reach"]
    lab.hit(total - 1)
    last = lab.selected
    act(lab, {"type": "more"})
    assert len(lab.hits["rows"]) == min(2 * PAGE, total)
    act(lab, {"type": "hit", "index": 0})
    assert lab.selected != last
    with pytest.raises(ArgumentError, match="from 0"):
        lab.hit(total)


def test_the_outline_is_sent_only_when_it_changed_and_is_small(lab):
    sent = []
    lab.observe(sent.append, "outline")
    lab.select("forward")
    lab.search("tanh")
    assert sent == []
    lab.toggles["gemm_epilogue"] = False
    assert len(sent) == 1
    act(lab, {"type": "outline", "id": stack_line(lab)["id"]})
    assert len(sent) == 1  # it was told already
    assert len(json.dumps(lab.outline)) < 60_000
