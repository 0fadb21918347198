"""The truth about each model of the zoo: how many sites of each concept its program holds.

Truths are computed from a model's configuration by the formulas below, one function for each kind of configuration,
from how the model (and the library's layer) is written: no model is imported or traced, and no matcher is asked.

What is counted
---------------
A site is a place in the forward program, after calls (`jit`, `custom_jvp_call`, remat) have been inlined. So:

- layers that are unrolled count each; a function that is called twice counts twice;
- the body of a scan, of a while loop, of a branch of a cond, or of a shard_map counts once, however often and on however
  many devices it runs; each branch of a cond counts;
- a vmapped function counts once;
- the gradient of a loss adds no site, and neither does what remat computes again. The optimizer adds none but
  `lerp_moments`. The loss is a mean squared error, which has none.

*Directly* means that only layout (reshape, transpose, broadcast, squeeze), casts and identities (stop_gradient, copy,
checkpoint names) stand between two steps. Slicing, splitting, concatenating and a sum over devices are not direct.

`linear`: a product of data with a learned weight, over one axis or more, to whose result a vector that is constant along
    the data's axes is added directly, whatever follows. The weight may be transposed, may have several feature axes, and
    may share axes with the data (stacked experts, mapped models). A convolution is not a product here.
`linear_no_bias`: such a product to which no bias is added directly. Tied logits are one. So is each product of
    `x @ w + h @ u + b`, and a product that is summed over devices before its bias is added.
`relu`, `gelu_tanh`, `gelu_erf`, `silu`, `sigmoid`, `tanh`: the activation of a linear's result, with or without bias,
    applied directly; each site is of one of them only (a silu is no sigmoid). Activations of anything else (a norm, a
    slice of a fused product, a sum of two products, a convolution) are not counted.
`attention`: a product of queries and keys, a softmax over keys, and a product with the values, in any spelling, with or
    without scale and masks; the sum of the three kinds that follow. Keys are data: a router's weight is not keys.
`attention_unmasked`: no mask, no bias, no dropout. `attention_causal`: exactly the lower triangle, whatever the
    spelling. `attention_masked`: anything else: masks that are data, windows, additive biases (ALiBi, relative
    positions), dropout, weights on heads, capped scores, probabilities that are changed; alone or with a causal mask. A constant mask that
    lets everything through is no mask.
`softmax`: a softmax (not a log-softmax) that is not part of an attention.
`layer_norm`: centred on the mean over the feature axes and divided by the root of the variance over them, in any
    spelling, with or without scale and shift, epsilon inside or outside the root.
`rms_norm`: divided by the root of the mean square over the feature axes, with or without scale.
`lerp`: `a * (1 - w) + b * w` in any spelling, `w` an array or a number: gates of the model, and averages of the
    parameters that a train step keeps.
`lerp_moments`: the same, inside the optimizer: Adam's two moments of each parameter, with numbers for `w`. A search that
    knows 0.1 for 1 - 0.9 finds `lerp + lerp_moments`.

Larger structures, counted apart (`Truth.structures`), by the same rules:

`glu_pair`: two learned products of one value, one of them activated, multiplied with each other entry by entry.
`qkv_siblings`: three learned products of one value that are the queries, keys and values of one attention.
`row_parallel`: a learned product that is summed over the devices before its bias is added.
`layer`: a whole transformer layer: an attention of a value to itself between its projections, then a feed-forward part of
    two products or three, each with a residual sum of its own and with one norm, before it or behind the sum. A factor
    for each feature may stand before a sum. No dropout, no norms on both sides, no attention to anything else in it, and
    not both parts of one value. Told of models whose configuration is made of parts; a train step is not made of layers.

f32 and bf16 have the same sites. Where a bf16 program differs it has further casts (statistics and softmaxes in f32, f32
parameters that are cast where they are used), and literals rounded to bf16 (0.044715 to 0.04468).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Literal

from .config import (
    ACTIVATIONS,
    Attention,
    Composite,
    Config,
    Control,
    Gate,
    Glu,
    Mlp,
    Moe,
    Norm,
    Parallel,
    Part,
    Recurrent,
    Transformer,
)

KINDS = ("attention_unmasked", "attention_causal", "attention_masked")
CONCEPTS = (
    *("linear", "linear_no_bias", *ACTIVATIONS, "attention", *KINDS),
    *("softmax", "layer_norm", "rms_norm", "lerp", "lerp_moments"),
)
STRUCTURES = ("glu_pair", "qkv_siblings", "row_parallel", "layer")
Variant = Literal["forward", "train"]


@dataclass(frozen=True)
class Truth:
    """The truth about one program.

    Attributes:
        sites: the number of forward sites of every concept in `CONCEPTS`, zero where there is none.
        leaves: the number of arrays among the parameters.
        evidence: how many primitives of a kind (`dot`, `exp`, `tanh`, `logistic`, `erf`, `root`) the forward program has
            beyond those that its sites imply in their usual spelling; fewer where negative.
        contested: what another reading would count otherwise: the concept, and why.
        structures: the number of each of `STRUCTURES` where the configuration tells it; else no entry.
    """

    sites: Mapping[str, int]
    leaves: int
    evidence: Mapping[str, int]
    contested: Mapping[str, str] = field(default_factory=dict)
    structures: Mapping[str, int] = field(default_factory=dict)


class Tally(Counter):
    """Numbers by name: concepts, `leaves`, and evidence (`+dot`, ...); they add up, and multiply by a number."""

    def __add__(self, other: Any) -> Tally:
        return Tally({name: self[name] + other[name] for name in self.keys() | other.keys()})

    def __mul__(self, times: int) -> Tally:
        return Tally({name: times * number for name, number in self.items()})

    __rmul__ = __mul__


def total(*tallies: Tally) -> Tally:
    return reduce(Tally.__add__, tallies, Tally())


# What a spelling changes in the primitives that its concept implies: a softmax one exp, a norm one root, an attention two
# products, gelu_tanh and tanh one tanh, silu and sigmoid one logistic, gelu_erf one erf or erfc.
SPELLINGS: Mapping[str, Mapping[str, int]] = {
    "sigmoid_form": {"+tanh": -1, "+logistic": 1},
    "norm_cdf": {"+erf": 2},  # a select among erf, near zero, and erfc on either side
    "exp": {"+logistic": -1, "+exp": 1},
    "quick_gelu": {"+logistic": 1},
    "softplus": {"+exp": 1},
    "softmax_logsumexp": {"+exp": 1},
    "softmax_exp_log": {"+exp": 1},
    "softcap": {"+tanh": 1},
    "scale_in_program": {"+root": 1},
    "sqrt_in_program": {"+root": 1},  # flax divides queries by `jnp.sqrt(depth)`
    "sqrt_in_program_ones": {"+root": 1},  # the same; a constant mask of ones is combined with the causal one
    "head_weights": {"+root": 1, "+dot": 1},  # the same, and probabilities times a weight for each head
    "by_sums": {"+root": -1},  # a power of -0.5
    "unit_length": {"+root": 1},
    "over_batch": {"+root": 1},
    "uncentred": {"+root": 1},
    "jax_softplus": {"+exp": 1},
    "log_softmax": {"+exp": 1},
    "logsumexp": {"+exp": 1},
    "sigmoid_attention": {"+logistic": 1},
    "linear_recurrence": {"+exp": 1},
}


def spelled(spelling: str) -> Tally:
    return Tally(SPELLINGS.get(spelling, {}))


def product(bias: bool) -> Tally:
    """One learned product: a weight, and a bias if it has one."""
    return Tally(linear=1, leaves=2) if bias else Tally(linear_no_bias=1, leaves=1)


def activation(name: str | None, spelling: str = "") -> Tally:
    """One activation of a product's result."""
    return (Tally({name: 1}) if name in ACTIVATIONS else Tally()) + spelled(spelling)


