"""Norms with what is added up before them, on a CUDA device: the op's kernels and jax.jit of plain code, in one run.

    python -m benchmarks norms [--each] [--json] [-o FILE] [--quick] [--only TEXT]

Times are device times of programs that take turns; every sample is kept (see gemm_epilogue.py). `jax.jit` is norm(x + shift + residual) as
models write it, statistics in float32; `fast variance` the same by E[x^2] - E[x]^2, as flax.linen does. Each case is run forward (with and
without the sum as a second result) and forward and backward, with the gradients of everything (of x and the residual once: they
are one array). With `--each` it is every implementation of the op that takes the call, of a norm of x alone, forward with what a backward
pass needs of it; `xla` is the op's own jnp code. Without a CUDA device `--quick` runs tiny
sizes by the host's clock, to show that it works.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..measuring import compiled_at_once, differences, finish, line, measured, new_record, parser_of, save

EPSILON = 1e-5
WAYS = ("forward", "forward and sum", "forward and backward", "forward and sum and backward")


@dataclass(frozen=True)
class Case:
    """A norm of [rows, columns], with a shift, a residual, a scale and (of a LayerNorm) a bias."""

    rows: int
    columns: int
    dtype: str = "bfloat16"
    kind: str = "layer"

    @property
    def name(self) -> str:
        return f"{self.kind} {self.rows}x{self.columns} {self.dtype}"

    @property
    def slots(self) -> tuple[str, ...]:
        return ("x", "residual", "shift", "scale", *(("bias",) if self.kind == "layer" else ()))

    def arguments(self) -> dict[str, Any]:
        import jax

        keys = jax.random.split(jax.random.key(0), len(self.slots) + 2)
        whole, vector = (self.rows, self.columns), (self.columns,)
        shapes = {slot: whole if slot in ("x", "residual") else vector for slot in self.slots}
        shapes |= {"ct": whole, "ct_sum": whole}
        return {n: jax.random.normal(k, s).astype(self.dtype) for (n, s), k in zip(shapes.items(), keys, strict=True)}


SHOWN = (Case(32768, 1024), Case(8192, 4096))  # those that have a goal
CASES = (
    *SHOWN,
    Case(32768, 1024, kind="rms"),
    Case(8192, 4096, kind="rms"),
    Case(32768, 1024, "float32"),
    Case(65536, 768),
    Case(16384, 1023),
    Case(4096, 8192),
    Case(2048, 16384, kind="rms"),
    Case(1024, 65536),
    # Down to where launches are all there is.
    Case(4096, 1024),
    Case(2048, 512),
    Case(1024, 1024),
    Case(512, 1024),
    Case(128, 1024),
    Case(16, 4096),
)
# Of a norm of x alone, by each implementation.
_SIZES = (
    (64, 4096),
    (512, 768),
    (4096, 768),
    (16384, 768),
    (2048, 1024),
    (8192, 1024),
    (8192, 1000),
    (8192, 2048),
    (16384, 4096),
)
ALONE = tuple(
    Case(*size, dtype, kind)
    for kind in ("layer", "rms")
    for dtype in ("bfloat16", "float32")
    for size in (*_SIZES, (8192, 8192), (4096, 16384))
)
TINY = (Case(16, 64), Case(8, 33, "float32", "rms"))


def plain(case: Case, fast: bool) -> Callable[..., Any]:
    """What a model writes: (out, sum)."""
    import jax
    import jax.numpy as jnp

    def norm(x: Any, residual: Any, shift: Any, scale: Any, bias: Any = None) -> Any:
        s = x + shift + residual
        wide = s.astype(jnp.float32)
        mean = jnp.mean(wide, -1, keepdims=True) if case.kind == "layer" else 0.0
        if case.kind == "rms" or fast:
            square = jnp.mean(jnp.square(wide), -1, keepdims=True)
            variance = jnp.maximum(square - jnp.square(mean), 0.0) if case.kind == "layer" else square
        else:
            variance = jnp.var(wide, -1, keepdims=True)
        out = (wide - mean) * jax.lax.rsqrt(variance + EPSILON) * scale.astype(jnp.float32)
        out = out if bias is None else out + bias.astype(jnp.float32)
        return out.astype(x.dtype), s

    return norm


def by_op(case: Case, implementation: str | None) -> Callable[..., Any]:
    """The same as one op: (out, sum)."""
    from fusionlab.ops import layer_norm_and_sum

    def norm(x: Any, residual: Any, shift: Any, scale: Any, bias: Any = None) -> Any:
        more = {"kind": case.kind, "epsilon": EPSILON, "implementation": implementation}
        return layer_norm_and_sum(x, scale, bias, shift=shift, residual=residual, **more)

    return norm


def by_op_alone(case: Case, implementation: str | None) -> Callable[..., Any]:
    """As an op without the sum."""
    from fusionlab.ops import layer_norm

    def norm(x: Any, residual: Any, shift: Any, scale: Any, bias: Any = None) -> Any:
        more = {"kind": case.kind, "epsilon": EPSILON, "implementation": implementation}
        return (layer_norm(x, scale, bias, shift=shift, residual=residual, **more),)

    return norm


def taken(norm: Callable[..., Any], way: str, given: dict[str, Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A program of one of `WAYS`, and its arguments."""
    import jax

    sums = "sum" in way
    slots = tuple(n for n in given if not n.startswith("ct"))
    cts = tuple(given[n] for n in (("ct", "ct_sum") if sums else ("ct",)))

    def forward(*operands: Any) -> Any:
        outs = norm(**dict(zip(slots, operands, strict=True)))
        return tuple(outs) if sums else outs[:1]

    def both(cts: Any, *operands: Any) -> Any:
        outs, pull = jax.vjp(forward, *operands)
        # The residual's is the gradient of x: given twice, either program would copy it.
        return outs, tuple(g for slot, g in zip(slots, pull(cts), strict=True) if slot != "residual")

    operands = tuple(given[n] for n in slots)
    return (both, (cts, *operands)) if "backward" in way else (forward, operands)


