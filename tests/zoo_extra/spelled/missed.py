"""What the search does not accept of the layers yet: a list to be shortened.

An entry is of one layer and kind of site, with the words that the reason has, in the groups of programs that it names: those
of `f32` and `bf16`, `forward` and `train`. Who makes one of these sites found takes its entry out.
"""

from __future__ import annotations

from typing import NamedTuple

ALL = ("f32 forward", "f32 train", "bf16 forward", "bf16 train")
FORWARD = ("f32 forward", "bf16 forward")


class Missed(NamedTuple):
    """So many sites of a kind that are missed in some groups, and words of the reason."""

    layer: str
    kind: str
    number: int
    words: str
    groups: tuple[str, ...] = ALL


SPLIT = "a reshape splits or merges across the axes of heads, features or rows"

PIECES = (Missed("alphafold-colabfold_evoformer", "attentions", 1, "clips the scores"),)
LAYERS = (
    Missed("nanodl_vit", "whole layers", 1, SPLIT, FORWARD),
    Missed("flaxmodels_gpt2", "whole layers", 1, "reads float32, where the op reads bfloat16", ("bf16 forward",)),
    Missed("equimo_dinov2", "whole layers", 1, "would round bfloat16 once more", ("bf16 forward",)),
)


def missed(layer: str, group: str, of: tuple[Missed, ...]) -> dict[str, tuple[int, str]]:
    """What is missed of one program, by kind: how many, and words of the reason."""
    return {m.kind: (m.number, m.words) for m in of if m.layer == layer and group in m.groups}
