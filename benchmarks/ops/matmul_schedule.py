"""Matrix products and their routes on a CUDA device: FusionLab, its switch on and off, and jax.jit, in one run.

    python -m benchmarks matmul_schedule [--json] [-o FILE] [--quick] [--only TEXT]

Times are device times of programs that take turns; every sample is kept (see gemm_epilogue.py). FusionLab runs as shipped, beside it with
every product that a library takes given to the library, and with none. Without a CUDA device `--quick` runs tiny sizes by the host's clock,
to show that it works.

What is measured, at sizes of 1024 and more:
  products   every pair of shapes of the original's tests, a linear layer of each, and one term to a sum
  epilogues  bias, relu and tanh-GELU, in 16 bits and with a float32 result; factors; a bias along the rows; a cast
  widened    operands of 16 bits that a program widens to float32
  llama      the gated feed-forward of Llama's 7B model, 4096 tokens; also with the gated pair as one product, and as one kernel
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ..measuring import compiled_at_once, differences, finish, line, measured, new_record, parser_of, save


@dataclass(frozen=True)
class Case:
    """A program and the shapes of its arguments, all of one dtype; `gated`: it has a gated pair."""

    name: str
    fn: Callable
    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "bfloat16"
    gated: bool = False

    def arguments(self) -> tuple[Any, ...]:
        import jax

        keys = jax.random.split(jax.random.key(0), len(self.shapes))
        scale = self.shapes[0][-1] ** -0.25
        return tuple(
            (jax.random.normal(k, s) * scale).astype(self.dtype) for k, s in zip(keys, self.shapes, strict=True)
        )


def cases(size: int, batch: int) -> Iterator[Case]:
    """All of them; `size` is that of the rows, the columns and the contracted axis, the epilogues' four times that."""
    import jax.numpy as jnp

    k, m, n, b = size, size, size, batch
    left = {"[k]": (k,), "[m,k]": (m, k), "[1,k]": (1, k), "[b,m,k]": (b, m, k), "[b,1,m,k]": (b, 1, m, k)}
    right = {"[k]": (k,), "[k,n]": (k, n), "[k,1]": (k, 1), "[b,k,n]": (b, k, n)}
    for one, a in left.items():
        for other, w in right.items():
            yield Case(f"{one} @ {other}", jnp.matmul, (a, w))
    for one, a in left.items():
        yield Case(f"linear {one}", _linear, (a, (n, k), (n,)))
    yield Case("one term to a sum", jnp.matmul, ((4 * m, 1), (1, 4 * n)))
    yield from _epilogues(size)
    yield from _widened(size)
    h = size * 43 // 4  # 11008 of 4096
    yield Case("llama", _llama, ((4 * m, 4 * k), (4 * k, h), (4 * k, h), (h, 4 * k)), gated=True)


def _linear(x: Any, w: Any, b: Any) -> Any:
    import jax.numpy as jnp

    return jnp.einsum("...k,nk->...n", x, w) + b


def _llama(x: Any, w: Any, v: Any, down: Any) -> Any:
    import jax

    return (jax.nn.silu(x @ w) * (x @ v)) @ down


def _epilogues(size: int) -> Iterator[Case]:
    import jax
    import jax.numpy as jnp

    shapes = ((4 * size, size), (size, 4 * size), (4 * size,))

    def wide(a: Any, b: Any) -> Any:
        return jnp.matmul(a, b, preferred_element_type=jnp.float32)

    programs: dict[str, Callable] = {
        "bias": lambda a, b, v: a @ b + v,
        "relu": lambda a, b, v: jax.nn.relu(a @ b),
        "bias, relu": lambda a, b, v: jax.nn.relu(a @ b + v),
        "gelu": lambda a, b, v: jax.nn.gelu(a @ b),
        "bias, gelu": lambda a, b, v: jax.nn.gelu(a @ b + v),
        "alpha": lambda a, b, v: 0.3 * (a @ b),
        "alpha of the sum": lambda a, b, v: 0.3 * (a @ b + v),
        "row bias": lambda a, b, v: a @ b + v[:, None],
        "to f32": lambda a, b, v: wide(a, b),
        "to f32, bias": lambda a, b, v: wide(a, b) + v,
        "to f32, bias, relu": lambda a, b, v: jax.nn.relu(wide(a, b) + v),
        "summed in f32, bias, cast": lambda a, b, v: (wide(a, b) + v).astype(a.dtype),
        "summed in f32, alpha, bias, relu, cast": lambda a, b, v: jax.nn.relu(0.3 * wide(a, b) + v).astype(a.dtype),
    }
    for dtype in ("bfloat16", "float16", "float32"):
        for name, fn in programs.items():
            if dtype == "bfloat16" or name in ("bias, relu", "alpha of the sum", "row bias"):
                yield Case(f"{name} {dtype}", fn, shapes, dtype)


