"""lerp and its gradients: FusionLab, jax.jit, a broadcast-then-sum composite and torch, in one run.

    python -m benchmarks lerp [--json] [-o FILE] [--quick]

Times are device times of programs that take turns; every sample is kept (see gemm_epilogue.py). Beside them stands what the bytes alone
would take at the copy rate measured in the same run. Without a CUDA device `--quick` runs tiny sizes by the host's clock, to show that
it works.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .attention import add, measured
from .gemm_epilogue import RESULTS, _torch_samples, compiled, differences, line

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """Shapes of x, y and w; `bar`: backward's time over the bytes' at the copy rate, where one is asked for."""

    name: str
    x: Shape
    y: Shape
    w: Shape
    dtype: str = "float32"
    bar: float | None = None

    @property
    def out(self) -> Shape:
        import numpy as np

        return tuple(np.broadcast_shapes(self.x, self.y, self.w))

    @property
    def backward_bytes(self) -> int:
        """Read: the cotangent and w; written: the gradients of x and y."""
        import numpy as np

        return np.dtype(self.dtype).itemsize * sum(map(math.prod, (self.out, self.w, self.x, self.y)))


CASES = (
    Case("x (512,1,1024) y (512,1024,1024) w (1024,1)", (512, 1, 1024), (512, 1024, 1024), (1024, 1), bar=1.10),
    Case("x (1024,1,1024) y (1,1024,1024) w (1)", (1024, 1, 1024), (1, 1024, 1024), (1,), bar=1.10),
    Case("(64,1024,1024), no broadcast", (64, 1024, 1024), (64, 1024, 1024), (64, 1024, 1024), bar=1.12),
    Case("(a) [16,102400] f32", (16, 102400), (16, 102400), (1,)),
    Case("(b) [16,204800] f64", (16, 204800), (16, 204800), (1,), "float64"),
    Case("(c) x [16,1,1,1] y [16,3,224,224] w [1]", (16, 1, 1, 1), (16, 3, 224, 224), (1,)),
    Case("(d) x [16,1,1,1] y [16,3,244,244] w [3,1,244]", (16, 1, 1, 1), (16, 3, 244, 244), (3, 1, 244)),
)
TINY = (Case("tiny", (4, 1, 8), (4, 6, 8), (6, 1)), Case("tiny, f64", (4, 8), (4, 8), (1,), "float64"))


def blend(x: Any, y: Any, w: Any) -> Any:
    """What a user writes."""
    return x + w * (y - x)


def backward_of(fn: Callable) -> Callable:
    """(dx, dy) of a cotangent and the operands."""
    import jax

    return lambda ct, x, y, w: jax.vjp(lambda x, y: fn(x, y, w), x, y)[1](ct)


def total_of(fn: Callable) -> Callable:
    """(out, dx, dy)."""
    import jax

    def step(ct: Any, x: Any, y: Any, w: Any) -> Any:
        out, pull = jax.vjp(lambda x, y: fn(x, y, w), x, y)
        return out, *pull(ct)

    return step


def naive_backward(ct: Any, x: Any, y: Any, w: Any) -> Any:
    """As the original did before: w broadcast in full, full-size gradients, then sums."""
    import jax
    import jax.numpy as jnp

    whole = jax.lax.optimization_barrier(jnp.broadcast_to(w, ct.shape))
    moved = jax.lax.optimization_barrier(((1 - whole) * ct, whole * ct))
    return tuple(_sum_to(a, like.shape) for a, like in zip(moved, (x, y), strict=True))


def _sum_to(a: Any, shape: Shape) -> Any:
    padded = (1,) * (a.ndim - len(shape)) + shape
    axes = tuple(i for i, (n, m) in enumerate(zip(a.shape, padded, strict=True)) if n != m)
    return a.sum(axes, keepdims=True).reshape(shape)


def one(case: Case, samples: int, copy_bytes_per_s: float | None, torch: bool) -> dict[str, Any]:
    """Forward, backward and both of one case."""
    import jax
    import jax.numpy as jnp

    from fusionlab.ops import lerp

    x, y, w, ct = (
        jax.random.normal(jax.random.key(i), s, jnp.dtype(case.dtype))
        for i, s in enumerate((case.x, case.y, case.w, case.out))
    )
    found: dict[str, Any] = {}
    for part, wrap, args in (
        ("forward", lambda f: f, (x, y, w)),
        ("backward", backward_of, (ct, x, y, w)),
        ("total", total_of, (ct, x, y, w)),
    ):
        programs: dict[str, Callable] = {"jax.jit": compiled(wrap(blend), *args)}
        programs["fusionlab"] = compiled(wrap(lerp), *args)
        left_out: dict[str, str] = {}
        add(programs, left_out, "op by cuda", wrap(functools.partial(lerp, implementation="cuda")), args)
        if part == "backward":
            programs["broadcast, then sum"] = compiled(naive_backward, *args)
        reference = programs["jax.jit"]()
        timed = measured(programs, "jax.jit", samples)
        timed["difference to jax.jit"] = {n: differences(reference, f()) for n, f in programs.items()}
        if torch:
            timed["torch"] = torch_lerp(case, part, samples)
        found[part] = timed | {"left out": left_out}
    if copy_bytes_per_s:
        found["floor_s"] = case.backward_bytes / copy_bytes_per_s
    return found


def torch_lerp(case: Case, part: str, samples: int) -> dict[str, Any]:
    """torch.lerp eager and compiled; apart from the others' turns. Its w is broadcast as numpy's is."""
    import torch

    make = functools.partial(torch.randn, device="cuda", dtype=getattr(torch, case.dtype))
    x, y = (make(s).requires_grad_() for s in (case.x, case.y))
    w, ct = make(case.w), make(case.out)
    found = {}
    for label, f in (("torch eager", torch.lerp), ("torch.compile", torch.compile(torch.lerp))):

        def step(f: Any = f) -> Any:
            with torch.no_grad() if part == "forward" else contextlib.nullcontext():
                out = f(x, y, w)
            return out if part == "forward" else torch.autograd.grad(out, (x, y), ct)

        if part == "backward":  # the forward once, outside of what is timed
            out = f(x, y, w)

            def step(out: Any = out) -> Any:
                return torch.autograd.grad(out, (x, y), ct, retain_graph=True)

        times = _torch_samples(step, samples)
        found[label] = {"samples_s": times, "median_s": sorted(times)[samples // 2]}
    return found


def main(argv: list[str]) -> int:
    """Prints a line for each measurement and writes the record. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks lerp", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the record as JSON instead of lines")
    parser.add_argument(
        "-o", "--output", type=Path, help="the record's file; a new one under benchmarks/results/h200 unless given"
    )
    parser.add_argument("--quick", action="store_true", help="fewer samples: a check that it runs, nothing to publish")
    options = parser.parse_args(argv)

    import jax

    from fusionlab.device import Device
    from fusionlab.evidence.peaks import measure_peaks
    from fusionlab.evidence.record import environment, save_json, to_json

    on_cuda = Device.current().platform == "cuda"
    if not on_cuda and not options.quick:
        print("this benchmark needs a CUDA device (JAX sees none here), or --quick for tiny sizes", file=sys.stderr)
        return 2
    samples = 40 if not options.quick else 6 if on_cuda else 3
    torch = on_cuda and importlib.util.find_spec("torch") is not None
    record: dict[str, Any] = {
        "benchmark": "lerp",
        "command": "python -m benchmarks lerp" + " --quick" * options.quick,
        "environment": environment().to_dict(),
        "cases": {},
    }
    rate = measure_peaks().copy_bytes_per_s if on_cuda else None
    record["peaks"] = {"copy_bytes_per_s": rate}
    for case in CASES if on_cuda else TINY:
        with jax.enable_x64(case.dtype == "float64"):
            found = one(case, samples, rate, torch)
        record["cases"][case.name] = found | {"bar": case.bar}
        if not options.json:
            for part in ("forward", "backward", "total"):
                print(line(f"{case.name}, {part}", found[part]), flush=True)
            if "floor_s" in found:
                print(f"  bytes of the backward at the copy rate: {found['floor_s'] * 1e6:.1f} us", flush=True)
    if options.json:
        print(to_json(record))
    if options.output or on_cuda:
        stamp = record["environment"]["time"][:10]
        path = options.output or RESULTS / f"lerp_{stamp}_jax{jax.__version__}.json"
        save_json(path, record)
        print(f"written to {path}", file=sys.stderr)
    return 0
