"""The implementation of a call of `dot_product_attention`: the measured one, or a rule.

The rule for CUDA devices comes from measurements on an H200 with jax 0.11.2 (forward and backward, bfloat16, 64 features) by
`python -m benchmarks attention` (benchmarks/results/h200). XLA's code of scores and softmax in bfloat16, cuDNN and FusionLab's
kernels take 0.118, 0.083 and 0.078 ms at batch 32, 12 heads, 128 x 128 scores, and 4.94, 1.35 and 2.91 ms at batch 32, 16 heads,
1024 x 1024. With a mask of all scores (batch 8) XLA's code takes 1.5, cuDNN, which is given a bias, 0.55, our kernels 2.5 ms; in
float32 XLA's code takes 2.2 and our kernels 3.7. So from 128 x 128 scores per head on cuDNN where it takes the call, and where it
does not our kernels, if no mask, bias or factors are read and the dtype has 16 bits; below that nothing was measured. What cuDNN
gives away for that in precision (`cudnn.PRECISION`) is stated with the choice: nothing before the call shows how far its softmax
saturates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ....device import Device
from ...choose.choices import CHOICES, case_text
from ...op.arrays import refuses_shardings
from ...op.implementation import ChoiceKind, ImplementationChoice
from ...op.primitive import wanted_of
from ..passes import those
from .cudnn import backend as cudnn
from .layouts import AttentionSizes, lengths
from .own import backend as cuda
from .settings import ROUNDED_OFF

MEASURED = ("sm_90",)
SIZES = ("batch", "heads", "queries", "keys")
FEW_ON_CUDA = 128 * 128  # scores per head
FEW_MASKED_ON_CUDA = 1024 * 1024  # of those with a mask of all scores, as cuDNN's bias: fewer were not measured
# Per head. Below, the composite fits in a CPU's cache, and keeping the probabilities is cheaper than computing them again.
FEW_ON_CPU = 512 * 512


def refuses_blockwise(shapes: Mapping[str, Any], device: Device, **attrs: Any) -> str | None:
    """Why the blockwise form cannot run, or None."""
    return refuses_shardings(shapes, " cannot be looped over in blocks")


def saves(shapes: Mapping[str, Any], attrs: Mapping[str, Any], name: str) -> str:
    """The residuals that an implementation's forward keeps for the backward: probabilities cost memory, computing them again costs
    time."""
    if name == "xla":
        return "probabilities"
    far = "bias" in shapes or ("mask" in shapes and attrs["mask_value"] != -math.inf)  # a whole row may be far from 0
    reads_rounded_off = name == "cuda" and np.dtype(shapes["query"].dtype).itemsize == 2
    return ("max_and_log_sum" if far else "logsumexp") + (ROUNDED_OFF if reads_rounded_off else "")


def keeps(role: str, attrs: Mapping[str, Any]) -> bool:
    """Whether probabilities are written or read, which neither cuDNN nor our kernels do."""
    return attrs["saves"] == "probabilities" and (role != "call" or attrs.get("residuals", False))


def rule(role: str, shapes: Mapping[str, Any], device: Device, attrs: Mapping[str, Any]) -> ImplementationChoice:
    """The choice if no implementation that can run was measured."""
    if device.platform == "cpu":
        return _on_cpu(role, shapes, device, attrs)
    if keeps(role, attrs):
        return ImplementationChoice("xla", ChoiceKind.SAME_CODE, "the probabilities are kept")
    # JAX's call of cuDNN is a `custom_vjp`, which has no forward mode, and our kernels have none.
    if role == "tangent":
        return ImplementationChoice("xla", ChoiceKind.DEVICE, "forward mode has no implementation of its own")
    if device.platform != "cuda" or not device.arch:
        why = "there is no kernel for this device, or its architecture is not known here"
        return ImplementationChoice("xla", ChoiceKind.DEVICE, why)
    return _on_gpu(role, shapes, device, attrs)


def _on_gpu(role: str, shapes: Mapping[str, Any], device: Device, attrs: Mapping[str, Any]) -> ImplementationChoice:
    t, s = lengths(shapes, attrs["layout"])
    size = f"{t} x {s} scores per head"
    verdicts = {name: _verdict(name, role, shapes, device, attrs) for name in FUSED}
    kinds = frozenset(kind for kind, _ in verdicts.values()) - {None}
    # Where nothing can run it, the refusals say more than its size.
    if role == "call" and t * s < FEW_ON_CUDA and kinds:
        why = f"fewer than 128 x 128 scores per head ({size}) were not measured"
        return ImplementationChoice("xla", ChoiceKind.UNMEASURED, why)
    refusals: list[str] = []
    for name, (kind, why) in verdicts.items():
        if kind == ChoiceKind.CHOSEN:
            less = [cudnn.PRECISION] * (name == "cudnn")
            why = "; ".join([f"{size}: never written to memory", *refusals, *less])
            return ImplementationChoice(name, ChoiceKind.CHOSEN, why)
        refusals.append(f"not {name}: {why}")
    text = "; ".join(refusals)
    if role != "call" and not refuses_blockwise(shapes, device):
        return ImplementationChoice("xla_blockwise", ChoiceKind.CHOSEN, f"only the statistics are kept; {text}")
    all_alike = {frozenset(): ChoiceKind.DEVICE, frozenset({ChoiceKind.SLOWER}): ChoiceKind.SLOWER}
    return ImplementationChoice("xla", all_alike.get(kinds, ChoiceKind.UNMEASURED), text)


def _verdict(
    name: str, role: str, shapes: Mapping[str, Any], device: Device, attrs: Mapping[str, Any]
) -> tuple[ChoiceKind | None, str]:
    """(CHOSEN, "") where an implementation is taken; else the kind of reason and why not: None where it cannot run, or it was measured
    slower than XLA's code on that architecture, or it was not measured there."""
    refuses, not_faster = FUSED[name]
    if refusal := refuses(shapes, device, role=role, **attrs):
        return None, refusal
    return not_faster(shapes, device, attrs) if role == "call" else _TAKEN


