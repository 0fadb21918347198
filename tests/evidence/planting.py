"""A planted error: a fused op whose result is off by a factor where it runs, and right where it is certified."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from fusionlab.kernels.op.primitive import FusedPrimitive


@contextlib.contextmanager
def planted(
    factor: float, wanted: Callable[..., bool] = lambda *operands: True, op: str = "gemm_epilogue", role: str = "call"
) -> Iterator[None]:
    """Within it, that op's first result is off by `factor` where `wanted(*operands)`; what was compiled before stays as it is."""
    right = FusedPrimitive._function

    def planted_function(self: FusedPrimitive, params: Any, implementation: str, device: Any) -> Any:
        fn = right(self, params, implementation, device)
        if device is None or (self.op.name, self.role) != (op, role):  # without a device it is the op's meaning
            return fn

        @functools.wraps(fn)
        def wrong(*operands: Any) -> list[Any]:
            first, *rest = fn(*operands)
            return [first * factor if wanted(*operands) else first, *rest]

        return wrong

    FusedPrimitive._function = planted_function
    try:
        yield
    finally:
        FusedPrimitive._function = right
