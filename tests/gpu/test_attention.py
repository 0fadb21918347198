"""Every implementation of dot_product_attention on a CUDA device, against float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab.ops import dot_product_attention
from tests.kernels.attention.attention_suite import CASES, AttentionSuite, Case
from tests.kernels.saturated import SaturatedSuite


class TestCuda(AttentionSuite):
    implementation = "cuda"
    skips = True
    least = 26


class TestCudaAsXlaRounds(AttentionSuite):
    """float32 by one TF32 product (10 bits of mantissa), as XLA has it unless told otherwise."""

    implementation = "cuda"
    skips = True
    precision = None
    slack = 1000.0
    least = 0

    def cases(self, dtype):
        return ("nothing", "causal", "dropout", "128 features") if dtype == "float32" else ()


class TestCudnn(AttentionSuite):
    implementation = "cudnn"
    skips = None
    least = 0  # float32 is none of its dtypes

    def test_it_holds_what_it_is_there_for(self):
        for name in ("nothing", "causal", "causal, few keys", "scale 1", "80 features", "128 features"):
            assert self.check(CASES[name], "bfloat16", name) == 1
        for name in ("key heads shared", "local, causal"):
            assert self.check(CASES[name], "bfloat16", name) == 1


class TestXla(AttentionSuite):
    implementation = "xla"
    slack = 2.0


class TestBlockwise(AttentionSuite):
    implementation = "xla_blockwise"
    skips = True
    slack = 2.0


class TestCudaSaturated(SaturatedSuite):
    implementation = "cuda"
    sizes = (2, 200, 4, 64)


class TestCudaSaturatedFewFeatures(SaturatedSuite):
    """A scale that is no power of two."""

    implementation = "cuda"
    sizes = (2, 64, 4, 32)


class TestXlaSaturated(SaturatedSuite):
    implementation = "xla"
    sizes = (2, 64, 4, 32)


class TestBlockwiseSaturated(SaturatedSuite):
    implementation = "xla_blockwise"
    sizes = (2, 64, 4, 32)


class TestCudnnSaturated(SaturatedSuite):
    """Which says of itself that it is off by a rounding of its result (`cudnn.PRECISION`): by no more than that."""

    implementation = "cudnn"
    sizes = (2, 64, 4, 32)
    reads_it_rounded = True


# SYSTEMS 2.4: what the fused attention of the pass was held to, here forward and all gradients, by every implementation that takes it.
SEED = {
    "fp16, nothing": ("float16", Case((8,), 128, 128, 12, d=64), 5e-4),
    "fp16, lengths": ("float16", Case((8,), 128, 128, 12, d=64, given=("lengths",)), 5e-4),
    "fp16, causal": ("float16", Case((8,), 128, 128, 12, d=64, attrs={"is_causal": True}), 1e-3),
    "bf16, nothing": ("bfloat16", Case((8,), 128, 128, 12, d=64, spread=0.02), 5e-3),
    "bf16, lengths": ("bfloat16", Case((8,), 128, 128, 12, d=64, given=("lengths",), spread=0.02), 5e-3),
    "bf16, causal": ("bfloat16", Case((8,), 128, 128, 12, d=64, attrs={"is_causal": True}, spread=0.02), 5e-3),
    "bf16, lengths, 1024": ("bfloat16", Case((2,), 1024, 1024, 4, d=64, given=("lengths",), spread=0.02), 5e-3),
    "bf16, lengths, 2048": ("bfloat16", Case((1,), 2048, 2048, 2, d=128, given=("lengths",), spread=0.02), 5e-3),
    "bf16, causal, 1024": ("bfloat16", Case((2,), 1024, 1024, 4, d=128, attrs={"is_causal": True}, spread=0.02), 5e-3),
    "bf16, half at random": ("bfloat16", Case((2,), 512, 512, 4, d=64, given=("random",), spread=0.02), 5e-3),
    "bf16, a hole": ("bfloat16", Case((2,), 512, 512, 4, d=64, given=("hole",), spread=0.02), 5e-3),
}


class _Seed(AttentionSuite):
    def __init__(self, implementation):
        self.implementation = implementation


@pytest.mark.parametrize("name", SEED)
@pytest.mark.parametrize("implementation", ["cuda", "cudnn"])
def test_the_sizes_that_the_seed_was_held_to(implementation, name):
    dtype, case, tolerance = SEED[name]
    # Absolute there; the suite's are relative to the largest entry, which is of order 1 in float16 and 0.02 in bfloat16.
    held = _Seed(implementation).check(
        case, dtype, name, tolerance=4 * tolerance if dtype == "float16" else 2 * tolerance
    )
    assert held or implementation == "cudnn"


@pytest.mark.parametrize("implementation", ["cuda", "cudnn"])
def test_twice_is_the_same_to_the_bit_where_that_is_promised(implementation):
    rng = np.random.default_rng(0)
    q, k, v, ct = (jnp.asarray(rng.standard_normal((2, 1000, 4, 64)), jnp.bfloat16) for _ in range(4))

    @jax.jit
    def run(q, k, v, ct):
        out, pull = jax.vjp(functools.partial(dot_product_attention, implementation=implementation), q, k, v)
        return out, *pull(ct)

    first = run(q, k, v, ct)
    for _ in range(5):
        for a, b in zip(first, run(q, k, v, ct), strict=True):
            if implementation == "cuda":
                np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
            else:  # cuDNN's backward adds in any order, unless XLA is asked for deterministic operations
                np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), 0.05, 0.05)


@pytest.mark.parametrize("implementation", ["cuda", "cudnn"])
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
def test_no_transpose_is_added_in_either_layout(implementation, layout):
    shape = (2, 512, 4, 64) if layout == "BTNH" else (2, 4, 512, 64)
    a = jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def step(q, k, v, ct):
        attend = functools.partial(dot_product_attention, layout=layout, implementation=implementation)
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(ct)

    text = jax.jit(step).lower(a, a, a, a).compile().as_text()
    copies = [line for line in text.splitlines() if " transpose(" in line or " copy(" in line]
    big = [line for line in copies if "bf16[2" in line]
    if implementation == "cudnn" and layout == "BTNH":
        return  # cuDNN itself chooses the layout of its gradients; the benchmark shows what that costs
    assert not big, big


@pytest.mark.parametrize("options", [{}, {"xla_gpu_graph_min_graph_size": 1}], ids=["launched", "in a graph"])
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
def test_gradients_of_hidden_keys_are_zero_whatever_the_memory_held(layout, options):
    """cuDNN may leave them unwritten, and XLA's zeros from before the call are not in its CUDA graphs."""
    rng = np.random.default_rng(0)
    q, k, v, ct = (jnp.asarray(rng.standard_normal((4, 256, 256, 64)), jnp.bfloat16) for _ in range(4))
    mask = (jnp.arange(256) < jnp.asarray([256, 31, 128, 200])[:, None])[:, None, None, :]

    def step(q, k, v, ct, mask):
        attend = functools.partial(dot_product_attention, mask=mask, layout=layout, implementation="cudnn")
        return jax.vjp(attend, q, k, v)[1](ct)

    compiled = jax.jit(step).lower(q, k, v, ct, mask).compile(compiler_options=options)
    for _ in range(3):
        held = [jnp.full((1 << 25,), jnp.nan, jnp.bfloat16).block_until_ready() for _ in range(16)]
        del held  # what is allocated next lies there
        for grad in compiled(q, k, v, ct, mask)[1:]:
            by_key = np.asarray(grad, np.float32).swapaxes(1, layout.index("T"))
            for row, length in zip(by_key, (256, 31, 128, 200), strict=True):
                assert not row[length:].any()
                assert np.isfinite(row).all()


