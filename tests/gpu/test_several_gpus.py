"""Two GPUs or more: kernels of our own and cuBLASLt under a sharded jit and a shard_map."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import fusionlab as fl
from fusionlab import ops

M, K, N = 256, 128, 512


@pytest.fixture
def mesh():
    gpus = [d for d in jax.devices() if d.platform == "gpu"]
    if len(gpus) < 2:
        pytest.skip("needs two CUDA devices")
    return Mesh(np.array(gpus[:2]), ("d",), axis_types=(AxisType.Auto,))


@pytest.fixture
def operands():
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (M, K), (K, N), (N,), (M, N)
    return [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)]


def step(implementation):
    def loss(x, w, b, ct):
        y = ops.gemm_epilogue(x, w, b, activation="gelu_tanh", implementation=implementation)
        return (y.astype(jnp.float32) * ct).sum(), y

    return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)


SPECS = {
    "rows": (P("d", None), P(), P(), P("d", None)),
    "columns": (P(), P(None, "d"), P("d"), P(None, "d")),
    "inner": (P(None, "d"), P("d", None), P(), P()),
}


@pytest.mark.parametrize("implementation", ["cuda", "cublaslt"])
@pytest.mark.parametrize("split", list(SPECS))
def test_a_layer_split_over_two_gpus_equals_the_whole_one(mesh, operands, implementation, split):
    one = step("xla")(*operands)
    placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(operands, SPECS[split], strict=True)]
    program = jax.jit(step(implementation)).lower(*placed).compile()
    text = program.as_text()
    assert "fusionlab_" in text
    if split == "rows":
        assert "all-gather" not in text
    for got, want in zip(jax.tree.leaves(program(*placed)), jax.tree.leaves(one), strict=True):
        want = np.asarray(want, np.float64)
        error = np.abs(np.asarray(got, np.float64) - want).max()
        assert error <= 2e-2 * max(1, np.abs(want).max())


def test_in_a_shard_map_each_gpu_launches_its_own(mesh, operands):
    x, w, b, _ = operands

    def layer(x, w, b):
        return ops.gemm_epilogue(x, w, b, activation="relu", implementation="cuda")

    split = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=(P("d"), P(), P()), out_specs=P("d")))
    got, want = (np.asarray(f(x, w, b), np.float64) for f in (split, jax.jit(layer)))
    # XLA's product of half the rows may add in another order.
    np.testing.assert_allclose(got, want, rtol=2**-6, atol=2**-6)


def test_fuse_on_every_gpu_and_a_program_moved_between_them(mesh):
    fused = fl.fuse(lambda x, w, b: jax.nn.gelu(x @ w + b), implementation="cuda")
    x, w, b = (
        jnp.asarray(np.random.default_rng(i).normal(size=s), jnp.float32)
        for i, s in enumerate(((64, 32), (32, 128), (128,)))
    )
    found = []
    for device in mesh.devices:
        given = jax.device_put((x, w, b), device)
        out = fused(*given)
        assert out.devices() == {device}
        found.append(np.asarray(out))
    np.testing.assert_array_equal(found[0], found[1])
