"""Whether kernels of FusionLab's own touch memory they should not, or race: compute-sanitizer over small calls, on a CUDA device.

    python -m benchmarks sanitizer [-o FILE] [--only NAME]

Each call (layer and group norms forward and backward, decoding steps) runs in a process of its own under `memcheck` and under `racecheck`
of CUDA's compute-sanitizer, which look at FusionLab's kernels alone. The record holds the tools' closing lines.
"""

from __future__ import annotations

import argparse
import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..measuring import finish, new_record

TOOLS = ("memcheck", "racecheck")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) .*")


def layer_norms() -> None:
    """Forward and backward at widths of one warp and of several blocks' work, none a power of two."""
    import jax
    import jax.numpy as jnp

    from fusionlab.ops import layer_norm_and_sum

    for rows, columns, dtype in (
        (37, 520, "bfloat16"),
        (70, 1000, "float32"),
        (21, 4104, "bfloat16"),
        (9, 333, "float16"),
    ):
        keys = jax.random.split(jax.random.key(0), 5)
        x, residual = (jax.random.normal(k, (rows, columns)).astype(dtype) for k in keys[:2])
        vectors = [jax.random.normal(k, (columns,)).astype(dtype) for k in keys[2:]]

        def loss(x: Any, residual: Any, shift: Any, scale: Any, bias: Any) -> Any:
            out, total = layer_norm_and_sum(x, scale, bias, shift=shift, residual=residual, implementation="cuda")
            return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(total.astype(jnp.float32))

        jax.block_until_ready(jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3, 4)))(x, residual, *vectors))


def group_norms() -> None:
    """Forward and backward: several threads along positions and one, groups of part of a vector, odd channels, one group, narrow images."""
    import jax
    import jax.numpy as jnp

    from fusionlab.ops import group_norm

    for shape, groups, dtype in (
        ((3, 17, 19, 320), 32, "bfloat16"),
        ((2, 70, 2560), 32, "float32"),
        ((1, 33, 1023), 11, "float16"),
        ((2, 900, 24), 1, "bfloat16"),
        ((2, 3000, 4), 2, "float32"),
    ):
        keys = jax.random.split(jax.random.key(0), 3)
        x = jax.random.normal(keys[0], shape).astype(dtype)
        vectors = [jax.random.normal(k, shape[-1:]).astype(dtype) for k in keys[1:]]

        def loss(x: Any, scale: Any, bias: Any, groups: int = groups) -> Any:
            out = group_norm(x, scale, bias, groups=groups, activation="silu", implementation="cuda")
            return jnp.sum(jnp.sin(out.astype(jnp.float32)))

        jax.block_until_ready(jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(x, *vectors))


def decoding() -> None:
    """Two layers, one text and eleven, caches of a length that is no power of two."""
    import jax
    import jax.numpy as jnp

    from ..measuring import normal
    from ..programs.decoding import Case, by_op, caches_of, layers_of

    for case in (Case("one", 96, 3, 45, 1), Case("eleven", 160, 5, 77, 11)):
        layers, caches = layers_of(case)[:2], caches_of(case)[:2]
        step = jax.jit(functools.partial(by_op, implementation="cuda"))
        jax.block_until_ready(step(layers, normal(1, case.batch, 1, case.embed), caches, jnp.int32(case.cache - 6)))


def decoding_by_one_kernel() -> None:
    """The same as one kernel of all layers, which wide layers alone are otherwise."""
    from fusionlab.kernels.ops.multi_transformer.decode import backend as cuda
    from fusionlab.kernels.ops.multi_transformer.decode.persistent import plan as persistent

    cuda.is_persistent = persistent.takes  # in this process, which ends with the call
    decoding()


CALLS: dict[str, tuple[Callable[[], None], str]] = {  # with what the names of their kernels begin with
    "layer_norm": (layer_norms, "norm_"),
    "group_norm": (group_norms, "gn_"),
    "multi_transformer": (decoding, "decode_"),
    "multi_transformer by one kernel": (decoding_by_one_kernel, "decode_"),
}


def checked(tool: str, name: str) -> dict[str, Any]:
    """The tool's verdict on a call: errors (or hazards), its closing line, and its exit status."""
    kernels = CALLS[name][1]
    given = (tool, "--kernel-regex", f"kns={kernels}", "--error-exitcode", "9")
    command = ["compute-sanitizer", "--tool", *given, sys.executable, "-m", "benchmarks", "sanitizer", "--call", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    text = done.stdout + done.stderr
    closing = list(_SUMMARY.finditer(text))
    if not closing:
        raise RuntimeError(f"{' '.join(command)} gave no summary, exit status {done.returncode}:\n{text[-2000:]}")
    found = {"errors": int(closing[-1][1]), "summary": closing[-1][0], "exit_status": done.returncode}
    if found["errors"] or done.returncode:
        found["output"] = text[-4000:]
    return found


def main(argv: list[str]) -> int:
    """Checks every call with every tool and writes the record. Returns the exit status: 1 where anything was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks sanitizer", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "-o", "--output", help="the record's file; a new one under benchmarks/results/h200 unless given"
    )
    parser.add_argument("--only", default="", help="only the calls whose name has this text")
    parser.add_argument("--call", choices=CALLS, help="run this call, as the tool does")
    options = parser.parse_args(argv)
    if options.call:
        CALLS[options.call][0]()
        return 0
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer, which comes with CUDA's toolkit, is not on PATH", file=sys.stderr)
        return 2
    options.quick = options.json = False
    version = subprocess.run(
        ["compute-sanitizer", "--version"], capture_output=True, text=True, check=True
    ).stdout.strip()
    record = new_record("sanitizer", options) | {"tool": version.splitlines()[-1], "calls": {}}
    names = [name for name in CALLS if options.only in name]
    with ThreadPoolExecutor() as pool:  # most of the time is the tools', on the CPU
        pending = {name: {tool: pool.submit(checked, tool, name) for tool in TOOLS} for name in names}
        for name, by_tool in pending.items():
            record["calls"][name] = {tool: one.result() for tool, one in by_tool.items()}
            for tool, found in record["calls"][name].items():
                print(f"{name}, {tool}: {found['summary']}", flush=True)
    finish(record, options, on_cuda=True)
    return int(any(f["errors"] or f["exit_status"] for call in record["calls"].values() for f in call.values()))
