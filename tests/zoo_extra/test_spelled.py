"""A layer of each model of the extra zoo, without its library: what it is made of, and what the search accepts of it.

What it does not accept stands in `spelled/missed.py`, exactly: a site that is found and stands there fails as well, until its
entry is taken out.
"""

from __future__ import annotations

from collections import Counter

import jax
import pytest
from zoo.catalogue import DTYPES, DtypeName, Model, Program
from zoo.kinds.flow import learned_products
from zoo.test_truths import PRIMITIVES, implied, primitives

import fusionlab as fl
from benchmarks.search.recall import LAYER_PASSES, Outcome, counted

from .catalogue import EVERY
from .spelled.catalogue import MODELS, programs
from .spelled.missed import LAYERS, PIECES, Missed, missed

PROGRAMS = tuple(programs())
OFTEN = [p for p in PROGRAMS if p.dtype == "f32" and p.variant == "forward"]
SELDOM = [p for p in PROGRAMS if p not in OFTEN]
FORWARD = [p for p in PROGRAMS if p.variant == "forward"]
WHOLE_LAYERS = "whole layers"


def test_every_model_has_a_layer() -> None:
    assert {model.name for model in MODELS} == {model.id.replace("/", "_") for model in EVERY}
    assert {m.layer for m in (*PIECES, *LAYERS)} <= {model.name for model in MODELS}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_layer_agrees_with_its_truth(model: Model, dtype: DtypeName) -> None:
    program = Program(model, dtype, "forward")
    function, args = program.make()
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    found = Counter(PRIMITIVES[name] for name in primitives(jaxpr) if name in PRIMITIVES)
    expected = implied(program.truth)
    assert {name: found[name] for name in found | expected} == {name: expected[name] for name in found | expected}
    sites = program.truth.sites
    assert learned_products(jaxpr, len(jax.tree.leaves(args[0]))) == (sites["linear"], sites["linear_no_bias"])


def hold(program: Program, found: Outcome, of: tuple[Missed, ...]) -> None:
    """What was missed is what is known to be, for the reasons that are known, and nothing was accepted that is no site."""
    want = missed(program.model.name, f"{program.dtype} {program.variant}", of)
    got: Counter[str] = Counter()
    for miss in found.misses:
        got[miss.kind] += miss.number
    assert dict(got) == {kind: number for kind, (number, _) in want.items()}, found.misses
    assert all(want[miss.kind][1] in miss.reason for miss in found.misses), found.misses
    assert not found.wrong


def pieces(program: Program) -> None:
    function, args = program.make()
    hold(program, counted(program, fl.find(function, *args)), PIECES)


@pytest.mark.whole
@pytest.mark.parametrize("program", OFTEN, ids=lambda p: p.id)
def test_every_site_of_a_layer_is_accepted_but_those_that_are_known(program: Program) -> None:
    pieces(program)


@pytest.mark.parametrize("program", SELDOM, ids=lambda p: p.id)
def test_the_same_in_train_steps_and_in_bfloat16(program: Program) -> None:
    pieces(program)


@pytest.mark.parametrize("program", FORWARD, ids=lambda p: p.id)
def test_a_layer_is_one_node_where_it_is_asked_for(program: Program) -> None:
    function, args = program.make()
    nothing, layers = fl.find(function, *args, passes=()), fl.find(function, *args, passes=LAYER_PASSES)
    found = counted(program, nothing, layers=layers)
    kept = tuple(miss for miss in found.misses if miss.kind == WHOLE_LAYERS)
    counts = {"layer": found.counts["layer"]}
    hold(program, Outcome(found.program, counts, found.reasons, 0.0, kept), LAYERS)
