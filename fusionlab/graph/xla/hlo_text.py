"""Optimised HLO text, as `jax.jit(f).lower(...).compile().as_text()` gives it, read into computations and instructions.

The format is that of XLA's HLO text (https://openxla.org/xla/operation_semantics names the operations), on CPU and GPU. Only the
information on kernels and their origin is read: opcode, operands, called computations, targets and metadata, which
newer versions keep in tables of stack frames at the top of the module. The format is not a stable interface, so unknown parts are
skipped and never an error: an unknown operation is an instruction with that opcode, an unknown line is ignored.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..program.scopes import Source

# Possessive, since a module has megabytes of this.
_STRING = r'"(?:[^"\\]++|\\.)*+"'
_METADATA = re.compile(rf'metadata=(\{{(?:[^{{}}"]++|{_STRING})*+\}})')
_HEAD = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*\)\s*->.*)?\{$")
_INSTRUCTION = re.compile(r"^(ROOT\s+)?%?([\w.\-]+)\s+=\s+(.*)$")
# Most lines: one array, operands by name, and an origin at the end if any.
_PLAIN = re.compile(r'^(ROOT\s+)?%([\w.\-]+) = ([^\s()"]+) ([a-zA-Z][\w\-]*)\(([^()"]*)\)(.*)$')
_ORIGIN = re.compile(r', metadata=\{op_name="([^"\\]*)"(?: stack_frame_id=(\d+))?\}$')
_OPCODE = re.compile(r"\s*([a-zA-Z][\w\-]*)\(")
_BRACKET = re.compile(rf"[()]|{_STRING}")
_OPERAND = re.compile(r"%([\w.\-]+)")
_NAME = re.compile(r"[\w.\-]+")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation|branch_computations|called_computations)="
    r"(\{[^{}]*\}|%?[\w.\-]+)"
)
_FUSION_KIND = re.compile(r"\bkind=(\w+)")
_TARGET = re.compile(r'custom_call_target="((?:[^"\\]|\\.)*)"')
_BACKEND_KIND = re.compile(r'\\?"kind\\?":\s*\\?"(__[^"\\]+)\\?"')  # in a backend_config, which may be a string of JSON
_ARRAY = re.compile(r"\b[a-z]\w*\[[\d,<=]*\]")
_INDEX = re.compile(r"\bindex=(\d+)")
_TRIPS = re.compile(r'\\?"known_trip_count\\?":\s*\{\\?"n\\?":\s*\\?"(\d+)')
_WITH_ATTRIBUTES = frozenset({"while", "get-tuple-element"})  # of their own: a trip count, an index
_TABLES = frozenset({"FileNames", "FunctionNames", "FileLocations", "StackFrames"})
_ENTRY = re.compile(r"^(\d+)\s+(.*)$")
_FRAME, _LINE = re.compile(r"\bstack_frame_id=(\d+)"), re.compile(r"\bsource_line=(\d+)")
_NUMBER = re.compile(r"(\w+)=(\d+)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
      name, opcode: "loop_fusion.3", "fusion".
      operands: names of the instructions it reads, in order.
      called: attribute -> names of the computations it calls ("calls", "to_apply", "body", "condition", ...).
      fusion_kind: "kLoop", "kInput", "kOutput", "kCustom"; "" for any other instruction.
      target: the code that runs it, as in the text: a custom call's target, a custom fusion's kind ("__triton_gemm"); else "".
      op_name: JAX's name for the original operation, "" if XLA kept none.
      frame: number of its stack frame in the module's tables, 0 for none.
      file, line: from older metadata, which contains them directly; "" and 0 otherwise.
      type: of its result, as in the text: "f32[8,16]{1,0}", "(f32[2]{0}, s32[])".
      trips: the trip count of a loop if XLA knows it; else 0.
      index: of the element that a get-tuple-element takes; else 0.
      root: it is the result of its computation.
    """

    name: str
    opcode: str
    operands: tuple[str, ...] = ()
    called: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fusion_kind: str = ""
    target: str = ""
    op_name: str = ""
    frame: int = 0
    file: str = ""
    line: int = 0
    type: str = ""
    trips: int = 0
    index: int = 0
    root: bool = False


