"""Blockwise attention on a CPU against the jitted original: time, and memory in a fresh process each.

    python -m benchmarks attention_cpu [--quick] [--length S] [--samples N] [-o FILE]

B 1, H 4, D 64, float32, in two spellings: (B, T, H, D) with einsum, and (B, H, T, D) with matmul; without a mask, with one of
lengths (data: 3/4 of the keys) and causal. Forward, and forward with all three gradients. "original" is jax.jit of the program,
"xla_blockwise" jax.jit of what fusionlab.fuse makes of the same program. Times are interleaved (A B B A).
Memory is the growth of the resident set (VmHWM) over one call, inputs built and program compiled before.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAYOUTS = ("bthd_einsum", "bhtd_matmul")
MASKS = ("none", "lengths", "causal")
WORK = ("forward", "forward_backward")
VARIANTS = ("original", "xla_blockwise")
BATCH, HEADS, FEATURES = 1, 4, 64
RESULTS = Path(__file__).parents[1] / "results" / "cpu"


def program(layout: str, mask: str, work: str, variant: str) -> Callable:
    """The function timed: original or fused, alone or with its gradients."""
    import jax

    import fusionlab as fl

    attend = _original(layout, mask)

    def forward_backward(ct: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, *rest), q, k, v)
        return out, *pull(ct)

    fn = attend if work == "forward" else forward_backward
    if variant == "original":
        return fn
    return fl.fuse(fn, passes="dot_product_attention", implementation="xla_blockwise")


def _original(layout: str, mask: str) -> Callable:
    import jax
    import jax.numpy as jnp

    def masked(s: Any, seen: tuple[Any, ...]) -> Any:
        if mask == "causal":
            seen = (jnp.tril(jnp.ones(s.shape[-2:], bool)),)
        return jnp.where(seen[0], s, -1e30) if seen else s

    def einsum(q: Any, k: Any, v: Any, *seen: Any) -> Any:
        scores = masked(jnp.einsum("bthd,bshd->bhts", q, k) / FEATURES**0.5, seen)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v)

    def matmul(q: Any, k: Any, v: Any, *seen: Any) -> Any:
        scores = masked(q @ jnp.swapaxes(k, -1, -2) / FEATURES**0.5, seen)
        return jax.nn.softmax(scores, axis=-1) @ v

    return einsum if layout == "bthd_einsum" else matmul


def inputs(layout: str, mask: str, work: str, length: int) -> list[Any]:
    """([cotangent,] query, key, value[, mask of lengths]) as the program takes them."""
    import jax
    import jax.numpy as jnp

    shape = (BATCH, length, HEADS, FEATURES) if layout == "bthd_einsum" else (BATCH, HEADS, length, FEATURES)
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(k, shape) for k in keys[: 3 if work == "forward" else 4]]
    if mask == "lengths":
        arrays.append(jnp.broadcast_to(jnp.arange(length) < length * 3 // 4, (BATCH, 1, 1, length)))
    return jax.block_until_ready(arrays)


def measure_time(layout: str, mask: str, work: str, length: int, samples: int) -> dict[str, Any]:
    """Interleaved samples of both variants, and how far their results are apart."""
    import jax
    import numpy as np

    from fusionlab.evidence.instruments.timing import time_pair

    original, fused = (program(layout, mask, work, variant) for variant in VARIANTS)
    args = inputs(layout, mask, work, length)
    apart = [
        float(np.max(np.abs(np.asarray(a) - np.asarray(b))))
        for a, b in zip(jax.tree.leaves(jax.jit(original)(*args)), jax.tree.leaves(jax.jit(fused)(*args)), strict=True)
    ]
    timing = time_pair(original, fused, *args, samples=samples, budget_s=600.0)
    return {
        "original_s": timing.before.samples_s,
        "xla_blockwise_s": timing.after.samples_s,
        "original_compile_s": timing.before.compile_s,
        "xla_blockwise_compile_s": timing.after.compile_s,
        "ratio": timing.ratio,
        "ratio_interval": timing.interval,
        "verdict": str(timing.verdict),
        "max_abs_difference": max(apart),
    }


def measure_memory(layout: str, mask: str, work: str, length: int, variant: str) -> dict[str, int]:
    """Growth of the resident set's high-water mark over the first call, in bytes."""
    import jax

    args = inputs(layout, mask, work, length)
    compiled = jax.jit(program(layout, mask, work, variant)).lower(*args).compile()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # what compiling left free would be taken first, and be no growth
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark to the present size
    before = _high_water_bytes()
    jax.block_until_ready(compiled(*args))
    return {"growth_bytes": _high_water_bytes() - before, "before_bytes": before}


