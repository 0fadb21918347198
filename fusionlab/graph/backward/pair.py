"""A forward region and its backward pass as a pair: whether both can be replaced together, and how."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.extend import core as jex_core

from ..canonical.view import CanonicalView
from ..certify.certify import Certifier, ProofOutcome, prove_gradients, with_vjp
from ..declined import Declined
from ..dtypes import arithmetic_dtype
from ..jax_compat import has_side_effects
from ..matching.region import Region, region_signature
from ..matching.wide import computed_wider
from ..primitives import having
from ..program.crossing import CROSSED, BlockTree
from ..program.equations import kind, slice_jaxpr
from ..program.graph import Graph
from ..program.in_shard_map import make_jaxpr
from ..program.ir import Block, Node, Value, values_in
from ..program.signature import node_signature
from ..unit_cotangent import unit_cotangent
from .find import Backward, Share
from .gradients import BackwardPart, terms_beside
from .vjp_split import Split, split_of

_PRODUCTS = having("product")
_NO_VALUE = -(1 << 60)  # the id of what stands for a literal cotangent: no node reads it
Placed = Sequence[tuple[int, str, Share]]  # number of a leaf among the region's inputs, its name, where its gradient is


@dataclass(frozen=True, eq=False)
class Pairing:
    """A backward pass that can be replaced together with its forward region.

    Attributes: `part` (the rewriter's), `node_ids` (nodes of the backward pass that go), `gradients` (leaf name -> value).
    """

    part: BackwardPart
    node_ids: frozenset[int]
    gradients: dict[str, Value]


class Pairer:
    """Plans replacements of regions of one graph together with their backward passes."""

    def __init__(self, graph: Graph, certifier: Certifier) -> None:
        self.tree = BlockTree(graph)
        self.certifier = certifier

    def plan(self, region: Region, fn: Callable[..., Any], description: Any, found: Backward) -> Pairing:
        """The plan for replacing a region by `fn`, and the backward pass found by the derivative of `fn`.

        Args:
          region: the site.
          fn: takes `region.inputs`, gives the region's root; with further roots, a tuple of all.
          description: hashable description of `fn`, for the cache of proofs.
          found: the backward pass.

        Raises:
          Declined: one of them would remain, or they do not agree.
        """
        path = self.tree.of_value.get(_place(found), "")
        placed = self._placed(region, found, path)
        _check_types(region, found)
        gone = self._gone(region, found, placed)
        if len(read := _read_outside(found.view.block, placed, gone)) < len(placed):
            placed, gone = read, self._gone(region, found, read)
        self._order(found, region, placed)
        split = self._split(region, fn, description, found, placed)
        part = self._part(region, found, path, placed, split)
        own = region.node_ids
        gradients = {name: share.value for _, name, share in placed}
        return Pairing(part, frozenset(i for i in gone if i >= 0 and i not in own), gradients)

    def _placed(self, region: Region, found: Backward, path: str) -> Placed:
        """The gradients in the block at `path` that are separate from others. Raises Declined if there is none."""
        shares = _shares(region, found)
        numbered = _each_once((i, name, share) for i, name, share in shares if _separate(share, region.inputs[i]))
        placed = [entry for entry in numbered if self.tree.of_value.get(entry[2].value.id) == path]
        if not placed:
            raise Declined("no gradient was found that is separate from other gradients")
        return placed

    def _gone(self, region: Region, found: Backward, placed: Placed) -> set[int]:
        """The nodes that nothing reads any more. Raises Declined if some nodes of the region are still read."""
        block = found.view.block
        replaced = {*(v.id for v in region.roots), *(share.value.id for _, _, share in placed)}
        read = {v.id for v in values_in((*region.inputs, found.cotangent))}
        read |= {v.id for _, _, share in placed for v in terms_beside(block, share.value, [share])}
        gone = dead_nodes(block, replaced, read)
        for node in region.nodes:
            if node.id not in gone:
                raise Declined(_still_read(block, node, gone, region, found, {n for _, n, _ in placed}))
        return gone

    def _order(self, found: Backward, region: Region, placed: Placed) -> None:
        """Raises Declined if the cotangent, or an operand, is computed from a gradient."""
        block = found.view.block
        values = {share.value.id for _, _, share in placed}
        first = min(block.position[block.producer[i].id] for i in values)
        stack = values_in((found.cotangent, region.root, *region.inputs))
        seen: set[int] = set()
        while stack:
            value = stack.pop()
            if value.id in values:
                raise Declined("its cotangent is computed from its gradients")
            maker = block.producer.get(value.id)
            if maker is not None and block.position[maker.id] >= first and maker.id not in seen:
                seen.add(maker.id)
                stack += values_in(maker.inputs)

    def _split(
        self,
        region: Region,
        fn: Callable[..., Any],
        description: Any,
        found: Backward,
        placed: Placed,
    ) -> Split:
        """The program of `fn` and that of its derivative, proved to agree with the backward pass."""
        block, inputs = found.view.block, region.inputs
        wanted = [i for i, _, _ in placed]
        terms = [_values(block, share) for _, _, share in placed]
        flat = list(itertools.chain(*terms))
        given = found.cotangent
        cotangent = given if isinstance(given, Value) else Value(_NO_VALUE, given.aval)
        nodes = _slice(found.view, flat, {v.id for v in (*inputs, cotangent)})
        _check_arithmetic(region, found, nodes)
        signature = _signature(found.view, nodes, (*inputs, cotangent), terms)
        types = tuple(v.aval for v in (*inputs, region.root, cotangent))  # of what the programs are traced with
        is_one = cotangent is not given
        key = ("pair", region_signature(region), description, *signature, tuple(wanted), types, is_one)
        known = {i: c for i, c in found.view.known_inputs.items() if i in {v.id for v in block.inputs}}

        def prove() -> tuple[ProofOutcome, Split]:
            avals, out = [v.aval for v in inputs], region.root.aval
            old = slice_jaxpr(block, nodes, (*inputs, cotangent), flat, known)
            groups = [(name, len(group)) for (_, name, _), group in zip(placed, terms, strict=True)]
            n = len(region.others)
            with unit_cotangent(is_one):
                new = with_vjp(fn, avals, out, wanted, others=n > 0)
                first = with_vjp(lambda *a: fn(*a)[0], avals, out, wanted) if n else new
            proved = _at_one(first) if is_one else first
            return prove_gradients(region, old, proved, groups, self.certifier.inline), split_of(new, n)

        verdict, split = self.certifier.once(key, prove)
        if not verdict.ok:
            raise Declined(f"the fused backward pass would not agree: {verdict.detail}")
        return split

    def _part(self, region: Region, found: Backward, path: str, placed: Placed, split: Split) -> BackwardPart:
        """The place of the backward pass, and the values to pass there."""
        known = {} if path == region.block.path else self._known_there(region, found, path, split)
        gradients = tuple((i, share) for i, _, share in placed)
        site = region.block.path, path, found.view.block, region.root, region.inputs
        return BackwardPart(*site, found.cotangent, gradients, known, split)

    def _known_there(self, region: Region, found: Backward, path: str, split: Split) -> dict[int, Value]:
        """Value of the site's block -> the other block's own name for it. Raises Declined if a value cannot be passed there."""
        known = _second_names(found.view.block)
        taken = (region.inputs[i] for role, i in split.taken if role == "input")
        moving = [*(v.aval for v in taken if v.id not in known), *split.residuals, region.root.aval]
        _check_ways(list(self.tree.between(region.block.path, path)), moving)
        return known


def _place(found: Backward) -> int:
    """The id of a value in the block of a backward pass: its cotangent, or a gradient where that is a literal."""
    if isinstance(found.cotangent, Value):
        return found.cotangent.id
    return next(iter(found.gradients.values())).value.id


def _at_one(closed: Any) -> Any:
    """A jaxpr of (inputs, cotangent) with 1 for the cotangent, whatever it is given."""
    fn = jex_core.jaxpr_as_fun(closed)
    return make_jaxpr(lambda *args: fn(*args[:-1], jnp.ones_like(args[-1])), list(closed.in_avals))


def _check_ways(between: Sequence[Node], moving: Sequence[Any]) -> None:
    """Raises Declined if values of the types `moving` cannot leave, or enter, the bodies of some nodes."""
    for node in between:
        if node.primitive not in CROSSED:
            raise Declined(
                f"it is in a different {node.primitive} from its forward pass, and no new value can leave that"
            )
    if any(n.primitive == "shard_map" for n in between) and not all(a.shape for a in moving):
        raise Declined("a scalar would have to leave its shard_map")


def _check_types(region: Region, found: Backward) -> None:
    """Raises Declined if the values' types do not allow the replacement."""
    if kind(found.cotangent.aval) != kind(region.root.aval):
        raise Declined("its cotangent varies along different mesh axes from its result")


def _check_arithmetic(region: Region, found: Backward, nodes: Sequence[Node]) -> None:
    """Raises Declined if a backward pass computes in more bits than its region, or its products request another precision."""
    wide = computed_wider(nodes, values_in((*region.inputs, found.cotangent)), arithmetic_dtype(region.root.dtype))
    if wide is not None:
        raise Declined(
            f"its {wide!r} computes wider than the fused one, which uses {arithmetic_dtype(region.root.dtype)}"
        )
    asked = {_precision(n) for n in region.nodes if n.primitive in _PRODUCTS}
    other = next((n for n in nodes if n.primitive in _PRODUCTS and asked and _precision(n) not in asked), None)
    if other is not None:
        raise Declined(
            f"{other!r} requests the precision {other.params['precision']}, its forward pass a different one"
        )


def _signature(
    view: CanonicalView, nodes: Sequence[Node], inputs: Sequence[Value], results: Sequence[Sequence[Value]]
) -> tuple[Any, Any]:
    """A signature of the computation of nodes from some inputs, whatever the names of values: (the nodes, their results)."""
    number: dict[int, Any] = {i: ("known", c) for i, c in view.known_inputs.items()}
    number.update((v.id, ("const", id(c))) for v, c in view.block.consts)
    number.update((v.id, i) for i, v in enumerate(inputs))
    body = tuple(node_signature(n, number) for n in nodes)
    return body, tuple(tuple(number.get(v.id) for v in group) for group in results)


def _shares(region: Region, found: Backward) -> list[tuple[int, str, Share]]:
    """(number among the region's inputs, name, share) of each gradient found, each input once."""
    names = {v.id: name for name, v in region.leaves.items()}
    shares = ((i, names[v.id]) for i, v in enumerate(region.inputs))
    return [(i, name, found.gradients[name]) for i, name in shares if name in found.gradients]


def _each_once(shares: Iterable[tuple[int, str, Share]]) -> list[tuple[int, str, Share]]:
    """The gradients without those equal to another operand's gradient (as for the two sides of a sum): replaced twice, they would be added
    twice.
    """
    own: dict[frozenset[int], tuple[int, str, Share]] = {}
    for entry in shares:
        own.setdefault(entry[2].own, entry)
    return list(own.values())


def _read_outside(block: Block, placed: Placed, gone: set[int]) -> Placed:
    """The gradients that the program uses; all of them if it uses none. A value that only another gradient's computation reads (w * ct is
    dy, and a term of dx) belongs to that gradient.
    """

    def asked(value: Value) -> bool:
        return value.id in block.returned or any(u.id not in gone for u in block.users.get(value.id, ()))

    return [entry for entry in placed if asked(entry[2].value)] or placed


def _separate(share: Share, leaf: Value) -> bool:
    return share.through is not None and kind(share.value.aval) == kind(leaf.aval)


def _precision(node: Node) -> tuple[Any, Any]:
    """The precision that a product requests of each operand, which numbers in float64 do not reveal."""
    asked = node.params["precision"]
    return tuple(asked) if isinstance(asked, tuple) else (asked, asked)


def _values(block: Block, share: Share) -> list[Value]:
    """The values whose sum a gradient is."""
    if share.own == {share.value.id}:
        return [share.value]
    found, stack = list[Value](), [share.value]
    while stack:
        maker = block.producer[stack.pop().id]
        for atom in maker.inputs:
            if isinstance(atom, Value) and atom.id in share.own:
                found.append(atom)
            elif (
                isinstance(atom, Value) and (above := block.producer.get(atom.id)) and above.id in (share.through or ())
            ):
                stack.append(atom)
    return found


def dead_nodes(block: Block, replaced: set[int], read: set[int]) -> set[int]:
    """Ids of the nodes of a block that nothing needs once the values `replaced` are computed otherwise, from the values `read`."""
    gone: set[int] = set()

    def needless(value: Value) -> bool:
        if value.id in read:
            return False
        if value.id in replaced:
            return True
        return value.id not in block.returned and all(u.id in gone for u in block.users.get(value.id, ()))

    queue = deque(block.producer[i] for i in replaced)
    while queue:
        node = queue.popleft()
        if node.id in gone or has_side_effects(node.eqn) or not all(map(needless, node.outputs)):
            continue
        gone.add(node.id)
        for atom in node.inputs:
            maker = block.producer.get(atom.id) if isinstance(atom, Value) else None
            if maker is not None:
                queue.append(maker)
    return gone


def _still_read(block: Block, node: Node, gone: set[int], region: Region, found: Backward, placed: set[str]) -> str:
    """Why a node of the region would remain."""
    missing = [n for n in (*found.absent, *found.gradients) if n not in placed]
    reader: Node | None = node
    while reader is not None and (reader.id < 0 or reader.id in region.node_ids):
        node = reader if reader.id >= 0 else node
        reader = _reader(block, reader, gone)
    where = f" (read by {reader!r})" if reader is not None else ""
    values = ", ".join(repr(v) for v in node.outputs)
    why = (
        f"the gradient of {', '.join(missing)} was not found in the backward pass"
        if missing
        else "it is read besides the gradients"
    )
    return f"{values} would still be needed{where}: {why}"


def _reader(block: Block, node: Node, gone: set[int]) -> Node | None:
    """The first node that reads a result of one and is not `gone`."""
    return next((u for v in node.outputs for u in block.users.get(v.id, ()) if u.id not in gone), None)


def _slice(view: CanonicalView, results: Iterable[Value], known: set[int]) -> list[Node]:
    """The nodes that compute some values of a block from known ones. Raises Declined if they read anything else."""
    block = view.block
    consts = {v.id for v, _ in block.consts}
    wanted: set[int] = set()
    stack = list(results)
    while stack:
        value = stack.pop()
        if value.id in known or value.id in view.known_inputs or value.id in consts:
            continue
        maker = block.producer.get(value.id)
        if maker is None:
            raise Declined(f"it reads {value!r} besides the site's operands")
        if maker.id not in wanted:
            wanted.add(maker.id)
            stack += values_in(maker.inputs)
    return [block.nodes[i] for i in sorted(block.position[n] for n in wanted)]


def _second_names(block: Block) -> dict[int, Value]:
    """For two bodies read as one: value of the first -> the second's own name for it."""
    found: dict[int, Value] = {}
    for node in block.nodes:
        if node.id < 0 and isinstance(node.inputs[0], Value):
            found.setdefault(node.inputs[0].id, node.outputs[0])
    return found
