"""The op protocol: meanings, eager caching, ahead-of-time lowering, shard_map, the public namespace."""

from __future__ import annotations

import doctest
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab.kernels.dot_product_attention.op as attention_op
import fusionlab.kernels.gemm_epilogue.op as gemm_op
import fusionlab.kernels.layer_norm.op as norm_op
from fusionlab import ops
from fusionlab.kernels import OPS, meaning_of
from fusionlab.kernels.implementation import Residual
from tests.simulated import environment

X, W, B = jnp.arange(12.0).reshape(3, 4) / 10 - 0.5, jnp.linspace(-1, 1, 20).reshape(4, 5), jnp.linspace(1, -1, 5)
Q = jnp.sin(jnp.arange(48.0)).reshape(1, 6, 2, 4)


def inline_meanings(jaxpr, *args):
    """Evaluates a flat jaxpr, replacing every fused equation by its meaning."""
    known = dict(zip(jaxpr.invars, args, strict=True))
    seen = []
    for eqn in jaxpr.eqns:
        operands = [known[v] if not hasattr(v, "val") else v.val for v in eqn.invars]
        meaning = meaning_of(eqn)
        if meaning is not None:
            seen.append(eqn.primitive.name)
            results = meaning(*operands)
        else:
            results = eqn.primitive.bind(*operands, **eqn.params)
            results = results if eqn.primitive.multiple_results else [results]
        known.update(zip(eqn.outvars, results, strict=True))
    return [known[v] for v in jaxpr.outvars], seen


