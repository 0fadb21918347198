"""The grouping `chained` of the linear family: an activation's derivative goes with the product of the layer behind it.

`per_layer`, the default, keeps each site's own gradients in its backward pass: act', dX, dW, dBias. cuBLASLt's epilogues group
differently (DRELU and DGELU follow dX), and so did the pass of PaddlePaddle/Paddle pull request 39437: if a linear layer feeds
only the next one, its act' follows the next layer's dX; an activation that feeds anything else has its act' separately.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from ....graph.backward.gradients import BackwardPart, Chain
from ....graph.backward.vjp_split import Split, split_vjp
from ....graph.program.ir import Block, Value
from ....kernels.ops.gemm_epilogue.activations import ACTIVATIONS
from ....kernels.ops.gemm_epilogue.reference import unpacked
from ...engine.base import Substitution
from ...engine.outcomes import Candidate, Rejection
from ...engine.pairs import Pair

GROUPINGS = ("per_layer", "chained")


def grouped(found: Sequence[Candidate | Rejection], grouping: str) -> list[Candidate | Rejection]:
    """The sites, with the grouping of the linear ones that are fused with their backward passes."""
    sites = [c for c in found if isinstance(c, Candidate) and _is_linear(c)]
    maker = {c.root.id: c for c in sites}
    paired: dict[int, Candidate] = {}
    for c in sites:
        assert c.backward is not None
        pair = replace(c.backward, grouping=grouping)
        paired[id(c)] = _chained(c, pair, maker) if grouping == "chained" else replace(c, backward=pair)
    return [paired.get(id(item), item) for item in found]


def _chained(c: Candidate, pair: Pair, maker: Mapping[int, Candidate]) -> Candidate:
    """A site with its act' after the next layer's product, and act' of the layer before after its own product if that layer feeds only it.

    Args:
      c, pair: the site, and its backward pass as reported.
      maker: value -> the site that computes it.
    """
    assert c.region is not None
    before = maker.get(c.region.leaves["x"].id)
    link = before if before is not None and _feeds_only(before, c) else None
    part = replace(c.site.backward, chain=_chain(c, link))
    pair = replace(pair, joins="x" if link is not None else None)
    return replace(c, site=replace(c.site, backward=part), backward=pair)


def _is_linear(c: Candidate) -> bool:
    """Whether a site is a linear layer, fused with the op's own backward pass, which keeps only its activation's residual.

    Layers with 16-bit operands and a derivative in float32 are excluded: after another layer's product it would be rounded.
    """
    part = c.site.backward if c.site is not None else None
    if c.op != "gemm_epilogue" or part is None or any(c.attrs.get(key) is not None for key in ("gradient", "wide")):
        return False
    act = ACTIVATIONS[c.attrs.get("activation", "none")]
    return len(part.split.residuals) == (act.residual != "none")


def _feeds_only(before: Candidate, c: Candidate) -> bool:
    """Whether the second site is the only reader of the first one's activated result, and its gradient is the first one's cotangent."""
    first, second = before.site.backward, c.site.backward
    if before.attrs.get("activation", "none") == "none" or not _in_same_block(first, second):
        return False
    if not all(map(_in_place, (before, c))):
        return False
    share = next((s for i, s in second.gradients if second.leaves[i].id == before.root.id), None)
    if share is None or share.own != {share.value.id} or share.value.id != first.cotangent.id:
        return False
    gone = before.all_node_ids | c.all_node_ids
    return all(_is_read_in(first.block, v, gone) for v in (before.root, share.value))


def _in_same_block(first: BackwardPart, second: BackwardPart) -> bool:
    """Whether two sites and their backward passes are all in one block."""
    return len({first.block_path, first.site_path, second.block_path, second.site_path}) == 1


def _is_read_in(block: Block, value: Value, nodes: Collection[int]) -> bool:
    """Whether only these nodes read a value."""
    return value.id not in block.returned and all(u.id in nodes for u in block.users.get(value.id, ()))


def _in_place(c: Candidate) -> bool:
    """Whether the op takes x and returns its result in the program's layout, without a transpose or reshape."""
    plan: Substitution = c.plan
    avals = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in c.site.leaves]
    eqns = jax.make_jaxpr(lambda *a: plan.operands(*a)[0])(*avals).eqns
    out = jax.make_jaxpr(plan.finish)(jax.ShapeDtypeStruct(c.root.shape, c.root.dtype))
    return not eqns and not out.eqns and plan.attrs["x_contract"] in (-1, len(c.leaves["x"].shape) - 1)


def _chain(c: Candidate, before: Candidate | None) -> Chain:
    """The site's backward pass without its own act', and with that of the site before it."""
    part: BackwardPart = c.site.backward
    plan = replace(c.plan, attrs={**c.plan.attrs, "activation": "none"})
    act = ACTIVATIONS[c.attrs.get("activation", "none")]
    slope = None
    if act.residual != "none":
        (saved,) = part.split.residuals
        slope = jax.make_jaxpr(lambda saved, t: act.scale(unpacked(saved, t.shape), t))(
            *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (saved, part.cotangent.aval))
        )
    linked = None if before is None else _derivative(part, plan, before)
    return Chain(slope, _derivative(part, plan, None), linked, None if before is None else before.root)


def _derivative(part: BackwardPart, plan: Substitution, before: Candidate | None) -> Split:
    """The derivative of a linear layer; with the site before, beyond its activation: the last input is that one's residual."""
    avals = [v.aval for v in part.leaves]
    wanted = [i for i, _ in part.gradients]
    if before is None:
        return split_vjp(plan.call, avals, part.root.aval, wanted)
    (saved,) = before.site.backward.split.residuals
    attrs = {**plan.attrs, "x_activation": before.attrs["activation"]}

    def call(*inputs: Any) -> Any:
        *own, residual = inputs
        return plan.finish(plan.op.call(*plan.operands(*own), residual, **attrs))

    return split_vjp(call, [*avals, saved], part.root.aval, wanted)
