"""The bridge to XLA agrees with the C header that comes with jaxlib, and answers frames that are built by hand from that header."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import jax
import pytest

from fusionlab.kernels.launch import ffi_call as launch
from fusionlab.kernels.launch import plans

HEADER = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
ENDS_EARLY = {"XLA_FFI_Api", "XLA_FFI_Metadata"}  # of which ours are a beginning; the header's rules allow that
SINCE_0_4 = {
    "XLA_FFI_Extension_Base": "XLA_FFI_InternalExtension",
    "XLA_FFI_Error_GetMessage": "XLA_FFI_Error_GetDetails",  # never called
}
SCALARS = {
    "size_t": ctypes.c_size_t,
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint32_t": ctypes.c_uint32,
}


class Header:
    """The structures, enumerators, typedefs and macros of a C header as plain as this one: name -> fields, name -> number."""

    def __init__(self, text: str):
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
        self.structs = {
            name: [field.strip() for field in body.split(";") if field.strip()]
            for name, body in re.findall(r"struct\s+(\w+)\s*\{(.*?)\}", text, re.DOTALL)
        }
        enums = re.findall(r"enum\s*(\w*)\s*\{([^}]*)\}\s*(\w*)\s*;", text)
        self.enums = {before or after: body for before, body, after in enums}
        pairs = [line for body in self.enums.values() for line in re.findall(r"(\w+)\s*=\s*([^,\n]+)", body)]
        self.values = {name: self._number(value.strip()) for name, value in pairs if not name.endswith("STRUCT_SIZE")}
        self.typedefs = dict(re.findall(r"typedef\s+(\w+)\s+(\w+)\s*;", text))
        self.typedefs = {new: old for old, new in self.typedefs.items()}
        self.macros = {
            name: int(value) for name, value in re.findall(r"#define\s+(\w+)\s+(\d+)\s*$", text, re.MULTILINE)
        }

    @staticmethod
    def _number(text: str) -> int:
        value, shift = re.fullmatch(r"(\d+)u?(?:\s*<<\s*(\d+))?", text).groups()
        return int(value) << int(shift or 0)

    def fields(self, name: str) -> list[tuple[str, object]]:
        """(name, ctypes type, or the fields of a structure held by value) of each field."""
        return [self._field(text) for text in self.structs[name]]

    def _field(self, text: str) -> tuple[str, object]:
        if macro := re.fullmatch(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\)", text):
            return macro[1], ctypes.c_void_p
        kind, stars, name = re.fullmatch(r"(?:const\s+)?(?:struct\s+)?(\w+)\s*(\**)\s*(\w+)", text).groups()
        if stars:
            return name, ctypes.c_char_p if kind == "char" and name == "message" else ctypes.c_void_p
        if kind in self.enums:
            return name, ctypes.c_int
        if kind in self.structs:
            return name, self.fields(kind)
        return name, SCALARS[self.typedefs.get(kind, kind)]


def ours(struct: type[ctypes.Structure]) -> list[tuple[str, object]]:
    return [
        (name, ours(kind) if issubclass(kind, ctypes.Structure) else kind)
        for name, kind, *_ in struct._fields_  # pyright: ignore
    ]


STRUCTS = [s for s in vars(launch).values() if isinstance(s, type) and issubclass(s, ctypes.Structure)]


@pytest.fixture(scope="module")
def header():
    return Header(HEADER.read_text(encoding="utf-8"))


def renamed(header: Header, name: str) -> str:
    return SINCE_0_4.get(name, name) if header.macros["XLA_FFI_API_MINOR"] >= 4 else name


def test_there_are_structures_to_compare():
    assert {"XLA_FFI_CallFrame", "XLA_FFI_Buffer", "XLA_FFI_Api"} <= {s.__name__ for s in STRUCTS}
    assert len(STRUCTS) >= 13


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda s: s.__name__)
def test_a_structure_has_the_fields_of_the_header(header, struct):
    theirs = header.fields(renamed(header, struct.__name__))
    mine = [(renamed(header, name), kind) for name, kind in ours(struct)]
    if struct.__name__ in ENDS_EARLY:
        assert len(mine) < len(theirs)
        theirs = theirs[: len(mine)]
    assert mine == theirs


def test_the_parser_sees_a_difference():
    changed = HEADER.read_text(encoding="utf-8").replace("int64_t rank;", "int32_t rank;")
    assert Header(changed).fields("XLA_FFI_Buffer") != ours(launch.Buffer)
    swapped = changed.replace("int32_t rank;", "").replace("int64_t* dims;", "int64_t* dims; int64_t rank;")
    assert Header(swapped).fields("XLA_FFI_Buffer") != ours(launch.Buffer)
    assert [name for name, _ in Header(swapped).fields("XLA_FFI_Buffer")][-2:] == ["dims", "rank"]


def test_the_functions_called_stand_where_the_header_has_them(header):
    theirs, mine = [[name for name, _ in f] for f in (header.fields("XLA_FFI_Api"), ours(launch.Api))]
    for name in ("XLA_FFI_Error_Create", "XLA_FFI_Stream_Get"):
        assert mine.index(name) == theirs.index(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("XLA_FFI_ExecutionStage_INSTANTIATE", launch._INSTANTIATE),
        ("XLA_FFI_ExecutionStage_EXECUTE", launch._EXECUTE),
        ("XLA_FFI_Extension_Metadata", launch._METADATA),
        ("XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE", launch._COMMAND_BUFFER_COMPATIBLE),
        ("XLA_FFI_AttrType_STRING", launch._STRING),
        ("XLA_FFI_Error_Code_INTERNAL", launch._INTERNAL),
    ],
)
def test_an_enumerator_has_the_number_of_the_header(header, name, value):
    assert header.values[name] == value


def test_the_version_answered_is_not_above_the_header_s(header):
    major, minor = launch._VERSION
    assert header.macros["XLA_FFI_API_MAJOR"] == major
    assert header.macros["XLA_FFI_API_MINOR"] >= minor


# Frames built by hand, as XLA builds them.

MESSAGES: list[bytes] = []
AN_ERROR = 0x1234


@launch._API_FUNCTION
def error_create(address: int) -> int:
    args = launch.ErrorCreateArgs.from_address(address)
    assert args.struct_size == ctypes.sizeof(args)
    MESSAGES.append(args.message)
    return AN_ERROR


@launch._API_FUNCTION
def stream_get(address: int) -> int | None:
    args = launch.StreamGetArgs.from_address(address)
    if args.ctx is None:
        return AN_ERROR
    args.stream = args.ctx + 1
    return None


def called(
    on_cuda: bool, stage: int, name: bytes, ctx: int | None = None, attr: int = 4
) -> tuple[int | None, list[bytes]]:
    """What the handler answers to a frame with one attribute and no buffers, and the messages of the errors it made."""
    function = ctypes.cast
    api = launch.Api(
        XLA_FFI_Error_Create=function(error_create, ctypes.c_void_p),
        XLA_FFI_Stream_Get=function(stream_get, ctypes.c_void_p),
    )
    text = ctypes.create_string_buffer(name, max(len(name), 1))
    span = launch.ByteSpan(ctypes.addressof(text), len(name))
    spans = (ctypes.c_void_p * 1)(ctypes.addressof(span))
    types = (ctypes.c_int * 1)(attr)
    attrs = launch.Attrs(size=1, types=ctypes.addressof(types), attrs=ctypes.addressof(spans))
    frame = launch.CallFrame(api=ctypes.addressof(api), ctx=ctx, stage=stage, attrs=attrs)
    MESSAGES.clear()
    return launch._HANDLERS["CUDA" if on_cuda else "Host"](ctypes.addressof(frame)), list(MESSAGES)


class Notes:
    """A plan that notes how it is launched."""

    kind = "test abi notes"
    prepared: list[int] = []  # noqa: RUF012
    launched: list[tuple] = []  # noqa: RUF012

    def spec(self) -> dict:
        return {}

    def prepare(self, device: int):
        self.prepared.append(device)
        return plans.Prepared(lambda *given: self.launched.append(given))


plans.plan_kind(Notes.kind, lambda content: Notes())
NAME = plans.plan_name(Notes()).encode()


@pytest.fixture
def notes(monkeypatch):
    monkeypatch.setattr(launch, "BOOK", plans.PlanBook())
    launch._stream_get.cache_clear()  # the tables of functions here come and go
    monkeypatch.setattr(Notes, "prepared", [])
    monkeypatch.setattr(Notes, "launched", [])
    return Notes


def test_on_cuda_a_plan_is_launched_on_xla_s_stream_and_the_current_device(notes, monkeypatch):
    monkeypatch.setattr(launch, "_current_cuda_device", lambda: 3)
    assert called(True, launch._EXECUTE, NAME, ctx=0x100) == (None, [])
    assert called(True, launch._EXECUTE, NAME, ctx=0x200) == (None, [])
    assert notes.launched == [(0x101, [], []), (0x201, [], [])]
    assert notes.prepared == [3]


def test_when_loaded_on_cuda_a_plan_is_prepared_on_every_local_device_made_current(notes, monkeypatch):
    current = []

    class Current:
        def __init__(self, device: int):
            self.device = device

        def __enter__(self):
            current.append(self.device)

        def __exit__(self, *exc):
            current.append("left")

    monkeypatch.setattr(launch, "_current", Current)
    monkeypatch.setattr(launch, "_local_cuda_devices", lambda: [0, 2])
    assert called(True, launch._INSTANTIATE, NAME) == (None, [])
    assert notes.prepared == [0, 2]
    assert current == [0, "left", 2, "left"]
    assert notes.launched == []


def test_without_a_stream_nothing_is_launched(notes, monkeypatch):
    monkeypatch.setattr(launch, "_current_cuda_device", lambda: 0)
    answer, (message,) = called(True, launch._EXECUTE, NAME, ctx=None)
    assert answer == AN_ERROR
    assert b"RuntimeError: XLA gave no stream" in message
    assert NAME in message
    assert notes.launched == []


def test_the_stages_between_do_nothing(notes, header):
    for stage in ("PREPARE", "INITIALIZE"):
        assert called(False, header.values[f"XLA_FFI_ExecutionStage_{stage}"], NAME) == (None, [])
    assert notes.prepared == notes.launched == []


@pytest.mark.parametrize(
    "name", [b"", b"{", b"[]", b"3", b'{"kind":3}', b'{"kind":[]}', b"\xff\xfe", b'{"kind":"\x00"}']
)
def test_a_name_that_cannot_be_read_is_an_error_that_quotes_it(notes, name):
    answer, (message,) = called(False, launch._EXECUTE, name)
    assert answer == AN_ERROR
    assert b"BackendError: unknown launch plan" in message
    quoted = name.decode(errors="backslashreplace").replace("\0", "\\0").encode()
    assert b"[launch plan " + quoted + b"]" in message


def test_an_attribute_that_is_no_text_is_an_error_that_says_so(notes):
    answer, (message,) = called(False, launch._EXECUTE, NAME, attr=3)
    assert answer == AN_ERROR
    assert b"needed one, the name of a plan" in message


class UntellableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (UntellableError(), b"UntellableError"),
        (ValueError("a lone surrogate \ud800 here"), b"a lone surrogate \\ud800 here"),
        (ValueError("before\0after"), b"before\\0after"),
        (KeyboardInterrupt(), b"KeyboardInterrupt"),
        (SystemExit(3), b"SystemExit: 3"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_no_exception_is_lost_at_the_boundary(notes, monkeypatch, error, text):
    def prepare(self, device):
        raise error

    monkeypatch.setattr(Notes, "prepare", prepare)
    answer, (message,) = called(False, launch._EXECUTE, NAME)
    assert answer == AN_ERROR
    assert text in message
    assert NAME in message


def test_asked_what_it_is_a_handler_answers_and_touches_nothing_behind_what_it_knows():
    class Newer(ctypes.Structure):
        _fields_ = [("known", launch.Metadata), ("state_type_id", ctypes.c_int64)]

    metadata = Newer(state_type_id=-7)
    extension = launch.MetadataExtension(launch.ExtensionBase(type=launch._METADATA), ctypes.addressof(metadata))
    frame = launch.CallFrame(extension_start=ctypes.addressof(extension))
    for handler in launch._HANDLERS.values():
        metadata.known.traits = 0
        assert handler(ctypes.addressof(frame)) is None
        version = metadata.known.api_version
        assert (version.major_version, version.minor_version) == launch._VERSION
        assert metadata.known.traits == launch._COMMAND_BUFFER_COMPATIBLE
        assert metadata.state_type_id == -7
