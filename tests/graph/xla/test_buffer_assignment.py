"""Messages of XLA's buffer assignment, written here field by field; and what a buffer of a compiled module holds."""

from __future__ import annotations

import pytest

from fusionlab.graph.xla.buffer_assignment import Buffer, instruction_names, read_assignment
from fusionlab.graph.xla.contents import Contents
from fusionlab.graph.xla.hlo_text import element_type, parse_hlo


def varint(value: int) -> bytes:
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def field(number: int, value: int | bytes | str) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def buffer(number: int, size: int, instruction: int, *index: int) -> bytes:
    packed = field(3, b"".join(map(varint, index))) if index else b""
    return field(1, field(1, number) + field(2, size) + field(3, field(4, instruction) + packed))


def placed(*buffers: int) -> bytes:
    return b"".join(field(9, field(1, number)) for number in buffers)


def event(kind: int, number: int, canonical: int = 0) -> bytes:
    return field(1, field(1, kind) + field(2, number) + field(5, canonical))


FIRST = 1 << 32
NAMES = {FIRST + 1: "x.1", FIRST + 2: "sin.2", FIRST + 3: "while.3"}
BUFFERS = (
    buffer(1, 400, FIRST + 1) + buffer(2, 300, FIRST + 2) + buffer(3, 200, FIRST + 3, 2) + buffer(4, 350, FIRST + 3, 0)
)
ARGUMENT = field(3, field(2, 400) + field(5, 1) + field(6, 3) + placed(1))
TEMPORARY = field(3, field(1, 1) + field(2, 640) + placed(2, 3, 4))


def test_names_of_instructions_are_read_from_the_module():
    def instruction(number, name):
        return field(2, field(1, name) + field(2, "sine") + field(35, number))

    module = field(1, "jit_f") + field(
        3, field(1, "main") + instruction(FIRST + 1, "x.1") + instruction(FIRST + 2, "sin.2")
    )
    assert instruction_names(module) == {FIRST + 1: "x.1", FIRST + 2: "sin.2"}


def test_the_peak_of_a_block_is_what_xla_recorded():
    peaks = field(5, field(1, 1) + field(2, varint(3) + varint(4)))
    host = field(3, field(1, 4) + field(2, 64) + field(8, 5) + placed(2))
    threads = field(3, field(1, 2) + field(2, 64) + field(3, 1) + placed(2))
    constant = field(3, field(1, 3) + field(2, 300) + field(12, 1) + placed(2))
    argument, temporary, held = read_assignment(
        BUFFERS + ARGUMENT + TEMPORARY + threads + host + constant + peaks, NAMES
    )
    assert (argument.kind, argument.size, argument.parameter) == ("argument", 400, 3)
    assert argument.peak == (Buffer("x.1", (), 400),)
    assert (temporary.kind, temporary.size) == ("temporary", 640)
    assert temporary.peak == (Buffer("while.3", (2,), 200), Buffer("while.3", (0,), 350))
    assert (held.kind, held.size) == ("constant", 300)


def test_without_such_a_record_the_events_tell_which_buffers_live_when_most_bytes_do():
    # 2 (300), then 3 (200) beside it: 500 at most. 4 shares 3's place, so that 3's is free only when both are gone.
    events = [event(0, 2), event(0, 3), event(2, 4, 3), event(1, 2), event(1, 3), event(0, 2), event(1, 2), event(1, 4)]
    trace = field(4, b"".join(events) + field(3, 1))
    _, temporary = read_assignment(BUFFERS + ARGUMENT + TEMPORARY + trace, NAMES)
    assert temporary.peak == (Buffer("sin.2", (), 300), Buffer("while.3", (2,), 200))
    # With 4 in a place of its own 550 live after 2 is gone.
    alone = field(4, b"".join([event(0, 2), event(0, 3), event(1, 2), event(0, 4), event(1, 3)]) + field(3, 1))
    _, temporary = read_assignment(BUFFERS + ARGUMENT + TEMPORARY + alone, NAMES)
    assert [b.size for b in temporary.peak] == [200, 350]


