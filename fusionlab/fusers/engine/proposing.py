"""From a region and a fused op's call that may replace it, to a certified candidate or the reason why there is none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ...graph.certify.certify import ProofOutcome, misplaced, weak_gradients
from ...graph.declined import Declined
from ...graph.dtypes import arithmetic_dtype, is_float
from ...graph.matching.region import Region, region_signature
from ...graph.matching.wide import wider_in
from ...graph.program.boundary import guarded
from ...graph.program.explicit_axes import Misplaced, placing, spec_text, typed_shapes
from ...graph.program.in_shard_map import DeviceSums, make_jaxpr
from ...graph.program.ir import Block, Node
from ...graph.program.trace import block_of_jaxpr
from ...graph.rewriting.rewrite import Replacement
from ...graph.settings import unwrapped
from ...kernels import OPS
from ...kernels.op.implementation import ImplementationChoice
from .base import AUTO_AXES, LEFT, WIDER_EDIT, Search, Substitution
from .declining import attempted, faulty, reject
from .other_numbers import notes_of
from .outcomes import Backend, Candidate, Rejection, Residual
from .unfit import check_fit
from .wording import anchor_text

TUNE = "fusionlab.tune measures it on this device; "


@dataclass(frozen=True)
class _Facts:
    """The results of certifying a site, shared by all sites of the same signature. `refused`: why the requested implementation cannot
    run it on the given device; then nothing else is known."""

    verdict: ProofOutcome
    program: Block | None = None  # of a site that is none, nothing but why
    residuals: tuple[Residual, ...] = ()
    backends: tuple[Backend, ...] = ()
    left: ImplementationChoice | None = None
    waits: bool = False
    refused: str = ""


def propose(
    search: Search,
    name: str,
    region: Region,
    plan: Substitution,
    anchor: Node,
    notes: Sequence[str] = (),
    concepts: Sequence[str] = (),
    proof: ProofOutcome | None = None,
    sums: bool = False,
) -> Any:
    """A certified Candidate, or the Rejection from certification. Its id is completed by `number`.

    `proof` is the outcome of certification for a region composed of certified regions; with `sums` the plan sums over devices where the
    region does.
    """
    plan = replace(plan, device=search.device)
    if not search.gradient:
        plan = replace(plan, attrs={**plan.attrs, "gradient": "reference"})
    nodes = region.nodes

    def proposed() -> Candidate | Rejection:
        check_fit(region, sums)
        _check_width(region)
        attrs = tuple(sorted(plan.attrs.items()))
        key = ("site", region_signature(region), plan.op.name, attrs, search.implementation, search.device)
        facts = guarded(
            lambda: search.certifier.once(key, lambda: _facts(search, region, plan, proof)),
            lambda fault: faulty(name, fault, anchor, nodes),
        )
        if isinstance(facts, Rejection):
            return facts
        if facts.refused:
            raise _refused(search, plan, facts, anchor)
        if not facts.verdict.ok:
            code, sentence, edit = _unproved(region, plan, facts.verdict, anchor)
            return reject(name, code, sentence, anchor, nodes, nodes, edit=edit)
        where, left = anchor_text(anchor), facts.left
        would = f"{where} could become {plan.formula}"
        noted = notes_of(search.view, region, plan.op.name, facts.verdict, notes, would)
        if left is not None and plan.op.declines:
            edit = f"{TUNE if facts.waits else ''}to fuse it anyway, pass {_named(facts.backends)}"
            raise Declined(f"{would}, but {left.reason}", left.kind.value, edit=edit)
        left = left if search.by_default else None
        return _candidate(name, region, plan, anchor, facts, left, noted, concepts)

    def declined(reason: Declined) -> Rejection:
        code, sentence, guilty = reason.code, reason.sentence, reason.nodes or nodes
        return reject(name, code, sentence, anchor, guilty, nodes, None, reason.edit, concepts)

    return attempted(proposed, declined)


def _check_width(region: Region) -> None:
    """Declines wider arithmetic inside the region: 16-bit results are computed in float32, all others in their own dtype."""
    arithmetic = arithmetic_dtype(region.root.dtype)
    wide = wider_in(region, arithmetic)
    if wide is not None:
        edit = WIDER_EDIT.format(jnp.dtype(arithmetic).name)
        raise Declined(wider_text(wide, arithmetic), "dtype", [wide], edit)


def _candidate(
    name: str,
    region: Region,
    plan: Substitution,
    anchor: Node,
    facts: _Facts,
    left: ImplementationChoice | None,
    notes: tuple[str, ...],
    concepts: Sequence[str],
) -> Candidate:
    """The candidate of a certified site."""
    assert facts.program is not None
    place = region.block.path, region.nodes, region.root, region.inputs
    replacement = Replacement(*place, plan.call, others=region.others, weak=weak_gradients(region))
    return Candidate(
        id=f"{name}@{anchor.scope}",
        pass_name=name,
        op=plan.op.name,
        attrs={k: v for k, v in plan.settings.items() if v is not None},
        node_ids=region.node_ids,
        root=region.root,
        others=region.others,
        leaves=dict(region.leaves),
        block_path=region.block.path,
        nodes_before=len(region.nodes),
        nodes_after=len(facts.program.nodes),
        source=anchor.source,
        formula=plan.formula,
        arithmetic=plan.arithmetic,
        residuals=facts.residuals,
        backends=facts.backends,
        left_to_xla=left,
        waits=facts.waits,
        notes=(*notes, LEFT + left.reason) if left else notes,
        concepts=tuple(concepts),
        program=facts.program,
        site=replacement,
        region=region,
        plan=plan,
    )


def _unproved(region: Region, plan: Substitution, verdict: ProofOutcome, anchor: Node) -> tuple[str, str, str | None]:
    """Code, sentence and edit for a site that was not certified."""
    where, code = anchor_text(anchor), verdict.code or "value"
    replaced = f"{where} could become {plan.formula}, but {verdict.detail}"
    if code == "sharding":
        return code, f"{replaced}{_asked(region)}", AUTO_AXES
    if code == "uncertified":
        return code, replaced, None
    return code, f"{where} looks like the end of {plan.formula} but computes another function: {verdict.detail}", None


def _refused(search: Search, plan: Substitution, facts: _Facts, anchor: Node) -> Declined:
    """The reason why the requested implementation cannot run a site on the given device."""
    asked = f"implementation {search.implementation!r} cannot run this call on {search.device}: {facts.refused}"
    sentence = f"{anchor_text(anchor)} could become {plan.formula}, but {plan.op.name}'s {asked}"
    return Declined(sentence, "implementation", edit=f"pass one that can run it: {_named(facts.backends)}")


def _named(backends: Sequence[Backend]) -> str:
    """The implementations that can run, as arguments of `fuse`."""
    return " or ".join(f"implementation={b.name!r}" for b in reversed(backends) if b.verdict != "unavailable")


def _asked(region: Region) -> str:
    """The products of a region that request an output sharding, which a fused op can express only by the type of its own result."""
    asking = [n for n in region.nodes if n.params.get("out_sharding") is not None]
    requests = (f"{anchor_text(n)} asks for {spec_text(n.params['out_sharding'])}" for n in asking)
    return f" ({'; '.join(requests)}, which cannot be requested of the fused op's own product)" if asking else ""


def wider_text(node: Node, dtype: Any) -> str:
    """The sentence for a node that computes in a wider dtype than the fused op's `dtype`."""
    widest = max((v.dtype for v in node.outputs if is_float(v.dtype)), key=lambda d: d.itemsize)
    return f"{anchor_text(node)} computes in {widest} inside the site; the fused op computes in {jnp.dtype(dtype).name}"


