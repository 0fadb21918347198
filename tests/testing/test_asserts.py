"""The assertions as functions: what passes, what fails, and what a failure says."""

import dataclasses
import functools
import re
import unittest

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.errors import ArgumentError, TraceError, UnknownNameError
from fusionlab.evidence.comparison import Evidence
from fusionlab.evidence.instruments.record import environment
from fusionlab.evidence.instruments.timing import Runs, timing_of
from fusionlab.models import multi_fc
from fusionlab.testing import (
    FusionAssertionError,
    assert_equivalent,
    assert_fused,
    assert_not_slower,
    assert_rejected,
    asserts,
)
from fusionlab.testing.survivors import activations, survivors
from fusionlab.verbs import comparison

STRICT = fl.Strategy(gemm_epilogue={"strict_rank": True})


def struct(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


X, W, B = struct(8, 64), struct(64, 32), struct(32)


def layer(x, w, b):
    return jax.nn.relu(x @ w + b)


def leaky(x, w, b):
    h = x @ w + b
    return jax.nn.relu(h), h


def shapes_of(size):
    return jax.eval_shape(lambda: (multi_fc.init(jax.random.key(0), 96), *multi_fc.inputs(jax.random.key(1), **size)))


FC = shapes_of({"batch": 4, "seq": 16, "hidden": 96})
relu_fc = functools.partial(multi_fc.apply, activation="relu")


def failure(assertion, *args, **options):
    """The message of an assertion that has to fail: a few lines, whatever the program."""
    with pytest.raises(FusionAssertionError) as caught:
        assertion(*args, **options)
    message = str(caught.value)
    assert len(message.splitlines()) <= 25
    return message


# -- assert_fused ----------------------------------------------------------------------------------------------------------


def test_counts_that_hold_give_the_findings():
    found = assert_fused(layer, (X, W, B), expect={"gemm_epilogue": 1, "layer_norm": 0}, survive={"relu": 0})
    assert found.counts()["gemm_epilogue"] == 1


@pytest.mark.parametrize("act", ["relu", "gelu_tanh"])
def test_the_activation_of_a_declined_layer_survives(act):
    fc = functools.partial(multi_fc.apply, activation=act)
    assert_fused(fc, FC, expect={"gemm_epilogue": 3}, survive={act: 1, "dot_general": 2}, passes=STRICT)
    assert_fused(fc, FC, expect={"gemm_epilogue": 4}, survive={act: 0, "dot_general": 1})


def test_a_train_step_counts_backward_passes_and_its_forward_activations():
    step = jax.value_and_grad(functools.partial(multi_fc.loss, activation="relu"))
    expect = {"gemm_epilogue": 3, "gemm_epilogue_grad": 3}
    found = assert_fused(step, FC, expect=expect, survive={"relu": 1}, passes=STRICT)
    assert found.differentiated
    assert "gemm_epilogue_grad: 3 fused, expected 2" in failure(
        assert_fused, step, FC, expect={"gemm_epilogue_grad": 2}, passes=STRICT
    )


def test_a_gradient_that_is_not_in_the_program_says_so():
    message = failure(assert_fused, layer, (X, W, B), expect={"gemm_epilogue_grad": 1})
    assert "gemm_epilogue_grad: runs under jax.grad, expected 1" in message


def test_too_few_sites_name_the_nearest_miss_with_its_line_and_edit():
    message = failure(assert_fused, relu_fc, FC, expect={"gemm_epilogue": 4}, passes=STRICT)
    lines = message.splitlines()
    assert lines[0] == "apply: gemm_epilogue: 3 fused, expected 4"
    assert lines[1] == "nearest miss:"
    assert lines[2].startswith("  [rank] gemm_epilogue@head#1 at multi_fc.py:")
    assert "a weight of rank 3" in lines[2]
    assert re.fullmatch(r"    multi_fc.py:\d+: .*@ .*", lines[3])
    assert "    edit: reshape the weight to a matrix, or leave strict_rank off" in lines


def test_a_survivor_names_its_own_line_and_what_was_declined_for_it():
    message = failure(assert_fused, leaky, (X, W, B), expect={"gemm_epilogue": 1}, survive={"relu": 0})
    at = leaky.__code__.co_firstlineno
    assert message.startswith("leaky: relu: 1 not fused, expected 0\nnot fused:\n")
    assert f"  relu at test_asserts.py:{at + 2}: return jax.nn.relu(h), h" in message
    assert f"[escapes] gemm_epilogue@#2 at test_asserts.py:{at + 1}: relu is not fused" in message
    assert f"    test_asserts.py:{at + 1}: h = x @ w + b" in message
    assert "    edit: let the activation be the only reader" in message


def test_too_many_sites_are_listed():
    message = failure(assert_fused, relu_fc, FC, expect={"gemm_epilogue": 2})
    assert "gemm_epilogue: 4 fused, expected 2" in message
    assert "gemm_epilogue@linear1#1: relu(x @ w + b) at layers.py:" in message
    assert "and 1 more" in message
    assert "nearest" not in message


def test_a_program_without_anything_alike_says_so():
    message = failure(assert_fused, jnp.sin, (X,), expect={"gemm_epilogue": 1})
    assert "nearest miss: none" in message


def test_alike_misses_are_told_together_and_long_lists_are_cut():
    def deep(x, w, b):
        kept = []
        for _ in range(30):
            h = x @ w + b
            kept.append(h)
            x = jax.nn.relu(h)
        return x, kept

    message = failure(assert_fused, deep, (struct(8, 32), struct(32, 32), B), survive={"relu": 0})
    assert "30 not fused" in message
    assert "and 27 more" in message
    assert "30 sites, gemm_epilogue@" in message


def test_what_is_fused_counts_by_concept_too():
    def capped(x, w, b):
        return jax.nn.relu6(x @ w + b)

    assert_fused(layer, (X, W, B), expect={"gemm_epilogue": 1, "relu": 1, "linear": 1, "silu": 0})
    message = failure(assert_fused, capped, (X, W, B), expect={"gemm_epilogue": 1, "relu": 1})
    assert message.startswith("capped: relu: 0 fused, expected 1\nnearest miss:\n  [activation] gemm_epilogue@#2")
    assert f"test_asserts.py:{capped.__code__.co_firstlineno + 1}: return jax.nn.relu6(x @ w + b)" in message
    message = failure(assert_fused, layer, (X, W, B), expect={"relu": 0})
    assert "fused by relu:\n  gemm_epilogue@#1: relu(x @ w + b)" in message


def test_what_is_left_as_it_is_on_a_device_is_not_fused_there():
    def mix(x, y, w):
        return x + w * (y - x)

    args = (jax.ShapeDtypeStruct((8, 16), jnp.float32),) * 3
    assert_fused(mix, args, expect={"lerp": 1}, survive={"lerp": 0}, device="cpu")
    on_gpu = {"args": args, "device": "sm_90"}
    found = assert_fused(mix, **on_gpu, expect={"lerp": 0}, survive={"lerp": 1})
    assert found.counts()["lerp"] == 1
    message = failure(assert_fused, mix, **on_gpu, expect={"lerp": 1})
    assert "[left as it is] 1 site, lerp@" in message or "[left as it is] lerp@" in message


def test_concepts_and_primitives_survive_by_name():
    def norm_and_softmax(x):
        return jax.nn.softmax(x * 2), jnp.linalg.norm(x)

    assert_fused(norm_and_softmax, (X,), survive={"softmax": 1, "exp": 1, "sqrt": 1, "linear": 0, "tanh": 0})
    assert "softmax at test_asserts.py" in failure(assert_fused, norm_and_softmax, (X,), survive={"softmax": 0})


def test_a_declined_site_survives_as_its_concept():
    def attend(q, k, v):
        weights = jax.nn.softmax(q @ k.mT / 8)
        return weights @ v, weights

    args = (struct(2, 4, 16, 64),) * 3
    (rejection,) = fl.find(attend, *args, passes="dot_product_attention").rejections
    assert rejection.concepts == ("attention", "attention_unmasked")
    assert_fused(attend, args, survive={"attention": 1, "attention_unmasked": 1, "layer_norm": 0})
    message = failure(assert_fused, attend, args, survive={"attention": 0})
    assert "attention: 1 not fused, expected 0" in message
    assert f"[{rejection.code}] {rejection.id}" in message


def test_a_site_whose_nodes_another_fusion_took_does_not_survive():
    found = fl.find(leaky, X, W, B)
    (declined,) = found.rejections
    for code, left in (("bias", 1), ("overlap", 0)):
        told = dataclasses.replace(declined, code=code, concepts=("linear",))
        assert len(survivors(dataclasses.replace(found, rejections=(told,)), found.graph, "linear")) == left


def test_activations_are_told_by_value_each_once_the_largest_first():
    def chain(x):
        h = jax.nn.silu(2 * x)
        k = jnp.maximum(jnp.tanh(h), 0.0)
        return k + jax.nn.gelu(h, approximate=False) + 0.5 * x * (1 + jnp.tanh(0.7978845608 * (x + 0.044715 * x**3)))

    names = [name for name, _ in activations(fl.trace(chain, X))]
    assert sorted(names) == ["gelu_erf", "gelu_tanh", "relu", "silu", "tanh"]


def test_activations_inside_loops_are_seen_and_those_of_backward_passes_are_not():
    def loop(x):
        return jax.lax.scan(lambda c, _: (jax.nn.gelu(c), None), x, None, length=3)[0]

    assert [name for name, _ in activations(fl.trace(loop, X))] == ["gelu_tanh"]
    step = jax.value_and_grad(lambda x: jax.checkpoint(jax.nn.gelu)(jax.nn.gelu(x)).sum())
    graph = fl.trace(step, X)
    assert [n.primitive for n in graph.nodes()].count(
        "tanh"
    ) == 3  # one of them is computed again, for the backward pass
    assert [name for name, _ in activations(graph)] == ["gelu_tanh"] * 2


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"expect": {"gemm": 1}}, UnknownNameError, "gemm_epilogue"),
        ({"expect": {"lerp": 0}, "passes": "gemm_epilogue"}, UnknownNameError, "'lerp'"),
        ({"survive": {"rellu": 0}}, UnknownNameError, "Did you mean 'relu'"),
        ({}, ArgumentError, "neither expect nor survive"),
        ({"expect": {"lerp": 0}, "device": "sm90"}, ArgumentError, "sm_NN"),
    ],
)
def test_a_mistake_in_the_assertion_is_an_error_and_no_failure(options, error, said):
    with pytest.raises(error, match=said):
        assert_fused(layer, (X, W, B), **options)


