"""The attributes of a call of `dot_product_attention` as one record, for all that computes it or checks whether it can."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....device import Device


@dataclass(frozen=True)
class Attributes:
    """Those that a user gives, with their defaults; see `dot_product_attention`."""

    scale: Any = None  # a float, once it is prepared
    is_causal: bool = False
    window: tuple[int, int] | None = None
    softcap: float | None = None
    mask_value: float = -math.inf
    factors_scale: float = 1.0
    keep: float = 1.0
    dropout_shape: tuple[int, ...] | None = None
    precision: Any = None
    layout: str = "BTNH"
    deterministic: bool = False


DEFAULTS = {field.name: field.default for field in dataclasses.fields(Attributes)}


@dataclass(frozen=True)
class Settings(Attributes):
    """A call without its operands: the user's arguments, and the settings that the op and its primitives add.

    Attributes:
      group: query heads that read one head of key and value: N / K.
      broadcast: (slot, shape, dtype) of the operands that broadcast and have a gradient.
      saves: the residuals kept for the backward (reference.py).
      present: the slots that are given; `live`: for each of them, whether it moves.
      role: of the primitive; `residuals`: whether a call keeps what it saves.
      device: the target of lowering, if known.
    """

    group: int = 1
    broadcast: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    saves: str = "logsumexp"
    present: tuple[str, ...] = ()
    live: tuple[bool, ...] = ()
    role: str = "call"
    residuals: bool = False
    device: Device | None = None

    @classmethod
    def of(cls, attrs: Mapping[str, Any]) -> Settings:
        """From among the attributes of a call."""
        return cls(**{f.name: attrs[f.name] for f in dataclasses.fields(cls) if f.name in attrs})

    @property
    def is_local(self) -> bool:
        """Whether a row's number determines which keys it may see."""
        return self.is_causal or self.window is not None

    def may_be_blind(self, t: int, s: int) -> bool:
        """Whether a row may see no key: for a bias or a mask, or for its number, since the last ones stand more than a window after the
        last key."""
        by_number = self.window is not None and t - 1 - self.window[0] > s - 1
        return by_number or not {"bias", "mask"}.isdisjoint(self.present)

    @property
    def has_backward(self) -> bool:
        """Whether it keeps something for a backward, or is one."""
        return self.residuals or self.role != "call"

    @property
    def wanted(self) -> tuple[str, ...]:
        """The slots that move."""
        return tuple(slot for slot, moves in zip(self.present, self.live, strict=False) if moves)

    @property
    def saved_names(self) -> tuple[str, ...]:
        """The residuals that the forward keeps in addition to its result."""
        if self.saves == "probabilities":
            beside = (("tanh", self.softcap is not None), ("sink_weight", "sink" in self.present))
            return ("probabilities", *(name for name, is_there in beside if is_there))
        return (*self.statistics, "rounded_off") if self.keeps_rounded_off else self.statistics

    @property
    def statistics(self) -> tuple[str, ...]:
        """Those with an entry for each row, where the probabilities are not kept."""
        return statistics(self.saves)

    @property
    def keeps_rounded_off(self) -> bool:
        return self.saves.endswith(ROUNDED_OFF)


ROUNDED_OFF = "_and_rounded_off"


def statistics(saves: str) -> tuple[str, ...]:
    """Those with an entry for each row, where the probabilities are not kept."""
    return ("logsumexp",) if saves.startswith("logsumexp") else ("row_max", "log_sum")
