"""Finding things in a program by text: operations, values, shapes, scopes, source lines, sites and rejection codes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fusionlab.errors import REJECTIONS
from fusionlab.fusers.report.findings import Findings
from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.ir import Atom, Literal, Node, literal_text, type_text
from fusionlab.graph.program.scopes import Source
from fusionlab.showing import Shown

from ..markup import short

_LABEL = 120


@dataclass(frozen=True, repr=False)
class Hit(Shown):
    """One thing found: the `name` to select it by ("n7", "%0", a site's id), and how a list shows it."""

    _says = "{0.label}: {0.where}"

    name: str
    label: str
    where: str

    def to_dict(self) -> dict[str, str]:
        """Plain data: `id` is the name to select."""
        return {"id": self.name, "label": self.label, "where": self.where}


@dataclass(frozen=True, repr=False)
class Hits(Shown):
    """Some `rows` of what was found, and how many there are in all."""

    _says = "{0.total} hits of {0.query!r}"
    _listed = "rows"

    query: str
    rows: tuple[Hit, ...]
    total: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data, JSON-able."""
        return {"query": self.query, "total": self.total, "rows": [row.to_dict() for row in self.rows]}


def search(graph: Graph, findings: Findings | None, text: str, limit: int = 50, start: int = 0) -> Hits:
    """Sites, arguments and nodes of a graph that have every word of a text in them, upper and lower case alike.

    A node is found by its primitive, number ("n7"), values ("%12"), their types ("bf16[32,16"), constants, scope, source line
    ("model.py:41") and the text of that line, and the function it is in; a site by its id, pass, formula or sentence, source
    line, rejection code and what that means. Exact names come first, then operations that are one of the words, then sites, then
    the rest in program order.

    Args:
      graph: where to search; the first search of a graph reads all of it, later ones only what was kept.
      findings: what was found in it, or None.
      text: words; an empty text finds nothing.
      limit: how many rows to give.
      start: which is the first of them.
    """
    return index_of(graph, findings).find(text, limit, start)


# Kept while the graph or the findings live: a widget searches at every key.
_KEPT: weakref.WeakKeyDictionary[Any, SearchIndex] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def index_of(graph: Graph, findings: Findings | None = None) -> SearchIndex:
    """The index of a graph, made when first asked for and kept as long as the findings (or, without any, the graph)."""
    owner = graph if findings is None or findings.graph is not graph else findings
    with _LOCK:
        if owner not in _KEPT:
            _KEPT[owner] = SearchIndex(graph, None if owner is graph else findings)
        return _KEPT[owner]


class SearchIndex:
    """The searchable text of a graph. It holds only strings, so that it keeps no graph alive."""

    def __init__(self, graph: Graph, findings: Findings | None = None):
        self._names: list[str] = []
        self._texts: list[str] = []
        self._labels: list[str] = []
        self._where: list[str] = []
        self._exact: dict[str, list[int]] = {}
        for site in _site_entries(findings):
            self._add(*site)
        for value, name in zip(graph.top.inputs, graph.in_names, strict=False):
            shown = f"{value.name} {name} {type_text(value.aval)}"
            self._add(value.name, f"{shown} argument input", shown, "argument", (value.name, name))
        types: dict[int, str] = {}
        lines: dict[Source, str] = {}
        for node in graph.nodes():
            self._add(*_node_entry(node, types, lines))

    def _add(self, name: str, text: str, label: str, where: str, exact: tuple[str, ...]) -> None:
        for exact_name in exact:
            self._exact.setdefault(exact_name.casefold(), []).append(len(self._names))
        self._names.append(name)
        self._texts.append(text.casefold())
        self._labels.append(label)
        self._where.append(where)

    def __len__(self) -> int:
        return len(self._names)

    def find(self, text: str, limit: int = 50, start: int = 0) -> Hits:
        """As `search`."""
        words = sorted(text.casefold().split(), key=len, reverse=True)  # a long word leaves few texts for the others
        if not words:
            return Hits(text, (), 0)
        found = [i for i, t in enumerate(self._texts) if words[0] in t]
        for word in words[1:]:
            found = [i for i in found if word in self._texts[i]]
        first = self._exact.get(text.casefold().strip(), [])
        taken, given = frozenset(first), frozenset(words)
        rest = [i for i in found if i not in taken]
        # The operation that a word names whole, before those that have it somewhere: "exp" is in "<genexpr>" too.
        rest.sort(key=lambda i: self._labels[i].partition(" ")[0].casefold() not in given)
        order = [*first, *rest]
        return Hits(text, tuple(map(self._hit, order[start : start + max(0, limit)])), len(order))

    def _hit(self, i: int) -> Hit:
        return Hit(self._names[i], short(self._labels[i], _LABEL), short(self._where[i], _LABEL))


Entry = tuple[str, str, str, str, tuple[str, ...]]


def _site_entries(findings: Findings | None) -> Iterator[Entry]:
    if findings is None:
        return
    for c in findings.candidates:
        where = _source_text(c.source)
        words = (c.id, c.pass_name, c.op, c.formula, where, "candidate site", *c.concepts)
        yield c.id, " ".join(words), f"{c.id}: {c.formula}", where, (c.id,)
    for r in findings.rejections:
        where = _source_text(r.source)
        words = (
            r.id,
            r.pass_name,
            r.code,
            REJECTIONS.get(r.code, ""),
            r.sentence,
            r.edit or "",
            where,
            "declined site",
        )
        yield r.id, " ".join(words), f"{r.id}: {r.code}, {r.matched}/{r.total}", where, (r.id,)


def _node_entry(node: Node, types: dict[int, str], lines: dict[Source, str]) -> Entry:
    """`types` and `lines` hold what was said of types and source lines before: thousands of nodes share a few."""
    outs = [f"{v.name} {_type(v, types)}" for v in node.outputs]
    ins = [literal_text(a.val) if isinstance(a, Literal) else f"{a.name} {_type(a, types)}" for a in node.inputs]
    source = node.source
    if source is not None and source not in lines:
        lines[source] = f"{source.short} {source.function} {source.text}"
    where = source.short if source is not None else ""
    title = " ".join([node.primitive, *outs[:1]])
    words = (f"n{node.id}", title, *outs[1:], *ins, node.scope, lines[source] if source is not None else "")
    label = f"{title}  {node.scope}" if node.scope else title
    return f"n{node.id}", " ".join(words), label, where, (f"n{node.id}", *(v.name for v in node.outputs))


def _type(atom: Atom, types: dict[int, str]) -> str:
    """The type in words, by the identity of its aval, which the graph keeps alive while it is indexed."""
    known = types.get(id(atom.aval))
    if known is None:
        known = types[id(atom.aval)] = type_text(atom.aval)
    return known


def _source_text(source: Source | None) -> str:
    return f"{source.short} {source.text}" if source is not None else ""
