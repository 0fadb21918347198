"""Whether the cotangent of what is traced is known to be 1: that of a loss which the program itself differentiates.

An op that makes its gradients in the forward pass can then round them there, rather than where they are multiplied by the cotangent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_IS_ONE: ContextVar[bool] = ContextVar("fusionlab_cotangent_is_one", default=False)


@contextlib.contextmanager
def unit_cotangent(is_one: bool = True) -> Iterator[None]:
    """Around the tracing of a function with its derivative: its cotangent is 1, or is not known."""
    token = _IS_ONE.set(is_one)
    try:
        yield
    finally:
        _IS_ONE.reset(token)


def has_unit_cotangent() -> bool:
    """Whether the cotangent is known to be 1 here."""
    return _IS_ONE.get()
