"""Plan files: measurements as JSON, in sets, each of one card, driver and library versions.

A file is sorted and complete, so that it can be kept in a repository and reviewed line by line. Two files merge: sets of the same card and
versions become one, in which the shorter time of each implementation counts, as interference only makes a measurement longer. The
tables that are shipped (`tables/sm_90.json`) have the same form.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...device import DATA_SHEETS, Device, card_in
from ...errors import ArgumentError
from ...output import write_file
from ...showing import Shown
from ..launch.disk import locked, warn_once

FORMAT = 2  # 1 had one set for each architecture, without the driver's version
MIN_GAIN = 0.01  # of the time: less is no reason to leave XLA's own code
VERSIONS = ("driver", "cuda", "cudnn", "cublaslt", "jax", "jaxlib", "fusionlab")  # on which a time depends


@dataclass(frozen=True, repr=False)
class Choice(Shown):
    """The best implementation found for one call.

    Attributes:
      implementation: its name.
      times_us: device microseconds, medians, of each rival measured.
      settings: further choices (gemm_epilogue: `packed`).
      source: its origin, for a reader: "plan file ...", "the table for sm_90".
      stale: with which other versions it was measured ("driver 570.1, here 580.2"); "" where they are this process's.
      samples_us: of each rival the device microseconds that its median is of, in the order taken; empty where they were not kept.
    """

    _says = "{0.implementation}: {0.reason}"

    implementation: str
    times_us: Mapping[str, float]
    settings: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    stale: str = ""
    samples_us: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        """The share of XLA's time that it saves; all of it where XLA was found best, or was not measured."""
        if self.implementation == "xla" or "xla" not in self.times_us:
            return 1.0
        return 1.0 - self.times_us.get(self.implementation, math.inf) / self.times_us["xla"]

    @property
    def reason(self) -> str:
        """The measured times in microseconds, fastest first, and where they were measured."""
        rivals = ", ".join(f"{name} {t:.4g} µs" for name, t in sorted(self.times_us.items(), key=lambda i: i[1]))
        return f"measured: {rivals} ({self.source}{f'; stale: {self.stale}' if self.stale else ''})"

    def to_dict(self) -> dict[str, Any]:
        samples = {n: [float(f"{t:.4g}") for t in taken] for n, taken in sorted(self.samples_us.items())}
        return {
            "implementation": self.implementation,
            "times_us": dict(sorted(self.times_us.items())),
            "settings": dict(sorted(self.settings.items())),
        } | ({"samples_us": samples} if samples else {})

    def merged(self, other: Choice) -> Choice:
        """Of two measurements of one call: the shorter time of each implementation, and the choice by these."""
        times = {n: min(t, other.times_us.get(n, t)) for n, t in {**other.times_us, **self.times_us}.items()}
        first = min(self, other, key=lambda c: (min(c.times_us.values(), default=math.inf), json.dumps(c.to_dict())))
        samples = {n: (self if self.times_us.get(n) == t else other).samples_us.get(n, ()) for n, t in times.items()}
        return replace(
            first,
            times_us=times,
            implementation=quickest(times) if "xla" in times else first.implementation,
            samples_us={n: taken for n, taken in samples.items() if taken},
        )


def quickest(times: Mapping[str, float]) -> str:
    """The implementation with the least time; "xla" where that is less than `MIN_GAIN` longer."""
    name = min(times, key=lambda n: times[n])
    return "xla" if times["xla"] <= times[name] * (1 + MIN_GAIN) else name


@dataclass(frozen=True, repr=False)
class Measured(Shown):
    """A set of measurements, made on one card with one driver and one version of each library.

    Attributes:
      cases: text of a call (`case_text`) -> Choice.
      algorithms: name of a cuBLASLt plan -> (algorithm as hex, version of the library).
      device: the card ("NVIDIA H200").
      versions: "driver" and the libraries -> version.
      memory: of the card, in bytes; None where unknown.
    """

    _listed = "cases"
    _says = "measured choices"

    cases: Mapping[str, Choice] = field(default_factory=dict)
    algorithms: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    device: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    memory: int | None = None

    @classmethod
    def here(cls, device: Device, cases: Mapping[str, Choice], algorithms: Mapping[str, tuple[str, int]]) -> Measured:
        """A set of this process's device."""
        return cls(cases, algorithms, device.name, versions_of(device), device.memory)

    @property
    def origin(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        """The card and the versions: what one set has in common."""
        return self.device, tuple(sorted(self.versions.items()))

    def with_more(self, other: Measured) -> Measured:
        """Both, `other` winning."""
        return Measured(
            {**self.cases, **other.cases},
            {**self.algorithms, **other.algorithms},
            other.device or self.device,
            {**self.versions, **other.versions},
            other.memory or self.memory,
        )

    def merged(self, other: Measured) -> Measured:
        """Both, each call as `Choice.merged` has it; of two algorithms for one plan, the one the newer library named."""
        cases = {
            t: c.merged(other.cases[t]) if t in other.cases else c for t, c in {**other.cases, **self.cases}.items()
        }
        named = [*self.algorithms.items(), *other.algorithms.items()]
        algorithms = dict(sorted(named, key=lambda item: (item[1][1], item[1][0])))
        return replace(self, cases=cases, algorithms=algorithms, memory=self.memory or other.memory)

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "memory": self.memory,
            "versions": dict(sorted(self.versions.items())),
            "cases": {text: case.to_dict() for text, case in sorted(self.cases.items())},
            "algorithms": {plan: list(algorithm) for plan, algorithm in sorted(self.algorithms.items())},
        }


