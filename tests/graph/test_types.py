"""What stands for a value has its type: as weak as the program's, and laid out as the program's over explicit mesh axes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import fusionlab as fl

RNG = np.random.default_rng(0)


def array(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def lerp(x, y, w):
    return x + w * (y - x)


def norm(x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def linear(x, w, b):
    return jnp.tanh(x @ w + b)


def gated(x, w, v):
    return jax.nn.silu(x @ w) * (x @ v)


def attend(q, k, v):
    return jax.nn.softmax(q @ k.swapaxes(-1, -2) / 4, -1) @ v


def types(tree):
    return [str(jax.typeof(x)) for x in jax.tree.leaves(tree)]


def weak_one(*shape):
    """Weakly typed, as what is made of Python numbers alone."""
    return jnp.full(shape, 0.5)


WEAK = {
    "numbers": (lerp, (1.0, 2.0, 0.3), "lerp"),
    "one number": (lambda x: lerp(x, 2.0 * x, 0.3), (1.5,), "lerp"),
    "weak arrays": (lerp, (weak_one(3, 4), weak_one(3, 4), weak_one(4)), "lerp"),
    "a weak and a strong one": (lerp, (weak_one(3, 4), array(3, 4), weak_one(4)), "lerp"),
    "a norm": (norm, (weak_one(3, 8),), "layer_norm"),
    "a product": (linear, (weak_one(3, 8), weak_one(8, 4), weak_one(4)), "gemm_epilogue"),
    "a product with a strong bias": (linear, (weak_one(3, 8), weak_one(8, 4), array(4)), "gemm_epilogue"),
    "a gated product": (gated, (weak_one(3, 8), weak_one(8, 4), weak_one(8, 4)), "gemm_epilogue"),
    "an attention": (attend, (weak_one(2, 3, 8, 16),) * 3, "dot_product_attention"),
}


@pytest.mark.parametrize("name", WEAK)
def test_results_and_gradients_are_as_weak_as_the_programs(name):
    fn, args, pass_ = WEAK[name]
    assert fl.find(fn, *args, passes=pass_).counts()[pass_] == 1
    fused = fl.fuse(fn, passes=pass_)
    every = tuple(range(len(args)))

    def gradients(f):
        return jax.grad(lambda *a: f(*a).sum(), every)

    for run in (lambda f: f, jax.jit, lambda f: jax.jit(lambda *a: f(*a) * jnp.ones((), jnp.bfloat16))):
        assert types(run(fused)(*args)) == types(run(fn)(*args))
    assert types(gradients(fused)(*args)) == types(gradients(fn)(*args))
    assert types(fl.fuse(gradients(fn), passes=[pass_, f"{pass_}_grad"])(*args)) == types(gradients(fn)(*args))
    np.testing.assert_allclose(fused(*args), fn(*args), rtol=1e-5)


def test_numbers_give_way_to_bfloat16_once_fused():
    x = jnp.ones(3, jnp.bfloat16)
    assert (fl.fuse(lerp)(1.0, 2.0, 0.3) * x).dtype == jnp.bfloat16
    assert fl.fuse(lambda x: lerp(1.0, 2.0, x.sum() * 0 + 0.3) * x)(x).dtype == jnp.bfloat16


def test_the_carry_of_a_loop_stays_weak():
    def loop(x):
        return jax.lax.scan(lambda c, _: (lerp(c, 2.0 * c + 1.0, 0.3), c), x, None, length=3)

    assert fl.find(loop, 1.0).counts()["lerp"] == 1
    assert types(fl.fuse(loop)(1.0)) == types(loop(1.0))
    np.testing.assert_allclose(fl.fuse(loop)(1.0)[0], loop(1.0)[0], rtol=1e-5)


def test_a_pass_of_ones_own_gives_weak_results():
    pass_ = fl.pattern_pass("mine", lambda x: jnp.sin(jnp.exp(jnp.tanh(x)) - 1), axes={"x": "m"})
    fl.register(pass_)
    try:
        fn = lambda x: jnp.sin(jnp.exp(jnp.tanh(x)) - 1)  # noqa: E731
        x = weak_one(4)
        assert fl.find(fn, x, passes="mine").candidates
        assert types(fl.fuse(fn, passes="mine")(x)) == types(fn(x))
    finally:
        fl.unregister("mine")


def test_weak_numbers_of_64_bits():
    with jax.enable_x64(True):
        assert types(fl.fuse(lerp)(1.0, 2.0, 0.3)) == types(jax.jit(lerp)(1.0, 2.0, 0.3)) == ["~float64[]"]


def spread(x, *spec):
    return jax.device_put(x, P(*spec))


def placed():
    """name -> (function, arguments), over the mesh that is set."""
    x, w, b = array(8, 16), array(16, 32), array(32)
    rows = spread(x, "data", None)
    return {
        "rows": (linear, (rows, w, b)),
        "columns": (linear, (x, spread(w, None, "data"), spread(b, "data"))),
        "gathered": (lambda x: jnp.tanh(jnp.einsum("mk,kn->mn", x, w, out_sharding=P(None, None)) + b), (rows,)),
        "spread": (lambda x: jnp.tanh(jnp.einsum("mk,kn->mn", x, w, out_sharding=P(None, "data")) + b), (x,)),
        "norm": (norm, (rows,)),
        "gated": (gated, (rows, w, w)),
        "blend": (lerp, (rows, spread(x, "data", None), array(16))),
        "attention": (attend, tuple(spread(array(2, 4, 8, 16), None, "data") for _ in range(3))),
    }


@pytest.mark.parametrize("name", ["rows", "columns", "gathered", "spread", "norm", "gated", "blend", "attention"])
def test_results_and_gradients_are_laid_out_as_the_programs(name):
    with jax.set_mesh(jax.make_mesh((1,), ("data",))):
        fn, args = placed()[name]
        every = tuple(range(len(args)))
        was, now = (
            jax.jit(lambda *a, f=f: (f(*a), jax.grad(lambda *a: f(*a).sum(), every)(*a)))(*args)
            for f in (fn, fl.fuse(fn))
        )
    assert types(now) == types(was)
    for a, b in zip(jax.tree.leaves(was), jax.tree.leaves(now), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)
