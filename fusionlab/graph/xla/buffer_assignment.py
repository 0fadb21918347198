"""XLA's buffer assignment of a compiled program: which blocks of memory it reserves, and which buffers live in each at its peak.

`jax.stages.Compiled.memory_analysis().serialized_buffer_assignment_proto` is a message `xla.BufferAssignmentProto`, whose fields are
declared in `xla/service/hlo.proto` (https://github.com/openxla/xla, checked against the declaration that jaxlib 0.10.2 contains). It
names instructions by number; the names are in the `xla.HloModuleProto` of the executable. Only the fields named below are read, by the
public wire format (https://protobuf.dev/programming-guides/encoding), so that no schema has to be installed; others are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5  # wire types
# Fields of a BufferAssignmentProto: newer versions keep the first, older ones the second.
_PEAK_BUFFERS, _HEAP_SIMULATOR_TRACES = 5, 4
# Of a BufferAllocationProto: is_thread_local, is_entry_computation_parameter, maybe_live_out, is_constant.
_FLAGS = {3: "thread", 5: "argument", 7: "output", 12: "constant"}
_HOST = 5  # the memory space of the host (xla/layout.h), which XLA counts apart
_FREE, _SHARE = 1, 2  # kinds of a heap simulator's events; 0 allocates
Fields = dict[int, list[Any]]


@dataclass(frozen=True)
class Buffer:
    """A value that XLA places in memory: the result of the instruction `name`, or with `index` one element of its tuple; `size` bytes."""

    name: str
    index: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class Allocation:
    """A block of memory that an executable reserves for the whole of a run.

    Attributes:
      size: bytes.
      kind: "argument", "output", "constant" or "temporary".
      parameter: the number of the argument it is; -1 for none.
      buffers: those that lie in it at some time.
      peak: those of them that live when most of it is in use, by XLA's own record; where XLA keeps none, and there is more than one
        buffer, ().
    """

    size: int
    kind: str
    parameter: int = -1
    buffers: tuple[Buffer, ...] = field(default=(), repr=False)
    peak: tuple[Buffer, ...] = ()


def read_assignment(message: bytes, names: Mapping[int, str]) -> tuple[Allocation, ...]:
    """The blocks that a run reserves, in XLA's order; without those of threads, which are on their stacks, and those
    in the host's memory.

    Args:
      message: a serialized `xla.BufferAssignmentProto`.
      names: number of an instruction -> its name, of `instruction_names`.

    Raises:
      ValueError: the bytes are no such message.
    """
    whole = _fields(message)
    buffers = {_last(one, 1, 0): _buffer(one, names) for one in _messages(whole, 1)}
    live = {_last(one, 1, 0): _numbers(one, 2) for one in _messages(whole, _PEAK_BUFFERS)}
    if not live:
        for trace in _messages(whole, _HEAP_SIMULATOR_TRACES):
            live.setdefault(_last(trace, 3, 0), []).extend(_live_at_peak(trace, buffers))
    allocations = (_allocation(one, buffers, live) for one in _messages(whole, 3))
    return tuple(a for a in allocations if a is not None)


def instruction_names(message: bytes) -> dict[int, str]:
    """Number -> name of each instruction of a serialized `xla.HloModuleProto` outside of fusions, which have no buffers inside.

    Raises:
      ValueError: the bytes are no such message.
    """
    computations = (c for c in _messages(_fields(message), 3) if not _last(c, 7, 0))  # is_fusion_computation
    instructions = (i for computation in computations for i in _messages(computation, 2))
    return {_last(i, 35, 0): _text(i, 1) for i in instructions}


def _buffer(one: Fields, names: Mapping[int, str]) -> Buffer:
    """A LogicalBufferProto: id, size and defined_at, which has the instruction's name in older versions, its shape_index and number."""
    place = _fields(_last(one, 3, b""))
    name = names.get(_last(place, 4, -1), "") or _text(place, 2)
    return Buffer(name, tuple(_numbers(place, 3)), _last(one, 2, 0))


def _allocation(one: Fields, buffers: Mapping[int, Buffer], live: Mapping[int, list[int]]) -> Allocation | None:
    """A BufferAllocationProto; None for one of a thread, or in the host's memory."""
    flags = {name: bool(_last(one, number, 0)) for number, name in _FLAGS.items()}
    if flags["thread"] or _last(one, 8, 0) == _HOST:  # color
        return None
    mine = tuple(buffers[_last(placed, 1, 0)] for placed in _messages(one, 9))
    peak = tuple(buffers[i] for i in live.get(_last(one, 1, 0), ()) if i in buffers)
    kind = next((kind for kind in ("constant", "argument", "output") if flags[kind]), "temporary")
    parameter = _last(one, 6, 0) if flags["argument"] else -1
    return Allocation(_last(one, 2, 0), kind, parameter, mine, peak or (mine if len(mine) == 1 else ()))


def _live_at_peak(trace: Fields, buffers: Mapping[int, Buffer]) -> list[int]:
    """The buffers that live when most bytes do, of a heap simulator's events: kind, buffer_id and share_with_canonical_id."""
    live: dict[int, int] = {}  # owner of the memory -> how many buffers share it
    owner: dict[int, int] = {}
    size = most = 0
    peak: list[int] = []
    for event in _messages(trace, 1):
        kind: int = _last(event, 1, 0)
        buffer: int = _last(event, 2, 0)
        if kind != _FREE:
            owner[buffer] = _last(event, 5, 0) if kind == _SHARE else buffer
        mine = owner.get(buffer, buffer)
        live[mine] = live.get(mine, 0) + (-1 if kind == _FREE else 1)
        bytes_of = buffers[mine].size if mine in buffers else 0
        if kind == _FREE and live[mine] == 0:
            del live[mine]
            size -= bytes_of
        elif kind != _FREE and live[mine] == 1:
            size += bytes_of
            if size > most:
                most, peak = size, list(live)
    return peak


# -- the wire format ---------------------------------------------------------------------------------------------------


def _last(fields: Fields, number: int, default: Any) -> Any:
    """The value of a field that is not repeated; the format lets the last one win."""
    return fields[number][-1] if number in fields else default


def _text(fields: Fields, number: int) -> str:
    return bytes(_last(fields, number, b"")).decode()


def _messages(fields: Fields, number: int) -> Iterator[Fields]:
    """The messages of a repeated field."""
    return map(_fields, fields.get(number, ()))


def _numbers(fields: Fields, number: int) -> list[int]:
    """A repeated integer, packed or not."""
    return [n for value in fields.get(number, ()) for n in ([value] if isinstance(value, int) else _varints(value))]


def _varints(data: memoryview) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _varint(data, at)
        yield value


def _fields(data: bytes | memoryview) -> Fields:
    """Field number -> its values: integers, or the bytes of texts and messages."""
    found: Fields = {}
    view, at = memoryview(data), 0
    while at < len(view):
        key, at = _varint(view, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(view, at)
        elif wire in (_EIGHT, _FOUR):
            value, at = None, at + (8 if wire == _EIGHT else 4)
        elif wire == _BYTES:
            length, at = _varint(view, at)
            value, at = view[at : at + length], at + length
        else:
            raise ValueError(f"wire type {wire} at byte {at}: not a message of protocol buffers")
        if at > len(view):
            raise ValueError("the message ends in the middle of a field")
        found.setdefault(number, []).append(value)
    return found


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """An integer in base 128, the lowest seven bits first, and where it ends."""
    value = shift = 0
    while at < len(data):
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError("the message ends in the middle of a number")
