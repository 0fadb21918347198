"""Numbers that a model is not meant to see: rows of zeros, rows that see no key, the dtype's edge. What a fused op makes of them otherwise
than the program is declined, or said with the site.
"""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.fusers.engine.fully_masked_rows import NOTE
from fusionlab.fusers.engine.other_numbers import notes_of, squares_note
from fusionlab.graph.certify.certify import Certifier, ProofOutcome

from ..checks import jit, normal

X, Y, W = (normal((4, 8), seed=i)[0] for i in range(3))
ZERO_ROW, EQUAL_ROW = X.at[1].set(0.0), X.at[1].set(1.5)
EPS = 1e-5


def norm_of_a_root(x):
    return x * jax.lax.rsqrt(jnp.linalg.norm(x, axis=-1, keepdims=True) ** 2 / 8 + EPS)


def of_a_deviation(x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(jnp.std(x, -1, keepdims=True) ** 2 + EPS)


def of_a_root_of_the_mean(x):
    return x / jnp.sqrt(jnp.sqrt((x * x).mean(-1, keepdims=True)) ** 2 + EPS)


def of_a_power_of_a_power(x):
    return x * jax.lax.rsqrt(((x * x).mean(-1, keepdims=True) ** 0.5) ** 2 + EPS)


def with_scale_and_bias(x):
    c = x - x.mean(-1, keepdims=True)
    return c * jax.lax.rsqrt(jnp.sqrt((c * c).mean(-1, keepdims=True)) ** 2 + EPS) * W[0] + Y[0]


ROOTS = [norm_of_a_root, of_a_deviation, of_a_root_of_the_mean, of_a_power_of_a_power, with_scale_and_bias]


def same(fn, *args, **options):
    """Values and gradients of the fused function are those of the program, NaN for NaN."""
    every = tuple(range(len(args)))

    def both(f):
        return jit(lambda *a: (f(*a), jax.grad(lambda *a: (f(*a) ** 2).sum(), every)(*a)))(*args)

    for a, b in zip(jax.tree.leaves(both(fn)), jax.tree.leaves(both(fl.fuse(fn, **options))), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("x", [ZERO_ROW, EQUAL_ROW, X], ids=["a row of zeros", "a row of one number", "no such row"])
@pytest.mark.parametrize("fn", ROOTS)
def test_no_gradient_of_a_root_that_is_squared_again_is_lost(fn, x):
    found = fl.find(fn, x)
    assert not found.candidates
    for reason in found.rejections:
        assert reason.code in ("gradient", "structure")
    same(fn, x)


def test_a_norm_of_a_root_is_declined_for_its_gradient_at_zero_with_an_edit():
    (reason,) = fl.find(norm_of_a_root, X).rejections
    assert reason.code == "gradient"
    assert "gradient of x is nan for inputs of zeros and would become a number" in reason.sentence
    assert "not to the square of its root" in str(reason.edit)


@pytest.mark.parametrize("x", [ZERO_ROW, EQUAL_ROW], ids=["a row of zeros", "a row of one number"])
def test_a_norm_with_its_epsilon_in_place_is_found_and_right_there(x):
    def norm(x):
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + EPS)

    (site,) = fl.find(norm, x, passes="layer_norm").candidates
    assert site.notes == (squares_note("float32"),)
    same(norm, x, passes="layer_norm")


def rms_norm(x):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + EPS)


def rms_norm_by_a_quotient(x):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + EPS)


@pytest.mark.whole
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_norm_whose_gradient_is_nan_where_squares_overflow_says_so_and_tells_the_truth(dtype):
    with jax.enable_x64(dtype == "float64"):
        x = jnp.full((4, 8), 0.5 * float(jnp.finfo(dtype).max), dtype)
        (site,) = fl.find(rms_norm, x, passes="layer_norm").candidates
        assert site.notes == (squares_note(dtype),)

        def gradient(fn):
            return np.asarray(jax.grad(lambda x: (fn(x) * 3).sum())(x))

        assert np.isnan(gradient(rms_norm)).all()
        assert (gradient(fl.fuse(rms_norm, passes="layer_norm")) == 0).all()


def test_a_norm_whose_gradient_is_no_nan_there_has_no_note():
    (site,) = fl.find(rms_norm_by_a_quotient, X, passes="layer_norm").candidates
    assert site.notes == ()


@pytest.fixture
def own():
    """Registers passes for a test."""
    names = []

    def register(pass_):
        fl.register(pass_)
        names.append(pass_.name)

    yield register
    for name in names:
        fl.unregister(name)


