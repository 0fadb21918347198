"""The choice of a call's implementation: by measurements of this very call, or a rule.

`fuse` never measures. A call is looked up in the user's plan file (written by `fusionlab.tune`), then in the table shipped for the
architecture (`tables/sm_90.json`, written by `python -m benchmarks gemm_epilogue --table`); then the nearest call of the same kind that was
measured decides, and without one XLA's own code runs.

Where several processes run one program they must compile the same code, so that plan files of their own cannot decide: until they all have
called `Choices.share`, which gives them process 0's, only the tables do. A look-up is never a collective: one process may look alone.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ...errors import ArgumentError
from ...output import write_file
from ...processes import from_process_0
from ...showing import Shown
from ..launch.disk import locked, warn_once

FORMAT = 1
NEAR_GAIN = (
    0.1  # of XLA's time, where XLA would run a product as well: a gain of less at other sizes says nothing of these
)
TABLES = Path(__file__).parent / "tables"


@dataclass(frozen=True, repr=False)
class Choice(Shown):
    """The best implementation found for one call.

    Attributes:
      implementation: its name.
      times_us: device microseconds, medians, of each rival measured.
      settings: further choices (gemm_epilogue: `packed`).
      source: its origin, for a reader: "plan file ...", "the table for sm_90".
    """

    _says = "{0.implementation}: {0.reason}"

    implementation: str
    times_us: Mapping[str, float]
    settings: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

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
        return f"measured: {rivals} ({self.source})"

    def to_dict(self) -> dict[str, Any]:
        return {
            "implementation": self.implementation,
            "times_us": dict(self.times_us),
            "settings": dict(self.settings),
        }


@dataclass(frozen=True, repr=False)
class Measured(Shown):
    """The measurements of one architecture.

    Attributes:
      cases: text of a call (`case_text`) -> Choice.
      algorithms: name of a cuBLASLt plan -> (algorithm as hex, version of the library).
      device, versions: the measuring machine, for a reader.
    """

    _listed = "cases"
    _says = "measured choices"

    cases: Mapping[str, Choice] = field(default_factory=dict)
    algorithms: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    device: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    def with_more(self, other: Measured) -> Measured:
        """Both, `other` winning."""
        return Measured(
            {**self.cases, **other.cases},
            {**self.algorithms, **other.algorithms},
            other.device or self.device,
            {**self.versions, **other.versions},
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "versions": dict(self.versions),
            "cases": {text: case.to_dict() for text, case in sorted(self.cases.items())},
            "algorithms": {plan: list(algorithm) for plan, algorithm in sorted(self.algorithms.items())},
        }


def case_text(op: str, role: str, **content: Any) -> str:
    """A call as canonical text: op, role and everything that its speed depends on."""
    return json.dumps({"op": op, "role": role, **content}, sort_keys=True, separators=(",", ":"))


def plan_file() -> Path:
    """The file that `tune` writes and `fuse` reads: `$FUSIONLAB_PLAN_FILE`, or `~/.cache/fusionlab/plans.json`."""
    named = os.environ.get("FUSIONLAB_PLAN_FILE")
    return Path(named) if named else Path(os.path.expanduser("~")) / ".cache" / "fusionlab" / "plans.json"


class PlanFileError(ArgumentError):
    """A file in a plan file's place that cannot be read as one; `why` is the rest of the sentence about it."""

    def __init__(self, path: Path, error: str):
        self.why = f"is not a plan file that FusionLab can read ({error}); needed one from fusionlab.tune: tune again, or remove the file"
        super().__init__(f"{path} {self.why}")


def read_plan_file(path: Path, source: str) -> dict[str, Measured]:
    """Architecture -> its measurements, from a plan file or a table; empty if there is no such file.

    Raises:
      ArgumentError: the file is there and cannot be read as one.
    """
    try:
        return parse(path.read_text(encoding="utf-8"), source)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
        raise PlanFileError(path, f"{type(e).__name__}: {e}") from e


