"""Programs that are one step from a site of the pass lerp. Not a test module."""

from __future__ import annotations

from typing import Any

from .near_miss import NearMiss, normal

X, Y, W = normal((6, 8), (6, 8), (8,))
EDIT = "write x + w * (y - x)"


def near(name: str, code: str | None, fn: Any, **rest: Any) -> NearMiss:
    return NearMiss(name, "lerp", code, fn, (X, Y, W), mapped=(0, 1), **rest)


CORPUS = (
    near("x * (1 - w) + y * w", "rounding", lambda x, y, w: x * (1 - w) + y * w,
         says="rounds differently", edit=EDIT, repaired=lambda x, y, w: x + w * (y - x)),
    near("y * w + x * (1 - w)", "rounding", lambda x, y, w: y * w + x * (1 - w),
         says="rounds differently", edit=EDIT, repaired=lambda x, y, w: x + w * (y - x)),
    near("x - w * x + w * y", "rounding", lambda x, y, w: x - w * x + w * y,
         says="rounds differently", edit=EDIT, repaired=lambda x, y, w: x + w * (y - x)),
    near("the difference is returned", "escapes", lambda x, y, w: (lambda d: (x + w * d, d))(y - x),
         says="is also returned", forms=("plain", "vmap")),
)  # fmt: skip
