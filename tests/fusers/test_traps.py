"""Programs built to be rewritten wrongly: each keeps its values and gradients, and says how it was found or why it was declined."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import fusionlab as fl

from .checks import agree, close, codes, normal, primitives, weighed

pytestmark = pytest.mark.whole

X, W, B, W2, B2 = normal((6, 4), (4, 10), (10,), (10, 3), (3,))
ARGS = (X, W, B)
RELU = jax.nn.relu


def activations(found):
    return [c.attrs["activation"] for c in found.candidates if c.pass_name == "gemm_epilogue"]


# -- gradients of the user's own --------------------------------------------------------------------------------------


def ste_sign(h):
    """Straight-through estimator: sign forward, identity backward."""
    return h + lax.stop_gradient(jnp.sign(h) - h)


def ste_relu(h):
    """The values of relu with the gradient of the identity."""
    return h + lax.stop_gradient(RELU(h) - h)


@pytest.mark.parametrize("estimator", [ste_sign, ste_relu])
def test_a_straight_through_estimator_keeps_its_gradient(estimator):
    found = agree(lambda x, w, b: estimator(x @ w + b), *ARGS)
    assert activations(found) == ["none"]
    grad = jax.grad(lambda x: jnp.sum(fl.fuse(lambda x: estimator(x @ W + B))(x)))(X)
    close(grad, jnp.broadcast_to(W.sum(1), X.shape), 2.0)  # as if there were no activation at all


def test_a_straight_through_relu_is_never_called_relu():
    found = fl.find(lambda x, w, b: ste_relu(x @ w + b), *ARGS)
    assert "relu" not in activations(found)
    assert codes(found)
    assert set(codes(found)) <= {"activation", "escapes", "gradient", "stop_gradient"}


@jax.custom_vjp
def reverse(h):
    return h


reverse.defvjp(lambda h: (h, None), lambda _, ct: (-ct,))


@jax.custom_vjp
def clip_gradient(h):
    return h


clip_gradient.defvjp(lambda h: (h, None), lambda _, ct: (jnp.clip(ct, -0.1, 0.1),))


@jax.custom_jvp
def leaky_backward(h):
    """relu forward, a leaky gradient backward."""
    return RELU(h)


leaky_backward.defjvp(lambda p, t: (RELU(p[0]), t[0] * jnp.where(p[0] > 0, 1.0, 0.2)))

RULES = {"gradient reversal": reverse, "gradient clip": clip_gradient, "leaky backward": leaky_backward}
PLACES = {
    "on the linear result": lambda rule: lambda x, w, b: RELU(rule(x @ w + b)),
    "on the product": lambda rule: lambda x, w, b: RELU(rule(x @ w) + b),
    "on the activated value": lambda rule: lambda x, w, b: rule(RELU(x @ w + b)),
    "on the input": lambda rule: lambda x, w, b: RELU(rule(x) @ w + b),
    "on the weight": lambda rule: lambda x, w, b: RELU(x @ rule(w) + b),
    "on the bias": lambda rule: lambda x, w, b: RELU(x @ w + rule(b)),
}
# where the rule stands between the product and its epilogue, the fusion ends before it; elsewhere it stays outside the site
FUSED = {
    "on the linear result": ["none"],
    "on the product": [],
    "on the activated value": ["relu"],
    "on the input": ["relu"],
    "on the weight": ["relu"],
    "on the bias": ["relu"],
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rule", RULES)
def test_a_users_derivative_rule_is_kept_wherever_it_stands(rule, place):
    found = agree(PLACES[place](RULES[rule]), *ARGS)
    assert activations(found) == FUSED[place]
    kept = [n for n in found.apply().nodes() if n.primitive in ("custom_vjp_call", "custom_jvp_call")]
    assert kept
    if place == "on the linear result":
        (rejection,) = found.rejections
        assert rejection.code == "custom_rule"
        assert "has a derivative of the user's own" in rejection.sentence


def test_a_gradient_reversal_reverses_and_a_clip_clips():
    """Against the definition, not only against the original."""

    def loss(rule):
        return jax.grad(lambda x: jnp.sum(fl.fuse(lambda x: RELU(rule(x @ W + B)))(x)))(X)

    plain = loss(lambda h: h)
    close(loss(reverse), -plain)
    close(loss(clip_gradient), 0.1 * plain, 2.0)


# -- frozen and named values ------------------------------------------------------------------------------------------

FROZEN = {
    "weight": (lambda x, w, b: RELU(x @ lax.stop_gradient(w) + b), 1),
    "bias": (lambda x, w, b: RELU(x @ w + lax.stop_gradient(b)), 2),
    "input": (lambda x, w, b: RELU(lax.stop_gradient(x) @ w + b), 0),
}


@pytest.mark.parametrize("name", FROZEN)
def test_a_frozen_operand_is_fused_and_still_gets_no_gradient(name):
    fn, i = FROZEN[name]
    found = agree(fn, *ARGS)
    assert activations(found) == ["relu"]
    assert "stop_gradient" in primitives(found.apply())
    gradients = jax.grad(weighed(fl.fuse(fn)), (0, 1, 2))(*ARGS)
    assert [bool(np.any(g)) for g in gradients] == [j != i for j in range(3)]


def test_a_stopped_linear_result_leaves_the_linear_part_and_says_so():
    found = agree(lambda x, w, b: RELU(lax.stop_gradient(x @ w + b)), *ARGS)
    assert activations(found) == ["none"]
    assert codes(found) == ["stop_gradient"]
    assert "stops the gradient of the linear result" in found.rejections[0].sentence


def saved_names(f, *args):
    """Shapes of what a function keeps for its backward pass, arguments aside."""
    _, pull = jax.vjp(f, *args)
    return sorted(leaf.shape for leaf in jax.tree.leaves(pull) if hasattr(leaf, "shape"))


def test_a_named_residual_is_still_what_the_policy_saves():
    def layer(x, w, b):
        h = checkpoint_name(x @ w + b, "pre")
        return jnp.sin(RELU(h) @ W2 + B2)

    policy = jax.checkpoint_policies.save_only_these_names("pre")

    def f(x, w, b):
        return jax.checkpoint(layer, policy=policy)(x, w, b)

    found = agree(f, *ARGS, factor=2)
    names = [n for n in found.apply().nodes() if n.primitive == "name"]
    assert [n.params["name"] for n in names] == ["pre"]
    assert activations(found) == ["none", "none"]  # the name stands between the linear result and relu
    assert saved_names(fl.fuse(f), *ARGS) == saved_names(f, *ARGS)
    assert (6, 10) in saved_names(fl.fuse(f), *ARGS)


def test_a_name_on_the_activated_value_leaves_the_whole_site():
    def f(x, w, b):
        body = jax.checkpoint(
            lambda x, w, b: jnp.sin(checkpoint_name(RELU(x @ w + b), "act")),
            policy=jax.checkpoint_policies.save_only_these_names("act"),
        )
        return body(x, w, b)

    found = agree(f, *ARGS)
    assert activations(found) == ["relu"]
    assert saved_names(fl.fuse(f), *ARGS) == saved_names(f, *ARGS)


# -- ties and lookalikes ----------------------------------------------------------------------------------------------

ZERO_ROWS = X.at[1].set(0.0).at[4].set(0.0)  # with b = 0 the pre-activation of rows 1 and 4 is exactly 0
NO_BIAS = jnp.zeros(10)
TIES = {
    "jax.nn.relu": (RELU, "relu", 0.0),
    "jnp.maximum(h, 0)": (lambda h: jnp.maximum(h, 0), "relu_tie", 0.5),
    "jnp.where(h > 0, h, 0)": (lambda h: jnp.where(h > 0, h, 0), "relu_where", 0.0),
    "jnp.where(h < 0, 0, h)": (lambda h: jnp.where(h < 0, 0, h), "none", 1.0),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", TIES)
def test_the_gradient_at_ties_is_the_spellings_own(name, dtype):
    act, found_as, slope = TIES[name]
    args = [a.astype(dtype) for a in (ZERO_ROWS, W, NO_BIAS)]
    found = agree(lambda x, w, b: act(x @ w + b), *args)
    assert activations(found) == [found_as]
    assert (codes(found) == ["gradient"]) == (found_as == "none")
    fused = fl.fuse(lambda b: act(args[0] @ args[1] + b))
    at_ties = jax.vjp(fused, args[2])[1](jnp.zeros((6, 10), dtype).at[jnp.array([1, 4])].set(1))[0]
    np.testing.assert_array_equal(np.asarray(at_ties, np.float32), np.full(10, 2 * slope, np.float32))


def test_ties_in_the_data_reach_the_weights_and_the_inputs():
    """Zero columns of w give ties in whole columns of h."""
    w = W.at[:, 2].set(0.0).at[:, 7].set(0.0)
    found = agree(lambda x, w, b: jnp.maximum(x @ w + b, 0), X, w, NO_BIAS)
    assert activations(found) == ["relu_tie"]


def test_nan_and_infinity_come_out_as_in_the_original():
    x = X.at[0, 0].set(jnp.nan).at[2, 1].set(jnp.inf).at[3, 2].set(-jnp.inf)
    for act in (RELU, lambda h: jnp.maximum(h, 0), lambda h: jnp.where(h > 0, h, 0), jax.nn.gelu):
        fn = lambda x, w, b, act=act: act(x @ w + b)  # noqa: E731
        np.testing.assert_array_equal(fl.fuse(fn)(x, W, B), jax.jit(fn)(x, W, B))


LOOKALIKES = {
    "relu6": (jax.nn.relu6, "activation"),
    "gelu with 0.8 for 0.7979": (lambda h: 0.5 * h * (1 + jnp.tanh(0.8 * (h + 0.044715 * h**3))), "activation"),
    "maximum with 0.1": (lambda h: jnp.maximum(h, 0.1), "activation"),
    "leaky relu": (lambda h: jax.nn.leaky_relu(h, 0.01), "activation"),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", LOOKALIKES)
def test_a_lookalike_is_declined_and_keeps_its_values_and_gradients(name, dtype):
    act, code = LOOKALIKES[name]
    args = [10 * a.astype(dtype) for a in ARGS]  # beyond relu6's 6
    found = agree(lambda x, w, b: act(x @ w + b), *args)
    assert activations(found) == ["none"]
    assert codes(found) == [code]


def test_the_two_gelus_are_each_given_their_own():
    for approximate, name in ((True, "gelu_tanh"), (False, "gelu_erf")):
        found = agree(lambda x, w, b, a=approximate: jax.nn.gelu(x @ w + b, approximate=a), 2 * X, W, B)
        assert activations(found) == [name]


# -- near-misses of the layer -----------------------------------------------------------------------------------------

COLUMN = normal((6,), seed=1)[0]
FULL = normal((6, 10), seed=2)[0]
NEAR = {
    "relu before the bias": (lambda x, w, b: RELU(x @ w) + b, ARGS, ["relu"], []),
    "full-tensor bias": (lambda x, w, y: RELU(x @ w + y), (X, W, FULL), [], ["bias"]),
    "bias along the rows": (lambda x, w, c: RELU(x @ w + c[:, None]), (X, W, COLUMN), [], ["bias"]),
    "a factor before the bias": (lambda x, w, b: RELU(2.5 * (x @ w) + b), ARGS, [], ["scalar"]),
    "a factor after the bias": (lambda x, w, b: RELU(2.5 * (x @ w + b)), ARGS, ["none"], ["activation"]),
    "clipped at 20": (lambda x, w, b: jnp.clip(10 * (x @ w) + 10 * b, 0, 20.0), ARGS, [], ["scalar"]),
    "clipped at 2": (lambda x, w, b: jnp.clip(x @ w + b, 0, 2.0), ARGS, ["relu_tie"], []),  # and a minimum after it
    "clipped at 2 first": (lambda x, w, b: jnp.maximum(jnp.minimum(x @ w + b, 2.0), 0), ARGS, ["none"], ["activation"]),
    "a factor on the input": (lambda x, w, b: RELU((2.5 * x) @ w + b), ARGS, ["relu"], []),
    "a factor on the bias": (lambda x, w, b: RELU(x @ w + 2.5 * b), ARGS, ["relu"], []),
    "the bias twice": (lambda x, w, b: RELU(x @ w + b + b), ARGS, None, None),
    "two biases": (lambda x, w, b, c: RELU(x @ w + b + c), (X, W, B, 2 * B), None, None),
    "the input added": (lambda x, w, b: RELU(x @ w[:, :4] + x), ARGS, [], ["bias"]),
    "a product of products": (lambda x, w, b: (x @ w) @ W2 + B2, ARGS, ["none"], []),
    "two products added": (lambda x, w, b: RELU(x @ w + jnp.sin(x) @ w + b), ARGS, None, None),
    "a gate": (lambda x, w, b: RELU(x @ w + b) * (x @ w - b), ARGS, None, None),
}


@pytest.mark.parametrize("name", NEAR)
def test_a_near_miss_of_the_layer_stays_right_and_is_told_truly(name):
    fn, args, found_as, reasons = NEAR[name]
    found = agree(fn, *args, factor=2)
    if found_as is not None:
        assert activations(found) == found_as, found.candidates
        assert codes(found) == reasons, found.rejections


def test_rows_and_features_of_one_size_do_not_confuse_a_row_bias():
    x, w, v = normal((7, 7), (7, 7), (7,), seed=3)
    assert activations(agree(lambda x, w, v: x @ w + v, x, w, v)) == ["none"]
    rows = agree(lambda x, w, v: x @ w + v[:, None], x, w, v)
    assert (activations(rows), codes(rows)) == ([], ["bias"])
    turned = agree(lambda x, w, v: (x @ w + v).T, x, w, v)
    assert activations(turned) == ["none"]
    sides = agree(lambda x, w, v: (x.T @ w.T + v) @ w + v[None], x, w, v, factor=2)
    assert activations(sides) == ["none", "none"]


# -- mutable arrays ---------------------------------------------------------------------------------------------------


@pytest.mark.dear
def test_reads_and_writes_of_a_mutable_array_keep_their_order():
    """In a loop and around it, between two sites that it feeds."""

    def fn(x, w, b):
        kept = jax.new_ref(x)

        @jax.jit
        def layer(carry, _):
            h = RELU(kept[...] @ w + b)
            kept[...] *= 2
            return carry + h, None

        h, _ = lax.scan(layer, jnp.zeros((6, 10)), None, length=2)
        return h + jnp.tanh(kept[...] @ w + b), kept[...]

    found = fl.find(fn, *ARGS)
    assert sorted(activations(found)) == ["relu", "tanh"]
    close(fl.fuse(fn)(*ARGS), jax.jit(fn)(*ARGS), 4.0)
