"""Recall on the zoo: what each model holds by its configuration, against what a search recognises and accepts.

    python -m benchmarks recall [--zoo own|extra] [--variant forward|train] [--dtype f32|bf16] [--models TEXT] [-o FILE]

The truths stand in tests/zoo/truths.py, which imports nothing of fusionlab. A site is *recognised* if the search names it, fused or
declined with a reason (a train step's backward pass reads inner values, so most of its forward sites are declined there); it is *accepted*
if it is a candidate. What is accepted beyond the truth is wrong. Concepts that a truth calls contested are left out for that model.

The extra zoo (tests/zoo_extra) is of libraries that `pip install 'fusionlab[zoo-extra]'` brings; what is missing is left out and said. Of
every model that is made of parts, whole transformer layers are searched too, by the passes that are asked by name, forward alone.

The last rows are structures: told, and never rewritten. `glu_pair` and `qkv_siblings` are made of accepted sites, so that a train step has
few of them; where a configuration does not tell how many there are, the model is left out.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import recall_kinds as kinds

# What sites are parts of, and what no pass fuses: told, never rewritten. The truths count the optimizer's blends apart.
STRUCTURES = ("softmax", "lerp", "glu_pair", "qkv_siblings", "row_parallel", "layer")
LAYER_PASSES = ("multi_transformer_encoder", "multi_transformer_encoder_fuse_qkv")
ROOT = Path(__file__).parents[2]


@functools.cache
def concepts() -> tuple[str, ...]:
    """What sites are called, op by op."""
    from fusionlab.kernels import CARDS

    named = (name for card in CARDS for name in (*card.concepts, *card.kinds))
    return tuple(name for name in named if name not in STRUCTURES)


@dataclass(frozen=True)
class Outcome:
    """One program: per concept (truth, recognised, accepted), the reasons of what was declined, and the search's seconds."""

    program: str
    counts: dict[str, tuple[int, int, int]]
    reasons: tuple[str, ...]
    seconds: float
    misses: tuple[kinds.Miss, ...] = ()

    @property
    def missed(self) -> dict[str, int]:
        """Concept -> sites that were not recognised."""
        return {c: n - r for c, (n, r, _) in self.counts.items() if r < n}

    @property
    def wrong(self) -> dict[str, int]:
        """Concept -> sites that were accepted and are none."""
        return {c: a - n for c, (n, _, a) in self.counts.items() if a > n}


@dataclass(frozen=True)
class Row:
    """One concept over all programs."""

    concept: str
    sites: int
    recognised: int
    accepted: int
    wrong: int


def zoo(name: str = "own") -> Any:
    """The catalogue of a zoo; it lives with the tests, and needs four devices for its shard_map models."""
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    if str(ROOT / "tests") not in sys.path:
        sys.path.insert(0, str(ROOT / "tests"))
    return importlib.import_module("zoo_extra.catalogue" if name == "extra" else "zoo.catalogue")


def outcome(program: Any) -> Outcome:
    """Searches one program of the zoo."""
    import fusionlab as fl

    fn, args = program.make()
    started = time.perf_counter()
    found = fl.find(fn, *args)
    seconds = time.perf_counter() - started
    has_layers = program.variant == "forward" and "layer" in program.truth.structures
    return counted(program, found, seconds, fl.find(fn, *args, passes=LAYER_PASSES) if has_layers else None)


def counted(program: Any, found: Any, seconds: float = 0.0, layers: Any = None) -> Outcome:
    """The findings of a program of the zoo against its truth; `layers`: those of the passes for whole layers."""
    again = recomputed(found.graph)
    candidates = [c for c in found.candidates if not c.node_ids <= again]
    rejections = [r for r in found.rejections if not r.site_ids <= again]
    recognised = Counter(c for x in (*candidates, *rejections) for c in x.concepts)
    accepted = Counter(c for x in candidates for c in x.concepts)
    truth = program.truth
    known = [c for c in concepts() if c in truth.sites and c not in truth.contested]
    counts = {c: (truth.sites[c], recognised[c], accepted[c]) for c in known}
    told = Counter(s.kind for s in found.structures if not s.node_ids <= again)
    told["lerp"] += accepted["lerp"]  # those that are fused are no structures
    # That of an attention which is not accepted may be told as one.
    missing = max(0, truth.sites["attention"] - accepted["attention"])
    told["softmax"] -= min(missing, max(0, told["softmax"] - truth.sites["softmax"]))
    there = {
        "softmax": truth.sites["softmax"],
        "lerp": truth.sites["lerp"] + truth.sites["lerp_moments"],
    } | truth.structures
    counts |= {c: (there[c], told[c], told[c]) for c in STRUCTURES if c in there and c not in truth.contested}
    counts.pop("layer", None)
    if layers is not None:
        fused = len(layers.candidates)
        counts["layer"] = (there["layer"], fused + len(layers.rejections), fused)
        rejections = [*rejections, *layers.rejections]
    why = kinds.misses(counts, rejections)
    return Outcome(program.id, counts, tuple(map(str, found.rejections)), seconds, why)


def recomputed(graph: Any) -> frozenset[int]:
    """The nodes of the backward pass of a remat: the forward pass again, whose sites the truths do not count twice."""
    found: set[int] = set()
    stack = [(graph.top, False)]
    while stack:
        block, inside = stack.pop()
        for node in block.nodes:
            again = inside or bool(node.params.get("differentiated"))
            found.update({node.id} if inside else ())
            stack.extend((child, again) for child in node.blocks)
    return frozenset(found)


