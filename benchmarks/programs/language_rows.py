"""What a row of `language_models` has beyond times: rates, the share of a card's peak, ratios to rivals, and its lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..measuring import ratio_to
from .language_expert import experts
from .language_steps import GPT2, Llama

GRAD_OF_FUSED, FUSED_GRAD = "grad of fused", "fused grad"
KEPT, EDITED = "fused grad, products kept", "fused grad, edits"
FUSED = (GRAD_OF_FUSED, FUSED_GRAD)
WITH_OPTIONS = ", options"  # at the end of a program's name: the same, compiled with `OPTIONS`
NO_GRAPHS = ", options, no graphs"  # and with `xla_gpu_enable_command_buffer=""`
_ENDS = ("", WITH_OPTIONS, NO_GRAPHS)
JUDGED = (GRAD_OF_FUSED, *(name + end for name in (FUSED_GRAD, KEPT, EDITED) for end in _ENDS))
# Of XLA's compiler, which `fl.advise` tries: https://github.com/openxla/xla, xla.proto.
OPTIONS = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_enable_dus_accumulator_zero_init_elimination": True,
}
TORCH, BY_HAND = "torch.compile", "by hand"
MOST_TIME, MOST_MEMORY = 1.02, 1.02  # of the fused gradient, relative to the gradient of the fused loss

# Part of a card's name -> FLOP/s of dense bfloat16 products, and where NVIDIA gives them. Data sheets that give the rate of sparse ones
# alone are halved.
PEAKS = {
    "H200": (989.5e12, "NVIDIA H200 data sheet: 1979 TFLOP/s with sparsity"),
    "H100 80GB HBM3": (989.5e12, "NVIDIA H100 data sheet, SXM: 1979 TFLOP/s with sparsity"),
    "H100 NVL": (835.5e12, "NVIDIA H100 data sheet, NVL: 1671 TFLOP/s with sparsity"),
    "H100 PCIe": (756.5e12, "NVIDIA H100 data sheet, PCIe: 1513 TFLOP/s with sparsity"),
    "A100": (312e12, "NVIDIA A100 data sheet"),
}


def peak_of(hardware: str) -> dict[str, Any] | None:
    """FLOP/s of dense bfloat16 products by the maker's data sheet, and its name; None for a card that is not in the table."""
    found = next((peak for part, peak in PEAKS.items() if part in hardware), None)
    return None if found is None else {"flop_per_s": found[0], "source": found[1]}


def model_flop(case: Llama | GPT2) -> float:
    """Operations of a step by the usual counting (PaLM, Chowdhery et al. 2022, appendix B): 6 for each token and weight of a product, and
    12 L H D T for each token in attention, the scores that a causal mask hides among them. What is made again is not counted."""
    return case.product_flop + case.attention_flop / 2


def complete(case: Llama | GPT2, found: dict[str, Any], rate: float, peak: Mapping[str, Any] | None) -> None:
    """Adds to a row: tokens a second, MFU, and the ratios of the fused programs to each other and to their rivals."""
    found |= {"product_flop": case.product_flop, "model_flop": model_flop(case), "floor_s": case.product_flop / rate}
    timed = {name: one for name, one in found.items() if isinstance(one, dict) and "median_s" in one}
    for one in timed.values():
        one["tokens_per_s"] = case.batch * case.length / one["median_s"]
        one["floor_share"] = found["floor_s"] / one["median_s"]
        if peak is not None:
            one["mfu"] = model_flop(case) / one["median_s"] / peak["flop_per_s"]
    by_experts = (BY_HAND, *experts(case.vocabulary))
    found["expert"] = _fastest(timed, by_experts)
    by_options = (name + end for name in by_experts for end in (WITH_OPTIONS, NO_GRAPHS))
    found["expert, with options"] = _fastest(timed, (*by_experts, *by_options))
    for name in timed.keys() & {*JUDGED}:
        expert = found["expert, with options" if WITH_OPTIONS in name else "expert"]
        for label, rival in ((TORCH, TORCH), (BY_HAND, BY_HAND), ("the expert", expert)):
            if rival in timed:
                timed[name][f"over {label}"] = ratio_to(rival, timed[rival]["samples_s"], timed[name]["samples_s"])
    if GRAD_OF_FUSED in timed and FUSED_GRAD in timed:
        timed[FUSED_GRAD]["against grad of fused"] = _against(timed[GRAD_OF_FUSED], timed[FUSED_GRAD])


