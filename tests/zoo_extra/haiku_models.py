"""AlphaFold's Evoformer, as ColabFold's package has its modules (Haiku); with bf16 its activations and parameters are bf16."""

from __future__ import annotations

from typing import Any

import jax
from zoo.config import Part, Sizes
from zoo.model import struct

from .parts import add, mlp, model

SEQUENCES, RESIDUES, PAIR = 5, 7, 24


def evoformer(sizes: Sizes, dtype: Any) -> Any:
    """One iteration as in training, but without dropout."""
    import haiku as hk
    from alphafold.model import prng
    from alphafold.model.config import model_config
    from alphafold.model.modules import EvoformerIteration

    config = model_config("model_1_ptm").model
    blocks = config.embeddings_and_evoformer.evoformer
    for name in ("msa_row_attention_with_pair_bias", "msa_column_attention"):
        blocks[name].num_head = sizes.heads
    for name in ("triangle_attention_starting_node", "triangle_attention_ending_node"):
        blocks[name].num_head = 3
    for name in ("triangle_multiplication_outgoing", "triangle_multiplication_incoming"):
        blocks[name].num_intermediate_channel = 20
        blocks[name].fuse_projection_weights = False
    blocks.outer_product_mean.num_outer_channel = 6
    config.global_config.deterministic = True

    def iterate(msa: Any, pair: Any, msa_mask: Any, pair_mask: Any) -> Any:
        block = EvoformerIteration(blocks, config.global_config, is_extra_msa=False)
        key = prng.SafeKey(jax.random.key(0))
        given = {"msa": msa, "pair": pair}, {"msa": msa_mask, "pair": pair_mask}
        return block(*given, is_training=True, safe_key=key)

    net = hk.transform(iterate)
    inputs = [
        struct((SEQUENCES, RESIDUES, sizes.model), dtype),
        struct((RESIDUES, RESIDUES, PAIR), dtype),
        struct((SEQUENCES, RESIDUES), dtype),
        struct((RESIDUES, RESIDUES), dtype),
    ]
    params = jax.eval_shape(net.init, jax.random.key(0), *inputs)

    def forward(params: Any, *given: Any) -> Any:
        result = net.apply(params, None, *given)
        return result["msa"], result["pair"]

    return forward, params, inputs


# An attention with a norm before it, q, k and v without bias, a gate and the output with bias; a bias of the pairs, but for
# the columns, is a product without bias of their norm.
ATTENTION = Part(linear=2, no_bias=3, activations=("sigmoid",), attentions=("masked",), layer_norms=1, siblings=1)
PAIR_BIAS = Part(no_bias=1)
# Norms at both ends; six products with bias and the one of the edges, which has no weight; three gates.
TRIANGLE = Part(
    linear=6,
    activations=("sigmoid",) * 3,
    layer_norms=2,
    evidence=(("dot", 1),),
    contested=(("glu_pair", "a mask stands between the product and its gate"),),
)
# A norm, two products, one of the two results with each other, one with a weight; that of the masks.
OUTER = Part(layer_norms=1, linear=3, evidence=(("dot", 2),))
MODELS = (
    model(
        "alphafold-colabfold",
        "evoformer",
        evoformer,
        (1, add(ATTENTION, PAIR_BIAS, Part(layer_norms=1))),  # rows: pairs have a norm of their own
        (1, ATTENTION),  # columns
        (2, add(ATTENTION, PAIR_BIAS)),  # triangles around the starting and the ending node
        (2, TRIANGLE),
        (2, add(mlp("relu"), Part(layer_norms=1))),  # transitions of the sequences and of the pairs
        (1, OUTER),
        sizes=Sizes(hidden=4 * Sizes().model),
    ),
)
