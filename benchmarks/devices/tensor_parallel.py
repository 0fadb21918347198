"""An encoder layer whose heads and features are spread over 1, 2 and 4 GPUs of one host, fused and unfused on the same GPUs.

    python -m benchmarks tensor_parallel [--quick] [--devices 1,2,4] [--embed E] [--seq S] [--batch B] [--dtype NAME] [-o FILE]

E 4096, heads of 128, F 4 E, S 2048, B 8, bfloat16, causal, forward: `fusionlab.models.parallel.encoder` of one layer. "jax.jit" is the
program as it is written, "layers" with the passes multi_devices_multi_transformer_*, "pieces" with the default ones; the same passes for
any number of devices. Before it is timed each is compared with one device in float32 (relative L2 error). Wall time of a call, blocked on
the results of all devices, the three in turns; and from the compiled programs what a device sends. On a machine without GPUs it runs on
simulated CPU devices (XLA_FLAGS=--xla_force_host_platform_device_count=4), as a check and with nothing to publish.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from ..measuring import compared, finish, line, new_record, parser_of

HEAD = 128
PASSES = tuple(
    f"multi_devices_multi_transformer_{kind}{end}" for kind in ("encoder", "decoder") for end in ("", "_fuse_qkv")
)
VARIANTS: dict[str, Any] = {"jax.jit": (), "layers": PASSES, "pieces": None}
ERROR = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 1e-5}


def main(argv: list[str]) -> int:
    """Runs the benchmark; returns the exit status: 1 where a result is wrong."""
    options = _options(argv)
    import jax

    platform = jax.devices()[0].platform
    record = new_record("tensor_parallel", options)
    record["shape"] = {k: getattr(options, k) for k in ("batch", "seq", "embed", "dtype")} | {"ffn": 4 * options.embed}
    record |= {"command": " ".join(["python -m benchmarks tensor_parallel", *argv]), "cases": {}}
    wrong = False
    for count in options.devices:
        if count > jax.device_count():
            print(f"{count} devices: left out, there are {jax.device_count()}", file=sys.stderr)
            continue
        found = record["cases"][str(count)] = case(count, options)
        wrong |= any(one["error"] > ERROR[options.dtype] for one in found["programs"].values())
        told = ", ".join(f"{n} {one['error']:.1e}" for n, one in found["programs"].items())
        print(
            f"{line(f'{count} devices', found['times'])} | error {told}",
            file=sys.stderr if options.json else sys.stdout,
        )
    finish(record, options, platform == "gpu" and len(record["cases"]) > 1)
    return int(wrong)


def _options(argv: list[str]) -> argparse.Namespace:
    parser = parser_of("tensor_parallel", __doc__)
    parser.add_argument("--devices", default="1,2,4", help="numbers of devices, with commas between")
    parser.add_argument(
        "--embed", type=int, default=4096, help="E, a multiple of the size of a head and of the devices"
    )
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--head", type=int, default=HEAD, help="features of a head")
    parser.add_argument("--dtype", choices=sorted(ERROR), default="bfloat16")
    parser.add_argument("--samples", type=int, help="of each program; 60, or 6 with --quick")
    options = parser.parse_args(argv)
    options.devices = [int(n) for n in options.devices.split(",")]
    options.samples = options.samples or (6 if options.quick else 60)
    return options


def case(count: int, options: argparse.Namespace) -> dict[str, Any]:
    """One number of devices: of each program its error, sites and collectives; the times of all."""
    import jax
    import jax.numpy as jnp

    import fusionlab as fl
    from fusionlab.graph.xla.collectives import traffic
    from fusionlab.models import parallel, transformer

    mesh = jax.make_mesh((count,), ("tensor",), devices=jax.devices()[:count], axis_types=(jax.sharding.AxisType.Auto,))
    heads = options.embed // options.head
    params = transformer.init(jax.random.key(0), 1, options.embed)
    x = transformer.inputs(jax.random.key(1), options.batch, options.seq, options.embed)
    reference = jax.jit(lambda p, x: transformer.encoder(p, x, heads=heads, causal=True))(params, x)
    cast = lambda tree: jax.tree.map(lambda a: a.astype(options.dtype), tree)  # noqa: E731
    layer = parallel.encoder(mesh, params, heads=heads, causal=True)
    args = (
        parallel.place(cast(params), mesh, parallel.specs(params)),
        parallel.place(cast(x), mesh, jax.sharding.PartitionSpec()),
    )

    @jax.jit
    def error(got: Any, want: Any) -> Any:
        return jnp.linalg.norm(got.astype(jnp.float32) - want) / jnp.linalg.norm(want)

    want = parallel.place(reference, mesh, jax.sharding.PartitionSpec())
    programs, told = {}, {}
    for name, passes in VARIANTS.items():
        fn = layer if passes == () else fl.fuse(layer, passes=passes)
        compiled = jax.jit(fn).lower(*args).compile()
        sites = {} if passes == () else fl.find(layer, *args, passes=passes).counts()
        programs[name] = lambda compiled=compiled: compiled(*args)
        told[name] = {
            "error": float(error(compiled(*args), want)),
            "sites": {n: k for n, k in sites.items() if isinstance(k, int) and k},
            "collectives": {k: {"count": t.count, "bytes": t.bytes} for k, t in traffic(compiled.as_text()).items()},
        }
    return {"mesh": dict(mesh.shape), "programs": told, "times": times(programs, options.samples)}


def times(programs: Mapping[str, Callable[[], Any]], samples: int) -> dict[str, Any]:
    """Wall seconds of calls that are blocked on, the programs in turns."""
    import jax

    from fusionlab.evidence.instruments.turns import take_turns

    def sampler(run: Callable[[], Any]) -> Callable[[], float]:
        def sample() -> float:
            start = time.perf_counter()
            jax.block_until_ready(run())
            return time.perf_counter() - start

        return sample

    for run in programs.values():
        for _ in range(3):
            jax.block_until_ready(run())
    taken, _ = take_turns({name: sampler(run) for name, run in programs.items()}, samples)
    return compared(taken, "jax.jit", 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
