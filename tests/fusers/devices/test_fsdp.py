"""A train step with sharded parameters has the sites of one device, and fused it moves between devices what the original moves."""

from __future__ import annotations

import pytest

from ..fsdp_steps import TRIALS


@pytest.mark.devices
@pytest.mark.dear
@pytest.mark.parametrize("name", TRIALS)
def test_a_sharded_train_step_is_fused_and_moves_what_the_original_moves(on_devices, name):
    on_devices("fusers.fsdp_steps", name)
