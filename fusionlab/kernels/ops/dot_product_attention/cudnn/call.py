"""The one place that touches JAX's internal cuDNN attention: forward with its statistics, and backward from them.

The public `jax.nn.dot_product_attention(implementation="cudnn")` rounds the log of the sum to the operands' dtype and offers the backward
only with its own forward. So the two primitives beneath it, in `jax._src.cudnn.fused_attention_stablehlo`, are bound here: those that
represent the custom calls themselves, since FusionLab itself splits them among devices. `why_missing` compares them with
what this file was written for; a test does so too.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ..settings import Settings

Array = Any

_MODULE = "jax._src.cudnn.fused_attention_stablehlo"
# What the backward is given beside its operands, in jax 0.10 and 0.11; 0.12 adds a function of the scores, None here.
_PARAMETERS = {"scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout", "sliding_window_length"}
_FUNCTION = {"score_mod_name", "score_mod_jaxpr"}
_OPERANDS = {
    *("ctx", "query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "page_table_k"),
    *("page_table_v", "activation", "fwd_output", "grad_output", "score_mod_args"),
}


@functools.cache
def why_missing() -> str | None:
    """Why this version of JAX cannot be called here, or None."""
    text = "this version of JAX has another cuDNN attention inside than FusionLab knows"
    try:
        internal: Any = importlib.import_module(_MODULE)
        found = _parameters(internal)
        kinds = {kind.name for kind in internal.MaskType}, {kind.name for kind in internal.AttentionLayout}
        bound = (internal._dot_product_attention_fwd_p, internal._dot_product_attention_bwd_p, internal.cuda_versions)
    except (ImportError, AttributeError) as e:
        return f"{text} ({e})"
    given = found - _OPERANDS
    known = given in (_PARAMETERS, _PARAMETERS | _FUNCTION) and {"NO_MASK", "CAUSAL"} <= kinds[0]
    return None if known and bound and {"BTNH", "BNTH"} <= kinds[1] else text


def _parameters(internal: Any) -> set[str]:
    return set(inspect.signature(internal._dot_product_attention_bwd_cuda_lowering).parameters)


def version() -> int | None:
    """cuDNN's, as JAX sees it (91200 is 9.12); None without one."""
    found = importlib.import_module(_MODULE).cuda_versions
    return None if found is None else int(found.cudnn_get_version())


def forward(
    qkv: Sequence[Array], bias: Array | None, lengths: tuple[Array, Array] | None, form: Settings
) -> tuple[Array, Array]:
    """(out, logsumexp): out as query, logsumexp B x N x T float32.

    Args:
      qkv: query, key, value: B x T x N x H, or B x N x T x H.
      bias: (1 or B) x (1 or N) x T x S in their dtype, or None.
      lengths: of queries and keys, int32 B each, or None.
      form: `scale`, `is_causal`, `window` (of a causal mask: (keys before the row, 0), or None) and `layout` are read.
    """
    out, statistics = _bind("fwd", qkv, bias, lengths, form, is_training=True)
    return out, statistics


def backward(
    qkv: Sequence[Array], bias: Array | None, lengths: tuple[Array, Array] | None, form: Settings, *more: Array
) -> list[Array]:
    """The gradients of query, key and value; arguments as for `forward`, then its results (logsumexp, out) and the cotangent of out."""
    return list(_bind("bwd", qkv, bias, lengths, form, *more)[:3])


def _bind(
    name: str,
    qkv: Sequence[Array],
    bias: Array | None,
    lengths: tuple[Array, Array] | None,
    form: Settings,
    *more: Array,
    **params: Any,
) -> Any:
    internal: Any = importlib.import_module(_MODULE)
    # Behind bias and lengths the offsets and page tables that are not used; what is not there is empty.
    empty = jnp.zeros(0, qkv[0].dtype)
    operands = (*qkv, empty if bias is None else bias, *(lengths or (empty, empty)), *(empty,) * 4, *more)
    kinds = ("PADDING", "PADDING_CAUSAL") if lengths else ("NO_MASK", "CAUSAL")
    params |= {
        "scale": form.scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (bias is not None, False),
        "mask_type": internal.MaskType[kinds[form.is_causal]],
        "layout": internal.AttentionLayout[form.layout].value,
        "sliding_window_length": None if form.window is None else form.window[0] + 1,  # cuDNN counts the row's own key
    } | dict.fromkeys(_FUNCTION & _parameters(internal))
    return getattr(internal, f"_dot_product_attention_{name}_p").bind(*operands, **params)
