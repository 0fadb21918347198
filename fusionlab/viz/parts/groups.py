"""From items to a tree of groups: by module scope, else by call and turn of a loop."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

from fusionlab.graph.program.scopes import Source, spoken

from .frames import Turn, shared, turns
from .items import RECOMPUTED, Item
from .nodes import PRODUCTS

Key = tuple[Hashable, ...]
Call = tuple[Hashable, str | None] | None


@dataclass(eq=False)
class Group:
    """Items that belong together, in program order.

    Attributes:
      key: what the same group is called in another phase.
      label: "layer_3", "attention", "predict, turn 2".
      items: all of them, those of `children` included.
      children: groups and items inside, in order.
    """

    key: Key
    label: str
    items: list[Item] = field(default_factory=list)
    children: list[Group | Item] = field(default_factory=list)

    @property
    def opens(self) -> bool:
        """Whether its inside shows more than its name."""
        return len(self.children) > 1


def grouped(
    items: Sequence[Item], depth: int = 0, turned: bool = False, calls: tuple[Source, ...] = ()
) -> list[Group | Item]:
    """Groups and items of one level, in order.

    Args:
      items: in program order.
      depth: how many names of the scope the level has used up.
      turned: whether these are one turn of a loop, in which no turns are looked for again.
      calls: calls that lead to the level; nodes that were called otherwise stay single. () takes the calls that all share.
    """
    out: list[Group | Item] = []
    scopes: dict[str, Group] = {}
    for scope, run in _by_scope(items, depth):
        if scope is None:
            out += _by_call(run, depth, turned, calls)
            continue
        if scope not in scopes:
            scopes[scope] = Group(("scope", scope), _plain(scope))
            out.append(scopes[scope])
        scopes[scope].items += run
    for group in scopes.values():
        if group.label == RECOMPUTED:  # runs as the forward pass does
            group.items.sort(key=lambda i: i.main.id)
        group.children = _inside(group.items, depth + 1)
    return out


def _plain(scope: str) -> str:
    """A scope's name without the library's modules in front: "Linear" for "eqx.nn.Linear"."""
    last = scope.rpartition(".")[2]
    return last if last[:1].isupper() else scope


def _inside(items: list[Item], depth: int, turned: bool = False) -> list[Group | Item]:
    """The content of a group: a single inner group is not a separate level."""
    found = grouped(items, depth, turned)
    while len(found) == 1 and isinstance(found[0], Group):
        found = found[0].children
    return found


def _by_scope(items: Sequence[Item], depth: int) -> Iterator[tuple[str | None, list[Item]]]:
    """Neighbours of one scope; None for those whose scope ends here."""
    for scope, run in groupby(items, key=lambda i: i.scope[depth] if len(i.scope) > depth else None):
        yield scope, [*run]


def _by_call(items: list[Item], depth: int, turned: bool, calls: tuple[Source, ...] = ()) -> list[Group | Item]:
    if any(i.frames[: len(calls)] != calls for i in items):
        return _inside_and_outside(items, depth, turned, calls)
    base = len(calls) or shared([i.frames for i in items])
    keys = [_call(i.frames, base) for i in items]
    if None in keys or _is_own_work(keys):
        return list(items)
    return [*_of_calls(items, keys, [None] * len(keys) if turned else turns(keys), depth, base)]


def _of_calls(
    items: list[Item], keys: Sequence[Call], marks: Sequence[Turn | None], depth: int, base: int
) -> Iterator[Group | Item]:
    for (key, mark), run in _neighbours(items, keys, marks):
        if _is_own_work([key]):
            yield from run
        else:
            yield _call_group(key, mark, run, depth, base)


def _is_own_work(calls: Sequence[Call]) -> bool:
    """Whether all of it is one line of the function itself, that calls nothing."""
    return len(set(calls)) == 1 and calls[0] is not None and calls[0][1] is None


def _inside_and_outside(items: list[Item], depth: int, turned: bool, calls: tuple[Source, ...]) -> list[Group | Item]:
    """The nodes that these calls lead to, grouped; nodes called otherwise stay as they are."""
    out: list[Group | Item] = []
    for inside, found in groupby(items, key=lambda i: i.frames[: len(calls)] == calls):
        run = [*found]
        out += _by_call(run, depth, turned, calls) if inside else run
    return out


def _call(path: tuple[Source, ...], base: int) -> Call:
    """The line of a call below the shared ones, and what was called there; None for the function's own work. None without a call."""
    if len(path) <= base:
        return None
    callee = path[base + 1].function if len(path) > base + 1 else None
    return (path[base].function, path[base].line), callee


def _neighbours(
    items: list[Item], calls: Sequence[Call], marks: Sequence[Turn | None]
) -> Iterator[tuple[tuple[Call, Turn | None], list[Item]]]:
    """Neighbours of one turn, else of one call."""
    keys = [(call if mark is None else None, mark) for call, mark in zip(calls, marks, strict=True)]
    for key, run in groupby(zip(keys, items, strict=True), key=itemgetter(0)):
        yield key, [item for _, item in run]


def _call_group(key: Hashable, mark: Turn | None, run: list[Item], depth: int, base: int) -> Group:
    frames = run[0].frames
    function = spoken(frames[base].function)
    if mark is not None:
        label = f"{function}, turn {mark.number + 1}".lstrip(", ")
        return Group(("turn", mark.first, mark.number), label, run, _inside(run, depth, turned=True))
    callee = spoken(frames[base + 1].function)
    return Group(("call", key), callee or function, run, _inside(run, depth))


def ids_of(group: Group) -> list[int]:
    """Ids of all nodes of a group, those inside regions too."""
    return [nid for item in group.items for nid in item.ids]


def products_in(group: Group) -> int:
    """How many matrix products and convolutions a group has."""
    return sum(n.primitive in PRODUCTS for i in group.items for n in i.nodes)
