"""Mutants of every new spelling: each declined, or equal to its original in values and gradients, judged in float64.

    python -m benchmarks mutants [--each N] [--only TEXT] [-o FILE]

From every spelling that the passes' tests list (tests/soundness/spelled.py) N mutants are made (tests/soundness/mutants.py), with a seed
of its own. Each is searched; where a site is found the whole mutant is judged against its fused form as random programs are
(tests/soundness/judge.py), which knows nothing of the certifier's verdict. Those that do not trace are left out, and others made.
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def judged(name: str, fn: Any, args: tuple[Any, ...], each: int, tools: Any) -> tuple[Counter[str], list[str]]:
    """How many mutants of one spelling came to which verdict, and what is said of the wrong ones."""
    import jax
    from jax.extend import core as jex_core

    mutants, spelled, judge = tools
    seed = zlib.crc32(name.encode())
    program = spelled.program_of(name, fn, args, seed)
    flat = mutants.flat(jax.make_jaxpr(program.fn)(*program.avals))
    verdicts, wrong = Counter[str](), list[str]()
    for what, closed in mutants.mutants(flat, random.Random(seed)):
        if verdicts.total() - verdicts["does not trace"] == each or verdicts["does not trace"] > 20 * each:
            break
        one = spelled.renamed(program, jex_core.jaxpr_as_fun(closed), f"{name}: {what}")
        if not spelled.traces(one):
            verdicts["does not trace"] += 1
            continue
        found = judge.judge(one, passes=spelled.passes_of(name))
        verdicts["declined" if found.verdict == "no site" else found.verdict] += 1
        wrong += [f"{one.text}: {found.reason}"] if found.verdict == "wrong" else []
    return verdicts, wrong


def main(argv: list[str]) -> int:
    """Prints a line for each spelling with a wrong mutant and the sums; returns 1 where one was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks mutants", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--each", type=int, default=20, help="mutants of every spelling, 20")
    parser.add_argument("--only", default="", help="only spellings with this text in their name")
    parser.add_argument(
        "--part", default="1/1", help="which part of how many, as 2/8: every eighth spelling from the second on"
    )
    parser.add_argument("-o", "--output", type=Path, help="where the JSON record is written")
    options = parser.parse_args(argv)
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

    import jax
    from tqdm.auto import tqdm

    from fusionlab.evidence.instruments.record import environment, save_json

    jax.config.update("jax_platforms", "cpu")
    tools = tuple(importlib.import_module(f"soundness.{n}") for n in ("mutants", "spelled", "judge"))
    part, parts = map(int, options.part.split("/"))
    every = [one for one in tools[1].spelled() if options.only in one[0]][part - 1 :: parts]
    record: dict[str, Any] = {"benchmark": "mutants", "environment": environment().to_dict(), "each": options.each}
    sums, each, wrong = Counter[str](), dict[str, Any](), list[str]()
    for name, fn, args in tqdm(every, disable=None):
        verdicts, told = judged(name, fn, args, options.each, tools)
        each[name], sums, wrong = dict(verdicts), sums + verdicts, wrong + told
        print(*told, sep="\n", end="\n" if told else "", flush=True)
    print(f"{len(every)} spellings: " + ", ".join(f"{n} {what}" for what, n in sorted(sums.items())))
    if options.output:
        save_json(options.output, record | {"sums": dict(sums), "spellings": each, "wrong": wrong})
    return int(bool(wrong))
