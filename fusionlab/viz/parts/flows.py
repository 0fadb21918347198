"""The values that flow between cards: distinct values, seen through casts, reshapes and broadcasts."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.ir import Value, type_text
from fusionlab.graph.program.meshes import sharding_text

from ..cards.card import PHASES, Card, Edge, Row
from .nodes import is_light
from .phases import BACKWARD, FORWARD, UPDATE
from .readers import FlowEnd, flow

Chains = Mapping[int, tuple[str, ...]]
_COEFFICIENTS = 64  # bytes
_MOST_INPUTS = 4
_RESULTS = "results/"


class Flows:
    """The readers and makers of values in a graph, worked out once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.edges = [*flow(graph)]
        self._read: dict[FlowEnd, list[tuple[FlowEnd, Value]]] = {}
        self._made: dict[int, tuple[FlowEnd, Value]] = {}  # value id -> who makes it
        for producer, reader, value in self.edges:
            self._read.setdefault(reader, []).append((producer, value))
            self._made[value.id] = producer, value
        self._parameter_of: dict[int, str] = {}
        self._light = {n.id for n in graph.nodes() if is_light(n)}
        self.inputs = _plain_inputs(graph)
        self._solid: dict[tuple[FlowEnd, int], tuple[FlowEnd, Value]] = {}

    def makers(self, nid: int) -> Iterable[int]:
        """Ids of the nodes that a node reads from, looked at through what only moves data."""
        for producer, value in self._read.get(nid, ()):
            maker, _ = self.origin(producer, value)
            if isinstance(maker, int):
                yield maker

    def origin(self, producer: FlowEnd, value: Value) -> tuple[FlowEnd, Value]:
        """Who made a value before it was cast, reshaped or broadcast, and the value then."""
        key = (producer, value.id)
        found = self._solid.get(key)
        if found is None:
            found = producer, value
            while isinstance(found[0], int) and found[0] in self._light and len(self._read.get(found[0], ())) == 1:
                found = self._read[found[0]][0]
            self._solid[key] = found
        return found

    # Parameters --------------------------------------------------------------------------------------------------------
    def before(self, value: Value) -> Value:
        """The value before it was cast, reshaped or broadcast."""
        made = self._made.get(value.id)
        return value if made is None else self.origin(*made)[1]

    def parameter_of(self, value_id: int) -> str:
        """The argument that a value holds, cast or reshaped or not; "" for one that is no parameter."""
        found = self._parameter_of.get(value_id)
        if found is None:
            made = self._made.get(value_id)
            k = self._parameter(self.origin(*made)[0]) if made is not None else None
            found = self._parameter_of[value_id] = "" if k is None else self.graph.in_names[k]
        return found

    def parameters_read(self, nodes: Iterable[int]) -> list[str]:
        """Names of the parameters that nodes read."""
        return [self.graph.in_names[k] for k in self._parameters(nodes)]

    def parameters(self, nodes: Iterable[int]) -> int:
        """Bytes of the parameters that nodes read."""
        return sum(self.graph.top.inputs[k].nbytes for k in self._parameters(nodes))

    def _parameters(self, nodes: Iterable[int]) -> list[int]:
        read = (self._parameter(p) for nid in nodes for p, _ in self._read.get(nid, ()))
        return [*dict.fromkeys(k for k in read if k is not None)]

    def _parameter(self, end: FlowEnd) -> int | None:
        """Which argument this is, if it is a parameter."""
        return end[1] if isinstance(end, tuple) and end[0] == "in" and end[1] not in self.inputs else None

    def results(self, nodes: Iterable[int]) -> list[Value]:
        """The results of nodes that others read, or that the program returns."""
        own = set(nodes)
        found: dict[int, Value] = {}
        for nid in own:
            for reader, value in self._readers.get(nid, ()):
                if reader not in own:
                    found[value.id] = value
        return [*found.values()]

    def readers(self, nid: int) -> Iterable[int]:
        """Ids of the nodes that read what a node makes."""
        return (reader for reader, _ in self._readers.get(nid, ()) if isinstance(reader, int))

    @functools.cached_property
    def _readers(self) -> dict[FlowEnd, list[tuple[FlowEnd, Value]]]:
        found: dict[FlowEnd, list[tuple[FlowEnd, Value]]] = {}
        for producer, reader, value in self.edges:
            found.setdefault(producer, []).append((reader, value))
        return found

    # Edges ---------------------------------------------------------------------------------------------------------------
    def between(
        self, rows: Sequence[Row], chains: Chains
    ) -> tuple[tuple[Row, ...], tuple[Edge, ...], tuple[Card, ...], tuple[Card, ...]]:
        """The rows with the edges inside their cards, the edges between them, and the cards of inputs and results."""
        found = self._between(chains, {c.id: (r, p) for r, row in enumerate(rows) for p, c in row.cards.items()})
        edges = found.of_the_top(rows)
        inside = found.inside()
        drawn = tuple(Row(row.name, {p: _with_edges(c, inside) for p, c in row.cards.items()}) for row in rows)
        read = {e.start for e in edges}
        inputs = tuple(
            Card(f"in{k}", self.graph.in_names[k], kind="input", type=_input_type(self.graph, k))
            for k in self.inputs
            if f"in{k}" in read
        )
        return drawn, edges, inputs, self._results(edges)

    def _between(self, chains: Chains, places: Mapping[str, tuple[int, str]]) -> _Found:
        found = _Found(places)
        ends: dict[FlowEnd, tuple[str, ...]] = {}  # most ends are asked for several times
        for maker, reader, made in self._drawn:
            for end in (maker, reader):
                if end not in ends:
                    ends[end] = self._chain(end, chains)
            if ends[maker] is not ends[reader]:
                found.add(ends[maker], ends[reader], made)
        return found

    @functools.cached_property
    def _drawn(self) -> list[tuple[FlowEnd, FlowEnd, Value]]:
        """The maker and the readers of each value, each once; a node that only moves data is counted with its readers."""
        found: dict[tuple[FlowEnd, FlowEnd, int], tuple[FlowEnd, FlowEnd, Value]] = {}
        for producer, reader, value in self.edges:
            if reader not in self._light:
                maker, made = self.origin(producer, value)
                found.setdefault((maker, reader, made.id), (maker, reader, made))
        return [*found.values()]

    def _chain(self, end: FlowEnd, chains: Chains) -> tuple[str, ...]:
        if isinstance(end, int):
            return chains.get(end, ())
        kind, k = end
        if kind == "in":
            return (f"in{k}",) if k in self.inputs else ()
        return (f"{_RESULTS}{k}",)

    def _results(self, edges: Sequence[Edge]) -> tuple[Card, ...]:
        """The program's results, one card per lane."""
        cards = []
        for edge in edges:
            if edge.end.startswith(_RESULTS):
                name = "result" if edge.values == 1 else f"{edge.values} results"
                cards.append(Card(edge.end, name, kind="output", type=edge.type))
        return tuple(cards)


