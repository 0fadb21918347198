"""Plain float64 numpy: what act(X @ Y + b), attention and their gradients are. Not a test module."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

Array = np.ndarray
C = math.sqrt(2 / math.pi)


def none(h: Array) -> Array:
    return h


def relu(h: Array) -> Array:
    return np.maximum(h, 0)


def gelu_tanh(h: Array) -> Array:
    return 0.5 * h * (1 + np.tanh(C * (h + 0.044715 * h**3)))


def gelu_erf(h: Array) -> Array:
    return 0.5 * h * (1 + np.vectorize(math.erf)(h / math.sqrt(2)))


def gelu_tanh_slope(h: Array) -> Array:
    t = np.tanh(C * (h + 0.044715 * h**3))
    return 0.5 * (1 + t) + 0.5 * h * (1 - t * t) * C * (1 + 3 * 0.044715 * h**2)


def gelu_erf_slope(h: Array) -> Array:
    density = np.exp(-h * h / 2) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + np.vectorize(math.erf)(h / math.sqrt(2))) + h * density


VALUE: dict[str, Callable[[Array], Array]] = {"none": none, "relu": relu, "gelu_tanh": gelu_tanh, "gelu_erf": gelu_erf}
SLOPE: dict[str, Callable[[Array], Array]] = {
    "none": np.ones_like,
    "relu": lambda h: (h > 0).astype(h.dtype),
    "gelu_tanh": gelu_tanh_slope,
    "gelu_erf": gelu_erf_slope,
}


def uniform(*shapes: tuple[int, ...], seed: int = 0) -> list[Array]:
    """The seed's test data: uniform in [-0.5, 0.5)."""
    rng = np.random.default_rng(seed)
    return [rng.uniform(-0.5, 0.5, s) for s in shapes]


def attention(
    q: Array,
    k: Array,
    v: Array,
    ct: Array,
    *,
    scale: float | None = None,
    bias: Array | None = None,
    seen: Array | None = None,
    weights: Array | None = None,
) -> dict[str, Array]:
    """softmax(scale * q k^T + bias) * weights @ v on [B, length, heads, features], with its gradients for the cotangent `ct`.

    `bias`, `seen` (True where a row sees a key; each sees one at least) and `weights` broadcast to [B, heads, T, S]. Keys and
    values may have fewer heads, each shared by neighbouring query heads.

    Returns: "out", "dq", "dk", "dv", and "dbias" as [B, heads, T, S].
    """
    shared = q.shape[2] // k.shape[2]
    q, k, v, ct = (np.asarray(a, np.float64).swapaxes(1, 2) for a in (q, k, v, ct))
    k, v = (np.repeat(a, shared, axis=1) for a in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    s = scale * (q @ k.swapaxes(-1, -2))
    s = s if bias is None else s + np.asarray(bias, np.float64)
    s = s if seen is None else np.where(seen, s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    w = 1.0 if weights is None else np.asarray(weights, np.float64)
    dp = (ct @ v.swapaxes(-1, -2)) * w
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))

    def of_shared(a: Array) -> Array:
        return a.reshape(a.shape[0], -1, shared, *a.shape[2:]).sum(2)

    found = {"out": (p * w) @ v, "dq": scale * (ds @ k)}
    found |= {
        "dk": of_shared(scale * (ds.swapaxes(-1, -2) @ q)),
        "dv": of_shared((p * w).swapaxes(-1, -2) @ ct),
    }
    return {name: a.swapaxes(1, 2) for name, a in found.items()} | {"dbias": ds}
