"""What the benchmarks of kernels share: programs and their times, rivals, and the record of a run."""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "h200"
CALLS = 8  # in a sample


def normal(seed: int, *shape: int, scale: float = 1.0) -> Any:
    """Random bf16 data: zeros would run faster than real data does."""
    import jax
    import jax.numpy as jnp

    return (jax.random.normal(jax.random.key(seed), shape) * scale).astype(jnp.bfloat16)


# Programs.


def compiled(fn: Callable, *args: Any, **options: Any) -> Callable[[], Any]:
    """The program on its arguments."""
    import jax

    program = jax.jit(fn).lower(*args).compile(compiler_options=options or None)
    return functools.partial(program, *args)


def compiled_at_once(programs: Mapping[str, tuple[Callable, Sequence[Any]]]) -> dict[str, Callable[[], Any]]:
    """Programs on their arguments, compiled side by side, after the first.

    XLA times several kernels for each product it finds, and its choice varies from one compilation to the next; what it has chosen for a
    product it takes again in the same process. So the others run the first one's choices, wherever they leave a product to XLA.
    """
    import jax

    lowered = {name: jax.jit(fn).lower(*args) for name, (fn, args) in programs.items()}
    made = compiled_side_by_side(lowered)
    return {name: functools.partial(program, *programs[name][1]) for name, program in made.items()}


def compiled_side_by_side(lowered: Mapping[str, Any]) -> dict[str, Any]:
    """Lowered programs, compiled as by `compiled_at_once`."""
    first, *others = lowered
    made = {first: lowered[first].compile()}
    with ThreadPoolExecutor() as pool:
        made |= zip(others, pool.map(lambda name: lowered[name].compile(), others), strict=True)
    return made


def refusal(fn: Callable, args: Sequence[Any]) -> str | None:
    """Why a rival does not take these sizes or dtypes, in its own words; None where it does."""
    import jax

    from fusionlab.errors import BackendError

    try:
        jax.jit(fn).lower(*args)
    except (BackendError, NotImplementedError, ValueError) as e:
        return str(e).partition("\n")[0]
    return None


def differences(a: Any, b: Any) -> float:
    """The largest ||b - a|| / ||a|| over outputs and gradients."""
    import jax

    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(_difference()(x, y)) for x, y in pairs)


@functools.cache
def _difference() -> Callable[[Any, Any], Any]:
    """Where the arrays are: some are larger than what a host should copy."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def of(x: Any, y: Any) -> Any:
        x, y = (a.astype(jnp.promote_types(a.dtype, jnp.float32)) for a in (x, y))
        return jnp.sqrt(jnp.sum(jnp.square(y - x)) / jnp.sum(jnp.square(x)))

    return of


# Times.


def measured(
    programs: Mapping[str, Callable], base: str, samples: int, calls: int = CALLS, repeats: int = 1
) -> dict[str, Any]:
    """Samples of each, and the ratio of the base's median to each one's, with its interval.

    Device time on a CUDA device, elsewhere the host's, of one call each; of one of the `repeats` that a program consists of.
    """
    from fusionlab.device import Device
    from fusionlab.evidence.instruments.device_clock import time_on_device

    if Device.current().platform == "cuda":
        timed = time_on_device(programs, samples=samples, calls=calls)
        times = {name: one.samples_s for name, one in timed.items()}
    else:
        times, calls = {name: _host_samples(run, samples) for name, run in programs.items()}, 1
    return compared({name: [t / repeats for t in taken] for name, taken in times.items()}, base, calls * repeats)


def compared(times: Mapping[str, Sequence[float]], base: str, calls: int) -> dict[str, Any]:
    """Samples of several programs as a record has them: each with its ratio to the base."""
    return {name: timed(taken, calls) | ratio_to(base, times[base], taken) for name, taken in times.items()}


def timed(samples: Sequence[float], calls: int) -> dict[str, Any]:
    import numpy as np

    return {"calls": calls, "samples_s": list(samples), "median_s": float(np.median(samples))}


def ratio_to(base: str, its: Sequence[float], samples: Sequence[float]) -> dict[str, Any]:
    """How many times faster than the base."""
    import numpy as np

    from fusionlab.evidence.instruments.timing import ratio_interval

    ratio = float(np.median(its) / np.median(samples))
    return {"ratio_to": base, "ratio": ratio, "interval": list(ratio_interval(its, samples))}


def _host_samples(run: Callable[[], Any], samples: int) -> list[float]:
    import jax

    times = []
    for _ in range(samples):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return times


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def torch_samples(step: Callable[[], Any], samples: int, calls: int = CALLS) -> list[float]:
    """Device seconds of a step of torch's, on its own stream."""
    import torch

    for _ in range(3):
        step()
    times = []
    for _ in range(samples):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20_000_000)  # some 10 ms, while the host queues the calls
        start.record()
        for _ in range(calls):
            step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / calls)
    return times


def line(name: str, found: Mapping[str, Any]) -> str:
    parts = []
    for program, one in [*found.items(), *found.get("torch", {}).items()]:
        if isinstance(one, dict) and "median_s" in one:
            ratio = (
                f" ({one['ratio']:.3f} [{one['interval'][0]:.3f}, {one['interval'][1]:.3f}])" if "ratio" in one else ""
            )
            parts.append(f"{program} {one['median_s'] * 1e6:.1f} us{ratio}")
    taken = ", ".join(f"{r['role']} {r['activation']}: {r['implementation']}" for r in found.get("routes", ()))
    return f"{name}: " + "; ".join(parts) + (f" | {taken}" if taken else "")


# The command and its record.


def parser_of(benchmark: str, doc: str | None) -> argparse.ArgumentParser:
    """With the options that every one of these benchmarks has."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {benchmark}", description=(doc or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the record as JSON instead of lines")
    parser.add_argument(
        "-o", "--output", type=Path, help="the record's file; a new one under benchmarks/results/h200 unless given"
    )
    parser.add_argument("--quick", action="store_true", help="fewer samples: a check that it runs, nothing to publish")
    return parser


def new_record(benchmark: str, options: argparse.Namespace) -> dict[str, Any]:
    """What was run, where and with what."""
    from fusionlab.evidence.instruments.record import environment

    here = environment().to_dict()
    if has_torch():
        here["versions"]["torch"] = importlib.metadata.version("torch")
    only = f" --only {options.only!r}" if getattr(options, "only", "") else ""
    command = f"python -m benchmarks {benchmark}" + " --quick" * options.quick + only
    return {"benchmark": benchmark, "command": command, "environment": here}


def finish(record: Mapping[str, Any], options: argparse.Namespace, on_cuda: bool) -> None:
    """Prints the record where JSON is asked for, and writes it where it was measured on a CUDA device or a file is named."""
    from fusionlab.evidence.instruments.record import to_json

    if options.json:
        print(to_json(record))
    if path := save(record, options, on_cuda):
        print(f"written to {path}", file=sys.stderr)


def save(record: Mapping[str, Any], options: argparse.Namespace, on_cuda: bool) -> Path | None:
    from fusionlab.evidence.instruments.record import save_json

    if not (options.output or on_cuda):
        return None
    here = record["environment"]
    name = f"{record['benchmark']}_{here['time'][:10]}_jax{here['versions']['jax']}.json"
    return save_json(options.output or RESULTS / name, record)
