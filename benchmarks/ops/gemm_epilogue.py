"""GEMM epilogues on a CUDA device: FusionLab, jax.jit, torch and the bare products, in device time, in one run.

    python -m benchmarks gemm_epilogue [--json] [-o FILE] [--quick]

Device time is that of CUDA events on XLA's own stream (torch: on torch's) around calls queued behind one another; programs take turns.
Every sample is kept. The record holds device, driver, versions, flags and commit. FusionLab runs as shipped: its routes come from the table
of the architecture, and are printed.

What is measured:
  launches  what a launch of ours costs beside XLA's own kernels, inside and outside of CUDA graphs, in a scan
  products  the forward of one layer, and relu's backward with its bias gradient, beside the bare product
  mlp       forward and backward of a two-layer perceptron, all gradients
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

from ..measuring import (
    compiled,
    differences,
    finish,
    has_torch,
    line,
    measured,
    new_record,
    normal,
    parser_of,
    torch_samples,
)

MLPS = ((8192, 768, 3072), (8192, 4096, 16384))  # rows, features in and out, hidden
ACTIVATIONS = ("relu", "gelu_tanh", "gelu_erf")
TABLE = (  # of layers in a card's table (benchmarks/method/standard.py): rows, features in, features out
    (2048, 768, 3072),
    (8192, 768, 3072),
    (8192, 4096, 16384),
    (2048, 4096, 16384),
    (2048, 1024, 4096),
    (8192, 1024, 4096),
    (32768, 1024, 4096),
)
LAUNCHES = 50


# What a launch costs.


def launches(samples: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    from fusionlab.kernels.launch import ffi_call as launch
    from fusionlab.kernels.ops import clock

    x = jnp.ones(4096, jnp.float32)
    large = jnp.ones(1 << 20, jnp.float32)

    def own(x: Any) -> Any:
        return jax.lax.optimization_barrier(x + 1.0)  # else XLA makes one kernel of them all

    def chain(step: Callable, count: int) -> Callable:
        return lambda x: functools.reduce(lambda v, _: step(v), range(count), x)

    def loop(step: Callable) -> Callable:
        body = chain(step, 10)
        return lambda x: jax.lax.scan(lambda c, _: (body(c), None), x, length=100)[0]

    off = {"xla_gpu_enable_command_buffer": ""}
    chains = {"xla": chain(own, LAUNCHES), "fusionlab": chain(clock.step, LAUNCHES)}
    loops = {"xla": compiled(loop(own), x), "fusionlab": compiled(loop(clock.step), x)}
    without = {n: compiled(f, x, **off) for n, f in chains.items()}
    found = {
        "in command buffers": measured({n: compiled(f, x) for n, f in chains.items()}, "xla", samples),
        "in command buffers, 4 MiB": measured({n: compiled(f, large) for n, f in chains.items()}, "xla", samples),
        "without command buffers": measured(without, "xla", samples),
        "scan of 10": measured(loops, "xla", samples),
        "host seconds a launch, without command buffers": {
            n: host_seconds(f, samples) / LAUNCHES for n, f in without.items()
        },
    }
    jax.block_until_ready(loops["fusionlab"]())
    before = launch.counters()
    jax.block_until_ready(loops["fusionlab"]())
    found["python calls in a run of the scan"] = launch.counters()["launches"] - before["launches"]
    found["launcher"] = "native" if launch.LAUNCHER else "python"
    return found


def host_seconds(run: Callable[[], Any], samples: int) -> float:
    """Median wall seconds of one call, waited for: where launches are what takes the time, that is what they cost."""
    import jax
    import numpy as np

    times = []
    for _ in range(samples * 2):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return float(np.median(times))


# One layer.


def products(samples: int) -> dict[str, Any]:
    import fusionlab as fl

    found = {}
    m, k, n = 8192, 4096, 16384
    args = normal(1, m, k), normal(2, k, n, scale=k**-0.5), normal(3, n)
    for name in ACTIVATIONS:
        layer = functools.partial(_layer, name)
        programs = {
            "bare product": compiled(lambda x, w, b: x @ w, *args),
            "jax.jit": compiled(layer, *args),
            "fusionlab": compiled(fl.fuse(layer), *args),
        }
        found[f"forward {name} {m}x{k}x{n}"] = measured(programs, "bare product", samples) | {
            "routes": routes(fl.fuse(layer), *args)
        }
    found["relu backward + bias gradient 16384x4096x8192"] = relu_backward(samples)
    return found


def _layer(name: str, x: Any, w: Any, b: Any) -> Any:
    return _act(name)(x @ w + b)


def _act(name: str) -> Callable:
    from fusionlab.models.layers import activation_named

    return activation_named(name)


def relu_backward(samples: int) -> dict[str, Any]:
    """relu'(h) * (dy @ w2^T) and its sum over rows, as XLA does it and with the kernel of gemm_epilogue's backward."""
    import jax
    import jax.numpy as jnp

    from fusionlab.kernels.ops.gemm_epilogue import cuda, reference

    m, k, n = 16384, 4096, 8192
    dy, w2 = normal(1, m, k), normal(2, n, k, scale=k**-0.5)
    mask = jax.random.bernoulli(jax.random.key(3), 0.5, (m, n))
    bits = jax.jit(reference.pack)(mask)

    def product(dy: Any, w2: Any) -> Any:
        return jax.lax.dot_general(dy, w2, (((1,), (1,)), ((), ())))

    def original(dy: Any, w2: Any, mask: Any) -> Any:
        dh = jnp.where(mask, product(dy, w2), 0)
        return dh, dh.sum(0)

    def ours(dy: Any, w2: Any, bits: Any) -> Any:
        return cuda.derive(bits, product(dy, w2), "relu", dbias=True)

    programs = {
        "bare product": compiled(product, dy, w2),
        "jax.jit": compiled(original, dy, w2, mask),
        "fusionlab": compiled(ours, dy, w2, bits),
    }
    return measured(programs, "jax.jit", samples)


# The perceptron.


def mlps(samples: int, torch: bool, flop_per_s: float) -> dict[str, Any]:
    """`flop_per_s` is what the device was measured to do, for the floor: the time of the products at that rate."""
    found = {}
    for m, k, n in MLPS:
        for name in ACTIVATIONS:
            found[f"{name} {m}x{k}x{n}"] = mlp(name, m, k, n, samples, torch)
            found[f"{name} {m}x{k}x{n}"]["floor_s"] = 12 * m * k * n / flop_per_s
            print(line(f"mlp {name} {m}x{k}x{n}", found[f"{name} {m}x{k}x{n}"]), flush=True)
    return found


def _mlp(name: str, x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
    return _act(name)(x @ w1 + b1) @ w2 + b2


def _stepped(fn: Callable) -> Callable:
    import jax

    def step(ct: Any, *args: Any) -> Any:
        out, back = jax.vjp(fn, *args)
        return out, back(ct)

    return step


def mlp(name: str, m: int, k: int, n: int, samples: int, torch: bool) -> dict[str, Any]:
    import fusionlab as fl

    args = (
        normal(1, m, k),
        normal(2, k, n, scale=k**-0.5),
        normal(3, n),
        normal(4, n, k, scale=n**-0.5),
        normal(5, k),
    )
    ct = normal(6, m, k)
    fn = functools.partial(_mlp, name)
    step, fused = _stepped(fn), _stepped(fl.fuse(fn))
    programs = {
        "jax.jit": compiled(step, ct, *args),
        "fusionlab": compiled(fused, ct, *args),
        "bare products": compiled(_bare, ct, *args),
    }
    wrong = differences(programs["jax.jit"](), programs["fusionlab"]())
    found = measured(programs, "jax.jit", samples)
    found["routes"] = routes(fused, ct, *args)
    found["largest relative difference"] = wrong
    if torch:
        found["torch"] = torch_mlp(name, m, k, n, samples)
    return found


def _bare(ct: Any, x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
    """The six products and nothing else."""
    h = x @ w1
    y = h @ w2
    dh = ct @ w2.T
    return y, dh @ w1.T, x.T @ dh, h.T @ ct


def torch_mlp(name: str, m: int, k: int, n: int, samples: int) -> dict[str, Any]:
    """torch eager and torch.compile on the same step, in device time; apart from the others' turns."""
    import torch

    act = {
        "relu": torch.relu,
        "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
        "gelu_erf": torch.nn.functional.gelu,
    }[name]
    make = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    args = [make(s) for s in ((m, k), (k, n), (n,), (n, k), (k,))]
    for scale, at in ((k**-0.5, 1), (n**-0.5, 3)):
        args[at] *= scale
    args = [a.requires_grad_() for a in args]
    ct = make((m, k))

    def fn(x: Any, w1: Any, b1: Any, w2: Any, b2: Any) -> Any:
        return torch.addmm(b2, act(torch.addmm(b1, x, w1)), w2)

    found = {}
    for label, f in (("torch eager", fn), ("torch.compile", torch.compile(fn))):

        def step(f: Any = f) -> Any:
            return torch.autograd.grad(f(*args), args, ct)

        found[label] = {"samples_s": torch_samples(step, samples)}
        found[label]["median_s"] = sorted(found[label]["samples_s"])[samples // 2]
    return found


def routes(fn: Callable, *args: Any) -> list[dict[str, str]]:
    """Each fused call of a program: its role, what it is, the implementation it takes and why."""
    import jax

    from fusionlab.device import Device
    from fusionlab.evidence.tuning import calls_in

    found = []
    for call in calls_in(jax.make_jaxpr(fn)(*args).jaxpr):
        op, role, params = call.primitive.op, call.primitive.role, dict(call.params)
        shapes = dict(call.shapes)
        decision = op.decide(role, shapes, Device.current(), **params)
        found.append(
            {
                "role": role,
                "activation": params["activation"],
                "implementation": decision.implementation,
                "why": decision.reason,
            }
        )
    return found


def main(argv: list[str]) -> int:
    """Prints a line for each measurement and writes the record. Returns the exit status."""
    parser = parser_of("gemm_epilogue", __doc__)
    options = parser.parse_args(argv)

    from fusionlab.device import Device
    from fusionlab.evidence.instruments.peaks import measure_peaks

    if Device.current().platform != "cuda":
        print("this benchmark needs a CUDA device; JAX sees none here", file=sys.stderr)
        return 2
    samples = 6 if options.quick else 40
    record, peaks = new_record("gemm_epilogue", options), measure_peaks()
    record["peaks"] = {"copy_bytes_per_s": peaks.copy_bytes_per_s, "bf16_flop_per_s": peaks.gemm_flop_per_s}
    for name, measure in (("launches", launches), ("products", products)):
        record[name] = measure(samples)
        for what, one in () if options.json else record[name].items():
            told = isinstance(one, dict) and any(isinstance(t, dict) for t in one.values())
            print(line(what, one) if told else f"{what}: {one}", flush=True)
    record["mlp"] = mlps(samples, has_torch(), record["peaks"]["bf16_flop_per_s"])
    finish(record, options, on_cuda=True)
    return 0
