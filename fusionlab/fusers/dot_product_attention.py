"""Pass `dot_product_attention`: softmax(scale * q k^T) v, causal or not, in any layout -> one `dot_product_attention` op.

The anchor is a product one of whose operands is made of exponentials of another product: softmax between two products.
Spellings of softmax are examples; a mask is told by its values, which must be those of a causal mask or of none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..graph.canonical import CNode, View
from ..graph.ir import Node, Value
from ..graph.match import Match, Miss, close
from ..graph.pattern import Example
from ..graph.region import NotARegion, Region, cut, escapes
from ..graph.scopes import is_backward
from ..kernels import OPS
from .base import Plan, Search, anchor_text, propose
from .findings import Candidate, Rejection
from .layout import Axes, arrange, axes_of, in_order, restore
from .masks import MASK_FILL, Mask, read_mask
from .site import Site

_LEAVES = {"q": "btc", "k": "bsc", "v": "bsd"}
_SAFE_FILL = -1e9  # above this the assumption on the scores is worth a note


def _scores(q: Any, k: Any, scale: float) -> Any:
    return jnp.einsum("btc,bsc->bts", q, k) * scale


def _weigh(p: Any, v: Any) -> Any:
    return jnp.einsum("bts,bsd->btd", p, v)


def _by_max(z: Any, v: Any) -> Any:
    return _weigh(jax.nn.softmax(z), v)


def _plain(z: Any, v: Any) -> Any:
    e = jnp.exp(z)
    return _weigh(e / e.sum(-1, keepdims=True), v)


def _by_logsumexp(z: Any, v: Any) -> Any:
    return _weigh(jnp.exp(z - jax.nn.logsumexp(z, -1, keepdims=True)), v)


def _by_log_softmax(z: Any, v: Any) -> Any:
    return _weigh(jnp.exp(jax.nn.log_softmax(z, -1)), v)


def _divided_after(z: Any, v: Any) -> Any:
    e = jnp.exp(z - z.max(-1, keepdims=True))
    return _weigh(e, v) / e.sum(-1)[..., None]


def _examples() -> Iterator[Example]:
    softmaxes: Mapping[str, Callable[[Any, Any], Any]] = {
        "softmax": _by_max,
        "softmax without max": _plain,
        "exp(z - logsumexp(z))": _by_logsumexp,
        "exp(log_softmax(z))": _by_log_softmax,
        "division after the product": _divided_after,
    }
    lacks = {x: frozenset({"mask"}) for x in "bts"}
    masked = {**_LEAVES, "mask": "bts"}
    for name, end in softmaxes.items():
        yield Example(name, lambda q, k, v, s, end=end: end(_scores(q, k, s), v), _LEAVES, ("scale",))
        yield Example(
            f"{name}, masked",
            lambda q, k, v, m, s, fill, end=end: end(jnp.where(m, _scores(q, k, s), fill), v),
            masked, ("scale", "fill"), frozenset({"mask"}), lacks,
        )  # fmt: skip
        yield Example(
            f"{name}, masked where true",
            lambda q, k, v, m, s, fill, end=end: end(jnp.where(m, fill, _scores(q, k, s)), v),
            masked, ("scale", "fill"), frozenset({"mask"}), lacks,
        )  # fmt: skip
        yield Example(
            f"{name}, additive mask", lambda q, k, v, m, s, end=end: end(_scores(q, k, s) + m, v), masked, ("scale",), optional=lacks
        )  # fmt: skip


EXAMPLES = tuple(_examples())


@dataclass(frozen=True)
class DotProductAttentionPass:
    """See the module docstring."""

    name: str = "dot_product_attention"
    op: str = "dot_product_attention"
    formula: str = "softmax(scale * q @ k.T) @ v, scale anywhere, no mask or a causal one, any layout"
    needs: str = "f32 or bf16, softmax along the keys, the attention weights read by the product with v alone"
    options: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", {})

    def sample(self) -> tuple[Any, tuple[Any, ...]]:
        def attention(q: Any, k: Any, v: Any) -> Any:
            scores = jnp.einsum("bthd,bshd->bhts", q, k) * 0.25
            return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)

        q = jnp.zeros((2, 8, 2, 16))
        return attention, (q, q, q)

    def search(self, search: Search) -> Iterator[Candidate | Rejection]:
        view = search.view
        done: set[int] = set()
        for node in search.block.nodes:
            if node.primitive != "dot_general" or is_backward(node.eqn):
                continue
            exponentials = _exponentials(view, view.nodes[view.ref[node.outputs[0].id].nid])
            if exponentials is None or exponentials in done:
                continue  # the products of a backward pass read the same exponentials as their forward
            done.add(exponentials)
            yield _Site(self, search, node).examine()


def _exponentials(view: View, dot: CNode) -> int | None:
    """The exponentials of another product that an operand of this product is made of: those of the attention weights."""
    if dot.op != "dot":
        return None
    for operand in dot.operands:
        exp = _reach(view, operand.nid, "exp", 3, frozenset({"prod", "select", "cast", "sum", "stop_gradient", "name"}))
        if exp is not None and _reach(view, exp, "dot", 8, None) is not None:
            return exp
    return None


def _reach(view: View, start: int, op: str, depth: int, through: frozenset[str] | None) -> int | None:
    """The nearest node of kind `op` below `start`, within `depth` steps, through nodes of the given ops (None: any)."""
    level = [start]
    for _ in range(depth + 1):
        for nid in level:
            if view.nodes[nid].op == op:
                return nid
        inner = [n for n in level if through is None or view.nodes[n].op in through]
        level = list(dict.fromkeys(o.nid for n in inner for o in view.nodes[n].operands))
    return None


class _Site(Site):
    """One softmax between two products, from anchor to candidate or rejection."""

    def examine(self) -> Candidate | Rejection:
        found = self.best_match(EXAMPLES, self.roots())
        if isinstance(found, Miss):
            return self.near_miss(found)
        try:
            return self.candidate(found)
        except NotARegion as reason:
            return self.rejection("structure", f"{anchor_text(self.anchor)}: {reason}")

    def roots(self) -> list[int]:
        """The product itself, or the division that follows it."""
        nid = self.view.ref[self.anchor.outputs[0].id].nid
        after = [u for u in self.view.users.get(nid, ()) if self.view.nodes[u].op == "prod"]
        return [*after, nid]

    def candidate(self, found: Match) -> Candidate | Rejection:
        root = self.root_value(found)
        region = cut(self.view, root, found.leaves, through_scale=frozenset({"q", "k"}))
        if self.anchor not in region.nodes:
            raise NotARegion("the product does not stand inside the site")
        if not close(self.view.ref[root.id].coef, self.view.ref[region.leaves["v"].id].coef):
            raise NotARegion("its result carries a factor that the values do not")
        problem = self.conditions(found, region)
        if problem is not None:
            return problem
        mask = self.mask(found, region)
        if isinstance(mask, Rejection):
            return mask
        leaks = escapes(region)
        if leaks:
            edit = "return or reuse the attention weights only where they are wanted, in a call of their own"
            return self.escaping(leaks[0], edit, region.nodes)
        region = _without_mask(region)
        plan = _plan(self.search, found, region, self.scale(found, region), mask, self.precision(region))
        notes = tuple(_notes(found, mask))
        return propose(self.search, self.pass_.name, region, plan, self.anchor, notes)

    def conditions(self, found: Match, region: Region) -> Rejection | None:
        dtypes = {str(region.leaves[x].dtype) for x in ("q", "k", "v")} | {str(region.root.dtype)}
        if len(dtypes) != 1 or not dtypes <= {"float32", "bfloat16"}:
            sentence = f"{anchor_text(self.anchor)} computes in {', '.join(sorted(dtypes))}; the fused op takes f32 or bf16 throughout"
            return self.rejection("dtype", sentence, edit="cast q, k and v to bfloat16 or float32", site=region.nodes)
        fill = found.scalars.get("fill")
        if fill is not None and not fill <= MASK_FILL:
            sentence = f"masked scores become {fill:g}, which still gives them weight; a mask's fill is -inf or <= {MASK_FILL:g}"
            return self.rejection("scalar", sentence, edit="fill with -jnp.inf", site=region.nodes)
        return None

    def mask(self, found: Match, region: Region) -> Mask | Rejection:
        """The mask, told by its values."""
        if "mask" not in region.leaves:
            return Mask()
        if self.made_of_scores(found):
            sentence = (
                f"{anchor_text(self.anchor)}: the scores are negated, or have more taken from them than their maximum"
            )
            return self.rejection("scalar", sentence, site=region.nodes, edit="negate q or k instead of the scores")
        name = found.pattern.example.name
        form = "added" if name.endswith("additive mask") else "masked" if name.endswith("where true") else "kept"
        read = read_mask(self.view, found, region.leaves["mask"], form, self.search.certifier)
        if isinstance(read, str):
            return self.rejection("mask", f"{read}; this version takes no mask or a causal one", site=region.nodes)
        return read

    def made_of_scores(self, found: Match) -> bool:
        """Whether what the match calls a mask is computed from the scores: their maximum, with an unexpected factor."""
        scores = next(
            (t for p, t in found.nodes.items() if found.pattern.nodes[p].op == "dot" and p != found.pattern.root), None
        )
        return scores is not None and self.made_of(found.leaves["mask"], scores, 4)

    def scale(self, found: Match, region: Region) -> float:
        """The factor on q k^T that the bound operands do not carry themselves."""
        return found.scalars.get("scale", 1.0) / self.carried(region, ("q", "k"))

    def precision(self, region: Region) -> Any:
        """What the user asked of the products; None for the default."""
        asked = {str(p): p for n in region.nodes if n.primitive == "dot_general" for p in (n.params.get("precision"),)}
        if region.root.dtype != jnp.float32:
            return None  # 16-bit products accumulate in float32 whatever is asked
        if len(asked) > 1:
            raise NotARegion(f"its two products ask for different precisions ({' and '.join(asked)})")
        return next(iter(asked.values()), None)


def _notes(found: Match, mask: Mask) -> Iterator[str]:
    """What the fused op does otherwise than the site on numbers a model is not meant to see."""
    name = found.pattern.example.name
    fill = max(found.scalars.get("fill", -math.inf), mask.fill)
    if mask.causal and fill > _SAFE_FILL:
        yield f"masked scores become {fill:g}: right while no score is as low"
    if name.startswith("softmax without max"):
        yield "no maximum is subtracted here: scores above 88 overflow in the original and not in the fused op"


def _without_mask(region: Region) -> Region:
    """The region as a function of q, k and v alone: a constant mask becomes part of its support."""
    if "mask" not in region.leaves:
        return region
    block, mask = region.block, region.leaves["mask"]
    known = {n.id for n in (*region.nodes, *region.support)}
    extra: dict[int, Node] = {}
    stack = [mask]
    while stack:
        node = block.producer.get(stack.pop().id)
        if node is not None and node.id not in extra:
            extra[node.id] = node
            stack.extend(a for a in node.inputs if isinstance(a, Value))
    added = (n for i, n in extra.items() if i not in known)
    support = tuple(sorted((*region.support, *added), key=lambda n: n.id))
    leaves = {name: v for name, v in region.leaves.items() if name != "mask"}
    return Region(block, region.root, leaves, region.nodes, support, region.known)


def _plan(search: Search, found: Match, region: Region, scale: float, mask: Mask, precision: Any) -> Plan:
    """Operands into [*B, T, N, H], the last batch axis being the heads; the result back to the root's axes.

    Query heads that share keys are more rows to the keys. Under a causal mask a row's number counts, so there they are heads, and the
    keys repeat.
    """
    sizes = found.sizes
    axes: dict[str, Axes] = {n: axes_of(found, search.view, found.leaf_id(n), v) for n, v in region.leaves.items()}
    order = {
        x: in_order(axes[n], found.letters[x]) for x, n in (("b", "q"), ("t", "q"), ("s", "k"), ("c", "k"), ("d", "v"))
    }
    batch, heads = [[c] for c in order["b"][:-1]], list(order["b"][-1:])
    if mask.causal:
        heads += [c for c in order["t"] if c != mask.row]
        order["t"] = tuple(c for c in order["t"] if c == mask.row)
    position = {v.id: i for i, v in enumerate(region.inputs)}
    where = {n: position[v.id] for n, v in region.leaves.items()}
    groups = {
        "q": [*batch, order["t"], heads, order["c"]],
        "k": [*batch, order["s"], heads, order["c"]],
        "v": [*batch, order["s"], heads, order["d"]],
    }
    out_groups = [*batch, order["t"], heads, order["d"]]
    root_axes = axes_of(found, search.view, found.pattern.root, region.root)

    def operands(*inputs: Any) -> tuple[Any, ...]:
        return tuple(arrange(inputs[where[n]], axes[n], groups[n], sizes) for n in ("q", "k", "v"))

    def finish(out: Any) -> Any:
        return restore(out, out_groups, root_axes, region.root.shape, sizes)

    op = OPS["dot_product_attention"]
    attrs = {"scale": scale, "is_causal": mask.causal, "precision": precision, "implementation": search.implementation}
    return Plan(op, attrs, operands, finish, op.formula(scale=scale, is_causal=mask.causal))
