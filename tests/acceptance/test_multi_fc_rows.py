"""Rows 11 and 12: MultiFC at 64 x 128 x 768, inference and training, its groups, its numbers."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.graph.program.scopes import in_backward
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
    return sum(n.primitive in ("max", "tanh", "erf", "erfc") and not in_backward(n) for n in graph.nodes())


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
    assert str(found).startswith("gemm_epilogue: 3 subgraphs can be fused, 1 declined (rank), nodes ")


@pytest.mark.parametrize("passes", ["gemm_epilogue", STRICT], ids=["by meaning", "strict_rank"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_row_11_multi_fc_inference_keeps_its_values(act, dtype, passes):
    fn, args = model(act, SMALL, jnp.dtype(dtype))
    close(fl.fuse(fn, passes=passes)(*args), jax.jit(fn)(*args), (act, "forward", dtype))


@pytest.mark.parametrize("batch", [2, SPECIFIED["batch"]])
def test_row_11_multi_fc_at_the_specified_size_keeps_its_values(batch):
    fn, args = model("relu", SPECIFIED | {"batch": batch}, jnp.float32)
    got, want = fl.fuse(fn)(*args), jax.jit(fn)(*args)
    assert got.shape == (batch, 128, 768)
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


def surviving_gradients(graph):
    """Derivatives of activations outside fused ops: the selection by relu's mask, the square of gelu's."""
    return sum(
        n.primitive == "select_n" or (n.primitive == "integer_pow" and n.params["y"] == 2) for n in graph.nodes()
    )


# grouping, strict_rank -> sites, of them with their backward passes, activations left, their derivatives left
GROUPS = {
    ("per_layer", False): (4, 4, 0, 0),
    ("per_layer", True): (3, 3, 1, 1),
    ("chained", True): (3, 3, 1, 2),  # the original's: linear3 feeds a product that is not fused, its relu' is left
    ("chained", False): (4, 4, 0, 2),  # the head takes a weight of rank 3, which nothing is chained to
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("grouping", "strict"), GROUPS, ids=[f"{g}, strict {s}" for g, s in GROUPS])
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_row_12_multi_fc_training_has_the_groups_of_each_grouping(act, grouping, strict, dtype):
    """The train step itself is fused: forward and backward are in the program already."""
    _, args = model(act, SMALL, jnp.dtype(dtype))
    step = jax.value_and_grad(partial(multi_fc.loss, activation=act))
    passes = fl.Strategy(gemm_epilogue={"strict_rank": strict, "grouping": grouping})
    found = fl.find(step, *args, passes=passes)
    sites, paired, activations, gradients = GROUPS[grouping, strict]
    assert found.counts() == {"gemm_epilogue": sites, "gemm_epilogue_grad": paired}
    after = found.apply()
    assert surviving_activations(found.graph) == surviving_gradients(found.graph) == 3
    assert (surviving_activations(after), surviving_gradients(after)) == (activations, gradients)
    names = [n.primitive for n in after.nodes()]
    assert names.count("gemm_epilogue_cotangent") == paired
    told = {c.scope: c.backward for c in found.candidates}
    assert {p.grouping for p in told.values()} == {grouping}
    assert [scope for scope, p in told.items() if p.joins] == (["linear2"] if grouping == "chained" else [])
    assert f"({grouping}" in found.report()
    want, got = jax.jit(step)(*args), fl.fuse(step, passes=passes)(*args)
    assert len(jax.tree.leaves(got[1])) == 6
    close(got, want, (act, "training", dtype))
    for g, w in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        assert np.max(np.abs(g - w)) <= {"float32": 1e-5, "float16": 2e-2}[dtype] * np.max(np.abs(w))


@pytest.mark.parametrize("alone", ["linear1", "linear2", "linear3"])
def test_row_12_a_chain_whose_neighbour_is_left_out_is_no_chain(alone):
    _, args = model("gelu_tanh", SMALL, jnp.float32)
    step = jax.value_and_grad(partial(multi_fc.loss, activation="gelu_tanh"))
    passes = fl.Strategy(gemm_epilogue={"grouping": "chained"})
    want = jax.jit(step)(*args)
    for options in ({"only": f"gemm_epilogue@{alone}#1"}, {"skip": f"gemm_epilogue@{alone}#1"}):
        close(fl.fuse(step, passes=passes, **options)(*args), want, ("gelu_tanh", "training", "float32"))


def test_row_12_without_its_grad_there_is_nothing_to_group():
    _, args = model("gelu_tanh", SMALL, jnp.float32)
    step = jax.value_and_grad(partial(multi_fc.loss, activation="gelu_tanh"))
    passes = fl.Strategy(gemm_epilogue={"grouping": "chained"}, gemm_epilogue_grad=False)
    found = fl.find(step, *args, passes=passes)
    assert found.counts() == {"gemm_epilogue": 4}
    assert {c.backward.grouping for c in found.candidates} == {None}
    close(fl.fuse(step, passes=passes)(*args), jax.jit(step)(*args), ("gelu_tanh", "training", "float32"))


def test_row_12_a_grouping_that_does_not_exist_is_refused():
    with pytest.raises(fl.errors.UnknownNameError, match="per_layer"):
        fl.find(lambda x: x @ x, jnp.ones((4, 4)), passes=fl.Strategy(gemm_epilogue={"grouping": "chain"}))
