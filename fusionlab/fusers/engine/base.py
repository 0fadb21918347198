"""What a pass is, and what it needs to search a block."""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from ...device import Device, asked_about
from ...errors import ArgumentError, unknown_name
from ...graph.backward.find import Derivatives
from ...graph.canonical.view import CanonicalView
from ...graph.certify.certify import Certifier, ProofOutcome, misplaced, weak_gradients
from ...graph.declined import Declined
from ...graph.dtypes import arithmetic_dtype, is_float
from ...graph.matching.region import Region, region_signature
from ...graph.matching.wide import wider_in
from ...graph.program.boundary import guarded
from ...graph.program.explicit_axes import Misplaced, placing, spec_text, typed_shapes
from ...graph.program.graph import Graph
from ...graph.program.in_shard_map import DeviceSums, make_jaxpr
from ...graph.program.ir import Block, Node
from ...graph.program.ir import all_nodes as all_nodes
from ...graph.program.scopes import is_backward
from ...graph.program.trace import block_of_jaxpr
from ...graph.rewriting.rewrite import Replacement
from ...graph.settings import unwrapped
from ...kernels import OPS
from ...kernels.op.implementation import ImplementationChoice
from ...kernels.op.op import Op
from .declining import attempted
from .declining import examined as examined
from .declining import faulty as faulty
from .declining import reason_to_tell as reason_to_tell
from .declining import reject as reject
from .other_numbers import notes_of
from .outcomes import Backend, Candidate, Rejection, Residual
from .unfit import check_fit
from .wording import anchor_text as anchor_text
from .wording import escape_text as escape_text

BY_DEFAULT = "_default"  # likewise, that nobody named the pass
LEFT = "left as it is unless asked for: "  # how the note of a site begins that a device gains nothing by
WIDER_EDIT = "compute in {} there if that is precise enough, or give the whole site wider operands"
# What to do where explicit axes stand in the way.
AUTO_AXES = "give the mesh axes the type Auto there (jax.sharding.auto_axes, or axis_types= of jax.make_mesh), or use jax.shard_map"
GRADIENT = "_grad"  # the option by which a search is told that a pass's `_grad` is off; no pass has one of this name


@dataclass(frozen=True, eq=False)
class Search:
    """One pass over one block.

    Attributes: `graph`, `view` (of the block), `device`, `options` of this pass, `certifier`, `implementation` (as given to fuse),
    `derivatives` (of regions, where there is a backward pass in the program), `shared` (for passes to keep what they found: one for all
    passes and blocks of a search).
    """

    graph: Graph
    view: CanonicalView
    device: Device
    certifier: Certifier
    options: Mapping[str, Any] = field(default_factory=dict)
    implementation: str | None = None
    derivatives: Derivatives | None = None
    shared: dict[Any, Any] = field(default_factory=dict)

    @property
    def block(self) -> Any:
        return self.view.block

    @property
    def differentiated(self) -> bool:
        """Whether there is a backward pass in the program."""
        return self.derivatives is not None

    @property
    def gradient(self) -> bool:
        """Whether the pass's `_grad` is on: else the gradient is JAX's own of the reference."""
        return self.options.get(GRADIENT, True)

    @property
    def by_default(self) -> bool:
        """Whether neither the pass nor an implementation was named."""
        return bool(self.options.get(BY_DEFAULT, False)) and self.implementation is None


@dataclass(frozen=True)
class Option:
    """An option of a pass: its default, what it means, and the values it can have where these are told."""

    default: Any
    meaning: str
    choices: Sequence[Any] | None = None

    @property
    def values(self) -> list[Any] | None:
        """The values it can have; None where they are not told."""
        if self.choices is not None:
            return list(self.choices)
        return [False, True] if isinstance(self.default, bool) else None


