"""Runs the launches of a `KernelPlan` on the CPU: the same source, compiled as C++ (`cuda_shim/`), the same geometry."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fusionlab.kernels.compile import KERNELS
from fusionlab.kernels.kernel_plan import KernelPlan

SHIM = Path(__file__).parent / "cuda_shim"


class Emulator:
    """Compiles a variant once, into `folder`, and runs launches."""

    def __init__(self, compiler: str, folder: Path):
        self._compiler, self._folder = compiler, folder
        self._libraries: dict[tuple[str, ...], ctypes.CDLL] = {}

    def _library(self, spec: KernelPlan) -> ctypes.CDLL:
        key = (spec.source, *spec.options)
        if key not in self._libraries:
            source = (KERNELS / spec.source).parent
            built = self._folder / f"variant{len(self._libraries)}.so"
            command = [
                self._compiler,
                "-std=c++20",
                "-O1",
                "-shared",
                "-fPIC",
                "-fno-strict-aliasing",
                "-Wno-unknown-pragmas",
            ]
            command += [
                f"-I{SHIM}",
                f"-I{source}",
                *spec.options,
                str(SHIM / f"{Path(spec.source).stem}.cpp"),
                "-o",
                str(built),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            self._libraries[key] = ctypes.CDLL(str(built))
        return self._libraries[key]

    def run(self, spec: KernelPlan, operands: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
        """Launches in order, into `results`."""
        self.run_at(spec, *([a.ctypes.data for a in side] for side in (operands, results)))

    def run_at(self, spec: KernelPlan, operands: Sequence[int], results: Sequence[int]) -> None:
        """The same, on addresses."""
        addresses = {"operand": operands, "result": results}
        for launch in spec.launches:
            scalars = {"i64": ctypes.c_int64, "i32": ctypes.c_int32}
            values = [
                scalars[kind](value)
                if kind in scalars
                else ctypes.c_void_p(None if kind == "null" else addresses[kind][value])
                for kind, value in launch.params
            ]
            pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
            sizes = [(ctypes.c_uint * 3)(*size) for size in (launch.grid, launch.block)]
            getattr(self._library(spec), f"run_{launch.entry}")(*sizes, pointers)
