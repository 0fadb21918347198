"""What XLA fused, mapped back: how much of what the compiled modules of the zoo launch is known by node and by source line.

    python -m benchmarks xla_mapping [--all] [--models TEXT] [-o FILE]

Each program is compiled for this process's default device with every equation tagged by its node's number. A kernel is *told* where its
own metadata names a node of the program, *inferred* where nothing in it says anything (XLA's own fills and copies) and the nodes are those
next to it. Beside it, for the same module without the numbers in it: how many kernels the primitive, line and scope alone bring to at least
one of their nodes, and to none that is wrong. Without --all every third program in f32 is taken, forward and as a train step.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .recall import zoo

SHARE = 0.95  # of the fusions that have to be known by node and by line
_STEP = 3


@dataclass(frozen=True)
class Outcome:
    """One program: kernels by kind, of them those with a node, with a line, and with a node only by inference; `by_metadata` of the
    fusions and library calls whose nodes are told: those that are found without numbers (`near`), and found exactly (`exact`)."""

    program: str
    kernels: dict[str, int]
    with_node: dict[str, int]
    with_line: dict[str, int]
    inferred: dict[str, int]
    by_metadata: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


def outcome(program: Any) -> Outcome:
    """Compiles one program of the zoo and maps it."""
    import fusionlab as fl
    from fusionlab.graph.xla.modules import compiled_text, read_hlo
    from fusionlab.graph.xla.tagging import tagged_jaxpr

    fn, args = program.make()
    graph = fl.trace(fn, *args)
    started = time.perf_counter()
    text = compiled_text(tagged_jaxpr(graph), graph)
    view = read_hlo(text, graph)
    seconds = time.perf_counter() - started
    kernels = [k for k in view.kernels if k.kind != "loop control"]
    without = {k.name: k for k in read_hlo(re.sub(r"/?fusionlab\.n\d+", "", text), graph).kernels}
    told = [k for k in kernels if k.kind in ("fusion", "library") and k.nodes and not k.inferred]
    near = [k for k in told if not without[k.name].inferred and set(without[k.name].nodes) & set(k.nodes)]
    return Outcome(
        program.id,
        *(
            dict(Counter(k.kind for k in kernels if wanted(k)))
            for wanted in (
                lambda k: True,
                lambda k: bool(k.nodes),
                lambda k: bool(k.nodes and k.sources),
                lambda k: k.inferred,
            )
        ),
        {"of": len(told), "near": len(near), "exact": sum(without[k.name].nodes == k.nodes for k in near)},
        seconds,
    )


def sample(everything: bool = False, models: str = "", step: int = _STEP) -> list[Any]:
    """The programs that are asked for: all, or every third of those in f32."""
    programs = [p for p in zoo().programs() if models in p.model.id]
    if everything:
        return programs
    plain = [p for p in programs if p.dtype == "f32"]
    return [p for v in ("forward", "train") for p in [q for q in plain if q.variant == v][:: 1 if models else step]]


def total(found: Iterable[Outcome]) -> dict[str, dict[str, int]]:
    """Each count over all programs: what is counted -> kind -> how many."""
    found = list(found)
    keys = ("kernels", "with_node", "with_line", "inferred", "by_metadata")
    return {key: dict(sum((Counter(getattr(o, key)) for o in found), Counter())) for key in keys}


def share(counts: dict[str, dict[str, int]], kind: str = "fusion") -> float:
    """Of the kernels of a kind, those that are known by at least one node and one line."""
    of = counts["kernels"].get(kind, 0)
    return counts["with_line"].get(kind, 0) / of if of else 1.0


def text(counts: dict[str, dict[str, int]]) -> str:
    """The table for a reader."""
    lines = [f"{'kind':14} {'kernels':>8} {'node':>8} {'and line':>9} {'':>8} {'inferred':>9}"]
    for kind, n in counts["kernels"].items():
        node, line, inferred = (counts[key].get(kind, 0) for key in ("with_node", "with_line", "inferred"))
        lines.append(f"{kind:14} {n:8} {node:8} {line:9} {100 * line / n:6.1f} % {inferred:9}")
    known = counts["by_metadata"]
    if of := known.get("of"):
        near, exact = known.get("near", 0), known.get("exact", 0)
        lines.append(
            f"without numbers, of {of} fusions and library calls: {100 * near / of:.1f} % by a node of theirs, "
            f"{100 * exact / of:.1f} % by exactly theirs"
        )
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Prints the table; 1 if fewer fusions than asked for are known by node and line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks xla_mapping", description="What XLA fused, mapped back."
    )
    parser.add_argument("--all", action="store_true", help="every program of the zoo, bf16 too")
    parser.add_argument("--models", default="", help="only models whose id holds this text, all of them")
    parser.add_argument("-o", "--output", type=Path, help="where the JSON record goes; none without it")
    options = parser.parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from tqdm.auto import tqdm

    found = [outcome(p) for p in tqdm(sample(options.all, options.models), disable=None)]
    counts = total(found)
    print(f"{len(found)} programs, {sum(o.seconds for o in found):.0f} s to compile and map")
    print(text(counts))
    for o in found:
        if share({key: getattr(o, key) for key in counts}) < SHARE:
            print(f"below {SHARE:.0%}: {o.program}: {o.kernels}, with node and line {o.with_line}")
    if options.output:
        _save(options.output, found, counts, options.all)
    return int(share(counts) < SHARE)


def _save(output: Path, found: list[Outcome], counts: dict[str, dict[str, int]], everything: bool) -> None:
    from fusionlab.evidence.instruments.record import environment, save_json

    record = {
        "benchmark": "xla_mapping",
        "environment": environment().to_dict(),
        "all": everything,
        "share": share(counts),
        "total": counts,
        "programs": [asdict(o) | {"seconds": round(o.seconds, 2)} for o in found],
    }
    save_json(output, record)
    print(f"record: {output}")
