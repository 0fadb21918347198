"""The search takes every program of the zoo: it raises on none, and what it finds can be rewritten."""

from __future__ import annotations

import jax
import pytest
from zoo.catalogue import Program, programs

import fusionlab as fl

PROGRAMS = tuple(programs())
OFTEN = [p for p in PROGRAMS if p.dtype == "f32" and p.variant == "forward"]
SELDOM = [p for p in PROGRAMS if p not in OFTEN]


def search(program: Program) -> None:
    function, args = program.make()
    found = fl.find(function, *args)
    assert set(found.counts()) == {p.name for p in fl.passes()}
    shapes = [(a.shape, a.dtype) for a in found.rewritten().out_avals]
    assert shapes == [(x.shape, x.dtype) for x in jax.tree.leaves(jax.eval_shape(function, *args))]


@pytest.mark.parametrize("program", OFTEN, ids=lambda p: p.id)
def test_the_search_raises_on_no_forward_program(program):
    search(program)


@pytest.mark.nightly
@pytest.mark.parametrize("program", SELDOM, ids=lambda p: p.id)
def test_the_search_raises_on_no_train_step_and_no_program_in_bfloat16(program):
    search(program)
