"""A forward region and its backward region as one block: a scan and the scan that runs back, and the like.

Differentiating a region makes two regions: the first also returns what the second reads. Read as one straight program, in which the
inputs of the second *are* the values that the first computes, both appear in one canonical view; this form is never executed or rewritten.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

from ..canonical.given import Known, known_inputs
from ..canonical.view import CanonicalView
from ..jax_compat import scan_counts
from ..primitives import having
from ..program.ir import Atom, Block, Node, Value

_WHOLE = having("jit", "remat", "branch")  # each body is given and returns whole values


def joined_views(found: Iterable[CanonicalView]) -> Iterator[tuple[str, CanonicalView]]:
    """(path of a forward block, view of it and of a backward block that reads it) in the blocks of some views, also inside each other."""
    stack = [(view.block, view) for view in found]
    while stack:
        block, view = stack.pop()
        for forward, backward in _pairs(block):
            for first, second in zip(forward.blocks, backward.blocks, strict=True):
                known = _known(block, forward, first, backward, second)
                if known:
                    whole = _joined(first, second, known, _kept(block, forward, backward, set(known)), backward)
                    inside = CanonicalView(whole, _known_inputs(view, forward, backward, known))
                    yield first.path, inside
                    stack.append((whole, inside))


def _known_inputs(view: CanonicalView, forward: Node, backward: Node, joined: Collection[int]) -> dict[int, Known]:
    """What the inputs of both bodies read as one are known to be; `joined` are those of the second that are values of the first."""
    first, second = (known_inputs(view, node) for node in (forward, backward))
    own = (i for i in range(len(backward.blocks[0].inputs)) if i not in joined)
    shift = len(forward.blocks[0].inputs)
    return first | {shift + at: second[i] for at, i in enumerate(own) if i in second}


def _pairs(block: Block) -> Iterator[tuple[Node, Node]]:
    """Pairs of region nodes of which the second reads results of the first."""
    for backward in block.nodes:
        if not backward.blocks:
            continue
        makers: dict[int, Node] = {}
        for atom in backward.inputs:
            maker = _maker(block, atom)
            if maker is not None and maker.blocks:
                makers[maker.id] = maker
        for forward in makers.values():
            if _same_run(forward, backward):
                yield forward, backward


def _source(block: Block, atom: Atom) -> Atom:
    """The atom itself, seen through the copies that `_joined` puts."""
    while isinstance(atom, Value):
        maker = block.producer.get(atom.id)
        if maker is None or maker.primitive != "copy":
            break
        atom = maker.inputs[0]
    return atom


def _maker(block: Block, atom: Atom) -> Node | None:
    source = _source(block, atom)
    return block.producer.get(source.id) if isinstance(source, Value) else None


def _known(block: Block, forward: Node, first: Block, backward: Node, second: Block) -> dict[int, Atom]:
    """Number of an input of the second body -> the value of the first that it equals in every iteration."""
    places = _places(forward, first)
    known: dict[int, Atom] = {}
    for i, (place, atom) in enumerate(_operands(backward, second)):
        source = _source(block, atom)
        if isinstance(source, Value):
            for mine, outer, inner in places:
                if mine == place and isinstance(outer, Value) and outer.id == source.id:
                    known[i] = inner
                    break
    return known


OperandPlace = Any  # where an operand or result stands: two values are the same only in the same kind of place


def _places(node: Node, body: Block) -> list[tuple[OperandPlace, Atom, Atom]]:
    """(place, value outside, value in the body) of a region's operands and results."""
    given = [(place, atom, value) for (place, atom), value in zip(_operands(node, body), body.inputs, strict=True)]
    outs = zip(_result_places(node), node.outputs, body.outputs, strict=True)
    return [*given, *((place, outer, inner) for place, outer, inner in outs if place is not None)]


