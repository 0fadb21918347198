"""Programs of several processes (`jax.distributed`): which process prints and writes, and how they agree.

Process 0 prints and writes. It also makes decisions that depend on a clock: processes that stopped at different samples would wait for
each other for ever.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from .errors import ProcessError

SPEAKERS = "FUSIONLAB_PROCESSES"  # "all": every process writes its own files and shows its own bars


def speaks() -> bool:
    """Whether this process prints and writes: process 0 does, and every other one where FUSIONLAB_PROCESSES=all."""
    if os.environ.get(SPEAKERS, "").lower() == "all" or not jax.distributed.is_initialized():
        return True
    return jax.process_index() == 0


def several(devices: Iterable[Any]) -> bool:
    """Whether devices belong to more than one process."""
    return len({device.process_index for device in devices}) > 1


def from_process_0(value: Any, task: str) -> np.ndarray:
    """The value of process 0, in every process; all must call it at the same point. Values of other processes count only by their
    shape.

    Raises:
      ProcessError: another process has ended, or is at another point of the program.
    """
    from jax.experimental import multihost_utils

    try:
        return np.asarray(multihost_utils.broadcast_one_to_all(value))
    except jax.errors.JaxRuntimeError as error:
        first = next(iter(str(error).splitlines()), "")
        raise ProcessError(
            f"{task}: this is process {jax.process_index()} of {jax.process_count()}, and not all of them answered ({first}); needed every "
            "process to be alive and to make the same calls in the same order: look for the first error in the others' output, and restart "
            "all processes"
        ) from error
