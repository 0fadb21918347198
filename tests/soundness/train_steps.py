"""Random train steps: a random program, a loss of it, its gradients taken already, and an optimiser's update.

`train_step(seed)` is a function of the seed alone: the program is that of the seed, or, where reverse mode does not go through it, of
another seed that the step's text names. Nothing here knows what fusionlab does with a step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .generator import Program, program, transformed
from .pieces.losses import Loss, loss_of
from .pieces.optimisers import Arrays, Optimiser, optimiser
from .pieces.piece import Array, Param

_NEXT = 1_000_003  # from a seed whose program has no gradient to the one whose program is taken instead

# How the gradients come about. "two batches" adds those of x and of x turned around, one after the other; "batches in a scan"
# does so in the body of a scan; "for each" maps the gradients over both; "two steps" makes two updates, in the body of a scan.
ROUTES = (*("once",) * 8, "two batches", "batches in a scan", "for each", "two steps")
PLACES = ("", "", "loss", "gradients", "step")  # what stands under a jit of its own


@dataclass(frozen=True)
class TrainStep(Program):
    """A random program with its loss, its gradients and an optimiser, as one function.

    `fn` takes the program's arguments, then the loss's, then the optimiser's state if it is given; it returns a flat list: the loss,
    the gradients if they are returned, the updated arguments, the optimiser's state, the auxiliary output if there is one. As a
    Program it is not differentiable: it is differentiated already. `baseline` is the step with a loss and gradients of zero, so
    that what they add to arguments and moments is judged, however small it is beside them.

    Attributes:
      changed: (gradients -> gradients) -> `fn` with that change made before they are returned and given to the optimiser.
      trained: which arguments are updated.
    """

    changed: Callable[[Callable[[Arrays], Arrays]], Callable[..., list[Array]]] = field(repr=False, kw_only=True)
    trained: tuple[int, ...] = field(kw_only=True)

    def arguments(self, draw: str, seed: int = 0) -> list[np.ndarray]:
        """As of a Program; second moments are not negative, counts are small integers."""
        return [_fit(p, a) for p, a in zip(self.params, super().arguments(draw, seed), strict=True)]


def _fit(p: Param, a: np.ndarray) -> np.ndarray:
    if p.role == "count":
        return np.minimum(np.abs(a), 3).astype(p.dtype)
    return np.abs(a) if p.role == "second moment" else a


@dataclass(frozen=True)
class _Choices:
    """All that is chosen of a step before anything is traced.

    Attributes:
      program: what it trains, as it is called: with its outer transformation inside.
      count: of the program's arguments.
      outs: what it returns.
      loss, optimiser, trained: as their names say.
      fresh: the optimiser's state is made inside.
      route, place: of ROUTES and of PLACES.
      aux: the output that is returned beside the loss, or None.
      returned: the gradients are returned.
      remat: the loss is under jax.checkpoint.
    """

    program: Callable[..., list[Array]]
    count: int
    outs: Sequence[jax.ShapeDtypeStruct]
    loss: Loss
    optimiser: Optimiser
    trained: tuple[int, ...]
    fresh: bool
    route: str
    place: str
    aux: int | None
    returned: bool
    remat: bool

    @property
    def inputs(self) -> int:
        """How many arguments the loss is of; those after them are the optimiser's state."""
        return self.count + len(self.loss.params)

    @property
    def text(self) -> str:
        words = [self.optimiser.text, *["fresh"] * self.fresh, f"of arguments {list(self.trained)}", self.loss.text]
        words += [f"jit of the {self.place}"] * bool(self.place) + [self.route] * (self.route != "once")
        words += ["remat"] * self.remat + ["gradients returned"] * self.returned
        return ", ".join([*words, *([] if self.aux is None else [f"output {self.aux} beside it"])])


def train_step(seed: int) -> TrainStep:
    """The train step of a seed."""
    rng = random.Random(f"train step {seed}")
    base = _differentiable(seed)
    c = _chosen(rng, base)
    params = (*base.params, *c.loss.params, *(() if c.fresh else c.optimiser.state))
    text = f"{c.text}; of program {base.seed}: {base.text}"
    outer = "vmap" if rng.random() < 0.04 else ""
    differentiated = _gradients(c)
    return TrainStep(
        seed, _step(c, differentiated), params, text, outer, base.largest, False, _names(c), _step(c, _no_gradients(c)),
        changed=lambda change: _step(c, differentiated, change), trained=c.trained,
    )  # fmt: skip


def _differentiable(seed: int) -> Program:
    while not (base := program(seed)).differentiable:
        seed += _NEXT
    return base


def _chosen(rng: random.Random, base: Program) -> _Choices:
    model = transformed(base.fn, base.outer)
    outs = jax.eval_shape(model, *base.avals)
    trained = _trained(rng, base.params)
    fitted = optimiser(rng, [base.params[i] for i in trained])
    route = rng.choice(ROUTES)
    return _Choices(
        model,
        len(base.params),
        outs,
        loss_of(rng, outs),
        fitted,
        trained,
        fresh=not fitted.state or rng.random() < 0.4,
        route=route,
        place=rng.choice(PLACES),
        aux=rng.randrange(len(outs)) if rng.random() < 0.3 and route == "once" else None,
        returned=rng.random() < 0.4 and route != "two steps",
        remat=rng.random() < 0.1,
    )