@dataclass(frozen=True, eq=False)
class Module:
    """An HLO module.

    Attributes:
      name: "jit_f"; "" if the text has none.
      computations: name -> its instructions, in order.
      entry: the name of the entry computation; "" if there is none.
      frames: number of a stack frame -> (its place, the number of the frame that called it or 0).
    """

    name: str
    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str
    frames: Mapping[int, tuple[Source, int]] = field(default_factory=dict, repr=False)

    @functools.cached_property
    def instructions(self) -> dict[str, Instruction]:
        """Name -> instruction, of all computations; names are unique in a module."""
        return {i.name: i for body in self.computations.values() for i in body}

    def origin(self, instruction: Instruction) -> list[Source]:
        """The source lines of an instruction, innermost first; none if XLA kept none."""
        if instruction.file:
            return [Source(instruction.file, instruction.line, "")]
        found, number = {}, instruction.frame
        while number in self.frames and number not in found:  # a table that runs in circles is broken, not endless
            found[number], parent = self.frames[number]
            number = parent
        return list(found.values())


def parse_hlo(text: str) -> Module:
    """Reads HLO text; other text gives a module without computations."""
    name, tables = "", {}
    computations: dict[str, list[Instruction]] = {}
    entry = table = current = ""
    # XLA writes the module's name, then tables of stack frames, then computations, each between its head and a "}" alone.
    for line in map(str.strip, text.splitlines()):
        if line.startswith("HloModule "):
            name = line.split()[1].rstrip(",")
        elif not current and line in _TABLES:
            table = line
        elif not current and (head := _HEAD.match(line)):
            current, table = head.group(2), ""
            computations[current] = []
            entry = current if head.group(1) else entry
        elif table and (row := _ENTRY.match(line)):
            tables.setdefault(table, {})[int(row.group(1))] = row.group(2)
        elif line.startswith("}") and current:
            current = ""
        elif current and (instruction := _instruction(line)) is not None:
            computations[current].append(instruction)
    return Module(name, {k: tuple(v) for k, v in computations.items()}, entry, _frames(tables))


def _instruction(line: str) -> Instruction | None:
    """ "ROOT %add.3 = f32[2]{0} add(%x, %y), metadata={...}"; None for a line of another form."""
    return _plain(line) or _any(line)


def _plain(line: str) -> Instruction | None:
    """The instruction of a line without attributes other than its origin and computations; None for any other line.

    As `_any`, in half the time: a module has tens of thousands of such lines.
    """
    match = _PLAIN.match(line)
    if match is None:
        return None
    root, name, type_, opcode, operands, attributes = match.groups()
    op_name, frame = "", 0
    if attributes and (origin := _ORIGIN.search(attributes)) is not None:
        attributes, op_name, frame = attributes[: origin.start()], origin[1], int(origin[2] or 0)
    if '"' in attributes or "metadata=" in attributes or opcode in _WITH_ATTRIBUTES:
        return None
    kind = _FUSION_KIND.search(attributes) if opcode.startswith("fusion") else None
    return Instruction(
        name,
        opcode,
        _operands(operands),
        _called(attributes),
        _matched(kind),
        op_name=op_name,
        frame=frame,
        type=type_,
        root=bool(root),
    )


