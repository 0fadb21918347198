"""Measured peak rates of a device: bytes per second of a large copy, operations per second of a large product."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fusionlab.device import Device
from fusionlab.errors import ArgumentError
from fusionlab.progress import Progress, Reporter, Stages, watched

from .program import compile_program
from .timing import runs_of

SAMPLES = 10
# Far beyond the caches, and within a 32nd of the memory: what is copied, its copies queued and the random bits' making take several of it.
COPY_BYTES = {"cuda": 1 << 30, "cpu": 256 << 20}
SIDE = {"cuda": 8192, "cpu": 2048}  # of the square matrices; a multiple of every tile


def measure_peaks(device: Device | None = None, progress: Progress = False) -> Device:
    """This process's device with `copy_bytes_per_s` and `gemm_flop_per_s` measured, each the best of some samples; takes a few
    seconds.

    The copy counts bytes read and written. The product is bfloat16 on CUDA, with sums in float32, and float32 elsewhere. Data are random:
    a GPU lowers its clocks to keep within its power limit, and zeros draw less power. Device time on CUDA, wall time elsewhere (timing.py).

    `progress`: False, True (a line) or a function of (task, done, total).

    Raises:
      ArgumentError: a device that is simulated or not this process's own.
    """
    here = Device.current()
    if device is not None and device != here:
        raise ArgumentError(
            f"device: got {device}, needed None or this process's own, {here}: only this process's device can be measured"
        )
    kind = "cuda" if here.platform == "cuda" else "cpu"
    with watched(progress) as told:
        return _measured(here, kind, Stages(told))


def _measured(here: Device, kind: str, stages: Stages) -> Device:
    words = min(COPY_BYTES[kind], (here.memory or COPY_BYTES[kind] * 32) // 32) // 4
    source = jax.random.bits(jax.random.key(0), (words,), "uint32")
    copy_s = _best_s(stages("rates of this device: copying", SAMPLES), jnp.copy, source)
    del source
    side, dtype = SIDE[kind], jnp.bfloat16 if kind == "cuda" else jnp.float32
    a, b = (jax.random.normal(jax.random.key(i), (side, side), dtype) for i in range(2))
    product_s = _best_s(stages("rates of this device: products", SAMPLES), jnp.matmul, a, b)
    return dataclasses.replace(here, copy_bytes_per_s=8 * words / copy_s, gemm_flop_per_s=2 * side**3 / product_s)


def _best_s(stage: Reporter, fn: Callable, *args: Any) -> float:
    """Seconds of the quickest sample."""
    return runs_of([compile_program(fn, args, {})], SAMPLES, step=stage.step)[0][0].min_s
