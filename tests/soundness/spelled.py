"""The spellings that the passes' own tests list, as programs to make mutants of: floats and masks are arguments, all else captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.fusers.attention import test_attention_layout as layouts
from tests.fusers.attention import test_attention_sinks as sinks
from tests.fusers.attention import test_attention_spellings as attentions
from tests.fusers.engine import test_known_numbers as numbers
from tests.fusers.linear import test_convolutions as convolutions
from tests.fusers.linear import test_reshaped_linear as reshaped
from tests.fusers.linear import test_wide_epilogues as epilogues
from tests.fusers.norm import test_group_norms as groups
from tests.fusers.norm import test_layer_norm as norms
from tests.fusers.norm import test_modulated_norms as modulated
from tests.fusers.transformer import test_layer_streams as streams
from tests.fusers.transformer import test_whole_layers_spelled_otherwise as layers

from .generator import Program
from .pieces.piece import Param


def spelled() -> Iterator[tuple[str, Callable, tuple[Any, ...]]]:
    """(name, function, arguments) of every spelling."""
    for name in attentions.SPELLINGS:
        yield f"attention, {name}", *attentions.given(name)
    for name, weights in sinks.WEIGHTS.items():
        yield f"sink, {name}", sinks.attention(weights), (sinks.Q, sinks.K, sinks.V, sinks.SINK)
    for name, (fn, _) in epilogues.SPELLINGS.items():
        args = epilogues.X, epilogues.W, epilogues.B
        yield f"epilogue, {name}", lambda x, w, b, fn=fn: fn(x, w, b, jax.nn.silu), args
    for name, args in epilogues.MIXED.items():
        yield f"epilogue, mixed, {name}", lambda x, w, b: jax.nn.gelu(epilogues.mixed_product(x, w, b)), args
    for name, one in norms.SPREAD_OUT.items():
        yield f"norm, {name}", one[0], (norms.X, norms.G, norms.B)
    for name, epsilon in numbers.EPSILONS.items():
        yield f"norm, epsilon {name}", numbers.rms(epsilon), (norms.X, norms.G)
    for name in convolutions.FORMS:
        yield f"convolution, {name}", *convolutions.arguments(name)[:2]
    for name, (fn, args, _) in reshaped.FORMS.items():
        yield f"reshaped, {name}", fn, args
    for name, (fn, args, _) in modulated.MODULATED.items():
        yield f"norm, {name}", fn, args
    for name, (fn, x, _) in groups.SPELLINGS.items():
        yield f"groups, {name}", fn, (x, groups.GAMMA, groups.BETA)
    for name, (fn, more, _) in groups.PARTS.items():
        yield f"groups, {name}", fn, (groups.IMAGE, *more)
    for name, (fn, args, *_) in layouts.FORMS.items():
        yield f"attention, {name}", fn, args
    for name, layer in streams.LAYERS.items():
        yield f"layer, {name}", partial(layer, streams.P), (streams.X,)
    for name, (layer, turn) in layers.LAYERS.items():
        yield f"layer, {name}", partial(layer, layers.P, turn=turn), (layers.X,)


def passes_of(name: str) -> Sequence[str]:
    """The passes that are asked for the sites of a spelling; none where those do that search by default."""
    return streams.ENCODERS if name.startswith("layer, ") else ()


def program_of(name: str, fn: Callable, args: tuple[Any, ...], seed: int) -> Program:
    """A spelling as a program of its floats and masks."""
    is_data = [_is_data(a) for a in args]
    params = tuple(
        Param(tuple(np.shape(a)), str(jnp.result_type(a)), "data")
        for a, data in zip(args, is_data, strict=True)
        if data
    )

    def run(*given: Any) -> list[Any]:
        rest = iter(given)
        return jax.tree.leaves(fn(*(next(rest) if data else a for a, data in zip(args, is_data, strict=True))))

    return Program(seed, run, params, name, "", 30.0, True)


def renamed(program: Program, fn: Callable, text: str) -> Program:
    """Another function of the same arguments."""
    return replace(program, fn=lambda *args: list(fn(*args)), text=text)


def traces(program: Program) -> bool:
    """Whether a program is one: of a mutant it may be that its types do not fit."""
    try:
        jax.make_jaxpr(program.fn)(*program.avals)
    except Exception:
        return False
    return True


def _is_data(a: Any) -> bool:
    dtype = jnp.result_type(a)
    return jnp.issubdtype(dtype, jnp.bool_) or jnp.issubdtype(dtype, jnp.floating)
