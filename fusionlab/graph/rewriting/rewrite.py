"""Graph -> jaxpr, with sites replaced. Everything outside a site is the traced equation itself, untouched.

A `Replacement` names the nodes to remove, their value, and the function that computes it instead; in an already differentiated
program, also the backward pass. Equations of the other nodes are re-emitted with their own params, effects,
contexts, scopes and source lines; regions are rebuilt, with their own parameters, only if they contain a site.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import core as jex_core

from ...errors import RewriteError
from ..backward.gradients import BackwardPart, Chosen, TravelKey, claims_of, first_gradients, sum_of_gradients
from ..interpret.observe import ENTERED
from ..jax_compat import rebuild, split_closed, types_in, variable_like, with_weakness, without_dead_code
from ..primitives import having
from ..program.crossing import BlockTree, more_operands, more_results
from ..program.equations import Constants, Env, atom_in, copied, inlined, kind, live, source_info
from ..program.graph import Graph
from ..program.in_shard_map import DeviceSums, make_jaxpr
from ..program.ir import Block, Node, Value
from ..program.order import in_order, last_of
from ..settings import jax_defaults, wide_types
from .peephole import with_less_kept, with_neighbours


@dataclass(frozen=True, eq=False)
class Replacement:
    """One site: the fused function in place of some nodes.

    Attributes:
      block_path: the block that contains the site.
      nodes: those that disappear.
      root: their value, now computed by `fn`.
      leaves: the values `fn` takes, in order.
      fn: arrays -> array of the root's shape and dtype; with `others`, a tuple of that and theirs.
      backward: its backward pass, if replaced with it; `others` are then no floats.
      others: further values of the nodes, which `fn` computes too.
      weak: the numbers of the leaves whose gradients are weakly typed in the program.
    """

    block_path: str
    nodes: tuple[Node, ...]
    root: Value
    leaves: tuple[Value, ...]
    fn: Callable[..., Any]
    backward: BackwardPart | None = None
    others: tuple[Value, ...] = ()
    weak: frozenset[int] = frozenset()

    @property
    def roots(self) -> tuple[Value, ...]:
        """All the values of the nodes that are read elsewhere."""
        return self.root, *self.others

    @property
    def gone(self) -> tuple[Node, ...]:
        """The nodes that are not written again. With a backward pass they are left to die: until it is replaced as well something reads
        them.
        """
        return self.nodes if self.backward is None else ()


@jax_defaults()
def to_jaxpr(graph: Graph, replacements: Iterable[Replacement] = ()) -> Any:
    """A closed jaxpr that computes `graph` with `replacements` applied.

    Raises:
      RewriteError: a replacement's result differs in shape or dtype from the value it replaces; or (SitesWaitError) replacements of
        several results depend on each other's.
    """
    return _emitted(graph, tuple(replacements), ())[0]


@jax_defaults()
def with_names(graph: Graph, replacements: Iterable[Replacement] = ()) -> tuple[Any, dict[Any, tuple[int, ...]]]:
    """(as `to_jaxpr`, variable -> the ids of the values of `graph` that it is), in the bodies of loops and calls as well.

    A value that a site no longer computes, or that nothing reads, is left out.
    """
    owner = BlockTree(graph).owner
    entered = {""}
    for block in graph.blocks():  # outermost first
        if block.path in owner and owner[block.path][1].path in entered and owner[block.path][0].primitive in ENTERED:
            entered.add(block.path)
    return _emitted(graph, tuple(replacements), entered)


@jax_defaults()
def with_params(graph: Graph, changed: Mapping[int, Mapping[str, Any]]) -> Any:
    """A closed jaxpr that computes `graph` with other parameters of some equations: node id -> parameter -> its value."""
    with wide_types(types_in(graph.top.jaxpr)):
        return _Edited(graph, changed).block(graph.top)


@jax_defaults()
def with_values_kept(graph: Graph, before: Mapping[int, Value]) -> Any:
    """A closed jaxpr that computes `graph`, in which a value (by id) that was computed before is passed there, not computed again."""
    with wide_types(types_in(graph.top.jaxpr)):
        return _Kept(graph, before).block(graph.top)


def _emitted(graph: Graph, chosen: Sequence[Replacement], paths: Iterable[str]) -> tuple[Any, dict]:
    """`paths` are further blocks to rewrite, so that their variables have names."""
    with wide_types(types_in(graph.top.jaxpr)):
        emitter = _Emitter(chosen, BlockTree(graph), paths)
        closed = emitter.block(graph.top)
        if any(r.backward for r in chosen):
            # What the old backward passes kept is computed, carried out of regions and into others until nobody reads it.
            closed = without_dead_code(with_less_kept(without_dead_code(closed)))
            closed = with_neighbours(closed)
    return closed, emitter.names


_REMAT = having("remat")


class _Emitter:
    """Blocks with their replacements, as jaxprs.

    `env` maps everything readable in a block to its variable: values by id; residuals and gradients of a pair by keys (number of the
    replacement, "residual" or "gradient", number); values passed to another block by ("value", id).
    """

    def __init__(self, replacements: Sequence[Replacement], tree: BlockTree, paths: Iterable[str] = ()) -> None:
        self.tree = tree
        self.names: dict[Any, tuple[int, ...]] = {}  # variable -> ids of the values that it is
        self.forward = _grouped((r.block_path, i, r) for i, r in enumerate(replacements))
        parts = [(i, r.backward) for i, r in enumerate(replacements) if r.backward is not None]
        self.chosen = Chosen(parts)
        self.backward = _grouped((part.block_path, i, part) for i, part in parts)
        self.exports: dict[str, list[TravelKey]] = {}
        self.imports: dict[str, list[TravelKey]] = {}
        self.types: dict[tuple[str, TravelKey], Any] = {}  # of what enters a block
        self.left: dict[tuple[str, TravelKey], Any] = {}  # and of what leaves one
        self.way: dict[tuple[str, TravelKey], list[str]] = {}  # the block a key leaves -> those that it enters
        for i, part in parts:
            if part.block_path != part.site_path:
                self._send(i, part)
        self.paths = {*self.forward, *self.backward, *self.exports, *self.imports, *paths}

    def _send(self, number: int, part: BackwardPart) -> None:
        """Passes the values that a backward pass needs and its block lacks out of the site's block and those around it."""
        for key in part.operands(number):
            if not isinstance(key, Value):
                self._pass(key, *self.tree.ways(part.site_path, part.block_path))

    def _pass(self, key: TravelKey, leave: Sequence[str], enter: Sequence[str]) -> None:
        """Passes a value out of some blocks and into others. A scan that is left stacks it for one that is entered; checkpoints are given,
        and give, what is there.
        """
        for paths, passed in ((leave, self.exports), (enter, self.imports)):
            for path in paths:
                if key not in passed.setdefault(path, []):
                    passed[path].append(key)
        stacks = [[path for path in way if not self._is_checkpoint(path)] for way in (leave, enter)]
        for out, into in zip(*stacks, strict=True):
            self.way.setdefault((out, key), []).append(into)

    def _is_checkpoint(self, path: str) -> bool:
        return path in self.tree.owner and self.tree.owner[path][0].primitive in _REMAT

    def block(self, block: Block) -> Any:
        binders = split_closed(block.jaxpr)[0].invars
        env: Env = {v.id: variable_like(var) for v, var in zip(block.inputs, binders, strict=True)}
        # What its calls captured, and fused functions do, is written into a block that may not have constants.
        closed = self._may_capture(block)
        env.update((v.id, jex_core.Var(v.aval) if closed else jex_core.Literal(c, v.aval)) for v, c in block.consts)
        given = self.imports.get(block.path, ())
        env.update((key, jex_core.Var(self.types[block.path, key])) for key in given)
        eqns, extra = self._equations(block, env)
        leaving = self._leaving(block, env)
        outvars = [*(atom_in(env, a) for a in block.outputs), *leaving]
        invars = [*(env[v.id] for v in block.inputs), *(env[key] for key in given)]
        captured = [(env[v.id], c) for v, c in block.consts] if closed else []
        constvars, consts = _apart(captured, extra)
        for key, atom in env.items():
            if isinstance(key, int) and isinstance(atom, jex_core.Var) and key not in self.chosen.unlike:
                self.names[atom] = (*self.names.get(atom, ()), key)
        return rebuild(block.jaxpr, constvars, invars, outvars, live(eqns, outvars), consts)

    def _leaving(self, block: Block, env: Env) -> list:
        """The values passed out of a block, whose types are now known where they enter another."""
        found = []
        for key in self.exports.get(block.path, ()):
            atom = _atom(env, key)
            self.left[block.path, key] = atom.aval
            self.types.update(((into, key), atom.aval) for into in self.way.get((block.path, key), ()))
            found.append(atom)
        return found

    def _may_capture(self, block: Block) -> bool:
        """Whether the block's jaxpr may have constants of its own: an open one has none, and a checkpoint's must not."""
        return hasattr(block.jaxpr, "consts") and not self._is_checkpoint(block.path)

    def _equations(self, block: Block, env: Env) -> tuple[list, Constants | None]:
        sites, pairs = self.forward.get(block.path, ()), self.backward.get(block.path, ())
        at_node = {last_of(block, r.roots).id: (i, r) for i, r in sites}
        gone = {n.id for _, r in sites for n in r.gone}
        claims, waiting = claims_of(pairs), first_gradients(block, pairs)
        eqns: list[Any] = []
        extra: Constants | None = [] if self._may_capture(block) else None
        for node in in_order(block, waiting, [r for _, r in sites]):
            for number, part in waiting.get(node.id, ()):
                eqns += self.chosen.pulled(number, part, node, env, extra)
            if node.id not in gone:
                eqns.append(self.eqn(node, env))
            if node.id in at_node:
                number, r = at_node[node.id]
                eqns += _spliced(number, r, block.producer[r.root.id], env, extra)
            for value in node.outputs:
                if value.id in claims:
                    eqns += sum_of_gradients(value, claims[value.id], node, env, extra)
        return eqns, extra

    def eqn(self, node: Node, env: Env) -> Any:
        """The node's own equation on new variables; child blocks are rebuilt only if they contain a site."""
        eqn = copied(node, env)
        if any(self._touched(b) for b in node.blocks):
            eqn = self._region(eqn, node, env)
        return eqn

    def _touched(self, block: Block) -> bool:
        return any(path == block.path or path.startswith(block.path + ".") for path in self.paths)

    def _region(self, eqn: Any, node: Node, env: Env) -> Any:
        """The equation with its bodies rebuilt, and with the values passed into and out of them."""
        body = node.blocks[0].path
        entering, leaving = self.imports.get(body, ()), self.exports.get(body, ())
        if self._is_checkpoint(body):
            self.types.update(((body, key), _atom(env, key).aval) for key in entering)
        params = self._params(node)
        if entering:
            params = more_operands(node, params, [self.types[body, key] for key in entering])
        eqn = eqn.replace(params=params, invars=[*eqn.invars, *(_atom(env, key) for key in entering)])
        if not leaving:
            return eqn
        params, outside = more_results(node, params, [self.left[body, key] for key in leaving], len(entering))
        results = [jex_core.Var(aval) for aval in outside]
        env.update(zip(leaving, results, strict=True))
        return eqn.replace(params=params, outvars=[*eqn.outvars, *results])

    def _params(self, node: Node) -> dict[str, Any]:
        params = dict(node.params)
        for block in node.blocks:
            if not self._touched(block):
                continue
            key, _, index = block.label.partition("[")
            new = self.block(block)
            if index:
                items = list(params[key])
                items[int(index.rstrip("]"))] = new
                kind = type(params[key])  # of a linear solve, a named tuple
                params[key] = kind(*items) if hasattr(kind, "_fields") else kind(items)
            else:
                params[key] = new
        if params.get("policy") is not None:
            params["policy"] = _AnchorPolicy(params["policy"])
        return params