def _input_type(graph: Graph, k: int) -> str:
    """ "f32[8,16] P('data')": the type of an argument, and how it is laid over devices."""
    sharding = sharding_text(next(iter(graph.in_shardings[k:]), None))
    return " ".join(filter(None, (type_text(graph.top.inputs[k].aval), sharding)))


def _plain_inputs(graph: Graph) -> tuple[int, ...]:
    """Arguments that are not parameters: those passed on their own, as long as they are few."""
    plain = [k for k, name in enumerate(graph.in_names) if name.isidentifier()]
    return tuple(plain) if len(plain) <= _MOST_INPUTS else ()


def _with_edges(card: Card, inside: Mapping[str, list[Edge]]) -> Card:
    if not card.children:
        return card
    children = tuple(_with_edges(c, inside) for c in card.children)
    own = {c.id for c in children}
    edges = tuple(e for e in inside.get(card.id, ()) if e.start in own and e.end in own)
    return replace(card, children=children, edges=edges)


class _Found:
    """Values by the cards that they flow between, at each level."""

    def __init__(self, places: Mapping[str, tuple[int, str]]) -> None:
        self.places = places  # id of a card of the rows -> its row and phase
        self.pairs: dict[tuple[str, str, str], dict[int, Value]] = {}

    def add(self, a: tuple[str, ...], b: tuple[str, ...], value: Value) -> None:
        depth = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if depth is not None:
            parent = a[depth - 1] if depth else ""
            self.pairs.setdefault((parent, a[depth], b[depth]), {})[value.id] = value

    def _phase(self, card: str) -> str:
        return self.places[card][1] if card in self.places else ""

    def inside(self) -> dict[str, list[Edge]]:
        """Parent's id -> edges between its children."""
        found: dict[str, list[Edge]] = {}
        for (parent, start, end), values in self.pairs.items():
            if parent:
                found.setdefault(parent, []).append(_edge(start, end, values, "flow"))
        return found

    def of_the_top(self, rows: Sequence[Row]) -> tuple[Edge, ...]:
        """Edges between lanes and rows. What a row reads forward and backward is kept by that row: nothing runs across rows."""
        found: dict[tuple[str, str, str], dict[int, Value]] = {}
        results: dict[str, dict[int, Value]] = {}
        for (parent, start, end), values in self.pairs.items():
            if parent:
                continue
            if end.startswith(_RESULTS):
                if start in self.places:
                    results.setdefault(start, {}).update(values)
                continue
            for key, value in self._drawn(start, end, values, rows):
                found.setdefault(key, {})[value.id] = value
        edges = [_edge(start, end, values, kind) for (start, end, kind), values in found.items()]
        # Rates and step counts go everywhere in an update: lines of a few bytes would hide the others.
        edges = [e for e in edges if e.bytes > _COEFFICIENTS or self._phase(e.start) != UPDATE]
        edges = _first_readers(edges, self.places)
        return tuple(edges + self._to_results(results))

    def _to_results(self, results: Mapping[str, Mapping[int, Value]]) -> list[Edge]:
        """One edge a lane, from the last row that returns something, for all that the lane returns."""
        edges = []
        for phase in PHASES:
            mine = [card for card in results if self._phase(card) == phase]
            if mine:
                last = max(mine, key=lambda card: self.places[card][0])
                values = {i: v for card in mine for i, v in results[card].items()}
                edges.append(_edge(last, f"{_RESULTS}{phase}", values, "flow"))
        return edges

    def _drawn(
        self, start: str, end: str, values: Mapping[int, Value], rows: Sequence[Row]
    ) -> Iterable[tuple[tuple[str, str, str], Value]]:
        key = start, end, "flow"
        if start in self.places:
            (_, a), (row, b) = self.places[start], self.places[end]
            key = _crossing(start, end, a, b, rows[row].cards.get(FORWARD)) if a != b else key
        return ((key, value) for value in values.values()) if key is not None else ()


