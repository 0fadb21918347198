"""A simulated GPU: a CUDA device that is not there, whose clock moves by what a test says each program takes."""

from __future__ import annotations

import jax
import pytest

from fusionlab.device import Device
from fusionlab.evidence.instruments import device_clock
from fusionlab.evidence.instruments.program import Program
from fusionlab.kernels.ops import clock


class SimulatedGpu:
    """`takes`: program name -> device seconds of a call; `log`: what was queued on its stream, in order."""

    def __init__(self, device):
        self.device, self.now_s = device, 0.0
        self.takes, self.log = {}, []
        self._marks = {}

    def run(self, name):
        self.log.append(name)
        self.now_s += self.takes[name]

    def wait(self, nanoseconds):
        assert 0 < nanoseconds < 1e8
        return lambda: self.log.append("wait")

    def mark(self, slot):
        def record():
            self.log.append(f"mark {slot}")
            self._marks[slot] = self.now_s

        return record

    def elapsed_s(self, first, second):
        return self._marks[second] - self._marks[first]


@pytest.fixture
def gpu(monkeypatch):
    """A `SimulatedGpu`, an sm_90, that this process seems to have; programs run on the CPU all the same."""
    simulated = SimulatedGpu(Device.of("sm_90"))
    for name in ("wait", "mark", "elapsed_s"):
        monkeypatch.setattr(clock, name, getattr(simulated, name))
    monkeypatch.setattr(clock, "device", lambda: jax.devices()[0])
    monkeypatch.setattr(device_clock, "SAMPLE_S", 1e9)  # how long a call takes here makes no sample shorter
    monkeypatch.setattr(Device, "current", classmethod(lambda cls: simulated.device))
    ready = Program.ready

    def queued(program, n):
        def queue(run):
            simulated.run(program.name)
            return run()

        return [lambda run=run: queue(run) for run in ready(program, n)]

    monkeypatch.setattr(Program, "ready", queued)
    return simulated
