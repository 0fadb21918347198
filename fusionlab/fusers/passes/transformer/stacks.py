"""Rows of identical layers as one call: each layer reads the result of the one before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ....graph.matching.region import Region, region_signature
from ....graph.program.identical import computed_alike
from ....graph.program.ir import Node, Value
from ....graph.program.order import waits_for_itself
from ...engine.base import Substitution
from ...engine.outcomes import Candidate
from .plan import Maker, Planned, plan_by


@dataclass(frozen=True)
class Found:
    """A layer that is a site, and its translation into a call."""

    candidate: Candidate
    planned: Planned

    @property
    def region(self) -> Region:
        return self.planned.site.region

    @property
    def reads(self) -> Value:
        return self.region.leaves["x"]

    @property
    def gives(self) -> Value:
        return self.region.root


def rows(found: Sequence[Found]) -> Iterator[list[Found]]:
    """The layers in rows of maximal length; a single layer is a row of one."""
    after = {layer.reads.id: layer for layer in found}
    continued = {layer.gives.id for layer in found if (n := after.get(layer.gives.id)) is not None and _joins(layer, n)}
    for layer in found:
        if layer.reads.id in continued:
            continue
        row = [layer]
        while row[-1].gives.id in continued:
            row.append(after[row[-1].gives.id])
        yield from _convex(row)


def _joins(first: Found, second: Found) -> bool:
    """Whether two layers are equal, see the same keys, and the second is the only reader of the first one's result."""
    block = first.region.block
    inside = second.candidate.node_ids  # what is in its support something else reads too
    alone = first.gives.id not in block.returned and all(n.id in inside for n in block.users.get(first.gives.id, ()))
    if not alone or _kind(first) != _kind(second) or first.planned.gives != second.planned.takes:
        return False
    mine, theirs = first.region.leaves, second.region.leaves
    return all(computed_alike(block, mine[n], theirs[n]) for n in mine if _is_shared(n) and n != "x")


def _is_shared(name: str) -> bool:
    return name in ("x", "step") or name.startswith(("mask:", "table:"))


def _kind(layer: Found) -> Any:
    """A key for a layer regardless of its weights: all its equations, because a row uses the first layer's masks and steps."""
    return (
        tuple(sorted(layer.planned.attrs.items(), key=str)),
        tuple(layer.planned.makers),
        region_signature(layer.region),
    )


def _convex(row: list[Found]) -> Iterator[list[Found]]:
    """The row, or its layers one by one if a later one reads a value computed from an earlier one's keys."""
    if len(row) > 1:
        region = region_of_row(row)
        if waits_for_itself(region.block, region.inputs, region.roots) is not None:
            yield from ([layer] for layer in row)
            return
    yield row


def region_of_row(row: Sequence[Found]) -> Region:
    """The regions of a row as one."""
    nodes: dict[int, Node] = {n.id: n for layer in row for n in layer.region.nodes}
    support = {n.id: n for layer in row for n in layer.region.support if n.id not in nodes}
    first, last = row[0].region, row[-1].region
    others = tuple(v for layer in row for v in layer.region.others)
    inner, beside = (tuple(kept[i] for i in sorted(kept)) for kept in (nodes, support))
    return Region(first.block, last.root, _leaves_of(row), inner, beside, first.known, others)


def _leaves_of(row: Sequence[Found]) -> dict[str, Value]:
    """The leaves of a row: shared ones of the first layer, and each layer's own with its number."""
    leaves = {n: v for n, v in row[0].region.leaves.items() if _is_shared(n)}
    for i, layer in enumerate(row):
        leaves |= {f"{n}.{i}": v for n, v in layer.region.leaves.items() if not _is_shared(n)}
    return leaves


def plan_of_row(row: Sequence[Found], region: Region, implementation: str | None) -> Substitution:
    """The one call of a row of individually certified layers."""
    where = {v.id: i for i, v in enumerate(region.inputs)}
    attrs = {**row[0].planned.attrs, "layers": len(row)}
    makers: dict[str, Maker] = {}
    results: list[Maker] = [_of_results(row[-1].planned.results[0], len(row) - 1)]
    for i, layer in enumerate(row):
        numbers = [where.get(v.id) for v in layer.region.inputs]
        for name, make in layer.planned.makers.items():
            if "." in name:
                makers[f"{name.partition('.')[0]}.{i}"] = _of_inputs(make, numbers)
            elif i == 0:
                makers[name] = _of_inputs(make, numbers)
        results += [_of_results(result, i) for result in layer.planned.results[1:]]
    return plan_by(attrs, makers, results, implementation)


def _of_inputs(make: Maker, numbers: Sequence[int | None]) -> Maker:
    """A layer's operand from the row's inputs: a result passed between layers is not an input, and only x reads it."""
    return lambda inputs: make([None if n is None else inputs[n] for n in numbers])


def _of_results(result: Maker, layer: int) -> Maker:
    """A layer's root from the row's results: (y, keys and values of each layer)."""
    return lambda outs: result((outs[0], *outs[1 + 2 * layer : 3 + 2 * layer]))
