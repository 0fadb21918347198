"""What a program costs: trips, formulas, sums, traffic, and XLA's own count where it has one."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fusionlab as fl
from fusionlab.errors import ArgumentError
from fusionlab.graph.cost.cost import Cost, cost_of, total_of
from fusionlab.graph.cost.kernel_model import kernels_of
from fusionlab.graph.program.trace import trace
from fusionlab.models import transformer

from ..every_primitive import Program, programs
from ..test_every_primitive import gradient

X = jnp.ones((8, 8), jnp.float32)
W = jnp.ones((8, 8), jnp.float32)


def body(c, w):
    return jnp.tanh(c @ w) + 1.0


def scanned(length):
    return lambda c, w: jax.lax.scan(lambda c, _: (body(c, w), None), c, None, length=length)[0]


def numbers(cost):
    return cost.flops, cost.transcendentals, cost.bytes_read, cost.bytes_written


def xla(fn, *args):
    counted = jax.jit(fn).lower(*args).cost_analysis()
    return counted.get("flops", 0), counted.get("transcendentals", 0)


def test_a_scan_of_300_costs_300_times_its_body():
    alone = cost_of(trace(body, X, W)).total
    graph = trace(scanned(300), X, W)
    costs = cost_of(graph)
    assert numbers(costs.total) == tuple(300 * n for n in numbers(alone))
    assert alone.flops == 2 * 8**3 + 64
    assert alone.transcendentals == 64
    (scan,) = graph.top.nodes
    assert numbers(costs.nodes[scan.id]) == (0, 0, 0, 0)
    assert costs.of(scan).flops == 300 * alone.flops
    dot = next(n for n in graph.nodes() if n.primitive == "dot_general")
    assert costs.nodes[dot.id].trips == 300
    assert costs.nodes[dot.id].flops == 300 * costs.each[dot.id].flops == 300 * 2 * 8**3
    # XLA's own analysis counts the body once (and what counts the trips).
    assert xla(scanned(300), X, W)[0] < 2 * alone.flops


def test_nested_scans_multiply():
    def outer(c, w):
        return jax.lax.scan(lambda c, _: (scanned(7)(c, w), None), c, None, length=5)[0]

    inner = cost_of(trace(body, X, W)).total
    assert numbers(cost_of(trace(outer, X, W)).total) == tuple(35 * n for n in numbers(inner))


def test_the_gradient_of_a_scan_has_two_more_products_a_trip():
    grad = jax.grad(lambda c, w: scanned(300)(c, w).sum(), argnums=(0, 1))
    graph = trace(grad, X, W)
    costs = cost_of(graph)
    dots = [costs.nodes[n.id] for n in graph.nodes() if n.primitive == "dot_general"]
    assert [d.trips for d in dots] == [300] * 3
    assert sum(d.flops for d in dots) == 3 * 300 * 2 * 8**3


def test_a_while_loop_counts_once_and_says_so_or_as_often_as_told():
    def loop(x, w):
        return jax.lax.while_loop(lambda c: c.sum() < 1e6, lambda c: body(c, w), x)

    graph = trace(loop, X, W)
    (node,) = graph.top.nodes
    dot = next(n for n in graph.nodes() if n.primitive == "dot_general")
    once = cost_of(graph)
    assert once.nodes[dot.id].trips is None
    assert once.nodes[dot.id].flops == 2 * 8**3
    assert "trips" in once.notes[node.id]
    told = cost_of(graph, trips={node.id: 10})
    assert told.nodes[dot.id].trips == 10
    assert told.nodes[dot.id].flops == 10 * 2 * 8**3
    test = next(n for n in graph.nodes() if n.primitive == "reduce_sum")
    assert told.nodes[test.id].trips == 11
    with pytest.raises(ArgumentError, match="needed trips of a while loop"):
        cost_of(graph, trips={dot.id: 3})


def test_the_dearest_branch_of_a_cond_counts():
    def f(x, w):
        return jax.lax.cond(x.sum() > 0, lambda x: x + 1.0, lambda x: x @ w @ w, x)

    graph = trace(f, X, W)
    costs = cost_of(graph)
    cond = next(n for n in graph.nodes() if n.primitive == "cond")
    assert costs.of(cond).flops == 2 * 2 * 8**3
    counted = {n.primitive: costs.nodes[n.id].trips for b in cond.blocks for n in b.nodes}
    assert counted == {"dot_general": 1, "add": 0}
    assert "most expensive of 2" in costs.notes[cond.id]


def test_remat_and_custom_rules_cost_what_is_inside():
    plain = cost_of(trace(lambda x, w: jax.nn.relu(x @ w), X, W)).total
    remat = cost_of(trace(jax.checkpoint(lambda x, w: jax.nn.relu(x @ w)), X, W)).total
    assert numbers(plain) == numbers(remat)
    assert plain.flops == 2 * 8**3 + 64


def test_a_shard_map_is_counted_for_one_device_and_says_so():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")
    graph = trace(jax.shard_map(lambda x: jnp.tanh(x @ x), mesh=mesh, in_specs=spec, out_specs=spec), X)
    costs = cost_of(graph)
    assert costs.total.flops == 2 * 8**3
    assert any("one device" in note for note in costs.notes.values())


dims = st.integers(1, 9)


@given(b=dims, m=dims, k=dims, n=dims)
@settings(max_examples=25, deadline=None)
def test_a_product_costs_what_xla_says(b, m, k, n):
    lhs, rhs = np.zeros((b, m, k), np.float32), np.zeros((b, k, n), np.float32)
    total = cost_of(trace(jnp.matmul, lhs, rhs)).total
    assert (total.flops, total.transcendentals) == (2 * b * m * n * k, 0)
    assert total.bytes_read == 4 * (b * m * k + b * k * n)
    assert total.bytes_written == 4 * b * m * n
    if min(b, m, k, n) > 1:  # of a product with an axis of size 1 XLA makes something else
        assert xla(jnp.matmul, lhs, rhs)[0] == total.flops


def test_each_row_of_a_ragged_product_meets_the_matrix_of_its_own_group():
    rows, k, n = 12, 5, 7
    args = np.zeros((rows, k), np.float32), np.zeros((3, k, n), np.float32), np.array([4, 6, 2], np.int32)
    assert cost_of(trace(jax.lax.ragged_dot, *args)).total.flops == 2 * rows * k * n


def softmax_layer(x, w):
    with jax.named_scope("layer"):
        h = jax.nn.gelu(x @ w)
    with jax.named_scope("out"):
        return jax.nn.softmax(h, axis=-1) * jnp.sqrt(jnp.abs(x)) + x.max()


def conv(x, w):
    return jax.lax.conv_general_dilated(x, w, (2, 1), ((1, 0), (2, 1)), rhs_dilation=(1, 2), feature_group_count=2)


@pytest.mark.parametrize(
    ("fn", "args", "rel"),
    [
        (softmax_layer, (X, W), 2e-3),
        (jax.grad(lambda x, w: softmax_layer(x, w).sum()), (X, W), 0.03),  # JAX merges what it computes twice
        (conv, (np.zeros((3, 4, 9, 8), np.float32), np.zeros((6, 2, 3, 3), np.float32)), 2e-3),
        (lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (2, 2), (1, 1), "VALID"), (X,), 2e-3),
    ],
)
def test_straight_programs_cost_what_xla_says(fn, args, rel):
    total = cost_of(trace(fn, *args)).total
    # Up to the scalars that XLA folds.
    assert xla(fn, *args) == pytest.approx((total.flops, total.transcendentals), rel=rel, abs=4)


@pytest.mark.parametrize("grad", [False, True])
def test_a_transformer_block_costs_what_xla_says(grad):
    params, x = (
        transformer.init_block(jax.random.key(0), embed=64),
        transformer.inputs(jax.random.key(1), seq=32, embed=64),
    )
    fn = jax.grad(lambda p, x: transformer.block(p, x).sum()) if grad else transformer.block
    total = cost_of(trace(fn, params, x)).total
    flops, transcendentals = xla(fn, params, x)
    assert total.flops == pytest.approx(flops, rel=2e-3)
    assert total.transcendentals == pytest.approx(transcendentals, rel=2e-3)


PROGRAMS = tuple(programs())


@pytest.mark.parametrize("program", PROGRAMS, ids=repr)
def test_every_primitive_costs_something_that_adds_up(program: Program):
    for fn in (program.fn, gradient(program)) if program.differentiable else (program.fn,):
        graph = trace(fn, *program.args)
        costs = cost_of(graph)
        for sums in (costs.by_scope(), costs.by_scope(1), costs.by_region()):
            assert numbers(total_of(sums.values())) == numbers(costs.total)
        kernels = total_of(k.cost for k in kernels_of(costs))
        assert (kernels.flops, kernels.transcendentals) == (costs.total.flops, costs.total.transcendentals)
        assert kernels.bytes_moved <= costs.total.bytes_moved or not graph.top.nodes
        json.dumps(costs.to_dict())
        assert str(costs)
        unknown = {graph.node_by_id[i].primitive for i in costs.unknown}
        assert unknown <= {"pure_callback", "debug_print", "debug_callback"}, unknown
        assert costs.total.known == (not unknown)


def test_an_unknown_primitive_has_bytes_and_says_that_its_operations_are_not_known():
    call = functools.partial(jax.pure_callback, np.tanh, jax.ShapeDtypeStruct(X.shape, X.dtype))
    graph = trace(lambda x: call(x) + 1.0, X)
    costs = cost_of(graph)
    node = next(n for n in graph.nodes() if n.primitive == "pure_callback")
    assert costs.nodes[node.id].flops is None
    assert costs.nodes[node.id].bytes_moved == 2 * X.nbytes
    assert costs.total.flops == 64
    assert not costs.total.known
    assert str(costs.total).startswith("at least 64 flop")


def test_a_view_moves_nothing_and_a_slice_reads_what_it_gives():
    assert cost_of(trace(lambda x: x.reshape(64), X)).total.bytes_moved == 0
    assert cost_of(trace(lambda x: jax.lax.slice(x, (0, 0), (2, 8)), X)).total.bytes_moved == 2 * 64
    update = cost_of(trace(lambda x, u: jax.lax.dynamic_update_slice(x, u, (0, 0)), X, X[:1])).total
    assert (update.bytes_read, update.bytes_written) == (32, 32)


def test_nodes_as_one_kernel_read_what_is_outside_once_and_write_what_leaves():
    def f(x, y):
        a = x + y
        b = a * x
        return jnp.exp(b), a

    graph = trace(f, X, W)
    costs = cost_of(graph)
    ids = [n.id for n in graph.top.nodes]
    assert costs.of(ids).bytes_moved == (2 + 1 + 2 + 1 + 1 + 1) * X.nbytes
    one = costs.fused(ids)
    assert (one.bytes_read, one.bytes_written) == (2 * X.nbytes, 2 * X.nbytes)
    assert (one.flops, one.transcendentals) == (128, 64)
    first = costs.fused(ids[:2])  # what the exp reads leaves the kernel too
    assert (first.bytes_read, first.bytes_written) == (2 * X.nbytes, 2 * X.nbytes)
    with pytest.raises(ArgumentError, match="needed nodes of a single block"):
        costs.fused([])


def test_nodes_in_a_scan_as_one_kernel_move_their_bytes_each_trip():
    graph = trace(scanned(300), X, W)
    costs = cost_of(graph)
    one = costs.fused([n.id for n in graph.top.nodes[0].blocks[0].nodes])
    assert (one.bytes_read, one.bytes_written, one.trips) == (300 * 2 * X.nbytes, 300 * X.nbytes, 300)


def test_a_fused_op_costs_its_formula():
    x, w, b = (jnp.ones(s, jnp.float32) for s in ((16, 32), (32, 48), (48,)))
    total = cost_of(trace(lambda x, w, b: fl.ops.gemm_epilogue(x, w, b, activation="relu"), x, w, b)).total
    assert total.flops == 2 * 16 * 32 * 48 + 2 * 16 * 48  # the product, a bias and a maximum
    assert (total.bytes_read, total.bytes_written) == (x.nbytes + w.nbytes + b.nbytes, 4 * 16 * 48)


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({}, 64 * 64),
        ({"is_causal": True}, 64 * 65 // 2),
        ({"window": (7, 0)}, 64 * 8 - 28),
        ({"window": (1, 1)}, 64 * 3 - 2),
    ],
)
def test_fused_attention_costs_the_pairs_that_are_seen(options, pairs):
    q = jnp.ones((2, 64, 4, 16), jnp.float32)
    total = cost_of(trace(functools.partial(fl.ops.dot_product_attention, **options), q, q, q)).total
    products = 2 * 2 * 2 * 4 * 16 * pairs
    assert products < total.flops < products * 1.25  # and the softmax
    assert (total.bytes_read, total.bytes_written) == (3 * q.nbytes, q.nbytes)
    seen = np.tril(np.ones((64, 64))).sum() if options.get("is_causal") else pairs
    assert seen == pairs


def test_causal_attention_as_written_computes_the_whole_matrix():
    q = jnp.ones((2, 64, 4, 16), jnp.float32)

    def written(q, k, v):
        s = jnp.einsum("bthd,bshd->bhts", q, k)
        s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), v)

    graph = trace(written, q, q, q)
    costs = cost_of(graph)
    dots = [costs.nodes[n.id].flops for n in graph.nodes() if n.primitive == "dot_general"]
    assert sum(dots) == 2 * 2 * 2 * 4 * 16 * 64 * 64


def test_the_backward_of_a_fused_op_costs_its_products():
    x, w, b = (jnp.ones(s, jnp.float32) for s in ((16, 32), (32, 48), (48,)))
    loss = lambda x, w, b: fl.ops.gemm_epilogue(x, w, b, activation="relu").sum()  # noqa: E731
    graph = trace(jax.grad(loss, argnums=(0, 1, 2)), x, w, b)
    costs = cost_of(graph)
    back = next(n for n in graph.nodes() if n.primitive == "gemm_epilogue_cotangent")
    products = 2 * 2 * 16 * 32 * 48
    assert products < costs.nodes[back.id].flops < products * 1.1


# -- the kernels of the model -----------------------------------------------------------------------------------------


def roots(fn, *args):
    return [k.primitive for k in kernels_of(cost_of(trace(fn, *args)))]


def test_elementwise_code_joins_what_reads_it():
    assert roots(lambda x: jnp.exp(x * 2.0 + 1.0) * x, X) == ["mul"]
    assert roots(lambda x: (x * 2.0 + 1.0).sum(), X) == ["reduce_sum"]
    assert roots(lambda x, w: jax.nn.relu(x @ w + 1.0), X, W) == ["dot_general", "max"]
    assert roots(lambda x, w: (x * 2.0) @ w, X, W) == ["mul", "dot_general"]
    assert roots(lambda x, w: (x @ w.T).T, X, W) == ["dot_general"]


def test_a_softmax_is_four_kernels_that_move_what_they_must():
    big = jnp.ones((64, 512), jnp.float32)
    kernels = kernels_of(cost_of(trace(jax.nn.softmax, big)))
    assert [k.primitive for k in kernels] == ["reduce_max", "exp", "reduce_sum", "div"]
    assert sum(k.cost.bytes_moved for k in kernels) == pytest.approx(6 * big.nbytes, rel=0.01)


def test_kernels_in_a_scan_count_each_trip():
    kernels = kernels_of(cost_of(trace(scanned(300), X, W)))
    assert [(k.primitive, k.cost.trips) for k in kernels] == [("dot_general", 300), ("add", 300)]


def test_findings_say_what_a_program_and_a_node_cost():
    found = fl.find(lambda x, w, b: jax.nn.relu(x @ w + b), X, W, X[0])
    assert found.cost().total.flops == 2 * 8**3 + 2 * 64
    assert found.cost() is found.cost()
    dot = next(n for n in found.graph.nodes() if n.primitive == "dot_general")
    assert "costs 1.02 kflop, reads 512 B, writes 256 B, 1.33 flop/byte" in found.explain(dot)
    text = found.explain(found.candidates[0].id)
    assert "as one kernel" in text
    assert "node by node" in text


def test_costs_add_up_and_print():
    assert Cost(1, 2, 3, 4) + Cost(None, 1, 1, 1, known=False) == Cost(1, 3, 4, 5, known=False)
    assert Cost(10, 0, 4, 1).intensity == 2
    assert str(Cost(2000, 0, 10, 10).times(300, 300)).endswith("300 trips")
