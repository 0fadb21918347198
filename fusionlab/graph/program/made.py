"""Arrays that a body is given, and that the block around it makes from constants alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from .ir import Block
from .trace import block_of_jaxpr


@dataclass(frozen=True, eq=False)
class Made:
    """An array that is the same at every call.

    Attributes:
      program: closed jaxpr without inputs that computes it.
      key: hashable, equal for arrays that are computed in the same way.
    """

    program: Any
    key: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Made) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @functools.cached_property
    def block(self) -> Block:
        """The program as a block."""
        return block_of_jaxpr(self.program)
