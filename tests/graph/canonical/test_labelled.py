"""Fused ops and reshapes in the canonical view, and patterns over them: axes by label, heads by their part in a split."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from fusionlab import ops
from fusionlab.graph.canonical.axes import reshape_kind
from fusionlab.graph.canonical.fused_nodes import Labelled, node_labels
from fusionlab.graph.canonical.nodes import FoldedNodes
from fusionlab.graph.canonical.view import CanonicalView
from fusionlab.graph.matching.match import Match, Miss, match
from fusionlab.graph.matching.pattern import Example, pattern_of
from fusionlab.graph.program.trace import trace


def view_of(fn, *shapes):
    graph = trace(fn, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    return CanonicalView(graph.top), [CanonicalView(graph.top).read(a) for a in graph.top.outputs]


def result(fn, *shapes):
    view, refs = view_of(fn, *shapes)
    return view.nodes[refs[0].nid], refs[0]


def one_node(fn, *shapes):
    """Whether a function's two results are one canonical node."""
    _, (a, b) = view_of(fn, *shapes)
    return a.nid == b.nid


def test_a_fused_op_labels_its_axes_and_names_its_operands():
    node, ref = result(lambda x, w, b: ops.gemm_epilogue(x, w, b, activation="relu"), (3, 5, 8), (8, 16), (16,))
    assert node.op == "gemm_epilogue"
    assert isinstance(node.params, Labelled)
    assert node.params.traits == (("activation", "relu"),)
    assert node.params.slots == ("x", "w", "bias")
    assert node.params.names == ("m", "m", "k", "n")
    assert [o.axes for o in node.operands] == [(0, 1, 2), (2, 3), (3,)]
    assert node_labels(node) == (0, 1, 3)
    assert (ref.coef, ref.dims, node.shape) == (1.0, (0, 1, 2), (3, 5, 16))


def test_layout_and_unit_axes_are_no_difference():
    def two(x, w, b):
        return ops.gemm_epilogue(x, w, b), ops.gemm_epilogue(x.T, w.T, b, x_contract=0, w_contract=1)

    assert one_node(two, (4, 8), (8, 16), (16,))

    def with_rows(x, w, b):
        return ops.gemm_epilogue(x, w, b), ops.gemm_epilogue(x[:, None], w, b)

    assert one_node(with_rows, (4, 8), (8, 16), (16,))

    def turned(x, s):
        return ops.layer_norm(x, s), jnp.swapaxes(ops.layer_norm(jnp.swapaxes(x, 0, 1), s, axis=0), 0, 1)

    assert one_node(turned, (4, 8), (8,))


@pytest.mark.parametrize(
    "other",
    [
        lambda x, w, b: ops.gemm_epilogue(x, w, b, activation="silu"),
        lambda x, w, b: ops.gemm_epilogue(x, w),
        lambda x, w, b: ops.gemm_epilogue(x, w, b, w_contract=1),
        lambda x, w, b: ops.gemm_epilogue(2 * x, w, b),
    ],
    ids=["activation", "no bias", "the other axis", "a factor"],
)
def test_what_makes_another_function_makes_another_node(other):
    assert not one_node(lambda x, w, b: (ops.gemm_epilogue(x, w, b), other(x, w, b)), (4, 8), (8, 8), (8,))


def test_numbers_are_operands_so_that_a_pattern_can_capture_them():
    node, _ = result(lambda x: ops.layer_norm(x, epsilon=1e-3), (4, 8))
    assert node.params.slots == ("x", "epsilon")
    assert node.operands[1].coef == 1e-3
    assert not one_node(lambda x: (ops.layer_norm(x, epsilon=1e-3), ops.layer_norm(x, epsilon=1e-5)), (4, 8))


def test_an_operand_that_is_broadcast_has_no_label_there():
    node, ref = result(
        lambda q, k: ops.dot_product_attention(jnp.broadcast_to(q, (2, 5, 3, 4)), k, k), (5, 3, 4), (2, 7, 3, 4)
    )
    assert node.params.names == ("t", "h", "c", "b", "s", "d")
    assert [len(o.axes) for o in node.operands[:3]] == [3, 4, 4]
    assert node.shape == (5, 3, 2, 4)
    assert [node.params.names[node.params.labels[d]] for d in ref.dims] == ["b", "t", "h", "d"]


def test_a_sum_over_an_axis_that_no_operand_has_is_left_opaque():
    node, _ = result(
        lambda x, w: ops.gemm_epilogue(jnp.broadcast_to(x, (4, 8)), jnp.broadcast_to(w, (8, 16))), (4, 1), (16,)
    )
    assert node.op == "gemm_epilogue"
    assert not isinstance(node.params, Labelled)


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ((4, 6, 8), (4, 6, 2, 4), ((1, 2),)),
        ((4, 6, 8), (24, 8), ((2, 1),)),
        ((4, 1, 6, 8), (4, 6, 1, 8), ()),
        ((2, 3), (3, 2), ((2, 2),)),
        ((4, 6), (2, 2, 6), ((1, 2),)),
        ((4, 6, 10), (2, 2, 60), ((1, 2), (2, 1))),
        ((0, 3), (3, 0), ((2, 2),)),
        ((2, 0), (0, 5, 1), ((2, 2),)),
        ((0, 5), (0, 2, 7), ((2, 3),)),
        ((0, 5), (0, 7), ((2, 2),)),
    ],
)
def test_a_reshape_is_known_by_the_axes_it_merges_and_splits(before, after, kind):
    node, _ = result(lambda x: x.reshape(after), before)
    assert (reshape_kind(node) if node.op == "reshape" else ()) == kind


