"""lerp and its gradients: FusionLab, jax.jit, a broadcast-then-sum composite and torch, in one run.

    python -m benchmarks lerp [--json] [-o FILE] [--quick] [--table FILE --of RECORD] [--tune]

Times are device times of programs that take turns; every sample is kept (see gemm_epilogue.py). What takes microseconds is repeated in one
program, each time on the results of the time before. Beside the times stands what the bytes alone would take at the copy rate measured in
the same run, and how many times faster than each rival FusionLab is, as shipped: what it takes comes from the table of the architecture.
`--table FILE --of RECORD` adds what a record of this benchmark holds for best to such a table and measures nothing: its repeated programs
tell apart what single launches of few microseconds do not. `--tune` times other ways to tile the backward (lerp_tiling.py). Without a
CUDA device `--quick` runs tiny sizes by the host's clock, to show that it works.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..measuring import (
    CALLS,
    compiled_at_once,
    differences,
    finish,
    has_torch,
    line,
    measured,
    new_record,
    parser_of,
    ratio_to,
    refusal,
    save,
    timed,
    torch_samples,
)

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
    def repeats(self) -> int:
        """In one program: a launch on its own takes as long as the small ones do."""
        return 8 if self.y == self.out and math.prod(self.out) < 1 << 24 else 1

    @property
    def calls(self) -> int:
        """In a sample: fewer of those that take milliseconds."""
        return CALLS if math.prod(self.out) < 1 << 28 else 3

    @property
    def backward_bytes(self) -> int:
        """Read: the cotangent and w; written: the gradients of x and y."""
        import numpy as np

        return np.dtype(self.dtype).itemsize * sum(map(math.prod, (self.out, self.w, self.x, self.y)))


CASES = (
    Case("x (512,1,1024) y (512,1024,1024) w (1024,1)", (512, 1, 1024), (512, 1024, 1024), (1024, 1), bar=1.10),
    Case("x (1024,1,1024) y (1,1024,1024) w (1)", (1024, 1, 1024), (1, 1024, 1024), (1,), bar=1.10),
    Case("x and y (64,1024,1024) w (1)", (64, 1024, 1024), (64, 1024, 1024), (1,), bar=1.12),
    Case("(a) [16,102400] f32", (16, 102400), (16, 102400), (1,)),
    Case("(b) [16,204800] f64", (16, 204800), (16, 204800), (1,), "float64"),
    Case("(c) x [16,1,1,1] y [16,3,224,224] w [1]", (16, 1, 1, 1), (16, 3, 224, 224), (1,)),
    Case("(d) x [16,1,1,1] y [16,3,244,244] w [3,1,244]", (16, 1, 1, 1), (16, 3, 244, 244), (3, 1, 244)),
)
RIVALS = ("jax.jit", "broadcast, then sum", "torch eager", "torch.compile")
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


def naive(x: Any, y: Any, w: Any) -> Any:
    """As the original did before: w broadcast in full; its gradients full-size ones, then sums."""
    import jax
    import jax.numpy as jnp

    shape = jnp.broadcast_shapes(x.shape, y.shape, w.shape)

    @jax.custom_vjp
    def of(x: Any, y: Any, w: Any) -> Any:
        return blend(x, y, jax.lax.optimization_barrier(jnp.broadcast_to(w, shape)))

    def backward(w: Any, ct: Any) -> Any:
        whole = jax.lax.optimization_barrier(jnp.broadcast_to(w, shape))
        moved = jax.lax.optimization_barrier(((1 - whole) * ct, whole * ct))
        return *(_sum_to(a, like.shape) for a, like in zip(moved, (x, y), strict=True)), None

    of.defvjp(lambda x, y, w: (of(x, y, w), w), backward)
    return of(x, y, w)


def _sum_to(a: Any, shape: Shape) -> Any:
    padded = (1,) * (a.ndim - len(shape)) + shape
    axes = tuple(i for i, (n, m) in enumerate(zip(a.shape, padded, strict=True)) if n != m)
    return a.sum(axes, keepdims=True).reshape(shape)


def repeated(part: str, fn: Callable, times: int) -> Callable:
    """That many of them in one program, each on what the one before made of y and of the cotangent, which have the result's shape."""
    import jax

    apart = jax.lax.optimization_barrier  # else XLA makes one kernel of them all

    def forward(x: Any, y: Any, w: Any) -> Any:
        for _ in range(times):
            y = apart(fn(x, y, w))
        return y

    def with_gradients(ct: Any, x: Any, y: Any, w: Any) -> Any:
        sums = []
        for _ in range(times):
            *out, dx, ct = apart(fn(ct, x, y, w))
            y = out[0] if out else y
            sums.append(dx)
        return y, sums, ct

    return fn if times == 1 else forward if part == "forward" else with_gradients


PARTS = {"forward": lambda fn: fn, "backward": backward_of, "total": total_of}


