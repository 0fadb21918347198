"""The search takes every program of the zoo: it raises on none, recognises what its configuration says, and nothing else. What looks
like a site, by the primitives of the raw graph alone, has a candidate, a rejection or a structure.

`python -m benchmarks recall` prints the same as a table.
"""

from __future__ import annotations

import jax
import pytest
from zoo.catalogue import Program, programs

import fusionlab as fl
from benchmarks.search.recall import Outcome, counted
from tests.asked import by_default

from .looks_like_sites import silent

PROGRAMS = tuple(programs())
OFTEN = [p for p in PROGRAMS if p.dtype == "f32" and p.variant == "forward"]
SELDOM = [p for p in PROGRAMS if p not in OFTEN]


def search(program: Program) -> Outcome:
    function, args = program.make()
    found = fl.find(function, *args)
    assert set(found.counts()) == {p.name + grad for p in by_default() for grad in ("", "_grad")}
    shapes = [(a.shape, a.dtype) for a in found.rewritten().out_avals]
    assert shapes == [(x.shape, x.dtype) for x in jax.tree.leaves(jax.eval_shape(function, *args))]
    assert [str(spot) for spot in silent(found)] == []
    return counted(program, found)


@pytest.mark.parametrize("program", OFTEN, ids=lambda p: p.id)
def test_every_site_of_a_forward_program_is_recognised_and_no_other(program):
    found = search(program)
    assert {c: (n, recognised) for c, (n, recognised, _) in found.counts.items() if recognised != n} == {}
    assert not found.wrong


@pytest.mark.parametrize("program", SELDOM, ids=lambda p: p.id)
def test_nothing_is_accepted_in_train_steps_and_in_bfloat16_that_is_no_site(program):
    assert not search(program).wrong
