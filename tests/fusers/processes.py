"""Trials that need several devices: they run in a process of their own, since the number of devices is fixed when JAX starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def problems_of(module: str, devices: int, *names: str) -> dict[str, str | None]:
    """What went wrong with each trial of `fusers.<module>` (or with those named) on so many simulated devices, None where nothing did."""
    env = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS.parent), *filter(None, [env.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", f"fusers.{module}", *names],
        env=env,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(map(json.loads, done.stdout.splitlines()))
