"""From a plan of launches to kernels that run on XLA's stream.

Read `ffi_call` first: the one custom call, its handler, and the launch. Then `plans` (what is launched, as data that names itself),
`kernel_plan` and `cublaslt` (the two kinds), `steps` (a plan made ready), `native` with `launcher.c` (the same without Python),
`compile` (CUDA C++ to cubins) and `disk` (caches).
"""

from .ffi_call import RECORDING_TARGET as RECORDING_TARGET
from .ffi_call import TARGET as TARGET
