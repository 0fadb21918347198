"""`dot_product_attention` by cuDNN's fused attention, forward and backward, through JAX's own calls of it.

Whether cuDNN takes a call is decided without a GPU. The limits are those that JAX and cuDNN state:
https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html and
`jax._src.cudnn.fused_attention_stablehlo.check_is_flash_attention`.

A row in which the bias leaves nothing but far negative scores has the statistic -1e9 + log(S), which float32 rounds to -1e9: cuDNN's
backward would take each of its probabilities for 1. So a bias is taken only where nothing is kept for a backward.

Its backward adds the parts of the query's gradient by atomics, unless it is asked for a deterministic algorithm, which JAX's call does
not do (same page, "SDPA Backward"): a call that must give the same bits every time takes another backward.

cuDNN knows of a mask only how many keys it leaves in a batch entry. For a mask of keys, which is data, a small kernel checks whether it is
that (probe.py), and `lax.cond` takes cuDNN where it is and the kernels of cuda.py where it has a hole, or leaves an entry nothing. Any
other mask is written out as a bias of 0 and of numbers so far below it that nothing is left of their weight, as jax.nn does it; where some
query sees no key at all, the statistic would be such a number too, and the kernels of cuda.py run instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from .....device import Device
from ..layouts import AttentionSizes, lengths
from ..own import backend as cuda
from ..settings import Settings
from . import call as cudnn_call
from . import probe

Array = Any

# Its backward takes rowsum(ct * out) of the result as it was rounded, from products of numbers that were not, and has no input for more.
# On an H200, with values of order 1e3 and scores of order 30, the query's gradient was off by 6 (of 1 + its size), the original's by 0.24.
PRECISION = (
    "where a softmax is near one key, gradients of query and key carry up to a rounding of ct . out "
    "(implementation='cuda' keeps what was rounded off)"
)
MIN_CAPABILITY = 80
MIN_MAJOR = 9  # JAX's plugins ask for 9; the flash kernels of 8.9.6 had other limits
DTYPES = ("bfloat16", "float16")
_QKV = ("query", "key", "value")
MOST_FEATURES, MOST_FEATURES_90 = 128, 256
LEAST_SEEN = -1e4  # a mask value up to which a masked key's weight is 0 beside any other's: scores are far above it


def refuses(shapes: Mapping[str, Any], device: Device, **attrs: Any) -> str | None:
    """Why cuDNN cannot run a call, or None."""
    form = Settings.of(attrs)
    reason = refuses_device(device) or _refuses_operands(shapes, device, form.layout)
    return reason or _refuses_form(shapes, form) or _refuses_mask(shapes, device, form)


def refuses_device(device: Device) -> str | None:
    if device.platform != "cuda":
        return f"cuDNN needs a CUDA device, this is {device}"
    if device.arch and device.capability < MIN_CAPABILITY:
        return f"{device.arch} is older than sm_{MIN_CAPABILITY}, the oldest that cuDNN's fused attention runs on"
    if reason := cudnn_call.why_missing():
        return reason
    if device.cudnn is not None:
        old = int(device.cudnn.split(".")[0]) < MIN_MAJOR
        return f"cuDNN {device.cudnn} is older than {MIN_MAJOR}.0" if old else None
    if device.arch and not device.simulated and cudnn_call.version() is None:
        return "JAX sees no cuDNN in this process"
    return None


def _refuses_operands(shapes: Mapping[str, Any], device: Device, layout: str) -> str | None:
    features = set()
    for slot in ("query", "key", "value", "ct"):
        if slot in shapes:
            dtype = np.dtype(shapes[slot].dtype).name
            if dtype not in DTYPES:
                return f"{slot} has dtype {dtype}, cuDNN's fused attention takes {' and '.join(DTYPES)}"
            features.add(AttentionSizes.of(shapes[slot].shape, layout).features)
            if math.prod(shapes[slot].shape) == 0:
                return f"{slot} has shape {tuple(shapes[slot].shape)}: there is nothing to compute"
    return _refuses_features(features, device)


def _refuses_features(features: Collection[int], device: Device) -> str | None:
    # JAX's check_is_flash_attention: head sizes are multiples of 8, up to 128, and up to 256 from Hopper on.
    most = MOST_FEATURES_90 if device.capability >= 90 else MOST_FEATURES
    if len(features) > 1:
        return f"values have other features than keys ({', '.join(map(str, sorted(features)))})"
    for n in features:
        if n % 8 or n > most:
            where = f" on {device.arch}" if device.arch else ""
            return f"{n} features per head: cuDNN's fused attention takes multiples of 8 up to {most}{where}"
    return None


def _refuses_form(shapes: Mapping[str, Any], form: Settings) -> str | None:
    if not {"factors", "dropout_key"}.isdisjoint(form.present):
        return "factors on the probabilities: cuDNN's dropout has a seed fixed when compiling, never the caller's key"
    if "sink" in form.present:
        return "a sink next to the scores, for which JAX's call of cuDNN has no operand"
    # JAX's call of cuDNN has no parameter for one.
    if form.softcap is not None:
        return "a softcap on the scores"
    if form.window is not None and (refusal := _refuses_window(shapes, form.window, form)):
        return refusal
    if form.scale <= 0:
        return f"a scale of {form.scale:g}: cuDNN's result is NaN for one that is not above 0 (seen with 9.19)"
    # JAX's call of cuDNN is a `custom_vjp`, which has no forward mode.
    if form.role == "tangent":
        return "forward mode"
    if "bias" in form.present:
        return _refuses_bias(shapes, form)
    return _refuses_backward(form) if form.has_backward else None


def _refuses_backward(form: Settings) -> str | None:
    """Of a call that keeps something for a backward, or of that backward."""
    if form.saves == "probabilities":
        return "the probabilities are kept for the backward, and cuDNN never writes them"
    if form.keeps_rounded_off:
        return "the rounding error of the result is kept for the backward, and cuDNN neither writes nor reads it"
    if form.deterministic and form.role != "call":
        return (
            "the same bits in every run are required: cuDNN's backward adds to the gradient of the query with atomics"
        )
    if form.role == "cotangent" and form.wanted == ("value",):
        return "the gradient of the value alone, for which the statistics suffice: cuDNN computes all three"
    return None


def _refuses_window(shapes: Mapping[str, Any], window: tuple[int, int], form: Settings) -> str | None:
    if window[1]:
        return f"a local window of {window[1]} keys after the row: cuDNN takes windows of a causal mask alone"
    for slot in ("bias", "mask"):
        if slot in form.present:
            return f"a local window and a {slot}"
    t, s = lengths(shapes, form.layout)
    return None if t == s else f"a local window of {t} queries over {s} keys: needed as many"


def _refuses_mask(shapes: Mapping[str, Any], device: Device, form: Settings) -> str | None:
    if "mask" not in form.present:
        return None
    of_keys, (t, s) = is_of_keys(shapes["mask"].shape), lengths(shapes, form.layout)
    # JAX's check_is_flash_attention: a bias in training takes even lengths.
    if not of_keys and (t % 2 or s % 2):
        return f"a mask of {t} x {s} scores: cuDNN takes a bias with statistics for even lengths alone"
    if form.mask_value > LEAST_SEEN:
        return f"a mask value of {form.mask_value}, which leaves masked keys a weight"
    refusal = cuda.refuses_call(shapes, device, form)
    fault = "may have a hole" if of_keys else "may leave a query no key"
    return f"the mask {fault}, for which it needs the implementation 'cuda': {refusal}" if refusal else None


def is_of_keys(shape: tuple[int, ...]) -> bool:
    """Whether a mask is one row of keys for all heads and queries of a batch entry."""
    return shape[-2] == 1 and shape[-3] == 1


def _refuses_bias(shapes: Mapping[str, Any], form: Settings) -> str | None:
    if "mask" in form.present:
        return "a bias and a mask"
    if form.has_backward:
        return "a bias with a backward: cuDNN keeps one statistic per row, too little for a row the bias masks"
    bias, query = shapes["bias"], shapes["query"]
    if np.dtype(bias.dtype) != np.dtype(query.dtype):
        return f"a bias of dtype {np.dtype(bias.dtype).name}: it would be rounded to {np.dtype(query.dtype).name}"
    t, s = lengths(shapes, form.layout)
    if tuple(bias.shape[-2:]) != (t, s):
        return f"a bias of shape {tuple(bias.shape)}: cuDNN takes one with all {t} x {s} scores of a head"
    if len(bias.shape) > 4 and math.prod(bias.shape[:-3]) not in (1, math.prod(query.shape[:-3])):
        return f"a bias of shape {tuple(bias.shape)}, which broadcasts over some batch axes only"
    return None


def forward(given: Mapping[str, Array], form: Settings) -> list[Array]:
    """[out], and its statistics if asked for."""
    query = given["query"]

    def by_cudnn(lengths: tuple[Array, Array] | None, hidden: Array | None) -> list[Array]:
        qkv = [_flat_batch(given[n]) for n in _QKV]
        bias = given.get("bias")
        whole = hidden if bias is None else bias.reshape(-1, *bias.shape[-3:])
        out, logsumexp = cudnn_call.forward(qkv, whole, lengths, form)
        out = out.reshape(query.shape)
        if not form.residuals:
            return [out]
        logsumexp = logsumexp.reshape(*query.shape[:-3], *logsumexp.shape[1:])
        return [out, logsumexp] if form.saves == "logsumexp" else [out, logsumexp, jnp.zeros_like(logsumexp)]

    return _by_mask(given, form, by_cudnn, lambda: cuda.forward(given, form))


def cotangent(
    saved: Mapping[str, Array], ct: Array, wanted: tuple[str, ...], shardings: Mapping[str, Any], form: Settings
) -> list[Array]:
    """The gradients wanted, of all three that cuDNN computes."""
    statistics = saved["logsumexp"] if "logsumexp" in saved else saved["row_max"] + saved["log_sum"]

    def by_cudnn(lengths: tuple[Array, Array] | None, hidden: Array | None) -> list[Array]:
        *qkv, out, d_out = map(_flat_batch, (*(saved[n] for n in (*_QKV, "out")), ct))
        kept = statistics.reshape(-1, *statistics.shape[-2:])
        grads = cudnn_call.backward(qkv, hidden, lengths, form, kept, out, d_out)
        known: dict[str, Array] = dict(zip(_QKV, grads, strict=True))
        if lengths is not None:
            known |= {n: _cut(known[n], lengths[1], form) for n in ("key", "value")}
        return [known[n].reshape(saved[n].shape) for n in wanted]

    return _by_mask(saved, form, by_cudnn, lambda: cuda.cotangent(saved, ct, wanted, shardings, form))


def _by_mask(
    given: Mapping[str, Array],
    form: Settings,
    by_cudnn: Callable[[tuple[Array, Array] | None, Array | None], list[Array]],
    by_cuda: Callable[[], list[Array]],
) -> list[Array]:
    """By cuDNN where there is no mask, where it is lengths of which none is 0, and where it leaves every query a key."""
    mask, query = given.get("mask"), given["query"]
    if mask is None:
        return by_cudnn(None, None)
    q = AttentionSizes.of(query.shape, form.layout)
    if not is_of_keys(mask.shape):
        hidden = _as_bias(mask, q, query.dtype)
        return lax.cond(_all_see(mask, q.length, form.is_causal), lambda: by_cudnn(None, hidden), by_cuda)
    lengths, is_prefix = probe.lengths_on_cuda(mask[..., 0, 0, :])
    of_keys = jnp.broadcast_to(lengths, q.batch).reshape(-1)
    of_queries = jnp.full_like(of_keys, q.length)
    return lax.cond(jnp.all(is_prefix & (lengths > 0)), lambda: by_cudnn((of_queries, of_keys), None), by_cuda)


def _cut(grad: Array, of_keys: Array, form: Settings) -> Array:
    """A gradient of keys or values with zeros beyond the lengths, where cuDNN may write nothing: XLA fills the results with zeros before
    the call, but not in its CUDA graphs (openxla/xla#46500), nor did versions until June 2026 (openxla/xla#44867). No other value was seen
    there on an H200 with cuDNN 9.19.
    """
    position = lax.broadcasted_iota(np.int32, grad.shape, form.layout.index("T"))
    return jnp.where(position < of_keys.reshape(-1, 1, 1, 1), grad, jnp.zeros((), grad.dtype))


def _all_see(mask: Array, queries: int, is_causal: bool) -> Array:
    """Whether every query sees a key."""
    if is_causal:
        rows, columns = (lax.broadcasted_iota(np.int32, (queries, mask.shape[-1]), axis) for axis in (0, 1))
        mask = mask & (rows >= columns)
    return jnp.all(jnp.any(mask, axis=-1))


def _as_bias(mask: Array, q: AttentionSizes, dtype: Any) -> Array:
    """(1 or B) x (1 or N) x T x S: 0 where a key is seen, else 0.7 of the least number of the dtype, as jax.nn.dot_product_attention
    takes it; less would be infinite once a score is added."""
    *batch, heads, _queries, keys = mask.shape
    if math.prod(batch) != 1:
        batch = list(q.batch)
    shown = jnp.broadcast_to(mask, (*batch, heads, q.length, keys)).reshape(-1, heads, q.length, keys)
    return jnp.where(shown, jnp.zeros((), dtype), jnp.asarray(0.7 * float(jnp.finfo(dtype).min), dtype))


def _flat_batch(a: Array) -> Array:
    """*B ... -> B ...; without a batch, B is 1."""
    return a.reshape(math.prod(a.shape[:-3]), *a.shape[-3:])
