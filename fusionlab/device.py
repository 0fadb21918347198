"""The device a decision is made for: real or simulated.

Support checks take this record, so decisions for any device can be made on a laptop.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import itertools
import os
import platform as _platform
import re
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from .errors import ArgumentError, did_you_mean
from .showing import Shown
from .tracebacks import errors_for_users

# What a card is called -> its architecture. Any other is asked about by its sm_NN.
GPUS = {
    "a100": "sm_80",
    "l4": "sm_89",
    "h100": "sm_90",
    "h200": "sm_90",
    "b200": "sm_100",
    "rtx4090": "sm_89",
    "rtx5090": "sm_120",
    "t4": "sm_75",
}
# Bytes per second of the memory and operations per second of bfloat16 products (float16 on a T4), dense, summed in float32, by NVIDIA's
# data sheets: what a card can do at best, for estimates where nothing was measured (`Device.at_most`).
DATA_SHEETS = {
    "a100": (1.555e12, 312e12),
    "l4": (300e9, 121e12),
    "h100": (3.35e12, 989e12),
    "h200": (4.8e12, 989e12),
    "b200": (8e12, 2250e12),
    "rtx4090": (1.008e12, 165e12),
    "rtx5090": (1.792e12, 209e12),
    "t4": (320e9, 65e12),
}
NEEDED = ("cupy", "nvmath")  # modules that launching on a CUDA device needs, beside JAX


@errors_for_users
@dataclass(frozen=True, repr=False)
class Device(Shown):
    """The properties of a device that decisions depend on: decisions are pure functions of a call and this record.

    Any device can be simulated: `Device.of("sm_75")`, `Device.of("h100")` or another of `GPUS`,
    `dataclasses.replace(Device.of("sm_90"), cudnn="8.9.7")` for one with an old library,
    `dataclasses.replace(Device.of("sm_90"), missing=("cupy",))` for one without CuPy, `Device.of("cpu")` for no GPU.

    Attributes:
      platform: JAX's platform name, "cpu" or "cuda" (other platforms keep JAX's name).
      arch: CUDA architecture, "sm_90"; "" without one.
      name: what to print ("NVIDIA H200", "x86_64, 2 cores").
      simulated: True when the device is not present.
      memory: bytes; on a GPU those that JAX may use. None where unknown.
      runtime: of CUDA, as JAX's client gives it ("13000" for 13.0); `driver`: the kernel driver's version ("580.65.06").
      cudnn, cublaslt: the versions of the packages that JAX's CUDA plugin loads. None where unknown, as all four are away from CUDA.
      units: multiprocessors of a GPU; None where unknown, as of a simulated one.
      missing: which of `NEEDED` this process lacks, on CUDA; a simulated device lacks none.
      copy_bytes_per_s: bytes read and written by a large copy; `gemm_flop_per_s`: of a large product (bfloat16 on CUDA, float32 on a CPU).
        Both None until `fusionlab.evidence.instruments.peaks.measure_peaks` measured them; devices that differ only in these are
        equal.
    """

    platform: str
    arch: str = ""
    name: str = ""
    simulated: bool = False
    memory: int | None = None
    runtime: str | None = None
    driver: str | None = None
    cudnn: str | None = None
    cublaslt: str | None = None
    units: int | None = None
    missing: tuple[str, ...] = ()
    copy_bytes_per_s: float | None = field(default=None, compare=False)
    gemm_flop_per_s: float | None = field(default=None, compare=False)

    @property
    def capability(self) -> int:
        """Compute capability times ten (90 for sm_90); 0 without one."""
        return int(self.arch.removeprefix("sm_")) if self.arch else 0

    @property
    def card(self) -> str:
        """Which of `GPUS` it is by its name ("NVIDIA H100 80GB HBM3" is "h100"); "" for any other."""
        return card_in(self.name)

    @property
    def at_most(self) -> tuple[float, float] | None:
        """Bytes and operations per second: as measured, else those of the card's data sheet; None where neither is known."""
        if self.copy_bytes_per_s and self.gemm_flop_per_s:
            return self.copy_bytes_per_s, self.gemm_flop_per_s
        of_arch = [card for card, arch in GPUS.items() if arch == self.arch]
        card = self.card or (of_arch[0] if self.simulated and of_arch else "")
        return DATA_SHEETS.get(card)

    @classmethod
    def current(cls) -> Device:
        """The default JAX device of this process. Cheap: looked up once, nothing is loaded or measured, and if JAX is set to use the
        CPU alone, its backend is not started for it.
        """
        alone = jax.config.jax_platforms == "cpu"  # pyright: ignore[reportAttributeAccessIssue]
        return _cpu() if alone else _described(jax.local_devices()[0])

    @classmethod
    def asked(cls) -> Device:
        """The device that a fused op is bound for: inside `asked_about` the device of the search, else the current one."""
        return _ASKED.get() or cls.current()

    @classmethod
    def lowered_for(cls, platform: str) -> Device:
        """The device a program is lowered for: this process's own, or, on a platform it does not run on, one of no known architecture."""
        here = cls.current()
        return here if here.platform == platform else cls(platform, missing=_missing(platform))

    @classmethod
    def of(cls, device: Device | str | None) -> Device:
        """`None` is the current device, a text in any case a simulated one ("cpu", "sm_90", or a card: "h100"), a Device itself.

        Raises:
          ArgumentError: the text does not name a device; the message lists the names.
        """
        if device is None:
            return cls.current()
        if isinstance(device, Device):
            return device
        name = device.strip().lower() if isinstance(device, str) else ""
        if name == "cpu":
            return cls("cpu", "", "a CPU", simulated=True)
        if (card := re.sub(r"[ -]", "", name)) in GPUS:
            return cls("cuda", GPUS[card], f"an NVIDIA {card.upper()}, {GPUS[card]}", simulated=True)
        if re.fullmatch(r"sm_\d{2,3}", name):
            return cls("cuda", name, f"a CUDA {name} device", simulated=True)
        cards = ", ".join(map(repr, GPUS))
        near = did_you_mean(device, ("cpu", *GPUS, *GPUS.values())) if isinstance(device, str) else ""
        raise ArgumentError(
            f"device: got {device!r}, needed None, 'cpu', 'sm_NN' (for instance 'sm_90'), one of {cards}, or a Device.{near}"
        )

    def __str__(self) -> str:
        text = self.name or self.platform
        return f"{text} (simulated)" if self.simulated else text