def operands(case: Case) -> tuple[Any, ...]:
    """The cotangent, x, y and w."""
    import jax
    import jax.numpy as jnp

    shapes = enumerate((case.out, case.x, case.y, case.w))
    return tuple(jax.random.normal(jax.random.key(i), s, jnp.dtype(case.dtype)) for i, s in shapes)


def one(case: Case, samples: int, copy_bytes_per_s: float | None, torch: bool) -> dict[str, Any]:
    """Forward, backward and both of one case."""
    import fusionlab as fl
    from fusionlab.ops import lerp

    fused = fl.fuse(blend)
    rivals = {
        "jax.jit": blend,
        "fusionlab": fused,
        "broadcast, then sum": naive,
        "op by cuda": functools.partial(lerp, implementation="cuda"),
    }
    given, found = operands(case), {}
    by_torch = torch_lerp(case, samples) if torch else {}
    for part, wrap in PARTS.items():
        args = given[1:] if part == "forward" else given
        left_out = {n: why for n, f in rivals.items() if (why := refusal(wrap(f), args))}
        taken = {n: wrap(f) for n, f in rivals.items() if n not in left_out}
        once = compiled_at_once({n: (f, args) for n, f in taken.items()})
        reference = once["jax.jit"]()
        apart = {n: differences(reference, run()) for n, run in once.items()}
        del reference
        if case.repeats > 1:
            once = compiled_at_once({n: (repeated(part, f, case.repeats), args) for n, f in taken.items()})
        found[part] = measured(once, "jax.jit", samples, case.calls, case.repeats)
        found[part]["same code as jax.jit"] = same_code(once["jax.jit"], once["fusionlab"])
        found[part]["torch"] = by_torch.get(part, {})
        found[part]["fusionlab against"] = against(found[part])
        found[part] |= {"difference to jax.jit": apart, "left out": left_out}
        found[part]["routes"] = routes(wrap(fused), *args)
    if copy_bytes_per_s:
        found["floor_s"] = case.backward_bytes / copy_bytes_per_s
        found["backward to floor"] = found["backward"]["fusionlab"]["median_s"] / found["floor_s"]
    return found


def same_code(*programs: Any) -> bool:
    """Whether compiled programs on their arguments are one, but for names."""
    from fusionlab.evidence.instruments.instructions import code_of

    first, *others = (code_of(program.func.as_text()) for program in programs)
    return all(other == first for other in others)


def against(found: Mapping[str, Any]) -> dict[str, Any]:
    """How many times faster than each rival FusionLab is."""
    mine = found["fusionlab"]["samples_s"]
    rivals = {n: t for n, t in (found | found["torch"]).items() if n in RIVALS}
    return {name: ratio_to(name, its["samples_s"], mine) for name, its in rivals.items()}


def routes(fn: Callable, *args: Any) -> list[dict[str, str]]:
    """Each call of the op: its role, the implementation it takes and why; none where the program is left as it is."""
    import jax

    from fusionlab.device import Device
    from fusionlab.evidence.tuning import calls_in

    found = []
    for call in calls_in(jax.make_jaxpr(fn)(*args).jaxpr):
        role = call.primitive.role
        decision = call.primitive.op.decide(role, dict(call.shapes), Device.current(), **dict(call.params))
        found.append(
            {"role": role, "activation": "lerp", "implementation": decision.implementation, "why": decision.reason}
        )
    return found


def torch_lerp(case: Case, samples: int) -> dict[str, dict[str, Any]]:
    """torch.lerp eager and compiled, by part; apart from the others' turns. Its w is broadcast as numpy's is.

    What is repeated goes from one to the next as in `repeated`: a cotangent that stays where it is would be read from the cache.
    """
    import torch

    make = functools.partial(torch.randn, device="cuda", dtype=getattr(torch, case.dtype))
    x, y = (make(s).requires_grad_() for s in (case.x, case.y))
    w, cotangent = make(case.w), make(case.out)
    torch.cuda.empty_cache()  # of the case before
    torch._dynamo.reset()  # else it takes the shapes of the case before, and these, for one that varies
    found: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    for label, f in (("torch eager", torch.lerp), ("torch.compile", torch.compile(torch.lerp, dynamic=False))):
        for part, step in torch_steps(f, x, y, w, cotangent, case.repeats).items():
            calls = case.calls if case.repeats == 1 else 1  # all are queued before the first starts
            taken = torch_samples(step, samples, calls)
            found[part][label] = timed([t / case.repeats for t in taken], calls * case.repeats)
    return found


