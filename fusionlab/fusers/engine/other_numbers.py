"""What a fused op makes of numbers that a model is not meant to see, where the program makes something else: said with the site.

Certification shows it (`Verdict.lost`, `Verdict.edge`, `Verdict.regained`); here it becomes a note, or the reason why the site stays as
it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ...graph.certify.certify import ProofOutcome
from ...graph.matching.region import Region
from .fully_masked_rows import NOTE, nan_test

_EDGE = "near the edge of"
_NO_SCORE = 1e30  # beyond this no attention has scores; float16 ends at 65504, where some have
_ATTENDS = frozenset({"dot_product_attention", "multi_transformer"})  # ops that are 0 for a query that sees no key


def edge_note(dtype: Any) -> str:
    """The note for numbers that overflow in the op and not in the program."""
    largest = float(jnp.finfo(dtype).max)
    return (
        f"infinities may become NaN, and finite numbers {_EDGE} {jnp.dtype(dtype).name} ({largest:.1e}) infinities or NaN, "
        "where they do not in the program"
    )


def squares_note(dtype: Any) -> str:
    """The note for a norm of numbers whose squares overflow, where the program's gradient may be NaN."""
    name = jnp.promote_types(dtype, jnp.float32).name
    root = float(jnp.finfo(name).max) ** 0.5
    return f"where squares overflow {name} (beyond {root:.1e}) the gradient of the program may be NaN, and that of the fused op is 0"


def _out_of_reach(op: str, dtype: Any) -> bool:
    """Whether no score of a model comes near the largest number: scores that overflow in one order of factors and sums then do in many."""
    return op in _ATTENDS and float(jnp.finfo(dtype).max) > _NO_SCORE


def notes_of(view: Any, region: Region, op: str, verdict: ProofOutcome, notes: Sequence[str]) -> tuple[str, ...] | str:
    """The notes with what the proof has shown beside them; a sentence where the site has to stay as it is."""
    found, dtype = list(notes), region.root.dtype
    # The softmax of a row of minus infinities is NaN; an attention op gives 0 there.
    if verdict.lost and NOTE not in found:
        if op not in _ATTENDS:
            return f"its {verdict.lost[0]} is NaN where a mask hides everything, which would become a number"
        if asked := nan_test(view, region.root):
            return f"{NOTE}, and {asked!r} asks where the NaN are"
        found.append(NOTE)
    text = "\n".join(found)
    if verdict.edge and not _out_of_reach(op, dtype) and _EDGE not in text:
        found.append(edge_note(dtype))
    # In float32, in which norms of 16 bits are computed too, squares overflow from 1.8e19 on.
    if verdict.regained and op == "layer_norm" and "overflows sooner" not in text:
        found.append(squares_note(dtype))
    return tuple(found)
