"""Sites on meshes whose axes are Explicit: found where what would stand for them has a type there, and else declined in words.

The programs, and what is asserted of each, are in explicit.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import fusionlab as fl
from fusionlab.errors import REJECTIONS
from fusionlab.graph.program.explicit_axes import Misplaced, placing, refusals, sharding_in_type
from fusionlab.graph.settings import on_one_device

from ..explicit import PROGRAMS, TRIALS, arguments, layer, same, step

IMPORTANT = (
    "relu6 on 4 Explicit",
    "norm on 4 Explicit",
    "is_causal on 4 Explicit",
    "asked_gathered on 4 Explicit",
    "asked_summed on 4 Explicit",
)


@pytest.mark.devices
@pytest.mark.parametrize("name", IMPORTANT)
def test_an_important_program_has_the_values_the_gradients_and_the_types_of_the_original(on_devices, name):
    on_devices("fusers.explicit", name)


@pytest.mark.devices
@pytest.mark.parametrize("name", sorted(set(TRIALS) - set(IMPORTANT)))
def test_once_fused_it_has_the_values_the_gradients_and_the_types_of_the_original(on_devices, name):
    on_devices("fusers.explicit", name)


@pytest.fixture
def mesh():
    return jax.make_mesh((1,), ("d",), axis_types=(AxisType.Explicit,))


def test_what_the_search_computes_is_on_one_device_whatever_mesh_is_set(mesh):
    computed = []

    def traced(x):
        computed.append(on_one_device(lambda: jnp.sin(jnp.ones(3))))
        return x

    with jax.set_mesh(mesh), jax.threefry_partitionable(False):
        jax.jit(traced)(jnp.ones(2))
        drawn = jax.jit(lambda: on_one_device(lambda: jax.random.bits(jax.random.key(0), (4,))))()
        np.testing.assert_array_equal(drawn, jax.random.bits(jax.random.key(0), (4,)))
    assert isinstance(computed[0].sharding, SingleDeviceSharding)


@pytest.mark.parametrize("name", ["softplus", "norm", "causal", "columns"])
def test_where_no_mesh_is_set_the_types_of_the_arguments_tell_it(mesh, name):
    program = PROGRAMS[name]
    args = arguments(program, mesh)
    assert fl.find(program.fn, *args).counts()[program.site] == 1
    same(fl.fuse(program.fn)(*args), jax.jit(program.fn)(*args))


def test_what_was_found_under_a_mesh_is_applied_where_another_is_set(mesh):
    program = PROGRAMS["where"]
    other = jax.make_mesh((1, 1), ("a", "b"))
    with jax.set_mesh(mesh):
        args = arguments(program, mesh)
        found = fl.find(step(program.fn), *args)
        want = jax.jit(step(program.fn))(*args)
    with jax.set_mesh(other):
        closed = found.rewritten()
    with jax.set_mesh(mesh):
        same(jax.jit(jax.extend.core.jaxpr_as_fun(closed))(*args), jax.tree.leaves(want))


def norm_and_activation(x, scale, w):
    centred = x - x.mean(-1, keepdims=True)
    normed = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale
    return jax.nn.gelu(normed @ w)


def in_shard_map(fn, mesh, check_vma):
    return jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=check_vma)


OTHER_THAN_SET = {
    "shard_map": lambda fn, mesh: in_shard_map(fn, mesh, False),
    "shard_map that checks": lambda fn, mesh: in_shard_map(fn, mesh, True),
    "auto_axes": lambda fn, mesh: jax.sharding.auto_axes(fn, axes=mesh.axis_names, out_sharding=P()),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("way", OTHER_THAN_SET)
def test_a_site_whose_values_stand_on_another_mesh_than_the_one_that_is_set_is_traced_on_theirs(kind, way):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(kind,))
    rng = np.random.default_rng(0)
    with jax.set_mesh(mesh):
        args = [jnp.asarray(rng.normal(size=shape), "float32") for shape in ((4, 8), (8,), (8, 16))]
        fn = OTHER_THAN_SET[way](norm_and_activation, mesh)
        for program in (fn, step(fn)):
            assert {"layer_norm", "gemm_epilogue"} <= {c.op for c in fl.find(program, *args).candidates}
            same(fl.fuse(program)(*args), jax.jit(program)(*args))


def test_what_was_found_on_no_mesh_is_applied_where_one_is_set(mesh):
    args = [jnp.ones(shape) for shape in ((4, 8), (8,), (8, 16))]
    found = fl.find(norm_and_activation, *args)
    with jax.set_mesh(mesh):
        closed = found.rewritten()
    same(jax.extend.core.jaxpr_as_fun(closed)(*args), [norm_and_activation(*args)])


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("asked_summed", "which cannot be requested of the fused op's own product"),
        ("asked_scattered", "asks for P('d'"),
        ("moved_before_the_bias", "= reshard (explicit.py"),
        ("moved_before_the_activation", "fixes the layout of the sum with the bias"),
        ("queries", "JAX cannot type it on these explicit mesh axes: Contracting dimensions are sharded"),
    ],
)
def test_a_decline_names_the_operation_and_what_to_do(mesh, name, told):
    program = PROGRAMS[name]
    with jax.set_mesh(mesh):
        found = fl.find(program.fn, *arguments(program, mesh))
    (reason,) = found.rejections
    assert reason.code == "sharding"
    assert told in reason.sentence, reason.sentence
    assert reason.edit
    assert REJECTIONS["sharding"]


def test_two_sites_that_differ_in_where_their_values_lie_alone_are_two(mesh):
    """What is proved of one is not said of the other."""

    def fn(x, y, w, v, b):
        one = jnp.einsum("ij,jk->ik", x, w, out_sharding=P()) + b
        return jax.nn.relu(one), jax.nn.relu(jnp.einsum("ij,jk->ik", y, v, out_sharding=P()) + b)

    put = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))  # noqa: E731
    a, b = np.ones((4, 4), "float32"), np.ones(4, "float32")
    with jax.set_mesh(mesh):
        args = put(a, "d"), put(a, None, "d"), put(a), put(a, "d"), put(b)
        found = fl.find(fn, *args)
        assert len(found.candidates) == 1
        assert [r.code for r in found.rejections] == ["sharding"]
        same(fl.fuse(fn)(*args), jax.jit(fn)(*args))


def test_a_constraint_on_auto_axes_before_the_bias_is_told_as_well():
    auto = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(auto):
        fn = lambda x, w, b: jax.nn.relu(jax.lax.with_sharding_constraint(x @ w, P("d")) + b)  # noqa: E731
        found = fl.find(fn, jnp.ones((4, 6)), jnp.ones((6, 3)), jnp.ones(3))
    assert [r.code for r in found.rejections] == ["sharding"]
    assert "= sharding_constraint (test_explicit_axes.py" in found.rejections[0].sentence


def sigmoid_layer(w, x, y):
    return jnp.mean(jax.nn.sigmoid(x @ w) ** 2)


def head(w, x, y):
    logits = x @ w
    picked = jnp.take_along_axis(logits, y[:, None], -1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize(("loss", "site"), [(sigmoid_layer, "gemm_epilogue"), (head, "linear_cross_entropy")])
def test_a_number_that_jax_places_on_the_mesh_is_that_number_in_the_backward_pass_too(kind, loss, site):
    """The derivatives of a sigmoid and of an absolute value read a 1 and a 0, each by a reshard of its own."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(kind,))
    draw = np.random.default_rng(0).normal
    x, y = jax.device_put((jnp.float32(draw(size=(4, 6))), jnp.arange(4)), NamedSharding(mesh, P("d")))
    w = jax.device_put(jnp.float32(draw(size=(6, 8))), NamedSharding(mesh, P()))
    step = jax.value_and_grad(loss)
    found = fl.find(step, w, x, y, passes=site, device="cpu")
    assert "reshard" in str(found.graph)
    assert found.counts()[f"{site}_grad"] == 1
    same(fl.fuse(step, passes=[site])(w, x, y), jax.jit(step)(w, x, y))