def attention(mask: str, spelling: str = "") -> Tally:
    return Tally({"attention": 1, f"attention_{mask}": 1}) + spelled(spelling)


def norm(kind: str | None, leaves: int, spelling: str = "") -> Tally:
    return (Tally({kind: 1}) if kind else Tally()) + Tally(leaves=leaves) + spelled(spelling)


def mlp(c: Mlp) -> Tally:
    """`products` products, of which all, none or all but the last have a bias; all but the last are activated."""
    hidden, last = c.products - 1, 1
    return total(
        hidden * (product(c.biased != "none") + activation(c.activation, c.spelling)),
        last * product(c.biased == "all"),
    )


def glu(c: Glu) -> Tally:
    """Three products a block and the gate's activation; fused, two products and an activation of a slice."""
    if not c.fused:
        return c.blocks * (3 * product(c.bias) + activation(c.activation, c.spelling))
    of_slice = Tally({"+logistic": 1}) if c.activation in ("silu", "sigmoid") else Tally()
    return c.blocks * (2 * product(c.bias) + of_slice)


def attentions(c: Attention) -> Tally:
    """`blocks` attentions with `projections` products around each, and two norms where queries and keys are normed."""
    norms = 2 * norm("rms_norm", leaves=1) if c.qk_norm else Tally()
    block = total(c.projections * product(c.bias), attention(c.mask, c.spelling), norms)
    return c.blocks * block + Tally(leaves=c.extra_leaves)


