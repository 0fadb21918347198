"""Activations recognised by value and by derivative: any spelling passes, nothing else does."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy.stats import norm

import fusionlab as fl
from fusionlab.fusers.passes.linear.epilogues import KNOWN
from fusionlab.graph.canonical.view import CanonicalView
from fusionlab.graph.certify import activations as fingerprint
from fusionlab.graph.certify.activations import ACTIVATION_TOLERANCE, LOOKS, _known_profile, cone, recognise
from fusionlab.graph.certify.certify import Certifier
from fusionlab.graph.certify.profiles import distance
from fusionlab.graph.program.trace import trace
from fusionlab.kernels import meaning_of

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
ROOT_2_OVER_PI = math.sqrt(2 / math.pi)


def recognised(fn, dtype=jnp.float32, shape=(4, 6)):
    """What the function from its first product-like value to its result is recognised as."""
    block = trace(lambda x, y: fn(x * y), *(jax.ShapeDtypeStruct(shape, dtype),) * 2).top
    return recognise(CanonicalView(block), block.nodes[0].outputs[0], block.outputs[0], KNOWN, Certifier(meaning_of))


def gelu_tanh(k=ROOT_2_OVER_PI, c=0.044715):
    return lambda h: 0.5 * h * (1 + jnp.tanh(k * (h + c * h * h * h)))


SPELLINGS = {
    "relu": [
        jax.nn.relu,
        lambda h: jax.nn.relu(h) * 1.0,
        lambda h: 2.0 * jax.nn.relu(0.5 * h),
        jax.jit(jax.nn.relu),
    ],
    "relu_tie": [
        lambda h: jnp.maximum(h, 0),
        lambda h: jnp.maximum(0.0, h),
        lambda h: jnp.clip(h, 0),
        lambda h: lax.max(h, jnp.zeros_like(h)),
        lambda h: -jnp.minimum(-h, 0),
    ],
    "relu_where": [
        lambda h: jnp.where(h > 0, h, 0),
        lambda h: jnp.where(jnp.less(0, h), h, jnp.zeros_like(h)),
        lambda h: lax.select(h > 0, h, jnp.zeros_like(h)),
    ],
    "gelu_tanh": [
        jax.nn.gelu,
        gelu_tanh(),
        lambda h: h * 0.5 * (1 + jnp.tanh(ROOT_2_OVER_PI * h * (1 + 0.044715 * h**2))),
        lambda h: h * jax.nn.sigmoid(2 * ROOT_2_OVER_PI * (h + 0.044715 * h**3)),
        lambda h: 0.5 * (h + h * jnp.tanh(ROOT_2_OVER_PI * h + ROOT_2_OVER_PI * 0.044715 * h**3)),
    ],
    "gelu_erf": [
        lambda h: jax.nn.gelu(h, approximate=False),
        lambda h: 0.5 * h * (1 + lax.erf(h / math.sqrt(2))),
        lambda h: 0.5 * h * lax.erfc(-h * math.sqrt(0.5)),
        lambda h: h * (0.5 + 0.5 * lax.erf(h * (1 / math.sqrt(2)))),
    ],
    "silu": [
        jax.nn.silu,
        jax.nn.swish,
        lambda h: h * jax.nn.sigmoid(h),
        lambda h: h * 0.5 * (1 + jnp.tanh(0.5 * h)),
    ],
    "sigmoid": [jax.nn.sigmoid, lax.logistic, lambda h: 0.5 + 0.5 * jnp.tanh(h / 2)],
    "tanh": [jnp.tanh, lambda h: 2 * jax.nn.sigmoid(2 * h) - 1],
}
CASES = [(name, i) for name, fns in SPELLINGS.items() for i in range(len(fns))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "i"), CASES)
def test_a_spelling_is_recognised(name, i, dtype):
    assert recognised(SPELLINGS[name][i], DTYPES[dtype]).name == name


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
@pytest.mark.parametrize("name", SPELLINGS)
def test_every_activation_is_known_in_half_precision_and_at_any_rank(name, dtype):
    fn = SPELLINGS[name][0]
    assert recognised(fn, dtype, (2, 3, 5)).name == name
    assert recognised(fn, dtype, (1, 1)).name == name


def test_a_function_computed_in_f32_inside_a_bf16_model_is_judged_by_its_own_constants():
    """relu has none; gelu's are not rounded to bf16 here, so it is not the op's bf16 gelu, and is never called another one."""

    def in_f32(act):
        return lambda h: act(h.astype(jnp.float32)).astype(jnp.bfloat16)

    assert recognised(in_f32(jax.nn.relu), jnp.bfloat16).name == "relu"
    found = recognised(in_f32(jax.nn.gelu), jnp.bfloat16)
    assert (found.name, found.code) == (None, "activation")
    assert found.explained().why.startswith("the nearest known function is gelu_tanh: at ")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sigmoid_whose_own_gradient_overflows_is_not_jax_nns(dtype):
    """d/dh 1 / (1 + exp(-h)) as written is inf / inf^2, a NaN, for large negative h; jax.nn.sigmoid's is 0."""
    assert np.isnan(jax.grad(lambda h: 1 / (1 + jnp.exp(-h)))(-1e4))
    assert recognised(lambda h: 1 / (1 + jnp.exp(-h)), DTYPES[dtype]).name == "sigmoid_exp"
    assert recognised(lambda h: h / (1 + jnp.exp(-h)), DTYPES[dtype]).name == "silu_exp"


