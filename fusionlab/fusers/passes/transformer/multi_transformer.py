"""The passes of whole transformer layers -> one `multi_transformer` op each.

They are searched after the others, over a view in which attention, products and norms are folded into the ops they become; see
`reading`. The anchor is an attention whose queries, keys and values come from projections and whose result goes through one into a
sum. Which of the passes a layer belongs to is told by its projections (three, or one), by whether its keys join a cache and by whether
devices sum its products.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ....graph.canonical.nodes import FoldedNodes
from ....graph.canonical.view import CanonicalView
from ....graph.certify.certify import ProofOutcome
from ....graph.declined import Declined
from ....graph.jax_compat import names_an_axis
from ....graph.matching.region import Region, escapes
from ....graph.program.boundary import guarded
from ....graph.program.ir import Node
from ...engine.base import LEFT, Option, Pass, Search, Substitution, anchor_text, faulty, found_at, reject
from ...engine.declining import attempted
from ...engine.outcomes import LEFT_TO_XLA, Candidate, Rejection
from ...engine.overlaps import settle, with_shares_left
from ...engine.proposing import propose
from ...engine.site import FUSE_FIRST, Site
from ..attention.dot_product_attention import MADE_OUTSIDE, DotProductAttentionPass
from ..linear.gemm_epilogue import GemmEpiloguePass
from ..norm.layer_norm import LayerNormPass
from .axes import Unread
from .devices import plan_over_devices
from .plan import Planned, check_fits, planned
from .reading import READING_STEPS, LayerRead, LayerReader, Partial
from .site import LayerSite, site_of
from .stacks import Found, plan_of_row, region_of_row, rows
from .streams import multiples

_PIECES: tuple[Pass, ...] = (GemmEpiloguePass(), DotProductAttentionPass(), LayerNormPass())
_REPORTED = 5  # steps of a reading from which on an attention is told of where nobody named the pass
_ATTENTION = "dot_product_attention"
_SUMMED = ", both of devices' parts that are summed before the bias"
SiteOutcome = TypeVar("SiteOutcome", Candidate, Rejection)


@dataclass(frozen=True)
class _Folded:
    """A block with its small sites folded.

    Attributes: `view`; `attentions` (canonical node -> the site that it is); `declined` and `norms` (attentions and norms that
    are none); `open` (attentions whose inner values are read outside);
    `collective` (whether devices speak to each other there); `read` (what was read at each attention, kept for the other passes);
    `failed` (attentions at which the reading itself failed, which one pass tells).
    """

    view: CanonicalView
    attentions: dict[int, Candidate]
    declined: tuple[Rejection, ...]
    norms: tuple[Rejection, ...]
    open: tuple[Candidate, ...]
    collective: bool
    read: dict[int, LayerRead | Partial] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)

    @property
    def to_read(self) -> list[int]:
        """The attentions at which reading has not failed."""
        return [nid for nid in self.attentions if nid not in self.failed]


def _folded(search: Search) -> _Folded:
    key = ("layers", search.block.path)
    if key not in search.shared:
        search.shared[key] = _fold(search)
    return search.shared[key]


def _fold(search: Search) -> _Folded:
    # By "xla" a site is found wherever it stands; whether a device gains by it is not asked.
    alone = replace(search, options={}, implementation="xla")
    found = [item for p in _PIECES for item in _items(search, alone, p)]
    candidates, rejections = settle(with_shares_left(found))
    tiles = [tile for c in candidates if (tile := _tile(c)) is not None]
    view = CanonicalView(search.block, _known_numbers(search), search.view.outer, tiles, multiples(search.view, tiles))
    declined, norms = _of_pass(rejections, _ATTENTION), _of_pass(rejections, "layer_norm")
    closed = {id(tile.of) for tile in tiles}
    rest = tuple(c for c in _of_pass(candidates, _ATTENTION) if id(c) not in closed)
    collective = any(names_an_axis(n.eqn) for n in search.block.nodes)
    return _Folded(view, _attentions(view), declined, norms, rest, collective)


def _tile(site: Candidate) -> FoldedNodes | None:
    """A site folded into the op that it becomes; None of one whose inner values are read outside."""
    seen = site.seen
    if seen.program is None or seen.region is None or escapes(seen.region):
        return None
    return FoldedNodes(seen.root, seen.site.leaves, seen.node_ids, seen.program, site)


def _attentions(view: CanonicalView) -> dict[int, Candidate]:
    """Canonical node -> the site that is folded there, of each attention."""
    nids = view.by_op.get(_ATTENTION, ())
    return {nid: tiles[0].of for nid in nids if (tiles := view.tiles_at.get(nid)) is not None}


def _known_numbers(search: Search) -> dict[int, Any]:
    """Number of an input of the block -> the literal that it is at the call."""
    numbers = {v.id: i for i, v in enumerate(search.block.inputs)}
    return {numbers[i]: coef for i, coef in search.view.known_inputs.items() if i in numbers}


def _of_pass(found: Iterable[SiteOutcome], name: str) -> tuple[SiteOutcome, ...]:
    return tuple(outcome for outcome in found if outcome.pass_name == name)


def _items(search: Search, alone: Search, pass_: Pass) -> list[Candidate | Rejection]:
    """What a pass finds in a block: as it was found already in this search, where all of that is of use here."""
    known = search.shared.get(found_at(pass_.name, search.view))
    if known is None or not search.by_default or any(isinstance(i, Rejection) and i.code in LEFT_TO_XLA for i in known):
        return list(pass_.search(alone))
    return known


class MultiTransformerPass(Pass):
    """One of them; see the module docstring.

    Attributes:
      spread: over devices, which sum the output projection's and the feed-forward's results.
      decoder: with a cache.
      fused: with one product for queries, keys and values.
    """

    op = "multi_transformer"
    needs = (
        "self-attention, output projection, both residual sums, a layer or RMS norm for each with epsilon up to 0.001, a feed-forward "
        "with a known activation; a rotary embedding by halves; nothing inside read elsewhere but keys and values; no dropout; forward "
        "only"
    )
    whole = forward_only = True
    named_only = True  # for now its pieces run the same kernels when they are fused one by one, and are differentiable

    def __init__(self, spread: bool, decoder: bool, fused: bool) -> None:
        self.spread, self.decoder, self.fused = spread, decoder, fused
        kind = f"{'decoder' if decoder else 'encoder'}{'_fuse_qkv' * fused}"
        self.name = f"{'multi_devices_' * spread}multi_transformer_{kind}"
        self.formula = (
            f"a = x + attend(norm(x)), y = a + mlp(norm(a)), or the norms after the sums{_SUMMED * spread}; attention over "
            f"{'a cache and ' * decoder}the call's own keys, {'one product' if fused else 'a product each'} for queries, keys and values"
        )
        if not spread:  # collectives stand between layers over devices
            self.options = {"stacked": Option(False, "identical layers in a row become one call")}

    def sample(self) -> tuple[Any, tuple[Any, ...]]:
        from .sample import sample

        return sample(self.decoder, self.fused, self.spread)

    def search(self, search: Search) -> Iterator[Candidate | Rejection]:
        found = _folded(search)
        yield from self.without_layer(search, found)
        layers: list[Found] = []
        for nid in found.to_read:
            outcome = self.at(search, found, nid)
            if isinstance(outcome, Found):
                layers.append(outcome)
            elif outcome is not None:
                yield outcome
        if self.spread or not self.option(search, "stacked"):
            yield from (layer.candidate for layer in layers)
            return
        for row in rows(layers):
            yield row[0].candidate if len(row) == 1 else self.stacked(search, row)

    def without_layer(self, search: Search, found: _Folded) -> Iterator[Rejection]:
        """Of the attentions that no layer can be read at; the plainest pass tells, and only where it is named."""
        if self.decoder or self.fused or self.spread or search.by_default:
            return
        yield from (self.without_attention(search, problem) for problem in found.declined)
        yield from (self.differentiated(search, attention) for attention in found.open)

    def at(self, search: Search, found: _Folded, nid: int) -> Found | Rejection | None:
        """The layer around an attention, why there is none, or None where that is another pass's to tell."""
        attention = found.attentions[nid]

        def looked() -> Found | Rejection | None:
            if nid not in found.read:
                found.failed.add(nid)
                found.read[nid] = LayerReader(found.view, nid).read()
                found.failed.discard(nid)
            layer = found.read[nid]
            if (layer.decoder, layer.fused) != (self.decoder, self.fused) or not self.tells(found, layer):
                return None
            return self.outcome(search, found, attention, layer)

        nodes = attention.region.nodes if attention.region else [_anchor(search, attention)]
        return guarded(looked, lambda fault: faulty(self.name, fault, _anchor(search, attention), nodes))

    def tells(self, found: _Folded, layer: LayerRead | Partial) -> bool:
        """Whether a layer is told of here, and not by the pass of one device: of one that was read in part, both may tell."""
        return bool(layer.axes) == self.spread or (self.spread and isinstance(layer, Partial) and found.collective)

    def outcome(
        self, search: Search, found: _Folded, attention: Candidate, layer: LayerRead | Partial
    ) -> Found | Rejection | None:
        anchor = _anchor(search, attention)
        if isinstance(layer, Partial):
            reported = layer.steps >= _REPORTED or not search.by_default
            return self.partial(search, found, anchor, layer) if reported else None

        def declined(why: Declined) -> Rejection:
            unread = why if isinstance(why, Unread) else Unread(why.sentence, layer.attention)
            products = (layer.q, layer.k, layer.v, layer.out, layer.up, layer.down)
            nids = (layer.norm1.nid, layer.norm2.nid, layer.attention, *(p.nid for p in products))
            partial = Partial(unread, READING_STEPS, self.decoder, self.fused, nids, layer.axes)
            return self.partial(search, found, anchor, partial)

        return attempted(lambda: self.fitted(search, found, attention, layer), declined)

    def fitted(self, search: Search, found: _Folded, attention: Candidate, layer: LayerRead) -> Found | Rejection:
        """A layer that was read to its end.

        Raises:
          Declined: it cannot be cut out, or the op does not take it.
        """
        plan = planned(found.view, site_of(search, found.view, layer, attention))
        check_fits(search, plan, layer_plan(plan, None))
        region = plan.site.region
        proposed = propose(
            search,
            self.name,
            region,
            layer_plan(plan, search.implementation),
            _anchor(search, attention),
            _notes(found.view, plan.site),
            ("transformer_layer",),
            sums=self.spread,
        )
        outcome = replace(proposed, id=f"{self.name}@{_common_scope(region)}")
        return Found(outcome, plan) if isinstance(outcome, Candidate) else outcome

    def stacked(self, search: Search, row: list[Found]) -> Candidate:
        """A row of layers as one site: each was certified, and a row is one after the other."""
        region = region_of_row(row)
        plan = plan_of_row(row, region, search.implementation)
        first = row[0].candidate
        notes = (*first.notes, f"{len(row)} identical layers as one call")
        anchor = _anchor(search, row[-1].candidate)
        outcome = propose(search, self.name, region, plan, anchor, notes, first.concepts, proof=ProofOutcome(None))
        return replace(outcome, id=f"{self.name}@{_common_scope(region)}")

    def partial(self, search: Search, found: _Folded, anchor: Node, layer: Partial) -> Rejection:
        """Why a layer that was read in part is none."""
        nodes = [n for nid in (*layer.nids, layer.why.nid) for n in _raw_nodes(search, found.view, nid)]
        guilty = _raw_nodes(search, found.view, layer.why.nid)[-1:]
        why, progress = layer.why, (min(layer.steps, READING_STEPS), READING_STEPS)
        declined = _norm_near(found, guilty, why.about) if why.about else None
        if declined is not None:
            guilty = [search.graph.node_by_id[i] for i in declined.node_ids]
            sentence, code, edit = f"its norm is not fused: {declined.sentence}", declined.code, declined.edit
        else:
            sentence, code, edit = f"{anchor_text(guilty[0] if guilty else anchor)}: {why}", why.code, why.edit
            if code == "structure" and self.is_random(search, found, layer):
                code = "dropout"
        return reject(self.name, code, sentence, anchor, guilty, nodes, progress, edit)

    def is_random(self, search: Search, found: _Folded, layer: Partial) -> bool:
        site = Site(self, search, search.block.nodes[0])
        site.view = found.view
        return site.is_random(layer.why.nid)

    def without_attention(self, search: Search, problem: Rejection) -> Rejection:
        """A layer may stand here; its attention is none that the op has."""
        node = search.graph.node_by_id[max(problem.site_ids)]
        guilty = [search.graph.node_by_id[i] for i in problem.node_ids]
        site = [search.graph.node_by_id[i] for i in problem.site_ids]
        sentence = f"its attention is not fused: {problem.sentence}"
        return reject(self.name, problem.code, sentence, node, guilty, site, (0, READING_STEPS), problem.edit)

    def differentiated(self, search: Search, attention: Candidate) -> Rejection:
        anchor = _anchor(search, attention)
        sentence = (
            f"{anchor_text(anchor)}: inner values of the layer around it are read outside, as by the backward pass of a program that is "
            f"differentiated already; the op runs forward only, and is its pieces under jax.grad"
        )
        nodes = attention.region.nodes if attention.region else [anchor]
        return reject(self.name, "escapes", sentence, anchor, [anchor], nodes, (0, READING_STEPS), FUSE_FIRST)


