"""The CUDA kernels behind a fused op: source text, and the registers on record. Reads files of this package; needs no GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from fusionlab.kernels import CARDS
from fusionlab.kernels.launch.compile import KERNELS, source_texts

from ..markup import code, folded, quiet, table

# Of the ops with kernels of this package's own.
_CARDS = {card.op.name: card for card in CARDS if card.sources}
RECORDED_ARCH = "sm_90"  # the one whose every variant is on record
_ROWS = 12
ELSEWHERE = (
    "Spilled bytes and static shared memory are not recorded here: `python -m benchmarks kernel_resources` compiles every kernel and "
    "prints them with its registers. The tests allow no spills, except a few bytes in the tiles of attention and of the gated product."
)


@dataclass(frozen=True)
class KernelSource:
    """The CUDA code of an op.

    Attributes:
      path: of the .cu file, relative to `fusionlab/kernels`.
      entries: the kernels it defines.
      archs: the architectures it is written for.
      texts: file name -> text, the source first, then what it includes of this package's own.
    """

    path: str
    entries: tuple[str, ...]
    archs: tuple[str, ...]
    texts: Mapping[str, str]


@cache
def kernel_source(op: str) -> KernelSource | None:
    """The CUDA code of an op; None where it has none of this package's own."""
    if op not in _CARDS:
        return None
    source = _CARDS[op].sources[0]
    texts = {path.name: text for path, text in source_texts(source.file).items()}
    return KernelSource(source.path, source.entries, source.archs, texts)


@cache
def _record() -> dict[str, Any]:
    return json.loads((KERNELS.parent / "choose" / "limits.json").read_text(encoding="utf-8"))


def registers(op: str, dtype: str, attrs: Mapping[str, Any], arch: str = "") -> tuple[str, dict[str, dict[str, int]]]:
    """(architecture, variant -> kernel -> registers of a thread) of the variants on record nearest to a call.

    Args:
      op: a fused op.
      dtype: of its operands ("bfloat16").
      attrs: the op's attributes; of these, the activation distinguishes variants.
      arch: "sm_90"; one that is not on record gives `RECORDED_ARCH`.
    """
    recorded = _record()["registers"]
    arch = arch if arch in recorded else RECORDED_ARCH
    if op not in _CARDS:
        return arch, {}
    start = _CARDS[op].variant.format(dtype=dtype, activation=attrs.get("activation", ""))
    found = {k: v for k, v in recorded[arch].items() if k.startswith((f"{start} ", f"{start}:"))}
    return arch, found


def kernels_html(op: str, dtype: str = "", attrs: Mapping[str, Any] | None = None, arch: str = "") -> str:
    """The kernels of an op: registers of the variants of this dtype, and the source to unfold; or a note that there are no kernels."""
    source = kernel_source(op)
    if source is None:
        return quiet(f"FusionLab has no CUDA kernel of its own for {op}.")
    at, found = registers(op, dtype, attrs or {}, arch)
    rows = [[name, entry, n] for name, by_entry in found.items() for entry, n in by_entry.items()]
    lines = [f"{source.path}: {', '.join(source.entries)}, for {source.archs[0]} to {source.archs[-1]}"]
    if rows:
        more = f", the first {_ROWS} of {len(rows)}" if len(rows) > _ROWS else ""
        lines.append(f"Registers per thread on {at}, as compiled by NVRTC {_record()['nvrtc']}{more}:")
    elif dtype:
        lines.append(f"No variant for {dtype} is recorded for {at}.")
    shown = table(["variant", "kernel", "registers"], rows[:_ROWS], (2,))
    files = "".join(folded(f"CUDA source: {name}", code(body)) for name, body in source.texts.items())
    return "".join(map(quiet, lines)) + shown + quiet(ELSEWHERE) + files
