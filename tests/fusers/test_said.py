"""What a rejection says is about the program: the operation that stands there, with its line, what is needed in its place, and no edit that
is so already. What looks like nothing that a pass fuses has no rejection.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab.fusers.engine.declining import FUSE_FIRST, anchor_text, reason_to_tell
from fusionlab.fusers.engine.outcomes import Rejection

from .checks import normal

X, W, G = normal((8, 8), (8, 8), (8,))
Q, K, V = normal((2, 3, 8, 16), (2, 3, 8, 16), (2, 3, 8, 16))
LOW = jnp.tril(jnp.ones((8, 8), bool))
FILL = jnp.float32(-1e9)
LINE = re.compile(r"%\d+\S* = [\w-]+ \(test_said\.py:\d+\)")
OF_THE_MATCHER = ("pattern", "nearest example", "two uses", "relu_tie")


def softmax(z):
    return jax.nn.softmax(z, -1)


def dot(q, k):
    return q @ k.swapaxes(-1, -2)


def rms(x, epsilon=1e-6):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + epsilon)


def normed(x, keep=True, ddof=0, outside=False):
    mean, variance = x.mean(-1, keepdims=keep), x.var(-1, keepdims=keep, ddof=ddof)
    return (x - mean) / (jnp.sqrt(variance) + 1e-5 if outside else jnp.sqrt(variance + 1e-5))


def behind(act):
    return lambda x, w: act(x @ w)


def factor_for_keys_of_masked(q, k, v, g):
    return softmax(jnp.where(LOW, dot(q, k), -1e9) * g) @ v


# name -> program, arguments, code, what its sentence says, and its edit (None: there is none).
SAID = {
    "keepdims forgotten": (lambda x: normed(x, keep=False), (X,), "axes", "a different axis from the one whose rows", "keepdims=True"),
    "keepdims forgotten, rms": (lambda x: x / jnp.sqrt((x * x).mean(-1) + 1e-6), (X,), "axes", "sums over axis 1", "keepdims=True"),
    "ddof": (lambda x: normed(x, ddof=1), (X,), "scalar", "times 0.142857, where 1/N = 0.125 is needed", "ddof=0"),
    "epsilon outside": (lambda x: normed(x, outside=True), (X,), "structure", "epsilon added outside the root", "divide by"),
    "epsilon traced": (rms, (X, G[0]), "structure", "epsilon is an argument of the program", "close over epsilon"),
    "root of others": (
        lambda x: (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6),
        *((X,), "structure", "are two different values where the same value is needed twice", None),
    ),
    "another numerator": (
        lambda x: (x - 0.5 * x.mean(-1, keepdims=True)) * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * x,
        *((X,), "structure", "", None),
    ),
    "one key": (lambda q, k, v: softmax(dot(q, k)) @ v, (Q, K[:, :, :1], V[:, :, :1]), "axes", "a softmax of one entry is 1", "skip"),
    "factor for keys": (
        lambda q, k, v, g: softmax(dot(q, k) * g) @ v,
        *((Q, K, V, G), "axes", "the scores have a factor per key, %", "scale k"),
    ),
    "factor for keys, masked before": (factor_for_keys_of_masked, (Q, K, V, G), "axes", "a factor per key, %", None),
    "fill is an array": (
        lambda q, k, v, fill: softmax(jnp.where(LOW, dot(q, k), fill)) @ v,
        *((Q, K, V, FILL), "mask", "the score of masked keys is an argument of the program", "close over fill"),
    ),
    "divided after the mask by an argument": (
        lambda q, k, v, heat: softmax(jnp.where(LOW, dot(q, k), -jnp.inf) / heat) @ v,
        *((Q, K, V, G[0]), "mask", "the scores are divided after they are masked", None),
    ),
    "scores through a sine": (
        lambda q, k, v: softmax(jnp.sin(dot(q, k))) @ v,
        *((Q, K, V), "structure", "where the product of queries and keys is needed", None),
    ),
    "bias over rows": (
        lambda x, w, b: x[None] @ w + b[:, None, None],
        *((X, W, normal((3,))[0]), "bias", "it varies along axis 0 of %", None),
    ),
    "bias subtracted": (lambda x, w, b: b - x @ w, (X, W, G), "bias", "subtracts the product from %", "negated"),
    "quick gelu": (
        behind(lambda h: h * jax.nn.sigmoid(1.6 * h)),
        *((X, W), "activation", "the nearest known function is quick_gelu: at -1.48 that is -0.11 and this is -0.126", "use relu, gelu"),
    ),
    "another gradient": (
        behind(lambda h: jnp.where(h < 0, 0, h)),
        *((X, W), "gradient", "its values are relu's but its gradient is not", "use jax.nn.relu"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID)
def test_a_sentence_names_an_operation_its_line_and_what_is_needed(name):
    fn, args, code, says, edit = SAID[name]
    found = fl.find(fn, *args)
    (told,) = (r for r in found.rejections if r.pass_name != "lerp")
    assert (told.code, says in told.sentence) == (code, True), told
    assert LINE.search(told.sentence), told
    assert not [w for w in OF_THE_MATCHER if w in told.sentence], told
    assert (edit is None) if told.edit is None else edit is not None and edit in told.edit, told


def test_the_edit_of_a_factor_for_each_key_makes_a_site():
    fn = lambda q, k, v, g: softmax(dot(q, k * g[:, None])) @ v  # noqa: E731
    assert fl.find(fn, Q, K, V, G).counts()["dot_product_attention"] == 1


QUIET = {
    "the derivative of a loss": (jax.value_and_grad(lambda w, x: jnp.mean(jnp.square(x @ w))), (W, X)),
    "that of another": (jax.value_and_grad(lambda w, x: jnp.mean(jnp.log1p(jnp.abs(x @ w)))), (W, X)),
    "a difference from a target": (lambda x, w, y: jnp.mean(jnp.square(y - x @ w)), (X, W, X)),
    "the square of a norm": (lambda x, w: rms(x @ w), (X, W)),
    "a sigmoid by exp": (lambda x, w: behind(lambda h: h / (1 + jnp.exp(-h)))(x, w) @ w, (X, W)),
    "one in a train step": (
        jax.value_and_grad(lambda w, x: ((behind(lambda h: h / (1 + jnp.exp(-h)))(x, w) @ w) ** 2).sum()),
        (W, X),
    ),
}


@pytest.mark.parametrize("name", QUIET)
def test_what_is_no_site_has_no_rejection(name):
    fn, args = QUIET[name]
    assert not fl.find(fn, *args).rejections


def test_an_unknown_activation_is_told_the_same_in_a_train_step():
    def quick(w, x):
        h = x @ w
        return h * jax.nn.sigmoid(1.6 * h)

    (forward,) = fl.find(quick, W, X).rejections
    (train,) = fl.find(jax.value_and_grad(lambda w, x: (quick(w, x) @ w).sum()), W, X).rejections
    bare = re.compile(r"%\d+")
    assert bare.sub("", forward.sentence) == bare.sub("", train.sentence)
    assert forward.edit == train.edit != FUSE_FIRST


def test_a_reason_behind_another_is_said_with_it_and_no_edit_that_leads_to_it():
    def over_two_axes(x):
        mean = x.mean((0, 1), keepdims=True)
        return (x - mean) / jnp.sqrt(((x - mean) ** 2).mean((0, 1), keepdims=True) + 1e-5)

    (told,) = fl.find(jax.grad(lambda x: (over_two_axes(x) ** 3).sum()), Q[0]).rejections
    assert told.code == "escapes"
    assert "; once that is fixed: [axes] %" in told.sentence
    assert "jnp.moveaxis" in told.edit
    first, last = (Rejection("a", "a", "escapes", s, (), frozenset(), 1, 1, None, FUSE_FIRST) for s in ("one", "two"))
    assert reason_to_tell(first, last).sentence == "one; once that is fixed: [escapes] two"
    assert reason_to_tell(first, first) is first


def test_an_operation_of_many_results_is_named_by_the_first():
    node = SimpleNamespace(outputs=list(range(17)), primitive="remat2", source=None)
    assert anchor_text(node) == "0, 1, 2 and 14 more = remat2"


@pytest.mark.parametrize(
    ("device", "code", "says"), [("sm_75", "device", "sm_75 is older"), ("sm_90", "slower", "measured slower")]
)
def test_a_train_step_is_told_why_its_attention_is_left_to_xla_and_not_to_fuse_it_first(device, code, says):
    q = jax.ShapeDtypeStruct((2, 8, 512, 64), jnp.float32)
    step = jax.value_and_grad(lambda q: ((softmax(dot(q, q) / 8) @ q) ** 2).sum())
    (told,) = fl.find(step, q, device=device).rejections
    assert (told.code, says in told.sentence, told.edit == FUSE_FIRST) == (code, True, False), told
