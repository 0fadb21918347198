"""Every implementation of lerp on a CUDA device, against float64; and what its kernels do there."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab.kernels.launch import ffi_call as launch
from fusionlab.ops import lerp
from tests.gpu.activity import activity
from tests.kernels.lerp.lerp_suite import CASES, LARGE, LerpSuite, beyond_32_bits, turns

OFF = {"xla_gpu_enable_command_buffer": ""}
BY_CUDA = functools.partial(lerp, implementation="cuda")


class TestCuda(LerpSuite):
    implementation = "cuda"
    turns = turns(CASES, every=("two sums", "sum over the middle", "w [1]", "rank 8", "1001", "7 x 33 x 1001")) + turns(
        LARGE, every=("large, two sums, odd", "large, sum over the middle", "large, images", "large, three sums")
    )

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("case", [c for c in LARGE if "sum" in c and "odd" not in c])
    def test_twice_is_the_same_to_the_bit_of_many_tiles(self, case, dtype):
        self.same_bits(LARGE[case], dtype)


class TestXla(LerpSuite):
    implementation = "xla"
    turns = turns(["alike", "two sums", "channels", "rank 8", "sums of nothing", "7 x 33 x 1001"])
    repeatable = False  # sums of several blocks are added in any order


def chained(op, x, y, w):
    """Gradients that meet at the ends of a chain of ten."""

    def loss(x, y, w):
        out = functools.reduce(lambda c, _: op(c, y, w), range(10), x)
        return jnp.cos(out).mean()

    return jax.grad(loss, (0, 1, 2))(x, y, w)


@pytest.mark.parametrize("options", [None, OFF], ids=["captured", "not captured"])
@pytest.mark.parametrize("case", ["large, alike", "large, sum over the middle", "large, two sums"])
def test_a_chain_of_them_captured_and_not(case, options):
    rng = np.random.default_rng(0)
    x, y, w = (jnp.asarray(rng.uniform(0, 1, s), jnp.float32) for s in LARGE[case])
    program = jax.jit(functools.partial(chained, BY_CUDA)).lower(x, y, w).compile(compiler_options=options)
    right = jax.jit(functools.partial(chained, lambda x, y, w: x + w * (y - x)))
    for i in range(3):  # other values at the same places: nothing is left of the run before
        found, want = program(x + i, y - i, w), right(x + i, y - i, w)
        for a, b in zip(found, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * float(jnp.abs(b).max()))


def test_what_is_captured_is_replayed_without_python():
    x, y, w = (jnp.ones(s, jnp.float32) for s in ((64, 1, 256), (64, 100, 256), (100, 1)))

    @jax.jit
    def looped(x, y, w):
        def step(c, _):
            dx, dy, dw = chained(BY_CUDA, *c)
            return (c[0] - dx, c[1] - dy, c[2] - dw), None

        return jax.lax.scan(step, (x, y, w), length=20)[0]

    # Results on the host alone: while they hold device memory, the next run's lie elsewhere, and XLA captures anew.
    first, _ = (jax.device_get(looped(x, y, w)) for _ in range(2))
    before = launch.counters()
    again = jax.device_get(looped(x, y, w))
    assert launch.counters() == before
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)


# Rows of 32,768 16-bit numbers: 32-bit numbers of elements would come round at the 131,072nd.
ROWS, COLUMNS = 131_072 + 512, 32_768


@pytest.mark.parametrize("what", ["forward", "sums", "no sums"])
def test_more_elements_than_32_bits_number(what):
    stats = jax.local_devices()[0].memory_stats()
    free, needed = stats["bytes_limit"] - stats["bytes_in_use"], 5 * ROWS * COLUMNS  # two such arrays, and half of one
    if free < needed:
        pytest.skip(f"needs {needed >> 30} GiB of GPU memory, {free >> 30} GiB are free")
    beyond_32_bits("cuda", what, ROWS, COLUMNS)


# Row 50.

TRACED = {
    "no broadcast": ((64, 1024), (64, 1024), (64, 1024)),
    "w [1]": ((64, 1024), (64, 1024), (1,)),
    "one sum": ((64, 1, 256), (64, 300, 256), (300, 1)),
    "two sums": ((129, 1, 512), (1, 130, 512), (1,)),
}


def forward_and_gradients(op, x, y, w, ct):
    out, pull = jax.vjp(op, x, y, w)
    return out, *pull(ct)


@pytest.mark.parametrize("case", TRACED)
def test_row_50_no_copies_and_no_waits_in_the_trace(case, tmp_path):
    rng = np.random.default_rng(0)
    shapes = TRACED[case]
    args = [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in (*shapes, np.broadcast_shapes(*shapes))]
    ops = {"cuda": BY_CUDA, "plain": lambda x, y, w: x + w * (y - x)}
    found, times = {}, 5
    for name, op in ops.items():
        # Outside of CUDA graphs each kernel has a name of its own in the trace.
        program = jax.jit(functools.partial(forward_and_gradients, op)).lower(*args).compile(compiler_options=OFF)
        found[name] = activity(functools.partial(program, *args), tmp_path / name, times)
        if name == "cuda":
            assert " copy(" not in program.as_text()
    mine, theirs = found["cuda"], found["plain"]
    assert mine.kernels, f"the trace shows no kernels on a device: {mine}"
    ours = {name: n for name, n in mine.kernels.items() if name.startswith("lerp_")}
    assert ours["lerp_forward"] == times, mine
    assert sum(ours.values()) == mine.kernels.total() >= 2 * times, mine
    assert not mine.copies, mine
    # The waits of whoever reads the results.
    assert mine.waits.total() <= theirs.waits.total(), (mine.waits, theirs.waits)
