"""Feed-forward models written by hand: activations and products in their many spellings."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..config import Glu, Mlp, Sizes
from ..model import Built, Model, Shape, activations, assemble, structs

Array = jax.Array
ROOT = math.sqrt(2.0 / math.pi)


def normal_cdf(h: Array) -> Array:
    """The normal distribution's function; it takes no bf16, hence the casts, which do nothing in f32."""
    return jax.scipy.stats.norm.cdf(h.astype(jnp.float32)).astype(h.dtype)


# How an activation may be written: (concept, spelling) to function. What is not a concept stands here as a control.
ACTIVATIONS: dict[tuple[str | None, str], Callable[[Array], Array]] = {
    ("gelu_tanh", "cube"): lambda h: 0.5 * h * (1 + jnp.tanh(ROOT * (h + 0.044715 * h**3))),
    ("gelu_tanh", "product"): lambda h: 0.5 * h * (1 + jnp.tanh(ROOT * (h + 0.044715 * (h * h * h)))),
    ("gelu_tanh", "factored"): lambda h: h * 0.5 * (1 + jnp.tanh(h * ROOT * (1 + 0.044715 * h * h))),
    ("gelu_tanh", "power"): lambda h: 0.5 * h * (1 + jnp.tanh(ROOT * (h + 0.044715 * jnp.power(h, 3.0)))),
    ("gelu_tanh", "sigmoid_form"): lambda h: h * jax.nn.sigmoid(2 * ROOT * (h + 0.044715 * h * h * h)),
    ("gelu_erf", "erf"): lambda h: h * 0.5 * (1 + lax.erf(h / math.sqrt(2.0))),
    ("gelu_erf", "erfc"): lambda h: 0.5 * h * lax.erfc(-h * math.sqrt(0.5)),
    ("gelu_erf", "norm_cdf"): lambda h: h * normal_cdf(h),
    ("relu", "maximum"): lambda h: jnp.maximum(h, 0),
    ("relu", "maximum_swapped"): lambda h: jnp.maximum(0.0, h),
    ("relu", "where"): lambda h: jnp.where(h > 0, h, 0),
    ("relu", "where_flipped"): lambda h: jnp.where(h <= 0, 0.0, h),
    ("relu", "times_positive"): lambda h: h * (h > 0),
    ("relu", "clip"): lambda h: jnp.clip(h, 0),
    ("relu", "absolute"): lambda h: 0.5 * (h + jnp.abs(h)),
    ("silu", "times_sigmoid"): lambda h: h * jax.nn.sigmoid(h),
    ("silu", "exp"): lambda h: h / (1 + jnp.exp(-h)),
    ("sigmoid", "exp"): lambda h: 1 / (1 + jnp.exp(-h)),
    ("tanh", "plain"): jnp.tanh,
    (None, "quick_gelu"): lambda h: h * jax.nn.sigmoid(1.6 * h),  # of another number than CLIP has
    (None, "leaky_relu"): lambda h: jnp.where(h > 0, h, 0.1 * h),
    (None, "threshold"): lambda h: jnp.maximum(h, 0.1),
    (None, "square"): jnp.square,
    (None, "softplus"): lambda h: jnp.log1p(jnp.exp(h)),
}


def matmul(x: Array, w: Array) -> Array:
    return x @ w


def with_bias(product: Callable[[Array, Array], Array]) -> Callable[[Array, Array, Array | None], Array]:
    return lambda x, w, b: product(x, w) if b is None else product(x, w) + b


def reshaped(x: Array, w: Array, b: Array | None) -> Array:
    """The product on merged rows, the bias after the rows have been split again."""
    y = (x.reshape(-1, x.shape[-1]) @ w).reshape(*x.shape[:-1], w.shape[-1])
    return y if b is None else y + b


def broadcast_bias(x: Array, w: Array, b: Array | None) -> Array:
    y = jnp.tensordot(x, w, axes=1)
    return y if b is None else jnp.broadcast_to(b, y.shape) + y


def per_row(x: Array, w: Array, b: Array | None) -> Array:
    """One vector at a time, mapped over the rows and the batch."""
    one = lambda row: w.T @ row if b is None else w.T @ row + b  # noqa: E731
    return jax.vmap(jax.vmap(one))(x)


# How a product with its bias may be written; `w` is `[in, out]`, but for "transposed", which stores it as `[out, in]`.
PRODUCTS: dict[str, Callable[[Array, Array, Array | None], Array]] = {
    "matmul": with_bias(matmul),
    "transposed": with_bias(lambda x, w: x @ w.T),
    "einsum": with_bias(partial(jnp.einsum, "btd,df->btf")),
    "einsum_swapped": with_bias(lambda x, w: jnp.einsum("df,btd->btf", w, x)),
    "reshaped": reshaped,
    "broadcast_bias": broadcast_bias,
    "per_row": per_row,
    "preferred_f32": with_bias(
        lambda x, w: lax.dot_general(x, w, (((2,), (0,)), ((), ())), preferred_element_type=jnp.float32).astype(x.dtype)
    ),
}


