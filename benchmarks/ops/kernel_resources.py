"""Registers and spills of every CUDA kernel on every architecture it is written for; needs NVRTC, no GPU.

`python -m benchmarks kernel_resources` prints them; `--record` writes them to the `limits.json` of the kernels, which the tests hold
later compiles to. Record with the NVRTC that the dev extra pins.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from typing import Any

from fusionlab.kernels.launch.compile import (
    ARCHS,
    KERNELS,
    CudaSource,
    Resources,
    compile_source,
    nvrtc_version,
    resources,
)
from fusionlab.kernels.launch.kernel_plan import KernelPlan, Launch
from fusionlab.kernels.ops.dot_product_attention.cudnn.probe import probe_plan
from fusionlab.kernels.ops.dot_product_attention.own import tiles
from fusionlab.kernels.ops.dot_product_attention.reference import ROUNDED_OFF
from fusionlab.kernels.ops.gated_matmul import plan as gated
from fusionlab.kernels.ops.gemm_epilogue import elementwise
from fusionlab.kernels.ops.group_norm import plan as group_norm
from fusionlab.kernels.ops.layer_norm import plan as norm
from fusionlab.kernels.ops.lerp import plan as lerp
from fusionlab.kernels.ops.multi_transformer.decode.persistent import plan as persistent
from fusionlab.kernels.ops.multi_transformer.decode.phased import plan as decode

LIMITS = KERNELS.parent / "choose" / "limits.json"
DTYPES = ("float32", "bfloat16", "float16", "float64")
# On the other architectures: each dtype, each kind of saved value, and each function of the special function unit once.
SAMPLE = (
    ("bfloat16", "relu"),
    ("bfloat16", "gelu_tanh"),
    ("bfloat16", "gelu_erf"),
    ("float32", "gelu_erf"),
    ("float32", "relu_tie"),
    ("float16", "silu"),
    ("float64", "tanh"),
)


def variants(arch: str) -> Iterator[tuple[str, KernelPlan]]:
    """Name -> plan of what is compiled for an architecture: everything for sm_90, a sample for the others."""
    for entry in ("spin", "step"):
        yield f"clock: {entry}", KernelPlan(f"clock/{entry}.cu", (), (Launch(entry, (1, 1, 1), (1, 1, 1), 0, ()),))
    pairs = [(d, a) for d in DTYPES for a in elementwise.KERNEL_ACTIVATIONS] if arch == "sm_90" else SAMPLE
    for dtype, activation in pairs:
        columns = (256, 255) if (dtype, activation) in SAMPLE else (256,)  # 255: one element at a time
        for n in columns:
            saves = elementwise.saves_for_backward(activation)[0]
            name = f"{dtype} {activation}" + ("" if n == 256 else " any columns")
            yield f"{name}: forward", elementwise.forward_plan(64, n, dtype, activation, bias=True, saves=saves)
            yield f"{name}: backward", elementwise.backward_plan(64, n, dtype, activation, dbias=True, saves=saves)[0]
    yield from _lerp(arch)
    yield from _norm(arch)
    yield from _group_norm(arch)
    yield from _attention(arch)
    yield from _gated(arch)
    if arch in decode.SOURCE.archs:
        nowhere = decode.Places({}, *[decode.NOTHING] * 7)
        for name, row in decode_rows().items():
            yield f"decode {name}", decode.decode_plan(row, [nowhere])
            if arch in persistent.SOURCE.archs and persistent.takes(row):
                yield (
                    f"decode {name} by one kernel",
                    persistent.persistent_plan(row, [nowhere] * 8, {}),
                )


def _lerp(arch: str) -> Iterator[tuple[str, KernelPlan]]:
    """Of lerp: element by element, and each kind of sum with what fits a vector and what does not."""
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
        "alike": ((64, 1024, 1024), (64, 1024, 1024), (64, 1024, 1024)),
        "images": ((16, 1, 1, 1), (16, 3, 244, 244), (1, 3, 1, 244)),
        "sum over rows": ((512, 1, 1024), (512, 1024, 1024), (1, 1024, 1)),
        "two sums": ((1024, 1, 1024), (1, 1024, 1024), (1, 1, 1)),
        "rows and columns": ((8191, 1), (1, 8191), (1, 1)),
    }
    some = shapes if arch == "sm_90" else ("images", "two sums")
    for dtype in DTYPES if arch == "sm_90" else ("float32", "bfloat16"):
        for kind in some:
            given = dict(zip(lerp.SLOTS, shapes[kind], strict=True))
            name = f"lerp {dtype} {kind}"
            yield f"{name}: forward", lerp.forward_plan(given, dtype)
            for wanted in (("x", "y"), ("x", "y", "w")):
                for i, one in enumerate(lerp.backward_passes(given, wanted, dtype)):
                    yield f"{name}: {' and '.join(wanted)}, pass {i + 1}", one.plan


def _norm(arch: str) -> Iterator[tuple[str, KernelPlan]]:
    """Of layer_norm, with everything there can be: rows of part of a warp, of a block, of two passes backward, of more than is held."""
    some = (1023, 1024, 16384)
    for dtype in ("float32", "bfloat16", "float16") if arch == "sm_90" else ("float32", "bfloat16"):
        for columns in (96, 768, 4096, 8192, 65536, *some) if arch == "sm_90" and dtype != "float16" else some:
            for kind in ("layer", "rms") if columns == 4096 else ("layer",):
                given = norm.NormLaunch(
                    kind, 4096, columns, dtype, tuple((s, dtype) for s in ("bias", "scale", "shift"))
                )
                name = f"norm {dtype} {kind} {columns}"
                yield f"{name}: forward", norm.forward_plan(given, 1e-5, residual=True, gives_sum=False, saves=False)
                yield (
                    f"{name}: forward, saves",
                    norm.forward_plan(given, 1e-5, residual=True, gives_sum=True, saves=True),
                )
                wanted = ("x", "scale", "bias", "shift")
                for ct_sum in (False, True):
                    for i, one in enumerate(norm.backward_passes(given, wanted, ct_sum, shifted=False)):
                        yield f"{name}: backward{' of both' if ct_sum else ''}, pass {i + 1}", one.plan
                for addends in (2, norm.MOST_ADDENDS):
                    if norm.adds_up(given, wanted, False, addends):
                        (one,) = norm.backward_passes(given, wanted, False, shifted=False, addends=addends)
                        yield f"{name}: backward of a sum of {addends}", one.plan


def _group_norm(arch: str) -> Iterator[tuple[str, KernelPlan]]:
    """Of group_norm: channels of diffusion models, narrow and odd ones, and as many as there can be, with SiLU and without."""
    every = ((320, 32), (512, 32), (1280, 32), (2560, 32), (3000, 24), (4096, 32), (8, 8), (1023, 11))
    for dtype in ("float32", "bfloat16", "float16") if arch == "sm_90" else ("float32", "bfloat16"):
        for channels, groups in every if arch == "sm_90" and dtype != "float16" else ((320, 32), (1023, 11)):
            for activation in ("silu", "none") if channels == 320 else ("silu",):
                vectors = tuple((s, dtype) for s in ("bias", "scale"))
                given = group_norm.Images(4, 4096, channels, groups, dtype, activation, vectors)
                name = f"group norm {dtype} {activation} {channels}"
                yield f"{name}: forward, saves", group_norm.forward_pass(given, 1e-5, saves=True).plan
                yield f"{name}: backward", group_norm.backward_pass(given, ("x", "scale", "bias")).plan


def _gated(arch: str) -> Iterator[tuple[str, KernelPlan]]:
    """Of gated_matmul: each way the weights lie, each activation of feed-forwards, many rows and few, and sizes that fit no vector."""
    if arch not in gated.SOURCE.archs:
        return
    everything = [("bfloat16", a, t) for a in ("silu", "gelu_tanh", "gelu_erf", "relu") for t in (False, True)]
    for dtype, activation, transposed in (
        (*everything, ("float16", "silu", False)) if arch == "sm_90" else everything[:2]
    ):
        sizes = ((4096, 4096, 1024), (64, 4096, 1024), (4096, 4095, 1023))
        for rows, columns, inner in sizes if activation == "silu" else sizes[:1]:
            for saves in (False, True):
                plan = gated.forward_plan(rows, columns, inner, dtype, activation, transposed=transposed, saves=saves)
                kind = f"{'N x K' if transposed else 'K x N'}{', saves' if saves else ''}"
                yield f"gated {dtype} {activation} {rows}x{inner}x{columns} {kind}", plan


def decode_rows() -> dict[str, decode.Row]:
    """Layers that decode one token a text: few and many texts, grouped heads, norms before and behind, weights turned and gated."""
    found = {}
    for dtype, e, h, g, d, rows, pre_norm, turned in (
        ("bfloat16", 4096, 32, 32, 128, 1, True, False),
        ("bfloat16", 4096, 32, 32, 128, 16, True, False),
        ("bfloat16", 1024, 16, 16, 64, 1, True, False),
        ("bfloat16", 4096, 32, 8, 128, 4, True, True),
        ("float16", 768, 12, 12, 64, 3, False, False),
    ):
        norm = "layer" if pre_norm and decode.fuses_norm(rows, e) else None
        own = pre_norm and norm is None
        attention = decode.AttentionPhase(
            rows,
            h,
            g,
            d,
            1024,
            "BSHD",
            False,
            True,
            d**-0.5,
            False,
            False,
            False,
            False,
            1 if turned else None,
            d if turned else 0,
        )
        found[f"{dtype} E{e} of {rows}"] = decode.Row(
            dtype,
            True,
            pre_norm,
            ("layer", "layer"),
            (1e-5, 1e-5),
            "silu" if turned else "gelu_tanh",
            decode.ProductPhase(rows, e, (h * d, g * d, g * d), turned, norm=norm, strips=own),
            attention,
            decode.ProductPhase(rows, h * d, (e,), turned, strips=True),
            decode.ProductPhase(rows, e, (4 * e,), turned, turned, norm, own),
            decode.ProductPhase(rows, 4 * e, (e,), turned, strips=True),
        )
    return found


def _attention(arch: str) -> Iterator[tuple[str, KernelPlan]]:
    """Of attention: each kind of operand of the scores, each way of saving, the sizes with most registers."""
    if arch not in tiles.SOURCE.archs:
        return
    scores = ("bool", (0, 0, 1024, 1))
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"is_causal": True},
        "local": {"window": (255, 0)},
        "mask": {"mask": scores, "mask_value": -1e9},
        "bias": {"bias": ("bfloat16", scores[1])},
        "dropout": {"factors": scores},
        "dropout by key": {"dropout": scores[1], "keep": 0.9},
    }
    yield "attention probe", probe_plan(64, 1024)
    everything = [("bfloat16", f, k) for f in (64, 128) for k in kinds]
    everything += [("float32", f, k) for f in (64, 128) for k in ("causal", "mask")] + [("float16", 64, "causal")]
    for dtype, features, kind in (
        everything if arch == "sm_90" else (("bfloat16", 128, "mask"), ("float32", 64, "mask"))
    ):
        strides = (1024 * features, features, features)
        sizes = (2, 4, 1024, 1024, features, features)
        call = tiles.TiledAttention(dtype, *sizes, *(strides,) * 4, features**-0.5, **kinds[kind])
        saves = "logsumexp" if call.plain else "max_and_log_sum"
        saves += ROUNDED_OFF if dtype != "float32" else ""
        name = f"attention {dtype} {features} {kind}"
        yield f"{name}: forward", tiles.forward_plan(call, saves)
        yield f"{name}: query", tiles.query_plan(call, saves)
        for some in tiles.together(call, ("key", "value")):
            plan = tiles.keys_plan(call, saves, key="key" in some, value="value" in some)
            yield f"{name}: {' and '.join(some)}", plan


def measure(arch: str, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, dict[str, Resources]]:
    """Name of the variant, if it is `wanted` -> kernel it launches -> what that takes."""
    found = {}
    for name, spec in variants(arch):
        if not wanted(name):
            continue
        source = CudaSource(spec.source, tuple(one.entry for one in spec.launches))
        taken = resources(compile_source(source, spec.options, arch).log)
        found[name] = {launch.entry: taken[launch.entry] for launch in spec.launches}
    return found


def main(argv: list[str]) -> int:
    """Prints a line for each kernel, and with `--record` writes the file. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks kernel_resources", description=__doc__)
    parser.add_argument("--record", action="store_true", help="write limits.json")
    record = parser.parse_args(argv).record
    found = {arch: measure(arch) for arch in ARCHS}
    for arch, by_variant in found.items():
        for name, by_entry in by_variant.items():
            for entry, taken in by_entry.items():
                print(f"{arch} {name}: {entry}: {taken}")
    if record:
        LIMITS.write_text(_text(found), encoding="utf-8")
    return 0


def _text(found: dict[str, dict[str, dict[str, Resources]]]) -> str:
    """JSON with a line for each variant: the registers of each kernel."""
    head = {"command": "python -m benchmarks kernel_resources --record", "nvrtc": ".".join(map(str, nvrtc_version()))}
    blocks = []
    for arch, by_variant in found.items():
        registers = {name: {e: r.registers for e, r in by_entry.items()} for name, by_entry in by_variant.items()}
        lines = ",\n".join(f"   {json.dumps(name)}: {json.dumps(taken)}" for name, taken in registers.items())
        blocks.append(f"  {json.dumps(arch)}: {{\n{lines}\n  }}")
    fields = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    return "{\n" + ",\n".join([*fields, ' "registers": {\n' + ",\n".join(blocks) + "\n }"]) + "\n}\n"
