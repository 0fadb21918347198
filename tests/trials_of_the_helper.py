"""Trials of the process that runs trials, for test_simulated.py. Not a test module."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import jax
import pytest

TRIALS: dict[str, Callable[[], str | None]] = {}
AROUND: list[str] = []  # what surrounds the trial that runs


def trial(fn: Callable[[], str | None]) -> Callable[[], str | None]:
    TRIALS[fn.__name__] = fn
    return fn


@contextlib.contextmanager
def surroundings() -> Iterator[None]:
    assert AROUND == []
    assert not jax.config.jax_enable_x64
    AROUND.append("here")
    try:
        with jax.enable_x64(True):
            yield
    finally:
        AROUND.remove("here")


@trial
def right() -> None:
    assert len(jax.devices()) == 8


@trial
def wrong() -> str:
    return "seven instead of eight"


@trial
def raises() -> None:
    raise ValueError("something went wrong")


@trial
def an_error_does_not_come() -> None:
    with pytest.raises(ValueError, match="never"):
        pass


@trial
def leaves() -> None:
    sys.exit(3)


@trial
def ends_the_process() -> None:
    print("last words", flush=True)
    os._exit(7)


@trial
def never_ends() -> None:
    while True:
        time.sleep(60)


@trial
def prints() -> str:
    """In every way, of which none may get into the answers; and reads, which may not take the next request."""
    print("printed")
    sys.__stdout__.write("written\n")
    sys.__stdout__.flush()
    os.write(1, b"without Python\n")
    subprocess.run([sys.executable, "-c", "import sys; print('by a child', len(sys.stdin.read()))"], check=True)
    return f"read {sys.stdin.read()!r}"


@trial
def is_surrounded() -> None:
    assert AROUND == ["here"]
    assert jax.config.jax_enable_x64