def torch_steps(f: Callable, x: Any, y: Any, w: Any, cotangent: Any, times: int) -> dict[str, Callable[[], Any]]:
    """The parts in torch, each as many times in a row, on the results of the time before; x's gradients are kept, as `repeated` does."""
    import torch

    out = f(x, y, w)  # once, outside of what is timed

    def forward() -> Any:
        at = y
        with torch.no_grad():
            for _ in range(times):
                at = f(x, at, w)
        return at

    def backward() -> Any:
        ct, kept = cotangent, []
        for _ in range(times):
            dx, ct = torch.autograd.grad(out, (x, y), ct, retain_graph=True)
            kept.append(dx)
        return kept, ct

    def total() -> Any:
        at, ct, kept = y, cotangent, []
        for _ in range(times):
            made = f(x, at, w)
            dx, ct = torch.autograd.grad(made, (x, at), ct)
            at = made.detach().requires_grad_()
            kept.append(dx)
        return at, kept, ct

    return {"forward": forward, "backward": backward, "total": total}


def table_of(path: Path, record: Mapping[str, Any]) -> None:
    """Adds what a record holds for best to a table; XLA's time is FusionLab's where that took XLA's code, else jax.jit's."""
    import jax

    from fusionlab.evidence.tuning import calls_in
    from fusionlab.kernels.choose.choices import Choice, Measured, write
    from fusionlab.kernels.choose.plan_files import MIN_GAIN
    from fusionlab.ops import lerp

    parts, choices = {"call": "forward", "cotangent": "backward"}, {}
    for case in CASES:
        with jax.enable_x64(case.dtype == "float64"):
            shapes = [jax.ShapeDtypeStruct(s, case.dtype) for s in (case.out, case.x, case.y, case.w)]
            calls = calls_in(jax.make_jaxpr(total_of(lerp))(*shapes).jaxpr)
        for call in calls:
            found = record["cases"][case.name][parts[call.primitive.role]]
            took = [r["implementation"] for r in found["routes"] if r["role"] == call.primitive.role]
            times = {"xla": found["jax.jit" if took == ["cuda"] else "fusionlab"], "cuda": found["op by cuda"]}
            us = {name: one["median_s"] * 1e6 for name, one in times.items()}
            best = "cuda" if us["cuda"] < (1 - MIN_GAIN) * us["xla"] else "xla"
            text = call.case()
            assert text is not None  # a call of lerp has one
            choices[text] = Choice(best, us)
            print(f"{case.name}: {best}, {choices[text].reason}")
    here = record["environment"]
    write(path, "sm_90", Measured(choices, {}, here["hardware"], here["versions"]))


def main(argv: list[str]) -> int:
    """Prints a line for each measurement and writes the record. Returns the exit status."""
    parser = parser_of("lerp", __doc__)
    parser.add_argument("--table", type=Path, help="a table of an architecture, to which --of is added")
    parser.add_argument("--of", type=Path, metavar="RECORD", help="with --table: what this record of an H200 measured")
    parser.add_argument("--tune", action="store_true", help="time other tilings of the backward, and print them")
    options = parser.parse_args(argv)

    if bool(options.of) != bool(options.table):
        parser.error("--table and --of go together: what the record measured is added to the table")
    if options.table:
        table_of(options.table, json.loads(options.of.read_text(encoding="utf-8")))
        return 0
    # Both JAX and torch hold arrays of several GiB: JAX, which takes three quarters of the memory otherwise, leaves torch enough.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")
    import jax

    from fusionlab.device import Device
    from fusionlab.evidence.instruments.peaks import measure_peaks

    on_cuda = Device.current().platform == "cuda"
    if not on_cuda and not options.quick:
        print("this benchmark needs a CUDA device (JAX sees none here), or --quick for tiny sizes", file=sys.stderr)
        return 2
    samples = 40 if not options.quick else 6 if on_cuda else 3
    rate = measure_peaks().copy_bytes_per_s if on_cuda else None
    if options.tune:
        from . import lerp_tiling

        lerp_tiling.tune(CASES, rate, samples // 4)
        return 0
    record: dict[str, Any] = new_record("lerp", options) | {"peaks": {"copy_bytes_per_s": rate}, "cases": {}}
    for case in CASES if on_cuda else TINY:
        start = time.perf_counter()
        with jax.enable_x64(case.dtype == "float64"):
            found = one(case, samples, rate, on_cuda and has_torch())
        record["cases"][case.name] = found | {"bar": case.bar, "wall_s": time.perf_counter() - start}
        if not options.json:
            told(case, record["cases"][case.name])
        save(record, options, on_cuda)  # what is measured is not lost where the run is cut off
    finish(record, options, on_cuda)
    return 0


def told(case: Case, found: Mapping[str, Any]) -> None:
    for part in PARTS:
        print(line(f"{case.name}, {part}", found[part]), flush=True)
    if "floor_s" in found:
        bar = f" (at most {case.bar})" if case.bar else ""
        print(f"  bytes of the backward at the copy rate: {found['floor_s'] * 1e6:.1f} us", end="; ")
        print(f"fusionlab takes {found['backward to floor']:.3f} of it{bar}", flush=True)