def widths(config: Mlp) -> list[int]:
    """The widths of an MLP: from `model` by way of hidden widths, all different, to `out`."""
    hidden = [config.sizes.hidden + 8 * index for index in range(config.products - 1)]
    return [config.sizes.model, *hidden, config.sizes.out]


def has_bias(config: Mlp, index: int) -> bool:
    return config.biased == "all" or (config.biased == "hidden" and index < config.products - 1)


def build_mlp(activation: Callable[[Array], Array] | None, product: str, config: Mlp, dtype: Any) -> Built:
    shapes: dict[str, Shape] = {}
    for index, (rows, columns) in enumerate(pairwise(widths(config))):
        shapes[f"w{index}"] = (columns, rows) if product == "transposed" else (rows, columns)
        if has_bias(config, index):
            shapes[f"b{index}"] = (columns,)

    def forward(params: dict[str, Array], x: Array) -> Array:
        for index in range(config.products):
            x = PRODUCTS[product](x, params[f"w{index}"], params.get(f"b{index}"))
            if activation is not None and index < config.products - 1:
                x = activation(x).astype(dtype)
        return x

    return assemble(forward, structs(shapes, dtype), [activations(config, dtype)], config)


def build_glu(activation: Callable[[Array], Array], config: Glu, dtype: Any) -> Built:
    """Gated blocks with a residual around each."""
    sizes = config.sizes
    shapes: dict[str, Shape] = {}
    inner = {"both": 2 * sizes.hidden} if config.fused else {"gate": sizes.hidden, "up": sizes.hidden}
    for block in range(config.blocks):
        shapes |= {f"{name}{block}": (sizes.model, width) for name, width in inner.items()}
        shapes[f"down{block}"] = (sizes.hidden, sizes.model)
        if config.bias:
            shapes |= {f"{name}{block}_bias": (width,) for name, width in inner.items()}
            shapes[f"down{block}_bias"] = (sizes.model,)

    def forward(params: dict[str, Array], x: Array) -> Array:
        def product(name: str, value: Array) -> Array:
            result = value @ params[name]
            return result + params[f"{name}_bias"] if config.bias else result

        for block in range(config.blocks):
            if config.fused:
                gate, up = jnp.split(product(f"both{block}", x), 2, axis=-1)
            else:
                gate, up = product(f"gate{block}", x), product(f"up{block}", x)
            x = x + product(f"down{block}", activation(gate) * up)
        return x

    return assemble(forward, structs(shapes, dtype), [activations(config, dtype)], config)


def _mlp(name: str, function: Callable[[Array], Array] | None, product: str = "matmul", **fields: Any) -> Model:
    config = Mlp(**fields)
    return Model(name, "handwritten", config, partial(build_mlp, function, product, config))


def _glu(name: str, function: Callable[[Array], Array], **fields: Any) -> Model:
    config = Glu(**fields)
    return Model(name, "handwritten", config, partial(build_glu, function, config))


def _heads(dtype: Any) -> Built:
    """Products into heads and out of them: weights `[model, heads, head]` and `[heads, head, out]`."""
    config = HEADS
    sizes = config.sizes
    shapes = {
        "w0": (sizes.model, sizes.heads, sizes.head),
        "b0": (sizes.heads, sizes.head),
        "w1": (sizes.heads, sizes.head, sizes.out),
        "b1": (sizes.out,),
    }

    def forward(params: dict[str, Array], x: Array) -> Array:
        h = jnp.maximum(jnp.einsum("btd,dhk->bthk", x, params["w0"]) + params["b0"], 0)
        return jnp.einsum("bthk,hko->bto", h, params["w1"]) + params["b1"]

    return assemble(forward, structs(shapes, dtype), [activations(config, dtype)], config)


HEADS = Mlp(products=2, activation="relu", spelling="maximum")
MODELS: tuple[Model, ...] = (
    *(
        _mlp(f"mlp_{concept or 'other'}_{spelling}", function, activation=concept, spelling=spelling)
        for (concept, spelling), function in ACTIVATIONS.items()
    ),
    *(
        _mlp(f"product_{product}", ACTIVATIONS["relu", "maximum"], product, products=3, spelling="maximum")
        for product in PRODUCTS
    ),
    _mlp("mlp_none", None, activation=None),
    _mlp("mlp_no_bias", jax.nn.gelu, activation="gelu_tanh", biased="none", products=3, optimizer="sgd"),
    _mlp("mlp_hidden_bias", jax.nn.relu, activation="relu", biased="hidden", products=3, optimizer="sgd"),
    Model("product_heads", "handwritten", HEADS, _heads),
    _glu("swiglu", jax.nn.silu, blocks=2),
    _glu("swiglu_by_hand", lambda h: h * (1 / (1 + jnp.exp(-h))), activation="silu", spelling="exp"),
    _glu("geglu", partial(jax.nn.gelu, approximate=True), activation="gelu_tanh", bias=True),
    _glu("geglu_erf", partial(jax.nn.gelu, approximate=False), activation="gelu_erf"),
    _glu("reglu", jax.nn.relu, activation="relu", sizes=Sizes(length=12)),
    _glu("swiglu_fused", jax.nn.silu, fused=True, bias=True),
    _glu("gated_linear_unit", jax.nn.sigmoid, activation="sigmoid", bias=True),
)