def _facts(search: Search, region: Region, plan: Substitution, proof: ProofOutcome | None) -> _Facts:
    avals, asked, attrs = [v.aval for v in region.inputs], search.implementation, plan.settings

    def backends(operands: Sequence[Any]) -> tuple[Backend, ...]:
        return plan.op.backends(*operands, device=search.device, implementation=asked, **attrs)

    try:
        with placing(avals):
            if asked is not None:  # and cannot be bound where it cannot run
                able = backends(typed_shapes(plan.operands, avals))
                if refusal := _refusal(able, asked):
                    return _Facts(ProofOutcome(None), backends=able, refused=refusal)
            traced = functools.cache(lambda: _program(plan, avals, region.sums))
            plan_key = (plan.op.name, tuple(sorted(plan.attrs.items())))
            verdict = proof or _proved(search, region, plan, plan_key, lambda: traced()[0])
            if not verdict.ok:
                return _Facts(verdict)
            program, operands = traced()
    # Explicit mesh axes are a part of JAX's types: the tracing raises where an operation has none for its result.
    except Misplaced as error:
        return _Facts(misplaced(error))
    saved = plan.op.residuals(*operands, implementation=asked, **attrs) if search.gradient else ()
    named = plan.op.declines and asked is not None  # who names an implementation has it
    left = None if named else plan.op.left_to_xla(*operands, device=search.device, **attrs)
    waits = asked is None and plan.op.waits(*operands, device=search.device, **attrs)
    return _Facts(verdict, program, saved, backends(operands), left, waits)


def _refusal(backends: Sequence[Backend], name: str) -> str | None:
    """Why the implementation of this name cannot run; None if it can."""
    return next((b.reason for b in backends if b.name == name and b.verdict == "unavailable"), None)


def _program(plan: Substitution, avals: Sequence[Any], sums: DeviceSums) -> tuple[Block, list[Any]]:
    """The program that would replace a site, and the types of the op's operands in it."""
    types: list[Any] = []

    def call(*inputs: Any) -> Any:
        operands, given = plan.calling(*inputs)
        types.extend(None if x is None else jax.typeof(x) for x in operands)
        return given

    with unwrapped():
        return block_of_jaxpr(make_jaxpr(call, avals, sums=sums)), types


def _proved(
    search: Search, region: Region, plan: Substitution, plan_key: Any, program: Callable[[], Block]
) -> ProofOutcome:
    """Whether a plan, traced to `program`, computes every root of a region, in values and in gradients."""
    derivative = search.derivatives.jaxpr if search.derivatives is not None else None
    ours = OPS.get(plan.op.name) is plan.op  # or registered by a user
    if not region.others:
        return search.certifier.region(region, plan.call, plan_key, derivative, program if ours else None)
    lost: dict[str, None] = {}
    edge = regained = False
    for i, root in enumerate(region.roots):

        def result(*inputs: Any, i: int = i) -> Any:
            return plan.call(*inputs)[i]

        verdict = search.certifier.region(region.of(root), result, (*plan_key, i, len(region.roots)))
        if not verdict.ok:
            return replace(verdict, detail=f"result {i + 1} of {len(region.roots)}: {verdict.detail}")
        lost.update(dict.fromkeys(verdict.lost))
        edge, regained = edge or verdict.edge, regained or verdict.regained
    return ProofOutcome(None, lost=tuple(lost), edge=edge, regained=regained)
