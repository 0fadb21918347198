"""Runs the launches of a `KernelPlan` on the CPU: the same source, compiled as C++ (`cuda_shim/`), the same geometry."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fusionlab.kernels import launch
from fusionlab.kernels.compile import KERNELS
from fusionlab.kernels.dot_product_attention import cuda
from fusionlab.kernels.kernel_plan import KernelPlan
from fusionlab.kernels.plans import PlanBook, Prepared

SHIM = Path(__file__).parent / "cuda_shim"
# -fsanitize=alignment: what a GPU cannot read at an odd address ends the process here too.
FLAGS = (
    *("-std=c++20", "-O1", "-fPIC", "-fno-strict-aliasing", "-fsanitize=alignment", "-fno-sanitize-recover"),
    *("-Wno-unknown-pragmas", f"-I{SHIM}"),
)


@functools.cache
def precompiled(compiler: str) -> tuple[tempfile.TemporaryDirectory, Path]:
    """The headers of C++, compiled once for all variants (a third of the time of each), in a folder that is held."""
    folder = tempfile.TemporaryDirectory()
    header = Path(folder.name) / "shim.h"
    header.write_text('#include "standard.h"\n', encoding="utf-8")
    _compiled([compiler, *FLAGS, "-x", "c++-header", str(header), "-o", f"{header}.gch"])
    return folder, header


def _compiled(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Emulator:
    """Compiles a variant once, into `folder`, and runs launches.

    Attributes:
      last_thread_first: the order in which the threads of a block take turns.
    """

    def __init__(self, compiler: str, folder: Path):
        self._compiler, self._folder = compiler, folder
        self._libraries: dict[tuple[str, ...], ctypes.CDLL] = {}
        self.last_thread_first = False

    def _library(self, spec: KernelPlan) -> ctypes.CDLL:
        key = (spec.source, spec.text, *spec.options)
        if key not in self._libraries:
            source, unit = (KERNELS / spec.source).parent, SHIM / f"{Path(spec.source).stem}.cpp"
            if spec.text:  # a user's own, with its entries as the launches name them
                entries = "".join(f"FL_RUN({name})\n" for name in {one.entry for one in spec.launches})
                unit = self._folder / f"unit{len(self._libraries)}.cpp"
                unit.write_text(f'{spec.text}\n#include "runner.h"\n{entries}', encoding="utf-8")
            built = self._folder / f"variant{len(self._libraries)}.so"
            _, header = precompiled(self._compiler)
            before = ("-shared", "-include", str(header), "-Winvalid-pch", "-Werror=invalid-pch", f"-I{source}")
            _compiled([self._compiler, *FLAGS, *before, *spec.options, str(unit), "-o", str(built)])
            self._libraries[key] = ctypes.CDLL(str(built))
        return self._libraries[key]

    def run(self, spec: KernelPlan, operands: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
        """Launches in order, into `results`."""
        self.run_at(spec, *([a.ctypes.data for a in side] for side in (operands, results)))

    def run_at(self, spec: KernelPlan, operands: Sequence[int], results: Sequence[int]) -> None:
        """The same, on addresses."""
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
            getattr(library, f"run_{one.entry}")(*sizes, pointers)


def emulator_in(folder: Path) -> Emulator:
    """An emulator that builds in `folder`; skips the test where there is no compiler."""
    compiler = shutil.which("g++")
    if not compiler:
        pytest.skip("needs g++")
    return Emulator(compiler, folder)


@contextmanager
def attention_on_the_cpu(emulator: Emulator) -> Iterator[PlanBook]:
    """attention.cu itself, as C++, launched by XLA's CPU backend: `implementation="cuda"` runs here. Gives the book of plans."""
    with kernels_on_the_cpu(emulator, cuda) as book:
        yield book


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
        for module in modules:
            patch.setattr(module, "refuses_device", lambda device: None)
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
