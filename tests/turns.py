"""Pairs of parameters of which every other one runs daily."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest


def in_turns(first: Sequence[Any], second: Sequence[Any], name: Callable[[Any], str] = str) -> list[Any]:
    """Each pair of both; every other one is left to the nightly run, and each of `first` and each of `second` stays."""
    return [
        pytest.param(a, b, id=f"{name(a)}-{name(b)}", marks=[pytest.mark.nightly] * ((i + j) % 2))
        for i, a in enumerate(first)
        for j, b in enumerate(second)
    ]
