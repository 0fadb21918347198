"""A program that computes wider than the fused op would, on purpose: the op runs as wide, or is declined with code `dtype`.

With 64-bit types on. Numbers alone are of 64 bits there until they meet an array, which makes no program a wider one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl

from ..checks import jit, normal

X, W, B = (a[0] for a in (normal((8, 64)), normal((64, 16), seed=1), normal((16,), seed=2)))
ATTENDED = tuple(0.01 * a + 17 for a in normal((1, 2, 8, 16), (1, 2, 8, 16))) + normal((1, 2, 8, 16), seed=3)
F64 = "float64"
ROWS = 0.01 * X + 10000


def statistics(x):
    c = x - x.mean(-1, keepdims=True, dtype=F64)
    return (c * jax.lax.rsqrt((c * c).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def variance_alone(x):
    """The rows less their mean in float32, their variance in float64."""
    c = x - x.mean(-1, keepdims=True)
    return c * jax.lax.rsqrt((c.astype(F64) ** 2).mean(-1, keepdims=True) + 1e-6).astype(x.dtype)


def squares(x):
    y = x.astype(F64)
    return (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def root_alone(x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True).astype(F64) + 1e-6).astype(x.dtype)


def statistics_by_numpy_numbers(x):
    """`np.float64` is no Python number: what it is multiplied with becomes float64."""
    m = (x * np.float64(1 / 64)).sum(-1, keepdims=True)
    return ((x - m) * jax.lax.rsqrt(((x - m) ** 2).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def scores(q, k, v):
    s = jnp.einsum("bhtd,bhsd->bhts", q, k, preferred_element_type=F64) / 4
    return jax.nn.softmax(s, -1).astype(v.dtype) @ v


def softmax_alone(q, k, v):
    s = q @ k.swapaxes(-1, -2) / 4
    return jax.nn.softmax(s.astype(F64), -1).astype(v.dtype) @ v


def scores_by_a_root_of_numpy(q, k, v):
    s = q @ k.swapaxes(-1, -2) / np.sqrt(16.0)
    return jax.nn.softmax(s, -1).astype(v.dtype) @ v


def masked_in_float64(q, k, v):
    s = jnp.einsum("bhtd,bhsd->bhts", q, k, preferred_element_type=F64) / 4
    s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf)
    return jax.nn.softmax(s, -1).astype(v.dtype) @ v


def linear(x):
    h = jnp.matmul(x, W.astype(x.dtype), preferred_element_type=F64) + B.astype(x.dtype)
    return jax.nn.gelu(h).astype(x.dtype)


def activation_alone(x):
    return jax.nn.gelu((x @ W.astype(x.dtype) + B.astype(x.dtype)).astype(F64)).astype(x.dtype)


def gated(x):
    up = jnp.matmul(x, W.astype(x.dtype), preferred_element_type=F64)
    return (jax.nn.silu(jnp.matmul(x, W.astype(x.dtype), preferred_element_type=F64)) * up).astype(x.dtype)


def blend(x, y, w):
    x, y, w = (a.astype(F64) for a in (x, y, w))
    return (x + w * (y - x)).astype("float32")


CASES = {
    "statistics": (statistics, (ROWS,)),
    "variance alone": (variance_alone, (1e18 * X,)),
    "squares beyond float32": (squares, (1e20 * X,)),
    "root alone": (root_alone, (X,)),
    "numbers of numpy": (statistics_by_numpy_numbers, (ROWS,)),
    "scores": (scores, ATTENDED),
    "softmax alone": (softmax_alone, ATTENDED),
    "a root of numpy": (scores_by_a_root_of_numpy, ATTENDED),
    "masked scores": (masked_in_float64, ATTENDED),
    "linear": (linear, (1e4 * X,)),
    "activation alone": (activation_alone, (X,)),
    "gated": (gated, (X,)),
    "blend": (blend, (1e3 + X, 1e3 - X, X)),
}


def both(fn, args):
    """The value and the gradients of a sum of squares, in one list."""

    def loss(*args):
        return (fn(*args).astype(F64) ** 2).sum()

    return [fn(*args), *jax.grad(loss, tuple(range(len(args))))(*args)]


@pytest.mark.parametrize("name", CASES)
def test_what_is_computed_wider_is_as_precise_once_fused(name):
    fn, args = CASES[name]
    with jax.enable_x64(True):
        true = both(fn, [a.astype(F64) for a in args])
        was, now = (jit(lambda *a, f=f: both(f, a))(*args) for f in (fn, fl.fuse(fn)))
        found = jit(fl.fuse(lambda *a: both(fn, a)))(*args)  # differentiated before it is fused
    for t, a, *got in zip(true, was, now, found, strict=True):
        t, a, *got = (np.asarray(x, np.float64) for x in (t, a, *got))
        error = np.max(np.abs(a - t))
        for b in got:
            assert np.max(np.abs(b - t)) <= 1.5 * error + 1e-6 * np.max(np.abs(t))


@pytest.mark.parametrize("name", ["variance alone", "root alone", "scores", "softmax alone", "masked scores"])
def test_what_no_fused_op_computes_so_wide_is_declined_by_name(name):
    fn, args = CASES[name]
    with jax.enable_x64(True):
        found = fl.find(fn, *args)
        differentiated = fl.find(jax.grad(lambda *a: fn(*a).sum()), *args)
    assert not found.candidates
    assert not differentiated.candidates
    (reason,) = found.rejections
    assert reason.code == "dtype"
    assert "computes in float64 inside the site; the fused op computes in float32" in str(reason)


@pytest.mark.parametrize("name", ["statistics", "squares beyond float32", "blend"])
def test_an_op_that_takes_float64_runs_in_it_and_the_cast_stays_behind_it(name):
    fn, args = CASES[name]
    with jax.enable_x64(True):
        (site,) = fl.find(fn, *args).candidates
    assert site.root.dtype == np.float64


def scaled(q, k, v, scale):
    return jax.nn.softmax(q @ k.swapaxes(-1, -2) * scale, -1) @ v


NARROW = {
    "a root of an int": (lambda q, k, v: scaled(q, k, v, 1 / jnp.sqrt(q.shape[-1])), ATTENDED),
    "a Python number": (lambda q, k, v: scaled(q, k, v, 0.25), ATTENDED),
    "a constant mask": (lambda q, k, v: scaled(q, k, v, 0.25) * 1.0, ATTENDED),
    "a norm": (lambda x: x / jnp.sqrt((x * x).sum(-1, keepdims=True) / x.shape[-1] + 1e-6), (X,)),
    "a number for w": (lambda x, y: x + 0.3 * (y - x), (X, X + 1)),
    "a traced number for w": (lambda x, y, w: x + w * (y - x), (X, X + 1, 0.3)),
}


@pytest.mark.parametrize("name", NARROW)
def test_numbers_of_64_bits_make_no_program_a_wider_one(name):
    fn, args = NARROW[name]
    with jax.enable_x64(True):
        found = fl.find(fn, *args)
    assert len(found.candidates) == 1
    assert found.candidates[0].root.dtype == np.float32


def test_a_layer_with_a_wider_sum_or_a_wider_part_is_none():
    width = 16
    made = (0.2 * a for a in normal(*[(width, width)] * 4, (width, 32), (32, width), seed=5))
    p: dict[str, jax.Array] = dict(zip(("q", "k", "v", "o", "up", "down"), made, strict=True))
    passes = "multi_transformer_encoder"

    def layer(x, wide_sum, wide_norm):
        def rms(x):
            y = x.astype(F64) if wide_norm else x
            return (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)

        h = rms(x)
        q, k, v = ((h @ p[n]).reshape(2, 6, 2, 8).swapaxes(1, 2) for n in "qkv")
        a = scaled(q, k, v, 8**-0.5).swapaxes(1, 2).reshape(x.shape) @ p["o"]
        y = (x.astype(F64) + a.astype(F64)).astype(x.dtype) if wide_sum else x + a
        return y + jax.nn.gelu(rms(y) @ p["up"]) @ p["down"]

    (x,) = normal((2, 6, width))
    with jax.enable_x64(True):
        for wide in ((False, False), (True, False), (False, True)):
            found = fl.find(lambda x, wide=wide: layer(x, *wide), x, passes=passes)
            assert len(found.candidates) == (0 if any(wide) else 1), wide


@pytest.fixture
def own():
    """A pass whose meaning computes in the dtype that it is given."""
    fl.register(fl.pattern_pass("narrow_one", lambda x: jnp.sin(jnp.exp(jnp.tanh(x)) - 1), axes={"x": "m"}))
    yield "narrow_one"
    fl.unregister("narrow_one")


@pytest.mark.parametrize(("dtype", "wide"), [("float32", F64), ("bfloat16", "float32"), ("float16", "float32")])
def test_a_pass_of_ones_own_is_as_wide_as_its_meaning(own, dtype, wide):
    x = X[0].astype(dtype)

    def late(x):  # no cast stands at either end, behind which the op could run wider
        y = jnp.exp(jnp.tanh(x).astype(wide)) - 1
        return jnp.sin(y.astype(x.dtype))

    with jax.enable_x64(True):
        (reason,) = fl.find(late, x, passes=own).rejections
        assert reason.code == "dtype"
        assert f"computes in {wide} inside the site" in str(reason)
        assert fl.find(lambda x: jnp.sin(jnp.exp(jnp.tanh(x)) - 1), x, passes=own).candidates