def layer_plan(planned: Planned, implementation: str | None) -> Substitution:
    """The plan of one layer, on one device or over several."""
    return plan_over_devices(planned, implementation) if planned.site.layer.axes else planned.plan(implementation)


def _anchor(search: Search, site: Candidate) -> Node:
    """The node that makes a site's result."""
    return search.block.producer[site.root.id]


def _raw_nodes(search: Search, view: CanonicalView, nid: int) -> list[Node]:
    """The raw nodes of a canonical one: of a site that is folded all of its own."""
    tiles = view.tiles_at.get(nid, ())
    if tiles:
        return [search.graph.node_by_id[i] for i in sorted(tiles[0].node_ids)]
    producer = search.block.producer
    return [producer[v.id] for v in view.values_of.get(nid, ()) if v.id in producer][:1]


def _norm_near(found: _Folded, at: list[Node], about: str) -> Rejection | None:
    """The nearest norm that was declined before or after a node, in program order."""
    if not at:
        return None
    here = at[0].id
    if about == "norm before":
        before = (r for r in found.norms if min(r.site_ids) <= here)
        return max(before, key=lambda r: max(r.site_ids), default=None)
    after = (r for r in found.norms if max(r.site_ids) >= here)
    return min(after, key=lambda r: min(r.site_ids), default=None)


def _common_scope(region: Region) -> str:
    """The scope that all of a layer's nodes stand in."""
    shared: list[str] | None = None
    for node in region.nodes:
        parts = node.scope.split("/")
        if shared is None:
            shared = parts
        same = [a == b for a, b in zip(shared, parts, strict=False)]
        shared = shared[: same.index(False) if False in same else len(same)]
    return "/".join(shared or ())


def _notes(view: CanonicalView, site: LayerSite) -> tuple[str, ...]:
    """Of the layer, and of its attention and norms: what those make of some numbers, the layer makes of them too."""
    weights = "one weight" if site.layer.fused else "three weights"
    norms = (view.tiles_at.get(norm.site, ()) for norm in (site.layer.norm1, site.layer.norm2))
    pieces = (site.attention, *(tile.of for tiles in norms for tile in tiles[:1]))
    notes = (note for piece in pieces for note in piece.notes if note not in (MADE_OUTSIDE, LEFT + piece.idle))
    return (
        f"weights are read as they lie: {weights} for queries, keys and values, nothing is repacked",
        *dict.fromkeys(notes),
    )


PASSES = {
    60 + place: MultiTransformerPass(*kind) for place, kind in enumerate(itertools.product((False, True), repeat=3))
}
