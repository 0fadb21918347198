"""Programs whose sums round otherwise: by how much, and that nothing else in them changes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from fusionlab.graph.interpret.resummed import TERMS, Arithmetic, moved, reach, resummed


def units_moved(x, most):
    """How many units in the last place each entry moves."""
    y = jax.jit(lambda x: moved(x, most, jnp.uint32(3)))(x)
    bits = f"int{jnp.finfo(x.dtype).bits}"
    before, after = (np.asarray(lax.bitcast_convert_type(a, jnp.dtype(bits)), np.int64) for a in (x, y))
    return after - before


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_entries_move_as_far_as_is_said(dtype):
    x = jnp.asarray(np.random.default_rng(0).normal(size=20_000), dtype)
    for most in (0.5, 8.0):
        units = units_moved(x, most)
        assert abs(units).max() <= np.ceil(most)
        deviation = 0.5 if most == 0.5 else np.sqrt(most**2 / 3 + 1 / 6)  # of the uniform number, and of its rounding
        assert abs(units.std() - deviation) < 0.02 * max(deviation, 1)
        assert abs(units.mean()) < 4 * deviation / np.sqrt(x.size)
    assert abs((units_moved(x, 0.5) != 0).mean() - 0.25) < 0.02  # as often as stochastic rounding and rounding differ


def test_zeros_and_infinities_stay_and_signs_too():
    top = float(jnp.finfo(jnp.float32).max)
    x = jnp.array([0.0, -0.0, np.inf, -np.inf, np.nan, top, -top, 1e-45, -1e-45], jnp.float32)
    y = np.asarray(moved(x, 1000.0, jnp.uint32(1)))
    assert np.array_equal(y[:5], np.asarray(x)[:5], equal_nan=True)
    assert np.isfinite(y[5:]).all()
    assert (np.signbit(y) == np.signbit(x)).all()
    assert (y[5:] != 0).all()


def everything(x, w, key, n):
    """Sums in a scan with a checkpoint, a branch, a loop, and next to draws, comparisons and integers."""

    @jax.checkpoint
    def layer(c, w):
        c = jax.nn.silu(c @ w)
        return c, c.sum()

    def loss(w):
        y, sums = lax.scan(layer, x, w)
        y = lax.cond(n > 0, lambda y: y @ w[0], lambda y: y, y)
        y = lax.while_loop(lambda c: c[1] < n, lambda c: (c[0] @ w[1], c[1] + 1), (y, 0))[0] if n is None else y
        kept = jax.random.bernoulli(key, 0.5, y.shape)
        return jnp.mean(jnp.where(kept, y, 0) ** 2) + sums.sum()

    value, grads = jax.value_and_grad(loss)(w)
    return value, grads, jax.random.bits(key, (4,)), jnp.arange(3) + n


@pytest.mark.dear
def test_a_program_changes_by_rounding_alone():
    draw = np.random.default_rng(0)
    x, w = (jnp.asarray(draw.normal(size=s), jnp.float32) for s in ((8, 16), (3, 16, 16)))
    args = (x, w / 4, jax.random.key(1), jnp.int32(2))
    closed = jax.make_jaxpr(everything)(*args)
    plain = jax.tree.leaves(jax.jit(everything)(*args))
    run = jax.jit(resummed(closed))
    first, again, other = (run(jnp.uint32(s), *args) for s in (1, 1, 2))
    for want, a, b, c in zip(plain, first, again, other, strict=True):
        assert np.array_equal(a, b)
        if np.issubdtype(want.dtype, np.integer):
            assert np.array_equal(want, c)
        else:
            error = np.linalg.norm(np.asarray(a - want)) / np.linalg.norm(np.asarray(want))
            assert 1e-9 < error < 1e-5
            assert want.ndim == 0 or not np.array_equal(a, c)


@pytest.mark.dear
def test_the_sums_inside_a_shard_map_move_as_well():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 64)), jnp.float32)
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    fn = jax.shard_map(lambda x: jax.lax.psum(x @ x.T, "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
    run = jax.jit(resummed(jax.make_jaxpr(fn)(x)))
    plain, moved = np.asarray(fn(x)), np.asarray(run(jnp.uint32(1), x)[0])
    assert 1e-9 < np.linalg.norm(moved - plain) / np.linalg.norm(plain) < 1e-5


def the_sum(fn, *shapes, dtype="float32"):
    args = [jax.ShapeDtypeStruct(s, dtype) for s in shapes]
    return next(e for e in jax.make_jaxpr(fn)(*args).jaxpr.eqns if e.primitive.name in ("dot_general", "reduce_sum"))


def test_how_far_depends_on_terms_and_types():
    product = the_sum(lambda a, b: a @ b, (4, 900), (900, 4))
    assert reach(product, Arithmetic()) == 15  # half the root of 900
    assert reach(product, Arithmetic(tf32=True)) == 2**12
    precise = the_sum(lambda a, b: jnp.matmul(a, b, precision="highest"), (4, 900), (900, 4))
    assert reach(precise, Arithmetic(tf32=True)) == 15
    assert reach(the_sum(lambda a, b: a @ b, (4, 900), (900, 4), dtype="bfloat16"), Arithmetic()) == 0.5
    narrow = the_sum(lambda a: lax.reduce(a, np.zeros((), a.dtype), lax.add, (0,)), (TERMS, 4), dtype="bfloat16")
    assert reach(narrow, Arithmetic()) == 0.5
    assert reach(narrow, Arithmetic(narrow=(("bfloat16", 16.0),))) == pytest.approx(16 / np.sqrt(2))
