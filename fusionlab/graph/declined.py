"""The one way to decline: whoever sees that a place is not what it was looked at as raises it, and the search catches it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Declined(Exception):  # noqa: N818 - an answer to the search, not an error of the user's
    """A place is none that can be replaced. Its line of origin is where it is raised.

    Attributes:
      sentence: why not.
      code: a key of `fusionlab.errors.REJECTIONS`.
      nodes: the guilty nodes; those of the place itself where there are none.
      edit: the source edit that would help, or None.
      progress: how far the place was understood, as (matched, total); None where that is all of it.
      rejection: all that is to be said of the place, where who raises it has it already.
    """

    def __init__(
        self,
        sentence: str,
        code: str = "structure",
        nodes: Sequence[Any] = (),
        edit: str | None = None,
        progress: tuple[int, int] | None = None,
        rejection: Any = None,
    ) -> None:
        super().__init__(sentence)
        self.sentence, self.code, self.nodes, self.edit = sentence, code, nodes, edit
        self.progress, self.rejection = progress, rejection
