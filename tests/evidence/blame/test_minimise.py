"""A small program that still shows a fault: what is cut, what is kept, and the file that is written."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.errors import ArgumentError
from fusionlab.evidence.blame import faults
from fusionlab.evidence.blame.program import small, written_out
from fusionlab.evidence.blame.search import Search
from fusionlab.evidence.blame.source import source_of_program
from fusionlab.evidence.instruments import timing
from fusionlab.progress import Stages
from tests.evidence.blame.planting import looped, planted, unrolled

ROOT = Path(__file__).parents[3]


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def ran(file):
    """What a file prints that is run by itself."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, file.name], capture_output=True, text=True, cwd=file.parent, env=env, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.dear
def test_a_train_step_of_24_layers_is_cut_to_the_planted_site_and_written_as_a_file_that_runs(tmp_path):
    step, args, of_layer = unrolled(24, 7)
    needs = "from tests.evidence.blame.planting import planted\nerror = planted(1.001)\nerror.__enter__()"
    with planted(1.001, of_layer):
        found = fl.minimise(step, *args, needs=needs)
        assert found.of > 500
        assert found.equations <= 20
        assert (found.kind, found.unwritten, found.stopped) == ("error", "", "")
        assert "WORSE" in found.observed
        assert found.observed in str(found)
        ours, theirs = jax.jit(found.fn)(*found.arrays), jax.jit(fl.fuse(found.fn))(*found.arrays)
    np.testing.assert_allclose(np.asarray(theirs[0]), np.asarray(ours[0]) * 1.001, rtol=1e-5)
    file = found.save(tmp_path / "repro.py")
    assert "planting.py:" in file.read_text()  # the lines of the model
    with np.load(tmp_path / "repro.npz", allow_pickle=False) as arrays:
        assert [arrays[f"x{i}"].shape for i in range(len(found.arrays))] == [x.shape for x in found.arrays]
    assert "1 of 1 outputs and gradients are WORSE than before" in ran(file)
    file.write_text(file.read_text().replace(needs, ""))
    assert "WORSE" not in ran(file)


@pytest.mark.dear
@pytest.mark.parametrize("role", ["call", "cotangent"])
def test_a_fault_in_a_scan_is_cut_out_of_its_body(role):
    step, args = looped(24 if role == "call" else 3)
    with planted(1.001, role=role):
        found = fl.minimise(step, *args)
    assert found.equations <= 20
    assert not found.unwritten
    assert "scan" not in str(found.jaxpr)


# The search alone: a program is faulty if it has a tangent.


def has_tan(program, *arrays):
    return "a tangent" if " tan " in str(jax.make_jaxpr(program)(*arrays)) else False


def of_many(x):
    for i in range(20):
        x = jnp.sin(x) + (jnp.tan(x) if i == 13 else jnp.cos(x))
    return x.sum()


def test_equations_are_left_out_and_what_the_rest_reads_of_them_is_recorded():
    x = normal(3)
    found = fl.minimise(of_many, x, shows=has_tan)
    assert (found.equations, found.of, found.kind, found.observed) == (1, 61, "shows", "a tangent")
    for _ in range(13):
        x = np.sin(x) + np.cos(x)
    np.testing.assert_allclose(np.asarray(found.arrays[0]), x, rtol=1e-5)
    assert found.trials < 40


@pytest.mark.dear
def test_loops_branches_and_calls_are_entered():
    def f(x):
        def body(c, y):
            return jax.checkpoint(lambda c: jax.lax.cond(c.sum() > y, jnp.tan, jnp.cos, c) * 2)(c), None

        return jax.lax.scan(body, x, jnp.arange(4.0) - 100)[0]

    found = fl.minimise(f, normal(3), shows=has_tan)
    assert found.equations == 1
    assert not found.unwritten
    # One of no steps has no body to enter.
    found = fl.minimise(lambda x: jnp.tan(jax.lax.scan(lambda c, y: (c + y, c), x, x[:0])[0]), normal(3), shows=has_tan)
    assert found.equations == 1