def parse(text: str, source: str) -> dict[str, Measured]:
    """The content of a plan file. Raises ValueError, LookupError or TypeError if it is not a plan file's."""
    data = json.loads(text)
    if data["format"] != FORMAT:
        raise ValueError(f"format {data['format']}, needed {FORMAT}")
    found = {}
    for arch, content in data["archs"].items():
        cases = {text: _parse_case(text, c, source) for text, c in content["cases"].items()}
        algorithms = {plan: (str(a), int(v)) for plan, (a, v) in content["algorithms"].items()}
        found[arch] = Measured(cases, algorithms, content["device"], content["versions"])
    return found


def _parse_case(text: str, content: Mapping[str, Any], source: str) -> Choice:
    """Errors in a case are raised when its file is read, not when a call is near the case."""
    name = content["implementation"]
    if not isinstance(json.loads(text), dict) or not isinstance(name, str):
        raise TypeError(f"{text!r} with implementation {name!r} is not a case")
    times = {rival: float(t) for rival, t in content["times_us"].items()}
    return Choice(name, times, dict(content["settings"]), source)


def write(path: Path, arch: str, more: Measured, rebuild: bool = False) -> Path:
    """Adds measurements to a plan file: completely or not at all, and without losing entries that another process adds at the same
    time.

    Args:
      rebuild: an existing file that is not a plan file is moved aside ("plans.json.damaged") with a warning, and a new one is begun.

    Raises:
      ArgumentError: the file exists and is not a plan file (not with `rebuild`).
      OutputError: it cannot be written.
    """
    with contextlib.suppress(OSError):  # write_file says why
        path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path):
        return _write(path, arch, more, rebuild)


def _write(path: Path, arch: str, more: Measured, rebuild: bool) -> Path:
    try:
        known = read_plan_file(path, "")
    except ArgumentError:
        if not (rebuild and path.is_file()):
            raise
        aside = path.with_name(f"{path.name}.damaged")
        with contextlib.suppress(OSError):  # then it is replaced: nothing could be read of it
            os.replace(path, aside)
        warn_once(
            path, f"was not a plan file that FusionLab can read; it was moved to {aside.name}, and a new one was begun"
        )
        known = {}
    known[arch] = known.get(arch, Measured()).with_more(more)
    data = {"format": FORMAT, "archs": {a: m.to_dict() for a, m in sorted(known.items())}}
    advice = "give a path you can write to, or set FUSIONLAB_PLAN_FILE"
    return write_file(path, json.dumps(data, indent=1) + "\n", folders=True, advice=advice, every_process=True)


