"""A `jit` whose arguments are sharded: fused programs send between devices what the original sends, and no more. The programs, and what
is asserted of each, are in placed.py. One of them by hand:

    python -m pytest "tests/fusers/devices/test_placed.py::test_a_fused_program_moves_no_data_that_the_original_does_not[lerp/both/forward]"
"""

from __future__ import annotations

import pytest

from fusionlab.graph.xla.collectives import Traffic

from ..placed import TRIALS, more


@pytest.mark.devices
@pytest.mark.parametrize("name", TRIALS)
def test_a_fused_program_moves_no_data_that_the_original_does_not(on_devices, name):
    on_devices("fusers.placed", name)


def test_what_is_more():
    one = {"all-gather": Traffic(2, 64), "all-reduce": Traffic(4, 400)}
    assert more(one, one) is None
    assert more(one, {"all-reduce": Traffic(5, 400)}) is None  # the same bytes in other parts
    assert more(one, {"all-reduce": Traffic(4, 401)}) == "all-reduce: 4 of 400 B before, 4 of 401 B after"
    assert more(one, {"all-gather": Traffic(3, 64)})
    assert more({}, {"all-to-all": Traffic(1, 0)})