def test_a_weak_result_stays_weak():
    """Of Python numbers: what is made of one and a bfloat16 array is bfloat16."""
    fn = lambda a, b, t: a + t * (b - a)  # noqa: E731
    assert fl.find(fn, 1.0, 2.0, 0.3).counts()["lerp"] == 1
    got, want = jax.jit(fl.fuse(fn))(1.0, 2.0, 0.3), jax.jit(fn)(1.0, 2.0, 0.3)
    same(got, want)
    assert got.weak_type
    assert (got * jnp.ones(3, "bfloat16")).dtype == "bfloat16"
    both = lambda f: jax.value_and_grad(f, (0, 1, 2))  # noqa: E731
    same(fl.fuse(both(fn))(1.0, 2.0, 0.3), jax.jit(both(fn))(1.0, 2.0, 0.3))


def test_an_error_where_no_sharding_is_part_of_a_type_is_no_answer():
    assert refusals()[0].__name__ == "ShardingTypeError"
    plain = jax.ShapeDtypeStruct((4, 4), "float32")
    with pytest.raises(ValueError, match="mine"), placing([plain]):
        raise ValueError("mine")
    mesh = jax.sharding.AbstractMesh((2,), ("d",), axis_types=(AxisType.Explicit,))
    typed = jax.ShapeDtypeStruct((4, 4), "float32", sharding=NamedSharding(mesh, P("d")))
    with pytest.raises(Misplaced, match="mine"), placing([plain, typed]):
        raise ValueError("mine")
    assert sharding_in_type(plain) is None
    assert sharding_in_type(typed).spec == P("d")


def test_a_row_parallel_product_by_default_raises_as_the_program_does(mesh):
    """JAX itself does not type it: that is the program's error, and told as that."""
    args = (
        jax.device_put(a, NamedSharding(mesh, s))
        for a, s in zip((np.ones((4, 4)), np.ones((4, 4)), np.ones(4)), (P(None, "d"), P("d"), P()), strict=True)
    )
    with pytest.raises(fl.errors.TraceError, match="ShardingTypeError"):
        fl.find(lambda x, w, b: layer(jax.nn.relu, x, w, b), *args)
