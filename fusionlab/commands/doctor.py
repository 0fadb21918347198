"""Reports what this machine has and can run: versions, devices, the needs of each backend and output, and the command to run next.

Nothing optional is imported to find out: installed packages are read from their metadata.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import jax

from ..device import Device
from ..kernels import CARDS
from ..kernels.choose.choices import CHOICES
from ..kernels.launch import ffi_call as launch
from ..kernels.launch import native
from ..kernels.launch.compile import DEFAULT_CACHE
from ..kernels.sources import Coverage
from ..showing import Shown, Table
from ..tracebacks import own_lines_hidden
from ..verbs.fused import DISABLE, is_disabled
from .kernels_by_gpu import MEANING, kernels_by_gpu


@dataclass(frozen=True, repr=False)
class Need(Shown):
    """A package or program that FusionLab can use.

    Attributes:
      name: the package or program.
      purpose: what it is used for.
      version: the version found ("" where it has none to read), or None when it is missing.
      remedy: the command that installs it, or what happens without it.
    """

    name: str
    purpose: str
    version: str | None
    remedy: str

    @property
    def present(self) -> bool:
        """Whether it was found."""
        return self.version is not None

    def __str__(self) -> str:
        return f"{self.name}: {(self.version or 'found') if self.present else 'missing'}, {self.purpose}"


@dataclass(frozen=True, repr=False)
class Ability(Shown):
    """A backend of the fused ops, or a kind of output: whether it runs here, and why or why not.

    Attributes:
      name: of the backend or the output.
      ready: whether it runs here.
      reason: why it does, or does not.
    """

    name: str
    ready: bool
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {'ready' if self.ready else 'missing'}, {self.reason}"


@dataclass(frozen=True, repr=False)
class Doctor(Shown):
    """The result of `doctor()`; prints as a report.

    Attributes:
      versions: package -> version, Python's and the platform's own among them.
      devices: the devices that JAX sees ("cpu: x86_64 CPU, 2 cores").
      device: the default one, with its memory, its libraries and, if asked for, its measured rates.
      needs: everything FusionLab can use, present or missing.
      abilities: backends and outputs, ready or not, with the reason.
      next_command: the command to run next.
      caches: name -> counter -> count, of this process: launch plans prepared, kernels compiled, choices of implementations looked up.
      kernels: pass -> what each GPU that is known by name, and this one, has of its kernels.
    """

    versions: dict[str, str]
    devices: tuple[str, ...]
    device: Device
    needs: tuple[Need, ...]
    abilities: tuple[Ability, ...]
    next_command: str
    caches: dict[str, dict[str, int]] = field(default_factory=dict)
    kernels: dict[str, tuple[Coverage, ...]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-able data; `needs` carry `present`."""
        return asdict(self) | {"needs": [asdict(n) | {"present": n.present} for n in self.needs]}

    def __repr__(self) -> str:
        ready = sum(a.ready for a in self.abilities)
        return f"<Doctor: {ready} of {len(self.abilities)} backends and outputs ready; next: {self.next_command}>"

    def _sentence(self) -> str:
        ready = sum(a.ready for a in self.abilities)
        return (
            f"{ready} of {len(self.abilities)} backends and outputs ready on {self.device}; next: {self.next_command}"
        )

    def _table(self) -> Table:
        facts = [("device", text, "") for text in (*self.devices, *_facts(self.device))]
        able = [(a.name, "ready" if a.ready else "missing", a.reason) for a in self.abilities]
        needs = [(n.name, (n.version or "found") if n.present else "missing", n.purpose) for n in self.needs]
        versions = [(name, version, "version") for name, version in self.versions.items()]
        kernels = [(f"kernels of {name}", "", _states(row)) for name, row in self.kernels.items()]
        return Table(("what", "state", "for or why"), (*facts, *able, *kernels, *needs, *versions))

    def __str__(self) -> str:
        lines = ["Versions", "  " + ", ".join(f"{k} {v}" for k, v in self.versions.items())]
        lines += ["Devices", *(f"  {d}" for d in self.devices)]
        lines += [f"  the first has {', '.join(facts)}"] if (facts := list(_facts(self.device))) else []
        lines += ["Backends and outputs"]
        lines += [f"  {'ready  ' if a.ready else 'missing'}  {a.name:<22} {a.reason}" for a in self.abilities]
        lines += ["Kernels of each pass by GPU", *(f"  {line}" for line in MEANING), *self._kernel_lines()]
        lines += ["Packages and programs", *map(_need_line, self.needs)]
        lines += ["Caches of this process"]
        for name, counts in self.caches.items():
            lines.append(f"  {name:<16} " + ", ".join(f"{k} {v}" for k, v in counts.items()))
        return "\n".join([*lines, "Next", f"  {self.next_command}"])

    def _kernel_lines(self) -> Iterator[str]:
        """The table of passes and GPUs, and what this one refuses."""
        yield _kernel_line("", [one.arch for row in list(self.kernels.values())[:1] for one in row])
        for name, row in self.kernels.items():
            yield _kernel_line(name, [one.state.value for one in row])
        here = (
            (name, one.refused) for name, row in self.kernels.items() for one in row if one.arch == self.device.arch
        )
        yield from (f"  {name}: {way}: {why}" for name, refused in here for way, why in refused.items())


