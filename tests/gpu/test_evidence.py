"""What is measured beside the time, on a real GPU: kernels, cold caches, clocks, the memory's peak."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab.evidence import time_pair
from fusionlab.evidence.instruments.clocks import read_clocks
from fusionlab.evidence.kernel_times import kernel_times
from fusionlab.graph.xla.hlo_text import kernel_counts
from fusionlab.models import transformer


@pytest.fixture(scope="module")
def block():
    params = transformer.init_block(jax.random.key(0), 512)
    x = transformer.inputs(jax.random.key(1), 4, 512, 512)
    return jax.tree.map(lambda a: a.astype(jnp.bfloat16), (params, x))


def test_the_kernels_of_a_program_sum_to_about_its_device_time(block):
    found = kernel_times(transformer.block, *block, runs=8)
    assert found.source.startswith("CUPTI durations")
    assert all(len(k.samples_s) == 8 for k in found.kernels)
    assert all(k.launches == int(k.launches) for k in found.kernels)
    assert any(k.hlo for k in found.kernels)
    whole = time_pair(transformer.block, transformer.block, *block, samples=10).before.median_s
    assert 0.3 * whole < found.sum_s < 1.5 * whole  # other tests may be using the GPU


def test_kernels_of_our_own_are_among_those_of_a_fused_program():
    def layer(x, w, b):
        return jax.nn.gelu(x @ w + b)

    args = [
        jax.random.normal(jax.random.key(i), s, jnp.bfloat16) for i, s in enumerate([(512, 512), (512, 512), (512,)])
    ]
    names = [k.name for k in kernel_times(fl.fuse(layer, implementation="cuda"), *args, runs=4).kernels]
    assert "epilogue_forward" in names


def test_the_time_of_scopes_adds_up_to_the_run_before_and_after_fusing(block):
    times = fl.time_by_scope(fl.fuse(transformer.block), *block)
    for part, version in (("self_s", times.before), ("fused_self_s", times.after)):
        assert sum(getattr(row, part) for row in times.rows) == pytest.approx(version.whole_s)
        placed = sum(version.seconds.values())
        assert placed > 0.9 * (placed + version.unplaced_s)
        assert placed + version.unplaced_s < 1.2 * version.kernels.sum_s
        assert 0 < version.run.busy_s < version.run.whole_s


def test_what_xla_fused_is_known_and_the_numbers_change_no_kernel(block):
    found = fl.find(transformer.block, *block)
    made = found.xla()
    plain = jax.jit(transformer.block).lower(*block).compile().as_text()
    assert made.counts == kernel_counts(plain)
    assert made.launches > 10
    known = [k for k in made.kernels if k.nodes and k.sources]
    assert len(known) >= 0.95 * len(made.kernels)
    assert "custom" in found.xla(fused=True).counts


def test_what_fits_in_the_cache_takes_longer_where_that_is_flushed():
    x = jax.random.normal(jax.random.key(0), (2048, 2048))  # 16 MiB

    def double(x):
        return x * 2

    warm, cold = (time_pair(double, double, x, samples=20, cold=c).before for c in (False, True))
    assert (warm.cold, cold.cold) == (False, True)
    assert cold.median_s > 1.1 * warm.median_s


def test_clocks_are_read_or_said_not_to_be():
    found = read_clocks("gpu")
    assert found.processor_mhz is None or 100 < found.processor_mhz < 5000
    assert found.power_w is None or 10 < found.power_w < 2000


PEAK = """
import jax, jax.numpy as jnp, fusionlab as fl

q = jax.random.normal(jax.random.key(0), (1, 4096, 8, 64), jnp.bfloat16)

def attend(q):
    return jax.nn.dot_product_attention(q, q, q)

found = fl.compare(attend, fl.fuse(attend, implementation="cuda"), q, timing=False, numerics=False, grad=False)
before, after = found.memory.device_peak
print(before, after)
assert before - after > 200 << 20, (before, after)  # the scores: 8 x 4096 x 4096, two bytes each
"""


def test_the_peak_of_the_memory_is_that_of_the_device():
    # Choosing among kernels at compile time takes memory of its own, above which a run does not show.
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": "--xla_gpu_autotune_level=0"}
    done = subprocess.run([sys.executable, "-c", PEAK], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_options_of_the_compiler_are_tried_with_the_same_results():
    def loss(w, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].astype(jnp.float32) ** 2)

    w, x = (jax.random.normal(jax.random.key(i), s, jnp.bfloat16) / 16 for i, s in enumerate([(4, 256, 256)] * 2))
    found = fl.advise(fl.fuse(jax.value_and_grad(loss)), w, x[0], samples=4, budget_s=5.0)
    tried = {t.lint.rule: t for t in found.tried}
    assert {"xla_gpu_enable_triton_gemm", "xla_gpu_graph_min_graph_size"} <= set(tried)
    assert not any(t.differing for t in found.tried)
    assert all(t.timing.verdict is not None for t in found.tried)
