"""The numpy interpreter on two devices, and certification of what sums over them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from fusionlab.graph.canonical.view import CanonicalView
from fusionlab.graph.certify.certify import Certifier
from fusionlab.graph.interpret.evaluate import ReducedSizes
from fusionlab.graph.interpret.limits import CannotEvaluate
from fusionlab.graph.interpret.on_devices import COUNT, evaluate_together
from fusionlab.graph.matching.region import cut
from fusionlab.graph.program.trace import trace
from fusionlab.kernels import meaning_of

AXES = frozenset({"tp"})


def together(fn, *args, axes=AXES):
    """`fn` on devices, one row of each argument for each."""
    bound = [(axis, COUNT) for axis in ("tp", "dp")]
    closed = jax.make_jaxpr(fn, axis_env=bound)(*(jax.ShapeDtypeStruct(a.shape[1:], jnp.float32) for a in args))
    own = [[a[device] for a in args] for device in range(COUNT)]
    return evaluate_together(closed, own, axes, ReducedSizes(), lambda eqn: None)


@pytest.fixture
def x():
    return np.random.default_rng(0).normal(size=(COUNT, 3, 4))


def test_each_device_has_its_own_numbers_and_a_sum_those_of_all(x):
    got, own = together(lambda x: (lax.psum(jnp.sin(x), "tp") * x, jnp.cos(x)), x)
    np.testing.assert_allclose(got, np.sin(x).sum(0) * x, rtol=1e-12)
    np.testing.assert_allclose(own, np.cos(x), rtol=1e-12)


def test_sums_of_several_and_one_after_another_and_in_calls(x):
    def fn(x):
        a, b = lax.psum((x, x**2), "tp")
        return jax.checkpoint(lambda a: lax.psum(a * x, "tp"))(a) + b

    (got,) = together(fn, x)
    np.testing.assert_allclose(got, np.broadcast_to((x.sum(0) * x).sum(0) + (x**2).sum(0), x.shape), rtol=1e-12)


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (lambda x: lax.psum(x, ("tp", "dp")), "psum over tp, dp"),
        (lambda x: lax.psum(x, "dp"), "psum over dp"),
        (lambda x: lax.psum_scatter(x, "tp"), "reduce_scatter"),
        (lambda x: lax.all_gather(x, "tp"), "all_gather"),
        (lambda x: lax.psum(x, "tp", axis_index_groups=[[0], [1]]), "psum over tp"),
    ],
)
def test_other_collectives_are_not_followed_and_nobody_waits_for_ever(x, fn, says):
    wide = np.stack([x[:, 0, :COUNT]] * COUNT, 1)  # [devices, devices, ..]: what scatters takes an entry for each
    with pytest.raises(CannotEvaluate, match=says):
        together(fn, wide)


def test_an_error_on_one_device_is_everybodys(x):
    def fn(x):
        return lax.psum(lax.cond(x[0, 0] > 0, lambda a: lax.cumlogsumexp(a), lambda a: a, x), "tp")

    x[0, 0, 0], x[1, 0, 0] = 1.0, -1.0
    with pytest.raises(CannotEvaluate):
        together(fn, x)


def region_of(fn, *shapes, check_vma, batches=False):
    """All of `fn`, in a shard_map whose first argument is split and whose others are on every device, as one region; along another mesh
    axis it may be split into batches.
    """
    mesh = AbstractMesh((2, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    batch = "dp" if batches else None
    specs = (P(batch, "tp"), *(P() for _ in shapes[1:]))
    split = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P(batch), check_vma=check_vma)
    (owner,) = trace(split, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).top.nodes
    block = owner.blocks[0]
    view = CanonicalView(block)
    return cut(view, block.outputs[0], {n: view.ref[v.id].nid for n, v in zip("xb", block.inputs, strict=True)})


def row_parallel(x, b):
    return lax.psum(jnp.sin(x).sum(1), "tp") + b


WRONG = {
    "no sum": lambda x, b: lax.psum(jnp.sin(x).sum(1) * 0, "tp") + jnp.sin(x).sum(1) + b,
    "the bias on each device": lambda x, b: lax.psum(jnp.sin(x).sum(1) + b, "tp"),
    "summed before": lambda x, b: jnp.sin(lax.psum(x, "tp")).sum(1) + b,
    "summed twice": lambda x, b: lax.psum(lax.psum(jnp.sin(x).sum(1), "tp"), "tp") + b,
}


@pytest.mark.parametrize("batches", [True, False])
@pytest.mark.parametrize("check_vma", [True, False])
def test_what_devices_sum_is_proved_on_several(check_vma, batches):
    """With batches, the gradient of the bias is summed over those too where types tell that it does not vary along them."""
    rows = 512 if not batches else 1024
    region = region_of(row_parallel, (rows, 64), (512,), check_vma=check_vma, batches=batches)

    def judge(replacement):
        return Certifier(meaning_of).region(region, replacement, "test")

    assert judge(row_parallel).ok, judge(row_parallel)
    assert judge(lambda x, b: b + lax.psum(jnp.ones(x.shape[1]) @ jnp.sin(x).T, "tp")).ok
    for name, fn in WRONG.items():
        if check_vma and name in ("no sum", "summed twice"):
            continue  # their types are others, which JAX itself refuses
        assert judge(fn).code == "value", name


def region_over_rows_too(fn, *shapes):
    """As `region_of`, on a mesh that the rows of the first argument are split over as well."""
    mesh = AbstractMesh((2, 2), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    specs = (P("dp", "tp"), *(P() for _ in shapes[1:]))
    split = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P("dp"))
    (owner,) = trace(split, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).top.nodes
    block = owner.blocks[0]
    view = CanonicalView(block)
    return cut(view, block.outputs[0], {n: view.ref[v.id].nid for n, v in zip("xb", block.inputs, strict=True)})


def test_devices_with_other_rows_are_no_part_of_the_proof():
    """The gradient of b is summed over rows on other devices; what is proved is the sum over tp."""
    scaled = lambda x, b: lax.psum(jnp.sin(x).sum(1, keepdims=True), "tp") * b  # noqa: E731
    region = region_over_rows_too(scaled, (512, 64), (48,))

    def judge(replacement):
        return Certifier(meaning_of).region(region, replacement, "test")

    assert judge(scaled).ok, judge(scaled)
    assert judge(lambda x, b: lax.psum(jnp.sin(x).sum(1, keepdims=True) * b, "tp")).ok  # the same, one after the other
    wrong = {
        "twice": lambda x, b: 2 * scaled(x, b),
        "before": lambda x, b: jnp.sin(lax.psum(x, "tp")).sum(1, keepdims=True) * b,
        "b of each": lambda x, b: lax.psum(jnp.sin(x).sum(1, keepdims=True) + b, "tp"),
        "other rows too": lambda x, b: lax.pcast(lax.psum(scaled(x, b), "dp"), "dp", to="varying"),
    }
    for name, fn in wrong.items():
        assert not judge(fn).ok, name
