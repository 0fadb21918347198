"""One of several processes that run one program together, with two CPU devices each. Not a test module:

    python -m processes.worker SCENARIO INDEX COUNT PORT FOLDER

In the folder tests. It prints lines of JSON, [name, value]; what each scenario does is in its docstring.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

LOCAL = 2  # devices of a process
SILENCE_S = 10  # until a process that is not heard of counts as dead
ENCODER = "multi_devices_multi_transformer_encoder"


def tell(name: str, value: Any) -> None:
    print(json.dumps([name, value]), flush=True)


def mesh_of(*axes: str) -> Any:
    """Processes along the first axis, the devices of each along the second."""
    return jax.make_mesh((jax.process_count(), LOCAL), axes, axis_types=(AxisType.Auto,) * 2)


def placed(tree: Any, mesh: Any, specs: Any) -> Any:
    """Arrays that every process has, over the devices of all; `specs` is one, a function of a path, or a tree like `tree`."""

    def put(a: Any, spec: P) -> Any:
        host = np.asarray(a)
        return jax.make_array_from_callback(host.shape, NamedSharding(mesh, spec), lambda index: host[index])

    if isinstance(specs, P):
        return jax.tree.map(lambda a: put(a, specs), tree)
    if callable(specs):
        return jax.tree.map_with_path(lambda path, a: put(a, specs(path)), tree)
    return jax.tree.map(put, tree, specs)


def far(got: Any, want: Any) -> float:
    """The largest error of any array, relative to its largest magnitude, or to 1."""
    from jax.experimental import multihost_utils

    whole = jax.tree.leaves(multihost_utils.process_allgather(got, tiled=True))
    pairs = [
        (np.asarray(g, np.float64), np.asarray(w, np.float64))
        for g, w in zip(whole, jax.tree.leaves(want), strict=True)
    ]
    return max(float(np.max(np.abs(g - w)) / max(1.0, np.max(np.abs(w)))) for g, w in pairs)


def train_step(_: Path) -> None:
    """A fused train step that XLA splits: data parallel between processes, tensor parallel inside one; against one device."""
    from fusers.placed import spec_of

    import fusionlab as fl
    from fusionlab.models import transformer

    @jax.jit  # one program that draws all
    def drawn() -> Any:
        params = transformer.init(jax.random.key(0), 1, 32)
        first, second, _ = transformer.init_adam(params)
        state = first, jax.tree.map(lambda v: v + 1e-2, second), jnp.int32(100)
        return params, state, [transformer.inputs(jax.random.key(i), 8, 8, 32) for i in (1, 2)]

    step = partial(transformer.train_step, heads=8, causal=True)
    params, state, batch = drawn()
    mesh = mesh_of("data", "tensor")
    trees = [placed(tree, mesh, partial(spec_of, True)) for tree in (params, state)]
    args = [*trees, *placed(batch, mesh, P("data"))]
    tell("error", far(jax.jit(fl.fuse(step))(*args), jax.jit(step)(params, state, *batch)))
    tell("sites", {name: n for name, n in fl.find(step, *args).counts().items() if n})


def layers(folder: Path, count: int = 2) -> None:
    """Fused layers that say themselves how they are split: data parallel between processes, tensor parallel inside one.

    Against one device. Then a comparison, whose loops end by the clock, and its file.
    """
    from fusers.spread import HEADS, PRE, encoder
    from fusers.transformer import layer_parts as parts

    import fusionlab as fl

    mesh = mesh_of("data", "tp")
    body, (made, _), (given, _), _ = encoder(PRE, HEADS, True)
    made, given = made[:count], given[:count]
    alone = encoder(PRE, HEADS, False)[0]
    rows = parts.inputs()
    over = jax.shard_map(body, mesh=mesh, in_specs=(given, P("data")), out_specs=P("data"))
    args = [placed(made, mesh, given), placed(rows, mesh, P("data"))]
    fused = fl.fuse(over, passes=[ENCODER])
    tell("sites", {name: n for name, n in fl.find(over, *args, passes=[ENCODER]).counts().items() if n})
    tell("error", far(fused(*args), jax.jit(alone)(made, rows)))

    def other(made: Any, x: Any) -> Any:  # what differs is timed
        return jnp.tanh(over(made, x))

    result = fl.compare(over, other, *args, samples=4, budget_s=1.0, grad=False)
    found = result.devices
    assert found is not None
    assert result.timing is not None
    sent = {kind: one.count for kind, one in found.collectives[0].after.items()}
    tell("devices", [found.devices, found.processes, dict(found.mesh), sent, sorted(found.device_s["after"])])
    tell("samples", [len(result.timing.before.samples_s), result.timing.before.repeats])
    tell("notes", list(result.notes))
    mine = folder / f"result-{jax.process_index()}.json"
    result.save(mine)
    result.to_html(mine.with_suffix(".html"))
    tell("wrote", [mine.exists(), mine.with_suffix(".html").exists()])


def killed_in_a_step(_: Path) -> None:
    """The last process is killed between two steps that sum over all."""
    import fusionlab as fl

    mesh = mesh_of("data", "tensor")
    step = jax.jit(lambda x, w: jnp.mean(fl.fuse(lambda x, w: jax.nn.relu(x @ w))(x, w)))
    args = placed(np.ones((8, 8), np.float32), mesh, P("data")), placed(np.ones((8, 8), np.float32), mesh, P())
    for i in range(10_000):
        jax.block_until_ready(step(*args))
        tell("step", i)
        if i == 3 and jax.process_index() == jax.process_count() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)


def killed_before_the_plan(_: Path) -> None:
    """The last process is killed before it shares the plan file that the others wait for."""
    import fusionlab as fl

    fl.share_plan()
    tell("shared", True)
    if jax.process_index() == jax.process_count() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)
    fl.share_plan()
    tell("shared again", True)


SCENARIOS: dict[str, Callable[[Path], None]] = {
    fn.__name__: fn for fn in (layers, train_step, killed_in_a_step, killed_before_the_plan)
} | {"one_layer": partial(layers, count=1)}

if __name__ == "__main__":
    scenario, index, count, port, folder = sys.argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(index), heartbeat_timeout_seconds=SILENCE_S)
    SCENARIOS[scenario](Path(folder))
    tell("end", int(index))
