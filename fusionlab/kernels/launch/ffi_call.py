"""The bridge from a jitted program to our kernels: one XLA custom call whose one attribute names a launch plan.

XLA calls a C function with a call frame. That function is Python through ctypes; structures and constants are those of the public
header `xla/ffi/api/c_api.h` (OpenXLA; it comes with jaxlib, `jax.ffi.include_dir()`), API version 0.1, whose ABI newer versions keep; a
test compares every field with the header of the jaxlib installed. The target is declared compatible with command buffers: XLA captures
the launches into a CUDA graph and replays that, so Python is off the hot path. It therefore launches the same work each time and
never allocates, synchronises or measures: scratch memory is one more result, and plans are prepared when the executable is loaded.

Nothing else of FusionLab knows how kernels get into a program, so another launcher can take this one's place.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import struct
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import ManualAxisType, NamedSharding, PartitionSpec

from ...graph.program.in_shard_map import same_varying_axes
from . import native
from .plans import LaunchPlan, PlanBook, plan_name
from .steps import Prepared

Array = Any

TARGET = "fusionlab_launch"
RECORDING_TARGET = "fusionlab_record"  # the same, for programs whose launches XLA may put into a CUDA graph itself
PLATFORMS = ("CUDA", "Host")
BOOK = PlanBook()  # one per process, as the registration of the target is

_pointer, _size, _i64, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int
_INSTANTIATE, _EXECUTE = 0, 3  # XLA_FFI_ExecutionStage
_METADATA = 1  # XLA_FFI_Extension_Metadata
_COMMAND_BUFFER_COMPATIBLE = 1  # XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE
_STRING = 4  # XLA_FFI_AttrType_STRING
_INTERNAL = 13  # XLA_FFI_Error_Code_INTERNAL
_VERSION = (0, 1)


def _struct(name: str, **fields: Any) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


ExtensionBase = _struct("XLA_FFI_Extension_Base", struct_size=_size, type=_int, next=_pointer)


def _sized(name: str, **fields: Any) -> type[ctypes.Structure]:
    """One that begins, as most do, with its own size and a place for extensions."""
    return _struct(name, struct_size=_size, extension_start=_pointer, **fields)


ApiVersion = _sized("XLA_FFI_Api_Version", major_version=_int, minor_version=_int)
Buffer = _sized("XLA_FFI_Buffer", dtype=_int, data=_pointer, rank=_i64, dims=_pointer)
Args = _sized("XLA_FFI_Args", size=_i64, types=_pointer, args=_pointer)
Rets = _sized("XLA_FFI_Rets", size=_i64, types=_pointer, rets=_pointer)
Attrs = _sized("XLA_FFI_Attrs", size=_i64, types=_pointer, names=_pointer, attrs=_pointer)
ByteSpan = _struct("XLA_FFI_ByteSpan", ptr=_pointer, len=_size)
CallFrame = _sized(
    "XLA_FFI_CallFrame", api=_pointer, ctx=_pointer, stage=_int, args=Args, rets=Rets, attrs=Attrs, future=_pointer
)
# The table of functions; those after the last one used here are left out, as the header's rules allow.
_FUNCTIONS = ("Error_Create", "Error_GetMessage", "Error_Destroy", "Handler_Register", "Stream_Get")
Api = _sized(
    "XLA_FFI_Api",
    api_version=ApiVersion,
    internal_api=_pointer,
    **{f"XLA_FFI_{name}": _pointer for name in _FUNCTIONS},
)
# Newer headers end this one with the type of a handler's state, which ours does not have: it is left as XLA set it.
Metadata = _struct("XLA_FFI_Metadata", struct_size=_size, api_version=ApiVersion, traits=ctypes.c_uint32)
MetadataExtension = _struct("XLA_FFI_Metadata_Extension", extension_base=ExtensionBase, metadata=_pointer)
StreamGetArgs = _sized("XLA_FFI_Stream_Get_Args", ctx=_pointer, stream=_pointer)
ErrorCreateArgs = _sized("XLA_FFI_Error_Create_Args", message=ctypes.c_char_p, errc=_int)

_HANDLER = ctypes.CFUNCTYPE(_pointer, _pointer)
_API_FUNCTION = ctypes.CFUNCTYPE(_pointer, _pointer)
# A launch outside a captured graph passes here each time, so a frame is read as words, at places that the structures give.
_WORD = ctypes.c_uint64
_Frame = _WORD * (ctypes.sizeof(CallFrame) // 8)
_read_frame = struct.Struct(f"={len(_Frame())}Q").unpack_from  # quicker than ctypes' own access
_Span = _WORD * 2
_STREAM_GET_SIZE = ctypes.sizeof(StreamGetArgs)


def _offset(structure: Any, field: str) -> int:
    return getattr(structure, field).offset


def _place(part: str, inner: Any = None, field: str = "") -> int:
    """The number of the word of a call frame that holds a field, or a field of one of its parts."""
    return (_offset(CallFrame, part) + (_offset(inner, field) if inner else 0)) // 8


_EXTENSION, _API, _CONTEXT, _STAGE = (_place(f) for f in ("extension_start", "api", "ctx", "stage"))
_OPERAND_COUNT, _OPERANDS = _place("args", Args, "size"), _place("args", Args, "args")
_RESULT_COUNT, _RESULTS = _place("rets", Rets, "size"), _place("rets", Rets, "rets")
_ATTRIBUTE_COUNT, _ATTRIBUTE_TYPES = _place("attrs", Attrs, "size"), _place("attrs", Attrs, "types")
_ATTRIBUTES = _place("attrs", Attrs, "attrs")
_DATA = _offset(Buffer, "data")


def launch(
    plan: LaunchPlan,
    operands: Sequence[Array],
    results: Sequence[jax.ShapeDtypeStruct],
    aliases: Mapping[int, int] | None = None,
) -> list[Array]:
    """A custom call that launches a plan; call it while a program is traced for a CUDA or a host device.

    Args:
      plan: the launches; it gets the addresses of operands and results, in this order, row-major.
      operands: arrays.
      results: shapes and dtypes; scratch memory is one of them, of dtype uint8 by convention, dropped by the caller.
      aliases: operand number -> number of the result that takes its memory. XLA copies the operand first if it is still needed.

    Returns:
      The results. An exception that the plan raises reaches whoever waits for them, as `jax.errors.JaxRuntimeError` with its text.
    """
    operands = same_varying_axes(operands)
    shapes = [varying_as(operands, r) for r in results]
    target = RECORDING_TARGET if LAUNCHER is not None and LAUNCHER.records else TARGET
    call = jax.ffi.ffi_call(target, shapes, input_output_aliases=dict(aliases or {}))
    return list(call(*operands, plan=plan_name(plan)))


def varying_as(operands: Sequence[Array], result: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Inside a `shard_map` that checks, results vary over the mesh axes that the operands vary over."""
    of = jax.typeof(operands[0]) if operands else None
    if of is None or not of.manual_axis_type.varying:
        return result
    kind = ManualAxisType(varying=of.manual_axis_type.varying)
    # A type that varies needs its mesh; no axis of a result is split by what is left to XLA or explicit.
    sharding = NamedSharding(of.sharding.mesh, PartitionSpec(*[None] * len(result.shape)))
    return jax.ShapeDtypeStruct(result.shape, result.dtype, sharding=sharding, manual_axis_type=kind)


