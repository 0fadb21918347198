"""A train step as a function of its state: which of its results are its next arguments, and which is the loss.

The state is found by structure: an argument and a part of the result that agree in their pytree, shapes and dtypes are one value before and
after the step, in whatever order the step takes and returns them. What a step changes in objects of nnx is known from its binding.
An argument without such a part (a learning rate, a key) is the same at every step.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from fusionlab.errors import ArgumentError
from fusionlab.graph.calls.binding import Bound, label_of
from fusionlab.graph.calls.parts import flattened, is_array, keystr
from fusionlab.graph.calls.state import is_object
from fusionlab.graph.calls.wrappers import unwrapped
from fusionlab.graph.program.trace import bind_users, name_of, users_code
from fusionlab.graph.settings import as_function

from ..instruments.program import compiling, refuse_side_effects
from .result import Leaf, Loss, Other, Result, is_same, leaves_of, loss_of, may_be_loss, text_of

Picks = Callable[[Any], Any] | None


@dataclass(frozen=True, eq=False)
class Call:
    """How the step is called with a batch.

    Attributes:
      step: the function.
      state, kwargs: its arguments without the batch.
      place: the position of the batch among the arguments.
      spread: "" where the batch is one argument, "*" where it is several, "**" where it is several by name.
      static: `static_argnums` and `static_argnames`.
    """

    step: Callable
    state: tuple
    kwargs: dict[str, Any]
    place: int
    spread: str
    static: dict[str, Any]

    @classmethod
    def of(
        cls, step: Callable, state: tuple, kwargs: dict[str, Any], batch: Any, place: int | None, **static: Any
    ) -> Call:
        """A tuple of arrays is one argument of a step that can take it as one, else several; so is a dict, by name.

        Raises:
          ArgumentError: the step takes no such arguments.
        """
        place = len(state) if place is None else place
        if not 0 <= place <= len(state):
            raise ArgumentError(f"data_argnum: got {place}, needed a position from 0 to {len(state)}")
        spreads = {tuple: ("", "*"), list: ("", "*"), dict: ("", "**")}.get(type(batch), ("",))
        for spread in spreads:
            call = cls(step, state, kwargs, place, spread, static)
            if call._takes(batch):
                return call
        raise ArgumentError(
            f"{name_of(step)}: got {len(state)} arguments and a batch of type {type(batch).__name__}, which do not fit its parameters "
            f"{_parameters(step)}; needed its state as fl.compare(step, fused, *state, data=batches), and data whose items are its batches"
        )

    def arguments(self, batch: Any) -> tuple[tuple, dict[str, Any]]:
        """All arguments, (positional, by name)."""
        more = tuple(batch) if self.spread == "*" else () if self.spread == "**" else (batch,)
        named = dict(batch) if self.spread == "**" else {}
        return (*self.state[: self.place], *more, *self.state[self.place :]), self.kwargs | named

    def is_batch(self, position: int, count: int) -> bool:
        """Whether the positional argument there is of the batch, of so many positional arguments."""
        return self.place <= position < self.place + count - len(self.state)

    def _takes(self, batch: Any) -> bool:
        args, kwargs = self.arguments(batch)
        try:
            inspect.signature(self.step).bind(*args, **kwargs)
        except TypeError:
            return False
        except ValueError:  # it has no signature
            pass
        return True


def _parameters(step: Callable) -> str:
    try:
        return str(inspect.signature(step))
    except (TypeError, ValueError):
        return "(unknown)"


class Step:
    """A step bound to its first batch, as a function of arrays: (state, fixed, batch) -> (next state, loss).

    Attributes:
      name: the function's.
      state: the arrays that it replaces, named as arguments; fixed: the others, but for the batch.
      initial, rest: their values.
      loss: the name of the loss in the result.
      fixed_names: the arguments that are the same at every step.
      traced: its program for the first batch; compiling: the options that its own jit gives the compiler.
    """

    def __init__(self, call: Call, first: Any, loss: Loss = None, next_state: Picks = None) -> None:
        self.call, self.name = call, name_of(call.step)
        self._loss = loss
        bound, closed, shape = self._traced(first)
        self.traced, self.compiling = closed, dict(compiling(bound))
        leaves = jax.tree.leaves((bound.args, bound.kwargs))
        named = [
            Leaf(i, n, tuple(np.shape(x)), jnp.result_type(x))
            for i, (n, x) in enumerate(zip(bound.leaf_names, leaves, strict=True))
        ]
        out = Result(shape)
        self._batch = [leaf.at for leaf in named if leaf.at in set(self._batch_leaves(bound))]
        own = [leaf for leaf in named if leaf.at not in set(self._batch)]
        found = _Matched(self, bound, own, out, next_state)
        self._next = found.next
        self.state = tuple(leaf for leaf in own if leaf.at in found.next)
        self._rest = [leaf.at for leaf in own if leaf.at not in found.next]
        self.initial = tuple(leaves[leaf.at] for leaf in self.state)
        self.rest = tuple(leaves[i] for i in self._rest)
        self.fixed_names = found.fixed
        taken = set(found.next.values())
        self._loss_at = (
            None if callable(loss) else loss_of(self.name, loss, [x for x in out.leaves if x.at not in taken])
        )
        self.loss = getattr(loss, "__name__", "loss") if self._loss_at is None else self._loss_at.name
        self._programs: dict[Any, Any] = {self._key(leaves): (closed, shape)}

    def _traced(self, batch: Any) -> tuple[Bound, Any, Any]:
        args, kwargs = self.call.arguments(batch)
        bound = bind_users(self.call.step, args, kwargs, **self.call.static)
        with users_code(self.call.step):
            closed, shape = jax.make_jaxpr(bound.fn, return_shape=True)(*bound.args, **bound.kwargs)
        refuse_side_effects(self.name, closed)
        return bound, closed, shape

    def _batch_leaves(self, bound: Bound) -> Iterator[int]:
        """The flat positions of the batch's arrays."""
        at = 0
        for position, arg in zip(bound.positions, bound.args, strict=True):
            size = len(jax.tree.leaves(arg))
            if self.call.is_batch(position, bound.total):
                yield from range(at, at + size)
            at += size
        for name in sorted(bound.kwargs):
            size = len(jax.tree.leaves(bound.kwargs[name]))
            if name not in self.call.kwargs:
                yield from range(at, at + size)
            at += size

    def arrays_of(self, batch: Any) -> tuple[Any, ...]:
        """The arrays of a batch, in the order in which the step takes them."""
        trees = [batch[k] for k in sorted(batch)] if self.call.spread == "**" else [batch]
        return tuple(x for tree in trees for _, x in flattened(tree)[0] if is_array(x) and not isinstance(x, str))

    @staticmethod
    def _key(leaves: Sequence[Any]) -> tuple:
        return tuple((np.shape(x), jnp.result_type(x)) for x in leaves)

    def program(self, batch: Any) -> tuple[Any, Callable]:
        """The step traced for batches of this shape, and its key: batches of one key run one program.

        Returns:
          (key, function): `function(how)` is (state, fixed, batch, *more) -> (next state, loss), computed by `how(traced)(*more, *arrays)`.

        Raises:
          ArgumentError: the batch has other arrays than the first one.
        """
        arrays = self.arrays_of(batch)
        if len(arrays) != len(self._batch):
            raise ArgumentError(
                f"data: got a batch of {len(arrays)} arrays, needed {len(self._batch)}, as the first one has"
            )
        leaves = self._all(self.initial, self.rest, arrays)
        key = self._key(leaves)
        if key not in self._programs:
            self._programs[key] = self._traced(batch)[1:]
        closed, shape = self._programs[key]
        return key, functools.partial(self._function, closed, shape)

    def _all(self, state: Sequence[Any], rest: Sequence[Any], batch: Sequence[Any]) -> list[Any]:
        places = dict(zip([leaf.at for leaf in self.state], state, strict=True))
        places |= zip(self._rest, rest, strict=True)
        places |= zip(self._batch, batch, strict=True)
        return [places[i] for i in range(len(places))]

    def _function(self, closed: Any, shape: Any, how: Callable[[Any], Callable] = as_function) -> Callable:
        run = how(closed)

        def step(state: tuple, rest: tuple, batch: tuple, *more: Any) -> tuple[tuple, Any]:
            outs = run(*more, *self._all(state, rest, batch))
            loss = outs[self._loss_at.at] if self._loss_at is not None else self._picked(shape, outs)
            return tuple(_strong(outs[self._next[leaf.at]], leaf) for leaf in self.state), jnp.asarray(
                loss, jnp.float32
            )

        return step

    def _picked(self, shape: Any, outs: Sequence[Any]) -> Any:
        assert callable(self._loss)
        loss = self._loss(Result(shape).tree_of(outs))
        if np.shape(loss) != ():
            raise ArgumentError(f"loss: got {np.shape(loss)} from the function, needed one number")
        return loss


