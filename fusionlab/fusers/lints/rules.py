"""All rules, in the order in which their lints are listed, the compiler's options, which are only tried, and a program with edits made."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from ...device import Device
from ...errors import ArgumentError, unknown_name
from ...graph.program.graph import Graph
from ...graph.program.trace import block_of_jaxpr
from .compiler_options import OPTIONS
from .lint import Editing, Lint, Program, Rule
from .recomputed_products import RecomputedProducts
from .stacked_scans import StackedScans

RULES: tuple[Editing, ...] = (StackedScans(), RecomputedProducts())


def lints_of(
    graph: Graph, device: Device, rules: Iterable[Rule] = RULES, fused: Callable[[], float] | None = None
) -> tuple[Lint, ...]:
    """The candidates for advice in a program, for a device; none at symbolic sizes, which have no cost. `fused`: see `Program`; rules that
    look at what fused ops do not hide take the time of the program as it is."""
    if graph.numbered is not None:
        return ()
    program, counted, found = Program(graph, device), {}, []
    before = replace(program, fused=fused)
    for lint in (lint for rule in rules for lint in rule.lints(before if rule.before_fusing else program)):
        counted[lint.id] = counted.get(lint.id, 0) + 1
        found.append(replace(lint, id=f"{lint.id}#{counted[lint.id]}"))
    return tuple(found)


def every_lint(graph: Graph, device: Device) -> tuple[Lint, ...]:
    """Those of `lints_of`, and the options of the compiler for this program."""
    return lints_of(graph, device, (*RULES, *OPTIONS))


def lints_of_fused(graph: Graph, before: Graph, fused: Callable[[Graph], Any], device: Device) -> tuple[Lint, ...]:
    """Those of `every_lint` for a program that was fused, with edits made where the program has what they are about.

    Args:
      graph: the fused program.
      before: as it was before.
      fused: makes the fused program of another such, a closed jaxpr.
    """
    first = [rule for rule in RULES if rule.before_fusing]
    found = lints_of(before, device, first, lambda: Program(graph, device).at_best)
    edited = [partial(_fused_after, before, lint, fused) for lint in found]
    others = lints_of(graph, device, (*(rule for rule in RULES if not rule.before_fusing), *OPTIONS))
    return (*(replace(lint, edited=edit) for lint, edit in zip(found, edited, strict=True)), *others)


def _fused_after(before: Graph, lint: Lint, fused: Callable[[Graph], Any]) -> Any:
    return fused(replace(before, top=block_of_jaxpr(lint.edited())))


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
