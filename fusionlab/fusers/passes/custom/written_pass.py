"""Passes of users' own that are written without the base class, as any object with the attributes that a pass needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...engine.base import Pass, Search
from ...engine.outcomes import Candidate, Rejection


class WrittenPass(Pass):
    """A pass of such an object: what that lacks is as by default."""

    def __init__(self, written: Any) -> None:
        self.written = written
        for part in (*Pass.__annotations__, "fused_op", "check"):
            if hasattr(written, part):
                setattr(self, part, getattr(written, part))

    def sample(self) -> Any:
        return self.written.sample()

    def search(self, search: Search) -> Iterator[Candidate | Rejection]:
        return self.written.search(search)
