"""Every implementation of group_norm on a CUDA device, against float64."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab.ops import group_norm
from tests.kernels.norm.group_norm_suite import CASES, LARGE, GroupNormSuite, turns

OFF = {"xla_gpu_enable_command_buffer": ""}


class TestCuda(GroupNormSuite):
    implementation = "cuda"
    turns = turns(CASES, every=("silu", "no activation", "odd channels", "320", "4096")) + turns(
        LARGE, every=("large", "large, odd", "large, wide")
    )

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("name", ["large", "large, odd", "large, wide"])
    def test_twice_is_the_same_to_the_bit_of_many_blocks(self, name, dtype):
        self.same_bits(LARGE[name], dtype)


class TestXla(GroupNormSuite):
    implementation = "xla"
    turns = turns(["plain", "silu", "float32 vectors", "odd channels", "no images"])
    repeatable = False


def chained(x, scale, bias, implementation):
    """Gradients through ten norms and what is added to them."""

    def loss(x, scale, bias):
        for _ in range(10):
            h = group_norm(x, scale, bias, groups=8, activation="silu", implementation=implementation)
            x = x + 0.1 * jnp.sin(h)  # few of its digits are lost on the way
        return jnp.cos(x).mean()

    return jax.grad(loss, (0, 1, 2))(x, scale, bias)


@pytest.mark.parametrize("options", [None, OFF], ids=["captured", "not captured"])
def test_a_chain_of_them_captured_and_not(options):
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((3, 20, 20, 64), (64,), (64,))]
    program = jax.jit(functools.partial(chained, implementation="cuda")).lower(*args).compile(compiler_options=options)
    right = jax.jit(functools.partial(chained, implementation="xla"))
    for i in range(3):  # other values at the same places: nothing is left of the run before
        moved = [a + 0.1 * i for a in args]
        for got, want in zip(program(*moved), right(*moved), strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-4 * float(jnp.abs(want).max()))
