"""Every distinct sentence that declines a site over the zoo, with how often it is said and by how many models.

    python -m tests.recall.sentences [--dtype f32|bf16] [--models TEXT] [--bare]

A sentence is shown once, without the names of values and lines in which alike sites differ, and one of them as it was said. `--bare` shows
only those that name no node of the program, or none with its line.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from zoo.catalogue import Program, programs

import fusionlab as fl
from fusionlab.fusers.engine.grouping import nameless
from fusionlab.fusers.engine.outcomes import Rejection

# A node as a sentence names it, "%7:f32[8,4] = add (model.py:41)", or an operand with what reads it.
NODE = re.compile(r"%\d+\S* = [\w-]+ \([^()]+:\d+\)")
# What speaks of the matcher instead of the program.
OF_THE_MATCHER = ("where the pattern has", "nearest example", "two uses of one value", "relu_tie", "than the pattern's")


def said(program: Program) -> Iterator[Rejection]:
    """The rejections of one program."""
    function, args = program.make()
    yield from fl.find(function, *args).rejections


def alike(rejection: Rejection) -> tuple[str, str, str]:
    """The sentence with its code and edit, as one that is alike reads too: without values, lines, shapes and numbers of them."""
    bare = re.sub(r":\w+\[[\d,]*\]", "", nameless(rejection.sentence))
    return rejection.code, bare, rejection.edit or ""


def is_bare(rejection: Rejection) -> bool:
    """Whether a sentence says nothing of the program: names no node with its line, or speaks of the matcher."""
    return NODE.search(rejection.sentence) is None or any(w in rejection.sentence for w in OF_THE_MATCHER)


def told(asked: Iterable[Program], only_bare: bool = False) -> list[str]:
    """Each sentence once: how often, in how many models, an example of it, and its edit."""
    counts: Counter[tuple[str, str, str]] = Counter()
    models: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    example: dict[tuple[str, str, str], tuple[str, Rejection]] = {}
    for program in asked:
        for rejection in said(program):
            if only_bare and not is_bare(rejection):
                continue
            key = alike(rejection)
            counts[key] += 1
            models[key].add(program.model.id)
            example.setdefault(key, (program.id, rejection))
    lines = [f"{len(counts)} sentences, {counts.total()} rejections"]
    for key, n in sorted(counts.items(), key=lambda item: (example[item[0]][1].pass_name, item[0][0], -item[1])):
        where, first = example[key]
        mark = " (BARE)" if is_bare(first) else ""
        lines.append(f"{n} x in {len(models[key])} models, {first.pass_name} [{first.code}]{mark}: {first.sentence}")
        lines += [f"    edit: {first.edit}"] if first.edit else []
        lines.append(f"    first: {where} {first.id}")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("f32", "bf16"))
    parser.add_argument("--models", default="", help="only models whose id holds this")
    parser.add_argument("--bare", action="store_true", help="only sentences that say nothing of the program")
    args = parser.parse_args(argv)
    asked = (p for p in programs() if args.dtype in (None, p.dtype) and args.models in p.model.id)
    print("\n".join(told(asked, args.bare)))


if __name__ == "__main__":
    main()
