"""Neighbours that are told together: work of one line as one box, equal parts as one stack."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fusionlab.graph.program.ir import all_nodes, type_text

from .groups import Group, products_in
from .items import Item


def boxed(children: Iterable[Group | Item]) -> list[Group | Item]:
    """Work of one line as one box, each product in one of its own."""
    out: list[Group | Item] = []
    for child in children:
        last = out[-1] if out else None
        if isinstance(child, Item) and isinstance(last, Item) and _joins(last, child):
            main = child.main if _has_product(child) else last.main
            out[-1] = Item([*last.nodes, *child.nodes], main, None, [*last.sites, *child.sites])
            continue
        out.append(child)
    return out


def _joins(a: Item, b: Item) -> bool:
    if any(i.site or i.is_fused or i.is_region for i in (a, b)):
        return False
    return a.frames[-1:] == b.frames[-1:] and not (_has_product(a) and _has_product(b))


def _has_product(item: Item) -> bool:
    return products_in(Group((), "", [item])) > 0


def _signature(part: Group | Item) -> tuple:
    """Equal for parts that compute the same of the same types: casts and masks left out, states of sites too."""
    items = part.items if isinstance(part, Group) else [part]
    sites = tuple(getattr(s.record, "formula", s.record.pass_name) for i in items for s in i.sites)
    return sites, *(
        (n.primitive, type_text(n.outputs[0].aval) if n.outputs else "") for i in items for n in all_nodes([i.main])
    )


def runs_of(parts: Sequence[Group | Item]) -> list[list[Group | Item]]:
    """Neighbours that are equal together."""
    runs: list[list[Group | Item]] = []
    before: tuple | None = None
    for part in parts:
        now = (isinstance(part, Group), _signature(part))
        if runs and now == before:
            runs[-1].append(part)
        else:
            runs.append([part])
        before = now
    return runs