def test_arguments_are_a_tuple_and_the_function_is_the_original():
    with pytest.raises(ArgumentError, match=r"\(x,\) for one"):
        assert_fused(jnp.sin, X, survive={"sin": 1})
    with pytest.raises(ArgumentError, match="already fused"):
        assert_fused(fl.fuse(layer), (X, W, B), expect={"gemm_epilogue": 0})
    with pytest.raises(TraceError):
        assert_fused(layer, (X, X, B), expect={"gemm_epilogue": 0})


def test_keyword_and_static_arguments_reach_the_function():
    def model(x, w, *, b, passes, power):
        return jax.nn.relu(x @ w + b) ** (power if passes else 1)

    options = {"kwargs": {"b": B, "passes": True, "power": 3}, "static_argnames": ("power", "passes")}
    assert_fused(model, (X, W), expect={"gemm_epilogue": 1}, survive={"integer_pow": 1}, **options)


# -- assert_rejected -------------------------------------------------------------------------------------------------------


def test_a_rejection_that_is_there_is_returned():
    (rejection,) = assert_rejected(relu_fc, FC, code="rank", pass_="gemm_epilogue", at="head", passes=STRICT)
    assert rejection.code == "rank"
    at = str(rejection.source)
    assert assert_rejected(relu_fc, FC, code="rank", at=at, count=1, passes=STRICT)[0].id == rejection.id


