"""Random train steps, differentiated already: what they return stays what it is; and the judge sees gradients that are wrong.

30 steps a run; FUSIONLAB_TRAIN_STEPS=start:count runs those seeds instead. Many more at once, with a record:
`python -m benchmarks random_programs --train-steps`.
"""

from __future__ import annotations

import os
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab.graph.interpret.evaluate import evaluate

from .fixed_programs import FLATTENED, flattened_norm
from .generator import Program
from .judge import judge
from .pieces.optimisers import KINDS
from .pieces.piece import Param
from .train_steps import train_step

START, COUNT = (int(n) for n in os.environ.get("FUSIONLAB_TRAIN_STEPS", "0:30").split(":"))
BATCH = 10
SEEDS = [range(s, min(s + BATCH, START + COUNT)) for s in range(START, START + COUNT, BATCH)]
pytestmark = [pytest.mark.whole] * ("FUSIONLAB_TRAIN_STEPS" in os.environ)  # seeds that are asked for all run


@pytest.mark.parametrize("seeds", SEEDS, ids=lambda r: f"seeds {r.start} to {r.stop - 1}")
def test_a_rewritten_train_step_is_the_train_step(seeds):
    found = [judge(train_step(seed), compiled=seed % 20 == 0) for seed in seeds]
    assert [(j.seed, j.reason) for j in found if j.verdict == "wrong"] == []
    assert [(j.seed, j.reason) for j in found if j.verdict == "uncomparable"] == []
    jax.clear_caches()


def test_a_train_step_is_a_function_of_its_seed():
    for seed in (3, 4, 5):
        one, two = train_step(seed), train_step(seed)
        assert one.text == two.text
        assert one.text != train_step(seed + 100).text
        texts = [str(jax.make_jaxpr(step.fn)(*step.avals)) for step in (one, two)]
        assert texts[0] == texts[1]


def test_a_train_step_returns_what_its_names_say():
    for seed in range(25):
        step = train_step(seed)
        assert step.baseline is not None
        outs, base = (jax.eval_shape(fn, *step.avals) for fn in (step.fn, step.baseline))
        assert len(outs) == len(step.outputs), step.text
        assert [o.shape for o in outs] == [o.shape for o in base], step.text
        for name, out in zip(step.outputs, outs, strict=True):
            if name.startswith(("gradient", "updated")):
                argument = step.params[int(name.rpartition(" ")[2])]
                assert (out.shape, str(out.dtype)) == (argument.shape, argument.dtype), step.text
        assert any(name.startswith("gradient") for name in step.outputs) == ("gradients returned" in step.text)


def test_the_train_steps_are_of_many_kinds():
    texts = [train_step(seed).text for seed in range(120)]
    words = (
        "optax.adamw",
        "adamw, fresh",
        "momentum",
        "sgd",
        "jit of the step",
        "jit of the gradients",
        "two batches",
        "two steps",
    )
    words += (
        "batches in a scan",
        "for each",
        "gradients returned",
        "beside it",
        "cross-entropy",
        "square error",
        " + ",
        "remat",
    )
    for word in words:
        assert any(word in text.partition("; of program")[0] for text in texts), word


# Of programs in which nothing is stopped or rounded; all the ways to a gradient are among them.
SMOOTH = (2, 13, 36, 59, 131, 177)


@pytest.mark.parametrize("seed", SMOOTH)
def test_the_gradients_are_the_slopes_of_the_loss(seed):
    step = train_step(seed)
    jaxpr, args = jax.make_jaxpr(step.fn)(*step.avals), step.arguments("normal")
    outs = dict(zip(step.outputs, evaluate(jaxpr, args), strict=True))
    rng = np.random.default_rng(0)
    for i in step.trained:
        along = rng.normal(size=args[i].shape)
        far, near = (evaluate(jaxpr, [*args[:i], args[i] + h * along, *args[i + 1 :]])[0] for h in (1e-6, -1e-6))
        np.testing.assert_allclose(np.sum(outs[f"gradient of argument {i}"] * along), (far - near) / 2e-6, 1e-4, 1e-7)


# -- the judge --------------------------------------------------------------------------------------------------------

# Steps whose first gradient is no zero: other optimisers, routes, places of jit; gradients returned and not.
STEADY = (2, 14, 22, 46, 47, 54, 59)


