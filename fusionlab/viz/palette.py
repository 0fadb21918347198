"""One colour per pass, everywhere: graph, toggles, plots, HTML.

The hues are Okabe and Ito's, told apart under the common colour-vision deficiencies (Okabe, Ito: "Color Universal
Design", 2008). A pass and its gradient, or the members of one family, share a hue in two strengths; state is never told
by colour alone.
"""

from __future__ import annotations

import zlib

from fusionlab.fusers import registry

INK = "#1f2933"
QUIET = "#7b8794"
LINE = "#9aa5b1"
PAPER = "#ffffff"
SCOPE_FILL = "#f5f7fa"
REGION_FILL = "#eef2f6"

_ORANGE, _SKY, _GREEN, _YELLOW = "#e69f00", "#56b4e9", "#009e73", "#d6c400"
_BLUE, _VERMILION, _PURPLE = "#0072b2", "#d55e00", "#cc79a7"

_COLOURS = {
    "gemm_epilogue": _ORANGE,
    "gemm_epilogue_grad": "#b37a00",
    "dot_product_attention": _SKY,
    "dot_product_attention_grad": _BLUE,
    "lerp": _GREEN,
    "lerp_grad": "#006b4e",
    "matmul_schedule": _YELLOW,
    "matmul": _YELLOW,
    "gated_matmul": _YELLOW,
    "layer_norm": _VERMILION,
    "layer_norm_grad": "#9c4400",
    "group_norm": _VERMILION,
    "group_norm_grad": "#9c4400",
    "multi_transformer": _PURPLE,
}
_SPARE = ("#44aa99", "#882255", "#999933", "#aa4499", "#117733", "#6699cc")


_FUSED_OPS = (
    "gemm_epilogue",
    "dot_product_attention",
    "multi_transformer",
    "lerp",
    "layer_norm",
    "group_norm",
    "matmul",
    "gated_matmul",
)


def pass_of_op(primitive: str) -> str | None:
    """The pass whose colour a fused op's node wears; None for JAX's own primitives.

    A fused op's backward (`gemm_epilogue_cotangent`) wears the colour of the `_grad` pass.
    """
    own = (p.op for p in registry().values() if p.op not in _FUSED_OPS)  # of users' own passes
    for op in (*_FUSED_OPS, *own):
        if primitive in (op, f"{op}_tangent"):
            return op
        if primitive == f"{op}_cotangent":
            return f"{op}_grad"
    return None


def colour_of(pass_name: str) -> str:
    """The full colour of a pass ("#rrggbb"), for lines and borders; the same for the fused op of that name."""
    if pass_name in _COLOURS:
        return _COLOURS[pass_name]
    if "multi_transformer" in pass_name:
        return _PURPLE
    return _SPARE[zlib.crc32(pass_name.encode()) % len(_SPARE)]


def tint_of(pass_name: str, strength: float = 0.3) -> str:
    """The pass's colour mixed with white, for fills under dark text; `strength` is the colour's share in [0, 1]."""
    colour = colour_of(pass_name)
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 + (p - 255) * strength):02x}" for p in parts)
