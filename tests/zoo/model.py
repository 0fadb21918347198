"""What a model of the zoo is, and the helpers with which each library's file builds its models.

A model is built for one dtype. Its arguments are shapes and dtypes only (`jax.ShapeDtypeStruct`), so that building and
tracing one costs no computation; `concrete` fills them in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .config import Config

Shape = tuple[int, ...]
DTYPES: Mapping[str, Any] = {"f32": jnp.float32, "bf16": jnp.bfloat16}


@dataclass(frozen=True)
class Built:
    """A model for one dtype.

    Attributes:
        forward: `forward(params, *inputs)`, the result of the model: an array or a tuple of arrays.
        train_loss: `train_loss(params, *inputs, *targets)`, the mean squared error, an f32 scalar; one target of the
            same shape for each array of the result.
        args: the arguments of `forward`, as shapes and dtypes.
        targets: the further arguments of `train_loss`, as shapes and dtypes.
        config: what the model's truth is computed from.
    """

    forward: Callable[..., Any]
    train_loss: Callable[..., jax.Array]
    args: tuple[Any, ...]
    targets: tuple[Any, ...]
    config: Config


@dataclass(frozen=True)
class Model:
    """A model by its name: `name` is unique within `library`; `build(dtype)` builds it for f32 or bf16."""

    name: str
    library: str
    config: Config
    build: Callable[[Any], Built]

    @property
    def id(self) -> str:
        return f"{self.library}/{self.name}"


def struct(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of one argument."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def structs(shapes: Mapping[str, Shape], dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Parameters of one dtype, by name."""
    return {name: struct(shape, dtype) for name, shape in shapes.items()}


def key_struct() -> Any:
    """The type of a random key, for a model with dropout."""
    return jax.eval_shape(lambda: jax.random.key(0))


def tokens(config: Config) -> jax.ShapeDtypeStruct:
    """Token ids, `int32[batch, length]`."""
    return struct((config.sizes.batch, config.sizes.length), jnp.int32)


def activations(config: Config, dtype: Any) -> jax.ShapeDtypeStruct:
    """The usual input of a model, `[batch, length, model]`."""
    return struct((config.sizes.batch, config.sizes.length, config.sizes.model), dtype)


def memory(config: Config, dtype: Any) -> jax.ShapeDtypeStruct:
    """What a cross attention attends to, `[batch, keys, model]`."""
    return struct((config.sizes.batch, config.sizes.keys, config.sizes.model), dtype)


def assemble(forward: Callable[..., Any], params: Any, inputs: Sequence[Any], config: Config) -> Built:
    """The built model: `forward`, with a loss and its targets."""
    args = (params, *inputs)
    targets = tuple(jax.tree.leaves(jax.eval_shape(forward, *args)))

    def train_loss(*arguments: Any) -> jax.Array:
        results = jax.tree.leaves(forward(*arguments[: len(args)]))
        total = jnp.zeros((), jnp.float32)
        for result, target in zip(results, arguments[len(args) :], strict=True):
            difference = result.astype(jnp.float32) - target.astype(jnp.float32)
            total = total + jnp.mean(difference * difference)
        return total

    return Built(forward, train_loss, args, targets, config)


def concrete(args: Any, seed: int = 0) -> Any:
    """Arrays for shapes: floats normal with deviation 0.3, integers from 1 to 7, masks half true and never empty, keys from `seed`."""
    generator = np.random.default_rng(seed)

    def fill(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key(seed)
        if leaf.dtype == jnp.bool_:
            mask = generator.random(leaf.shape) < 0.5
            mask[..., 0] = True
            return jnp.asarray(mask)
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.asarray(generator.integers(1, 8, leaf.shape), leaf.dtype)
        return jnp.asarray(generator.normal(0.0, 0.3, leaf.shape), leaf.dtype)

    return jax.tree.map(fill, args)