@pytest.mark.parametrize("cut", [-20.0, -31.0, -80.0])
def test_a_cut_in_a_tail_is_not_taken_for_noise(cut):
    """log(0) is -inf where log of the sigmoid is -81."""
    found = recognised(lambda h: jax.nn.sigmoid(h) * jnp.where(h > cut, 1.0, 0.0))
    assert found.name is None


TRAPS = {
    "relu6": (jax.nn.relu6, "activation"),
    "leaky_relu": (jax.nn.leaky_relu, "activation"),
    "leaky_relu of a tiny slope": (lambda h: jax.nn.leaky_relu(h, 1e-3), "activation"),
    "elu": (jax.nn.elu, "activation"),
    "softplus": (jax.nn.softplus, "activation"),
    "relu squared": (lambda h: jnp.square(jax.nn.relu(h)), "activation"),
    "maximum with 0.1": (lambda h: jnp.maximum(h, 0.1), "activation"),
    "a large upper limit": (lambda h: jnp.clip(h, 0, 60.0), "activation"),
    "gelu with 0.8": (gelu_tanh(k=0.8), "activation"),
    "gelu with 0.05": (gelu_tanh(c=0.05), "activation"),
    "quick gelu with 1.6": (lambda h: h * jax.nn.sigmoid(1.6 * h), "activation"),
    "hard tanh": (jax.nn.hard_tanh, "activation"),
    "hard swish": (jax.nn.hard_silu, "activation"),
    "sine": (jnp.sin, "activation"),
    "a scaled relu": (lambda h: 1.01 * jax.nn.relu(h), "activation"),
    "a shifted relu": (lambda h: jax.nn.relu(h - 0.01), "activation"),
    "a negated relu": (lambda h: -jax.nn.relu(-h), "activation"),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TRAPS)
def test_another_function_is_not_taken_for_a_known_one(name, dtype):
    fn, code = TRAPS[name]
    found = recognised(fn, DTYPES[dtype])
    assert (found.name, found.code) == (None, code), found
    assert "nearest known function is" in found.explained().why


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_right_values_with_another_gradient_are_declined_for_the_gradient(dtype):
    """At a tie the gradient of where(h < 0, 0, h) is 1: neither relu's 0 nor maximum's 1/2."""
    found = recognised(lambda h: jnp.where(h < 0, 0, h), DTYPES[dtype])
    assert (found.name, found.code) == (None, "gradient")
    assert found.explained().why in (
        "its values are relu's but its gradient is not",
        "its values are relu_tie's but its gradient is not",
    )


def test_the_two_gelus_are_told_apart_in_both_dtypes():
    for dtype in DTYPES.values():
        assert recognised(lambda h: jax.nn.gelu(h, approximate=True), dtype).name == "gelu_tanh"
        assert recognised(lambda h: jax.nn.gelu(h, approximate=False), dtype).name == "gelu_erf"


def test_gelu_by_the_normal_distribution_is_gelu_erf_or_says_why_not():
    found = recognised(lambda h: h * norm.cdf(h))
    assert found.name == "gelu_erf", found.explained().why


def test_another_result_dtype_is_said():
    found = recognised(lambda h: jax.nn.relu(h).astype(jnp.bfloat16))
    assert (found.name, found.explained().why) == (None, "its result is bfloat16, not float32")


def test_the_tolerance_is_below_half_of_what_tells_the_gelus_apart():
    h = np.linspace(-9, 9, 4001)
    tanh = 0.5 * h * (1 + np.tanh(ROOT_2_OVER_PI * (h + 0.044715 * h**3)))
    erf = 0.5 * h * (1 + np.vectorize(math.erf)(h / math.sqrt(2)))
    gap = np.max(np.abs(tanh - erf))
    assert gap == pytest.approx(4.73e-4, rel=0.01)
    assert max(ACTIVATION_TOLERANCE.values()) < gap / 2


def test_a_cone_stops_at_what_is_not_elementwise_or_reads_other_values():
    def fn(x, y):
        h = x * y
        a = jnp.maximum(h * 2.0, 0.0)
        return a + y, a.sum(1), a @ y.T, jnp.tanh(a)

    block = trace(fn, *(jax.ShapeDtypeStruct((4, 6), jnp.float32),) * 2).top
    nodes = cone(CanonicalView(block), block.nodes[0].outputs[0])
    assert [n.primitive for n in nodes] == ["mul", "max", "tanh"]


