"""Rows of identical layers as one call: the results of one are what the next reads."""

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
    """A layer that is a site of its own, and how it becomes a call."""

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
    """The layers in rows, each as long as can be: one alone is a row of one."""
    after = {one.reads.id: one for one in found}
    continued = {one.gives.id for one in found if (n := after.get(one.gives.id)) is not None and _joins(one, n)}
    for one in found:
        if one.reads.id in continued:
            continue
        row = [one]
        while row[-1].gives.id in continued:
            row.append(after[row[-1].gives.id])
        yield from _convex(row)


def _joins(one: Found, two: Found) -> bool:
    """Whether two layers are alike, see the same keys, and nothing but the second reads what the first gives."""
    block = one.region.block
    inside = two.candidate.node_ids  # what is in its support something else reads too
    alone = one.gives.id not in block.returned and all(n.id in inside for n in block.users.get(one.gives.id, ()))
    if not alone or _kind(one) != _kind(two) or one.planned.gives != two.planned.takes:
        return False
    mine, theirs = one.region.leaves, two.region.leaves
    return all(computed_alike(block, mine[n], theirs[n]) for n in mine if _is_shared(n) and n != "x")


def _is_shared(name: str) -> bool:
    return name in ("x", "step") or name.startswith(("mask:", "table:"))


def _kind(one: Found) -> Any:
    """What a layer is, whatever its weights: its equations and all, since masks and steps are made by the first layer's for the row."""
    return tuple(sorted(one.planned.attrs.items(), key=str)), tuple(one.planned.makers), region_signature(one.region)


def _convex(row: list[Found]) -> Iterator[list[Found]]:
    """The row, or its layers one by one where a later one reads what is made of an earlier one's keys."""
    if len(row) > 1:
        region = joined(row)
        if waits_for_itself(region.block, region.inputs, region.roots) is not None:
            yield from ([one] for one in row)
            return
    yield row


def joined(row: Sequence[Found]) -> Region:
    """The regions of a row as one."""
    nodes: dict[int, Node] = {n.id: n for one in row for n in one.region.nodes}
    support = {n.id: n for one in row for n in one.region.support if n.id not in nodes}
    first, last = row[0].region, row[-1].region
    others = tuple(v for one in row for v in one.region.others)
    inner, beside = (tuple(kept[i] for i in sorted(kept)) for kept in (nodes, support))
    return Region(first.block, last.root, _leaves_of(row), inner, beside, first.known, others)


def _leaves_of(row: Sequence[Found]) -> dict[str, Value]:
    """The leaves of a row: what its layers share as the first has it, and each layer's own with its number."""
    leaves = {n: v for n, v in row[0].region.leaves.items() if _is_shared(n)}
    for i, one in enumerate(row):
        leaves |= {f"{n}.{i}": v for n, v in one.region.leaves.items() if not _is_shared(n)}
    return leaves


def plan_of_row(row: Sequence[Found], region: Region, implementation: str | None) -> Substitution:
    """The one call of a row, each of whose layers was certified by itself."""
    where = {v.id: i for i, v in enumerate(region.inputs)}
    attrs = {**row[0].planned.attrs, "layers": len(row)}
    makers: dict[str, Maker] = {}
    results: list[Maker] = [_of_results(row[-1].planned.results[0], len(row) - 1)]
    for i, one in enumerate(row):
        numbers = [where.get(v.id) for v in one.region.inputs]
        for name, make in one.planned.makers.items():
            if "." in name:
                makers[f"{name.partition('.')[0]}.{i}"] = _of_inputs(make, numbers)
            elif i == 0:
                makers[name] = _of_inputs(make, numbers)
        results += [_of_results(result, i) for result in one.planned.results[1:]]
    return plan_by(attrs, makers, results, implementation)


def _of_inputs(make: Maker, numbers: Sequence[int | None]) -> Maker:
    """A layer's operand, of the row's inputs: what one layer gives the next is no input, and no operand but the first's x reads it."""
    return lambda inputs: make([None if n is None else inputs[n] for n in numbers])


def _of_results(result: Maker, layer: int) -> Maker:
    """A layer's root, of the row's results: (y, keys and values of each layer)."""
    return lambda outs: result((outs[0], *outs[1 + 2 * layer : 3 + 2 * layer]))
