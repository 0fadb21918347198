"""The encoder's training step in torch: eager and by torch.compile. See attention.py for the same model in flax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..measuring import torch_device, torch_samples


def step_of(size: Any, compiled: bool, rate: float = 0.0) -> Callable[[], Any]:
    """One step (loss, gradients, SGD) of post-LN layers of torch's own: `nn.TransformerEncoderLayer`, relu, in bfloat16; dropout of
    attention's weights and after both halves of a layer, not within the second."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    make: dict[str, Any] = {"device": torch_device(), "dtype": torch.bfloat16}
    layers = [
        nn.TransformerEncoderLayer(size.hidden, size.heads, size.ffn, dropout=rate, batch_first=True, **make)
        for _ in range(size.layers)
    ]
    for layer in layers:
        layer.dropout = nn.Identity()
    model = nn.Sequential(*layers).train()
    x, y = (torch.randn(size.batch, size.length, size.hidden, **make) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(x: Any, y: Any) -> Any:
        return torch.mean(torch.square((model(x) - y).float()))

    forward = torch.compile(loss) if compiled else loss

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        value = forward(x, y)
        value.backward()
        optimizer.step()
        return value

    return step


def samples_of(size: Any, samples: int, rate: float = 0.0) -> dict[str, list[float]]:
    """Device seconds of a step: "torch" and "torch.compile"."""
    return {
        name: torch_samples(step_of(size, compiled, rate), samples)
        for name, compiled in (("torch", False), ("torch.compile", True))
    }