def _handler(on_cuda: bool) -> Any:
    """The C function that XLA calls on a platform."""

    def handle(address: int) -> int | None:
        frame = _read_frame(_Frame.from_address(address))
        if frame[_EXTENSION] and ExtensionBase.from_address(frame[_EXTENSION]).type == _METADATA:
            return _describe(frame[_EXTENSION])
        try:
            stage = frame[_STAGE] & 0xFFFF_FFFF
            if stage == _EXECUTE:
                name, device = _plan_of(frame), _current_cuda_device() if on_cuda else 0
                prepared = BOOK.ready(name, device) or BOOK.prepare(name, device)
                if _published(name, device, prepared):
                    return _NATIVE[on_cuda](address)
                stream, operands = _stream(frame) if on_cuda else 0, _addresses(frame[_OPERANDS], frame[_OPERAND_COUNT])
                prepared(stream, operands, _addresses(frame[_RESULTS], frame[_RESULT_COUNT]))
            elif stage == _INSTANTIATE:
                _instantiate(frame, on_cuda)
        except BaseException as error:  # the C boundary: nothing may pass it but an error code with a message
            return _error(frame, error)
        return None

    return _HANDLER(handle)


def _describe(extension: int) -> None:
    """Answers XLA's question what this handler is."""
    metadata = Metadata.from_address(MetadataExtension.from_address(extension).metadata)
    metadata.api_version.major_version, metadata.api_version.minor_version = _VERSION
    metadata.traits = _COMMAND_BUFFER_COMPATIBLE


def _instantiate(frame: Sequence[int], on_cuda: bool) -> None:
    """Prepares the plan on the devices of this process: outside any capture, and early enough for a clear error."""
    name = _plan_of(frame)
    if not on_cuda:
        _prepare(name, 0)
        return
    for device in _local_cuda_devices():
        with _current(device):
            _prepare(name, device)


def _prepare(name: bytes, device: int) -> None:
    """Makes the plan ready for Python, and for the compiled launcher where that can launch it."""
    _published(name, device, BOOK.prepare(name, device))


