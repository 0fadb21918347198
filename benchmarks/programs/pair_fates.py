"""What becomes of each forward site of a train step of the zoo that is differentiated already (see benchmarks/programs/pairs.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..search.recall import recomputed

KINDS = ("linear", "linear_activation", "attention", "norm")
FATES = ("paired", "no gradient", "primal half", "stays")


@dataclass(frozen=True)
class Site:
    """One forward site: `reason` where it stays; `forward_too` where the forward program declines it as well."""

    id: str
    kind: str
    fate: str
    reason: str = ""
    forward_too: bool = False


def kind_of(item: Any) -> str | None:
    """The kind of a candidate or rejection, by what was recognised; None for what is no site, or part of one that is."""
    concepts = set(item.concepts)
    if not concepts or getattr(item, "code", "") == "overlap":
        return None
    if "attention" in concepts:
        return "attention"
    if concepts & {"layer_norm", "rms_norm"}:
        return "norm"
    return "linear" if concepts == {"linear"} else "linear_activation"


def sites_of(program: Any, found: Any) -> tuple[Site, ...]:
    """The fates of the forward sites of a train step of the zoo."""
    items = [x for x in (*found.candidates, *found.rejections) if kind_of(x)]
    again, own = recomputed(found.graph), Inside(found.graph)
    primal = _primal_halves(items, again, own.operands)
    reached = _reached_by_parameters(found.graph, len(_leaves(program.built.args[0])))
    sites = []
    for item in items:
        pair = item.backward
        if pair is not None and pair.stays is None:
            sites.append((item, "paired"))
        elif pair is None and _is_candidate(item) and not own.read(item) & reached and not own.is_read_back(item):
            sites.append((item, "no gradient"))
        elif pair is None and id(item) in primal and not own.is_read_back(item):
            sites.append((item, "primal half"))
        else:
            sites.append((item, "stays"))
    declined = _declined_forward(program) if any(f == "stays" and not _is_candidate(i) for i, f in sites) else set()
    return tuple(
        Site(i.id, str(kind_of(i)), fate, _reason(i), not _is_candidate(i) and _place(i) in declined)
        if fate == "stays"
        else Site(i.id, str(kind_of(i)), fate)
        for i, fate in sites
    )


def _is_candidate(item: Any) -> bool:
    return hasattr(item, "formula")


def _ids(item: Any) -> frozenset[int]:
    return item.node_ids if _is_candidate(item) else item.site_ids


def _place(item: Any) -> tuple[Any, ...]:
    return item.pass_name, item.concepts, str(item.source)


def _reason(item: Any) -> str:
    if _is_candidate(item):
        return item.backward.stays if item.backward else "its backward pass was not found"
    return f"[{item.code}] {item.sentence}"


def _primal_halves(items: Sequence[Any], again: frozenset[int], operands_of: Callable[[Any], Any]) -> set[int]:
    """The items (by `id`) of which a twin is computed again in a backward checkpoint; no more of them than there are twins."""

    def key(item: Any) -> tuple[Any, ...]:
        return *_place(item), item.scope, getattr(item, "code", None), operands_of(item)

    twins = Counter(key(x) for x in items if _ids(x) <= again)
    firsts: dict[tuple[Any, ...], list[Any]] = {}
    for x in items:
        if not _ids(x) & again:
            firsts.setdefault(key(x), []).append(x)
    return {id(x) for k, group in firsts.items() if len(group) <= twins[k] for x in group}


def _leaves(tree: Any) -> list[Any]:
    import jax

    return jax.tree.leaves(tree)


def _reached_by_parameters(graph: Any, parameters: int) -> set[int]:
    """Ids of the float values that hang on the first inputs, but for stop_gradient; a region's body on all it is given if on any of it."""
    import jax.numpy as jnp

    reached = {v.id for v in graph.top.inputs[:parameters]}
    stack = [(graph.top, False)]
    while stack:
        block, whole = stack.pop()
        if whole:
            reached.update(v.id for v in block.inputs)
        for node in block.nodes:
            hangs = any(getattr(a, "id", None) in reached for a in node.inputs) and node.primitive != "stop_gradient"
            stack.extend((child, hangs) for child in node.blocks)
            if hangs:
                reached.update(v.id for v in node.outputs if jnp.issubdtype(v.dtype, jnp.floating))
    return reached


class Inside:
    """What sites read, and who reads what they make."""

    def __init__(self, graph: Any) -> None:
        from fusionlab.graph.jax_compat import scan_counts

        self.graph = graph
        self.given: dict[int, int] = {}  # input of a region's body -> what it is outside; none for a loop's carry
        for node in graph.nodes():
            first, carried = scan_counts(node.params) if node.primitive == "scan" else (0, 0)
            for body in node.blocks if node.primitive != "while" else ():
                atoms = node.inputs[len(node.inputs) - len(body.inputs) :]  # a cond's branches are not given its index
                for i, (value, atom) in enumerate(zip(body.inputs, atoms, strict=True)):
                    if hasattr(atom, "id") and not first <= i < first + carried:
                        self.given[value.id] = atom.id

    def operands(self, item: Any) -> tuple[Any, ...]:
        """Shapes of the result and of the float operands, and which of those are inputs of the program. A mask is left out: it may be made
        inside a site, or outside and given to it.
        """
        import jax.numpy as jnp

        result = self.graph.node_by_id[max(_ids(item))].outputs[0]
        leaves = item.leaves.values() if _is_candidate(item) else ()
        floats = [v for v in leaves if jnp.issubdtype(v.dtype, jnp.floating)]
        inputs = {self._outermost(v.id) for v in floats} & {v.id for v in self.graph.top.inputs}
        return result.shape, *sorted(v.shape for v in floats), *sorted(inputs)

    def _outermost(self, value: int) -> int:
        """What a region around is given for a value that its body is given."""
        while value in self.given:
            value = self.given[value]
        return value

    def read(self, item: Any) -> set[int]:
        """Ids of the values that a site reads and does not make."""
        nodes = [self.graph.node_by_id[i] for i in _ids(item)]
        made = {v.id for n in nodes for v in n.outputs}
        return {a.id for n in nodes for a in n.inputs if hasattr(a, "id")} - made

    def is_read_back(self, item: Any) -> bool:
        """Whether a backward node reads an inner value of the site, or its block returns one; the last node's is its result."""
        from fusionlab.graph.program.scopes import in_backward

        ids = _ids(item)
        for i in ids - {max(ids)}:
            block = self.graph.block_of[i]
            for value in self.graph.node_by_id[i].outputs:
                readers = (u for u in block.users.get(value.id, ()) if u.id not in ids)
                if value.id in block.returned or any(map(in_backward, readers)):
                    return True
        return False


def _declined_forward(program: Any) -> set[tuple[Any, ...]]:
    """The places at which the forward program has a site that is declined and none that is accepted."""
    import fusionlab as fl

    function, args = replace(program, variant="forward").make()
    found = fl.find(function, *args)
    return {_place(r) for r in found.rejections} - {_place(c) for c in found.candidates}
