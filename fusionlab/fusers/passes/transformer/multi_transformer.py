"""The passes of whole transformer layers -> one `multi_transformer` op each.

They run after the other passes, over a view in which attention, products and norms are folded into the ops they become; see
`reading`. The anchor is an attention whose queries, keys and values come from projections and whose result goes through one into a
sum. The pass of a layer is determined by its projections (three, or one), by whether its keys join a cache, and by whether
its products are summed over devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ....graph.canonical.view import CanonicalView
from ....graph.certify.certify import ProofOutcome
from ....graph.declined import Declined
from ....graph.jax_compat import names_an_axis
from ....graph.matching.region import Region
from ....graph.program.boundary import guarded
from ....graph.program.ir import Node
from ...engine.base import LEFT, Option, Pass, Search, Substitution, found_at
from ...engine.declining import FUSE_FIRST, attempted, faulty, reject
from ...engine.grouping import common_scope
from ...engine.outcomes import LEFT_TO_XLA, Candidate, Rejection, folded
from ...engine.overlaps import settle, with_shares_left
from ...engine.proposing import propose
from ...engine.site import Site
from ...engine.wording import anchor_text
from ..attention.dot_product_attention import MADE_OUTSIDE, DotProductAttentionPass
from ..linear.gemm_epilogue import GemmEpiloguePass
from ..norm.layer_norm import LayerNormPass
from .axes import Unread
from .devices import plan_over_devices
from .plan import Planned, check_fits, plan_by
from .reading import READING_STEPS, LayerRead, LayerReader, Partial
from .residuals import multiples
from .site import LayerSite, site_of
from .stacks import Found, plan_of_row, region_of_row, rows

_PIECES: tuple[Pass, ...] = (GemmEpiloguePass(), DotProductAttentionPass(), LayerNormPass())
_NOT_BEGUN = (0, READING_STEPS)  # the progress at an attention around which nothing was read
_REPORTED = 5  # steps of a reading from which on an attention is told of where nobody named the pass
_ATTENTION = "dot_product_attention"
_SUMMED = ", both summed over devices before the bias"
SiteOutcome = TypeVar("SiteOutcome", Candidate, Rejection)


@dataclass(frozen=True)
class _Folded:
    """A block with its small sites folded.

    Attributes: `view`; `attentions` (canonical node -> its site, except those at which the reading itself failed, which one
    pass reports); `declined` and `norms` (declined attentions and norms); `open` (attentions whose inner values are read outside);
    `collective` (whether it contains collectives); `read` (the reading at each attention, cached for the other passes).
    """

    view: CanonicalView
    attentions: dict[int, Candidate]
    declined: tuple[Rejection, ...]
    norms: tuple[Rejection, ...]
    open: tuple[Candidate, ...]
    collective: bool
    read: dict[int, LayerRead | Partial] = field(default_factory=dict)


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
    tiles = [tile for c in candidates if (tile := folded(c)) is not None]
    view = CanonicalView(search.block, _known_numbers(search), search.view.outer, tiles, multiples(search.view, tiles))
    declined, norms = _of_pass(rejections, _ATTENTION), _of_pass(rejections, "layer_norm")
    closed = {id(tile.of) for tile in tiles}
    rest = tuple(c for c in _of_pass(candidates, _ATTENTION) if id(c) not in closed)
    collective = any(names_an_axis(n.eqn) for n in search.block.nodes)
    return _Folded(view, _attentions(view), declined, norms, rest, collective)


def _attentions(view: CanonicalView) -> dict[int, Candidate]:
    """Canonical node -> the site folded there, for each attention."""
    nids = view.by_op.get(_ATTENTION, ())
    return {nid: tiles[0].of for nid in nids if (tiles := view.tiles_at.get(nid)) is not None}


def _known_numbers(search: Search) -> dict[int, Any]:
    """Number of an input of the block -> its literal at the call."""
    numbers = {v.id: i for i, v in enumerate(search.block.inputs)}
    return {numbers[i]: coef for i, coef in search.view.known_inputs.items() if i in numbers}


def _of_pass(found: Iterable[SiteOutcome], name: str) -> tuple[SiteOutcome, ...]:
    return tuple(outcome for outcome in found if outcome.pass_name == name)


def _items(search: Search, alone: Search, pass_: Pass) -> list[Candidate | Rejection]:
    """The outcomes of a pass in a block, reused from this search if all of them apply here."""
    known = search.shared.get(found_at(pass_.name, search.view))
    if known is None or not search.by_default or any(isinstance(i, Rejection) and i.code in LEFT_TO_XLA for i in known):
        return list(pass_.search(alone))
    return known


_BY_NAME = (
    "Off: it runs only if it is named. A whole layer runs the same kernels as its pieces fused one by one, gains nothing over them, and is "
    "not differentiable as one op."
)
_DEFAULT = (
    _BY_NAME,
    f"{_BY_NAME} The exception is a decoding step, one token for each of up to 16 texts in bfloat16 or float16 on sm_90: the named op has "
    "kernels of its own there, and takes them where they were measured faster: for tokens of 1,024 to 4,096 features, on one GPU.",
)


def _summary(spread: bool, decoder: bool) -> str:
    what = "Replaces a whole transformer layer by one op"
    if decoder:
        what += ", which also returns the cache's new keys and values"
    return f"{what}, in two parts with the program's own sums over devices between them." if spread else f"{what}."


def _spellings(spread: bool, decoder: bool, fused: bool) -> Iterator[str]:
    yield "The norms may stand before attention and feed-forward or after their residual sums."
    yield "The feed-forward may be gated. A rotary embedding has to cover whole heads, with halves as pairs."
    if fused:
        yield "Queries, keys and values come from one product, whose columns are split as a whole or by head."
    else:
        yield "Queries, keys and values come from a product each."
    if decoder:
        yield "Keys and values may be appended to a cache or written into one at a position."
    if spread:
        yield (
            "The layer stands in a shard_map, with check_vma or without. Heads and inner features are split over the devices of a mesh "
            "axis, and a psum follows the output projection and the feed-forward, before the bias. No collective is added, removed or "
            "reordered."
        )


class MultiTransformerPass(Pass):
    """One of the passes; see the module docstring.

    Attributes:
      spread: sharded over devices, which sum the results of the output projection and the feed-forward.
      decoder: with a cache.
      fused: with one product for queries, keys and values.
    """

    op = "multi_transformer"
    needs = (
        "self-attention, output projection, both residual sums, each with a layer norm or RMS norm of epsilon up to 0.001, a feed-forward "
        "with a known activation; a rotary embedding by halves; only keys and values are read outside; no dropout; forward only"
    )
    codes = ("activation", "axes", "bias", "dropout", "mask", "rotary", "scalar", "structure", "rounding")
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
        self.summary = _summary(spread, decoder)
        self.spellings = tuple(_spellings(spread, decoder, fused))
        self.default = _DEFAULT[decoder and not spread]
        if not spread:  # collectives stand between layers over devices
            self.options = {"stacked": Option(False, "identical layers in a row become one call")}

    def sample(self) -> tuple[Any, tuple[Any, ...]]:
        from .sample import sample

        return sample(self.decoder, self.fused, self.spread)

    def search(self, search: Search) -> Iterator[Candidate | Rejection]:
        found = _folded(search)
        yield from self.without_layer(search, found)
        layers: list[Found] = []
        for nid, attention in list(found.attentions.items()):
            outcome = _Place(self, search, found, attention).around(nid)
            if isinstance(outcome, Found):
                layers.append(outcome)
            elif outcome is not None:
                yield outcome
        if self.spread or not self.option(search, "stacked"):
            yield from (layer.candidate for layer in layers)
            return
        for row in rows(layers):
            last = row[-1].candidate
            yield last if len(row) == 1 else _Place(self, search, found, last).stacked(row)

    def without_layer(self, search: Search, found: _Folded) -> Iterator[Rejection]:
        """Rejections for the attentions without a readable layer, reported only by the plainest pass, and only if it is named."""
        if self.decoder or self.fused or self.spread or search.by_default:
            return
        yield from (self.without_attention(search, problem) for problem in found.declined)
        yield from (_Place(self, search, found, attention).differentiated() for attention in found.open)

    def without_attention(self, search: Search, problem: Rejection) -> Rejection:
        """The rejection of a possible layer whose attention is not one of the op's."""
        by_id = search.graph.node_by_id
        guilty, site = ([by_id[i] for i in ids] for ids in (problem.node_ids, problem.site_ids))
        sentence, anchor = f"its attention is not fused: {problem.sentence}", by_id[max(problem.site_ids)]
        return reject(self.name, problem.code, sentence, anchor, guilty, site, _NOT_BEGUN, problem.edit)

    def tells(self, found: _Folded, layer: LayerRead | Partial) -> bool:
        """Whether this pass reports the layer rather than its single-device twin. Both may report a partially recognised layer."""
        if (layer.decoder, layer.fused) != (self.decoder, self.fused):
            return False
        return bool(layer.axes) == self.spread or (self.spread and isinstance(layer, Partial) and found.collective)


