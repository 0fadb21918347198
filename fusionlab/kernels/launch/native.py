"""The compiled launcher: `launcher.c`, built once by the machine's C compiler, which launches prepared plans without Python.

Without a compiler Python launches the kernels, later outside of CUDA graphs. `$FUSIONLAB_LAUNCHER` may ask for one of the two,
"native" or "python"; a record of `python -m benchmarks gemm_epilogue` names the one it used.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import jax

from ...errors import ArgumentError, CompileError, MissingDependencyError
from .compile import cache_folder
from .disk import make_private, warn_once, why_not_trusted
from .steps import KernelStep, MatmulStep, Param, Prepared

SOURCE = Path(__file__).with_name("launcher.c")
FLAGS = ("-std=c11", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden")
VARIABLE = "FUSIONLAB_LAUNCHER"
COMPILE_S = 120  # seconds until a compiler is given up
_KINDS = {"operand": 0, "result": 1, "i64": 2, "i32": 3}  # as in launcher.c; no address is the value 0
_NOTHING = 4


class Launcher:
    """The library, loaded.

    Attributes:
      path: the file.
    """

    def __init__(self, path: Path):
        self.path = path
        self._library = lib = ctypes.CDLL(str(path))
        pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        signatures = {
            "fl_driver": ([pointer] * 3, None),
            "fl_cublaslt": ([pointer] * 2, None),
            "fl_python": ([pointer] * 2, None),
            "fl_program": ([ctypes.c_char_p, size, integer, integer], pointer),
            "fl_kernel": ([*[pointer] * 3, *[integer] * 3, *[pointer] * 4, ctypes.c_int64], integer),
            "fl_matmul": ([pointer, pointer, size, pointer, integer, integer], None),
            "fl_publish": ([pointer], None),
            "fl_known": ([ctypes.c_char_p, size, integer], integer),
            "fl_counters": ([pointer], None),
            "fl_recording_target": ([ctypes.c_char_p], None),
            "fl_can_record": ([], integer),
            "fl_records": ([], integer),
        }
        for name, (arguments, result) in signatures.items():
            function = getattr(lib, name)
            function.argtypes, function.restype = arguments, result
        self._lock = threading.Lock()
        self._kept: list[object] = []  # what published programs point into
        # Not even at the interpreter's end is it freed: XLA's threads may still launch, without Python.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._kept))
        self._has_driver = self._has_cublaslt = False

    @property
    def can_record(self) -> bool:
        """Whether it is built to be asked for the nodes of a CUDA graph (jaxlib 0.11 and later)."""
        return bool(self._library.fl_can_record())

    @property
    def records(self) -> bool:
        """Whether XLA does ask: the second target is registered, once JAX's CUDA plugin is loaded."""
        return bool(self._library.fl_records())

    def handler(self, on_cuda: bool) -> int:
        """The address of the C function that executes."""
        return _address(self._library.fl_execute_cuda if on_cuda else self._library.fl_execute_host)

    def record_as(self, target: str) -> None:
        """Names the second target, on CUDA, whose calls XLA asks for nodes; before the first is registered."""
        name = target.encode()
        self._kept.append(name)
        self._library.fl_recording_target(name)

    def fall_back_on(self, host: int, cuda: int) -> None:
        """The addresses of the Python handlers, which take what is not published here."""
        self._library.fl_python(host, cuda)

    def publish(self, name: bytes, device: int, prepared: Prepared) -> bool:
        """From now on calls that name this plan on this device launch its steps, which it has; False where that cannot be (a kernel of too
        many parameters, a cuBLASLt that cannot be identified)."""
        lib, steps = self._library, prepared.steps or ()
        with self._lock:
            if lib.fl_known(name, len(name), device):
                return True
            self._find_driver()
            versions = [step.library for step in steps if isinstance(step, MatmulStep)]
            if not all(self._find_cublaslt(version) for version in versions):
                return False
            program = lib.fl_program(name, len(name), device, len(steps))
            if not all(self._add(program, step) for step in steps):
                return False
            self._kept.append(prepared)
            lib.fl_publish(program)
            return True

    def _add(self, program: int, step: KernelStep | MatmulStep) -> bool:
        if isinstance(step, KernelStep):
            return self._add_kernel(program, step)
        pointers = (ctypes.c_void_p * len(step.pointers))(*step.pointers)
        places = [number for place in step.places for number in _place(place)]
        numbers = (ctypes.c_int * len(places))(*places)
        self._library.fl_matmul(program, pointers, step.workspace, numbers, *step.attributes)
        return True

    def _add_kernel(self, program: int, step: KernelStep) -> bool:
        count = len(step.params)
        geometry = (ctypes.c_uint * 7)(*step.grid, *step.block, step.shared)
        kinds = (ctypes.c_ubyte * count)(*[_KINDS.get(kind, _KINDS["i64"]) for kind, _ in step.params])
        values = (ctypes.c_uint64 * count)(*[value & 0xFFFF_FFFF_FFFF_FFFF for _, value in step.params])
        entry = ctypes.create_string_buffer(step.entry.encode())
        image = ctypes.create_string_buffer(step.image, len(step.image))
        self._kept += [entry, image]
        held = (ctypes.addressof(array) for array in (geometry, kinds, values, entry, image))
        at, kinds_at, values_at, entry_at, image_at = held
        early, cooperative, size = int(step.early), int(step.cooperative), len(step.image)
        return bool(
            self._library.fl_kernel(
                program, step.function, at, early, cooperative, count, kinds_at, values_at, entry_at, image_at, size
            )
        )

    def _find_driver(self) -> None:
        """The driver's functions, once; only a plan for a GPU has steps, so the driver is there."""
        if not self._has_driver:
            driver = ctypes.CDLL("libcuda.so.1")
            names = ("cuCtxGetDevice", "cuLaunchKernelEx", "cuGetErrorString")
            self.use_driver(*[_address(getattr(driver, name)) for name in names])

    def use_driver(self, device: int, launch: int, text: int) -> None:
        """The addresses of cuCtxGetDevice, cuLaunchKernelEx and cuGetErrorString."""
        self._library.fl_driver(device, launch, text)
        self._has_driver = True

    def _find_cublaslt(self, version: int) -> bool:
        """The functions of the library that made the handles, once: the one loaded under cuBLASLt's name, if it is of that version."""
        library = None if self._has_cublaslt else _loaded_cublaslt()
        if library is not None and library.cublasLtGetVersion() == version:
            self.use_cublaslt(_address(library.cublasLtMatmul), _address(library.cublasLtMatmulDescSetAttribute))
        return self._has_cublaslt

    def use_cublaslt(self, matmul: int, set_attribute: int) -> None:
        """The addresses of cublasLtMatmul and cublasLtMatmulDescSetAttribute."""
        self._library.fl_cublaslt(matmul, set_attribute)
        self._has_cublaslt = True

    def counters(self) -> dict[str, int]:
        """How often plans were `launched` outside of CUDA graphs or while one was captured, were `recorded` into one, and were handed over
        to Python."""
        found = (ctypes.c_longlong * 3)()
        self._library.fl_counters(found)
        return dict(zip(("launched", "recorded", "handed_over"), found, strict=True))


