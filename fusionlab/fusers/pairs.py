"""Forward sites and their backward passes, in a program that is differentiated already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..graph.backward import Backward, Derivatives, Sums, find_backward
from ..graph.canonical import View
from ..graph.ir import Graph, Value
from ..graph.joined import joined_views
from ..graph.region import Region
from ..graph.scopes import in_backward
from ..graph.views import views

if TYPE_CHECKING:
    from .findings import Findings


@dataclass(frozen=True, eq=False)
class Pair:
    """A forward site and its backward pass.

    Attributes:
      site: id of the candidate or rejection.
      cotangent: the value that is the cotangent of the site's result.
      gradients: operand -> the value that is its gradient, or in whose sum it is a part.
      absent: float operands whose gradient is not computed from that cotangent here (data, mostly).
    """

    site: str
    cotangent: Value
    gradients: Mapping[str, Value]
    absent: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.site}: {self.text}"

    __repr__ = __str__

    @property
    def text(self) -> str:
        """What is known of it, without the site's name."""
        found = ", ".join(f"d{name} = {v!r}" for name, v in self.gradients.items())
        rest = f"; no gradient of {', '.join(self.absent)}" if self.absent else ""
        return f"its backward pass is here: from {self.cotangent!r}, {found}{rest}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, JSON-able: values by name."""
        return {
            "site": self.site,
            "cotangent": self.cotangent.name,
            "gradients": {name: v.name for name, v in self.gradients.items()},
            "absent": list(self.absent),
        }


def pairs_of(found: Findings) -> tuple[Pair, ...]:
    """Every site of `found` whose backward pass is in the program, in program order."""
    items = [(item, item.region) for item in (*found.candidates, *found.rejections) if item.region is not None]
    if not items or not any(map(in_backward, found.graph.nodes())):
        return ()
    search = _Search(found.graph, {region.block.path for _, region in items})
    ordered = sorted(items, key=lambda pair: pair[1].nodes[0].id)
    backs = ((item.id, search.backward(region)) for item, region in ordered)
    return tuple(Pair(name, b.cotangent, b.gradients, b.absent) for name, b in backs if b is not None)


class _Search:
    """Where the backward pass of a region may stand: in its own block, else in those that read what the block returns."""

    def __init__(self, graph: Graph, paths: set[str]) -> None:
        self.derivatives = Derivatives()
        self.places: dict[str, list[tuple[View, Sums]]] = {}
        for path, view in (*((v.block.path, v) for v, _ in views(graph)), *joined_views(graph)):
            if path in paths:
                self.places.setdefault(path, []).append((view, Sums(view)))

    def backward(self, region: Region) -> Backward | None:
        found = (find_backward(view, region, self.derivatives, sums) for view, sums in self.places[region.block.path])
        return max((b for b in found if b is not None), key=lambda b: len(b.gradients), default=None)


def told_together(alike: Sequence[Pair]) -> str:
    """One line for pairs of one pass and with the same gradients."""
    first, n = alike[0], len(alike)
    names = ", ".join("d" + name for name in first.gradients)
    which = first.site if n == 1 else f"{n} sites, {first.site} and more"
    rest = f"; no gradient of {', '.join(first.absent)}" if first.absent else ""
    return f"{which}: {names}{rest}"
