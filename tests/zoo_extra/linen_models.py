"""Models of libraries on Flax's linen: diffusers, flaxmodels, jax-models and nanodl.

Only diffusers knows a dtype to compute in; parameters of the others are of the dtype that is asked for, and so is the input.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from zoo.config import Part, Sizes
from zoo.model import key_struct, struct

from .parts import LAYERS, LONGEST, QUADRUPLE, activations, add, cast, layer, mlp, model, packed


def applied(net: Any, inputs: list[Any], dtype: Any, result: Callable[[Any], Any] = lambda r: r, **options: Any) -> Any:
    """A linen module with parameters of one dtype (None: as they are)."""
    params = jax.eval_shape(lambda *given: net.init(jax.random.key(0), *given, **options), *inputs)["params"]

    def forward(params: Any, *given: Any) -> Any:
        return result(net.apply({"params": params}, *given, **options))

    return forward, params if dtype is None else cast(params, dtype), inputs


def spatial_transformer(sizes: Sizes, dtype: Any) -> Any:
    """The attention block of Stable Diffusion 2's UNet, over an image and the text's embeddings."""
    from diffusers.models.attention_flax import FlaxTransformer2DModel

    net = FlaxTransformer2DModel(
        sizes.model, sizes.heads, sizes.head, depth=LAYERS, use_linear_projection=True, dtype=dtype
    )
    image = struct((sizes.batch, 6, 7, sizes.model), dtype)
    return applied(net, [image, struct((sizes.batch, sizes.keys, 20), dtype)], None)


def gpt2(sizes: Sizes, dtype: Any) -> Any:
    """Its blocks and last norm: the model around them calls `jnp.reshape` by a name that JAX 0.10 does not have."""
    import flax.linen as nn
    from flaxmodels.gpt2 import ops
    from flaxmodels.gpt2.gpt2 import GPT2Block

    config = SimpleNamespace(
        vocab_size=sizes.vocab,
        n_positions=LONGEST,
        n_embd=sizes.model,
        n_head=sizes.heads,
        n_layer=LAYERS,
        n_inner=sizes.hidden,
        layer_norm_epsilon=1e-5,
        activation_function="gelu_new",
        scale_attn_weights=True,
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.1),
    )

    class Blocks(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(config.n_layer):
                x, _ = GPT2Block(config)(x)
            return ops.layer_norm(None, eps=config.layer_norm_epsilon)(x)

    return applied(Blocks(), [activations(sizes, dtype)], dtype)


def masked_autoencoder(sizes: Sizes, dtype: Any) -> Any:
    """An encoder of the patches that are left, and a narrower decoder of all; which are left is drawn from a key."""
    from jax_models.models.masked_autoencoder import MaskedAutoencoderViT

    net = MaskedAutoencoderViT(4, sizes.model, 40, LAYERS, 1, num_heads=sizes.heads, dec_num_heads=5)
    keys = {name: jax.random.key(0) for name in ("params", "noise")}
    image = struct((sizes.batch, 16, 16, 3), dtype)
    variables = net.init(keys, jnp.zeros(image.shape, dtype), deterministic=True)
    rest = {name: value for name, value in variables.items() if name != "params"}

    def forward(params: Any, image: Any, key: Any) -> Any:
        return net.apply({"params": params} | rest, image, deterministic=True, rngs={"noise": key})[0]

    return forward, cast(variables["params"], dtype), [image, key_struct()]


def vit(sizes: Sizes, dtype: Any) -> Any:
    """Only the logits: the weights of its attentions are results as well."""
    from nanodl import ViT

    net = ViT((4, 4), LAYERS, sizes.model, sizes.heads, sizes.model, 0.1, sizes.out)
    return applied(net, [struct((sizes.batch, 8, 12, 5), dtype)], dtype, lambda r: r[0])


MODELS = (
    model(
        "diffusers",
        "spatial_transformer",
        spatial_transformer,
        # Projections without bias but the last, to itself and then to the text; a packed gate.
        (
            LAYERS,
            add(
                packed("gelu_tanh"),
                Part(linear=2, no_bias=6, attentions=("unmasked",) * 2, layer_norms=3, siblings=1),
            ),
        ),
        # A group norm, which is no norm over the features; products into the layers and back.
        (1, Part(linear=2, evidence=(("root", 1),))),
        sizes=Sizes(model=64, head=16, hidden=256),
    ),
    model(
        "flaxmodels",
        "gpt2",
        gpt2,
        (LAYERS, layer(mlp("gelu_tanh"), "causal", projections=2)),
        (1, Part(layer_norms=1)),
    ),
    model(
        "jax-models",
        "masked_autoencoder",
        masked_autoencoder,
        (LAYERS + 1, layer(mlp("gelu_tanh"), "unmasked", projections=2)),
        (2, Part(layer_norms=1, linear=1)),  # the encoder's norm; into the decoder; its norm; to the pixels
        sizes=QUADRUPLE,
    ),
    model(
        "nanodl",
        "vit",
        vit,
        # Norms behind the sums.
        (LAYERS, layer(mlp("gelu_tanh"), "unmasked", projections=2, evidence=(("root", 1),))),
        (1, Part(linear=2)),
    ),
)
