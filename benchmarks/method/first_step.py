"""The time to the first step of a process: to trace, find, rewrite, lower, compile and run a train step, cold and from caches.

    python -m benchmarks first_step [--layers N ...] [--repeats N] [--quick] [--json] [-o FILE]

The program is a train step of `fusionlab.models.gpt` (loss, gradients and a step of SGD), once under `jax.jit` and once fused. Each sample
is a process of its own that has imported everything and has the arguments on the device; what is timed is what the first call adds:

    trace    from the function to its equations
    find     the search with its proofs (fused only)
    rewrite  the equations again with fused ops in them (fused only)
    lower    from equations to StableHLO
    kernels  compiling CUDA kernels and the launcher, wherever it happens (fused only)
    compile  XLA, with the choice of kernels for matrix products on a GPU
    run      the first execution

Each phase has the time of the clock and the processor time of all threads. On a machine that does other work at the same time the second is
the one to quote.

`cold` starts with empty folders. `kernels cached` keeps FusionLab's folder of compiled kernels (`FUSIONLAB_CACHE_DIR`), which is what a
second process has without any setting; it is left out where no kernel is compiled. `all cached` keeps JAX's compilation cache
(`jax_compilation_cache_dir`) as well.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PHASES = ("trace", "find", "rewrite", "lower", "kernels", "compile", "run")
STATES = ("cold", "kernels cached", "all cached")
SIZES = {
    "gpu": {"embed": 768, "heads": 12, "vocab": 50304, "batch": 8, "length": 1024},
    "cpu": {"embed": 256, "heads": 4, "vocab": 2048, "batch": 2, "length": 128},
}


# One sample, in a process of its own.


class Clock:
    """Seconds by phase, of a clock. A phase inside another one is not counted for that one too."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.processor_seconds = dict.fromkeys(PHASES, 0.0)
        self._inner: list[tuple[float, float]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._inner.append((0.0, 0.0))
        start, processor = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            taken, used = time.perf_counter() - start, time.process_time() - processor
            inner, inner_used = self._inner.pop()
            self.seconds[name] += taken - inner
            self.processor_seconds[name] += used - inner_used
            if self._inner:
                outer, outer_used = self._inner[-1]
                self._inner[-1] = outer + taken, outer_used + used

    def around(self, owner: Any, attribute: str, name: str) -> None:
        """Counts each call of `owner.attribute` for a phase."""
        inner = getattr(owner, attribute)

        @functools.wraps(inner)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return inner(*args, **kwargs)

        setattr(owner, attribute, timed)


def train_step(layers: int, sizes: Mapping[str, int]) -> tuple[Callable, tuple[Any, ...]]:
    """The step and its arguments: bfloat16 on a GPU, float32 on a CPU."""
    import jax
    import jax.numpy as jnp

    from fusionlab.models import gpt

    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    shape = {name: sizes[name] for name in ("embed", "heads", "vocab")}
    config = gpt.Config(layers=layers, longest=sizes["length"], **shape)

    def loss(params: Any, tokens: Any) -> Any:
        cache = gpt.init_cache(sizes["batch"], config, dtype=dtype)
        logits, _ = gpt.prefill(params, tokens[:, :-1], cache, config=config)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits.astype(jnp.float32)), tokens[:, 1:, None], -1)
        return -jnp.mean(chosen)

    def step(params: Any, tokens: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        return value, jax.tree.map(lambda p, g: p - jnp.asarray(1e-3, p.dtype) * g, params, gradients)

    tokens = jax.random.randint(jax.random.key(1), (sizes["batch"], sizes["length"] + 1), 0, sizes["vocab"])
    return step, (gpt.init(jax.random.key(0), config, dtype), tokens)


def sample(version: str, layers: int, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Seconds by phase of the first call of the step in this process: `version` is "jit" or "fused"."""
    import jax

    from fusionlab.kernels.launch import compile as kernels
    from fusionlab.kernels.launch import native

    clock = Clock()
    clock.around(kernels.CompileCache, "get", "kernels")
    # Before the module of the custom call is imported, which builds the launcher.
    clock.around(native, "build", "kernels")

    import fusionlab as fl
    from fusionlab.evidence.instruments.record import environment
    from fusionlab.kernels.launch import ffi_call
    from fusionlab.verbs import fused as verb

    step, args = train_step(layers, sizes)
    jax.block_until_ready(args)
    if version == "fused":
        clock.around(verb, "graph_of", "trace")
        clock.around(verb, "find_in", "find")
        clock.around(verb.PlainFindings, "rewritten", "rewrite")
        program = fl.fuse(step)
        with clock.phase("lower"):
            lowered = program.lower(*args)
    else:
        with clock.phase("trace"):
            traced = jax.jit(step).trace(*args)
        with clock.phase("lower"):
            lowered = traced.lower()
    with clock.phase("compile"):
        compiled = lowered.compile()
    with clock.phase("run"):
        jax.block_until_ready(compiled(*args))
    counters = kernels.DEFAULT_CACHE.counters()
    return {
        "seconds": clock.seconds,
        "processor_seconds": clock.processor_seconds,
        "cubins": {"found": counters.hits, "compiled": counters.misses},
        "launcher": "compiled" if ffi_call.LAUNCHER is not None else native.why_not() or "python",
        "load": os.getloadavg()[0],  # of the machine: on a busy one the times are those of the others, too
        "environment": environment().to_dict(),
    }


# The benchmark: processes, caches, record.


def in_a_process(
    version: str, layers: int, sizes: Mapping[str, int], kernels: Path, programs: Path | None
) -> dict[str, Any]:
    """A sample of a fresh process with these folders as its caches; JAX's own is off without one."""
    settings = {
        "FUSIONLAB_CACHE_DIR": str(kernels),
        "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
    }
    if programs is not None:
        settings["JAX_COMPILATION_CACHE_DIR"] = str(programs)
        settings["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        settings["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    asked = json.dumps({"version": version, "layers": layers, "sizes": dict(sizes)})
    command = [sys.executable, "-m", "benchmarks", "first_step", "--sample", asked]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the process that measured ended with status {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measured(layers: int, sizes: Mapping[str, int], repeats: int) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Samples by state of the caches and version, in turns. The first sample of a repeat fills the caches of the others."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {state: {"jit": [], "fused": []} for state in STATES}
    for _ in range(repeats):
        for version in ("jit", "fused"):
            with tempfile.TemporaryDirectory() as folder:
                kernels, programs = Path(folder, "kernels"), Path(folder, "programs")
                first = in_a_process(version, layers, sizes, kernels, None)
                found["cold"][version].append(first)
                if first["cubins"]["compiled"] or first["seconds"]["kernels"]:
                    found["kernels cached"][version].append(in_a_process(version, layers, sizes, kernels, None))
                in_a_process(version, layers, sizes, kernels, programs)  # fills JAX's cache
                found["all cached"][version].append(in_a_process(version, layers, sizes, kernels, programs))
    return {state: {v: samples for v, samples in versions.items() if samples} for state, versions in found.items()}


def medians(samples: Sequence[Mapping[str, Any]], clock: str = "seconds") -> dict[str, float]:
    """Median seconds of each phase, and of their sum."""
    each = {phase: statistics.median(s[clock][phase] for s in samples) for phase in PHASES}
    return each | {"sum": statistics.median(sum(s[clock].values()) for s in samples)}


def summed(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Samples of one version in one state of the caches, as a record has them."""
    kept = ("seconds", "processor_seconds", "cubins", "launcher", "load")
    return {
        "median_s": medians(samples),
        "processor_median_s": medians(samples, "processor_seconds"),
        **{key: [s[key] for s in samples] for key in kept},
    }


def row(label: str, seconds: Mapping[str, float]) -> str:
    return f"{label:40}" + "".join(f"{seconds[name]:9.2f}" for name in (*PHASES, "sum"))


def _platform() -> str:
    """The platform that a process of JAX's gets here, without this process starting a backend."""
    code = "import jax; print(jax.default_backend())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()[-1]


def main(argv: list[str]) -> int:
    """Prints medians by phase, and writes the record where one is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks first_step", description="The time to the first step.")
    parser.add_argument(
        "--layers", type=int, nargs="+", default=[2, 12], help="layers of the model (default: 2 and 12)"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="processes of each kind (default 3)")
    parser.add_argument(
        "--quick", action="store_true", help="one process of each kind, the small sizes: a check that it runs"
    )
    parser.add_argument("--json", action="store_true", help="print the record as JSON")
    parser.add_argument("-o", "--output", type=Path, help="write the record as JSON")
    parser.add_argument("--sample", help=argparse.SUPPRESS)  # one sample, in this process
    asked = parser.parse_args(argv)
    if asked.sample:
        print(json.dumps(sample(**json.loads(asked.sample))))
        return 0
    from fusionlab.evidence.instruments.record import save_json, to_json

    platform = _platform()
    sizes = SIZES["cpu" if asked.quick or platform == "cpu" else "gpu"]
    repeats = 1 if asked.quick else asked.repeats
    layers_asked = " ".join(map(str, asked.layers))
    record: dict[str, Any] = {
        "benchmark": "first_step",
        "command": f"python -m benchmarks first_step --layers {layers_asked} --repeats {repeats}",
        "sizes": sizes,
        "programs": {},
    }
    print(" " * 40 + "".join(f"{name:>9}" for name in (*PHASES, "sum")), file=sys.stderr)
    for layers in asked.layers:
        found = measured(layers, sizes, repeats)
        record["environment"] = found["cold"]["fused"][0]["environment"]
        record["programs"][f"{layers} layers"] = {
            state: {version: summed(samples) for version, samples in versions.items()}
            for state, versions in found.items()
        }
        for state, versions in record["programs"][f"{layers} layers"].items():
            for version, one in versions.items():
                label = f"{layers} layers, {state}, {version}"
                print(row(label, one["median_s"]), file=sys.stderr)
                print(row(f"{label}, processor", one["processor_median_s"]), file=sys.stderr)
        if asked.output is not None:  # after each, since all take long
            asked.output.parent.mkdir(parents=True, exist_ok=True)
            save_json(asked.output, record)
    if asked.json:
        print(to_json(record))
    return 0
