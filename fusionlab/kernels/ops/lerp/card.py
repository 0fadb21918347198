"""The entry of `lerp` in the lists of all ops."""

from __future__ import annotations

from ...op.arrays import FLOATS
from ...op.card import Card, Variants
from .op import LERP
from .plan import SLOTS, SOURCE, backward_passes, forward_plan

_SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "alike": ((64, 1024, 1024), (64, 1024, 1024), (64, 1024, 1024)),
    "images": ((16, 1, 1, 1), (16, 3, 244, 244), (1, 3, 1, 244)),
    "sum over rows": ((512, 1, 1024), (512, 1024, 1024), (1, 1024, 1)),
    "two sums": ((1024, 1, 1024), (1, 1024, 1024), (1, 1, 1)),
    "rows and columns": ((8191, 1), (1, 8191), (1, 1)),
}


def variants(arch: str) -> Variants:
    """Element by element, and each kind of sum with what fits a vector and what does not."""
    some = _SHAPES if arch == "sm_90" else ("images", "two sums")
    for dtype in FLOATS if arch == "sm_90" else FLOATS[:2]:
        for kind in some:
            given = dict(zip(SLOTS, _SHAPES[kind], strict=True))
            name = f"lerp {dtype} {kind}"
            yield f"{name}: forward", forward_plan(given, dtype)
            for wanted in (("x", "y"), ("x", "y", "w")):
                for i, one in enumerate(backward_passes(given, wanted, dtype)):
                    yield f"{name}: {' and '.join(wanted)}, pass {i + 1}", one.plan


CARD = Card(50, LERP, hue="green", concepts=("lerp",), sources=(SOURCE,), variant="lerp {dtype}", variants=variants)