PARTS = Example(
    "parts",
    lambda x, w: jnp.exp((x @ w).reshape(x.shape[0], 2, w.shape[1] // 2)).sum(2),
    {"x": "mk", "w": "kf"},
)


@pytest.mark.parametrize(("order", "fits"), [((3, 4), True), ((4, 3), True), ((12,), False), ((2, 2, 3), False)])
def test_the_lengths_of_the_parts_are_free_and_their_number_is_not(order, fits):
    view, (ref,) = view_of(lambda x, w: jnp.exp((x @ w).reshape(5, *order)).sum(-1), (5, 8), (8, 12))
    assert isinstance(match(pattern_of(PARTS), view, ref.nid), Match) is fits


def test_the_order_of_the_parts_counts():
    view, (ref,) = view_of(lambda x, w: jnp.exp((x @ w).reshape(5, 3, 4)).sum(1), (5, 8), (8, 12))
    found = match(pattern_of(PARTS), view, ref.nid)
    assert isinstance(found, Miss)
    assert found.kind == "axes"


NORMED = Example(
    "norm of a product",
    lambda x, w, e: ops.layer_norm(ops.gemm_epilogue(x, w), epsilon=e),
    {"x": "mk", "w": "kn"},
    ("epsilon",),
    concrete=True,
)
LOOSE = Example(
    "norm of a product, loosely",
    lambda x, w, e: ops.layer_norm(ops.gemm_epilogue(x, w, activation="relu"), epsilon=e),
    {"x": "mk", "w": "kn"},
    ("epsilon",),
    any_of={("activation", "relu"): frozenset({"relu", "tanh"}), ("kind", "layer"): frozenset({"layer", "rms"})},
    loose=True,
    concrete=True,
)


def test_an_example_captures_numbers_and_demands_the_operands_it_has():
    def program(x, w, b, bias=False, **kwargs):
        return ops.layer_norm(ops.gemm_epilogue(x, w, b if bias else None, **kwargs), epsilon=1e-3)

    shapes = (2, 4, 8), (8, 16), (16,)
    view, (ref,) = view_of(program, *shapes)
    found = match(pattern_of(NORMED), view, ref.nid)
    assert isinstance(found, Match)
    assert found.scalars == {"epsilon": 1e-3}
    assert sorted(found.sizes[c] for c in found.letters["m"]) == [2, 4]
    for changed in ({"bias": True}, {"activation": "tanh"}):
        view, (ref,) = view_of(lambda *a, c=changed: program(*a, **c), *shapes)
        assert isinstance(match(pattern_of(NORMED), view, ref.nid), Miss)


@pytest.mark.parametrize(
    ("activation", "kind", "fits"),
    [("tanh", "rms", True), ("relu", "layer", True), ("silu", "layer", False), ("none", "rms", False)],
)
def test_a_loose_example_takes_what_it_is_told_to_take(activation, kind, fits):
    view, (ref,) = view_of(
        lambda x, w, b, s: ops.layer_norm(ops.gemm_epilogue(x, w, b, activation=activation), s, kind=kind),
        *((4, 8), (8, 16), (16,), (16,)),
    )
    assert isinstance(match(pattern_of(LOOSE), view, ref.nid), Match) is fits


def test_a_program_in_the_place_of_nodes_leaves_its_own_ids_behind():
    """The view of a program that is folded is that of the program written with the op, whatever ids either has."""

    def gated(x, w):
        return jax.nn.relu(x @ w) * 2

    graph = trace(gated, jnp.ones((4, 8)), jnp.ones((8, 8)))
    block = graph.top
    last = block.nodes[-1]
    program = trace(lambda h: jax.nn.relu(h) * 2, jnp.ones((4, 8))).top
    inside = [n for n in block.nodes if n.primitive != "dot_general"]
    (product,) = [n for n in block.nodes if n.primitive == "dot_general"]
    tile = FoldedNodes(last.outputs[0], product.outputs, frozenset(n.id for n in inside), program)
    view, plain = CanonicalView(block, tiles=[tile]), CanonicalView(block)
    assert view.nodes[view.ref[product.outputs[0].id].nid].op == "dot"
    assert view.ref[last.outputs[0].id] == plain.ref[last.outputs[0].id]
    assert set(view.ref) == {v.id for v in (*block.inputs, *product.outputs, *last.outputs)}
