"""The time to compile a language model's step in processes of its own; `language_models --compile`.

JAX's persistent cache is off. A process that compiles the fused program finds an empty folder of FusionLab's kernels (cold), the next one
the folder that it left (warm), which is what a second process has without any setting. What is counted is what the first call adds, from
the function to the executable: tracing, the search, lowering, CUDA kernels and XLA. Imports, arguments and the run are not counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .language_rows import EDITED, FUSED_GRAD, GRAD_OF_FUSED
from .language_steps import GPT2, Llama

ROOT = Path(__file__).parents[2]
PLAIN = "jax.jit"
MOST_S = 240.0  # for one process
# In this order: the first also loads the libraries from the disk, and fills the folder for those that are warm.
PROCESSES = (
    ("fused grad, cold", FUSED_GRAD),
    (PLAIN, PLAIN),
    ("fused grad, warm", FUSED_GRAD),
    ("grad of fused, warm", GRAD_OF_FUSED),
    (f"{EDITED}, warm", EDITED),
)


def measure(name: str, tiny: bool) -> dict[str, dict[str, Any]]:
    """Seconds by program; `over_jit` is the ratio to those of jax.jit. A process that fails is an entry with its error."""
    with tempfile.TemporaryDirectory(prefix="fusionlab-") as folder:
        here = [row for row in PROCESSES if row[1] != EDITED or name.split(",")[0].endswith(("scan", "checkpoint"))]
        found = {label: _in_a_process(name, program, tiny, folder) for label, program in here}
    if "total_s" in found[PLAIN]:
        for one in found.values():
            if "total_s" in one:
                one["over_jit"] = one["total_s"] / found[PLAIN]["total_s"]
    return found


def _in_a_process(name: str, program: str, tiny: bool, folder: str) -> dict[str, Any]:
    asked = json.dumps({"name": name, "program": program, "tiny": tiny})
    kept = {key: value for key, value in os.environ.items() if not key.startswith("JAX_COMPILATION_CACHE")}
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    settings = {"FUSIONLAB_CACHE_DIR": folder, "PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-m", "benchmarks", "language_models", "--sample", asked]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=kept | settings, capture_output=True, text=True, check=False, timeout=MOST_S
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it took more than {MOST_S:.0f} s"}
    if done.returncode:
        return {"error": f"exit status {done.returncode}: {done.stderr[-2000:]}"}
    return json.loads(done.stdout.splitlines()[-1])


def sample(case: Llama | GPT2, program: Callable[[], Callable[..., Any]]) -> dict[str, Any]:
    """Seconds to lower and to compile a program in this process, on shapes alone."""
    import jax

    from fusionlab.kernels.launch import compile as kernels

    args = jax.eval_shape(case.parameters), jax.ShapeDtypeStruct((case.batch, case.length + 1), "int32")
    jax.block_until_ready(jax.numpy.zeros(8) + 1)  # the backend is up
    start, processor = time.perf_counter(), time.process_time()
    lowered = jax.jit(program()).lower(*args)
    lower_s = time.perf_counter() - start
    lowered.compile()
    total_s, processor_s = time.perf_counter() - start, time.process_time() - processor
    counters = kernels.DEFAULT_CACHE.counters()
    return {
        "lower_s": lower_s,
        "total_s": total_s,
        "processor_s": processor_s,
        "cubins": {"found": counters.hits, "compiled": counters.misses},
        "load": os.getloadavg()[0],
    }
