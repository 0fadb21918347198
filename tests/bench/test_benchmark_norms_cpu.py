"""The benchmark of norms on a CPU: its programs have sites, and what it writes of them."""

from __future__ import annotations

import pytest

import fusionlab as fl
from benchmarks.ops import norms_cpu


@pytest.mark.parametrize("place", norms_cpu.PLACES)
@pytest.mark.parametrize("kind", norms_cpu.NORMS)
def test_its_programs_have_a_norm_a_block_and_are_timed(kind, place):
    fn, args = norms_cpu.program(kind, place, "step"), norms_cpu.arguments(4, 8)
    counts = fl.find(fn, *args, passes="layer_norm").counts()
    assert counts == {"layer_norm": 2, "layer_norm_grad": 2}
    found = norms_cpu.timed(fn, fl.fuse(fn, passes="layer_norm"), args, samples=4)
    assert len(found["jax_jit_s"]) == len(found["fused_s"]) >= 4
    assert norms_cpu.line("a case", found).startswith("a case")