def _any(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    rest = _after_type(match.group(3))
    opcode = _OPCODE.match(rest)
    if opcode is None:
        return None
    end = _closing(rest, opcode.end() - 1)
    attributes, metadata = rest[end + 1 :], ""
    if (found := _METADATA.search(attributes)) is not None:
        attributes, metadata = attributes[: found.start()] + attributes[found.end() :], found.group(1)
    kind = _FUSION_KIND.search(attributes) if opcode.group(1).startswith("fusion") else None
    target = _TARGET.search(attributes) if "custom_call_target" in attributes else None
    target = target or (_BACKEND_KIND.search(attributes) if kind else None)
    trips = _TRIPS.search(attributes) if opcode.group(1) == "while" else None
    index = _INDEX.search(attributes) if opcode.group(1) == "get-tuple-element" else None
    return Instruction(
        name=match.group(2),
        opcode=opcode.group(1),
        operands=_operands(rest[opcode.end() : end]),
        called=_called(attributes),
        fusion_kind=_matched(kind),
        target=_matched(target),
        op_name=_quoted(metadata, "op_name"),
        frame=int(_matched(_FRAME.search(metadata)) or 0),
        file=_quoted(metadata, "source_file"),
        line=int(_matched(_LINE.search(metadata)) or 0),
        type=match.group(3)[: len(match.group(3)) - len(rest)].strip(),
        trips=int(_matched(trips) or 0),
        index=int(_matched(index) or 0),
        root=bool(match.group(1)),
    )


def element_type(text: str, index: tuple[int, ...] = ()) -> str:
    """The type of a result, or of an element of its tuple, without layouts: "f32[8,16]"; "" for a tuple itself."""
    arrays = _ARRAY.findall(text)
    if text.startswith("("):
        return arrays[index[0]] if len(index) == 1 and index[0] < len(arrays) else ""
    return arrays[0] if len(arrays) == 1 else ""


def _called(attributes: str) -> dict[str, tuple[str, ...]]:
    """Attribute -> names of the computations it calls."""
    return {key: tuple(_NAME.findall(names)) for key, names in _CALLED.findall(attributes)} if attributes else {}


def _matched(match: re.Match[str] | None) -> str:
    """The value of an attribute; "" if it is missing."""
    return match.group(1) if match else ""


def _after_type(text: str) -> str:
    """The text after an instruction's type; a tuple's type contains blanks, also in comments such as /*index=5*/."""
    if text.startswith("("):
        return text[_closing(text, 0) + 1 :]
    return text[text.find(" ") + 1 :] if " " in text else text


def _closing(text: str, start: int) -> int:
    """The position of the bracket that closes the one at `start`; the end of the text if none does."""
    end = text.find(")", start)
    if end > 0 and text.find("(", start + 1, end) < 0 and text.find('"', start, end) < 0:
        return end
    depth = 0
    for match in _BRACKET.finditer(text, start):
        depth += {"(": 1, ")": -1}.get(match.group(), 0)
        if depth == 0:
            return match.start()
    return len(text)


def _operands(text: str) -> tuple[str, ...]:
    """ "%x, f32[2]{0} %y" -> ("x", "y"); if names are written without the sign, anything that may be a name counts."""
    named = _OPERAND.findall(text)
    return tuple(named if named else (words[-1] for part in text.split(",") if (words := part.split())))


def _quoted(metadata: str, key: str) -> str:
    if key not in metadata:
        return ""
    found = re.search(rf'\b{key}="((?:[^"\\]++|\\.)*+)"', metadata)
    value = _matched(found)
    return re.sub(r"\\(.)", r"\1", value) if "\\" in value else value


def _frames(tables: Mapping[str, Mapping[int, str]]) -> dict[int, tuple[Source, int]]:
    """The tables of stack frames, joined; a frame whose line is missing is skipped."""
    files, functions = (
        {i: row.strip('"') for i, row in tables.get(k, {}).items()} for k in ("FileNames", "FunctionNames")
    )
    places = {i: _numbers(row) for i, row in tables.get("FileLocations", {}).items()}
    rows = {i: _numbers(row) for i, row in tables.get("StackFrames", {}).items()}
    # A caller stands before what it calls, so the first frame has none: XLA prints that as 1, callers' numbers being one more there.
    shift = rows.get(1, {}).get("parent_frame_id", 0)
    frames = {}
    for i, row in rows.items():
        place = places.get(row.get("file_location_id", 0), {})
        if file := files.get(place.get("file_name_id", 0), ""):
            source = Source(file, place.get("line", 0), functions.get(place.get("function_name_id", 0), ""))
            frames[i] = source, row.get("parent_frame_id", 0) - shift
    return frames


def _numbers(row: str) -> dict[str, int]:
    return {key: int(value) for key, value in _NUMBER.findall(row)}


# What XLA runs by a library where the text has the plain operation (on the CPU: Eigen, LAPACK, DUCC).
_LIBRARY_OPS = frozenset({"dot", "convolution", "fft", "cholesky", "triangular-solve", "ragged-dot"})
_LIBRARIES = (
    "__cublas",
    "__cudnn",
    "__cusparse",
    "__onednn",
    "__ynn",
    "__xnn",
    "__hipblas",
    "__cub",
    "cub",
    "cusolver",
)
_LIBRARIES += ("cufft", "lapack_", "hipsolver", "rocblas", "blas_", "nvshmem", "__acl")
_COPIES = frozenset({"copy", "transpose"})
_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "reduce-scatter",
    "collective-",
    "ragged-all-to-all",
    "send",
    "recv",
)
_CONTROL_OPCODES = frozenset({"while", "conditional"})
_TRANSPARENT = frozenset({"call", "async-start"})
# Names for values that are there already, and the ends of what was started before.
_NO_KERNEL = frozenset(
    {
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency", "domain"),
        *("opt-barrier", "optimization-barrier", "partition-id", "replica-id", "get-dimension-size", "async-done"),
        *("async-update", "infeed-token"),
    }
)
CONTROL = "loop control"
# What runs a target, which may be a library's -> its kind else.
_TARGETED = {"fusion": "fusion", "custom-call": "custom"}