@pytest.mark.parametrize("message", [b"\x0a", b"\x0a\x05ab", b"\x0b\x01", b"\x08\xff", TEMPORARY[:-1]])
def test_bytes_of_another_kind_are_an_error_of_their_own(message):
    with pytest.raises(ValueError, match="message"):
        read_assignment(message, {})


HLO = """HloModule jit_step, is_scheduled=true

%fused_update (p0: f32[5,8], p1: f32[8], p2: s32[]) -> f32[5,8] {
  %p0 = f32[5,8]{1,0} parameter(0)
  %p1 = f32[8]{0} parameter(1)
  %row = f32[1,8]{1,0} bitcast(%p1)
  %p2 = s32[] parameter(2)
  ROOT %put = f32[5,8]{1,0} dynamic-update-slice(%p0, %row, %p2, %p2), metadata={op_name="jit(step)/while/body/dynamic_update_slice"}
}

%body (t: (s32[], f32[8], f32[5,8])) -> (s32[], f32[8], f32[5,8]) {
  %t = (s32[], f32[8]{0}, f32[5,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[8]{0} get-tuple-element(%t), index=1
  %kept = f32[5,8]{1,0} get-tuple-element(%t), index=2
  %tanh.1 = f32[8]{0} tanh(%x), metadata={op_name="jit(step)/while/body/tanh"}
  %stored = f32[5,8]{1,0} fusion(%kept, %tanh.1, %i), kind=kLoop, calls=%fused_update
  ROOT %next = (s32[], f32[8]{0}, f32[5,8]{1,0}) tuple(%i, %tanh.1, %stored)
}

%condition (t.1: (s32[], f32[8], f32[5,8])) -> pred[] {
  %t.1 = (s32[], f32[8]{0}, f32[5,8]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (a: f32[8]) -> f32[5,8] {
  %a = f32[8]{0} parameter(0), metadata={op_name="a"}
  %zero = f32[] constant(0)
  %room = f32[5,8]{1,0} broadcast(%zero), dimensions={}
  %room.copy = f32[5,8]{1,0} copy(%room)
  %start = s32[] constant(0)
  %first = (s32[], f32[8]{0}, f32[5,8]{1,0}) tuple(%start, %a, %room.copy)
  %loop = (s32[], f32[8]{0}, f32[5,8]{1,0}) while(%first), condition=%condition, body=%body
  %result = f32[5,8]{1,0} get-tuple-element(%loop), index=2
  ROOT %wide = f32[5,8]{1,0} copy(%result)
}
"""


@pytest.mark.parametrize(
    ("name", "index", "written"),
    [
        ("room.copy", (), "tanh.1"),  # zeros that the loop writes over
        ("room", (), "room"),  # only its copy is written over
        ("loop", (2,), "tanh.1"),
        ("wide", (), "tanh.1"),
        ("stored", (), "tanh.1"),
        ("x", (), "tanh.1"),  # of every turn but the first
        ("i", (), "start"),  # which no turn changes
        ("a", (), "a"),
        ("start", (), "start"),
    ],
)
def test_the_content_of_a_buffer_is_followed_to_what_computes_it(name, index, written):
    found = Contents(parse_hlo(HLO)).written(name, index)
    assert found is not None
    assert found.name == written


def test_a_buffer_of_no_instruction_is_written_by_none():
    assert Contents(parse_hlo(HLO)).written("gone") is None
    assert Contents(parse_hlo("")).written("gone") is None


def test_the_type_of_an_element_is_read_from_its_tuple():
    text = "(s32[], f32[8]{0:T(256)}, /*index=2*/bf16[5,8]{1,0})"
    assert [element_type(text, (i,)) for i in range(4)] == ["s32[]", "f32[8]", "bf16[5,8]", ""]
    assert element_type("f32[8]{0}") == "f32[8]"
    assert element_type(text) == ""
