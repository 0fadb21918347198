"""Scanned layers as flax's linen and nnx and equinox write them: a differentiated step costs what the gradient of the fused loss costs."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

import fusionlab as fl
from tests.fusers.checks import close, jit

BATCH, LENGTH, WIDTH, HEADS, LAYERS, WORDS = 2, 64, 32, 2, 3, 64
TOKENS = jax.random.randint(jax.random.key(0), (BATCH, LENGTH + 1), 0, WORDS)


def cross_entropy(logits, tokens):
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(log_p, tokens[:, 1:, None], -1))


class LinenLayer(linen.Module):
    @linen.compact
    def __call__(self, x, mask):
        h = linen.RMSNorm(dtype=jnp.bfloat16)(x)
        attention = linen.MultiHeadDotProductAttention(HEADS, dtype=jnp.bfloat16, deterministic=True, use_bias=False)
        x += attention(h, h, mask=mask)
        h = linen.RMSNorm(dtype=jnp.bfloat16)(x)
        gate, up = (linen.Dense(4 * WIDTH, dtype=jnp.bfloat16, use_bias=False)(h) for _ in range(2))
        return x + linen.Dense(WIDTH, dtype=jnp.bfloat16)(linen.silu(gate) * up), None


class Linen(linen.Module):
    remat: bool

    @linen.compact
    def __call__(self, tokens, lengths):
        here = jnp.arange(LENGTH) < lengths[:, None]
        mask = linen.combine_masks(linen.make_causal_mask(tokens), linen.make_attention_mask(here, here))
        layer = linen.remat(LinenLayer, prevent_cse=False) if self.remat else LinenLayer
        scanned = linen.scan(
            layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS, in_axes=linen.broadcast
        )
        x, _ = scanned()(linen.Embed(WORDS, WIDTH, dtype=jnp.bfloat16)(tokens), mask)
        return linen.Dense(WORDS, dtype=jnp.bfloat16)(x)


def in_linen(remat):
    """Its padding mask is an argument's, not a constant."""
    model, lengths = Linen(remat), jnp.array([LENGTH, LENGTH // 2])
    params = model.init(jax.random.key(1), TOKENS[:, :-1], lengths)
    return lambda p, t, n: cross_entropy(model.apply(p, t[:, :-1], n), t), (params, TOKENS, lengths)


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x += self.attention(self.norm(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Nnx(nnx.Module):
    def __init__(self, remat, rngs):
        make = nnx.split_rngs(splits=LAYERS)(nnx.vmap(NnxLayer, in_axes=0, out_axes=0))
        self.layers, self.embed, self.remat = make(rngs), nnx.Embed(WORDS, WIDTH, rngs=rngs), remat

    def __call__(self, tokens):
        run = (lambda x, layer: layer(x)) if not self.remat else nnx.remat(lambda x, layer: layer(x))
        scanned = nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.embed.attend(scanned(self.embed(tokens), self.layers))


def in_nnx(remat):
    graph, state = nnx.split(Nnx(remat, nnx.Rngs(0)))
    return lambda s, t: cross_entropy(nnx.merge(graph, s)(t[:, :-1]), t), (state, TOKENS)


class EquinoxLayer(eqx.Module):
    norm: eqx.nn.RMSNorm
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.norm, (a, b) = eqx.nn.RMSNorm(WIDTH), jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=a)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=b)

    def __call__(self, x, mask):
        h = jax.vmap(self.norm)(x)
        x += self.attention(h, h, h, mask=mask)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norm)(x))


def in_equinox(remat):
    layers, rest = eqx.partition(
        eqx.filter_vmap(EquinoxLayer)(jax.random.split(jax.random.key(0), LAYERS)), eqx.is_array
    )
    embed = jax.random.normal(jax.random.key(1), (WORDS, WIDTH))

    def loss(params, tokens):
        def of_text(text):
            mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
            run = lambda x, layer: (eqx.combine(layer, rest)(x, mask), None)  # noqa: E731
            x, _ = jax.lax.scan(jax.checkpoint(run) if remat else run, params[1][text[:-1]], params[0])
            return x @ params[1].T

        return cross_entropy(jax.vmap(of_text)(tokens), tokens)

    return loss, ((layers, embed), TOKENS)


@pytest.mark.dear
@pytest.mark.parametrize("remat", [False, True], ids=["kept", "remat"])
@pytest.mark.parametrize("library", [in_linen, in_nnx, in_equinox])
def test_a_differentiated_step_costs_what_the_gradient_of_the_fused_loss_costs(library, remat):
    loss, args = library(remat)
    step = jax.value_and_grad(loss)
    fused, inside = fl.fuse(step), jax.value_and_grad(fl.fuse(loss))
    mine, theirs = (jax.jit(fn).lower(*args).compile().cost_analysis() for fn in (fused, inside))
    assert mine["flops"] <= 1.02 * theirs["flops"]
    assert mine["bytes accessed"] <= 1.02 * theirs["bytes accessed"]
    close(fused(*args), jit(step)(*args), factor=4, least=2e-2 if library is in_linen else 0)
    found = fused.findings(*args).counts()
    # With remat the backward pass has the forward a second time.
    assert (found["dot_product_attention"], found["dot_product_attention_grad"]) == (1 + remat, 1)
