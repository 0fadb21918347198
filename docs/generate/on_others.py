"""The tables of measurements on an H100 and on CPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .tables import Column, Measured, Row

GROUP_NORMS = Measured(
    "GroupNorm",
    "h100",
    "group_norms",
    "Batch x height x width x channels. The second column computes E[x^2] - E[x]^2, as flax does. The floor is the time to move the bytes.",
    (
        Column("jax.jit", ("jax.jit",)),
        Column("by E[x^2] - E[x]^2", ("fast variance",)),
        Column("FusionLab", ("fusionlab",)),
        Column("ratio", ("fusionlab",), before=("jax.jit",)),
        Column("floor", ("floor",)),
    ),
    lambda data: [
        Row(f"{case}, {work}", ("cases", case, work))
        for case in data["cases"]
        for work in ("forward", "forward and backward")
    ],
    ("layer_norm",),
)

TENSOR_PARALLEL = Measured(
    "An encoder layer on one GPU and on two",
    "h100",
    "tensor_parallel",
    "Width 4096, 2,048 positions, batch 8, bfloat16, forward, over NCCL; wall time of a call. FusionLab is the layer passes; the last "
    "column is the default passes.",
    (
        Column("jax.jit", ("times", "jax.jit")),
        Column("FusionLab", ("times", "layers")),
        Column("ratio", ("times", "layers"), before=("times", "jax.jit")),
        Column("default passes", ("times", "pieces")),
    ),
    [Row("one GPU", ("cases", "1")), Row("two GPUs", ("cases", "2"))],
    ("multi_devices_multi_transformer_encoder",),
)

DEMO = Measured(
    "The demo's transformer block",
    "cpu",
    "demo",
    "One sequence of 2,048 positions, 2 heads of 64 features, float32. `before` is `jax.jit` of the block. Memory is that of the compiled "
    "program's temporaries.",
    (
        Column("before", ("before",)),
        Column("after", ("after",)),
        Column("before/after", ("after",), before=("before",)),
    ),
    [
        Row("time, call", ("timing",)),
        Row("time, gradient of the call", ("timing_grad",)),
        Row("compiled temporaries, call", ("memory",)),
        Row("compiled temporaries, gradient of the call", ("memory_grad",)),
    ],
    ("dot_product_attention", "gemm_epilogue", "layer_norm"),
    "Most of the gain is attention's: `xla_blockwise` never stores the matrix of scores. Linear layers gain nothing on a CPU: the product "
    "takes most of the time, and XLA fuses bias and activation by itself.",
)

_LAYOUTS = {"bthd_einsum": "positions before heads", "bhtd_matmul": "heads before positions"}


def _attention_rows(part: str) -> Any:
    def rows(data: Mapping[str, Any]) -> Sequence[Row]:
        return [Row(_label(case), ("cases", i, part)) for i, case in enumerate(data["cases"])]

    return rows


def _label(case: Mapping[str, Any]) -> str:
    mask = f", mask: {case['mask']}" if "mask" in case else ""
    return f"{_LAYOUTS[case['layout']]}{mask}, {case['work'].replace('_', ' and ')}"


_SIZES = "One sequence of 4,096 positions, 4 heads of 64 features, float32."
ATTENTION = Measured(
    "Attention: time",
    "cpu",
    "attention_cpu",
    _SIZES,
    (
        Column("jax.jit", ("original_s",)),
        Column("xla_blockwise", ("xla_blockwise_s",)),
        Column("ratio", ("xla_blockwise_s",), before=("original_s",)),
    ),
    _attention_rows("time"),
    ("dot_product_attention",),
)
ATTENTION_MEMORY = Measured(
    "Attention: memory",
    "cpu",
    "attention_cpu",
    f"{_SIZES} By how much the resident memory of a fresh process grows in one call.",
    (
        Column("jax.jit", ("original",)),
        Column("xla_blockwise", ("xla_blockwise",)),
        Column("ratio", ("xla_blockwise",), before=("original",)),
    ),
    _attention_rows("memory"),
    ("dot_product_attention",),
)

_KINDS = {"layer": "LayerNorm", "rms": "RMSNorm"}


def _norm_label(case: str) -> str:
    """ "layer before forward 32x32" in words."""
    words = case.split()
    if len(words) != 4:
        return case.replace("distilbert", "DistilBERT, small,")
    kind, place, work, size = words
    return f"{_KINDS[kind]} {place} the branch, {work.replace('step', 'train step')}, {size.replace('x', ' x ')}"


NORMS = Measured(
    "Norms",
    "cpu",
    "norms_cpu",
    "Two residual blocks in float32, rows x features, with their norms fused because the pass is named. XLA's own code is as fast, so a "
    "norm keeps it on a CPU unless the pass is named.",
    (
        Column("jax.jit", ("jax_jit_s",)),
        Column("fused", ("fused_s",)),
        Column("ratio", ("fused_s",), before=("jax_jit_s",)),
    ),
    lambda data: [Row(_norm_label(case), ("cases", case)) for case in data["cases"]],
    ("layer_norm",),
)

TABLES = (GROUP_NORMS, TENSOR_PARALLEL, DEMO, ATTENTION, ATTENTION_MEMORY, NORMS)
