"""The Mosaic kernels of grouped_matmul on a Hopper GPU, against float64: every tile, and groups of every kind."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab import ops
from fusionlab.device import Device
from fusionlab.kernels.ops.grouped_matmul import mosaic
from fusionlab.kernels.ops.grouped_matmul.op import GROUPED_MATMUL

pytestmark = pytest.mark.skipif(bool(mosaic.refuses_device(Device.current())), reason="the kernels are for sm_90")

# Sizes of the groups of some rows.
GROUPS = {
    "even": (256, [64, 64, 64, 64]),
    "across blocks": (512, [100, 0, 200, 212]),
    "fewer than the rows": (512, [100, 0, 200, 100]),
    "more than the rows": (304, [100, 150, 100, 7]),
    "one row each": (136, [1, 1, 1, 133]),
    "rows of no whole block": (344, [0, 301, 0, 43]),
    "none but one": (128, [0, 0, 128, 0]),
    "all empty": (128, [0, 0, 0, 0]),
}
# Multiples of each tile's columns and of nothing more; several and one.
SIZES = {"128 x 128": (128, 128), "64 x 192": (64, 192), "192 x 64": (192, 64), "256 x 384": (256, 384)}
TOLERANCE = {"bfloat16": 8e-3, "float16": 1e-3}


def operands(rows, groups, inner, columns, w_contract, dtype):
    rng = np.random.default_rng(0)
    shape = (groups, columns, inner) if w_contract else (groups, inner, columns)
    x, w, ct = (rng.normal(size=s) for s in ((rows, inner), shape, (rows, columns)))
    return tuple(jnp.asarray(a, dtype) for a in (x, w / np.sqrt(inner), ct))


def exact(x, w, ct, sizes, w_contract):
    """The product and both gradients, in float64."""
    x, w, ct = (np.asarray(a, np.float64) for a in (x, w, ct))
    turned = w.swapaxes(1, 2) if w_contract else w
    out, dx, dw = np.zeros(ct.shape), np.zeros(x.shape), np.zeros(turned.shape)
    start = 0  # rows beyond those that there are belong to no group
    for group, size in enumerate(sizes):
        mine, start = slice(start, start + size), start + size
        out[mine], dx[mine] = x[mine] @ turned[group], ct[mine] @ turned[group].T
        dw[group] = x[mine].T @ ct[mine]
    return out, dx, dw.swapaxes(1, 2) if w_contract else dw


@functools.partial(jax.jit, static_argnums=(0,))
def both_ways(f, x, w, ct, sizes):
    out, pull = jax.vjp(lambda x, w: f(x, w, sizes), x, w)
    return out, *pull(ct)


@pytest.mark.parametrize("dtype", mosaic.DTYPES)
@pytest.mark.parametrize("w_contract", [0, 1])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("rows_and_sizes", GROUPS.values(), ids=GROUPS)
def test_values_and_gradients(rows_and_sizes, size, w_contract, dtype):
    rows, sizes = rows_and_sizes
    given = operands(rows, len(sizes), *size, w_contract, dtype)
    f = functools.partial(ops.grouped_matmul, w_contract=w_contract, implementation="mosaic")
    got = both_ways(f, *given, jnp.asarray(sizes, jnp.int32))
    for a, b in zip(got, exact(*given, sizes, w_contract), strict=True):
        scale = max(np.abs(b).max(), 1e-6)
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=0, atol=TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("name", ["x", "ct"])
@pytest.mark.parametrize("row", [99, 100, 450])
def test_what_is_no_number_stays_in_its_group(name, row):
    rows, sizes = GROUPS["fewer than the rows"]
    x, w, ct = operands(rows, 4, 128, 128, 0, "bfloat16")
    x, ct = (a.at[row].set(jnp.nan) if name == n else a for n, a in (("x", x), ("ct", ct)))
    f = functools.partial(ops.grouped_matmul, implementation="mosaic")
    got = both_ways(f, x, w, ct, jnp.asarray(sizes, jnp.int32))
    want = both_ways(jax.lax.ragged_dot, x, w, ct, jnp.asarray(sizes, jnp.int32))
    for a, b in zip(got, want, strict=True):
        assert (jnp.isfinite(a) == jnp.isfinite(b)).all()


def test_a_program_that_is_differentiated_already_runs_by_the_kernels_a_hundred_times_alike():
    rows, sizes = GROUPS["across blocks"]
    x, w, ct = operands(rows, 4, 128, 256, 0, "bfloat16")
    sizes = jnp.asarray(sizes, jnp.int32)

    def gradients(x, w):
        def loss(x, w):
            return (jax.nn.silu(jax.lax.ragged_dot(x, w, sizes)).astype(jnp.float32) * ct).sum()

        return jax.value_and_grad(loss, (0, 1))(x, w)

    # Named: of few rows XLA's code is chosen.
    found = fl.find(gradients, x, w, implementation="mosaic")
    assert [(c.op, c.backend.name) for c in found.candidates] == [(GROUPED_MATMUL.name, "mosaic")] * 3
    run = jax.jit(fl.fuse(gradients, implementation="mosaic"))
    first = jax.tree.leaves(run(x, w))
    for a, b in zip(first, jax.tree.leaves(jax.jit(gradients)(x, w)), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2e-2, atol=2e-2 * float(jnp.abs(b).max())
        )
    for _ in range(100):
        assert all((a == b).all() for a, b in zip(first, jax.tree.leaves(run(x, w)), strict=True))