@dataclass
class Choices:
    """The plan file and the tables, read when first asked and again when the plan file changes.

    Attributes:
      path: the plan file; None takes `plan_file()`, asked each time.
      trial: algorithms that `tune` is just trying, before all others.
      hits, misses: how often a call was found, and was not.
    """

    path: Path | None = None
    trial: dict[str, tuple[str, int]] = field(default_factory=dict)
    hits: int = 0
    misses: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _read: tuple[Any, dict[str, Measured]] = field(default=(None, {}), repr=False)
    _tables: dict[str, Measured] = field(default_factory=dict, repr=False)
    _shared: dict[str, Measured] | None = field(default=None, repr=False)

    def share(self) -> None:
        """Makes all processes of one program use process 0's plan file, as it is now, from here on.

        It is a collective: every process must call it, at the same point among its other collectives and outside of `jax.jit`.
        With one process there is nothing to share.

        Raises:
          ArgumentError: process 0's file exists and is not a plan file; raised in all processes. ProcessError: another process has
            ended.
        """
        if jax.process_count() > 1:
            shared = _from_process_0(self.path or plan_file())
            with self._lock:
                self._shared = shared

    @property
    def unshared(self) -> str:
        """Advice for one of several processes that do not share a plan file yet, so that none decides; else ""."""
        if jax.process_count() == 1 or self._shared is not None:
            return ""
        return "with several processes a plan file decides once all of them have called fusionlab.share_plan()"

    def lookup(self, arch: str, text: str) -> Choice | None:
        """The measurement of a call on an architecture ("sm_90")."""
        if not arch:
            return None
        with self._lock:
            found = self._known(arch).cases.get(text)
            self.hits, self.misses = self.hits + (found is not None), self.misses + (found is None)
            return found

    def nearest(
        self, arch: str, text: str, sizes: tuple[str, ...], within: float = 4.0, gain: float = 0.0
    ) -> Choice | None:
        """The measurement of the nearest call that differs only in `sizes`, each by at most the factor `within`; distance is the
        sum of the logarithms of the factors. Sizes that are a multiple of 8 and sizes that are not are never compared: kernels
        differ there. One that saves less than `gain` of XLA's time is not evidence for other sizes.
        """
        kind, asked = _parts(text, sizes)
        with self._lock:
            known = self._known(arch).cases
        near: list[tuple[float, tuple[int, ...], Choice]] = []
        for other, choice in known.items():
            its_kind, content = _parts(other, sizes)
            if its_kind == kind:
                near.append((_distance(list(zip(asked, content, strict=True)), within), content, choice))
        if not near:
            return None
        distance, found, best = min(near, key=lambda one: one[0])
        if distance == math.inf or best.gain < gain:
            return None
        shape = " x ".join(map(str, found))
        return replace(best, source=f"{best.source}, at {shape}, the nearest measured")

    def algorithm(self, arch: str, plan: str) -> tuple[str, int] | None:
        """The algorithm found best for a cuBLASLt plan (by name), and the version of the library that named it."""
        with self._lock:
            return self.trial.get(plan) or self._known(arch).algorithms.get(plan)

    def counters(self) -> dict[str, int]:
        with self._lock:
            return {"hits": self.hits, "misses": self.misses}

    def forget(self) -> None:
        """Reads the plan file again when next asked."""
        with self._lock:
            self._read = (None, {})

    def _known(self, arch: str) -> Measured:
        """The plan file's content before the table's."""
        return self._table(arch).with_more(self._mine(arch))

    def _mine(self, arch: str) -> Measured:
        if jax.process_count() > 1:
            return (self._shared or {}).get(arch, Measured())
        path = self.path or plan_file()
        stamp = (path, _stamp(path))
        if self._read[0] != stamp:
            self._read = (stamp, _read_or_warn(path))
        return self._read[1].get(arch, Measured())

    def _table(self, arch: str) -> Measured:
        if arch not in self._tables:
            self._tables[arch] = read_plan_file(TABLES / f"{arch}.json", f"the table for {arch}").get(arch, Measured())
        return self._tables[arch]


def _read_or_warn(path: Path) -> dict[str, Measured]:
    """A plan file as a cache: one that cannot be read must not stop a program."""
    try:
        return read_plan_file(path, f"plan file {path}")
    except PlanFileError as error:
        warn_once(path, f"is ignored, and the shipped tables decide: it {error.why}")
        return {}


@functools.lru_cache(maxsize=4096)  # a table's cases are gone through at each look-up
def _parts(text: str, sizes: tuple[str, ...]) -> tuple[str, tuple[int, ...]]:
    """A call without its sizes, as text; and those."""
    content = json.loads(text)
    found = tuple(int(content.pop(name, 0)) for name in sizes)
    return json.dumps(content, sort_keys=True), found


def _distance(pairs: list[tuple[int, int]], within: float) -> float:
    total = 0.0
    for a, b in pairs:
        if a == b:
            continue
        if not (a and b) or (a % 8 == 0) != (b % 8 == 0) or max(a, b) > within * min(a, b):
            return math.inf
        total += abs(math.log(a / b))
    return total


def _stamp(path: Path) -> Any:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _from_process_0(path: Path) -> dict[str, Measured]:
    """The plan file that process 0 reads, in every process; a collective."""
    try:
        mine = path.read_bytes() if jax.process_index() == 0 and path.is_file() else b""
    except OSError as error:
        mine = f"unreadable: {error}".encode()  # no plan file to any process: all raise, none is left waiting
    size = int(from_process_0(np.int32(len(mine)), "share_plan"))
    if not size:
        return {}
    padded = np.zeros(size, np.uint8)
    padded[: len(mine)] = np.frombuffer(mine, np.uint8)
    content = bytes(from_process_0(padded, "share_plan"))
    try:
        return parse(content.decode(), "the plan file of process 0")  # its path means nothing in the others
    except (ValueError, LookupError, TypeError, AttributeError) as e:
        raise ArgumentError(f"the plan file of process 0 cannot be read ({e}); tune again, or remove the file") from e


CHOICES = Choices()
