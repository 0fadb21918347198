"""The fit of Phi in activation.cuh: its error, its place in float arithmetic, and that it is the best of its form."""

import math
import re

import numpy as np
import pytest

from fusionlab.kernels.ops.gemm_epilogue.elementwise import SOURCE

TEXT = (SOURCE.file.parent.parent / "activation.cuh").read_text(encoding="utf-8")
LIMIT = 4.1e-6  # stated beside the coefficients


def constant(name: str) -> list[float]:
    """The value, or the values, of a constexpr of the source."""
    text = re.search(rf"{name}(?:\[\d+\])? = ([^;]+);", TEXT)
    assert text, name
    return [float(v) for v in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", text[1])]


(SCALE,), COEFFICIENTS = constant("kMillsScale"), constant("kMills")
A = np.concatenate([np.linspace(0, 3, 1500), np.linspace(3, 13.5, 1500)])
TRUE = np.array([0.5 * math.erfc(a * math.sqrt(0.5)) * math.exp(a * a / 2) for a in A])  # Phi(-a) exp(a^2/2)


def basis(a, scale):
    t = 1 / (1 + scale * a)
    return np.stack([t ** (k + 1) for k in range(len(COEFFICIENTS))], 1)


def fitted(scale: float) -> float:
    """The least maximum of the relative error for that scale, by Lawson's iteration (reweighted least squares)."""
    rows = basis(A, scale) / TRUE[:, None]
    weights, best = np.ones_like(A), math.inf
    for _ in range(200):
        root = np.sqrt(weights)
        found = np.linalg.lstsq(rows * root[:, None], root, rcond=None)[0]
        error = np.abs(rows @ found - 1)
        best = min(best, error.max())
        weights = np.maximum(weights * error, 1e-300)
        weights /= weights.sum()
    return best


def test_the_fit_holds_what_its_comment_says():
    error = np.abs(basis(A, SCALE) @ COEFFICIENTS / TRUE - 1).max()
    assert 0.9 * LIMIT < error < LIMIT
    assert "below 4.1e-6" in TEXT


@pytest.mark.parametrize("step", [0.0, -0.02, -0.005, 0.005, 0.02])
def test_the_coefficients_are_the_best_of_their_form(step):
    error = np.abs(basis(A, SCALE) @ COEFFICIENTS / TRUE - 1).max()
    assert error < 1.03 * fitted(SCALE + step)


def phi_of(h: np.ndarray) -> np.ndarray:
    """normal_of(h).phi in float32, every operation rounded."""
    f = np.float32
    bell = np.exp2(h * h * f(-0.5 * math.log2(math.e)))
    t = f(1) / (f(1) + f(SCALE) * np.abs(h))
    p = np.full_like(h, f(COEFFICIENTS[-1]))
    for c in COEFFICIENTS[-2::-1]:
        p = p * t + f(c)
    return np.abs((h > 0).astype(f) - p * t * bell)


@pytest.mark.parametrize(("bits", "lowest"), [(8, -126), (11, -14)], ids=["bfloat16", "float16"])
def test_gelu_is_within_a_hundredth_of_an_ulp_of_16_bits_before_it_is_rounded(bits, lowest):
    # Every value of 2^-20..2^4 in steps of 2^-11: all of both dtypes there, and more.
    h = np.concatenate([s * np.arange(2048, 4096) * 2.0**e for e in range(-31, -7) for s in (-1, 1)]).astype(np.float32)
    h = h[np.abs(h) < 12.8]
    true = np.array([0.5 * v * math.erfc(-v * math.sqrt(0.5)) for v in h.astype(np.float64)])
    ulp = 2.0 ** (np.maximum(np.floor(np.log2(np.abs(true))), lowest) - bits + 1)
    assert np.max(np.abs(h * phi_of(h) - true) / ulp) < 0.02
