"""Models of libraries on Equinox: equimo, esm2quinox and jaxonmodels. All parameters are of the dtype that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from zoo.config import Part, Sizes
from zoo.model import struct

from .parts import LAYERS, QUADRUPLE, cast, layer, mlp, model, packed, tokens


def mapped(net: Any, call: Callable[..., Any], inputs: list[Any], dtype: Any) -> Any:
    """A module of one example on a batch; what is no floating array of it is closed over."""
    params, rest = eqx.partition(net, eqx.is_inexact_array)

    def forward(params: Any, *given: Any) -> Any:
        return jax.vmap(lambda *one: call(eqx.combine(params, rest), *one))(*given)

    return forward, cast(params, dtype), inputs


def dinov2(sizes: Sizes, dtype: Any) -> Any:
    """As the giant of DINOv2: register tokens, a packed SwiGLU, a factor for each feature before each sum."""
    from equimo.models import VisionTransformer

    net = VisionTransformer(
        img_size=12,
        in_channels=5,
        dim=sizes.model,
        patch_size=4,
        num_heads=sizes.heads,
        depths=[LAYERS],
        reg_tokens=2,
        ffn_layer="swiglufused",
        init_values=1e-5,
        eps=1e-6,
        num_classes=sizes.out,
        global_pool="token",
        key=jax.random.key(0),
    )
    image = struct((sizes.batch, 5, 12, 12), dtype)
    return mapped(net, lambda net, x: net(x, key=jax.random.key(0), inference=True), [image], dtype)


def esm2(sizes: Sizes, dtype: Any) -> Any:
    """Its layers are stacked and scanned."""
    from esm2quinox import ESM2

    net = ESM2(LAYERS, sizes.model, sizes.heads, True, jax.random.key(0))
    return mapped(net, lambda net, ids: net(ids).logits, [tokens(sizes)], dtype)


def clip(sizes: Sizes, dtype: Any) -> Any:
    """The image's side of CLIP."""
    from jaxonmodels.models.vit import VisionTransformer

    net = VisionTransformer(12, 4, sizes.model, LAYERS, sizes.heads, sizes.out, key=jax.random.key(0), dtype=dtype)
    return mapped(net, lambda net, x: net(x)[0], [struct((sizes.batch, 3, 12, 12), dtype)], dtype)


SQRT = (("root", 1),)  # scores are divided by `jnp.sqrt` of a number
MODELS = (
    model(
        "equimo",
        "dinov2",
        dinov2,
        (LAYERS, layer(packed("silu"), "unmasked", projections=2, evidence=SQRT)),
        (1, Part(layer_norms=1, linear=1)),
        sizes=Sizes(length=12),
    ),
    model(
        "esm2quinox",
        "esm2",
        esm2,
        (1, layer(mlp("gelu_erf"), "masked")),
        (1, Part(layer_norms=2, linear=2, activations=("gelu_erf",))),
        sizes=QUADRUPLE,
    ),
    model(
        "jaxonmodels",
        "clip",
        clip,
        # Queries, keys and values by parts of one weight.
        (LAYERS, layer(mlp("gelu_tanh"), "unmasked", evidence=SQRT)),
        (1, Part(layer_norms=2, no_bias=1)),
        sizes=Sizes(length=10, hidden=128),
    ),
)
