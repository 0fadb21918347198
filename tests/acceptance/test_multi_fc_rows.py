"""Row 11, and the training half of the model's own test: MultiFC at 64 x 128 x 768, its groups, its numbers."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.models import multi_fc

KEY = jax.random.key(11)
SPECIFIED = {"batch": 64, "seq": 128, "hidden": 768}
# The numbers are compared at this size: four products of 64 x 128 x 768 take seconds each in float16 on a CPU. The groups
# are counted at the specified size, and one float32 forward is run at it.
SMALL = {"batch": 4, "seq": 16, "hidden": 96}
# (activation, direction, dtype) -> (atol, rtol), the original's own.
TOLERANCE = {
    ("relu", "forward", "float32"): (1e-3, 1e-2),
    ("gelu_tanh", "forward", "float32"): (1e-4, 1e-3),
    ("relu", "training", "float32"): (1e-4, 1e-3),
    ("gelu_tanh", "training", "float32"): (5e-4, 1e-3),
    ("relu", "forward", "float16"): (1e-3, 1e-2),
    ("gelu_tanh", "forward", "float16"): (1e-3, 1e-2),
    ("relu", "training", "float16"): (1e-3, 1e-2),
    ("gelu_tanh", "training", "float16"): (1e-3, 1e-2),
}
ACTIVATIONS = ("relu", "gelu_tanh")
STRICT = fl.Strategy(gemm_epilogue={"strict_rank": True})


def model(act, size, dtype):
    """(function, arguments) of the inference model."""
    params = multi_fc.init(KEY, size["hidden"], dtype)
    return partial(multi_fc.apply, activation=act), (params, *multi_fc.inputs(KEY, **size, dtype=dtype))


def shapes(act, dtype=jnp.float32):
    args = jax.eval_shape(lambda: model(act, SPECIFIED, dtype)[1])
    return partial(multi_fc.apply, activation=act), args


def surviving_activations(graph):
    """Nonlinear elementwise functions outside fused ops: relu's max, gelu's tanh or erf."""
    return sum(n.primitive in ("max", "tanh", "erf", "erfc") for n in graph.nodes())


def close(got, want, key):
    atol, rtol = TOLERANCE[key]
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        np.testing.assert_allclose(np.asarray(g, np.float64), np.asarray(w, np.float64), rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_row_11_multi_fc_has_four_groups_and_no_activation_left(act, dtype):
    fn, args = shapes(act, dtype)
    found = fl.find(fn, *args, passes="gemm_epilogue")
    assert found.counts() == {"gemm_epilogue": 4, "gemm_epilogue_grad": "runs under jax.grad"}
    assert not found.rejections
    assert {c.scope: c.attrs["activation"] for c in found.candidates} == {
        "linear1": act,
        "linear2": "none",
        "linear3": act,
        "head": act,  # its weight of shape [1, 768, 768] is a matrix
    }
    assert surviving_activations(found.graph) == 3
    assert surviving_activations(found.apply()) == 0
    assert [n.primitive for n in found.apply().nodes()].count("dot_general") == 1  # the bare product `side`


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_row_11_with_strict_rank_multi_fc_has_the_originals_three_groups_one_activation_and_one_rejection(act):
    fn, args = shapes(act)
    found = fl.find(fn, *args, passes=STRICT)
    assert [c.scope for c in found.candidates] == ["linear1", "linear2", "linear3"]
    assert surviving_activations(found.apply()) == 1
    (rejection,) = found.rejections
    assert (rejection.code, rejection.scope) == ("rank", "head")
    assert "[1,768,768]" in rejection.sentence
    assert "rank 3" in rejection.sentence
    assert "multi_fc.py:" in rejection.sentence
    assert str(found).startswith("gemm_epilogue: 3 subgraphs fused, 1 declined (rank), nodes ")


@pytest.mark.parametrize("passes", ["gemm_epilogue", STRICT], ids=["by meaning", "strict_rank"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_row_11_multi_fc_inference_keeps_its_values(act, dtype, passes):
    fn, args = model(act, SMALL, jnp.dtype(dtype))
    close(fl.fuse(fn, passes=passes)(*args), jax.jit(fn)(*args), (act, "forward", dtype))


def test_row_11_multi_fc_at_the_specified_size_keeps_its_values():
    fn, args = model("relu", SPECIFIED, jnp.float32)
    got, want = fl.fuse(fn)(*args), jax.jit(fn)(*args)
    assert got.shape == (64, 128, 768)
    assert float(jnp.std(want)) > 1e-2
    close(got, want, ("relu", "forward", "float32"))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_row_11_multi_fc_training_keeps_its_loss_and_its_six_gradients(act, dtype):
    """The fused function stands inside jax.value_and_grad: the backward kernels are reached by differentiation."""
    _, args = model(act, SMALL, jnp.dtype(dtype))
    loss = partial(multi_fc.loss, activation=act)
    fused = fl.fuse(loss)
    assert fused.findings(*args).counts()["gemm_epilogue"] == 4
    names = [n.primitive for n in fl.trace(jax.grad(fused), *args).nodes()]
    assert names.count("gemm_epilogue_cotangent") == 4
    want, got = (jax.jit(jax.value_and_grad(f))(*args) for f in (loss, fused))
    assert len(jax.tree.leaves(got[1])) == 6
    close(got, want, (act, "training", dtype))
    # Gradients of a mean are far below the tolerances' absolute part: also relative to each gradient's own size.
    for g, w in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        assert np.max(np.abs(g - w)) <= {"float32": 1e-5, "float16": 2e-2}[dtype] * np.max(np.abs(w))
