"""Trials that need several devices: they run in a process of their own, since the number of devices is fixed when JAX starts."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.simulated import environment


def problems_of(module: str, devices: int, *names: str) -> dict[str, str | None]:
    """What went wrong with each trial of `fusers.<module>` (or with those named) on so many simulated devices, None where nothing did."""
    done = subprocess.run(
        [sys.executable, "-m", f"fusers.{module}", *names],
        env=environment(devices),
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(map(json.loads, done.stdout.splitlines()))
