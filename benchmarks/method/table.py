"""The table of this machine's GPU: `fl.tune` of usual layers, products, norms and attention, as one record that can be sent.

    python -m benchmarks table --device here [--budget MIN] [-o FILE] [--quick]
    python -m benchmarks table --add FILE [FILE ...]

The record is a plan file: device, driver and versions, each time with its samples, and besides the flags and the commit. A call is written
as soon as it is measured. Ctrl-C or the end of the budget keeps what there is, and the same command goes on from there. `--add` takes
records into the tables that are shipped, and keeps each under `benchmarks/results`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from . import standard

RESULTS = Path(__file__).parents[1] / "results"
INTERRUPTED = 130


def main(argv: list[str]) -> int:
    """Measures, or takes records in. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks table", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=["here"], default="here", help="the GPU that is measured: this machine's")
    parser.add_argument("--budget", type=float, metavar="MIN", help="minutes for all of it (default: no limit)")
    parser.add_argument("-o", "--output", type=Path, help="the record (default: table_CARD.json), which is added to")
    parser.add_argument("--quick", action="store_true", help="two programs: a check that it runs, nothing to send")
    parser.add_argument("--add", nargs="+", type=Path, metavar="FILE", help="take these records into the tables")
    options = parser.parse_args(argv)

    from fusionlab.errors import FusionLabError

    try:
        return _added(options.add) if options.add else _measured(options)
    except FusionLabError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1


def _measured(options: argparse.Namespace) -> int:
    from fusionlab.device import Device

    device = Device.current()
    if device.platform != "cuda":
        print(
            f"error: got {device}, needed a CUDA GPU that JAX sees: only there do tables decide; elsewhere each op has a rule",
            file=sys.stderr,
        )
        return 2
    if device.missing:
        print(f"error: {', '.join(device.missing)} missing: pip install 'fusionlab[cuda13]'", file=sys.stderr)
        return 2
    path = options.output or Path(f"table_{_slug(device.name)}.json")
    # The pieces of a composite are chosen by this very record, and by nothing that is shipped.
    os.environ |= {"FUSIONLAB_PLAN_FILE": str(path), "FUSIONLAB_TABLES": "none"}
    try:
        _tune(path, options)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where it stopped", file=sys.stderr)
        return INTERRUPTED
    finally:
        if path.exists():
            _complete(path, options)
    return 0


def _tune(path: Path, options: argparse.Namespace) -> None:
    """Measures into the file, after an estimate."""
    import jax

    import fusionlab as fl
    from fusionlab.device import Device

    until = math.inf if options.budget is None else time.perf_counter() + 60 * options.budget
    half = standard.half_of(Device.current())
    parts = standard.by_precision(standard.programs(options.quick, half))

    def tuned(ahead: bool) -> Iterator[Any]:
        for wide, programs in parts.items():
            every, shapes = standard.together(programs)
            rest = max(0.0, until - time.perf_counter())
            budget_s = 0.0 if ahead else None if rest == math.inf else rest
            with jax.enable_x64(wide):
                yield fl.tune(every, shapes, path=path, budget_s=budget_s, progress=not ahead)

    ahead = list(tuned(ahead=True))
    counts = f"{sum(one.before for one in ahead)} calls measured before, {_left(ahead)}"
    print(f"{ahead[0].device}: {counts}", flush=True)
    found = list(tuned(ahead=False)) if any(one.left for one in ahead) else ahead
    for large in (large for one in found for large in one.too_large):
        print(f"too little memory for {large}", flush=True)
    if any(one.left for one in found):
        print(f"{_left(found)}; the same command goes on", flush=True)


def _left(found: list[Any]) -> str:
    """What there is to measure, and how long it may take."""
    from fusionlab.progress import clock_text

    seconds = sum(one.left_s or 0.0 for one in found)
    return f"{sum(len(one.left) for one in found)} to measure, about {clock_text(seconds)}"


def _complete(path: Path, options: argparse.Namespace) -> None:
    """Adds to the plan file what a record of a measurement has."""
    from fusionlab.evidence.instruments.record import environment
    from fusionlab.kernels.choose.plan_files import existing, json_text
    from fusionlab.output import write_file

    existing(path)  # another file stays as it is
    plan = json.loads(path.read_text(encoding="utf-8"))
    command = "python -m benchmarks table --device here" + " --quick" * options.quick
    here = environment().to_dict()
    here["settings"]["jax_compilation_cache_dir"] = bool(here["settings"].get("jax_compilation_cache_dir"))  # no path
    head = {"benchmark": "table", "command": command, "environment": here}
    write_file(path, json_text(head | plan))
    print(f"{_said(plan)}; written to {path}")
    print("To send it: docs/how-to/send-a-table.md", flush=True)


def _said(plan: Mapping[str, Any]) -> str:
    """What a record has, in words: calls, and how many of them XLA's code was not the fastest for."""
    cases = [case for sets in plan["archs"].values() for one in sets for case in one["cases"].values()]
    faster = sum(case["implementation"] != "xla" for case in cases)
    return f"{len(cases)} calls measured, {faster} of them with an implementation faster than XLA's"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


# Taking records in ---------------------------------------------------------------------------------------------------


def _added(paths: list[Path]) -> int:
    """Takes records into the tables; each is kept in the folder of its card."""
    from dataclasses import replace

    from fusionlab.device import card_in
    from fusionlab.kernels.choose import choices
    from fusionlab.kernels.choose.plan_files import existing, join
    from fusionlab.output import write_file

    for path in paths:
        sets = [(arch, one) for arch, ones in existing(path).items() for one in ones]
        content = path.read_text(encoding="utf-8")
        if problem := _problem(json.loads(content), sets):
            print(f"error: {path}: {problem}", file=sys.stderr)
            return 1
        for arch, one in sets:
            bare = {text: replace(case, samples_us={}) for text, case in one.cases.items()}
            table = join(choices.TABLES / f"{arch}.json", [(arch, replace(one, cases=bare))])
            print(f"{one.device} ({arch}): {len(bare)} calls added to {table}")
        head = json.loads(content)["environment"]
        folder = RESULTS / (card_in(sets[0][1].device) or _slug(sets[0][1].device))
        kept = _free(folder, f"table_{head['time'][:10]}_jax{head['versions']['jax']}", content)
        print(f"{_said(json.loads(content))}; the record is kept as {write_file(kept, content, folders=True)}")
    return 0


def _free(folder: Path, stem: str, content: str) -> Path:
    """A file for a record, which takes no other record's place."""
    names = itertools.chain([stem], (f"{stem}_{number}" for number in itertools.count(2)))
    paths = (folder / f"{name}.json" for name in names)
    return next(path for path in paths if not path.exists() or path.read_text(encoding="utf-8") == content)


def _problem(record: Mapping[str, Any], sets: list[tuple[str, Any]]) -> str:
    """Why a plan file is no record to take in; "" where it is one."""
    if record.get("benchmark") != "table" or "environment" not in record:
        return "got a plan file without command, flags and commit, needed a record of `python -m benchmarks table --device here`"
    if "--quick" in record["command"]:
        return "got a record of --quick, needed a whole one: run it without --quick"
    if not all(one.device for _, one in sets):
        return "got measurements without a card, needed the name of the card with each set"
    if len({one.device for _, one in sets}) != 1:
        return "needed the measurements of one card: write those of each to a file of its own"
    if any(not case.samples_us for _, one in sets for case in one.cases.values()):
        return "got times without samples, needed those of `python -m benchmarks table --device here`"
    return ""