def _strong(x: Any, leaf: Leaf) -> Any:
    """Of a type that is not weak, or the next step would be compiled once more."""
    return x if jnp.issubdtype(leaf.dtype, jax.dtypes.extended) else jnp.asarray(x, leaf.dtype)


class _Matched:
    """The state's arrays, by structure or by the names of changed objects.

    Attributes:
      next: flat position of an argument's array -> position of its next value among the results.
      fixed: names of the arguments that have none.
    """

    def __init__(self, step: Step, bound: Bound, own: Sequence[Leaf], out: Result, picks: Picks) -> None:
        self.step, self.out = step, out
        named = {leaf.name: leaf for leaf in own}
        results = {leaf.name: leaf.at for leaf in out.leaves}
        self.next = {named[n].at: results[n] for n in bound.changed if n in named and n in results}
        self.trees = dict(_arguments(step.call, bound, named))
        self.fixed: list[str] = []
        self._decided: set[str] = set()
        self._free = [(depth, path, node) for depth, path, node in out.nodes() if not isinstance(node, Other)]
        if picks is not None:
            self._by(picks)
        else:
            self._by_structures()
        if not self.next:
            raise self._nothing()

    def _by_structures(self) -> None:
        # The largest first: a part of an optimiser's state may be like the parameters.
        for label, tree in sorted(self.trees.items(), key=lambda item: -len(leaves_of(item[1]))):
            self._by_structure(label, tree)

    def _by(self, picks: Callable[[Any], Any]) -> None:
        picked = picks(self.out.tree)
        trees = list(self.trees.items())
        if len(trees) > 1 and not isinstance(picked, tuple):
            picked = (picked,)
        parts = picked if len(trees) > 1 else (picked,)
        for (label, tree), part in zip(trees, parts, strict=False):
            if not is_same(tree, part):
                raise ArgumentError(
                    f"next_state: got {text_of(part)} for {label}, needed its next value: {text_of(tree)}"
                )
            self._take(tree, part)
        self.fixed += [label for label, _ in trees[len(parts) :]]

    def _by_structure(self, label: str, tree: Any) -> None:
        """Takes the part of the result that is like the argument; of several, the one that is least deep in it."""
        if any(leaf.at in self.next for leaf in leaves_of(tree)):  # changed in place
            return
        fits = [(depth, path, node) for depth, path, node in self._free if is_same(tree, node)]
        fits = [fit for fit in fits if fit[0] == fits[0][0]]
        alike = [other for other, t in self.trees.items() if is_same(tree, t) and other not in self._decided]
        self._decided.add(label)
        if not fits or (may_be_loss(tree) and len(fits) <= len(alike)):
            self.fixed += [label] if leaves_of(tree) else []
            return
        if len(fits) > len(alike):
            places = ", ".join(path for _, path, _ in fits[:4])
            raise ArgumentError(
                f"{self.step.name}: got {len(fits)} results with the structure of {label} ({places}), needed to know which one is its "
                f"next value; pick the state: next_state=lambda out: (out[0], out[1])"
            )
        self._take(tree, fits[0][2])
        taken = {leaf.at for leaf in leaves_of(fits[0][2])}
        self._free = [free for free in self._free if not taken & {leaf.at for leaf in leaves_of(free[2])}]

    def _take(self, tree: Any, node: Any) -> None:
        pairs = zip(leaves_of(tree), leaves_of(node), strict=True)
        self.next |= {a.at: b.at for a, b in pairs}

    def _nothing(self) -> ArgumentError:
        arguments = "; ".join(f"{label} of {text_of(tree)}" for label, tree in self.trees.items()) or "no arguments"
        near = next(filter(None, (self._near(label, tree) for label, tree in self.trees.items())), "")
        return ArgumentError(
            f"{self.step.name}: got {arguments}, and a result of {text_of(self.out.tree)}, in which no argument has its next value{near}; "
            f"needed a step that returns its state, such as (state, batch) -> (state, loss), or next_state=lambda out: ... that picks it"
        )

    def _near(self, label: str, tree: Any) -> str:
        """The first array that differs in a part of the result with the argument's structure."""
        for _, path, node in self.out.nodes():
            if isinstance(node, Leaf | Other) or jax.tree.structure(node) != jax.tree.structure(tree):
                continue
            for a, b in zip(leaves_of(tree), leaves_of(node), strict=False):
                if (a.shape, a.dtype) != (b.shape, b.dtype):
                    return f" ({path} is like {label}, but for {a.text}, which becomes {b.text})"
        return ""


def _arguments(call: Call, bound: Bound, named: dict[str, Leaf]) -> Iterator[tuple[str, Any]]:
    """(name, tree of leaves) of each argument but the batch."""
    inside, *_ = unwrapped(call.step)
    for position, arg in enumerate(_positional(call, bound)):
        if position in bound.positions and not call.is_batch(position, bound.total):
            yield _marked(label_of(inside, position + bound.given), arg, named)
    for name in sorted(call.kwargs):
        yield _marked(name, call.kwargs[name], named)


def _positional(call: Call, bound: Bound) -> tuple:
    blank = (None,) * (bound.total - len(call.state))
    return (*call.state[: call.place], *blank, *call.state[call.place :])


def _marked(label: str, arg: Any, named: dict[str, Leaf]) -> tuple[str, Any]:
    flat, tree = flattened(arg)
    marks = [Other(label) if is_object(x) else named.get(label + keystr(path), Other(label)) for path, x in flat]
    return label, jax.tree.unflatten(tree, marks)
