"""A forward site and its backward pass, as reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...graph.program.ir import Atom, Value
from ...showing import Shown
from .wording import plain


@dataclass(frozen=True, eq=False)
class Pair(Shown):
    """A forward site and its backward pass.

    Attributes:
      site: id of the candidate or rejection.
      cotangent: the value that is the cotangent of the site's result; the literal 1 for a scalar that the program differentiates itself.
      gradients: operand -> the value that is its gradient, or a sum that contains it.
      absent: float operands whose gradient is not computed from that cotangent here (data, mostly).
      node_ids: nodes of the backward pass that are fused with the site; empty if it is left as it is.
      stays: why it is left as it is; None if it is fused with the site.
      idle: it is fused only with the site, which is left as it is unless requested.
      grouping: for a fused linear layer, which parts form one op: "per_layer" or "chained" (see the pass's option).
      joins: the operand after whose gradient act' of the layer before is computed; None if there is none.
    """

    site: str
    cotangent: Atom
    gradients: Mapping[str, Value]
    absent: tuple[str, ...]
    node_ids: frozenset[int] = frozenset()
    stays: str | None = None
    idle: bool = False
    grouping: str | None = None
    joins: str | None = None

    def __str__(self) -> str:
        return f"{self.site}: {self.text}"

    __repr__ = __str__

    @property
    def is_fused(self) -> bool:
        """Whether it is fused with the site by default."""
        return self.stays is None and not self.idle

    @property
    def text(self) -> str:
        """Its description, without the site's name."""
        found = ", ".join(f"d{name} = {v!r}" for name, v in self.gradients.items())
        rest = f"; no gradient of {', '.join(self.absent)}" if self.absent else ""
        how = f"left as it is: {self.stays}" if self.stays is not None else f"{self._when()}{self._grouped()}"
        return f"its backward pass is here: from {self.cotangent!r}, {found}{rest}; {how}"

    def _when(self) -> str:
        return "fused with the site if requested" if self.idle else "fused with the site"

    def _grouped(self) -> str:
        joined = f", with act' of the layer before after d{self.joins}" if self.joins else ""
        return f" ({self.grouping}{joined})" if self.grouping else ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, JSON-able: values by name."""
        return plain(self, "site cotangent gradients absent node_ids is_fused stays idle grouping joins")


def pairs_line(alike: Sequence[Pair]) -> str:
    """One line for pairs of one pass and with the same gradients."""
    first, n = alike[0], len(alike)
    names = ", ".join("d" + name for name in first.gradients)
    which = first.site if n == 1 else f"{n} sites, {first.site} and more"
    rest = f"; no gradient of {', '.join(first.absent)}" if first.absent else ""
    when = f"; {first._when()}" if first.idle else ""
    how = f"; left as it is: {first.stays}" if first.stays is not None else f"{when}{first._grouped()}"
    return f"{which}: {names}{rest}{how}"
