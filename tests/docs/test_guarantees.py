"""The times on the page of guarantees are those of the record it names."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_times_to_the_first_step_are_those_of_the_record():
    page = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    section = page.partition("## Time to the first step\n")[2].partition("\n## ")[0]
    name = re.search(r"`(benchmarks/results/[\w./]+\.json)`", section)
    assert name is not None
    programs = json.loads((ROOT / name[1]).read_text(encoding="utf-8"))["programs"]
    head, *rows = ([c.strip() for c in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|")
    assert len(rows) - 1 == sum(len(versions) for states in programs.values() for versions in states.values())
    for layers, caches, version, *times in rows[1:]:
        states = programs[f"{layers} layers"]
        one = states["cold" if caches == "empty" else "all cached"]["jit" if "jit" in version else "fused"]
        medians = one["processor_median_s"]
        for phase, text in zip(head[3:], times, strict=True):
            assert text == (f"{medians[phase]:.2f}" if medians[phase] else "-"), (layers, caches, version, phase)
