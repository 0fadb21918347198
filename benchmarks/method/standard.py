"""The programs of which a card's table is made: layers, products, blends, norms, attention and heads of usual sizes, as shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from ..ops import gemm_epilogue, lerp, matmul_schedule

ROWS = 8192
HEADS = (  # of attention: batch, queries, keys, heads, heads of the keys, features, causal
    (8, 1024, 1024, 12, 12, 64, True),
    (4, 2048, 2048, 32, 8, 128, True),
    (64, 196, 196, 12, 12, 64, False),
    (8, 1, 4096, 32, 8, 128, False),
)
NORMS = (768, 1024, 2048, 4096)  # features
IMAGES = ((8, 64, 64, 320), (8, 32, 32, 640))
VOCABULARY = (768, 50257)
EXPERTS = (8, 1024, 4096)  # their number, features in and out

Program = tuple[str, Callable[..., Any], tuple[Any, ...]]  # name, function, shapes of the arguments


def programs(quick: bool = False, half: str = "bfloat16") -> list[Program]:
    """All of them; `quick`: a small layer and a small blend. `half`: the dtype of 16 bits of most, float16 for cards without the other."""
    found = _quick() if quick else _all()
    return found if half == "bfloat16" else [(name, fn, _in_half(shapes, half)) for name, fn, shapes in found]


def half_of(device: Any) -> str:
    """The dtype of 16 bits in which programs for a CUDA device are written: products of bfloat16 came with sm_80."""
    return "bfloat16" if device.capability >= 80 else "float16"


def _in_half(shapes: tuple[Any, ...], half: str) -> tuple[Any, ...]:
    import jax

    return tuple(jax.ShapeDtypeStruct(s.shape, half) if s.dtype == "bfloat16" else s for s in shapes)


def _quick() -> list[Program]:
    layer = functools.partial(_layer, "relu")
    return [
        ("layer", layer, _shapes("bfloat16", (64, 32), (32, 128), (128,))),
        ("blend", _blend, _shapes("float32", (8, 16), (8, 16), (1,))),
    ]


def _all() -> list[Program]:
    return [*_layers(), *_products(), *_blends(), *_norms(), *_attention(), *_others()]


def together(given: list[Program]) -> tuple[Callable[..., list[Any]], list[tuple[Any, ...]]]:
    """The programs as one, and its argument."""

    def every(arguments: list[tuple[Any, ...]]) -> list[Any]:
        return [fn(*args) for (_, fn, _), args in zip(given, arguments, strict=True)]

    return every, [shapes for *_, shapes in given]


def by_precision(given: list[Program]) -> dict[bool, list[Program]]:
    """The programs without float64, and those with it, for which JAX needs `enable_x64`; neither where there are none."""
    parts: dict[bool, list[Program]] = {}
    for one in given:
        parts.setdefault(any(shape.dtype == "float64" for shape in one[2]), []).append(one)
    return parts


def _shapes(dtype: str, *shapes: tuple[int, ...]) -> tuple[Any, ...]:
    import jax

    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)


def _layer(name: str, x: Any, w: Any, b: Any) -> Any:
    from fusionlab.models.layers import activation_named

    return activation_named(name)(x @ w + b)


def _layers() -> Iterator[Program]:
    for m, k, n in gemm_epilogue.TABLE:
        for name in (*gemm_epilogue.ACTIVATIONS, "silu"):
            fn = functools.partial(_layer, name)
            yield f"{name} {m}x{k}x{n}", fn, _shapes("bfloat16", (m, k), (k, n), (n,))


def _products() -> Iterator[Program]:
    import jax
    import jax.numpy as jnp

    for case in matmul_schedule.cases(1024, 16):
        yield case.name, case.fn, _shapes(case.dtype, *case.shapes)

    def wide(x: Any, w: Any, b: Any, alpha: float = 1.0) -> Any:
        product = jnp.matmul(x, w, preferred_element_type=jnp.float32)
        return (product if alpha == 1.0 else alpha * product) + b

    operands = (*_shapes("bfloat16", (4096, 1024), (1024, 4096)), *_shapes("float32", (4096,)))
    yield "to f32, f32 bias", wide, operands
    yield "to f32, f32 bias, relu", lambda x, w, b: jax.nn.relu(wide(x, w, b)), operands
    yield "to f32, alpha, f32 bias, relu", lambda x, w, b: jax.nn.relu(wide(x, w, b, 0.3)), operands


def _blend(x: Any, y: Any, w: Any) -> Any:
    import jax

    return x + jax.lax.stop_gradient(w) * (y - x)  # some programs learn the weight, some do not: both are measured


def _blends() -> Iterator[Program]:
    for case in lerp.CASES:
        yield case.name, _blend, _shapes(case.dtype, case.x, case.y, case.w)


def _norms() -> Iterator[Program]:
    from fusionlab import ops

    for features in NORMS:
        rows, one = _shapes("bfloat16", (ROWS, features), (features,))
        yield f"LayerNorm {features}", ops.layer_norm, (rows, one, one)
        yield f"RMSNorm {features}", functools.partial(ops.layer_norm, kind="rms"), (rows, one)
        yield f"RMSNorm of a sum {features}", _normed_sum, (rows, one, rows)
    for shape in IMAGES:
        image, one = _shapes("bfloat16", shape, shape[-1:])
        silu = functools.partial(ops.group_norm, activation="silu")
        yield f"GroupNorm {'x'.join(map(str, shape))}", silu, (image, one, one)


def _normed_sum(x: Any, scale: Any, residual: Any) -> Any:
    from fusionlab import ops

    return ops.layer_norm(x, scale, residual=residual, kind="rms")


def _attention() -> Iterator[Program]:
    from fusionlab import ops

    for batch, queries, keys, heads, key_heads, features, causal in HEADS:
        shapes = ((batch, queries, heads, features), *[(batch, keys, key_heads, features)] * 2)
        fn = functools.partial(ops.dot_product_attention, is_causal=causal)
        yield f"attention {queries}x{keys}, {heads} heads of {features}", fn, _shapes("bfloat16", *shapes)


def _others() -> Iterator[Program]:
    from fusionlab import ops

    (labels,), (x, w) = _shapes("int32", (ROWS,)), _shapes("bfloat16", (ROWS, VOCABULARY[0]), VOCABULARY)
    yield "head of a language model", ops.linear_cross_entropy, (x, w, labels)
    groups, inner, columns = EXPERTS
    (sizes,), operands = _shapes("int32", (groups,)), _shapes("bfloat16", (ROWS, inner), (groups, inner, columns))
    yield "experts", ops.grouped_matmul, (*operands, sizes)
