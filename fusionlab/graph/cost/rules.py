"""The operations of each primitive, a table by name for `cost.py`. A primitive that is not in it is unknown.

Counted as in XLA's own analysis: one operation for each entry of an elementwise result (including comparisons, selections and conversions,
of any dtype), two for each multiply-and-add of a product, one less than the number of entries for their sum; functions that need a
function unit or a series (exp, tanh, sqrt, a power) are transcendentals, counted separately. Moving entries is not an operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..primitives import having
from ..program.ir import Node

Arithmetic = tuple[int, int]  # operations, transcendentals
CostRule = Callable[[Node], Arithmetic]

# Elementwise at one operation an entry; the others are in `TRANSCENDENTAL`, `EXPANDED` and `SERIES`.
UNIT_COST_ELEMENTWISE = frozenset(
    """
    add add_any sub mul div max min neg abs sign floor ceil round square rem clamp select_n convert_element_type reduce_precision is_finite
    and or xor not eq ne ge gt le lt eq_to le_to lt_to real imag complex conj clz population_count mulhi shift_left shift_right_logical
    shift_right_arithmetic
    """.split()
)
# What XLA has an instruction for.
TRANSCENDENTAL = frozenset("exp expm1 log log1p sin cos tan tanh atan atan2 sqrt rsqrt cbrt pow erf".split())
# Operations and transcendentals an entry of what XLA writes out in simpler instructions, in float32.
EXPANDED: dict[str, Arithmetic] = {
    "logistic": (3, 1), "exp2": (1, 1), "log2": (1, 1), "one_minus_square": (2, 0), "mul_add": (2, 0),
    "acos": (3, 2), "asin": (5, 2), "acosh": (7, 4), "asinh": (11, 3), "atanh": (6, 2), "cosh": (3, 2), "sinh": (10, 3),
    "erfc": (62, 1), "erf_inv": (37, 2), "lgamma": (53, 4), "digamma": (73, 3), "bessel_i0e": (83, 1), "bessel_i1e": (83, 1),
    "nextafter": (24, 0),
}  # fmt: skip
# As `EXPANDED`, for series that run until they have converged: one term of each is counted.
SERIES: dict[str, Arithmetic] = {
    "zeta": (121, 11), "polygamma": (87, 13), "igamma": (183, 6), "igammac": (183, 6), "igamma_grad_a": (335, 14),
    "random_gamma_grad": (335, 14), "regularized_incomplete_beta": (293, 17), "random_gamma": (240, 8),
}  # fmt: skip
# Another look at the same entries: no bytes move either.
FREE_VIEWS = frozenset(
    """
    reshape squeeze expand_dims stop_gradient name optimization_barrier pvary sharding_constraint reshard mesh_cast bitcast_convert_type
    random_wrap random_unwrap dce_sink create_token after_all empty empty2 platform_index axis_index layout_constraint
    """.split()
)
# The same entries elsewhere, on this device or another: bytes move, nothing is computed.
DATA_MOVES = frozenset(
    """
    broadcast_in_dim transpose concatenate pad rev slice dynamic_slice dynamic_update_slice split stack unstack tile gather copy copy_p
    device_put iota ppermute all_gather all_gather_invariant all_to_all ragged_all_to_all pbroadcast lu_pivots_to_permutation
    """.split()
)
REDUCTIONS = having("reduction")
COMBINES_OVER_DEVICES = having("device sum", "device extreme")  # an operation for each entry, whichever it is
# One for each of a block of 64 bits (two words) of threefry: 20 rounds of an addition, a rotation and an xor, and 5 key injections.
_THREEFRY_WORD, _PHILOX_WORD = 58, 25
# Estimates: of the leading term, or of how many steps an iteration takes.
ROUGH = SERIES.keys() | frozenset(
    """
    fft sort top_k approx_top_k random_bits random_split random_fold_in random_seed threefry2x32 rng_bit_generator rng_uniform cholesky
    cholesky_update eig eigh hessenberg householder_product geqrf lu ormqr qr schur svd symmetric_product triangular_solve tridiagonal
    tridiagonal_solve cumlogsumexp select_and_gather_add select_and_scatter_add ragged_dot ragged_dot_general
    """.split()
)


def entries_of(atom: Any) -> int:
    """Number of entries."""
    return math.prod(int(n) for n in atom.shape)


def _per_entry(flops: int, transcendentals: int) -> CostRule:
    return lambda node: (flops * entries_of(node.outputs[0]), transcendentals * entries_of(node.outputs[0]))


def _nothing(node: Node) -> Arithmetic:
    return 0, 0


def _reduce(node: Node) -> Arithmetic:
    return max(0, entries_of(node.inputs[0]) - entries_of(node.outputs[0])), 0


def _dot(node: Node) -> Arithmetic:
    (contracted, _), _ = node.params["dimension_numbers"]
    return 2 * entries_of(node.outputs[0]) * math.prod(int(node.inputs[0].shape[i]) for i in contracted), 0


def _ragged_dot(node: Node) -> Arithmetic:
    """Each row is multiplied only by the matrix of its own group."""
    return 2 * entries_of(node.outputs[0]) * int(node.inputs[0].shape[-1]), 0


def _conv(node: Node) -> Arithmetic:
    """Products with padding are not counted."""
    p, (image, kernel) = node.params, node.inputs
    numbers = p["dimension_numbers"]
    pairs = 1
    for i, (axis, tap, result) in enumerate(
        zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)
    ):
        low, _ = p["padding"][i]
        pairs *= _taps(
            image.shape[axis],
            kernel.shape[tap],
            node.outputs[0].shape[result],
            (p["window_strides"][i], low, p["lhs_dilation"][i], p["rhs_dilation"][i]),
        )
    features = kernel.shape[numbers.rhs_spec[0]] * kernel.shape[numbers.rhs_spec[1]]
    return 2 * image.shape[numbers.lhs_spec[0]] // p["batch_group_count"] * features * pairs, 0


def _taps(entries: int, taps: int, results: int, where: tuple[int, int, int, int]) -> int:
    """The number of (result, tap) pairs of one axis that meet an entry of the image rather than padding or a dilation gap."""
    stride, low, spread, apart = where
    found = 0
    for tap in range(taps):
        for out in range(results):
            place = out * stride + tap * apart - low
            found += 0 <= place <= (entries - 1) * spread and place % spread == 0
    return found


def _cumulative(flops: int, transcendentals: int) -> CostRule:
    def rule(node: Node) -> Arithmetic:
        (x,) = node.inputs[:1]
        steps = entries_of(x) - entries_of(x) // max(1, int(x.shape[node.params["axis"]]))
        return flops * steps, transcendentals * steps

    return rule


def _integer_pow(node: Node) -> Arithmetic:
    """Squarings and multiplications of the binary method, and a division for a negative power."""
    y = int(node.params["y"])
    steps = max(0, abs(y).bit_length() - 1 + abs(y).bit_count() - 1) + (y < 0)
    return steps * entries_of(node.outputs[0]), 0


def _polynomial(node: Node) -> Arithmetic:
    """Horner's rule."""
    return 2 * max(1, len(node.inputs) - 1) * entries_of(node.outputs[0]), 0


