"""Models of Penzai: named axes, numbers that are arrays, parameters of the dtype that is computed in."""

from __future__ import annotations

from typing import Any

import jax
from zoo.config import GROUPED, Part, Sizes

from .parts import LAYERS, gated, layer, mlp, model, tokens


def bound(net: Any, sizes: Sizes) -> Any:
    """A model whose parameters are taken out of it, as arrays."""
    from penzai import pz

    unbound, variables = pz.unbind_params(net, freeze=True)
    leaves, tree = jax.tree.flatten(variables)
    params = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]

    def forward(params: Any, ids: Any) -> Any:
        whole = pz.bind_variables(unbound, jax.tree.unflatten(tree, params))
        return whole(pz.nx.wrap(ids).tag("batch", "seq")).unwrap("batch", "seq", "vocabulary")

    return forward, params, [tokens(sizes)]


def like_llama(sizes: Sizes, dtype: Any, **options: Any) -> Any:
    from penzai.models.transformer.variants.llamalike_common import (
        LlamalikeTransformerConfig,
        build_llamalike_transformer,
    )

    config = LlamalikeTransformerConfig(
        embedding_dim=sizes.model,
        projection_dim=sizes.head,
        mlp_hidden_dim=sizes.hidden,
        num_decoder_blocks=LAYERS,
        vocab_size=sizes.vocab,
        parameter_dtype=dtype,
        activation_dtype=dtype,
        **options,
    )
    return bound(build_llamalike_transformer(config, jax.random.key(0)), sizes)


def gemma(sizes: Sizes, dtype: Any) -> Any:
    """One head of keys and values for all heads of queries."""
    return like_llama(
        sizes,
        dtype,
        num_kv_heads=1,
        query_head_multiplier=sizes.heads,
        mlp_variant="geglu_approx",
        tie_embedder_and_logits=True,
    )


def mistral(sizes: Sizes, dtype: Any) -> Any:
    """A sliding window, and the layers stacked and scanned."""
    from penzai.models.transformer.variants.llamalike_common import AttentionTypeSlidingWindowCausal

    return like_llama(
        sizes,
        dtype,
        num_kv_heads=sizes.kv_heads,
        query_head_multiplier=sizes.heads // sizes.kv_heads,
        mlp_variant="swiglu",
        tie_embedder_and_logits=False,
        attention_type=AttentionTypeSlidingWindowCausal(4),
        use_layer_stack=True,
    )


def gpt_neox(sizes: Sizes, dtype: Any) -> Any:
    """Attention and feed-forward part of one value, added up; a part of each head is turned."""
    from penzai.models.transformer.variants.gpt_neox import GPTNeoXTransformerConfig, build_gpt_neox_transformer

    config = GPTNeoXTransformerConfig(
        num_attention_heads=sizes.heads,
        embedding_dim=sizes.model,
        projection_dim=sizes.head,
        mlp_hidden_dim=sizes.hidden,
        num_decoder_blocks=LAYERS,
        vocab_size=sizes.vocab,
        activation_fn="gelu_exact",
        rope_subset_size=4,
        rope_wavelength=10_000.0,
        layernorm_epsilon=1e-5,
        parameter_dtype=dtype,
        activation_dtype=dtype,
    )
    return bound(build_gpt_neox_transformer(config, jax.random.key(0)), sizes)


def scaled(norms: int) -> tuple[tuple[str, int], ...]:
    """A norm's scale is multiplied by an einsum, a product over no axis."""
    return (("dot", norms),)


MODELS = (
    model(
        "penzai",
        "gemma",
        gemma,
        (LAYERS, layer(gated("gelu_tanh"), "causal", bias=False, norms="rms_norms", evidence=scaled(2))),
        (1, Part(rms_norms=1, no_bias=1, evidence=scaled(1))),
        sizes=GROUPED,
    ),
    model(
        "penzai",
        "mistral",
        mistral,
        (1, layer(gated("silu"), "masked", bias=False, norms="rms_norms", evidence=scaled(2))),
        (1, Part(rms_norms=1, no_bias=1, evidence=scaled(1))),
        sizes=GROUPED,
    ),
    model(
        "penzai",
        "gpt_neox",
        gpt_neox,
        (LAYERS, layer(mlp("gelu_erf"), "causal", whole=False, evidence=scaled(2))),
        (1, Part(layer_norms=1, no_bias=1, evidence=scaled(1))),
    ),
)
