"""What a norm that is nearly one is told: another share of the sum, an epsilon that is no number, statistics along another axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..graph.match import Miss
from .base import anchor_text
from .findings import Rejection
from .nearly import shown
from .norms import Surroundings, crossing, summed_axes
from .site import ARGUMENT, CLOSE_OVER, Site

BY_COUNT = "divide the sums by the number of entries (ddof=0)"
# What the operations of a norm are to a reader.
_WORDS = {
    "reduce_sum": "a sum over the axis that is normalised",
    "sum": "the mean of the squares and epsilon, or x without its mean,",
    "prod": "x over the root, or a square,",
}


class NormMisses(Site):
    """A site at the root of a mean of squares: what is said where it matches no example.

    Attributes:
      around: what stands around the root.
      x: the canonical node of what is normalised, by its name in the examples.
    """

    words = _WORDS
    around: Surroundings
    x: Mapping[str, int]

    def missed(self, miss: Miss) -> Rejection:
        near = self.near_miss(miss)
        edge, edit = miss.pattern.edges.get(miss.at) if miss.at is not None else None, near.edit
        if near.code == "scalar" and edge is not None and edge.scalar == "1/N":
            edit = BY_COUNT  # two different shares of one sum: the sample variance of a right mean, mostly
        elif near.code == "structure" and edge is not None and edge.scalar == "epsilon" and miss.wanted is not None:
            name = self.argument(miss.target)
            if name is not None:
                sentence = f"{anchor_text(self.anchor)}: {ARGUMENT.format('epsilon', name)}"
                near, edit = replace(near, sentence=sentence), CLOSE_OVER.format(name)
            else:
                edit = "make epsilon a Python number, known when the program is traced"
        elif miss.wanted is not None and miss.pattern.leaf_of.get(miss.wanted) == "x":
            stands = f"{shown(self.view, miss.target, self.anchor)} stands where that is needed"
            near = replace(near, sentence=f"{anchor_text(self.anchor)} normalises {self.around.x!r}, and {stands}")
        return replace(near, code="structure" if near.code == "mask" else near.code, edit=edit)

    def grouped(self) -> Rejection | None:
        """The rejection of a GroupNorm: statistics over part of an axis, its channels, that a reshape takes apart, and over positions."""
        channels = self.around.groups()
        if channels is None:
            return None
        groups, each = channels
        what = (
            f"is of a GroupNorm, of {groups} groups of {each} channels: its statistics are over a group's channels and over positions; "
            f"no pass rewrites it, and XLA keeps it"
        )
        call = f"fusionlab.ops.group_norm(x, scale, bias, groups={groups})"
        edit = f"call {call} there, with the channels last: one op, with kernels of its own on a GPU"
        return self.rejection("axes", f"{anchor_text(self.anchor)} {what}", edit=edit, concepts=("group_norm",))

    def shifted(self) -> Rejection | None:
        """The rejection for multiples of the root that are added up and are not x less its mean."""
        if not self.around.shifts:
            return None
        node = self.around.shifts[0]
        what = "adds two multiples of the root, which are not x and minus its mean by the same factor"
        edit = "shift x * inv by -mean(x) * inv: one root, one epsilon, and the scale in both or in neither"
        return self.rejection("structure", f"{anchor_text(node)} {what}", [node], edit=edit)

    def transposed(self) -> Rejection | None:
        """The rejection for statistics that stand along another axis than they were taken for: without keepdims, in a square array."""
        crossed = next((c for v in self.around.results if (c := crossing(self.view, self.x["x"], self.nid(v)))), None)
        node = None if crossed is None else self.raw_of(crossed)
        if node is None:
            return None
        sums = self.around.sums_of_x
        of = (
            f"; {anchor_text(sums[0])} sums over axis {', '.join(map(str, summed_axes(sums[0], self.around.x)))}"
            if sums
            else ""
        )
        sentence = (
            f"{anchor_text(node)} reads statistics along another axis than that of the rows they were taken of{of}"
        )
        return self.rejection(
            "axes", sentence, [node, *sums[:1]], edit="keep the axis of mean and variance: keepdims=True"
        )