def norms(c: Norm) -> Tally:
    """A product with a bias before each norm; the norm has a leaf for its scale and one for its shift."""
    return c.blocks * (product(True) + norm(c.kind, c.scale + c.shift, c.spelling))


def gates(c: Gate) -> Tally:
    """A layer has a product with tanh, one with a sigmoid, and the blend of the two."""
    return c.blocks * total(2 * product(True), activation("tanh"), activation("sigmoid"), Tally(lerp=1))


def transformer(c: Transformer) -> Tally:
    """Layers (in one place, where they are scanned), the norms outside of them, products at both ends."""
    one_norm = norm(c.norm, c.norm_leaves)
    projections = (2 if c.fused_qkv else 4) * product(c.bias)
    feed_forward = (3 if c.glu else 2) * product(c.mlp_bias) + activation(c.activation)
    encoder = total(projections, attention(c.mask, c.spelling), feed_forward, 2 * one_norm)
    crossing = total(4 * product(c.bias), attention(c.cross_mask, c.spelling), one_norm)
    decoder = total(projections, attention(c.decoder_mask, c.spelling), feed_forward, 2 * one_norm, crossing)
    heads = {
        None: Tally(),
        "biased": product(True),
        "no_bias": product(False),
        "tied": Tally(linear_no_bias=1),  # its weight is the table, counted among `tables`
        "pooler": product(True) + activation("tanh"),
    }
    places = 1 if c.places == "once" else c.layers
    repeated = (places - 1) * encoder["leaves"] if c.places == "shared" else 0
    return total(
        places * encoder,
        Tally(leaves=-repeated),
        c.decoder_layers * decoder,
        c.norms_outside * one_norm,
        c.in_products * product(True),
        heads[c.head],
        Tally(leaves=c.tables),
    )


def recurrent(c: Recurrent) -> Tally:
    """The cell's body, once. Its gates are activations of sums of two products, or of slices, so none is counted.

    A GRU blends its state with its candidate: one lerp. `split` products compute the gates side by side.
    """
    gru, lstm = Tally({"lerp": 1, "+logistic": 2, "+tanh": 1}), Tally({"+logistic": 3, "+tanh": 2})
    cells = {
        # Four gates, each a product of the input without bias plus one of the state with bias.
        "linen_lstm": lstm + 4 * product(True) + 4 * product(False),
        # Three of the input with bias; of the state, two without, and the candidate's with.
        "linen_gru": gru + 4 * product(True) + 2 * product(False),
        "nnx_gru": gru + product(True) + product(False),
        # Input and state products are added first, then one bias: neither has it directly.
        "equinox_lstm": lstm + 2 * product(False) + Tally(leaves=1),
        # The candidate's further bias is added to a slice of the state's product.
        "equinox_gru": gru + product(True) + product(False) + Tally(leaves=1),
        "haiku_lstm": lstm + product(True),
        # Three leaves; the state's weight is used in two slices. One sigmoid serves both gates.
        "haiku_gru": total(gru, 3 * Tally(linear_no_bias=1), Tally({"leaves": 3, "+logistic": -1})),
    }
    return cells[c.cell]


def moe(c: Moe) -> Tally:
    """A router, its softmax, and two products of stacked experts; then one product to combine, or two to dispatch."""
    routing = product(False) + Tally({"softmax": 1, "+dot": 2 if c.dispatch else 1})
    return total(routing, 2 * product(c.bias), activation(c.activation))


def parallel(c: Parallel) -> Tally:
    """A block's last product is summed over the devices before its bias, which is then a leaf and not the product's."""
    summed = Tally(linear_no_bias=1, leaves=2)
    feed_forward = total(product(True), activation(c.activation), summed)
    if not c.attention:
        return feed_forward
    itself = total(3 * product(True), attention("causal"), summed)
    return total(itself, feed_forward, 2 * norm("layer_norm", leaves=2))


def control(c: Control) -> Tally:
    return Tally(
        {
            "linear": c.linear,
            "linear_no_bias": c.no_bias,
            "relu": c.relu,
            "softmax": c.softmax,
            "leaves": c.leaves,
            "+dot": c.other_products,
        }
    ) + spelled(c.spelling)


def part(c: Part) -> Tally:
    """What stands in it; whose arrays its parameters are is not told, so that none is counted."""
    return total(
        Tally({"linear": c.linear, "linear_no_bias": c.no_bias, "softmax": c.softmaxes, "lerp": c.lerps}),
        *(activation(name) for name in c.activations),
        *(attention(mask) for mask in c.attentions),
        c.layer_norms * norm("layer_norm", leaves=0),
        c.rms_norms * norm("rms_norm", leaves=0),
        Tally({f"+{name}": number for name, number in c.evidence}),
    )


