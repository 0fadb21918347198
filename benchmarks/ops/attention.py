"""Attention: FusionLab, jax.jit, cuDNN through jax.nn and torch, forward and backward, in one run.

    python -m benchmarks attention [--json] [-o FILE] [--quick] [--only TEXT]

On a CUDA device times are device times, programs take turns, and every sample is kept (see gemm_epilogue.py). FusionLab runs as shipped;
its routes are printed. Without a CUDA device `--quick` runs tiny sizes by the host's clock, to show that it works, and otherwise
attention_cpu.py is run.

What is measured:
  attention  forward and backward of one attention: jax.jit of plain code, the same through fusionlab.fuse, each implementation by name,
             jax.nn.dot_product_attention by cuDNN, and torch's scaled_dot_product_attention; at head sizes 64, 80, 96, 128, 160, 256;
             and the time of each kernel of fusionlab.fuse; "in a graph" is compiled so that XLA makes CUDA graphs of fewer than five
             kernels too
  encoder    a training step of two layers of flax's own attention (flax.linen), at dropout 0 and 0.1; its softmax in float32 too, and
             its parameters in bfloat16 (there beside torch's layer, at both rates): by attention alone, as FusionLab comes, and with
             the norms too
  memory     scratch of the compiled programs at length 8192
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..measuring import (
    CALLS,
    attempt,
    chosen,
    compiled_at_once,
    continued,
    differences,
    finish,
    has_torch,
    line,
    measured,
    new_record,
    normal,
    parser_of,
    ratio_to,
    refusal,
    routes,
    save,
    timed,
    torch_device,
    torch_forgotten,
    torch_samples,
)
from . import attention_cpu

IN_A_GRAPH = {"xla_gpu_graph_min_graph_size": 1}  # XLA's default is five kernels in a row
NAMED = {"cuda": ("cuda", "cudnn"), "cpu": ("xla_blockwise",)}


@dataclass(frozen=True)
class Shape:
    """batch x heads x length x features; `masked`: "no", "causal", "lengths" or "random" (half of the scores)."""

    batch: int
    heads: int
    length: int
    features: int
    masked: str = "no"
    layout: str = "BTNH"
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        sizes = f"B{self.batch} H{self.heads} S{self.length} D{self.features}"
        return f"{sizes} {self.dtype} {self.layout} mask {self.masked}"

    @property
    def dims(self) -> tuple[int, ...]:
        middle = (self.length, self.heads) if self.layout == "BTNH" else (self.heads, self.length)
        return (self.batch, *middle, self.features)


SHAPES = (
    Shape(32, 16, 1024, 64),
    Shape(32, 16, 1024, 64, layout="BNTH"),
    Shape(4, 16, 4096, 128, "causal"),
    Shape(4, 16, 4096, 128, "causal", "BNTH"),
    Shape(32, 12, 128, 64),
    Shape(8, 16, 1024, 64, "lengths"),
    Shape(8, 16, 1024, 64, "random"),
    Shape(8, 16, 1024, 64, "no", "BTNH", "float32"),
)
OTHER_HEADS = tuple(Shape(8, 16, 1024, features) for features in (80, 96, 160, 256))
TINY = (Shape(1, 2, 64, 8), Shape(1, 2, 64, 8, "causal", "BNTH"), Shape(1, 2, 64, 8, "random", dtype="float32"))


def plain(shape: Shape, q: Any, k: Any, v: Any, mask: Any = None, *, rounds: bool = False) -> Any:
    """What a user writes: scores and their softmax in float32, as jax.nn has it; with `rounds` in the operands' dtype."""
    import jax
    import jax.numpy as jnp

    scores, out = (
        ("bthd,bshd->bhts", "bhts,bshd->bthd") if shape.layout == "BTNH" else ("bhtd,bhsd->bhts", "bhts,bhsd->bhtd")
    )
    wide = None if rounds else jnp.float32
    s = jnp.einsum(scores, q, k, preferred_element_type=wide) / shape.features**0.5
    if shape.masked == "causal":
        s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -1e30)
    elif mask is not None:
        s = jnp.where(mask, s, -1e30)
    return jnp.einsum(out, jax.nn.softmax(s, axis=-1).astype(v.dtype), v)


