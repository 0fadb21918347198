"""The operands of replaced backward passes, and the destinations of their gradients."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ...errors import RewriteError
from ..program.equations import Constants, Env, atom_in, inlined, kind, source_info
from ..program.in_shard_map import make_jaxpr
from ..program.ir import Atom, Block, Node, Value, values_in
from .find import Share
from .vjp_split import Split, Taken

# What travels from a site's block to its backward pass: (number of the pair, "residual", number), or ("value", id).
TravelKey = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Chain:
    """A backward pass in a row of layers, each ending in a function whose derivative the next layer may take over.

    Attributes:
      slope: jaxpr of (residual, cotangent) -> the cotangent before that function; None where the layer has none.
      own: the derivative without it.
      linked: the same, and beyond the function that the layer before ends in: its last input is that one's residual.
      before: the result of that layer; `linked` and this are None if there is none.
    """

    slope: Any
    own: Split
    linked: Split | None
    before: Value | None


@dataclass(frozen=True, eq=False)
class BackwardPart:
    """The backward pass of a site in an already differentiated program: either both are replaced, or neither is.

    Attributes:
      site_path, block_path: the block of the site, and that of its backward pass.
      block: the one block, or both read as one.
      root, leaves: the site's result and operands.
      cotangent: the value that is the cotangent of the root, or the literal 1.
      gradients: (number of the leaf, where its gradient is) of each gradient the program computes.
      known: value of the site's block -> the backward block's own name for it, where they are two.
      split: the programs that replace the site and its backward pass.
      chain: the form of these programs in a row of layers, if layers are grouped.
    """

    site_path: str
    block_path: str
    block: Block
    root: Value
    leaves: tuple[Value, ...]
    cotangent: Atom
    gradients: tuple[tuple[int, Share], ...]
    known: Mapping[int, Value]
    split: Split
    chain: Chain | None = None

    def operands(self, number: int, taken: Sequence[Taken] | None = None) -> list[Value | TravelKey]:
        """Its operands besides the cotangent: values of its block, and keys of the values that are passed there (in pair `number`)."""
        return [self._operand(number, role, i) for role, i in (self.split.taken if taken is None else taken)]

    def _operand(self, number: int, role: str, i: int) -> Value | TravelKey:
        if role == "residual":
            return number, "residual", i
        value = self.root if role == "value" else self.leaves[i]
        if self.block_path == self.site_path:
            return value
        here = value
        while here.id in self.known:
            here = self.known[here.id]
        return ("value", value.id) if here is value else here

    def read(self) -> list[Value]:
        """The values of its block that it reads, and the root, with which its residuals are computed."""
        root = [self.root] if self.block_path == self.site_path else []
        return [*values_in([self.cotangent]), *root, *(o for o in self.operands(0) if isinstance(o, Value))]


Pairs = Sequence[tuple[int, BackwardPart]]


class Chosen:
    """The replaced pairs, and the chaining of those in a row of layers, as far as both neighbours are among them.

    Attributes: `number` (root -> number of its pair), `followed` (roots whose last function the next layer differentiates), `unlike` (the
    cotangents of these, which in the rewritten program have that derivative in them).
    """

    def __init__(self, pairs: Pairs) -> None:
        self.number = {part.root.id: number for number, part in pairs}
        links = (part.chain for _, part in pairs if part.chain is not None)
        self.followed = {c.before.id for c in links if c.before is not None and c.before.id in self.number}
        # Gradients that the rewritten program takes a step further than the original does, so that they are not the same values.
        followed = (part.cotangent for _, part in pairs if part.root.id in self.followed)
        self.unlike = {v.id for v in values_in(followed)}

    def pulled(self, number: int, part: BackwardPart, at: Node, env: Env, extra: Constants | None) -> list:
        """The equations of a site's gradients, from its cotangent and the residuals of its forward pass; `env` gets the gradients."""
        (program, residual), ct, eqns = self._derivative(part, env), atom_in(env, part.cotangent), []
        if part.chain is not None and part.chain.slope is not None and part.root.id not in self.followed:
            eqns, (ct,) = inlined(part.chain.slope, [env[number, "residual", 0], ct], source_info(at), extra)
        beside = [t for t in program.taken if t != ("input", len(part.leaves))]
        given = (env[o.id] if isinstance(o, Value) else env[o] for o in part.operands(number, beside))
        atoms = dict(zip(beside, given, strict=True))
        taken = [atoms.get(t, residual) for t in program.taken]
        more, outs = inlined(program.backward, [*taken, ct], source_info(at), extra)
        env.update(((number, "gradient", i), atom) for (i, _), atom in zip(part.gradients, outs, strict=True))
        return eqns + more

    def _derivative(self, part: BackwardPart, env: Env) -> tuple[Split, Any]:
        """The backward program, and the residual of the layer before if that program includes its last function; None otherwise."""
        chain = part.chain
        if chain is None:
            return part.split, None
        if chain.linked is None or chain.before is None or chain.before.id not in self.number:
            return chain.own, None
        return chain.linked, env[self.number[chain.before.id], "residual", 0]


Claims = list[tuple[TravelKey, Share, Block]]  # key of a gradient, where it goes, the block that is in


def claims_of(pairs: Pairs) -> dict[int, Claims]:
    """Value -> the gradients that it is, or has as terms."""
    found: dict[int, Claims] = {}
    for number, part in pairs:
        for i, share in part.gradients:
            found.setdefault(share.value.id, []).append(((number, "gradient", i), share, part.block))
    return found


def terms_beside(block: Block, value: Value, shares: Sequence[Share]) -> list[Value]:
    """The terms of a value other than some gradients."""
    own = frozenset[int]().union(*(s.own for s in shares))
    through = frozenset[int]().union(*(s.through or () for s in shares))
    found, stack = list[Value](), [value]
    while stack:
        part = stack.pop()
        if part.id in own:
            continue
        maker = block.producer.get(part.id)
        if maker is not None and maker.id in through:
            stack += reversed(values_in(maker.inputs))
        else:
            found.append(part)
    return found


def sum_of_gradients(value: Value, claims: Claims, at: Node, env: Env, extra: Constants | None) -> list:
    """The equations that add a value's gradients and its other terms; `env` gets the result."""
    beside = terms_beside(claims[0][2], value, [share for _, share, _ in claims])
    atoms = [env[v.id] for v in beside] + [env[key] for key, _, _ in claims]
    closed = make_jaxpr(lambda *terms: functools.reduce(jax.lax.add, terms), [a.aval for a in atoms], value.aval)
    eqns, (out,) = inlined(closed, atoms, source_info(at), extra)
    if kind(out.aval) != kind(value.aval):
        raise RewriteError(f"the gradient {value!r} came out as {out.aval.str_short()}; this is a bug")
    env[value.id] = out
    return eqns


def first_gradients(block: Block, pairs: Pairs) -> dict[int, list[tuple[int, BackwardPart]]]:
    """Node -> the pairs whose first gradient is computed there."""
    found: dict[int, list[tuple[int, BackwardPart]]] = {}
    for number, part in pairs:
        first = min(block.position[block.producer[share.value.id].id] for _, share in part.gradients)
        found.setdefault(block.nodes[first].id, []).append((number, part))
    return found