def _states(row: tuple[Coverage, ...]) -> str:
    """What each GPU has of a pass: "sm_90 measured, sm_100 compiled"."""
    return ", ".join(f"{one.arch} {one.state}" for one in row)


def _kernel_line(name: str, cells: list[str]) -> str:
    return f"  {name:<22} {' '.join(f'{cell:<8}' for cell in cells)}".rstrip()


def _need_line(need: Need) -> str:
    state = need.version or "found" if need.present else "missing"
    return f"  {need.name:<16} {state:<10} {need.purpose}" + ("" if need.present else f"; {need.remedy}")


def _facts(device: Device) -> Iterator[str]:
    """The facts about a device beyond its name, in words."""
    if device.memory is not None:
        yield f"{device.memory / 2**30:.1f} GiB"
    libraries = {
        "CUDA": _cuda(device.runtime),
        "driver": device.driver,
        "cuDNN": device.cudnn,
        "cuBLAS": device.cublaslt,
    }
    yield from (f"{name} {version}" for name, version in libraries.items() if version is not None)
    if device.copy_bytes_per_s is not None:
        yield f"copies {device.copy_bytes_per_s / 1e9:.4g} GB/s (measured, read and written)"
    if device.gemm_flop_per_s is not None:
        dtype = "bfloat16" if device.platform == "cuda" else "float32"
        yield f"multiplies {device.gemm_flop_per_s / 1e12:.3g} TFLOP/s (measured, {dtype})"


def _cuda(runtime: str | None) -> str | None:
    """CUDA's version as it is written ("13.0"), of the number that it gives itself ("13000")."""
    return f"{int(runtime) // 1000}.{int(runtime) % 1000 // 10}" if runtime and runtime.isdigit() else runtime


def _package(name: str, module: str, purpose: str, remedy: str) -> Need:
    """A Python package: its version when its module can be found, without importing it."""
    if importlib.util.find_spec(module) is None:
        return Need(name, purpose, None, remedy)
    try:
        return Need(name, purpose, importlib.metadata.version(name), remedy)
    except importlib.metadata.PackageNotFoundError:
        return Need(name, purpose, "", remedy)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed: run from its source folder)"


def _cupy() -> Need:
    found = [d for d in ("cupy-cuda13x", "cupy-cuda12x", "cupy") if _package(d, "cupy", "", "").version]
    return _package(
        found[0] if found else "cupy", "cupy", "compiling and launching CUDA kernels", "pip install 'fusionlab[cuda13]'"
    )


