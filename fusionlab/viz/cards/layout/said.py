"""Further lines in the box of a site: its operation, and why it is fused or stays."""

from __future__ import annotations

from collections.abc import Sequence

from .measure import cut_at_end
from .picture import Rect, Text

SAID = 15.0  # of a line
_LEFT, _RIGHT = 26.0, 9.0


def said_marks(lines: Sequence[str], rect: Rect, y: float) -> list[Text]:
    """The lines in a box, below `y`, each cut to the room there is."""
    room = rect.width - _LEFT - _RIGHT
    texts = ((i, cut_at_end(line, room, 10)) for i, line in enumerate(lines))
    return [Text(rect.x + _LEFT, y + SAID * i + 10, t, muted=True, kind="said", line=2) for i, t in texts if t]