def _operands(node: Node, body: Block) -> Iterator[tuple[OperandPlace, Atom]]:
    """(place, atom outside) for each input of a body."""
    atoms = node.inputs[len(node.inputs) - len(body.inputs) :]  # a cond's branches are not given its index
    if node.primitive == "scan":
        consts, carried = scan_counts(node.params)
        kinds = itertools.chain(["const"] * consts, [None] * carried, itertools.repeat("x"))
    elif node.primitive == "shard_map":
        kinds = map(str, node.params["in_specs"])
    else:
        kinds = itertools.repeat("whole")
    return zip((object() if k is None else k for k in kinds), atoms, strict=False)


def _result_places(node: Node) -> list[OperandPlace | None]:
    if node.primitive == "scan":
        carried = scan_counts(node.params)[1]
        return [None] * carried + ["x"] * (len(node.outputs) - carried)
    if node.primitive == "shard_map":
        return [str(s) for s in node.params["out_specs"]]
    return ["whole"] * len(node.outputs)


def _same_run(forward: Node, backward: Node) -> bool:
    """Whether the second is a region of the same kind over the same entries, branch or devices as the first."""
    if forward.primitive != backward.primitive or len(forward.blocks) != len(backward.blocks):
        return False
    if forward.primitive == "scan":
        return forward.params["length"] == backward.params["length"]
    if forward.primitive == "cond":
        first, second = forward.inputs[0], backward.inputs[0]
        return isinstance(first, Value) and isinstance(second, Value) and first.id == second.id
    return forward.primitive == "shard_map" or forward.primitive in _WHOLE


def _kept(block: Block, forward: Node, backward: Node, known: set[int]) -> list[bool]:
    """For each result of the first region, whether anything but the second reads it; a carry is read in the next iteration."""
    shift = len(backward.inputs) - len(backward.blocks[0].inputs)
    carried = scan_counts(forward.params)[1] if forward.primitive == "scan" else 0

    def elsewhere(value: Value) -> bool:
        if value.id in block.returned:
            return True
        for user in block.users.get(value.id, ()):
            if user is backward:
                at = (i - shift for i, a in enumerate(user.inputs) if isinstance(a, Value) and a.id == value.id)
                if not known.issuperset(at):
                    return True
            # The copies that `_joined` puts have no id of the program's.
            elif user.id >= 0 or elsewhere(user.outputs[0]):
                return True
        return False

    return [i < carried or elsewhere(value) for i, value in enumerate(forward.outputs)]


def _joined(first: Block, second: Block, known: dict[int, Atom], kept: list[bool], like: Node) -> Block:
    """Both bodies one after the other; each input or captured array of the second that is a value of the first becomes a copy of it.

    The joined block returns the results of the first (`kept`: those read by others than the second) and of the second. `like` is the second
    region's node, whose equation the copies use.
    """
    shared, own = _captured_again(first, second)
    same = [*((second.inputs[i], atom) for i, atom in known.items()), *shared]
    copies = [replace(like, primitive="copy", inputs=(a,), outputs=(v,), blocks=(), id=-1 - v.id) for v, a in same]
    inputs = (*first.inputs, *(v for i, v in enumerate(second.inputs) if i not in known))
    consts = (*first.consts, *own)
    returned = (a for a, keep in zip(first.outputs, kept, strict=True) if keep)
    nodes, outputs = (*first.nodes, *copies, *second.nodes), (*returned, *second.outputs)
    return Block(first.path, first.label, inputs, consts, nodes, outputs, first.jaxpr)


def _captured_again(first: Block, second: Block) -> tuple[list[tuple[Value, Value]], list[tuple[Value, Any]]]:
    """(values of the second block and of the first that are one captured array, further captures of the second)."""
    arrays = {id(array): value for value, array in first.consts}
    shared = [(value, arrays[id(array)]) for value, array in second.consts if id(array) in arrays]
    return shared, [(value, array) for value, array in second.consts if id(array) not in arrays]