def test_a_search_ends_with_the_smallest_so_far():
    whole = small(jax.make_jaxpr(of_many)(normal(3)), [normal(3)])
    calls = []

    def attempt(program):
        calls.append(program.count)
        return has_tan(program.fn, *program.arrays) or ""

    asked = iter([False, False, True])
    found = Search(attempt, whole, "a tangent", Stages(cancel=lambda: next(asked))).run()
    assert (found.stopped, found.trials, found.program.count) == ("cancelled", 3, min(61, *calls[1:]))
    assert len(calls) == 2
    found = Search(attempt, whole, "a tangent", budget_s=0.0).run()
    assert (found.stopped, found.trials, found.program) == ("budget", 0, whole)


def test_of_a_fused_function_its_passes_count():
    fused = fl.fuse(of_many, passes=["lerp"], implementation="xla")
    found = fl.minimise(fused, normal(3), shows=has_tan)
    assert (found.equations, found.options) == (1, {"passes": ["lerp"], "implementation": "xla"})


@pytest.mark.whole
@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({}, {}),
        ({"passes": (name for name in ("lerp",))}, {"passes": ["lerp"]}),
        ({"passes": []}, {"passes": []}),
        ({"passes": fl.Strategy(lerp={"reassociate": True})}, {"passes": fl.Strategy(lerp={"reassociate": True})}),
        ({"passes": {"lerp": True, "lerp_grad": False}}, {"passes": {"lerp": True, "lerp_grad": False}}),
        ({"skip": "lerp"}, {"skip": ["lerp"]}),
        ({"skip": ("lerp", "gemm_epilogue@#1")}, {"skip": ["lerp"]}),
        ({"only": "lerp@#2"}, {"only": ["lerp"]}),
        ({"only": ()}, {"only": []}),
        ({"implementation": "xla"}, {"implementation": "xla"}),
        ({"edits": "stacked_scan"}, {"edits": ["stacked_scan"]}),
        ({"check": True, "dump": "folder", "static_argnums": 0}, {}),
    ],
)
def test_every_option_of_a_fused_function_that_decides_what_is_fused_counts(asked, kept):
    fused = fl.fuse(of_many, **asked)
    assert fused.named_options == kept
    again = fl.fuse(of_many, **fused.named_options)
    decides = ("passes", "implementation", "edits")
    assert all(again._options[name] == fused._options[name] for name in decides)
    assert again.named_options == kept


def test_a_new_option_of_fuse_is_counted_or_left_out_on_purpose():
    """Each option of `fuse` is in the test before this one."""
    asked = {"passes", "skip", "only", "implementation", "edits", "check", "dump", "static_argnums", "static_argnames"}
    assert set(inspect.signature(fl.fuse).parameters) - {"fn"} == asked


def blended(x, y, w):
    return jnp.sum(x + w * (y - x))


def test_a_pass_that_a_fused_function_skips_shows_no_fault():
    args = normal(3, 8), normal(3, 8) + 1, normal(3, 8) / 4
    with planted(1.1, op="lerp"):
        assert fl.minimise(fl.fuse(blended), *args, shows="error").kind == "error"
        with pytest.raises(ArgumentError, match="does not show the fault"):
            fl.minimise(fl.fuse(blended, skip="lerp"), *args, shows="error")


def test_what_is_asked_wrongly_is_refused():
    x = normal(3)
    with pytest.raises(
        ArgumentError, match="shows: got 'eror', needed one of 'error', 'raises', 'time', or a function"
    ):
        fl.minimise(of_many, x, shows="eror")
    with pytest.raises(ArgumentError, match=r"minimise: of_many does not show the fault \(shows\)"):
        fl.minimise(of_many, x, shows=lambda *_: False)
    with pytest.raises(ArgumentError, match="got a shape"):
        fl.minimise(of_many, jax.ShapeDtypeStruct((3,), "float32"), shows=has_tan)


@pytest.mark.dear
def test_a_program_that_raises_and_one_whose_gradients_are_wrong():
    def refuses(*operands):
        raise RuntimeError("kernel refuses")

    def layer(x, w, b):
        return jnp.tanh(jax.nn.relu(x @ w + b) * 2)

    args = normal(4, 6), normal(6, 5), normal(5)
    with planted(1.001, refuses):
        found = fl.minimise(layer, *args)
    assert (found.kind, found.equations <= 4) == ("raises", True)
    assert "RuntimeError: kernel refuses" in found.observed
    with planted(1.001, role="cotangent"):
        with pytest.raises(ArgumentError, match="does not show the fault"):
            fl.minimise(layer, *args)
        found = fl.minimise(layer, *args, grad=True)
    assert (found.kind, found.unwritten) == ("error", "")


