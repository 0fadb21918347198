"""Two processes with two CPU devices each, on one machine (`jax.distributed`, sums through gloo): the numbers of one device, one process
that writes, and an end where one of them is killed. What they run is in worker.py.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from tests.simulated import environment

from .worker import ENCODER, LOCAL

COUNT = 2


def run(scenario, folder, limit_s):
    """What each process printed (name -> last value), its errors, how it ended, and after how many seconds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    outputs = [(folder / f"{i}.out", folder / f"{i}.err") for i in range(COUNT)]
    started = []
    begun = time.monotonic()
    try:
        for i, (out, err) in enumerate(outputs):
            command = [sys.executable, "-m", "processes.worker", scenario, str(i), str(COUNT), port, str(folder)]
            with out.open("w") as stdout, err.open("w") as stderr:
                started.append(subprocess.Popen(command, env=environment(LOCAL), stdout=stdout, stderr=stderr))
        ended = [p.wait(timeout=max(1.0, limit_s - (time.monotonic() - begun))) for p in started]
    finally:
        for p in started:
            p.kill()
            p.wait()
    told = []
    for (out, err), code in zip(outputs, ended, strict=True):
        lines = [line for line in out.read_text().splitlines() if line.startswith('["')]
        told.append(SimpleNamespace(said=dict(map(json.loads, lines)), errors=err.read_text(), code=code))
    return told, time.monotonic() - begun


# Scenario -> what each of its processes finds.
SITES = {
    "one_layer": {ENCODER: 1},
    "layers": {ENCODER: 2},
    "train_step": {
        "layer_norm": 2,  # left as they are on a CPU, and their gradients with them
        **{
            name + grad: n for name, n in (("gemm_epilogue", 6), ("dot_product_attention", 1)) for grad in ("", "_grad")
        },
    },
}


@pytest.fixture(scope="module", params=SITES)
def scenario(request):
    return request.param


@pytest.fixture(scope="module")
def told(scenario, tmp_path_factory):
    """What each process of a scenario said."""
    told, _ = run(scenario, tmp_path_factory.mktemp(scenario), 400)
    assert [one.code for one in told] == [0, 0], "\n".join(one.errors[-3000:] for one in told)
    return [one.said for one in told]


of_layers = pytest.mark.parametrize("scenario", ["one_layer", "layers"], indirect=True, scope="module")


def test_a_train_step_and_layers_over_processes_equal_one_device(told):
    assert [said["error"] <= 1e-5 for said in told] == [True, True], [said["error"] for said in told]


def test_processes_find_the_same(told, scenario):
    assert [said["sites"] for said in told] == [SITES[scenario]] * COUNT


@of_layers
def test_a_comparison_knows_all_devices_and_stops_in_all_processes_at_once(told, scenario):
    (first, second) = (said["devices"] for said in told)
    sums = 2 * SITES[scenario][ENCODER]
    assert first[:4] == second[:4] == [COUNT * LOCAL, COUNT, {"data": COUNT, "tp": LOCAL}, {"all-reduce": sums}]
    assert first[4] != second[4]  # each has times of its own devices
    assert len(first[4]) == len(second[4]) == LOCAL
    assert told[0]["samples"] == told[1]["samples"]
    assert any("devices of other processes" in note for note in told[0]["notes"])


@of_layers
def test_one_process_writes(told):
    assert [said["wrote"] for said in told] == [[True, True], [False, False]]


def test_a_process_that_is_killed_in_a_step_ends_the_others(tmp_path):
    (first, second), seconds = run("killed_in_a_step", tmp_path, 120)
    assert second.code == -signal.SIGKILL
    assert first.said["step"] >= 3
    assert "end" not in first.said
    assert first.code not in (0, None)
    assert any(word in first.errors for word in ("heartbeat", "unhealthy", "closed by peer", "Connection reset")), (
        first.errors[-3000:]
    )
    assert seconds < 100


def test_a_process_that_is_killed_before_a_plan_is_shared_is_an_error_of_the_others(tmp_path):
    (first, second), seconds = run("killed_before_the_plan", tmp_path, 120)
    assert second.code == -signal.SIGKILL
    assert first.said == {"shared": True}
    assert first.code not in (0, None)
    # The service's silence comes to the call that waits and to JAX's own watch, which ends the process; either may be the first.
    ours = "ProcessError: share_plan: this is process 0 of 2, and not all of them answered"
    expected = (
        ours if first.code > 0 else "Terminating process because the JAX distributed service detected fatal errors"
    )
    assert expected in first.errors, first.errors[-3000:]
    assert seconds < 100
