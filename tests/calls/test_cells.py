"""Every way of calling a fused function is right or one sentence; see cells.py."""

from __future__ import annotations

import pytest

from fusionlab.errors import ArgumentError

from .cells import CELLS, RAISED_BY_THE_JIT, REFUSED, TRIALS, name_of, run


@pytest.mark.parametrize("cell", [c for c in CELLS if c[2] != "sharding"], ids=name_of)
def test_a_call_gives_what_the_original_gives_or_says_what_works(cell):
    kind, _, feature = cell
    if (kind, feature) in REFUSED:
        with pytest.raises(ArgumentError, match=rf"loses in-place changes: model\.calls .*{REFUSED[kind, feature]}"):
            run(cell)
    elif (kind, feature) in RAISED_BY_THE_JIT:
        with pytest.raises(TypeError, match=r"abstract array|not a valid JAX type|Argument"):
            run(cell)
    else:
        run(cell)


@pytest.mark.devices
@pytest.mark.parametrize("name", TRIALS)
def test_a_call_places_arrays_as_the_original_does(on_devices, name):
    on_devices("calls.cells", name)
