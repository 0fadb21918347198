"""The exception for declining a place: raised where a condition of a site fails, and caught by the search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Declined(Exception):  # noqa: N818 - an answer to the search, not an error of the user's
    """A place cannot be replaced. Its line of origin is where this is raised.

    Attributes:
      sentence: the reason.
      code: a key of `fusionlab.errors.REJECTIONS`.
      nodes: the guilty nodes; empty for those of the place itself.
      edit: the source edit that would help, or None.
      progress: how far the place was understood, as (matched, total); None if completely.
      rejection: the complete rejection, if the raising code already has it.
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
