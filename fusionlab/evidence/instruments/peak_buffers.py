"""The buffers that live at the peak of a compiled program, each with the nodes and the source line that compute what it holds.

XLA reserves all memory of a run before it starts: a block for each argument and result, and one block for all temporaries, in which it
places them so that those share a place which never live at the same time. What the executable takes is the size of these blocks, and it
takes it from start to end. Its peak is the moment at which the temporaries that live fill most of their block; they are why the block is
as large as it is. What is left of the block at that moment are `gaps`: places of buffers that live at other times.

Lines and nodes come from the metadata of the compiled program. JAX's persistent cache leaves them out of its key: a program that it
returns has the lines that it had when it was compiled (`PeakBuffers.stale`).
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from fusionlab.graph.jax_compat import split_closed
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.trace import graph_of_jaxpr
from fusionlab.graph.xla.assignment_text import read_text
from fusionlab.graph.xla.buffer_assignment import Allocation, Buffer, instruction_names, read_assignment
from fusionlab.graph.xla.hlo_text import Instruction
from fusionlab.graph.xla.modules import Origins
from fusionlab.showing import Shown, Table, plural, table_of

from ..units import binary_bytes
from .program import Program, uses_cache

_TOLD = 10  # buffers and lines of a text
_NAMED = 3  # lines of a sentence
_OLDER = 0.1  # of a module's lines which the program has not, from where on they are of an older source
_NODES = 3  # of a buffer's, in a text
_DTYPE = re.compile(r"^(bf|f|s|u|c)(\d)")
_KINDS = {"bf": "bfloat", "f": "float", "s": "int", "u": "uint", "c": "complex"}
_ELSEWHERE = "(no line)"


@dataclass(frozen=True, repr=False)
class PeakBuffer(Shown):
    """A buffer that lives at the peak.

    Attributes:
      bytes: its size.
      kind: "argument", "output" or "temporary", which XLA's figure counts; or "constant", which it does not.
      type: of its array: "f32[8,16]"; "" for a table of pointers.
      name: the argument or result that it is: "params['w']", "out[0]"; of a temporary the argument of which it is a copy; else "".
      operations: the nodes that compute what it holds, as "n57 exp"; of an argument those that read it. Several, where JAX keeps the
        same line and primitive for them and their results have one size. The numbers are those of the program's own graph, `fl.trace`
        of what was compiled.
      line: the place of the first of them, "model.py:41"; "" where JAX kept none.
      code: that line itself; "" where it cannot be read.
      scope: the module scope of that node.
      instruction: XLA's name for what defined the buffer.
    """

    _told = ("bytes", "kind", "type", "name", "operations", "line", "code", "scope", "instruction")

    bytes: int
    kind: str
    type: str
    name: str
    operations: tuple[str, ...]
    line: str
    code: str
    scope: str
    instruction: str

    @property
    def nodes(self) -> tuple[int, ...]:
        """The ids of the nodes in `operations`."""
        return tuple(int(operation.partition(" ")[0][1:]) for operation in self.operations)

    @property
    def dtype(self) -> str:
        """The name of its array's dtype, "float32"; "" for a table of pointers."""
        name = self.type.partition("[")[0]
        return "bool" if name == "pred" else _DTYPE.sub(lambda found: f"{_KINDS[found.group(1)]}{found.group(2)}", name)

    @property
    def what(self) -> str:
        """What it holds, in a few words: its name, or else the operation that computes it."""
        if self.name:
            return f"copy of {self.name}" if self.kind == "temporary" else self.name
        kinds = dict.fromkeys(operation.partition(" ")[2] for operation in self.operations)
        return " or ".join(self._of(kind) for kind in [*kinds][:_NODES]) or self.instruction

    def _of(self, kind: str) -> str:
        """ "exp n57", or "exp n57, n81 or one of 3 more" where JAX keeps one and the same place for several."""
        own = [operation.partition(" ")[0] for operation in self.operations if operation.endswith(f" {kind}")]
        more = len(own) - _NODES
        last = [f"one of {more} more" if more > 1 else own[-1]] if len(own) > 1 else []
        first = own[:_NODES] if more > 1 else own[:-1] if last else own
        return f"{kind} {' or '.join([', '.join(first), *last])}"

    @property
    def title(self) -> str:
        """What it holds, with its line: "exp n57 at model.py:41"."""
        return f"{self.what} at {self.line}" if self.line else self.what

    def __str__(self) -> str:
        kind = f"{self.kind} {self.type}".strip()
        return f"{binary_bytes(self.bytes)}  {kind}: {self.title}{f': {self.code}' if self.code else ''}"


