"""JAX's own settings: what `jax.jit` does under each, the fused function does, whatever was fused before and under what.

What is asserted is in settings.py. By hand: `python -m tests.calls.settings rank_promotion debug_nans`.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fusionlab as fl
from fusionlab.graph.settings import jax_defaults
from tests.calls import settings
from tests.simulated import TESTS, environment

# Each in a process forked from one that has imported everything and fused nothing.
GROUPS = (
    ("rank_promotion", "dtype_promotion", "transfer_guard"),
    ("checking_leaks", "debug_nans", "debug_infs"),
    ("matmul_precision", "enable_x64", "disable_jit"),
    ("log_compiles", "enable_checks", "legacy_prng_key"),
)


def first_of_all(*names: str) -> None:
    command = [sys.executable, "-m", "tests.calls.settings", *names]
    told = subprocess.run(command, cwd=TESTS.parent, env=environment(1), capture_output=True, text=True, timeout=600)
    assert told.returncode == 0, told.stderr[-2000:]
    answers = dict(map(json.loads, told.stdout.splitlines()))
    assert answers == dict.fromkeys(names, "")


def test_every_setting_is_tried():
    assert {name for group in GROUPS for name in group} | {"together"} == set(settings.SETTINGS)


@pytest.mark.whole
def test_in_a_process_in_which_nothing_was_fused_before():
    first_of_all("together")


@pytest.mark.dear
@pytest.mark.parametrize("names", GROUPS, ids="-".join)
def test_each_setting_in_a_process_in_which_nothing_was_fused_before(names):
    first_of_all(*names)


@pytest.mark.parametrize("name", settings.SETTINGS)
def test_after_a_fuse_under_the_defaults(name):
    for fn, args, _ in settings.programs():
        fl.fuse(fn)(*args)
    settings.under(name)


@pytest.mark.whole
def test_what_is_fused_under_a_setting_first_is_the_same_under_the_defaults():
    fn, args, name = next(settings.programs())
    with settings.SETTINGS["together"]():
        strict = fl.find(fn, *args)
    assert [c.formula for c in strict.candidates] == [c.formula for c in fl.find(fn, *args).candidates]
    (out,) = jax.jit(jax.extend.core.jaxpr_as_fun(strict.rewritten()))(*args)
    settings.same(out, jax.jit(fn)(*args))
    assert strict.counts()[name] == 1


@pytest.mark.whole
def test_the_users_function_runs_under_the_users_settings():
    """What it does wrong under them it is told, by find and by the fused function."""
    seen: list[str] = []

    def fn(x, w, b):
        seen.append(jax.config.jax_numpy_rank_promotion)  # pyright: ignore[reportAttributeAccessIssue]
        return jax.nn.relu(x @ w + b)

    x, w, b = jnp.ones((4, 6)), jnp.ones((6, 3)), jnp.ones(3)
    with jax.numpy_rank_promotion("raise"):
        for call in (lambda: jax.jit(fn)(x, w, b), lambda: fl.fuse(fn)(x, w, b)):
            with pytest.raises(ValueError, match="rank_promotion"):
                call()
        with pytest.raises(fl.errors.TraceError, match="rank_promotion"):
            fl.find(fn, x, w, b)
    assert set(seen) == {"raise"}


@pytest.mark.whole
def test_a_call_of_an_op_runs_at_jaxs_defaults_but_in_the_precision_that_is_set():
    x, w, b = jnp.ones((4, 6)), jnp.ones((6, 3)), jnp.ones(3)
    want = jax.grad(lambda x: fl.ops.gemm_epilogue(x, w, b, activation="relu").sum())(x)
    with settings.SETTINGS["together"](), jax.default_matmul_precision("highest"):
        got = jax.jit(jax.grad(lambda x: fl.ops.gemm_epilogue(x, w, b, activation="relu").sum()))(x)
        closed = jax.make_jaxpr(lambda x: fl.ops.gemm_epilogue(x, w, b))(x)
    np.testing.assert_allclose(got, want)
    assert "HIGHEST" in str(closed.eqns[0].params["precision"])


@pytest.mark.whole
def test_an_op_of_the_users_has_the_precision_of_the_program_whatever_is_set_when_it_is_lowered():
    made = fl.pattern_pass("sine_of_a_product", lambda x, w: jnp.sin(x @ w) * 2.0, axes={"x": "mk", "w": "kn"})
    fl.register(made)
    try:
        fn = lambda x, w: jnp.sin(x @ w) * 2.0  # noqa: E731
        args = jnp.ones((4, 8)), jnp.ones((8, 6))

        def lowered(fn, set_later):
            traced = jax.jit(fn).trace(*args)
            with jax.default_matmul_precision(set_later):
                text = traced.lower().as_text()
            return text.count("HIGHEST")

        fused = lambda x, w: fl.fuse(fn, passes="sine_of_a_product")(x, w)  # noqa: E731
        assert fl.find(fn, *args, passes="sine_of_a_product").counts()["sine_of_a_product"] == 1
        assert lowered(fused, "highest") == lowered(fn, "highest") == 0
        with jax.default_matmul_precision("highest"):
            grads = (jax.grad(lambda *a, f=f: f(*a).sum(), (0, 1)) for f in (fused, fn))
            assert lowered(fused, None) == lowered(fn, None) > 0
            assert len({lowered(g, None) for g in grads}) == 1
    finally:
        fl.unregister(made)


def test_defaults_leave_alone_what_is_at_its_default():
    """A setting that is made anew is another key of JAX's caches."""
    traces = []

    @jax.jit
    def fn(x):
        traces.append(1)
        return x + 1

    fn(jnp.ones(3))
    with jax_defaults():
        fn(jnp.ones(3))
    assert len(traces) == 1
    with jax.debug_nans(True), jax_defaults():
        assert not jax.config.jax_debug_nans  # pyright: ignore[reportAttributeAccessIssue]
    with jax.debug_nans(True), jax_defaults(kept={"jax_debug_nans"}):
        assert jax.config.jax_debug_nans  # pyright: ignore[reportAttributeAccessIssue]