def test_another_reason_is_told_with_its_line():
    message = failure(assert_rejected, leaky, (X, W, B), code="rank")
    assert message.startswith("leaky: expected a site declined [rank], got none")
    assert "[escapes] gemm_epilogue@#2" in message
    assert "edit: " in message


def test_a_site_that_is_fused_after_all_is_told():
    message = failure(assert_rejected, relu_fc, FC, code="rank", pass_="gemm_epilogue", at="head")
    assert "expected a site declined [rank] by gemm_epilogue at head, got none" in message
    assert "fused:\n  gemm_epilogue@head#1: relu(x @ w + b) at multi_fc.py" in message


def test_another_number_or_another_place_is_a_failure():
    assert "expected 2 declined [escapes], got 1" in failure(assert_rejected, leaky, (X, W, B), code="escapes", count=2)
    message = failure(assert_rejected, leaky, (X, W, B), code="escapes", at="encoder")
    assert "at encoder, got none" in message
    assert "[escapes] gemm_epilogue@#2" in message


def test_a_code_or_pass_that_does_not_exist_is_an_error():
    with pytest.raises(UnknownNameError, match="Did you mean 'escapes'"):
        assert_rejected(leaky, (X, W, B), code="escape")
    with pytest.raises(UnknownNameError, match="unknown pass"):
        assert_rejected(leaky, (X, W, B), code="escapes", pass_="linear")


# -- assert_equivalent -----------------------------------------------------------------------------------------------------


def arrays():
    keys = jax.random.split(jax.random.key(3), 3)
    return tuple(jax.random.normal(k, s.shape, s.dtype) for k, s in zip(keys, (X, W, B), strict=True))


def test_the_fused_function_is_equivalent_with_its_gradients():
    evidence = assert_equivalent(layer, arrays())
    assert [leaf.kind for leaf in evidence.numerics.leaves] == ["output"] + ["gradient"] * 3
    assert evidence.timing is None
    evidence = assert_equivalent(layer, arrays(), grad=False, passes="gemm_epilogue")
    assert [leaf.kind for leaf in evidence.numerics.leaves] == ["output"]


