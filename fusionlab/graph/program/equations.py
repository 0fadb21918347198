"""Equations of a traced program, copied onto new variables."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex_core

from ..jax_compat import on_inputs, split_closed, variables_in, varying_axes
from .explicit_axes import placeless, sharding_in_type
from .in_shard_map import make_jaxpr
from .ir import Atom, Block, Literal, Node, Value, values_in
from .scopes import traceback_of
from .trace import FLATTENED, block_of_jaxpr

Env = dict[Any, Any]  # value id -> variable; whoever emits a block may keep further variables by keys of its own


@dataclass(frozen=True, eq=False)
class Made:
    """An array that a body is given, the same at every call, since the block around it makes it from constants alone.

    Attributes:
      program: closed jaxpr without inputs that computes it.
      key: hashable, equal for arrays that are computed in the same way.
      placed: the same program with its layouts over explicit mesh axes; None where the array has none.
    """

    program: Any
    key: Any
    placed: Any = None

    def at(self, constant: bool) -> Any:
        """The program: with the layouts that a body has, or as a `constant`, on one device."""
        return self.program if constant or self.placed is None else self.placed

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Made) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    @functools.cached_property
    def block(self) -> Block:
        """The program as a block."""
        return block_of_jaxpr(self.program)


def copied(node: Node, env: Env) -> Any:
    """The node's own equation on the variables of `env`, which gets new ones for its results."""
    invars = [atom_in(env, a) for a in node.inputs]
    outvars = _bound(node.outputs, env)
    return on_inputs(node.eqn, invars).replace(outvars=outvars, source_info=source_info(node))


def _bound(values: Sequence[Value], env: Env) -> list:
    """New variables for some values, which `env` gets."""
    variables = [jex_core.Var(v.aval) for v in values]
    env.update((v.id, var) for v, var in zip(values, variables, strict=True))
    return variables


def slice_jaxpr(
    block: Block,
    nodes: Sequence[Node],
    inputs: Sequence[Value],
    output: Value | Sequence[Value],
    known: Mapping[int, Any] | None = None,
    constant: bool = False,
    instead: Mapping[int, Any] | None = None,
) -> Any:
    """A closed jaxpr of some nodes of a block: a function of `inputs` that gives `output`, one or several.

    `instead` gives, for a node (by id), a closed jaxpr to replace it.

    `known` gives the value of block inputs (by id) that are literals at the call, broadcast or not, or are made of constants. Where
    values vary along mesh axes it is to be traced by `manual.make_jaxpr`; with `constant` it runs outside the shard_map, on values that
    are the same everywhere.
    """
    eqns: list[Any] = []
    outputs = (output,) if isinstance(output, Value) else output
    read = {v.id for n in nodes for v in values_in(n.inputs)} | {v.id for v in outputs}
    extra: Constants = []
    env = _literals(block, known or {}, read, eqns, extra, constant)
    invars = _bound(inputs, env)
    captured, consts = _captured(block, read - env.keys())
    constvars = _bound(captured, env)
    for node in nodes:
        eqns += _emitted(node, env, constant, instead or {})
    base, _ = split_closed(block.jaxpr)
    debug = base.debug_info._replace(arg_names=None, result_paths=None)
    constvars, consts = [*constvars, *(v for v, _ in extra)], [*consts, *(c for _, c in extra)]
    new = jex_core.Jaxpr(constvars, invars, [env[v.id] for v in outputs], eqns, debug_info=debug)
    return jex_core.ClosedJaxpr(new, consts)


def _captured(block: Block, wanted: Set[int]) -> tuple[list[Value], list]:
    """(values bound to arrays that a block captured, those arrays), of the values wanted (by id)."""
    found = [(v, c) for v, c in block.consts if v.id in wanted]
    return [v for v, _ in found], [c for _, c in found]


def _emitted(node: Node, env: Env, constant: bool, instead: Mapping[int, Any]) -> list:
    """The equations that a node becomes in a slice; `env` gets its results."""
    # A pvary is an identity that only has a meaning inside its shard_map; a node without a number of the program's is a copy.
    if node.id < 0 or (constant and node.primitive == "pvary"):
        eqns, outs = [], [atom_in(env, a) for a in node.inputs]
    elif node.id in instead:
        eqns, outs = inlined(instead[node.id], [atom_in(env, a) for a in node.inputs], source_info(node), None)
    else:
        eqn = copied(node, env)
        return [eqn.replace(params=placeless(eqn.params)) if constant else eqn]
    env.update((v.id, atom) for v, atom in zip(node.outputs, outs, strict=True))
    return eqns


