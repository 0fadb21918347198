"""How the kernels of `attention.cu` are compiled and launched for a call: plain arithmetic, no GPU.

Tiles are as large as registers (sums of a block's rows stay in them) and the 99 KiB of shared memory allow that a block has on every
architecture from sm_80 on (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

from ....launch.architectures import COPIES, TENSOR_CORES
from ....launch.compile import CudaSource
from ....launch.kernel_plan import KernelPlan, Launch
from ...geometry import GRID_Y, ITEM_BYTES, VECTOR_BYTES, ceil_div, round_up
from ...passes import integers, options, places, those
from ..settings import ROUNDED_OFF, statistics

SHARED = 99 << 10
SOURCE = CudaSource(
    "dot_product_attention/own/attention.cu",
    ("attention_forward", "attention_query", "attention_keys"),
    (TENSOR_CORES, COPIES),
    SHARED,
)
CODES = {"float32": 0, "bfloat16": 1, "float16": 2}
OPERANDS = {"bool": 1, "float32": 2, "bfloat16": 3, "float16": 4}  # FL_FACTORS; FL_BIAS is one less
MOST_FEATURES = 128
MOST_BLOCKS = GRID_Y  # along y and z, which are heads and batch: CUDA's limit of both

_READ = ("query", "key", "value", "bias", "mask", "factors")

Strides = tuple[int, ...]


@dataclass(frozen=True)
class TiledAttention:
    """A call, as the kernels see it.

    Attributes:
      dtype: numpy's name, of query, key, value, out.
      batch, heads, queries, keys: sizes; `group` query heads share a head of key and value.
      features, value_features: of a head, multiples of 8 up to `MOST_FEATURES`.
      query, key, value, out: (batch, head, row) strides, in elements.
      bias, mask, factors: their dtype and (batch, head, row, column) strides, 0 where it broadcasts; None if absent.
      window: keys before and after a row's own that it sees; None: all (or with is_causal those before).
      terms: of a product of floats: 3 TF32 products or 1.
      dropout: the same strides among the entries that are drawn, where the factors are made of a key, with probability `keep` each;
        those of row and column are `keys` and 1.
    """

    dtype: str
    batch: int
    heads: int
    queries: int
    keys: int
    features: int
    value_features: int
    query: Strides
    key: Strides
    value: Strides
    out: Strides
    scale: float
    is_causal: bool = False
    window: tuple[int, int] | None = None
    softcap: float | None = None
    mask_value: float = -math.inf
    factors_scale: float = 1.0
    bias: tuple[str, Strides] | None = None
    mask: tuple[str, Strides] | None = None
    factors: tuple[str, Strides] | None = None
    group: int = 1
    terms: int = 3
    dropout: Strides | None = None
    keep: float = 1.0

    @property
    def scores(self) -> dict[str, Strides]:
        """The strides of what is read for each score; of a dropout's key those of the factors that are made of it."""
        given = (("bias", self.bias), ("mask", self.mask), ("factors", self.factors))
        found = {slot: operand[1] for slot, operand in given if operand}
        return found | {"factors": self.dropout} if self.dropout else found

    @property
    def read(self) -> tuple[str, ...]:
        """The operands of the forward, in order."""
        return those((*_READ[:3], *self.scores), *_READ)

    @property
    def plain(self) -> bool:
        """Whether scores may be compared before they are scaled."""
        finite = self.mask is not None and self.mask_value != -math.inf
        return self.scale > 0 and self.bias is None and self.softcap is None and not finite


@dataclass(frozen=True)
class Tiles:
    """`tiles` times 16 rows for each of `warps`, and `columns` of a step."""

    tiles: int
    warps: int
    columns: int

    @property
    def rows(self) -> int:
        return 16 * self.tiles * self.warps


# What follows is as large as leaves no register spilt (or, of a few variants, some words outside of the loop); `reads_scores`: a mask,
# bias or factors are read for each score, which takes registers.


def forward_tiles(dtype: str, features: int, reads_scores: bool) -> Tiles:
    if dtype == "float32":
        return Tiles(1, 4, 16 if reads_scores else 32)
    if reads_scores:
        return Tiles(2, 4, 32) if features <= 64 else Tiles(1, 4, 64)
    return Tiles(2, 4, 64 if features <= 64 else 32)


def query_tiles(dtype: str, features: int, reads_scores: bool) -> Tiles:
    if dtype == "float32":
        return Tiles(1, 4, 16)
    if features <= 64:
        return Tiles(2, 4, 32)
    return Tiles(1, 4, 32 if reads_scores else 64)


def keys_tiles(dtype: str, features: int, reads_scores: bool) -> Tiles:
    if dtype == "float32":
        return Tiles(1, 4, 16) if features <= 64 else Tiles(1, 2, 16)
    if features <= 64:
        return Tiles(1, 8, 32 if reads_scores else 64)
    return Tiles(1, 4, 32)


def forward_plan(call: TiledAttention, saves: str | None) -> KernelPlan:
    """Operands query, key, value[, bias][, mask][, factors]; results out and what `saves` names ("logsumexp": one float32 array, batch x
    heads x queries; "max_and_log_sum": two of them; None: none; with what out was rounded by: an array like it)."""
    stats = () if saves is None else statistics(saves)
    rounded = ("rounded_off",) if saves is not None and saves.endswith(ROUNDED_OFF) else ()
    tiles = forward_tiles(*_kind(call))
    results = places("result", ("out", *_two(stats), "rounded_off"), ("out", *stats, *rounded))
    shared = _bytes(call, call.features, tiles.rows + 2 * tiles.columns)
    shared += _bytes(call, call.value_features, 2 * tiles.columns)
    params = (*places("operand", _READ, call.read), *results)
    told = {"FORWARD": 1, "STATS": len(stats), "ROUNDED": len(rounded)}
    return _plan("attention_forward", call, tiles, (call.queries, call.heads), shared, params, told)


