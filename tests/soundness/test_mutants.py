"""Mutants of the spellings that the passes' tests list: a few of them here, twenty of each by `python -m benchmarks mutants`."""

from __future__ import annotations

import itertools
import random

import jax
import numpy as np
import pytest
from jax.extend import core as jex_core

from .judge import judge
from .mutants import flat, mutants
from .spelled import passes_of, program_of, renamed, spelled, traces

SPELLED = {name: (fn, args) for name, fn, args in spelled()}


def some(name: str, count: int):
    """(the program, its first mutants that trace)."""
    program = program_of(name, *SPELLED[name], seed=1)
    made = mutants(flat(jax.make_jaxpr(program.fn)(*program.avals)), random.Random(1))
    named = (renamed(program, jex_core.jaxpr_as_fun(closed), what) for what, closed in made)
    return program, list(itertools.islice(filter(traces, named), count))


@pytest.mark.parametrize("name", SPELLED)
def test_a_mutant_is_declined_or_fused_as_what_it_is(name):
    for mutant in some(name, 3)[1]:
        found = judge(mutant, passes=passes_of(name))
        assert found.verdict in ("same", "no site", "uncomparable"), found.reason


def test_a_spelling_without_its_calls_is_what_it_was():
    program, _ = some("attention, factor after a bias", 0)
    args = [np.asarray(a, p.dtype) for a, p in zip(program.arguments("normal"), program.params, strict=True)]
    closed = flat(jax.make_jaxpr(program.fn)(*program.avals))
    again = jex_core.jaxpr_as_fun(closed.closed(closed.equations))
    np.testing.assert_array_equal(again(*args)[0], program.fn(*args)[0])


def test_most_mutants_are_other_functions():
    program, made = some("norm, quotients", 40)
    args = [np.asarray(a, p.dtype) for a, p in zip(program.arguments("normal"), program.params, strict=True)]
    want = program.fn(*args)[0]
    others = [not np.allclose(m.fn(*args)[0], want, rtol=1e-4, atol=1e-4) for m in made]
    assert sum(others) > len(made) / 2
