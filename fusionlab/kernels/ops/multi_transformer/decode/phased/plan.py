"""How the kernels of `decode.cu` are compiled and launched for a call: plain arithmetic, no GPU.

Letters as in layer.py, with R rows (texts, one token each) in place of B.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .....launch.architectures import (
    ARCHITECTURES,
    BULK_COPIES,
    CLUSTERS,
    COPIES,
    TENSOR_CORES,
    target_of,
)
from .....launch.compile import CudaSource
from .....launch.kernel_plan import KernelPlan, Launch
from .....launch.steps import Param
from ....gemm_epilogue.elementwise import KERNEL_ACTIVATIONS
from ....passes import options

INSTRUCTIONS = (TENSOR_CORES, COPIES, CLUSTERS, BULK_COPIES)
SOURCE = CudaSource(
    "multi_transformer/decode/phased/decode.cu",
    ("decode_qkv", "decode_attend", "decode_out", "decode_up", "decode_down"),
    INSTRUCTIONS,
    99 << 10,
)
CODES = {"bfloat16": 1, "float16": 2}  # FL_T
MOST_ROWS = 16
WORD = 8  # entries of 16 bytes: rows of matrices and caches begin at multiples of that
STRIP = 16  # entries of a row that stand together in a scratch result in strips
NORMS = {None: 0, "layer": 1, "rms": 2}  # FL_NORM1, FL_NORM2
_THREADS, _WARPS = 256, 8
_UNITS = 132  # multiprocessors that a launch is cut for; any number can run it
# Bytes of shared memory of a block, at most: the one that runs and the one that waits share a multiprocessor.
_BLOCK = 108 << 10
_SCRATCH = 64  # bytes: what the warps of a norm tell each other
_RESIDENT = 24 << 10  # bytes of x, at most, that a block of a product keeps whole
_UNROLL = 4
_MOST_GROUP = 4  # query heads that share what a block reads
_SPLITS = (1, 2, 4, 8)  # of the inner axis, and of the keys: blocks of a cluster
_COLUMNS = (16, 32, 64)  # of one matrix in a tile
_LEAST_KEYS = 128  # of a block of the attention

NOTHING: Param = ("null", 0)


@dataclass(frozen=True)
class ProductTile:
    """How a product is cut: columns of a block, blocks that share the inner axis, inner entries of a slice, slices of a warp's ring."""

    columns: int
    split: int
    step: int
    depth: int