def test_distance_is_relative_to_the_value_however_small_and_infinite_where_specials_differ():
    def at(point, got, want):
        return distance(np.array([got]), np.array([want]), np.array([point]))

    assert at(200.0, 1e4 + 1.0, 1e4) == pytest.approx(1e-4 / (1 + math.log(1e4)))
    assert at(-0.75, 1e-9, 0.0) == pytest.approx(1e-9 / 0.75, rel=0.01)  # a slope that crosses zero near the origin
    assert at(-50.0, 1e-14, 1e-20) == 0.0  # what 1 + tanh leaves in float64
    assert at(-200.0, 1e-14, 0.0) == math.inf
    assert at(0.0, np.nan, 0.0) == math.inf
    assert at(0.0, np.inf, -np.inf) == math.inf
    assert at(0.0, np.nan, np.nan) == 0.0


EPSILONS = {
    "relu + 1e-7": lambda h: jax.nn.relu(h) + 1e-7,
    "relu + 1e-10": lambda h: jax.nn.relu(h) + 1e-10,
    "sigmoid + 1e-7": lambda h: jax.nn.sigmoid(h) + 1e-7,
    "a squeezed sigmoid": lambda h: (1 - 2e-7) * jax.nn.sigmoid(h) + 1e-7,
    "silu + 1e-6": lambda h: jax.nn.silu(h) + 1e-6,
    "tanh + 1e-7": lambda h: jnp.tanh(h) + 1e-7,
    "gelu + 1e-8": lambda h: jax.nn.gelu(h) + 1e-8,
    "a stretched relu": lambda h: (1 + 6e-7) * jax.nn.relu(h),
}


@pytest.mark.parametrize("name", EPSILONS)
def test_an_epsilon_after_an_activation_is_not_swallowed(name):
    """log(relu(h) + 1e-7) is finite: the epsilon is what keeps it so."""
    assert recognised(EPSILONS[name]).name is None


def test_a_rule_of_the_users_own_for_a_function_of_jaxs_is_not_jaxs():
    """Also when the same function with JAX's own rule was recognised before."""
    straight = jax.custom_jvp(jax.nn.relu.__wrapped__)
    straight.defjvps(lambda g, ans, x: g)
    certifier = Certifier(meaning_of)

    def name_of(fn):
        block = trace(lambda x, y: fn(x * y), *(jax.ShapeDtypeStruct((4, 6), jnp.float32),) * 2).top
        nodes = cone(CanonicalView(block), block.nodes[0].outputs[0])
        return (
            nodes
            and recognise(CanonicalView(block), block.nodes[0].outputs[0], block.outputs[0], KNOWN, certifier).name
        )

    assert name_of(jax.nn.relu) == "relu"
    assert not name_of(straight)
    assert name_of(jax.nn.relu) == "relu"


def test_a_tensor_of_equal_axes_costs_no_more_than_a_long_one():
    """The points are laid along one axis, and axes of one size reduce to one size: their product has to stay small."""
    assert recognised(jnp.tanh, shape=(16, 16, 16, 16, 16)).name == "tanh"


def test_an_answer_is_remembered_by_the_cones_signature():
    certifier = Certifier(meaning_of)

    def layers(x, y):
        return jax.nn.gelu(x * y), jax.nn.gelu(x - y), jax.nn.relu(x + y)

    block = trace(layers, *(jax.ShapeDtypeStruct((4, 6), jnp.float32),) * 2).top
    view = CanonicalView(block)
    both = {v.id for v in block.inputs}
    starts = [n.outputs[0] for n in block.nodes if {getattr(a, "id", None) for a in n.inputs} == both]
    first = recognise(view, starts[0], block.outputs[0], KNOWN, certifier)
    hits, misses = certifier.hits, certifier.misses
    again = recognise(view, starts[1], block.outputs[1], KNOWN, certifier)
    assert again is first
    assert (certifier.hits, certifier.misses) == (hits + 1, misses)
    assert first.name == "gelu_tanh"
    assert recognise(view, starts[2], block.outputs[2], KNOWN, certifier).name == "relu"
    assert certifier.misses > misses


def test_activations_are_known_under_an_explicit_mesh_too():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    x, w = jnp.ones((4, 8)), jnp.ones((8, 8))
    _known_profile.cache_clear()
    with jax.set_mesh(mesh):
        found = fl.find(lambda x: jax.nn.gelu(x @ w), x)
    assert [c.attrs["activation"] for c in found.candidates] == ["gelu_tanh"]


def test_a_long_function_is_no_known_one_and_is_not_evaluated(monkeypatch):
    def fn(x, w):
        h = x @ w
        for _ in range(60):
            h = jnp.sin(h)
        return h

    evaluated = []
    real = fingerprint.profile
    monkeypatch.setattr(fingerprint, "profile", lambda *a, **k: evaluated.append(a) or real(*a, **k))
    found = fl.find(fn, jnp.ones((4, 8)), jnp.ones((8, 8)), passes="gemm_epilogue")
    assert "takes 60 operations" in found.rejections[0].sentence
    assert len(evaluated) <= 40 + 2 * len(KNOWN)


@pytest.mark.whole
@pytest.mark.parametrize("name", KNOWN)
def test_a_known_function_looks_as_it_is_told_to(name):
    """Else a search would pass over it."""
    with jax.enable_x64(True):
        made = np.asarray(KNOWN[name].fn(jnp.asarray(LOOKS, jnp.float64)))
    np.testing.assert_allclose(made, KNOWN[name].looks, rtol=0, atol=6e-4)