def outcomes(variants: Iterable[str], dtypes: Iterable[str], models: str = "", name: str = "own") -> Iterator[Outcome]:
    """The outcome of every program of a zoo that is asked for, in order."""
    variants, dtypes = set(variants), set(dtypes)
    for program in zoo(name).programs():
        if program.variant in variants and program.dtype in dtypes and models in program.model.id:
            yield outcome(program)


def table(found: Iterable[Outcome]) -> list[Row]:
    """Per concept: sites by the truths, and how many of them were recognised and accepted."""
    rows = []
    found = list(found)
    for concept in (*concepts(), *STRUCTURES):
        counts = [o.counts[concept] for o in found if concept in o.counts]
        rows.append(
            Row(
                concept,
                sum(n for n, _, _ in counts),
                sum(min(n, r) for n, r, _ in counts),
                sum(min(n, a) for n, _, a in counts),
                sum(max(0, a - n) for n, _, a in counts),
            )
        )
    return rows


def text(rows: Iterable[Row]) -> str:
    """The table for a reader."""
    lines = [f"{'concept':20} {'sites':>6} {'recognised':>11} {'':>7} {'accepted':>9} {'wrong':>6}"]
    for row in rows:
        share = f"{100 * row.recognised / row.sites:.1f} %" if row.sites else "-"
        lines.append(f"{row.concept:20} {row.sites:6} {row.recognised:11} {share:>7} {row.accepted:9} {row.wrong:6}")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Prints the table and what was missed; 1 if anything was accepted that is no site."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks recall", description="Recall on the zoo.")
    parser.add_argument("--zoo", choices=("own", "extra"), default="own", help="default: own")
    parser.add_argument("--variant", choices=("forward", "train"), action="append", help="default: both")
    parser.add_argument("--dtype", choices=("f32", "bf16"), action="append", help="default: both")
    parser.add_argument("--models", default="", help="only models whose id holds this text")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="say why the sites of a missing concept were declined"
    )
    parser.add_argument("-o", "--output", type=Path, help="where the JSON record goes; none without it")
    options = parser.parse_args(argv)
    variants, dtypes = options.variant or ("forward", "train"), options.dtype or ("f32", "bf16")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    catalogue = zoo(options.zoo)
    from tqdm.auto import tqdm

    total = len(catalogue.MODELS) * len(variants) * len(dtypes)
    found = list(
        tqdm(
            outcomes(variants, dtypes, options.models, options.zoo),
            total=None if options.models else total,
            disable=None,
        )
    )
    for o in found:
        if o.missed or o.wrong:
            print(f"{o.program}: missed {o.missed or '-'}, wrong {o.wrong or '-'}")
            if options.verbose:
                print(*(f"    {reason}" for reason in o.reasons), sep="\n")
    rows = {v: table(o for o in found if o.program.endswith(v)) for v in variants}
    for variant in variants:
        print(f"\n{variant}, {', '.join(dtypes)}: {sum(o.program.endswith(variant) for o in found)} programs")
        print(text(rows[variant]))
    groups = {f"{dtype} {variant}": (dtype, variant) for variant in variants for dtype in dtypes}
    shares = {
        name: kinds.shares(o.counts for o in found if o.program.endswith("-".join(group)))
        for name, group in groups.items()
    }
    print("\n" + kinds.text(shares))
    missed = kinds.by_reason((*_parts(o.program), o.misses) for o in found)
    for miss in missed:
        where = ", ".join(f"{n} {variant}" for variant, n in miss["sites"].items())
        print(f"missed {miss['kind']} of {miss['model']} ({where}): {miss['reason']}")
    for model, why in catalogue.LEFT_OUT.items():
        print(f"left out: {model}: {why}")
    if options.output:
        told = {"shares": {name: [row._asdict() for row in group] for name, group in shares.items()}, "misses": missed}
        told |= {"libraries": dict(getattr(catalogue, "PINS", {})), "left_out": dict(catalogue.LEFT_OUT)}
        _save(options.output, options.zoo, found, rows, variants, dtypes, told)
    return int(any(o.wrong for o in found))


def _parts(program: str) -> tuple[str, str]:
    """A program's model, and its dtype and variant: `keras/bert-f32-train`."""
    model, dtype, variant = program.rsplit("-", 2)
    return model, f"{dtype} {variant}"


def _save(output: Path, name: str, found: list[Outcome], rows: dict, variants: Any, dtypes: Any, told: dict) -> None:
    from fusionlab.evidence.instruments.record import environment, save_json

    record = {
        "benchmark": "recall",
        "zoo": name,
        "environment": environment().to_dict(),
        "variants": list(variants),
        "dtypes": list(dtypes),
        "programs": len(found),
        "table": {variant: [asdict(row) for row in rows[variant]] for variant in variants},
        "missed": {o.program: o.missed for o in found if o.missed},
        "wrong": {o.program: o.wrong for o in found if o.wrong},
        "search_seconds": round(sum(o.seconds for o in found), 1),
        "slowest": {o.program: round(o.seconds, 2) for o in sorted(found, key=lambda o: -o.seconds)[:5]},
    } | told
    save_json(output, record)
    print(f"record: {output}")