class _Edited(_Emitter):
    """Blocks without replacements, in which some equations have other parameters."""

    def __init__(self, graph: Graph, changed: Mapping[int, Mapping[str, Any]]) -> None:
        super().__init__((), BlockTree(graph), {graph.block_of[i].path for i in changed})
        self.changed = changed

    def eqn(self, node: Node, env: Env) -> Any:
        eqn = super().eqn(node, env)
        return eqn.replace(params={**eqn.params, **self.changed.get(node.id, {})})


class _Kept(_Emitter):
    """Blocks without replacements, in which some values are those that were computed before."""

    def __init__(self, graph: Graph, before: Mapping[int, Value]) -> None:
        super().__init__((), BlockTree(graph))
        self.before = before
        place = self.tree.of_value
        for again, first in before.items():
            self._pass(("value", first.id), *self.tree.ways(place[first.id], place[again]))
        self.paths |= {*self.exports, *self.imports, *(place[again] for again in before)}

    def eqn(self, node: Node, env: Env) -> Any:
        eqn = super().eqn(node, env)
        again = [v for v in node.outputs if v.id in self.before]
        env.update((v.id, _atom(env, ("value", self.before[v.id].id))) for v in again)
        return eqn  # what nobody reads any more is left out of the block


def _atom(env: Env, key: TravelKey) -> Any:
    """The atom of a key, in a block that is given it or one that made its value."""
    return env[key] if key in env else env[key[1]]