@pytest.mark.dear
def test_a_slowdown_by_a_clock_that_is_made_up(monkeypatch):
    def timed(what, before, after, **_):
        slow = 1.3 if " tan " in str(before.jaxpr) else 0.99
        seconds = {"before": 1e-3, "after": 1e-3 * slow}
        runs = [timing.Runs(name, (s,) * 40, 1, 0.0, 0.0, 0.0) for name, s in seconds.items()]
        return timing.timing_of(what, *runs)

    monkeypatch.setattr(faults, "time_programs", timed)
    found = fl.minimise(of_many, normal(3), shows="time")
    assert (found.kind, found.equations) == ("time", 1)
    assert "slower" in found.observed


# What is written.


def many_operations(key, x, i):
    def body(c, row):
        return c * 0.5 + row, (c.max(), row[0])

    c, (tops, firsts) = jax.lax.scan(body, x[0], x)
    picked = jax.lax.cond(c.sum() > 0, lambda v: v[::2], lambda v: v[1::2], c)
    kept = jax.checkpoint(jnp.tanh)(x.astype(jnp.bfloat16)) * jax.random.bernoulli(key, 0.5, x.shape)
    counted = jnp.zeros(7).at[i].add(1.5)
    return (
        picked,
        tops,
        firsts,
        kept,
        counted,
        jax.nn.silu(x)[:, i],
        jnp.where(x > 0, jnp.inf, x),
        jnp.sort(x),
        ~(x > 0),
    )


@pytest.mark.dear
def test_a_program_written_as_source_computes_the_same_bits():
    args = jax.random.key(0), normal(4, 6), np.asarray([1, 1, 4])
    whole = small(jax.make_jaxpr(many_operations)(*args), args)
    for program in (whole, written_out(whole, loops=False), written_out(whole, loops=True)):
        space = {"jax": jax, "np": np, "lax": jax.lax, "fusionlab": fl}
        exec(source_of_program(program), space)
        for got, want in zip(
            jax.jit(space["program"])(*program.arrays), jax.jit(program.fn)(*program.arrays), strict=True
        ):
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    assert "scan" not in str(program.closed)


@pytest.mark.dear
def test_arrays_of_other_dtypes_come_back_from_the_file(tmp_path):
    def f(key, x):
        return jnp.tan(x * jax.random.bernoulli(key, 0.5, x.shape))

    def shows(program, *arrays):
        return str(jax.make_jaxpr(program)(*arrays)).count(" tan ") and len(arrays) == 2

    found = fl.minimise(
        f, jax.random.key(7), jnp.asarray(normal(3), jnp.bfloat16), shows=shows, passes=fl.Strategy(lerp=True)
    )
    text = found.save(tmp_path / "r.py").read_text()
    assert "fused = fusionlab.fuse(program, passes=fusionlab.Strategy(lerp=True))" in text
    space = {"__name__": "r", "__file__": str(tmp_path / "r.py")}
    exec((tmp_path / "r.py").read_text(), space)
    for got, want in zip(space["arrays"](), found.arrays, strict=True):
        assert got.dtype == want.dtype
        assert (np.asarray(got) == np.asarray(want)).all() if got.dtype != jax.random.key(0).dtype else True


def test_what_has_no_source_is_named_and_kept():
    def f(x):
        return jax.pure_callback(lambda x: np.asarray(x), x, x * 2) + jnp.tan(x)

    found = fl.minimise(f, normal(3), shows=lambda program, *xs: "pure_callback" in str(jax.make_jaxpr(program)(*xs)))
    assert found.equations == 1
    assert "pure_callback at test_minimise.py:" in found.unwritten
    assert "cannot be written as source" in str(found)
    with pytest.raises(ArgumentError, match="cannot be written as source"):
        found.save("repro.py")
    (out,) = jax.jit(found.fn)(*found.arrays)
    np.testing.assert_array_equal(np.asarray(out), normal(3) * 2)
