"""Devices that run out of memory during a measurement: one clear error, which keeps no arrays alive."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator

import jax

from fusionlab.errors import OutOfMemoryError

from ..units import binary_bytes

_STATUS = "RESOURCE_EXHAUSTED"  # XLA's word; other failures of the runtime are none of ours
_ASKED = re.compile(r"allocat\w* ([\d.,]+) ?(bytes|[KMGT]?i?B)\b")
_ADVICE = (
    "give smaller inputs, or grad=False to leave the gradients out; free arrays that are no longer needed; on a GPU, let JAX have more of "
    "its memory with XLA_PYTHON_CLIENT_MEM_FRACTION"
)


@contextlib.contextmanager
def out_of_memory(task: str) -> Iterator[None]:
    """Turns XLA's out-of-memory error into one that names the running `task`; all other errors pass through unchanged.

    Raises:
      OutOfMemoryError: the device had too little memory.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if _STATUS not in str(error):
            raise
        sentence = f"{task} ran out of memory{_asked(str(error))}; {_ADVICE}. XLA: {_first_line(error)}"
        # The frames that failed hold the arrays that filled the memory, for as long as the error is looked at.
        traceback.clear_frames(error.__traceback__)
        raise OutOfMemoryError(sentence) from error


def _asked(text: str) -> str:
    found = _ASKED.search(text)
    if found is None:
        return ""
    number, unit = found.group(1).rstrip(".,"), found.group(2)
    return f", asking for {binary_bytes(int(number)) if unit == 'bytes' and number.isdigit() else f'{number} {unit}'}"


def _first_line(error: Exception) -> str:
    line = str(error).strip().partition("\n")[0]
    return line if len(line) <= 200 else f"{line[:200]}..."
