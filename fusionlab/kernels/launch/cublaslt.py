"""One cuBLASLt product with an epilogue as a launch plan, through nvmath-python's bindings.

cuBLASLt speaks column-major: D = epilogue(alpha op(A) op(B) + beta C), D of m x n. A row-major M x N result is its
N x M matrix, so callers swap the operands (`row_major` does it). Source of every limit named here: the cuBLAS documentation,
"cublasLtEpilogue_t" and "cublasLtMatmulDescAttributes_t" (https://docs.nvidia.com/cuda/cublas).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import threading
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np

from ...errors import BackendError, MissingDependencyError
from .plans import plan_kind
from .steps import MatmulStep, Param, Prepared

ALIGNMENT = 128  # bytes, of every buffer XLA hands out on a GPU
WORKSPACE = {90: 32 << 20}  # bytes; the documentation recommends 32 MiB on Hopper and later, 4 MiB before
SMALL_WORKSPACE = 4 << 20
_ALGORITHM_BYTES = 64
NOT_INSTALLED = 'nvmath-python is not installed: pip install "fusionlab[cuda13]", or [cuda12]'

_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}  # cudaDataType_t
_COMPUTE = {"f32": 68, "f64": 70, "tf32": 77}  # cublasComputeType_t: 32F, 64F, 32F_FAST_TF32
_FORWARD = "BIAS RELU_BIAS RELU_AUX RELU_AUX_BIAS GELU_BIAS GELU_AUX GELU_AUX_BIAS".split()
_EPILOGUES = (*_FORWARD, *"BGRADA BGRADB DRELU DRELU_BGRAD DGELU DGELU_BGRAD".split())
GRADIENT_OF_BIAS = frozenset(name for name in _EPILOGUES if "BGRAD" in name)
WITH_BIAS = GRADIENT_OF_BIAS.union(name for name in _EPILOGUES if "BIAS" in name)
WRITES_AUX = frozenset(name for name in _EPILOGUES if "AUX" in name)
READS_AUX = frozenset(name for name in _EPILOGUES if name.startswith("D"))


@dataclass(frozen=True)
class MatmulPlan:
    """D (m x n, leading dimension m) = epilogue(alpha op(A) op(B) + beta C), column-major, once or for a batch of matrices.

    Operands, in order: A, B, then C where beta is not 0, then a bias of m entries where the epilogue adds one, then the auxiliary input
    where it reads one.
    Results: D, then the auxiliary output where it writes one, then the bias gradient where it makes one (m entries, or n for BGRADB),
    then the workspace.

    Attributes:
      m, n, k: sizes.
      transposed: of A and B.
      dtype: numpy name, of A and B, and of C, D, bias and a pre-activation unless `out` gives another.
      compute: "f32", "tf32" or "f64": the dtype of multiplication and accumulation.
      epilogue: a name of cublasLtEpilogue_t without its prefix.
      aux_pitch: leading dimension of the auxiliary matrix, in elements (in bits for relu's mask); 0 without one.
      workspace: bytes.
      algorithm: 64 bytes of cublasLtMatmulAlgo_t as hex, and `library` the version of cuBLASLt that gave them; "" and 0 take the first that
        the library's heuristic proposes.
      out: numpy name of the dtype of C, D, bias and a pre-activation; "" for `dtype`.
      alpha, beta: the factors, held in the arithmetic's dtype.
      batch: how many matrices; those of C and D are contiguous.
      leading: leading dimensions of A and B, in elements; 0 for contiguous columns.
      strides: from one matrix of a batch to the next in A and B, in elements; 0 for one that all share.
    """

    kind: ClassVar[str] = "cublaslt"
    m: int
    n: int
    k: int
    transposed: tuple[bool, bool]
    dtype: str
    compute: str
    epilogue: str = "DEFAULT"
    aux_pitch: int = 0
    workspace: int = SMALL_WORKSPACE
    algorithm: str = ""
    library: int = 0
    out: str = ""
    alpha: float = 1.0
    beta: float = 0.0
    batch: int = 1
    leading: tuple[int, int] = (0, 0)
    strides: tuple[int, int] = (0, 0)

    def spec(self) -> dict[str, Any]:
        """Without what `_RARE` names and is not said otherwise: the names under which algorithms were measured stay theirs."""
        usual = {f.name: f.default for f in fields(self) if f.name in _RARE}
        return {name: value for name, value in asdict(self).items() if name not in usual or usual[name] != value}

    @property
    def result_dtype(self) -> str:
        """The dtype of D."""
        return self.out or self.dtype

    def with_algorithm(self, algorithm: str, library: int) -> MatmulPlan:
        return replace(self, algorithm=algorithm, library=library)

    def prepare(self, device: int) -> Prepared:
        product = _Matmul(self, device)
        return Prepared(product.run, (product.step(),), product)


_RARE = ("out", "alpha", "beta", "batch", "leading", "strides")
plan_kind(MatmulPlan.kind, lambda content: MatmulPlan(**{**content, "transposed": tuple(content["transposed"])}))


def missing() -> str | None:
    """Why cuBLASLt cannot be called from this process; None where it can."""
    return NOT_INSTALLED if importlib.util.find_spec("nvmath") is None else None


@functools.cache
def bindings() -> Any:
    """nvmath's bindings of cuBLASLt.

    Raises:
      MissingDependencyError: nvmath-python is not installed.
    """
    if reason := missing():
        raise MissingDependencyError(f"cuBLASLt: {reason}")
    return importlib.import_module("nvmath.bindings.cublasLt")


def version() -> int:
    """The version of the library loaded, as cublasLtGetVersion gives it (130100 for 13.1)."""
    return int(bindings().get_version())


def workspace_for(capability: int) -> int:
    """Bytes of workspace for an architecture (90 for sm_90)."""
    return WORKSPACE[90] if capability >= 90 else SMALL_WORKSPACE


def row_major(
    rows: int,
    columns: int,
    inner: int,
    *,
    left_transposed: bool = False,
    right_transposed: bool = False,
    **rest: Any,
) -> MatmulPlan:
    """The plan of a row-major product: left (rows x inner) times right (inner x columns), each stored so or, if "transposed", as
    its transpose. Its operands are (right, left, ...): a row-major matrix is the column-major one of its transpose; `leading` and
    `strides` are in that order too.
    """
    return MatmulPlan(columns, rows, inner, (right_transposed, left_transposed), **rest)


def algorithms(plan: MatmulPlan, device: int, count: int = 8) -> list[str]:
    """Up to `count` algorithms that the library's heuristic proposes for a plan on a device (current), best first, as hex.

    Raises:
      BackendError: it proposes none.
    """
    found = _Matmul(plan, device, pick=False).heuristic(count)
    return [bytes(result["algo"].tobytes()).hex() for result in found]


@functools.cache
def _handle(device: int) -> int:
    """The library's for a device; it belongs to the context that is current when it is made."""
    return bindings().create()


class _Matmul:
    """A plan's descriptors on one device. Bias and auxiliary addresses are attributes of the descriptor, hence the lock."""

    def __init__(self, plan: MatmulPlan, device: int, pick: bool = True):
        lt = bindings()
        self._lt, self._plan, self._lock = lt, plan, threading.Lock()
        self._handle = _handle(device)
        scale = 1 if plan.compute == "f64" else 0
        self._desc = lt.matmul_desc_create(_COMPUTE[plan.compute], scale)
        self._set("TRANSA", int(plan.transposed[0]))
        self._set("TRANSB", int(plan.transposed[1]))
        self._set("EPILOGUE", int(lt.Epilogue[plan.epilogue]))
        if plan.aux_pitch:
            self._set("EPILOGUE_AUX_LD", plan.aux_pitch)
        a = (plan.k, plan.m) if plan.transposed[0] else (plan.m, plan.k)
        b = (plan.n, plan.k) if plan.transposed[1] else (plan.k, plan.n)
        self._layouts = []
        # Not at the interpreter's end: by then the bindings may be gone. Here, before anything that can fail.
        weakref.finalize(self, _destroy, lt, self._desc, self._layouts).atexit = False
        for shape, dtype, leading, stride in (
            (a, plan.dtype, plan.leading[0], plan.strides[0]),
            (b, plan.dtype, plan.leading[1], plan.strides[1]),
            ((plan.m, plan.n), plan.result_dtype, 0, plan.m * plan.n),
        ):
            self._add_layout(shape, dtype, leading or shape[0], stride)
        number = np.float64 if plan.compute == "f64" else np.float32
        self._alpha, self._beta = np.full(1, plan.alpha, number), np.full(1, plan.beta, number)
        self._algorithm = self._picked() if pick else np.zeros(8, np.uint64)
        numbers = (array.ctypes.data for array in (self._alpha, self._beta, self._algorithm))
        self._pointers = (self._handle, self._desc, *self._layouts, *numbers)
        self._places = _places(plan)

    def _add_layout(self, shape: tuple[int, int], dtype: str, leading: int, stride: int) -> None:
        """Of one matrix, or of each of a batch, `stride` entries apart."""
        layout = self._lt.matrix_layout_create(_TYPES[dtype], *shape, leading)
        self._layouts.append(layout)
        if self._plan.batch > 1:
            _set_attribute(self._lt, "layout", layout, "BATCH_COUNT", self._plan.batch)
            _set_attribute(self._lt, "layout", layout, "STRIDED_BATCH_OFFSET", stride)

    def run(self, stream: int, operands: Sequence[int], results: Sequence[int]) -> None:
        buffers = {"operand": operands, "result": results}
        a, b, bias, aux, c, d, workspace = (buffers[kind][i] if kind != "null" else None for kind, i in self._places)
        handle, desc, a_layout, b_layout, d_layout, alpha, beta, algorithm = self._pointers
        factors, result = (alpha, a, a_layout, b, b_layout), (beta, c, d_layout, d, d_layout)
        with self._lock:
            if bias is not None:
                self._set("BIAS_POINTER", bias)
            if aux is not None:
                self._set("EPILOGUE_AUX_POINTER", aux)
            self._lt.matmul(handle, desc, *factors, *result, algorithm, workspace, self._plan.workspace, stream)

    def step(self) -> MatmulStep:
        """The call as data."""
        attributes = self._lt.MatmulDescAttribute
        numbers = int(attributes.BIAS_POINTER), int(attributes.EPILOGUE_AUX_POINTER)
        return MatmulStep(self._pointers, self._plan.workspace, self._places, numbers, version())

    def heuristic(self, count: int) -> np.ndarray:
        lt, plan = self._lt, self._plan
        preference = lt.matmul_preference_create()
        try:
            _set_attribute(lt, "preference", preference, "MAX_WORKSPACE_BYTES", plan.workspace)
            for name in "ABCD":
                _set_attribute(lt, "preference", preference, f"MIN_ALIGNMENT_{name}_BYTES", ALIGNMENT)
            found = np.zeros(count, lt.matmul_heuristic_result_dtype)
            returned = np.zeros(1, np.int32)
            a, b, d = self._layouts
            if plan.epilogue in WITH_BIAS:
                self._set("BIAS_POINTER", ALIGNMENT)  # any aligned address: the heuristic looks at its alignment alone
            if plan.aux_pitch:
                self._set("EPILOGUE_AUX_POINTER", ALIGNMENT)
            lt.matmul_algo_get_heuristic(
                self._handle, self._desc, a, b, d, d, preference, count, found.ctypes.data, returned.ctypes.data
            )
        except lt.cuBLASLtError as error:
            raise BackendError(f"cuBLASLt {version()} has no algorithm for {plan}: {error}") from error
        finally:
            lt.matmul_preference_destroy(preference)
        usable = [result for result in found[: returned[0]] if result["state"] == 0]
        if not usable:
            raise BackendError(f"cuBLASLt {version()} has no algorithm for {plan}")
        return np.array(usable, lt.matmul_heuristic_result_dtype)

    def _picked(self) -> np.ndarray:
        """The algorithm the plan names, or the heuristic's first where it names none or one of another library version."""
        if self._plan.algorithm and self._plan.library == version():
            return _algorithm(self._plan.algorithm)
        return np.frombuffer(self.heuristic(1)[0]["algo"].tobytes(), np.uint64).copy()

    def _set(self, attribute: str, value: int) -> None:
        _set_attribute(self._lt, "desc", self._desc, attribute, value)


def _algorithm(text: str) -> np.ndarray:
    """A cublasLtMatmulAlgo_t from hex. cuBLASLt reads all of it, so that a damaged plan file must not give less."""
    data = bytes.fromhex(text)
    if len(data) != _ALGORITHM_BYTES:
        raise BackendError(
            f"algorithm: got {len(data)} bytes, needed the {_ALGORITHM_BYTES} of cublasLtMatmulAlgo_t: the plan file is damaged, tune again"
        )
    return np.frombuffer(data, np.uint64).copy()


def _places(plan: MatmulPlan) -> tuple[Param, ...]:
    """Where A, B, bias (or its gradient), auxiliary matrix, C, D and workspace are, in the order that `MatmulPlan` gives them."""
    operands, results = itertools.count(2), itertools.count(1)
    c = ("operand", next(operands)) if plan.beta else ("result", 0)  # with beta 0 it is not read
    aux = bias = ("null", 0)
    if plan.aux_pitch and plan.epilogue in WRITES_AUX:
        aux = ("result", next(results))
    if plan.epilogue in WITH_BIAS:
        gives = plan.epilogue in GRADIENT_OF_BIAS
        bias = ("result", next(results)) if gives else ("operand", next(operands))
    if plan.aux_pitch and plan.epilogue in READS_AUX:
        aux = ("operand", next(operands))
    return ("operand", 0), ("operand", 1), bias, aux, c, ("result", 0), ("result", next(results))


def _destroy(lt: Any, desc: int, layouts: Sequence[int]) -> None:
    for layout in layouts:
        lt.matrix_layout_destroy(layout)
    lt.matmul_desc_destroy(desc)


def _set_attribute(lt: Any, kind: str, handle: int, attribute: str, value: int) -> None:
    names = {
        "desc": lt.MatmulDescAttribute,
        "preference": lt.MatmulPreferenceAttribute,
        "layout": lt.MatrixLayoutAttribute,
    }[kind]
    structure = f"{'matrix' if kind == 'layout' else 'matmul'}_{kind}"
    data = np.array([value], getattr(lt, f"get_{structure}_attribute_dtype")(names[attribute]))
    getattr(lt, f"{structure}_set_attribute")(handle, names[attribute], data.ctypes.data, data.nbytes)