def _trained(rng: random.Random, params: Sequence[Param]) -> tuple[int, ...]:
    """The parameters, mostly; perhaps x as well, or only some."""
    floats = [i for i, p in enumerate(params) if p.dtype != "bool"]
    kind = rng.choice(["parameters", "parameters", "all", "some"])
    if kind == "parameters" and len(floats) > 1:
        return tuple(floats[1:])
    return tuple(sorted(rng.sample(floats, rng.randint(1, len(floats))))) if kind == "some" else tuple(floats)


def _names(c: _Choices) -> tuple[str, ...]:
    """What the step's outputs are called; the first word is the group that an array is measured in."""
    gradients = [f"gradient of argument {i}" for i in c.trained if c.returned]
    updated = [f"updated argument {i}" for i in c.trained]
    aux = [] if c.aux is None else ["auxiliary output"]
    return ("loss", *gradients, *updated, *c.optimiser.names, *aux)


def _no_gradients(c: _Choices) -> Callable[..., Any]:
    """As `_gradients`, all zeros."""

    def differentiated(*args: Array) -> Any:
        aux = None if c.aux is None else jnp.zeros(c.outs[c.aux].shape, c.outs[c.aux].dtype)
        return (jnp.zeros(()), aux), tuple(jnp.zeros_like(args[i]) for i in c.trained)

    return differentiated


def _step(
    c: _Choices, differentiated: Any, change: Callable[[Arrays], Arrays] = lambda gs: gs
) -> Callable[..., list[Array]]:
    """The step as one flat function; `change` is made to the gradients that `differentiated` gives."""

    def update(args: Sequence[Array], state: Any) -> tuple[Any, Arrays, Any]:
        value, gradients = differentiated(*args)
        gradients = change(gradients)
        trained, state = c.optimiser.update(gradients, state, tuple(args[i] for i in c.trained))
        return (value, gradients), trained, state

    def step(*given: Array) -> list[Array]:
        args = given[: c.inputs]
        start = tuple(args[i] for i in c.trained)
        state = c.optimiser.init(start) if c.fresh else c.optimiser.unflatten(given[c.inputs :])
        if c.route == "two steps":
            loss, trained, state = _two_steps(c, update, args, state)
            return [loss, *trained, *jax.tree.leaves(state)]
        ((loss, aux), gradients), trained, state = update(args, state)
        return [loss, *(gradients if c.returned else ()), *trained, *jax.tree.leaves(state), *jax.tree.leaves(aux)]

    return jax.jit(step) if c.place == "step" else step


def _gradients(c: _Choices) -> Callable[..., Any]:
    """(arguments) -> ((loss, auxiliary output), gradients): of two batches the means."""

    def loss(*args: Array) -> tuple[Array, Any]:
        outs = c.program(*args[: c.count])
        return c.loss.fn(outs, args[c.count :]), (None if c.aux is None else outs[c.aux])

    loss = jax.jit(loss) if c.place == "loss" else loss
    loss = jax.checkpoint(loss) if c.remat else loss
    once = jax.value_and_grad(loss, c.trained, has_aux=True)

    def several(x: Array, *rest: Array) -> Any:
        batches = jnp.stack([x, 0.5 * x])
        if c.route == "for each":
            (values, _), gradients = jax.vmap(lambda x: once(x, *rest))(batches)
            return (values.mean(0), None), tuple(g.mean(0) for g in gradients)
        if c.route == "two batches":
            ((one, _), first), ((two, _), second) = (once(batch, *rest) for batch in batches)
            return ((one + two) / 2, None), _mean(first, second)
        shapes = jax.eval_shape(once, x, *rest)
        start = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (shapes[0][0], shapes[1]))

        def add(total: Any, batch: Array) -> tuple[Any, None]:
            (value, _), gradients = once(batch, *rest)
            return jax.tree.map(lambda a, b: a + b / 2, total, (value, gradients)), None

        (value, gradients), _ = lax.scan(add, start, batches)
        return (value, None), gradients

    whole = once if c.route in ("once", "two steps") else several
    return jax.jit(whole) if c.place == "gradients" else whole


def _mean(first: Arrays, second: Arrays) -> Arrays:
    return tuple((a + b) / 2 for a, b in zip(first, second, strict=True))


def _two_steps(c: _Choices, update: Any, args: Sequence[Array], state: Any) -> tuple[Array, Arrays, Any]:
    """The losses added, what is trained and the state, after two updates in a scan."""

    def body(carry: Any, _: None) -> tuple[Any, Array]:
        trained, state = carry
        full = list(args)
        for i, p in zip(c.trained, trained, strict=True):
            full[i] = p
        ((loss, _), _), trained, state = update(full, state)
        return (trained, state), loss

    (trained, state), losses = lax.scan(body, (tuple(args[i] for i in c.trained), state), None, length=2)
    return losses.sum(), trained, state
