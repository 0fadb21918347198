"""The meaning of `dot_product_attention` in plain jnp: softmax(scale * query @ key^T) @ value, tangent and cotangent.

Letters, as `jax.nn.dot_product_attention`: query is *B T N H, key is *B S N H, value is *B S N Hv, out is *B T N Hv; scores
and probabilities are *B N T S. The residual `logsumexp` is *B N T: log of the sum, over the keys a row sees, of exp(score).
Scores and statistics are float32 for float32, bfloat16 and float16 operands, float64 for float64.

With `saves="probabilities"` the forward keeps them (*B N T S, in the operands' dtype), as JAX's own gradient of a softmax does;
with `saves="logsumexp"` it keeps that and the backward recomputes p = exp(score - logsumexp). Either way, with
dp = ct @ value^T, the softmax gives ds = p * (dp - rowsum(p * dp)), and rowsum(p * dp) = rowsum(ct * out). Source: Dao et al.
2022, arXiv:2205.14135, appendix B.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = Any


def statistics_dtype(dtype: Any) -> Any:
    """The dtype of scores and statistics for operands of `dtype`."""
    return jnp.promote_types(dtype, jnp.float32)


def _dot(a: Array, b: Array, axes: str, precision: Any, dtype: Any) -> Array:
    return jnp.einsum(axes, a, b, precision=precision, preferred_element_type=dtype)


def scores_of(query: Array, key: Array, scale: float, is_causal: bool, precision: Any) -> Array:
    """scale * query @ key^T as *B N T S; with `is_causal`, -inf where row t would see a key s > t."""
    dtype = statistics_dtype(query.dtype)
    scores = _dot(query, key, "...tnh,...snh->...nts", precision, dtype) * scale
    if not is_causal:
        return scores
    t, s = scores.shape[-2:]
    return jnp.where(causal_mask(t, s), scores, -jnp.inf)


def causal_mask(t: int, s: int) -> Array:
    """True where row t sees key s: s <= t, aligned at the top left."""
    return lax.broadcasted_iota(jnp.int32, (t, s), 1) <= lax.broadcasted_iota(jnp.int32, (t, s), 0)


def forward(
    query: Array,
    key: Array,
    value: Array,
    *,
    residuals: bool,
    scale: float,
    is_causal: bool,
    precision: Any,
    saves: str,
    **_: Any,
) -> list[Array]:
    """[out], and what is saved for the backward if asked for."""
    scores = scores_of(query, key, scale, is_causal, precision)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    out = _weigh(probabilities, value, precision)
    if not residuals:
        return [out]
    return [out, probabilities if saves == "probabilities" else jax.nn.logsumexp(scores, axis=-1)]


def _weigh(probabilities: Array, value: Array, precision: Any) -> Array:
    out = _dot(probabilities, value, "...nts,...snh->...tnh", precision, statistics_dtype(value.dtype))
    return out.astype(value.dtype)


def _probabilities(saved: Mapping[str, Array], scale: float, is_causal: bool, precision: Any) -> Array:
    """*B N T S in the statistics dtype."""
    if "probabilities" in saved:
        return saved["probabilities"].astype(statistics_dtype(saved["probabilities"].dtype))
    scores = scores_of(saved["query"], saved["key"], scale, is_causal, precision)
    return jnp.exp(scores - saved["logsumexp"][..., None])


def tangent(
    saved: Mapping[str, Array],
    tangents: Mapping[str, Array],
    shape: tuple[int, ...],
    shardings: Mapping[str, Any],
    *,
    scale: float,
    is_causal: bool,
    precision: Any,
    **_: Any,
) -> Array:
    """p * (ds - rowsum(p * ds)) @ value + p @ dvalue, with ds = scale * (dquery @ key^T + query @ dkey^T)."""
    p = _probabilities(saved, scale, is_causal, precision)
    dtype = p.dtype
    parts = []
    if "value" in tangents:
        parts.append(_dot(p, tangents["value"].astype(dtype), "...nts,...snh->...tnh", precision, dtype))
    pairs = []
    if "query" in tangents:
        pairs.append((tangents["query"], saved["key"]))
    if "key" in tangents:
        pairs.append((saved["query"], tangents["key"]))
    if pairs:
        moved = [_dot(q, k, "...tnh,...snh->...nts", precision, dtype) * scale for q, k in pairs]
        weighted = _through_softmax(p, _seen(sum(moved[1:], moved[0]), is_causal))
        parts.append(_dot(weighted, saved["value"].astype(dtype), "...nts,...snh->...tnh", precision, dtype))
    return sum(parts[1:], parts[0]).astype(next(iter(tangents.values())).dtype)


def _through_softmax(p: Array, moved: Array) -> Array:
    """The softmax's Jacobian, which is symmetric, applied to `moved`."""
    return p * (moved - jnp.sum(p * moved, axis=-1, keepdims=True))


def _seen(scores: Array, is_causal: bool) -> Array:
    """0 where a row does not see a key: not even a NaN of the row's reaches that key's gradient."""
    return jnp.where(causal_mask(*scores.shape[-2:]), scores, 0.0) if is_causal else scores


def cotangent(
    saved: Mapping[str, Array],
    ct: Array,
    wanted: tuple[str, ...],
    shardings: Mapping[str, Any],
    *,
    scale: float,
    is_causal: bool,
    precision: Any,
    **_: Any,
) -> list[Array]:
    """The gradients wanted, in order: dvalue = p^T @ ct, dquery = scale * ds @ key, dkey = scale * ds^T @ query."""
    p = _probabilities(saved, scale, is_causal, precision)
    dtype = p.dtype
    ct_wide = ct.astype(dtype)
    grads = {}
    if "value" in wanted:
        grads["value"] = _dot(p, ct_wide, "...nts,...tnh->...snh", precision, dtype)
    if "query" in wanted or "key" in wanted:
        dp = _dot(ct_wide, saved["value"].astype(dtype), "...tnh,...snh->...nts", precision, dtype)
        ds = _seen(_through_softmax(p, dp), is_causal) * scale
        if "query" in wanted:
            grads["query"] = _dot(ds, saved["key"].astype(dtype), "...nts,...snh->...tnh", precision, dtype)
        if "key" in wanted:
            grads["key"] = _dot(ds, saved["query"].astype(dtype), "...nts,...tnh->...snh", precision, dtype)
    return [grads[slot].astype(ct.dtype) for slot in wanted]
