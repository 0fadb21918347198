"""Whole comparisons: what is wrong is found, what is right is said so, nothing of the user's is touched."""

from __future__ import annotations

import gc
import importlib.util
import json
import sys

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from fusionlab.errors import (
    ArgumentError,
    BackendError,
    MissingDependencyError,
    OutputError,
    SideEffectError,
    TraceError,
)
from fusionlab.evidence import Evidence, Verdict, environment, load_json, measure, resident_growth, save_json
from fusionlab.evidence.instruments.program import compile_program
from fusionlab.graph.interpret.promote import promote
from fusionlab.graph.program.trace import trace

QUICK = {"samples": 2, "budget_s": 5.0}


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def layer(params, x):
    h = jax.nn.gelu(x @ params["w"] + params["b"])
    return {"h": h, "winner": jnp.argmax(h, 1)}


def arguments(dtype=jnp.float32):
    return {"w": normal(0, 16, 8, dtype=dtype), "b": normal(1, 8, dtype=dtype)}, normal(2, 12, 16, dtype=dtype)


@pytest.fixture(scope="module")
def evidence():
    return measure(layer, layer, *arguments(), **QUICK)


def test_every_output_and_gradient_of_a_pytree_is_compared_by_name(evidence):
    names = [(leaf.kind, leaf.name) for leaf in evidence.numerics.leaves]
    assert names == [
        ("output", "out['h']"),
        ("output", "out['winner']"),
        ("gradient", "params['b']"),
        ("gradient", "params['w']"),
        ("gradient", "x"),
    ]
    assert evidence.numerics.ok
    assert evidence.numerics.reduction_size == 16
    for leaf in evidence.numerics.leaves:
        assert leaf.before == leaf.after
        assert leaf.between.max_abs == 0
        if leaf.name != "out['winner']":
            assert 0 < leaf.before.rel_l2 < 1e-5, "float32 is off by rounding, and only by that"


def test_the_text_has_both_versions_their_errors_and_the_hardware_once(evidence):
    lines = str(evidence).splitlines()
    hardware = evidence.environment.hardware
    few = "inconclusive: fewer than 40 samples"
    assert lines[0] == f"layer: call: {few}; gradient of the call: {few}"
    assert any(line.strip().startswith("call: ") and "x [" in line for line in lines)
    assert any(line.startswith("    output out['h']") for line in lines)
    assert any(line.startswith("    gradient ") for line in lines)
    assert any("compiled peak memory" in line for line in lines)
    assert str(evidence).count(hardware) == 1
    assert lines[-1].startswith(f"  measured on {hardware}; jax {jax.__version__}")
    if evidence.environment.commit:
        assert "the current folder's repository at commit " in lines[-1]


def test_kernels_are_counted_before_and_after(evidence):
    counts = evidence.kernels
    assert counts.before == counts.after, "one function against itself"
    assert counts.total[0] == sum(counts.before.values()) > 0
    assert f"  {counts}" in str(evidence).splitlines()
    assert str(counts).startswith(f"XLA kernels: {counts.total[0]} -> {counts.total[1]} (")
    rows = [row[:4] for row in evidence.rows() if row[0] == "XLA kernels"]
    assert rows == [("XLA kernels", kind, v, n) for v in ("before", "after") for kind, n in counts.before.items()]
    other = measure(layer, lambda p, x: layer(p, jnp.sort(x)), *arguments(), grad=False, timing=False, numerics=False)
    assert other.kernels.before == counts.before
    assert other.kernels.total[1] > other.kernels.total[0]
    assert "XLA kernels: " in str(other)


def test_a_record_from_before_kernels_were_counted_is_read(evidence):
    data = evidence.to_dict()
    assert Evidence.from_dict(data).kernels == evidence.kernels
    del data["kernels"]
    assert Evidence.from_dict(data).kernels is None


def test_what_was_not_compiled_has_no_kernels():
    nothing = measure(layer, layer, *arguments(), grad=False, timing=False, numerics=False, memory=False)
    assert nothing.kernels is None
    assert "XLA kernels" not in str(nothing)


