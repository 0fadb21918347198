"""The canonical view says what the program says: an interpreter of the view equals the program, value by value, over the zoo."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from zoo.catalogue import Program, programs
from zoo.model import concrete

from fusionlab.graph.canonical import rules
from fusionlab.graph.program.trace import trace

from .. import every_primitive
from ..canonical_interpreter import Canonical, Outcome, RecordedView, check_block
from ..raw_values import RawBlock, Unknown

FORWARD = [p for p in programs() if p.dtype == "f32" and p.variant == "forward"]
FEW, SAMPLE = FORWARD[::20], FORWARD[::5]


@functools.cache
def graph_of(program: Program) -> Any:
    function, args = program.make()
    return trace(function, *args)


@functools.cache
def outcome(program: Program) -> Outcome:
    """All blocks of a program: the top with the program's own random arrays, every body with random arrays of its own."""
    total = Outcome()
    graph = graph_of(program)
    for block in graph.blocks():
        own = [concrete(jax.ShapeDtypeStruct(v.shape, v.dtype), i) for i, v in enumerate(block.inputs)]
        total += check_block(block, jax.tree.leaves(program.arrays()) if block is graph.top else own)
    return total


def shares(chosen: list[Program]) -> tuple[float, str]:
    """The share of the values that were compared, over some programs, and as text that of each that lacks some."""
    outcomes = {p.id: outcome(p) for p in chosen}
    lacking = (f"{name}: {o.compared} of {o.compared + o.unknown}" for name, o in outcomes.items() if o.unknown)
    return sum(outcomes.values(), Outcome()).share, "\n".join(lacking)


def compare_with_jit(program: Program) -> None:
    """The view's results against those of the compiled program, as the user runs it."""
    function, _ = program.make()
    arrays = program.arrays()
    top = graph_of(program).top
    canonical = Canonical(RecordedView(top), RawBlock(top, jax.tree.leaves(arrays)))
    for atom, want in zip(top.outputs, jax.tree.leaves(jax.jit(function)(*arrays)), strict=True):
        try:
            got = canonical.value(atom)
        except Unknown:
            continue
        want = np.asarray(want, np.float64)
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("program", FORWARD, ids=lambda p: p.id)
def test_the_view_of_a_model_computes_what_the_model_computes(program):
    assert not outcome(program).wrong


@pytest.mark.parametrize("chosen", [FEW, SAMPLE, FORWARD], ids=["a few", "a sample", "all"])
def test_of_the_values_of_the_zoo_nearly_all_are_compared(chosen):
    share, lacking = shares(chosen)
    assert share >= 0.95, lacking


# The others can be traced here, not run.
ON_ONE_DEVICE = [p for p in FORWARD if getattr(p.model.config, "devices", 1) == 1]


@pytest.mark.parametrize("program", ON_ONE_DEVICE, ids=lambda p: p.id)
def test_the_view_of_a_model_computes_what_jit_computes(program):
    compare_with_jit(program)


# -- one primitive at a time, against JAX alone -----------------------------------------------------------------------------


# Not nextafter, which acts on the bits of its own dtype: in float64 it is another function.
RULED = rules.CANONICAL_RULES.keys() - {"nextafter"}
NAMED = [p for p in every_primitive.programs() if p.name.removesuffix("_integer").removesuffix("_bool") in RULED]


@pytest.mark.parametrize("program", NAMED, ids=repr)
def test_a_primitive_with_a_rule_means_what_jax_computes(program):
    graph = trace(program.fn, *program.args)
    found = check_block(graph.top, program.args, by_jax=True)
    assert not found.wrong
    assert not found.unknown


# -- where views go wrong ---------------------------------------------------------------------------------------------------

X = np.linspace(0.2, 0.8, 6, dtype=np.float32)
I = np.array([-5, 4, 7, 0, 1, 2], np.int32)  # noqa: E741 - integers


def _same_but_for_unit_axes(x: Any) -> Any:
    return [f(x.reshape(s), 0) for s in ((1, 6), (6, 1)) for f in (lax.cumsum, lambda a, d: lax.rev(a, (d,)))]


