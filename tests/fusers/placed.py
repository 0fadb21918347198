"""Programs under a `jit` whose arguments are sharded, without shard_map: what the fused program sends between devices against what the
original sends. Trials for test_placed.py, whose cases have their names.

Every op runs code here that XLA cannot look into, as its kernels are on a GPU: the reference, behind `custom_partitioning`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fusionlab as fl
from fusionlab.graph.xla.collectives import COLLECTIVE_MOVES, Traffic, traffic
from fusionlab.kernels import OPS
from fusionlab.kernels.op.composite import CompositeOp
from fusionlab.kernels.op.implementation import ChoiceKind, ImplementationChoice
from fusionlab.models import transformer
from tests.asked import by_name

from .checks import close, floats, jit, normal
from .spread import HEADS, LLAMA, weights
from .transformer import layer_parts as parts

Array = jax.Array
NAMED = tuple(f"multi_transformer_{kind}{fused}" for kind in ("encoder", "decoder") for fused in ("", "_fuse_qkv"))
ENCODER, ENCODER_QKV, DECODER, DECODER_QKV = NAMED
B, S, E, H, D, F = 8, 8, 32, 8, 4, 64
COLUMNS, ROWS = frozenset("q k v up gate qkv_by_head fc1".split()), frozenset("out down fc2".split())
LAYOUTS = {"data": (True, False), "tensor": (False, True), "both": (True, True)}  # what is split: rows, weights


@contextlib.contextmanager
def surroundings() -> Iterator[None]:
    """Each op has an implementation that XLA cannot look into, and prefers it."""
    with pytest.MonkeyPatch.context() as patch:
        decision = ImplementationChoice("opaque", ChoiceKind.CHOSEN, "for these trials")
        for op in OPS.values():
            if not isinstance(op, CompositeOp):
                one = replace(op.implementations["xla"], name="opaque", opaque=True)
                patch.setattr(type(op), "implementations", {**op.implementations, "opaque": one})
                patch.setattr(type(op), "decide", lambda self, *_, **__: decision)
        yield


@dataclass(frozen=True)
class Trial:
    """A program, its arguments as they are placed, and what it is compared with.

    Attributes:
      fused, plain: functions of the same arguments.
      args: a function that gives them, placed.
      opaque: how many pieces XLA cannot look into are in the fused program, at least.
      factor: on the rounding that values may differ by.
    """

    name: str
    fused: Callable[..., Any]
    plain: Callable[..., Any]
    args: Callable[[], Sequence[Any]]
    opaque: int
    factor: float = 2.0


def mesh() -> Any:
    return jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def put(tree: Any, specs: Any) -> Any:
    """Arrays on the mesh; `specs` is one for all, or a function of an array's path."""
    at = specs if callable(specs) else lambda _: specs
    return jax.tree.map_with_path(lambda path, a: jax.device_put(a, NamedSharding(mesh(), at(path))), tree)


