"""Runs the launches of a `KernelPlan` on the CPU: the same source, compiled as C++ (`cuda_shim/`), the same geometry."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab.kernels.launch import ffi_call as launch
from fusionlab.kernels.launch.architectures import ARCHS
from fusionlab.kernels.launch.compile import KERNELS
from fusionlab.kernels.launch.kernel_plan import KernelPlan
from fusionlab.kernels.launch.plans import PlanBook, Prepared
from fusionlab.kernels.op.implementation import Implementation
from fusionlab.kernels.ops.dot_product_attention.own import backend as cuda
from fusionlab.kernels.sources import sources
from tests.caches import cached_file

SHIM = Path(__file__).parent / "cuda_shim"
# -fsanitize=alignment: what a GPU cannot read at an odd address ends the process here too. -fno-gnu-unique: or all libraries of a process
# would have the `__shared__` arrays of inline functions in common, in the size that the first of them has.
FLAGS = (
    *("-std=c++20", "-Og", "-fPIC", "-fno-strict-aliasing", "-fsanitize=alignment", "-fno-sanitize-recover"),
    *("-fno-gnu-unique", "-Wno-unknown-pragmas", f"-I{SHIM}"),
)


def _compiled(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@functools.cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


@functools.cache
def _headers() -> bytes:
    """The texts that any kernel may include: the project's own and those that stand for CUDA's."""
    kinds = {".cu", ".cuh", ".h", ".cpp"}
    files = sorted(p for folder in (SHIM, KERNELS) for p in folder.rglob("*") if p.suffix in kinds)
    return b"".join(p.name.encode() + p.read_bytes() for p in files)


class Emulator:
    """Compiles a variant once and runs launches.

    What is compiled lies in the tests' cache folder, under a hash of all that it is made from: source text and headers, options and
    compiler. Tests, workers of pytest and runs share it.

    Attributes:
      last_thread_first: the order in which the threads of a block take turns.
      card: the architecture whose limits hold ("sm_89"); None for those of every architecture that a source is compiled for.
    """

    def __init__(self, compiler: str):
        self._compiler = compiler
        self._libraries: dict[tuple[str, ...], ctypes.CDLL] = {}
        self.last_thread_first = False
        self.card: str | None = None

    def _library(self, spec: KernelPlan) -> ctypes.CDLL:
        key = (spec.source, spec.text, *spec.options)
        if key not in self._libraries:
            self._libraries[key] = ctypes.CDLL(str(self._built(spec)))
        return self._libraries[key]

    def _built(self, spec: KernelPlan) -> Path:
        entries = sorted({one.entry for one in spec.launches}) if spec.text else []
        made_from = repr((_version(self._compiler), FLAGS, spec.source, spec.text, entries, spec.options))
        name = hashlib.sha256(made_from.encode() + _headers()).hexdigest()[:32]

        def build(path: Path) -> None:
            folder, unit = (KERNELS / spec.source).parent, SHIM / f"{Path(spec.source).stem}.cpp"
            if spec.text:  # a user's own, with its entries as the launches name them
                runs = "".join(f"FL_RUN({entry})\n" for entry in entries)
                unit = path.with_suffix(".cpp")
                unit.write_text(f'{spec.text}\n#include "runner.h"\n{runs}', encoding="utf-8")
            before = (
                "-shared",
                "-include",
                str(self._precompiled()),
                "-Winvalid-pch",
                "-Werror=invalid-pch",
                f"-I{folder}",
            )
            _compiled([self._compiler, *FLAGS, *before, *spec.options, str(unit), "-o", str(path)])

        return cached_file(f"emulated/{name}.so", build)

    def _precompiled(self) -> Path:
        """The headers of C++, compiled once for all variants (a third of the time of each)."""
        made_from = repr((_version(self._compiler), FLAGS)).encode() + _headers()
        name = f"emulated/{hashlib.sha256(made_from).hexdigest()[:32]}.h"

        def build(path: Path) -> None:
            path.write_text('#include "standard.h"\n', encoding="utf-8")

        header = cached_file(name, build)
        cached_file(
            f"{name}.gch",
            lambda path: _compiled([self._compiler, *FLAGS, "-x", "c++-header", str(header), "-o", str(path)]),
        )
        return header

    def run(self, spec: KernelPlan, operands: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
        """Launches in order, into `results`."""
        self.run_at(spec, *([a.ctypes.data for a in side] for side in (operands, results)))

    def run_at(self, spec: KernelPlan, operands: Sequence[int], results: Sequence[int]) -> None:
        """The same, on addresses."""
        for arch in (self.card,) if self.card else sources()[spec.source].archs if spec.source in sources() else ARCHS:
            unable = spec.refuses(arch)
            assert unable is None, f"{spec.source}: {unable}"
        addresses = {"operand": operands, "result": results}
        for one in spec.launches:
            scalars = {"i64": ctypes.c_int64, "i32": ctypes.c_int32}
            values = [
                scalars[kind](value)
                if kind in scalars
                else ctypes.c_void_p(None if kind == "null" else addresses[kind][value])
                for kind, value in one.params
            ]
            held = (ctypes.c_uint64 * len(values))()  # one behind another, as a structure would have them
            for i, value in enumerate(values):
                ctypes.memmove(ctypes.addressof(held) + 8 * i, ctypes.addressof(value), ctypes.sizeof(value))
            pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(held) + 8 * i for i in range(len(values))))
            sizes = [(ctypes.c_uint * 3)(*size) for size in (one.grid, one.block)]
            library = self._library(spec)
            ctypes.c_int.in_dll(library, "last_thread_first").value = self.last_thread_first
            ctypes.c_uint.in_dll(library, "shared_bytes").value = one.shared
            getattr(library, f"run_{one.entry}")(*sizes, pointers)


@contextmanager
def attention_on_the_cpu(emulator: Emulator) -> Iterator[PlanBook]:
    """attention.cu itself, as C++, launched by XLA's CPU backend: `implementation="cuda"` runs here. Gives the book of plans."""
    with kernels_on_the_cpu(emulator, cuda) as book:
        yield book


