"""What the search does not accept of the layers yet: a list to be shortened.

An entry is of one layer and kind of site, with the words that the reason has, in the groups of programs that it names: those
of `f32` and `bf16`, `forward` and `train`. Who makes one of these sites found takes its entry out.
"""

from __future__ import annotations

from typing import NamedTuple

ALL = ("f32 forward", "f32 train", "bf16 forward", "bf16 train")
BF16 = ("bf16 forward", "bf16 train")
FORWARD = ("f32 forward", "bf16 forward")


class Missed(NamedTuple):
    """So many sites of a kind that are missed in some groups, and words of the reason."""

    layer: str
    kind: str
    number: int
    words: str
    groups: tuple[str, ...] = ALL


SCALE_AND_SHIFT = "stands where that is needed"
ARRAY_EPSILON = "epsilon as a number written in the program is needed"
ARRAY_MASK = "gives masked keys the score x, an array"
WIDENED = "computes in bfloat16, float32"
ESCAPES = "is also read by x = div, as the backward pass of a program that is differentiated already does"
SPLIT = "axes are split or merged across those of heads, features or rows"

PIECES = (
    *(Missed(f"keras_{name}", "norms", 2, SCALE_AND_SHIFT) for name in ("bert", "gpt", "vit")),
    *(Missed(f"penzai_{name}", "norms", 2, ARRAY_EPSILON) for name in ("gemma", "mistral")),
    *(Missed(f"penzai_{name}", "attentions", 1, ARRAY_MASK) for name in ("gemma", "mistral", "gpt_neox")),
    Missed("google-tunix_qwen2", "linear layers", 3, "silent"),
    *(Missed(f"google-tunix_{name}", "attentions", 1, "silent") for name in ("gemma2", "llama3")),
    Missed("alphafold-colabfold_evoformer", "attentions", 1, "reads x = min, where the product of queries and keys"),
    *(Missed(f"transformers_{name}", "attentions", 1, WIDENED, BF16) for name in ("gemma", "mistral", "bloom")),
    *(Missed(f"transformers_{name}", "norms", 1, ESCAPES, ("bf16 train",)) for name in ("gemma", "mistral")),
    Missed("transformers_electra", "attentions", 2, "where a selection by a mask (jnp.where) is needed"),
)
LAYERS = (
    *(Missed(f"keras_{name}", "whole layers", 1, SCALE_AND_SHIFT, FORWARD) for name in ("bert", "gpt", "vit")),
    *(Missed(f"penzai_{name}", "whole layers", 1, ARRAY_MASK, FORWARD) for name in ("gemma", "mistral")),
    *(Missed(name, "whole layers", 1, SPLIT, FORWARD) for name in ("attnax_decoder", "nanodl_vit")),
    Missed("google-tunix_qwen2", "whole layers", 1, "sum stands where the op has a projection", FORWARD),
    Missed("google-tunix_llama3", "whole layers", 1, "silent", FORWARD),
    Missed("flaxmodels_gpt2", "whole layers", 1, "reads float32, where the op has the bfloat16", ("bf16 forward",)),
    Missed("equimo_dinov2", "whole layers", 1, "where the op has a residual sum", FORWARD),
    Missed("transformers_opt", "whole layers", 1, "0 norms read the sum after the attention", FORWARD),
    Missed("transformers_gpt_neo", "whole layers", 1, "besides the score scale", FORWARD),
    Missed("transformers_gemma", "whole layers", 1, "is added with a factor", ("f32 forward",)),
    *(
        Missed(f"transformers_{name}", "whole layers", 1, WIDENED, ("bf16 forward",))
        for name in ("gemma", "mistral", "bloom")
    ),
    Missed("transformers_roformer", "whole layers", 1, "as by a rotary embedding in another form", FORWARD),
)


def missed(layer: str, group: str, of: tuple[Missed, ...]) -> dict[str, tuple[int, str]]:
    """What is missed of one program, by kind: how many, and words of the reason."""
    return {m.kind: (m.number, m.words) for m in of if m.layer == layer and group in m.groups}
