"""Train loops as the tutorials of five libraries write them, each with the line that fuses its step.

Every loop trains on the same 20 batches. `Loop.step` is the body of the user's loop, with whatever function it is given; `Loop.pure` is the
same step as a function of arrays, written with the library's own means and without FusionLab, for the float64 reference.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

import fusionlab as fl

Array = Any
BATCH, FEATURES, CLASSES, STEPS = 16, 12, 5, 20


def batches(dtype: Any = jnp.float32) -> list[dict[str, Array]]:
    rng = np.random.default_rng(0)
    made = []
    for _ in range(STEPS):
        x = rng.normal(size=(BATCH, FEATURES)).astype(np.float32)
        label = (x[:, :CLASSES] + 0.3 * rng.normal(size=(BATCH, CLASSES))).argmax(-1).astype(np.int32)
        made.append({"x": jax.device_put(x.astype(dtype)), "label": jax.device_put(label)})
    return made


@dataclass(frozen=True)
class Loop:
    """One library's loop.

    Attributes:
      name: of the library.
      start: the state before the first step.
      original, fused: make the step that the loop calls; the second differs from the first in the line that fuses.
      step: (the step, the state, a batch) -> (loss, the new state); the user's loop.
      pure: (arrays, a batch) -> (loss, arrays), of these values.
      arrays: a state's arrays.
      call: the arguments of the step at a state and a batch.
      donates: whether the step consumes its state.
      zero: the leaves whose gradient is zero in theory, so that what Adam makes of it is rounding alone: parts of their names.
      sites: of gemm_epilogue, all with their backward passes.
    """

    name: str
    start: Callable[[], Any]
    original: Callable[[], Callable]
    fused: Callable[[], Callable]
    step: Callable[[Callable, Any, Any], tuple[Array, Any]]
    pure: Callable[[], Callable]
    arrays: Callable[[Any], Any]
    call: Callable[[Any, Any], tuple]
    donates: bool = False
    zero: tuple[str, ...] = ()
    sites: int = 3


def cross_entropy(logits: Array, label: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), label).mean()


# -- flax nnx: dropout, BatchNorm, AdamW ------------------------------------------------------------------------------------


class Classifier(nnx.Module):
    def __init__(self, dtype: Any, rngs: nnx.Rngs) -> None:
        told = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        self.first, self.norm = nnx.Linear(FEATURES, 32, **told), nnx.BatchNorm(32, **told)
        self.drop, self.hidden, self.last = (
            nnx.Dropout(0.2, rngs=rngs),
            nnx.Linear(32, 32, **told),
            nnx.Linear(32, CLASSES, **told),
        )

    def __call__(self, x: Array) -> Array:
        x = self.drop(nnx.relu(self.norm(self.first(x))))
        return self.last(nnx.gelu(self.hidden(x)))


def nnx_loss(model: Classifier, batch: dict[str, Array]) -> tuple[Array, Array]:
    logits = model(batch["x"])
    return cross_entropy(logits, batch["label"]), logits


def nnx_step(model: Classifier, optimizer: nnx.Optimizer, metrics: nnx.MultiMetric, batch: dict[str, Array]) -> Array:
    (loss, logits), grads = nnx.value_and_grad(nnx_loss, has_aux=True)(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)
    return loss


def nnx_loop(dtype: Any = jnp.float32) -> Loop:
    def start() -> tuple[Any, ...]:
        model = Classifier(dtype, nnx.Rngs(0))
        metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
        return model, nnx.Optimizer(model, optax.adamw(5e-3), wrt=nnx.Param), metrics

    def pure() -> Callable:
        graphdef = nnx.split(start())[0]

        def run(state: Any, batch: Any) -> tuple[Array, Any]:
            objects = nnx.merge(graphdef, state)
            loss = nnx_step(*objects, batch)
            return loss, nnx.split(objects)[1]

        return run

    return Loop(
        "nnx",
        start,
        original=lambda: nnx.jit(nnx_step),
        fused=lambda: fl.fuse(nnx.jit(nnx_step)),
        step=lambda fn, state, batch: (fn(*state, batch), state),
        pure=pure,
        arrays=lambda state: nnx.split(state)[1],
        call=lambda state, batch: (*state, batch),
        zero=("'first']['bias'",),  # in front of BatchNorm
    )


# -- flax linen: TrainState, donated ----------------------------------------------------------------------------------------


class Linen(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        told = {"dtype": self.dtype, "param_dtype": self.dtype}
        x = nn.Dropout(0.1, deterministic=not train)(nn.gelu(nn.Dense(32, **told)(x)))
        return nn.Dense(CLASSES, **told)(nn.relu(nn.Dense(32, **told)(x)))


def linen_step(state: TrainState, batch: dict[str, Array], key: Array) -> tuple[TrainState, Array]:
    def loss_fn(params: Any) -> Array:
        rngs = {"dropout": jax.random.fold_in(key, state.step)}
        return cross_entropy(state.apply_fn({"params": params}, batch["x"], train=True, rngs=rngs), batch["label"])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def linen_loop(dtype: Any = jnp.float32) -> Loop:
    key = jax.random.key(1)

    def start() -> TrainState:
        model = Linen(dtype)
        params = model.init(jax.random.key(0), jnp.zeros((1, FEATURES), dtype), train=False)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(5e-3))

    return Loop(
        "linen",
        start,
        original=lambda: jax.jit(linen_step, donate_argnums=0),
        fused=lambda: fl.fuse(jax.jit(linen_step, donate_argnums=0)),
        step=lambda fn, state, batch: fn(state, batch, key)[::-1],
        pure=lambda: lambda state, batch: linen_step(state, batch, key)[::-1],
        arrays=lambda state: state,
        call=lambda state, batch: (state, batch, key),
        donates=True,
    )


# -- equinox: filter_jit, filter_value_and_grad -----------------------------------------------------------------------------


def eqx_loss(model: eqx.Module, batch: dict[str, Array]) -> Array:
    return cross_entropy(jax.vmap(model)(batch["x"]), batch["label"])


def equinox_loop(dtype: Any = jnp.float32) -> Loop:
    optimizer = optax.adam(5e-3)

    def step(model: eqx.Module, opt_state: Any, batch: dict[str, Array]) -> tuple[eqx.Module, Any, Array]:
        loss, grads = eqx.filter_value_and_grad(eqx_loss)(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    def start() -> tuple[Any, Any]:
        model = eqx.nn.MLP(FEATURES, CLASSES, 32, 2, activation=jax.nn.gelu, key=jax.random.key(0), dtype=dtype)
        return model, optimizer.init(eqx.filter(model, eqx.is_array))

    def run(fn: Callable, state: Any, batch: Any) -> tuple[Array, Any]:
        *state, loss = fn(*state, batch)
        return loss, tuple(state)

    def pure() -> Callable:
        static = eqx.partition(start(), eqx.is_array)[1]

        def of_arrays(arrays: Any, batch: Any) -> tuple[Array, Any]:
            loss, state = run(step, eqx.combine(arrays, static), batch)
            return loss, eqx.filter(state, eqx.is_array)

        return of_arrays

    return Loop(
        "equinox",
        start,
        original=lambda: eqx.filter_jit(step, donate="all"),
        fused=lambda: fl.fuse(eqx.filter_jit(step, donate="all")),
        step=run,
        pure=pure,
        arrays=lambda state: eqx.filter(state, eqx.is_array),
        call=lambda state, batch: (*state, batch),
        donates=True,
    )


# -- plain optax: gradients added up over micro-batches, in a scan ------------------------------------------------------------


def optax_loop(dtype: Any = jnp.float32) -> Loop:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(5e-3))

    def loss_fn(params: dict[str, Array], batch: dict[str, Array]) -> Array:
        h = jax.nn.relu(batch["x"] @ params["w1"] + params["b1"])
        h = jax.nn.gelu(h @ params["w2"] + params["b2"])
        return cross_entropy(h @ params["w3"] + params["b3"], batch["label"])

    def step(params: Any, opt_state: Any, batch: dict[str, Array]) -> tuple[Any, Any, Array]:
        def micro(total: Any, part: dict[str, Array]) -> tuple[Any, Array]:
            loss, grads = jax.value_and_grad(loss_fn)(params, part)
            return jax.tree.map(jnp.add, total, grads), loss

        parts = jax.tree.map(lambda a: a.reshape(4, -1, *a.shape[1:]), batch)
        grads, losses = jax.lax.scan(micro, jax.tree.map(jnp.zeros_like, params), parts)
        updates, opt_state = optimizer.update(jax.tree.map(lambda g: g / 4, grads), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, losses.mean()

    def start() -> tuple[Any, Any]:
        rng, sizes = np.random.default_rng(1), ((FEATURES, 32), (32, 32), (32, CLASSES))
        params = {}
        for i, (width, height) in enumerate(sizes, 1):
            kernel = rng.normal(size=(width, height)) / np.sqrt(width)
            params |= {f"w{i}": jnp.asarray(kernel, dtype), f"b{i}": jnp.zeros(height, dtype)}
        return params, optimizer.init(params)

    def run(fn: Callable, state: Any, batch: Any) -> tuple[Array, Any]:
        *state, loss = fn(*state, batch)
        return loss, tuple(state)

    return Loop(
        "optax",
        start,
        original=lambda: jax.jit(step, donate_argnums=(0, 1)),
        fused=lambda: fl.fuse(jax.jit(step, donate_argnums=(0, 1))),
        step=run,
        pure=lambda: lambda state, batch: run(step, state, batch),
        arrays=lambda state: state,
        call=lambda state, batch: (*state, batch),
        donates=True,
    )


# -- Keras 3 on JAX: fit ----------------------------------------------------------------------------------------------------


def keras_model(fused: bool) -> Any:
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    model = keras.Sequential(
        [keras.Input((FEATURES,)), dense(32, activation="relu"), dense(32, activation="gelu"), dense(CLASSES)]
    )
    if fused:
        model.train_step = fl.fuse(model.train_step)
    model.compile(keras.optimizers.Adam(5e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def keras_state(model: Any) -> tuple[list[Array], ...]:
    """What a step of the model takes and gives: trainable variables, others, the optimizer's, the metrics'."""
    model.optimizer.build(model.trainable_variables)
    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    return tuple([v.value for v in group] for group in groups)


def keras_data(batch: dict[str, Array]) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(batch["x"]), np.asarray(batch["label"])


def keras_fit(fused: bool, steps: int) -> tuple[list[float], tuple[list[Array], ...]]:
    """Losses of each batch, and all variables after them, of `fit`."""
    model, losses = keras_model(fused), []
    import keras

    after = keras.callbacks.LambdaCallback(on_train_batch_end=lambda _, logs: losses.append(float(logs["loss"])))
    for batch in batches()[:steps]:  # an epoch each, so that a loss is that batch's own and no running mean
        model.fit(*keras_data(batch), batch_size=BATCH, verbose=0, shuffle=False, callbacks=[after])
    return losses, keras_state(model)


LOOPS: dict[str, Callable[..., Loop]] = {
    "nnx": nnx_loop,
    "optax": optax_loop,
    "linen": linen_loop,
    "equinox": equinox_loop,
}
