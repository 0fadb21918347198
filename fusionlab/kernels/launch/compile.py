"""CUDA C++ to cubins: NVRTC through CuPy, the CUDA headers it needs, and a cache on disk.

Nothing here needs a GPU or a driver, so every kernel can be compiled for every architecture on any machine. CuPy is imported by the first
compile, not before.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...device import Device
from ...errors import ArgumentError, CompileError, MissingDependencyError, OutputError
from ...output import write_file
from .architectures import (
    ARCHITECTURES,
    ARCHS,
    Instructions,
    refuses_instructions,
    refuses_untargeted,
    target_of,
)
from .disk import make_private, warn_once, why_not_trusted

KERNELS = Path(__file__).parents[1] / "ops"
NOT_INSTALLED = 'CuPy is not installed: pip install "fusionlab[cuda13]", or [cuda12]'
_MAGIC = b"fusionlab cubin 1\n"
_DIGEST = hashlib.sha256().digest_size
_LOCAL_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class CudaSource:
    """A CUDA source: a file of this package, or a text.

    Attributes:
      path: the .cu file, relative to `fusionlab/kernels`; of a text, its name.
      entries: the `extern "C"` kernels it defines.
      needs: the instructions it uses that not every architecture of `ARCHS` has.
      shared: bytes of shared memory of a block, without which its kernels cannot be launched.
      tried: the only architectures it may run on, whatever others have; empty for no such limit.
      text: the source itself, if it is not a file of this package; it includes CUDA's headers and nothing else.
    """

    path: str
    entries: tuple[str, ...]
    needs: tuple[Instructions, ...] = ()
    shared: int = 48 << 10
    tried: tuple[str, ...] = ()
    text: str = ""

    @property
    def archs(self) -> tuple[str, ...]:
        """The architectures it is compiled for, out of `ARCHS`."""
        return tuple(arch for arch in ARCHS if self.refuses_arch(arch) is None)

    def refuses_arch(self, arch: str) -> str | None:
        """Why its kernels cannot run on an architecture, or None: what it lacks, or what is too little."""
        name = self.file.name
        if reason := refuses_instructions(arch, self.needs, name):
            return reason
        target = target_of(arch)
        if target and self.tried and target not in self.tried:
            return f"{arch} is not {' or '.join(self.tried)}, where alone {name} was tried"
        return ARCHITECTURES[target].refuses(name, 0, self.shared) if target else None

    def refuses(self, device: Device) -> str | None:
        """Why its kernels cannot run on a device, or None."""
        return refuses_device(device) or (self.refuses_arch(device.arch) if device.arch else None)

    @property
    def file(self) -> Path:
        """The path of the file."""
        return KERNELS / self.path

    def read(self) -> str:
        """The source text."""
        return self.text or self.file.read_text(encoding="utf-8")


@dataclass(frozen=True)
class Cubin:
    """A cubin (an ELF image for one architecture) and the compiler's log."""

    cubin: bytes
    log: str


@dataclass(frozen=True)
class Resources:
    """The resources of one kernel: registers per thread, bytes spilled to memory per thread, static shared memory per block."""

    registers: int
    spill_stores: int
    spill_loads: int
    shared: int


@dataclass(frozen=True)
class Counters:
    """Counters of a `CompileCache`: cubins found, compiled, found but damaged or not to be trusted (compiled again), and not
    writable (kept nowhere)."""

    hits: int = 0
    misses: int = 0
    damaged: int = 0
    unwritten: int = 0


def cache_folder() -> Path:
    """`$FUSIONLAB_CACHE_DIR`, or `~/.cache/fusionlab/cubin`."""
    named = os.environ.get("FUSIONLAB_CACHE_DIR")
    return Path(named) if named else Path(os.path.expanduser("~")) / ".cache" / "fusionlab" / "cubin"