class _Place(Site):
    """An attention that may be part of a layer, or the last layer of a row."""

    pass_: MultiTransformerPass

    def __init__(self, pass_: MultiTransformerPass, search: Search, found: _Folded, site: Candidate) -> None:
        super().__init__(pass_, search, search.block.producer[site.root.id])
        self.found, self.view, self.attention = found, found.view, site
        self.nodes = site.region.nodes if site.region else [self.anchor]

    def around(self, nid: int) -> Found | Rejection | None:
        """The layer around the attention, the rejection if there is none, or None if another pass reports it."""
        return guarded(
            lambda: self.read(nid),
            lambda fault: faulty(self.pass_.name, fault, self.anchor, self.nodes),
        )

    def read(self, nid: int) -> Found | Rejection | None:
        if nid not in self.found.read:
            del self.found.attentions[nid]
            self.found.read[nid] = LayerReader(self.view, nid).read()
            self.found.attentions[nid] = self.attention
        layer = self.found.read[nid]
        if not self.pass_.tells(self.found, layer):
            return None
        if isinstance(layer, Partial):
            reported = layer.steps >= _REPORTED or not self.search.by_default
            return self.partial(layer.why, layer.nids, layer.steps) if reported else None

        def unfit(why: Declined) -> Rejection:
            unread = why if isinstance(why, Unread) else Unread(why.sentence, layer.attention)
            parts = (layer.norm1, layer.norm2, layer.q, layer.k, layer.v, layer.out, layer.up, layer.down)
            return self.partial(unread, [layer.attention, *(p.nid for p in parts)], READING_STEPS)

        return attempted(lambda: self.fitted(layer), unfit)

    def fitted(self, layer: LayerRead) -> Found | Rejection:
        """A completely read layer.

        Raises:
          Declined: it cannot be cut out, or the op does not take it.
        """
        plan = Planned(self.view, site_of(self.search, self.view, layer, self.attention))
        check_fits(self.search, plan, layer_plan(plan, None))
        substitution = layer_plan(plan, self.search.implementation)
        outcome = self.proposed(plan.site.region, substitution, _notes(self.view, plan.site))
        return Found(outcome, plan) if isinstance(outcome, Candidate) else outcome

    def stacked(self, row: list[Found]) -> Candidate:
        """A row of layers as one site: each layer is certified, and a row is their composition."""
        region = region_of_row(row)
        plan = plan_of_row(row, region, self.search.implementation)
        notes = (*row[0].candidate.notes, f"{len(row)} identical layers as one call")
        return self.proposed(region, plan, notes, ProofOutcome(None))

    def proposed(
        self, region: Region, plan: Substitution, notes: Sequence[str], proof: ProofOutcome | None = None
    ) -> Any:
        """The outcome for a layer or a row of layers, named by the common scope of all its nodes."""
        name, concepts = self.pass_.name, ("transformer_layer",)
        outcome = propose(self.search, name, region, plan, self.anchor, notes, concepts, proof, self.pass_.spread)
        return replace(outcome, id=f"{name}@{common_scope(n.scope for n in region.nodes)}")

    def partial(self, why: Unread, nids: Sequence[int], steps: int) -> Rejection:
        """The rejection of a partially read layer."""
        guilty = self.raw_nodes(why.nid)[-1:]
        site = [n for nid in (*nids, why.nid) for n in self.raw_nodes(nid)]
        declined = _norm_near(self.found, guilty, why.about) if why.about else None
        if declined is not None:
            guilty = [self.search.graph.node_by_id[i] for i in declined.node_ids]
            sentence, code, edit = f"its norm is not fused: {declined.sentence}", declined.code, declined.edit
        else:
            sentence, code, edit = f"{anchor_text(guilty[0] if guilty else self.anchor)}: {why}", why.code, why.edit
            if code == "structure" and self.is_random(why.nid):
                code = "dropout"
        progress = min(steps, READING_STEPS), READING_STEPS
        return reject(self.pass_.name, code, sentence, self.anchor, guilty, site, progress, edit)

    def raw_nodes(self, nid: int) -> list[Node]:
        """The raw nodes of a canonical one: for a folded site, all of its nodes."""
        tiles, producer = self.view.tiles_at.get(nid, ()), self.search.block.producer
        if tiles:
            return [self.search.graph.node_by_id[i] for i in sorted(tiles[0].node_ids)]
        return [producer[v.id] for v in self.view.values_of.get(nid, ()) if v.id in producer][:1]

    def differentiated(self) -> Rejection:
        sentence = (
            f"{anchor_text(self.anchor)}: inner values of the surrounding layer are read outside it, for example by the backward pass "
            "of a program that is already differentiated; the op runs forward only, and splits into its pieces under jax.grad"
        )
        return self.rejection("escapes", sentence, (), _NOT_BEGUN, FUSE_FIRST)


def layer_plan(planned: Planned, implementation: str | None) -> Substitution:
    """The plan of one layer, on one device or over several."""
    if planned.site.layer.axes:
        return plan_over_devices(planned, implementation)
    return plan_by(planned.attrs, planned.makers, planned.results, implementation)


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


def _notes(view: CanonicalView, site: LayerSite) -> tuple[str, ...]:
    """The notes of the layer, including those of its attention and norms, which apply to the layer too."""
    weights = "one weight" if site.layer.fused else "three weights"
    norms = (view.tiles_at.get(norm.site, ()) for norm in (site.layer.norm1, site.layer.norm2))
    pieces = (site.attention, *(tile.of for tiles in norms for tile in tiles[:1]))
    notes = (note for piece in pieces for note in piece.notes if note not in (MADE_OUTSIDE, LEFT + piece.idle))
    return (
        f"weights are read in place: {weights} for queries, keys and values, nothing is repacked",
        *dict.fromkeys(notes),
    )


PASSES = {
    60 + place: MultiTransformerPass(*kind) for place, kind in enumerate(itertools.product((False, True), repeat=3))
}
