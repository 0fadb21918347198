"""Which of several equal layers an item is in, where the program's scopes do not say: the parameters that it reads do.

Libraries that put no scopes into programs, or classes instead of instances, still hold their parameters by place: what reads
`blocks[3].q.kernel` is in `blocks[3]`, and so is everything between two such readers.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence

from fusionlab.graph.program.ir import type_text

from .items import Item

_CONTAINER = re.compile(r"(.*?[A-Za-z_]\w*)\[\d+\]")
Reads = Callable[[Item], Collection[str]]


def told_apart(items: Sequence[Item], reads: Reads, known: Collection[str] | None = None) -> frozenset[str]:
    """Gives each item of a layer the name of its layer (`Item.instance`), and returns the families of layers found ("blocks").

    Args:
      items: of one lane, in program order.
      reads: the parameters that an item reads, as paths one can say ("blocks[3].q.kernel").
      known: the families to look for; None finds those that the scopes do not tell apart already.
    """
    read = [reads(i) for i in items]
    anchors = [_container(names) for names in read]
    families = frozenset(known) if known is not None else _families(items, anchors)
    # Where two families run side by side (layers and their caches), the one that more is known of names the layer.
    known_of = Counter(map(_family, anchors))
    for family in sorted(families, key=lambda f: (-known_of[f], f)):
        mine = [a if a and _family(a) == family else "" for a in anchors]
        if not _are_named(items, mine):
            _fill(items, mine, read)
    if families:
        _name_the_rest(items, read)
    return families


def _name_the_rest(items: Sequence[Item], read: Sequence[Collection[str]]) -> None:
    for item, names in zip(items, read, strict=True):
        item.instance = item.instance or _first(names)


def _are_named(items: Sequence[Item], anchors: Sequence[str]) -> bool:
    """Whether most of a family's own items have a layer already."""
    named = [bool(i.instance) for i, a in zip(items, anchors, strict=True) if a]
    return 2 * sum(named) > len(named)


def as_forward(backward: Sequence[Item], forward: Sequence[Item]) -> None:
    """Gives items of the backward pass that read no parameter the layer of their forward pass, where it is the only one it can be."""
    for kind in (_record, _place_and_operation, _place):
        known: dict[Hashable, set[str]] = {}
        for item in forward:
            known.setdefault(kind(item), set()).add(item.instance)
        for item in backward:
            found = known.get(kind(item), set()) if not item.instance and kind(item) is not None else set()
            if len(found) == 1:
                (item.instance,) = found


def _record(item: Item) -> Hashable:
    return item.site.record.id if item.site is not None else None


def _place_and_operation(item: Item) -> Hashable:
    return item.main.scope, item.frames, item.main.primitive


def _place(item: Item) -> Hashable:
    return item.main.scope, item.frames


def _first(names: Collection[str]) -> str:
    """The part of the model that all of these parameters are of, where it has a name."""
    found = {re.split(r"[.\[]", n, maxsplit=1)[0] for n in names}
    return found.pop() if len(found) == 1 else ""


def _container(names: Collection[str]) -> str:
    """The one layer that these parameters are of; "" for none, or several."""
    found = {m.group() for n in names if (m := _CONTAINER.match(n))}
    return found.pop() if len(found) == 1 else ""


def _family(container: str) -> str:
    return container.rpartition("[")[0]


def _families(items: Sequence[Item], anchors: Sequence[str]) -> frozenset[str]:
    scopes: dict[str, set[tuple[str, ...]]] = {}
    for item, anchor in zip(items, anchors, strict=True):
        if anchor:
            scopes.setdefault(anchor, set()).add(item.scope)
    found: dict[str, list[set[tuple[str, ...]]]] = {}
    for anchor, names in scopes.items():
        found.setdefault(_family(anchor), []).append(names)
    return frozenset(f for f, each in found.items() if len(each) > 1 and _meet(each))


def _meet(each: Sequence[set[tuple[str, ...]]]) -> bool:
    """Whether two layers have a scope in common: then scopes do not tell them apart."""
    seen: set[tuple[str, ...]] = set()
    for names in each:
        if not seen.isdisjoint(names):
            return True
        seen |= names
    return False


def _fill(items: Sequence[Item], anchors: Sequence[str], reading: Sequence[Collection[str]]) -> None:
    """Anchored items, and items between two of one layer, belong to that layer; items between two layers are cut where
    the first layer begins: what comes right before its first parameter comes so before each layer's."""
    places = [i for i, a in enumerate(anchors) if a]
    if not places:
        return
    head, tail = _around_layers(items, anchors, places, reading)
    _mark(items, range(places[0] - head, places[0]), anchors[places[0]])
    for a, b in itertools.pairwise(places):
        cut = b if anchors[a] == anchors[b] else b - min(head, b - a - 1)
        _mark(items, range(a, cut), anchors[a])
        _mark(items, range(cut, b), anchors[b])
    _mark(items, range(places[-1], min(places[-1] + tail + 1, len(items))), anchors[places[-1]])


def _around_layers(
    items: Sequence[Item], anchors: Sequence[str], places: Sequence[int], reading: Sequence[Collection[str]]
) -> tuple[int, int]:
    """How many items of a layer come before its first parameter, and after its last."""
    gap = next(((a, b) for a, b in itertools.pairwise(places) if anchors[a] != anchors[b]), None)
    if gap is None:
        return 0, 0
    first = places[0]
    before = next((k for k in range(first, 0, -1) if reading[k - 1]), 0)
    between = [_signature(i) for i in items[gap[0] + 1 : gap[1]]]
    head = _common_end(between, [_signature(i) for i in items[before:first]])
    return head, len(between) - head


def _mark(items: Sequence[Item], places: range, name: str) -> None:
    for i in places:
        if i >= 0:
            items[i].instance = name


def _common_end(a: Sequence[Hashable], b: Sequence[Hashable]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[-1 - n] == b[-1 - n]:
        n += 1
    return n


def _signature(item: Item) -> Hashable:
    main = item.main
    return main.primitive, type_text(main.outputs[0].aval) if main.outputs else "", main.scope, item.frames[-1:]