@pytest.mark.parametrize(
    ("f", "args", "name"),
    [
        (lambda *a: ops.gemm_epilogue(*a, activation="gelu_tanh"), (X, W, B), "gemm_epilogue"),
        (lambda *a: ops.dot_product_attention(*a, is_causal=True), (Q, Q + 1, Q - 1), "dot_product_attention"),
        (lambda *a: ops.layer_norm(*a), (X, B[:4], B[1:]), "layer_norm"),
    ],
)
def test_an_interpreter_can_inline_every_primitive_by_its_meaning(f, args, name):
    grad = jax.grad(lambda *a: (f(*a) ** 2).sum(), (0, 1, 2))
    forward_and_back, seen = inline_meanings(jax.make_jaxpr(grad)(*args).jaxpr, *args)
    assert seen == [name, f"{name}_cotangent"]
    for got, want in zip(forward_and_back, grad(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    push = lambda *a: jax.jvp(f, a, a)[1]  # noqa: E731
    pushed, seen = inline_meanings(jax.make_jaxpr(push)(*args).jaxpr, *args)
    assert seen == [name, f"{name}_tangent"]
    np.testing.assert_allclose(pushed[0], push(*args), rtol=1e-5, atol=1e-5)


def test_other_equations_have_no_meaning_here():
    (eqn,) = jax.make_jaxpr(jnp.sin)(X).jaxpr.eqns
    assert meaning_of(eqn) is None


def test_a_reference_is_plain_code_without_our_primitives():
    for name, args in (("gemm_epilogue", (X, W, B)), ("dot_product_attention", (Q, Q, Q)), ("layer_norm", (X,))):
        text = str(jax.make_jaxpr(OPS[name].reference)(*args))
        assert name not in text
        np.testing.assert_allclose(OPS[name].reference(*args), OPS[name].call(*args), rtol=1e-6)


def test_eval_shape_and_ahead_of_time_lowering_for_cuda_need_no_gpu():
    f = lambda *a: ops.gemm_epilogue(*a, activation="relu")  # noqa: E731
    assert jax.eval_shape(f, X, W, B) == jax.ShapeDtypeStruct((3, 5), jnp.float32)
    lowered = jax.jit(jax.grad(lambda *a: f(*a).sum(), (0, 1))).trace(X, W, B).lower(lowering_platforms=("cuda",))
    assert "stablehlo.dot_general" in lowered.as_text()


def test_an_eager_call_compiles_once():
    primitive = OPS["gemm_epilogue"].primitives["gemm_epilogue"]
    cells = [cell.cell_contents for cell in primitive.impl.__closure__]
    compiled = next(c for c in cells if hasattr(c, "_cache_size"))
    ops.gemm_epilogue(jnp.ones((7, 4)), W, B, activation="tanh")
    size = compiled._cache_size()
    assert size > 0
    ops.gemm_epilogue(jnp.zeros((7, 4)), W, B, activation="tanh")
    assert compiled._cache_size() == size
    ops.gemm_epilogue(jnp.zeros((9, 4)), W, B, activation="tanh")
    assert compiled._cache_size() == size + 1


def test_records_are_values():
    assert Residual("mask", (2,), "bool", 2, ("dx",)) == Residual("mask", (2,), "bool", 2, ("dx",))
    with pytest.raises(AttributeError):
        Residual("mask", (2,), "bool", 2, ()).nbytes = 3


@pytest.mark.parametrize("module", [gemm_op, attention_op, norm_op])
def test_docstring_examples_run(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


def test_the_public_namespace_is_the_ops():
    assert set(ops.__all__) >= set(OPS)
    assert all(getattr(ops, name).__doc__ for name in ops.__all__)
    beside = ("pack_", "unpack_", "rotary_", "layer_norm_and_sum")  # the last is layer_norm with two results
    assert {name for name in ops.__all__ if name.islower() and not name.startswith(beside)} == set(OPS)


# Several devices need their own process: the number of CPU devices is fixed when JAX starts.
SHARDED = """
    import functools, jax, jax.numpy as jnp, numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from fusionlab.kernels.dot_product_attention import blockwise
    from fusionlab.errors import BackendError
    from fusionlab.ops import dot_product_attention, gemm_epilogue, layer_norm

    blockwise._FORWARD_SCORES = blockwise._BACKWARD_SCORES = 64
    blockwise._LEAST_ROWS = 4
    jax.config.update("jax_enable_x64", True)
    keys = jax.random.split(jax.random.key(0), 5)
    rand = lambda *shapes: tuple(jax.random.normal(k, s, jnp.float64) for k, s in zip(keys, shapes))
    plain_attention = lambda q, k, v: jnp.einsum(
        "bnts,bsnh->btnh", jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k) * 0.5, -1), v)
    seen = np.tri(9, dtype=bool)
    extra = dict(mask=seen, mask_value=-1e9, softcap=2.0, factors_scale=1.5, scale=0.5)

    def plain_with_all(q, k, v, bias, factors):
        scores = 2.0 * jnp.tanh(jnp.einsum("btnh,bsnh->bnts", q, k) * 0.25) + bias
        p = jax.nn.softmax(jnp.where(seen, scores, -1e9), -1) * factors * 1.5
        return jnp.einsum("bnts,bsnh->btnh", p, v)

    def with_all(implementation=None):
        return lambda q, k, v, b, f: dot_product_attention(q, k, v, bias=b, factors=f, implementation=implementation, **extra)

    all_args, all_specs = rand(*[(2, 9, 2, 4)] * 3, (2, 9, 9), (2, 1, 1, 9)), (P("d"), P("d"), P("d"), P(), P("d"))
    plain_norm = lambda x, g, b: jax.nn.standardize(x) * g + b
    blocks = functools.partial(dot_product_attention, scale=0.5, implementation="xla_blockwise")
    cases = [
        (lambda x, w, b: gemm_epilogue(x, w, b, activation="gelu_tanh"), lambda x, w, b: jax.nn.gelu(x @ w + b),
         rand((8, 4), (4, 6), (6,)), (P("d"), P(), P())),
        (functools.partial(dot_product_attention, scale=0.5), plain_attention, rand(*[(2, 9, 2, 4)] * 3), (P("d"),) * 3),
        (blocks, plain_attention, rand(*[(2, 9, 2, 4)] * 3), (P("d"),) * 3),
        (with_all(), plain_with_all, all_args, all_specs),
        (with_all("xla_blockwise"), plain_with_all, all_args, all_specs),
        (layer_norm, plain_norm, rand((8, 4), (4,), (4,)), (P("d"), P(), P())),
    ]
    looped = (blocks, cases[4][0])

    def refused(call):
        try:
            call()
        except BackendError as e:
            assert "explicit mesh axes" in str(e)
        else:
            raise AssertionError("not refused")

    def close(got, want):
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-9, atol=1e-9)

    for fused, plain, args, specs in cases:
        every = tuple(range(len(args)))
        want = jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(plain(*a))), every)(*args)
        mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
        for check_vma in (True, False):
            body = lambda *a: jax.lax.psum(jnp.sum(jnp.sin(fused(*a))), "d")
            loss = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
            close(jax.jit(jax.value_and_grad(loss, every))(*args), want)
        placed = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs)]
        close(jax.jit(jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(fused(*a))), every))(*placed), want)
        explicit = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))
        with jax.set_mesh(explicit):
            placed = [jax.device_put(a, NamedSharding(explicit, s)) for a, s in zip(args, specs)]
            step = jax.jit(jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(fused(*a))), every))
            if fused in looped:
                refused(lambda: step(*placed))
            else:
                close(step(*placed), want)
    gemm, norm = cases[0], cases[-1]
    elsewhere = [(gemm, gemm[-1]), (gemm, (P(), P(None, "d"), P("d"))), (norm, (P(), P("d"), P())), (norm, (P(None, "d"), P(), P("d")))]
    for (fused, plain, args, _), specs in elsewhere:
        placed = [jax.device_put(a, NamedSharding(explicit, s)) for a, s in zip(args, specs)]
        for some in ((0,), (1,), (2,), (0, 1, 2)):
            grad = lambda f: jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a))), some))
            close(grad(fused)(*placed), grad(plain)(*args))
    print("sharded: right")
"""


def test_shard_map_and_both_kinds_of_sharded_jit_give_the_right_gradients():
    command = [sys.executable, "-c", textwrap.dedent(SHARDED)]
    done = subprocess.run(command, env=environment(2), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "sharded: right"
