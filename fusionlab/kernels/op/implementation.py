"""Descriptions of an op and of each way to run it: plain records."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...device import Device
from ...showing import Shown
from ..launch.compile import refuses_device

Array = Any


@dataclass(frozen=True, repr=False)
class Residual(Shown):
    """A value the fused forward saves for the fused backward.

    Attributes: `name`, `shape`, `dtype` (text, "f32"), `nbytes`, and `readers`: the gradients that read it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    readers: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}, {self.nbytes:,} bytes, read by {', '.join(self.readers)}"


WHAT_XLA_RUNS = "what XLA runs anyway"  # how the reason of a choice with the same code begins


class ChoiceKind(enum.StrEnum):
    """The kind of decision at a site when no implementation is named, compared with XLA's code of the site as written.

    The values are the verdicts of backends and the codes of rejections (`fusionlab.errors.REJECTIONS`).
    """

    CHOSEN = "chosen"  # another code than XLA's
    SAME_CODE = "same code"  # the op, and it compiles to what XLA runs anyway
    IN_PIECES = "in pieces"  # the ops of its pieces, each fused for itself: they run the same kernels
    SLOWER = "slower"  # XLA's: all that can run the site was measured as slow or slower
    UNMEASURED = "unmeasured"  # XLA's: not all that can run the site was measured on the device
    DEVICE = "device"  # XLA's: nothing else runs on the device

    @property
    def leaves_it_to_xla(self) -> bool:
        return self in (ChoiceKind.SLOWER, ChoiceKind.UNMEASURED, ChoiceKind.DEVICE)


@dataclass(frozen=True)
class Call:
    """A call for which an implementation is chosen: the role of its primitive, the shapes of the operands by name, where it is to run, and
    the parameters."""

    role: str
    shapes: Mapping[str, Any]
    device: Device
    attrs: Mapping[str, Any]


@dataclass(frozen=True, repr=False)
class ImplementationChoice(Shown):
    """The implementation that runs when none is named: its kind, compared with XLA's code of the site as written, and the reason.

    Attributes:
      implementation: its name.
      kind: what it is against XLA's code of the site as it is written.
      reason: why, in a sentence.
      untried: whether it is XLA's code only because what else can run the call was not measured on the device.
    """

    _says = "{0.implementation} ({0.kind}): {0.reason}"

    implementation: str
    kind: ChoiceKind
    reason: str
    untried: bool = False

    @property
    def waits(self) -> bool:
        """Whether a measurement on the device may change it."""
        return self.untried or self.kind is ChoiceKind.UNMEASURED


@dataclass(frozen=True, repr=False)
class BackendVerdict(Shown):
    """One implementation of an op for one call, by its `name`.

    `verdict` is "chosen", "same code" (chosen, and what XLA runs anyway), "possible" or "unavailable"; `reason` explains it.
    """

    _says = "{0.name} ({0.verdict}): {0.reason}"

    name: str
    verdict: str
    reason: str


def _runs_everywhere(*asked: Any, **attrs: Any) -> str | None:
    return None


@dataclass(frozen=True, eq=False)
class Implementation:
    """One way to run an op.

    Attributes:
      name: the value for `implementation=`.
      summary: its method, in a few words.
      forward: `(**operands by slot, residuals: bool, **attrs) -> [*results, *residuals]`.
      tangent: `(saved, tangents, shape, shardings, **attrs) -> tangent of out`; dicts by name, and the shape of the result. Of an op that
        gives several results a dict: result -> tangent.
      cotangent: `(saved, ct, wanted, shardings, **attrs) -> [a gradient for each slot in wanted]`; `shardings` holds, for
        the slots (and "out") of an explicitly sharded call, the sharding they have and their gradients must have. Of an op that gives
        several results, `ct` is a dict with the cotangents that there are: result -> cotangent.
      adds: whether `cotangent` adds up a cotangent itself that is given as several arrays (`Op.addends`): it takes a tuple of them.
      unable: `(shapes, device, role=, **attrs) -> reason it cannot run, or None`, where nothing else forbids it (`refuses`).
      opaque: whether XLA cannot see what it computes (a custom call), so that the op itself has to be split among devices.
      unable_on: `device -> reason it cannot run there, or None`.
      roles: those in which it runs; in the others it is the reference, and runs everywhere.

    Among the attributes of forward, tangent and cotangent may be `device`: what they are lowered for; without it, or with None, the code
    is to run anywhere.
    """

    name: str
    summary: str
    forward: Callable[..., list[Array]]
    tangent: Callable[..., Array]
    cotangent: Callable[..., list[Array]]
    unable: Callable[..., str | None] = _runs_everywhere
    opaque: bool = False
    adds: bool = False
    unable_on: Callable[[Device], str | None] = _runs_everywhere
    roles: tuple[str, ...] = ("call", "tangent", "cotangent")

    @classmethod
    def of_reference(cls, summary: str, module: Any) -> Implementation:
        """ "xla": the meaning of an op, of which `module` has `forward`, `tangent` and `cotangent`."""
        return cls("xla", summary, module.forward, module.tangent, module.cotangent)

    def refuses(self, shapes: Mapping[str, Any], device: Device, *, role: str = "call", **attrs: Any) -> str | None:
        """Why it cannot run a call, or None; `shapes` maps the operands' names to shapes with dtypes."""
        if role not in self.roles:
            return None
        return self.unable_on(device) or self.unable(shapes, device, role=role, **attrs)

    def by_kernels(self, name: str, summary: str, module: Any, **more: Any) -> Implementation:
        """Another way to run the op, by CUDA kernels that XLA cannot look into: `module` has `forward` and `refuses`, and may have
        `cotangent` and `refuses_device`. What is not given is as here."""
        kernels = {
            "forward": module.forward,
            "cotangent": getattr(module, "cotangent", self.cotangent),
            "unable": module.refuses,
            "unable_on": getattr(module, "refuses_device", refuses_device),
            "opaque": True,
        }
        return replace(self, name=name, summary=summary, **kernels | more)
