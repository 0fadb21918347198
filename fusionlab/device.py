"""The device a decision is made for: real or simulated.

Support checks take this record, so that any device can be asked about on a laptop.
"""

from __future__ import annotations

import os
import platform as _platform
import re
from dataclasses import dataclass

import jax

from .errors import ArgumentError


@dataclass(frozen=True)
class Device:
    """What a decision needs to know of a device.

    Attributes:
      platform: JAX's platform name, "cpu" or "cuda" (other platforms keep JAX's name).
      arch: CUDA architecture, "sm_90"; "" without one.
      name: what to print ("NVIDIA H200", "x86_64, 2 cores").
      simulated: True when the device is only asked about, not present.
    """

    platform: str
    arch: str = ""
    name: str = ""
    simulated: bool = False

    @property
    def capability(self) -> int:
        """Compute capability times ten (90 for sm_90); 0 without one."""
        return int(self.arch.removeprefix("sm_")) if self.arch else 0

    @classmethod
    def current(cls) -> Device:
        """The default JAX device of this process."""
        first = jax.devices()[0]
        if first.platform == "gpu":
            capability = str(getattr(first, "compute_capability", ""))
            return cls("cuda", "sm_" + capability.replace(".", ""), first.device_kind)
        if first.platform == "cpu":
            return cls("cpu", "", f"{_platform.machine()} CPU, {os.cpu_count()} cores")
        return cls(first.platform, "", first.device_kind)

    @classmethod
    def lowered_for(cls, platform: str) -> Device:
        """The device a program is lowered for: this process's own, or, on a platform it does not run on, one of no known architecture."""
        here = cls.current()
        return here if here.platform == platform else cls(platform)

    @classmethod
    def of(cls, device: Device | str | None) -> Device:
        """`None` is the current device, "cpu" or "sm_90" a simulated one, a Device itself.

        Raises:
          ArgumentError: the text is neither "cpu" nor "sm_NN".
        """
        if device is None:
            return cls.current()
        if isinstance(device, Device):
            return device
        if device == "cpu":
            return cls("cpu", "", "a CPU", simulated=True)
        if isinstance(device, str) and re.fullmatch(r"sm_\d{2,3}", device):
            return cls("cuda", device, f"a CUDA {device} device", simulated=True)
        raise ArgumentError(f"device: got {device!r}, needed None, 'cpu', 'sm_NN' (for instance 'sm_90') or a Device")

    def __str__(self) -> str:
        text = self.name or self.platform
        return f"{text} (simulated)" if self.simulated else text
