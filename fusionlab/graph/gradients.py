"""Where the backward passes that are replaced take what they read, and where the gradients they give go."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ..errors import RewriteError
from .backward import Share
from .emit import Constants, Env, inlined, kind, source_info
from .ir import Block, Node, Value
from .manual import make_jaxpr
from .split import Split

# What travels from a site's block to its backward pass: (number of the pair, "residual", number), or ("value", id).
Key = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class BackwardPart:
    """The backward pass of a site, in a program that is differentiated already: it is replaced with the site, or neither is.

    Attributes:
      site_path, block_path: the block of the site, and that of its backward pass.
      block: the one block, or both read as one.
      root, leaves: the site's result and operands.
      cotangent: the value that is the cotangent of the root.
      gradients: (number of the leaf, where its gradient is) of each gradient the program computes.
      known: value of the site's block -> the backward block's own name for it, where they are two.
      split: what runs in place of the site, and of its backward pass.
    """

    site_path: str
    block_path: str
    block: Block
    root: Value
    leaves: tuple[Value, ...]
    cotangent: Value
    gradients: tuple[tuple[int, Share], ...]
    known: Mapping[int, Value]
    split: Split

    def operands(self, number: int) -> list[Value | Key]:
        """What it reads beside the cotangent: values of its block, and keys of what travels there (in pair `number`)."""
        return [self._operand(number, what, i) for what, i in self.split.taken]

    def _operand(self, number: int, what: str, i: int) -> Value | Key:
        if what == "residual":
            return number, "residual", i
        value = self.root if what == "value" else self.leaves[i]
        if self.block_path == self.site_path:
            return value
        here = value
        while here.id in self.known:
            here = self.known[here.id]
        return ("value", value.id) if here is value else here

    def read(self) -> list[Value]:
        """The values of its block that it reads, and the root, with which its residuals are made."""
        made = [self.root] if self.block_path == self.site_path else []
        return [self.cotangent, *made, *(o for o in self.operands(0) if isinstance(o, Value))]


class PairsWaitError(RewriteError):
    """Pairs each read what is computed from the other's gradients. `number` is that of one of them."""

    def __init__(self, number: int) -> None:
        super().__init__("backward passes that are to be replaced wait for each other")
        self.number = number


Pairs = Sequence[tuple[int, BackwardPart]]
Claims = list[tuple[Key, Share, Block]]  # key of a gradient, where it goes, the block that is in


def claims_of(pairs: Pairs) -> dict[int, Claims]:
    """Value -> the gradients that it is, or has as terms."""
    found: dict[int, Claims] = {}
    for number, part in pairs:
        for i, share in part.gradients:
            found.setdefault(share.value.id, []).append(((number, "gradient", i), share, part.block))
    return found


def terms_beside(block: Block, value: Value, shares: Sequence[Share]) -> list[Value]:
    """What a value is the sum of beside some gradients that are terms of it."""
    own = frozenset[int]().union(*(s.own for s in shares))
    through = frozenset[int]().union(*(s.through or () for s in shares))
    found, stack = list[Value](), [value]
    while stack:
        part = stack.pop()
        if part.id in own:
            continue
        maker = block.producer.get(part.id)
        if maker is not None and maker.id in through:
            stack += [a for a in reversed(maker.inputs) if isinstance(a, Value)]
        else:
            found.append(part)
    return found


def summed(value: Value, claims: Claims, at: Node, env: Env, extra: Constants | None) -> list:
    """The equations that make a value of its gradients and what else it is the sum of; `env` gets the result."""
    beside = terms_beside(claims[0][2], value, [share for _, share, _ in claims])
    atoms = [env[v.id] for v in beside] + [env[key] for key, _, _ in claims]
    closed = make_jaxpr(lambda *terms: functools.reduce(jax.lax.add, terms), [a.aval for a in atoms])
    eqns, (out,) = inlined(closed, atoms, source_info(at), extra)
    if kind(out.aval) != kind(value.aval):
        raise RewriteError(f"the gradient {value!r} came out as {out.aval.str_short()}; this is a bug")
    env[value.id] = out
    return eqns


def first_gradients(block: Block, pairs: Pairs) -> dict[int, list[tuple[int, BackwardPart]]]:
    """Node -> the pairs whose gradients are computed there: where the first of them is made."""
    found: dict[int, list[tuple[int, BackwardPart]]] = {}
    for number, part in pairs:
        first = min(block.position[block.producer[share.value.id].id] for _, share in part.gradients)
        found.setdefault(block.nodes[first].id, []).append((number, part))
    return found


def in_order(block: Block, waiting: Mapping[int, Iterable[tuple[int, BackwardPart]]]) -> list[Node]:
    """The block's nodes in program order, but for what a pair reads where its first gradient is made: that comes before.

    Raises:
      PairsWaitError: pairs wait for each other.
    """
    if not waiting:
        return list(block.nodes)
    done: set[int] = set()
    under_way: set[int] = set()
    order: list[Node] = []
    for last in block.nodes:
        stack = [last]
        while stack:
            node = stack[-1]
            if node.id in done:
                stack.pop()
                continue
            read = [a for a in node.inputs if isinstance(a, Value)]
            read += [v for _, part in waiting.get(node.id, ()) for v in part.read()]
            makers = [m for v in read if (m := block.producer.get(v.id)) is not None and m.id not in done]
            if not makers:
                done.add(stack.pop().id)
                order.append(node)
                continue
            if node.id in under_way:
                raise PairsWaitError(next(number for n in stack for number, _ in waiting.get(n.id, ())))
            under_way.add(node.id)
            stack += makers
    return order