def composite(c: Composite) -> Tally:
    return total(*(times * tally(part) for times, part in c.parts))


FORMULAS: Mapping[type[Config], Callable[[Any], Tally]] = {
    Mlp: mlp,
    Glu: glu,
    Attention: attentions,
    Norm: norms,
    Gate: gates,
    Transformer: transformer,
    Recurrent: recurrent,
    Moe: moe,
    Parallel: parallel,
    Control: control,
    Part: part,
    Composite: composite,
}


def tally(config: Config) -> Tally:
    """Sites, leaves and evidence of the forward program."""
    return FORMULAS[type(config)](config)


def structures(config: Config) -> dict[str, int]:
    """How often larger structures stand in the forward program, for those that the configuration decides."""
    match config:
        case Composite():
            parts = [structures(part) for _, part in config.parts]
            told = [name for name in STRUCTURES if all(name in part for part in parts)]
            return {n: sum(times * structures(part)[n] for times, part in config.parts) for n in told}
        case Part():
            return {
                "glu_pair": config.gated,
                "qkv_siblings": config.siblings,
                "row_parallel": 0,
                "layer": config.layers,
            }
        case Glu():
            gated = config.blocks if config.activation in ACTIVATIONS and not config.fused else 0
            return {"glu_pair": gated, "qkv_siblings": 0, "row_parallel": 0}
        case Transformer(stacked=True):
            return {"row_parallel": 0}
        case Transformer():
            places = (1 if config.places == "once" else config.layers) + config.decoder_layers
            gated = places if config.glu and config.activation in ACTIVATIONS else 0
            return {"glu_pair": gated, "qkv_siblings": 0 if config.fused_qkv else places, "row_parallel": 0}
        case Parallel():
            attended = int(config.attention)
            return {"glu_pair": 0, "qkv_siblings": attended, "row_parallel": 1 + attended}
        case Attention():  # whether the projections are apart, and of one value, is not said
            return {"glu_pair": 0, "row_parallel": 0}
    return dict.fromkeys(("glu_pair", "qkv_siblings", "row_parallel"), 0)


SUM_OF_TWO = "the bias of `x @ w + h @ u + b` may be seen as that of one of the two products"
SLICE = "the activation of a slice of a linear's result, each slice with one of its own or with none"
BATCHED = "the weights share an axis with the data (experts, ensembles): a batched product with a bias for each"


def contested(config: Config) -> dict[str, str]:
    """What another reading of a program would count otherwise."""
    match config:
        case Composite():
            return {concept: why for _, one in config.parts for concept, why in contested(one).items()}
        case Part():
            return dict(config.contested)
        case Moe(dispatch=False):
            keys = "softmax(x @ router) times the experts' results is attention whose keys are a weight"
            return {"attention": keys, "linear": BATCHED}
        case Moe() | Transformer(stacked=True):
            return {"linear": BATCHED}
        case Parallel():
            return {"linear": "a bias added after the sum over devices may be seen as the row-parallel product's"}
        case Recurrent(cell="equinox_lstm" | "haiku_gru"):
            return {"linear": SUM_OF_TWO}
        case Recurrent(cell="haiku_lstm"):
            return dict.fromkeys(("sigmoid", "tanh"), SLICE)
        case Glu(fused=True) | Control(spelling="relu_of_slice"):
            return {config.activation if isinstance(config, Glu) else "relu": SLICE}
        case Attention(spelling="softcap"):
            return {"attention_masked": "scores are capped, not masked"}
        case Transformer(spelling="sqrt_in_program_ones"):
            return {"attention_causal": "the causal mask is combined with a constant mask of ones"}
        case Control(spelling="bias_over_rows"):
            return {"linear": "of the transposed product, the added vector is a bias"}
    return {}


def truth(config: Config, variant: Variant = "forward") -> Truth:
    """The truth about the forward program, or about the train step, of a model of this configuration."""
    numbers = tally(config)
    leaves = numbers["leaves"]
    if variant == "train":
        averages = leaves if config.ema is not None else 0
        moments = 2 * leaves if config.optimizer == "adamw" else 0
        numbers = numbers + Tally(lerp=averages, lerp_moments=moments)
    sites = {concept: numbers[concept] for concept in CONCEPTS}
    evidence = {name[1:]: number for name, number in numbers.items() if name.startswith("+") and number}
    return Truth(sites, leaves, evidence, contested(config), structures(config))
