"""The route of a product, and why: a list of routes in order of priority, each of which takes the product or explains why not.

A route is asked what it supports first, which is plain arithmetic, and only then what was measured: on a device that a library knows
nothing of, nobody asks the library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....device import Device
from ....showing import Shown
from ...choose.choices import Choice, case_text
from ...op.chooser import is_to_measure
from ...op.implementation import ChoiceKind
from ..gemm_epilogue.cublaslt import compute_of
from . import support
from .axes import ProductAxes
from .support import Reason

SIZES = ("batch", "rows", "columns", "inner")
FindMeasured = Callable[[], Choice | None]


@dataclass(frozen=True, repr=False)
class Route(Shown):
    """One way to run a product.

    Attributes:
      name: "library", "kernel" or "xla".
      implementation: of the op `matmul`.
      tag: what a product is marked with that takes it: "evaluate" (a library evaluates it), "kernel" or "xla".
      supports: (shapes, device, **attrs) -> why it does not take a call, or None.
    """

    _says = "{0.name}: runs as {0.implementation} ({0.tag})"

    name: str
    implementation: str
    tag: str
    supports: Callable[..., Reason | None]


ROUTES = (
    Route("library", "cublaslt", "evaluate", support.library),
    Route("kernel", "cuda", "kernel", support.kernel),
    Route("xla", "xla", "xla", lambda *a, **k: None),
)


@dataclass(frozen=True, repr=False)
class Answer(Shown):
    """The answer of a route for a product.

    Attributes: `route`; `takes`; `code` ("" where it takes it, else a key of `errors.ROUTE_REASONS`); `sentence`.
    """

    route: Route
    takes: bool
    code: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.route.name}: {'takes it:' if self.takes else f'[{self.code}]'} {self.sentence}"

    def _row(self) -> dict[str, Any]:
        return {"route": self.route.name, "takes it": self.takes, "code": self.code, "why": self.sentence}


def answers(
    measured: FindMeasured, shapes: Mapping[str, Any], device: Device, library: bool | None, **attrs: Any
) -> tuple[Answer, ...]:
    """The answers of the routes, in order, up to the one that takes the product.

    Args:
      measured: the measurement of the product, if there is one.
      shapes: of a, b and bias, by name, with dtypes.
      device: the device to run on.
      library: True: the library takes what it can; False: it takes nothing; None: it takes what it was measured fastest for.
      attrs: of the primitive.
    """
    answered = []
    for route in ROUTES:
        answered.append(_answer(route, measured, shapes, device, library, attrs))
        if answered[-1].takes:
            return tuple(answered)
    # A named one that cannot run it: the product stays as it is written, and that is XLA's.
    return (*answered[:-1], Answer(ROUTES[-1], True, "", "the product as it is written"))


def _answer(
    route: Route,
    measured: FindMeasured,
    shapes: Mapping[str, Any],
    device: Device,
    library: bool | None,
    attrs: Mapping[str, Any],
) -> Answer:
    named = attrs.get("implementation")
    if named not in (None, route.implementation):
        return Answer(route, False, "switch", f"another implementation was named: {named!r}")
    if route.name == "library" and library is False and named is None:
        return Answer(route, False, "switch", "the switch is off: matmul_schedule=dict(library=False)")
    unable = route.supports(shapes, device, **attrs)
    if unable is not None:
        return Answer(route, False, unable.code, unable.sentence)
    if route.name == "xla":
        return Answer(route, True, "", "the product as XLA compiles it")
    if named is not None:
        return Answer(route, True, "", "named by the caller")
    if route.name == "library" and library:
        return Answer(route, True, "", "the switch is on: matmul_schedule=dict(library=True)")
    return _by_measurement(route, measured(), device)


def _by_measurement(route: Route, found: Choice | None, device: Device) -> Answer:
    if is_to_measure():
        return Answer(route, True, "", "to be measured")
    if found is None:
        where = device.arch or "this architecture"
        return Answer(
            route,
            False,
            ChoiceKind.UNMEASURED.value,
            f"no such product was measured for {where}; fusionlab.tune measures",
        )
    if found.implementation != route.implementation:
        return Answer(route, False, ChoiceKind.SLOWER.value, found.reason)
    return Answer(route, True, "", found.reason)


def case(shapes: Mapping[str, Any], **attrs: Any) -> str:
    """The product as text: all that its speed depends on."""
    dimensions, activation, is_biased = attrs["dimensions"], attrs["activation"], "bias" in shapes
    sizes = ProductAxes.of(shapes["a"].shape, shapes["b"].shape, dimensions)
    dtype = np.dtype(shapes["a"].dtype).name
    sides = [None if operand is None else operand.transposed for operand in support.layouts(shapes, dimensions)]
    content: dict[str, Any] = {
        "dtype": dtype,
        "product": attrs["product"],
        "out": attrs["out"],
        "compute": compute_of(dtype, attrs["precision"]),
        "activation": activation,
        "bias": sizes.bias(shapes["bias"].shape) if is_biased else "none",
        "scaled": [attrs["alpha"] != 1.0, attrs["beta"] != 1.0 and is_biased],
        "a": {None: "other", True: "KM", False: "MK"}[sides[0]],
        "b": {None: "other", True: "KN", False: "NK"}[sides[1]],
        "residuals": bool(attrs.get("residuals")) and activation != "none",
    }
    if is_biased and (given := np.dtype(shapes["bias"].dtype).name) != attrs["product"]:
        content["bias_dtype"] = given  # XLA widens it in a kernel behind the product
    content |= dict(zip(SIZES, sizes.sizes, strict=True))
    return case_text("matmul", "call", **content)
