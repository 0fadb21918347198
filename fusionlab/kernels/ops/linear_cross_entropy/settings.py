"""The attributes of a call of `linear_cross_entropy` as one record, for all that computes it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....device import Device

FLOATING = ("out", "lse", "loss")  # results that have a derivative
ALSO = ("lse", "argmax", "loss")
# What a label outside of [0, V) picks, and what is subtracted of the picked logit's gradient.
OUT_OF_RANGE = ("nan", "clip", "promise_in_bounds", "zero", "drop")


@dataclass(frozen=True)
class Attributes:
    """Those that a user gives, with their defaults; see `linear_cross_entropy`."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    scale: float = 1.0
    classes: int | None = None
    fill: float = -math.inf
    logits_dtype: Any = None  # a numpy name, once it is prepared
    transposed: bool = False
    out_of_range: str = "nan"
    masked: bool = True
    also: tuple[str, ...] = ()
    chunk: int | None = None
    precision: Any = None


DEFAULTS = {field.name: field.default for field in dataclasses.fields(Attributes)}


@dataclass(frozen=True)
class Settings(Attributes):
    """A call without its operands: the user's arguments, and the settings that the op and its primitives add.

    Attributes:
      present: the slots that are given.
      dtypes: those of the operands that are given, in order.
      rounded: whether gradients that are made forward are rounded there to the dtypes of their operands: their cotangent is known to be 1.
      across: label of an axis ("m0", ..., "v") -> the mesh axes along which each device holds a part of it.
      device: the target of lowering, if known.
    """

    present: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    rounded: bool = False
    across: tuple[tuple[str, tuple[str, ...]], ...] = ()
    device: Device | None = None

    @classmethod
    def of(cls, attrs: Mapping[str, Any]) -> Settings:
        """From among the attributes of a call."""
        return cls(**{f.name: attrs[f.name] for f in dataclasses.fields(cls) if f.name in attrs})

    @property
    def on_a_gpu(self) -> bool:
        """Whether the target of lowering is known, and no CPU."""
        return self.device is not None and self.device.platform != "cpu"

    @property
    def is_bounded(self) -> bool:
        """Whether the cotangent of a logit is of the size of its row's."""
        return self.z_loss <= 1 and abs(self.scale) <= 1

    @property
    def is_scalar(self) -> bool:
        """Whether the result is the weighted sum over the rows, of which the gradients are made in the forward pass."""
        return "weights" in self.present

    @property
    def results(self) -> tuple[str, ...]:
        return ("out", *self.also)

    @property
    def gradients(self) -> dict[str, str]:
        """Slot -> the residual that is its gradient for a cotangent of 1, not rounded yet; of a sum alone."""
        if not self.is_scalar:
            return {}
        return {slot: GRADIENTS[slot] for slot in self.present if slot in GRADIENTS}

    @property
    def residuals(self) -> tuple[str, ...]:
        """What a differentiated call keeps, apart from operands and results."""
        if not self.is_scalar:
            return STATISTICS
        recomputed = STATISTICS if self.has_rows else ()
        return (*self.gradients.values(), *(() if "loss" in self.also else ("loss",)), *recomputed)

    @property
    def has_rows(self) -> bool:
        """Whether a result by row has a derivative, for which the logits are computed again."""
        return not self.is_scalar or "lse" in self.also or "loss" in self.also

    def dtype_of(self, slot: str) -> str:
        """The dtype of an operand that is given."""
        return dict(zip(self.present, self.dtypes, strict=True))[slot]

    def mesh_axes(self, *labels: str) -> tuple[str, ...]:
        """The mesh axes along which a device holds a part of these labels; "m" is all axes of rows."""
        return tuple(n for label, names in self.across for n in names if label.rstrip("0123456789") in labels)


GRADIENTS = {"x": "dx", "w": "dw", "bias": "dbias"}
STATISTICS = ("top", "mass")  # of a row: its largest logit, and the sum of the exponentials below it
