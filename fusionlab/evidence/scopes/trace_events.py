"""A run of a program in the Trace Event Format, which https://ui.perfetto.dev and chrome://tracing open.

Source: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: complete events ("X")
with `ts` and `dur` in microseconds, and metadata events ("M") with the names of processes and threads.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.ir import Node
from fusionlab.graph.program.scopes import in_backward, place_of
from fusionlab.showing import plain

from ..instruments.timeline import Launch
from ..node_times import NodeTimes

_SCOPES = "scopes of "
_MOST_NODES = 40  # ids written into one slice


def packed_trace(
    name: str, versions: Mapping[str, NodeTimes], graph: Graph | None, sites: Mapping[int, str] | None = None
) -> bytes:
    """The trace as gzipped JSON; the same times always give the same bytes. Arguments as of `trace_events`."""
    text = json.dumps(plain(trace_events(name, versions, graph, sites)), separators=(",", ":"), allow_nan=False)
    return gzip.compress(text.encode(), mtime=0)


def trace_events(
    name: str, versions: Mapping[str, NodeTimes], graph: Graph | None, sites: Mapping[int, str] | None = None
) -> dict[str, Any]:
    """One run of each version as a process: a thread for each stream with a slice for each launch of a kernel, and next to it one with the
    scopes in which it ran.

    A slice's `args` hold the ids of its nodes with its parts of time, scope, source line, site, the number of the launch (a loop's step),
    and `share_us`: its part of the run, which differs from `dur` where other kernels are inside it or run at the same time. The shares
    add up to the time in which any kernel ran.

    Args:
      name: of the program.
      versions: name -> its times.
      graph: the program whose nodes they are; None leaves out what is known of nodes.
      sites: node id -> the site that is fused there in "after", and could be before.
    """
    events = [e for pid, (v, times) in enumerate(versions.items(), 1) for e in _process(pid, v, times, graph, sites)]
    first = next(iter(versions.values())).kernels
    about = {"program": name, "source": first.source, "hardware": first.hardware, "written by": "FusionLab"}
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}


def _process(
    pid: int, version: str, times: NodeTimes, graph: Graph | None, sites: Mapping[int, str] | None
) -> Iterator[dict[str, Any]]:
    run = times.run
    yield _named("process_name", pid, 0, version)
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    yield _named("thread_name", pid, 0, "run")
    yield _slice(version, "run", pid, 0, 0, _ns(run.whole_s), {"busy_us": run.busy_s * 1e6})
    seen: Counter[tuple[str, str]] = Counter()
    for k, stream in enumerate(sorted({x.stream for x in run.launches})):
        tid, drawn = 2 * k + 2, _drawn(x for x in run.launches if x.stream == stream)
        yield _named("thread_name", pid, tid - 1, _SCOPES + stream)
        yield _named("thread_name", pid, tid, stream)
        yield from _scopes(pid, tid - 1, drawn, times, graph)
        for one in drawn:
            launch = one.launch
            seen[launch.name, launch.hlo] += 1
            told = _args(launch, times, graph, sites or {}) | {"launch": seen[launch.name, launch.hlo]}
            yield _slice(launch.name, "kernel", pid, tid, one.start, one.end, told)


@dataclass
class _Drawn:
    """A launch as a slice of its stream's track, in whole nanoseconds: slices of a track are nested or apart."""

    launch: Launch
    start: int
    end: int
    is_leaf: bool = True  # no other is nested in it


def _drawn(launches: Iterable[Launch]) -> list[_Drawn]:
    """The launches of a stream by their start; one that overlaps the one ahead begins where that ends."""
    found: list[_Drawn] = []
    around: list[_Drawn] = []
    for launch in launches:
        one = _Drawn(launch, _ns(launch.start_s), _ns(launch.end_s))
        while around and around[-1].end <= one.start:
            around.pop()
        if around and one.end > around[-1].end:
            one.start = around.pop().end
        elif around:
            around[-1].is_leaf = False
        around.append(one)
        found.append(one)
    return found


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _args(launch: Launch, times: NodeTimes, graph: Graph | None, sites: Mapping[int, str]) -> dict[str, Any]:
    parts = times.nodes_of(launch.name, launch.hlo)
    found: dict[str, Any] = {"hlo": launch.hlo, "share_us": launch.share_s * 1e6}
    found["nodes"] = {f"n{i}": round(part, 6) for i, part in [*parts.items()][:_MOST_NODES]}
    if len(parts) > _MOST_NODES:
        found["more nodes"] = len(parts) - _MOST_NODES
    if here := list(dict.fromkeys(sites[i] for i in parts if i in sites)):
        found["site"] = ", ".join(here)
    node = _main(parts, graph)
    if node is not None:
        found |= {"primitive": node.primitive, "scope": place_of(node), "source": str(node.source or "")}
        found["backward"] = in_backward(node)
    return found


def _main(parts: Mapping[int, float], graph: Graph | None) -> Node | None:
    """The node that has most of a kernel."""
    return graph.node_by_id[max(parts, key=lambda i: parts[i])] if parts and graph is not None else None


def _scopes(pid: int, tid: int, drawn: Sequence[_Drawn], times: NodeTimes, graph: Graph | None) -> list[dict[str, Any]]:
    """Slices of scopes around consecutive kernels of a stream, nested as the scopes are, the outer ones first."""
    open_: list[tuple[str, int]] = []  # name, start
    found: list[dict[str, Any]] = []
    end = 0

    def close(depth: int) -> None:
        while len(open_) > depth:
            name, start = open_.pop()
            found.append(_slice(name, "scope", pid, tid, start, end, {}))

    for one in (one for one in drawn if one.is_leaf):
        node = _main(times.nodes_of(one.launch.name, one.launch.hlo), graph)
        path = [part for part in (place_of(node) if node is not None else "").split("/") if part]
        close(_shared(path, [name for name, _ in open_]))
        open_ += [(name, one.start) for name in path[len(open_) :]]
        end = one.end
    close(0)
    found.reverse()  # inner ones were closed first
    return sorted(found, key=lambda e: (e["ts"], -e["dur"]))


def _shared(path: Sequence[str], other: Sequence[str]) -> int:
    """How many first parts both have in common."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(path, other, strict=False)))


def _slice(name: str, cat: str, pid: int, tid: int, start: int, end: int, args: Any) -> dict[str, Any]:
    """A complete event, from its nanoseconds."""
    where = {"ph": "X", "name": name, "cat": cat, "pid": pid, "tid": tid}
    return where | {"ts": start / 1e3, "dur": (end - start) / 1e3, "args": args}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