def test_the_repr_is_a_line_and_says_what_is_worse(evidence):
    few = "inconclusive: fewer than 40 samples"
    assert repr(evidence) == f"<Evidence layer: call: {few}; gradient of the call: {few}>"
    e = measure(jnp.sin, lambda x: jnp.sin(x) + 1, normal(0, 4), grad=False, timing=False, memory=False)
    assert repr(e) == "<Evidence sin: not timed; 1 result WORSE>"


def test_an_evidence_survives_json(evidence, tmp_path):
    again = Evidence.from_dict(json.loads(evidence.to_json()))
    assert again == evidence
    path = save_json(tmp_path / "deep" / "e.json", evidence.to_dict())
    assert Evidence.from_dict(load_json(path)) == evidence
    assert [p.name for p in path.parent.iterdir()] == ["e.json"]
    assert evidence.to_dict()["timing"]["before"]["median_s"] == evidence.timing.before.median_s
    assert "ENTRY" in evidence.hlo["before"]


def test_a_frame_holds_every_sample(evidence, require):
    require(importlib.util.find_spec("pandas"), "pandas")
    frame = evidence.to_dataframe()
    assert (frame.quantity == "time").sum() == 2 * 2 * 2
    assert set(frame.version) == {"before", "after"}
    assert set(frame.unit) == {"s", "bytes", "", "ulp"}
    assert set(frame.dtype) == {"", "float32", "int32"}
    assert set(frame[frame.quantity == "max abs error"].unit) == {""}


def test_compiled_memory_of_both_is_there(evidence):
    assert evidence.memory.before.argument == (16 * 8 + 8 + 12 * 16) * 4
    assert evidence.memory.before.peak >= evidence.memory.before.argument
    assert evidence.memory_grad.after.peak > 0


def test_without_pandas_a_frame_is_refused_with_the_way_to_get_one(evidence, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingDependencyError, match="pip install pandas"):
        evidence.to_dataframe()
    assert len(evidence.rows()) > 20


def test_a_wrong_custom_gradient_is_found_though_the_values_are_right():
    @jax.custom_vjp
    def fused(x, w):
        return jnp.tanh(x @ w)

    def backward(res, g):
        x, w, y = res
        d = g * (1 - y)  # should be 1 - y * y
        return d @ w.T, x.T @ d

    fused.defvjp(lambda x, w: ((y := jnp.tanh(x @ w)), (x, w, y)), backward)
    e = measure(lambda x, w: jnp.tanh(x @ w), fused, normal(0, 6, 5), normal(1, 5, 4), timing=False, memory=False)
    bad = e.numerics.regressions
    assert [(leaf.kind, leaf.name) for leaf in bad] == [("gradient", "x"), ("gradient", "w")]
    assert bad[0].after.rel_l2 > 0.1
    assert bad[0].before.rel_l2 < 1e-6
    assert e.verdict is Verdict.NOT_TIMED
    assert "2 of 3 outputs and gradients are WORSE" in str(e)


def test_a_wrong_value_is_found_with_its_place():
    x = normal(0, 5, 7)
    e = measure(jnp.sin, lambda x: jnp.sin(x).at[3, 2].add(0.01), x, grad=False, timing=False, memory=False)
    (leaf,) = e.numerics.regressions
    assert leaf.after.worst_index == (3, 2)
    assert leaf.after.worst_value - leaf.after.worst_reference == pytest.approx(0.01, rel=1e-3)
    assert leaf.after.over_tolerance == 1
    assert leaf.before.over_tolerance == 0


def test_a_new_nan_is_a_regression_and_an_old_one_is_not():
    x = jnp.asarray([1.0, -1.0, 4.0])
    e = measure(lambda x: jnp.sqrt(jnp.abs(x)), jnp.sqrt, x, grad=False, timing=False, memory=False)
    (leaf,) = e.numerics.regressions
    assert leaf.after.nonfinite_mismatch == 1
    assert np.isnan(leaf.after.worst_value)
    assert Evidence.from_dict(json.loads(e.to_json())).numerics.leaves[0].after.nonfinite_mismatch == 1
    assert measure(jnp.sqrt, jnp.sqrt, x, grad=False, timing=False, memory=False).numerics.ok


