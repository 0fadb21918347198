"""The kernels of decode.cu, run on the CPU by the emulator, against float64."""

from __future__ import annotations

import numpy as np
import pytest

from fusionlab.kernels.multi_transformer import cuda

from .decode_suite import Case, check
from .emulated import emulator_in, kernels_on_the_cpu

CASES = {
    "a layer": Case(),
    "three texts": Case(rows=3),
    "eleven texts, two layers": Case(rows=11, layers=2, past=13, step=7),
    "half": Case(rows=2, dtype="float16"),
    "of 136 columns": Case(width=136, heads=3, kv_heads=3, size=40, hidden=264),
    "grouped heads": Case(heads=6, kv_heads=2, size=16, rows=2, qkv="concatenated"),
    "one key head": Case(heads=5, kv_heads=1, size=8),
    "interleaved, caches by head": Case(qkv="interleaved", cache_layout="BHSD", heads=3, kv_heads=3, rows=2),
    "packed": Case(qkv="packed", rows=2),
    "turned": Case(turned=("q", "k", "v", "out", "up", "down"), rows=2),
    "rotary": Case(rotary=1, rotary_width=24, rows=2),
    "rotary of a part, of each text": Case(rotary=2, rotary_width=16, rows=2, angles_of_each=True, qkv="concatenated"),
    "root mean square": Case(norm="rms", biases=False, parameters="float32"),
    "gated": Case(gated=True, activation="silu", gate_bias=False, rows=2),
    "gated, with biases": Case(gated=True, activation="relu"),
    "gated and turned": Case(gated=True, turned=("gate", "up"), gate_bias=False),
    "norms behind": Case(pre_norm=False, rows=2),
    "norms behind, two layers": Case(pre_norm=False, layers=2, rows=2),
    "norms behind, the second left out": Case(pre_norm=False, layers=2, epsilons=(1e-5, None)),
    "norms behind, the first left out": Case(pre_norm=False, layers=2, epsilons=(None, 1e-5)),
    "no norms": Case(epsilons=(None, None)),
    "a step of each": Case(rows=3, step=(0, 36, 12)),
    "a step beyond the cache": Case(step=60),
    "a step before it": Case(rows=2, step=(-3, 5)),
    "lengths": Case(rows=3, lengths=(1, 0, 1), step=(4, 9, 30)),
    "not causal": Case(causal=False),
    "a mask": Case(causal=False, mask="shared", mask_value=float(np.finfo(np.float32).min)),
    "a mask of each": Case(rows=3, causal=True, mask="each"),
    "heads of 136": Case(heads=1, kv_heads=1, size=136, rotary=1, rotary_width=136),
    "one text, many keys": Case(past=300, step=250, heads=1, kv_heads=1),
}


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu(tmp_path_factory):
    with kernels_on_the_cpu(emulator_in(tmp_path_factory.mktemp("decode")), cuda):
        yield


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name):
    check(CASES[name])
