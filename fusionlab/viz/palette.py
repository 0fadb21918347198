"""One colour per pass, everywhere: graph, toggles, plots, HTML.

The hues of the passes made first are Okabe and Ito's, distinct under the common colour-vision deficiencies (Okabe, Ito: "Color
Universal Design", 2008); the others were searched for, as far as possible from these and each other in the eyes of each deficiency, and
seen on light and dark paper. A pass and its gradient share a hue in two strengths, and so do all forms of one op; state is never shown by
colour alone.
"""

from __future__ import annotations

import zlib

from fusionlab.fusers.registry import BUILT_IN, registry
from fusionlab.kernels import CARDS, OPS

INK = "#1f2933"
QUIET = "#7b8794"
LINE = "#9aa5b1"
PAPER = "#ffffff"

# Hue -> of a pass, of its gradient; "": one of the spare ones.
_HUES = {
    "": ("", ""),
    "orange": ("#e69f00", "#b37a00"),
    "sky": ("#56b4e9", "#0072b2"),
    "green": ("#009e73", "#006b4e"),
    "lime": ("#96c35a", "#64913a"),
    "indigo": ("#6969d2", "#4a4ab0"),
    "violet": ("#a53cff", "#7d1fd0"),
    "crimson": ("#e1004b", "#a80038"),
    "vermilion": ("#d55e00", "#9c4400"),
    "purple": ("#cc79a7", "#cc79a7"),
}
_HUE_OF = {card.op.name: card.hue for card in CARDS}
_SPARE = ("#44aa99", "#b3507a", "#999933", "#b65cae", "#c8b45a", "#6699cc")  # lines of them are seen on dark paper too


def pass_of_op(primitive: str) -> str | None:
    """The pass whose colour a fused op's node wears; None for JAX's own primitives.

    A fused op's backward (`gemm_epilogue_cotangent`) wears the colour of the `_grad` pass.
    """
    own = (p.op for p in registry().values() if p.op not in OPS)  # of users' own passes
    for op in (*OPS, *own):
        if primitive in (op, f"{op}_tangent"):
            return op
        if primitive == f"{op}_cotangent":
            return f"{op}_grad"
    return None


def colour_of(pass_name: str) -> str:
    """The full colour of a pass ("#rrggbb"), for lines and borders; the same for the fused op of that name."""
    name = pass_name.removesuffix("_grad")
    op = BUILT_IN[name].op if name in BUILT_IN else name
    colour = _HUES[_HUE_OF.get(op, "")][pass_name != name]
    return colour or _SPARE[zlib.crc32(pass_name.encode()) % len(_SPARE)]


def tint_of(pass_name: str, strength: float = 0.3) -> str:
    """The pass's colour mixed with white, for fills under dark text; `strength` is the colour's share in [0, 1]."""
    colour = colour_of(pass_name)
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 + (p - 255) * strength):02x}" for p in parts)