def _apart(captured: Constants, extra: Constants | None) -> tuple[list, list]:
    """(variables, arrays) of the captures of a block and of equations written into it."""
    both = [*captured, *(extra or ())]
    return [v for v, _ in both], [c for _, c in both]


def _program_of(r: Replacement) -> Any:
    """A closed jaxpr of the leaves that makes the roots, and the residuals of the backward pass."""
    if r.backward is not None:
        return r.backward.split.forward
    types = [v.aval for v in r.roots] if r.others else r.root.aval
    return make_jaxpr(r.fn, [v.aval for v in r.leaves], types, DeviceSums.of(r.nodes))


def _spliced(number: int, r: Replacement, at: Node, env: Env, extra: Constants | None) -> list:
    """The equations of the fused function, with the source information of the site's root."""
    info = source_info(at)
    program = _program_of(r)
    eqns, given = _strong([env[v.id] for v in r.leaves], r.weak, info)
    more, results = inlined(program, given, info, extra)
    residuals = results[len(r.roots) :]
    if len(results) < len(r.roots) or (residuals and r.backward is None):
        raise RewriteError(f"the replacement for {r.roots!r} gives {len(results)} arrays; this is a bug")
    for value, atom in zip(r.roots, results, strict=False):
        if kind(atom.aval) != kind(value.aval):
            raise RewriteError(
                f"the replacement for {value!r} gives {atom.aval.str_short()}, needed the same shape and dtype (and, in a "
                "shard_map, varying along the same mesh axes; laid out alike over explicit ones); this is a bug"
            )
        env[value.id] = atom
    env.update(((number, "residual", k), atom) for k, atom in enumerate(residuals))
    return [*eqns, *more]