def test_an_overflow_the_reference_does_not_have_is_counted_for_both():
    e = measure(jnp.square, jnp.square, jnp.asarray([300.0, 2.0], jnp.float16), grad=False, timing=False, memory=False)
    (leaf,) = e.numerics.leaves
    assert leaf.before.nonfinite_mismatch == leaf.after.nonfinite_mismatch == 1
    assert leaf.ok, "the fused version is no worse than the original"


def test_a_bf16_program_is_judged_in_bf16():
    e = measure(layer, layer, *arguments(jnp.bfloat16), timing=False, memory=False)
    h = e.numerics.leaves[0]
    assert h.dtype == "bfloat16"
    assert 1e-4 < h.before.rel_l2 < 1e-2
    assert h.before.over_tolerance == 0

    def better(p, x):
        out = layer(jax.tree.map(lambda a: a.astype(jnp.float32), p), x.astype(jnp.float32))
        return out | {"h": out["h"].astype(jnp.bfloat16)}

    e = measure(layer, better, *arguments(jnp.bfloat16), grad=False, timing=False, memory=False)
    assert e.numerics.leaves[0].after.rel_l2 < e.numerics.leaves[0].before.rel_l2


def test_dropout_is_compared_under_the_same_mask():
    def f(key, x):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x * 2, 0.0)

    e = measure(f, f, jax.random.key(0), normal(0, 50), timing=False, memory=False)
    assert e.numerics.ok
    assert e.numerics.leaves[0].before.max_abs == 0
    assert e.numerics.left_out == ("key",)


def test_gradients_are_taken_where_asked():
    e = measure(layer, layer, *arguments(), argnums=1, timing=False, memory=False)
    assert [leaf.name for leaf in e.numerics.leaves if leaf.kind == "gradient"] == ["x"]
    assert e.numerics.left_out == ("params['b']", "params['w']")


def test_static_donated_and_keyword_arguments_together():
    def f(state, n, x, *, flag):
        return state + x * n if flag else state

    state, x = normal(0, 4), normal(1, 4)
    e = measure(f, f, state, 3, x, flag=True, static_argnums=1, static_argnames="flag", donate_argnums=0, **QUICK)
    assert [leaf.name for leaf in e.numerics.leaves] == ["out", "state", "x"]
    assert e.numerics.ok
    assert not state.is_deleted()


def test_the_users_config_is_unchanged_after_a_comparison(evidence):
    assert jax.config.jax_enable_x64 is False
    assert jnp.ones(2).dtype == jnp.float32


def test_same_code_is_not_timed():
    e = measure(jnp.sin, jnp.sin, normal(0, 4), same_code=True)
    assert e.verdict is Verdict.SAME_CODE
    assert e.timings == ()
    assert str(e).startswith("sin: same code")
    assert "both compile to the same instructions (call, gradient of the call)" in e.notes


def test_a_function_with_the_name_of_its_call_is_named_once():
    def call(x):
        return x @ x

    e = measure(call, call, normal(0, 16, 16), numerics=False, grad=False, **QUICK)
    assert str(e).splitlines()[0] == e.headline
    assert repr(e) == f"<{type(e).__name__} {e.headline}>"
    assert e.headline.startswith("call: ")


def test_what_only_claims_to_be_the_same_code_is_timed_and_says_so():
    x = normal(0, 16, 16)
    e = measure(lambda x: x @ x, lambda x: jnp.tanh(x @ x), x, same_code=True, numerics=False, grad=False, **QUICK)
    assert e.verdict is Verdict.INCONCLUSIVE
    assert e.timing is not None
    assert not e.same_code
    (note,) = (n for n in e.notes if n.startswith("every fused site runs XLA's own code"))
    assert note.endswith("(kernels that the original lacks: call: 1 of 2)")


@jax.custom_vjp
def own_gradient(x):
    return jnp.sin(x)


own_gradient.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (jnp.exp(x) * ct,))


def test_the_same_forward_with_another_backward_is_no_same_code():
    e = measure(jnp.sin, own_gradient, normal(0, 4), same_code=True, numerics=False, **QUICK)
    assert [t.what for t in e.timings] == ["call", "gradient of the call"]
    assert "both compile to the same instructions (call)" in e.notes
    assert measure(jnp.sin, own_gradient, normal(0, 4), same_code=True, numerics=False, grad=False, **QUICK).same_code


