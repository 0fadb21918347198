"""What the benchmarks of kernels share: programs and their times, rivals, and the record of a run."""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
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


def compiled_at_once(
    programs: Mapping[str, tuple[Callable, Sequence[Any]]], failures: MutableMapping[str, str] | None = None
) -> dict[str, Callable[[], Any]]:
    """Programs on their arguments, compiled side by side, after the first; what is jitted already is compiled with its own options.

    XLA times several kernels for each product it finds, and its choice varies from one compilation to the next; what it has chosen for a
    product it takes again in the same process. So the others run the first one's choices, wherever they leave a product to XLA.

    `failures`: a program that does not compile is left out, with its error here; without it the error is raised.
    """

    def attempted(name: str, work: Callable[[], Any]) -> Any:
        return work() if failures is None else attempt(failures, name, work)

    def compile_(name: str) -> Any:
        return attempted(name, lowered[name].compile)

    lowered: dict[str, Any] = {}
    for name, (fn, args) in programs.items():
        if (one := attempted(name, functools.partial(jitted(fn).lower, *args))) is not None:
            lowered[name] = one
    first, *others = lowered or [None]
    if first is None:
        return {}
    made = {first: compile_(first)}
    with ThreadPoolExecutor() as pool:
        made |= zip(others, pool.map(compile_, others), strict=True)
    return {name: functools.partial(p, *programs[name][1]) for name, p in made.items() if p is not None}


def jitted(fn: Callable) -> Any:
    """Under `jax.jit`, unless it is already."""
    import jax

    return fn if hasattr(fn, "lower") else jax.jit(fn)


def attempt(failures: MutableMapping[str, str], name: str, work: Callable[[], Any]) -> Any:
    """What `work` returns; None where it raises, with the error under this name. A benchmark goes on without what fails."""
    try:
        return work()
    except Exception as e:  # of XLA, of a rival, of memory: anything
        failures[name] = f"{type(e).__name__}: {str(e).strip().partition(chr(10))[0][:400]}"
        print(f"{name} failed: {failures[name]}", file=sys.stderr, flush=True)
        return None


def peak_bytes(program: Any) -> int:
    """What a compiled program allocates: arguments, outputs and temporaries, less what they share."""
    found = program.memory_analysis()
    kept = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return int(kept + found.temp_size_in_bytes)


def compiled_side_by_side(lowered: Mapping[str, Any]) -> dict[str, Any]:
    """Lowered programs, compiled as by `compiled_at_once`."""
    first, *others = lowered
    made = {first: lowered[first].compile()}
    with ThreadPoolExecutor() as pool:
        made |= zip(others, pool.map(lambda name: lowered[name].compile(), others), strict=True)
    return made


def refusal(fn: Callable, args: Sequence[Any]) -> str | None:
    """Why a rival does not take these sizes or dtypes, in its own words; None where it does."""
    from fusionlab.errors import BackendError

    try:
        jitted(fn).lower(*args)
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


def routes(fn: Callable, *args: Any) -> list[dict[str, str]]:
    """Each fused call of a program: its role, the implementation it takes and why."""
    import jax

    from fusionlab.device import Device
    from fusionlab.kernels.op.primitive import FusedPrimitive

    found = []

    def walk(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            if isinstance(eqn.primitive, FusedPrimitive):
                one = eqn.primitive
                names = one.operand_names(eqn.params)
                shapes = {n: v.aval for n, v in zip(names, eqn.invars, strict=True)}
                decision = one.op.decide(one.role, shapes, Device.current(), **eqn.params)
                runs = {"implementation": decision.implementation, "why": decision.reason}
                found.append({"role": one.role, "activation": one.op.name, **runs})
            for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
                if hasattr(inner, "jaxpr"):
                    walk(inner.jaxpr)

    walk(jax.make_jaxpr(fn)(*args).jaxpr)
    return found


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


def torch_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def torch_samples(step: Callable[[], Any], samples: int, calls: int = CALLS) -> list[float]:
    """Seconds of a step of torch's: the device's on a CUDA device, on its own stream, elsewhere the host's of one call."""
    import torch

    for _ in range(3):
        step()
    if torch_device() == "cpu":
        return _host_samples(step, samples)
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


def torch_forgotten() -> None:
    """Frees what torch keeps of a case: its compiled programs and the memory it holds back from others."""
    import gc

    import torch

    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


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


def chosen(names: Iterable[str], only: str) -> list[str]:
    """The names that have the text of `--only`, or one of several with a "|" between them; of a text that is a name, that one alone."""
    names = list(names)
    parts = only.split("|")
    return [name for name in names if any(name == part if part in names else part in name for part in parts)]


def new_record(benchmark: str, options: argparse.Namespace) -> dict[str, Any]:
    """What was run, where and with what."""
    from fusionlab.evidence.instruments.record import environment

    here = environment().to_dict()
    if has_torch():
        here["versions"]["torch"] = importlib.metadata.version("torch")
    only = f" --only {options.only!r}" if getattr(options, "only", "") else ""
    command = f"python -m benchmarks {benchmark}" + " --quick" * options.quick + only
    return {"benchmark": benchmark, "command": command, "environment": here}


def continued(record: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The record in the file that is named, if it is one of the same benchmark, machine and versions, so that this run adds to it.

    Its `command` is then both, joined by "; ", the second with its commit if that is another one.
    """
    if not (options.output and options.output.exists()):
        return record
    before = json.loads(options.output.read_text(encoding="utf-8"))
    here, there = (
        (r["benchmark"], r["environment"]["hardware"], r["environment"]["versions"]) for r in (record, before)
    )
    if here != there:
        return record
    commits = [r["environment"].get("commit") for r in (before, record)]
    at = "" if commits[0] == commits[1] else f"  # commit {commits[1]}"
    return record | before | {"command": f"{before['command']}; {record['command']}{at}"}


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