class Pass(abc.ABC):
    """One fusion pass: a name, words for people, and a search over one block.

    A pass says which nodes are its anchors, and what is made of one; an error that is raised there is told as a rejection `uncertified`.

    Attributes:
      name: as in `passes=[...]` and `Strategy`.
      op: the fused op it rewrites to.
      formula: what it fuses, in one line.
      needs: its conditions, in one line.
      options: by name; a tuple (default, meaning) or (default, meaning, choices) is an option too.
      primitives: of its anchors.
      whole: its sites are made of what other passes find: it is searched after them, whatever the order they were asked in.
      named_only: it is asked only by name.
      forward_only: its op dissolves under `jax.grad`: it has no `_grad`.
      sample_for: the device and the options at which its sample has a site.
    """

    name: str
    op: str
    formula: str
    needs: str
    options: Mapping[str, Option | tuple[Any, ...]] = MappingProxyType({})
    primitives: Collection[str] = ()
    whole: bool = False
    named_only: bool = False
    forward_only: bool = False
    sample_for: tuple[str, Mapping[str, Any]] = ("cpu", MappingProxyType({}))

    def __repr__(self) -> str:
        return f"<pass {self.name}: {self.formula}>"

    @functools.cached_property
    def fused_op(self) -> Op:
        """The op that it rewrites to, by default the one of this package that `op` names."""
        return OPS[self.op]

    @functools.cached_property
    def declared(self) -> dict[str, Option]:
        """The options, none of them a tuple."""
        return {key: o if isinstance(o, Option) else Option(*o) for key, o in self.options.items()}

    def option(self, search: Search, key: str) -> Any:
        """An option's value: as given, or the default."""
        return search.options.get(key, self.declared[key].default)

    def check_names(self, options: Mapping[str, Any]) -> None:
        """Raises UnknownNameError for an option the pass does not have."""
        for key in options:
            if key not in self.options:
                raise unknown_name(f"option of pass {self.name}", key, self.options)

    def check(self, options: Mapping[str, Any]) -> None:
        """Raises ArgumentError or UnknownNameError for the value of an option that it does not take."""
        for key, value in options.items():
            choices = self.declared[key].choices if key in self.declared else None
            # 0 is no False, and 1 no True, though they are equal
            if choices is None or any(isinstance(value, bool) == isinstance(c, bool) and value == c for c in choices):
                continue
            if all(isinstance(choice, str) for choice in choices):
                raise unknown_name(key, value, choices)
            *needed, last = sorted(map(repr, choices), key=lambda text: text == "None")
            raise ArgumentError(f"{self.name}: {key} is {value!r}, needed {', '.join(needed)} or {last}")

    @abc.abstractmethod
    def sample(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A small function and arguments with one site (for the before/after picture)."""

    def is_anchor(self, node: Node) -> bool:
        """Whether a node may be where a site is matched from."""
        return node.primitive in self.primitives and not is_backward(node.eqn)

    def anchors(self, search: Search) -> Iterable[tuple[Any, ...]]:
        """The anchors of a block, each with what `examine` is to know of it."""
        return ((node,) for node in search.block.nodes if self.is_anchor(node))

    def examine(self, search: Search, anchor: Node, *known: Any) -> Any:
        """What is found at an anchor: a candidate, a rejection that says why not, several of them, or None where there is no site."""
        raise NotImplementedError

    def search(self, search: Search) -> Iterator[Candidate | Rejection]:
        """Every site of the block: a candidate, or a rejection that says why not."""
        for anchor in self.anchors(search):
            yield from examined(self.name, anchor[0], functools.partial(self.examine, search, *anchor))


@dataclass(frozen=True, eq=False)
class Substitution:
    """How a region becomes a call of a fused op.

    Attributes:
      op, attrs: the fused op and its attributes.
      operands: region inputs -> the op's operands (None for an absent one).
      finish: the op's result -> the region's root; a tuple of its roots, where it has several.
      formula: what it computes at this site.
      arithmetic: as of a Candidate.
      device: what the op is bound for; None: the device at hand.
    """

    op: Op
    attrs: Mapping[str, Any]
    operands: Callable[..., tuple[Any, ...]]
    finish: Callable[[Any], Any]
    formula: str
    arithmetic: str = ""
    device: Device | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The attributes without the name of an implementation."""
        return {k: v for k, v in self.attrs.items() if k != "implementation"}

    def call(self, *inputs: Any) -> Any:
        return self.calling(*inputs)[1]

    def calling(self, *inputs: Any) -> tuple[tuple[Any, ...], Any]:
        """The op's operands, and what it gives of them."""
        operands = self.operands(*inputs)
        with contextlib.nullcontext() if self.device is None else asked_about(self.device):
            return operands, self.finish(self.op.call(*operands, **self.attrs))


@dataclass(frozen=True)
class _Facts:
    """What certification of a site yields, shared by all sites of the same signature. `refused`: why the implementation that was named
    cannot run it on the device asked about; then nothing else is known."""

    verdict: ProofOutcome
    program: Block | None = None  # of a site that is none, nothing but why
    residuals: tuple[Residual, ...] = ()
    backends: tuple[Backend, ...] = ()
    left: ImplementationChoice | None = None
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
    """A certified Candidate, or the Rejection certification gives. Its id is completed by `number`.

    `proof` is the outcome of certification where the region is put together of others that were certified; with `sums` the plan sums over
    devices where the region does.
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
        notes_or_reason = notes_of(search.view, region, plan.op.name, facts.verdict, notes)
        if isinstance(notes_or_reason, str):
            raise Declined(f"{where}: {plan.formula} would replace it, but {notes_or_reason}", "value")
        if left is not None and plan.op.declines:
            edit = f"name one to have it all the same: {_named(facts.backends)}"
            raise Declined(f"{where}: {plan.formula} would do, but {left.reason}", left.kind.value, edit=edit)
        left = left if search.by_default else None
        return _candidate(name, region, plan, anchor, facts, left, notes_or_reason, concepts)

    def declined(reason: Declined) -> Rejection:
        code, sentence, guilty = reason.code, reason.sentence, reason.nodes or nodes
        return reject(name, code, sentence, anchor, guilty, nodes, None, reason.edit, concepts)

    return attempted(proposed, declined)


def _check_width(region: Region) -> None:
    """Declines what is computed wider inside: results of 16 bits are computed in float32, all others in their own dtype."""
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
    """The candidate of a site that is certified."""
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
    replaced = f"{where}: {plan.formula} would replace it, but {verdict.detail}"
    if code == "sharding":
        return code, f"{replaced}{_asked(region)}", AUTO_AXES
    if code == "uncertified":
        return code, replaced, None
    return code, f"{where} ends what looks like {plan.formula} and is another function: {verdict.detail}", None


def _refused(search: Search, plan: Substitution, facts: _Facts, anchor: Node) -> Declined:
    """The reason where the implementation that was named cannot run a site on the device asked about."""
    asked = f"implementation {search.implementation!r} cannot run this call on {search.device}: {facts.refused}"
    sentence = f"{anchor_text(anchor)}: {plan.formula} would do, but {plan.op.name}'s {asked}"
    return Declined(sentence, "implementation", edit=f"name one that can: {_named(facts.backends)}")


def _named(backends: Sequence[Backend]) -> str:
    """The implementations that can run, as a user names them."""
    able = reversed([b.name for b in backends if b.verdict != "unavailable"])
    return ", ".join(f"implementation={name!r}" for name in able)


def _asked(region: Region) -> str:
    """Which products of a region say where their results lie: a fused op has no word for it but the type of its own result."""
    asking = [n for n in region.nodes if n.params.get("out_sharding") is not None]
    requests = (f"{anchor_text(n)} asks for {spec_text(n.params['out_sharding'])}" for n in asking)
    return f" ({'; '.join(requests)}, which the fused op's own product cannot be asked for)" if asking else ""


def wider_text(node: Node, dtype: Any) -> str:
    """The sentence for a node that computes wider than the fused op would, in `dtype`."""
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
    left = plan.op.left_to_xla(*operands, device=search.device, **attrs)
    if left is not None and plan.op.declines and asked is not None:
        left = None  # who names an implementation has it
    return _Facts(verdict, program, saved, backends(operands), left)


def _refusal(backends: Sequence[Backend], name: str) -> str | None:
    """Why the implementation of this name cannot run; None where it can."""
    return next((b.reason for b in backends if b.name == name and b.verdict == "unavailable"), None)


def _program(plan: Substitution, avals: Sequence[Any], sums: DeviceSums) -> tuple[Block, list[Any]]:
    """What would stand for a site, and the types of the op's operands in it."""
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
    """Whether a plan, which is traced to `program`, gives every root of a region, in values and in gradients."""
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
            return replace(verdict, detail=f"of its {len(region.roots)} results number {i + 1}: {verdict.detail}")
        lost.update(dict.fromkeys(verdict.lost))
        edge, regained = edge or verdict.edge, regained or verdict.regained
    return ProofOutcome(None, lost=tuple(lost), edge=edge, regained=regained)


def found_at(pass_name: str, view: CanonicalView) -> tuple[str, str, str]:
    """Where `Search.shared` has what a pass found in a block."""
    return "found", pass_name, view.block.path
