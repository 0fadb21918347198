"""What a fused op makes of numbers that a model is not meant to see, where the program makes something else: said with the site.

Certification shows it (`Verdict.lost`, `Verdict.edge`); here it becomes a note, or the reason why the site stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ..graph.certify import Verdict
from ..graph.region import Region
from .blind import NOTE, nan_test

_EDGE = "near the edge of"
_ATTENDS = frozenset({"dot_product_attention", "multi_transformer"})  # ops that are 0 for a query that sees no key


def edge_note(dtype: Any) -> str:
    """The note for numbers that overflow in the op and not in the program."""
    largest = float(jnp.finfo(dtype).max)
    return (
        f"infinities may become NaN, and finite numbers {_EDGE} {jnp.dtype(dtype).name} ({largest:.1e}) infinities or NaN, "
        "where they do not in the program"
    )


def notes_of(view: Any, region: Region, op: str, verdict: Verdict, notes: Sequence[str]) -> tuple[str, ...] | str:
    """The notes with what the proof has shown beside them; a sentence where the site has to stay as it is."""
    found = list(notes)
    if verdict.lost and NOTE not in found:
        if op not in _ATTENDS:
            return f"its {verdict.lost[0]} is NaN where a mask hides everything, which would become a number"
        asked = nan_test(view, region.root)
        if asked is not None:
            return f"{NOTE}, and {asked!r} asks where the NaN are"
        found.append(NOTE)
    if verdict.edge and not any(_EDGE in note for note in found):
        found.append(edge_note(region.root.dtype))
    return tuple(found)