ODD = {
    "factors that cancel": lambda x, i: (x / x, x[:, None] * x / x, x / x * x, (x * x) / (x * x * x), x - x, x + x - 2 * x),
    "powers": lambda x, i: (x**0, x**-1, (2 * x) ** 0.5, (-2 * x) ** 2.0, (-x) ** 3, lax.rsqrt(4 * x), jnp.sqrt(-x)),
    "axes of opaque nodes": lambda x, i: _same_but_for_unit_axes(x),
    "truth and number": lambda x, i: (~jnp.where(i > 0, True, False), ~jnp.where(i > 0, 1, 0), jnp.where(i > 0, 1.0, 0.0)),
    "the two zeros": lambda x, i: (lax.atan2(0 * x, jnp.float32(-0.0)), lax.atan2(0 * x, jnp.float32(0.0))),
    "rounding": lambda x, i: (lax.round(5 * x), lax.round(5 * x, lax.RoundingMethod.TO_NEAREST_EVEN), jnp.round(x + 0.3)),
    "integers": lambda x, i: (i // 3, lax.div(i, 2), i % 3, lax.rem(i, 2), i**3, i.astype(np.int8), i.sum(), (3 * i).sum()),
    "factors of a reduction": lambda x, i: ((-x).max(), (-2 * x).min(), (0 * x).max(), (3 * x).sum(), (-i).max()),
    "broadcast and reduced": lambda x, i: [jnp.broadcast_to(-x[:, None], (6, 4)).sum(a) for a in (0, 1, (0, 1))],
    "literals": lambda x, i: (jnp.full((3, 4), 2).sum(), jnp.full(3, 0.1) * 0.3, x * (jnp.float32(8) ** 0.5), x - jnp.inf),
    "choices": lambda x, i: (lax.select_n(i % 3, x, 2 * x, 3 * x), jnp.where(True, x, 0 * x), jnp.clip(x, 0.3, 0.5)),
    "neutral literals": lambda x, i: (jnp.maximum(x, -jnp.inf), jnp.minimum(x, -jnp.inf), (i > 0) & True, (i > 0) | True),
    "outer products": lambda x, i: (x[:, None] - x[None], (x[:, None] * x) / x[None], jnp.outer(x, x) @ x, jnp.outer(x, 2 * x).T),
    "reshapes": lambda x, i: ((2 * x).reshape(2, 3).T.reshape(3, 2), jnp.outer(x, x).reshape(2, 3, 6).reshape(36) * 2, x[:0].sum()),
    "products": lambda x, i: (jnp.einsum("i,i->", x, x), jnp.einsum("i,j->ij", x, -x), jnp.broadcast_to(x, (4, 6)) @ x),
    "products of reshaped rows": lambda x, i: (jnp.outer(x, x).reshape(36, 1) @ x[None], jnp.outer(x, x) @ jnp.outer(x, x)),
    "branches and loops": lambda x, i: (lax.cond(i[0] > 0, jnp.sin, jnp.cos, x), lax.fori_loop(0, 3, lambda k, c: c * x, x)),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_an_odd_program_means_what_jax_computes(name):
    graph = trace(ODD[name], X, I)
    found = check_block(graph.top, (X, I), by_jax=True)
    assert not found.wrong
    assert not found.unknown


# -- the interpreter can tell -------------------------------------------------------------------------------------------------


SQUARES = tuple(np.random.default_rng(i).normal(size=(6, 6)).astype(np.float32) for i in (0, 1))


def layer(x: Any, w: Any) -> Any:
    """A layer with most rules in it; every axis of the same length, so that a wrong one goes unnoticed by shapes."""
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    scores = jax.nn.softmax(jnp.where(scaled @ w > -1.0, scaled @ w, -jnp.inf))
    return jax.nn.gelu(scores.T / 2.0 + 1.0).reshape(4, 9)


BROKEN = {
    "rsqrt": rules._mul((0.5,)),
    "sub": rules._add(1),
    "div": rules._mul((1.0, 1.0)),
    "transpose": rules._same,
    "reduce_sum": lambda view, node, ins: [r._replace(coef=r.coef * 2) for r in rules._reduce(view, node, ins)],
    "reduce_max": lambda view, node, ins: rules._reduce(view, node, [ins[0]._replace(coef=-ins[0].coef)]),
    "integer_pow": rules._mul((3.0,)),
    "gt": lambda view, node, ins: [rules._binary(view, node, ins)[0]._replace(coef=0.0)],
    "select_n": lambda view, node, ins: rules._select(view, node, [ins[0], ins[2], ins[1]]),
    "reshape": lambda view, node, ins: [view.literal(0.0, node.outputs[0].shape)],
    "tanh": rules._same,
    "dot_general": lambda view, node, ins: rules.dot(view, node, ins[::-1]),
}


def test_the_layer_itself_is_right():
    found = check_block(trace(layer, *SQUARES).top, SQUARES)
    assert not found.wrong
    assert not found.unknown


@pytest.mark.parametrize("primitive", BROKEN)
def test_a_rule_that_is_wrong_is_found_out(primitive, monkeypatch):
    graph = trace(layer, *SQUARES)
    monkeypatch.setitem(rules.CANONICAL_RULES, primitive, BROKEN[primitive])
    assert check_block(graph.top, SQUARES).wrong