def one(case: Case, samples: int, implementation: str | None = "cuda") -> Iterator[tuple[str, dict[str, Any]]]:
    """(way, what was measured) of a case: times, ratios to jax.jit, and how far the op's numbers are from its."""
    given = case.arguments()
    for way in WAYS:
        alone = by_op(case, implementation) if "sum" in way else by_op_alone(case, implementation)
        rivals = {"jax.jit": plain(case, False), "fusionlab": alone}
        if case.kind == "layer":
            rivals["fast variance"] = plain(case, True)
        programs = compiled_at_once({name: taken(norm, way, given) for name, norm in rivals.items()})
        found = measured(programs, "jax.jit", samples)
        found["difference"] = differences(programs["jax.jit"](), programs["fusionlab"]())
        yield way, found


def each(case: Case, samples: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(way, what was measured) of a norm of x alone by every implementation that takes it."""
    from fusionlab.kernels.ops.layer_norm.op import LAYER_NORM

    given = case.arguments()
    operands = tuple(given.get(slot) for slot in ("x", "scale", "bias"))

    def program(name: str) -> Callable[..., Any]:
        return lambda *xs: LAYER_NORM.call_with_residuals(*xs, kind=case.kind, epsilon=EPSILON, implementation=name)

    able = [b.name for b in LAYER_NORM.backends(*operands, kind=case.kind) if b.verdict != "unavailable"]
    programs = compiled_at_once({name: (program(name), operands) for name in able})
    found = measured(programs, "xla", samples)
    found["difference"] = max(differences(programs["xla"](), programs[name]()) for name in able)
    yield "alone", found


def main(argv: list[str]) -> int:
    """Prints a line for each measurement and writes the record. Returns the exit status."""
    parser = parser_of("norms", __doc__)
    parser.add_argument("--only", default="", help="only the cases whose name has this text")
    parser.add_argument("--each", action="store_true", help="a norm of x alone, by each implementation of the op")
    options = parser.parse_args(argv)

    from fusionlab.device import Device

    on_cuda = Device.current().platform == "cuda"
    if not on_cuda and not options.quick:
        print("this benchmark needs a CUDA device (JAX sees none here), or --quick for tiny sizes", file=sys.stderr)
        return 2
    samples = 30 if not options.quick else 6 if on_cuda else 2
    record: dict[str, Any] = new_record("norms", options) | {"cases": {}}
    if options.each:
        record["command"] += " --each"
    for case in (ALONE if options.each else CASES) if on_cuda else TINY:
        if options.only not in case.name:
            continue
        record["cases"][case.name] = {}
        ways = each(case, samples) if options.each else one(case, samples, "cuda" if on_cuda else None)
        for way, found in ways:
            record["cases"][case.name][way] = found
            if not options.json:
                print(line(f"{case.name}, {way}", found), flush=True)
        save(record, options, on_cuda)  # what is measured is not lost where the run is cut off
    finish(record, options, on_cuda)
    return 0