def _crossing(start: str, end: str, a: str, b: str, forward: Card | None) -> tuple[str, str, str] | None:
    """An edge from lane to lane; what is kept begins at the forward card of the row that reads it."""
    if (a, b) == (FORWARD, BACKWARD):
        return forward.id if forward is not None else start, end, "kept"
    return (start, end, "gradients") if (a, b) == (BACKWARD, UPDATE) else None


def _first_readers(edges: Sequence[Edge], places: Mapping[str, tuple[int, str]]) -> list[Edge]:
    """Of an input, only the edge to what reads it first."""
    order = {FORWARD: 0, BACKWARD: 1, UPDATE: 2}
    first: dict[str, Edge] = {}
    kept = []
    for edge in edges:
        if edge.start in places:
            kept.append(edge)
            continue
        here = places[edge.end]
        old = first.get(edge.start)
        if old is None or (order[here[1]], here[0]) < (order[places[old.end][1]], places[old.end][0]):
            first[edge.start] = edge
    return [*first.values(), *kept]


def _edge(start: str, end: str, values: Mapping[int, Value], kind: str) -> Edge:
    one = next(iter(values.values())) if len(values) == 1 else None
    return Edge(
        start, end, sum(v.nbytes for v in values.values()), type_text(one.aval) if one else "", len(values), kind
    )
