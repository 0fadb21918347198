"""Tracing at types that vary along mesh axes. An abstract mesh is enough: nothing runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend import core as jex_core
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from fusionlab.errors import RewriteError
from fusionlab.graph.canonical.view import CanonicalView
from fusionlab.graph.jax_compat import varying_axes
from fusionlab.graph.matching.constants import constant_array
from fusionlab.graph.program.equations import slice_jaxpr
from fusionlab.graph.program.in_shard_map import as_varying, has_mesh, make_jaxpr
from fusionlab.graph.program.signature import Memo
from fusionlab.graph.program.trace import trace
from fusionlab.graph.rewriting.rewrite import Replacement, to_jaxpr

X, W, B = jnp.ones((8, 4)), jnp.ones((4, 12)), jnp.ones(12)
COLUMNS = (P(), P(None, "d"), P("d"))


def layer(x, w, b):
    return jax.nn.relu(x @ w + b)


def mesh(*names, kind=AxisType.Auto):
    return AbstractMesh((2,) * len(names), names, axis_types=(kind,) * len(names))


def types_in(fn, mesh, specs, *args, **options):
    """The types of the arguments, and of the result, in the innermost shard_map's body."""
    seen = []

    def body(*inner):
        out = fn(*inner)
        seen.append([jax.typeof(a) for a in (*inner, out)])
        return out

    jax.make_jaxpr(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(None, "d"), **options))(*args)
    (*ins, out) = seen[-1]
    return ins, out


def made(closed):
    return [v.aval for v in closed.jaxpr.outvars]


@pytest.mark.parametrize(
    ("names", "options"),
    [(("d",), {}), (("d", "e"), {}), (("e", "d"), {"axis_names": {"d"}})],
    ids=["one", "two", "partly"],
)
def test_a_program_traced_at_the_types_of_a_body_makes_the_types_it_makes_there(names, options):
    ins, out = types_in(layer, mesh(*names), COLUMNS, X, W, B, **options)
    closed = make_jaxpr(layer, ins)
    assert made(closed) == [out]
    assert [v.aval for v in closed.jaxpr.invars] == ins


def test_and_its_gradient_sums_over_the_axes_an_operand_does_not_vary_along():
    ins, _ = types_in(layer, mesh("d"), COLUMNS, X, W, B)
    closed = make_jaxpr(jax.grad(lambda x, w, b: jnp.sum(layer(x, w, b)), (0, 1)), ins)
    assert made(closed) == ins[:2]
    assert [e.primitive.name for e in closed.jaxpr.eqns].count("psum_invariant") == 1


def test_a_shard_map_in_a_shard_map():
    seen = []

    def inner(x, w, b):
        seen.append([jax.typeof(a) for a in (x, w, b, layer(x, w, b))])
        return layer(x, w, b)

    def outer(x, w, b):
        return jax.shard_map(inner, in_specs=(P("e"), P(), P()), out_specs=P("e"), axis_names={"e"})(x, w, b)

    jax.make_jaxpr(
        jax.shard_map(outer, mesh=mesh("d", "e"), in_specs=COLUMNS, out_specs=P(None, "d"), axis_names={"d"})
    )(X, W, B)
    *ins, out = seen[-1]
    assert [varying_axes(a) for a in (*ins, out)] == [{"e"}, {"d"}, {"d"}, {"d", "e"}]
    assert made(make_jaxpr(layer, ins)) == [out]


def test_inside_the_very_shard_map():
    def fn(x, w, b):
        ins = [jax.typeof(a) for a in (x, w, b)]
        assert made(make_jaxpr(layer, ins)) == [jax.typeof(layer(x, w, b))]
        return layer(x, w, b)

    types_in(fn, mesh("d"), COLUMNS, X, W, B)


def test_in_the_context_of_another_mesh():
    ins, out = types_in(layer, mesh("d", "e"), COLUMNS, X, W, B)
    with jax.sharding.use_abstract_mesh(mesh("other", kind=AxisType.Explicit)):
        assert made(make_jaxpr(layer, ins)) == [out]


def test_a_result_is_made_to_vary_as_asked_and_no_further():
    ins, out = types_in(layer, mesh("d"), COLUMNS, X, W, B)
    assert [varying_axes(a) for a in made(make_jaxpr(jnp.sin, ins[:1]))] == [set()]
    assert [varying_axes(a) for a in made(make_jaxpr(jnp.sin, ins[:1], out))] == [{"d"}]
    assert [e.primitive.name for e in make_jaxpr(jnp.sin, ins[1:2], out).jaxpr.eqns] == ["sin"]
    assert as_varying(X, jax.typeof(X)) is X