def test_a_comparison_cancelled_before_the_programs_were_looked_at_claims_nothing():
    e = measure(jnp.sin, jnp.sin, normal(0, 4), same_code=True, cancel=lambda: True)
    assert e.verdict is Verdict.NOT_TIMED
    assert "cancelled before: memory" in e.notes


def test_the_results_of_a_mixed_precision_program_are_judged_as_coarsely_as_it_multiplies():
    def low(x, w):
        return (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)

    def high(x, w):
        return (x.astype(jnp.bfloat16).astype(jnp.float32) @ w.astype(jnp.bfloat16).astype(jnp.float32)) * 1.001

    e = measure(high, lambda x, w: low(x, w), normal(0, 8, 8), normal(1, 8, 8), grad=False, timing=False, memory=False)
    assert e.numerics.leaves[0].dtype == "float32"
    assert not e.numerics.notes, "the original multiplies in float32"
    e = measure(low, high, normal(0, 8, 8), normal(1, 8, 8), grad=False, timing=False, memory=False)
    assert e.numerics.ok
    assert "judged with the tolerance of bfloat16" in str(e)


def test_a_cancelled_comparison_says_what_is_missing():
    told = []
    e = measure(
        jnp.sin,
        jnp.sin,
        normal(0, 4),
        progress=lambda *step: told.append(step[0]),
        cancel=lambda: "errors of outputs and gradients" in told,
    )
    assert e.memory is not None
    assert e.numerics is not None
    assert e.timing is None
    assert any("cancelled before: timing" in n for n in e.notes)


COMPARED = [
    "tracing before",  # what it is, a call or a step, is not known yet
    "compiling before, call 1/4",
    "tracing after, call 2/4",
    "compiling after, call 2/4",
    "memory, call",
    *(
        f"{verb} {which}, gradient of the call {k}/4"
        for k, which in enumerate(("before", "after"), 3)
        for verb in ("tracing", "compiling")
    ),
    "memory, gradient of the call",
    "planning the float64 reference",
    "float64 reference",
    "errors of outputs and gradients",
    "timing call",
    "timing gradient of the call",
    "reading the compiled programs",
]


def test_each_stage_of_a_comparison_is_named_as_it_begins():
    told = []
    measure(jnp.sin, jnp.sin, normal(0, 4), samples=2, progress=lambda *step: told.append(step[0]))
    assert list(dict.fromkeys(told)) == COMPARED


@pytest.mark.parametrize("stage", COMPARED[:-1])
def test_a_comparison_is_cancelled_at_each_stage(stage):
    told = []
    e = measure(
        jnp.sin,
        jnp.sin,
        normal(0, 4),
        samples=2,
        progress=lambda *step: told.append(step[0]),
        cancel=lambda: stage in told,
    )
    stages = list(dict.fromkeys(told))
    assert stages == [*COMPARED[: COMPARED.index(stage) + 1], "reading the compiled programs"]
    assert any(n.startswith("cancelled before") for n in e.notes) or "cancelled" in (t.stopped for t in e.timings)


def test_a_program_without_a_float64_form_is_still_measured_and_says_so():
    def f(x):
        return jax.custom_derivatives.linear_call(lambda r, x: r * x, lambda r, y: r * y, 2.0, x)

    e = measure(f, f, normal(0, 3), timing=False)
    assert e.numerics is None
    assert "linear_call" in e.notes[0]
    assert e.memory is not None


def test_bad_input_gives_one_clear_error():
    x = normal(0, 3)
    with pytest.raises(ArgumentError, match="needed arrays"):
        measure(jnp.sin, jnp.sin, jax.ShapeDtypeStruct((3,), jnp.float32))
    with pytest.raises(ArgumentError, match="structure"):
        measure(jnp.sin, lambda x: (x, x), x, timing=False, memory=False)
    with pytest.raises(ArgumentError, match=r"float16\[3\].*float32\[3\]"):
        measure(jnp.sin, lambda x: x.astype(jnp.float16), x, timing=False, memory=False)
    with pytest.raises(SideEffectError, match="debug"):
        measure(jnp.sin, lambda x: (jax.debug.print("{}", x), x)[1], x)
    with pytest.raises(TraceError, match="before does not run"):
        measure(lambda x: x.reshape(7), jnp.sin, x)
    with pytest.raises(ArgumentError, match="argnums"):
        measure(jnp.sin, jnp.sin, x, argnums=4)
    with pytest.raises(ArgumentError, match="got 'relu' in the result, needed the original's 'tanh'"):
        measure(lambda x, how: (x, "tanh"), lambda x, how: (x, how["act"]), x, {"act": "relu"}, timing=False)
    with pytest.raises(TraceError, match=r"depends on the value of the argument n.*raised from test_comparison.py:\d+"):
        measure(lambda x, n: x + sum(range(n)), jnp.add, x, 3)

    def looped(x):
        return jax.lax.while_loop(lambda c: c.sum() < 3, lambda c: c + 1, x)

    with pytest.raises(TraceError, match=r"Reverse-mode.*grad=False"):
        measure(looped, looped, x, grad=True)


