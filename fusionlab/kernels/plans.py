"""What a kernel launch is, as plain records: nothing here needs a GPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes:
      entry: the kernel's `extern "C"` name.
      grid, block: in x, y, z.
      shared: dynamic shared memory, bytes.
      params: the kernel's parameters in order: ("operand", i), ("result", i), ("null", 0), ("i64", value) or ("i32", value).
    """

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    params: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class KernelSpec:
    """A source, how to compile it, and its launches in order.

    Attributes:
      source: the .cu file, relative to `fusionlab/kernels`.
      options: NVRTC's.
      launches: none for empty arrays.
    """

    source: str
    options: tuple[str, ...]
    launches: tuple[Launch, ...]
