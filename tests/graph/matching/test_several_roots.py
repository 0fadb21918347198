"""Sites of several results: cut out as one region and replaced by one call, wherever what they give is read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fusionlab as fl
from fusionlab.errors import RewriteError
from fusionlab.graph.canonical.view import CanonicalView
from fusionlab.graph.declined import Declined
from fusionlab.graph.matching.region import Region, cut, escapes, region_signature
from fusionlab.graph.program.order import SitesWaitError
from fusionlab.graph.program.trace import graph_of_jaxpr, trace
from fusionlab.graph.rewriting.rewrite import Replacement, to_jaxpr

KEYS = jax.random.split(jax.random.key(7), 2)
X = jax.random.normal(KEYS[0], (6, 6))
W = jax.random.normal(KEYS[1], (6, 6)) * 0.3


def pair(x, w):
    """What the sites here compute: two results, of which the second is made of the first."""
    a = jnp.sin(x)
    return a, a @ w


def fused(x, w):
    """In its place: (root, other), told from it by its primitives."""
    a = jnp.cos(x - np.pi / 2)
    return a @ w, a


def home(graph, primitive="sin"):
    return next(b for b in graph.blocks() if any(n.primitive == primitive for n in b.nodes))


def made(block, primitive, number=0):
    """The first value that a node of this primitive makes, of several such nodes that of a number."""
    return [n for n in block.nodes if n.primitive == primitive][number].outputs[0]


def region(block, number=0, **leaves):
    """The site `pair` of a block, of several that of a number: the product is its root, the sine the other."""
    view, a, b = CanonicalView(block), made(block, "sin", number), made(block, "dot_general", number)
    leaves = {"x": block.producer[a.id].inputs[0], "w": block.producer[b.id].inputs[1]} | leaves
    return cut(view, b, {k: view.ref[v.id].nid for k, v in leaves.items()}, others=(a,))


def replacement(r: Region, fn=fused):
    return Replacement(r.block.path, r.nodes, r.root, r.inputs, fn, others=r.others)


def after(graph, *replacements):
    """(the rewritten program as a function of arrays, as a graph)."""
    closed = to_jaxpr(graph, replacements)
    names = {"name": "f", "in_tree": graph.in_tree, "out_tree": graph.out_tree, "in_names": graph.in_names}
    return jaxpr_as_fun(closed), graph_of_jaxpr(closed, **names)


def primitives(graph):
    return [n.primitive for n in graph.nodes()]


def same(fn, run, *args, grad=True):
    """Values, and gradients of a weighted sum of the outputs."""

    def loss(call):
        def of(*args):
            outs = [y for y in jax.tree.leaves(call(*args)) if jnp.issubdtype(y.dtype, jnp.floating)]
            return sum((y * np.linspace(0.5, 1.5, y.size).reshape(y.shape)).sum() for y in outs)

        return of

    for want, got in zip(jax.tree.leaves(jax.jit(fn)(*args)), jax.jit(run)(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    for want, got in zip(
        *(jax.jit(jax.grad(loss(f), tuple(range(len(args)))))(*args) if grad else () for f in (fn, run)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


# -- wherever the site stands ----------------------------------------------------------------------------------------------


def at_the_top(x, w):
    a, b = pair(x, w)
    return b, a * 2.0


def both_returned(x, w):
    return pair(x, w)


def root_carried_and_other_stacked(x, w):
    def body(c, _):
        a, b = pair(c, w)
        return b, a

    return lax.scan(body, x, None, length=3)


def other_carried_and_root_stacked(x, w):
    def body(c, scale):
        a, b = pair(c, w)
        return a, b * scale

    return lax.scan(body, x, jnp.arange(1.0, 4.0), reverse=True)


def both_carried_by_while(x, w):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, *pair(c[1] + c[2], w)), (0, x, x))


def in_a_branch(x, w):
    return lax.cond(x[0, 0] > 9, lambda x: (x, x), lambda x: pair(x, w), x)


def in_remat(x, w):
    return jax.checkpoint(lambda x: pair(x, w), policy=jax.checkpoint_policies.dots_saveable)(x)


def in_remat_in_scan(x, w):
    return lax.scan(lambda c, _: jax.checkpoint(lambda c: pair(c, w)[::-1])(c), x, None, length=2)


def in_a_donating_jit(x, w):
    return jax.jit(pair, donate_argnums=0)(x * 1.5, w)


PLACES = [
    at_the_top,
    both_returned,
    root_carried_and_other_stacked,
    other_carried_and_root_stacked,
    both_carried_by_while,
    in_a_branch,
    in_remat,
    in_remat_in_scan,
    in_a_donating_jit,
]


@pytest.mark.parametrize("fn", PLACES, ids=lambda fn: fn.__name__)
def test_one_call_makes_all_results(fn):
    graph = trace(fn, X, W)
    r = region(home(graph))
    assert [n.primitive for n in r.nodes] == ["sin", "dot_general"]
    assert escapes(r) == []
    run, new = after(graph, replacement(r))
    assert "sin" not in primitives(new)
    assert primitives(new).count("dot_general") == primitives(new).count("cos") == 1
    same(fn, run, X, W, grad=fn is not both_carried_by_while)


def test_in_a_shard_map_every_result_varies_as_it_did():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))

    def fn(x, w):
        return jax.shard_map(pair, mesh=mesh, in_specs=(P("d"), P()), out_specs=(P("d"), P("d")))(x, w)

    def constant(x, w):
        return jnp.ones((6, 6)), jnp.zeros((6, 6))

    graph = trace(fn, X, W)
    r = region(home(graph))
    run, _ = after(graph, replacement(r))
    same(fn, run, X, W)
    run, _ = after(graph, replacement(r, constant))
    np.testing.assert_array_equal(run(X, W)[0], np.zeros((6, 6)))
    np.testing.assert_array_equal(run(X, W)[1], np.ones((6, 6)))


def test_results_may_come_from_one_node():
    def fn(x, w):
        a, b = lax.split(x, (2, 4))
        return b, a @ w

    graph = trace(fn, X, W)
    view, (a, b) = CanonicalView(graph.top), next(n for n in graph.top.nodes if n.primitive == "split").outputs
    r = cut(view, a, {"x": view.ref[graph.top.inputs[0].id].nid}, others=(b,))
    run, new = after(graph, replacement(r, lambda x: (x[:2], x[2:])))
    assert "split" not in primitives(new)
    same(fn, run, X, W)


# -- the order of what is written ------------------------------------------------------------------------------------------


def early(x, w):
    a = jnp.sin(x)
    reader = jnp.exp(a)
    between = jnp.tanh(x)
    late = jnp.sqrt(w + 2.0)
    return a @ late, reader, between


def test_a_reader_before_the_sites_last_operand_comes_to_stand_behind_the_site():
    graph = trace(early, X, W)
    r = region(home(graph))
    run, new = after(graph, replacement(r))
    order = primitives(new)
    assert (
        order.index("sqrt") < order.index("cos") < order.index("dot_general") < order.index("exp") < order.index("tanh")
    )
    same(early, run, X, W)


def test_what_nobody_reads_early_keeps_its_place():
    graph = trace(lambda x, w: (*pair(x, w), jnp.tanh(x)), X, W)
    _, new = after(graph, replacement(region(home(graph))))
    assert primitives(new)[-1] == "tanh"
    graph = trace(lambda x, w: (jnp.sin(x), jnp.tanh(x), jnp.sqrt(w), jnp.exp(x)), X, W)
    sine, root = made(graph.top, "sin"), made(graph.top, "sqrt")
    x, w = graph.top.inputs
    alone = Replacement("", (graph.top.producer[sine.id],), sine, (x,), jnp.sin)
    both = Replacement(
        "", tuple(graph.top.producer[v.id] for v in (sine, root)), root, (x, w), lambda x, w: (w, x), others=(sine,)
    )
    assert primitives(after(graph, alone)[1]) == ["sin", "tanh", "sqrt", "exp"]
    assert primitives(after(graph, both)[1]) == ["tanh", "exp"]


def test_a_site_of_one_result_that_makes_a_late_operand_comes_first():
    graph = trace(early, X, W)
    r = region(home(graph))
    root = made(graph.top, "sqrt")
    nodes = graph.top.producer[root.id], graph.top.producer[graph.top.producer[root.id].inputs[0].id]
    one = Replacement("", nodes, root, (graph.top.inputs[1],), lambda w: (w + 2.0) ** 0.5)
    for given in ((replacement(r), one), (one, replacement(r))):
        run, new = after(graph, *given)
        assert not {"sin", "sqrt"} & set(primitives(new)) - {"sqrt"}
        same(early, run, X, W)


def test_a_leaf_made_of_a_root_is_refused():
    def fn(x, w):
        a = jnp.sin(x)
        return a @ jnp.exp(a + w), a

    graph = trace(fn, X, W)
    with pytest.raises(Declined, match=r"%\d+:f32\[6,6\] is a result of the site, and .* is computed from it"):
        region(graph.top)


def test_a_leaf_that_is_a_root_in_another_form_is_refused():
    def fn(x, w):
        a = jnp.sin(x)
        return a @ a.T, a

    graph = trace(fn, X, W)
    block = graph.top
    view, (a, b) = CanonicalView(block), (made(block, "sin"), made(block, "dot_general"))
    with pytest.raises(Declined, match="computed from it"):
        cut(view, b, {"x": view.ref[block.inputs[0].id].nid, "w": view.ref[a.id].nid}, others=(a,))


# -- effects ---------------------------------------------------------------------------------------------------------------


def with_effects(seen, late_is_read):
    """A root is told to the host; then the host is asked for a number, on which the last operand depends or not."""

    def fn(x, w):
        a = jnp.sin(x)
        io_callback(lambda v: seen.append(("root", float(v))), None, a.sum(), ordered=True)
        told = io_callback(
            lambda v: seen.append(("w", float(v))) or v, jax.ShapeDtypeStruct((), "float32"), w.sum(), ordered=True
        )
        late = jnp.sqrt(w + 2.0 + (0.0 * told if late_is_read else 0.0))
        return a @ late, told

    return fn


def test_an_effect_that_reads_a_root_early_happens_in_its_turn():
    seen = []
    fn = with_effects(seen, late_is_read=False)
    graph = trace(fn, X, W)
    run, new = after(graph, replacement(region(graph.top)))
    assert primitives(new).index("sqrt") < primitives(new).index("io_callback")
    want = jax.jit(fn)(X, W)
    jax.effects_barrier()
    events, seen[:] = list(seen), []
    got = jax.jit(run)(X, W)
    jax.effects_barrier()
    assert [name for name, _ in events] == [name for name, _ in seen] == ["root", "w"]
    np.testing.assert_allclose([v for _, v in seen], [v for _, v in events], rtol=1e-5)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_effects_that_come_before_an_early_reader_come_in_their_order():
    def fn(x, w):
        a = jnp.sin(x)
        reader = jnp.exp(a)
        io_callback(lambda v: None, None, x.sum(), ordered=False)
        told = io_callback(lambda v: v, jax.ShapeDtypeStruct((), "float32"), w.sum())
        return a @ jnp.sqrt(w + 2.0 + 0.0 * told), reader

    graph = trace(fn, X, W)
    _, new = after(graph, replacement(region(graph.top)))
    order = [n for n in new.nodes() if n.primitive in ("io_callback", "exp")]
    assert [n.primitive for n in order] == ["io_callback", "io_callback", "exp"]
    assert [len(n.outputs) for n in order[:2]] == [0, 1]


def test_a_reader_with_effects_that_would_have_to_come_later_than_others_is_refused():
    graph = trace(with_effects([], late_is_read=True), X, W)
    with pytest.raises(Declined, match="computed after side effects that depend on it"):
        region(graph.top)


def test_a_node_with_effects_inside_the_site_is_refused():
    def fn(x, w):
        def body(c, _):
            jax.debug.print("{}", c[0, 0])
            return jnp.cos(c), None

        a = jnp.sin(x)
        return lax.scan(body, a, None, length=2)[0] @ w, a

    graph = trace(fn, X, W)
    with pytest.raises(Declined, match="has side effects"):
        region(graph.top)


# -- regions ---------------------------------------------------------------------------------------------------------------


def test_every_root_may_be_read_outside_and_no_inner_value():
    def fn(x, w):
        a = jnp.sin(x)
        inner = a * 3.0
        return inner @ w, a, inner.sum()

    block = trace(fn, X, W).top
    assert [e.node.primitive for e in escapes(region(block))] == ["mul"]
    view = CanonicalView(block)
    leaves = {k: view.ref[v.id].nid for k, v in zip("xw", block.inputs, strict=True)}
    one = cut(view, made(block, "dot_general"), leaves)
    assert {e.node.primitive for e in escapes(one)} == {"sin", "mul"}


def test_the_part_that_makes_one_root_takes_all_the_inputs():
    block = trace(both_returned, X, W).top
    whole = region(block)
    parts = [whole.of(v) for v in whole.roots]
    assert [[n.primitive for n in p.nodes] for p in parts] == [["sin", "dot_general"], ["sin"]]
    for part, want in zip(parts, reversed(pair(X, W)), strict=True):
        assert part.inputs == whole.inputs
        assert part.others == ()
        np.testing.assert_allclose(jaxpr_as_fun(part.jaxpr())(X, W)[0], want, rtol=1e-6)
    assert len({region_signature(r) for r in (whole, *parts)}) == 3
    assert whole.of(whole.root).of(whole.root) is not whole


def test_which_results_a_region_has_is_part_of_its_signature():
    block = trace(both_returned, X, W).top
    view = CanonicalView(block)
    leaves = {k: view.ref[v.id].nid for k, v in zip("xw", block.inputs, strict=True)}
    assert region_signature(region(block)) != region_signature(cut(view, made(block, "dot_general"), leaves))


# -- replacements that do not fit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda x, w: (x, x[:3]), r"%\d+:f32\[6,6\] gives float32\[3,6\], needed the same"),
        (lambda x, w: (x, x.astype(jnp.bfloat16)), r"gives bfloat16\[6,6\], needed the same"),
        (lambda x, w: (x[:3], x), r"gives float32\[3,6\], needed the same"),
    ],
    ids=["shape of the other", "dtype of the other", "shape of the root"],
)
def test_every_result_has_to_be_of_the_type_it_replaces(bad, message):
    graph = trace(both_returned, X, W)
    with pytest.raises(RewriteError, match=message):
        to_jaxpr(graph, [replacement(region(graph.top), bad)])


def test_sites_that_wait_for_each_other_are_not_written():
    """Each reads what is made of a result of the other; either alone can be replaced."""

    def fn(x, w):
        a1 = jnp.sin(x)
        a2 = jnp.sin(w)
        b1 = a1 @ (a2 + 1.0)
        b2 = a2 @ (a1 - 1.0)
        return a1, b1, a2, b2

    graph = trace(fn, X, W)
    one, two = (replacement(region(graph.top, i)) for i in (0, 1))
    for alone in (one, two):
        same(fn, after(graph, alone)[0], X, W)
    with pytest.raises(SitesWaitError) as caught:
        to_jaxpr(graph, [one, two])
    assert set(caught.value.numbers) == {0, 1}


def test_sites_in_a_row_are_all_replaced():
    def fn(x, w):
        kept = []
        for _ in range(3):
            a, x = pair(x, w)
            kept.append(a)
        return x, kept

    graph = trace(fn, X, W)
    run, new = after(graph, *(replacement(region(graph.top, i)) for i in range(3)))
    assert primitives(new).count("cos") == 3
    assert "sin" not in primitives(new)
    same(fn, run, X, W)


def test_beside_a_pair_both_are_replaced():
    """In a program that is differentiated already, beside a site that is fused with its backward pass."""

    def step(x, w):
        def loss(x, w):
            return (jax.nn.relu(x @ w + w[0]) ** 2).sum()

        return *jax.value_and_grad(loss, (0, 1))(x, w), *pair(x, w)

    found = fl.find(step, X, W, passes="gemm_epilogue")
    paired = [c for c in found.candidates if c.backward is not None and c.backward.is_fused]
    block = found.graph.top
    a = made(block, "sin")
    (b,) = [n.outputs[0] for n in block.nodes if n.primitive == "dot_general" and a in n.inputs]
    view = CanonicalView(block)
    leaves = {k: view.ref[v.id].nid for k, v in zip("xw", block.inputs, strict=True)}
    r = cut(view, b, leaves, others=(a,))
    assert paired
    run, new = after(found.graph, *(c.site for c in paired), replacement(r))
    assert "cos" in primitives(new)
    assert "sin" not in primitives(new)
    same(step, run, X, W, grad=False)
