"""Runs the products of a `MatmulPlan` on the CPU, by numpy, from the same buffers, strides and epilogues."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from fusionlab.kernels.launch import ffi_call as launch
from fusionlab.kernels.launch.cublaslt import WITH_BIAS, WRITES_AUX, MatmulPlan
from fusionlab.kernels.launch.plans import PlanBook, Prepared
from tests.kernels.emulated import run_here

_DTYPES = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
FORWARD = {
    "DEFAULT",
    "BIAS",
    "RELU",
    "RELU_BIAS",
    "GELU",
    "GELU_BIAS",
    "RELU_AUX",
    "RELU_AUX_BIAS",
    "GELU_AUX",
    "GELU_AUX_BIAS",
}


def memory(address: int, dtype: Any, count: int) -> np.ndarray:
    dtype = np.dtype(dtype)
    held = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(held, dtype)


def matrix(address: int, dtype: Any, rows: int, columns: int, leading: int, offset: int) -> np.ndarray:
    """A column-major matrix in memory."""
    dtype = np.dtype(dtype)
    flat = memory(address + offset * dtype.itemsize, dtype, leading * (columns - 1) + rows)
    return np.lib.stride_tricks.as_strided(flat, (rows, columns), (dtype.itemsize, leading * dtype.itemsize))


def run(plan: MatmulPlan, operands: Sequence[int], results: Sequence[int]) -> None:
    """As cublasLtMatmul is documented; arithmetic is float64."""
    assert plan.epilogue in FORWARD, plan.epilogue
    assert plan.compute == ("f64" if plan.dtype == "float64" else plan.compute)
    given, made = _DTYPES[plan.dtype], _DTYPES[plan.result_dtype]
    more = list(operands[2:])
    c = more.pop(0) if plan.beta else None
    bias = memory(more.pop(0), made, plan.m).astype(np.float64) if plan.epilogue in WITH_BIAS else None
    assert not more
    for i in range(plan.batch):
        sides = []
        for which, (rows, columns) in enumerate(((plan.m, plan.k), (plan.k, plan.n))):
            shape = (columns, rows) if plan.transposed[which] else (rows, columns)
            at = matrix(operands[which], given, *shape, plan.leading[which] or shape[0], i * plan.strides[which])
            sides.append((at.T if plan.transposed[which] else at).astype(np.float64))
        h = plan.alpha * (sides[0] @ sides[1])
        if c is not None:
            h += plan.beta * matrix(c, made, plan.m, plan.n, plan.m, i * plan.m * plan.n).astype(np.float64)
        if bias is not None:
            h += bias[:, None]
        d = matrix(results[0], made, plan.m, plan.n, plan.m, i * plan.m * plan.n)
        if plan.epilogue in WRITES_AUX:
            assert plan.batch == 1
            keep(plan, h, results[1])
        d[...] = activated(plan.epilogue, h).astype(made)


def activated(epilogue: str, h: np.ndarray) -> np.ndarray:
    if epilogue.startswith("RELU"):
        return np.maximum(h, 0)
    if epilogue.startswith("GELU"):
        return 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    return h


def keep(plan: MatmulPlan, h: np.ndarray, address: int) -> None:
    if plan.epilogue.startswith("GELU"):
        matrix(address, _DTYPES[plan.result_dtype], plan.m, plan.n, plan.aux_pitch, 0)[...] = h
        return
    assert plan.aux_pitch % 128 == 0
    assert plan.aux_pitch >= plan.m
    bits = matrix(address, np.uint8, plan.aux_pitch // 8, plan.n, plan.aux_pitch // 8, 0)
    packed = np.packbits(h > 0, axis=0, bitorder="little")
    bits[...] = 0
    bits[: packed.shape[0]] = packed


@contextmanager
def products_on_the_cpu(*modules: Any) -> Iterator[list[MatmulPlan]]:
    """cuBLASLt's products by numpy, launched by XLA's CPU backend, which the `refuses_device` of each module then takes.

    Gives the plans prepared, in order.
    """
    prepared: list[MatmulPlan] = []

    def prepare(plan: MatmulPlan, device: int) -> Prepared:
        prepared.append(plan)
        return Prepared(lambda stream, operands, results: run(plan, operands, results))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MatmulPlan, "prepare", prepare)
        patch.setattr(launch, "BOOK", PlanBook())
        run_here(patch, modules)
        yield prepared
        jax.block_until_ready(jax.live_arrays())  # a CPU computes while Python goes on
        jax.clear_caches()