def card_in(name: str) -> str:
    """Which of `GPUS` the name of a device means, by whole words ("NVIDIA GeForce RTX 4090"); "" for any other."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    pairs = map("".join, itertools.pairwise(words))
    return next((card for card in GPUS if card in {*words, *pairs}), "")


_ASKED: ContextVar[Device | None] = ContextVar("fusionlab_asked", default=None)


@contextlib.contextmanager
def asked_about(device: Device) -> Iterator[None]:
    """Context in which fused ops are bound for another device than this machine's: they are traced and inspected, but not run."""
    token = _ASKED.set(device)
    try:
        yield
    finally:
        _ASKED.reset(token)


@functools.lru_cache(maxsize=1)  # it is asked at every call of a fused op
def _described(first: Any) -> Device:
    if first.platform == "gpu":
        capability = str(getattr(first, "compute_capability", ""))
        return Device(
            "cuda",
            "sm_" + capability.replace(".", ""),
            first.device_kind,
            memory=(first.memory_stats() or {}).get("bytes_limit"),
            runtime=_first_match(r"cuda (\d+)", str(getattr(first.client, "platform_version", ""))),
            driver=_driver(),
            cudnn=_installed("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
            cublaslt=_installed("nvidia-cublas", "nvidia-cublas-cu12"),
            units=getattr(first, "core_count", None),
            missing=_missing("cuda"),
        )
    return _cpu() if first.platform == "cpu" else Device(first.platform, "", first.device_kind)


@functools.cache
def _cpu() -> Device:
    return Device("cpu", "", f"{_platform.machine()} CPU, {os.cpu_count()} cores", memory=_host_memory())


def _missing(platform: str) -> tuple[str, ...]:
    return tuple(n for n in NEEDED if importlib.util.find_spec(n) is None) if platform == "cuda" else ()


def _installed(*packages: str) -> str | None:
    """The version of the first of these that is installed, without importing it."""
    for name in packages:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    return driver_in(text)


def driver_in(text: str) -> str | None:
    """The kernel driver's version from the text of `/proc/driver/nvidia/version`: "580.159.03".

    The file may name the processor before it ("NVIDIA UNIX Open Kernel Module for x86_64  580.159.03"): a version has a dot.
    """
    return _first_match(r"Kernel Module\b.*?\s(\d+(?:\.\d+)+)\s", text)


def _host_memory() -> int | None:
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _first_match(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text)
    return found.group(1) if found else None
