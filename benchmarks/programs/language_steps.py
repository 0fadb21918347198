"""Losses of language models in plain JAX, as users write them: one of Llama's kind, and GPT-2.

How a loss is written is a parameter, a `Written` of language_expert.py: `PLAIN` is an einsum, a mask and a softmax; `BY_HAND` is what an
expert puts in their place, cuDNN's attention through `jax.nn`. Everything else is the same in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .language_expert import BY_HAND, PLAIN, Written

__all__ = ["BY_HAND", "CASES", "GPT2", "PLAIN", "TINY", "Llama", "tokens_of"]
USUAL = 32768  # entries of the Llama-like model's vocabulary, unless its name has another number


@dataclass(frozen=True)
class Llama:
    """RMSNorm, rotary positions, grouped queries, SwiGLU; the layers in a scan, a scan with checkpoints, or unrolled."""

    form: str = "scan"  # or "checkpoint", "unrolled"
    layers: int = 4
    width: int = 2048
    heads: int = 16
    groups: int = 4
    features: int = 128
    inner: int = 5632
    vocabulary: int = USUAL
    batch: int = 4
    length: int = 2048

    @property
    def name(self) -> str:
        return f"llama {self.form}"

    @property
    def attention_flop(self) -> float:
        """Of attention's products, forward and backward, with the scores that a causal mask hides."""
        return 12 * self.batch * self.length**2 * self.layers * self.heads * self.features

    @property
    def product_flop(self) -> float:
        """Of the products alone, forward and backward; of attention's, half, since it is causal."""
        e, h, tokens = self.width, self.features, self.batch * self.length
        matrices = self.layers * (e * h * (2 * self.heads + 2 * self.groups) + 3 * e * self.inner) + e * self.vocabulary
        return 6 * tokens * matrices + self.attention_flop / 2

    def parameters(self) -> dict[str, Any]:
        e, h = self.width, self.features
        shapes = {
            "wq": (e, self.heads * h),
            "wk": (e, self.groups * h),
            "wv": (e, self.groups * h),
            "wo": (self.heads * h, e),
            "gate": (e, self.inner),
            "up": (e, self.inner),
            "down": (self.inner, e),
            "norm_1": (e,),
            "norm_2": (e,),
        }
        stacked = {name: _random(i, self.layers, *shape) for i, (name, shape) in enumerate(shapes.items())}
        layers: Any = stacked
        if self.form == "unrolled":
            layers = [{name: value[i] for name, value in stacked.items()} for i in range(self.layers)]
        ends = {"embedding": (self.vocabulary, e), "head": (e, self.vocabulary), "norm": (e,)}
        return {"layers": layers} | {name: _random(20 + i, *shape) for i, (name, shape) in enumerate(ends.items())}

    def loss(self, written: Written) -> Callable[..., Any]:
        """loss(parameters, tokens [batch, length + 1]), float32."""
        import jax
        import jax.numpy as jnp

        b, t, k, h = self.batch, self.length, self.groups, self.features
        cos, sin = _rotations(t, h)

        def rms_norm(x: Any, scale: Any) -> Any:
            wide = x.astype(jnp.float32)
            wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-5)
            return wide.astype(x.dtype) * scale

        def rotated(x: Any) -> Any:
            one, two = jnp.split(x.astype(jnp.float32), 2, axis=-1)
            turned = jnp.concatenate([one * cos - two * sin, two * cos + one * sin], axis=-1)
            return turned.astype(x.dtype)

        def attention(q: Any, key: Any, v: Any) -> Any:
            if written.attend is not None:
                return written.attend(q, key, v)
            q = q.reshape(b, t, k, self.heads // k, h)
            scores = jnp.einsum("btkgh,bskh->bkgts", q, key, preferred_element_type=jnp.float32) / math.sqrt(h)
            scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -1e30)
            return jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(scores).astype(v.dtype), v)

        def layer(x: Any, p: Any) -> Any:
            x, p = written.rows(x), written.whole(p)
            y = rms_norm(x, p["norm_1"])
            q = rotated((y @ p["wq"]).reshape(b, t, self.heads, h))
            key = rotated((y @ p["wk"]).reshape(b, t, k, h))
            v = (y @ p["wv"]).reshape(b, t, k, h)
            x = x + attention(q, key, v).reshape(b, t, -1) @ p["wo"]
            y = rms_norm(x, p["norm_2"])
            return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]

        def loss(parameters: Any, tokens: Any) -> Any:
            ends = written.whole({name: parameters[name] for name in ("embedding", "norm", "head")})
            x = written.rows(written.looked_up(ends["embedding"], tokens[:, :-1]))
            body = written.remade(layer, jax.checkpoint(layer) if self.form == "checkpoint" else layer)
            if self.form == "unrolled":
                for p in parameters["layers"]:
                    x = body(x, p)
            else:
                x, _ = jax.lax.scan(lambda x, p: (body(x, p), None), x, parameters["layers"])
            x = rms_norm(written.rows(x), ends["norm"])
            if written.loss is not None:
                return written.loss(x, ends["head"], tokens[:, 1:])
            return _cross_entropy(x @ ends["head"], tokens[:, 1:])

        return loss


