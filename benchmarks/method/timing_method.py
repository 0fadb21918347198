"""How far the timing method is to be trusted: how often it finds a difference between a function and itself, and one that was planted.

    python -m benchmarks timing_method [--runs 200] [--quick] [-o FILE]

Each run is one `time_programs` of 40 samples of each, as `fl.compare` takes them: A against A, two compilations of one function, and A
against B, which does 10 % more of the same. Alarms are A/A runs with a verdict of "faster" or "slower"; of the planted ones those
count that say "slower". Programs are compiled anew every 10 runs, so that what two compilations of one function differ by is in it.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
STEPS, MORE = 100, 110  # of the loop in A and in B
RUNS, ANEW = 200, 10
ALARMS, DETECTED = 0.05, 0.95  # at most, at least


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


def one_kind(after_steps: int, runs: int, told: Callable[[str], Any]) -> dict[str, Any]:
    """All runs of A against A, or against B."""
    from fusionlab.evidence.instruments.timing import time_programs

    args, found, pair = operands(), [], None
    for i in range(runs):
        if pair is None or i % ANEW == 0:
            pair = compiled("before", STEPS, args), compiled("after", after_steps, args)
        timing = time_programs("forward", *pair)
        found.append({"ratio": timing.ratio, "interval": list(timing.interval), "verdict": str(timing.verdict)})
        if (i + 1) % 20 == 0:
            told(f"{i + 1} of {runs}: {dict(Counter(one['verdict'] for one in found))}")
    beyond = sum(not one["interval"][0] <= 1 <= one["interval"][1] for one in found)
    return {"runs": found, "verdicts": dict(Counter(one["verdict"] for one in found)), "intervals without 1": beyond}


def rates(record: dict[str, Any]) -> tuple[float, float]:
    """(share of A/A runs with an alarm, share of planted slowdowns that were told)."""
    same, planted = record["A/A"]["verdicts"], record["A/B"]["verdicts"]
    alarms = sum(n for verdict, n in same.items() if verdict != "no difference")
    return alarms / sum(same.values()), planted.get("slower", 0) / sum(planted.values())


def main(argv: list[str]) -> int:
    """Prints the two rates and writes the record; the exit status is 1 where one is out of bounds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks timing_method", description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=RUNS, help="of each kind (default %(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help="10 runs of each: a check that it works, nothing to publish"
    )
    parser.add_argument("-o", "--output", type=Path, help="the record's file; under benchmarks/results unless given")
    options = parser.parse_args(argv)

    import jax

    from fusionlab.evidence.instruments.record import environment, save_json

    runs, here = 10 if options.quick else options.runs, environment().to_dict()
    record: dict[str, Any] = {
        "benchmark": "timing_method",
        "command": "python -m benchmarks timing_method" + (f" --runs {runs}" if runs != RUNS else ""),
        "environment": here,
        "steps": {"A": STEPS, "B": MORE},
    }
    for kind, steps in (("A/A", STEPS), ("A/B", MORE)):
        record[kind] = one_kind(steps, runs, lambda line, kind=kind: print(f"{kind} {line}", file=sys.stderr))
    alarms, detected = rates(record)
    record |= {"false alarms": alarms, "detected": detected}
    print(f"A/A: {alarms:.1%} of {runs} runs said that a function differs from itself (at most {ALARMS:.0%})")
    print(f"A/B: {detected:.1%} of {runs} runs told a slowdown of 10 % (at least {DETECTED:.0%})")
    if options.output or not options.quick:
        folder = RESULTS / ("cpu" if jax.default_backend() == "cpu" else "h200")
        name = f"timing_method_jax{here['versions']['jax']}.json"
        print(f"written to {save_json(options.output or folder / name, record)}", file=sys.stderr)
    return int(alarms > ALARMS or detected < DETECTED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
