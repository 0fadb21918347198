"""Train steps of a small Llama-like model whose parameters and optimizer are sharded over two devices, fused and not. Trials for
test_fsdp.py, whose cases have their names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import numpy as np

import fusionlab as fl
from benchmarks.devices.fsdp import Layout, arguments, layouts, steps, with_layout
from benchmarks.measuring import peak_bytes
from benchmarks.programs.language_rows import FUSED
from benchmarks.programs.language_steps import TINY
from fusionlab.graph.xla.collectives import traffic

CASE = TINY[0]
SITES = {"dot_product_attention": 1, "layer_norm": 3, "linear_cross_entropy": 1, "gemm_epilogue": 1}


def sites(fn: Callable, *args: jax.Array) -> dict[str, int]:
    counts = fl.find(fn, *args, passes=tuple(SITES)).counts()
    return {name: counts[name] for name in SITES}


def trial(name: str) -> None:
    """The same sites as on one device, forward and differentiated; the original's collectives, its results, and no more memory."""
    layout: Layout = dict(layouts(2))[name]
    loss, args = CASE.loss(layout.written), arguments(CASE, layout)
    with jax.set_mesh(layout.mesh):
        assert sites(loss, args[0], args[2]) == SITES
        assert sites(jax.value_and_grad(loss), args[0], args[2]) == SITES
        made = steps(CASE, layout)
        compiled = {n: with_layout(made[n], args).lower(*args).compile() for n in ("jax.jit", *FUSED)}
        found = {n: program(*args) for n, program in compiled.items()}
    moved = {n: traffic(program.as_text()) for n, program in compiled.items()}
    peaks = {n: peak_bytes(program) for n, program in compiled.items()}
    for fused in FUSED:
        assert moved[fused] == moved["jax.jit"], moved
        assert peaks[fused] <= peaks["jax.jit"], peaks
        for got, want in zip(jax.tree.leaves(found[fused]), jax.tree.leaves(found["jax.jit"]), strict=True):
            assert got.sharding == want.sharding
            got, want = (np.asarray(a, "float32") for a in (got, want))
            assert np.linalg.norm(got - want) <= 0.03 * np.linalg.norm(want)  # rounding of bfloat16


TRIALS: dict[str, Callable[[], None]] = {name: partial(trial, name) for name in ("explicit", "auto, constrained")}
