"""Regions that no fused op can replace, whatever they compute."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...graph.declined import Declined
from ...graph.dtypes import is_float, narrows
from ...graph.matching.region import Region
from ...graph.primitives import SUMS_OVER_DEVICES
from ...graph.program.in_shard_map import has_mesh
from ...graph.program.ir import Atom, Node, all_nodes
from .wording import anchor_text


def check_fit(region: Region, sums: bool = False) -> None:
    """Declines a region that no fused op could replace, whatever it computes."""
    values = *region.inputs, *region.roots
    if any(0 in v.shape for v in values):
        raise Declined(f"{region.root!r} or one of its operands is empty", "axes")
    summed = None if sums else _sum_over_devices(region)
    if summed is not None:
        raise Declined(f"{anchor_text(summed)} sums over devices inside the site; the fused op runs on one", "region")
    if not all(has_mesh(v.aval) for v in values):
        along = "varies, or has yet to be summed, along an axis of a mesh that does not surround it"
        raise Declined(f"{region.root!r} or one of its operands {along}", "region")
    rounding = _rounding(region)
    if rounding is not None:
        rounded = rounding.outputs[0].dtype
        what = f"{anchor_text(rounding)} rounds to {rounded} inside the site"
        raise Declined(f"{what}; the fused op would not round there", "dtype")


def _sum_over_devices(region: Region) -> Node | None:
    return next((n for n in all_nodes(region.nodes) if n.primitive in SUMS_OVER_DEVICES), None)


def _rounding(region: Region) -> Node | None:
    """The first node that rounds to fewer bits than the fused op would keep there."""
    floats = _floats((*region.inputs, *region.roots))
    for node in all_nodes(region.nodes):
        rounded = node.outputs[0].dtype
        read = _floats(node.inputs)
        # A cast may round to what the site's operands have anyway; a product that rounds its own sum is another matter.
        against = floats if node.primitive == "convert_element_type" else read
        if is_float(rounded) and read and all(narrows(rounded, dtype) for dtype in against):
            return node
    return None


def _floats(atoms: Iterable[Atom]) -> list[Any]:
    """The floating dtypes among those of some values."""
    return [a.dtype for a in atoms if is_float(a.dtype)]