def test_what_varies_nowhere_is_traced_outside_every_shard_map_and_without_a_weak_type():
    weak = jax.typeof(jnp.asarray(2.0)).update(weak_type=True)
    closed = make_jaxpr(lambda x: x * 3, [weak], jax.ShapeDtypeStruct((), jnp.float32))
    assert not closed.jaxpr.invars[0].aval.weak_type
    assert not closed.jaxpr.invars[0].aval.sharding.mesh.axis_names


def test_a_type_that_is_owed_a_sum_is_not_taken():
    (x, _, _), _ = types_in(layer, mesh("d"), COLUMNS, X, W, B)
    reduced, _ = types_in(lambda x: x, mesh("d"), (P(None, "d"),), W)
    assert has_mesh(x)
    assert has_mesh(reduced[0])
    assert has_mesh(jax.ShapeDtypeStruct((2,), jnp.float32))
    kinds = []

    def body(w):
        kinds.append(jax.typeof(lax.pcast(w, "d", to="reduced")))
        return w

    jax.make_jaxpr(jax.shard_map(body, mesh=mesh("d"), in_specs=P(), out_specs=P()))(W)
    assert not has_mesh(kinds[0])


def body_of(fn, *args, specs, out):
    graph = trace(jax.shard_map(fn, mesh=mesh("d"), in_specs=specs, out_specs=out), *args)
    (owner,) = graph.top.nodes
    return graph, owner.blocks[0]


def test_a_known_scalar_that_varies_is_made_to_vary_in_a_slice():
    def fn(x):
        half = lax.pcast(jnp.float32(0.5), "d", to="varying")
        return jax.checkpoint(lambda x, half: jnp.sin(x * half))(x, half)

    _, block = body_of(fn, X, specs=(P(None, "d"),), out=P(None, "d"))
    inner = block.nodes[-1].blocks[0]
    x, half = inner.inputs
    closed = slice_jaxpr(inner, inner.nodes, (x,), inner.outputs[0], {half.id: 0.5})
    assert [e.primitive.name for e in closed.jaxpr.eqns] == ["pvary", "mul", "sin"]
    traced = make_jaxpr(jex_core.jaxpr_as_fun(closed), [x.aval])
    assert made(traced) == [inner.outputs[0].aval]


def test_a_constant_slice_runs_outside_the_shard_map():
    def fn(x):
        return x + lax.pcast(jnp.arange(4.0) * 2, "d", to="varying")

    _, block = body_of(fn, X, specs=(P("d"),), out=P("d"))
    nodes = block.nodes[:-1]
    assert "pvary" in [n.primitive for n in nodes]
    added = next(a for a in block.nodes[-1].inputs if a is not block.inputs[0])
    closed = slice_jaxpr(block, nodes, (), added, constant=True)
    assert jex_core.jaxpr_as_fun(closed)()[0].ravel().tolist() == [0, 2, 4, 6]


def test_a_constant_whose_custom_rule_names_a_mesh_axis_is_not_computed():
    def fn(x):
        return x + jax.nn.relu(lax.pcast(jnp.arange(4.0) - 1, "d", to="varying")) + lax.pcast(2.0, "d", to="varying")

    _, block = body_of(fn, X, specs=(P("d"),), out=P("d"))
    relu = next(n for n in block.nodes if n.primitive == "custom_jvp_call")
    view = CanonicalView(block)
    assert constant_array(view, relu.inputs[0], Memo()).tolist() == [-1, 0, 1, 2]
    assert constant_array(view, relu.outputs[0], Memo()) is None


def test_a_replacement_that_varies_more_than_what_it_replaces_is_refused_and_one_that_varies_less_is_made_to():
    graph, block = body_of(lambda w: jnp.sin(lax.psum(w, "d")) + w, W, specs=(P(None, "d"),), out=P(None, "d"))
    sine = next(n for n in block.nodes if n.primitive == "sin")
    operands = (*sine.inputs, *block.inputs)
    more = Replacement(block.path, (sine,), sine.outputs[0], operands, lambda x, w: jnp.sin(x) + 0 * w)
    plain = Replacement(block.path, (sine,), sine.outputs[0], sine.inputs, jnp.cos)
    summed = next(n for n in block.nodes if n.primitive == "add")
    less = Replacement(block.path, (summed,), summed.outputs[0], sine.outputs, lambda x: x)
    with pytest.raises(RewriteError, match="varying along the same mesh axes"):
        to_jaxpr(graph, [more])
    rewritten = to_jaxpr(graph, [plain, less])
    inner = next(e for e in rewritten.jaxpr.eqns if e.primitive.name == "shard_map").params["jaxpr"]
    assert [e.primitive.name for e in inner.eqns if e.primitive.name in ("sin", "cos", "add")] == ["cos"]