Sets = dict[str, tuple[Measured, ...]]  # architecture -> its sets of measurements


def case_text(op: str, role: str, **content: Any) -> str:
    """A call as canonical text: op, role and everything that its speed depends on."""
    return json.dumps({"op": op, "role": role, **content}, sort_keys=True, separators=(",", ":"))


def plan_file() -> Path:
    """The file that `tune` writes and `fuse` reads: `$FUSIONLAB_PLAN_FILE`, or `~/.cache/fusionlab/plans.json`."""
    named = os.environ.get("FUSIONLAB_PLAN_FILE")
    return Path(named) if named else Path(os.path.expanduser("~")) / ".cache" / "fusionlab" / "plans.json"


# Cards and versions --------------------------------------------------------------------------------------------------


def versions_of(device: Device) -> dict[str, str]:
    """The versions on which times on this process's device depend, those that are known."""
    known = {"driver": device.driver, "cuda": device.runtime, "cudnn": device.cudnn, "cublaslt": device.cublaslt}
    return {name: v for name, v in (known | _libraries()).items() if v}


@functools.cache
def _libraries() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in ("jax", "jaxlib", "fusionlab"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def is_of(measured: Measured, device: Device) -> bool:
    """Whether a set of the device's architecture was measured on such a card: by its name, for a simulated device by the card in it."""
    if measured.device in ("", device.name):
        return True
    if not device.simulated:
        return False
    return not device.card or card_in(measured.device) == device.card


def has_its_chip(measured: Measured, device: Device) -> bool:
    """Whether a set may be of a card with the device's chip: the data sheets of both give one rate of products, or one is not known."""
    rates = [DATA_SHEETS.get(card) for card in (card_in(measured.device), device.card)]
    return None in rates or len({rate[1] for rate in rates if rate is not None}) == 1


def staleness(measured: Measured, device: Device) -> str:
    """The versions that differ from this process's ("driver 570.1, here 580.2"); "" if none does, or the device is simulated."""
    if device.simulated:
        return ""
    here = versions_of(device)
    pairs = ((n, measured.versions.get(n, "not recorded"), here[n]) for n in VERSIONS if n in here)
    return ", ".join(f"{name} {then}, here {now}" for name, then, now in pairs if then != now)


def _age(measured: Measured) -> Any:
    """By which sets are sorted: the newest versions last."""
    numbers = {name: [int(n) for n in re.findall(r"\d+", v)] for name, v in measured.versions.items()}
    return [
        numbers.get(name, []) for name in ("fusionlab", "jax", "jaxlib", "driver", "cudnn", "cublaslt")
    ], measured.origin


# Files ---------------------------------------------------------------------------------------------------------------


class PlanFileError(ArgumentError):
    """A file in a plan file's place that cannot be read as one; `why` is the rest of the sentence about it."""

    def __init__(self, path: Path, error: str):
        self.why = f"is not a plan file that FusionLab can read ({error}); needed one from fusionlab.tune: tune again, or remove the file"
        super().__init__(f"{path} {self.why}")


def read_sets(path: Path, source: str) -> Sets:
    """The sets of a plan file or a table, the newest versions last; empty if there is no such file.

    Raises:
      ArgumentError: the file is there and cannot be read as one.
    """
    try:
        return parse(path.read_text(encoding="utf-8"), source)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
        raise PlanFileError(path, f"{type(e).__name__}: {e}") from e


def read_plan_file(path: Path, source: str) -> dict[str, Measured]:
    """Architecture -> all its measurements, of whatever card and versions; raises as `read_sets`."""
    return {arch: union(sets) for arch, sets in read_sets(path, source).items()}


def union(sets: Iterable[Measured]) -> Measured:
    """All measurements, of each call that of the last set that has it."""
    return functools.reduce(Measured.with_more, sets, Measured())


def parse(text: str, source: str) -> Sets:
    """The content of a plan file. Raises ValueError, LookupError or TypeError if it is not a plan file's."""
    data = json.loads(text)
    if data["format"] not in (1, FORMAT):
        raise ValueError(f"format {data['format']}, needed 1 to {FORMAT}")
    found = {}
    for arch, content in data["archs"].items():
        sets = [_parse_set(one, source) for one in ([content] if data["format"] == 1 else content)]
        found[arch] = tuple(sorted(sets, key=_age))
    return found


def _parse_set(content: Mapping[str, Any], source: str) -> Measured:
    cases = {text: _parse_case(text, c, source) for text, c in content["cases"].items()}
    algorithms = {plan: (str(a), int(v)) for plan, (a, v) in content["algorithms"].items()}
    memory, versions = content.get("memory"), {str(k): str(v) for k, v in content["versions"].items()}
    return Measured(cases, algorithms, str(content["device"]), versions, None if memory is None else int(memory))


def _parse_case(text: str, content: Mapping[str, Any], source: str) -> Choice:
    """Errors in a case are raised when its file is read, not when a call is near the case."""
    name, call = content["implementation"], json.loads(text)
    if not isinstance(call, dict) or "op" not in call or not isinstance(name, str):
        raise TypeError(f"{text!r} with implementation {name!r} is not a case")
    times = {rival: float(t) for rival, t in content["times_us"].items()}
    samples = {rival: tuple(map(float, taken)) for rival, taken in content.get("samples_us", {}).items()}
    return Choice(name, times, dict(content["settings"]), source, samples_us=samples)


def write(path: Path, arch: str, more: Measured, rebuild: bool = False) -> Path:
    """Adds measurements to a plan file: completely or not at all, and without losing entries that another process adds at the same
    time. They replace those of the same calls, card and versions; sets of other cards and versions stay.

    Args:
      rebuild: an existing file that is not a plan file is moved aside ("plans.json.damaged") with a warning, and a new one is begun.

    Raises:
      ArgumentError: the file exists and is not a plan file (not with `rebuild`).
      OutputError: it cannot be written.
    """
    with _held(path):
        known = _known(path, rebuild)
        known[arch] = _added(known.get(arch, ()), more, Measured.with_more)
        return _written(path, known)


def merge(paths: Sequence[Path], into: Path) -> Path:
    """Adds the plan files `paths` to the plan file `into`, which may be new; raises as `write`, and if one of `paths` does not exist."""
    given = [existing(path) for path in paths]
    return join(into, ((arch, one) for sets in given for arch, ones in sets.items() for one in ones))


def existing(path: Path) -> Sets:
    """The sets of a plan file that has to exist; raises as `read_sets`, and if it does not."""
    if not path.exists():
        raise ArgumentError(f"{path} does not exist, needed a plan file from fusionlab.tune")
    return read_sets(path, "")


def join(into: Path, sets: Iterable[tuple[str, Measured]]) -> Path:
    """Adds sets, each with its architecture, to the plan file `into`, which may be new; raises as `write`."""
    with _held(into):
        known = _known(into, rebuild=False)
        for arch, one in sets:
            known[arch] = _added(known.get(arch, ()), one, Measured.merged)
        return _written(into, known)


@contextlib.contextmanager
def _held(path: Path) -> Any:
    with contextlib.suppress(OSError):  # write_file gives the reason
        path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path):
        yield


