"""The sites and products that are XLA's code only because nothing was measured on the device, and what measuring may gain, by the
roofline."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...device import Device
from ...errors import ArgumentError
from ...graph.cost.cost import Cost, Costs
from ...graph.cost.kernel_model import kernels_of
from ...showing import Shown, plural, seconds_text
from ..engine.outcomes import Candidate, Rejection
from ..passes.matmul.route_table import ProductRoute


@dataclass(frozen=True, repr=False)
class Waiting(Shown):
    """What waits for `fusionlab.tune` on a device.

    Attributes:
      sites: ids; of a matrix product that no site has, the value it computes ("%12").
      saved_s: seconds that they can save at most by the roofline: the time of the kernels that XLA is expected to make of them, without
        that of one kernel for each site. None where the device's rates are not known, neither measured nor by the card's data sheet.
      whole_s: seconds of the whole program by the roofline; None likewise.
      products: how many of the sites are such products: whether a library runs one faster than XLA, the roofline does not tell.
    """

    sites: tuple[str, ...]
    saved_s: float | None = None
    whole_s: float | None = None
    products: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, JSON-able."""
        known = {"sites": list(self.sites), "saved_s": self.saved_s, "whole_s": self.whole_s}
        return known | {"products": self.products, "text": str(self)}

    def __str__(self) -> str:
        n = len(self.sites)
        text = f"{n} {plural('site', n)} {'waits' if n == 1 else 'wait'} for fl.tune"
        if self.saved_s is None or self.whole_s is None:
            return f"{text}: the rates of this device are not known, so that nothing is estimated"
        k = self.products
        which = f"{'a matrix product' if k == 1 else 'matrix products'}, which a library may run faster"
        if k == n:
            return f"{text}: {which}; the program takes {seconds_text(self.whole_s)} by the roofline"
        more = f"; {k} of them {'is' if k == 1 else 'are'} {which}" if k else ""
        return f"{text}: at most {seconds_text(self.saved_s)} of {seconds_text(self.whole_s)} by the roofline{more}"


def waiting_in(
    found: Iterable[Candidate | Rejection], routes: Iterable[ProductRoute], costs: Costs, device: Device
) -> Waiting | None:
    """The sites and products that wait, or None. `routes` and `costs` are the program's."""
    sites = [site for site in found if site.waits]
    taken = frozenset[int]().union(*map(_all_nodes, sites))
    products = [row.value for row in routes if row.waits and row.node not in taken]
    if not sites and not products:
        return None
    ids = (*(site.id for site in sites), *products)
    rates = device.at_most
    if rates is None:
        return Waiting(ids, products=len(products))
    times = [(frozenset(kernel.nodes), _at_best(kernel.cost, rates)) for kernel in kernels_of(costs)]
    parts = [part for site in sites for part in _parts(site)]
    alone = sum(_at_best(_fused(costs, part), rates) for part in _apart(parts))
    return Waiting(ids, max(0.0, _touched(times, parts) - alone), sum(time for _, time in times), len(products))


def _touched(times: Iterable[tuple[frozenset[int], float]], parts: Iterable[frozenset[int]]) -> float:
    """Seconds of the kernels that any of the parts has a node in."""
    nodes = frozenset().union(*parts)
    return sum(time for kernel, time in times if not nodes.isdisjoint(kernel))


def _apart(parts: Iterable[frozenset[int]]) -> list[frozenset[int]]:
    """Of parts with nodes in common the largest: one fusion can have them."""
    kept: list[frozenset[int]] = []
    for part in sorted(parts, key=len, reverse=True):
        if all(map(part.isdisjoint, kept)):
            kept.append(part)
    return kept


def _all_nodes(site: Candidate | Rejection) -> frozenset[int]:
    return site.node_ids if isinstance(site, Candidate) else site.site_ids


def _parts(site: Candidate | Rejection) -> list[frozenset[int]]:
    """The nodes of a site, and those of its backward pass."""
    own = _all_nodes(site)
    backward = site.backward.node_ids if site.backward is not None else frozenset()
    return [part for part in (own, backward - own) if part]


def _fused(costs: Costs, part: frozenset[int]) -> Cost:
    """The cost as one kernel; nothing for nodes in several blocks, which cannot be one."""
    try:
        return costs.fused(part)
    except ArgumentError:
        return Cost()


def _at_best(cost: Cost, rates: tuple[float, float]) -> float:
    bytes_per_s, flop_per_s = rates
    return max(cost.bytes_moved / bytes_per_s, cost.operations / flop_per_s)
