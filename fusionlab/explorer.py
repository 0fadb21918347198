"""Puts the widget together: the search, the rewriter and the evidence behind `fl.explore`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .fusers import registry
from .lab import compare, find, fuse


def make_explorer(fn: Callable, args: tuple, kwargs: dict) -> Any:
    """An `Explorer` widget over `fn` at these arguments."""
    from .viz.widget import Explorer

    search = {k: kwargs.pop(k) for k in ("passes", "device", "implementation") if k in kwargs}
    static = {k: kwargs.pop(k) for k in ("static_argnums", "static_argnames") if k in kwargs}
    found = find(fn, *args, **search, **static, **kwargs)
    chosen = {k: search[k] for k in ("passes", "implementation") if k in search}

    def measure(enabled: frozenset[str], progress: Any = None, cancel: Any = None) -> Any:
        fused = fuse(fn, only=sorted(enabled), **chosen, **static)
        return compare(fn, fused, *args, progress=progress, cancel=cancel, **static, **kwargs)

    formulas = {p.name: p.formula for p in registry().values()}

    def after(enabled: frozenset[str]) -> Any:
        return found.apply(sorted(enabled))

    return Explorer(found.graph, found, measure=measure, after=after, formulas=formulas)
