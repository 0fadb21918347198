"""Parts have names one can say; equal ones are one; every node has a place, and every byte an edge."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import subprocess
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from fusionlab.graph.program.trace import trace
from fusionlab.viz.cards.album import Album
from fusionlab.viz.cards.card import Card
from fusionlab.viz.parts.drawing import told_from_each_other
from fusionlab.viz.parts.names import run_name

from .small import WIDTH, attention, attention_shapes, cards, dense, dense_shapes, drawn, shape, stepped

FORBIDDEN = re.compile(r"__call__|<lambda>|<locals>|\d+ nodes|^apply$|^n\d+$|part~|cluster")


def twelve(params, x):
    x = x @ params["first"]
    for p in params["layers"]:
        x = x + dense(p, x)
    return x @ params["head"]


def scoped(params, x):
    x = x @ params["first"]
    for i, p in enumerate(params["layers"]):
        with jax.named_scope(f"layer_{i}"):
            with jax.named_scope("attn"):
                x = x + attention(p, x)
            with jax.named_scope("mlp"):
                x = x + dense(p, x)
    return x


class Linear:
    def __call__(self, p, x):
        with jax.named_scope("lib.Linear"):
            return x @ p["weight"]


def classes(params, x):
    x = x @ params["first"]
    for p in params["blocks"]:
        x = Linear()(p["two"], jnp.tanh(Linear()(p["one"], x)))
    return x


@functools.cache
def program(name):
    square = {"weight": shape(WIDTH, WIDTH)}
    x = shape(4, 64, WIDTH)
    given = {
        "twelve": (twelve, {"layers": [dense_shapes()] * 12, "head": shape(WIDTH, 32), "first": shape(WIDTH, WIDTH)}),
        "scoped": (scoped, {"first": shape(WIDTH, WIDTH), "layers": [attention_shapes() | dense_shapes()] * 3}),
        "classes": (classes, {"first": shape(WIDTH, WIDTH), "blocks": [{"one": square, "two": square}] * 4}),
    }
    model, params = given[name]
    return drawn(stepped(model), params, x)


NAMES = ("twelve", "scoped", "classes")


@pytest.mark.parametrize(
    ("name", "count", "said"), [("twelve", 12, "layers"), ("scoped", 3, "layer_"), ("classes", 4, "blocks")]
)
def test_equal_layers_are_one_card_in_each_lane(name, count, said):
    _, overview, _ = program(name)
    for phase in overview.phases:
        (stack,) = [c for c in cards(overview, phase) if c.count == count]
        assert stack.name.startswith(said)
    assert len(overview.rows) <= 5


@pytest.mark.parametrize("name", NAMES)
def test_names_can_be_said(name):
    _, overview, _ = program(name)
    for card in overview.cards():
        assert card.name
        assert not FORBIDDEN.search(card.name)


@pytest.mark.parametrize("name", NAMES)
def test_no_child_is_called_as_its_parent(name):
    _, overview, _ = program(name)
    assert not [c.name for c in overview.cards() if c.kind == "part" and any(k.name == c.name for k in c.children)]


@pytest.mark.parametrize("name", NAMES)
def test_every_node_has_a_place_and_all_cost_is_in_a_card(name):
    maker, overview, chains = program(name)
    assert all(chains[n.id] for n in maker.graph.nodes())
    bytes_moved = sum(c.bytes_moved for c in maker.costs.nodes.values())
    assert sum(c.cost.bytes for row in overview.rows for c in row.cards.values()) == bytes_moved
    for card in overview.cards():
        inside = sum(c.cost.bytes for c in card.children)
        assert not card.children or card.kind == "region" or inside * card.count == card.cost.bytes


@pytest.mark.parametrize("name", NAMES)
def test_strips_add_up_to_counts(name):
    maker, overview, _ = program(name)
    found = Counter()
    for strip in (s for row in overview.rows for c in row.cards.values() for s in c.strips):
        if not strip.backward and strip.state != "declined":
            found[strip.pass_name] += strip.count
    counts = maker.findings.counts()
    assert found == {k: v for k, v in counts.items() if isinstance(v, int) and v and not k.endswith("_grad")}


def test_the_backward_pass_of_a_declined_site_is_declined_too():
    _, overview, _ = program("scoped")
    (stack,) = [c for c in cards(overview, "backward") if c.count == 3]
    (strip,) = [s for s in stack.strips if s.pass_name == "dot_product_attention"]
    assert (strip.state, strip.count, strip.backward) == ("declined", 3, True)
    claimed = Counter(i for c in stack.walk() if c.site is not None for i in c.nodes)
    assert max(claimed.values()) == 1


def test_gradients_and_residuals_are_called_by_what_they_are_of():
    _, overview, _ = program("scoped")
    (forward,) = [c for c in cards(overview, "forward") if c.count == 3]
    (backward,) = [c for c in cards(overview, "backward") if c.count == 3]
    said = [c.name for c in forward.walk()]
    assert "x + attention" in said
    assert "x @ q" in said or "x @ q … v" in said
    said = [c.name for c in backward.walk()]
    assert any(name.startswith("gradient of") for name in said)
    assert "gradient of q" in said
    assert not any("a weight" in name for name in said)


def test_what_the_backward_pass_reads_is_kept_by_its_row():
    _, overview, _ = program("twelve")
    (forward,) = [c for c in cards(overview, "forward") if c.count == 12]
    (backward,) = [c for c in cards(overview, "backward") if c.count == 12]
    (kept,) = [e for e in overview.edges if e.kind == "kept" and e.end == backward.id]
    assert kept.start == forward.id
    hidden = 4 * 64 * 2 * WIDTH * 4
    assert kept.bytes >= 12 * hidden
    assert overview.kept == sum(e.bytes for e in overview.edges if e.kind == "kept")
    gradients = [e for e in overview.edges if e.kind == "gradients" and e.start == backward.id]
    assert sum(e.bytes for e in gradients) == 12 * sum(v.size * 4 for v in dense_shapes().values())


def test_the_cells_of_a_stack_cost_what_all_copies_cost():
    _, overview, _ = program("scoped")
    (stack,) = [c for c in cards(overview, "forward") if c.count == 3]
    whole = [c.times(stack.count) for c in stack.children]
    assert sum(c.cost.bytes for c in whole) == stack.cost.bytes
    assert sum(s.count for c in whole for s in c.strips) == sum(s.count for s in stack.strips)


def digest():
    """Of ids and names of one program, all its cards."""
    layers = [{name: shape(8, 8) for name in ("up", "down")} | {"bias": shape(8)}] * 2
    params = {"first": shape(8, 8), "layers": layers, "head": shape(8, 8)}
    _, overview, _ = drawn(stepped(twelve), params, shape(4, 8), find=False)
    return hashlib.sha256(repr([(c.id, c.name, c.count) for c in overview.cards()]).encode()).hexdigest()


def test_two_processes_give_the_same_cards():
    code = "from tests.viz.parts.test_parts import digest; print(digest())"
    environment = os.environ | {"PYTHONHASHSEED": "7", "JAX_PLATFORMS": "cpu"}
    other = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert other.stdout.split()[-1] == digest()


def test_a_program_without_a_name_is_called_by_its_line():
    _, overview, _ = drawn(lambda x: x @ x, shape(8, 8), find=False)
    assert re.fullmatch(r"lambda · .*test_parts\.py:\d+", overview.title)


def test_operations_beside_each_other_are_told_apart():
    def card(k, where, kind="nodes"):
        return Card(f"c{k}", "gradient of w", kind=kind, where=where)

    lines = told_from_each_other([card(0, "model.py:3"), card(1, "model.py:5"), card(2, "", "part")])
    assert [c.name for c in lines] == ["gradient of w :3", "gradient of w :5", "gradient of w"]
    assert [c.name for c in told_from_each_other([card(0, ""), card(1, "")])] == [
        "gradient of w (1)",
        "gradient of w (2)",
    ]


@pytest.mark.parametrize("size", [(float("inf"), float("nan")), (float("nan"), float("-inf"))])
def test_a_pane_without_a_size_is_the_usual_one(size):
    album = Album(trace(lambda x: x @ x, shape(8, 8)))
    usual = album.svg(())
    album.pane = size
    assert album.svg(()) == usual


def angles():
    return jnp.cos(jnp.arange(8.0))


def test_a_loop_costs_what_it_alone_reads_too():
    def model(params, x):
        x = x @ params["first"]
        most = angles().sum()
        return jax.lax.scan(lambda x, p: (dense(p, x) * most, None), x, params["layers"])[0]

    params = {"first": shape(WIDTH, WIDTH), "layers": dense_shapes(5)}
    maker, overview, chains = drawn(stepped(model), params, shape(64, WIDTH), find=False)
    outermost = [c for row in overview.rows for c in row.cards.values()]
    (loop,) = [c for c in cards(overview, "forward") if c.kind == "region"]
    (cosine,) = [n.id for n in maker.graph.nodes() if n.primitive == "cos"]
    assert chains[cosine] == (loop.id,)
    assert cosine in loop.nodes
    assert sum(c.cost.bytes for c in outermost) == sum(c.bytes_moved for c in maker.costs.nodes.values())


@pytest.mark.parametrize(
    ("first", "last", "name"),
    [
        ("layer_0", "layer_23", "layer_0 … 23"),
        ("blocks[0]", "blocks[11]", "blocks[0 … 11]"),
        ("blocks[3].q", "blocks[5].q", "blocks[3 … 5].q"),
        ("turn 0", "turn 3", "turns 0 … 3"),
        ("relu", "relu", "relu"),
        ("blocks[3].q", "blocks[5].k", "blocks[3].q … 5].k"),
    ],
)
def test_equal_parts_in_a_row_are_named_by_their_ends(first, last, name):
    assert run_name(first, last) == name
