"""A run of a program in the Trace Event Format, which https://ui.perfetto.dev and chrome://tracing open.

Source: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: complete events ("X")
with `ts` and `dur` in microseconds, and metadata events ("M") with the names of processes and threads.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Mapping
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
    streams = {stream: 2 * k + 2 for k, stream in enumerate(sorted({x.stream for x in run.launches}))}
    yield _named("process_name", pid, 0, version)
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    yield _named("thread_name", pid, 0, "run")
    yield _slice(version, "run", pid, 0, 0.0, run.whole_s, {"busy_us": run.busy_s * 1e6})
    for stream, tid in streams.items():
        yield _named("thread_name", pid, tid - 1, _SCOPES + stream)
        yield _named("thread_name", pid, tid, stream)
        yield from _scopes(pid, tid - 1, [x for x in run.launches if x.stream == stream], times, graph)
    seen: Counter[tuple[str, str]] = Counter()
    for launch in run.launches:
        seen[launch.name, launch.hlo] += 1
        told = _args(launch, times, graph, sites or {}) | {"launch": seen[launch.name, launch.hlo]}
        tid = streams[launch.stream]
        yield _slice(launch.name, "kernel", pid, tid, launch.start_s, launch.end_s - launch.start_s, told)


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


def _scopes(
    pid: int, tid: int, launches: list[Launch], times: NodeTimes, graph: Graph | None
) -> Iterator[dict[str, Any]]:
    """Slices of scopes around consecutive kernels of a stream, nested as the scopes are."""
    open_: list[tuple[str, float]] = []  # name, start
    end = 0.0
    for launch in sorted(launches, key=lambda x: x.start_s):
        node = _main(times.nodes_of(launch.name, launch.hlo), graph)
        path = (place_of(node) if node is not None else "").split("/")
        same = 0
        while same < min(len(open_), len(path)) and open_[same][0] == path[same]:
            same += 1
        while len(open_) > same:
            name, start = open_.pop()
            yield _slice(name, "scope", pid, tid, start, end - start, {})
        begin = max(launch.start_s, end)
        open_ += [(name, begin) for name in path[same:] if name]
        end = max(end, launch.end_s)
    while open_:
        name, start = open_.pop()
        yield _slice(name, "scope", pid, tid, start, end - start, {})


def _slice(name: str, cat: str, pid: int, tid: int, start_s: float, dur_s: float, args: Any) -> dict[str, Any]:
    where = {"ph": "X", "name": name, "cat": cat, "pid": pid, "tid": tid}
    return where | {"ts": round(start_s * 1e6, 3), "dur": round(dur_s * 1e6, 3), "args": args}


def _named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