@dataclass(frozen=True, repr=False)
class LineBytes(Shown):
    """The temporaries at the peak that one source line computes.

    `buffers` is how many they are, `bytes` their sum; `line` and `code` as of a `PeakBuffer`.
    """

    bytes: int
    buffers: int
    line: str
    code: str

    def __str__(self) -> str:
        count = f"{self.buffers} {plural('buffer', self.buffers)}"
        return f"{binary_bytes(self.bytes)}  {self.line}, {count}{f': {self.code}' if self.code else ''}"


@dataclass(frozen=True, repr=False)
class PeakBuffers(Shown):
    """All buffers that live at the peak of a compiled program, and the gaps between them.

    Attributes:
      name: the version, "before" or "after".
      buffers: the largest first.
      gaps: bytes of the blocks of temporaries in which nothing lives at that moment.
      stale: whether the program came from JAX's persistent cache with the lines of an older source.
    """

    _listed = "buffers"

    name: str
    buffers: tuple[PeakBuffer, ...]
    gaps: int
    stale: bool = False

    def bytes_of(self, kind: str) -> int:
        """The bytes of all buffers of a kind: "argument", "output", "temporary" or "constant"."""
        return sum(b.bytes for b in self.buffers if b.kind == kind)

    @property
    def total(self) -> int:
        """Bytes of arguments, outputs, temporaries and gaps: XLA's figure of what the executable takes, `CompiledMemory.peak`."""
        return self.live + self.gaps

    @property
    def live(self) -> int:
        """The same without the gaps."""
        return sum(b.bytes for b in self.buffers if b.kind != "constant")

    @property
    def lines(self) -> tuple[LineBytes, ...]:
        """The temporaries by the source line that computes them, the line of most bytes first."""
        found: dict[str, list[PeakBuffer]] = {}
        for buffer in self.buffers:
            if buffer.kind == "temporary":
                found.setdefault(buffer.line or _ELSEWHERE, []).append(buffer)
        sums = (LineBytes(sum(b.bytes for b in own), len(own), line, own[0].code) for line, own in found.items())
        return tuple(sorted(sums, key=lambda s: -s.bytes))

    @property
    def sentence(self) -> str:
        """The lines that most bytes of the temporaries come from, on one line."""
        most = ", ".join(f"{binary_bytes(line.bytes)} of {line.line}" for line in self.lines[:_NAMED])
        return f"{self.name}, most temporaries at the peak: {most}{self._older}"

    @property
    def _older(self) -> str:
        advice = "for today's, compile with jax_enable_compilation_cache=False"
        return f" (lines of an older source, from the compilation cache; {advice})" if self.stale else ""

    def __str__(self) -> str:
        more = len(self.buffers) - _TOLD
        rows = [f"  {b}" for b in self.buffers[:_TOLD]] + ([f"  ... and {more:,} smaller ones"] if more > 0 else [])
        lines = [f"  {line}" for line in self.lines[:_TOLD]]
        return "\n".join([self.text, *rows, *([f"temporaries by line{self._older}:", *lines] if lines else [])])

    @property
    def text(self) -> str:
        """The sums, on one line."""
        parts = [f"{plural(kind, 2)} {binary_bytes(self.bytes_of(kind))}" for kind in ("argument", "output")]
        parts += [
            f"temporaries {binary_bytes(self.bytes_of('temporary'))}",
            f"gaps between them {binary_bytes(self.gaps)}",
        ]
        constants = self.bytes_of("constant")
        beyond = f"; constants, which XLA does not count, {binary_bytes(constants)}" if constants else ""
        return f"{self.name}: {binary_bytes(self.total)} at the peak: {', '.join(parts)}{beyond}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, JSON-able; `from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Reads `to_dict` back."""
        buffers = (PeakBuffer(**b | {"operations": tuple(b["operations"])}) for b in data["buffers"])
        return cls(data["name"], tuple(buffers), data["gaps"], data.get("stale", False))

    def _table(self) -> Table:
        return table_of(self.buffers)


def peak_buffers(program: Program, arguments: Sequence[str] = (), results: Sequence[str] = ()) -> PeakBuffers | None:
    """The buffers at the peak of a compiled program; None where the backend does not show its buffer assignment.

    Args:
      program: what was compiled.
      arguments: names for the leaves of its last arguments; () for JAX's own.
      results: names for all of its results; () for none.
    """
    assigned = _assigned(program)
    if assigned is None:
        return None
    graph = graph_of_jaxpr(program.jaxpr, name=program.name, in_tree=None, out_tree=None, in_names=())
    origins = Origins(program.module, graph)
    names = dict(zip(reversed(_argument_names(program.jaxpr)), reversed(arguments), strict=False))
    returned = _results(origins, results)
    stale = uses_cache() and origins.unknown_lines > _OLDER
    return replace(_Peak(origins, graph, names, returned).of(program.name, assigned), stale=stale)