def together(call: TiledAttention, wanted: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The gradients wanted by the launches that make them: the query's, and those of key and value, of which for float32 of many features
    the sums of both would not fit in registers."""
    sums = those(wanted, "key", "value")
    apart = call.dtype == "float32" and max(call.features, call.value_features) > 64
    return [some for some in (those(wanted, "query"), *(zip(sums) if apart else [sums])) if some]


def backward_plan(call: TiledAttention, saves: str, grads: tuple[str, ...]) -> KernelPlan:
    """The gradients that one launch makes (`together`), laid out as what they are of.

    Operands query, key, value[, bias][, mask][, factors], the statistics that `saves` names, delta (float32, batch x heads x queries: the
    sum over a row of ct * out) and ct, laid out as out; results the gradients.
    """
    of_query, stats = grads == ("query",), statistics(saves)
    tiles = (query_tiles if of_query else keys_tiles)(*_kind(call))
    shared = sum(_bytes(call, n, tiles.rows + 2 * tiles.columns) for n in (call.features, call.value_features))
    behind = ("delta", "ct")
    params = places("operand", (*_READ, *_two(stats), *behind), (*call.read, *stats, *behind))
    if of_query:
        told = {"BACKWARD_QUERY": 1, "STATS": len(stats)}
        return _plan("attention_query", call, tiles, (call.queries, call.heads), shared, (*params, ("result", 0)), told)
    told = {"BACKWARD_KEYS": 1, "STATS": len(stats), "GRADS": ("key" in grads) + 2 * ("value" in grads)}
    params += places("result", ("key", "value"), grads)
    shared += 2 * 3 * 4 * tiles.columns
    return _plan("attention_keys", call, tiles, (call.keys, call.heads // call.group), shared, params, told)


def _plan(
    entry: str,
    call: TiledAttention,
    tiles: Tiles,
    size: tuple[int, int],
    shared: int,
    params: tuple[tuple[str, int], ...],
    told: dict[str, int],
) -> KernelPlan:
    """One launch over so many rows and heads."""
    grid = (ceil_div(size[0], tiles.rows), size[1], call.batch)
    launch = Launch(entry, grid, (32 * tiles.warps, 1, 1), shared, (*params, *_geometry(call)))
    return KernelPlan(SOURCE.path, _options(call, tiles) + options(told), (launch,))


def _two(stats: tuple[str, ...]) -> tuple[str, ...]:
    """The statistics for which a kernel has parameters; one that is not there has no name."""
    return (*stats, "", "")[:2]


def _kind(call: TiledAttention) -> tuple[str, int, bool]:
    """The settings that tiles depend on."""
    return call.dtype, max(call.features, call.value_features), len(call.read) > 3 or call.softcap is not None


def _geometry(call: TiledAttention) -> tuple[tuple[str, int], ...]:
    # Every call has these parameters: a kernel is compiled without the reads of what is not there (FL_BIAS, FL_MASK, FL_FACTORS).
    sizes = (call.queries, call.keys, call.heads, call.group, *(call.window or (0, 0)))
    strides = [*call.query, *call.key, *call.value, *call.out]
    for slot in _READ[3:]:
        strides += call.scores.get(slot, (0, 0, 0, 0))
    numbers = (call.scale, call.softcap or 0.0, call.mask_value, call.factors_scale, call.keep)
    return (*(("i32", n) for n in sizes), *integers(*strides), *(("i32", _bits(x)) for x in numbers))


def _bits(x: float) -> int:
    """Of a float32, beyond whose range a number is its largest: a mask value of -1e300 masks as float32's lowest does."""
    largest = 3.4028234663852886e38
    clipped = x if math.isinf(x) else min(max(x, -largest), largest)
    return int.from_bytes(struct.pack("<f", clipped), "little", signed=True)


def _bytes(call: TiledAttention, features: int, rows: int) -> int:
    """Of that many rows in shared memory: `Tile::bytes`."""
    per_word = VECTOR_BYTES // ITEM_BYTES[call.dtype]
    words = round_up(features, 16) // per_word
    swizzled = call.dtype != "float32" and words % 8 == 0
    return rows * (words if swizzled else words + 1) * 16


def _options(call: TiledAttention, tiles: Tiles) -> tuple[str, ...]:
    values: dict[str, Any] = {
        "T": CODES[call.dtype],
        "D": call.features,
        "DV": call.value_features,
        "TILES": tiles.tiles,
        "WARPS": tiles.warps,
        "COLUMNS": tiles.columns,
        "CAUSAL": int(call.is_causal and call.window is None),
        "WINDOW": int(call.window is not None),
        "MASK": int(call.mask is not None),
        "SOFTCAP": int(call.softcap is not None),
        "BIAS": OPERANDS[call.bias[0]] - 1 if call.bias else 0,
        "FACTORS": 5 if call.dropout else OPERANDS[call.factors[0]] if call.factors else 0,
        "PLAIN": int(call.plain),
        "TERMS": call.terms,
    }
    return options(values)
