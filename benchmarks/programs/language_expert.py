"""What an expert writes in plain JAX within an hour: attention of a library, a policy of what is kept, a loss in chunks of rows."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _same(tree: Any) -> Any:
    return tree


def _looked_up(table: Any, tokens: Any) -> Any:
    return table[tokens]


@dataclass(frozen=True)
class Written:
    """How a language model's loss is written, as far as that is a choice.

    Attributes:
      attend: causal attention of q [batch, length, heads, features] and k, v [batch, length, groups, features]; None: as a user writes it.
      loss: the mean cross-entropy of x [batch, length, E], w [E, V] and labels [batch, length]; None: as a user writes it.
      keeps_products: layers keep the results of products with weights for the backward pass, and make all else again.
      whole: of several devices: (weights about to be used) -> the same, where each device has all of them.
      rows: of several devices: (activations) -> the same, where each device has some of the texts.
      looked_up: (the embedding's table, tokens) -> the rows of the tokens.
    """

    attend: Callable[..., Any] | None = None
    loss: Callable[..., Any] | None = None
    keeps_products: bool = False
    whole: Callable[[Any], Any] = _same
    rows: Callable[[Any], Any] = _same
    looked_up: Callable[[Any, Any], Any] = _looked_up

    def remade(self, layer: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
        """The layer with the policy, or `otherwise` without one."""
        import jax

        if not self.keeps_products:
            return otherwise
        return jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)


def through_jax_nn(q: Any, k: Any, v: Any) -> Any:
    """cuDNN's causal attention, XLA's away from a GPU."""
    import jax

    on_cuda = jax.default_backend() == "gpu"
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn" if on_cuda else "xla")


def through_tokamax(q: Any, k: Any, v: Any) -> Any:
    """Causal attention as tokamax chooses it. It reads absl's flags from the command line, which is not written for it."""
    import tokamax  # pyright: ignore[reportMissingImports]
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS(sys.argv[:1])
    return tokamax.dot_product_attention(q, k, v, is_causal=True)


def chunked_loss(rows: int, x: Any, w: Any, labels: Any) -> Any:
    """The loss with the logits of at most `rows` rows at a time, whose gradients are made in the forward pass.

    The logits have the dtype of x, and the gradient of w is added up in float32. A number of rows that the chunks do not divide is split
    into chunks of fewer.
    """
    import jax
    import jax.numpy as jnp

    count = labels.size
    number = next(n for n in range(-(-count // rows), count + 1) if count % n == 0)
    labels = labels.reshape(number, -1)

    def chunk(x: Any, w: Any, labels: Any) -> tuple[Any, Any]:
        """The sum of the losses of a chunk, and the gradient of its logits."""
        logits = (x @ w).astype(jnp.float32)
        lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)
        hot = jax.nn.one_hot(labels, logits.shape[-1], dtype=jnp.float32)
        return jnp.sum(lse - picked), ((jnp.exp(logits - lse) - hot) / count).astype(x.dtype)

    @jax.custom_vjp
    def loss(x: Any, w: Any) -> Any:
        return jnp.sum(jax.lax.map(lambda part: chunk(part[0], w, part[1])[0], (x, labels))) / count

    def forward(x: Any, w: Any) -> Any:
        def step(dw: Any, part: Any) -> Any:
            total, of_logits = chunk(part[0], w, part[1])
            dw = dw + jnp.matmul(part[0].T, of_logits, preferred_element_type=jnp.float32)
            return dw, (total, of_logits @ w.T)

        dw, (totals, dx) = jax.lax.scan(step, jnp.zeros(w.shape, jnp.float32), (x, labels))
        return jnp.sum(totals) / count, (dx, dw)

    def backward(gradients: Any, ct: Any) -> Any:
        dx, dw = gradients
        return (dx * ct).astype(x.dtype), (dw * ct).astype(w.dtype)

    loss.defvjp(forward, backward)
    return loss(x.reshape(number, -1, x.shape[-1]), w)


PLAIN, BY_HAND = Written(), Written(through_jax_nn)
TOKAMAX = "expert, tokamax and chunked loss"


def experts(vocabulary: int) -> dict[str, Written]:
    """What an expert tries beyond `BY_HAND`, by name; with tokamax where it is installed.

    A chunk has 4096 rows, and 2048 of a vocabulary of more than 65536.
    """
    chunked = functools.partial(chunked_loss, 4096 if vocabulary <= 1 << 16 else 2048)
    tried = {
        "expert, chunked loss": Written(through_jax_nn, chunked),
        "expert, policy": Written(through_jax_nn, keeps_products=True),
        "expert, policy and chunked loss": Written(through_jax_nn, chunked, keeps_products=True),
    }
    if importlib.util.find_spec("tokamax") is not None:
        tried[TOKAMAX] = Written(through_tokamax, chunked)
    return tried
