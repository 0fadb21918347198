"""Random programs: whether fusionlab's rewrite of each is the program itself, judged against float64.

    python -m benchmarks random_programs [--start 0] [--count 10000] [--resume] [--compiled-every 20] [--train-steps] [--x64] [-o FILE]

A program is a function of its seed (tests/soundness/generator.py): planted sites, right and wrong, in random surroundings.
Where sites are accepted, outputs and gradients of the fused program are compared with the original's
(tests/soundness/judge.py). The record is written every minute, and read again with `--resume`: seeds it holds are not
run again, failing ones excepted; its `runs` say which commit, versions and machine judged how many. A
seed whose rewrite is wrong, or at which something raised, is recorded with the reason; the exit status is 1 then.

With `--train-steps` what is run is a whole train step of each program, differentiated already (tests/soundness/train_steps.py), and
loss, gradients, updated arguments and the optimiser's state are compared; the record is a file of its own, and its `pairs` counts the
sites that were fused together with their backward passes.

With `--x64` there is float64: programs have it, or compute in it on purpose what must not lose precision. The records are files of
their own.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import itertools
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "cpu"
PROGRAMS, TRAIN_STEPS = "random_programs.json", "random_train_steps.json"
VERDICTS = ("same", "no site", "uncomparable", "wrong", "raised")
_SAVE_S = 60.0
_FORGET = 100  # programs after which JAX's caches are dropped: nothing in them is of use to the next


def empty() -> dict[str, Any]:
    """A record of nothing."""
    zero: dict[str, Any] = {key: {} for key in ("candidates", "pairs", "rejections", "uncomparable", "failing")}
    return {
        "seeds": [],
        "verdicts": dict.fromkeys(VERDICTS, 0),
        "shaken": 0,
        "overflows": 0,
        "compiled": 0,
        "seconds": 0.0,
        **zero,
        "runs": [],
    }


def add(record: dict[str, Any], judgement: Any, compiled: bool) -> None:
    """Adds what became of one seed."""
    record["seeds"] = with_seed(record["seeds"], judgement.seed)
    record["verdicts"][judgement.verdict] += 1
    record["shaken"] += judgement.shaken
    record["overflows"] += judgement.overflows
    record["compiled"] += int(compiled and judgement.verdict == "same")
    if judgement.verdict in ("wrong", "raised"):
        record["failing"][str(judgement.seed)] = f"{judgement.verdict}: {judgement.reason}"
        return
    for key in ("candidates", "pairs", "rejections"):
        counts = collections.Counter(record[key]) + collections.Counter(getattr(judgement, key))
        record[key] = dict(sorted(counts.items()))
    if judgement.verdict == "uncomparable":
        record["uncomparable"][judgement.reason] = record["uncomparable"].get(judgement.reason, 0) + 1


def with_seed(ranges: Sequence[Sequence[int]], seed: int) -> list[list[int]]:
    """Ranges [first, last] of seeds with one more."""
    seeds = sorted([*(list(r) for r in ranges), [seed, seed]])
    merged: list[list[int]] = []
    for first, last in seeds:
        if merged and first <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], last)
        else:
            merged.append([first, last])
    return merged


def without_failures(record: dict[str, Any]) -> dict[str, Any]:
    """The record with the failing seeds taken out of it, to be run again."""
    failing = {int(seed) for seed in record["failing"]}
    verdicts = dict(record["verdicts"]) | {"wrong": 0, "raised": 0}
    seeds: list[list[int]] = []
    for first, last in record["seeds"]:
        cuts = [first - 1, *sorted(s for s in failing if first <= s <= last), last + 1]
        seeds += [[a + 1, b - 1] for a, b in itertools.pairwise(cuts) if a + 1 < b]
    return record | {"seeds": seeds, "verdicts": verdicts, "failing": {}}


def holds(ranges: Iterable[Sequence[int]], seed: int) -> bool:
    return any(first <= seed <= last for first, last in ranges)


def judged(seed: int, compiled: bool, train_steps: bool = False) -> Any:
    """The judgement of a seed, or of its train step; one of verdict "raised" where anything raises."""
    generator, steps, judges = (
        importlib.import_module(f"soundness.{n}") for n in ("generator", "train_steps", "judge")
    )
    made = steps.train_step if train_steps else generator.program
    try:
        return judges.judge(made(seed), compiled)
    except Exception as error:  # whatever it is, it goes into the record
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())[:300]
        place = f"{Path(where.filename).name}:{where.lineno}"
        return judges.Judgement(seed, "raised", f"{type(error).__name__} at {place}: {text}")


def run(record: dict[str, Any], seeds: Iterable[int], every: int, train_steps: bool, save: Any) -> None:
    """Judges the seeds, or their train steps, in order; `save()` is called now and then, and at the end."""
    import jax

    started = saved = time.perf_counter()
    before = record["seconds"]
    for count, seed in enumerate(seeds, 1):
        compiled = bool(every) and seed % every == 0
        found = judged(seed, compiled, train_steps)
        add(record, found, compiled)
        if found.verdict in ("wrong", "raised"):
            print(f"seed {seed}: {found.verdict}: {found.reason}", flush=True)
        now = time.perf_counter()
        record["seconds"] = round(before + now - started, 1)
        if count % _FORGET == 0:
            jax.clear_caches()
        if now - saved > _SAVE_S:
            saved = now
            save()
            print(f"{count} programs, {(now - started) / count:.2f} s each; {summary(record)}", flush=True)
    save()


def summary(record: dict[str, Any]) -> str:
    programs = sum(record["verdicts"].values())
    counts = ", ".join(f"{n} {verdict}" for verdict, n in record["verdicts"].items())
    sites, pairs = (
        ", ".join(f"{n} {name}" for name, n in record[key].items()) or "none" for key in ("candidates", "pairs")
    )
    return f"in all {programs}: {counts}; sites fused: {sites}; with their backward passes: {pairs}"


def main(argv: list[str]) -> int:
    """Runs the seeds asked for that the record does not hold; returns 1 where a rewrite was wrong or something raised."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks random_programs", description=__doc__)
    parser.add_argument("--start", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=10_000, help="how many seeds, 10000")
    parser.add_argument("--resume", action="store_true", help="add to the record there is")
    parser.add_argument(
        "--compiled-every", type=int, default=20, help="every so manieth program is compiled too; 0: none"
    )
    parser.add_argument("--train-steps", action="store_true", help="a differentiated train step of each program")
    parser.add_argument("--x64", action="store_true", help="with 64-bit dtypes")
    parser.add_argument("-o", "--output", type=Path, help="where the JSON record is")
    options = parser.parse_args(argv)
    name = TRAIN_STEPS if options.train_steps else PROGRAMS
    output = options.output or RESULTS / (name.replace(".", "_x64.") if options.x64 else name)
    sys.path.insert(0, str(ROOT / "tests"))

    import jax

    from fusionlab.evidence.instruments.record import environment, hardware, load_json, save_json

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_x64", options.x64)
    where = environment()
    record = empty()
    if options.resume and output.exists():
        record |= without_failures(load_json(output)["result"])
    wanted = range(options.start, options.start + options.count)
    seeds = [s for s in wanted if not holds(record["seeds"], s)]

    before = sum(record["verdicts"].values())
    this = {
        "commit": where.commit,
        "versions": where.versions,
        "hardware": hardware(),
        "time": where.time,
        "programs": 0,
    }
    record["runs"] = [*record["runs"], this]

    def save() -> None:
        this["programs"] = sum(record["verdicts"].values()) - before
        command = " ".join(["python", "-m", "benchmarks", "random_programs", *argv])
        save_json(output, {"command": command, "what": __doc__, "result": record})

    run(record, seeds, options.compiled_every, options.train_steps, save)
    print(f"{summary(record)}\n{where}\nrecord: {output}")
    return 1 if record["failing"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
