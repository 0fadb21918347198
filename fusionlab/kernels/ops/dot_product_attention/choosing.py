"""Which implementation a call of `dot_product_attention` takes: what was measured for it, or a rule.

The rule for CUDA devices is what was measured on an H200 with jax 0.11.2 (forward and backward, bfloat16, 64 features) by
`python -m benchmarks attention` (benchmarks/results/h200). XLA's code of scores and softmax in bfloat16, cuDNN and kernels of our own take
0.118, 0.083 and 0.078 ms at batch 32, 12 heads, 128 x 128 scores, and 4.94, 1.35 and 2.91 ms at batch 32, 16 heads, 1024 x 1024. With a
mask of all scores (batch 8) XLA's code takes 1.5, cuDNN, which is given a bias, 0.55, our kernels 2.5 ms; in float32 XLA's code takes 2.2
and our kernels 3.7. So from 128 x 128 scores a head on cuDNN where it takes the call, and where it does not our kernels, if no mask, bias
or factors are read and the dtype has 16 bits; below that nothing was measured. What cuDNN gives away for that in precision
(`cudnn.PRECISION`) is said with the choice: nothing before the call tells how far its softmax saturates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ....device import Device
from ...choose.choices import case_text
from ...op.arrays import is_explicitly_sharded
from ...op.implementation import ChoiceKind, ImplementationChoice
from .cudnn import backend as cudnn
from .layouts import AttentionSizes, lengths
from .own import backend as cuda
from .settings import ROUNDED_OFF

MEASURED = ("sm_90",)
SIZES = ("batch", "heads", "queries", "keys")
FEW_ON_CUDA = 128 * 128  # scores a head
FEW_MASKED_ON_CUDA = 1024 * 1024  # of those with a mask of all scores, as cuDNN's bias: fewer were not measured
# Per head. Below, the composite fits in a CPU's cache, and keeping the probabilities is cheaper than computing them again.
FEW_ON_CPU = 512 * 512


def refuses_blockwise(shapes: Mapping[str, Any], device: Device, **attrs: Any) -> str | None:
    """Why the blockwise form cannot run, or None."""
    if any(is_explicitly_sharded(a) for a in shapes.values()):
        return "operands sharded over explicit mesh axes cannot be looped over in blocks"
    return None


# In the order in which the rule tries them.
FUSED = {"cudnn": cudnn.refuses, "cuda": cuda.refuses}


def saves(shapes: Mapping[str, Any], attrs: Mapping[str, Any], name: str) -> str:
    """What the forward of an implementation keeps for the backward: probabilities cost memory, computing them again costs time."""
    if name == "xla":
        return "probabilities"
    far = "bias" in shapes or ("mask" in shapes and attrs["mask_value"] != -math.inf)  # a whole row may be far from 0
    reads_rounded_off = name == "cuda" and np.dtype(shapes["query"].dtype).itemsize == 2
    return ("max_and_log_sum" if far else "logsumexp") + (ROUNDED_OFF if reads_rounded_off else "")


def keeps(role: str, attrs: Mapping[str, Any]) -> bool:
    """Whether probabilities are written or read, which neither cuDNN nor our kernels do."""
    return attrs["saves"] == "probabilities" and (role != "call" or attrs.get("residuals", False))


def rule(role: str, shapes: Mapping[str, Any], device: Device, attrs: Mapping[str, Any]) -> ImplementationChoice:
    """What runs where nothing that can run was measured."""
    if device.platform == "cpu":
        return _on_cpu(role, shapes, device, attrs)
    if keeps(role, attrs):
        return ImplementationChoice("xla", ChoiceKind.SAME_CODE, "the probabilities are what is kept")
    # JAX's call of cuDNN is a `custom_vjp`, which has no forward mode, and our kernels have none.
    if role == "tangent":
        return ImplementationChoice("xla", ChoiceKind.DEVICE, "forward mode has no implementation of its own")
    if device.platform != "cuda" or not device.arch:
        why = "there is no kernel for this device, or its architecture is not known here"
        return ImplementationChoice("xla", ChoiceKind.DEVICE, why)
    return _on_gpu(role, shapes, device, attrs)


def _on_gpu(role: str, shapes: Mapping[str, Any], device: Device, attrs: Mapping[str, Any]) -> ImplementationChoice:
    t, s = lengths(shapes, attrs["layout"])
    size = f"{t} x {s} scores a head"
    forward = role == "call"
    refused = {name: refuses(shapes, device, role=role, **attrs) for name, refuses in FUSED.items()}
    # Where nothing can run it, the refusals say more than its size.
    if forward and t * s < FEW_ON_CUDA and not all(refused.values()):
        why = f"fewer than 128 x 128 scores a head ({size}) were not measured"
        return ImplementationChoice("xla", ChoiceKind.UNMEASURED, why)
    refusals, kinds = [], set()
    for name, refusal in refused.items():
        kind, slow = _not_faster(name, shapes, device, attrs) if forward and not refusal else (ChoiceKind.CHOSEN, "")
        if not refusal and not slow:
            less = [cudnn.PRECISION] if name == "cudnn" else []
            why = "; ".join([f"{size}: never written to memory", *refusals, *less])
            return ImplementationChoice(name, ChoiceKind.CHOSEN, why)
        if not refusal:
            kinds.add(kind)
        refusals.append(f"not {name}: {refusal or slow}")
    text = "; ".join(refusals)
    if not forward and not refuses_blockwise(shapes, device):
        return ImplementationChoice("xla_blockwise", ChoiceKind.CHOSEN, f"the statistics are what is kept; {text}")
    kind = ChoiceKind.SLOWER if kinds == {ChoiceKind.SLOWER} else ChoiceKind.UNMEASURED
    return ImplementationChoice("xla", kind if kinds else ChoiceKind.DEVICE, text)


def _not_faster(
    name: str, shapes: Mapping[str, Any], device: Device, attrs: Mapping[str, Any]
) -> tuple[ChoiceKind, str]:
    """Why an implementation that could run is not taken: it was measured slower than XLA's code on that architecture, or it was not
    measured there. (CHOSEN, "") where it is taken.
    """
    if name == "cudnn" and "mask" in attrs["present"] and not cudnn.is_of_keys(shapes["mask"].shape):
        t, s = lengths(shapes, attrs["layout"])
        few = "a mask of fewer than 1024 x 1024 scores as its bias was not measured (implementation='cudnn' takes it)"
        return (ChoiceKind.UNMEASURED, few) if t * s < FEW_MASKED_ON_CUDA else (ChoiceKind.CHOSEN, "")
    read = [slot for slot in ("bias", "mask", "factors", "dropout_key") if slot in attrs["present"]]
    # cuDNN's fused attention takes no operands wider than 16 bits: those are left to our kernels, or to XLA.
    wide = np.dtype(shapes["query"].dtype).itemsize > 2
    if name != "cuda" or not (wide or read):
        return ChoiceKind.CHOSEN, ""
    subject = np.dtype(shapes["query"].dtype).name if wide else f"a {read[0].replace('_', ' ')}"
    takes = "(implementation='cuda' takes it)"
    if device.arch in MEASURED and (wide or "mask" in read):
        slow = subject if wide else "a mask"
        return ChoiceKind.SLOWER, f"with {slow} it was measured slower than XLA's code {takes}"
    return ChoiceKind.UNMEASURED, f"with {subject} it was not measured on {device.arch} {takes}"


def _on_cpu(role: str, shapes: Mapping[str, Any], device: Device, attrs: Mapping[str, Any]) -> ImplementationChoice:
    t, s = lengths(shapes, attrs["layout"])
    size = " x ".join(str(n) for n in (t, s) if n)
    few = t * s < FEW_ON_CPU
    deciding = role == "call" and attrs["implementation"] is None
    if attrs["saves"] == "probabilities" or (deciding and few) or refuses_blockwise(shapes, device):
        why = refuses_blockwise(shapes, device) or f"{size} scores a head are few enough to be kept"
        return ImplementationChoice("xla", ChoiceKind.SAME_CODE, why)
    why = f"{size} scores a head: measured faster on a CPU, and the score matrix never exists"
    return ImplementationChoice("xla_blockwise", ChoiceKind.CHOSEN, why)


def case(role: str, shapes: Mapping[str, Any], attrs: Mapping[str, Any]) -> str:
    """The call as text: all that its speed hangs on."""
    query, key = shapes["query"], shapes["key"]
    q, k = (AttentionSizes.of(a.shape, attrs["layout"]) for a in (query, key))
    # A backward need not read the value: its cotangent has as many features.
    value = shapes.get("value", shapes.get("ct", key))
    content: dict[str, Any] = {
        "dtype": np.dtype(query.dtype).name,
        "features": [q.features, value.shape[-1]],
        "layout": attrs["layout"],
        "causal": attrs["is_causal"],
        "softcap": attrs["softcap"] is not None,
        "precision": str(attrs["precision"]),
        "batch": math.prod(q.batch),
        "heads": q.heads,
        "queries": q.length,
        "keys": k.length,
    }
    if attrs.get("window") is not None:
        content["window"] = list(attrs["window"])
    if k.heads != q.heads:
        content["key heads"] = k.heads
    for slot in ("bias", "mask", "factors"):
        if slot in attrs["present"]:
            whole = slot in shapes and shapes[slot].shape[-2] > 1  # else one row of it for all
            content[slot] = "scores" if whole else "keys"
    if "sink" in attrs["present"]:
        content["sink"] = True
    if "dropout_key" in attrs["present"]:
        shared = attrs["dropout_shape"][-3] != q.heads or math.prod(attrs["dropout_shape"][:-3]) != math.prod(q.batch)
        content["factors"] = "shared key" if shared else "key"
    if role == "call":
        # Forward alone writes no statistics.
        content["residuals"] = bool(attrs.get("residuals"))
    else:
        # cuDNN's backward adds to the gradient of the query by atomics: it does not give the same bits every time.
        if attrs["deterministic"]:
            content["deterministic"] = True
        content["wanted"] = [slot for slot, moves in zip(attrs["present"], attrs["live"], strict=True) if moves]
    return case_text("dot_product_attention", role, **content)
