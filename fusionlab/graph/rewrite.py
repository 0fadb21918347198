"""Graph -> jaxpr, with sites replaced. Everything outside a site is the traced equation itself, untouched.

A `Replacement` names the nodes that go, the value they made, and the function that makes it instead. Equations of the other
nodes are re-emitted with their own params, effects, contexts, scopes and source lines; regions are rebuilt only where a site
stands inside them, with their own parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core

from ..errors import RewriteError
from .compat import rebuild, split_closed, varying_axes
from .ir import Atom, Block, Graph, Literal, Node, Value
from .manual import make_jaxpr
from .scopes import traceback_of
from .trace import FLATTENED


@dataclass(frozen=True, eq=False)
class Replacement:
    """One site: the fused function in place of some nodes.

    Attributes:
      block_path: the block the site stands in.
      nodes: those that disappear.
      root: the value they made; it is made by `fn` now.
      leaves: the values `fn` takes, in order.
      fn: arrays -> array of the root's shape and dtype.
    """

    block_path: str
    nodes: tuple[Node, ...]
    root: Value
    leaves: tuple[Value, ...]
    fn: Callable[..., Any]


def to_jaxpr(graph: Graph, replacements: Iterable[Replacement] = ()) -> Any:
    """A closed jaxpr that computes `graph` with `replacements` applied.

    Raises:
      RewriteError: a replacement's result differs in shape or dtype from the value it replaces.
    """
    by_path: dict[str, list[Replacement]] = {}
    for replacement in replacements:
        by_path.setdefault(replacement.block_path, []).append(replacement)
    return _Emitter(by_path).block(graph.top)


def slice_jaxpr(
    block: Block,
    nodes: Sequence[Node],
    inputs: Sequence[Value],
    output: Value,
    known: Mapping[int, Any] | None = None,
    constant: bool = False,
) -> Any:
    """A closed jaxpr of some nodes of a block: a function of `inputs` that gives `output`.

    `known` gives the value of block inputs (by id) that are literals at the call, broadcast or not. Where values vary along mesh
    axes it is to be traced by `manual.make_jaxpr`; with `constant` it runs outside the shard_map, on values that are the same
    everywhere.
    """
    emitter = _Emitter({})
    eqns: list[Any] = []
    read = {a.id for n in nodes for a in n.inputs if isinstance(a, Value)} | {output.id}
    env = _literals(block, {i: c for i, c in (known or {}).items() if i in read}, eqns, constant)
    env.update((v.id, jex_core.Var(v.aval)) for v in inputs)
    consts = [(v, c) for v, c in block.consts if v.id not in env]
    env.update((v.id, jex_core.Var(v.aval)) for v, _ in consts)
    for node in nodes:
        if constant and node.primitive == "pvary":  # an identity that only has a meaning inside its shard_map
            env.update((v.id, _atom(env, a)) for v, a in zip(node.outputs, node.inputs, strict=True))
        else:
            eqns.append(emitter.eqn(node, env))
    base, _ = split_closed(block.jaxpr)
    debug = base.debug_info._replace(arg_names=None, result_paths=None)
    new = jex_core.Jaxpr(
        [env[v.id] for v, _ in consts], [env[v.id] for v in inputs], [env[output.id]], eqns, debug_info=debug
    )
    return jex_core.ClosedJaxpr(new, [c for _, c in consts])


def _literals(block: Block, known: Mapping[int, Any], eqns: list, constant: bool) -> dict[int, Any]:
    """An atom for each known value; `eqns` gets the equations that broadcast it, or make it vary along mesh axes (unless `constant`)."""
    avals = {v.id: v.aval for v in block.inputs}
    env: dict[int, Any] = {}
    for i, value in known.items():
        aval = avals[i]
        scalar = np.asarray(value, aval.dtype)[()]
        varies = not constant and varying_axes(aval)
        if not aval.shape and not varies:
            env[i] = jex_core.Literal(scalar, aval)
            continue
        fill = functools.partial(_filled, aval.shape, scalar)
        made, _ = split_closed(make_jaxpr(fill, [], aval) if varies else jax.make_jaxpr(fill)())
        eqns += made.eqns
        env[i] = made.outvars[0]
    return env


def _filled(shape: tuple[int, ...], scalar: Any) -> Any:
    return jax.lax.full(shape, scalar) if shape else scalar


class _Emitter:
    def __init__(self, by_path: Mapping[str, list[Replacement]]) -> None:
        self.by_path = by_path

    def block(self, block: Block) -> Any:
        env: dict[int, Any] = {v.id: jex_core.Var(v.aval) for v in block.inputs}
        env.update((v.id, jex_core.Var(v.aval)) for v, _ in block.consts)
        eqns, extra = self._equations(block, env)
        outvars = [_atom(env, a) for a in block.outputs]
        constvars = [env[v.id] for v, _ in block.consts] + [v for v, _ in extra]
        consts = [c for _, c in block.consts] + [c for _, c in extra]
        eqns = _live(eqns, outvars)
        return rebuild(block.jaxpr, constvars, [env[v.id] for v in block.inputs], outvars, eqns, consts)

    def _equations(self, block: Block, env: dict[int, Any]) -> tuple[list, list]:
        sites = self.by_path.get(block.path, ())
        at_root = {r.root.id: r for r in sites}
        gone = {n.id for r in sites for n in r.nodes}
        eqns: list[Any] = []
        extra: list[tuple[Any, Any]] = []
        for node in block.nodes:
            replacement = next((at_root[v.id] for v in node.outputs if v.id in at_root), None)
            if replacement is not None:
                eqns += self._splice(replacement, node, env, extra)
            elif node.id not in gone:
                eqns.append(self.eqn(node, env))
        return eqns, extra

    def eqn(self, node: Node, env: dict[int, Any]) -> Any:
        """The node's own equation on new variables; child blocks rebuilt only if a site stands inside."""
        invars = [_atom(env, a) for a in node.inputs]
        outvars = [jex_core.Var(v.aval) for v in node.outputs]
        env.update((v.id, var) for v, var in zip(node.outputs, outvars, strict=True))
        eqn = node.eqn.replace(invars=invars, outvars=outvars, source_info=_source_info(node))
        if any(self._touched(b) for b in node.blocks):
            eqn = eqn.replace(params=self._params(node))
        return eqn

    def _touched(self, block: Block) -> bool:
        return any(path == block.path or path.startswith(block.path + ".") for path in self.by_path)

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
                params[key] = type(params[key])(items)
            else:
                params[key] = new
        if params.get("policy") is not None:
            params["policy"] = _AnchorPolicy(params["policy"])
        return params

    def _splice(self, r: Replacement, at: Node, env: dict[int, Any], extra: list) -> list:
        """The equations of the fused function, in the place and with the source information of the site's root."""
        jaxpr, consts = split_closed(make_jaxpr(r.fn, [v.aval for v in r.leaves], r.root.aval))
        made = jaxpr.outvars[0].aval
        if len(jaxpr.outvars) != 1 or _kind(made) != _kind(r.root.aval):
            raise RewriteError(
                f"the replacement for {r.root!r} gives {made.str_short()}, needed the same shape and dtype (and, in a "
                "shard_map, varying along the same mesh axes); this is a bug"
            )
        inner: dict[Any, Any] = dict(zip(jaxpr.invars, (env[v.id] for v in r.leaves), strict=True))
        for var, const in zip(jaxpr.constvars if consts else (), consts, strict=True):
            inner[var] = jex_core.Var(var.aval)
            extra.append((inner[var], const))
        info = _source_info(at)
        eqns = []
        for eqn in jaxpr.eqns:
            outvars = [jex_core.Var(v.aval) for v in eqn.outvars]
            invars = [inner.get(v, v) if not isinstance(v, jex_core.Literal) else v for v in eqn.invars]
            inner.update(zip(eqn.outvars, outvars, strict=True))
            eqns.append(eqn.replace(invars=invars, outvars=outvars, source_info=info))
        out = jaxpr.outvars[0]
        env[r.root.id] = out if isinstance(out, jex_core.Literal) else inner[out]
        return eqns