def pulled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Value and gradients of a scalar of all results, by every argument that holds floats."""

    def run(*args: Any) -> Any:
        def loss(*args: Any) -> Array:
            return sum(jnp.mean(jnp.sin(leaf)) for leaf in floats_of(fn(*args)))

        return jax.value_and_grad(loss, floats(args))(*args)

    return run


def floats_of(tree: Any) -> list[Array]:
    return [a for a in jax.tree.leaves(tree) if jnp.issubdtype(a.dtype, jnp.floating)]


# -- one op ------------------------------------------------------------------------------------------------------------

HEADED = P("data", None, "tensor")  # [B, S, H, D]: data and tensor parallel
OF_ONE_OP: dict[str, tuple[str, dict[str, Any], tuple[tuple[int, ...], ...], tuple[P, ...]]] = {
    # name -> (op, attributes, shapes, specs over both mesh axes)
    "gemm_columns": (
        "gemm_epilogue",
        {"activation": "gelu_tanh"},
        ((B, S, E), (E, F), (F,)),
        (P("data"), P(None, "tensor"), P("tensor")),
    ),
    "gemm_rows": (
        "gemm_epilogue",
        {"activation": "relu"},
        ((B, S, F), (F, E), (E,)),
        (P("data", None, "tensor"), P("tensor"), P()),
    ),
    "gemm_turned": (
        "gemm_epilogue",
        {"activation": "none", "w_contract": 1},
        ((B, S, E), (F, E), (F,)),
        (P("data"), P("tensor"), P("tensor")),
    ),
    "gated_columns": (
        "gated_matmul",
        {},
        ((B, S, E), (E, F), (E, F)),
        (P("data"), P(None, "tensor"), P(None, "tensor")),
    ),
    "gated_rows": (
        "gated_matmul",
        {},
        ((B, S, F), (F, E), (F, E)),
        (P("data", None, "tensor"), P("tensor"), P("tensor")),
    ),
    "attention": ("dot_product_attention", {"is_causal": True}, ((B, S, H, D),) * 3, (HEADED,) * 3),
    "attention_of_groups": (
        "dot_product_attention",
        {"is_causal": True},
        ((B, S, H, D), (B, S, H // 2, D), (B, S, H // 2, D)),
        (HEADED,) * 3,
    ),
    "norm": ("layer_norm", {"axis": -1}, ((B, S, E), (E,), (E,)), (P("data", "tensor"), P(), P())),
    "lerp": ("lerp", {}, ((B, S, E),) * 2 + ((E,),), (P("data", None, "tensor"),) * 2 + (P("tensor"),)),
    "matmul_columns": ("matmul", {"alpha": 0.5}, ((B, E), (E, F), (F,)), (P("data"), P(None, "tensor"), P("tensor"))),
    "matmul_rows": (
        "matmul",
        {"activation": "relu"},
        ((B, F), (F, E), (E,)),
        (P("data", "tensor"), P("tensor"), P()),
    ),
}


def ops() -> Iterator[Trial]:
    for name, (op, attrs, shapes, specs) in OF_ONE_OP.items():
        for layout, (by_rows, by_weights) in LAYOUTS.items():
            kept = {"data": by_rows, "tensor": by_weights}
            own = [P(*(a if kept.get(a) else None for a in spec)) for spec in specs]

            def args(shapes: Any = shapes, own: Any = own) -> list[Array]:
                return [put(0.3 * a, s) for a, s in zip(normal(*shapes), own, strict=True)]

            fused, plain = partial(OPS[op].call, **attrs), partial(OPS[op].reference, **attrs)
            yield Trial(f"{name}/{layout}/forward", fused, plain, args, 1)
            yield Trial(f"{name}/{layout}/gradient", pulled(fused), pulled(plain), args, 2)


# -- layers ------------------------------------------------------------------------------------------------------------


def spec_of(split: bool, path: Any) -> P:
    """How a weight is stored, by its name: Megatron's columns and rows."""
    *above, name = ["", *(key.key for key in path if hasattr(key, "key"))]
    slot = above[-1] if name in ("w", "b", "scale", "bias") else name.removesuffix("_bias")
    bias = name == "b" or name.endswith("_bias")
    if not split or (slot not in COLUMNS and (bias or slot not in ROWS)):
        return P()
    if slot in ROWS:
        return P("tensor")
    return P("tensor") if bias else P(None, "tensor")


