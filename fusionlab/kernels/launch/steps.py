"""The steps of a prepared plan, as data: one kernel, or one product by cuBLASLt. Python can launch it, and so can a compiled
launcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# ("operand", number), ("result", number): the address of a buffer; ("null", 0): none; ("i64", value), ("i32", value): a value.
Param = tuple[str, int]


@dataclass(frozen=True)
class Launch:
    """One launch of one kernel.

    Attributes:
      entry: the kernel's name in the source (extern "C").
      grid, block: blocks, and threads of a block, along x, y, z.
      shared: dynamic shared memory of a block, bytes.
      params: in order, ("operand", number) and ("result", number) for an address, ("null", 0) for no address, ("i64", value),
        ("i32", value).
      early: the kernel starts with `fl_wait()` of `early.cuh`, so that on sm_90 and later it may be started before what comes before it has
        ended; without that wait it would read what is not written yet.
      cooperative: its blocks wait for each other, so all of them must be resident at once; where they cannot, the launch fails.

    A kernel may as well have one parameter, a structure of eight bytes for each of `params`: they lie one behind another.
    """

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    params: tuple[Param, ...]
    early: bool = False
    cooperative: bool = False


@dataclass(frozen=True, kw_only=True)
class KernelStep(Launch):
    """A loaded kernel and how it is launched; `early` only on a device that can.

    Attributes:
      function: CUfunction.
      image: its cubin.
    """

    function: int
    image: bytes


@dataclass(frozen=True)
class MatmulStep:
    """One call of cublasLtMatmul; everything but buffers is made.

    Attributes:
      pointers: library handle, descriptor, layouts of A, B and D (and C), addresses of alpha and beta, address of the algorithm.
      workspace: bytes.
      places: where A, B, bias, auxiliary matrix, C (D itself where beta is 0), D and workspace are, as of a kernel's parameters.
      attributes: numbers of the descriptor's attributes that hold the addresses of bias and auxiliary matrix.
      library: the version of the cuBLASLt that made them (130100 for 13.1).
    """

    pointers: tuple[int, ...]
    workspace: int
    places: tuple[Param, ...]
    attributes: tuple[int, int]
    library: int


@dataclass(frozen=True, eq=False)
class Prepared:
    """A plan ready to be launched on one device. Called with a stream and the addresses of operands and results, it launches, and
    returns before the work is done.

    Attributes:
      run: launches from Python.
      steps: the same as data, in order; None where only `run` can do it.
      keep: the objects that the steps point into.
    """

    run: Callable[[int, Sequence[int], Sequence[int]], None]
    steps: tuple[KernelStep | MatmulStep, ...] | None = None
    keep: Any = None

    def __call__(self, stream: int, operands: Sequence[int], results: Sequence[int]) -> None:
        self.run(stream, operands, results)
