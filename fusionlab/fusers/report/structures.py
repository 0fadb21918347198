"""Larger structures composed of sites, including those that no pass fuses yet.

With small sites folded into the ops they become, a transformer layer is a dozen nodes. Nothing here is rewritten: a structure
shows how sites belong together. It consists of accepted sites and the nodes between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...graph.canonical.blocks import views
from ...graph.canonical.fused_nodes import Labelled, node_labels
from ...graph.canonical.nodes import ONE, CNode, FoldedNodes, Operand
from ...graph.canonical.view import CanonicalView
from ...graph.matching.match import Match, match
from ...graph.matching.pattern import pattern_of
from ...graph.matching.region import cut
from ...graph.primitives import SUMS_OVER_DEVICES
from ...graph.program.graph import Graph
from ...graph.program.ir import Node
from ...graph.program.scopes import Source, in_backward, is_backward
from ...graph.settings import jax_defaults
from ...showing import Shown
from ..engine.declining import attempted
from ..engine.grouping import Form, common_scope
from ..engine.outcomes import folded
from ..engine.wording import plain
from ..passes.lerp.blends import blends
from ..passes.matmul.gates import packed, sides_of
from .gated_structures import PRODUCTS, gated_attentions, products_below, triangles
from .layer_rows import rows_of
from .structure_forms import FOLDED, GATED, PACKED, SOFTMAX

if TYPE_CHECKING:
    from ..engine.outcomes import Candidate
    from .findings import Findings

_MAKERS = (*PRODUCTS, "dot_product_attention")  # what makes queries, keys and values of a value
STRUCTURE_KINDS = {
    "transformer_layer": "attention and feed-forward, each with its norm and its residual connection",
    "repeated_layers": "equal layers in a row, each reading the one before",
    "qkv_siblings": "three products of one value that are the queries, keys and values of an attention",
    "glu_pair": "two products of one value, one of them activated, multiplied together",
    "packed_gate": "two parts of one product, one of them activated, multiplied together",
    "gated_attention": "an attention whose result is multiplied by a sigmoid",
    "triangle_multiplication": "a product, channel by channel, of two gated projections of pairs",
    "residual_norm": "a norm of the sum of two values, as a residual connection is",
    "row_parallel": "a product that is summed over devices before its bias is added",
    "softmax": "a softmax outside of any site",
    "lerp": "a blend of two values, x + w * (y - x), in any spelling",
}


@dataclass(frozen=True, eq=False)
class Structure(Shown):
    """Sites and nodes that belong together.

    Attributes:
      id: stable name, "qkv_siblings@encoder/layer_3#1" (kind, scope, ordinal within the scope).
      kind: a key of `STRUCTURE_KINDS`.
      text: its description.
      node_ids: the raw nodes of its sites, and those between them.
      sites: ids of its candidates, in program order.
      block_path: the block that contains it ("" = top).
      source: the user's line of its last node.
    """

    _told = ("id", "kind", "text", "sites", "source")

    id: str
    kind: str
    text: str
    node_ids: frozenset[int]
    sites: tuple[str, ...]
    block_path: str
    source: Source | None

    @property
    def scope(self) -> str:
        """The module scope it stands in ("encoder/layer_3/mlp"); "" at the top."""
        return self.id.partition("@")[2].rpartition("#")[0]

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"{self.id}: {self.text}{where}"

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """Plain data, JSON-able."""
        return plain(self, "id kind text node_ids sites source")


@jax_defaults()
def structures_of(found: Findings) -> tuple[Structure, ...]:
    """Every structure of a program whose sites are known, in program order within each kind."""
    claimed = _claimed_nodes(found)
    items = [
        i for view, _ in folded_views(found) for i in _Searcher(view, found.graph, claimed, found.candidates).search()
    ]
    items.sort(key=lambda s: (list(STRUCTURE_KINDS).index(s.kind), max(s.node_ids)))
    return _numbered(items)


def folded_views(found: Findings) -> Iterator[tuple[CanonicalView, Node | None]]:
    """Each block's canonical view, with the candidates of `found` folded into the ops they would become."""
    tiles: dict[str, list[FoldedNodes]] = {}
    for c in found.candidates:
        if (tile := folded(c)) is not None:
            tiles.setdefault(c.block_path, []).append(tile)
    return views(found.graph, tiles)


