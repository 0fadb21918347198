"""What every search decides, written down, so that a change of the code shows what it changes.

    python -m benchmarks decisions -o before.json [--modules]
    python -m benchmarks decisions -o after.json --against before.json [--codes-only]

Programs: the zoo (every model in each dtype, forward and as a train step) and the corpus of near misses in each of its forms. Each is
judged for a CPU and three cards. Of every site the record has its id, and of a candidate its formula, nodes, attributes, the
implementation that runs with kind and reason, and whether it is left to XLA; of a rejection its code, sentence, nodes, edit and how far it
got. `--modules` adds a digest of what XLA makes of each fused forward program of the zoo on this machine, without metadata.
`--against` lists what differs from an older record and exits with 1 where anything does; `--codes-only` compares neither sentences nor
reasons.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import recall

DEVICES = ("cpu", "sm_80", "sm_90", "sm_100")
_METADATA = re.compile(r', metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}')
# The tables of files, functions and stack frames that a module's text begins with.
_TABLES = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*", re.MULTILINE)
# Fields that are words for people.
_WORDS = "sentence", "edit", "why", "notes", "left"
_DIFFERENCES_SHOWN = 40


def programs() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Each program: its name, the function, its arguments."""
    for program in recall.zoo().programs():
        yield f"zoo/{program.id}", *program.make()
    if str(recall.ROOT) not in sys.path:
        sys.path.insert(0, str(recall.ROOT))
    from tests.soundness import near_misses

    for entry in near_misses.CORPUS:
        for form in entry.forms:
            yield f"near/{entry.pass_name}/{entry.name}/{form}", *near_misses.in_form(entry, form)


def decided(found: Any) -> dict[str, Any]:
    """Site -> what was decided there."""
    sites: dict[str, Any] = {}
    for c in found.candidates:
        sites[c.id] = {
            "formula": c.formula,
            "nodes": sorted(c.all_node_ids),
            "attrs": {k: str(v) for k, v in sorted(c.attrs.items())},
            "runs": c.backend and c.backend.name,
            "kind": c.choice.value,
            "why": c.backend and c.backend.reason,
            "left": c.idle,
            "notes": list(c.notes),
            "concepts": list(c.concepts),
        }
    for r in found.rejections:
        decision = r.to_dict()
        del decision["origin"]  # a line of our own code
        sites[r.id] = decision
    return sites


def module_digest(fn: Any, args: tuple[Any, ...]) -> str:
    """Of the optimised module of the fused function, without metadata."""
    import jax

    import fusionlab as fl

    text = jax.jit(fl.fuse(fn)).lower(*args).compile().as_text()
    return hashlib.sha256(_TABLES.sub("", _METADATA.sub("", text)).encode()).hexdigest()[:16]


def decisions(modules: bool, named: str) -> dict[str, Any]:
    """Program -> device -> site -> decision; with the digest of its module."""
    import fusionlab as fl

    record: dict[str, Any] = {}
    for name, fn, args in programs():
        if named not in name:
            continue
        graph = fl.trace(fn, *args)
        record[name] = {device: decided(fl.find(graph, device=device)) for device in DEVICES}
        if modules and name.startswith("zoo/") and name.endswith("-forward"):
            record[name]["module"] = module_digest(fn, args)
    return record


def without_words(decision: Any) -> Any:
    """A decision without its sentences."""
    return {k: v for k, v in decision.items() if k not in _WORDS} if isinstance(decision, dict) else decision


def differences(old: dict[str, Any], new: dict[str, Any], codes_only: bool) -> Iterator[str]:
    """One line for every field of a decision that differs."""
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name, {}), new.get(name, {})
        for place in sorted(before.keys() | after.keys()):
            was, now = before.get(place), after.get(place)
            if was == now:
                continue
            if not (isinstance(was, dict) and isinstance(now, dict)):
                yield f"{name} {place}: {was} -> {now}"
                continue
            for site in sorted(was.keys() | now.keys()):
                a, b = was.get(site), now.get(site)
                a, b = (without_words(a), without_words(b)) if codes_only else (a, b)
                if a == b:
                    continue
                if a is None or b is None:
                    yield f"{name} {place} {site}: {'appears' if a is None else 'is gone'}: {a or b}"
                    continue
                for field in sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k)):
                    yield f"{name} {place} {site} {field}:\n    {a.get(field)}\n    {b.get(field)}"


def main(argv: list[str]) -> int:
    """Writes the record; compares it with an older one. Returns 1 where they differ."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks decisions", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--against", type=Path, help="an older record to compare with")
    parser.add_argument("--codes-only", action="store_true", help="compare neither sentences nor reasons")
    parser.add_argument("--modules", action="store_true", help="also compile the fused forward programs of the zoo")
    parser.add_argument("--programs", default="", metavar="TEXT", help="only programs whose name has TEXT in it")
    args = parser.parse_args(argv)
    record = decisions(args.modules, args.programs)
    args.output.write_text(json.dumps(record, indent=1, sort_keys=True))
    sites = sum(len(s) for devices in record.values() for s in devices.values() if isinstance(s, dict))
    print(f"{len(record)} programs, {sites} decisions")
    if args.against is None:
        return 0
    lines = list(differences(json.loads(args.against.read_text()), json.loads(json.dumps(record)), args.codes_only))
    print(f"{len(lines)} differences from {args.against}")
    print("\n".join(lines[:_DIFFERENCES_SHOWN]))
    return 1 if lines else 0
