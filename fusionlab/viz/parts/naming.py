"""Names of the parts and items of one graph: parameters, gradients and residuals are named by their readers and makers."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fusionlab.graph.program.graph import Graph
from fusionlab.graph.program.ir import Node
from fusionlab.graph.program.scopes import frames_of

from .flows import Flows
from .groups import Group
from .items import Item
from .names import item_name, parameter_name, shared_parameter, short_parameter, works_on
from .nodes import PRODUCTS, is_light
from .phases import BACKWARD

_MOST_NAMED = 3  # parameters of which one is meant


class Naming:
    """Names for what is in a graph; what they need of it is worked out when the first one asks."""

    def __init__(self, graph: Graph, flows: Flows, phases: Mapping[int, str]) -> None:
        self.graph, self.flows, self.phases = graph, flows, phases

    def argument_of(self, value_id: int) -> str:
        """The name of the parameter that a value holds, cast or reshaped or not; "" for one that holds none."""
        path = self.flows.parameter_of(value_id)
        return parameter_name(path) if path else ""

    def reads(self, item: Item) -> list[str]:
        """Names of the parameters that an item reads."""
        return [parameter_name(p) for p in self.flows.parameters_read(item.ids)]

    def group(self, group: Group) -> str:
        """A scope or a function has its name; a turn of a loop has the parameters' that it reads."""
        kind, label = group.key[0], group.label
        if kind in ("turn", "region") or not label:
            named = shared_parameter(self._read_by(group))
            if any(c.isalpha() for c in named):
                return named
        if kind == "region":
            return item_name(next(i for i in group.items if i.is_region), self.argument_of)
        if kind == "call":
            label = " ".join(filter(None, (label, self._only_parameter(group))))
        return label or works_on([n for i in group.items for n in i.nodes])

    def _read_by(self, group: Group) -> list[str]:
        read = self.flows.parameters_read(nid for i in group.items for nid in i.ids)
        return [parameter_name(p) for p in read]

    def _only_parameter(self, group: Group) -> str:
        """The parameter of a function that only multiplies by one: "first" of a convolution by it."""
        if any(i.site is not None or i.main.primitive not in PRODUCTS for i in group.items):
            return ""
        products = (n for i in group.items for n in i.nodes if n.primitive in PRODUCTS)
        found = {self._multiplied(n) or self._whose_gradient(n) for n in products}
        return found.pop() if len(found) == 1 else ""

    def item(self, item: Item, siblings: Sequence[Group | Item] = (), parent: str = "") -> str:
        """The name of one thing.

        Args:
          item: the thing.
          siblings: its neighbours; a residual is named by the part that makes it.
          parent: the name of the part around it.
        """
        if item.is_region and item.site is None:
            return self.group(Group(("region",), "", [item]))
        main = item.main
        if item.site is None and main.primitive in PRODUCTS and self._is_gradient(item):
            return self._gradient(item)
        return self._residual(item, siblings, parent) or item_name(item, self.argument_of)

    def _is_gradient(self, item: Item) -> bool:
        return self.phases[item.main.id] == BACKWARD and not item.is_recomputed

    # Gradients ---------------------------------------------------------------------------------------------------------
    def _gradient(self, item: Item) -> str:
        """A product of the backward pass by the parameter whose gradient it is, or that it is multiplied by."""
        if self._multiplied(item.main):
            return f"backward of {item_name(item, self.argument_of)}"
        parameter = self._whose_gradient(item.main)
        return f"gradient of {parameter}" if parameter else item_name(item, self.argument_of)

    def _multiplied(self, product: Node) -> str:
        """The parameter that a product multiplies by; "" for none."""
        names = (self.argument_of(v.id) for v in product.values)
        return next((short_parameter(n) for n in names if n), "")

    def _whose_gradient(self, product: Node) -> str:
        """The parameter that has the shape of what a product of the backward pass makes, among those its source line multiplies by.

        Where several have it, the one that the gradient it reads is multiplied by too.
        """
        shape = _sizes(product.outputs[0].shape)
        fitting = {p for p, s in self._weights.get((product.scope, frames_of(product)), ()) if s == shape}
        if len(fitting) > 1:
            fitting = fitting & {self._partners.get(v, "") for v in self._operands(product)} or fitting
        return " or ".join(sorted(fitting)) if len(fitting) <= _MOST_NAMED else "a weight"

    def _operands(self, node: Node) -> Iterable[int]:
        """Ids of the values that a node reads, as they were before they were cast, reshaped or broadcast."""
        return (self.flows.before(v).id for v in node.values)

    @functools.cached_property
    def _weights(self) -> dict[Any, list[tuple[str, tuple[int, ...]]]]:
        """Place of a product of the forward pass -> the parameters it multiplies by, with their sizes."""
        found: dict[Any, list[tuple[str, tuple[int, ...]]]] = {}
        for node in self.graph.nodes():
            if node.primitive not in PRODUCTS or self.phases.get(node.id) == BACKWARD:
                continue
            for value in node.values:
                if name := self.argument_of(value.id):
                    place = node.scope, frames_of(node)
                    found.setdefault(place, []).append((short_parameter(name), _sizes(value.shape)))
        return found

    @functools.cached_property
    def _partners(self) -> dict[int, str]:
        """Id of a value that the backward pass multiplies by a parameter -> that parameter."""
        found: dict[int, str] = {}
        for node in self.graph.nodes():
            if node.primitive in PRODUCTS and self.phases.get(node.id) == BACKWARD:
                parameter = self._multiplied(node)
                found.update((v, parameter) for v in self._operands(node) if parameter)
        return found

    # Residuals ---------------------------------------------------------------------------------------------------------
    def _residual(self, item: Item, siblings: Sequence[Group | Item], parent: str) -> str:
        """ "x + attention" for an addition of equal shapes to which a neighbouring part gives one operand; "" for anything else."""
        if item.site is not None or not self._adds_equals(item):
            return ""
        makers = {*self.flows.makers(item.main.id)}
        beside = [s for s in siblings if s is not item and _makes(s, makers)]
        names = [self.group(s) for s in beside if isinstance(s, Group)] or [parent] * (len(beside) == 1)
        return f"x + {names[-1]}" if any(names) else ""

    def _adds_equals(self, item: Item) -> bool:
        """Whether an item is one addition of two values of its own shape, neither of them broadcast."""
        if item.main.primitive != "add" or any(n is not item.main and not is_light(n) for n in item.nodes):
            return False
        values = item.main.values
        return len(values) == 2 and all(self.flows.before(v).shape == item.main.outputs[0].shape for v in values)


def _makes(part: Group | Item, ids: set[int]) -> bool:
    items = part.items if isinstance(part, Group) else [part]
    return any(not ids.isdisjoint(i.ids) for i in items)


def _sizes(shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(d for d in shape if d > 1))
