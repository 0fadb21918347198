"""Larger structures by example, written in the fused ops and matched in a view in which small sites are folded.

An example names only the operands of a fused op that it needs; a further bias or mask in the program does not prevent a match. An
activation of relu stands for any activation, a layer norm for any norm, an attention for a causal one as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from ...graph.matching.pattern import Example
from ...kernels.ops.dot_product_attention import dot_product_attention
from ...kernels.ops.gated_matmul import gated_matmul
from ...kernels.ops.gemm_epilogue import gemm_epilogue
from ...kernels.ops.gemm_epilogue.activations import ACTIVATIONS
from ...kernels.ops.layer_norm import layer_norm
from ..engine.grouping import Form

ANY_OF = {
    ("activation", "relu"): frozenset(ACTIVATIONS) - {"none"},
    ("kind", "layer"): frozenset({"layer", "rms"}),
    ("is_causal", False): frozenset({False, True}),
}
GATED = "act(x @ w) * (x @ v): two products of one value, multiplied"
PACKED = "act(h1) * h2 of h = x @ w: two parts of one product, multiplied; their weights are packed into one"
_HEADS = 2  # of an example; a pattern knows no sizes


def _example(name: str, fn: Callable[..., Any], leaves: dict[str, str], scalars: tuple[str, ...] = ()) -> Example:
    return Example(name, fn, leaves, scalars, bare=True, any_of=ANY_OF, loose=True, concrete=True)


def _product(x: Any, w: Any) -> Any:
    return x @ w


# How a product may stand: with a bias, folded; bare; bare, and of a weight that has the heads as an axis.
_LINEAR: dict[str, Callable[[Any, Any], Any]] = {"biased": gemm_epilogue, "bare": _product}


def _residual_norm(x: Any, y: Any, epsilon: Any) -> Any:
    return layer_norm(x + y, epsilon=epsilon)


def _pairs() -> Iterator[Form]:
    for name, linear in _LINEAR.items():

        def gated(x: Any, w: Any, v: Any, linear: Any = linear) -> Any:
            return gemm_epilogue(x, w, activation="relu") * linear(x, v)

        example = _example(f"gated pair, {name}", gated, {"x": "mk", "w": "kn", "v": "kn"})
        yield Form("glu_pair", GATED, example)


def _split(x: Any) -> Any:
    return jnp.reshape(x, (*x.shape[:-1], _HEADS, x.shape[-1] // _HEADS))


def _merge(x: Any) -> Any:
    return jnp.reshape(x, (*x.shape[:-2], x.shape[-2] * x.shape[-1]))


# How the projections to queries, keys and values stand, with the axes of their weights; and that of the result.
_INTO: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "biased": ("ef", "eg", lambda x, w: _split(gemm_epilogue(x, w))),
    "bare": ("ef", "eg", lambda x, w: _split(x @ w)),
    "bare, by heads": ("ehf", "ehg", lambda x, w: jnp.einsum("bte,ehf->bthf", x, w)),
}


def _rows(w: Any) -> Any:
    """A weight whose heads are an axis of their own, as a matrix."""
    return w if len(w.shape) == 2 else jnp.reshape(w, (-1, w.shape[-1]))


_OUT_OF: dict[str, Callable[..., Any]] = {
    "biased": lambda a, w: gemm_epilogue(_merge(a), _rows(w)),
    "bare": lambda a, w: _merge(a) @ _rows(w),
    "bare, by heads": lambda a, w: jnp.einsum("bthg,hge->bte", a, w),
}


def _layers() -> Iterator[Form]:
    gates = ("", "gated", "gated in one op")
    kinds = itertools.product(_INTO.items(), _OUT_OF.items(), _LINEAR.items(), gates, (True, False))
    for (name, (qk, v, project)), (end, output), (last, linear), gated, first in kinds:
        if end == "bare, by heads" and len(qk) == 2:
            continue  # a weight with an axis for the heads beside weights without one

        def attend(
            x: Any, q: Any, k: Any, v: Any, o: Any, scale: Any, project: Any = project, output: Any = output
        ) -> Any:
            return output(dot_product_attention(project(x, q), project(x, k), project(x, v), scale=scale), o)

        def feed(x: Any, up: Any, down: Any, *gate: Any, linear: Any = linear, gated: str = gated) -> Any:
            if gated == "gated in one op":
                return linear(gated_matmul(x, up, gate[0], activation="relu"), down)
            h = gemm_epilogue(x, up, activation="relu")
            return linear(h * linear(x, gate[0]) if gate else h, down)

        def pre(x: Any, *rest: Any, attend: Any = attend, feed: Any = feed) -> Any:
            *weights, scale, first_epsilon, second_epsilon = rest
            x = x + attend(layer_norm(x, epsilon=first_epsilon), *weights[:4], scale)
            return x + feed(layer_norm(x, epsilon=second_epsilon), *weights[4:])

        def post(x: Any, *rest: Any, attend: Any = attend, feed: Any = feed) -> Any:
            *weights, scale, first_epsilon, second_epsilon = rest
            x = layer_norm(x + attend(x, *weights[:4], scale), epsilon=first_epsilon)
            return layer_norm(x + feed(x, *weights[4:]), epsilon=second_epsilon)

        leaves = {"x": "bte", "q": qk, "k": qk, "v": v, "o": "hge" if len(qk) == 3 else "ge", "up": "en", "down": "ne"}
        leaves |= {"gate": "en"} if gated else {}
        order = "norm before" if first else "norm after"
        example = _example(
            f"transformer layer, {order}, projections {name}, their result's {end}, feed-forward {last}{gated and f', {gated}'}",
            pre if first else post, leaves, ("scale", "epsilon", "epsilon of the second"),
        )  # fmt: skip
        text = f"a transformer layer ({order} attention and feed-forward{', gated' if gated else ''})"
        yield Form("transformer_layer", text, example)


RESIDUAL_NORM = Form(
    "residual_norm",
    "norm(x + y): a norm of a sum, as of a residual connection",
    _example("residual, norm", _residual_norm, {"x": "mn", "y": "mn"}, ("epsilon",)),
)
FOLDED = (RESIDUAL_NORM, *_pairs(), *_layers())


# -- of plain operations: what no pass fuses yet ------------------------------------------------------------------------------


def _softmax(x: Any) -> Any:
    e = jnp.exp(x - jnp.max(x, -1, keepdims=True))
    return e / jnp.sum(e, -1, keepdims=True)


def _softmax_without_max(x: Any) -> Any:
    e = jnp.exp(x)
    return e / jnp.sum(e, -1, keepdims=True)


SOFTMAX = tuple(
    Form("softmax", text, Example(text, lambda x, s, fn=fn: fn(x * s), {"x": "mn"}, ("factor",), bare=True))
    for text, fn in (
        ("exp(x - max(x)) / sum(exp(x - max(x)))", _softmax),
        ("exp(x) / sum(exp(x)), no maximum subtracted", _softmax_without_max),
        ("exp(log_softmax(x))", lambda x: jnp.exp(jax.nn.log_softmax(x))),
        ("exp(x - logsumexp(x))", lambda x: jnp.exp(x - jax.nn.logsumexp(x, -1, keepdims=True))),
    )
)
