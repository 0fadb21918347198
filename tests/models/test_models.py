"""The models compute what they say: checked against NumPy in float64, not against themselves."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab.errors import ArgumentError, UnknownNameError
from fusionlab.models import layers, mlp, multi_fc, transformer

KEY = jax.random.key(7)


def f64(tree):
    return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


def np_dense(p, x):
    return x @ p["w"] + p["b"]


def np_gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


NP_ACT = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu_tanh": np_gelu_tanh,
    "gelu_erf": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "none": lambda x: x,
}


def np_softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def np_layer_norm(p, x):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def np_block(p, x, heads, causal):
    b, t, e = x.shape
    h = np_layer_norm(p["ln1"], x)
    q, k, v = (np_dense(p["attention"][n], h).reshape(b, t, heads, e // heads) for n in "qkv")
    scores = np.einsum("bthd,bshd->bhts", q, k) / math.sqrt(e // heads)
    if causal:
        scores = np.where(np.tril(np.ones((t, t), bool)), scores, -np.inf)
    mixed = np.einsum("bhts,bshd->bthd", np_softmax(scores), v).reshape(b, t, e)
    x = x + np_dense(p["attention"]["out"], mixed)
    h = np_layer_norm(p["ln2"], x)
    return x + np_dense(p["mlp"]["fc2"], np_gelu_tanh(np_dense(p["mlp"]["fc1"], h)))


@pytest.mark.parametrize("activation", sorted(NP_ACT))
def test_multi_fc_computes_its_formula(activation):
    params, (x, y, e) = multi_fc.init(KEY, hidden=24), multi_fc.inputs(KEY, batch=2, seq=5, hidden=24)
    assert y.shape == (1, 24, 24)
    assert float(x.min()) < -0.4
    assert float(x.max()) < 0.5
    p, x64, y64, e64 = f64((params, x, y, e))
    act = NP_ACT[activation]
    h = np_dense(p["linear2"], act(np_dense(p["linear1"], x64)))
    expected = act(act(np_dense(p["linear3"], h)) @ y64 + e64) + h @ y64
    got = multi_fc.apply(params, x, y, e, activation=activation)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    np.testing.assert_allclose(multi_fc.loss(params, x, y, e, activation=activation), expected.mean(), atol=1e-5)


def test_multi_fc_has_six_parameters_and_its_published_size():
    assert len(jax.tree.leaves(multi_fc.init(KEY, hidden=8))) == 6
    x, y, e = jax.eval_shape(lambda: multi_fc.inputs(KEY))
    assert (x.shape, y.shape, e.shape) == ((64, 128, 768), (1, 768, 768), (768,))


@pytest.mark.parametrize("activation", ["relu", "gelu_erf"])
def test_mlp_computes_its_formula(activation):
    params = mlp.init(KEY, 6, 10, 4)
    x = jax.random.normal(KEY, (3, 5, 6))
    p, x64 = f64((params, x))
    expected = np_dense(p["fc2"], NP_ACT[activation](np_dense(p["fc1"], x64)))
    np.testing.assert_allclose(mlp.apply(params, x, activation=activation), expected, atol=1e-5)
    loss = mlp.loss(params, x, jnp.ones((3, 5, 4)), activation=activation)
    np.testing.assert_allclose(loss, np.mean((expected - 1) ** 2), rtol=1e-5)


@pytest.mark.parametrize("spelling", transformer.SPELLINGS)
@pytest.mark.parametrize("causal", [False, True])
def test_transformer_block_computes_its_formula(spelling, causal):
    params, x = transformer.init_block(KEY, embed=24, ffn=40), transformer.inputs(KEY, batch=2, seq=7, embed=24)
    p, x64 = f64((params, x))
    got = transformer.block(params, x, heads=3, causal=causal, spelling=spelling)
    np.testing.assert_allclose(got, np_block(p, x64, 3, causal), atol=2e-5)


def test_encoder_stacks_its_blocks():
    params, x = transformer.init(KEY, layers=2, embed=16), transformer.inputs(KEY, seq=5, embed=16)
    p, x64 = f64((params, x))
    expected = np_block(p[1], np_block(p[0], x64, 4, False), 4, False)
    np.testing.assert_allclose(transformer.encoder(params, x), expected, atol=2e-5)


def test_the_two_spellings_are_different_programs():
    params, x = transformer.init_block(KEY, embed=16), transformer.inputs(KEY, seq=5, embed=16)
    texts = {str(jax.make_jaxpr(lambda s=s: transformer.block(params, x, spelling=s))()) for s in transformer.SPELLINGS}
    assert len(texts) == 2


def test_train_step_lowers_the_loss():
    params, x = transformer.init(KEY, layers=1, embed=16), transformer.inputs(KEY, batch=2, seq=5, embed=16)
    target = jax.random.normal(jax.random.key(8), x.shape)
    adam, step = transformer.init_adam(params), jax.jit(transformer.train_step)
    losses = []
    for _ in range(20):
        params, adam, value = step(params, adam, x, target)
        losses.append(float(value))
    assert int(adam[2]) == 20
    assert losses[-1] < 0.95 * losses[0]
    assert all(b < a for a, b in itertools.pairwise(losses))


def equations(jaxpr):
    inner = [v.jaxpr for e in jaxpr.eqns for v in e.params.values() if hasattr(v, "jaxpr")]
    return len(jaxpr.eqns) + sum(equations(j) for j in inner)


def test_a_training_step_has_about_580_equations_a_layer():
    counts = []
    for n in (1, 2):
        params, x = transformer.init(KEY, layers=n, embed=16), transformer.inputs(KEY, seq=4, embed=16)
        counts.append(
            equations(jax.make_jaxpr(transformer.train_step)(params, transformer.init_adam(params), x, x).jaxpr)
        )
    assert 540 <= counts[1] - counts[0] <= 640


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_dtype_asked_for_holds_throughout(dtype):
    params, x = transformer.init(KEY, 1, 16, dtype=dtype), transformer.inputs(KEY, seq=4, embed=16, dtype=dtype)
    assert {a.dtype for a in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
    assert jax.eval_shape(lambda: transformer.encoder(params, x, causal=True)).dtype == dtype
    new, _, value = jax.eval_shape(transformer.train_step, params, transformer.init_adam(params), x, x)
    assert {a.dtype for a in jax.tree.leaves(new)} == {jnp.dtype(dtype)}
    assert value.dtype == jnp.float32


def test_the_same_key_gives_the_same_parameters():
    a, b, c = (transformer.init(jax.random.key(k), 1, 8) for k in (1, 1, 2))
    np.testing.assert_array_equal(a[0]["mlp"]["fc1"]["w"], b[0]["mlp"]["fc1"]["w"])
    assert not np.array_equal(a[0]["mlp"]["fc1"]["w"], c[0]["mlp"]["fc1"]["w"])


def test_module_names_reach_the_traced_program():
    params, x = transformer.init(KEY, 2, 8), transformer.inputs(KEY, seq=4, embed=8)
    jaxpr = jax.make_jaxpr(transformer.encoder)(params, x)
    scopes = {str(e.source_info.name_stack) for e in jaxpr.eqns}
    assert {"layer_0/attention", "layer_1/mlp", "layer_1/ln2"} <= scopes


def test_bad_arguments_are_refused_by_name():
    params, x = transformer.init_block(KEY, 16), transformer.inputs(KEY, seq=4, embed=16)
    with pytest.raises(ArgumentError, match="heads: got 3"):
        transformer.block(params, x, heads=3)
    with pytest.raises(UnknownNameError, match="einsum, matmul"):
        transformer.block(params, x, spelling="einsumm")  # pyright: ignore
    with pytest.raises(UnknownNameError, match=r"gelu_erf.*Did you mean 'gelu_tanh'"):
        layers.activation_named("gelu_tan")
