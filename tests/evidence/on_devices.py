"""What a comparison, a graph and its pictures say of programs on four devices. Trials for test_on_devices.py, whose cases have their
names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fusionlab as fl
from fusionlab.graph.xla.collectives import Traffic
from fusionlab.verbs.comparison import Comparison
from fusionlab.viz.export import to_svg, view_model
from fusionlab.viz.html.inspector import inspect
from fusionlab.viz.html.report import report_html
from fusionlab.viz.html.tabs import evidence_tabs

TRIALS: dict[str, Callable[[], None]] = {}
SPECS = (P("data"), P(None, "tensor"), P("tensor"), P())
SHAPES = ((8, 16), (16, 32), (32, 16), (16,))
SENT = {"all-reduce": Traffic(1, 4 * 16 * 4)}  # a device's rows of the result, in f32


def trial(fn: Callable[[], None]) -> Callable[[], None]:
    TRIALS[fn.__name__] = fn
    return fn


def mesh() -> Any:
    return jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])


def mlp(x: Any, up: Any, down: Any, bias: Any) -> Any:
    """One feed-forward whose parts XLA sums over the devices."""
    return x + jax.nn.gelu(x @ up) @ down + bias


def mapped(x: Any, up: Any, down: Any, bias: Any) -> Any:
    """The same, with a sum of its own."""
    return x + jax.lax.psum(jax.nn.gelu(x @ up) @ down, "tensor") + bias


def arguments() -> list[Any]:
    made = (jnp.cos(jnp.arange(16 * s[0], dtype=jnp.float32).reshape(s[0], -1)[:, : s[-1]]) for s in SHAPES[1:3])
    up, down = (jnp.resize(a, s) for a, s in zip(made, SHAPES[1:3], strict=True))
    args = (jnp.ones(SHAPES[0]) / 4, up, down, jnp.ones(SHAPES[3]))
    return [jax.device_put(a, NamedSharding(mesh(), s)) for a, s in zip(args, SPECS, strict=True)]


def over() -> Any:
    return jax.shard_map(mapped, mesh=mesh(), in_specs=SPECS, out_specs=P("data"))


def measured(fn: Any, **options: Any) -> Any:
    return fl.compare(fn, fl.fuse(fn), *arguments(), samples=4, budget_s=1, **options)


@trial
def a_comparison_names_mesh_devices_and_collectives_before_and_after() -> None:
    for fn in (mlp, over()):
        result = measured(fn, grad=False)
        found = result.devices
        assert found is not None
        assert (dict(found.mesh), found.devices, found.processes) == ({"data": 2, "tensor": 2}, 4, 1)
        (forward,) = found.collectives
        assert (forward.what, forward.before, forward.after) == ("call", SENT, SENT), forward
        assert "on 4 devices, mesh data=2 x tensor=2" in str(result)
        assert "collectives per device, call: all-reduce 1 (256 B) -> 1 (256 B)" in str(result)
        rows = {(r[0], r[1], r[2]): r[3] for r in result.rows()}
        assert rows["collectives", "call: all-reduce", "after"] == 1
        assert rows["bytes of collectives", "call: all-reduce", "before"] == 256
        page = result.to_html()
        assert "4 devices, mesh data=2 x tensor=2" in page
        text = re.sub(r"<[^>]*>|\s+", " ", page)
        assert re.search(r"Collectives .*call +all-reduce +1 +1 +256 B +256 B", text), text[-3000:]
        assert Comparison.from_dict(json.loads(result.to_json())).devices == found
        kernels = next(tab["html"] for tab in evidence_tabs(result, None) if tab["name"] == "Kernels")
        assert "all-reduce" in kernels


@trial
def gradients_and_each_device_have_numbers_of_their_own() -> None:
    def bare(*args: Any) -> Any:
        return jnp.tanh(mlp(*args))

    result = fl.compare(mlp, bare, *arguments(), samples=2, budget_s=1, numerics=False)
    assert [c.what for c in result.devices.collectives] == ["call", "gradient of the call"]
    backward = result.devices.collectives[1]
    assert backward.before["all-reduce"].bytes > SENT["all-reduce"].bytes
    for version in ("before", "after"):
        times = result.devices.device_s[version]
        assert list(times) == ["0", "1", "2", "3"]
        assert all(0 < s < 10 for s in times.values())
    assert "time until a device is done (first to last): before " in str(result)
    frame = {r[0] for r in result.rows()}
    assert "time of a device" in frame
    assert "Time of each device" in result.to_html()


@trial
def on_one_device_nothing_is_said() -> None:
    args = [jax.device_put(a, jax.devices()[0]) for a in arguments()]
    result = fl.compare(mlp, fl.fuse(mlp), *args, samples=2, budget_s=1, grad=False)
    assert result.devices is None
    assert "devices" not in str(result).replace(Path(__file__).name, "")
    assert "Collectives" not in result.to_html()
    assert Comparison.from_dict(result.to_dict() | {"devices": None}).devices is None


@trial
def a_graph_shows_mesh_shardings_and_sums() -> None:
    args = arguments()
    graph = fl.trace(over(), *args)
    text = str(graph)
    assert "%0:f32[8,16] x P('data'), %1:f32[16,32] up P(None, 'tensor')" in text
    assert "shard_map %0 %1 %2 %3 [mesh data=2 x tensor=2, " in text
    assert text == str(fl.trace(over(), *args))
    view = view_model(graph)
    assert "mesh data=2 x tensor=2" in view["header"]
    assert view["picture"]["mesh"] == "shard_map, mesh data=2 x tensor=2"
    assert ("x", "f32[8,16] P('data')") in [(card["name"], card["type"]) for card in view["picture"]["inputs"]]
    assert "psum over tensor: 256 B" in to_svg(graph)
    (summed,) = (n for n in graph.nodes() if n.primitive.startswith("psum"))
    told = inspect(graph, None, summed).html
    assert "tensor" in told
    assert "256 B" in told
    of_argument = inspect(graph, None, "%1").html
    assert "sharded" in of_argument
    fused = fl.find(over(), *args).apply()
    assert "P(None, 'tensor')" in str(fused)


@trial
def a_region_that_leaves_axes_to_xla_says_which_are_its_own() -> None:
    fn = jax.shard_map(
        lambda x: jax.lax.psum(x.sum(0), "data"), mesh=mesh(), in_specs=P("data"), out_specs=P(), axis_names={"data"}
    )
    assert "mesh data=2 x tensor=2, manual over data" in str(fl.trace(fn, arguments()[0]))


@trial
def what_xla_makes_of_it_is_compiled_for_the_mesh() -> None:
    for fn in (mlp, over()):
        found = fl.find(fn, *arguments())
        assert found.xla().counts["collective"] == 1
        assert found.xla(fused=True).counts["collective"] == 1
        assert "all-reduce" in report_html(found.graph, found, evidence=measured(fn, grad=False))
