"""The demo: a transformer block found, fused, verified and timed on this machine, written up as one web page."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ..evidence.errors.numerics import share_text
from ..evidence.instruments.record import newest_record
from ..evidence.instruments.timing import Timing, seconds
from ..models import transformer
from ..output import output_folder, write_file
from ..progress import Progress, Stages, watched
from ..showing import Shown, counted
from ..verbs import comparison, lab

# Small enough that 40 interleaved samples of forward and of forward + backward end well under a minute on two cores;
# the features per head, 64, are those of common models.
EMBED, HEADS = 128, 2
ELSEWHERE = "sm_90"
NEXT = 'fusionlab find model.py:layer --args "bf16[64,512], bf16[512,512]" --device h200'
# Bounds each of the two timings on a slow machine; one that is cut short says so and gives no verdict.
BUDGET_S = 20.0
# Records of benchmarks on a GPU: the repository's own where this is a checkout; else the same files, which pyproject.toml puts into a wheel
# here, so that there is no second copy to keep equal.
GPU_RECORDS = (
    Path(__file__).parents[2] / "benchmarks" / "results" / "h200",
    Path(__file__).parents[1] / "records" / "h200",
)
STEP = "gpt2"  # of `python -m benchmarks language_models`


def gpu_record(benchmark: str = "gemm_epilogue", case: str = "") -> dict[str, Any] | None:
    """The newest record of `python -m benchmarks NAME`, with this case, that comes with FusionLab; None if none is installed."""
    folder = next((f for f in GPU_RECORDS if f.is_dir()), None)
    return newest_record(folder, benchmark, case) if folder is not None else None


def transformer_block(params: Any, x: jax.Array) -> jax.Array:
    """The block the demo looks at."""
    return transformer.block(params, x, heads=HEADS)


@dataclass(frozen=True, eq=False, repr=False)
class Demo(Shown):
    """The findings and measurements of the demo; prints as a short table.

    Attributes:
      size: sequence length.
      found: the findings on this machine.
      elsewhere: the findings for `ELSEWHERE`, decided without running there.
      result: time, memory and errors, before and after, on this machine.
      record: an earlier measurement of perceptrons on a GPU of another machine (`gpu_record`); None without one.
      folder, files: where the report is.
      seconds: of the whole demo.
      step: an earlier measurement of language models there, for what a whole train step gains; None without one.
    """

    size: int
    found: lab.Findings
    elsewhere: lab.Findings
    result: comparison.Comparison
    record: dict[str, Any] | None
    folder: str
    files: tuple[str, ...]
    seconds: float
    step: dict[str, Any] | None = None

    @property
    def title(self) -> str:
        return f"transformer block, B1 S{self.size} E{EMBED} H{HEADS} float32"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able data; every measurement is listed under the hardware it was made on."""
        measured = self.result.to_dict()
        return {
            "title": self.title,
            "sequence": self.size,
            "hardware": self.result.environment.hardware,
            "counts": self.found.counts(),
            "found": self.found.to_dict(),
            "elsewhere": self.elsewhere.to_dict(),
            **measured,
            "gpu_record": _source(self.record),
            "gpu_step": _source(self.step),
            "files": list(self.files),
            "seconds": round(self.seconds, 1),
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        environment = self.result.environment
        versions = environment.versions
        yield f"{self.title}, jax {versions['jax']}, Python {versions['python']}"
        yield f"\nFound on {self.found.device}"
        # A pass without a site is no news in a program that is always the same.
        yield from (
            f"  {line}" for line in str(self.found).splitlines() if ": 0 subgraphs can be fused, 0 declined" not in line
        )
        yield "\nRuns there, and why"
        yield from (f"  {row}" for row in _table(list(_choices(self.found))))
        yield f"\nMeasured on {environment.hardware}: jax.jit of the block -> the same with its sites fused"
        yield from (f"  {row}" for row in _table([["", "before", "after", "before/after", "verdict"], *self._rows()]))
        yield from [f"  {self.result.numerics.sentence}"] if self.result.numerics else []
        yield from (f"  note: {note}" for note in self.result.all_notes)
        yield f"\nWould run on {self.elsewhere.device}; judged, not run"
        yield from (f"  {row}" for row in _table(list(_choices(self.elsewhere))))
        yield from (f"  {line}" for line in self.elsewhere.reasons())
        yield "\nIn short"
        yield from (f"  {line}" for line in self._in_short())
        page = os.path.join(self.folder, "report.html")
        yield f"\n{self.seconds:.0f} s in all. Next: open {page} in a browser, then search a function of yours for its GPU:"
        yield f"  {NEXT}"

    def _in_short(self) -> Iterator[str]:
        """What was found, what it gains here, and what a whole step gains on a GPU."""
        others = [c for c in self.found.candidates if not c.idle and not c.same_code]
        passes = ", ".join(dict.fromkeys(c.pass_name for c in others))
        rest = len(self.found.candidates) - len(others)
        own = f"{len(others)} run{'s' * (len(others) == 1)} fused ({passes})" if others else ""
        left = f"{rest} run{'s' * (rest == 1)} as XLA compiles {'it' if rest == 1 else 'them'}" if rest else ""
        yield f"found here: {counted(len(self.found.candidates), 'site')}; " + ", ".join(filter(None, (own, left)))
        yield f"gain here: {self._gains()}"
        if self.step is not None:
            yield _step_text(self.step)

    def _gains(self) -> str:
        """Times and errors in a line; "same code" where nothing was timed."""
        gains = [
            f"{t.what} {t.ratio:.2f}x [{t.interval[0]:.2f}, {t.interval[1]:.2f}] ({t.verdict})"
            for t in self.result.timings
        ]
        worse = len(self.result.numerics.regressions) if self.result.numerics is not None else 0
        judged = (
            f"; {worse or 'no'} result{'s' * (worse > 1)} worse than before" if self.result.numerics is not None else ""
        )
        return (", ".join(gains) or f"none, {self.result.verdict}") + judged

    def _rows(self) -> Iterator[list[str]]:
        yield from (_timing_row(timing) for timing in self.result.timings)
        if not self.result.timings:
            yield ["time", "", "", "", f"not measured: {self.result.verdict}"]
        yield from self._memory_rows()
        yield from self._error_rows()

    def _memory_rows(self) -> Iterator[list[str]]:
        for call, memory in self.result.memories:
            before, after = memory.before.temp, memory.after.temp
            ratio = f"{before / after:.2f}x" if after else ""
            yield [f"compiled temporaries, {call}", mebibytes(before), mebibytes(after), ratio, ""]

    def _error_rows(self) -> Iterator[list[str]]:
        numerics = self.result.numerics
        for kind in ("output", "gradient"):
            of_kind = [leaf for leaf in (numerics.ranked if numerics else ()) if leaf.kind == kind]
            if of_kind:
                worst, verdict = of_kind[0], "ok" if all(leaf.ok for leaf in of_kind) else "WORSE"
                errors = [f"{error.max_abs:.2e}" for error in (worst.before, worst.after)]
                shares = " -> ".join(map(share_text, worst.shares))
                yield [f"worst {kind} of {len(of_kind)}, {worst.name}", *errors, f"{shares} of tolerance", verdict]


def _source(record: dict[str, Any] | None) -> dict[str, Any] | None:
    """Where a record is from."""
    return None if record is None else {k: record[k] for k in ("command", "environment")}


def _step_text(record: dict[str, Any]) -> str:
    """GPT-2's step in a record of `python -m benchmarks language_models`, in a line."""
    from ..viz.gpu_record import where

    case = record["cases"][STEP]
    before, after = case["jax.jit"], case["grad of fused"]
    low, high = after["interval"]
    return (
        f"gain on a GPU: loss and gradients of GPT-2 124M {after['ratio']:.2f}x [{low:.2f}, {high:.2f}], "
        f"{seconds(before['median_s'])} -> {seconds(after['median_s'])} (record of {where(record)})"
    )


def mebibytes(n: float) -> str:
    return f"{n / 2**20:.1f} MiB"


def _timing_row(t: Timing) -> list[str]:
    low, high = t.interval
    n = min(len(t.before.samples_s), len(t.after.samples_s))
    ratio = f"{t.ratio:.2f}x [{low:.2f}, {high:.2f}]"
    medians = [seconds(t.before.median_s), seconds(t.after.median_s)]
    return [f"time, {t.what}, median of {n}", *medians, ratio, str(t.verdict)]


def _choices(found: lab.Findings) -> Iterator[list[str]]:
    """A line for each different (pass, backend, reason), with the number of sites that share it."""
    shared: dict[tuple[str, str, str], int] = {}
    for candidate in found.candidates:
        if candidate.idle:
            key = candidate.pass_name, "left as it is", candidate.idle
            shared[key] = shared.get(key, 0) + 1
            continue
        if backend := candidate.backend:
            key = candidate.pass_name, f"{backend.name} ({backend.verdict})", backend.reason
            shared[key] = shared.get(key, 0) + 1
    for (name, backend, reason), sites in shared.items():
        yield [name, f"{sites} site" + ("s" if sites > 1 else ""), backend, reason]


def _table(rows: list[list[str]]) -> list[str]:
    """Rows as text in aligned columns."""
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(len(rows[0]) if rows else 0)]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def run_demo(folder: str | os.PathLike[str], *, size: int = 2048, progress: Progress = True) -> Demo:
    """Finds, fuses, verifies and times a transformer block, and writes `report.html`, pictures and `report.json`.

    Args:
      folder: the output folder; checked first, and its files appear together at the end.
      size: sequence length.
      progress: False, True (a line on standard error) or a function of (task, done, total).

    Raises:
      OutputError: `folder` cannot be written to; nothing is left half-written.
    """
    start = time.perf_counter()
    with output_folder(folder) as work, watched(progress) as told:
        params = transformer.init_block(jax.random.key(0), EMBED)
        x = transformer.inputs(jax.random.key(1), seq=size, embed=EMBED, dtype=jnp.float32)
        found = lab.find(transformer_block, params, x, progress=told)
        elsewhere = lab.find(found.graph, device=ELSEWHERE, progress=told)
        fused = lab.fuse(transformer_block)
        result = comparison.compare(transformer_block, fused, params, x, grad=True, progress=told, budget_s=BUDGET_S)
        record, step = gpu_record(), gpu_record("language_models", STEP)
        Stages(told)("writing the report")
        _write(work, found, elsewhere, result, record)
        files = (*sorted(p.name for p in work.iterdir()), "report.json")
        took = time.perf_counter() - start
        done = Demo(size, found, elsewhere, result, record, str(folder), files, took, step)
        write_file(work / "report.json", json.dumps(done.to_dict(), indent=1) + "\n")
    return done


def _write(
    work: Path,
    found: lab.Findings,
    elsewhere: lab.Findings,
    result: comparison.Comparison,
    record: dict[str, Any] | None,
) -> None:
    """The page and the pictures."""
    from ..viz.explorer.files import save
    from ..viz.html.report import report_html
    from ..viz.plots import evidence_figures, figure_svg

    after, formulas = found.apply(), {p.name: p.formula for p in lab.passes()}
    environment = result.environment
    shown = {"hardware": environment.hardware, **environment.versions, "measured": environment.time}
    page = report_html(
        found.graph,
        found,
        enabled=None,
        evidence=result,
        after=after,
        environment=shown,
        formulas=formulas,
        record=record,
    )
    write_file(work / "report.html", page)
    simulated = report_html(
        elsewhere.graph,
        elsewhere,
        formulas=formulas,
        title=f"FusionLab: {elsewhere.graph.name} on {elsewhere.device}; judged, not run",
    )
    write_file(work / f"report-{ELSEWHERE}.html", simulated)
    save(found.graph, work / "found.svg", found, show="all")
    save(after, work / "fused.svg", show="all")
    for name, figure in evidence_figures(result):
        write_file(work / f"{name.lower()}.svg", figure_svg(figure))