def _of_cudnn(shapes: Mapping[str, Any], device: Device, attrs: Mapping[str, Any]) -> tuple[ChoiceKind, str]:
    t, s = lengths(shapes, attrs["layout"])
    if "mask" in attrs["present"] and not cudnn.is_of_keys(shapes["mask"].shape) and t * s < FEW_MASKED_ON_CUDA:
        few = "a mask of fewer than 1024 x 1024 scores as its bias was not measured (implementation='cudnn' takes it)"
        return ChoiceKind.UNMEASURED, few
    return _TAKEN


def _of_cuda(shapes: Mapping[str, Any], device: Device, attrs: Mapping[str, Any]) -> tuple[ChoiceKind, str]:
    read, dtype = those(attrs["present"], "bias", "mask", "factors", "dropout_key"), np.dtype(shapes["query"].dtype)
    # cuDNN's fused attention takes no operands wider than 16 bits: those are left to our kernels, or to XLA.
    wide = dtype.itemsize > 2
    if not (wide or read):
        return _TAKEN
    slower = CHOICES.measured_on(device, MEASURED) and (wide or "mask" in read)
    subject = dtype.name if wide else f"a {'mask' if slower else read[0].replace('_', ' ')}"
    takes = "(implementation='cuda' takes it)"
    if slower:
        return ChoiceKind.SLOWER, f"with {subject} it was measured slower than XLA's code {takes}"
    return ChoiceKind.UNMEASURED, f"with {subject} it was not measured on {device.arch} {takes}"


_TAKEN = ChoiceKind.CHOSEN, ""
# In the order in which the rule tries them: whether each can run a call, and whether it is then taken.
FUSED = {"cudnn": (cudnn.refuses, _of_cudnn), "cuda": (cuda.refuses, _of_cuda)}


def _on_cpu(role: str, shapes: Mapping[str, Any], device: Device, attrs: Mapping[str, Any]) -> ImplementationChoice:
    t, s = lengths(shapes, attrs["layout"])
    size = " x ".join(str(n) for n in (t, s) if n)
    few = t * s < FEW_ON_CPU
    deciding = role == "call" and attrs["implementation"] is None
    if attrs["saves"] == "probabilities" or (deciding and few) or refuses_blockwise(shapes, device):
        why = refuses_blockwise(shapes, device) or f"{size} scores per head are few enough to be kept"
        return ImplementationChoice("xla", ChoiceKind.SAME_CODE, why)
    why = f"{size} scores per head: measured faster on a CPU, and the score matrix never exists"
    return ImplementationChoice("xla_blockwise", ChoiceKind.CHOSEN, why)


def case(role: str, shapes: Mapping[str, Any], attrs: Mapping[str, Any]) -> str:
    """The call as text: all that its speed depends on."""
    query, key, drawn = shapes["query"], shapes["key"], attrs["dropout_shape"]
    q, k = AttentionSizes.of(query.shape, attrs["layout"]), AttentionSizes.of(key.shape, attrs["layout"])
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
    for slot in those(attrs["present"], "bias", "mask", "factors"):
        whole = slot in shapes and shapes[slot].shape[-2] > 1  # else one row of it for all
        content[slot] = "scores" if whole else "keys"
    if "dropout_key" in attrs["present"]:
        own = (math.prod(drawn[:-3]), drawn[-3]) == (math.prod(q.batch), q.heads)
        content["factors"] = "key" if own else "shared key"
    # Named only where they are there.
    rare: dict[str, Any] = {
        "window": attrs["window"],
        "key heads": k.heads if k.heads != q.heads else None,
        "sink": "sink" in attrs["present"],
    }
    if role == "call":
        # Forward alone writes no statistics.
        content["residuals"] = bool(attrs.get("residuals"))
    else:
        # cuDNN's backward adds to the gradient of the query by atomics: it does not give the same bits every time.
        rare["deterministic"] = attrs["deterministic"]
        content["wanted"] = wanted_of(attrs)
    content |= {name: value for name, value in rare.items() if value not in (None, False)}
    return case_text("dot_product_attention", role, **content)
