"""The configurations of the zoo's models: what a model is built from, and what its truth is computed from.

A configuration names the pieces of a model and how often each occurs; it holds no array and imports no library. The
sizes of all axes of one model differ from each other, so that no two axes match by having the same length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# The concept of an activation, by its name; other names are activations that belong to no concept.
ACTIVATIONS = ("relu", "gelu_tanh", "gelu_erf", "silu", "sigmoid", "tanh")
Mask = Literal["unmasked", "causal", "masked"]
Optimizer = Literal["adamw", "sgd"]
Ema = Literal["products", "difference", "traced"]


@dataclass(frozen=True)
class Sizes:
    """The lengths of the axes; `heads * head == model` and `heads == kv_heads * group` where these are used."""

    batch: int = 3
    length: int = 10
    keys: int = 14
    model: int = 32
    heads: int = 4
    head: int = 8
    hidden: int = 48
    out: int = 20
    vocab: int = 37
    kv_heads: int = 2
    experts: int = 5


# Grouped queries need a group and a number of key heads that differ from each other and from the batch.
GROUPED = Sizes(batch=5, model=48, heads=6, hidden=56, kv_heads=2)


@dataclass(frozen=True, kw_only=True)
class Config:
    """What every model has: sizes, the optimizer of its train step, and an average of its parameters if it keeps one."""

    sizes: Sizes = Sizes()
    optimizer: Optimizer = "adamw"
    ema: Ema | None = None


@dataclass(frozen=True, kw_only=True)
class Mlp(Config):
    """`products` learned products in a row, each but the last followed by `activation` (None: by nothing).

    `spelling` says how the activation is written, `biased` which products add a bias: all, none, or all but the last.
    """

    products: int = 2
    activation: str | None = "relu"
    spelling: str = ""
    biased: Literal["all", "none", "hidden"] = "all"


@dataclass(frozen=True, kw_only=True)
class Glu(Config):
    """`blocks` gated feed-forward blocks: `(activation(x @ gate) * (x @ up)) @ down`.

    With `fused`, gate and up are one product that is split: the activation then applies to a slice of its result.
    """

    blocks: int = 1
    activation: str = "silu"
    spelling: str = ""
    bias: bool = False
    fused: bool = False


@dataclass(frozen=True, kw_only=True)
class Attention(Config):
    """`blocks` attentions, each with `projections` learned products around it (4: query, key, value, output).

    `mask` is the kind of masking, `spelling` how the scores, their softmax or their scale are written, `qk_norm` whether
    queries and keys pass an RMS norm first, `extra_leaves` the number of parameters beyond those of products and norms.
    """

    blocks: int = 1
    projections: int = 4
    bias: bool = True
    mask: Mask = "unmasked"
    spelling: str = ""
    qk_norm: bool = False
    extra_leaves: int = 0


@dataclass(frozen=True, kw_only=True)
class Norm(Config):
    """A biased product followed by a norm of `kind` (None: one that is neither), `blocks` times."""

    blocks: int = 1
    kind: Literal["layer_norm", "rms_norm"] | None = "layer_norm"
    scale: bool = True
    shift: bool = True
    spelling: str = ""


@dataclass(frozen=True, kw_only=True)
class Gate(Config):
    """Highway layers: `carry * x + (1 - carry) * tanh(x @ w + b)`, `carry = sigmoid(x @ v + c)`, in some spelling."""

    blocks: int = 1
    spelling: str = "products"


@dataclass(frozen=True, kw_only=True)
class Transformer(Config):
    """Encoder layers, then decoder layers that attend to the encoder's result, if there are any.

    A decoder without an encoder (GPT) is an encoder whose mask is causal. `places` says how often one layer stands in the
    program: once for each layer (`layers`), as often but with the same parameters (`shared`), or once in all (`once`: a
    scan over the layers, or a loop of one). `stacked` says that the weights have a leading axis, that of an ensemble.
    """

    layers: int = 2
    decoder_layers: int = 0
    places: Literal["layers", "shared", "once"] = "layers"
    mask: Mask = "unmasked"
    decoder_mask: Mask = "causal"
    cross_mask: Mask = "unmasked"
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"
    norm_leaves: int = 2
    norms_outside: int = 1
    activation: str = "gelu_tanh"
    glu: bool = False
    bias: bool = True
    mlp_bias: bool = True
    fused_qkv: bool = False
    spelling: str = ""
    stacked: bool = False
    tables: int = 0
    in_products: int = 0
    head: Literal["biased", "no_bias", "tied", "pooler"] | None = None


@dataclass(frozen=True, kw_only=True)
class Recurrent(Config):
    """A recurrent cell scanned over time, by its name, without a head."""

    cell: Literal["linen_lstm", "linen_gru", "nnx_gru", "equinox_lstm", "equinox_gru", "haiku_lstm", "haiku_gru"]


@dataclass(frozen=True, kw_only=True)
class Moe(Config):
    """A router, a softmax over its logits, and experts of two products each, stacked on a leading axis.

    With `dispatch`, tokens travel to the chosen expert and back by products with a one-hot tensor.
    """

    activation: str = "relu"
    bias: bool = True
    dispatch: bool = False


@dataclass(frozen=True, kw_only=True)
class Parallel(Config):
    """Megatron blocks in shard_map: column-parallel products, and row-parallel ones that are summed over the devices."""

    devices: int = 2
    attention: bool = False
    checked: bool = True
    activation: str = "gelu_tanh"


@dataclass(frozen=True, kw_only=True)
class Control(Config):
    """A model with few concepts or none: `linear`, `no_bias` and `softmax` sites, and other products, by number."""

    linear: int = 0
    no_bias: int = 0
    relu: int = 0
    softmax: int = 0
    leaves: int = 0
    other_products: int = 0
    spelling: str = ""


@dataclass(frozen=True, kw_only=True)
class Composite(Config):
    """Several models in one program: how often each occurs, and its configuration."""

    parts: tuple[tuple[int, Config], ...]


@dataclass(frozen=True, kw_only=True)
class Part(Config):
    """A part of a model (a layer, a head), told by what stands in it once, as its library's source says.

    `linear` and `no_bias` are learned products with a bias and without, `activations` those of products' results, one name
    each, `attentions` one kind of mask each. `gated` are pairs of products, `siblings` the attentions whose queries, keys
    and values are three products of one value, `layers` whole transformer layers. `evidence` names primitives beyond those
    that the sites imply, and `contested` what another reading would count otherwise, each with its number or reason.
    """

    linear: int = 0
    no_bias: int = 0
    activations: tuple[str, ...] = ()
    attentions: tuple[Mask, ...] = ()
    layer_norms: int = 0
    rms_norms: int = 0
    softmaxes: int = 0
    lerps: int = 0
    gated: int = 0
    siblings: int = 0
    layers: int = 0
    evidence: tuple[tuple[str, int], ...] = ()
    contested: tuple[tuple[str, str], ...] = ()
