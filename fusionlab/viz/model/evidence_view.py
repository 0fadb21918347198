"""A measured comparison as plain data, and as the few words a header can hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fusionlab.evidence.comparison import Evidence
from fusionlab.evidence.errors.numerics import LeafNumerics, Numerics, share_text
from fusionlab.evidence.instruments.memory import Memory
from fusionlab.evidence.instruments.timing import Timing, seconds
from fusionlab.evidence.units import binary_bytes
from fusionlab.graph.xla.collectives import bytes_text

_MANY_ULP = 1_000_000

EvidenceTable = tuple[str, list[str], list[list[Any]], tuple[int, ...]]


def timings_of(evidence: Evidence | Timing) -> tuple[Timing, ...]:
    """All timings of an Evidence (forward, and forward + backward); a Timing counts as one."""
    return (evidence,) if isinstance(evidence, Timing) else evidence.timings


def numerics_of(evidence: Evidence | Numerics) -> Numerics | None:
    """The errors of an Evidence; a Numerics is returned as it is."""
    return evidence if isinstance(evidence, Numerics) else evidence.numerics


def timing_text(timing: Timing) -> str:
    """The terminal's line with a screen's signs: "call: 21.5 ms → 11.4 ms, 1.89× [1.87, 1.91], faster (median of …)"."""
    return timing.text.replace(" -> ", " → ").replace("x [", "× [")


def headline(measured: Mapping[str, Any] | None, brief: bool = False) -> str:
    """Before → after with its interval, and the worst error with its share of the tolerance; or that nothing was measured.

    `brief` leaves out how many samples there are, and the clock.
    """
    if measured is None:
        return "not measured"
    parts = [t["text"].partition(" (")[0] if brief else t["text"] for t in measured["timing"]] or [measured["verdict"]]
    parts += [measured["worst"]]
    if (n := measured["regressions"]) > 0:
        parts.append(f"{n} result{'s' if n > 1 else ''} WORSE than before and over tolerance")
    return " · ".join(p for p in parts if p)


def evidence_dict(evidence: Evidence | None) -> dict[str, Any] | None:
    """The measurement as plain data: every number the tables show; samples stay with the evidence itself."""
    if evidence is None:
        return None
    numerics = evidence.numerics
    leaves = numerics.leaves if numerics is not None else ()
    return {
        "timing": [_timing_dict(t) for t in evidence.timings],
        "verdict": str(evidence.verdict),
        "errors": [_leaf_dict(leaf) for leaf in (numerics.ranked if numerics is not None else ())],
        "worst": numerics.sentence if numerics is not None and leaves else "",
        "regressions": len(numerics.regressions) if numerics is not None else 0,
        "notes": list(evidence.all_notes),
        "memory": [{"what": call, **_memory_dict(m)} for call, m in evidence.memories],
        "devices": _devices_dict(evidence),
        "environment": environment_dict(evidence),
    }


def _memory_dict(memory: Memory) -> dict[str, Any]:
    """What the compiler planned; the buffers stay with the evidence itself."""
    plans = {v.name: dataclasses.replace(v, buffers=None) for v in (memory.before, memory.after)}
    return dataclasses.asdict(dataclasses.replace(memory, **plans))


def _devices_dict(evidence: Evidence) -> dict[str, Any] | None:
    over = evidence.devices
    if over is None:
        return None
    rows = [[c.what, kind, *c.of(kind)] for c in over.collectives for kind in c.kinds]
    return {
        "place": over.place,
        "collectives": [
            [call, kind, b.count, a.count, bytes_text(b.bytes), bytes_text(a.bytes)] for call, kind, b, a in rows
        ],
        "device_s": {version: dict(times) for version, times in over.device_s.items()},
    }


def measured_on(evidence: Evidence) -> str:
    """The hardware, and the devices with their mesh where there are several."""
    over = evidence.devices
    return evidence.environment.hardware + (f": {over.place}" if over is not None else "")


def environment_dict(evidence: Evidence | None) -> dict[str, Any]:
    """The environment of an Evidence, flat: name -> value; empty values left out."""
    flat: dict[str, Any] = {}
    for name, value in (evidence.environment.to_dict() if evidence is not None else {}).items():
        label = "commit of the current folder's repository" if name == "commit" else name.replace("_", " ")
        flat |= value if isinstance(value, dict) else {label: value}
    return {k: v for k, v in flat.items() if v not in ("", None)}


def _timing_dict(timing: Timing) -> dict[str, Any]:
    return {
        "what": timing.what,
        "text": timing_text(timing),
        "ratio": timing.ratio,
        "interval": list(timing.interval),
        "verdict": str(timing.verdict),
        "hardware": timing.hardware,
        "stopped": timing.stopped,
        "runs": [
            {
                "name": run.name,
                "median_s": run.median_s,
                "quartiles_s": list(run.quartiles_s),
                "min_s": run.min_s,
                "samples": len(run.samples_s),
                "repeats": run.repeats,
                "compile_s": run.compile_s,
            }
            for run in (timing.before, timing.after)
        ],
    }


def _leaf_dict(leaf: LeafNumerics) -> dict[str, Any]:
    keys = ("max_abs", "rel_l2", "ulp_max", "over_tolerance", "nonfinite_mismatch")
    return {
        "name": leaf.name,
        "kind": leaf.kind,
        "type": f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]",
        "size": leaf.size,
        "atol": leaf.atol,
        "rtol": leaf.rtol,
        "ok": leaf.ok,
        "zero_in_theory": leaf.zero_in_theory,
        "before": {k: getattr(leaf.before, k) for k in keys} | {"share": share_text(leaf.shares[0])},
        "after": {k: getattr(leaf.after, k) for k in keys} | {"share": share_text(leaf.shares[1])},
    }


def evidence_tables(measured: Mapping[str, Any] | None) -> list[EvidenceTable]:
    """The measurement as tables: (name, heads, rows, indices of numeric columns)."""
    if measured is None:
        return []
    tables: list[EvidenceTable] = []
    if measured["timing"]:
        tables.append(_timing_table(measured["timing"]))
    if measured["errors"]:
        tables.append(_error_table(measured["errors"]))
    if measured["memory"]:
        tables.append(_memory_table(measured["memory"]))
    if measured.get("devices") is not None:
        tables += _device_tables(measured["devices"])
    return tables


def _memory_table(memories: list[dict[str, Any]]) -> EvidenceTable:
    heads = ["what", "version", "peak", "temporaries", "arguments", "results"]
    rows = [
        [m["what"], version, *(binary_bytes(m[version][k]) for k in ("peak", "temp", "argument", "output"))]
        for m in memories
        for version in ("before", "after")
    ]
    return "Compiled memory", heads, rows, (2, 3, 4, 5)


def _device_tables(over: Mapping[str, Any]) -> list[EvidenceTable]:
    """The collectives of each kind, and the time of each device where that was measured."""
    rows = over["collectives"] or [["every call", "none", 0, 0, "0 B", "0 B"]]
    heads = ["what", "kind", "runs before", "runs after", "bytes of a device before", "bytes of a device after"]
    tables: list[EvidenceTable] = [("Collectives", heads, rows, (2, 3, 4, 5))]
    before, after = (over["device_s"].get(version, {}) for version in ("before", "after"))
    if before:
        times = [[f"device {i}", seconds(s), seconds(after[i]) if i in after else ""] for i, s in before.items()]
        tables.append(("Time of each device", ["device", "before", "after"], times, (1, 2)))
    return tables


def _timing_table(timings: list[dict[str, Any]]) -> EvidenceTable:
    heads = [
        "what",
        "version",
        "median",
        "quartiles",
        "samples × calls",
        "compile",
        "ratio [95 % interval]",
        "verdict",
    ]
    rows = []
    for t in timings:
        low, high = t["interval"]
        for run in t["runs"]:
            last = run is t["runs"][-1]
            rows.append(
                [
                    t["what"],
                    run["name"],
                    seconds(run["median_s"]),
                    " – ".join(seconds(q) for q in run["quartiles_s"]),
                    f"{run['samples']} × {run['repeats']}",
                    seconds(run["compile_s"]),
                    f"{t['ratio']:.2f}× [{low:.2f}, {high:.2f}]" if last else "",
                    t["verdict"] if last else "",
                ]
            )
    return "Timing", heads, rows, (2, 3, 4, 5)


_ERRORS = ("share of tolerance", "max abs", "rel L2", "largest ulp", "over tolerance")


def _error_table(errors: list[dict[str, Any]]) -> EvidenceTable:
    heads = [
        "result",
        "type",
        *(f"{what} {version}" for what in _ERRORS for version in ("before", "after")),
        "verdict",
    ]
    rows = []
    for e in errors:
        cells = [e[version]["share"] for version in ("before", "after")]
        cells += [f"{e[version]['max_abs']:.2e}" for version in ("before", "after")]
        if e["zero_in_theory"]:  # what is there is rounding: relative to the result it may be of any size
            cells += ["zero in theory", "", "", ""]
        else:
            cells += [f"{e[version]['rel_l2']:.2e}" for version in ("before", "after")]
            cells += [_ulp_text(e[version]["ulp_max"]) for version in ("before", "after")]
        rows.append(
            [
                f"{'gradient ' if e['kind'] == 'gradient' else ''}{e['name']}",
                (e["type"], "mono"),
                *cells,
                e["before"]["over_tolerance"],
                e["after"]["over_tolerance"],
                "ok" if e["ok"] else ("WORSE", "warn"),
            ]
        )
    return "Errors", heads, rows, tuple(range(2, 12))


def _ulp_text(ulp: float) -> str:
    """Where sums cancel, an element may be many powers of ten away in ulp; the exact number is meaningless."""
    return f"{ulp:.3g}" if ulp < _MANY_ULP else f"over {_MANY_ULP:,}"
