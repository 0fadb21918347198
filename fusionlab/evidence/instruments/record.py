"""The environment of a measurement: hardware, versions, settings; and results as JSON files, complete or absent."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fusionlab.errors import ArgumentError
from fusionlab.output import write_file
from fusionlab.showing import Shown
from fusionlab.tracebacks import own_lines_hidden

# Settings that change what XLA compiles or what numbers come out.
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
    "jax_compilation_cache_dir",
    "jax_debug_nans",
    "jax_disable_jit",
)


@dataclass(frozen=True, repr=False)
class Environment(Shown):
    """The environment in which a measurement was made.

    Attributes:
      hardware: the device, as printed with every number.
      platform, device_kind, device_count: JAX's words for it.
      host_cpu, host_cores: the host's processor; cores this process may use.
      driver: platform version as XLA reports it (CUDA driver and runtime), "" without one.
      versions: package -> version, python included.
      xla_flags: the variable XLA_FLAGS.
      settings: JAX settings that change the compiled code.
      commit: git commit of the repository that the current folder belongs to, "-dirty" appended when it has changes; ""
        outside git. The variable FUSIONLAB_COMMIT overrides it, for a copy of the files without their history.
      time: UTC, ISO 8601.
    """

    hardware: str
    platform: str
    device_kind: str
    device_count: int
    host_cpu: str
    host_cores: int
    driver: str
    versions: dict[str, str]
    xla_flags: str
    settings: dict[str, Any]
    commit: str
    time: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Environment:
        """Reads a record back.

        Raises:
          KeyError: a field is missing.
        """
        return cls(**{f.name: data[f.name] for f in fields(cls)})

    def __str__(self) -> str:
        packages = ", ".join(f"{k} {v}" for k, v in self.versions.items())
        repository = f"; the current folder's repository at commit {self.commit}" if self.commit else ""
        return f"{self.hardware}; {packages}{repository}"


def environment() -> Environment:
    """The record of this process, now."""
    device = jax.devices()[0]
    return Environment(
        hardware=hardware(),
        platform=device.platform,
        device_kind=device.device_kind,
        device_count=jax.device_count(),
        host_cpu=host_cpu(),
        host_cores=host_cores(),
        driver=str(getattr(device.client, "platform_version", "")) if device.platform != "cpu" else "",
        versions={
            "jax": jax.__version__,
            "jaxlib": importlib.metadata.version("jaxlib"),
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        xla_flags=os.environ.get("XLA_FLAGS", ""),
        settings={s: _plain(getattr(jax.config, s)) for s in _SETTINGS if hasattr(jax.config, s)},
        commit=_commit(),
        time=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def hardware() -> str:
    """The hardware printed with every number: "NVIDIA H200", or the CPU's name and the cores this process may use."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    return f"CPU {host_cpu()}, {host_cores()} cores"


def host_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def host_cpu() -> str:
    """The processor's name, as the operating system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _commit() -> str:
    if named := os.environ.get("FUSIONLAB_COMMIT"):  # where the files are without their history
        return named

    def git(*args: str) -> str:
        done = subprocess.run(("git", *args), capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        dirty = "-dirty" if git("status", "--porcelain", "--untracked-files=no") else ""
        return git("rev-parse", "HEAD") + dirty
    except (OSError, subprocess.SubprocessError):
        return ""


def to_json(data: Any) -> str:
    """JSON that any reader accepts: NaN and the infinities, which JSON lacks, become strings."""
    return json.dumps(_strict(data), indent=1, allow_nan=False)


def _strict(x: Any) -> Any:
    if isinstance(x, Mapping):
        return {str(k): _strict(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_strict(v) for v in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


@own_lines_hidden
def save_json(path: str | os.PathLike[str], data: Any) -> Path:
    """Writes `data` as JSON, by way of a temporary file in the same folder.

    Raises:
      OutputError: the folder cannot be written to; no part of the file is left.
    """
    return write_file(path, to_json(data) + "\n", folders=True, advice="give a path you can write to")


def newest_record(folder: str | os.PathLike[str], benchmark: str, case: str = "") -> Any:
    """The record of a benchmark (a JSON file that names it, with an `environment`) in a folder that was measured last; None without one.

    `case`: of those that have this one among their `cases`; "" for any.

    Raises:
      ArgumentError: a file there is not JSON.
    """
    records = (load_json(path) for path in sorted(Path(folder).glob("*.json")))
    return max(
        (
            r
            for r in records
            if isinstance(r, dict) and r.get("benchmark") == benchmark and (not case or case in r.get("cases", ()))
        ),
        key=lambda r: r["environment"]["time"],
        default=None,
    )


@own_lines_hidden
def load_json(path: str | os.PathLike[str]) -> Any:
    """Reads what `save_json` wrote.

    Raises:
      ArgumentError: there is no such file, or it is not JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ArgumentError(f"path: there is no file {str(path)!r}; needed a .json file that save() wrote") from error
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no text, no JSON, a number of too many digits
        raise ArgumentError(f"path: {path} is not a readable JSON file ({error})") from error
