"""The one place that touches JAX's internal cuDNN attention: forward with its statistics, and backward from them.

The public `jax.nn.dot_product_attention(implementation="cudnn")` rounds the log of the sum to the operands' dtype and offers the backward
only with its own forward. So the two primitives beneath it, in `jax._src.cudnn.fused_attention_stablehlo`, are bound here: those that
stand for the custom calls themselves, since FusionLab says by itself how they are split among devices. `why_missing` compares them with
what this file was written for; a test does so too.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

import jax.numpy as jnp

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
    query: Array, key: Array, value: Array, bias: Array | None, lengths: tuple[Array, Array] | None, **given: Any
) -> tuple[Array, Array]:
    """(out, logsumexp): out as query, logsumexp B x N x T float32.

    Args:
      query, key, value: B x T x N x H, or B x N x T x H.
      bias: (1 or B) x (1 or N) x T x S in their dtype, or None.
      lengths: of queries and keys, int32 B each, or None.
      given: `scale`, `is_causal`, `window` (of a causal mask: (keys before the row, 0), or None) and `layout`.
    """
    internal: Any = importlib.import_module(_MODULE)
    operands = _operands(query, bias, lengths)
    params = _params(internal, bias, lengths, **given)
    out, statistics = internal._dot_product_attention_fwd_p.bind(
        query, key, value, *operands, is_training=True, **params
    )
    return out, statistics


def backward(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None,
    lengths: tuple[Array, Array] | None,
    logsumexp: Array,
    out: Array,
    ct: Array,
    **given: Any,
) -> list[Array]:
    """The gradients of query, key and value; arguments as for `forward`, beside what it gave and the cotangent of out."""
    internal: Any = importlib.import_module(_MODULE)
    operands = _operands(query, bias, lengths)
    params = _params(internal, bias, lengths, **given)
    found = internal._dot_product_attention_bwd_p.bind(query, key, value, *operands, logsumexp, out, ct, **params)
    return list(found[:3])


def _operands(query: Array, bias: Array | None, lengths: tuple[Array, Array] | None) -> list[Array]:
    """Bias, lengths, and the offsets and page tables that are not used; what is not there is empty."""
    empty = jnp.zeros(0, query.dtype)
    return [empty if bias is None else bias, *(lengths or (empty, empty)), empty, empty, empty, empty]


def _params(
    internal: Any,
    bias: Array | None,
    lengths: tuple[Array, Array] | None,
    *,
    scale: float,
    is_causal: bool,
    window: tuple[int, int] | None,
    layout: str,
) -> dict[str, Any]:
    kind = ("PADDING_CAUSAL" if is_causal else "PADDING") if lengths else ("CAUSAL" if is_causal else "NO_MASK")
    return {
        "scale": scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (bias is not None, False),
        "mask_type": internal.MaskType[kind],
        "layout": internal.AttentionLayout[layout].value,
        "sliding_window_length": None if window is None else window[0] + 1,  # cuDNN counts the row's own key
    } | dict.fromkeys(_FUNCTION & _parameters(internal))
