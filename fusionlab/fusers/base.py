"""What a pass is, and what it needs to search a block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ..device import Device
from ..errors import unknown_name
from ..graph.canonical import View
from ..graph.certify import Certifier, Verdict, misplaced
from ..graph.evaluate import is_float, narrows
from ..graph.explicit import Misplaced, placing, told, typed_shapes
from ..graph.ir import Block, Graph, Node
from ..graph.manual import has_mesh, make_jaxpr
from ..graph.region import Escape, Region
from ..graph.rewrite import Replacement
from ..graph.rules import SUMS_OVER_DEVICES as SUMS_OVER_DEVICES
from ..graph.signature import region_signature
from ..graph.trace import block_of_jaxpr
from ..kernels.op import Op
from .findings import Backend, Candidate, Rejection, Residual

BY_DEFAULT = "_default"  # likewise, that nobody named the pass
# What to do where explicit axes stand in the way.
AUTO_AXES = "give the mesh axes the type Auto there (jax.sharding.auto_axes, or axis_types= of jax.make_mesh), or use jax.shard_map"
GRADIENT = "_grad"  # the option by which a search is told that a pass's `_grad` is off; no pass has one of this name


class Pass(Protocol):
    """One fusion pass: a name, words for people, and a search over one block.

    Attributes:
      name: as in `passes=[...]` and `Strategy`.
      op: the fused op it rewrites to.
      formula: what it fuses, in one line.
      needs: its conditions, in one line.
      options: option name -> (default, meaning), or (default, meaning, choices).
      whole: where it is there and true, the pass is searched after those that have none, whatever the order they were asked in.
      named_only: where it is there and true, the pass is asked only by name.
      forward_only: likewise, that it has no `_grad`.
      sample(): a small function and arguments in which it finds a site (for the before/after picture).
    """

    @property
    def name(self) -> str: ...
    @property
    def op(self) -> str: ...
    @property
    def formula(self) -> str: ...
    @property
    def needs(self) -> str: ...
    @property
    def options(self) -> Mapping[str, tuple[Any, ...]]: ...

    def sample(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """A small function and arguments with one site."""
        ...

    def search(self, search: Search) -> Iterator[Candidate | Rejection]:
        """Every site of the block: a candidate, or a rejection that says why not."""
        ...


@dataclass(frozen=True, eq=False)
class Search:
    """One pass over one block.

    Attributes: `graph`, `view` (of the block), `device`, `options` of this pass, `certifier`, `implementation` (as given to fuse),
    `differentiated` (there is a backward pass in the program), `shared` (for passes to keep what they found: one for all passes and
    blocks of a search).
    """

    graph: Graph
    view: View
    device: Device
    certifier: Certifier
    options: Mapping[str, Any] = field(default_factory=dict)
    implementation: str | None = None
    differentiated: bool = False
    shared: dict[Any, Any] = field(default_factory=dict)

    @property
    def block(self) -> Any:
        return self.view.block

    @property
    def gradient(self) -> bool:
        """Whether the pass's `_grad` is on: else the gradient is JAX's own of the reference."""
        return self.options.get(GRADIENT, True)

    @property
    def by_default(self) -> bool:
        """Whether neither the pass nor an implementation was named."""
        return bool(self.options.get(BY_DEFAULT, False)) and self.implementation is None


@dataclass(frozen=True, eq=False)
class Plan:
    """How a region becomes a call of a fused op.

    Attributes:
      op, attrs: the fused op and its attributes.
      operands: region inputs -> the op's operands (None for an absent one).
      finish: the op's result -> the region's root; a tuple of its roots, where it has several.
      formula: what it computes at this site.
      arithmetic: as of a Candidate.
    """

    op: Op
    attrs: Mapping[str, Any]
    operands: Callable[..., tuple[Any, ...]]
    finish: Callable[[Any], Any]
    formula: str
    arithmetic: str = ""

    def call(self, *inputs: Any) -> Any:
        return self.finish(self.op.call(*self.operands(*inputs), **self.attrs))


@dataclass(frozen=True)
class _Facts:
    """What certification of a site yields, shared by all sites of the same signature."""

    verdict: Verdict
    program: Block | None = None  # of a site that is none, nothing but why
    residuals: tuple[Residual, ...] = ()
    backends: tuple[Backend, ...] = ()
    left_alone: str | None = None
    idle: str = ""


def propose(
    search: Search,
    name: str,
    region: Region,
    plan: Plan,
    anchor: Node,
    notes: Sequence[str] = (),
    concepts: Sequence[str] = (),
    proof: Verdict | None = None,
    sums: bool = False,
) -> Any:
    """A certified Candidate, or the Rejection certification gives. Its id is completed by `number`.

    `proof` is the outcome of certification where the region is put together of others that were certified; with `sums` the plan sums over
    devices where the region does.
    """
    if not search.gradient:
        plan = replace(plan, attrs={**plan.attrs, "gradient": "reference"})
    problem = _unfit(region, sums)
    if problem is not None:
        return reject(search, name, *problem, anchor, region.nodes, region.nodes, concepts=concepts)
    key = (
        "site",
        region_signature(region),
        plan.op.name,
        tuple(sorted(plan.attrs.items())),
        search.implementation,
        search.device,
    )
    facts: _Facts = search.certifier.once(key, lambda: _facts(search, region, plan, proof))
    if not facts.verdict.ok:
        sentence = f"{anchor_text(anchor)}: {plan.formula} would replace it, but {facts.verdict.detail}"
        code, edit = facts.verdict.code or "value", None
        if code == "sharding":
            sentence, edit = f"{sentence}{_asked(region)}", AUTO_AXES
        return reject(search, name, code, sentence, anchor, region.nodes, region.nodes, edit=edit)
    if facts.left_alone is not None:
        sentence = f"{anchor_text(anchor)}: {plan.formula} would do, but {facts.left_alone}"
        able = reversed([b.name for b in facts.backends if b.verdict != "unavailable"])
        edit = f"name one to have it all the same: {', '.join(f'implementation={name!r}' for name in able)}"
        nodes = region.nodes
        return reject(search, name, "slower", sentence, anchor, nodes, nodes, edit=edit, concepts=concepts)
    assert facts.program is not None
    plan_call, idle = plan.call, facts.idle if search.by_default else ""
    replacement = Replacement(
        region.block.path, region.nodes, region.root, region.inputs, plan_call, others=region.others
    )
    return Candidate(
        id=f"{name}@{anchor.scope}",
        pass_name=name,
        op=plan.op.name,
        attrs={k: v for k, v in plan.attrs.items() if k != "implementation" and v is not None},
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
        idle=idle,
        notes=(*notes, f"left as it is unless asked for: {idle}") if idle else tuple(notes),
        concepts=tuple(concepts),
        program=facts.program,
        site=replacement,
        region=region,
        plan=plan,
    )


def _asked(region: Region) -> str:
    """Which products of a region say where their results lie: a fused op has no word for it but the type of its own result."""
    asking = [n for n in region.nodes if n.params.get("out_sharding") is not None]
    told_of = (f"{anchor_text(n)} asks for {told(n.params['out_sharding'])}" for n in asking)
    return f" ({'; '.join(told_of)}, which the fused op's own product cannot be asked for)" if asking else ""


def _unfit(region: Region, sums: bool = False) -> tuple[str, str] | None:
    """Why no fused op could stand for a region, whatever it computes: (code, sentence)."""
    values = *region.inputs, *region.roots
    floats = [v.dtype for v in values if is_float(v.dtype)]
    if any(0 in v.shape for v in values):
        return "axes", f"{region.root!r} or one of its operands is empty"
    odd = next((v for v in region.roots if not is_float(v.dtype)), None) if region.others else None
    if odd is not None:
        return "dtype", f"{odd!r}, a result of the site, is no float"
    summed = next((n for n in all_nodes(region.nodes) if n.primitive in SUMS_OVER_DEVICES), None)
    if summed is not None and not sums:
        return "region", f"{anchor_text(summed)} sums over devices inside the site; the fused op runs on one"
    if not all(has_mesh(v.aval) for v in values):
        return (
            "region",
            f"{region.root!r} or one of its operands varies along an axis of no mesh around it, or is still to be summed along one",
        )
    for node in all_nodes(region.nodes):
        made = node.outputs[0].dtype
        read = [a.dtype for a in node.inputs if is_float(a.dtype)]
        if not is_float(made) or not read:
            continue
        # A cast may round to what the site's operands have anyway; a product that rounds its own sum is another matter.
        against = floats if node.primitive == "convert_element_type" else read
        if all(narrows(made, dtype) for dtype in against):
            return (
                "dtype",
                f"{anchor_text(node)} rounds to {made} inside the site; the fused op would not round there",
            )
    return None


def all_nodes(nodes: Iterable[Node]) -> Iterator[Node]:
    """The nodes and those of their child blocks."""
    for node in nodes:
        yield node
        for block in node.blocks:
            yield from all_nodes(block.nodes)


def _facts(search: Search, region: Region, plan: Plan, proof: Verdict | None) -> _Facts:
    what = (plan.op.name, tuple(sorted(plan.attrs.items())))
    verdict = proof or _proved(search, region, plan, what)
    if not verdict.ok:
        return _Facts(verdict)
    avals = [v.aval for v in region.inputs]
    try:
        with placing(avals):
            program = block_of_jaxpr(make_jaxpr(plan.call, avals, sums=region.sums))
            operands = typed_shapes(plan.operands, avals)
    except Misplaced as error:
        return _Facts(misplaced(error))
    attrs = {k: v for k, v in plan.attrs.items() if k != "implementation"}
    saved = plan.op.residuals(*operands, implementation=search.implementation, **attrs)
    residuals = saved if search.gradient else ()
    backends = plan.op.backends(*operands, device=search.device, implementation=search.implementation, **attrs)
    alone = None
    if search.implementation is None:
        alone = plan.op.left_alone(*operands, device=search.device, **attrs)
    idle = plan.op.idle(*operands, device=search.device, **attrs)
    return _Facts(verdict, program, residuals, backends, alone, idle)


def _proved(search: Search, region: Region, plan: Plan, what: Any) -> Verdict:
    """Whether a plan gives every root of a region, in values and in gradients."""
    if not region.others:
        return search.certifier.region(region, plan.call, what)
    for i, root in enumerate(region.roots):

        def one(*inputs: Any, i: int = i) -> Any:
            return plan.call(*inputs)[i]

        verdict = search.certifier.region(region.of(root), one, (*what, i, len(region.roots)))
        if not verdict.ok:
            return replace(verdict, detail=f"of its {len(region.roots)} results number {i + 1}: {verdict.detail}")
    return Verdict(None)


def reject(
    search: Search,
    name: str,
    code: str,
    sentence: str,
    anchor: Node,
    guilty: Iterable[Node],
    site: Iterable[Node],
    progress: tuple[int, int] | None = None,
    edit: str | None = None,
    concepts: Sequence[str] = (),
) -> Rejection:
    """A Rejection at `anchor`; `progress` defaults to all of the site's nodes having matched."""
    site_ids = frozenset(n.id for n in site) | {anchor.id}
    matched, total = progress or (len(site_ids), len(site_ids))
    guilty_ids = tuple(n.id for n in guilty)
    return Rejection(
        f"{name}@{anchor.scope}",
        name,
        code,
        sentence,
        guilty_ids,
        site_ids,
        matched,
        total,
        anchor.source,
        edit,
        concepts=tuple(concepts),
    )