def _high_water_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def in_fresh_process(*args: str) -> Any:
    """The JSON that this module prints when run with these arguments in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.ops.attention_cpu", *args], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"benchmark process {' '.join(args)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run(length: int, samples: int, processes: int) -> list[dict[str, Any]]:
    """All cases; one line is printed as each is done."""
    print(f"B {BATCH} H {HEADS} S {length} D {FEATURES} float32, original -> xla_blockwise")
    cases = []
    for layout, mask, work in itertools.product(LAYOUTS, MASKS, WORK):
        case: dict[str, Any] = {"layout": layout, "mask": mask, "work": work}
        common = (layout, mask, work, str(length))
        case["time"] = in_fresh_process("--child", "time", *common, str(samples))
        case["memory"] = {v: [] for v in VARIANTS}
        for _, variant in itertools.product(range(processes), VARIANTS):
            case["memory"][variant].append(in_fresh_process("--child", "memory", *common, variant))
        cases.append(case)
        print(summary(case), flush=True)
    return cases


def summary(case: dict[str, Any]) -> str:
    times = [statistics.median(case["time"][f"{v}_s"]) * 1e3 for v in VARIANTS]
    growth = [statistics.median(m["growth_bytes"] for m in case["memory"][v]) / 1e6 for v in VARIANTS]
    low, high = case["time"]["ratio_interval"]
    return (
        f"{case['layout']:12} {case['mask']:8} {case['work']:17} {times[0]:7.1f} -> {times[1]:6.1f} ms ({times[0] / times[1]:.2f}x, "
        f"[{low:.2f}, {high:.2f}]), peak growth {growth[0]:6.1f} -> {growth[1]:5.1f} MB (1/{growth[0] / growth[1]:.1f})"
    )


def main(argv: list[str]) -> int:
    """Runs the benchmark, or, with --child, one measurement of it; returns the exit status."""
    if argv[:1] == ["--child"]:
        kind, layout, mask, work, length, last = argv[1:]
        if kind == "time":
            print(json.dumps(measure_time(layout, mask, work, int(length), int(last))))
        else:
            print(json.dumps(measure_memory(layout, mask, work, int(length), last)))
        return 0
    parser = argparse.ArgumentParser(prog="python -m benchmarks attention_cpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="S 1024, fewer samples; no verdict")
    parser.add_argument("--length", type=int, help="S; 4096, or 1024 with --quick")
    parser.add_argument("--samples", type=int, help="of each program; 40, or 10 with --quick")
    parser.add_argument("-o", "--output", type=Path, help="where the JSON record goes")
    options = parser.parse_args(argv)
    if not Path("/proc/self/clear_refs").exists():
        print("attention_cpu: needs Linux: the resident set is read from /proc", file=sys.stderr)
        return 1
    length = options.length or (1024 if options.quick else 4096)
    samples = options.samples or (10 if options.quick else 40)
    return _run_and_save(length, samples, 1 if options.quick else 3, options.output, argv)


def _run_and_save(length: int, samples: int, processes: int, output: Path | None, argv: list[str]) -> int:
    import jax

    from fusionlab.evidence.instruments.record import environment, save_json

    jax.config.update("jax_platforms", "cpu")
    where = environment()
    output = output or RESULTS / f"attention_s{length}_jax{where.versions['jax']}.json"
    record = {
        "command": " ".join(["python", "-m", "benchmarks", "attention_cpu", *argv]),
        "what": __doc__,
        "shape": {"B": BATCH, "H": HEADS, "S": length, "D": FEATURES, "dtype": "float32"},
        "environment": where.to_dict(),
        "cases": run(length, samples, processes),
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    save_json(output, record)
    print(f"{where}\nrecord: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
