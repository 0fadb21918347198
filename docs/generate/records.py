"""The records of benchmarks/results: which there are, on which device each was made, and the numbers in them."""

from __future__ import annotations

import functools
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusionlab.commands.demo import mebibytes
from fusionlab.evidence.instruments.timing import ratio_interval, seconds

from .markdown import ROOT, link_to_file

RESULTS = ROOT / "benchmarks" / "results"
CARDS = ("h200", "h100", "cpu")
NONE = "–"


@dataclass(frozen=True)
class Record:
    """One record: the file, and the data in it."""

    path: Path
    data: Mapping[str, Any]

    @functools.cached_property
    def environment(self) -> Mapping[str, Any]:
        return self.data.get("environment", {})

    @property
    def command(self) -> str:
        command = self.data.get("command") or ("fusionlab demo -o demo" if self.path.stem == "demo" else "")
        return re.sub(r" -o \S+\.json", "", command)  # where the record was written to

    @property
    def benchmark(self) -> str:
        """The benchmark that wrote it: `python -m benchmarks NAME`."""
        named = re.search(r"-m benchmarks (\w+)", self.command)
        return named[1] if named else self.data.get("benchmark", self.path.stem)

    @property
    def time(self) -> str:
        return self.environment.get("time", "")

    @property
    def versions(self) -> str:
        """The device and the versions: "NVIDIA H200, JAX 0.11.2, CUDA 13.0, torch 2.11.0, Python 3.12.3"."""
        versions = self.environment.get("versions", {})
        cuda = re.fullmatch(r"cuda (\d+)0(\d)0", self.environment.get("driver", ""))
        parts = [
            self.environment.get("hardware", ""),
            f"JAX {versions['jax']}" if "jax" in versions else "",
            f"CUDA {cuda[1]}.{cuda[2]}" if cuda else "",
            f"torch {versions['torch']}" if "torch" in versions else "",
            f"Python {versions['python']}" if "python" in versions else "",
        ]
        return ", ".join(filter(None, parts))

    def link(self, page: Path, text: str = "record") -> str:
        return link_to_file(self.path, page, text)

    def origin(self, page: Path) -> str:
        """Device, versions, date, command and link, in a line."""
        command = f"; `{self.command}`" if self.command else ""
        return f"{self.versions}; measured on {self.time[:10]}{command} ({self.link(page)})."


@functools.cache
def records_of(card: str) -> tuple[Record, ...]:
    """The records of a card, by name."""
    paths = sorted((RESULTS / card).glob("*.json"))
    return tuple(Record(path, json.loads(path.read_text(encoding="utf-8"))) for path in paths)


def newest(card: str, benchmark: str, case: str = "") -> Record:
    """The record of a benchmark that was made last, of those with a `case` if it is given.

    Raises:
      LookupError: there is none.
    """
    found = [record for record in records_of(card) if record.benchmark == benchmark]
    found = [record for record in found if not case or case in record.data["cases"]]
    if not found:
        raise LookupError(f"benchmarks/results/{card} has no record of {benchmark}")
    return max(found, key=lambda record: record.time)


def at(data: Any, path: Sequence[str | int]) -> Any:
    """What stands at a path in a record; None where nothing does."""
    for key in path:
        if isinstance(data, Mapping) and key not in data:
            return None
        data = data[key]
    return data


def duration(value: float) -> str:
    """Three digits with a unit, as reports write them."""
    return _together(seconds(value))


def _memory(size: float) -> str:
    """As reports write it, but for what has more than a gibibyte."""
    return _together(f"{size / 2**30:.1f} GiB" if size >= 2**30 else mebibytes(size))


def _together(quantity: str) -> str:
    """A quantity whose unit stays in the line of its number."""
    return quantity.replace(" ", "\N{NO-BREAK SPACE}")


def cell(value: Any) -> str:
    """A measurement of a record, for a table: a time, a number of seconds, samples of either, or the memory of a program."""
    if value is None:
        return NONE
    if isinstance(value, int):  # bytes; times are no whole numbers
        return _memory(value)
    if isinstance(value, Mapping):
        return _memory(value["temp"]) if "temp" in value else duration(value["median_s"])
    if isinstance(value, Sequence):
        if isinstance(value[0], Mapping):
            return _memory(statistics.median(sample["growth_bytes"] for sample in value))
        return duration(statistics.median(value))
    return duration(value)


def _samples(value: Any) -> Sequence[float] | None:
    """The samples of a time."""
    if isinstance(value, Mapping):
        return value.get("samples_s")
    return value if isinstance(value, Sequence) and not isinstance(value[0], Mapping) else None


def samples_in(value: Any) -> int:
    """How many samples a time is the median of; 0 for what is no time."""
    return len(_samples(value) or ())


def ratio(before: Any, after: Any, name: str) -> str:
    """Before / after, with the record's interval where it is of the same two programs (`name`: of the one before)."""
    if before is None or after is None:
        return NONE
    if isinstance(after, Mapping) and after.get("ratio_to") == name:
        return _with_interval(after["ratio"], after["interval"])
    first, last = _samples(before), _samples(after)
    if first and last:
        return _with_interval(statistics.median(first) / statistics.median(last), ratio_interval(first, last))
    return f"{_bytes(before) / _bytes(after):.2f}x"


def _bytes(value: Any) -> float:
    if isinstance(value, int):
        return value
    return (
        value["temp"] if isinstance(value, Mapping) else statistics.median(sample["growth_bytes"] for sample in value)
    )


def _with_interval(value: float, interval: Sequence[float]) -> str:
    return f"{value:.2f}x [{interval[0]:.2f}, {interval[1]:.2f}]"
