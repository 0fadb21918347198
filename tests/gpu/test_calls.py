"""Train loops in bfloat16, and exported programs, with our kernels on a CUDA device."""

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
