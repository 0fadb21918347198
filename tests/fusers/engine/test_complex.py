"""Programs of complex numbers: searched without an error, and unchanged where nothing of theirs is a site."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.graph.program.literals import scalar_result

RNG = np.random.default_rng(0)
Z = jnp.asarray(RNG.normal(size=(4, 6)) + 1j * RNG.normal(size=(4, 6)), "complex64")
X, W, B = (jnp.asarray(RNG.normal(size=s), "float32") for s in ((4, 6), (6, 6), (6,)))


def two(z):
    """A real literal, made complex."""
    return jnp.float32(2).astype(z.dtype)


PROGRAMS = {
    "zeros": lambda z: z + jnp.zeros(6).astype(z.dtype),
    "factors": lambda z: z * jnp.full(6, 2.0).astype(z.dtype),
    "positions": lambda z: z + jnp.arange(6).astype(z.dtype) + jnp.int32(3).astype(z.dtype),
    "a truth": lambda z: z * jnp.bool_(True).astype(z.dtype),
    "a power": lambda z: z ** two(z),
    "an exponential": lambda z: z * jnp.exp(two(z) * 1j),
    "a size": lambda z: abs(z) * abs(two(z) * 1j),
    "a part": lambda z: jnp.real(two(z)) * X,
    "a conjugate": lambda z: z * jnp.conj(two(z)),
    "a choice": lambda z: jnp.where(jnp.real(z) > 0, z, two(z)),
    "a test": lambda z: jnp.where(two(z) == 2, z, 0),
    "a maximum": lambda z: z * jnp.max(jnp.full(6, 2.0).astype(z.dtype)),
    "a sum": lambda z: z * jnp.full((4, 6), 2.0).astype(z.dtype).sum(-1, keepdims=True),
    "a transform": lambda z: jnp.fft.ifft(jnp.fft.fft(z) * two(z)),
    "a norm": lambda z: z / jnp.sqrt(jnp.mean(jnp.abs(z) ** 2, -1, keepdims=True) + 1e-6) * two(z),
    "scores": lambda z: jax.nn.softmax(jnp.abs(z @ z.T.conj()) / two(z).real) @ X,
    "a scan": lambda z: jax.lax.scan(lambda c, _: (c * two(z), None), z, length=3)[0],
    "a checkpoint": lambda z: jax.checkpoint(lambda z, c: jnp.abs(z * c.astype(z.dtype)))(z, jnp.float32(2.0)),
    "a product": lambda z: jax.nn.relu(jnp.real(z @ (W.astype(z.dtype) * 2) + B.astype(z.dtype))),
    "a blend": lambda z: z + jnp.float32(0.3).astype(z.dtype) * (z.conj() - z),
}


def same(fn):
    np.testing.assert_allclose(fl.fuse(fn)(Z), jax.jit(fn)(Z), rtol=1e-5, atol=1e-5)


@pytest.mark.whole
@pytest.mark.parametrize("name", ["zeros", "a size", "scores"])
def test_a_real_literal_made_complex_is_no_error(name):
    assert not fl.find(PROGRAMS[name], Z).candidates
    same(PROGRAMS[name])


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_of_complex_numbers_are_as_they_were_with_their_gradients(name):
    fn = PROGRAMS[name]
    found = fl.find(fn, Z)
    assert found.report()
    assert isinstance(found.structures, tuple)
    same(fn)
    same(jax.grad(lambda z: jnp.abs(fn(z)).sum()))


@pytest.mark.whole
def test_what_is_real_behind_complex_numbers_is_found():
    fn = lambda z: jax.nn.gelu(jnp.real(z * two(z)) @ W + B)  # noqa: E731
    assert fl.find(fn, Z).counts()["gemm_epilogue"] == 1
    same(fn)


def test_no_arithmetic_on_complex_literals_is_known():
    assert scalar_result("convert_element_type", {}, [(2.0, np.dtype("float32"))], np.dtype("complex64")) is None
    assert scalar_result("abs", {}, [(2j, np.dtype("complex64"))], np.dtype("float32")) is None
    assert scalar_result("add", {}, [(2.0, np.dtype("float32"))] * 2, np.dtype("float32")) == 4
