"""The description of an op besides its code: the card in its folder, from which every list of all ops is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..launch.compile import CudaSource
from ..launch.compile import why_missing as cupy_missing
from ..launch.cublaslt import missing as cublaslt_missing
from ..launch.kernel_plan import KernelPlan
from .op import Op

Variants = Iterator[tuple[str, KernelPlan]]


@dataclass(frozen=True)
class Requirement:
    """The requirements of an implementation on a machine.

    Attributes:
      order: its position among those of all ops.
      name: the implementation's.
      ability: what it does, in a few words.
      missing: checks on a CUDA GPU; each returns what is missing, or None. None: it runs wherever JAX runs.
    """

    order: int
    name: str
    ability: str
    missing: tuple[Callable[[], str | None], ...] | None = None


XLA = Requirement(0, "xla", "plain jax.numpy, compiled by XLA; runs wherever JAX runs")
CUBLASLT = Requirement(40, "cublaslt", "one cuBLASLt call per product", (cublaslt_missing, cupy_missing))
CUDA = Requirement(60, "cuda", "FusionLab's own CUDA kernels", (cupy_missing,))


def _none(arch: str) -> Variants:
    yield from ()


@dataclass(frozen=True)
class Card:
    """The entry of an op in lists of all ops.

    Attributes:
      order: its position among all ops.
      op: the op.
      hue: the colour of its sites and nodes in `fusionlab.viz.palette`; "" for one of the spare ones.
      concepts: names of its sites in `Candidate.concepts`.
      kinds: further names, each for one kind of site.
      requirements: of its implementations, one each.
      sources: its CUDA kernels, if it has any. The first is the one that pages show; of a source that several ops run, each has it.
      variant: how the names of its variants on record begin, with places for `dtype` and `activation`.
      variants: architecture -> name and plan of each variant of its kernels that is compiled for the record of registers: everything for
        sm_90, a sample for the others. Of kernels that several ops run, one has them.
      measured: the architectures on which its implementations were timed against XLA's code: what its rule, the shipped tables or a
        record in `benchmarks/results` is of.
    """

    order: int
    op: Op
    hue: str = ""
    concepts: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    requirements: tuple[Requirement, ...] = (XLA, CUDA)
    sources: tuple[CudaSource, ...] = ()
    variant: str = ""
    variants: Callable[[str], Variants] = _none
    measured: tuple[str, ...] = ("sm_90",)