def test_a_pass_of_ones_own_loses_no_nan_either(own):
    own(fl.pattern_pass("unit", lambda x: jnp.tanh(x * x) * jnp.exp(x), axes={"x": "m"}))
    fn = lambda x: jnp.tanh(jnp.sqrt(x * x) ** 2) * jnp.exp(x)  # noqa: E731
    found = fl.find(fn, X[0], passes="unit")
    assert not found.candidates
    same(fn, ZERO_ROW[1])


# -- rows that see no key: a mask that is added ----------------------------------------------------------------------------


def softmax_by_logsumexp(s):
    return jnp.exp(s - jax.nn.logsumexp(s, -1, keepdims=True))


def attended(weights_of, fill, factors):
    """Attention in which the first query sees no key; the mask is added, to scores that may have a factor for each query."""

    def fn(q, k, v, g):
        i = jnp.arange(4)
        hidden = jnp.where(i[:, None] > i, 0.0, fill)
        scores = jnp.einsum("qd,kd->qk", q, k)
        return weights_of((scores * g[:, None] if factors else scores) + hidden) @ v

    return fn


@pytest.mark.whole
@pytest.mark.parametrize("fill", [-1e9, -1e30])
@pytest.mark.parametrize("weights_of", [jax.nn.softmax, softmax_by_logsumexp])
@pytest.mark.parametrize("factors", [False, True])
def test_the_weights_of_a_row_that_sees_no_key_stay_what_they_are(factors, weights_of, fill):
    """Beside -1e9 the logarithm of the number of keys is lost: by logsumexp each weight is 1, by a quotient a quarter."""
    fn, args = attended(weights_of, fill, factors), [normal((4, 8), seed=s)[0] for s in (1, 2, 3)]
    args.append(normal((4,), seed=4)[0])
    found = fl.find(fn, *args, passes="dot_product_attention")
    assert bool(found.candidates) == (weights_of is jax.nn.softmax)
    if not found.candidates:
        (reason,) = found.rejections
        assert (reason.code, "for a score term that hides every key" in reason.sentence) == ("value", True)
    np.testing.assert_allclose(fl.fuse(fn)(*args), jax.jit(fn)(*args), rtol=1e-5, atol=1e-6)


# -- rows that see no key -------------------------------------------------------------------------------------------------

NAMES = ("multi_transformer_encoder", "multi_transformer_encoder_fuse_qkv")
WEIGHTS: dict[str, jax.Array] = dict(
    zip(
        ("q", "k", "v", "out", "up", "down"),
        (0.2 * a for a in normal(*[(32, 32)] * 4, (32, 64), (64, 32), seed=7)),
        strict=True,
    )
)
SEEN = jnp.asarray(np.random.default_rng(0).random((2, 1, 6, 6)) < 0.7).at[0, 0, 2].set(False)


def layer(x, mask, fill=-jnp.inf, packed=False):
    def norm(x):
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + EPS)

    h = norm(x)
    if packed:
        made = jnp.split(h @ jnp.concatenate([WEIGHTS[n] for n in "qkv"], -1), 3, -1)
    else:
        made = [h @ WEIGHTS[n] for n in "qkv"]
    q, k, v = (a.reshape(2, 6, 2, 16) for a in made)
    s = jnp.where(mask, jnp.einsum("bthd,bshd->bhts", q, k) * 0.25, fill)
    y = x + jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(s, -1), v).reshape(x.shape) @ WEIGHTS["out"]
    return y + jax.nn.gelu(norm(y) @ WEIGHTS["up"]) @ WEIGHTS["down"]


STREAM = normal((2, 6, 32), seed=9)[0]


@pytest.mark.parametrize("times", [1, 2])
def test_the_note_of_an_attention_goes_along_into_the_layer(times):
    def fn(x, mask):
        for _ in range(times):
            x = layer(x, mask)
        return x

    found = fl.find(fn, STREAM, SEEN, passes=NAMES)
    assert len(found.candidates) == times
    assert all(site.notes.count(NOTE) == 1 for site in found.candidates)


def test_a_layer_masked_with_a_finite_number_has_no_such_note():
    (site,) = fl.find(lambda x, m: layer(x, m, -1e9), STREAM, SEEN, passes=NAMES).candidates
    assert NOTE not in site.notes


