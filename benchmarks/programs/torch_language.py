"""The models of language_steps.py in torch: loss and gradients by torch.compile, with torch's own attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..measuring import torch_device
from .language_steps import GPT2, Llama, _rotations


def step_of(case: Llama | GPT2, parameters: Any, tokens: Any) -> Callable[[], Any]:
    """A compiled step, loss and all gradients, on copies of JAX's arrays."""
    import jax
    import numpy as np
    import torch

    def moved(x: Any) -> Any:
        made = torch.from_numpy(np.asarray(x.astype("float32"))).to(torch_device(), torch.bfloat16)
        return made.requires_grad_()

    leaves, treedef = jax.tree.flatten(parameters)
    leaves = [moved(x) for x in leaves]
    ids = torch.from_numpy(np.asarray(tokens)).long().to(torch_device())
    loss = torch.compile(_llama(case) if isinstance(case, Llama) else _gpt2(case))

    def step() -> Any:
        value = loss(jax.tree.unflatten(treedef, leaves), ids)
        return value, torch.autograd.grad(value, leaves)

    return step


def _llama(case: Llama) -> Callable[..., Any]:
    import torch
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint

    b, t, h = case.batch, case.length, case.features
    cos, sin = (torch.from_numpy(a).to(torch_device()) for a in _rotations(t, h))

    def rms_norm(x: Any, scale: Any) -> Any:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * scale

    def rotated(x: Any) -> Any:
        one, two = x.float().chunk(2, dim=-1)
        return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1).to(x.dtype)

    def layer(x: Any, p: Any) -> Any:
        y = rms_norm(x, p["norm_1"])
        q = rotated((y @ p["wq"]).view(b, t, case.heads, h))
        k = rotated((y @ p["wk"]).view(b, t, case.groups, h))
        v = (y @ p["wv"]).view(b, t, case.groups, h)
        q, k, v = (a.transpose(1, 2) for a in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + out.transpose(1, 2).reshape(b, t, -1) @ p["wo"]
        y = rms_norm(x, p["norm_2"])
        return x + (functional.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]

    def loss(parameters: Any, ids: Any) -> Any:
        x = functional.embedding(ids[:, :-1], parameters["embedding"])
        layers = parameters["layers"]
        if case.form != "unrolled":
            layers = [{name: value[i] for name, value in layers.items()} for i in range(case.layers)]
        for p in layers:
            x = checkpoint(layer, x, p, use_reentrant=False) if case.form == "checkpoint" else layer(x, p)
        logits = rms_norm(x, parameters["norm"]) @ parameters["head"]
        return functional.cross_entropy(logits.float().view(-1, case.vocabulary), ids[:, 1:].reshape(-1))

    return loss


def _gpt2(case: GPT2) -> Callable[..., Any]:
    from torch.nn import functional

    b, t, e = case.batch, case.length, case.width

    def layer(x: Any, p: Any) -> Any:
        y = functional.layer_norm(x, (e,), p["scale_1"], p["bias_1"])
        q, k, v = (y @ p["qkv"] + p["qkv_bias"]).split(e, dim=-1)
        q, k, v = (a.view(b, t, case.heads, -1).transpose(1, 2) for a in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + out.transpose(1, 2).reshape(b, t, e) @ p["out"] + p["out_bias"]
        y = functional.layer_norm(x, (e,), p["scale_2"], p["bias_2"])
        return x + functional.gelu(y @ p["up"] + p["up_bias"], approximate="tanh") @ p["down"] + p["down_bias"]

    def loss(parameters: Any, ids: Any) -> Any:
        x = functional.embedding(ids[:, :-1], parameters["tokens"]) + parameters["positions"]
        for p in parameters["layers"]:
            x = layer(x, p)
        x = functional.layer_norm(x, (e,), parameters["scale"], parameters["bias"])
        logits = x @ parameters["tokens"].T
        return functional.cross_entropy(logits.float().view(-1, case.vocabulary), ids[:, 1:].reshape(-1))

    return loss