def _strong(atoms: Sequence[Any], numbers: Collection[int], info: Any) -> tuple[list, list]:
    """(equations, atoms) of an op's operands, some of them cast to be strong: the transpose of that cast makes a gradient weak again."""
    eqns: list[Any] = []
    given = list(atoms)
    for i in sorted(numbers):
        cast = make_jaxpr(lambda x: with_weakness(x, False), [given[i].aval], weak=True)
        more, (given[i],) = inlined(cast, [given[i]], info, None)
        eqns += more
    return eqns, given


def _grouped(items: Iterable[tuple[str, int, Any]]) -> dict[str, list[tuple[int, Any]]]:
    found: dict[str, list[tuple[int, Any]]] = {}
    for path, number, item in items:
        found.setdefault(path, []).append((number, item))
    return found


@dataclass(frozen=True)
class _AnchorPolicy:
    """A remat policy that treats a fused op like the equation that the op replaces.

    Otherwise `dots_saveable` would recompute values that it used to save. A primitive names the replaced equation in a method
    `stands_for(params) -> (primitive, params)`.
    """

    policy: Callable[..., Any]

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        stands_for = getattr(primitive, "stands_for", None)
        if stands_for is not None:
            primitive, params = stands_for(params)
        return self.policy(primitive, *avals, **params)
