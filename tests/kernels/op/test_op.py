"""The op protocol: meanings, eager caching, ahead-of-time lowering, shard_map, the public namespace."""

from __future__ import annotations

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab.kernels.ops.dot_product_attention.op as attention_op
import fusionlab.kernels.ops.gemm_epilogue.op as gemm_op
import fusionlab.kernels.ops.layer_norm.op as norm_op
from fusionlab import ops
from fusionlab.kernels import CARDS, OPS, meaning_of
from fusionlab.kernels.launch.compile import KERNELS
from fusionlab.kernels.op.implementation import Residual

from .sharded_ops import TRIALS

X, W, B, Q = (
    jnp.asarray(a, jnp.float32)
    for a in (
        np.arange(12.0).reshape(3, 4) / 10 - 0.5,
        np.linspace(-1, 1, 20).reshape(4, 5),
        np.linspace(1, -1, 5),
        np.sin(np.arange(48.0)).reshape(1, 6, 2, 4),
    )
)


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
        (lambda *a: ops.group_norm(*a, groups=2, activation="silu"), (X[None], B[:4], B[1:]), "group_norm"),
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
    assert set(OPS) == {path.parent.name for path in KERNELS.glob("*/op.py")}
    assert len({card.order for card in CARDS}) == len(OPS)
    assert set(ops.__all__) >= set(OPS)
    assert all(getattr(ops, name).__doc__ for name in ops.__all__)
    beside = ("pack_", "unpack_", "rotary_", "layer_norm_and_sum")  # the last is layer_norm with two results
    assert {name for name in ops.__all__ if name.islower() and not name.startswith(beside)} == set(OPS)


@pytest.mark.devices
@pytest.mark.parametrize("name", TRIALS)
def test_shard_map_and_both_kinds_of_sharded_jit_give_the_right_gradients(on_devices, name):
    """One of them by hand, all on a line:

    python -m pytest
      "tests/kernels/op/test_op.py::test_shard_map_and_both_kinds_of_sharded_jit_give_the_right_gradients[gemm, shard_map]"
    """
    on_devices("kernels.op.sharded_ops", name)
