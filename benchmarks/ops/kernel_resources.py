"""Registers and spills of every CUDA kernel on every architecture it is written for; needs NVRTC, no GPU.

`python -m benchmarks kernel_resources` prints them; `--record` writes them to the `limits.json` of the kernels, which the tests hold
later compiles to. Record with the NVRTC that the dev extra pins.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

from fusionlab.kernels.launch.architectures import ARCHS
from fusionlab.kernels.launch.compile import KERNELS, CudaSource, Resources, compile_source, nvrtc_version, resources
from fusionlab.kernels.sources import variants

LIMITS = KERNELS.parent / "choose" / "limits.json"


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