def _place(place: Param) -> tuple[int, int]:
    kind, number = place
    return (_NOTHING, 0) if kind == "null" else (_KINDS[kind], number)


def _address(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # pyright: ignore[reportArgumentType]


def _loaded_cublaslt() -> ctypes.CDLL | None:
    for major in (13, 12):
        try:
            library = ctypes.CDLL(f"libcublasLt.so.{major}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            continue
        library.cublasLtGetVersion.restype = ctypes.c_size_t
        return library
    return None


def load() -> Launcher | None:
    """The launcher this process uses: built now if it was not yet, None where Python launches.

    Raises:
      ArgumentError: `$FUSIONLAB_LAUNCHER` is neither "native" nor "python".
      CompileError, MissingDependencyError: it asks for "native", which cannot be built.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "native", "python"):
        raise ArgumentError(f"{VARIABLE}: got {asked!r}, needed 'native' or 'python', or the variable unset")
    if asked == "python" or (not asked and why_not() is not None):
        return None
    try:
        return Launcher(build())
    except (CompileError, OSError):
        if asked:
            raise
        return None  # a compiler without a C library, or a folder that nothing may be loaded from: `fl.doctor` says which launches


def why_not() -> str | None:
    """Why Python launches here unless asked otherwise; None where the compiled launcher does."""
    if sys.platform != "linux":
        return f"the compiled launcher is for Linux, this is {sys.platform}"
    if not any(importlib.util.find_spec(f"jax_cuda{major}_plugin") for major in (13, 12)):
        return "JAX has no CUDA plugin here"
    if compiler() is None:
        return "no C compiler: install gcc or clang (Debian: apt-get install gcc)"
    return None


def compiler() -> list[str] | None:
    """The command of the C compiler: `$CC`, else cc, gcc or clang from PATH; None without one."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        words = shlex.split(name) if name else []
        if words and shutil.which(words[0]):
            return words
    return None


def build(folder: Path | None = None) -> Path:
    """The library for this machine's jaxlib, built if it is not in the folder.

    Args:
      folder: None takes that of the kernels (`$FUSIONLAB_CACHE_DIR`), or one of this process alone where that cannot be written to.

    Raises:
      CompileError: the compiler fails, or takes more than `COMPILE_S`; holds its output.
      MissingDependencyError: there is no compiler.
    """
    command = compiler()
    if command is None:
        raise MissingDependencyError(
            "the compiled launcher needs a C compiler ($CC, cc, gcc or clang): Debian's is apt-get install gcc"
        )
    folder = cache_folder() if folder is None else folder
    include = Path(jax.ffi.include_dir())
    key = _key(command, include)
    for found in folder.glob(f"launcher-{key}-*.so"):
        if _can_be_trusted(found):
            return found
    try:
        make_private(folder)
        if why := why_not_trusted(folder):
            raise PermissionError(errno.EPERM, why)
        scratch = tempfile.mkdtemp(prefix=".launcher-", dir=folder)
    except OSError as error:
        why = error.strerror or error
        warn_once(folder, f"keeps no compiled launcher ({why}): each process compiles it; set FUSIONLAB_CACHE_DIR")
        folder = Path(tempfile.mkdtemp(prefix="fusionlab-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        scratch = tempfile.mkdtemp(dir=folder)
    try:
        return _compile(command, include, Path(scratch), folder / f"launcher-{key}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _compile(command: Sequence[str], include: Path, scratch: Path, stem: Path) -> Path:
    library = scratch / "launcher.so"
    whole = [*command, *FLAGS, f"-I{include}", str(SOURCE), "-o", str(library)]
    try:
        # What a compiler says may be in any encoding.
        done = subprocess.run(whole, capture_output=True, text=True, errors="replace", timeout=COMPILE_S, check=False)
    except subprocess.TimeoutExpired as e:
        raise CompileError(f"{shlex.join(whole)} had not ended after {COMPILE_S} s; set CC to another compiler") from e
    if done.returncode:
        raise CompileError(f"{shlex.join(whole)} failed with status {done.returncode}:\n{done.stderr.strip()}")
    library.chmod(0o700)
    place = stem.with_name(f"{stem.name}-{_digest(library.read_bytes())}.so")
    os.replace(library, place)  # whole, or not there
    return place


def _can_be_trusted(path: Path) -> bool:
    """Whether a file of the cache is whole and no other user's making, nor theirs to change: its code would run in this process."""
    try:
        whole = _digest(path.read_bytes()) == path.stem.rpartition("-")[2]
        why = "" if whole else "it is damaged"
        why = why or why_not_trusted(path)
    except OSError as error:
        why = error.strerror or str(error)
    if why:
        warn_once(path, f"is not loaded: {why}; the launcher is compiled again")
    return not why


def _key(command: Sequence[str], include: Path) -> str:
    """Of all that the library depends on."""
    headers = sorted((include / "xla" / "ffi" / "api").glob("*c_api.h"))
    parts = [shlex.join(command).encode(), " ".join(FLAGS).encode(), platform.machine().encode(), SOURCE.read_bytes()]
    return _digest(b"\0".join([*parts, *(h.read_bytes() for h in headers)]))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
