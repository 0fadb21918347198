"""What declines a site of the zoo names an operation of the program and its line (`python -m tests.recall.sentences` prints all of it)."""

from __future__ import annotations

import pytest
from zoo.catalogue import programs

from .sentences import is_bare, said, told

# A norm of another function, a softmax over other axes, biases that are none, activations that are none, a norm behind a product.
CHOSEN = (
    "norms/uncentred-f32-forward",
    "controls/softmax_over_heads-f32-forward",
    "controls/bias_over_rows-f32-forward",
    "handwritten/mlp_other_quick_gelu-f32-train",
    "handwritten/swiglu_by_hand-f32-train",
    "norms/over_batch-f32-train",
)
PROGRAMS = {p.id: p for p in programs() if p.id in CHOSEN}


@pytest.mark.parametrize("name", CHOSEN)
def test_what_is_said_names_an_operation_and_its_line(name):
    assert not [str(r) for r in said(PROGRAMS[name]) if is_bare(r)]


def test_each_sentence_is_printed_once_with_its_edit():
    lines = told(PROGRAMS[name] for name in CHOSEN[2:4])
    assert lines[0] == "2 sentences, 2 rejections"
    assert [line.startswith("1 x in 1 models, gemm_epilogue [activation]: %") for line in lines].count(True) == 1
    assert sum(line.startswith("    edit: use relu") for line in lines) == 1
