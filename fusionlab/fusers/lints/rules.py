"""All rules, in the order in which their lints are listed, the compiler's options, which are only tried, and a program with edits made."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from ...device import Device
from ...errors import ArgumentError, unknown_name
from ...graph.program.graph import Graph
from ...graph.program.trace import block_of_jaxpr
from .compiler_options import OPTIONS
from .lint import Editing, Lint, Program, Rule
from .recomputed_products import RecomputedProducts
from .stacked_scans import StackedScans

RULES: tuple[Editing, ...] = (StackedScans(), RecomputedProducts())


def lints_of(graph: Graph, device: Device, rules: Iterable[Rule] = RULES) -> tuple[Lint, ...]:
    """The candidates for advice in a program, for a device; none at symbolic sizes, which have no cost."""
    if graph.numbered is not None:
        return ()
    program, counted, found = Program(graph, device), {}, []
    for lint in (lint for rule in rules for lint in rule.lints(program)):
        counted[lint.id] = counted.get(lint.id, 0) + 1
        found.append(replace(lint, id=f"{lint.id}#{counted[lint.id]}"))
    return tuple(found)


def every_lint(graph: Graph, device: Device) -> tuple[Lint, ...]:
    """Those of `lints_of`, and the options of the compiler for this program."""
    return lints_of(graph, device, (*RULES, *OPTIONS))


def rule_names(given: Iterable[str] | str) -> frozenset[str]:
    """The names of rules, of which `given` is one or several.

    Raises:
      ArgumentError: `given` is neither a name nor names.
      UnknownNameError: there is no such rule.
    """
    if not isinstance(given, Iterable):
        raise ArgumentError(f"edits: got {given!r}, needed the name of a rule, or several: {RULES[0].name!r}")
    names, known = frozenset((given,) if isinstance(given, str) else given), {rule.name for rule in RULES}
    for name in sorted(names - known, key=str):
        raise unknown_name("edit", name, known)
    return names


def with_edits(graph: Graph, device: Device, names: Collection[str]) -> Graph:
    """The program with every edit of the rules named made, however little it may save; itself without any, and at symbolic sizes."""
    for rule in RULES if names and graph.numbered is None else ():
        if rule.name in names and (closed := rule.edited(Program(graph, device))) is not None:
            graph = replace(graph, top=block_of_jaxpr(closed))
    return graph
