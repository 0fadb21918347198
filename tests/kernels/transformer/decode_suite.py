"""Layers that decode one token a text, and what they mean in float64. Not a test module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fusionlab.kernels import OPS

OP = OPS["multi_transformer"]
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2}  # of the largest entry: every step of a layer rounds


@dataclass(frozen=True)
class Case:
    """A call: sizes, what there is of it, and the op's attributes beside."""

    rows: int = 1
    width: int = 48
    heads: int = 2
    kv_heads: int = 2
    size: int = 24
    hidden: int = 72
    past: int = 37
    layers: int = 1
    qkv: str = "separate"
    cache_layout: str = "BSHD"
    pre_norm: bool = True
    norm: str = "layer"
    epsilons: tuple[float | None, float | None] = (1e-5, 1e-3)
    gated: bool = False
    gate_bias: bool = True
    activation: str = "gelu_tanh"
    turned: tuple[str, ...] = ()
    rotary: int | None = None
    rotary_width: int = 0
    angles_of_each: bool = False
    biases: bool = True
    parameters: str = ""  # the dtype of the norms' parameters, where it is another
    causal: bool = True
    step: Any = 20
    lengths: Any = None
    mask: str = ""  # "shared" or "each"
    mask_value: float = -np.inf
    dtype: str = "bfloat16"


CASES = {
    "a layer": Case(),
    "three texts": Case(rows=3),
    "eleven texts, two layers": Case(rows=11, layers=2, past=13, step=7),
    "half": Case(rows=2, dtype="float16"),
    "of 136 columns": Case(width=136, heads=3, kv_heads=3, size=40, hidden=264),
    "grouped heads": Case(heads=6, kv_heads=2, size=16, rows=2, qkv="concatenated"),
    "one key head": Case(heads=5, kv_heads=1, size=8),
    "interleaved, caches by head": Case(qkv="interleaved", cache_layout="BHSD", heads=3, kv_heads=3, rows=2),
    "packed": Case(qkv="packed", rows=2),
    "turned": Case(turned=("q", "k", "v", "out", "up", "down"), rows=2),
    "rotary": Case(rotary=1, rotary_width=24, rows=2),
    "rotary of a part, of each text": Case(rotary=2, rotary_width=16, rows=2, angles_of_each=True, qkv="concatenated"),
    "root mean square": Case(norm="rms", biases=False, parameters="float32"),
    "gated": Case(gated=True, activation="silu", gate_bias=False, rows=2),
    "gated, with biases": Case(gated=True, activation="relu"),
    "gated and turned": Case(gated=True, turned=("gate", "up"), gate_bias=False),
    "norms behind": Case(pre_norm=False, rows=2),
    "norms behind, two layers": Case(pre_norm=False, layers=2, rows=2),
    "norms behind, the second left out": Case(pre_norm=False, layers=2, epsilons=(1e-5, None)),
    "norms behind, the first left out": Case(pre_norm=False, layers=2, epsilons=(None, 1e-5)),
    "no norms": Case(epsilons=(None, None)),
    "a step of each": Case(rows=3, step=(0, 36, 12)),
    "a step beyond the cache": Case(step=60),
    "a step before it": Case(rows=2, step=(-3, 5)),
    "lengths": Case(rows=3, lengths=(1, 0, 1), step=(4, 9, 30)),
    "not causal": Case(causal=False),
    "a mask": Case(causal=False, mask="shared", mask_value=float(np.finfo(np.float32).min)),
    "a mask of each": Case(rows=3, causal=True, mask="each"),
    "heads of 136": Case(heads=1, kv_heads=1, size=136, rotary=1, rotary_width=136),
    "one text, many keys": Case(past=1100, step=1050, heads=1, kv_heads=1),  # parts of them are blocks' own
}


def shapes_of(case: Case) -> dict[str, Any]:
    """Shapes and dtypes of the operands, by name."""
    given = operands_of(case, drawn=False)
    return {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in given.items()}