def _literals(
    block: Block, known: Mapping[int, Any], read: Set[int], eqns: list, extra: Constants, constant: bool
) -> dict[int, Any]:
    """An atom for each known value that is read; `eqns` gets the equations that make or broadcast it, or make it vary along mesh axes
    (unless `constant`), and `extra` the arrays that it is made from.
    """
    avals = {v.id: v.aval for v in block.inputs}
    env: dict[int, Any] = {}
    for i, value in known.items():
        if i not in read:
            continue
        aval = avals[i]
        if isinstance(value, Made):
            more, (env[i],) = inlined(value.at(constant), [], block.nodes[0].eqn.source_info, extra)
            eqns += more
            continue
        scalar = np.asarray(value, aval.dtype)[()]
        typed = not constant and bool(varying_axes(aval) or sharding_in_type(aval))
        if not aval.shape and not typed:
            env[i] = jex_core.Literal(scalar, aval)
            continue
        fill = functools.partial(_filled, aval, scalar, typed)
        jaxpr, _ = split_closed(make_jaxpr(fill, [], aval) if typed else jax.make_jaxpr(fill)())
        eqns += jaxpr.eqns
        env[i] = jaxpr.outvars[0]
    return env


def _filled(aval: Any, scalar: Any, typed: bool) -> Any:
    if not aval.shape:
        return scalar
    sharding = sharding_in_type(aval) if typed else None
    return (
        jax.lax.broadcast(scalar, aval.shape, out_sharding=sharding) if sharding else jax.lax.full(aval.shape, scalar)
    )


Constants = list[tuple[Any, Any]]  # (variable, array)


def inlined(closed: Any, atoms: Sequence[Any], info: Any, extra: Constants | None) -> tuple[list, list]:
    """(equations of a closed jaxpr at some operands, its results).

    `extra` gets its constants; they are written into the equations where it is None, for a jaxpr that cannot have any.
    """
    jaxpr, consts = split_closed(closed)
    inner: dict[Any, Any] = dict(zip(jaxpr.invars, atoms, strict=True))
    for var, const in zip(jaxpr.constvars if consts else (), consts, strict=True):
        inner[var] = jex_core.Literal(const, var.aval) if extra is None else jex_core.Var(var.aval)
        if extra is not None:
            extra.append((inner[var], const))

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, jex_core.Literal) else inner.get(atom, atom)

    eqns = []
    for eqn in jaxpr.eqns:
        outvars = [jex_core.Var(v.aval) for v in eqn.outvars]
        invars = list(map(read, eqn.invars))
        inner.update(zip(eqn.outvars, outvars, strict=True))
        eqns.append(on_inputs(eqn, invars).replace(outvars=outvars, source_info=info))
    return eqns, [v if isinstance(v, jex_core.Literal) else inner[v] for v in jaxpr.outvars]


def kind(aval: Any) -> tuple[Any, ...]:
    """The part of a type that must be equal for one value to replace another; the type itself of what is no array, as flax's variables."""
    if not hasattr(aval, "shape"):
        return (aval,)
    return aval.shape, aval.dtype, varying_axes(aval), sharding_in_type(aval)


def atom_in(env: Mapping[int, Any], atom: Atom) -> Any:
    return jex_core.Literal(atom.val, atom.aval) if isinstance(atom, Literal) else env[atom.id]


def source_info(node: Node) -> Any:
    """The equation's source information, its scope completed with those of the calls that were flattened around it."""
    info = node.eqn.source_info.replace(traceback=traceback_of(node.eqn, node.calls))
    stack = None
    for call in node.calls:
        if call.primitive.name in FLATTENED:
            outer = call.source_info.name_stack
            stack = outer if stack is None else stack + outer
    return info if stack is None else info.replace(name_stack=stack + info.name_stack)


def live(eqns: list, outvars: list) -> list:
    """Drops equations a replacement has left without readers."""
    wanted = set(variables_in(outvars))
    kept = []
    for eqn in reversed(eqns):
        if eqn.effects or any(v in wanted for v in eqn.outvars):
            kept.append(eqn)
            wanted.update(variables_in(eqn.invars))
    return kept[::-1]
