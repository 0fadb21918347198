"""Parameters of a call's kernels, and passes: launches that leave scratch in addition to their results."""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from ..launch.kernel_plan import KernelPlan, Launch
from .geometry import WARP, ceil_div

CODES = {"float32": 0, "bfloat16": 1, "float16": 2, "float64": 3}  # FL_T
SUM_HEIGHT = 16  # threads that share a column where `sum_of_parts` adds up


@dataclass(frozen=True)
class KernelPass:
    """Launches that make results and scratch.

    Attributes:
      plan: its operands are `reads`; its results `gives`, then scratch.
      reads: names of operands.
      gives: names of results; of a backward pass the slots whose gradients these are.
      scratch: the shape of each array of partial results.
    """

    plan: KernelPlan
    reads: tuple[str, ...]
    gives: tuple[str, ...]
    scratch: tuple[tuple[int, ...], ...]

    def results(self, types: Mapping[str, Any], scratch_dtype: str = "float32") -> list[Any]:
        """The types of all its results, of which `types` has those it gives."""
        scratch = (jax.ShapeDtypeStruct(shape, scratch_dtype) for shape in self.scratch)
        return [*(types[name] for name in self.gives), *scratch]


def options(values: Mapping[str, object]) -> tuple[str, ...]:
    """For NVRTC: {"VEC": 8} as "-DFL_VEC=8"."""
    return tuple(f"-DFL_{name}={value}" for name, value in values.items())


def places(kind: str, every: tuple[str, ...], there: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    """Parameters of a launch: where each of `every` is among the operands or results (`kind`) `there`; no address for one that is not."""
    return tuple((kind, there.index(name)) if name in there else ("null", 0) for name in every)


def those(there: Collection[str], *every: str) -> tuple[str, ...]:
    """Those of `every` that are there, in order."""
    return tuple(name for name in every if name in there)


def integers(*numbers: int) -> tuple[tuple[str, int], ...]:
    """Parameters of type long long."""
    return tuple(("i64", n) for n in numbers)


def float_param(number: float) -> tuple[str, int]:
    """A parameter of type float."""
    return "i32", struct.unpack("=i", struct.pack("=f", number))[0]


def sum_of_parts(
    entry: str, columns: int, slots: tuple[str, ...], results: tuple[str, ...], parts: int
) -> tuple[Launch, ...]:
    """The launch that adds up so many partial sums, "parts_<slot>", of each of the slots that is among the results; none for none."""
    count = len(those(results, *slots))
    each = tuple(name for slot in slots for name in (f"parts_{slot}", slot))
    params = (*places("result", each, results), ("i32", parts))
    grid = ceil_div(columns, WARP), count, 1
    return (Launch(entry, grid, (WARP, SUM_HEIGHT, 1), 0, params, early=True),) if count else ()