@pytest.mark.parametrize("seed", STEADY)
def test_the_judge_catches_one_gradient_that_is_a_hundredth_off(seed):
    step = train_step(seed)
    assert judge(step, rewrite=lambda _: step.changed(lambda gradients: gradients)).verdict == "same"
    found = judge(step, rewrite=lambda _: step.changed(lambda gradients: (gradients[0] * 1.01, *gradients[1:])))
    assert found.verdict == "wrong"
    assert re.search(f"(argument {step.trained[0]}|moment 0|momentum 0) differs by", found.reason), found.reason


@pytest.mark.parametrize("seed", STEADY)
def test_the_judge_catches_a_gradient_that_is_rounded(seed):
    step = train_step(seed)
    found = judge(step, rewrite=lambda _: step.changed(rounded))
    assert found.verdict == "wrong"
    assert "from float64 rounded" in found.reason, found.reason


def rounded(gradients: Any) -> Any:
    return tuple(g.astype(jnp.bfloat16).astype(g.dtype) for g in gradients)


def tied(kind: str, stopped: str = "", act: Any = jax.nn.relu, change: Any = lambda gradients: gradients) -> Program:
    """A train step of y = relu(x @ w + b) @ v + b + x, then y @ w; no gradient goes through the use that is `stopped`."""
    init, update = KINDS[kind]()

    def loss(trained: tuple[Any, ...], target: Any) -> Any:
        def use(value: Any, name: str) -> Any:
            return jax.lax.stop_gradient(value) if name == stopped else value

        x, w, v, b = trained
        h = act(x @ use(w, "first product") + use(b, "first bias"))
        y = h @ v + use(b, "second bias") + use(x, "residual")
        return jnp.mean(jnp.square(y @ use(w, "last product") - target)) + jnp.mean(jnp.sin(y))

    def step(*args: Any) -> list[Any]:
        trained, target = args[:4], args[4]
        gradients = change(jax.grad(loss)(trained, target))
        return jax.tree.leaves(update(gradients, init(trained), trained))

    shapes = (
        Param((5, 4), "float32", "data"),
        Param((4, 4), "float32"),
        Param((4, 4), "float32"),
        Param((4,), "float32", "bias"),
    )
    params = (*shapes, Param((5, 4), "float32", "data"))
    count = len(jax.eval_shape(step, *(jax.ShapeDtypeStruct(p.shape, p.dtype) for p in params)))
    names = [f"updated argument {i}" for i in range(4)] + [f"moment {i}" for i in range(count - 4)]
    return Program(1, step, params, "a step", "", 1e4, False, tuple(names))


MISSING = ("first product", "first bias", "second bias", "residual", "last product")
LIES: dict[str, dict[str, Any]] = {
    **{f"no gradient through the {use}": {"stopped": use} for use in MISSING},
    "two gradients exchanged": {"change": lambda g: (g[0], g[2], g[1], g[3])},
    "another slope at zero": {"act": lambda h: jnp.where(h >= 0, h, 0)},
    "a gradient of one row": {"change": lambda g: (g[0].at[0].set(0), *g[1:])},
    "gradients rounded": {"change": rounded},
}


@pytest.mark.parametrize("kind", ["sgd", "nesterov", "optax.adamw"])
@pytest.mark.parametrize("name", LIES)
def test_the_judge_catches_a_gradient_that_lacks_a_part(name, kind):
    wrong = tied(kind, **LIES[name])
    found = judge(tied(kind), rewrite=lambda _: wrong.fn)
    assert found.verdict == "wrong"
    want = {"another slope at zero": "at zeros inputs", "gradients rounded": "from float64 rounded"}
    assert re.search(want.get(name, "differs by .* at normal inputs"), found.reason), found.reason


@pytest.mark.parametrize("kind", KINDS)
def test_the_judge_believes_a_step_that_is_right(kind):
    found = judge(tied(kind), rewrite=lambda _: tied(kind).fn)
    assert (found.verdict, found.reason, found.shaken) == ("same", "", 0)


def test_a_train_step_at_which_the_search_once_raised():
    """An axis of a norm's input that a reshape takes apart."""

    def step(*args: Any) -> list[Any]:
        loss = lambda trained: jnp.sum(jnp.sqrt(jnp.square(flattened_norm((args[0], *trained))) + 1e-2))  # noqa: E731
        gradients = jax.grad(loss)(args[1:])
        return [*gradients, *(p - 0.1 * g for p, g in zip(args[1:], gradients, strict=True))]

    assert judge(Program(2210311, step, FLATTENED, "a norm that is flattened", "", 1e4, False)).verdict == "same"
