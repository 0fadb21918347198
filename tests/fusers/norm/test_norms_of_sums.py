"""Pass layer_norm: what is added up right before a norm is folded in where a kernel runs it, in programs that are differentiated too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import fusionlab as fl
from fusionlab.kernels.ops.layer_norm import choosing

from ..checks import ERROR, close, normal, weighed

NORM = "layer_norm"
X, R = normal((4, 6, 32), (4, 6, 32))
G, B, S = normal((32,), (32,), (32,), seed=1)
ARGS = X, R, G, B


@pytest.fixture(autouse=True)
def _small_ones_too(monkeypatch):
    monkeypatch.setattr(choosing, "LEAST", 1)


def norm(h, g, b):
    wide = h.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    return ((wide - mean) * lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5) * g + b).astype(h.dtype)


def stepped(fn):
    """A program that is differentiated already."""

    def step(*args):
        wanted = tuple(i for i, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.floating))
        return jax.value_and_grad(weighed(fn), wanted)(*args)

    return step


def found(fn, *args, device="sm_90", factor=20.0, **options):
    """The sites on a device where the kernels run; what stands in their place has the program's values and gradients."""
    f = fl.find(fn, *args, device=device, passes=NORM, **options)
    run = jax.extend.core.jaxpr_as_fun(f.rewritten())

    def fused(*args):
        return jax.tree.unflatten(jax.tree.structure(fn(*args)), run(*jax.tree.leaves(args)))

    least = max(ERROR.get(str(a.dtype), 0.0) for a in args)
    for of in (lambda g: g, lambda g: jax.grad(weighed(g), (0, 1))):
        close(of(fused)(*args), of(fn)(*args), factor, least)
    return f


def site(fn, *args, **options):
    (one,) = found(fn, *args, **options).candidates
    return one


def post(x, r, g, b):
    return norm(x + r, g, b)


def pre(x, r, g, b):
    h = x + r
    return norm(h, g, b) * 2, h * 3


def test_a_residual_is_folded_in():
    one = site(post, *ARGS)
    assert one.formula == "layer_norm(x + residual) * scale + bias"
    assert set(one.leaves) == {"x", "residual", "scale", "bias"}
    assert one.plain.formula == "layer_norm(x) * scale + bias"
    assert one.backend.name == "cuda"


def test_a_sum_that_is_read_elsewhere_is_a_second_result():
    one = site(pre, *ARGS)
    assert one.formula == "layer_norm(x + residual) * scale + bias, and x + residual"
    assert len(one.roots) == 2


def test_a_sum_that_the_program_returns_is_a_second_result():
    one = site(lambda *a: (post(*a), a[0] + a[1]), *ARGS)  # another addition: that of the norm is its own
    assert len(one.roots) == 1

    def both(x, r, g, b):
        h = x + r
        return norm(h, g, b), h

    assert len(site(both, *ARGS).roots) == 2


@pytest.mark.parametrize("fn", [post, lambda x, r, g, b: post(jnp.sin(x), jnp.cos(r), g, b)], ids=["given", "made"])
def test_it_is_fused_with_its_backward_pass_in_a_train_step(fn):
    f = found(stepped(fn), *ARGS)
    (one,) = f.candidates
    assert one.formula == "layer_norm(x + residual) * scale + bias"
    assert one.backward.is_fused
    names = [n.primitive for n in f.apply().nodes()]
    assert (names.count(NORM), names.count("layer_norm_cotangent"), names.count("rsqrt")) == (1, 1, 0)


def test_equal_gradients_of_both_sides_are_put_in_their_place_once():
    """The gradient of x and that of the residual are one value; replaced twice it would be doubled."""
    for fn in (stepped(post), stepped(lambda x, r, g, b: post(x, r, g, b) * jnp.cos(x) + jnp.sin(r))):
        f = found(fn, *ARGS)
        assert f.candidates[0].backward.is_fused


def test_layers_in_a_row_each_fold_their_residual():
    def stack(x, w, g, b):
        for i in range(3):
            x = norm(x + jnp.tanh(x @ w) * (i + 1.0), g, b)
        return x

    w = normal((32, 32), seed=3)[0] * 0.2
    for fn in (stack, stepped(stack)):
        f = found(fn, X, w, G, B, factor=60)
        assert [c.formula for c in f.candidates] == ["layer_norm(x + residual) * scale + bias"] * 3