class CompileCache:
    """Cubins on disk, by the hash of all that they depend on; safe for threads and for processes that share the folder.

    A file holds a checksum before the cubin, so that a truncated or altered one is detected and compiled again. It is written next to
    its place and moved there, so that no reader sees half of it. A cubin is code: one that another user made or could change is not
    read. A folder that cannot be written to or is not to be trusted costs a compile in each process, and is a warning, no error.

    Args:
      folder: None takes `cache_folder()`, asked at each use.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None):
        self._folder = None if folder is None else Path(folder)
        self._lock = threading.Lock()
        self._busy: dict[str, threading.Lock] = {}
        self._counters = Counters()

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        return cache_folder() if self._folder is None else self._folder

    def counters(self) -> Counters:
        """Its counters so far."""
        with self._lock:
            return self._counters

    def get(self, key: str, make: Callable[[], bytes]) -> bytes:
        """The cubin of that key (hexadecimal); if it is missing, one thread makes it and the others wait."""
        with self._lock:
            mine = self._busy.setdefault(key, threading.Lock())
        with mine:
            found = self._read(key)
            if found is not None:
                self._count("hits")
                return found
            data = make()
            self._count("misses")
            self._write(key, data)
            return data

    def _count(self, name: str) -> None:
        with self._lock:
            self._counters = replace(self._counters, **{name: getattr(self._counters, name) + 1})

    def _read(self, key: str) -> bytes | None:
        file = self.folder / f"{key}.cubin"
        try:
            data, distrusted = file.read_bytes(), why_not_trusted(file)
        except OSError:  # not there, or not readable, which compiling repairs as well
            return None
        if distrusted:
            self._count("damaged")
            warn_once(file, f"is not loaded: {distrusted}; the kernel is compiled again")
            return None
        body = data[len(_MAGIC) + _DIGEST :]
        if data[: -len(body) or None] == _MAGIC + hashlib.sha256(body).digest() and body:
            return body
        self._count("damaged")
        warn_once(file, "is damaged; the kernel is compiled again")
        return None

    def _write(self, key: str, cubin: bytes) -> None:
        folder = self.folder
        try:
            make_private(folder)
            distrusted = why_not_trusted(folder)
            if not distrusted:
                content = _MAGIC + hashlib.sha256(cubin).digest() + cubin
                write_file(folder / f"{key}.cubin", content, mode=0o600, every_process=True)
                return
        except (OutputError, OSError) as error:
            distrusted = str(getattr(error.__cause__, "strerror", None) or getattr(error, "strerror", None) or error)
        self._count("unwritten")
        warn_once(
            folder, f"keeps no compiled kernels ({distrusted}): each process compiles them; set FUSIONLAB_CACHE_DIR"
        )


DEFAULT_CACHE = CompileCache()


def cubin(source: CudaSource, options: tuple[str, ...], arch: str, cache: CompileCache | None = None) -> bytes:
    """The cubin of a source, from the cache or from NVRTC.

    Args:
      source: what to compile.
      options: NVRTC's, in addition to those of `compile_source` ("-DFL_T=1").
      arch: one of `source.archs`, "sm_90".
      cache: None takes `DEFAULT_CACHE`.

    Raises:
      ArgumentError: an arch that the source is not written for.
      CompileError: it does not compile.
      MissingDependencyError: CuPy, NVRTC or the CUDA headers are missing; names what to install.
    """
    _check_arch(source, arch)
    version = nvrtc_version()
    cache = DEFAULT_CACHE if cache is None else cache
    return cache.get(_key(source, options, arch, version), lambda: compile_source(source, options, arch).cubin)


def compile_source(source: CudaSource, options: tuple[str, ...], arch: str) -> Cubin:
    """Compiles without a cache. Arguments and errors as for `cubin`; the log holds what `resources` reads."""
    _check_arch(source, arch)
    nvrtc, include = _nvrtc(), headers()
    given = (
        f"--gpu-architecture={arch}",
        "--std=c++17",
        f"-I{include}",
        f"-I{source.file.parent}",
        "--ptxas-options=-v",
        *options,
    )
    program = nvrtc.createProgram(source.read(), source.path, (), ())
    try:
        nvrtc.compileProgram(program, given)
        return Cubin(_whole(nvrtc.getCUBIN(program)), _log(nvrtc, program))
    except nvrtc.NVRTCError as e:
        raise CompileError(
            f"{source.path} does not compile for {arch} ({e}); NVRTC {'.'.join(map(str, nvrtc_version()))}, "
            f"options {' '.join(given)}; its log:\n{_log(nvrtc, program)}"
        ) from e
    finally:
        nvrtc.destroyProgram(program)


def _whole(image: bytes) -> bytes:
    """The ELF image with the last byte that CuPy 14 cuts off, as if it ended a string; it ends a header of 8-byte words, and is 0."""
    return image + b"\0" * (-len(image) % 8)


def _log(nvrtc: Any, program: Any) -> str:
    return nvrtc.getProgramLog(program).rstrip("\0").strip()


_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def resources(log: str) -> dict[str, Resources]:
    """Entry -> its resources, from the log of a compile (the lines of `ptxas -v`)."""
    found = {}
    _, *parts = re.split(r"(?=Compiling entry function)", log)
    for part in parts:
        entry, spills, used, shared = (p.search(part) for p in (_ENTRY, _SPILLS, _USED, _SHARED))
        if entry and used:
            stores, loads = (int(n) for n in spills.groups()) if spills else (0, 0)
            found[entry[1]] = Resources(int(used[1]), stores, loads, int(shared[1]) if shared else 0)
    return found


def nvrtc_version() -> tuple[int, int]:
    """NVRTC's, (13, 0).

    Raises:
      MissingDependencyError: CuPy or NVRTC is missing; names what to install.
    """
    major, minor = _nvrtc().getVersion()
    return int(major), int(minor)


def headers() -> Path:
    """The folder of `cuda_fp16.h` and `cuda_bf16.h` for NVRTC's CUDA: of the CUDA wheels, or of a toolkit.

    Raises:
      MissingDependencyError: no folder has them; names the wheel that holds them.
    """
    major = nvrtc_version()[0]
    for folder in _header_folders(major):
        if (folder / "cuda_fp16.h").is_file() and (folder / "cuda_bf16.h").is_file() and _major_of(folder) == major:
            return folder
    wheel = "nvidia-cuda-runtime-cu12" if major == 12 else "nvidia-cuda-runtime"
    raise MissingDependencyError(
        f"the headers cuda_fp16.h and cuda_bf16.h of CUDA {major} are in neither a CUDA wheel nor a toolkit (CUDA_HOME, CUDA_PATH, "
        f"/usr/local/cuda, nvcc on PATH): pip install '{wheel}=={major}.*'"
    )


def _header_folders(major: int) -> list[Path]:
    """Where headers may be, the wheels that NVRTC comes from first."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    folders = [root / part / "include" for root in roots for part in (f"cu{major}", "cuda_runtime")]
    nvcc = shutil.which("nvcc")
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), f"/usr/local/cuda-{major}", "/usr/local/cuda"]
    toolkits += [str(Path(nvcc).resolve().parents[1])] if nvcc else []
    return folders + [Path(t) / "include" for t in toolkits if t]