@dataclass(frozen=True)
class _AnchorPolicy:
    """A remat policy asked about a fused op answers as for the equation the fused op stands for.

    `dots_saveable` would otherwise recompute what it used to save. A primitive says what it stands for by a method
    `stands_for(params) -> (primitive, params)`.
    """

    policy: Callable[..., Any]

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        stands_for = getattr(primitive, "stands_for", None)
        if stands_for is not None:
            primitive, params = stands_for(params)
        return self.policy(primitive, *avals, **params)


def _kind(aval: Any) -> tuple[Any, ...]:
    return aval.shape, aval.dtype, varying_axes(aval)


def _atom(env: Mapping[int, Any], atom: Atom) -> Any:
    return jex_core.Literal(atom.val, atom.aval) if isinstance(atom, Literal) else env[atom.id]


def _source_info(node: Node) -> Any:
    """The equation's source information, its scope completed with those of the calls that were flattened around it."""
    info = node.eqn.source_info.replace(traceback=traceback_of(node.eqn, node.calls))
    stack = None
    for call in node.calls:
        if call.primitive.name in FLATTENED:
            outer = call.source_info.name_stack
            stack = outer if stack is None else stack + outer
    return info if stack is None else info.replace(name_stack=stack + info.name_stack)


def _live(eqns: list, outvars: list) -> list:
    """Drops equations a replacement has left without readers."""
    wanted = {v for v in outvars if not isinstance(v, jex_core.Literal)}
    kept = []
    for eqn in reversed(eqns):
        if eqn.effects or any(v in wanted for v in eqn.outvars):
            kept.append(eqn)
            wanted.update(v for v in eqn.invars if not isinstance(v, jex_core.Literal))
    return kept[::-1]