def operands_of(case: Case, seed: int = 0, drawn: bool = True) -> dict[str, Any]:
    """Random operands, by name; where they are not to be drawn, only the shapes of those that may be large."""
    rng = np.random.default_rng(seed)
    b, e, h, g, d, f = case.rows, case.width, case.heads, case.kv_heads, case.size, case.hidden

    def draw(*shape: int, scale: float = 1.0, dtype: str = case.dtype) -> Any:
        if not drawn:
            return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
        return jnp.asarray(rng.normal(size=shape) * scale, dtype)

    def weight(slot: str, inner: int, *columns: int) -> Any:
        wide = int(np.prod(columns))
        shape = (
            (*columns, inner) if slot in case.turned or (slot == "qkv" and case.qkv == "packed") else (inner, *columns)
        )
        if slot == "out" and slot in case.turned:
            shape = (e, h, d)
        elif slot == "out":
            shape = (h, d, e)
        assert int(np.prod(shape)) == inner * wide
        return draw(*shape, scale=inner**-0.5)

    given: dict[str, Any] = {"x": draw(b, 1, e)}
    if case.mask:
        seen = rng.random((b if case.mask == "each" else 1, 1, 1, case.past)) < 0.6
        given["mask"] = jnp.asarray(seen)
    given["step"] = jnp.asarray(case.step, jnp.int32)
    if case.lengths is not None:
        given["lengths"] = jnp.asarray(case.lengths, jnp.int32)
    if case.rotary:
        angles = rng.uniform(0, 3, size=(*((b,) if case.angles_of_each else ()), 1, case.rotary_width))
        given |= {"cos": jnp.asarray(np.cos(angles), jnp.float32), "sin": jnp.asarray(np.sin(angles), jnp.float32)}
    for i in range(case.layers):
        own: dict[str, Any] = {}
        for n, epsilon in enumerate(case.epsilons, 1):
            if epsilon is not None:
                kept = case.parameters or case.dtype
                own[f"norm{n}_scale"] = jnp.asarray(1 + 0.3 * rng.normal(size=e), kept)
                if case.norm == "layer":
                    own[f"norm{n}_bias"] = draw(e, scale=0.3, dtype=kept)
        if case.qkv == "separate":
            own |= {slot: weight(slot, e, n, d) for slot, n in (("q", h), ("k", g), ("v", g))}
            biases = {"q_bias": (h, d), "k_bias": (g, d), "v_bias": (g, d)}
        else:
            columns = {"concatenated": ((h + 2 * g) * d,), "interleaved": (h, 3, d), "packed": (3, h, d)}[case.qkv]
            own["qkv"] = weight("qkv", e, *columns)
            biases = {"qkv_bias": columns}
        own |= {"out": weight("out", h * d, e), "up": weight("up", e, f), "down": weight("down", f, e)}
        biases |= {"out_bias": (e,), "up_bias": (f,), "down_bias": (e,)}
        if case.gated:
            own["gate"] = weight("gate", e, f)
            biases["gate_bias"] = (f,)
        if not case.gate_bias:
            biases = {slot: shape for slot, shape in biases.items() if slot not in ("gate_bias", "up_bias")}
        own |= {slot: draw(*shape, scale=0.5) for slot, shape in biases.items() if case.biases}
        cache = (b, case.past, g, d) if case.cache_layout == "BSHD" else (b, g, case.past, d)
        own |= {"cache_k": draw(*cache), "cache_v": draw(*cache)}
        given |= {f"{slot}.{i}": a for slot, a in own.items()}
    return given


def attributes_of(case: Case) -> dict[str, Any]:
    return {
        "layers": case.layers,
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "qkv": case.qkv,
        "pre_norm": case.pre_norm,
        "norm": case.norm,
        "epsilons": case.epsilons,
        "activation": case.activation,
        "gated": case.gated,
        "is_causal": case.causal,
        "mask_value": case.mask_value,
        "cache": "write",
        "cache_layout": case.cache_layout,
        "rotary": case.rotary,
        "turned": case.turned,
    }


def run(case: Case, given: dict[str, Any], implementation: str) -> tuple[Any, ...]:
    """The op by one implementation, as a jitted function of its operands."""

    def call(operands: dict[str, Any]) -> tuple[Any, ...]:
        names = tuple(given)
        values = [operands[n] for n in names]
        return OP.call(*values, present=names, implementation=implementation, **attributes_of(case))

    return jax.jit(call)(given)


def exact(case: Case, given: dict[str, Any]) -> tuple[np.ndarray, ...]:
    """The reference in float64 of the same numbers."""
    with jax.enable_x64(True):
        wide = {
            n: jnp.asarray(np.asarray(a, np.float64)) if jnp.issubdtype(a.dtype, jnp.floating) else a
            for n, a in given.items()
        }
        names, attributes = tuple(wide), attributes_of(case)
        found = jax.jit(lambda *operands: OP.reference(*operands, present=names, **attributes))(*wide.values())
        return tuple(np.asarray(a) for a in found)


def check(case: Case, implementation: str = "cuda", seed: int = 0, slack: float = 1.0) -> None:
    """y and the caches against float64, and the caches' other positions bit for bit."""
    given = operands_of(case, seed)
    got, want = run(case, given, implementation), exact(case, given)
    allowed = slack * TOLERANCE[case.dtype]
    for one, true in zip(got, want, strict=True):
        assert one.dtype == jnp.dtype(case.dtype)
        assert one.shape == true.shape
        error = np.abs(np.asarray(one, np.float64) - true).max() / max(1.0, np.abs(true).max())
        assert error <= allowed, error
    axis = 1 if case.cache_layout == "BSHD" else 2
    at = np.clip(np.broadcast_to(np.asarray(case.step), case.rows), 0, case.past - 1)
    for i in range(case.layers):
        for j, slot in enumerate(("cache_k", "cache_v")):
            old, new = np.array(given[f"{slot}.{i}"]), np.array(got[1 + 2 * i + j])
            for row, place in enumerate(at):
                index = (row, place) if axis == 1 else (row, slice(None), place)
                old[index] = new[index]
            assert old.tobytes() == new.tobytes()