def found_by(passes: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
    return fl.fuse(fn, passes=passes or by_name())


BY_HEAD = parts.Parts(project=parts.interleaved)
WRITTEN = replace(LLAMA, out=parts.out)  # without the sums of spread.py: XLA puts them


def encoder(how: parts.Parts, made: Any, x: Array) -> Array:
    for p in made:
        x = parts.encode(how, p, x, parts.causal())
    return x


def scanned(how: parts.Parts, made: Any, x: Array) -> Array:
    return lax.scan(lambda x, p: (parts.encode(how, p, x, parts.causal()), None), x, made)[0]


def decoder(how: parts.Parts, writes: bool, made: Any, x: Array, cache: Any, step: Array) -> Any:
    pairs = []
    for p, pair in zip(made, cache, strict=True):
        x, pair = parts.write(how, p, x, pair, step) if writes else parts.append(how, p, x, pair)
        pairs.append(pair)
    return x, pairs


def layers() -> Iterator[Trial]:
    for layout, (by_rows, by_weights) in LAYOUTS.items():
        rows = P("data") if by_rows else P()

        def encoded(kv: int, stacked: bool, rows: P = rows, split: bool = by_weights) -> list[Any]:
            made: Any = weights(kv_heads=kv)
            if stacked:
                one = jax.tree.map(lambda *a: jnp.stack(a), *made)
                return [put(one, lambda path: P(None, *spec_of(split, path))), put(parts.inputs(), rows)]
            return [put(made, partial(spec_of, split)), put(parts.inputs(), rows)]

        def decoded(kv: int, writes: bool, rows: P = rows, split: bool = by_weights) -> list[Any]:
            cache = parts.caches(parts.SMAX if writes else parts.T, heads=kv)
            held = P(*(rows or (None,)), None, "tensor" if split else None)
            x = put(parts.inputs(parts.B, 1, parts.E), rows)
            return [put(weights(kv_heads=kv), partial(spec_of, split)), x, put(cache, held), jnp.int32(parts.STEP)]

        plain = partial(encoder, parts.Parts())
        for kind, passes in (("pieces", None), ("layers", NAMED)):
            fused = found_by(passes, plain)
            given = partial(encoded, HEADS, False)
            yield Trial(f"encoder/{kind}/{layout}", fused, plain, given, 18)
            yield Trial(f"encoder/{kind}/{layout}/gradient", pulled(fused), pulled(plain), given, 30, 8.0)
            llama, by_head = partial(encoder, WRITTEN), partial(encoder, BY_HEAD)
            grouped = partial(encoded, HEADS // 2, False)
            yield Trial(f"llama/{kind}/{layout}", found_by(passes, llama), llama, grouped, 14, 8.0)
            yield Trial(f"by_head/{kind}/{layout}", found_by(passes, by_head), by_head, given, 10, 8.0)
            if layout == "both":
                over = partial(scanned, parts.Parts())
                yield Trial(f"scanned/{kind}/{layout}", found_by(passes, over), over, partial(encoded, HEADS, True), 9)
            for writes in (False, True):
                step = partial(decoder, parts.Parts(), writes)
                name = f"decoder/{'write' if writes else 'append'}/{kind}/{layout}"
                yield Trial(name, found_by(passes, step), step, partial(decoded, HEADS, writes), 18)


def steps() -> Iterator[Trial]:
    """A train step as it is written: differentiated before it is fused."""
    plain = partial(transformer.train_step, heads=H, causal=True)
    for layout, (by_rows, by_weights) in LAYOUTS.items():

        def args(by_rows: bool = by_rows, by_weights: bool = by_weights) -> list[Any]:
            params = transformer.init(jax.random.key(0), 2, E)
            first, second, _ = transformer.init_adam(params)
            # As after some steps: at the first one the update is the sign of a gradient, which rounding decides where it is almost zero.
            state = first, jax.tree.map(lambda v: v + 1e-2, second), jnp.int32(100)
            x, y = (transformer.inputs(jax.random.key(i), B, S, E) for i in (1, 2))
            rows = P("data") if by_rows else P()
            return [
                *(put(tree, partial(spec_of, by_weights)) for tree in (params, state)),
                put(x, rows),
                put(y, rows),
            ]

        yield Trial(f"train_step/{layout}", found_by(None, plain), plain, args, 36, 4.0)


def trials() -> Iterator[Trial]:
    yield from ops()
    yield from layers()
    yield from steps()


def more(before: dict[str, Traffic], after: dict[str, Traffic]) -> str | None:
    """What a program sends that another does not: a move of data more, or more bytes of any kind."""
    none = Traffic(0, 0)
    for kind, now in after.items():
        was = before.get(kind, none)
        if now.bytes > was.bytes or (kind in COLLECTIVE_MOVES and now.count > was.count):
            return f"{kind}: {was} before, {now} after"
    return None


def as_text(sent: dict[str, Traffic]) -> str:
    return ", ".join(f"{kind} {one}" for kind, one in sent.items()) or "none"


def problem(trial: Trial) -> str | None:
    """What is wrong with a trial: values, collectives, or that nothing in it was opaque to XLA."""
    args = trial.args()
    before = jit(trial.plain).lower(*args).compile()
    lowered = jit(trial.fused).lower(*args)
    if (count := lowered.as_text().count("CustomSPMDPartitioning(")) < trial.opaque:
        return f"{count} pieces are opaque to XLA, needed {trial.opaque}"
    after = lowered.compile()
    close(after(*args), before(*args), trial.factor)
    sent = [traffic(one.as_text()) for one in (before, after)]
    if why := more(*sent):
        return f"{why}; in all {as_text(sent[0])} before, {as_text(sent[1])} after"
    return None


TRIALS: dict[str, Callable[[], str | None]] = {trial.name: partial(problem, trial) for trial in trials()}
