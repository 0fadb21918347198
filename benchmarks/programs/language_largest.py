"""The largest batch of a language model's step that fits, by the memory of its compiled program; `language_models --largest`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..measuring import attempt, peak_bytes
from .language_rows import BY_HAND, FUSED_GRAD
from .language_steps import GPT2, Llama, tokens_of

FIRST, MOST = 4, 4096  # texts tried
RUNS = 5  # of batches that by their compiled memory fit, each smaller than the one before by STEP
STEP = 0.03
PROGRAMS = (BY_HAND, FUSED_GRAD)


def largest(bytes_of: Callable[[int], int], limit: float, first: int = FIRST, most: int = MOST) -> int:
    """The largest n up to `most` with bytes_of(n) <= limit, which grows with n; 0 where none fits.

    It goes by a line through the last two sizes, since memory is nearly that: about four calls where bisection takes ten.
    """
    known: dict[int, int] = {}

    def fits(n: int) -> bool:
        known[n] = bytes_of(n)
        return known[n] <= limit

    low, high, n = 0, most + 1, min(first, most)
    while high - low > 1:
        low, high = (n, high) if fits(n) else (low, n)
        n = min(max(_guess(known, limit, n), low + 1), high - 1)
    return low


def _guess(known: Mapping[int, int], limit: float, last: int) -> int:
    """The size at which the line through the last two sizes reaches the limit; twice the last size of a single one."""
    if len(known) < 2:
        return 2 * last if known[last] <= limit else last // 2
    (a, b) = list(known)[-2:]
    slope = (known[b] - known[a]) / (b - a)
    return int(b + (limit - known[b]) / slope) if slope > 0 else 2 * last


def measure(
    case: Llama | GPT2, programs: Callable[..., Mapping[str, Callable[..., Any]]], limit: float
) -> dict[str, Any]:
    """By program the largest batch, its bytes and whether it ran; and the ratio of the fused one to the one by hand."""
    failures: dict[str, str] = {}
    found: dict[str, Any] = {"limit_bytes": limit}
    for name in PROGRAMS:
        one = attempt(failures, name, lambda name=name: _of_program(case, lambda c: programs(c)[name], limit))
        found[name] = one if one is not None else {"error": failures[name]}
    by_hand, fused = (found[name].get("batch") for name in PROGRAMS)
    return found | ({"ratio": fused / by_hand} if by_hand and fused else {})


def _of_program(case: Llama | GPT2, program: Callable[[Any], Callable[..., Any]], limit: float) -> dict[str, Any]:
    compiled: dict[int, Any] = {}
    failures: dict[str, str] = {}

    def bytes_of(batch: int) -> int:
        """A batch that does not compile does not fit."""
        made = attempt(failures, f"batch {batch}", lambda: _compiled(replace(case, batch=batch), program))
        if made is None:
            return int(2 * limit)
        compiled[batch] = made
        return peak_bytes(made)

    batch = largest(bytes_of, limit)
    for _ in range(RUNS):
        if batch < 1 or (batch not in compiled and bytes_of(batch) > limit):
            break
        if attempt(failures, f"running {batch}", lambda b=batch: _ran(replace(case, batch=b), compiled[b])):
            found = {"batch": batch, "peak_bytes": peak_bytes(compiled[batch]), "ran": True}
            return found | {"tried": sorted(compiled), "failures": failures}
        batch -= max(1, round(STEP * batch))
    return {"ran": False, "error": "; ".join(failures.values()), "tried": sorted(compiled), "failures": failures}


def _compiled(case: Llama | GPT2, program: Callable[[Any], Callable[..., Any]]) -> Any:
    """Without the choice of kernels by time, which is most of compiling and changes memory little."""
    import jax

    tokens = jax.ShapeDtypeStruct((case.batch, case.length + 1), "int32")
    lowered = jax.jit(program(case)).lower(jax.eval_shape(case.parameters), tokens)
    return lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})


def _ran(case: Llama | GPT2, program: Any) -> bool:
    import jax

    jax.block_until_ready(program(case.parameters(), tokens_of(case)))
    return True
