"""Models of libraries on Flax's nnx: attnax and tunix. attnax has no dtype of its own; its parameters are of the dtype asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from zoo.config import GROUPED, Part, Sizes
from zoo.model import struct

from .parts import LAYERS, LONGEST, cast, gated, layer, model, tokens


def merged(make: Callable[[Any], Any], inputs: list[Any], dtype: Any, call: Callable[..., Any]) -> Any:
    """A module of nnx: its parameters as the first argument, whatever else it keeps closed over."""
    from flax import nnx

    graph, params, rest = nnx.split(make(nnx.Rngs(0)), nnx.Param, ...)

    def forward(params: Any, *given: Any) -> Any:
        return call(nnx.merge(graph, params, rest), *given)

    return forward, cast(params, dtype), inputs


def decoder(sizes: Sizes, dtype: Any) -> Any:
    from attnax import TransformerConfig, TransformerDecoder

    config = TransformerConfig(
        vocab_size=sizes.vocab,
        d_model=sizes.model,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        num_layers=LAYERS,
        d_ff=sizes.hidden,
        max_len=LONGEST,
        pos_emb_type="rope",
        ff_activation="swiglu",
        norm_type="rms",
    )
    return merged(
        lambda rngs: TransformerDecoder(rngs, config),
        [tokens(sizes)],
        dtype,
        lambda net, ids: net(ids, deterministic=True),
    )


def attended(sizes: Sizes) -> list[Any]:
    """Tokens, their positions, and which keys each query sees."""
    return [tokens(sizes), tokens(sizes), struct((sizes.batch, sizes.length, sizes.length), jnp.bool_)]


def called(net: Any, ids: Any, positions: Any, mask: Any) -> Any:
    return net(ids, positions, None, mask)[0]


def qwen2(sizes: Sizes, dtype: Any) -> Any:
    from tunix.models.qwen2.model import ModelConfig, Qwen2

    config = ModelConfig(
        num_layers=LAYERS,
        vocab_size=sizes.vocab,
        embed_dim=sizes.model,
        hidden_dim=sizes.hidden,
        num_heads=sizes.heads,
        head_dim=sizes.head,
        num_kv_heads=sizes.kv_heads,
        rope_theta=1_000_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
        dtype=dtype,
        param_dtype=dtype,
    )
    return merged(lambda rngs: Qwen2(config, rngs=rngs), attended(sizes), dtype, called)


def gemma2(sizes: Sizes, dtype: Any) -> Any:
    from tunix.models.gemma.model import AttentionType, Gemma, ModelConfig

    config = ModelConfig(
        num_layers=LAYERS,
        num_embed=sizes.vocab,
        embed_dim=sizes.model,
        hidden_dim=sizes.hidden,
        num_heads=sizes.heads,
        head_dim=sizes.head,
        num_kv_heads=sizes.kv_heads,
        final_logit_softcap=30.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=(AttentionType.LOCAL_SLIDING, AttentionType.GLOBAL),
        attn_logits_soft_cap=50.0,
        sliding_window_size=4,
    )
    return merged(lambda rngs: Gemma(config, rngs=rngs), attended(sizes), dtype, called)


def llama3(sizes: Sizes, dtype: Any) -> Any:
    from tunix.models.llama3.model import Llama3, ModelConfig

    config = ModelConfig(
        num_layers=LAYERS,
        vocab_size=sizes.vocab,
        embed_dim=sizes.model,
        hidden_dim=sizes.hidden,
        num_heads=sizes.heads,
        head_dim=sizes.head,
        num_kv_heads=sizes.kv_heads,
        rope_theta=500_000,
        norm_eps=1e-5,
    )
    return merged(lambda rngs: Llama3(config, rngs=rngs), attended(sizes), dtype, called)


RMS: dict[str, Any] = {"norms": "rms_norms"}
MODELS = (
    model(
        "attnax",
        "decoder",
        decoder,
        (LAYERS, layer(gated("silu", bias=True), "causal", evidence=(("root", 1),), **RMS)),
        (1, Part(rms_norms=1)),
        sizes=GROUPED,
    ),
    model(
        "google-tunix",
        "qwen2",
        qwen2,
        # The bias is added to the heads joined, the norm divides by a root; the angles are an outer product.
        (LAYERS, layer(gated("silu"), "masked", projections=0, linear=3, no_bias=1, siblings=1, **RMS)),
        (1, Part(rms_norms=1, no_bias=1, evidence=(("dot", 1),))),
        sizes=GROUPED,
    ),
    model(
        "google-tunix",
        "gemma2",
        gemma2,
        # Keys and values are one product; scores are capped; two further norms, behind each part.
        (
            LAYERS,
            layer(
                gated("gelu_tanh"),
                "masked",
                projections=3,
                bias=False,
                whole=False,
                rms_norms=2,
                evidence=(("tanh", 1),),
                **RMS,
            ),
        ),
        # Embeddings are multiplied by a root. The logits are capped: their tanh is that of a product over a number.
        (
            1,
            Part(
                rms_norms=1,
                no_bias=1,
                evidence=(("tanh", 1), ("root", 1)),
                contested=(("tanh", "the tanh of logits over a number"),),
            ),
        ),
        sizes=GROUPED,
    ),
    model(
        "google-tunix",
        "llama3",
        llama3,
        (LAYERS, layer(gated("silu"), "masked", bias=False, **RMS)),
        (1, Part(rms_norms=1, no_bias=1)),
        sizes=GROUPED,
    ),
)