def _major_of(folder: Path) -> int | None:
    """The major version of the CUDA whose headers these are."""
    try:
        text = (folder / "cuda_runtime_api.h").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    version = re.search(r"^#define\s+CUDART_VERSION\s+(\d+)", text, re.MULTILINE)
    return int(version[1]) // 1000 if version else None


def _nvrtc() -> Any:
    """CuPy's binding of NVRTC, once NVRTC itself is known to load."""
    try:
        nvrtc = importlib.import_module("cupy.cuda").nvrtc
    except ImportError as e:
        raise MissingDependencyError(
            f'compiling CUDA kernels needs CuPy, which cannot be imported ({e}): pip install "fusionlab[cuda13]" '
            f"(or fusionlab[cuda12])"
        ) from e
    try:
        nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as e:
        raise MissingDependencyError(
            f"compiling CUDA kernels needs NVRTC, which CuPy cannot load ({str(e).partition(chr(10))[0]}): pip install nvidia-cuda-nvrtc "
            f"(nvidia-cuda-nvrtc-cu12 for CUDA 12)"
        ) from e
    return nvrtc


def why_missing() -> str | None:
    """Why nothing can be compiled in this process, without loading anything; None where CuPy is installed."""
    return NOT_INSTALLED if importlib.util.find_spec("cupy") is None else None


def refuses_device(device: Device) -> str | None:
    """Why none of this package's kernels can run on a device, or None if a kernel with only the compiler's requirements can."""
    return refuses_untargeted(device) or (NOT_INSTALLED if "cupy" in device.missing else None)


def _check_arch(source: CudaSource, arch: str) -> None:
    if arch not in source.archs:
        why = f": {reason}" if (reason := source.refuses_arch(arch)) else ""
        raise ArgumentError(f"arch: got {arch!r} for {source.path}, needed one of {', '.join(source.archs)}{why}")


def _key(source: CudaSource, options: tuple[str, ...], arch: str, version: tuple[int, int]) -> str:
    if source.text:
        texts = {source.path: source.text}
    else:
        texts = {str(path.relative_to(source.file.parent)): text for path, text in source_texts(source.file).items()}
    whole = json.dumps([source.path, texts, list(options), arch, list(version)], sort_keys=True)
    return hashlib.sha256(whole.encode()).hexdigest()


def source_texts(file: Path) -> Mapping[Path, str]:
    """The text of a source and of all that it includes with quotes, by path."""
    texts: dict[Path, str] = {}
    waiting = [file]
    while waiting:
        path = waiting.pop()
        if path not in texts:
            texts[path] = path.read_text(encoding="utf-8")
            waiting += [path.parent / name for name in _LOCAL_INCLUDE.findall(texts[path])]
    return texts
