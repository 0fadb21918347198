"""Every implementation of layer_norm on a CUDA device, against float64; and the pass that folds in what is added before a norm."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.kernels.launch import ffi_call as launch
from fusionlab.ops import layer_norm, layer_norm_and_sum
from tests.kernels.norm.norm_suite import CASES, LARGE, NormSuite, turns

OFF = {"xla_gpu_enable_command_buffer": ""}


class TestCuda(NormSuite):
    implementation = "cuda"
    turns = turns(CASES, every=("everything", "everything and the sum", "7", "1023", "16392, two passes")) + turns(
        LARGE, every=("large", "large, the sum", "large, 12288", "large, 65535")
    )

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("name", ["large, the sum", "large, odd", "large, 12288"])
    def test_twice_is_the_same_to_the_bit_of_many_blocks(self, name, dtype):
        self.same_bits(LARGE[name], dtype)


class TestPallas:
    """Its forward; the gradients of a call that names it are the reference's."""

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    @pytest.mark.parametrize("kind", ["layer", "rms"])
    @pytest.mark.parametrize(
        "shape", [(3001, 1024), (4, 257, 4096), (41, 8192), (7, 128), (1280,), (129, 768)], ids=str
    )
    def test_rows_of_all_lengths(self, shape, kind, dtype):
        rng = np.random.default_rng(0)
        x, scale, bias = (jnp.asarray(rng.normal(size=s) + 0.5, dtype) for s in (shape, shape[-1:], shape[-1:]))
        bias = bias if kind == "layer" else None
        step = jax.jit(
            lambda *a, implementation: jax.vjp(
                functools.partial(layer_norm, kind=kind, implementation=implementation), *a
            )[0],
            static_argnames="implementation",
        )
        got = step(x, scale, bias, implementation="pallas")
        given = [None if a is None else a.astype(jnp.float32) for a in (x, scale, bias)]
        want = np.asarray(step(*given, implementation="xla"))
        tolerance = {"float32": 1e-5, "bfloat16": 8e-3, "float16": 1e-3}[dtype] * max(1.0, np.abs(want).max())
        np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=0, atol=tolerance)

    def test_it_is_taken_for_an_rms_norm_in_16_bits(self):
        x, scale = jnp.ones((4096, 768), jnp.bfloat16), jnp.ones(768, jnp.bfloat16)

        def norm(x, scale):
            wide = x.astype(jnp.float32)
            return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * scale

        (site,) = fl.find(norm, x, scale).candidates
        assert site.backend.name == "pallas"
        np.testing.assert_array_equal(jax.jit(fl.fuse(norm))(x, scale), jax.jit(norm)(x, scale))


class TestXla(NormSuite):
    implementation = "xla"
    turns = turns(["plain", "everything", "everything and the sum", "float32 vectors", "1023", "no rows"])
    repeatable = False


def chained(x, residual, scale, bias, implementation):
    """Gradients through ten layers of a residual stream."""

    def loss(x, residual, scale, bias):
        stream = x
        for i in range(10):
            out, stream = layer_norm_and_sum(
                jnp.sin(stream), scale, bias, residual=residual * (i + 1), implementation=implementation
            )
            stream = stream * 0.5 + out
        return jnp.cos(stream).mean()

    return jax.grad(loss, (0, 1, 2, 3))(x, residual, scale, bias)


@pytest.mark.parametrize("options", [None, OFF], ids=["captured", "not captured"])
def test_a_chain_of_them_captured_and_not(options):
    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((300, 520), (300, 520), (520,), (520,))]
    program = jax.jit(functools.partial(chained, implementation="cuda")).lower(*args).compile(compiler_options=options)
    right = jax.jit(functools.partial(chained, implementation="xla"))
    for i in range(3):  # other values at the same places: nothing is left of the run before
        moved = [a + 0.1 * i for a in args]
        for got, want in zip(program(*moved), right(*moved), strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-4 * float(jnp.abs(want).max()))


def test_what_is_captured_is_replayed_without_python():
    x, scale = jnp.ones((64, 256)), jnp.ones(256)

    @jax.jit
    def looped(x, scale):
        def step(c, _):
            for _ in range(6):
                c = layer_norm(c, scale, residual=x, implementation="cuda")
            return c, None

        return jax.lax.scan(step, x, length=20)[0]

    first, _ = (jax.device_get(looped(x, scale)) for _ in range(2))
    before = launch.counters()
    again = jax.device_get(looped(x, scale))
    assert launch.counters() == before
    np.testing.assert_array_equal(first, again)


def block(x, residual, w, scale, bias):
    h = x + residual
    wide = h.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    normed = ((wide - mean) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)).astype(h.dtype) * scale + bias
    return normed @ w


@pytest.mark.parametrize("both", [False, True], ids=["the norm", "the norm and the sum"])
def test_the_pass_folds_in_what_is_added_and_the_kernels_run(both):
    rng = np.random.default_rng(0)
    shapes = ((2048, 768), (2048, 768), (768, 64), (768,), (768,))
    args = [jnp.asarray(rng.standard_normal(s) * 0.5, jnp.bfloat16) for s in shapes]

    def model(x, residual, *rest):
        return block(x, residual, *rest), (x + residual if both else x)

    def loss(*args):
        return sum(jnp.square(a.astype(jnp.float32)).mean() for a in model(*args))

    found = fl.find(model, *args)
    (site,) = [c for c in found.candidates if c.pass_name == "layer_norm"]
    assert set(site.leaves) == {"x", "residual", "scale", "bias"}
    assert site.backend.name == "cuda"
    assert not site.idle
    step = jax.value_and_grad(loss, (0, 1, 2, 3, 4))
    programs = (
        step,
        fl.fuse(step),
        jax.value_and_grad(
            lambda *a: sum(jnp.square(o.astype(jnp.float32)).mean() for o in fl.fuse(model)(*a)), (0, 1, 2, 3, 4)
        ),
    )
    want, *others = (jax.jit(f)(*args) for f in programs)
    for got in others:
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            a, b = (np.asarray(v, np.float64) for v in (a, b))
            np.testing.assert_allclose(a, b, atol=0.03 * np.abs(b).max())