def anchor_text(node: Node) -> str:
    """ "%7:f32[8,4] = add (model.py:41)": how a sentence names a node."""
    outs = ", ".join(map(repr, node.outputs))
    return f"{outs} = {node.primitive}" + (f" ({node.source})" if node.source else "")


def escape_text(escape: Escape) -> str:
    """ "%7 = add (model.py:41) is also read by %19 = mul (model.py:44)"."""
    reader = "is also returned" if escape.user is None else f"is also read by {anchor_text(escape.user)}"
    return f"{anchor_text(escape.node)} {reader}"


def is_whole(pass_: Pass) -> bool:
    """Whether a pass's sites are made of what other passes find, and it is to be searched after them."""
    return getattr(pass_, "whole", False)


def option(search: Search, pass_: Pass, key: str) -> Any:
    """An option's value: as given, or the default."""
    return search.options.get(key, pass_.options[key][0])


def has_gradient(pass_: Pass) -> bool:
    """Whether a pass brings a `_grad` with it: one of a forward op that dissolves under `jax.grad` does not."""
    return not getattr(pass_, "forward_only", False)


def found_at(pass_name: str, view: View) -> tuple[str, str, str]:
    """Where `Search.shared` has what a pass found in a block."""
    return "found", pass_name, view.block.path


def choices_of(pass_: Pass, name: str) -> list[Any] | None:
    """The values an option of a pass can have; None where they are not told."""
    default, _, *choices = pass_.options[name]
    if choices:
        return list(choices[0])
    return [False, True] if isinstance(default, bool) else None


def check_options(pass_: Pass, options: Mapping[str, Any]) -> None:
    """Raises UnknownNameError for an option the pass does not have."""
    for key in options:
        if key not in pass_.options:
            raise unknown_name(f"option of pass {pass_.name}", key, pass_.options)