def test_a_residual_stream_folds_forward_and_stays_apart_in_a_train_step():
    def stack(x, w, g, b):
        for _ in range(2):
            x = x + jnp.tanh(norm(x, g, b) @ w)
        return norm(x, g, b)

    w = normal((32, 32), seed=3)[0] * 0.2
    first, *rest = [c.formula for c in found(stack, X, w, G, B, factor=60).candidates]
    assert first == "layer_norm(x) * scale + bias"
    assert rest == [
        "layer_norm(x + residual) * scale + bias, and x + residual",
        "layer_norm(x + residual) * scale + bias",
    ]
    f = found(stepped(stack), X, w, G, B, factor=60)
    assert [len(c.roots) for c in f.candidates] == [1, 1, 1]
    assert all(c.backward.is_fused for c in f.candidates)


def formulas(fn, *args, **options):
    f = found(fn, *args, **options)
    assert "overlap" not in {r.code for r in f.rejections}
    return [c.formula for c in f.candidates]


WHOLE, FOLDED = "layer_norm(x) * scale + bias", "layer_norm(x + residual) * scale + bias"
BOTH = f"{FOLDED}, and x + residual"


def test_a_sum_that_two_norms_are_taken_of_is_the_first_ones():
    """The second reads it as it was given: it is not declined for wanting the same addition."""

    def parallel(x, r, g, b):
        h = x + r
        return norm(h, g, b) * 2, jnp.sin(norm(h, b, g))

    def added(x, r, g, b):
        h = x + r
        return norm(h + norm(h, g, b), b, g)

    assert formulas(parallel, *ARGS) == [BOTH, WHOLE]
    assert formulas(added, *ARGS) == [BOTH, FOLDED]
    for fn in (parallel, added):
        f = found(stepped(fn), *ARGS, factor=60)
        assert len(f.candidates) == 2
        assert all(c.backward.is_fused for c in f.candidates)


def test_the_bias_of_a_norm_is_not_the_shift_of_the_next():
    """Taken as its shift it would cost the norm before it its site."""

    def twice(x, r, g, b):
        return norm(norm(x, g, b), b, g)

    def before_a_block(x, r, g, b):  # BLOOM's and CLIP's first layers
        h = norm(x, g, b)
        return h + jnp.tanh(norm(h, b, g))

    def with_residual(x, r, g, b):
        return norm(norm(x, g, b) + r, b, g)

    assert formulas(twice, *ARGS) == formulas(before_a_block, *ARGS) == [WHOLE, WHOLE]
    assert formulas(with_residual, *ARGS) == [WHOLE, FOLDED]
    for fn in (twice, before_a_block, with_residual):
        assert len(formulas(stepped(fn), *ARGS, factor=60)) == 2


def test_what_another_pass_makes_of_the_sum_is_left_to_it():
    def blended(x, r, g, b):
        return norm(x + jax.nn.sigmoid(g) * (r - x), g, b)

    f = fl.find(blended, *ARGS, device="sm_90", passes=[NORM, "lerp"])
    assert {c.pass_name: c.formula for c in f.candidates}[NORM] == WHOLE
    assert {c.pass_name for c in f.candidates} == {NORM, "lerp"}
    assert formulas(blended, *ARGS) == [FOLDED]


def test_norms_that_would_wait_for_each_others_sums_go_without_one():
    def crossed(x, r, g, b):
        h, k = x + r, jnp.sin(x) + r
        return norm(h, k[0, 0], b), norm(k, h[0, 0], b), h * k

    assert set(formulas(crossed, *ARGS)) == {WHOLE, BOTH}


def test_a_sum_of_a_shifted_value_with_itself():
    def doubled(x, r, g, b, s):
        h = jnp.tanh(x * r) + s
        return norm(h + h, g, b)

    assert formulas(doubled, *ARGS, S) == formulas(stepped(doubled), *ARGS, S) == [FOLDED]


def test_a_vector_before_the_norm_is_the_shift():
    one = site(lambda x, r, g, b, s: norm(jnp.tanh(x) + s + r, g, b), *ARGS, S)
    assert one.formula == "layer_norm(x + shift + residual) * scale + bias"
    one = site(lambda x, r, g, b, s: norm(r + (s + jnp.tanh(x)), g, b), *ARGS, S)
    assert one.formula == "layer_norm(x + shift + residual) * scale + bias"
    one = site(lambda x, r, g, b, s: norm(jnp.tanh(x * r) + s, g, b), *ARGS, S)
    assert one.formula == "layer_norm(x + shift) * scale + bias"
    found(stepped(lambda x, r, g, b, s: norm(jnp.tanh(x) + s + r, g, b)), *ARGS, S)


