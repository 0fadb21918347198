"""Helpers for a library's own tests: assertions on fusions, as functions and as the pytest fixture `fusionlab`.

    from fusionlab.testing import assert_fused

    assert_fused(model, (params, x), expect={"gemm_epilogue": 3}, survive={"relu": 0})

The names are loaded on first use, because `fusionlab.evidence` imports the table of tolerances from this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .asserts import assert_equivalent as assert_equivalent
    from .asserts import assert_fused as assert_fused
    from .asserts import assert_not_slower as assert_not_slower
    from .asserts import assert_rejected as assert_rejected
    from .messages import FusionAssertionError as FusionAssertionError
    from .snapshots import snapshot_text as snapshot_text
    from .tolerances import tolerance as tolerance

_FROM = {
    "assert_equivalent": "asserts",
    "assert_fused": "asserts",
    "assert_not_slower": "asserts",
    "assert_rejected": "asserts",
    "FusionAssertionError": "messages",
    "snapshot_text": "snapshots",
    "tolerance": "tolerances",
}


__all__ = [
    "FusionAssertionError",
    "assert_equivalent",
    "assert_fused",
    "assert_not_slower",
    "assert_rejected",
    "snapshot_text",
    "tolerance",
]


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_FROM[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
