"""The conditions on every norm, and the rejections of near misses: another share of the sum, an epsilon that is not a number, statistics
along another axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ....graph.dtypes import arithmetic_dtype, is_float, narrows
from ....graph.matching.match import Miss
from ....graph.matching.region import CASTS, Region
from ....graph.program.ir import Node
from ....kernels.op.arrays import FLOATS as DTYPES
from ...engine.nearly import canonical_text
from ...engine.outcomes import Rejection
from ...engine.site import ARGUMENT, CLOSE_OVER, Site
from ...engine.wording import anchor_text
from .surroundings import ChannelGroups, Surroundings, crossing, reduced_axes

_CANCELS = (
    "mean(x^2) - mean(x)^2 cancels where |mean| is far above the standard deviation, and overflows sooner; the fused op computes "
    "the mean of (x - mean)^2 and is accurate there"
)
_SPREAD = (
    "x * inv - mean * inv cancels where |mean| is far above the standard deviation; the fused op subtracts the mean first and is "
    "accurate there"
)
_EPSILON_LIMIT = 1e-2  # at or above this it is no guard against a division by 0 any more
_NO_VECTOR = "it reads an operand that is neither a scale nor a bias with one entry per channel"
_STATISTICS_EDIT = (
    "use mean and variance unchanged (the variance clipped at 0 at most), and add epsilon to the variance"
)
BY_COUNT = "divide the sums by the number of entries (ddof=0)"
# What the operations of a norm are to a reader.
_WORDS = {
    "reduce_sum": "a sum over the normalised axis",
    "sum": "the mean of the squares plus epsilon, or x minus its mean,",
    "prod": "x over the root, or a square,",
}


class NormSite(Site):
    """A site at the root of a mean of squares, with the rejections for a site that matches no example.

    Attributes:
      around: the surroundings of the root.
      x: the canonical node of the normalised value, by its name in the examples.
    """

    words = _WORDS
    around: Surroundings
    x: Mapping[str, int]

    def missed(self, miss: Miss) -> Rejection:
        near, scalar = self.near_miss(miss), _scalar_at(miss)
        edit = near.edit
        if near.code == "scalar" and scalar == "1/N":
            edit = BY_COUNT  # two different shares of one sum: the sample variance of a right mean, mostly
        elif near.code == "structure" and scalar == "epsilon" and miss.wanted is not None:
            name = self.argument(miss.target)
            if name is not None:
                sentence = f"{anchor_text(self.anchor)}: {ARGUMENT.format('epsilon', name)}"
                near, edit = replace(near, sentence=sentence), CLOSE_OVER.format(name)
            else:
                edit = "make epsilon a Python number, known when the program is traced"
        elif miss.wanted is not None and miss.pattern.leaf_of.get(miss.wanted) == "x":
            instead = f"{canonical_text(self.view, miss.target, self.anchor)} is found in its place"
            near = replace(near, sentence=f"{anchor_text(self.anchor)} normalises {self.around.x!r}, but {instead}")
        return replace(near, code="structure" if near.code == "mask" else near.code, edit=edit)

    def grouped(self, channels: ChannelGroups, odd: Node | None) -> Rejection:
        """The rejection of a GroupNorm in a layout that the op does not take, or with a node that a norm does not have."""
        groups, each, guilty = channels.groups, channels.each, [odd] if odd is not None else []
        subject = f"{anchor_text(self.anchor)} belongs to a GroupNorm with {groups} groups of {each} channels"
        if channels.batch_axes is not None:
            code, edit = "structure", _STATISTICS_EDIT
            where = (
                f"it contains {anchor_text(odd)}, which the fused op does not have" if odd is not None else _NO_VECTOR
            )
        else:
            code, where = "axes", "it can be fused if the channels are the last axis, after the batch and the positions"
            edit = f"call fusionlab.ops.group_norm(x, scale, bias, groups={groups}) there, with the channels last"
            guilty = []
        return self.rejection(code, f"{subject}; {where}", guilty, edit=edit, concepts=("group_norm",))

    def check_guarded(self, epsilon: float) -> None:
        """Declines an epsilon out of range: one of 0 does not prevent a division by 0, and a large one makes another function."""
        if not 0 < epsilon < _EPSILON_LIMIT:
            limits = f"above 0 and below {_EPSILON_LIMIT:g}"
            sentence = f"{anchor_text(self.anchor)} has epsilon {epsilon:g}; a norm's is {limits}"
            self.decline("scalar", sentence, edit=f"use an epsilon {limits}")

    def notes(self, region: Region) -> tuple[str, ...]:
        """Where the fused op is more accurate: a variance by squares has two sums below its root, that of (x - mean)^2 has one."""
        by_squares = len({self.search.view.ref[n.outputs[0].id].nid for n in self.around.sums}) > 1
        spread = any(n in region.nodes for n in self.around.shifts)
        return (_CANCELS,) * by_squares + (_SPREAD,) * spread

    def check_dtypes(self, region: Region) -> None:
        """Declines dtypes in which the op does not compute, and roundings that it would not make."""
        dtype = region.root.dtype
        given = {str(v.dtype) for v in (*region.leaves.values(), region.root)}
        where, edit = anchor_text(self.anchor), None
        if not given <= set(DTYPES):  # of others the arithmetic is not known
            problem = f"{where} computes in {', '.join(sorted(given))}; the fused op takes {', '.join(DTYPES)}"
            self.decline("dtype", problem, site=region.nodes)
        computed, rounding = np.dtype(arithmetic_dtype(dtype)), _rounding(region, region.leaves["x"].dtype)
        if any(narrows(computed, v.dtype) for v in region.leaves.values()):
            problem = f"has parameters wider than {computed.name}, in which it would be computed"
        elif rounding is not None:
            problem = f"reads {anchor_text(rounding)}, which rounds to {rounding.outputs[0].dtype}; the fused op would not round there"
            edit = "keep the statistics in the dtype of x, or a wider one"
        else:
            return
        self.decline("dtype", f"{where} {problem}", edit=edit, site=region.nodes)

    def check_shifted(self) -> None:
        """Declines a sum of multiples of the root that is not x minus its mean."""
        for node in self.around.shifts[:1]:
            problem = "adds two multiples of the root that are not x and -mean(x) times the same factor"
            edit = (
                "shift x * inv by -mean(x) * inv: with one root, one epsilon, and the scale in both terms or in neither"
            )
            self.decline("structure", f"{anchor_text(node)} {problem}", [node], edit=edit)

    def check_transposed(self) -> None:
        """Declines statistics that are broadcast along the wrong axis: without keepdims, in a square array."""
        crossed = next((c for v in self.around.results if (c := crossing(self.view, self.x["x"], self.nid(v)))), None)
        node = None if crossed is None else self.view.maker(crossed)
        if node is None:
            return
        sentence = f"{anchor_text(node)} reads statistics along a different axis from the one whose rows they describe"
        sums = self.around.sums_of_x[:1]
        for total in sums:
            axes = ", ".join(map(str, reduced_axes(total, self.around.x)))
            sentence += f"; {anchor_text(total)} sums over axis {axes}"
        self.decline("axes", sentence, [node, *sums], edit="keep the axis of mean and variance: keepdims=True")


def _scalar_at(miss: Miss) -> str | None:
    """The name of the example's number at which a match ended; None if there is none."""
    edge = miss.pattern.edges.get(miss.at) if miss.at is not None else None
    return None if edge is None else edge.scalar


def _rounding(region: Region, dtype: Any) -> Node | None:
    """The first cast inside a site to a float of fewer bits than `dtype`."""
    casts = ((n, n.outputs[0].dtype) for n in region.nodes if n.primitive in CASTS)
    return next((n for n, to in casts if is_float(to) and narrows(to, dtype)), None)
