"""The entry of `layer_norm` in the lists of all ops."""

from __future__ import annotations

from ...op.card import CUDA, XLA, Card, Requirement, Variants
from .op import LAYER_NORM
from .pallas import missing
from .plan import MOST_ADDENDS, SOURCE, NormLaunch, adds_up, backward_passes, forward_plan
from .tiling import DTYPES


def variants(arch: str) -> Variants:
    """With everything there can be: rows of part of a warp, of a block, of two passes backward, of more than is held."""
    some = (1023, 1024, 16384)
    for dtype in DTYPES if arch == "sm_90" else DTYPES[:2]:
        for columns in (96, 768, 4096, 8192, 65536, *some) if arch == "sm_90" and dtype != "float16" else some:
            for kind in ("layer", "rms") if columns == 4096 else ("layer",):
                given = NormLaunch(kind, 4096, columns, dtype, tuple((s, dtype) for s in ("bias", "scale", "shift")))
                yield from _of(given, f"norm {dtype} {kind} {columns}")


def _of(given: NormLaunch, name: str) -> Variants:
    yield f"{name}: forward", forward_plan(given, 1e-5, residual=True, gives_sum=False, saves=False)
    yield f"{name}: forward, saves", forward_plan(given, 1e-5, residual=True, gives_sum=True, saves=True)
    wanted = ("x", "scale", "bias", "shift")
    for ct_sum in (False, True):
        for i, one in enumerate(backward_passes(given, wanted, ct_sum, shifted=False)):
            yield f"{name}: backward{' of both' if ct_sum else ''}, pass {i + 1}", one.plan
    for addends in (2, MOST_ADDENDS):
        if adds_up(given, wanted, False, addends):
            (one,) = backward_passes(given, wanted, False, shifted=False, addends=addends)
            yield f"{name}: backward of a sum of {addends}", one.plan


CARD = Card(
    30,
    LAYER_NORM,
    hue="vermilion",
    concepts=("layer_norm", "rms_norm"),
    requirements=(
        XLA,
        CUDA,
        Requirement(70, "pallas", "Pallas kernels, by the Mosaic GPU in JAX; Hopper GPUs", (missing,)),
    ),
    sources=(SOURCE,),
    variant="norm {dtype}",
    variants=variants,
)
