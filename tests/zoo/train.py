"""A train step of any model: the loss, its gradient, and the optimizer's update, in one function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .config import Config, Ema
from .model import Built, struct

DECAY = 0.99
Step = Callable[..., tuple[Any, ...]]


def optimizer(config: Config) -> optax.GradientTransformation:
    return optax.adamw(1e-3) if config.optimizer == "adamw" else optax.sgd(1e-2)


def average(ema: Ema, old: Any, new: Any, decay: Any) -> Any:
    """The moving average of the parameters, in the spelling that is asked for; each leaf is one lerp."""
    blends: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
        "products": lambda e, p: e * decay + p * (1 - decay),
        "difference": lambda e, p: e + (1 - decay) * (p - e),
        "traced": lambda e, p: (1 - decay).astype(p.dtype) * p + decay.astype(e.dtype) * e,
    }
    return jax.tree.map(blends[ema], old, new)


def initial_state(built: Built, params: Any) -> Any:
    """The optimizer's state before the first step."""
    return optimizer(built.config).init(params)


def train_step(built: Built) -> tuple[Step, tuple[Any, ...]]:
    """The step and its arguments, as shapes and dtypes.

    `step(params, opt_state, *inputs, *targets)` returns `(loss, new params, new opt_state)`. Where the configuration
    keeps an average of the parameters, the step takes `average` and an f32 `decay` at the end, and also returns the new
    average; the decay is used only by the spelling "traced", the others have a number in its place.
    """
    rule, ema = optimizer(built.config), built.config.ema
    params, *inputs = built.args
    data = (*inputs, *built.targets)

    def step(params: Any, opt_state: Any, *rest: Any) -> tuple[Any, ...]:
        loss, gradient = jax.value_and_grad(built.train_loss)(params, *rest[: len(data)])
        updates, opt_state = rule.update(gradient, opt_state, params)
        params = optax.apply_updates(params, updates)
        if ema is None:
            return loss, params, opt_state
        old, decay = rest[len(data) :]
        return loss, params, opt_state, average(ema, old, params, decay if ema == "traced" else DECAY)

    args = (params, jax.eval_shape(rule.init, params), *data)
    return step, args if ema is None else (*args, params, struct((), jnp.float32))
