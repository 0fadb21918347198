"""What `fl.compare` takes for a language model's loss at training size, stage by stage, errors of all gradients included.

    python -m benchmarks comparing [--model gpt2|llama|gpt2-cpu] [--quick] [--one-piece] [-o FILE]

Models are those of `language_models`: GPT-2 of 124M parameters at B8 S1024, and a scanned Llama-like one at B4 S2048; `gpt2-cpu` is the
first at B1 S256. It measures this process, which should be a fresh one. `beyond the original` leaves the tracing and compiling of the
original out, which any first call pays. `--one-piece` computes the reference once more in one piece and compares the two.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.programs.language_steps import GPT2, PLAIN, Llama, tokens_of

MODELS: dict[str, Any] = {
    "gpt2": GPT2(),
    "llama": Llama("scan"),
    "gpt2-cpu": GPT2(batch=1, length=256),
}
QUICK: dict[str, Any] = {
    name: dataclasses.replace(model, layers=2, width=64, heads=4, vocabulary=512, batch=1, length=64)
    for name, model in MODELS.items()
}
QUICK["llama"] = dataclasses.replace(QUICK["llama"], groups=2, features=16, inner=128)


class Stopwatch:
    """A progress function that adds up the seconds of each stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._task, self._since = "", time.perf_counter()

    def __call__(self, task: str, done: int = 0, total: int = 0) -> None:
        if task == self._task:
            return
        now = time.perf_counter()
        if self._task:
            self.seconds[self._task] = self.seconds.get(self._task, 0.0) + now - self._since
            print(f"{self.seconds[self._task]:8.1f} s  {self._task}", file=sys.stderr, flush=True)
        self._task, self._since = task, now


def measured(model: Any) -> dict[str, Any]:
    """The stages of a comparison, its seconds, and its result in words."""
    import jax

    import fusionlab as fl

    loss, args = model.loss(PLAIN), (model.parameters(), tokens_of(model))
    jax.block_until_ready(args)
    watch, start = Stopwatch(), time.perf_counter()
    result = fl.compare(loss, fl.fuse(loss), *args, progress=watch)
    watch("done")
    total = time.perf_counter() - start
    originals = sum(s for task, s in watch.seconds.items() if " before, " in task or task == "tracing before")
    errors = result.numerics
    return {
        "parameters": sum(x.size for x in jax.tree.leaves(args[0])),
        "stages_s": watch.seconds,
        "total_s": total,
        "beyond_the_original_s": total - originals,
        "resident_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "device_peak_bytes": (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        "errors": None if errors is None else {"leaves": len(errors.leaves), "worst": errors.sentence},
        "result": str(result),
        "environment": result.environment.to_dict(),
    }


def one_piece(model: Any) -> float:
    """The largest difference between the reference in pieces and in one, relative to each leaf's largest value."""
    import jax
    import numpy as np

    from fusionlab.graph.interpret.pieces import in_pieces
    from fusionlab.graph.interpret.promote import promote

    loss, args = model.loss(PLAIN), (model.parameters(), tokens_of(model))
    one = promote(loss, *args)
    size = one.program.bytes / 16
    several = promote(loss, *args, cut=lambda jaxpr, consts: in_pieces(jaxpr, size, consts))
    whole, pieces = (jax.tree.leaves(each.values_and_gradients(1.0, *args)) for each in (one, several))
    return max(
        float(np.max(np.abs(w - p)) / np.max(np.abs(w), initial=1e-300)) for w, p in zip(whole, pieces, strict=True)
    )


def main(argv: list[str]) -> int:
    """Prints the seconds of each stage, and writes the record where one is asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks comparing", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--quick", action="store_true", help="a small model: a check that it runs")
    parser.add_argument(
        "--one-piece", action="store_true", help="compare the reference in pieces with that in one piece"
    )
    parser.add_argument("-o", "--output", type=Path, help="write the record as JSON")
    asked = parser.parse_args(argv)
    model = (QUICK if asked.quick else MODELS)[asked.model]
    record: dict[str, Any] = {
        "benchmark": "comparing",
        "command": f"python -m benchmarks comparing {' '.join(a for a in argv if a not in ('-o', str(asked.output)))}",
        "model": {"name": asked.model, **dataclasses.asdict(model)},
        "load": os.getloadavg()[0],
    }
    if asked.one_piece:
        record["difference_from_one_piece"] = one_piece(model)
        print(f"the reference in pieces differs from that in one piece by {record['difference_from_one_piece']:.1e}")
    record |= measured(model)
    print(record["result"])
    print(
        f"{asked.model}, {record['parameters'] / 1e6:.0f}M parameters: {record['total_s']:.1f} s, "
        f"{record['beyond_the_original_s']:.1f} s beyond the original; resident at most {record['resident_peak_bytes'] / 2**30:.1f} GiB"
    )
    if asked.output is not None:
        from fusionlab.evidence.instruments.record import save_json

        asked.output.parent.mkdir(parents=True, exist_ok=True)
        save_json(asked.output, record)
    return 0
