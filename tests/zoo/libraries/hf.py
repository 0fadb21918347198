"""Flax models of Hugging Face's `transformers` 4.x, tiny and with parameters of random values.

`transformers` is imported only where a model is built; without it, or with a release that has no Flax models, `reason`
says why these models are left out. Parameters are f32; with bf16 the modules cast them where they use them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp

from ..config import GROUPED, Sizes, Transformer
from ..model import Built, Model, assemble, struct, tokens

Array = jax.Array
LONGEST = 16
Settings = Callable[[Transformer], dict[str, Any]]


def reason() -> str | None:
    """Why the models of this file cannot be built here; None if they can."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed (`pip install 'transformers<5'`)"
    version = metadata.version("transformers")
    if int(version.split(".")[0]) >= 5:
        return f"transformers {version} has no Flax models; they were in 4.x"
    return None


def bert(config: Transformer) -> dict[str, Any]:
    sizes = config.sizes
    return {
        "hidden_size": sizes.model,
        "num_attention_heads": sizes.heads,
        "intermediate_size": sizes.hidden,
        "num_hidden_layers": config.layers,
        "vocab_size": sizes.vocab,
        "max_position_embeddings": LONGEST,
        "type_vocab_size": 6,
    }


def gpt2(config: Transformer) -> dict[str, Any]:
    sizes = config.sizes
    return {
        "n_embd": sizes.model,
        "n_head": sizes.heads,
        "n_inner": sizes.hidden,
        "n_layer": config.layers,
        "vocab_size": sizes.vocab,
        "n_positions": LONGEST,
    }


def llama(config: Transformer) -> dict[str, Any]:
    shared = {name: value for name, value in bert(config).items() if name != "type_vocab_size"}
    return shared | {"num_key_value_heads": config.sizes.kv_heads, "attention_bias": False}


def vit(config: Transformer) -> dict[str, Any]:
    shared = ("hidden_size", "num_attention_heads", "intermediate_size", "num_hidden_layers")
    return {name: bert(config)[name] for name in shared} | {"image_size": 12, "patch_size": 4}


# Each model's class and configuration class in `transformers`, and the settings of the latter.
CLASSES: Mapping[str, tuple[str, str, Settings]] = {
    "bert": ("FlaxBertModel", "BertConfig", bert),
    "gpt2": ("FlaxGPT2LMHeadModel", "GPT2Config", gpt2),
    "llama": ("FlaxLlamaForCausalLM", "LlamaConfig", llama),
    "vit": ("FlaxViTModel", "ViTConfig", vit),
}


def network(name: str, config: Transformer, dtype: Any) -> tuple[Any, Any]:
    """The model of `transformers`, without parameters of its own, and the shapes of its parameters."""
    transformers = importlib.import_module("transformers")
    kind, settings_class, settings = CLASSES[name]
    net = getattr(transformers, kind)(
        getattr(transformers, settings_class)(**settings(config)), dtype=dtype, _do_init=False
    )
    shape = (config.sizes.batch, 12, 12, 3) if name == "vit" else (config.sizes.batch, config.sizes.length)
    return net, jax.eval_shape(lambda: net.init_weights(jax.random.key(0), shape))


def build(name: str, masked: bool, config: Transformer, dtype: Any) -> Built:
    """The built model; with `masked`, a mask over the keys, `int32[batch, length]`, is an input."""
    net, params = network(name, config, dtype)
    sizes = config.sizes
    inputs = [struct((sizes.batch, 3, 12, 12), dtype)] if name == "vit" else [tokens(config)]
    if masked:
        inputs.append(struct((sizes.batch, sizes.length), jnp.int32))

    def forward(params: Any, x: Array, mask: Array | None = None) -> tuple[Array, ...]:
        given = {} if mask is None else {"attention_mask": mask}
        return tuple(net(x, **given, params=params).to_tuple())

    return assemble(forward, params, inputs, config)


def _model(name: str, kind: str, masked: bool = True, **fields: Any) -> Model:
    fields.setdefault("spelling", "sqrt_in_program")
    fields.setdefault("mask", "masked")
    config = Transformer(**fields)
    return Model(name, "hf", config, partial(build, kind, masked, config))


RMS: dict[str, Any] = {"norm": "rms_norm", "norm_leaves": 1, "bias": False, "mlp_bias": False}
GPT2: dict[str, Any] = {"fused_qkv": True, "tables": 2, "head": "tied"}
MODELS: tuple[Model, ...] = (
    _model("bert", "bert", activation="gelu_erf", tables=3, head="pooler", spelling="head_weights"),
    _model("gpt2", "gpt2", **GPT2),
    _model("gpt2_unmasked", "gpt2", False, mask="causal", spelling="sqrt_in_program_ones", **GPT2),
    _model("llama", "llama", activation="silu", glu=True, tables=1, head="no_bias", sizes=GROUPED, **RMS),
    _model(
        "vit",
        "vit",
        False,
        mask="unmasked",
        activation="gelu_erf",
        tables=4,
        head="pooler",
        sizes=Sizes(batch=2, length=10),
    ),
)
