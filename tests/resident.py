"""The process that runs trials on simulated devices, one for each request, until there are no more. Not a test module.

`python -m tests.resident` reads lines of JSON, {"module": "fusers.placed", "trial": "lerp/both/forward"}, and answers each with a line: the
trial's name, and what went wrong or null. simulated.py is the other end.

A module of trials has them in `TRIALS`, by name: functions that raise, or return a text that says what is wrong. What they need around
them is a context manager, `surroundings`. Trials of all modules run here in any order, so that both leave everything as it was.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
import traceback
from types import ModuleType
from typing import Any, TextIO

import jax

KEPT = 32  # trials whose programs JAX may remember at once: some take 30 MB


class Trials:
    """Runs trials. What JAX remembers of a function may mean another thing in other surroundings: there it forgets everything."""

    def __init__(self) -> None:
        self._around: Any = contextlib.nullcontext
        self._remembered = 0

    def problem(self, module: str, trial: str) -> str | None:
        """What is wrong with a trial, None where nothing is."""
        try:
            found = importlib.import_module(module)
            if trial not in found.TRIALS:
                return f"{module} has no trial {trial!r}; it has {', '.join(map(repr, found.TRIALS))}"
            with self._surroundings(found):
                problem = found.TRIALS[trial]()
            return None if problem is None else str(problem)
        except BaseException:  # whatever goes wrong is the answer; what pytest.raises raises is no Exception
            return traceback.format_exc()[-4000:]

    def _surroundings(self, found: ModuleType) -> contextlib.AbstractContextManager[Any]:
        around = getattr(found, "surroundings", contextlib.nullcontext)
        if around is not self._around or self._remembered == KEPT:
            jax.clear_caches()
            self._around, self._remembered = around, 0
        self._remembered += 1
        return around()


def streams() -> tuple[TextIO, TextIO]:
    """Where requests come from and answers go to. What trials print goes to stderr from here on, and they find nothing to read."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return requests, answers


def main() -> None:
    requests, answers = streams()
    gc.set_threshold(100_000, 20, 50)  # as in conftest.py: traces are large and live long
    trials = Trials()
    for line in requests:
        asked = json.loads(line)
        answer = json.dumps([asked["trial"], trials.problem(**asked)])
        sys.stderr.flush()
        print(answer, file=answers, flush=True)
    os._exit(0)  # at once: to take all programs apart would take seconds, and there is nothing to save


if __name__ == "__main__":
    main()