@dataclass(frozen=True)
class GPT2:
    """LayerNorm, learned positions, GELU, biases, a tied head; unrolled."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257
    batch: int = 8
    length: int = 1024

    @property
    def name(self) -> str:
        return "gpt2"

    @property
    def attention_flop(self) -> float:
        """As the other model's."""
        return 12 * self.batch * self.length**2 * self.layers * self.width

    @property
    def product_flop(self) -> float:
        matrices = self.layers * 12 * self.width**2 + self.width * self.vocabulary
        return 6 * self.batch * self.length * matrices + self.attention_flop / 2

    def parameters(self) -> dict[str, Any]:
        e = self.width
        shapes = {
            "qkv": (e, 3 * e),
            "qkv_bias": (3 * e,),
            "out": (e, e),
            "out_bias": (e,),
            "up": (e, 4 * e),
            "up_bias": (4 * e,),
            "down": (4 * e, e),
            "down_bias": (e,),
            "scale_1": (e,),
            "bias_1": (e,),
            "scale_2": (e,),
            "bias_2": (e,),
        }
        layers = [
            {name: _random(100 * i + j, *shape) for j, (name, shape) in enumerate(shapes.items())}
            for i in range(self.layers)
        ]
        ends = {"tokens": (self.vocabulary, e), "positions": (self.length, e), "scale": (e,), "bias": (e,)}
        return {"layers": layers} | {name: _random(5000 + i, *shape) for i, (name, shape) in enumerate(ends.items())}

    def loss(self, written: Written) -> Callable[..., Any]:
        """loss(parameters, tokens [batch, length + 1]), float32."""
        import jax
        import jax.numpy as jnp

        b, t, h = self.batch, self.length, self.width // self.heads

        def layer_norm(x: Any, scale: Any, bias: Any) -> Any:
            wide = x.astype(jnp.float32)
            mean = jnp.mean(wide, -1, keepdims=True)
            variance = jnp.mean(jnp.square(wide - mean), -1, keepdims=True)
            return ((wide - mean) * jax.lax.rsqrt(variance + 1e-5)).astype(x.dtype) * scale + bias

        def attention(q: Any, key: Any, v: Any) -> Any:
            if written.attend is not None:
                return written.attend(q, key, v)
            scores = jnp.einsum("bthd,bshd->bhts", q, key, preferred_element_type=jnp.float32) / math.sqrt(h)
            scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -1e30)
            return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores).astype(v.dtype), v)

        def layer(x: Any, p: Any) -> Any:
            y = layer_norm(x, p["scale_1"], p["bias_1"])
            q, key, v = jnp.split(y @ p["qkv"] + p["qkv_bias"], 3, axis=-1)
            q, key, v = (a.reshape(b, t, self.heads, h) for a in (q, key, v))
            x = x + attention(q, key, v).reshape(b, t, -1) @ p["out"] + p["out_bias"]
            y = layer_norm(x, p["scale_2"], p["bias_2"])
            return x + jax.nn.gelu(y @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]

        def loss(parameters: Any, tokens: Any) -> Any:
            x = parameters["tokens"][tokens[:, :-1]] + parameters["positions"]
            body = written.remade(layer, layer)
            for p in parameters["layers"]:
                x = body(x, p)
            x = layer_norm(x, parameters["scale"], parameters["bias"])
            if written.loss is not None:
                return written.loss(x, parameters["tokens"].T, tokens[:, 1:])
            return _cross_entropy(x @ parameters["tokens"].T, tokens[:, 1:])

        return loss


CASES = (Llama("scan"), Llama("checkpoint"), Llama("unrolled"), GPT2())
TINY = (
    *(replace(c, layers=2, width=32, heads=4, groups=2, features=8, inner=64, vocabulary=64, batch=2, length=32) for c in CASES[:3]),
    GPT2(layers=2, width=32, heads=4, vocabulary=64, batch=2, length=32),
)  # fmt: skip


def tokens_of(case: Llama | GPT2) -> Any:
    import jax

    return jax.random.randint(jax.random.key(9), (case.batch, case.length + 1), 0, case.vocabulary)


def _random(seed: int, *shape: int) -> Any:
    import jax
    import jax.numpy as jnp

    if len(shape) == 1 or min(shape[-2:]) == shape[0] == 1:
        return jnp.ones(shape, jnp.bfloat16)
    return (jax.random.normal(jax.random.key(seed), shape) * 0.02).astype(jnp.bfloat16)


def _rotations(length: int, features: int) -> tuple[Any, Any]:
    import numpy as np

    angles = np.arange(length)[:, None] / 10000 ** (np.arange(features // 2) / (features // 2))
    return np.cos(angles)[:, None].astype("float32"), np.sin(angles)[:, None].astype("float32")


def _cross_entropy(logits: Any, labels: Any) -> Any:
    import jax
    import jax.numpy as jnp

    logp = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logp, labels[..., None], axis=-1))
