"""What each GPU has of each pass: measured, compiled or refused. The table of `doctor` and of the documentation."""

from __future__ import annotations

from ..device import GPUS, Device
from ..kernels import CARDS
from ..kernels.launch.architectures import capability_of
from ..kernels.sources import Coverage, coverage
from ..verbs.lab import passes

MEANING = (
    "measured: timed there against XLA's code; compiled: built for that GPU, and not measured there",
    "refused: none of its kernels runs there; XLA: no kernel of its own, runs wherever JAX does",
)


def gpus() -> dict[str, tuple[str, ...]]:
    """Architecture -> the cards that are known by name, the oldest first."""
    archs = sorted(set(GPUS.values()), key=capability_of)
    return {arch: tuple(name for name, its in GPUS.items() if its == arch) for arch in archs}


def kernels_by_gpu(here: Device | None = None) -> dict[str, tuple[Coverage, ...]]:
    """Pass -> what each of the `gpus` has of it; `here`, if it is a CUDA device, for its architecture, with its plan file.

    An op that several passes share, or that a pass has besides its own, goes by its own name.
    """
    named: dict[str, list[str]] = {}
    for one in passes():
        named.setdefault(one.op, []).append(one.name)
    devices = {arch: Device.of(arch) for arch in gpus()} | ({here.arch: here} if here and here.arch else {})
    label = {op: names[0] for op, names in named.items() if len(names) == 1}
    return {label.get(c.op.name, c.op.name): tuple(coverage(c, device) for device in devices.values()) for c in CARDS}


def refusals(row: tuple[Coverage, ...]) -> dict[tuple[str, str], list[str]]:
    """(implementation, why it does not run) -> the architectures of a row with that reason; each is the subject of the sentence."""
    found: dict[tuple[str, str], list[str]] = {}
    for one in row:
        for name, why in one.refused.items():
            found.setdefault((name, why.removeprefix(f"{one.arch} ")), []).append(one.arch)
    return found
