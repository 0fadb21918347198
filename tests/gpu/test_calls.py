"""Train loops in bfloat16, exported programs, and the same bits every time, with our kernels on a CUDA device."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.kernels.launch.ffi_call import RECORDING_TARGET, TARGET
from tests.loops.loops import LOOPS, STEPS, batches
from tests.loops.test_loops import assert_as_near, in_float64, trained

pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")


@pytest.mark.parametrize("implementation", [None])
@pytest.mark.parametrize("name", ["nnx", "optax"])
def test_twenty_steps_in_bfloat16_train_as_the_original_does(name, implementation):
    loop = LOOPS[name](jnp.bfloat16)
    want, original, gone = trained(loop, loop.original, STEPS, jnp.bfloat16)
    found = fl.find(loop.original(), *loop.call(loop.start(), batches(jnp.bfloat16)[0]), passes=["gemm_epilogue"])
    # A kernel of ours has something to do where there is an activation.
    only = [c.id for c in found.candidates if implementation is None or c.attrs["activation"] != "none"]
    assert len(only) == (3 if implementation is None else 2)
    fused = fl.fuse(loop.original(), passes=["gemm_epilogue"], only=only, implementation=implementation)
    got, ours, gone_too = trained(loop, lambda: fused, STEPS, jnp.bfloat16)
    exact = in_float64(loop, STEPS, jnp.bfloat16)
    assert gone_too == gone
    np.testing.assert_allclose(got, want, rtol=2e-2)
    assert_as_near(loop.zero, ours, original, exact, rounding=8 * float(jnp.finfo(jnp.bfloat16).eps))


def layer(w, b, x):
    return jax.nn.relu(x @ w + b)


def operands():
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((64, 128), (128,), (32, 64))]


def test_an_exported_function_carries_the_kernels_and_the_loading_process_imports_fusionlab(tmp_path):
    fused = fl.fuse(layer, implementation="cuda")
    allowed = [jax.export.DisabledSafetyCheck.custom_call(target) for target in (TARGET, RECORDING_TARGET)]
    exported = jax.export.export(jax.jit(fused), disabled_checks=allowed)(*operands())
    assert any(f"custom_call @{target}" in exported.mlir_module() for target in (TARGET, RECORDING_TARGET))
    (tmp_path / "layer.bin").write_bytes(exported.serialize())
    program = """
import sys, numpy as np, jax
import fusionlab.kernels.launch.ffi_call
from tests.gpu.test_calls import operands, layer
with open(sys.argv[1], "rb") as file:
    exported = jax.export.deserialize(bytearray(file.read()))
got, want = exported.call(*operands()), layer(*operands())
np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), rtol=2e-2, atol=2e-2)
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "layer.bin")],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


# -- fl.Strategy(deterministic=True): every pass at once ------------------------------------------------------------------------

B, S, H, D, F = 4, 512, 8, 64, 1024
M = H * D
SHAPES = {"qkv": (M, 3 * M), "out": (M, M), "up": (M, F), "gate": (M, F), "down": (F, M), "scale": (M,), "bias": (F,)}


def drawn(dtype):
    rng = np.random.default_rng(0)
    arrays = {name: jnp.asarray(rng.normal(size=s) / np.sqrt(s[0]), dtype) for name, s in SHAPES.items()}
    arrays["experts"] = jnp.asarray(rng.normal(size=(4, M, M)) / np.sqrt(M), dtype)
    return arrays, jnp.asarray(rng.normal(size=(B, S, M)), dtype)


def norm(x, scale):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


def block(p, x):
    """A layer with a site of every pass by default."""
    q, k, v = (a.reshape(B, S, H, D).swapaxes(1, 2) for a in jnp.split(norm(x, p["scale"]) @ p["qkv"], 3, -1))
    scores = (q @ k.swapaxes(-1, -2)) * D**-0.5
    scores = jnp.where(jnp.tril(jnp.ones((S, S), bool)), scores, -jnp.inf)
    mixed = jax.nn.softmax(scores.astype(jnp.float32), -1).astype(x.dtype) @ v
    x = x + mixed.swapaxes(1, 2).reshape(x.shape) @ p["out"]
    h = norm(x, p["scale"])
    x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
    x = x + jax.nn.gelu(h @ p["up"] + p["bias"]) @ p["down"]
    rows = x.reshape(-1, M)
    x = x + jax.lax.ragged_dot(rows, p["experts"], jnp.asarray([100, 300, 0, B * S - 400])).reshape(x.shape)
    return h + p["scale"] * (x - h)


def block_loss(p, x):
    return (block(p, x).astype(jnp.float32) ** 2).mean()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "differentiated", [False, True], ids=["fused, then differentiated", "differentiated, then fused"]
)
def test_the_same_bits_a_hundred_times(differentiated, dtype):
    p, x = drawn(dtype)
    passes = fl.Strategy(deterministic=True)
    step = jax.value_and_grad(block_loss)
    run = jax.jit(
        fl.fuse(step, passes=passes) if differentiated else jax.value_and_grad(fl.fuse(block_loss, passes=passes))
    )
    counts = fl.find(step if differentiated else block_loss, p, x, passes=passes).counts()
    assert counts["dot_product_attention"] == (dtype == "bfloat16")  # in float32 it is left to XLA
    assert counts["layer_norm"] + counts["gemm_epilogue"] + counts.get("grouped_matmul", 0) >= 3
    first = [np.asarray(a) for a in jax.tree.leaves(run(p, x))]
    for _ in range(100):
        again = jax.tree.leaves(run(p, x))
        assert all(a.tobytes() == np.asarray(b).tobytes() for a, b in zip(first, again, strict=True))
    plain = jax.tree.leaves(jax.jit(step)(p, x))
    for a, b in zip(first, plain, strict=True):
        scale = float(jnp.abs(b.astype(jnp.float32)).max())
        np.testing.assert_allclose(a.astype(np.float32), np.asarray(b, np.float32), rtol=0, atol=4e-2 * scale)
