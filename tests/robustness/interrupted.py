"""Run by test_interrupts.py in a process of its own: a measurement is interrupted, then everything is used again."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time

import jax
from jax import numpy as jnp
from tqdm.auto import tqdm

import fusionlab as fl
from fusionlab.evidence.instruments.timing import time_pair
from fusionlab.kernels.choose.choices import CHOICES

X, W, B = jnp.ones((64, 64)), jnp.ones((64, 64)) / 64, jnp.zeros(64)
LONG = {"samples": 1_000_000, "budget_s": 100.0}
SHORT = {"samples": 4, "budget_s": 5.0}


def layer(x, w, b):
    return jax.nn.relu(x @ w + b)


def same(x, w, b):
    return layer(x, w, b)


VERBS = {
    "compare": lambda: fl.compare(
        layer, same, X, W, B, numerics=False, memory=False, grad=False, progress=True, **LONG
    ),
    "time_pair": lambda: time_pair(layer, same, X, W, B, progress=True, **LONG),
    "bisect": lambda: fl.bisect(layer, X, W, B, passes="gemm_epilogue", of="time", progress=True, **LONG),
}


def interrupt_when_measuring():
    """SIGINT to this process once samples are being taken, which is while nothing is collected."""
    while gc.isenabled():
        time.sleep(0.005)
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)


def main(verb):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with the signal ignored
    threading.Thread(target=interrupt_when_measuring, daemon=True).start()
    try:
        VERBS[verb]()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    assert gc.isenabled()
    assert not tqdm._instances, list(tqdm._instances)
    assert CHOICES.trial == {}
    assert float(jax.jit(layer)(X, W, B)[0, 0]) == 1.0
    found = fl.compare(layer, same, X, W, B, **SHORT)
    assert found.numerics.regressions == ()
    assert found.timing is not None
    print("usable")


if __name__ == "__main__":
    main(sys.argv[1])
