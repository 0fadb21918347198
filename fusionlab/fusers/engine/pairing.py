"""Forward sites of a differentiated program, each with its backward pass.

A site whose inner values the backward pass reads can be fused only together with that pass; any other can be fused with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ...graph.backward.find import Backward, Derivatives, SumTerms, find_backward
from ...graph.backward.gradients import first_gradients
from ...graph.backward.joined_blocks import joined_views
from ...graph.backward.pair import Pairer, Pairing
from ...graph.canonical.view import CanonicalView
from ...graph.certify.certify import Certifier
from ...graph.declined import Declined
from ...graph.dtypes import is_float
from ...graph.matching.region import Region
from ...graph.program.boundary import Fault, guarded
from ...graph.program.graph import Graph
from ...graph.program.ir import Block
from ...graph.program.order import PairsWaitError, in_order
from ...graph.program.scopes import in_backward
from .declining import FUSE_FIRST, attempted
from .outcomes import Candidate, Rejection, declined
from .overlaps import part_in, parts_in
from .pairs import Pair


def has_backward_pass(graph: Graph) -> bool:
    """Whether a program contains a backward pass."""
    return any(map(in_backward, graph.nodes()))


def with_backward(
    graph: Graph,
    views: Iterable[CanonicalView],
    found: Sequence[Candidate | Rejection],
    certifier: Certifier,
    derivatives: Derivatives,
) -> list[Candidate | Rejection]:
    """The sites of a differentiated program, each with its backward pass; a site that needs one and has none is declined."""
    search = _BackwardSearch(graph, views, certifier, derivatives)
    result: dict[int, list[Candidate | Rejection]] = {}
    # From the last site to the first, as the backward pass runs; of two that share nodes the larger one first.
    for i in sorted(range(len(found)), key=lambda i: _place(found[i]), reverse=True):
        result[i] = guarded(
            lambda i=i: list(search.resolved(found[i])), lambda fault, i=i: [failed_on(found[i], fault)]
        )
    for block in graph.blocks():
        search.untangle(block, result)
    settled = (item for i in range(len(found)) for item in result[i])
    return [replace(item, alternatives=()) if isinstance(item, Candidate) else item for item in settled]


def failed_on(item: Candidate | Rejection, fault: Fault) -> Rejection:
    """The rejection of a site on which FusionLab failed after finding it."""
    if isinstance(item, Rejection):
        return item
    where = f" ({item.source})" if item.source else ""
    sentence, nodes = f"{item.formula}{where} is a site, but {fault}", tuple(sorted(item.node_ids))
    return declined(item, "uncertified", sentence, node_ids=nodes, origin=fault.origin, failed=True)


def _place(item: Candidate | Rejection) -> tuple[int, int]:
    region = item.region
    return (region.nodes[-1].id, len(region.nodes)) if region is not None else (-1, 0)


def _has_several(region: Region) -> bool:
    """Whether several results of a region may be differentiated."""
    return not region.aside and any(is_float(v.dtype) for v in region.others)


def _is_alone(item: Candidate | Rejection) -> bool:
    """Whether the gradients of a site are sites of their own."""
    return isinstance(item, Candidate) and item.alone


class _BackwardSearch:
    """The search for the backward pass of a region: in its own block, then in the blocks that read its results."""

    def __init__(
        self, graph: Graph, found_views: Iterable[CanonicalView], certifier: Certifier, derivatives: Derivatives
    ) -> None:
        self.derivatives = derivatives
        self.pairer = Pairer(graph, certifier)
        self.views: dict[str, list[CanonicalView]] = {}
        plain = list(found_views)
        for path, view in (*((v.block.path, v) for v in plain), *joined_views(plain)):
            self.views.setdefault(path, []).append(view)
        self.sums: dict[int, SumTerms] = {}
        self.taken: set[int] = set()  # terms of gradients that a site has already
        self.yielded: set[int] = set()  # those of them that an idle site has: it loses to any that shares nodes with it
        # (view, canonical node of an operand) -> the canonical node of its gradient: what makes that operand has this cotangent
        self.expected: dict[tuple[int, int], int] = {}

    def resolved(self, item: Candidate | Rejection) -> Iterator[Candidate | Rejection]:
        """A site with its backward pass, or the outcome that replaces it if it needs one and there is none."""
        region = item.region
        if region is not None and _has_several(region):
            yield from self.without(item, "it has several results")
            return
        found = None if region is None or _is_alone(item) else self.backward(region)
        if region is None or found is None:
            yield from self.without(item, "its backward pass was not found")
            return
        given = {name: share.value for name, share in found.gradients.items()}
        pair = Pair("", found.cotangent, given, found.absent)
        if isinstance(item, Rejection):
            yield replace(item, backward=replace(pair, stays="the site is not fused"))
            return
        pairing = attempted(lambda: self.paired(item, region, found), lambda reason: reason.sentence)
        if isinstance(pairing, str):
            yield from self.without(item, pairing, pair)
            return
        pair = replace(pair, gradients=pairing.gradients, node_ids=pairing.node_ids)
        yield replace(item, backward=pair, site=replace(item.site, backward=pairing.part))

    def paired(self, item: Candidate, region: Region, found: Backward) -> Pairing:
        key = item.op, tuple(sorted((k, str(v)) for k, v in item.attrs.items())), item.formula
        pairing = self.pairer.plan(region, item.site.fn, key, found)
        own = {i for _, share in pairing.part.gradients for i in share.own}
        if not own.isdisjoint(self.taken if item.idle else self.taken - self.yielded):
            raise Declined("its gradient is also the gradient of another site")
        self.taken |= own
        self.yielded = self.yielded | own if item.idle else self.yielded - own
        view = found.view
        for i, share in pairing.part.gradients:
            self.expected[id(view), view.ref[region.inputs[i].id].nid] = view.ref[share.value.id].nid
        return pairing

    def without(
        self, item: Candidate | Rejection, why: str, pair: Pair | None = None
    ) -> Iterator[Candidate | Rejection]:
        """A site whose backward pass is left as it is: the site alone if it has no alternatives, else the first feasible alternative."""
        kept = None if pair is None else replace(pair, stays=why)
        if isinstance(item, Rejection) or not item.alternatives:
            yield replace(item, backward=kept) if kept else item
            return
        for number, other in enumerate(item.alternatives, 1):
            if isinstance(other, Candidate):
                yield from self.resolved(replace(other, alternatives=item.alternatives[number:]))
                return
            if other.code == "escapes":
                # Where the reader is the user's own code, the backward pass is not what stands in the way.
                more = f"; it cannot be fused with its backward pass either: {why}" if other.edit == FUSE_FIRST else ""
                yield replace(other, sentence=other.sentence + more, backward=kept)
            else:
                yield from self.resolved(other)

    def backward(self, region: Region) -> Backward | None:
        found = (self.backward_in(view, region) for view in self.views[region.block.path])
        return max((b for b in found if b is not None), key=lambda b: len(b.gradients), default=None)

    def backward_in(self, view: CanonicalView, region: Region) -> Backward | None:
        expected = self.expected.get((id(view), view.ref[region.root.id].nid))
        return find_backward(view, region, self.derivatives, self.sums_of(view), expected, self.taken)

    def untangle(self, block: Block, result: dict[int, list[Candidate | Rejection]]) -> None:
        """Gives up pairs of a block that depend on each other, until none do. This happens if cotangents do not depend on results."""
        while True:
            pairs = parts_in(block, ((i, item) for i, items in result.items() for item in items))
            try:
                in_order(block, first_gradients(block, pairs))
                return
            except PairsWaitError as error:
                why = "it and another backward pass would each wait for the other's gradients"
                items = result[error.number]
                undone = (self.undone(i, why) if part_in(block, i) else iter([i]) for i in items)
                result[error.number] = [item for some in undone for item in some]

    def undone(self, item: Candidate | Rejection, why: str) -> Iterator[Candidate | Rejection]:
        """A site that was to be fused with its backward pass, without it."""
        assert isinstance(item, Candidate)
        alone = replace(item, site=replace(item.site, backward=None), backward=None)
        yield from self.without(alone, why, item.backward)

    def sums_of(self, view: CanonicalView) -> SumTerms:
        if id(view) not in self.sums:
            self.sums[id(view)] = SumTerms(view)
        return self.sums[id(view)]
