"""The numbers of README and docs that link a record, and whether the record has them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fusionlab.commands.demo import mebibytes
from fusionlab.evidence.instruments.timing import seconds

RECORD = re.compile(r"\]\(((?:\.\./)*benchmarks/results/[\w./-]+\.json)\)")
QUANTITY = re.compile(r"(?<![\w.])(\d[\d.]*) (s|ms|µs|ns|MiB|GiB)\b")
RATIO = re.compile(r"(?<![\w.])(\d+\.\d+)x|\[(\d+\.\d+), (\d+\.\d+)\]")


def with_records(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each row of a table, and each other paragraph, that links records: its text and the links."""
    for paragraph in re.split(r"\n\n+", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)):
        for part in paragraph.splitlines() if paragraph.startswith("|") else [paragraph]:
            if links := RECORD.findall(part):
                yield part, links


def numbers_in(record: Any) -> Iterator[float]:
    """Every number of a JSON record, at any depth, but single samples: nearly any number would be one."""
    if isinstance(record, dict):
        for name, inner in record.items():
            yield from () if name == "samples_s" else numbers_in(inner)
    elif isinstance(record, list):
        for inner in record:
            yield from numbers_in(inner)
    elif isinstance(record, int | float):
        yield float(record)


def forms(number: float) -> set[str]:
    """How a number may be written: as a time, as memory, as a ratio."""
    return {
        seconds(number),
        mebibytes(number),
        f"{number / 2**20:.0f} MiB",
        f"{number / 2**30:.1f} GiB",
        f"{number:.2f}",
    }


def quoted(text: str) -> tuple[set[str], set[str]]:
    """The times and sizes of a text, and its ratios with their intervals."""
    quantities = {" ".join(pair) for pair in QUANTITY.findall(text)}
    return quantities, {number for groups in RATIO.findall(text) for number in groups if number}


def without_record(part: str, links: list[str], page: Path) -> set[str]:
    """The numbers of a row or paragraph that none of the records has which it links."""
    recorded = {n for link in links for n in numbers_in(json.loads((page.parent / link).read_text(encoding="utf-8")))}
    known = set().union(*map(forms, recorded))
    quantities, ratios = quoted(part)
    return (quantities | ratios) - known
