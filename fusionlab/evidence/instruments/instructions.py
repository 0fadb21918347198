"""The instructions of a compiled program without names: whether two programs are the same code, and how many of their kernels are.

XLA numbers instructions over a whole compilation and lists those that do not depend on each other in any order, so one program has many
texts. Here an instruction is what it computes: its text with each name replaced by the identity of what has that name, an operand or a
called computation (a Merkle hash over the graph). A program is the multiset of its instructions.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

_NAME = re.compile(r"%([\w.\-]+)")
_METADATA = re.compile(r', metadata=\{(?:[^{}"]++|"(?:[^"\\]++|\\.)*+")*+\}')
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_DEFINED = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"(?:^|\s)([a-z][\w\-]*)\(")
_NO_KERNELS = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"})


@dataclass
class Code:
    """What a compiled program runs: equal for the same code, whatever its names, origins and order of independent instructions.

    Attributes:
      instructions: of the entry computation: identity -> how many there are; an operand counts as what it is.
      kernels: the same without parameters, constants, tuples and views, and whatever their operands are.
    """

    instructions: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter, compare=False)

    def shared(self, other: Code) -> int:
        """How many kernels of this program the other one has as well."""
        return (self.kernels & other.kernels).total()


def code_of(hlo: str) -> Code:
    """The code of optimised HLO text; empty for text without an entry computation."""
    computations: dict[str, str] = {}
    for is_entry, name, lines in _computations(_METADATA.sub("", hlo)):
        made, kernels = _identities(lines, computations)
        if is_entry:
            return Code(made, kernels)
        computations[name] = _hash(*sorted(made.elements()))
    return Code()


def _computations(hlo: str) -> Iterator[tuple[bool, str, list[re.Match[str]]]]:
    """(whether it is the entry, name, its instructions) of each computation; one that is called comes before its caller."""
    name, is_entry, lines = "", False, []
    for line in hlo.splitlines():
        if head := _HEAD.match(line):
            name, is_entry, lines = head[2], bool(head[1]), []
        elif line.startswith("}") and name:
            yield is_entry, name, lines
            name = ""
        elif name and (made := _DEFINED.match(line)):
            lines.append(made)


def _identities(lines: list[re.Match[str]], computations: dict[str, str]) -> tuple[Counter[str], Counter[str]]:
    known, made, kernels = dict(computations), Counter[str](), Counter[str]()
    for line in lines:
        root, name, text = line.groups()
        known[name] = _hash(root or "", _NAME.sub(lambda m: known.get(m[1], "?"), text))
        made[known[name]] += 1
        opcode = _OPCODE.search(text)
        if opcode is None or opcode[1] not in _NO_KERNELS:
            kernels[_hash(_NAME.sub(lambda m: computations.get(m[1], "?"), text))] += 1
    return made, kernels


def _hash(*texts: str) -> str:
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=12).hexdigest()