def test_a_wrong_value_fails_and_names_the_output():
    message = failure(assert_equivalent, layer, arrays(), fused=lambda *a: layer(*a) * 1.01)
    assert message.startswith("layer: 4 of 4 outputs and gradients are worse than the original's")
    assert "output " in message
    assert "WORSE" in message
    assert "and 1 more" in message


def test_a_wrong_gradient_alone_fails_unless_gradients_are_left_out():
    @jax.custom_vjp
    def broken(x, w, b):
        return layer(x, w, b)

    broken.defvjp(
        lambda *a: (layer(*a), a),
        lambda a, t: tuple(g * (2 if i else 1) for i, g in enumerate(jax.vjp(layer, *a)[1](t))),
    )
    message = failure(assert_equivalent, layer, arrays(), fused=broken)
    assert "2 of 4 outputs and gradients" in message
    assert_equivalent(layer, arrays(), fused=broken, grad=False)
    assert_equivalent(layer, arrays(), fused=broken, argnums=0)


def test_shapes_are_not_enough_to_compare_values():
    with pytest.raises(ArgumentError):
        assert_equivalent(layer, (X, W, B))


def test_a_comparison_without_a_reference_is_no_pass(monkeypatch):
    real = comparison.compare

    def without(*args, **options):
        return dataclasses.replace(real(*args, **options), numerics=None, notes=("no reference",))

    monkeypatch.setattr(comparison, "compare", without)
    assert "nothing to compare: no reference" in failure(assert_equivalent, layer, arrays())


# -- assert_not_slower -----------------------------------------------------------------------------------------------------


def test_without_a_gpu_it_is_skipped_with_the_reason():
    with pytest.raises(unittest.SkipTest, match="needs a CUDA GPU for device time; this process runs on"):
        assert_not_slower(layer, arrays())


def test_a_margin_is_a_share():
    with pytest.raises(ArgumentError, match="margin"):
        assert_not_slower(layer, arrays(), margin=1.5)


def timed(before, after, clock="device time", samples=40):
    """What a comparison says whose functions take so many seconds, with 1 % of noise."""
    noise = 1 + 0.01 * np.random.default_rng(0).standard_normal((2, samples))
    runs = [
        Runs(name, tuple(s * n), 8, 0.0, 0.0, 0.0, clock)
        for name, s, n in zip(("before", "after"), (before, after), noise, strict=True)
    ]
    return Evidence("layer", environment(), timing=timing_of("call", *runs))


@pytest.fixture
def on_a_gpu(monkeypatch):
    """A process that believes to have a GPU, and a comparison that says what the test says."""
    monkeypatch.setattr(asserts, "Device", type("Device", (), {"current": staticmethod(lambda: fl.Device.of("sm_90"))}))
    said = {}
    monkeypatch.setattr(comparison, "compare", lambda *a, **o: said["evidence"])
    return lambda *a, **o: said.update(evidence=timed(*a, **o))


@pytest.mark.parametrize("after", [0.5e-3, 1.0e-3, 1.04e-3])
def test_faster_equal_and_within_the_margin_pass(on_a_gpu, after):
    on_a_gpu(1e-3, after)
    assert assert_not_slower(layer, (X, W, B)).timing.ratio == pytest.approx(1e-3 / after, rel=0.02)


def test_slower_beyond_the_margin_fails_with_the_interval(on_a_gpu):
    on_a_gpu(1e-3, 1.2e-3)
    message = failure(assert_not_slower, layer, (X, W, B))
    assert message.startswith(
        "layer: slower than under jax.jit by more than 5%\n  call: 999 µs -> 1.2 ms, 0.83x [0.83, 0.84]"
    )
    assert "gemm_epilogue@#1: relu(x @ w + b)" in message
    assert_not_slower(layer, (X, W, B), margin=0.3)


def test_an_interval_that_reaches_the_margin_is_no_failure(on_a_gpu):
    on_a_gpu(1e-3, 1e-3 / 0.9502)
    assert_not_slower(layer, (X, W, B))


def test_wall_time_and_few_samples_are_skipped_with_the_reason(on_a_gpu):
    on_a_gpu(1e-3, 2e-3, clock="wall time")
    with pytest.raises(unittest.SkipTest, match="needs device time, got wall time"):
        assert_not_slower(layer, (X, W, B))
    on_a_gpu(1e-3, 2e-3, samples=5)
    with pytest.raises(unittest.SkipTest, match="fewer than 40 samples"):
        assert_not_slower(layer, (X, W, B))
