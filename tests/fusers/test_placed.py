"""A `jit` whose arguments are sharded: fused programs send between devices what the original sends, and no more. The programs, and what
is asserted of each, are in placed.py; they run in one process of their own, since the number of devices is fixed when JAX starts.
"""

from __future__ import annotations

import pytest

from fusionlab.graph.collectives import Traffic

from .placed import is_long, more, trials
from .processes import problems_of

NAMES = [trial.name for trial in trials()]
LONG = [name for name in NAMES if is_long(name)]


@pytest.fixture(scope="module")
def problems():
    """What went wrong with each trial, None where nothing did."""
    return problems_of("placed", 8)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in LONG])
def test_a_fused_program_moves_no_data_that_the_original_does_not(problems, name):
    assert problems[name] is None, problems[name]


@pytest.mark.nightly
def test_nor_do_the_others():
    found = problems_of("placed", 8, *LONG)
    assert sorted(found) == sorted(LONG)
    assert not {name: why for name, why in found.items() if why is not None}


def test_what_is_more():
    one = {"all-gather": Traffic(2, 64), "all-reduce": Traffic(4, 400)}
    assert more(one, one) is None
    assert more(one, {"all-reduce": Traffic(5, 400)}) is None  # the same bytes in other parts
    assert more(one, {"all-reduce": Traffic(4, 401)}) == "all-reduce: 4 of 400 B before, 4 of 401 B after"
    assert more(one, {"all-gather": Traffic(3, 64)})
    assert more({}, {"all-to-all": Traffic(1, 0)})
