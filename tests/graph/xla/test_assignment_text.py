"""XLA's buffer assignment, read from the texts that it dumps on a GPU."""

from __future__ import annotations

import pytest

from fusionlab.evidence.instruments import program as programs
from fusionlab.evidence.instruments.peak_buffers import peak_buffers
from fusionlab.evidence.instruments.program import compile_program
from fusionlab.graph.xla.assignment_text import read_text

ASSIGNMENT = """BufferAssignment:
allocation 0: size 400, page 0, parameter 1, shape |f32[10,10]| at ShapeIndex {}:
 value: <3 w.1 @0> (size=400,offset=0): f32[10,10]{1,0}
allocation 1: size 4, page 0, thread-local:
 value: <4 add.4.0 @0> (size=4,offset=0): f32[]
allocation 2: size 40, page 0, maybe-live-out:
 value: <5 first @0> (size=20,offset=0): f32[5]{0}
 value: <6 result @0> (size=40,offset=0): f32[10]{0}
allocation 3: size 1000, page 0, preallocated-temp:
 value: <7 early @0> (size=800,offset=200): f32[200]{0}
 value: <8 held{1} @0> (size=400,offset=0): f32[100]{0}
 value: <9 late @0> (size=500,offset=400): f32[125]{0}
 value: <10 loop{1} (phi) @0> (size=400,offset=0): f32[100]{0}
 value: <11 not listed @0> (size=900,offset=0): f32[225]{0}

Total bytes used: 1444 (1.41KiB)
allocation 9: size 7, page 0, preallocated-temp:
"""
RANGES = """HloLiveRange (max 9):
  InstructionSequence:
    0:early
  BufferLiveRange:
    w.1{}:0-9
    early{}:0-3
    held{1}:4-9
    late{}:5-7
    loop{1}:5-9
    first{}:0-2
    result{}:8-9
  Live ranges at 5 (peak):
    late{}: 500 bytes (cumulative: 500 bytes)
"""


def test_blocks_and_what_lives_in_them_at_the_peak():
    argument, output, temporary = read_text(ASSIGNMENT, RANGES)
    assert (argument.kind, argument.parameter, argument.size) == ("argument", 1, 400)
    assert (output.kind, output.parameter, [b.name for b in output.peak]) == ("output", -1, ["result"])
    assert temporary.kind == "temporary"
    # 900 bytes from 5 on, of which `held` and `loop` are the same 400; 800 before.
    assert sorted((b.name, b.index, b.size) for b in temporary.peak) in (
        [("held", (1,), 400), ("late", (), 500)],
        [("late", (), 500), ("loop", (1,), 400)],
    )


@pytest.mark.parametrize("texts", [("", RANGES), (ASSIGNMENT, ""), ("nothing", "known")])
def test_texts_of_another_form_are_refused(texts):
    with pytest.raises(ValueError, match="no allocations"):
        read_text(*texts)


def test_a_program_is_compiled_with_its_texts_where_they_are_wanted(monkeypatch):
    monkeypatch.setattr(programs, "_can_dump", lambda: True)
    made = compile_program(lambda x: x * 2, (1.0,), {}, assigned=True)
    # A CPU writes no live ranges in some versions.
    assert made.assignment is None or "allocation 0" in made.assignment[0]
    assert float(made.run()) == 2
    assert compile_program(lambda x: x * 2, (1.0,), {}).assignment is None
    assert peak_buffers(made) is not None