def _added(sets: Sequence[Measured], more: Measured, joined: Any) -> tuple[Measured, ...]:
    """The sets with one more, joined to the one of its card and versions."""
    by_origin = {one.origin: one for one in sets}
    by_origin[more.origin] = joined(by_origin[more.origin], more) if more.origin in by_origin else more
    return tuple(by_origin.values())


def _known(path: Path, rebuild: bool) -> Sets:
    try:
        return read_sets(path, "")
    except ArgumentError:
        if not (rebuild and path.is_file()):
            raise
        aside = path.with_name(f"{path.name}.damaged")
        with contextlib.suppress(OSError):  # then it is replaced: nothing could be read of it
            os.replace(path, aside)
        warn_once(
            path, f"was not a plan file that FusionLab can read; it was moved to {aside.name}, and a new one was begun"
        )
        return {}


def _written(path: Path, known: Sets) -> Path:
    archs = {arch: [one.to_dict() for one in sorted(sets, key=_age)] for arch, sets in sorted(known.items())}
    advice = "give a path you can write to, or set FUSIONLAB_PLAN_FILE"
    text = json_text({"format": FORMAT, "archs": archs})
    return write_file(path, text, folders=True, advice=advice, every_process=True)


def json_text(content: Mapping[str, Any]) -> str:
    """JSON with an entry in each line, and each list of plain values in one."""
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    plain = re.compile(r"\[\n[^\[\]{}]*\]")
    return plain.sub(lambda found: re.sub(r"\n\s*", "", re.sub(r",\n\s*", ", ", found[0])), text)