def _published(name: bytes, device: int, prepared: Prepared) -> bool:
    """Whether the compiled launcher has the plan, from now on if not before. Then Python leaves it alone: what both would use (a
    descriptor of cuBLASLt) is guarded by the launcher's lock."""
    return LAUNCHER is not None and prepared.steps is not None and LAUNCHER.publish(name, device, prepared)


def _plan_of(frame: Sequence[int]) -> bytes:
    """The value of the one attribute."""
    if frame[_ATTRIBUTE_COUNT] != 1 or ctypes.c_int.from_address(frame[_ATTRIBUTE_TYPES]).value != _STRING:
        raise ValueError(f"{TARGET} has {frame[_ATTRIBUTE_COUNT]} attributes, needed one, the name of a plan, as text")
    start, length = _Span.from_address(_WORD.from_address(frame[_ATTRIBUTES]).value)
    return _chars(length).from_address(start).raw


@functools.cache
def _chars(length: int) -> Any:
    return ctypes.c_char * length


def _addresses(pointers: int, count: int) -> list[int]:
    """The data addresses of `count` buffers; an empty buffer has address 0."""
    return [_WORD.from_address(p + _DATA).value for p in (_WORD * count).from_address(pointers)[:]] if count else []


def _stream(frame: Sequence[int]) -> int:
    asked = StreamGetArgs(_STREAM_GET_SIZE, None, frame[_CONTEXT], None)
    if _stream_get(frame[_API])(ctypes.addressof(asked)):
        raise RuntimeError("XLA gave no stream for a custom call on a CUDA device")
    return asked.stream or 0


@functools.cache  # by the address of XLA's table of functions, of which there is one
def _stream_get(api: int) -> Any:
    return _API_FUNCTION(Api.from_address(api).XLA_FFI_Stream_Get)


def _error(frame: Sequence[int], error: BaseException) -> int:
    """XLA's error with the exception's type and text and the plan's name."""
    # Not str(error), which may raise itself; no text may stay unencodable either: an exception here would be taken for success.
    found = "".join(traceback.format_exception_only(error)).strip()
    text = f"FusionLab: {found} [launch plan {_name_for_reader(frame)}]".encode(errors="backslashreplace")
    asked = ErrorCreateArgs(ctypes.sizeof(ErrorCreateArgs), None, text.replace(b"\0", b"\\0"), _INTERNAL)
    return _API_FUNCTION(Api.from_address(frame[_API]).XLA_FFI_Error_Create)(ctypes.addressof(asked))


def _name_for_reader(frame: Sequence[int]) -> str:
    try:
        return _plan_of(frame).decode(errors="backslashreplace")
    except ValueError:  # the call has no such attribute, which the error says itself
        return "without a name"


def _local_cuda_devices() -> list[int]:
    """CUDA ordinals of the devices that JAX uses in this process."""
    return [d.local_hardware_id for d in jax.local_devices(backend="cuda")]


def _current_cuda_device() -> int:
    return _cuda_runtime().getDevice()


@functools.cache
def _cuda_runtime() -> Any:
    return importlib.import_module("cupy.cuda").runtime  # only where there is CUDA


def _current(device: int) -> Any:
    return importlib.import_module("cupy.cuda").Device(device)


def counters() -> dict[str, int]:
    """The plan book's counters and, where the compiled launcher is in use, its own."""
    return BOOK.counters() | (LAUNCHER.counters() if LAUNCHER else {})


# Kept for as long as XLA may call them. Registered at import, once, and not by the first `launch`: an executable that was deserialised
# needs the targets without a trace, and two threads may trace at once. JAX queues a registration until there is a backend.
LAUNCHER = native.load()
_HANDLERS = {platform: _handler(platform == "CUDA") for platform in PLATFORMS}
_ADDRESSES = {platform: ctypes.cast(handler, ctypes.c_void_p).value or 0 for platform, handler in _HANDLERS.items()}
_NATIVE: dict[bool, Any] = {}  # on CUDA or not -> the C function
_records = LAUNCHER is not None and LAUNCHER.can_record
if LAUNCHER is not None:
    LAUNCHER.fall_back_on(_ADDRESSES["Host"], _ADDRESSES["CUDA"])
    LAUNCHER.record_as(RECORDING_TARGET)
for _platform, _address in _ADDRESSES.items():
    _stages = {"instantiate": _address, "execute": _address}
    if LAUNCHER is not None:
        _stages["execute"] = LAUNCHER.handler(_platform == "CUDA")
        _NATIVE[_platform == "CUDA"] = _HANDLER(_stages["execute"])
    # The launcher registers the second target on CUDA itself, where it can.
    for _target in (TARGET,) if _records and _platform == "CUDA" else (TARGET, RECORDING_TARGET):
        _bundle = {stage: jax.ffi.pycapsule(address) for stage, address in _stages.items()}
        jax.ffi.register_ffi_target(_target, _bundle, platform=_platform)
