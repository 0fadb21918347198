"""The float64 reference: the same program, the same draws, the same rules, no rounding."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec

from fusionlab.errors import ArgumentError, TraceError
from fusionlab.graph.interpret.promote import promote
from fusionlab.graph.jax_compat import enable_x64


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def wide(x):
    return np.asarray(x).astype(np.float64)


def close(got, want, rtol=1e-12):
    got = np.asarray(got)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, want, rtol=rtol, atol=1e-13)


def bf16_mlp(x, w1, w2):
    h = jnp.tanh((x @ w1).astype(jnp.float32) * 0.3).astype(jnp.bfloat16)
    return (h @ w2).astype(jnp.float32)


def numpy_mlp(x, w1, w2):
    # 0.3 is a float32 literal in the program, and stays that very number.
    return np.tanh(wide(x) @ wide(w1) * wide(np.float32(0.3))) @ wide(w2)


def mlp_args(m=5, k=7, n=6):
    return (
        normal(0, m, k, dtype=jnp.bfloat16),
        normal(1, k, n, dtype=jnp.bfloat16),
        normal(2, n, 3, dtype=jnp.bfloat16),
    )


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_a_bf16_mlp_promoted_equals_numpy_in_float64(m, k, n):
    args = mlp_args(m, k, n)
    close(promote(bf16_mlp, *args).values(*args), numpy_mlp(*args))


def test_running_the_function_under_x64_is_not_the_reference():
    args = mlp_args()
    with enable_x64(True):
        under_x64 = np.asarray(bf16_mlp(*args), np.float64)
    reference = promote(bf16_mlp, *args).values(*args)
    assert np.abs(under_x64 - numpy_mlp(*args)).max() > 1e-3
    assert np.abs(reference - numpy_mlp(*args)).max() < 1e-13


def test_the_users_config_is_left_alone():
    before = jax.config.jax_enable_x64
    args = mlp_args()
    p = promote(bf16_mlp, *args)
    p.values(*args)
    p.gradients(np.ones((5, 3)), *args)
    assert jax.config.jax_enable_x64 == before
    assert jnp.ones(3).dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_draws_are_the_ones_the_program_sees(dtype):
    key = jax.random.key(3)

    def draws(key):
        a, b, c, d = jax.random.split(key, 4)
        return (
            jax.random.normal(a, (64,), dtype),
            jax.random.uniform(b, (64,), dtype, minval=-2.0, maxval=3.0),
            jax.random.gumbel(c, (64,), dtype),
            jax.random.bernoulli(d, 0.3, (64,)),
            jax.random.randint(d, (64,), 0, 10),
            jax.random.truncated_normal(a, -1.0, 1.0, (64,), dtype),
        )

    got = promote(draws, key).values(key)
    want = jax.jit(draws)(key)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == (np.float64 if jnp.issubdtype(w.dtype, jnp.floating) else w.dtype)
        np.testing.assert_array_equal(g, np.asarray(w).astype(g.dtype))


def test_running_the_function_under_x64_changes_the_draws():
    def f(key):
        return jax.random.uniform(key, (8,))

    key = jax.random.key(0)
    reference = promote(f, key).values(key)
    with enable_x64(True):
        assert np.abs(np.asarray(f(key)) - reference).max() > 1e-3


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_dropout_mask_is_identical_with_a_traced_rate(dtype):
    def dropout(key, x, rate):
        keep = 1 - rate
        return jnp.where(jax.random.bernoulli(key, keep, x.shape), x / keep, 0)

    args = (jax.random.key(7), normal(0, 100, 100, dtype=jnp.bfloat16), jnp.asarray(0.1, dtype))
    got = promote(dropout, *args).values(*args)
    assert ((got == 0) == (np.asarray(jax.jit(dropout)(*args)) == 0)).all()
    kept = got != 0
    close(got[kept], (wide(args[1]) / (1 - wide(args[2])))[kept])


def test_old_style_keys_draw_the_same():
    def f(seed_key):
        return jax.random.normal(jax.random.fold_in(seed_key, 3), (16,))

    key = jax.random.PRNGKey(5)
    np.testing.assert_array_equal(promote(f, key).values(key), wide(jax.jit(f)(key)))


def test_a_product_of_a_draw_is_computed_in_float64():
    def f(key, w):
        return jax.random.normal(key, (4, 5)) @ w

    args = (jax.random.key(0), normal(1, 5, 3))
    noise = wide(jax.jit(lambda k: jax.random.normal(k, (4, 5)))(args[0]))
    close(promote(f, *args).values(*args), noise @ wide(args[1]))


def test_a_loop_that_only_draws_is_replayed():
    def f(key):
        return jax.random.poisson(key, 3.0, (200,))

    key = jax.random.key(1)
    np.testing.assert_array_equal(promote(f, key).values(key), np.asarray(jax.jit(f)(key)))


def test_a_sampler_that_multiplies_draws_in_a_loop_is_replayed_in_its_own_dtype():
    def f(key):
        def again(c):
            key, p = c
            key, sub = jax.random.split(key)
            return key, p * jax.random.uniform(sub)

        return lax.while_loop(lambda c: c[1] > 1e-3, again, (key, 1.0))[1]

    for key in jax.random.split(jax.random.key(0), 4):
        assert promote(f, key).values(key) == wide(jax.jit(f)(key))


def test_scan_carries_and_outputs_are_promoted():
    def f(x, w):
        def step(c, xt):
            c = jnp.tanh(c @ w + xt).astype(jnp.bfloat16)
            return c, (c * 2, jnp.int32(1))

        return lax.scan(step, x[0], x, reverse=True)

    x, w = normal(0, 6, 4, dtype=jnp.bfloat16), normal(1, 4, 4, dtype=jnp.bfloat16)
    c, want = wide(x[0]), []
    for xt in wide(x)[::-1]:
        c = np.tanh(c @ wide(w) + xt)
        want.append(2 * c)
    got_c, (got_y, ones) = promote(f, x, w).values(x, w)
    close(got_c, c)
    close(got_y, np.stack(want[::-1]))
    assert ones.dtype == np.int32


def test_dropout_inside_a_scanned_remat_layer_is_identical_and_differentiable():
    def f(key, x):
        @jax.checkpoint
        def layer(x, key):
            return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), jnp.sin(x), 0), None

        return lax.scan(layer, x, jax.random.split(key, 3))[0]

    args = (jax.random.key(0), normal(0, 30))
    p = promote(f, *args)
    assert ((p.values(*args) == 0) == (np.asarray(jax.jit(f)(*args)) == 0)).all()
    (no_grad, got), _ = p.gradients(np.ones(30), *args)
    assert no_grad is None
    np.testing.assert_allclose(got, wide(jax.grad(lambda x: f(args[0], x).sum())(args[1])), rtol=1e-5, atol=1e-6)


def test_cond_while_and_fori_are_promoted():
    def f(x, n):
        y = lax.cond(n > 2, lambda a: a * 0.1, lambda a: a + 1, x)
        y = lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 1.1), (0, y))[1]
        return lax.fori_loop(0, 3, lambda i, a: a + x, y)

    x = normal(0, 5)
    tenth, growth = wide(np.float32(0.1)), wide(np.float32(1.1))
    p = promote(f, x, jnp.int32(4))
    close(p.values(x, jnp.int32(4)), wide(x) * tenth * growth**4 + 3 * wide(x))
    close(p.values(x, jnp.int32(1)), (wide(x) + 1) * growth + 3 * wide(x))


def test_relu_keeps_its_own_gradient_at_zero():
    x = jnp.asarray([-1.0, 0.0, 2.0])
    p = promote(jax.nn.relu, x)
    (got,), _ = p.gradients(np.array([1.0, 1.0, 3.0]), x)
    np.testing.assert_array_equal(got, [0.0, 0.0, 3.0])
    (tied,), _ = promote(lambda x: jnp.maximum(x, 0), x).gradients(np.ones(3), x)
    np.testing.assert_array_equal(tied, [0.0, 0.5, 1.0])


def test_a_custom_jvp_rule_is_kept_and_promoted():
    @jax.custom_jvp
    def f(x, n):
        return x * n

    @f.defjvp
    def rule(primals, tangents):
        (x, n), (dx, _) = primals, tangents
        return f(x, n), dx.astype(jnp.bfloat16).astype(x.dtype) * (0.7 * x)  # on purpose not the derivative

    x = normal(0, 5)
    (got, none), _ = promote(f, x, 3).gradients(np.full(5, 1 / 3), x, 3)
    close(got, 1 / 3 * (wide(np.float32(0.7)) * wide(x)))
    assert none is None


def test_a_custom_vjp_rule_is_kept_and_promoted():
    @jax.custom_vjp
    def clip_gradient(x, n):
        return x * n

    clip_gradient.defvjp(lambda x, n: (x * n, (x,)), lambda res, g: (jnp.clip(g, -0.1, 0.1) + 0 * res[0], None))
    x = normal(0, 6)

    def f(x):
        return jnp.sin(clip_gradient(x, jnp.int32(2)))

    p = promote(f, x)
    close(p.values(x), np.sin(2 * wide(x)))
    (got,), _ = p.gradients(np.full(6, 1 / 3), x)
    tenth = wide(np.float32(0.1))
    close(got, np.clip(np.cos(2 * wide(x)) / 3, -tenth, tenth))


def test_custom_rules_inside_scan_jit_and_remat_are_differentiable():
    def f(x, w):
        @jax.jit
        def layer(c, w):
            return jax.nn.gelu(jax.nn.relu(c @ w)) + jax.nn.silu(c), None

        return lax.scan(jax.checkpoint(layer), x, w)[0]

    x, w = normal(0, 3, 4), normal(1, 2, 4, 4)
    p = promote(f, x, w)
    got = p.gradients(np.ones((3, 4)), x, w)[0]
    want = jax.grad(lambda *a: f(*a).sum(), (0, 1))(x, w)
    for g, r in zip(got, want, strict=True):
        np.testing.assert_allclose(g, wide(r), rtol=2e-5, atol=1e-5)
        assert np.abs(g - wide(r)).max() > 0, "float32 and float64 cannot agree to the last bit"


def test_a_gradient_step_of_the_users_own_is_promoted():
    def step(w, x):
        def loss(w):
            return jnp.mean(jax.nn.gelu(x @ w, approximate=False).max(1) ** 2) + jnp.sum(w.at[0].add(1.0)[:2])

        return w - 0.1 * jax.grad(loss)(w)

    w, x = normal(0, 4, 3), normal(1, 8, 4)
    got = promote(step, w, x).values(w, x)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, wide(jax.jit(step)(w, x)), rtol=1e-5, atol=1e-6)
    with enable_x64(True):
        exact = np.asarray(step(jnp.asarray(wide(w)), jnp.asarray(wide(x))))
    np.testing.assert_allclose(got, exact, rtol=1e-7, atol=1e-8)  # 0.1 and erf's constants are float32 here


def test_scatters_reductions_sorts_and_convolutions_are_promoted():
    def f(x, k):
        a = x.at[jnp.array([1, 1])].add(0.5).at[0].mul(2.0)
        b = lax.reduce(a, jnp.bfloat16(1), lambda u, v: u * v, (0,))
        c = lax.reduce_window(x, -jnp.inf, lax.max, (2, 1), (1, 1), "VALID")
        d = lax.conv_general_dilated(x[None, None], k[None, None], (1, 1), "SAME")
        return a, b, c.sum(), jnp.sort(x, 0), d, jnp.cumsum(x, 0), jnp.argmax(x, 0)

    x, k = normal(0, 4, 3, dtype=jnp.bfloat16), normal(1, 3, 3, dtype=jnp.bfloat16)
    a = wide(x).copy()
    a[1] += 1
    a[0] *= 2
    got = promote(f, x, k).values(x, k)
    close(got[0], a)
    close(got[1], a.prod(0))
    close(got[2], np.maximum(wide(x)[1:], wide(x)[:-1]).sum())
    close(got[3], np.sort(wide(x), 0))
    padded = np.pad(wide(x), 1)
    close(got[4][0, 0], [[(padded[i : i + 3, j : j + 3] * wide(k)).sum() for j in range(3)] for i in range(4)])
    close(got[5], np.cumsum(wide(x), 0))
    assert got[6].dtype == np.int32
    np.testing.assert_array_equal(got[6], np.argmax(wide(x), 0))


def test_integers_bools_and_static_arguments_pass_through():
    def f(x, i, n, *, flag):
        return {"i": i * n, "b": x > 0, "x": x + i if flag else x, "int": (x * 100).astype(jnp.int32)}

    x = normal(0, 4)
    p = promote(f, x, jnp.int8(3), 2, flag=True, static_argnums=2, static_argnames="flag")
    got = p.values(x, jnp.int8(3), 2, flag=True)
    assert got["i"].dtype == np.int8
    assert got["i"] == 6
    assert got["b"].dtype == bool
    assert got["int"].dtype == np.int32
    close(got["x"], wide(x) + 3)


def test_shard_map_is_promoted_custom_rules_in_it_too():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("i")

    def f(x):
        def body(x):
            return lax.psum(jax.nn.relu(jnp.sin(x * 0.1)).astype(jnp.bfloat16).astype(jnp.float32).sum(0), "i")

        return jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=PartitionSpec())(x)

    x = normal(0, 4, 3)
    p = promote(f, x)
    tenth = wide(np.float32(0.1))
    close(p.values(x), np.maximum(np.sin(wide(x) * tenth), 0).sum(0))
    close(p.gradients(np.ones(3), x)[0][0], np.where(wide(x) > 0, tenth * np.cos(wide(x) * tenth), 0))


def test_inline_gives_an_opaque_primitive_its_meaning():
    def f(x):
        return jax.pure_callback(lambda v: np.tanh(v), jax.ShapeDtypeStruct(x.shape, x.dtype), x) * 0.1

    x = normal(0, 4)
    tenth = wide(np.float32(0.1))
    opaque = promote(f, x)
    got = opaque.values(x)
    assert "pure_callback" in opaque.notes[0]
    assert "test_promote.py" in opaque.notes[0]
    np.testing.assert_allclose(got, np.tanh(wide(x)) * tenth, rtol=1e-6)
    known = promote(f, x, inline=lambda eqn: jnp.tanh if eqn.primitive.name == "pure_callback" else None)
    close(known.values(x), np.tanh(wide(x)) * tenth)
    assert known.notes == ()


def test_a_primitive_with_a_program_of_its_own_is_refused_by_name():
    def f(x):
        return jax.custom_derivatives.linear_call(lambda r, x: r * x, lambda r, y: r * y, 2.0, x)

    x = jnp.ones(3)
    with pytest.raises(TraceError, match=r"linear_call \(test_promote\.py:\d+\)"):
        promote(f, x).values(x)


def test_a_vmapped_while_loop_stops_each_element_by_itself():
    def f(x):
        return jax.vmap(lambda v: lax.while_loop(lambda c: c < 10, lambda c: c * 1.5 + 1, v))(x)

    x = jnp.asarray([0.0, 5.0, 9.0, 20.0])
    want = wide(x).copy()
    while (want < 10).any():
        want = np.where(want < 10, want * 1.5 + 1, want)
    close(promote(f, x).values(x), want)


def test_linear_solves_and_their_gradients_are_promoted():
    def f(a, b):
        return jnp.linalg.solve(a @ a.T + 3 * jnp.eye(4), b)

    a, b = normal(0, 4, 4), normal(1, 4, 2)
    p = promote(f, a, b)
    spd = wide(a) @ wide(a).T + 3 * np.eye(4)
    close(p.values(a, b), np.linalg.solve(spd, wide(b)))
    close(p.gradients(np.ones((4, 2)), a, b)[0][1], np.linalg.solve(spd.T, np.ones((4, 2))))


def test_bad_arguments_are_named():
    x = normal(0, 3)
    p = promote(jnp.sin, x)
    with pytest.raises(ArgumentError, match="structure"):
        p.values(x, x)
    with pytest.raises(ArgumentError, match="arrays"):
        p.values(jax.ShapeDtypeStruct((3,), jnp.float32))
    with pytest.raises(ArgumentError, match="cotangent"):
        p.gradients((x, x), x)
    with pytest.raises(TraceError, match="does not trace"):
        promote(lambda x: x.reshape(7), x)
