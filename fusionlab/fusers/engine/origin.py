"""The line of FusionLab that decided to decline a place, even if another function wrote the rejection."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

from ...graph.program.boundary import origin_of, place_text

# These functions write rejections down for others, which have decided: the one that called them is meant.
_FOR_OTHERS = frozenset(
    {"reject", "rejection", "decline", "faulty", "_declined", "declined", "declined_at", "__init__", "__post_init__"}
)
_HERE = Path(__file__).parents[2].as_posix() + "/"


def declined_at(sentence: str) -> str:
    """ "fusers/engine/site.py:203 in near_miss": the line of FusionLab that decided on the rejection that is made just now.

    While an exception is handled whose text is in the sentence, this is the line that raised it; otherwise it is the innermost line on
    the stack whose function does not write rejections for others; "" if a rejection is made outside FusionLab.
    """
    raised = sys.exc_info()[1]
    if isinstance(raised, Exception) and str(raised) and str(raised) in sentence:
        return origin_of(raised)
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        file = Path(frame.f_code.co_filename).as_posix()
        if file.startswith(_HERE) and frame.f_code.co_name not in _FOR_OTHERS:
            return place_text(file, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return ""
