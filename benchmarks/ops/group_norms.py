"""A GroupNorm as XLA's code and as the op's kernels, against the least that memory allows, on a CUDA device.

    python -m benchmarks group_norms [--json] [-o FILE] [--quick] [--only TEXT]

A GroupNorm of images `[batch, height, width, channels]` in 32 groups, as diffusion models have them, with and without SiLU behind it,
bfloat16, statistics in float32: `jax.jit` of it with the variance about the mean, and `fast variance` of E[x^2] - E[x]^2, as flax's;
`fusionlab` is the op by its kernels, and how far its numbers are from jax.jit's is kept. The floor is what has to be moved at all, by
programs that move it and do nothing: x in and a result out; and for the backward pass x and the cotangent in and the gradient of x out.
A group of these sizes has 80 and 512 KiB: its statistics need no second look at x in memory.
Device times of programs that take turns; without a CUDA device `--quick` runs tiny sizes by the host's clock, to show that it works.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..measuring import compiled_at_once, differences, finish, line, measured, new_record, normal, parser_of, save

GROUPS, EPSILON = 32, 1e-6


@dataclass(frozen=True)
class Case:
    """Images of a batch, square, and whether SiLU follows."""

    batch: int
    side: int
    channels: int
    silu: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.batch, self.side, self.side, self.channels

    @property
    def name(self) -> str:
        return f"{self.batch}x{self.side}x{self.side}x{self.channels} bfloat16{', SiLU' * self.silu}"


SIZES = ((16, 64, 320), (4, 128, 512), (2, 64, 320))
CASES = tuple(Case(*size, silu) for size in SIZES for silu in (False, True))
TINY = (Case(2, 4, 64, True),)


def group_norm(case: Case, fast: bool) -> Callable[..., Any]:
    """What a model writes."""
    import jax
    import jax.numpy as jnp

    def norm(x: Any, scale: Any, bias: Any) -> Any:
        b, h, w, c = x.shape
        wide = x.astype(jnp.float32).reshape(b, h, w, GROUPS, c // GROUPS)
        mean = wide.mean((1, 2, 4), keepdims=True)
        if fast:
            variance = jnp.square(wide).mean((1, 2, 4), keepdims=True) - jnp.square(mean)
        else:
            variance = jnp.square(wide - mean).mean((1, 2, 4), keepdims=True)
        normed = ((wide - mean) * jax.lax.rsqrt(variance + EPSILON)).reshape(x.shape)
        out = normed * scale.astype(jnp.float32) + bias.astype(jnp.float32)
        return (jax.nn.silu(out) if case.silu else out).astype(x.dtype)

    return norm


def by_op(case: Case, implementation: str | None) -> Callable[..., Any]:
    """The same as one op."""
    from fusionlab.ops import group_norm

    activation = "silu" if case.silu else "none"
    attrs = {"groups": GROUPS, "epsilon": EPSILON, "activation": activation, "implementation": implementation}
    return lambda x, scale, bias: group_norm(x, scale, bias, **attrs)


def programs(
    case: Case, backward: bool, implementation: str | None
) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The floor, XLA's two and the op, forward or both ways."""
    import jax

    x, ct = normal(0, *case.shape), normal(1, *case.shape)
    scale, bias = normal(2, case.channels), normal(3, case.channels)

    def both(fn: Callable[..., Any]) -> Callable[..., Any]:
        def run(ct: Any, *args: Any) -> Any:
            out, pull = jax.vjp(fn, *args)
            return out, pull(ct)

        return run

    rivals = {"jax.jit": group_norm(case, False), "fast variance": group_norm(case, True)}
    rivals["fusionlab"] = by_op(case, implementation)
    if not backward:
        return {"floor": (lambda x: x * 2, (x,)), **{n: (fn, (x, scale, bias)) for n, fn in rivals.items()}}

    def floor(ct: Any, x: Any) -> Any:
        out, again = jax.lax.optimization_barrier((x * 2, x))  # no loop over both: a backward pass reads x again
        return out, again * ct

    return {"floor": (floor, (ct, x)), **{n: (both(fn), (ct, x, scale, bias)) for n, fn in rivals.items()}}


def one(case: Case, samples: int, implementation: str | None = "cuda") -> Iterator[tuple[str, dict[str, Any]]]:
    """(way, what was measured) of a case: times, ratios to the floor, and how far the op's numbers are from jax.jit's."""
    for way in ("forward", "forward and backward"):
        running = compiled_at_once(programs(case, "backward" in way, implementation))
        found = measured(running, "floor", samples)
        found["difference"] = differences(running["jax.jit"](), running["fusionlab"]())
        yield way, found


def main(argv: list[str]) -> int:
    """Prints a line for each measurement and writes the record. Returns the exit status."""
    parser = parser_of("group_norms", __doc__)
    parser.add_argument("--only", default="", help="only the cases whose name has this text")
    options = parser.parse_args(argv)

    from fusionlab.device import Device

    on_cuda = Device.current().platform == "cuda"
    if not on_cuda and not options.quick:
        print("this benchmark needs a CUDA device (JAX sees none here), or --quick for tiny sizes", file=sys.stderr)
        return 2
    record: dict[str, Any] = new_record("group_norms", options) | {"cases": {}}
    for case in CASES if on_cuda else TINY:
        if options.only not in case.name:
            continue
        record["cases"][case.name] = {}
        for way, found in one(case, 30 if on_cuda else 2, "cuda" if on_cuda else None):
            record["cases"][case.name][way] = found
            if not options.json:
                print(line(f"{case.name}, {way}", found), flush=True)
        save(record, options, on_cuda)  # what is measured is not lost where the run is cut off
    finish(record, options, on_cuda)
    return 0
