"""What the first `find` of a process costs, against the tracing that it cannot do without.

    python -m benchmarks first_find [--models TEXT] [--variant forward|train] [--dtype f32|bf16] [--every N] [--repeats N] [-o FILE]

For each program of the zoo, in processor time (and wall time beside it): `jax.make_jaxpr(fn)(*args)` in one process and
`fl.find(fn, *args)` in another, in turns; the median of several (`--repeats`), since one alone is off by a quarter at times. A process
is a fork of one that has imported everything and has traced, compiled and computed nothing: it builds the model, forgets what JAX
remembers of that (`jax.clear_caches`), and is measured. What is imported only then is counted, as are FusionLab's own examples, which
are traced once in a process.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .recall import zoo

SLOW_TRACE_MS = 50.0  # from here on a program's search is held against its tracing, below it against a time
MEDIAN, WORST, SHORT_MS = 3.0, 6.0, 500.0


@dataclass(frozen=True)
class Cost:
    """One program: milliseconds (processor, clock) to trace it and to search it, each the first time in a process, of several processes."""

    program: str
    trace: tuple[tuple[float, float], ...]
    find: tuple[tuple[float, float], ...]

    @property
    def trace_ms(self) -> float:
        return statistics.median(processor for processor, _ in self.trace)

    @property
    def find_ms(self) -> float:
        return statistics.median(processor for processor, _ in self.find)

    @property
    def ratio(self) -> float:
        return self.find_ms / self.trace_ms

    @property
    def is_slow(self) -> bool:
        """Whether it takes long enough to trace for the ratio to mean something."""
        return self.trace_ms >= SLOW_TRACE_MS


def apart(work: Callable[[], Sequence[float]]) -> list[float]:
    """What `work` returns in a fork of this process. Only sound while no backend of JAX, and so no thread of XLA, has been started here."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(out)
            os.write(into, json.dumps(list(work())).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(status)  # nothing of the parent's is to be run or flushed twice
    os.close(into)
    with os.fdopen(out) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if status != 0:
        raise RuntimeError(f"the process that measured ended with status {status}")
    return json.loads(text)


def first(program: Any, call: Callable[..., Any]) -> list[float]:
    """Milliseconds (processor, clock) of `call(fn, *args)` for a program that is built first, in this process."""
    import jax

    fn, args = program.make()
    jax.clear_caches()
    wall, processor = time.perf_counter(), time.process_time()
    call(fn, *args)
    return [(time.process_time() - processor) * 1e3, (time.perf_counter() - wall) * 1e3]


def _trace(fn: Any, *args: Any) -> None:
    import jax

    jax.make_jaxpr(fn)(*args)


def _find(fn: Any, *args: Any) -> None:
    import fusionlab as fl

    fl.find(fn, *args)


def cost(program: Any, repeats: int) -> Cost:
    """Both costs of a program, each in processes of its own."""
    samples = [[apart(lambda call=call: first(program, call)) for call in (_trace, _find)] for _ in range(repeats)]
    trace, find = (tuple((p, w) for p, w in one) for one in zip(*samples, strict=True))
    return Cost(program.id, trace, find)


def summary(costs: Sequence[Cost]) -> list[str]:
    """The lines for a reader: medians, worst, and the worst ten of either kind."""
    slow, short = [c for c in costs if c.is_slow], [c for c in costs if not c.is_slow]
    lines = []
    if slow:
        ratios = [c.ratio for c in slow]
        told = f"median {statistics.median(ratios):.2f} x (<= {MEDIAN:g}), worst {max(ratios):.2f} x (<= {WORST:g})"
        lines.append(f"{len(slow)} programs that take {SLOW_TRACE_MS:g} ms or more to trace: {told}")
        lines += map(_line, sorted(slow, key=lambda c: -c.ratio)[:10])
    if short:
        times = [c.find_ms for c in short]
        told = f"median {statistics.median(times):.0f} ms, worst {max(times):.0f} ms (<= {SHORT_MS:g})"
        over = sum(t > SHORT_MS for t in times)
        lines.append(f"{len(short)} other programs: {told}, {over} above")
        lines += map(_line, sorted(short, key=lambda c: -c.find_ms)[:10])
    return lines


def _line(c: Cost) -> str:
    trace, find = (statistics.median(clock for _, clock in one) for one in (c.trace, c.find))
    wall = f"wall {trace:.0f} and {find:.0f} ms"
    return f"  {c.program:48} trace {c.trace_ms:7.1f} ms  find {c.find_ms:7.1f} ms  {c.ratio:5.2f} x  ({wall})"


def met(costs: Sequence[Cost]) -> bool:
    """Whether the bounds hold."""
    ratios = [c.ratio for c in costs if c.is_slow]
    fast_enough = not ratios or (statistics.median(ratios) <= MEDIAN and max(ratios) <= WORST)
    return fast_enough and all(c.find_ms <= SHORT_MS for c in costs if not c.is_slow)


def _prepare() -> Any:
    """Imports what programs of the zoo are made with; the catalogue."""
    import importlib.util

    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    catalogue = zoo()
    import fusionlab.verbs.lab  # noqa: F401 - what is imported is not measured

    if importlib.util.find_spec("transformers") is not None:
        import transformers

        for name in ("Bert", "GPT2", "Llama", "ViT"):
            getattr(transformers, f"{name}Config", None)
            getattr(transformers, f"Flax{name}PreTrainedModel", None)
    gc.collect()
    gc.freeze()  # whether a search of 200 ms sees the collection of all that was imported, which takes 130, is chance
    return catalogue


def _save(output: Path, argv: Sequence[str], costs: Sequence[Cost]) -> None:
    from fusionlab.evidence.instruments.record import environment, save_json

    command = " ".join(["python", "-m", "benchmarks", "first_find", *argv])
    head = {
        "benchmark": "first_find",
        "command": command,
        "environment": environment().to_dict(),
        "summary": summary(costs),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    save_json(output, head | {"programs": [asdict(c) for c in costs]})


def main(argv: list[str]) -> int:
    """Prints the summary; 1 where a bound does not hold."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks first_find", description="The first search of a process."
    )
    parser.add_argument("--variant", choices=("forward", "train"), action="append", help="default: both")
    parser.add_argument("--dtype", choices=("f32", "bf16"), action="append", help="default: both")
    parser.add_argument("--models", default="", metavar="TEXT", help="only those whose id contains it")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one program in N")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="processes of each kind (default 3)")
    parser.add_argument("-o", "--output", type=Path, help="write the record of every process as JSON")
    asked = parser.parse_args(argv)
    wanted = [
        p
        for p in _prepare().programs()
        if p.variant in (asked.variant or ("forward", "train"))
        and p.dtype in (asked.dtype or ("f32", "bf16"))
        and asked.models in p.id
    ]
    costs = []
    for program in wanted[:: asked.every]:
        costs.append(cost(program, asked.repeats))
        print(_line(costs[-1]), file=sys.stderr)
    print("\n".join(summary(costs)))
    if asked.output is not None:
        _save(asked.output, argv, costs)
    return 0 if met(costs) else 1
