"""Processes with several simulated devices: how many there are is fixed when JAX starts."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def environment(devices: int) -> dict[str, str]:
    """The variables of a process of so many CPU devices, which finds the package and the tests' own modules."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}".strip()
    paths = [str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)}
