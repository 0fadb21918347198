"""Pass dot_product_attention: every layout, scale, softmax, mask and bias is found; near-misses are declined with reasons."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import fusionlab as fl
from fusionlab.fusers.engine.fully_masked_rows import NOTE as BLIND

from ..checks import agree, forward_counts, normal, primitives

Q, K, V = normal((2, 6, 3, 4), (2, 7, 3, 4), (2, 7, 3, 5))  # B T H D, B S H D, B S H Dv
N = normal((2, 6, 3, 4), (2, 6, 3, 4), (2, 6, 3, 4), seed=1)  # T = S
ATTENTION = "dot_product_attention"


def sites(found):
    return [c for c in found.candidates if c.pass_name == ATTENTION]


def fused(fn, *args, **options):
    """The one site, with values and gradients checked and nothing declined."""
    found = agree(fn, *args, passes=ATTENTION, factor=2, **options)
    assert not found.rejections, found.rejections
    (site,) = found.candidates
    assert "exp" not in primitives(found.apply())
    return site


def declined(fn, *args):
    found = fl.find(fn, *args, passes=ATTENTION)
    assert not found.candidates, found.candidates
    (rejection,) = found.rejections
    assert "(test_dot_product_attention.py:" in rejection.sentence or rejection.source is not None
    return rejection


def einsum_form(q, k, v, scale=0.5, mask=None, softmax=jax.nn.softmax, fill=-jnp.inf):
    s = jnp.einsum("bthd,bshd->bhts", q, k) * scale
    if mask is not None:
        s = jnp.where(mask, s, fill)
    return jnp.einsum("bhts,bshd->bthd", softmax(s), v)


# -- layouts ----------------------------------------------------------------------------------------------------------


def matmul_form(q, k, v):
    q, k, v = (a.swapaxes(1, 2) for a in (q, k, v))
    return (jax.nn.softmax(q @ k.swapaxes(-1, -2) * 0.5) @ v).swapaxes(1, 2)


def merged_heads(q, k, v):
    q, k, v = (a.swapaxes(1, 2).reshape(6, -1, a.shape[-1]) for a in (q, k, v))
    out = jnp.einsum("xts,xsd->xtd", jax.nn.softmax(jnp.einsum("xtd,xsd->xts", q, k) * 0.5), v)
    return out.reshape(2, 3, 6, 5).swapaxes(1, 2)


def per_head(q, k, v):  # one head: T D, S D, S Dv
    return jax.nn.softmax(q @ k.T * 0.5) @ v


LAYOUTS = {
    "einsum bthd": einsum_form,
    "matmul bhtd": matmul_form,
    "heads merged into the batch": merged_heads,
    "vmap over batch and heads": jax.vmap(jax.vmap(per_head, 1, 1)),
    "scores transposed": lambda q, k, v: jnp.einsum(
        "bhst,bshd->bthd", jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", k, q) * 0.5, axis=2), v
    ),
    "output hbtd": lambda q, k, v: jnp.einsum(
        "bhts,bshd->hbtd", jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) * 0.5), v
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_one_site_with_the_same_values_and_gradients(name):
    site = fused(LAYOUTS[name], Q, K, V)
    assert site.attrs["scale"] == pytest.approx(0.5)
    assert site.attrs["is_causal"] is False
    assert set(site.leaves) == {"q", "k", "v"}


def test_attention_without_heads_or_batch_is_a_site():
    fused(per_head, Q[0, :, 0], K[0, :, 0], V[0, :, 0])


def test_jax_nn_dot_product_attention_is_found_causal_and_not():
    assert fused(lambda q, k, v: jax.nn.dot_product_attention(q, k, v), *N).attrs["is_causal"] is False
    assert fused(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True), *N).attrs["is_causal"] is True


def test_one_value_as_query_key_and_value_is_a_site():
    site = fused(lambda x: einsum_form(x, x, x), N[0])
    assert len({v.id for v in site.leaves.values()}) == 1


FACTORS = {
    "on the values": lambda q, k, v: einsum_form(q, k, 2 * v),
    "on the result": lambda q, k, v: 3 * einsum_form(q, k, v),
    "on both": lambda q, k, v: einsum_form(q, k, v / 2) * 5,
    "inside an activation that makes the values": lambda q, k, v: einsum_form(q, k, 0.5 * v * (1 + jnp.tanh(v))),
}


@pytest.mark.parametrize("name", FACTORS)
def test_a_factor_on_the_values_or_the_result_stays_outside_the_site(name):
    assert fused(FACTORS[name], Q, K, V).attrs["scale"] == pytest.approx(0.5)


def test_a_factor_on_the_weights_is_declined():
    rejection = declined(lambda q, k, v: einsum_form(q, k, v, softmax=lambda s: 2 * jax.nn.softmax(s)), Q, K, V)
    assert rejection.code == "structure"
    assert "has a factor that the values do not have" in rejection.sentence


def test_bf16_with_a_softmax_in_f32_is_a_site():
    def attend(q, k, v):
        s = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) * 0.5
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s).astype(jnp.bfloat16), v)

    fused(attend, *(a.astype(jnp.bfloat16) for a in (Q, K, V)))


@pytest.mark.parametrize("implementation", ["xla", "xla_blockwise"])
def test_each_named_implementation_runs_and_has_the_same_values_and_gradients(implementation):
    site = fused(
        lambda q, k, v: einsum_form(q, k, v, mask=jnp.tril(jnp.ones((6, 6), bool))), *N, implementation=implementation
    )
    verdicts = {b.name: b.verdict for b in site.backends}
    assert verdicts[implementation] in ("chosen", "same code")


# -- scale and softmax ------------------------------------------------------------------------------------------------

SCALES = {
    "on the scores": (lambda q, k, s: jnp.einsum("bthd,bshd->bhts", q, k) * s, 0.3),
    "dividing the scores": (lambda q, k, s: jnp.einsum("bthd,bshd->bhts", q, k) / (1 / s), 0.3),
    "on q": (lambda q, k, s: jnp.einsum("bthd,bshd->bhts", q * s, k), 0.3),
    "on k": (lambda q, k, s: jnp.einsum("bthd,bshd->bhts", q, k * s), 0.3),
    "on both": (lambda q, k, s: jnp.einsum("bthd,bshd->bhts", q * 0.5, k * (2 * s)), 0.3),
    "a root on q": (lambda q, k, s: jnp.einsum("bthd,bshd->bhts", q / jnp.sqrt(4.0), k), 0.5),
    "absent": (lambda q, k, s: jnp.einsum("bthd,bshd->bhts", q, k), 1.0),
}


@pytest.mark.parametrize("name", SCALES)
def test_the_scale_is_found_wherever_it_stands(name):
    scores, scale = SCALES[name]
    site = fused(lambda q, k, v: jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores(q, k, 0.3)), v), Q, K, V)
    assert site.attrs["scale"] == pytest.approx(scale, rel=1e-6)


def by_hand(z):
    e = jnp.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def by_hand_stopped(z):
    e = jnp.exp(z - lax.stop_gradient(z.max(-1, keepdims=True)))
    return e / e.sum(-1, keepdims=True)


SOFTMAXES = {
    "jax.nn.softmax": jax.nn.softmax,
    "by hand": by_hand,
    "by hand, gradient stopped at the maximum": by_hand_stopped,
    "without the maximum": lambda z: jnp.exp(z) / jnp.exp(z).sum(-1, keepdims=True),
    "by logsumexp": lambda z: jnp.exp(z - jax.nn.logsumexp(z, -1, keepdims=True)),
    "by log_softmax": lambda z: jnp.exp(jax.nn.log_softmax(z)),
}


@pytest.mark.parametrize("name", SOFTMAXES)
def test_every_spelling_of_softmax_is_found_causal_too(name):
    assert fused(lambda q, k, v: einsum_form(q, k, v, softmax=SOFTMAXES[name]), Q, K, V).attrs["is_causal"] is False
    found = fl.find(
        lambda q, k, v: einsum_form(q, k, v, mask=jnp.tril(jnp.ones((6, 6), bool)), softmax=SOFTMAXES[name], fill=-1e9),
        *N,
    )
    assert [c.attrs["is_causal"] for c in sites(found)] == [True]


def test_division_after_the_product_with_v_is_found():
    def attend(q, k, v):
        s = jnp.einsum("bthd,bshd->bhts", q, k) * 0.5
        e = jnp.exp(s - s.max(-1, keepdims=True))
        return jnp.einsum("bhts,bshd->bhtd", e, v) / e.sum(-1)[..., None]

    fused(attend, Q, K, V)


# -- masks ------------------------------------------------------------------------------------------------------------

TRIL = np.tril(np.ones((16, 16), bool))
CAUSAL = {
    "where tril": lambda s: jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -jnp.inf),
    "where iota": lambda s: jnp.where(
        lax.broadcasted_iota(int, s.shape, 2) >= lax.broadcasted_iota(int, s.shape, 3), s, -1e30
    ),
    "where later, the fill": lambda s: jnp.where(jnp.triu(jnp.ones(s.shape[-2:], bool), 1), jnp.finfo(s.dtype).min, s),
    "a captured numpy mask": lambda s: jnp.where(TRIL[:6, :6], s, -1e9),
    "a captured jax mask, cut to length": lambda s: jnp.where(jnp.asarray(TRIL)[: s.shape[-2], : s.shape[-1]], s, -1e9),
    "a rank-4 mask": lambda s: jnp.where(jnp.tril(jnp.ones((1, 1, 6, 6), bool)), s, -1e9),
    "added": lambda s: s + jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), 0.0, -1e9),
    "added, (1 - m) * -1e9": lambda s: s + (1.0 - jnp.tril(jnp.ones(s.shape[-2:]))) * -1e9,
    "float mask compared": lambda s: jnp.where(jnp.tril(jnp.ones(s.shape[-2:])) == 0, -1e9, s),
    "arange": lambda s: jnp.where(jnp.arange(6)[:, None] < jnp.arange(6)[None, :], -1e9, s),
}


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_is_told_by_its_values_in_every_spelling(name):
    def attend(q, k, v):
        s = CAUSAL[name](jnp.einsum("bthd,bshd->bhts", q, k) * 0.5)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), v)

    site = fused(attend, *N)
    assert site.attrs["is_causal"] is True
    assert site.formula == "softmax(0.5 * q @ k.T, causal) @ v"


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("name", ["causal", "a band"])
def test_a_captured_mask_is_found_in_a_train_step_too(name, as_array):
    """The derivative that the backward pass is looked up by captures the same array."""
    mask = as_array({"causal": TRIL[:6, :6], "a band": TRIL[:6, :6] & ~np.tri(6, k=-3, dtype=bool)}[name])

    def loss(q, k, v):
        return jnp.sum(jnp.square(einsum_form(q, k, v, mask=mask, fill=-1e9)))

    step = jax.value_and_grad(loss, (0, 1, 2))
    fn = fl.fuse(step, passes=ATTENTION)
    found = fn.findings(*N)
    assert found.counts() == {ATTENTION: 1, f"{ATTENTION}_grad": 1}
    (site,) = found.candidates
    assert site.attrs["is_causal"] is True
    assert site.attrs.get("window") == (None if name == "causal" else (2, 0))
    for got, want in zip(jax.tree.leaves(fn(*N)), jax.tree.leaves(step(*N)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_causal_mask_of_unequal_lengths_starts_at_the_top_left():
    def attend(q, k, v):
        return einsum_form(q, k, v, mask=jnp.tril(jnp.ones((6, 7), bool)), fill=-1e9)

    assert fused(attend, Q, K, V).attrs["is_causal"] is True


def test_a_mask_that_hides_nothing_is_no_mask():
    site = fused(lambda q, k, v: einsum_form(q, k, v, mask=jnp.ones((6, 7), bool)), Q, K, V)
    assert site.attrs["is_causal"] is False


MASKS = {
    "aligned at the bottom right": jnp.tril(jnp.ones((6, 7), bool), 1),
    "inverted": jnp.triu(jnp.ones((6, 7), bool)),
    "one row short": jnp.tril(jnp.ones((6, 7), bool)).at[4, 4].set(False),
    "padding": jnp.arange(7)[None] < 5,
}


@pytest.mark.parametrize("fill", [-jnp.inf, -1e9])
@pytest.mark.parametrize("name", MASKS)
def test_another_constant_mask_is_an_operand_not_taken_for_causal(name, fill):
    site = fused(lambda q, k, v: einsum_form(q, k, v, mask=MASKS[name], fill=fill), Q, K, V)
    assert site.attrs["is_causal"] is False
    assert "mask0" in site.leaves
    assert site.formula == "softmax(0.5 * q @ k.T, mask) @ v"
    assert site.concepts == ("attention", "attention_masked")


@pytest.mark.parametrize("fill", [0.5, 0.0, -10.0, -9999.0])
def test_a_fill_that_still_gives_weight_is_declined(fill):
    rejection = declined(
        lambda q, k, v: einsum_form(q, k, v, mask=jnp.tril(jnp.ones((6, 7), bool)), fill=fill), Q, K, V
    )
    assert rejection.code == "scalar"
    assert f"masked scores become {fill:g}" in rejection.sentence
    assert rejection.edit == "fill with -jnp.inf"


# -- near-misses ------------------------------------------------------------------------------------------------------

S = normal((2, 5, 5, 5), (2, 5, 5, 5), (2, 5, 5, 5), seed=3)  # B T H D all five: shapes cannot tell axes apart


def near(score="bthd,bshd->bhts", softmax=jax.nn.softmax, weigh="bhts,bshd->bthd"):
    return lambda q, k, v: jnp.einsum(weigh, softmax(jnp.einsum(score, q, k) * 0.5), v)


NEAR_MISSES = {
    "softmax over the queries": (near(softmax=lambda s: jax.nn.softmax(s, axis=2)), "axes"),
    "softmax over the heads": (near(softmax=lambda s: jax.nn.softmax(s, axis=1)), "axes"),
    "weights contracted over the queries": (near(weigh="bhts,bthd->bshd"), "axes"),
    "exp(s - 2 max)": (
        near(softmax=lambda s: (e := jnp.exp(s - 2 * s.max(-1, keepdims=True))) / e.sum(-1, keepdims=True)),
        "scalar",
    ),
    "normalised over another axis": (
        near(softmax=lambda s: (e := jnp.exp(s - s.max(-1, keepdims=True))) / e.sum(-2, keepdims=True)),
        None,
    ),
    "exp without normalisation": (near(softmax=lambda s: jnp.exp(s - s.max(-1, keepdims=True))), None),
    "temperature inside the weights": (near(softmax=lambda s: jax.nn.softmax(s) ** 2), None),
    "capped twice": (near(softmax=lambda s: jax.nn.softmax(jnp.tanh(jnp.tanh(s / 30)) * 30)), None),
    "sigmoid attention": (near(softmax=lambda s: jnp.exp(s) / (1 + jnp.exp(s))), None),
    "a gradient stopped at the weights": (
        near(softmax=lambda s: lax.stop_gradient(jax.nn.softmax(s))),
        "stop_gradient",
    ),
    "a gradient stopped at the scores": (near(softmax=lambda s: jax.nn.softmax(lax.stop_gradient(s))), "stop_gradient"),
    "named weights": (near(softmax=lambda s: checkpoint_name(jax.nn.softmax(s), "weights")), "named_residual"),
    "the maximum over the queries": (
        near(softmax=lambda s: (e := jnp.exp(s - s.max(-2, keepdims=True))) / e.sum(-1, keepdims=True)),
        "structure",
    ),
}


@pytest.mark.whole
@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_near_miss_is_declined_and_stays_right(name):
    fn, code = NEAR_MISSES[name]
    found = agree(fn, *S, passes=ATTENTION)
    assert not found.candidates
    (rejection,) = found.rejections
    assert code is None or rejection.code == code
    assert rejection.matched < rejection.total or rejection.code in ("axes", "mask", "scalar", "structure")
    assert "(test_dot_product_attention.py:" in rejection.sentence or rejection.code == "mask"


def test_the_guilty_node_is_the_one_that_differs():
    for name, guilty in (
        ("capped twice", "= tanh ("),
        ("sigmoid attention", "= add ("),
        ("a gradient stopped at the scores", "= stop_gradient ("),
    ):
        assert guilty in declined(NEAR_MISSES[name][0], *S).sentence


def test_q_and_k_exchanged_is_attention_of_the_other():
    """Queries are what the result keeps: softmax over t with the values at t attends from k to q."""
    site = fused(near(score="bthd,bshd->bhst", weigh="bhst,bthd->bshd"), *S)
    graph_inputs = fl.find(near(score="bthd,bshd->bhst", weigh="bhst,bthd->bshd"), *S).graph.top.inputs
    assert site.leaves["q"].id == graph_inputs[1].id
    assert site.leaves["k"].id == graph_inputs[0].id


def test_returned_attention_weights_decline_the_site_by_name():
    def attend(q, k, v):
        p = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) * 0.5)
        return jnp.einsum("bhts,bshd->bthd", p, v), p

    rejection = declined(attend, Q, K, V)
    assert rejection.code == "escapes"
    assert rejection.sentence.endswith("is also returned")
    assert "= div" in rejection.sentence
    assert rejection.edit


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_every_floating_dtype_is_a_site_and_its_train_step_too(dtype):
    def attend(q, k, v):
        return einsum_form(q, k, v, mask=jnp.tril(jnp.ones((6, 6), bool)), fill=-1e9)

    with jax.enable_x64(dtype == "float64"):
        args = tuple(a.astype(dtype) for a in N)
        fused(attend, *args)
        step = jax.value_and_grad(lambda *a: attend(*a).astype(jnp.float32).sum(), (0, 1, 2))
        assert fl.find(step, *args, passes=ATTENTION).counts()[f"{ATTENTION}_grad"] == 1


@pytest.mark.parametrize("implementation", ["xla", "xla_blockwise"])
def test_a_fill_that_overflows_the_dtype_is_minus_infinity_as_it_is_in_the_program(implementation):
    """-1e9 in float16: a row that sees nothing is NaN there and 0 in the fused op, never the mean of the values."""
    args = tuple(a.astype(jnp.float16) for a in N)
    seen = jnp.ones((2, 1, 6, 6), bool).at[1, 0, 2].set(False)

    def attend(q, k, v, seen):
        return einsum_form(q, k, v, mask=seen, fill=-1e9)

    (site,) = fl.find(attend, *args, seen, passes=ATTENTION).candidates
    assert site.attrs.get("mask_value", -jnp.inf) == -jnp.inf
    assert BLIND in site.notes
    want, got = np.array(attend(*args, seen)), fl.fuse(attend, implementation=implementation)(*args, seen)
    assert np.isnan(want[1, 2]).all()
    want[1, 2] = 0
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-3)


def test_operands_of_two_dtypes_are_declined():
    rejection = declined(einsum_form, Q, K, V.astype(jnp.bfloat16))
    assert rejection.code == "dtype"
    assert "bfloat16, float32" in rejection.sentence
    assert rejection.edit == "cast q, k and v to one of these dtypes"


def test_the_rejection_says_how_far_the_match_got():
    rejection = declined(near(softmax=lambda s: jax.nn.softmax(jnp.sin(s))), *S)
    assert 0 < rejection.matched < rejection.total
    assert f"({rejection.matched} of {rejection.total} matched)" in str(rejection)
    assert "= sin (" in rejection.sentence
    assert "where the product of queries and keys is needed" in rejection.sentence


def test_a_projection_around_attention_is_left_to_gemm_epilogue():
    wq, wo, b = normal((12, 12), (12, 12), (12,), seed=4)

    def block(x):
        q, k, v = (jnp.reshape(x @ (wq * c) + b, (2, 6, 3, 4)) for c in (1.0, 0.5, 2.0))
        return einsum_form(q, k, v).reshape(2, 6, 12) @ wo + b

    found = agree(block, *normal((2, 6, 12), seed=5), factor=4)
    assert forward_counts(found) == {"gemm_epilogue": 4, "dot_product_attention": 1, "layer_norm": 0}
    assert not found.rejections


def test_residuals_of_a_small_site_are_the_probabilities_and_of_blocks_one_statistic_a_row():
    (saved,) = fused(einsum_form, Q, K, V).residuals
    assert (saved.name, saved.readers) == ("probabilities", ("dquery", "dkey", "dvalue"))
    site = fused(einsum_form, Q, K, V, implementation="xla_blockwise")
    saved = {r.name: (r.shape, r.dtype) for r in site.residuals}
    assert saved["logsumexp"] in (((2, 3, 6), "f32"), ((2, 6, 3), "f32"))
    assert saved["out"] == ((2, 6, 3, 5), "f32")


def test_a_long_sequence_chooses_blocks_on_a_cpu_and_says_why():
    q = jax.ShapeDtypeStruct((1, 1024, 2, 64), jnp.float32)
    (site,) = sites(fl.find(einsum_form, q, q, q, device="cpu"))
    verdicts = {b.name: b.verdict for b in site.backends}
    assert verdicts == {"xla": "possible", "xla_blockwise": "chosen", "cuda": "unavailable", "cudnn": "unavailable"}
    assert not site.same_code
    small = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.float32)
    (site,) = sites(fl.find(einsum_form, small, small, small, device="cpu"))
    assert site.same_code


def test_a_product_that_rounds_its_own_sum_is_not_replaced_by_one_that_does_not():
    def attend(q, k, v):
        s = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=jnp.bfloat16).astype(jnp.float32)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), v)

    (rejection,) = fl.find(attend, Q, K, V, passes=ATTENTION).rejections
    assert rejection.code == "dtype"
    assert "rounds to bfloat16" in rejection.sentence


@pytest.mark.parametrize("divisor", [8, 3], ids=["2.828125", "1.734375"])
def test_a_scale_is_what_the_programs_own_dtype_makes_of_it(divisor):
    site = fused(lambda q, k, v: einsum_form(q / jnp.sqrt(jnp.asarray(divisor, jnp.bfloat16)), k, v), Q, K, V)
    plain = fused(einsum_form, Q, K, V)
    rounded = float(jnp.sqrt(jnp.asarray(divisor, jnp.bfloat16)))
    assert site.attrs["scale"] == pytest.approx(plain.attrs["scale"] / rounded, rel=1e-6)


def test_query_heads_that_share_keys_under_a_causal_mask_are_a_site():
    q, k, v = normal((2, 6, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8), seed=5)
    site = fused(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True), q, k, v)
    assert site.attrs["is_causal"]


def test_a_site_whose_result_another_one_reads_through_a_view_leaves_the_view_alone():
    q, k, v = normal((2, 6, 4), (2, 6, 4), (2, 6, 4), seed=6)

    def attend(q, k, v):
        return jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v

    def twice(q, k, v):
        t = attend(q, k, v).swapaxes(1, 2)
        return t, attend(t.reshape(2, 6, 4) * 0.5, k, v), attend(t.swapaxes(1, 2) * 0.5, k, v)

    found = agree(twice, q, k, v, passes=ATTENTION, factor=2)
    assert len(found.candidates) == 3


def test_a_mask_traced_by_an_enclosing_transformation_is_data():
    mask = jnp.tril(jnp.ones((2, 6, 6), bool))

    def masked(m):
        def attend(q, k, v):
            s = jnp.where(m, jnp.einsum("bthd,bshd->bhts", q, k), -1e9)
            return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s), v)

        return attend

    got = jax.vmap(lambda m: fl.fuse(masked(m))(Q, K[:, :6], V[:, :6]))(mask)
    np.testing.assert_allclose(got, jax.vmap(lambda m: masked(m)(Q, K[:, :6], V[:, :6]))(mask), rtol=1e-5, atol=1e-6)


def test_a_gate_with_a_derivative_of_its_own_is_no_softmax():
    @jax.custom_jvp
    def gate(x):
        return x / (1 + jnp.exp(-x))

    gate.defjvp(lambda p, t: (gate(p[0]), t[0]))
    w = N[0][0, :4, 0]
    found = fl.find(lambda x: (gate(x @ w) * (x @ w)) @ w, N[1], passes=ATTENTION)
    assert not found.candidates
    assert not found.rejections


def test_a_sum_that_is_read_turned_is_another_function():
    q, k, v = normal((2, 2, 6, 8), (2, 2, 6, 8), (2, 2, 6, 8), seed=3)

    def turned(q, k, v):
        e = jnp.exp(q @ k.swapaxes(-1, -2) * 0.1)
        return jnp.einsum("bhts,bhsd->bhtd", e / jnp.swapaxes(e.sum(-1, keepdims=True), 0, 1), v)

    assert declined(turned, q, k, v).code == "axes"


# -- weights in a wider dtype ------------------------------------------------------------------------------------------


def weights_in_float32(q, k, v, made=jnp.bfloat16):
    """As flax has it with force_fp32_for_softmax: the weights stay float32 until the result is rounded."""
    p = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q * 0.5, k).astype(jnp.float32))
    return jnp.einsum("bhts,bshd->bthd", p, v).astype(made)


def test_weights_that_stay_wider_until_the_result_is_rounded_are_a_site():
    half = tuple(a.astype(jnp.bfloat16) for a in N)
    site = fused(weights_in_float32, *half)
    assert site.root.dtype == jnp.bfloat16
    assert any("rounds its result to bfloat16" in n for n in site.notes)

    def step(q, k, v, w):
        def loss(q, k, v, w):
            out = weights_in_float32(q, k, v)
            return (jnp.einsum("bthd,hde->bte", out, w).astype(jnp.float32) ** 2).sum()

        return jax.value_and_grad(loss, (0, 1, 2, 3))(q, k, v, w)

    w = normal((3, 4, 5))[0].astype(jnp.bfloat16)
    found = fl.find(step, *half, w, passes=ATTENTION)
    assert found.counts() == {ATTENTION: 1, f"{ATTENTION}_grad": 1}
    got, want = fl.fuse(step, passes=ATTENTION)(*half, w), jax.jit(step)(*half, w)
    for g, x in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == x.dtype
        scale = float(np.abs(np.asarray(x, np.float64)).max())
        np.testing.assert_allclose(np.asarray(g, np.float64), np.asarray(x, np.float64), atol=4e-2 * scale)


@pytest.mark.parametrize(
    "fn",
    [
        lambda q, k, v: weights_in_float32(q, k, v, jnp.float32),
        lambda q, k, v: weights_in_float32(q, k, v, jnp.float16),
        lambda q, k, v: (lambda out: (out.astype(jnp.bfloat16), out.sum()))(weights_in_float32(q, k, v, jnp.float32)),
        lambda q, k, v: (2.0 * weights_in_float32(q, k, v, jnp.float32)).astype(jnp.bfloat16),
    ],
    ids=["not rounded", "to another dtype", "read as it is too", "something in between"],
)
def test_a_result_that_is_wider_for_another_reader_is_none(fn):
    assert declined(fn, *(a.astype(jnp.bfloat16) for a in N)).code == "dtype"