def test_the_bias_of_a_product_stays_with_the_product():
    w = normal((32, 32), seed=3)[0]
    one = site(lambda x, r, g, b, w: norm(x @ w + b + r, g, b), *ARGS, w)
    assert one.formula == "layer_norm(x + residual) * scale + bias"
    assert one.leaves["x"].shape == X.shape
    f = fl.find(lambda x, r, g, b, w: norm(x @ w + b + r, g, b), *ARGS, w, device="sm_90")
    assert {c.pass_name for c in f.candidates} == {"gemm_epilogue", NORM}


def test_bfloat16_is_folded_and_close():
    args = tuple(a.astype(jnp.bfloat16) for a in ARGS)
    for fn in (post, pre, stepped(post)):
        assert "residual" in site(fn, *args, factor=3).leaves


NEAR = {
    "a residual of each column is a shift": (lambda x, r, g, b: norm(jnp.sin(x) + r[0, 0], g, b), "shift"),
    "a residual of each row": (lambda x, r, g, b: norm(x + r[:, :, :1], g, b), ""),
    "a residual of each batch": (lambda x, r, g, b: norm(x + r[:1], g, b), ""),
    "one number a row, and a vector": (lambda x, r, g, b: norm(x[..., :1] + r[:1, :1], g, b), ""),
    "a number": (lambda x, r, g, b: norm(x + 1.0, g, b), ""),
    "a difference": (lambda x, r, g, b: norm(x - r, g, b), ""),
    "a product": (lambda x, r, g, b: norm(x * r, g, b), ""),
    "a scaled residual is made before": (lambda x, r, g, b: norm(x + 2 * r, g, b), "residual"),
    "itself twice": (lambda x, r, g, b: norm(x + x, g, b) + r * 0, "residual"),
    "widened before it is added": (lambda x, r, g, b: norm(x.astype(jnp.bfloat16).astype(jnp.float32) + r, g, b), ""),
    "rounded after it is added": (lambda x, r, g, b: norm((x + r).astype(jnp.bfloat16).astype(jnp.float32), g, b), ""),
    "a barrier in between": (lambda x, r, g, b: norm(lax.optimization_barrier(x + r), g, b), ""),
}


@pytest.mark.whole
@pytest.mark.parametrize("name", NEAR)
def test_near_misses(name):
    fn, folded = NEAR[name]
    f = found(fn, *ARGS)
    (one,) = f.candidates
    assert set(one.leaves) & {"shift", "residual"} == ({folded} if folded else set())


def test_where_no_kernel_runs_nothing_is_folded():
    for device in ("cpu", "sm_80"):
        assert set(site(post, *ARGS, device=device).leaves) == {"x", "scale", "bias"}
    f = fl.find(post, *ARGS, device="sm_90", passes=NORM, implementation="xla")
    assert set(f.candidates[0].leaves) == {"x", "scale", "bias"}


def test_over_other_axes_no_kernel_runs():
    def first(x, r):
        h = x + r
        return (h - h.mean(0)) * lax.rsqrt(h.var(0) + 1e-5)

    f = fl.find(first, X, R, device="sm_90", passes=NORM)
    assert all(set(c.leaves) == {"x"} for c in f.candidates)


def test_the_structures_around_it_are_seen_all_the_same():
    for fn in (post, pre):
        f = fl.find(fn, *ARGS, device="sm_90", passes=NORM)
        assert any(s.kind == "residual_norm" for s in f.structures)


def looped(x, r, g, b):
    return lax.scan(lambda c, _: (post(c, r, g, b), None), x, None, length=2)[0]


@pytest.mark.parametrize(("fn", "more"), [(looped, {"factor": 60}), (jax.checkpoint(post), {})], ids=["scan", "remat"])
def test_inside_a_scan_and_a_checkpoint(fn, more):
    assert "residual" in site(fn, *ARGS).leaves
    found(stepped(fn), *ARGS, **more)


def test_named_by_the_user_it_is_left_to_them():
    def named(x, r, g, b):
        return norm(checkpoint_name(x + r, "stream"), g, b)

    assert set(site(named, *ARGS).leaves) == {"x", "scale", "bias"}
    np.testing.assert_array_equal(np.asarray(named(*ARGS)), np.asarray(post(*ARGS)))
