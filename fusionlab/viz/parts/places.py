"""The rows of a picture: a module, its backward pass and its update share one."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from fusionlab.graph.program.ir import all_nodes, type_text
from fusionlab.graph.program.scopes import Source, spoken

from ..cards.card import PHASES
from .flows import Flows
from .frames import shared
from .groups import Group, grouped, ids_of
from .items import Item
from .names import lines_text, run_name
from .phases import BACKWARD, FORWARD, UPDATE

_TRIFLE = 0.002  # of the bytes of its lane
_WRAPS = 0.9  # a part with more of its lane than this says nothing as a row: what is in it becomes rows

Key = tuple[Hashable, ...]
_SEVERAL: Key = ("several",)
Top = tuple[Key, Group]


@dataclass(eq=False)
class Places:
    """A row in the making: its name, and its groups in each phase (several for equal parts in a row)."""

    keys: list[Key]
    name: str
    groups: dict[str, list[Group]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.keys)


def rows_of(lanes: Mapping[str, Sequence[Item]], flows: Flows, weights: Mapping[int, int]) -> list[Places]:
    """The rows of a program, forward's first, in program order; then what has no forward pass.

    Args:
      lanes: phase -> its items; those of the backward pass as the forward pass has them.
      flows: who reads whom.
      weights: node id -> bytes moved.
    """
    leading = next((p for p in PHASES if lanes[p]), FORWARD)
    tops = _all_tops(lanes, leading, flows, weights)
    places = _stacked(tops[leading], leading)
    home = {key: place for place in places for key in place.keys}
    for phase, found in tops.items():
        for key, group in found if phase != leading else ():
            if key not in home:
                places.append(Places([key], group.label))
                home[key] = places[-1]
            home[key].groups.setdefault(phase, []).append(group)
    return places


def _all_tops(
    lanes: Mapping[str, Sequence[Item]], leading: str, flows: Flows, weights: Mapping[int, int]
) -> dict[str, list[Top]]:
    """Phase -> its outermost groups, keyed alike."""
    dissolved: set[Key] = set()
    inner = _differentiated(lanes[BACKWARD])
    tops = {leading: _tops(lanes[leading], weights, dissolved, None, inner)}
    if leading == FORWARD and lanes[BACKWARD]:
        tops[BACKWARD] = _tops(lanes[BACKWARD], weights, dissolved, tops[FORWARD], inner)
    if leading != UPDATE and lanes[UPDATE]:
        tops[UPDATE] = _updates(lanes[UPDATE], tops, flows)
    if leading == FORWARD:
        tops[FORWARD], gone = _absorbed(tops[FORWARD], flows, weights)
        tops = {p: found if p == FORWARD else [(gone.get(k, k), g) for k, g in found] for p, found in tops.items()}
    return tops


def _tops(
    items: Sequence[Item],
    weights: Mapping[int, int],
    dissolved: set[Key],
    leading: Sequence[Top] | None,
    inner: tuple[Source, ...],
) -> list[Top]:
    """The outermost groups of a lane. The first lane decides which groups are dissolved (`dissolved`), the others follow."""
    tops = _keyed(grouped(items, calls=inner), (), leading)
    total = sum(weights[n.id] for i in items for n in i.nodes) or 1
    through = _looked_through(tops, total, weights, dissolved, leading)
    while through:
        inside = (_inside(top, leading) if top[0] in through else [top] for top in tops)
        tops = [*itertools.chain.from_iterable(inside)]
        through = _looked_through(tops, total, weights, dissolved, leading)
    return _merged(tops)


def _looked_through(
    tops: Sequence[Top], total: int, weights: Mapping[int, int], dissolved: set[Key], leading: Sequence[Top] | None
) -> frozenset[Key]:
    """Keys of the groups that are replaced by their content; the first lane adds to those of all lanes."""
    if leading is None:
        dissolved |= _come_again(tops) | {key for key, group in tops if _wraps(group, total, weights)}
    return frozenset(key for key, group in tops if key in dissolved and _dissolves(group))


def _dissolves(group: Group) -> bool:
    """Whether what is in a group can be rows in its place."""
    return group.key[0] != "lines" and (group.opens or group.key[0] != "scope")


def _inside(top: Top, leading: Sequence[Top] | None) -> list[Top]:
    key, group = top
    return _named_by(group, _keyed(group.children, key, leading))


def _named_by(group: Group, inside: list[Top]) -> list[Top]:
    """ "3" means nothing without the name of what it counts."""
    for _, part in inside:
        if part.label.isdigit():
            part.label = f"{group.label}[{part.label}]"
    return inside


def _come_again(tops: Sequence[Top]) -> set[Key]:
    """Calls that other rows interrupt: as one row they would stand before and after those."""
    seen: set[Key] = set()
    again: set[Key] = set()
    before: Key | None = None
    for key, group in tops:
        if key != before and key in seen and group.key[0] == "call":
            again.add(key)
        seen.add(key)
        before = key
    return again


def _differentiated(backward: Sequence[Item]) -> tuple[Source, ...]:
    """The calls that lead to the differentiated function: those that all of the backward pass without scopes shares."""
    paths = [i.frames for i in backward if not i.scope and i.frames]
    return paths[0][: shared(paths)] if paths else ()


def _wraps(group: Group, total: int, weights: Mapping[int, int]) -> bool:
    return group.opens and _weight(group, weights) > _WRAPS * total


def _keyed(found: Sequence[Group | Item], outer: Key, leading: Sequence[Top] | None) -> list[Top]:
    """Groups with their keys; single items on lines of one function form a group of those lines."""
    out: list[Top] = []
    lines = _lines(leading or ())
    for part in found:
        if isinstance(part, Group):
            out.append(((*outer, part.key), part))
        elif part.is_region:
            out.append((_region_key(outer, part), _of_region(part)))
        else:
            _take_line(out, part, outer, lines)
    for _, group in out:
        if group.key[0] == "lines":
            _name_lines(group)
    return out


def _take_line(out: list[Top], item: Item, outer: Key, lines: Mapping[tuple[str, int], Key]) -> None:
    """Adds a single item to the group of lines before it, or begins one."""
    function, line = (item.frames[-1].function, item.frames[-1].line) if item.frames else ("", 0)
    last = out[-1] if out else None
    key = lines.get((function, line))
    if key is None:
        key = last[0] if last and last[1].key == ("lines", function) else (*outer, ("lines", function, len(out)))
    if last is None or last[0] != key:
        last = key, Group(("lines", function), spoken(function))
        out.append(last)
    _add(last[1], item)


def _name_lines(group: Group) -> None:
    text = lines_text(i.frames[-1] for i in group.items if i.frames)
    if group.label and text:
        group.label = f"{group.label} :{text.rpartition(':')[2]}"


def _region_key(outer: Key, item: Item) -> Key:
    return *outer, ("region", item.main.primitive, item.main.scope, item.frames[-1:])


def _of_region(item: Item) -> Group:
    return Group(("region", item.main.primitive), "", [item], [item])


def _lines(leading: Sequence[Top]) -> dict[tuple[str, int], Key]:
    return {
        (i.frames[-1].function, i.frames[-1].line): key
        for key, group in leading
        if group.key[0] == "lines"
        for i in group.items
        if i.frames
    }


def _add(group: Group, item: Item) -> None:
    group.items.append(item)
    group.children.append(item)


def _merged(tops: Sequence[Top]) -> list[Top]:
    """Each key once: later occurrences join the first."""
    found: dict[Key, Group] = {}
    for key, group in tops:
        if key in found and found[key] is not group:
            found[key].items += group.items
            found[key].children += group.children
        else:
            found[key] = group
    return list(found.items())


def _updates(items: Sequence[Item], tops: Mapping[str, Sequence[Top]], flows: Flows) -> list[Top]:
    """An update is in the row of the gradient that it reads; a function whose work joins several rows is a row of its own."""
    label_of = {key: g.label for found in tops.values() for key, g in found}
    gradients = {nid: key for key, g in tops.get(BACKWARD, ()) for nid in ids_of(g)}
    rows = _rows_of_readers(items, _rows_read(items, gradients, flows), flows)
    joins = {_function(i) for i, row in zip(items, rows, strict=True) if row == _SEVERAL}
    found: dict[Key, Group] = {}
    for item, row in zip(items, rows, strict=True):
        function = _function(item)
        key = function if row in (None, _SEVERAL) or function in joins else row
        _add(found.setdefault(key, Group(("update", key), label_of.get(key, str(key[-1])))), item)
    return list(found.items())


def _rows_read(items: Sequence[Item], gradients: Mapping[int, Key], flows: Flows) -> list[Key | None]:
    """The row whose gradient each item reads, directly or not; None if there is no such row, `_SEVERAL` if there are several.

    `gradients`: id of a node of the backward pass -> its row.
    """
    known: dict[int, Key | None] = dict(gradients)
    rows: list[Key | None] = []
    for item in items:
        read = {known[p] for nid in item.ids for p in flows.makers(nid) if p in known}
        rows.append(_one_of(read))
        known.update((nid, rows[-1]) for nid in item.ids if nid not in gradients)
    return rows


def _one_of(read: set[Key | None]) -> Key | None:
    named = read - {None}
    return next(iter(named)) if len(named) == 1 else _SEVERAL if named else None


def _rows_of_readers(items: Sequence[Item], rows: Sequence[Key | None], flows: Flows) -> list[Key | None]:
    """An item that reads no gradient (a decayed moment) is in the row of its reader."""
    row_of = {nid: row for i, row in zip(items, rows, strict=True) for nid in i.ids}
    for item in reversed(items):
        if row_of[item.main.id] is None:
            readers = {row_of.get(r) for r in _readers(item.ids, flows)}
            row_of.update((nid, next(iter(readers)) if len(readers) == 1 else None) for nid in item.ids)
    return [row_of[i.main.id] for i in items]


def _readers(ids: Sequence[int], flows: Flows) -> set[int]:
    """Ids of the nodes that read what these make, without these."""
    return {r for nid in ids for r in flows.readers(nid)}.difference(ids)


def _function(item: Item) -> Key:
    names = [spoken(f.function) for f in item.frames[1:]] or [spoken(f.function) for f in item.frames]
    return "function", next((n for n in names if n), "update")


def _absorbed(tops: Sequence[Top], flows: Flows, weights: Mapping[int, int]) -> tuple[list[Top], dict[Key, Key]]:
    """Trifles that only one row reads stand with it: masks, tables of angles; what nothing reads, a loop's condition, with the last.

    Also: the key of each such row -> whose it is now.
    """
    least = _TRIFLE * sum(_weight(g, weights) for _, g in tops)
    row_of = {nid: key for key, g in tops for nid in ids_of(g)}
    group_of = dict(tops)
    gone: dict[Key, Key] = {}
    for key, group in reversed(tops):
        home = _home(key, group, row_of, gone, flows) if _is_trifle(group, flows, weights, least) else None
        if home is not None:
            gone[key] = home
            group_of[home].items[:0] = group.items
            group_of[home].children[:0] = group.children
    return [(k, g) for k, g in tops if k not in gone], gone


def _home(key: Key, group: Group, row_of: Mapping[int, Key], gone: Mapping[Key, Key], flows: Flows) -> Key | None:
    """The only row that reads a group; the last one where nothing does."""
    ids = ids_of(group)
    if not flows.results(ids):
        left = [k for k in dict.fromkeys(row_of.values()) if k not in gone and k != key]
        return left[-1] if left else None
    readers = {row_of.get(r) for r in _readers(ids, flows)} - {key, None}
    homes = {gone.get(r, r) for r in readers if r is not None}
    return homes.pop() if len(homes) == 1 else None


def _is_trifle(group: Group, flows: Flows, weights: Mapping[int, int], least: float) -> bool:
    if group.key[0] not in ("lines", "call") or any(i.sites for i in group.items):
        return False
    return _weight(group, weights) <= least and not flows.parameters(ids_of(group))


def _weight(group: Group, weights: Mapping[int, int]) -> int:
    return sum(weights[n.id] for i in group.items for n in i.nodes)


def _stacked(tops: Sequence[Top], phase: str) -> list[Places]:
    """Neighbours that compute the same are one row."""
    places: list[Places] = []
    before: tuple | None = None
    for key, group in tops:
        now = _signature(group)
        if places and now == before and len(now) > 1:
            place = places[-1]
            place.keys.append(key)
            place.groups[phase].append(group)
            place.name = run_name(place.groups[phase][0].label, group.label)
        else:
            places.append(Places([key], group.label, {phase: [group]}))
        before = now
    return places


def _signature(group: Group) -> tuple:
    return tuple(
        (n.primitive, type_text(n.outputs[0].aval) if n.outputs else "")
        for i in group.items
        for n in all_nodes([i.main] if i.site is None else i.nodes)
    )
