"""The launch seam on a CUDA device: captured and not, threads, errors, another process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab.kernels.launch import ffi_call as launch
from fusionlab.kernels.launch import plans
from fusionlab.kernels.ops import clock
from fusionlab.kernels.ops.gemm_epilogue import cuda

OFF = {"xla_gpu_enable_command_buffer": ""}


@dataclass(frozen=True)
class Fails:
    kind = "test_gpu_fails"

    def spec(self):
        return {}

    def prepare(self, device):
        def run(stream, operands, results):
            raise ValueError("went wrong on purpose")

        return plans.Prepared(run)


plans.plan_kind(Fails.kind, lambda content: Fails())


def chain(count):
    def of(x):
        for _ in range(count):
            x = clock.step(x)
        return x

    return of


@pytest.mark.parametrize("options", [None, OFF], ids=["captured", "not captured"])
def test_a_chain_of_launches_counts_its_steps(options):
    x = jnp.arange(1000, dtype=jnp.float32)
    program = jax.jit(chain(20)).lower(x).compile(compiler_options=options)
    for i in range(5):
        np.testing.assert_array_equal(program(x + i), x + i + 20)


def test_what_is_captured_is_replayed_without_python():
    x = jnp.arange(1000, dtype=jnp.float32)
    looped = jax.jit(lambda x: jax.lax.scan(lambda c, _: (chain(10)(c), None), x, length=50)[0])
    calls = []  # of Python, run by run: XLA captures anew where its buffers have moved, as they may where memory is shared
    for _ in range(8):
        before = launch.counters()
        np.testing.assert_array_equal(looped(x), x + 500)
        calls.append(launch.counters() != before)
    assert not all(calls[2:])


@pytest.mark.parametrize("steps", [0, 10], ids=["alone", "captured"])
def test_what_a_plan_raises_reaches_the_caller_and_the_device_lives_on(steps):
    def program(x):
        x = chain(steps)(x)
        return launch.launch(Fails(), [x], [jax.ShapeDtypeStruct(x.shape, x.dtype)])[0]

    x = jnp.ones(8, jnp.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ValueError: went wrong on purpose"):
        jax.block_until_ready(jax.jit(program)(x))
    np.testing.assert_array_equal(jax.jit(chain(3))(x), x + 3)


def test_eight_threads_share_one_program_and_compile_others():
    h = jnp.asarray(np.random.default_rng(0).normal(size=(64, 256)), jnp.float32)
    shared = jax.jit(lambda h: cuda.activate(h, None, "gelu_tanh", "none")[0])

    def work(i):
        own = jax.jit(lambda h: cuda.activate(h * i, None, "relu", "none")[0])
        for _ in range(20):
            np.testing.assert_allclose(shared(h + i), jax.nn.gelu(h + i), rtol=1e-4, atol=1e-5)
            np.testing.assert_array_equal(own(h), np.maximum(np.asarray(h) * np.float32(i), 0))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(1, 9)))


def test_on_every_device_that_is_there():
    for device in jax.devices():
        if device.platform == "gpu":
            x = jax.device_put(jnp.arange(64, dtype=jnp.float32), device)
            out = jax.jit(chain(6))(x)
            assert out.devices() == {device}
            np.testing.assert_array_equal(out, np.arange(64) + 6)


PROGRAM = """
    import jax, jax.numpy as jnp, numpy as np, sys
    from fusionlab import ops
    hits = []
    jax.monitoring.register_event_listener(lambda name, **k: hits.append(name))
    x, w, b = (jnp.ones(s, jnp.bfloat16) for s in ((64, 32), (32, 128), (128,)))
    f = jax.jit(lambda *a: ops.gemm_epilogue(*a, activation="gelu_tanh", implementation=sys.argv[1]))
    out = np.asarray(f(x, w, b), np.float32)
    assert np.allclose(out, 33, rtol=1e-2), out
    print("hits", sum("cache_hits" in h for h in hits))
"""


@pytest.mark.parametrize("implementation", ["cuda", "cublaslt"])
def test_a_second_process_takes_the_program_from_jax_s_cache_and_has_its_kernels(tmp_path, implementation):
    env = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    code = textwrap.dedent(PROGRAM)
    runs = [
        subprocess.run(
            (sys.executable, "-c", code, implementation), env=env, capture_output=True, text=True, check=False
        )
        for _ in range(2)
    ]
    for done in runs:
        assert done.returncode == 0, done.stderr[-2000:]
    hits = [int(done.stdout.split()[-1]) for done in runs]
    assert hits[1] > hits[0]
