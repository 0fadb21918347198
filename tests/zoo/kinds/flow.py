"""Learned products and their biases, counted by following parameters through a traced program.

This is a check on the truths and on nothing else: it knows the parameters of a model, which a matcher does not, and only
asks of each product whether one operand is a parameter and whether another parameter, as long as the product has
features, is added to its result with nothing but layout and casts in between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# What leaves a value the same but for its layout or dtype, and what takes a part of it.
LAYOUT = {"broadcast_in_dim", "convert_element_type", "copy", "copy_p", "name", "pcast", "pvary", "reshape", "squeeze"}
LAYOUT |= {"expand_dims", "stop_gradient", "transpose"}
PARTS = {"dynamic_slice", "gather", "slice", "split"}


@dataclass(frozen=True)
class Parameter:
    """A value that is a parameter, or part of one, of so many elements."""

    size: int


@dataclass(frozen=True)
class Product:
    """The result of a product, by its number, before any bias."""

    number: int


Mark = Parameter | Product | None


def inner_jaxpr(value: Any) -> Any:
    """The jaxpr in a parameter of an equation, closed or not; None if it is none."""
    value = getattr(value, "jaxpr", value)
    return value if hasattr(value, "eqns") else None


@dataclass
class Flow:
    """What has been counted: the features of every learned product, and the numbers of those that add a bias."""

    features: list[int] = field(default_factory=list)
    biased: set[int] = field(default_factory=set)

    def run(self, jaxpr: Any, marks: Sequence[Mark]) -> list[Mark]:
        """Follow the marks of a jaxpr's inputs to its results."""
        known = dict(zip(jaxpr.invars, marks, strict=True))

        def mark(atom: Any) -> Mark:
            return None if hasattr(atom, "val") else known.get(atom)

        for equation in jaxpr.eqns:
            results = self.step(equation, [mark(atom) for atom in equation.invars])
            known |= dict(zip(equation.outvars, results, strict=True))
        return [mark(atom) for atom in jaxpr.outvars]

    def step(self, equation: Any, marks: list[Mark]) -> list[Mark]:
        """The marks of one equation's results."""
        name = equation.primitive.name
        count = len(equation.outvars)
        if name in LAYOUT:
            return [marks[0]] * count
        if name in PARTS and isinstance(marks[0], Parameter):
            return [Parameter(math.prod(result.aval.shape)) for result in equation.outvars]
        if name == "dot_general":
            return [self.product(equation, marks)]
        if name in ("add", "add_any"):
            self.sum(marks)
            return [None]
        return self.call(name, equation, marks) or [None] * count

    def product(self, equation: Any, marks: list[Mark]) -> Mark:
        contracted = equation.params["dimension_numbers"][0]
        if not contracted[0]:
            return None  # entry by entry, as a norm's scale
        for side in (0, 1):
            if isinstance(marks[side], Parameter) and not isinstance(marks[1 - side], Parameter):
                shape = equation.invars[side].aval.shape
                kept = [size for axis, size in enumerate(shape) if axis not in contracted[side]]
                self.features.append(math.prod(kept))
                return Product(len(self.features) - 1)
        return None

    def sum(self, marks: list[Mark]) -> None:
        for one, other in (marks, marks[::-1]):
            if isinstance(one, Product) and isinstance(other, Parameter) and other.size == self.features[one.number]:
                self.biased.add(one.number)

    def call(self, name: str, equation: Any, marks: list[Mark]) -> list[Mark]:
        """Follow the marks into the jaxprs of a call; those of a loop, a scan or a branch do not come out again."""
        params = equation.params
        if name == "while":
            self.enter(inner_jaxpr(params["body_jaxpr"]), marks[params["cond_nconsts"] :])
            return []
        if name == "cond":
            for branch in params["branches"]:
                self.enter(inner_jaxpr(branch), marks[1:])
            return []
        bodies = (inner_jaxpr(value) for value in params.values())
        body = next((body for body in bodies if body is not None and len(body.invars) == len(marks)), None)
        results = self.enter(body, marks) if body is not None else []
        return results if name != "scan" and len(results) == len(equation.outvars) else []

    def enter(self, body: Any, marks: list[Mark]) -> list[Mark]:
        """Inside a scan or on one device, a parameter is as large as what is seen of it there."""
        sizes = [math.prod(variable.aval.shape) for variable in body.invars]
        seen = (
            Parameter(size) if isinstance(mark, Parameter) else mark for mark, size in zip(marks, sizes, strict=True)
        )
        return self.run(body, list(seen))


def learned_products(jaxpr: Any, parameters: int) -> tuple[int, int]:
    """How many learned products a jaxpr has with a bias and without, its first inputs being the `parameters`."""
    flow = Flow()
    sizes = [math.prod(variable.aval.shape) for variable in jaxpr.invars]
    flow.run(jaxpr, [Parameter(size) if index < parameters else None for index, size in enumerate(sizes)])
    return len(flow.biased), len(flow.features) - len(flow.biased)
