"""Pass gemm_epilogue on what people write around 16 bits: products of bfloat16 whose bias and activation are computed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fusionlab as fl
from fusionlab.errors import ArgumentError
from fusionlab.kernels.ops.gemm_epilogue.op import GEMM_EPILOGUE

from ..checks import agree, close, differentiated, floats, jit, normal, weighed

BF16, F32 = jnp.bfloat16, jnp.float32
X, W, B = (a.astype(BF16) for a in normal((6, 16), (16, 12), (12,)))
ACTS = {"silu": jax.nn.silu, "gelu_tanh": jax.nn.gelu, "relu": jax.nn.relu, "sigmoid": jax.nn.sigmoid}


def wide(a):
    return a.astype(F32)


def preferred(x, w):
    return jnp.matmul(x, w, preferred_element_type=F32)


# name -> (program of x, w, b and the activation, the op's attributes `wide` and `out`)
SPELLINGS = {
    "the product widened": (lambda x, w, b, act: act(wide(x @ w)).astype(BF16), ("epilogue", None)),
    "a bias before": (lambda x, w, b, act: act(wide(x @ w + b)).astype(BF16), ("epilogue", None)),
    "a bias behind": (lambda x, w, b, act: act(wide(x @ w) + wide(b)).astype(BF16), ("epilogue", None)),
    "a sum that is kept": (lambda x, w, b, act: act(preferred(x, w) + wide(b)).astype(BF16), ("product", None)),
    "a sum that is kept, without a bias": (lambda x, w, b, act: act(preferred(x, w)).astype(BF16), ("product", None)),
    "operands widened": (lambda x, w, b, act: act(wide(x) @ wide(w) + wide(b)).astype(BF16), ("product", None)),
    "rounded before the bias": (
        lambda x, w, b, act: act(wide(preferred(x, w).astype(BF16) + b)).astype(BF16),
        ("epilogue", None),
    ),
    "a result that is kept": (lambda x, w, b, act: act(wide(x @ w + b)), ("epilogue", "float32")),
    "sum and result are kept": (lambda x, w, b, act: act(preferred(x, w) + wide(b)), ("product", "float32")),
    "rounded in another shape": (
        lambda x, w, b, act: act(wide(x @ w)).reshape(3, 2, 12).astype(BF16),
        ("epilogue", None),
    ),
}


def site_of(fn, *args):
    found = agree(fn, *args, passes="gemm_epilogue", factor=2)
    assert not found.rejections, found.rejections
    (site,) = found.candidates
    return site


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("name", SPELLINGS)
def test_what_is_computed_in_float32_behind_a_16_bit_product_is_fused_with_it(name, act):
    fn, (start, out) = SPELLINGS[name]
    site = site_of(lambda x, w, b: fn(x, w, b, ACTS[act]), X, W, B)
    assert (site.attrs["activation"], site.attrs.get("wide"), site.attrs.get("out")) == (act, start, out)
    assert {str(v.dtype) for v in site.leaves.values()} == {"bfloat16"}


@pytest.mark.parametrize("name", SPELLINGS)
def test_its_numbers_are_as_near_to_float64_as_the_programs(name):
    """Over many draws, in values and gradients: the fused form's mean error is at most a tenth above the original's."""
    fn, _ = SPELLINGS[name]
    program = lambda x, w, b: fn(x, w, b, jax.nn.gelu)  # noqa: E731
    fused = fl.fuse(program, passes="gemm_epilogue")
    both = [jit(lambda *a, f=f: (f(*a), *jax.grad(weighed(f), (0, 1, 2))(*a))) for f in (program, fused)]
    with jax.enable_x64(True):
        exact = jax.jit(lambda *a: (doubled(*a), *jax.grad(weighed64(doubled), (0, 1, 2))(*a)))
    biased = "bias" in name or name not in ("the product widened", "rounded in another shape")
    biased = biased and "without" not in name

    def doubled(x, w, b):
        out = jax.nn.gelu(x @ w + b if biased else x @ w)
        return out.reshape(3, 2, 12) if "shape" in name else out

    errors = np.zeros((2, 4))
    for seed in range(12):
        args = [a.astype(BF16) for a in normal((6, 16), (16, 12), (12,), seed=seed)]
        with jax.enable_x64(True):
            want = [np.asarray(a) for a in exact(*(jnp.asarray(np.asarray(a, np.float64)) for a in args))]
        for i, run in enumerate(both):
            got = [np.asarray(a, np.float64) for a in run(*args)]
            errors[i] += [np.abs(g - w).mean() for g, w in zip(got, want, strict=True)]
    assert (errors[1] <= 1.1 * errors[0] + 1e-12).all(), errors


def weighed64(fn):
    """As `weighed`, in float64."""

    def loss(*args):
        leaf = fn(*args)
        weight = jnp.cos(jnp.arange(leaf.size, dtype=F32)).reshape(leaf.shape) + F32(0.5)
        return (leaf * weight).sum()

    return loss


@pytest.mark.parametrize("name", SPELLINGS)
def test_differentiated_scanned_and_mapped_it_is_found_and_right(name):
    fn, _ = SPELLINGS[name]
    program = lambda x, w, b: fn(x, w, b, jax.nn.silu)  # noqa: E731
    ws, bs, xs = (a.astype(BF16) for a in normal((3, 16, 12), (3, 12), (2, 6, 16), seed=3))

    def scanned(x, ws, bs):
        return jax.lax.scan(lambda total, p: (total + wide(program(x, *p)).sum(), None), F32(0), (ws, bs))[0]

    def mapped(xs, w, b):
        return jax.vmap(lambda x: program(x, w, b))(xs)

    for fn_, args in ((scanned, (X, ws, bs)), (mapped, (xs, W, B))):
        assert len(agree(fn_, *args, passes="gemm_epilogue", factor=2).candidates) == 1
    step = jax.value_and_grad(weighed(program), floats((X, W, B)))
    found = fl.find(step, X, W, B, passes="gemm_epilogue")
    assert [c.attrs["activation"] for c in found.candidates] == ["silu"], found.rejections
    got, want = (jit(f)(X, W, B) for f in (fl.fuse(step, passes="gemm_epilogue"), step))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(g, np.float64), np.asarray(w, np.float64), rtol=0.03, atol=0.06)


NEAR = {
    "a bias that has float32's digits": (
        lambda x, w, b: jax.nn.silu(wide(x @ w) + b).astype(BF16),
        (X, W, wide(B)),
        "dtype",
    ),
    "a sum of float16 that is kept": (
        lambda x, w, b: jax.nn.silu(preferred(x, w)).astype(jnp.float16),
        tuple(a.astype(jnp.float16) for a in (X, W, B)),
        "dtype",
    ),
    "rounded to fewer bits between": (
        lambda x, w, b: jax.nn.silu((x @ w).astype(BF16)).astype(F32),
        (wide(X), wide(W), wide(B)),
        None,
    ),
    "highest precision of widened operands": (
        lambda x, w, b: jax.nn.silu(jnp.matmul(wide(x), wide(w), precision="highest")).astype(BF16),
        (X, W, B),
        None,
    ),
    "widened twice, to float32 and back": (
        lambda x, w, b: jax.nn.silu(wide(wide(x @ w).astype(jnp.float16))).astype(BF16),
        (X, W, B),
        None,
    ),
}


@pytest.mark.parametrize("name", NEAR)
def test_near_misses_are_declined(name):
    fn, args, code = NEAR[name]
    found = fl.find(fn, *args, passes="gemm_epilogue")
    wide_sites = [c for c in found.candidates if c.attrs.get("wide")]
    assert not wide_sites
    assert code is None or code in [r.code for r in found.rejections], found.rejections


def test_float32_products_of_float32_are_what_they_were():
    site = site_of(lambda x, w, b: jax.nn.silu(x @ w + b), *map(wide, (X, W, B)))
    assert "wide" not in site.attrs


def test_the_op_says_which_operands_it_takes_so():
    x, w, _ = map(wide, (X, W, B))
    for given, attrs in (((x, w), {"wide": "product"}), ((X, W), {"out": "float32"}), ((X, W), {"wide": "all"})):
        with pytest.raises(ArgumentError, match=r"16 bits|needed None"):
            GEMM_EPILOGUE.call(*given, None, **attrs)


@pytest.mark.parametrize("out", [None, "float32"])
@pytest.mark.parametrize("start", ["product", "epilogue"])
def test_the_ops_own_derivatives_are_those_of_its_meaning(start, out):
    def meaning(x, w, b):
        h = preferred(x, w) if start == "product" else wide(x @ w)
        return jax.nn.gelu(h + wide(b)).astype(out or BF16)

    def op(x, w, b):
        return GEMM_EPILOGUE.call(x, w, b, activation="gelu_tanh", wide=start, out=out)

    moved = [a.astype(BF16) for a in normal(X.shape, W.shape, B.shape, seed=5)]
    for fn in (lambda f: jax.jvp(f, (X, W, B), tuple(moved)), lambda f: jax.grad(weighed(f), (0, 1, 2))(X, W, B)):
        for g, v in zip(jax.tree.leaves(fn(op)), jax.tree.leaves(fn(meaning)), strict=True):
            assert g.dtype == v.dtype
            np.testing.assert_allclose(np.asarray(g, np.float64), np.asarray(v, np.float64), rtol=0.02, atol=0.05)
    only_bias = jax.grad(lambda b: wide(op(X, W, b)).sum())(B)
    np.testing.assert_allclose(wide(only_bias), wide(jax.grad(lambda b: wide(meaning(X, W, b)).sum())(B)), rtol=0.02)


# -- a product in float32, of which one operand has 16 bits ------------------------------------------------------------


MIXED = {
    "the weight": (X.astype(F32), W, B.astype(F32)),
    "weight and bias": (X.astype(F32), W, B),
    "x": (X, W.astype(F32), B.astype(F32)),
    "the bias": (X.astype(F32), W.astype(F32), B),
}


MADE = {
    "a multiple": lambda b: 2.5 * b,
    "the other sign": lambda b: -b,
    "a share": lambda b: b / 3,
    "a function": lambda b: jnp.tanh(b),
    "a sum": lambda b: b + b[::-1],
}


@pytest.mark.parametrize("name", MADE)
def test_a_bias_that_is_made_in_float32_of_one_of_16_bits_makes_a_product_of_float32(name):
    def program(x, w, b):
        return jax.nn.silu(x.astype(F32) @ w.astype(F32) + MADE[name](b.astype(F32))).astype(x.dtype)

    site = site_of(program, X, W, B)
    assert (site.root.dtype, site.leaves["b"].dtype, site.attrs.get("wide")) == (F32, F32, None)
    step = fl.find(differentiated(program, (X, W, B)), X, W, B, passes="gemm_epilogue")
    assert step.counts() == {"gemm_epilogue": 1, "gemm_epilogue_grad": 1}


def mixed_product(x, w, b):
    """As einsum has it: the operands are given to the product as they are."""
    return lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=F32) + b.astype(F32)


@pytest.mark.parametrize("act", [*ACTS, None])
@pytest.mark.parametrize("name", MIXED)
def test_an_operand_of_fewer_bits_is_widened_for_a_product_in_float32(name, act):
    program = lambda x, w, b: (ACTS[act] if act else lambda h: h)(mixed_product(x, w, b))  # noqa: E731
    site = site_of(program, *MIXED[name])
    assert (site.attrs["activation"], site.attrs.get("wide")) == (act or "none", None)


@pytest.mark.parametrize("name", MIXED)
def test_such_a_product_is_found_differentiated_scanned_and_mapped(name):
    program = lambda x, w, b: jax.nn.gelu(mixed_product(x, w, b))  # noqa: E731
    args = MIXED[name]

    def step(x, w, b):
        loss, grads = jax.value_and_grad(weighed(program), (0, 1, 2))(x, w, b)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g.astype(p.dtype), (w, b), grads[1:])

    def scanned(x, w, b):
        return lax.scan(lambda c, one: (c, program(one, w, b)), 0.0, jnp.stack([x, -x]))[1]

    for fn in (step, scanned, lambda x, w, b: jax.vmap(lambda one: program(one, w, b))(jnp.stack([x, -x]))):
        found = fl.find(fn, *args, passes="gemm_epilogue")
        assert [c.attrs["activation"] for c in found.candidates] == ["gelu_tanh"], found.rejections
        got, want = (jit(f)(*args) for f in (fl.fuse(fn, passes="gemm_epilogue"), fn))
        close(got, want, 4, 2e-6)


def test_a_sum_of_16_bits_is_not_widened_for_a_bias_in_float32():
    """Nor is a product of 16 bits made one of float32 because its sum is kept."""
    for fn in (lambda x, w, b: x @ w + wide(b), lambda x, w, b: preferred(x, w) + wide(b) * 1.5):
        found = fl.find(fn, X, W, wide(B) * 1.1, passes="gemm_epilogue")
        assert [r.code for r in found.rejections] == ["dtype"], found
