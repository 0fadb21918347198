"""What is measured and shown of several devices: mesh, collectives before and after, the time of each. The trials are in on_devices.py. One
of them by hand:

    python -m pytest "tests/evidence/test_on_devices.py::test_on_four_devices[a_graph_shows_mesh_shardings_and_sums]"
"""

from __future__ import annotations

import pytest

from tests.evidence.on_devices import TRIALS


@pytest.mark.devices
@pytest.mark.parametrize("name", TRIALS)
def test_on_four_devices(on_devices, name):
    on_devices("tests.evidence.on_devices", name)