def _argument_names(jaxpr: Any) -> tuple[str, ...]:
    """JAX's name for each argument, which XLA has as well; () where JAX kept none."""
    debug = getattr(split_closed(jaxpr)[0], "debug_info", None)
    return tuple(map(str, getattr(debug, "arg_names", None) or ()))


def _assigned(program: Program) -> tuple[Allocation, ...] | None:
    """The blocks of a compiled program; None where the backend does not show them, or in no form that is known."""
    compiled = program.compiled
    if program.assignment is not None:
        with contextlib.suppress(ValueError):
            return read_text(*program.assignment)
    message = getattr(program.memory, "serialized_buffer_assignment_proto", b"")
    modules = getattr(getattr(compiled, "runtime_executable", lambda: None)(), "hlo_modules", list)()
    if not message or len(modules) != 1:
        return None
    try:
        found = read_assignment(message, instruction_names(modules[0].as_serialized_hlo_module_proto()))
    except (ValueError, KeyError):  # another form of the message
        return None
    # Without a record of which temporaries live at the peak there is nothing to show.
    return found if all(a.peak for a in found if a.kind == "temporary" and a.size) else None


class _Peak:
    """Names the buffers of one program."""

    def __init__(
        self,
        origins: Origins,
        graph: Graph,
        names: Mapping[str, str],
        results: Mapping[tuple[str, tuple[int, ...]], str],
    ) -> None:
        self.origins, self.graph, self.names, self.results = origins, graph, names, results

    def of(self, name: str, allocations: Iterable[Allocation]) -> PeakBuffers:
        buffers, gaps = [], 0
        for allocation in allocations:
            if allocation.kind == "temporary":
                buffers += [self.buffer(b, b.size, "temporary") for b in allocation.peak]
                gaps += allocation.size - sum(b.size for b in allocation.peak)
            elif allocation.size:
                buffers.append(self.whole(allocation))
        return PeakBuffers(name, tuple(sorted(buffers, key=lambda b: -b.bytes)), gaps)

    def whole(self, allocation: Allocation) -> PeakBuffer:
        """A block of its own: of an argument, a result or a constant, whatever else lies in it at other times."""
        known = self.origins.module.instructions
        opcodes = {"argument": ("parameter",), "constant": ("constant",)}.get(allocation.kind, ())
        named = [b for b in allocation.buffers if b.name in known and known[b.name].opcode in opcodes]
        returned = [b for b in allocation.buffers if (b.name, b.index) in self.results]
        chosen = [*named, *returned, *allocation.peak, *allocation.buffers, Buffer("", (), 0)][0]
        return self.buffer(chosen, allocation.size, allocation.kind)

    def buffer(self, buffer: Buffer, size: int, kind: str) -> PeakBuffer:
        origin = self.origins.of(buffer.name, buffer.index)
        operations, scope = self.operations(origin.nodes)
        source = origin.sources[0] if origin.sources else None
        argument = self.names.get(origin.argument, origin.argument)
        name = self.results.get((buffer.name, buffer.index), "") if kind == "output" else argument
        return PeakBuffer(
            size,
            kind,
            origin.type,
            name,
            operations,
            source.short if source else "",
            source.text if source else "",
            scope,
            buffer.name,
        )

    @functools.cache  # noqa: B019 - one is made for one reading, and many buffers come from the same nodes
    def operations(self, ids: tuple[int, ...]) -> tuple[tuple[str, ...], str]:
        """The nodes as "n57 exp", and the scope of the first."""
        nodes = [self.graph.node_by_id[i] for i in ids]
        return tuple(f"n{n.id} {n.primitive}" for n in nodes), nodes[0].scope if nodes else ""


def _results(origins: Origins, names: Sequence[str]) -> dict[tuple[str, tuple[int, ...]], str]:
    """(instruction, index) -> the name of the result that it is, with every name that an element of a loop's tuple goes by."""
    module = origins.module
    root = next((i for i in module.computations.get(module.entry, ()) if i.root), None)
    if root is None:
        return {}
    if root.opcode != "tuple":
        return dict.fromkeys(_names(root.name, module.instructions.get), *names[:1]) if names else {}
    found: dict[tuple[str, tuple[int, ...]], str] = {}
    for operand, name in zip(root.operands, names, strict=False):
        found |= dict.fromkeys(_names(operand, module.instructions.get), name)
    return found


def _names(name: str, known: Callable[[str], Instruction | None]) -> Iterable[tuple[str, tuple[int, ...]]]:
    """A value's place, and the places that it is taken from unchanged."""
    index: tuple[int, ...] = ()
    while (here := known(name)) is not None:
        yield name, index
        if here.opcode == "get-tuple-element":
            index = (here.index, *index)
        elif here.opcode != "bitcast":
            return
        name = here.operands[0]
