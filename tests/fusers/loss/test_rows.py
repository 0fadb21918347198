"""Losses of a part of the rows: of the next token, of what follows a prompt, and those that train a policy on texts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from tests.fusers.checks import agree

from .spellings import integer_labels

NAME = "linear_cross_entropy"


def next_token(x, w, y, cut):
    """The logits of all but the last few tokens predict the next ones, as in Hugging Face's causal models."""
    return integer_labels((x @ w)[:, :-cut], y[:, cut:]).mean()


def completion(x, w, y, prompt):
    """The loss of what follows the first tokens of each text alone."""
    return integer_labels((x @ w)[:, prompt - 1 : -1], y[:, prompt:]).mean()


def of_log_probabilities(x, w, y, cut):
    """Rows are cut off what a softmax makes of all logits."""
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ w)[:, :-cut], y[:, cut:, None], -1).mean()


def test_two_parts_of_the_log_probabilities_are_declined_with_the_edit():
    x, w, y = jnp.ones((4, 256, 64)), jnp.ones((64, 1000)), jnp.ones((4, 256), int)

    def loss(x, w, y):
        z = jax.nn.log_softmax(x @ w)
        first, second = (-jnp.take_along_axis(z[:, :-n], y[:, n:, None], -1).mean() for n in (1, 2))
        return first + second

    found = fl.find(loss, x, w, y, passes=NAME, device="cpu")
    (reason,) = found.rejections
    assert (reason.code, len(found.candidates)) == ("uncertified", 0)
    assert "takes a part of" in reason.sentence
    assert "x[:, :-1] @ w" in reason.edit


def test_rows_that_are_taken_for_something_else_are_no_rows_of_the_loss():
    """The last token's logits, as for sampling, beside a loss of all tokens."""

    def loss(x, w, y):
        z = jax.nn.log_softmax(x @ w)
        return -jnp.take_along_axis(z, y[..., None], -1).mean(), z[:, -1:]

    x, w, y = jnp.ones((4, 16, 8)), jnp.ones((8, 100)), jnp.ones((4, 16), int)
    found = fl.find(loss, x, w, y, passes=NAME, device="cpu")
    assert [r.code for r in found.rejections] == ["escapes"]


@pytest.mark.dear
@pytest.mark.parametrize(
    "loss",
    [
        functools.partial(next_token, cut=1),
        functools.partial(completion, prompt=300),
        functools.partial(of_log_probabilities, cut=1),
    ],
    ids=["one", "prompt", "log-probabilities"],
)
def test_rows_cut_off_the_logits_are_found_at_sizes_of_a_real_model(loss):
    shapes = jax.ShapeDtypeStruct((8, 1024, 768), "bfloat16"), jax.ShapeDtypeStruct((768, 50304), "bfloat16")
    args = *shapes, jax.ShapeDtypeStruct((8, 1024), "int32")
    assert len(fl.find(loss, *args, passes=NAME, device="h200").candidates) == 1
    found = fl.find(jax.value_and_grad(loss, (0, 1)), *args, passes=NAME, device="h200")
    assert found.counts() == {NAME: 1, f"{NAME}_grad": 1}


@pytest.mark.parametrize(
    ("loss", "tokens"),
    [
        (lambda x, w, y: integer_labels((x @ w)[:, 300:], y[:, 300:]).mean(), 768),
        (lambda x, w, y: integer_labels((x @ w)[:, 299:][:, :-1], y[:, 300:]).mean(), 1024),
    ],
    ids=["as many tokens as features", "two cuts"],
)
def test_a_cut_is_found_where_its_axis_is_summed_too_and_where_another_cut_follows(loss, tokens):
    x, w = (jax.ShapeDtypeStruct(s, "float32") for s in ((1, tokens, 768), (768, 2000)))
    y = jax.ShapeDtypeStruct((1, tokens), "int32")
    found = fl.find(jax.value_and_grad(loss, (0, 1)), x, w, y, passes=NAME, device="h200")
    assert found.counts() == {NAME: 1, f"{NAME}_grad": 1}


def contrastive(x, z):
    """Each row's own class is one of the first of more; with as many classes as rows there is no proof at reduced sizes."""
    return integer_labels(x @ z.T / 0.1, jnp.arange(len(x))).mean()


def test_labels_that_the_program_counts_up_itself_are_labels():
    shapes = [jax.ShapeDtypeStruct((n, 512), "bfloat16") for n in (1024, 8192)]
    assert len(fl.find(contrastive, *shapes, passes=NAME, device="h200").candidates) == 1