def _fastest(timed: Mapping[str, Any], names: Iterable[str]) -> str | None:
    return min((name for name in names if name in timed), key=lambda name: timed[name]["median_s"], default=None)


def _against(inner: Mapping[str, Any], outer: Mapping[str, Any]) -> dict[str, Any]:
    """Time and peak memory of the fused gradient, relative to the gradient of the fused loss: more than 1 is worse."""
    taken = ratio_to(FUSED_GRAD, outer["samples_s"], inner["samples_s"])
    return {"time": taken["ratio"], "interval": taken["interval"], "peak": outer["peak_bytes"] / inner["peak_bytes"]}


def lines(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    """A row as text: each program, then what is asked of the fused ones."""
    if "floor_s" in found:
        yield f"{name}: floor of the products {found['floor_s'] * 1e3:.2f} ms"
    else:
        yield name
    yield from (_program(label, one) for label, one in found.items() if isinstance(one, dict) and "median_s" in one)
    yield from (f"  {label}: {why}" for label, why in found.get("failures", {}).items())
    for label in JUDGED:
        if label in found:
            yield from _judged(label, found[label])
    yield from compile_lines(found.get("compile", {}))
    yield from largest_lines(found.get("largest", {}))


def _program(label: str, one: Mapping[str, Any]) -> str:
    mfu = f", MFU {one['mfu']:.1%}" if "mfu" in one else ""
    peak = f", {one['peak_bytes'] / 2**30:.2f} GiB" if one.get("peak_bytes") else ""
    apart = f", difference {one['difference']:.1e}" if "difference" in one else ""
    first = f", first call {one['first_call_s']:.1f} s" if "first_call_s" in one else ""
    rates = f"{one['tokens_per_s']:.0f} tokens/s, {one['floor_share']:.1%} of the products' rate{mfu}"
    return f"  {label}: {one['median_s'] * 1e3:.3f} ms {_ratio(one)}, {rates}{peak}{apart}{first}"


def _ratio(one: Mapping[str, Any]) -> str:
    if "ratio" not in one:  # of torch, where no program of JAX's was timed
        return "alone"
    return f"{one['ratio']:.3f}x [{one['interval'][0]:.3f}, {one['interval'][1]:.3f}]"


def _judged(label: str, one: Mapping[str, Any]) -> Iterator[str]:
    for rival in (TORCH, BY_HAND, "the expert"):
        if (over := one.get(f"over {rival}")) is not None:
            yield f"  {label} over {rival} ({over['ratio_to']}): {_ratio(over)}"
    if (against := one.get("against grad of fused")) is not None:
        low, high = against["interval"]
        ok = high <= MOST_TIME and against["peak"] <= MOST_MEMORY
        bar = f"{'within' if ok else 'beyond'} {MOST_TIME} of the time and {MOST_MEMORY} of the peak"
        yield (
            f"  {label} / grad of fused: time {against['time']:.3f} [{low:.3f}, {high:.3f}], peak {against['peak']:.3f}: {bar}"
        )


def compile_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Of `--compile`."""
    for label, one in found.items():
        if "total_s" in one:
            ratio = f", {one['over_jit']:.2f} x jit's" if "over_jit" in one else ""
            yield f"  compiling {label}: {one['total_s']:.1f} s (to StableHLO {one['lower_s']:.1f}){ratio}"
        else:
            yield f"  compiling {label}: {one['error']}"


def largest_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Of `--largest`."""
    for label, one in found.items():
        if isinstance(one, dict):
            size = (
                f"{one['batch']}, {one['peak_bytes'] / 2**30:.2f} GiB"
                if one.get("ran")
                else f"none ran: {one['error']}"
            )
            yield f"  largest batch of {label}: {size}"
    if "ratio" in found:
        yield f"  largest batch, fused over by hand: {found['ratio']:.2f}"
