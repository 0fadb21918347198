"""`python -m benchmarks language_models` at tiny sizes: its programs agree, and every one has its samples."""

from __future__ import annotations

import pytest

from benchmarks.programs import language_models as bench


@pytest.mark.dear
@pytest.mark.parametrize("case", [case.name for case in bench.TINY])
def test_the_programs_of_a_model_agree_and_are_timed(case):
    ((_, found),) = bench.cases(False, 2, case)
    rivals = ["jax.jit", "by hand", "grad of fused", "fused grad"]
    assert [name for name in found if name != "product_flop"] == rivals
    for name in rivals:
        assert len(found[name]["samples_s"]) == 2
        assert found[name]["difference"] < 0.03  # rounding of bfloat16, in the smallest of the gradients
        assert found[name]["temporaries_bytes"] > 0
    assert found["product_flop"] > 0
