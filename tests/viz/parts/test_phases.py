"""Forward, backward and update are told apart, whatever a function is wrapped in; loops are seen through or opened."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from .small import WIDTH, cards, dense, dense_shapes, drawn, shape, stepped


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))

MODELS = {
    "plain": dense,
    "remat": jax.checkpoint(dense),
    "jit": jax.jit(dense),
    "custom_vjp": lambda p, x: doubled(dense(p, x)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_train_step_has_three_lanes(name):
    _, overview, _ = drawn(stepped(MODELS[name]), dense_shapes(), shape(64, WIDTH), find=False)
    assert overview.phases == ("forward", "backward", "update")
    backward, forward = overview.totals["backward"].operations, overview.totals["forward"].operations
    assert backward >= 1.4 * forward  # two products for each of the forward pass, but none for the program's input
    assert overview.kept > 0
    assert overview.gradients == sum(v.size * 4 for v in dense_shapes().values())


def test_inference_has_one_lane():
    _, overview, _ = drawn(dense, dense_shapes(), shape(64, WIDTH), find=False)
    assert overview.phases == ("forward",)
    assert overview.turns == 0


def test_a_scan_inside_a_train_step_is_a_region_that_opens():
    def model(params, x):
        x = x @ params["first"]
        return jax.lax.scan(lambda x, p: (dense(p, x), None), x, params["layers"])[0]

    params = {"first": shape(WIDTH, WIDTH), "layers": dense_shapes(5)}
    _, overview, _ = drawn(stepped(model), params, shape(64, WIDTH))
    (forward,) = [c for c in cards(overview, "forward") if c.turns]
    (backward,) = [c for c in cards(overview, "backward") if c.turns]
    assert (forward.turns, backward.turns) == (5, 5)
    assert (forward.name, backward.prefix, backward.name) == ("layers", "backward of", "layers")
    assert forward.children
    assert backward.children


@pytest.mark.parametrize(("loop", "turns"), [("while", -1), ("scan", 7)])
def test_a_program_that_is_one_loop_says_how_often_it_runs(loop, turns):
    def of_while(p, x):
        def unfinished(state):
            return state[0] < 7

        return jax.lax.while_loop(unfinished, lambda s: (s[0] + 1, dense(p, s[1])), (0, x))[1]

    def of_scan(p, x):
        return jax.lax.scan(lambda x, _: (dense(p, x), None), x, None, 7)[0]

    _, overview, _ = drawn(of_while if loop == "while" else of_scan, dense_shapes(), shape(64, WIDTH), find=False)
    assert overview.turns == turns
    assert not any("unfinished" in row.name for row in overview.rows)


def test_a_choice_has_its_branches():
    def chosen(p, x, which):
        x = x @ p["up"]
        x = jax.lax.cond(which, lambda x: jnp.tanh(x @ x.T) @ x, lambda x: jnp.sin(x), x)
        return x @ p["down"]

    _, overview, chains = drawn(chosen, dense_shapes(), shape(64, WIDTH), shape(dtype=bool), find=False)
    regions = [c for c in overview.cards() if c.kind == "region"]
    assert len(regions) == 1
    assert len(regions[0].children) == 2
    assert all(chains.values())
