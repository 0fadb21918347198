"""Pass gemm_epilogue on relu in a scan that is differentiated already: JAX leaves max(h, 0) there, with the gradient that its rule has."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl

from ..checks import jit, normal, primitives

WS, BS, X = normal((3, 8, 8), (3, 8), (5, 8))
# A row of zeros without a bias is exactly 0 before every activation.
TIED = WS, jnp.zeros_like(BS), X.at[1].set(0.0).at[3].set(0.0)


def layer(c, w, b, act):
    return act(c @ w + b)


def loss_of(c):
    """With a gradient where c is 0."""
    return (c**2 + c).sum()


def scanned(act, ws, bs, x):
    return loss_of(jax.lax.scan(lambda c, p: (layer(c, *p, act), None), x, (ws, bs))[0])


def rematted(act, ws, bs, x):
    """Two layers, of which the first is computed again for the second's gradient."""

    def body(c, p):
        return c + layer(layer(c, *p, act), p[0].T, p[1], act), None

    return loss_of(jax.lax.scan(jax.checkpoint(body), x, (ws, bs))[0])


def mapped(act, ws, bs, x):
    return (
        scanned(act, ws, bs, jax.vmap(lambda row: row * 2)(x))
        + jax.vmap(lambda s: scanned(act, ws, bs, x * s))(jnp.arange(1.0, 3.0)).sum()
    )


def looped(act, ws, bs, x):
    return loss_of(jax.lax.fori_loop(0, 3, lambda i, c: layer(c, ws[i], bs[i], act), x))


def two_layers(act, ws, bs, x):
    def body(c, p):
        return layer(layer(c, *p, act), p[0].T, p[1], act), None

    return loss_of(jax.lax.scan(body, x, (ws, bs))[0])


# name -> (loss of the activation and its operands, how many activations are found)
FORMS = {
    "scan": (scanned, 1),
    "two layers": (two_layers, 2),
    "fori_loop": (looped, 1),
    "vmap of scan": (mapped, 2),
    "remat in scan": (rematted, 1),
}
ACTS = {"relu": jax.nn.relu, "relu_tie": lambda h: jnp.maximum(h, 0), "relu_where": lambda h: jnp.where(h > 0, h, 0)}


def step_of(loss, act):
    return jax.value_and_grad(lambda *args: loss(act, *args), (0, 1, 2))


def agrees(step, args, **options):
    fused = fl.fuse(step, passes="gemm_epilogue", **options)
    for given in (args, TIED):
        got, want = (jax.tree.leaves(jit(f)(*given)) for f in (fused, step))
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(g, w, rtol=0, atol=3e-6 * float(jnp.abs(w).max() + 1))
    return fused.findings(*args)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("form", FORMS)
def test_a_relu_in_a_loop_is_fused_with_its_backward_pass_and_has_the_programs_gradient_at_0(form, act):
    loss, count = FORMS[form]
    found = agrees(step_of(loss, ACTS[act]), (WS, BS, X))
    paired = [
        c.attrs["activation"] for c in found.candidates if c.backward is not None and c.attrs["activation"] != "none"
    ]
    assert paired.count(act) >= count, (paired, found.rejections)
    assert not [r for r in found.rejections if r.code == "escapes"], found.rejections


@pytest.mark.parametrize("form", FORMS)
def test_at_exactly_0_the_two_spellings_have_other_gradients(form):
    """Or nothing above would tell them apart."""
    by_rule, by_half = (jit(step_of(FORMS[form][0], ACTS[a]))(*TIED)[1][1] for a in ("relu", "relu_tie"))
    assert float(jnp.abs(by_rule - by_half).max()) > 0.1


def test_in_float64_and_in_16_bits_it_is_found_and_right():
    for dtype in (jnp.bfloat16, jnp.float16):
        args = [a.astype(dtype) for a in (WS, BS, X)]
        step = step_of(lambda *a: scanned(*a).astype(jnp.float32), jax.nn.relu)
        found = fl.find(step, *args, passes="gemm_epilogue")
        assert [c.attrs["activation"] for c in found.candidates] == ["relu"], found.rejections
        got, want = (jax.tree.leaves(jit(f)(*args)) for f in (fl.fuse(step, passes="gemm_epilogue"), step))
        for g, w in zip(got, want, strict=True):
            g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
            np.testing.assert_allclose(g, w, rtol=0, atol=3e-2 * np.abs(w).max())
    with jax.enable_x64(True):
        args = [jnp.asarray(np.asarray(a, np.float64)) for a in (WS, BS, X)]
        step = step_of(scanned, jax.nn.relu)
        got, want = (jax.tree.leaves(jit(f)(*args)) for f in (fl.fuse(step, passes="gemm_epilogue"), step))
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-12, atol=1e-12)


@jax.custom_jvp
def leaky(h):
    return jnp.maximum(h, 0)


leaky.defjvp(lambda p, t: (leaky(p[0]), t[0] * jnp.where(p[0] > 0, 1.0, 0.1)))


@jax.custom_jvp
def at_least(h):
    return jnp.maximum(h, 0)


at_least.defjvp(lambda p, t: (at_least(p[0]), jnp.where(p[0] >= 0, t[0], 0)))


@pytest.mark.parametrize("act", [leaky, at_least], ids=["leaky", "at least"])
def test_a_maximum_with_another_rule_of_the_users_keeps_it(act):
    found = agrees(step_of(scanned, act), (WS, BS, X))
    assert [c.attrs["activation"] for c in found.candidates] == ["none"]
    (code,) = (r.code for r in found.rejections)
    assert code == ("custom_rule" if "custom_jvp_call" in primitives(found.graph) else "escapes")


def test_its_site_says_what_differentiating_the_step_once_more_would_find():
    found = fl.find(step_of(scanned, jax.nn.relu), WS, BS, X, passes="gemm_epilogue")
    (site,) = found.candidates
    keeps_its_rule = "custom_jvp_call" in primitives(found.graph)  # from JAX 0.12 on, in a scan too
    assert any("differentiated again" in note for note in site.notes) != keeps_its_rule
    assert site.formula == "relu(x @ w + b)"


def test_with_its_gradient_off_the_backward_pass_is_the_references():
    step = step_of(scanned, jax.nn.relu)
    found = agrees(step, (WS, BS, X))
    off = fl.find(step, WS, BS, X, passes=fl.Strategy(gemm_epilogue=True, gemm_epilogue_grad=False))
    assert len(off.candidates) == len(found.candidates)