def test_a_comparison_is_made_under_the_strictest_settings():
    fn, args, _ = next(settings.programs())
    with settings.SETTINGS["together"]():
        assert fl.compare(fn, fl.fuse(fn), *args).numerics is not None
        fl.find(fn, *args).report(xla=True)


def precisions_of(fn, args):
    """Those of the products of a program, as it is lowered, in no order."""
    return sorted(
        "HIGHEST" in line for line in jax.jit(fn).lower(*args).as_text().splitlines() if "dot_general" in line
    )


@pytest.mark.whole
@pytest.mark.parametrize("implementation", ["xla", None])
def test_a_gradient_pulled_back_under_another_precision_is_computed_in_that(implementation):
    fn, (x, w, b), _ = next(settings.programs())
    fused = fl.fuse(fn, implementation=implementation)

    def pulled(fn, forward, backward):
        def run(x, w, b):
            with jax.default_matmul_precision(forward):
                y, pull = jax.vjp(fn, x, w, b)
            with jax.default_matmul_precision(backward):
                return pull(y)

        return run

    for forward, backward in ((None, "highest"), ("highest", None), (None, None), ("highest", "default")):
        want = precisions_of(pulled(fn, forward, backward), (x, w, b))
        assert precisions_of(pulled(fused, forward, backward), (x, w, b)) == want
        assert any(want) == ("highest" in (forward, backward))


def test_an_attention_that_computes_its_scores_again_does_so_at_the_precision_of_the_first_time():
    x = jnp.ones((1, 64, 2, 8))
    attend = functools.partial(fl.ops.dot_product_attention, implementation="xla_blockwise")

    def pulled(*args):
        y, pull = jax.vjp(attend, *args)
        with jax.default_matmul_precision("highest"):
            return pull(y)

    assert not any(precisions_of(pulled, (x, x, x)))


@pytest.mark.whole
def test_an_op_of_the_users_is_pulled_back_under_the_precision_that_is_set_there():
    fl.register(fl.pattern_pass("sine_of_a_product", lambda x, w: jnp.sin(x @ w) * 2.0, axes={"x": "mk", "w": "kn"}))
    try:
        fn = lambda x, w: jnp.sin(x @ w) * 2.0  # noqa: E731
        args = jnp.ones((4, 8)), jnp.ones((8, 6))

        def pulled(fn):
            def run(*args):
                y, pull = jax.vjp(fn, *args)
                with jax.default_matmul_precision("highest"):
                    return pull(y)

            return run

        assert sum(precisions_of(pulled(fl.fuse(fn, passes="sine_of_a_product")), args)) >= 2
    finally:
        fl.unregister("sine_of_a_product")


def in_64_bits(fn):
    def within(*args):
        with jax.enable_x64(True):
            return fn(*(a.astype("float64") for a in args)).astype("float32")

    return within


def in_both(fn):
    return lambda *args: fn(*args) + in_64_bits(lambda *given: fn(*(given[0] * 2, *given[1:])))(*args)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")  # of the original, when it is transposed
@pytest.mark.parametrize("of", [in_64_bits, in_both], ids=lambda of: of.__name__)
@pytest.mark.parametrize("number", range(3))
def test_what_switches_64_bit_types_on_inside_is_fused_as_it_is(number, of, monkeypatch):
    monkeypatch.setenv("FUSIONLAB_RAISE", "1")
    fn, args, name = list(settings.programs())[number]
    fn = of(fn)
    for program in (fn, settings.step(fn)):
        found = fl.find(program, *args)
        assert any(c.op == name and c.root.dtype == "float64" for c in found.candidates), found.report()
        for fused in (fl.fuse(program), jax.jit(fl.fuse(program))):
            settings.same(fused(*args), jax.jit(program)(*args))