def _widened(size: int) -> Iterator[Case]:
    import jax
    import jax.numpy as jnp

    def product(a: Any, b: Any) -> Any:
        return a.astype(jnp.float32) @ b.astype(jnp.float32)

    shapes = ((4 * size, size), (size, 4 * size))
    yield Case("widened", product, shapes)
    yield Case("widened, cast", lambda a, b: product(a, b).astype(a.dtype), shapes)
    yield Case("widened, silu, cast", lambda a, b: jax.nn.silu(product(a, b)).astype(a.dtype), shapes)


def one(case: Case, samples: int) -> dict[str, Any]:
    """Times of jax.jit and of FusionLab in three settings, five for a gated pair; the routes of each."""
    import fusionlab as fl

    args = case.arguments()
    fused = {
        "fusionlab": fl.fuse(case.fn),
        "library": fl.fuse(case.fn, passes=fl.Strategy(gemm_epilogue=True, matmul_schedule={"library": True})),
        "no library": fl.fuse(case.fn, passes=fl.Strategy(gemm_epilogue=True, matmul_schedule={"library": False})),
    }
    for gated in ("concatenated", "kernel") if case.gated else ():
        passes = fl.Strategy(gemm_epilogue=True, gated_matmul={"prefer": gated}, matmul_schedule=True)
        fused[f"gated {gated}"] = fl.fuse(case.fn, passes=passes)
    programs = compiled_at_once({"jax.jit": (case.fn, args)} | {name: (f, args) for name, f in fused.items()})
    reference = programs["jax.jit"]()
    apart = {name: differences(reference, run()) for name, run in programs.items()}
    del reference
    found = measured(programs, "jax.jit", samples)
    tags = {name: [(row.tag, row.formula, row.why) for row in f.findings(*args).routes()] for name, f in fused.items()}
    return found | {"difference to jax.jit": apart, "products": tags}


def told(name: str, found: dict[str, Any]) -> None:
    tags = "; ".join(
        f"{setting}: {', '.join(tag for tag, _, _ in rows)}" for setting, rows in found["products"].items()
    )
    print(f"{line(name, found)} | {tags}", flush=True)


def main(argv: list[str]) -> int:
    """Prints a line for each measurement and writes the record. Returns the exit status."""
    parser = parser_of("matmul_schedule", __doc__)
    parser.add_argument("--only", default="", help="only the cases whose name has this text")
    options = parser.parse_args(argv)

    from fusionlab.device import Device

    on_cuda = Device.current().platform == "cuda"
    if not on_cuda and not options.quick:
        print("this benchmark needs a CUDA device (JAX sees none here), or --quick for tiny sizes", file=sys.stderr)
        return 2
    chosen = [case for case in (cases(1024, 16) if on_cuda else cases(4, 2)) if options.only in case.name]
    samples = 40 if not options.quick else 6 if on_cuda else 2
    record: dict[str, Any] = new_record("matmul_schedule", options) | {"cases": {}}
    for case in chosen:
        start = time.perf_counter()
        found = one(case, samples)
        record["cases"][case.name] = found | {"wall_s": time.perf_counter() - start}
        if not options.json:
            told(case.name, found)
        save(record, options, on_cuda)  # what is measured is not lost where the run is cut off
    finish(record, options, on_cuda)
    return 0
