"""`jax.lax.ragged_dot` as XLA has it and fused, on a CUDA device: forward, and with both gradients.

    python -m benchmarks grouped_matmul [--json] [-o FILE] [--quick] [--only TEXT]

Rows of bfloat16 in groups of uneven sizes, some of them small, as a router of a mixture of experts makes them. `jax.jit` is the program as
it is written, `fusionlab` the same by `fl.fuse`, without a word about which pass; how far its numbers are from jax.jit's is kept. The
sizes of models come first, then a sweep down to few rows and one group, where a kernel has the least to gain. Device times of programs
that take turns; without a CUDA device `--quick` runs tiny sizes by the host's clock, to show that it works.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..measuring import compiled_at_once, differences, finish, line, measured, new_record, normal, parser_of, save


@dataclass(frozen=True)
class Case:
    """Rows in groups, and the sizes of a group's matrix."""

    rows: int
    groups: int
    inner: int
    columns: int

    @property
    def name(self) -> str:
        return f"{self.rows} rows, {self.groups} x {self.inner} x {self.columns}"


MODELS = (Case(16384, 64, 2048, 1408), Case(16384, 8, 4096, 14336))
SWEEP = tuple(
    Case(rows, groups, inner, columns)
    for (inner, columns), groups, rows in itertools.product(
        ((512, 512), (2048, 1408)), (1, 2, 8, 64), (64, 256, 1024, 8192)
    )
)
TINY = (Case(64, 4, 64, 64),)


def sizes_of(case: Case) -> Any:
    """As many rows for each group as a random router gives it, together all."""
    import jax.numpy as jnp
    import numpy as np

    shares = np.random.default_rng(1).dirichlet(np.full(case.groups, 2.0))
    sizes = np.floor(shares * case.rows).astype(np.int32)
    sizes[-1] += case.rows - sizes.sum()
    return jnp.asarray(sizes)


def programs(case: Case, backward: bool) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The product as it is written and fused, forward or with both gradients."""
    import jax

    import fusionlab as fl

    x, ct = normal(0, case.rows, case.inner), normal(1, case.rows, case.columns)
    w = normal(2, case.groups, case.inner, case.columns, scale=case.inner**-0.5)

    def forward(x: Any, w: Any, sizes: Any, ct: Any) -> Any:
        return jax.lax.ragged_dot(x, w, sizes)

    def both(x: Any, w: Any, sizes: Any, ct: Any) -> Any:
        out, pull = jax.vjp(lambda x, w: jax.lax.ragged_dot(x, w, sizes), x, w)
        return out, pull(ct)

    program, args = both if backward else forward, (x, w, sizes_of(case), ct)
    return {"jax.jit": (program, args), "fusionlab": (fl.fuse(program), args)}


def main(argv: list[str]) -> int:
    """Prints a line for each measurement and writes the record. Returns the exit status."""
    parser = parser_of("grouped_matmul", __doc__)
    parser.add_argument("--only", default="", help="only the cases whose name has this text")
    options = parser.parse_args(argv)

    from fusionlab.device import Device

    on_cuda = Device.current().platform == "cuda"
    if not on_cuda and not options.quick:
        print("this benchmark needs a CUDA device (JAX sees none here), or --quick for tiny sizes", file=sys.stderr)
        return 2
    record: dict[str, Any] = new_record("grouped_matmul", options) | {"cases": {}}
    for case in (*MODELS, *SWEEP) if on_cuda else TINY:
        if options.only not in case.name:
            continue
        record["cases"][case.name] = {}
        for way in ("forward", "forward and backward"):
            running = compiled_at_once(programs(case, "backward" in way))
            found = measured(running, "jax.jit", (20 if case in MODELS else 5) if on_cuda else 2)
            found["difference"] = differences(running["jax.jit"](), running["fusionlab"]())
            record["cases"][case.name][way] = found
            if not options.json:
                print(line(f"{case.name}, {way}", found), f"| difference {found['difference']:.2g}", flush=True)
        save(record, options, on_cuda)  # what is measured is not lost where the run is cut off
    finish(record, options, on_cuda)
    return 0
