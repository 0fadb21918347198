"""Flax models of `transformers` that are not among the zoo's: parameters are f32, and cast where they are used with bf16."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from zoo.config import GROUPED, Part, Sizes
from zoo.model import key_struct

from .parts import LAYERS, LONGEST, add, gated, layer, mlp, model, padding, tokens

Settings = Callable[[Sizes], dict[str, Any]]


def common(sizes: Sizes) -> dict[str, Any]:
    return {
        "hidden_size": sizes.model,
        "num_attention_heads": sizes.heads,
        "intermediate_size": sizes.hidden,
        "num_hidden_layers": LAYERS,
        "vocab_size": sizes.vocab,
        "max_position_embeddings": LONGEST,
    }


def opt(sizes: Sizes) -> dict[str, Any]:
    return common(sizes) | {
        "ffn_dim": sizes.hidden,
        "word_embed_proj_dim": sizes.model,
        "dropout": 0.0,
        "pad_token_id": 1,
    }


def gpt_neo(sizes: Sizes) -> dict[str, Any]:
    kinds = {"num_layers": LAYERS, "num_heads": sizes.heads, "attention_types": [[["global", "local"], LAYERS // 2]]}
    return common(sizes) | kinds | {"window_size": 4}


def grouped(sizes: Sizes) -> dict[str, Any]:
    return common(sizes) | {"num_key_value_heads": sizes.kv_heads, "head_dim": sizes.head}


def gemma(sizes: Sizes) -> dict[str, Any]:
    return grouped(sizes) | {"hidden_activation": "gelu_pytorch_tanh"}


def mistral(sizes: Sizes) -> dict[str, Any]:
    return grouped(sizes) | {"sliding_window": 4}


def bloom(sizes: Sizes) -> dict[str, Any]:
    return {"vocab_size": sizes.vocab, "hidden_size": sizes.model, "n_layer": LAYERS, "n_head": sizes.heads}


def electra(sizes: Sizes) -> dict[str, Any]:
    return common(sizes) | {"embedding_size": 24, "type_vocab_size": 6}


def bart(sizes: Sizes) -> dict[str, Any]:
    sides = ("encoder", "decoder")
    numbers = {f"{side}_{name}": n for side in sides for name, n in counts(sizes).items()}
    return {"vocab_size": sizes.vocab, "d_model": sizes.model, "max_position_embeddings": LONGEST} | numbers


def counts(sizes: Sizes) -> dict[str, int]:
    return {"layers": LAYERS, "attention_heads": sizes.heads, "ffn_dim": sizes.hidden}


def roformer(sizes: Sizes) -> dict[str, Any]:
    return common(sizes) | {"type_vocab_size": 6}


# Each model's class and configuration class, and the settings of the latter.
CLASSES: Mapping[str, tuple[str, str, Settings]] = {
    "opt": ("FlaxOPTForCausalLM", "OPTConfig", opt),
    "gpt_neo": ("FlaxGPTNeoForCausalLM", "GPTNeoConfig", gpt_neo),
    "gemma": ("FlaxGemmaForCausalLM", "GemmaConfig", gemma),
    "mistral": ("FlaxMistralForCausalLM", "MistralConfig", mistral),
    "bloom": ("FlaxBloomForCausalLM", "BloomConfig", bloom),
    "electra": ("FlaxElectraModel", "ElectraConfig", electra),
    "bart": ("FlaxBartModel", "BartConfig", bart),
    "roformer": ("FlaxRoFormerModel", "RoFormerConfig", roformer),
}


def network(name: str, sizes: Sizes, dtype: Any) -> tuple[Any, Any]:
    """The model, without parameters of its own, and the shapes of its parameters."""
    import transformers

    kind, settings_class, settings = CLASSES[name]
    config = getattr(transformers, settings_class)(**settings(sizes))
    net = getattr(transformers, kind)(config, dtype=dtype, _do_init=False)
    shape = (sizes.batch, sizes.length)
    return net, jax.eval_shape(lambda: net.init_weights(jax.random.key(0), shape))


def encodes(name: str, sizes: Sizes, dtype: Any) -> Any:
    """A model of one text, with a mask over its tokens."""
    net, params = network(name, sizes, dtype)

    def forward(params: Any, ids: Any, mask: Any) -> Any:
        return net(ids, attention_mask=mask, params=params)[0]

    return forward, params, [tokens(sizes), padding(sizes)]


def trains(name: str, sizes: Sizes, dtype: Any) -> Any:
    """The same with dropout, drawn from a key."""
    net, params = network(name, sizes, dtype)

    def forward(params: Any, ids: Any, mask: Any, key: Any) -> Any:
        return net(ids, attention_mask=mask, params=params, train=True, dropout_rng=key)[0]

    return forward, params, [tokens(sizes), padding(sizes), key_struct()]


def translates(name: str, sizes: Sizes, dtype: Any) -> Any:
    """A model of two texts, each with a mask over its tokens."""
    net, params = network(name, sizes, dtype)

    def forward(params: Any, ids: Any, mask: Any, out: Any, out_mask: Any) -> Any:
        given = {"attention_mask": mask, "decoder_input_ids": out, "decoder_attention_mask": out_mask}
        return net(ids, **given, params=params)[0]

    out = jax.ShapeDtypeStruct((sizes.batch, sizes.keys), jnp.int32)
    return forward, params, [tokens(sizes), padding(sizes), out, out]


def _model(name: str, make: Any, *parts: tuple[int, Part], sizes: Sizes | None = None) -> Any:
    return model("transformers", name, partial(make, name), *parts, sizes=sizes)


SQRT = (("root", 1),)  # flax divides queries by `jnp.sqrt` of their width
RMS: dict[str, Any] = {"norms": "rms_norms"}
TIED = Part(no_bias=1)
CROSS = {"linear": 4, "attentions": ("masked",)}
MODELS = (
    _model("opt", encodes, (LAYERS, layer(mlp("relu"), "masked", evidence=SQRT)), (1, add(TIED, Part(layer_norms=1)))),
    _model(
        "gpt_neo",
        encodes,
        # Only the last of the four projections has a bias; queries are multiplied by a root first, to be divided by it.
        (
            LAYERS,
            layer(mlp("gelu_tanh"), "masked", projections=0, linear=1, no_bias=3, siblings=1, evidence=(("root", 2),)),
        ),
        (1, add(TIED, Part(layer_norms=1))),
    ),
    _model(
        "gemma",
        encodes,
        (LAYERS, layer(gated("gelu_tanh"), "masked", bias=False, evidence=SQRT, **RMS)),
        (1, add(TIED, Part(rms_norms=1))),
        sizes=GROUPED,
    ),
    _model(
        "mistral",
        encodes,
        (LAYERS, layer(gated("silu"), "masked", bias=False, evidence=SQRT, **RMS)),
        (1, Part(no_bias=1, rms_norms=1)),
        sizes=GROUPED,
    ),
    _model(
        "bloom",
        encodes,
        (LAYERS, layer(mlp("gelu_tanh"), "masked", projections=2, evidence=SQRT)),
        (1, add(TIED, Part(layer_norms=2))),
        sizes=Sizes(hidden=4 * Sizes().model),
    ),
    _model(
        "electra",
        trains,
        # With dropout of the weights it is no whole layer; weights are multiplied by those of the heads, as an einsum.
        (LAYERS, layer(mlp("gelu_erf"), "masked", whole=False, evidence=(*SQRT, ("dot", 1)))),
        (1, Part(linear=1, layer_norms=1)),
    ),
    _model(
        "bart",
        translates,
        (LAYERS, layer(mlp("gelu_erf"), "masked", evidence=SQRT)),
        (LAYERS, layer(mlp("gelu_erf"), "masked", whole=False, evidence=SQRT)),
        (LAYERS, Part(**CROSS, layer_norms=1, evidence=SQRT)),
        (2, Part(layer_norms=1)),
    ),
    _model(
        "roformer",
        encodes,
        # Pairs of neighbours are turned by einsums, and weights multiplied by those of the heads.
        (LAYERS, layer(mlp("gelu_erf"), "masked", evidence=(*SQRT, ("dot", 5)))),
        (1, Part(layer_norms=1)),
    ),
)