def _claimed_nodes(found: Findings) -> frozenset[int]:
    """The nodes of sites, folded or fused with their backward pass, and of declined attentions: a softmax or a blend in them
    is not a structure of its own."""
    declined = (r.site_ids for r in found.rejections if "attention" in r.concepts)
    return frozenset().union(*(c.node_ids for c in found.candidates), *declined)


def _numbered(items: Sequence[Structure]) -> tuple[Structure, ...]:
    counter: dict[str, int] = {}
    named = []
    for item in items:
        counter[item.id] = counter.get(item.id, 0) + 1
        named.append(replace(item, id=f"{item.id}#{counter[item.id]}"))
    return tuple(named)


class _Searcher:
    """The structures of one block."""

    def __init__(
        self, view: CanonicalView, graph: Graph, claimed: frozenset[int], candidates: Sequence[Candidate]
    ) -> None:
        self.view, self.graph, self.claimed, self.candidates = view, graph, claimed, candidates

    def search(self) -> Iterator[Structure]:
        for nid in self.view.by_op.get("dot_product_attention", ()):
            yield from self.siblings(nid)
        for op in SUMS_OVER_DEVICES:
            for nid in self.view.by_op.get(op, ()):
                yield from self.row_parallel(nid)
        yield from self.folded()
        for gate in (*gated_attentions(self.view), *triangles(self.view)):
            if self.forward(max(gate.nodes)):
                yield self.record(gate.kind, gate.text, gate.nodes)
        for _, found in self.matches(SOFTMAX, lambda node: node.op in ("prod", "exp")):
            yield from self.softmax(found)
        for blend in blends(self.view):
            if blend.nodes[-1].id not in self.claimed:
                yield self.of_nodes("lerp", blend.form.text, {n.id: n for n in blend.nodes})

    def folded(self) -> Iterator[Structure]:
        """The structures of folded sites: matched ones, then gated pairs of another kind, then equal layers in a row."""
        layers: list[tuple[Match, Structure]] = []
        pairs: set[int] = set()  # the last nodes of gated pairs
        for form, found in self.matches(FOLDED, self.has_op):
            if form.kind == "glu_pair" and found.leaves["w"] == found.leaves["v"]:
                continue  # one product, read twice
            structure = self.structure(form, found)
            if form.kind == "transformer_layer":
                layers.append((found, structure))
            if form.kind == "glu_pair":
                pairs.add(max(structure.node_ids))
            yield structure
        yield from self.gated(pairs)
        yield from map(_row, rows_of(self.view, layers))

    def matches(self, forms: Sequence[Form], wanted: Callable[[CNode], bool]) -> Iterator[tuple[Form, Match]]:
        """At every `wanted` node, the first matching form of each kind."""
        roots: dict[str, list[Form]] = {}
        for form in forms:
            pattern = pattern_of(form.example)
            roots.setdefault(pattern.nodes[pattern.root].op, []).append(form)
        for op, here in roots.items():
            for nid in self.view.by_op.get(op, ()):
                if not wanted(self.view.nodes[nid]) or not self.forward(nid):
                    continue
                kinds: set[str] = set()
                for form in here:
                    found = match(pattern_of(form.example), self.view, nid) if form.kind not in kinds else None
                    if isinstance(found, Match):
                        kinds.add(form.kind)
                        yield form, found

    def has_op(self, node: CNode) -> bool:
        """Whether a node is a fused op, or reads one or a product of one, as the last node of a folded structure does."""
        below = [self.view.nodes[o.nid] for o in node.operands]
        further = [self.view.nodes[o.nid] for n in below if n.op == "dot" for o in n.operands]
        return any(isinstance(n.params, Labelled) or n.op == "prod" for n in (node, *below, *further))

    def forward(self, nid: int) -> bool:
        """Whether a canonical node is a value of this block, and not only of a backward pass."""
        node = self.view.maker(nid)
        return nid in self.view.tiles_at or (node is not None and not is_backward(node.eqn))

    # -- records --------------------------------------------------------------------------------------------------

    def structure(self, form: Form, found: Match) -> Structure:
        leaves = set(found.pattern.leaf_of)
        inner = [t for p, t in found.nodes.items() if p not in leaves and t != ONE]
        return self.record(form.kind, form.text, inner)

    def record(self, kind: str, text: str, nids: Iterable[int]) -> Structure:
        """The structure over some canonical nodes; the last of them in the program gives it its scope and line."""
        nodes: dict[int, Node] = {}
        sites: dict[str, int] = {}
        for nid in nids:
            for tile in self.view.tiles_at.get(nid, ())[:1]:
                nodes.update((i, self.graph.node_by_id[i]) for i in tile.node_ids)
                sites[tile.of.id] = max(tile.node_ids)
            if nid not in self.view.tiles_at and (node := self.view.maker(nid)) is not None:
                nodes[node.id] = node
        return self.of_nodes(kind, text, nodes, tuple(sorted(sites, key=sites.__getitem__)))

    def of_nodes(self, kind: str, text: str, nodes: Mapping[int, Node], sites: tuple[str, ...] = ()) -> Structure:
        """The structure over some raw nodes, located at the last of them."""
        scope = common_scope(n.scope for n in nodes.values())
        source = nodes[max(nodes)].source
        return Structure(f"{kind}@{scope}", kind, text, frozenset(nodes), sites, self.view.block.path, source)

    # -- what is read off rather than matched ---------------------------------------------------------------------

    def siblings(self, attention: int) -> Iterator[Structure]:
        """Queries, keys and values computed by one product each from one value, with weights that could be concatenated."""
        if not isinstance(self.view.nodes[attention].params, Labelled):
            return  # a residual of the op's, in a program that is fused and differentiated
        sources = [products_below(self.view, o.nid, _MAKERS) for o in self.view.nodes[attention].operands[:3]]
        if any(len(m) != 1 for m in sources) or len(set().union(*sources)) != 3:
            return
        products = [next(iter(m)) for m in sources]
        if any(self.view.nodes[p].op == "dot_product_attention" for p in products):
            return
        if self.share_factor(products):
            text = "queries, keys and values by three products of one value: one product with concatenated weights reads it once"
            yield self.record("qkv_siblings", text, [*products, attention])

    def share_factor(self, products: Sequence[int]) -> bool:
        """Whether products share one factor, along the same axes, and the other factors do not have a higher rank."""
        read = [self.factors(p) for p in products]
        shared = set.intersection(*map(set, read))
        if len(shared) != 1:
            return False
        ((x, _),) = shared
        weights = {nid for r in read for nid, _ in r if nid != x}
        rank = len(self.view.nodes[x].shape)
        return len(weights) == len(products) and all(rank >= len(self.view.nodes[w].shape) for w in weights)

    def factors(self, product: int) -> list[tuple[int, frozenset[int]]]:
        """The operands of a product (x and w of a fused one), each with its contracted axes."""
        node = self.view.nodes[product]
        own = node_labels(node) or ()
        return [(o.nid, frozenset(i for i, x in enumerate(o.axes) if x not in own)) for o in node.operands[:2]]

    def gated(self, known: Set[int]) -> Iterator[Structure]:
        """Gated pairs whose activation is not folded, because a backward pass reads its inner values or the pass declined it."""
        for node in self.view.block.nodes:
            if node.primitive != "mul" or node.id in {*known, *self.claimed} or in_backward(node):
                continue
            sides, packed_nodes = sides_of(self.view, node), packed(self.view, node)
            if sides is not None and sides.alike(self.view):
                kind, text, nodes = "glu_pair", GATED, sides.nodes(self.view)
            elif packed_nodes is not None:
                kind, text, nodes = "packed_gate", PACKED, packed_nodes
            else:
                continue
            nodes = nodes | {node.id: node}
            sites = tuple(c.id for c in self.candidates if c.node_ids <= nodes.keys())
            yield self.of_nodes(kind, text, nodes, sites)

    def row_parallel(self, summed: int) -> Iterator[Structure]:
        """A product, its sum over devices, and a vector along its features that is added as its bias."""
        node, added = self.view.nodes[summed], self.added_to(summed)
        if len(node.operands) != 1 or added is None:
            return
        (product,), (total, mine, bias) = node.operands, added
        if product.coef != 1 or not self.is_bare(product.nid):
            return
        slots = {slot: axis for axis, slot in enumerate(mine.axes)}
        along = [slots.get(slot, -1) for slot in bias.axes]
        if not self.are_last(summed, along):
            return
        if frozenset(product.axes[axis] for axis in along) in self.free_axes(product.nid):
            text = "x @ w summed over devices, then its bias added: a row-parallel product"
            yield self.record("row_parallel", text, [product.nid, summed, total])

    def added_to(self, nid: int) -> tuple[int, Operand, Operand] | None:
        """The only sum that reads a canonical node, the node as a term of it, and its other term; None unless it is a sum of two unscaled
        terms."""
        sums = [u for u in self.view.users.get(nid, ()) if self.view.nodes[u].op == "sum"]
        terms = self.view.nodes[sums[0]].operands if len(sums) == 1 else ()
        if len(terms) != 2 or any(o.coef != 1 for o in terms):
            return None
        mine, other = sorted(terms, key=lambda o: o.nid != nid)
        return sums[0], mine, other

    def are_last(self, nid: int, axes: Sequence[int]) -> bool:
        """Whether axes of a canonical node, at least one, are the last axes of its value; -1 stands for an axis of no operand."""
        order = self.view.ref[self.view.values_of[nid][0].id].dims
        return bool(axes) and -1 not in axes and sorted(axes) == sorted(order[-len(axes) :])

    def free_axes(self, product: int) -> list[frozenset[int]]:
        """For each factor of a product, the product's axes that only it has; none if the factors share an axis."""
        node, (left, right) = self.view.nodes[product], self.view.nodes[product].operands[:2]
        own = node_labels(node) or ()
        if any(x in left.axes and x in right.axes for x in own):
            return []
        return [frozenset(i for i, x in enumerate(own) if x in o.axes) for o in (left, right)]

    def is_bare(self, nid: int) -> bool:
        """Whether a node is a product without an epilogue."""
        node = self.view.nodes[nid]
        folded = isinstance(node.params, Labelled) and dict(node.params.traits).get("activation") == "none"
        return node.op == "dot" or (folded and "bias" not in node.params.slots)

    def softmax(self, found: Match) -> Iterator[Structure]:
        root = next(v for v in self.view.values_of[found.nodes[found.pattern.root]] if v.id in self.view.block.producer)
        scaled = frozenset({"x"})
        region = attempted(lambda: cut(self.view, root, found.leaves, scaled), lambda reason: None)
        if region is not None and not region.node_ids & self.claimed:
            yield self.of_nodes("softmax", found.pattern.example.name, {n.id: n for n in region.nodes})


def _row(row: Sequence[Structure]) -> Structure:
    """The structure of equal layers in a row."""
    return Structure(
        f"repeated_layers@{common_scope(s.id.partition('@')[2] for s in row)}",
        "repeated_layers",
        f"{len(row)} equal layers in a row: {row[0].text}",
        frozenset(i for s in row for i in s.node_ids),
        tuple(i for s in row for i in s.sites),
        row[0].block_path,
        row[-1].source,
    )
