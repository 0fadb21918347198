"""The instructions of a compiled program without names: whether two programs are the same code."""

from __future__ import annotations

import re

_NAME = re.compile(r"%([\w.\-]+)")
_METADATA = re.compile(r', metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}')
_PARAMETER = re.compile(r"[\w.\-]+: ")


def instructions(hlo: str) -> str:
    """Optimised HLO text without source locations, and with names in order of appearance: equal for the same code.

    XLA numbers instructions over a whole compilation, so the same code has different names if it was written differently.
    """
    body = hlo[hlo.find("\n%") if "\n%" in hlo else hlo.find("\nENTRY") :]
    names: dict[str, str] = {}
    lines = []
    for line in _METADATA.sub("", body).splitlines():
        if line.endswith("{") and not line.startswith(" "):  # a computation; its parameters are named in it again
            line = _PARAMETER.sub("", line)
        lines.append(_NAME.sub(lambda m: names.setdefault(m.group(1), f"%{len(names)}"), line))
    return "\n".join(lines)