def by_name(implementation: str | None, shape: Shape, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    """FusionLab's op itself."""
    from fusionlab.ops import dot_product_attention

    return dot_product_attention(
        q,
        k,
        v,
        mask=mask,
        mask_value=-1e30,
        is_causal=shape.masked == "causal",
        layout=shape.layout,
        implementation=implementation,
    )


def through_jax_nn(shape: Shape, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    """cuDNN by the public function; BNTH is transposed, as it has to be for it."""
    import jax
    import jax.numpy as jnp

    if shape.layout == "BNTH":
        q, k, v = (jnp.swapaxes(a, 1, 2) for a in (q, k, v))
    out = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=shape.masked == "causal", implementation="cudnn")
    return jnp.swapaxes(out, 1, 2) if shape.layout == "BNTH" else out


def step_of(fn: Callable) -> Callable:
    """(out, gradients of query, key and value) of a cotangent, q, k, v[, mask]."""
    import jax

    def step(ct: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
        out, pull = jax.vjp(lambda q, k, v: fn(q, k, v, *rest), q, k, v)
        return out, pull(ct)

    return step


def operands(shape: Shape) -> tuple[Any, ...]:
    import jax
    import jax.numpy as jnp

    made = tuple(normal(i, *shape.dims).astype(shape.dtype) for i in range(4))
    if shape.masked == "lengths":
        lengths = jax.random.randint(jax.random.key(9), (shape.batch, 1, 1, 1), shape.length // 4, shape.length + 1)
        return (*made, jnp.arange(shape.length) < lengths)
    if shape.masked == "random":
        mask = jax.random.bernoulli(jax.random.key(9), 0.5, (shape.batch, 1, shape.length, shape.length))
        return (*made, mask | jnp.eye(shape.length, dtype=bool))
    return made


def attention(shape: Shape, samples: int, torch: bool) -> dict[str, Any]:
    import jax

    import fusionlab as fl
    from fusionlab.device import Device

    args, device = operands(shape), Device.current()
    written = functools.partial(plain, shape)
    fused = fl.fuse(step_of(written))
    rivals: dict[str, Callable] = {
        "jax.jit": step_of(written),
        "fusionlab": fused,
        "jax.jit, 16-bit scores": step_of(functools.partial(plain, shape, rounds=True)),
    }
    rivals |= {f"op by {name}": step_of(functools.partial(by_name, name, shape)) for name in NAMED[device.platform]}
    if device.platform == "cuda":
        rivals["jax.nn cudnn"] = step_of(functools.partial(through_jax_nn, shape))
        rivals |= {
            f"{name}, in a graph": jax.jit(rivals[name], compiler_options=IN_A_GRAPH)
            for name in ("fusionlab", "jax.nn cudnn")
        }
    left_out = {name: why for name, f in rivals.items() if (why := refusal(f, args))}
    programs = compiled_at_once({name: (f, args) for name, f in rivals.items() if name not in left_out}, left_out)
    reference = programs["jax.jit"]()
    found: dict[str, Any] = {"difference to jax.jit": {n: differences(reference, f()) for n, f in programs.items()}}
    found |= measured(programs, "jax.jit", samples)
    found |= {"routes": routes(fused, *args), "left out": left_out}
    if device.platform == "cuda":
        found["kernels_s"] = attempt(left_out, "kernels", lambda: kernels(fused, args)) or {}
    found["flop"] = 14 * shape.batch * shape.heads * shape.length**2 * shape.features / (1 + (shape.masked == "causal"))
    if torch:
        found["torch"] = attempt(left_out, "torch sdpa", lambda: torch_attention(shape, samples)) or {}
        torch_forgotten()
    for one in found.get("torch", {}).values():
        for name in found.keys() & {"fusionlab", "fusionlab, in a graph"}:
            found[name]["over torch"] = ratio_to("torch", one["samples_s"], found[name]["samples_s"])
    return found


def kernels(fused: Callable, args: tuple[Any, ...]) -> dict[str, float]:
    """Seconds of each kernel of a call, by name: those of cuDNN, and what XLA fills with zeros before ("Memset")."""
    from fusionlab.evidence.kernel_times import kernel_times

    found: dict[str, float] = {}
    for one in kernel_times(fused, *args).kernels:
        found[one.name] = found.get(one.name, 0.0) + one.median_s
    return found


def torch_attention(shape: Shape, samples: int) -> dict[str, Any]:
    """torch's scaled_dot_product_attention as it chooses, on BHTD; apart from the others' turns."""
    import torch

    dims = (shape.batch, shape.heads, shape.length, shape.features)
    device = torch_device()
    make = functools.partial(torch.randn, device=device, dtype=getattr(torch, shape.dtype))
    q, k, v = (make(dims).requires_grad_() for _ in range(3))
    ct, mask = make(dims), None
    if shape.masked == "lengths":
        lengths = torch.randint(shape.length // 4, shape.length + 1, (shape.batch, 1, 1, 1), device=device)
        mask = torch.arange(shape.length, device=device) < lengths
    elif shape.masked == "random":
        mask = torch.rand(shape.batch, 1, shape.length, shape.length, device=device) < 0.5
        mask |= torch.eye(shape.length, device=device, dtype=torch.bool)
    attend = torch.nn.functional.scaled_dot_product_attention

    def step() -> Any:
        out = attend(q, k, v, attn_mask=mask, is_causal=shape.masked == "causal")
        return torch.autograd.grad(out, (q, k, v), ct)

    times = torch_samples(step, samples)
    return {"torch sdpa": {"samples_s": times, "median_s": sorted(times)[samples // 2]}}


# A model that does not know of any of this.


@dataclass(frozen=True)
class Encoder:
    batch: int = 32
    length: int = 1024
    hidden: int = 1024
    heads: int = 16
    ffn: int = 4096
    layers: int = 2


STEPS = {
    "dropout 0.0": (0.0, False, "float32"),
    "dropout 0.0, softmax in float32": (0.0, True, "float32"),
    "dropout 0.0, softmax in float32, parameters in bfloat16": (0.0, True, "bfloat16"),
    "dropout 0.1": (0.1, False, "float32"),
    "dropout 0.1, softmax in float32, parameters in bfloat16": (0.1, True, "bfloat16"),
}


def encoder_step(size: Encoder, rate: float, wide: bool, parameters: str) -> tuple[Callable, tuple[Any, ...]]:
    """A step (loss, gradients, SGD) of post-LN layers with flax.linen's own attention, unchanged, and its arguments; `wide`: its softmax
    in float32."""
    import jax
    import jax.numpy as jnp
    from flax import linen as nn

    makers = (nn.LayerNorm, nn.Dense)

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            attend = nn.MultiHeadDotProductAttention(
                num_heads=size.heads,
                dtype=jnp.bfloat16,
                dropout_rate=rate,
                deterministic=rate == 0.0,
                force_fp32_for_softmax=wide,
                param_dtype=jnp.dtype(parameters),
            )
            drop = nn.Dropout(rate, deterministic=rate == 0.0)
            norm, dense = (functools.partial(m, dtype=jnp.bfloat16, param_dtype=jnp.dtype(parameters)) for m in makers)
            x = norm()(x + drop(attend(x)))
            h = dense(size.hidden)(nn.relu(dense(size.ffn)(x)))
            return norm()(x + drop(h))

    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(size.layers):
                x = Layer()(x)
            return x

    model = Stack()
    x, y = (normal(i, size.batch, size.length, size.hidden) for i in (1, 2))
    params = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)

    def loss(params: Any, x: Any, y: Any, key: Any) -> Any:
        out = model.apply(params, x, rngs={"dropout": key})
        return jnp.mean(jnp.square((out - y).astype(jnp.float32)))

    def step(params: Any, x: Any, y: Any, key: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x, y, key)
        return value, jax.tree.map(lambda p, g: (p - 0.1 * g).astype(p.dtype), params, grads)

    return step, (params, x, y, jax.random.key(2))


def encoder(size: Encoder, rate: float, wide: bool, parameters: str, samples: int, with_torch: bool) -> dict[str, Any]:
    """Times of `encoder_step`: jax.jit, by attention alone, as FusionLab comes, with every pass, and torch's."""
    import fusionlab as fl

    step, args = encoder_step(size, rate, wide, parameters)
    fused = fl.fuse(step, passes=["dot_product_attention"])
    rivals = {
        "jax.jit": step,
        "fusionlab": fused,
        "fusionlab, as it comes": fl.fuse(step),
        "with layer_norm": fl.fuse(step, passes=["dot_product_attention", "gemm_epilogue", "layer_norm"]),
    }
    left_out: dict[str, str] = {}
    programs = compiled_at_once({name: (f, args) for name, f in rivals.items()}, left_out)
    losses = {n: float(f()[0]) for n, f in programs.items()}
    found = measured(programs, "jax.jit", samples)
    if with_torch and parameters == "bfloat16":
        from .torch_encoder import samples_of

        times = attempt(left_out, "torch", lambda: samples_of(size, samples, rate)) or {}
        found["torch"] = {name: timed(taken, CALLS) for name, taken in times.items()}
        torch_forgotten()
    return {**found, "losses": losses, "routes": routes(fused, *args), "left out": left_out}


def memory(length: int) -> dict[str, Any]:
    """Scratch bytes of forward and backward, causal."""
    import jax
    import jax.numpy as jnp

    import fusionlab as fl

    shape = Shape(1, 16, length, 64, "causal")
    args = (jax.ShapeDtypeStruct(shape.dims, jnp.bfloat16),) * 4
    step = step_of(functools.partial(plain, shape))
    programs = {"jax.jit": step, "fusionlab": fl.fuse(step)}
    return {
        name: jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes for name, f in programs.items()
    }


def main(argv: list[str]) -> int:
    """Prints a line for each measurement and writes the record. Returns the exit status."""
    parser = parser_of("attention", __doc__)
    parser.add_argument("--only", default="", help='only what has this text in its name, or one of "A|B"')
    options = parser.parse_args(argv)

    from fusionlab.device import Device

    on_cuda = Device.current().platform == "cuda"
    if not on_cuda and not options.quick:
        print("JAX sees no CUDA device here: attention_cpu runs (--quick: tiny sizes of this one)", file=sys.stderr)
        return attention_cpu.main(["-o", str(options.output)] if options.output else [])
    samples = 20 if not options.quick else 6 if on_cuda else 3
    record = continued(new_record("attention", options) | {"attention": {}, "encoder": {}, "failures": {}}, options)

    def say(name: str, found: Mapping[str, Any]) -> None:
        if not options.json:
            print(line(name, found), flush=True)

    shapes = {shape.name: shape for shape in ((*SHAPES, *OTHER_HEADS) if on_cuda else TINY)}
    steps = {f"encoder step, {name}": name for name in STEPS} if importlib.util.find_spec("flax") else {}
    size = Encoder() if on_cuda else Encoder(1, 16, 32, 2, 64)
    asked = chosen((*shapes, *steps, "memory"), options.only)
    failures = record["failures"]
    for name in [name for name in asked if name != "memory"]:
        if name in shapes:
            part, key, work = "attention", name, functools.partial(attention, shapes[name], samples, has_torch())
        else:
            part, key = "encoder", steps[name]
            work = functools.partial(encoder, size, *STEPS[key], samples, has_torch())
        if (found := attempt(failures, name, work)) is not None:
            record[part][key] = found
            say(name, found)
        save(record, options, on_cuda)  # what is measured is not lost where the run is cut off
    if "memory" in asked:
        record["memory"] = memory(8192 if on_cuda else 1024)
        if not options.json:
            print("scratch bytes, length 8192, causal:", record["memory"])
    finish(record, options, on_cuda)
    return 0
