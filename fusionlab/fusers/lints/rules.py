"""All rules, in the order in which their lints are listed."""

from __future__ import annotations

from dataclasses import replace

from ...device import Device
from ...graph.program.graph import Graph
from .lint import Lint, Program, Rule
from .stacked_scans import StackedScans

RULES: tuple[Rule, ...] = (StackedScans(),)


def lints_of(graph: Graph, device: Device) -> tuple[Lint, ...]:
    """The candidates for advice in a program, for a device; none at symbolic sizes, which have no cost."""
    if graph.numbered is not None:
        return ()
    program, counted, found = Program(graph, device), {}, []
    for lint in (lint for rule in RULES for lint in rule.lints(program)):
        counted[lint.id] = counted.get(lint.id, 0) + 1
        found.append(replace(lint, id=f"{lint.id}#{counted[lint.id]}"))
    return tuple(found)
