"""How far the timing method is to be trusted: how often it finds a difference between a function and itself, and one that was planted.

    python -m benchmarks timing_method [--runs 200] [--busy] [--quick] [-o FILE]

Each run is one `time_programs` of 40 samples of each, as `fl.compare` takes them: A against A, two compilations of one function, and A
against B, which does 10 % more of the same. Alarms are A/A runs with a verdict of "faster" or "slower"; of the planted ones those
count that say "slower". Programs are compiled anew every 10 runs, so that what two compilations of one function differ by is in it.

With `--busy` a process of its own keeps a core busy all the while. A wrong verdict is then "faster" or "slower" of A/A, and "faster" or "no
difference" of the planted ones; "undecided" and "inconclusive" are none. There may be none in 100 runs of each.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
STEPS, MORE = 100, 110  # of the loop in A and in B
RUNS, ANEW = 200, 10
ALARMS, DETECTED = 0.05, 0.95  # at most, at least
BUSY_RUNS, BUSY_S = 100, 2.0  # of each kind beside a busy process, and at most so many seconds for each
WRONG = {"A/A": ("faster", "slower"), "A/B": ("faster", "no difference")}


def work(steps: int) -> Callable[[Any, Any], Any]:
    """A loop of small products: its time is as its steps."""
    import jax
    import jax.numpy as jnp

    def loop(x: Any, w: Any) -> Any:
        return jax.lax.fori_loop(0, steps, lambda _, y: jnp.tanh(y @ w), x)

    return loop


def compiled(name: str, steps: int, args: tuple[Any, ...]) -> Any:
    from fusionlab.evidence.instruments.program import compile_program

    return compile_program(work(steps), args, {}, name=name)


def operands() -> tuple[Any, ...]:
    import jax

    on_cpu = jax.default_backend() == "cpu"
    x, w = ((32, 64), (64, 64)) if on_cpu else ((1024, 1024), (1024, 1024))
    return jax.random.normal(jax.random.key(0), x), jax.random.normal(jax.random.key(1), w) / w[0] ** 0.5


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """A process that computes all the time, and ends with the block."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            yield
        finally:
            process.kill()


def one_kind(after_steps: int, runs: int, told: Callable[[str], Any], budget_s: float = 60.0) -> dict[str, Any]:
    """All runs of A against A, or against B."""
    from fusionlab.evidence.instruments.timing import time_programs

    args, found, pair = operands(), [], None
    for i in range(runs):
        if pair is None or i % ANEW == 0:
            pair = compiled("before", STEPS, args), compiled("after", after_steps, args)
        timing = time_programs("forward", *pair, budget_s=budget_s)
        one = {"ratio": timing.ratio, "interval": list(timing.interval), "verdict": str(timing.verdict)}
        if seen := timing.contention:
            one |= {"others": seen.others, "waited": seen.waited, "busy": seen.is_busy}
        found.append(one)
        if (i + 1) % 20 == 0:
            told(f"{i + 1} of {runs}: {dict(Counter(one['verdict'] for one in found))}")
    beyond = sum(not one["interval"][0] <= 1 <= one["interval"][1] for one in found)
    return {"runs": found, "verdicts": dict(Counter(one["verdict"] for one in found)), "intervals without 1": beyond}


def rates(record: dict[str, Any]) -> tuple[float, float]:
    """(share of A/A runs with an alarm, share of planted slowdowns that were told)."""
    same, planted = record["A/A"]["verdicts"], record["A/B"]["verdicts"]
    alarms = sum(same.get(verdict, 0) for verdict in WRONG["A/A"])
    return alarms / sum(same.values()), planted.get("slower", 0) / sum(planted.values())


def wrong_verdicts(record: Mapping[str, Any]) -> int:
    """How many runs beside a busy process had a verdict that is wrong."""
    return sum(record[kind]["verdicts"].get(verdict, 0) for kind, wrong in WRONG.items() for verdict in wrong)


def main(argv: list[str]) -> int:
    """Prints the two rates and writes the record; the exit status is 1 where one is out of bounds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks timing_method", description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, help=f"of each kind (default {RUNS}; {BUSY_RUNS} with --busy)")
    parser.add_argument("--busy", action="store_true", help="beside a process that keeps a core busy")
    parser.add_argument(
        "--quick", action="store_true", help="10 runs of each: a check that it works, nothing to publish"
    )
    parser.add_argument("-o", "--output", type=Path, help="the record's file; under benchmarks/results unless given")
    options = parser.parse_args(argv)

    import jax

    from fusionlab.evidence.instruments.record import environment, save_json

    usual, name = (BUSY_RUNS, "timing_busy") if options.busy else (RUNS, "timing_method")
    runs, here = 10 if options.quick else options.runs or usual, environment().to_dict()
    command = "python -m benchmarks timing_method" + " --busy" * options.busy + f" --runs {runs}" * (runs != usual)
    record: dict[str, Any] = {
        "benchmark": name,
        "command": command,
        "environment": here,
        "steps": {"A": STEPS, "B": MORE},
    }
    start = time.perf_counter()
    with busy_core() if options.busy else contextlib.nullcontext():
        for kind, steps in (("A/A", STEPS), ("A/B", MORE)):
            told = lambda line, kind=kind: print(f"{kind} {line}", file=sys.stderr)  # noqa: E731
            record[kind] = one_kind(steps, runs, told, **{"budget_s": BUSY_S} if options.busy else {})
    record["seconds"] = time.perf_counter() - start
    failed = _busy_result(record) if options.busy else _quiet_result(record)
    if options.output or not options.quick:
        folder = RESULTS / ("cpu" if jax.default_backend() == "cpu" else "h200")
        path = options.output or folder / f"{name}_jax{here['versions']['jax']}.json"
        print(f"written to {save_json(path, record)}", file=sys.stderr)
    return int(failed)


def _quiet_result(record: dict[str, Any]) -> bool:
    """Prints and records the two rates: whether one is out of bounds."""
    alarms, detected = rates(record)
    record |= {"false alarms": alarms, "detected": detected}
    runs = len(record["A/A"]["runs"])
    print(f"A/A: {alarms:.1%} of {runs} runs said that a function differs from itself (at most {ALARMS:.0%})")
    print(f"A/B: {detected:.1%} of {runs} runs told a slowdown of 10 % (at least {DETECTED:.0%})")
    return alarms > ALARMS or detected < DETECTED


def _busy_result(record: dict[str, Any]) -> bool:
    """Prints and records how many verdicts were wrong beside a busy process: whether any was."""
    wrong = record["wrong verdicts"] = wrong_verdicts(record)
    for kind in WRONG:
        seen = sum(one.get("busy", False) for one in record[kind]["runs"])
        print(
            f"{kind} beside a busy process: {record[kind]['verdicts']}, {seen} of {len(record[kind]['runs'])} seen as busy"
        )
    print(f"{wrong} wrong verdicts (none allowed), in {record['seconds']:.0f} s")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