def test_a_layer_whose_nan_are_asked_for_stays_as_it_is():
    asks = lambda x, m: jnp.nan_to_num(layer(x, m))  # noqa: E731
    found = fl.find(asks, STREAM, SEEN, passes=NAMES)
    assert not found.candidates
    assert {r.code for r in found.rejections} == {"mask"}


# -- the dtype's edge -----------------------------------------------------------------------------------------------------

REASSOCIATED = fl.Strategy(lerp={"reassociate": True})
BLENDS = {
    "x * (1 - w) + y * w": lambda x, y, w: x * (1 - w) + y * w,
    "(1 - w) * x + w * y": lambda x, y, w: (1 - w) * x + w * y,
    "a number for w": lambda x, y, w: 0.7 * x + 0.3 * y,
}


@pytest.mark.whole
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", BLENDS)
def test_a_reassociated_blend_says_what_becomes_of_numbers_at_the_edge(name, dtype):
    with jax.enable_x64(dtype == "float64"):
        fn = BLENDS[name]
        args = tuple(a.astype(dtype) for a in (X, Y, W))
        (site,) = fl.find(fn, *args, passes=REASSOCIATED).candidates
        (note,) = (n for n in site.notes if "near the edge of" in n)
        assert note.startswith("infinities may become NaN, and finite numbers")
        assert f"near the edge of {dtype}" in note


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_that_note_tells_the_truth(dtype):
    with jax.enable_x64(dtype == "float64"):
        fn, most = BLENDS["x * (1 - w) + y * w"], jnp.finfo(dtype).max
        x, y = jnp.asarray([most, jnp.inf], dtype), jnp.asarray([-most, 1.0], dtype)
        w = jnp.full(2, 0.5, dtype)
        was, now = np.asarray(fn(x, y, w)), np.asarray(fl.fuse(fn, passes=REASSOCIATED)(x, y, w))
    assert was[0] == 0 and was[1] == np.inf  # noqa: PT018
    assert np.isinf(now[0])
    assert np.isnan(now[1])


def scaled_before(q, k, v):
    return jax.nn.softmax((q / 4) @ k.swapaxes(-1, -2), -1) @ v


def scaled_after(q, k, v):
    return jax.nn.softmax((q @ k.swapaxes(-1, -2)) / 4, -1) @ v


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (lambda x, y, w: x + w * (y - x), (X, Y, W)),
        (lambda x, y, w: x - w * (x - y), (X, Y, W)),
        (lambda x: x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + EPS), (X,)),
        (lambda x, w: jax.nn.gelu(x @ w.T + w[:, 0]), (X, W)),
        (scaled_after, normal((1, 2, 6, 4), (1, 2, 6, 4), (1, 2, 6, 4))),
    ],
    ids=["lerp", "lerp by a difference", "norm", "linear", "attention"],
)
def test_what_overflows_as_the_program_does_has_no_note(fn, args):
    (site,) = fl.find(fn, *args).candidates
    assert not [n for n in site.notes if "near the edge" in n]


def test_an_attention_says_so_only_where_scores_may_come_near_the_edge():
    """Those of float16 may; those of float32 would have to be 1e30, and overflow then in the program's order, too."""
    (site,) = fl.find(scaled_before, *normal((1, 2, 6, 4), (1, 2, 6, 4), (1, 2, 6, 4))).candidates
    assert not [n for n in site.notes if "near the edge" in n]
    for dtype, op, says in (
        ("float16", "dot_product_attention", 1),
        ("bfloat16", "multi_transformer", 0),
        ("float32", "lerp", 1),
    ):
        region = SimpleNamespace(root=SimpleNamespace(dtype=jnp.dtype(dtype)))
        assert len(notes_of(None, region, op, ProofOutcome(None, edge=True), (), "")) == says


def test_each_proof_looks_at_zeros_masks_and_the_edge(monkeypatch):
    from fusionlab.graph.certify import programs

    told = []
    original = programs.specials
    monkeypatch.setattr(
        programs, "specials", lambda *given: (told.append(s.description) or s for s in original(*given))
    )
    edges = []
    at_edge = programs.at_edge
    monkeypatch.setattr(programs, "at_edge", lambda *a: edges.append(1) or at_edge(*a))
    monkeypatch.setattr(Certifier, "once", lambda self, key, make: make())  # whatever was proved before
    assert fl.find(layer, STREAM, SEEN, passes="dot_product_attention").candidates
    assert edges
    wanted = {"inputs of zeros", "inputs of zero variance", "masks of all False", "masks of all True"}
    assert wanted <= set(told)