def test_the_environment_names_hardware_versions_and_settings():
    e = environment()
    assert e.versions["jax"] == jax.__version__
    assert e.host_cores >= 1
    assert e.settings["jax_enable_x64"] is False
    assert type(e).from_dict(json.loads(json.dumps(e.to_dict()))) == e


def test_an_unwritable_path_is_one_error_and_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="cannot write"):
        save_json(tmp_path / "file" / "e.json", {})
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    with pytest.raises(ArgumentError, match="not a readable JSON"):
        load_json(tmp_path / "file")


def test_resident_growth_of_a_fresh_process_sees_the_arrays_a_run_makes(tmp_path, monkeypatch):
    (tmp_path / "grower.py").write_text(
        "import jax.numpy as jnp\n"
        "def make(n):\n"
        "    return (lambda x: x + 1), (jnp.ones(n),)\n"
        "def broken():\n"
        "    raise RuntimeError('no such thing')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    n = 16 * 2**20
    grown = resident_growth("grower:make", [n])
    assert 0.9 * 4 * n < grown.growth < 1.5 * 4 * n
    with pytest.raises(BackendError, match="no such thing"):
        resident_growth("grower:broken")
    with pytest.raises(ArgumentError, match="module:function"):
        resident_growth("grower")


def test_a_comparison_searches_its_original_once_and_another_function_for_itself(monkeypatch):
    import fusionlab as fl
    from fusionlab.verbs import fused as module

    searched, find_in = [], module.find_in
    monkeypatch.setattr(
        module, "find_in", lambda graph, *a, **k: (searched.append(graph.name), find_in(graph, *a, **k))[1]
    )
    options = {"timing": False, "memory": False, "grad": False}
    first = fl.compare(layer, fl.fuse(layer), *arguments(), **options)
    assert searched == ["layer"]
    assert (first.name, first.numerics.ok) == ("layer", True)

    def doubled(params, x):
        return jax.tree.map(lambda y: 2 * y, layer(params, x))

    del searched[:]
    other = fl.compare(layer, fl.fuse(doubled), *arguments(), **options)
    assert searched == ["doubled"]
    assert (other.name, other.numerics.ok) == ("layer", False)


def test_two_traces_are_of_one_program_only_with_the_same_captured_arrays_numbers_and_shapes():
    import fusionlab as fl
    from fusionlab.verbs.fused import _are_alike

    def graph(array, number, x):
        return fl.trace(lambda x: x * array + number, x)

    x, first, second = jnp.ones(8), jnp.ones(8), jnp.ones(8)
    assert _are_alike(graph(first, 2.0, x), graph(first, 2.0, x))
    assert not _are_alike(graph(first, 2.0, x), graph(second, 2.0, x))
    assert not _are_alike(graph(first, 2.0, x), graph(first, 3.0, x))
    assert not _are_alike(graph(first, 2.0, x), graph(first, 2.0, jnp.ones((2, 8))))


def test_the_garbage_collector_walks_young_objects_alone_while_a_program_is_traced_or_compiled():
    seen, before = [], gc.get_threshold()

    def one():  # anew, as JAX keeps what it has traced
        def f(x):
            seen.append(gc.get_threshold()[2])
            return x + 1

        return f

    x = jnp.ones(3)
    trace(one(), x)
    promote(one(), x)
    compile_program(one(), (x,), {})
    assert len(seen) == 3
    assert min(seen) > 100 * before[2]
    assert gc.get_threshold() == before