@dataclass(frozen=True)
class ProductPhase:
    """One product of a layer: `columns` of up to three matrices side by side, or of the gate alone where there is one; `norm` of its x, a
    key of `NORMS`; `strips`: x lies in strips."""

    rows: int
    inner: int
    columns: tuple[int, ...]
    turned: bool = False
    gated: bool = False
    norm: str | None = None
    strips: bool = False

    def blocks(self, tile: ProductTile) -> int:
        columns = tile.columns // 2 if self.gated else tile.columns
        return sum(-(-n // columns) for n in self.columns) * tile.split

    def own(self, tile: ProductTile) -> int:
        """Inner entries of a block."""
        whole = tile.split * tile.step
        return -(-self.inner // whole) * tile.step

    def is_resident(self, tile: ProductTile) -> bool:
        """Whether a block keeps its part of x whole."""
        return self.norm is not None or 2 * self.rows * self.own(tile) <= _RESIDENT

    def slice_bytes(self, tile: ProductTile) -> int:
        matrix = tile.columns * (tile.step + WORD) if self.turned else tile.step * (tile.columns + WORD)
        return 2 * matrix + (0 if self.is_resident(tile) else 2 * self.rows * (tile.step + WORD))

    def resident_bytes(self, tile: ProductTile) -> int:
        return 2 * self.rows * (self.own(tile) + WORD) if self.is_resident(tile) else 0

    def shared(self, tile: ProductTile) -> int:
        """Bytes of shared memory of a block, as `Shape` of project.cuh has them."""
        sums = 4 * self.rows * (_WARPS * (tile.columns + 4) + tile.columns)
        return max(_WARPS * tile.depth * self.slice_bytes(tile), sums) + self.resident_bytes(tile) + _SCRATCH

    def arguments(self, tile: ProductTile) -> str:
        """The template arguments of `Shape`."""
        columns = (*self.columns, 0, 0)[:3]
        cut = (tile.columns, tile.split, tile.step, tile.depth)
        flags = int(self.turned), int(self.gated), NORMS[self.norm], int(self.is_resident(tile)), int(self.strips)
        return ",".join(map(str, (self.inner, *columns, *cut, *flags)))

    def cut(self, room: int) -> ProductTile:
        """The tile for which the busiest multiprocessor has least to read, of a block with that many bytes of shared memory."""
        step = 32 if self.turned else 16
        matrices = 2 if self.gated else 1
        tiles = [ProductTile(matrices * n, s, step, 1) for n in _COLUMNS[: 3 if matrices == 1 else 2] for s in _SPLITS]
        best = min(tiles, key=self._cost)
        own = -(-self.own(best) // (_WARPS * step))  # slices of a warp
        fit = (room - _SCRATCH - self.resident_bytes(best)) // (_WARPS * self.slice_bytes(best))
        return replace(best, depth=max(1, min(own, fit)))

    def _cost(self, tile: ProductTile) -> float:
        """Bytes that the busiest multiprocessor reads, plus the cost of short pieces and of sums over blocks: factors and terms that put
        the tiles tried on an H200, at widths of 1024 and 4096, in their order; there is no record of those trials."""
        own = self.own(tile)
        wide = tile.step if self.turned else tile.columns // 2 if self.gated else tile.columns
        scattered = {16: 1.5, 32: 1.22}.get(wide, 1.0)
        summing = (20 << 10) + (tile.split << 12) + 8 * self.rows * tile.columns if tile.split > 1 else 0
        return -(-self.blocks(tile) // _UNITS) * (scattered * 2 * tile.columns * own + 2 * self.rows * own + summing)


@dataclass(frozen=True)
class AttentionPhase:
    """The attention of a layer; strides in entries."""

    rows: int
    heads: int
    kv_heads: int
    size: int
    past: int
    layout: str  # of the caches
    interleaved: bool  # queries, keys and values of a head side by side
    causal: bool
    scale: float
    mask_is_finite: bool
    step_of_each: bool
    mask_of_each: bool
    turn_of_each: bool
    rotary: int | None
    rotary_width: int

    @property
    def group(self) -> int:
        """Query heads of a block."""
        each = self.heads // self.kv_heads
        return max(n for n in range(1, _MOST_GROUP + 1) if each % n == 0)

    @property
    def parts(self) -> int:
        """Blocks that share the keys of a head."""
        jobs = self.rows * self.heads // self.group
        return max((s for s in _SPLITS if jobs * s <= _UNITS + 28 and s * _LEAST_KEYS <= self.past), default=1)

    @property
    def grid(self) -> int:
        return self.rows * self.heads // self.group * self.parts

    @property
    def shared(self) -> int:
        return 4 * self.group * (10 * self.size + 18) + 4 * self.size + 64

    def options(self) -> dict[str, object]:
        size, wide = self.size, self.heads * self.size
        by_token = self.layout == "BSHD"
        between = self.kv_heads * size
        return {
            "HEADS": self.heads,
            "KEY_HEADS": self.kv_heads,
            "SIZE": size,
            "GROUP": self.group,
            "PAST": self.past,
            "PARTS": self.parts,
            "UNROLL": _UNROLL,
            "KEY_STRIDE": between if by_token else size,
            "HEAD_STRIDE": size if by_token else self.past * size,
            "KEYS_AT": size if self.interleaved else wide,
            "VALUES_AT": 2 * size if self.interleaved else wide + between,
            "QUERY_STRIDE": 3 * size if self.interleaved else size,
            "KEY_ROW_STRIDE": 3 * size if self.interleaved else size,
            "CAUSAL": int(self.causal),
            "STEP_OF_EACH": int(self.step_of_each),
            "MASK_OF_EACH": int(self.mask_of_each),
            "TURN_OF_EACH": int(self.turn_of_each),
            "MASK_IS_FINITE": int(self.mask_is_finite),
            "SCALE": float_literal(self.scale * math.log2(math.e)),
            "ROTARY": self.rotary or 0,
            "ROTARY_WIDTH": self.rotary_width,
        }


@dataclass(frozen=True)
class Row:
    """The compile-time settings of the kernels, the same for all layers of a call.

    Attributes:
      dtype: of x, weights and caches.
      parameters: whether the norms' parameters are of that dtype; else they are float32.
      norms: of the attention and of the feed-forward, a key of `NORMS`, None without a norm; `epsilons`: theirs.
    """

    dtype: str
    parameters: bool
    pre_norm: bool
    norms: tuple[str | None, str | None]
    epsilons: tuple[float | None, float | None]
    activation: str
    qkv: ProductPhase
    attention: AttentionPhase
    out: ProductPhase
    up: ProductPhase
    down: ProductPhase


@dataclass(frozen=True)
class Places:
    """Where the kernels of one layer find what they read and write: of each slot that is there, and of the steps' results.

    Attributes:
      slots: name without the layer's number -> place; shared operands as well.
      x: what the layer begins with; `normed`, `qkv`, `attended`, `between` and `hidden`: what its steps make; `y`: what it ends with.
    """

    slots: Mapping[str, Param]
    x: Param
    normed: Param
    qkv: Param
    attended: Param
    between: Param
    hidden: Param
    y: Param

    def at(self, slot: str) -> Param:
        return self.slots.get(slot, NOTHING)

    def norm(self, number: int) -> tuple[Param, Param]:
        return self.at(f"norm{number}_scale"), self.at(f"norm{number}_bias")


def float_literal(value: float | None) -> str:
    """A float in C++; 0 for one that is not there."""
    return "0.0f" if value is None or not math.isfinite(value) else f"{value!r}f"


def fuses_norm(rows: int, width: int) -> bool:
    """Whether every block of a product norms its x itself; else one kernel does it for all."""
    return 2 * rows * width <= _RESIDENT and rows <= _WARPS


def room_on(arch: str) -> int:
    """Bytes of shared memory of a block on an architecture; of one that is not known ("") those that there are wherever the kernels run."""
    target = target_of(arch) if arch else None
    return min(_BLOCK, ARCHITECTURES[target].shared if target else SOURCE.shared)


def decode_plan(row: Row, layers: Sequence[Places], arch: str) -> KernelPlan:
    """The kernels of all layers, one after another, for a GPU of an architecture ("" where it is not known).

    Returns:
      A plan whose operands and results are those that the places name.
    """
    products = {"QKV": row.qkv, "OUT": row.out, "UP": row.up, "DOWN": row.down}
    tiles = {name: product.cut(room_on(arch)) for name, product in products.items()}
    told: dict[str, object] = {
        "T": CODES[row.dtype],
        "P": int(row.parameters),
        "ROWS": row.qkv.rows,
        "STRIPS": int(row.pre_norm),
        "ACT": KERNEL_ACTIVATIONS.index(row.activation),
    }
    for i, (norm, epsilon) in enumerate(zip(row.norms, row.epsilons, strict=True), 1):
        told |= {f"NORM{i}": NORMS[norm], f"EPSILON{i}": float_literal(epsilon)}
    for name, product in products.items():
        told |= {name: product.arguments(tiles[name]), f"{name}_CLUSTER": tiles[name].split}
    told |= row.attention.options()
    launches = [launch for at in layers for launch in _layer(row, tiles, at)]
    # The first starts when all before it has ended: then nothing that the others read before they wait is still being written.
    launches[0] = replace(launches[0], early=False)
    return KernelPlan(SOURCE.path, options(told), tuple(launches))


def _layer(row: Row, tiles: Mapping[str, ProductTile], at: Places) -> list[Launch]:
    none = NOTHING
    threes = ("q", "k", "v") if "q" in at.slots else ("qkv",)
    gated = ("gate", "up") if row.up.gated else ("up",)

    # A product has places for three matrices and three biases (project.cuh); those of matrices that are not there are null.
    def three(slots: Sequence[str]) -> list[Param]:
        return [*(at.at(s) for s in slots), none, none, none][:3]

    # All but the first kernel start early: they wait themselves for the one ahead (PTX, griddepcontrol).
    def product(name: str, x: Param, number: int, slots: Sequence[str], residual: Param, out: Param) -> Launch:
        phase, tile = {"qkv": row.qkv, "out": row.out, "up": row.up, "down": row.down}[name], tiles[name.upper()]
        parameters = at.norm(number) if phase.norm else (none, none)
        biases = three([f"{s}_bias" for s in slots])
        params = (x, *parameters, *three(slots), *biases, residual, out)
        return Launch(
            f"decode_{name}", (phase.blocks(tile), 1, 1), (_THREADS, 1, 1), phase.shared(tile), params, early=True
        )

    # A product that norms its x itself has the norm in its phase (`fuses_norm`); other norms are kernels of their own.
    phases = zip(row.norms, (row.qkv.norm, row.up.norm), strict=True)
    own = [number for number, (norm, fused) in enumerate(phases, 1) if norm != fused]

    def norm(number: int, is_here: bool, x: Param, out: Param) -> tuple[Param, list[Launch]]:
        """What is read behind a place where a norm may be, and the kernel that makes it there, if one does."""
        if not is_here or number not in own:
            return x, []
        grid, params = (row.qkv.rows, 1, 1), (x, *at.norm(number), out)
        return out, [Launch(f"decode_norm{number}", grid, (_THREADS, 1, 1), _SCRATCH, params, early=True)]

    shared = ("cos", "sin", "step", "lengths", "mask", "cache_k", "cache_v")
    attend = (at.qkv, *(at.at(s) for s in shared), at.attended)
    x, ahead_of_qkv = norm(1, row.pre_norm, at.x, at.normed)
    summed, behind_out = norm(1, not row.pre_norm, at.between, at.normed)
    h, ahead_of_up = norm(2, row.pre_norm, summed, at.normed)
    _, behind_down = norm(2, not row.pre_norm, at.between, at.y)
    return [
        *ahead_of_qkv,
        product("qkv", x, 1, threes, none, at.qkv),
        Launch("decode_attend", (row.attention.grid, 1, 1), (_THREADS, 1, 1), row.attention.shared, attend, early=True),
        product("out", at.attended, 1, ("out",), at.x, at.between),
        *behind_out,
        *ahead_of_up,
        product("up", h, 2, gated, none, at.hidden),
        product("down", at.hidden, 2, ("down",), summed, at.between if behind_down else at.y),
        *behind_down,
    ]
