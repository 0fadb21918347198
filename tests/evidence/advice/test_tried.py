"""`fl.advise` claims a gain only where the interval of the edited program's time is above a tenth, and its results are the same."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import fusionlab as fl
from fusionlab.evidence import Runs, Timing, Verdict
from fusionlab.evidence.advice.tried import Advice, TriedLint, try_lints
from fusionlab.evidence.instruments.timing import timing_of
from fusionlab.graph.program.trace import bind_users
from fusionlab.graph.rewriting.rewrite import to_jaxpr
from fusionlab.progress import Stages


def step(w, x):
    def loss(w):
        def layer(x, w):
            h = jnp.tanh(x @ w)
            return x + h * jnp.sin(h), None

        return jnp.sum(jax.lax.scan(layer, x, w)[0] ** 2)

    return jax.value_and_grad(loss)(w)


def arguments(layers=6, rows=1024, width=32):
    keys = jax.random.split(jax.random.key(0))
    return jax.random.normal(keys[0], (layers, width, width)) * 0.1, jax.random.normal(keys[1], (rows, width))


def timed(ratio, spread=0.001, samples=40):
    after = tuple(1e-3 * (1 + spread * (i % 5)) for i in range(samples))
    before = tuple(s * ratio for s in after)
    return timing_of("step", *(Runs(n, t, 1, 0.1, 0.1, 0.1) for n, t in (("before", before), ("after", after))))


def lint():
    return fl.find(step, *arguments(), passes=()).lints[0]


def test_only_a_clear_tenth_is_advised():
    x = lint()
    assert TriedLint(x, timed(1.3)).helps
    assert not TriedLint(x, timed(1.10)).helps  # saves 9 %
    assert not TriedLint(x, timed(0.7)).helps
    assert not TriedLint(x, timed(1.3), differing=("out[0]",)).helps
    assert not TriedLint(x, timed(1.3, samples=3)).helps  # no verdict
    wide = dataclasses.replace(timed(1.2), interval=(1.05, 1.4))
    assert not TriedLint(x, wide).helps
    good, bad = TriedLint(x, timed(1.3)), TriedLint(x, timed(1.02))
    assert Advice("step", (bad, good), "a card").given == (good,)
    text = str(Advice("step", (bad, good), "a card"))
    assert "2 lints tried, 1 advised" in text
    assert "costs 23% of the step [23%, 23%]" in text
    assert f"edit: {x.edit}" in text
    assert "no advice, it does not clearly save a tenth" in text
    assert text.count(x.edit) == 1  # an edit that did not help is not repeated as advice
    less = dataclasses.replace(x, rule="recomputed_products", least=0.03)
    assert TriedLint(less, timed(1.04)).helps
    text = str(Advice("step", (TriedLint(less, timed(1.02)), good), "a card"))
    assert "(an edit has to save more than 10% of the time, the edit of recomputed_products 3%)" in text
    assert "no advice, it does not clearly save 3%" in text


@pytest.mark.dear
def test_the_edit_is_tried_on_the_program_with_the_same_results_and_less_memory():
    said = []
    found = fl.advise(step, *arguments(), samples=4, budget_s=5.0, progress=lambda task, *_: said.append(task))
    (tried,) = found.tried
    assert tried.differing == ()
    assert tried.memory.after.peak < tried.memory.before.peak  # nothing is stacked
    assert isinstance(tried.timing, Timing)
    assert tried.timing.what == "step"
    assert tried.timing.verdict != Verdict.SAME_CODE
    assert "lint 1 of 1: timing step" in said
    jitted = jax.jit(lambda scale, w, x: step(w * scale, x), static_argnums=0, donate_argnums=1)
    assert fl.advise(jitted, 2, *arguments(), samples=2, budget_s=2.0).tried[0].differing == ()
    assert len(fl.advise(fl.fuse(step), *arguments(), samples=2, budget_s=2.0).tried) == 1


@pytest.mark.dear
def test_an_edit_that_changes_results_is_never_advised():
    args = arguments()
    graph = fl.trace(step, *args)
    other = fl.trace(lambda w, x: step(w * 1.01, x), *args)
    wrong = dataclasses.replace(lint(), edited=lambda: to_jaxpr(other))
    (tried,) = try_lints(graph, bind_users(step, args, {}), [wrong], 2, 1.0, Stages()).tried
    assert tried.differing == ("out[0]", "out[1]")
    assert not tried.helps


def test_without_a_lint_nothing_is_compiled():
    found = fl.advise(lambda x: x + 1, jnp.ones(3))
    assert found.tried == ()
    assert "no lint" in str(found)


def test_shapes_are_refused_and_a_cancel_keeps_what_was_tried():
    w, x = arguments()
    with pytest.raises(fl.errors.ArgumentError, match="needed arrays"):
        fl.advise(step, jax.ShapeDtypeStruct(w.shape, w.dtype), x)
    with pytest.raises(fl.errors.ArgumentError, match="samples"):
        fl.advise(step, w, x, samples=1)
    seen = []
    assert fl.advise(step, w, x, cancel=lambda: bool(seen.append(1)) or len(seen) > 1).tried == ()
