"""What the explorer is opened on in a browser: two transformer blocks, and a head of which one product is also returned."""

import jax

from fusionlab.models import layers, transformer


def model_step(params, x):
    blocks, head = params
    x = transformer.encoder(blocks, x, heads=2)
    with jax.named_scope("head"):
        h = x @ head["w"] + head["b"]
        return jax.nn.relu(h), h


def arguments(seq=512, embed=32):
    blocks = transformer.init(jax.random.key(0), layers=2, embed=embed, ffn=2 * embed)
    head = layers.dense_init(jax.random.key(1), embed, embed)
    return (blocks, head), transformer.inputs(jax.random.key(2), seq=seq, embed=embed)
