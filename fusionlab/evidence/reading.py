"""Reads the parts of a saved comparison back, those of older records too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors.arrays import Error
from .errors.numerics import LeafNumerics, Numerics
from .errors.rounding import Noise
from .instruments.clocks import Clocks
from .instruments.contention import Contention
from .instruments.memory import CompiledMemory, Memory
from .instruments.timing import OLDER_NAMES, WALL, Runs, Timing, Verdict


def read_timing(data: Mapping[str, Any] | None) -> Timing | None:
    """A timing as `asdict` gave it; None of None."""
    if data is None:
        return None

    def runs(d: Mapping[str, Any]) -> Runs:
        keys = ("name", "repeats", "trace_s", "lower_s", "compile_s")
        # Older records have neither.
        later_fields: dict[str, Any] = {
            "clock": d.get("clock", WALL),
            "cold": d.get("cold", False),
            "dispatch_s": d.get("dispatch_s"),
        }
        return Runs(samples_s=tuple(d["samples_s"]), **later_fields, **{k: d[k] for k in keys})

    low, high = (float(x) for x in data["interval"])
    return Timing(
        what=str(OLDER_NAMES.get(data["what"], data["what"])),
        before=runs(data["before"]),
        after=runs(data["after"]),
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
    plans = CompiledMemory(**data["before"]), CompiledMemory(**data["after"])
    peak = data.get("device_peak")  # records from before it was measured have none
    return Memory(*plans, data["hardware"], None if peak is None else (int(peak[0]), int(peak[1])))


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
        return LeafNumerics(shape=tuple(d["shape"]), noise=_read_noise(d.get("noise")), **parts)

    leaves = tuple(map(leaf, data["leaves"]))
    return Numerics(
        leaves, tuple(data["left_out"]), data["reduction_size"], tuple(data["notes"]), data.get("tf32", False)
    )


def _read_noise(data: Mapping[str, Any] | None) -> Noise | None:
    if data is None:
        return None
    counts = {k: int(data[k]) for k in ("runs", "over_tolerance")}
    return Noise(**counts, max_abs=float(data["max_abs"]), rel_l2=float(data["rel_l2"]))
