"""The Memory tab: what each version takes, and which source lines and buffers are behind it at the peak."""

from __future__ import annotations

from typing import Any

from fusionlab.evidence.comparison import Evidence
from fusionlab.evidence.instruments.memory import Memory
from fusionlab.evidence.instruments.peak_buffers import PeakBuffer, PeakBuffers
from fusionlab.evidence.units import binary_bytes
from fusionlab.graph.program.graph import Graph
from fusionlab.showing import plural

from ...markup import Html, folded, mono, pick, quiet, section, short, table, text

_MOST = 10  # rows of a table
_ALL = 200  # of the folded one
_NODES = 3  # of a buffer
_CODE = 90  # letters of a line
_LESS = 50  # where there are more columns
_HOW = (
    "XLA reserves the memory of a run before it starts: a block for each argument and result, and one for all temporaries. These are the "
    "buffers that live when most of that block is in use; gaps are places in it of buffers that live at other times."
)


def memory_html(evidence: Evidence | None, graph: Graph | None) -> str:
    """For each call the temporaries by source line, before and after, and the largest buffers of both; "" where XLA shows none.

    Nodes and lines of `graph`, the original, can be selected.
    """
    if evidence is None:
        return ""
    call, gradient = evidence.calls
    names = {call: _Names(graph), gradient: _Names(graph, nodes=False)}
    inner = "".join(_call(call, memory, names[call]) for call, memory in evidence.memories)
    return quiet(_HOW) + inner if inner else ""


class _Names:
    """Cells for nodes and lines: buttons where the graph has them."""

    def __init__(self, graph: Graph | None, nodes: bool = True) -> None:
        self.nodes = {f"n{n.id} {n.primitive}" for n in graph.nodes()} if graph is not None and nodes else set()
        self.lines = {n.source.short for n in graph.nodes() if n.source is not None} if graph is not None else set()

    def line(self, line: str) -> Any:
        return Html(pick(line)) if line in self.lines else line

    def holds(self, buffer: PeakBuffer, known: bool) -> Any:
        """What a buffer holds; the operations of the original are buttons, of which the first few are shown."""
        if buffer.name or not known or not self.nodes.intersection(buffer.operations):
            return buffer.what
        buttons = (pick(o.partition(" ")[0], o) if o in self.nodes else text(o) for o in buffer.operations[:_NODES])
        more = len(buffer.operations) - _NODES
        return Html(" or ".join([*buttons, *([f"one of {more} more"] if more > 0 else [])]))


def _call(call: str, memory: Memory, names: _Names) -> str:
    versions = [v.buffers for v in (memory.before, memory.after) if v.buffers is not None]
    if not versions:
        return ""
    shown = section(f"{call}: temporaries at the peak, by source line", _lines(versions, names))
    for peak in versions:
        shown += section(f"{call}, {peak.name}: the largest buffers at the peak", _buffers(peak, names))
    return shown


def _lines(versions: list[PeakBuffers], names: _Names) -> str:
    """Bytes of each version by line, those of most bytes in either first."""
    sums = [{line.line: line.bytes for line in peak.lines} for peak in versions]
    codes = {line.line: line.code for peak in versions for line in peak.lines}
    most = sorted(codes, key=lambda line: -max(of.get(line, 0) for of in sums))
    rows = [[names.line(line), _code(codes[line]), *(_size(of.get(line, 0)) for of in sums)] for line in most]
    gaps = ["gaps", "", *(_size(peak.gaps) for peak in versions)]
    heads, numeric, rest = ["line", "code", *(peak.name for peak in versions)], (2, 3), rows[_MOST:]
    more = folded(f"{len(rest)} more {plural('line', len(rest))}", table(heads, rest, numeric)) if rest else ""
    return table(heads, [*rows[:_MOST], gaps], numeric) + more


def _buffers(peak: PeakBuffers, names: _Names) -> str:
    heads, numeric = ["size", "share", "kind", "type", "holds", "line", "code"], (0, 1)
    rows = [_buffer(b, peak, names) for b in peak.buffers[:_ALL]]
    rest, beyond = rows[_MOST:], len(peak.buffers) - _MOST
    title = f"{beyond:,} smaller {plural('one', beyond)}" + (f", {len(rest)} shown" if beyond > len(rest) else "")
    more = folded(title, table(heads, rest, numeric)) if rest else ""
    return quiet(peak.text) + table(heads, rows[:_MOST], numeric) + more


def _buffer(buffer: PeakBuffer, peak: PeakBuffers, names: _Names) -> list[Any]:
    share = f"{100 * buffer.bytes / peak.total:.1f} %" if buffer.kind != "constant" and peak.total else ""
    holds = names.holds(buffer, peak.name == "before")
    return [
        _size(buffer.bytes),
        share,
        buffer.kind,
        Html(f'<code style="white-space:nowrap">{text(buffer.type)}</code>'),
        holds,
        names.line(buffer.line),
        _code(buffer.code, _LESS),
    ]


def _code(line: str, most: int = _CODE) -> Any:
    return Html(mono(short(line, most))) if line else ""


def _size(number: int) -> str:
    return binary_bytes(number) if number else "–"
