"""The `gemm_epilogue` op that replaces a site: its operands from the site's inputs, its attributes, and its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....graph.matching.region import Region
from ....graph.program.ir import Node
from ....kernels import OPS
from ....kernels.ops.gemm_epilogue.cublaslt import product_arithmetic
from ...engine.base import Substitution
from ...engine.layout import AxisClasses, arrange, axes_of, input_positions, ordered_classes, restore
from ...engine.passages import replayed, unplaced
from .linear_parts import Linear, LinearSite


@dataclass(frozen=True)
class _Product:
    """The axis classes of a product: those of `x` and of `w`, grouped into rows, contracted axes and columns.

    `pointwise`: whether it is a convolution, whose weight has axes of size 1.
    """

    x: AxisClasses
    w: AxisClasses
    rows: tuple[int, ...]
    contracted: tuple[int, ...]
    columns: tuple[int, ...]
    pointwise: bool

    @classmethod
    def of(cls, x: AxisClasses, w: AxisClasses, pointwise: bool) -> _Product:
        contracted = ordered_classes(w, [c for c in w if c is not None and c in x])
        rows, columns = (tuple(c for c in axes if c is not None and c not in contracted) for axes in (x, w))
        return cls(x, w, rows, contracted, columns, pointwise)

    @property
    def direct(self) -> bool:
        """Whether the op takes x in its layout, and w up to axes of size 1; otherwise their axes are merged first."""
        if len(self.contracted) != 1 or len(self.columns) != 1 or len(self.x) < 2:
            return False
        return len(self.w) == 2 or (self.pointwise and None not in self.x)

    @property
    def contracts(self) -> tuple[int, int]:
        """The axes of x and of w that the op contracts."""
        if not self.direct:
            return -1, 0
        return self.x.index(self.contracted[0]), self._long.index(self.contracted[0])

    @property
    def x_groups(self) -> list[Sequence[int]]:
        return [*([[c] for c in self.rows] or [[]]), self.contracted]

    @property
    def w_groups(self) -> list[Sequence[int]]:
        return [[c] for c in self._long] if self.direct else [self.contracted, self.columns]

    @property
    def _long(self) -> list[int]:
        return [c for c in self.w if c is not None]


def linear_plan(
    site: LinearSite,
    linear: Linear,
    region: Region,
    after: tuple[Node, ...],
    attributes: tuple[str, Mapping[str, Any]],
    widened: Any,
) -> Substitution:
    """Arranges the operands as x [*M, K], w [K, N] or [N, K], b [N]; restores the result to the axes of the match, and through its views.

    Args:
      site, linear, region: the site, its linear part, and its region.
      after: the views after the site.
      attributes: the activation, and the part computed in float32.
      widened: the dtype that operands are widened to first; None where none is.
    """
    search, behind, m = site.search, linear.behind, linear.match
    view, sizes = search.view, m.sizes
    axes = {
        role: axes_of(m, view, linear.leaf(role), v)
        for role, v in region.leaves.items()
        if role != "b" or linear.matched_bias
    }
    product = _Product.of(axes["x"], axes["w"], site.anchor.primitive != "dot_general")
    pick = input_positions(region)
    matched = linear.value if behind is None and linear.bias else site.product
    root_axes = axes_of(m, view, m.pattern.root, matched)  # an activation keeps the axes
    views = (*(behind.views if behind is not None else ()), *after)

    def added(given: Any) -> Any:
        if behind is None:
            return arrange(given, axes["b"], [product.columns], sizes)
        given = unplaced(site, region.leaves["b"], behind.added, behind.views, given)
        return arrange(given, tuple(c if c in product.columns else None for c in root_axes), [product.columns], sizes)

    def given(inputs: Any, role: str) -> Any:
        return inputs[pick[role]] if widened is None else inputs[pick[role]].astype(widened)

    def operands(*inputs: Any) -> tuple[Any, ...]:
        x, w = given(inputs, "x"), given(inputs, "w")
        bias = added(given(inputs, "b")) if linear.bias else None
        if not product.direct:
            x = arrange(x, product.x, product.x_groups, sizes)
        if not product.direct or product.pointwise:
            w = arrange(w, product.w, product.w_groups, sizes)
        return x, w, bias

    def finish(out: Any) -> Any:
        groups = [*([c] for c in product.rows), list(product.columns)]
        return replayed(views, restore(out, groups, root_axes, matched.shape, sizes))

    activation, wide = attributes
    x_contract, w_contract = product.contracts
    attrs = {
        "activation": activation,
        "x_contract": x_contract,
        "w_contract": w_contract,
        "precision": site.anchor.params.get("precision"),
        "implementation": search.implementation,
        **wide,
    }
    op = OPS["gemm_epilogue"]
    arithmetic = product_arithmetic(str(widened or region.leaves["x"].dtype), attrs["precision"], search.device)
    return Substitution(op, attrs, operands, finish, op.formula(**attrs | {"bias": linear.bias}), arithmetic)
