"""Files that tests make once and share: between tests, between the workers of one run, and between runs."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
from collections.abc import Callable
from pathlib import Path

# A run that measures what tests take has a folder of its own (tests/durations.py).
FOLDER = Path(os.environ.get("FUSIONLAB_TEST_CACHE") or Path(__file__).parents[1] / ".pytest_cache" / "fusionlab")


def processor() -> str:
    """A name of this machine's processor and what it can do: code compiled for one may not run on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:  # no Linux
        lines = [platform.machine(), platform.processor()]
    told = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}) or lines
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]


def cached_file(name: str, build: Callable[[Path], None]) -> Path:
    """The file of this name in the cache, which `build(path)` writes where it is not there yet.

    Of several processes that want it at once, one builds. A build that fails leaves nothing behind.
    """
    path = FOLDER / name
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            unfinished = path.with_name(f"unfinished.{path.name}")
            build(unfinished)
            unfinished.rename(path)
    return path