def test_it_runs_in_a_scan_a_vmap_and_a_remat():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((3, 2, 65, 2, 32)), jnp.bfloat16) for _ in range(3))
    f = functools.partial(dot_product_attention, is_causal=True, implementation="cuda")
    r = functools.partial(dot_product_attention, is_causal=True, implementation="xla")

    def loss(f, wrap):
        def of(q, k, v):
            looped = jax.lax.scan(lambda c, x: (c + wrap(f)(*x).astype(jnp.float32).sum(), None), 0.0, (q, k, v))[0]
            return looped + jax.vmap(f)(q, k, v).astype(jnp.float32).sum()

        return jax.jit(jax.grad(of, (0, 1, 2)))

    want = loss(r, lambda f: f)(q, k, v)
    for wrap in (lambda f: f, jax.checkpoint):
        for got, right in zip(loss(f, wrap)(q, k, v), want, strict=True):
            got, right = np.asarray(got, np.float32), np.asarray(right, np.float32)
            assert np.abs(got - right).max() <= 2e-2 * np.abs(right).max()


@pytest.mark.parametrize("d", [64, 128])
def test_peak_memory_grows_with_the_length_not_with_its_square(d):
    shape = jax.ShapeDtypeStruct((1, 8192, 4, d), jnp.bfloat16)

    def scratch(implementation):
        def loss(*a):
            return dot_product_attention(*a, is_causal=True, implementation=implementation).astype(jnp.float32).sum()

        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, shape, shape).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    composite = scratch("xla")
    for implementation in ("cuda", "cudnn"):
        assert scratch(implementation) < composite / 8
