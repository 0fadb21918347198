"""Every CUDA source of this package with its variants, and which of an op's implementations a GPU runs.

Tests compile this list; `doctor` and the documentation print it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from ..device import Device
from ..showing import Shown
from . import CARDS
from .choose.choices import CHOICES
from .launch.compile import CudaSource
from .launch.kernel_plan import KernelPlan
from .op.card import Card
from .ops import clock


@cache
def sources() -> dict[str, CudaSource]:
    """Path, relative to the folder of the ops -> each CUDA source of this package."""
    every = (*(source for card in CARDS for source in card.sources), clock.SPIN, clock.STEP)
    return {source.path: source for source in every}


def variants(arch: str) -> Iterator[tuple[str, KernelPlan]]:
    """Name and plan of what is compiled for an architecture: everything for sm_90, a sample for the others."""
    yield from clock.variants()
    for card in CARDS:
        yield from card.variants(arch)


class State(enum.StrEnum):
    """What a GPU has of the implementations of an op other than those that XLA compiles.

    Attributes:
      MEASURED: timed against XLA's code on this architecture, or on this very card: in the plan file or a shipped table.
      COMPILED: built for it, and not measured there.
      REFUSED: none of them runs there.
      XLA: the op has no such implementation; it is JAX code, which runs wherever JAX does.
    """

    MEASURED = "measured"
    COMPILED = "compiled"
    REFUSED = "refused"
    XLA = "XLA"


@dataclass(frozen=True, repr=False)
class Coverage(Shown):
    """What a GPU has of an op.

    Attributes:
      op: the op.
      arch: the GPU's architecture, "sm_90".
      state: what there is.
      runs: the implementations that run there, without those that XLA compiles.
      refused: implementation -> why it does not run there.
    """

    _says = "{0.op} on {0.arch}: {0.state}"

    op: str
    arch: str
    state: State
    runs: tuple[str, ...]
    refused: dict[str, str]


def coverage(card: Card, device: Device) -> Coverage:
    """What a CUDA device has of an op."""
    names = [one.name for one in card.requirements if one.missing is not None]
    found = {name: card.op.implementations[name].unable_on(device) for name in names}
    refused = {name: why for name, why in found.items() if why}
    is_measured = device.arch in card.measured or card.op.name in CHOICES.ops_measured(device)
    state = State.MEASURED if is_measured else State.COMPILED
    if len(refused) == len(found):
        state = State.REFUSED if found else State.XLA
    return Coverage(card.op.name, device.arch, state, tuple(sorted(found.keys() - refused.keys())), refused)