def _sort(node: Node) -> Arithmetic:
    """Comparisons of a merge sort."""
    x, p = node.inputs[0], node.params
    return p["num_keys"] * entries_of(x) * math.ceil(math.log2(max(2, int(x.shape[p["dimension"]])))), 0


def _top_k(node: Node) -> Arithmetic:
    return entries_of(node.inputs[0]) * math.ceil(math.log2(max(2, int(node.params["k"])))), 0


def _fft(node: Node) -> Arithmetic:
    """5 N log2 N of a complex transform of N entries, half of it for a real one."""
    lengths = [int(n) for n in node.params["fft_lengths"]]
    real = "RFFT" in str(node.params["fft_type"])
    entries = max(entries_of(node.inputs[0]), entries_of(node.outputs[0]))
    return int((2.5 if real else 5) * entries * math.log2(max(2, math.prod(lengths)))), 0


def _random(node: Node) -> Arithmetic:
    words = sum(-(-v.nbytes // 4) for v in node.outputs)
    threefry = any("fry" in str(a.dtype) for a in (*node.inputs, *node.outputs)) or node.primitive == "threefry2x32"
    return (_THREEFRY_WORD if threefry else _PHILOX_WORD) * words, 0


def _window(per_window: Callable[[int], int]) -> CostRule:
    def rule(node: Node) -> Arithmetic:
        windows = entries_of(min((*node.inputs[:1], *node.outputs[:1]), key=entries_of))
        return windows * per_window(math.prod(int(n) for n in node.params["window_dimensions"])), 0

    return rule


def _matrix(count: Callable[[int, int], float]) -> CostRule:
    """The cost for each matrix [m, n] of the first operand."""

    def rule(node: Node) -> Arithmetic:
        *batch, m, n = (int(s) for s in node.inputs[0].shape)
        return int(math.prod(batch) * count(m, n)), 0

    return rule


def _triangular_solve(node: Node) -> Arithmetic:
    a, b = node.inputs
    return int(a.shape[-1]) * entries_of(b), 0


def _ormqr(node: Node) -> Arithmetic:
    return 4 * entries_of(node.outputs[0]) * int(node.inputs[1].shape[-1]), 0


def _symmetric_product(node: Node) -> Arithmetic:
    return 2 * entries_of(node.outputs[0]) * int(node.inputs[0].shape[-1]), 0


def _qr(m: int, n: int) -> float:
    """Householder vectors, and Q made of them."""
    k = min(m, n)
    return 2 * (2 * m * n * k - (m + n) * k * k + 2 * k**3 / 3)


COST_RULES: dict[str, CostRule] = {
    **dict.fromkeys(FREE_VIEWS | DATA_MOVES | {"scatter"}, _nothing),
    **dict.fromkeys(UNIT_COST_ELEMENTWISE | COMBINES_OVER_DEVICES, _per_entry(1, 0)),
    **dict.fromkeys(TRANSCENDENTAL, _per_entry(0, 1)),
    **{name: _per_entry(*counts) for name, counts in (EXPANDED | SERIES).items()},
    **dict.fromkeys(REDUCTIONS, _reduce),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin"), _cumulative(1, 0)),
    "cumlogsumexp": _cumulative(4, 2),
    "dot_general": _dot,
    **dict.fromkeys(("ragged_dot", "ragged_dot_general"), _ragged_dot),
    "conv_general_dilated": _conv,
    "integer_pow": _integer_pow,
    "polynomial": _polynomial,
    "sort": _sort,
    "top_k": _top_k,
    "approx_top_k": _top_k,
    "fft": _fft,
    **dict.fromkeys("random_bits random_split random_fold_in random_seed threefry2x32 rng_bit_generator".split(), _random),
    "rng_uniform": _per_entry(_PHILOX_WORD, 0),
    **dict.fromkeys(("reduce_window_sum", "reduce_window_max", "reduce_window_min"), _window(lambda w: w - 1)),
    "select_and_gather_add": _window(lambda w: 3 * (w - 1)),
    "select_and_scatter_add": _window(lambda w: w),
    # Golub and Van Loan, Matrix Computations (4th ed., 2013): the leading terms of their operation counts.
    "cholesky": _matrix(lambda m, n: n**3 / 3),
    "cholesky_update": _matrix(lambda m, n: 6 * n * n),
    "eig": _matrix(lambda m, n: 25 * n**3),
    "eigh": _matrix(lambda m, n: 9 * n**3),
    "schur": _matrix(lambda m, n: 25 * n**3),
    "svd": _matrix(lambda m, n: 14 * max(m, n) * min(m, n) ** 2 + 8 * min(m, n) ** 3),
    "hessenberg": _matrix(lambda m, n: 10 * n**3 / 3),
    "tridiagonal": _matrix(lambda m, n: 4 * n**3 / 3),
    "lu": _matrix(lambda m, n: m * n * min(m, n) - (m + n) * min(m, n) ** 2 / 2 + min(m, n) ** 3 / 3 if m != n else 2 * n**3 / 3),
    "qr": _matrix(_qr),
    "geqrf": _matrix(lambda m, n: _qr(m, n) / 2),
    "householder_product": _matrix(lambda m, n: _qr(m, n) / 2),
    "ormqr": _ormqr,
    "symmetric_product": _symmetric_product,
    "triangular_solve": _triangular_solve,
    "tridiagonal_solve": lambda node: (8 * entries_of(node.outputs[0]), 0),
}  # fmt: skip
