"""What the models of the extra zoo are put together from: layers by what stands in them, and how a model is built."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from zoo.config import Composite, Part, Sizes
from zoo.model import Built, Model, assemble, struct

LAYERS = 2
LONGEST = 16  # positions that a model has a table of
Make = Callable[[Sizes, Any], tuple[Callable[..., Any], Any, list[Any]]]

# A width of its own for the feed-forward part where the library takes four times the model's.
QUADRUPLE = Sizes(hidden=4 * Sizes().model)


def layer(
    feed_forward: Part, mask: Any, *, projections: int = 4, bias: bool = True, whole: bool = True, **fields: Any
) -> Part:
    """One transformer layer: an attention with so many products around it, two norms, and a feed-forward part."""
    norms = fields.pop("norms", "layer_norms")
    return add(
        feed_forward,
        Part(**{"linear" if bias else "no_bias": projections}, attentions=(mask,), layers=int(whole), **{norms: 2}),
        Part(siblings=int(projections == 4)),
        Part(**fields),
    )


def add(*parts: Part) -> Part:
    """One part that holds what the others hold: tuples are joined and numbers summed."""
    fields = ("linear", "no_bias", "activations", "attentions", "layer_norms", "rms_norms", "softmaxes", "lerps")
    fields += ("gated", "siblings", "layers", "evidence", "contested")
    return Part(**{f: sum((getattr(p, f) for p in parts[1:]), getattr(parts[0], f)) for f in fields})


def mlp(activation: str, bias: bool = True) -> Part:
    """Two products with an activation between them."""
    return Part(**{"linear" if bias else "no_bias": 2}, activations=(activation,))


def gated(activation: str, bias: bool = False) -> Part:
    """A gate and a value of the same input, multiplied, and a product behind."""
    return Part(**{"linear" if bias else "no_bias": 3}, activations=(activation,), gated=1)


def packed(activation: str) -> Part:
    """The same with gate and value from one product that is split."""
    why = (("glu_pair", "gate and value are one product that is split"), (activation, "the activation of a slice"))
    names = {"gelu_tanh": "tanh", "gelu_erf": "erf", "silu": "logistic"}
    return Part(linear=2, contested=why, evidence=((names[activation], 1),))


def cast(params: Any, dtype: Any) -> Any:
    """Parameters as shapes, the floating ones of one dtype: for a library that has no dtype of its own for computing."""

    def one(leaf: Any) -> Any:
        return struct(leaf.shape, dtype if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype)

    return jax.tree.map(one, params)


def tokens(sizes: Sizes) -> Any:
    return struct((sizes.batch, sizes.length), jnp.int32)


def activations(sizes: Sizes, dtype: Any) -> Any:
    return struct((sizes.batch, sizes.length, sizes.model), dtype)


def padding(sizes: Sizes, dtype: Any = jnp.int32) -> Any:
    """A mask over the keys, as tokenizers give it."""
    return struct((sizes.batch, sizes.length), dtype)


def model(library: str, name: str, make: Make, *parts: tuple[int, Part], sizes: Sizes | None = None) -> Model:
    """A model by what it is made of; `make(sizes, dtype)` gives its function, its parameters as shapes, and its inputs."""
    sizes = sizes or Sizes()
    config = Composite(parts=parts, sizes=sizes, optimizer="sgd")
    return Model(name, library, config, partial(_build, make, config))


def _build(make: Make, config: Composite, dtype: Any) -> Built:
    forward, params, inputs = make(config.sizes, dtype)
    return assemble(forward, params, inputs, config)
