"""Reads the parts of a saved comparison back, those of older records too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .errors.arrays import Error
from .errors.numerics import LeafNumerics, Numerics
from .errors.rounding import Noise
from .instruments.clocks import Clocks
from .instruments.contention import Contention
from .instruments.memory import CompiledMemory, Memory
from .instruments.peak_buffers import PeakBuffers
from .instruments.timing import OLDER_NAMES, WALL, Runs, Timing, Verdict


def read_runs(data: Mapping[str, Any]) -> Runs:
    """Samples as `asdict` gave them."""
    keys = ("name", "repeats", "trace_s", "lower_s", "compile_s")
    # Older records have none of these.
    later_fields: dict[str, Any] = {
        "clock": data.get("clock", WALL),
        "cold": data.get("cold", False),
        "dispatch_s": data.get("dispatch_s"),
    }
    return Runs(samples_s=tuple(data["samples_s"]), **later_fields, **{k: data[k] for k in keys})


def read_timing(data: Mapping[str, Any] | None) -> Timing | None:
    """A timing as `asdict` gave it; None of None."""
    if data is None:
        return None
    low, high = (float(x) for x in data["interval"])
    return Timing(
        what=str(OLDER_NAMES.get(data["what"], data["what"])),
        before=read_runs(data["before"]),
        after=read_runs(data["after"]),
        ratio=data["ratio"],
        interval=(low, high),
        verdict=Verdict(data["verdict"]),
        hardware=data["hardware"],
        stopped=data["stopped"],
        clocks=tuple(Clocks(**c | {"throttled": tuple(c["throttled"])}) for c in data.get("clocks", ())),
        contention=Contention(**data["contention"]) if data.get("contention") else None,
    )


def read_memory(data: Mapping[str, Any] | None) -> Memory | None:
    """Compiled memory as `asdict` gave it; None of None."""
    if data is None:
        return None
    plans = _read_plan(data["before"]), _read_plan(data["after"])
    peak = data.get("device_peak")  # records from before it was measured have none
    return Memory(*plans, data["hardware"], None if peak is None else (int(peak[0]), int(peak[1])))


def _read_plan(data: dict[str, Any]) -> CompiledMemory:
    plan = CompiledMemory(**data)
    # Older records have no buffers.
    return replace(plan, buffers=PeakBuffers.from_dict(data["buffers"])) if data.get("buffers") else plan


def read_numerics(data: Mapping[str, Any] | None) -> Numerics | None:
    """Errors as `asdict` gave them; None of None."""
    if data is None:
        return None

    def error(d: Mapping[str, Any]) -> Error:
        whole = {"over_tolerance": d["over_tolerance"], "nonfinite_mismatch": d["nonfinite_mismatch"]}
        lists: dict[str, Any] = {
            "worst_index": tuple(d["worst_index"]),
            "ulp_histogram": tuple(d.get("ulp_histogram", ())),
        }
        floats = {k: None if v is None else float(v) for k, v in d.items() if k not in (*whole, *lists)}
        return Error(**floats, **whole, **lists)

    def leaf(d: Mapping[str, Any]) -> LeafNumerics:
        parts: dict[str, Any] = {k: d[k] for k in ("name", "kind", "dtype", "size", "rtol", "atol")}
        parts |= {k: error(d[k]) for k in ("before", "after", "between")}
        parts |= {"zero_in_theory": d.get("zero_in_theory", False)}
        parts |= {k: d.get(k, 0) for k in ("filled", "filled_rows")}
        parts |= {"scale_limit": d.get("scale_limit", 0.0), "noise": _read_noise(d.get("noise"))}
        return LeafNumerics(shape=tuple(d["shape"]), **parts)

    leaves = tuple(map(leaf, data["leaves"]))
    return Numerics(
        leaves, tuple(data["left_out"]), data["reduction_size"], tuple(data["notes"]), data.get("tf32", False)
    )


def _read_noise(data: Mapping[str, Any] | None) -> Noise | None:
    if data is None:
        return None
    counts = {k: int(data[k]) for k in ("runs", "over_tolerance")}
    return Noise(**counts, max_abs=float(data["max_abs"]), rel_l2=float(data["rel_l2"]))