def instruction_kind(instruction: Instruction) -> str:
    """The kind of an instruction in a computation that runs: "fusion", "library", "custom", "copy", "collective", "unfused" (an operation
    with a kernel of its own), "loop control" (while, conditional), or "" if it launches nothing.
    """
    opcode, target = instruction.opcode, instruction.target
    if opcode in _NO_KERNEL or opcode in _TRANSPARENT or opcode.endswith(("-done", "-update")):
        return ""
    if opcode in _CONTROL_OPCODES:
        return CONTROL
    base = opcode.removesuffix("-start")
    if base in _TARGETED:
        return "library" if target.startswith(_LIBRARIES) else _TARGETED[base]
    if base in _LIBRARY_OPS:
        return "library"
    if base in _COPIES:
        return "copy"
    return "collective" if base.startswith(_COLLECTIVES) else "unfused"


def running(module: Module) -> Iterator[tuple[str, Instruction]]:
    """(computation, instruction) of all that runs: the entry and the bodies of loops, branches and calls, each once."""
    waiting, seen = [module.entry], set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        inner: list[str] = []
        for instruction in module.computations.get(name, ()):
            yield name, instruction
            if instruction.opcode in _CONTROL_OPCODES | _TRANSPARENT:
                inner += [c for names in instruction.called.values() for c in names]
        waiting += reversed(inner)


def inside(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    """An instruction and all those of the computations it calls, of a fusion or a reduction."""
    waiting, seen = [instruction], set()
    while waiting:
        here = waiting.pop()
        yield here
        for name in (c for names in here.called.values() for c in names if c not in seen):
            seen.add(name)
            waiting += module.computations.get(name, ())


def calls_in_fusions(module: Module) -> dict[str, str]:
    """Custom call inside a fusion -> the fusion: XLA hands slices of arrays to a call in a fusion around it, and launches the call."""
    fusions = (i for _, i in running(module) if i.opcode == "fusion")
    return {call.name: f.name for f in fusions for call in inside(module, f) if call.opcode == "custom-call"}


def kernel_counts(module: Module | str) -> dict[str, int]:
    """Kind -> number of kernels that one run launches, with a loop's body counted once; loop control launches none."""
    module = parse_hlo(module) if isinstance(module, str) else module
    counts: dict[str, int] = {}
    for _, instruction in running(module):
        if (kind := instruction_kind(instruction)) and kind != CONTROL:
            counts[kind] = counts.get(kind, 0) + 1
    return counts