def _needs() -> tuple[Need, ...]:
    base = "pip install --force-reinstall fusionlab"
    return (
        _package("graphviz", "graphviz", "DOT text", base),
        _package("matplotlib", "matplotlib", "plots of times and errors", base),
        _package("ipywidgets", "ipywidgets", "controls in a notebook", base),
        _package("anywidget", "anywidget", "the explorer in a notebook", base),
        _package("tqdm", "tqdm", "progress bars", base),
        _package("resvg_py", "resvg_py", "PNG pictures", base),
        _package("vl-convert-python", "vl_convert", "PDF pictures", "pip install 'fusionlab[pdf]'"),
        _cupy(),
    )


def _abilities(device: Device, needs: tuple[Need, ...]) -> tuple[Ability, ...]:
    have = {n.name for n in needs if n.present}
    widget = {"ipywidgets", "anywidget"} <= have
    off = f"{DISABLE} is set: every fused function runs as the original"
    return (
        Ability("fusing", not is_disabled(), off if is_disabled() else f"{DISABLE}=1 turns it off"),
        *_backends(device),
        _launcher(),
        Ability("SVG pictures", True, "drawn by FusionLab"),
        Ability("PNG pictures", "resvg_py" in have, "by resvg_py"),
        Ability("PDF pictures", "vl-convert-python" in have, "by vl-convert-python (pip install 'fusionlab[pdf]')"),
        Ability("plots", "matplotlib" in have, "by matplotlib"),
        Ability("notebook explorer", widget, "by ipywidgets and anywidget"),
    )


def _backends(device: Device) -> Iterator[Ability]:
    """The backends of all ops: ready if nothing is needed, or JAX sees a CUDA GPU and nothing is missing; else with the missing
    parts."""
    for one in sorted({r for card in CARDS for r in card.requirements}, key=lambda r: r.order):
        needs = []
        if one.missing is not None:
            needs += [] if device.platform == "cuda" else ["JAX sees no CUDA GPU"]
            needs += [reason for missing in one.missing if (reason := missing()) is not None]
        yield Ability(f"backend {one.name}", not needs, "; ".join(needs) if needs else one.ability)


def _launcher() -> Ability:
    """Ready where a compiled launcher is in use; Python launches kernels elsewhere, later."""
    if launch.LAUNCHER is not None:
        return Ability("compiled launcher", True, "launches kernels without Python, also outside CUDA graphs")
    reason = native.why_not() or f"{native.VARIABLE} asks for it, or it could not be built or loaded"
    return Ability("compiled launcher", False, f"Python launches kernels, more slowly outside CUDA graphs: {reason}")


def _next_command(device: Device, needs: tuple[Need, ...]) -> str:
    if missing := [n.name for n in needs if not n.present and "force-reinstall" in n.remedy]:
        return f"pip install {' '.join(missing)}"
    # The kernel driver is there but JAX runs on the CPU: what is missing is JAX's CUDA plugin.
    if (
        device.platform == "cpu"
        and os.path.exists("/proc/driver/nvidia/version")
        and not os.environ.get("JAX_PLATFORMS")
    ):
        return "pip install 'jax[cuda13]'"
    return "fusionlab demo -o demo"


@own_lines_hidden
def doctor(measure: bool = False) -> Doctor:
    """Reports what this machine has and can run. Starts JAX's default backend and imports nothing optional.

    Args:
      measure: also measure the device's copy bandwidth and matrix product rate, which takes a few seconds.

    Returns:
      Versions, devices, and each backend and output with whether it is ready; it prints as a report.
    """
    device, needs = Device.current(), _needs()
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    versions |= {name: _version(name) for name in ("fusionlab", "jax", "jaxlib", "numpy")}
    described = [f"{d.platform}: {device if d.platform == 'cpu' else d.device_kind}" for d in jax.devices()]
    if measure:
        from ..evidence.instruments.peaks import measure_peaks

        device = measure_peaks()
    caches = {"plans": launch.counters(), "kernels": asdict(DEFAULT_CACHE.counters()), "choices": CHOICES.counters()}
    abilities, command = _abilities(device, needs), _next_command(device, needs)
    return Doctor(versions, tuple(described), device, needs, abilities, command, caches, kernels_by_gpu(device))
