"""Where a fused op differs from the program on numbers that a model is not meant to see; reported with the site.

Certification finds the differences (`Verdict.lost`, `Verdict.edge`, `Verdict.regained`); here they become notes, or the reason to leave
the site as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from ...graph.certify.certify import ProofOutcome
from ...graph.declined import Declined
from ...graph.matching.region import Region
from .fully_masked_rows import NOTE, nan_test

_EDGE = "near the edge of"
_NO_SCORE = 1e30  # beyond this no attention has scores; float16 ends at 65504, where some have
_ATTENDS = frozenset({"dot_product_attention", "multi_transformer"})  # ops that are 0 for a query that sees no key


def edge_note(dtype: Any) -> str:
    """The note for numbers that overflow in the op but not in the program."""
    largest = float(jnp.finfo(dtype).max)
    return (
        f"infinities may become NaN, and finite numbers {_EDGE} {jnp.dtype(dtype).name} ({largest:.1e}) may become infinities "
        "or NaN, unlike in the program"
    )


def squares_note(dtype: Any) -> str:
    """The note for a norm of numbers whose squares overflow, where the program's gradient may be NaN."""
    name = jnp.promote_types(dtype, jnp.float32).name
    root = float(jnp.finfo(name).max) ** 0.5
    return (
        f"where squares overflow {name} (beyond {root:.1e}), the program's gradient may be NaN and the fused op's is 0"
    )


def _is_in_reach(op: str, dtype: Any) -> bool:
    """Whether a model's numbers come near the largest one: no score of an attention does, and scores that overflow in one order of
    factors and sums overflow in many.
    """
    return op not in _ATTENDS or float(jnp.finfo(dtype).max) <= _NO_SCORE


# Finding of a proof -> the words of an existing note that already covers it, the note, and whether it concerns an op on a dtype. In
# float32, in which 16-bit norms are computed as well, squares overflow from 1.8e19 on.
_SHOWN: dict[str, tuple[str, Callable[[Any], str], Callable[[str, Any], bool]]] = {
    "edge": (_EDGE, edge_note, _is_in_reach),
    "regained": ("overflows sooner", squares_note, lambda op, _: op == "layer_norm"),
}


def notes_of(
    view: Any, region: Region, op: str, verdict: ProofOutcome, notes: Sequence[str], would: str
) -> tuple[str, ...]:
    """The notes, with those for the differences that the proof has found.

    Args:
      would: the site and the op that it could become, for the sentence.

    Raises:
      Declined: the site must be left as it is.
    """
    found, dtype = list(notes), region.root.dtype
    # The softmax of a row of minus infinities is NaN; an attention op gives 0 there.
    if verdict.lost and NOTE not in found:
        if op not in _ATTENDS:
            lost = f"where a mask hides everything, its {verdict.lost[0]} is NaN and would become a number"
            raise Declined(f"{would}, but {lost}", "value")
        if asked := nan_test(view, region.root):
            raise Declined(f"{would}, but {NOTE}, and {asked!r} tests for NaN", "value")
        found.append(NOTE)
    text = "\n".join(found)
    for shown, (words, note, concerns) in _SHOWN.items():
        if getattr(verdict, shown) and words not in text and concerns(op, dtype):
            found.append(note(dtype))
    return tuple(found)