def run_here(patch: pytest.MonkeyPatch, modules: Sequence[Any]) -> None:
    """The implementations of the ops of these modules take any device."""
    for module in modules:
        patch.setattr(module, "refuses_device", lambda *_: None, raising=False)
    packages, refuses = {module.__name__.rpartition(".")[0] for module in modules}, Implementation.refuses

    def anywhere(self: Implementation, *call: Any, **attrs: Any) -> str | None:
        ours = self.forward.__module__.rpartition(".")[0] in packages
        return refuses(replace(self, unable_on=lambda _: None) if ours else self, *call, **attrs)

    patch.setattr(Implementation, "refuses", anywhere)


@contextmanager
def kernels_on_the_cpu(emulator: Emulator, *modules: Any) -> Iterator[PlanBook]:
    """Kernel plans run by the emulator, launched by XLA's CPU backend, which the `refuses_device` of each module then takes."""
    one_at_a_time = threading.Lock()

    def prepare(plan: KernelPlan, device: int) -> Prepared:
        def run(stream: int, operands: Sequence[int], results: Sequence[int]) -> None:
            with one_at_a_time:
                emulator.run_at(plan, operands, results)

        return Prepared(run)

    with pytest.MonkeyPatch.context() as patch:
        book = PlanBook()
        patch.setattr(KernelPlan, "prepare", prepare)
        patch.setattr(launch, "BOOK", book)
        run_here(patch, modules)
        yield book
        jax.block_until_ready(jax.live_arrays())  # a CPU computes while Python goes on
        jax.clear_caches()


def poisoned(real: Any) -> Any:
    """`launch` whose results are NaN (or of all bits) until a kernel writes them: each takes the memory of an operand that is."""

    @functools.wraps(real)
    def launch(plan: Any, operands: Sequence[Any], results: Sequence[Any], aliases: Any = None) -> list[Any]:
        assert not aliases
        poison = [_poison(r) for r in results]
        return real(plan, [*operands, *poison], results, {len(operands) + i: i for i in range(len(results))})

    return launch


def _poison(result: Any) -> Any:
    is_float = jnp.issubdtype(result.dtype, jnp.floating)
    return jnp.full(result.shape, jnp.nan if is_float else np.iinfo(result.dtype).max, result.dtype)
