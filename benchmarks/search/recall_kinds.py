"""Recall told by kinds of sites, and why each site that was not accepted was not.

A miss is a site of the truth that no candidate is for. Which rejection speaks of it is not known, only how many there are: those that
name the concept come first, then those of the pass that is for it; where there are fewer than misses, the rest is silent.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

SILENT = "silent"
KINDS: Mapping[str, tuple[str, ...]] = {
    "attentions": ("attention",),
    "norms": ("layer_norm", "rms_norm"),
    "linear layers": ("linear",),
    "activations": ("relu", "gelu_tanh", "gelu_erf", "silu", "sigmoid", "tanh"),
    "gated pairs": ("glu_pair",),
    "whole layers": ("layer",),
}
KIND_OF = {concept: kind for kind, concepts in KINDS.items() for concept in concepts}
# The passes whose rejections may be about a site of a kind; those of whole layers all start with the same word.
PASSES: Mapping[str, str] = {
    "attentions": "dot_product_attention",
    "norms": "layer_norm",
    "linear layers": "gemm_epilogue",
    "activations": "gemm_epilogue",
    "gated pairs": "gemm_epilogue",
    "whole layers": "multi_",
}
Counts = Mapping[str, tuple[int, int, int]]


class Miss(NamedTuple):
    """So many sites of a kind that were not accepted, for one reason."""

    kind: str
    number: int
    reason: str


class Share(NamedTuple):
    """One kind over some programs: sites by the truths, how many were accepted, and the misses."""

    kind: str
    sites: int
    accepted: int

    @property
    def percent(self) -> str:
        return f"{100 * self.accepted / self.sites:.1f} %" if self.sites else "-"


def reason_of(rejection: Any) -> str:
    """A rejection's code and sentence, without the names, shapes and lines in which those of alike sites differ."""
    sentence = re.sub(r" \([^()\s]+:\d+\)", "", re.sub(r"%\w+(:\w+\[[\d,]*\])?", "x", rejection.sentence))
    return f"[{rejection.code}] {sentence}"


def misses(counts: Counts, rejections: Sequence[Any]) -> tuple[Miss, ...]:
    """Why sites were not accepted, from all that was declined; each rejection is the reason of one site."""
    lacking = {c: n - accepted for c, (n, _, accepted) in counts.items() if c in KIND_OF and accepted < n}
    told: dict[str, Counter[str]] = defaultdict(Counter)
    left = list(rejections)
    for by_name in (True, False):
        for concept in lacking:
            for rejection in [r for r in left if _speaks_of(r, concept, by_name)][: lacking[concept]]:
                told[KIND_OF[concept]][reason_of(rejection)] += 1
                lacking[concept] -= 1
                left.remove(rejection)
    for concept, number in lacking.items():
        told[KIND_OF[concept]][SILENT] += number
    return tuple(Miss(kind, n, why) for kind, reasons in told.items() for why, n in reasons.items() if n)


def _speaks_of(rejection: Any, concept: str, by_name: bool) -> bool:
    if by_name:
        return concept in rejection.concepts
    # A sum that the pass for products declines as no bias is no site of the truths.
    about = rejection.pass_name.startswith(PASSES[KIND_OF[concept]]) and rejection.code != "bias"
    return about and not rejection.concepts


def shares(counted: Iterable[Counts]) -> list[Share]:
    """Each kind over some programs, and all of them together at the end, without whole layers, whose sites are sites already."""
    sites: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for counts in counted:
        for concept, (n, _, a) in counts.items():
            if concept in KIND_OF:
                sites[KIND_OF[concept]] += n
                accepted[KIND_OF[concept]] += min(n, a)
    rows = [Share(kind, sites[kind], accepted[kind]) for kind in KINDS]
    pieces = [row for row in rows if row.kind != "whole layers"]
    return [*rows, Share("all but whole layers", sum(r.sites for r in pieces), sum(r.accepted for r in pieces))]


def text(columns: Mapping[str, list[Share]]) -> str:
    """The shares of several groups of programs, side by side."""
    lines = [f"{'accepted':22}" + "".join(f"{name:>22}" for name in columns)]
    for rows in zip(*columns.values(), strict=True):
        lines.append(f"{rows[0].kind:22}" + "".join(f"{f'{r.accepted}/{r.sites} {r.percent:>8}':>22}" for r in rows))
    return "\n".join(lines)


def by_reason(missed: Iterable[tuple[str, str, Iterable[Miss]]]) -> list[dict[str, Any]]:
    """The misses of many programs, those of one model, kind and reason as one entry: `missed` gives (model, variant, misses)."""
    entries: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for model, variant, several in missed:
        for miss in several:
            entries[miss.kind, model, miss.reason][variant] += miss.number
    order = {kind: i for i, kind in enumerate(KINDS)}
    return [
        {"kind": kind, "model": model, "sites": dict(entries[kind, model, why]), "reason": why}
        for kind, model, why in sorted(entries, key=lambda e: (order[e[0]], e[1], e[2]))
    ]