@pytest.mark.dear
def test_a_loss_by_labels_that_are_counted_up_and_its_gradients():
    draw = np.random.default_rng(5)
    x, z = (jnp.asarray(draw.normal(size=(n, 8)), jnp.float32) for n in (12, 20))
    found = agree(jax.value_and_grad(contrastive, (0, 1)), x, z, passes=[NAME], factor=4)
    assert found.counts() == {NAME: 1, f"{NAME}_grad": 1}


@pytest.mark.dear
@pytest.mark.parametrize(
    "form",
    [
        functools.partial(next_token, cut=1),
        functools.partial(completion, prompt=13),
        functools.partial(of_log_probabilities, cut=3),
    ],
)
def test_rows_cut_off_the_logits_and_their_gradients(form):
    draw = np.random.default_rng(5)
    x, w = (jnp.asarray(draw.normal(size=s), jnp.float32) for s in ((3, 40, 8), (8, 33)))
    loss = functools.partial(form, y=jnp.asarray(draw.integers(0, 33, (3, 40))))
    found = agree(jax.value_and_grad(lambda x, w: loss(x, w), (0, 1)), x, w, passes=[NAME], factor=4)
    assert len(found.candidates) == 1


# -- policies ----------------------------------------------------------------------------------------------------------

DRAW = np.random.default_rng(7)
TEXTS, TOKENS, REPLY = 4, 21, 8
IDS = jnp.asarray(DRAW.integers(0, 33, (TEXTS, TOKENS)))
COUNTS = jnp.arange(TOKENS) < jnp.asarray([21, 17, 15, 14])[:, None]


def of_tokens(x, w):
    """The log-probability of each token of the replies, as libraries of reinforcement learning have it."""
    logits = (x @ w)[:, -REPLY - 1 : -1]
    return jnp.take_along_axis(jax.nn.log_softmax(logits), IDS[:, -REPLY:, None], -1)[..., 0]


def grpo(x, w):
    """Of group-relative policy optimisation (Shao et al., 2024, equation 3): clipped ratios, and a penalty for leaving the reference."""
    new, counts = of_tokens(x, w), COUNTS[:, -REPLY:]
    advantage, reference = jnp.asarray([0.3, -0.2, 1.0, -1.0])[:, None], jnp.full((TEXTS, REPLY), -3.0)
    ratio = jnp.exp(new - jax.lax.stop_gradient(new))
    gained = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
    left = jnp.exp(reference - new) - (reference - new) - 1
    return (((0.04 * left - gained) * counts).sum(-1) / counts.sum(-1)).mean()


def dpo(x, w):
    """Of direct preference optimisation (Rafailov et al., 2023, equation 7), of the pairs of the first two texts and the last two."""
    picked = jnp.take_along_axis(jax.nn.log_softmax((x @ w)[:, :-1]), IDS[:, 1:, None], -1)[..., 0]
    whole = (picked * COUNTS[:, 1:]).sum(-1)
    return -jax.nn.log_sigmoid(0.1 * (whole[:2] - whole[2:] - 0.3)).mean()


@pytest.mark.parametrize("loss", [grpo, dpo])
def test_the_loss_of_a_policy_is_found_with_its_gradients(loss):
    x, w = (jnp.asarray(DRAW.normal(size=s), jnp.float32) for s in ((TEXTS, TOKENS, 8), (8, 33)))
    found = agree(loss, x, w, passes=[NAME], factor=4)
    assert len(found.candidates) == 1
    assert fl.find(jax.value_and_grad(loss, (0, 1)), x, w, passes=NAME).counts() == {NAME: 1, f"{NAME}_grad": 1}


def test_a_bias_and_a_mean_in_a_shard_map_that_checks_what_varies():
    """The gradient of what every device has is summed over the devices, which the program says there; its numbers vary along the axis."""
    mesh, split = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,)), jax.P("d")

    def loss(x, w, b, y):
        return jax.lax.pmean(integer_labels(x @ w + b, y).mean(), "d")

    specs, gradients = (split, jax.P(), jax.P(), split), (split, jax.P(), jax.P())
    graded = jax.value_and_grad(loss, (0, 1, 2))
    step = jax.shard_map(graded, mesh=mesh, in_specs=specs, out_specs=(jax.P(), gradients))
    draw = np.random.default_rng(6)
    x, w, b = (jnp.asarray(draw.normal(size=s), jnp.float32) for s in ((12, 8), (8, 20), (20,)))
    found = agree(step, x, w, b, jnp.arange(12), passes=[NAME], factor=4)
    assert found.counts() == {NAME: 1, f"{NAME}_grad": 1}
