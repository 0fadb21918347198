"""The entry of `linear_cross_entropy` in the lists of all ops."""

from __future__ import annotations

from dataclasses import replace

from ....device import Device
from ...op.card import CUDA, XLA, Card, Requirement, Variants
from .op import LINEAR_CROSS_ENTROPY
from .own.part_plan import DTYPES, SOURCE, part_plan
from .settings import Settings


def variants(arch: str) -> Variants:
    """Of the softmax: rows that are kept, rows of which a part is read again, rows that start anywhere; all there is to compute; and rows
    with entries beyond the vocabulary and beyond the classes.
    """
    if arch not in SOURCE.archs:
        return
    device = Device.of(arch)
    further = {"softcap": 30.0, "also": ("argmax",), "out_of_range": "drop"}
    everything = Settings(label_smoothing=0.1, z_loss=1e-4, scale=0.5, **further, device=device)
    for dtype in DTYPES if arch == "sm_90" else DTYPES[:2]:
        narrow = ("bfloat16", "float16") if dtype == "float32" else (dtype,)
        for columns in (100, 32768, 50257, 128256) if arch == "sm_90" else (32768, 50257):
            for out in (*narrow, None):
                plan = part_plan(4096, columns, dtype, out, Settings(device=device))
                yield f"softmax {dtype} {columns}: {out or 'no cotangent'}", plan
        bias = "bfloat16" if dtype == "float32" else dtype
        for columns, out in ((4099, "float32"), (32768, narrow[0]), (50257, narrow[0])):
            plan = part_plan(4096, columns, dtype, out, everything, bias=bias)
            yield f"softmax {dtype} {columns}: {out} and everything", plan
        for name, form in (("", Settings(device=device)), (" and everything", replace(everything, classes=50000))):
            plan = part_plan(4096, 50304, dtype, narrow[0], form, size=50257)
            yield f"softmax {dtype} 50257 of 50304: {narrow[0]}{name}", plan


CARD = Card(
    100,
    LINEAR_CROSS_ENTROPY,
    hue="indigo",
    concepts=("linear_cross_entropy",),
    requirements=(
        XLA,
        CUDA,
        Requirement(90, "xla_chunked", "plain jax.numpy in a loop over chunks of rows; runs wherever JAX runs"),
    ),
    sources=(SOURCE,),
    variant="softmax {dtype}",
    variants=variants,
)
