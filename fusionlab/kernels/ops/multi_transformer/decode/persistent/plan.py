"""How the kernel of `persistent.cu` is compiled and launched for a call: all layers in one launch. Plain arithmetic, no GPU.

Letters as in layer.py, with R rows (texts, one token each) in place of B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ......device import Device
from .....launch.architectures import ARCHITECTURES
from .....launch.compile import CudaSource
from .....launch.kernel_plan import KernelPlan, Launch
from .....launch.steps import Param
from ....gemm_epilogue.elementwise import KERNEL_ACTIVATIONS
from ....passes import options
from ..phased.plan import CODES, INSTRUCTIONS, NORMS, NOTHING, Places, ProductPhase, Row, float_literal

_SHARED = ARCHITECTURES["sm_90"].shared  # bytes of a block
SOURCE = CudaSource(
    "multi_transformer/decode/persistent/persistent.cu",
    ("decode_begin", "decode_layers"),
    INSTRUCTIONS,
    _SHARED,
    ("sm_90",),
)
BLOCKS = 132  # at most: no more than the device has multiprocessors, or they would wait for each other for ever
MOST_LAYERS = 24  # of a launch: its addresses are one parameter, of 4 KB at most
_PAIR = 2  # blocks that share the inner axis of a product
_THREADS, _WARPS = 512, 8  # eight warps that compute and eight that fill their rings
# Bytes of a slice, and of a ring's slices on their way at a time: enough for the memory's rate, and no long row to wait behind. Slices are
# large where a layer is so small that what a warp does for each of them counts.
_SLICE, _FLIGHT = 2048, 6144
_LARGE_SLICE, _LARGE_FLIGHT = 4096, 8192
_SMALL_LAYER = 128 << 20  # bytes of a layer's weights
_RING = 12 << 10, 48 << 10  # bytes of a warp's ring, at least and at most
_KEPT = 64 << 10  # bytes of x in shared memory
_SHARES = (1, 2, 4, 8)  # parts of the keys
_LEAST_BYTES = 24 << 20  # of a layer's weights
_SCRATCH = "counter", "qkv", "attended", "between", "hidden", "next", "statistics"  # as `Shared` of stream.cuh has them


def tile_of(product: ProductPhase) -> int:
    """Columns of a tile: those with which the busiest block has least to read; short pieces of rows cost more."""
    if product.gated:
        return 32 if product.turned else 64
    costs = {32: 1.0, 64: 1.25} if product.turned else {16: 2.5, 32: 1.15, 64: 1.0}
    return min(costs, key=lambda n: (-(-_tiles(product, n) // (BLOCKS // _PAIR)) * n * costs[n], n))


def _tiles(product: ProductPhase, tile: int) -> int:
    columns = tile // 2 if product.gated else tile
    return sum(-(-n // columns) for n in product.columns)


def blocks_of(row: Row) -> int:
    """How many blocks there are: those without which no phase takes longer, since fewer of them meet sooner and read less of x."""
    attention = row.attention
    jobs = attention.rows * attention.heads // attention.group * blocks_of_a_head(row)

    def rounds(blocks: int) -> list[int]:
        tiles = (_tiles(p, tile_of(p)) for p in _products(row).values())
        return [*(-(-n // (blocks // _PAIR)) for n in tiles), -(-jobs // blocks)]

    fewest = BLOCKS - BLOCKS // 16  # far fewer would not ask for as much as memory gives
    return next(n for n in range(fewest - fewest % _PAIR, BLOCKS + 1, _PAIR) if rounds(n) == rounds(BLOCKS))


def _held(product: ProductPhase, size: int) -> tuple[int, int]:
    """Entries of a row of x that a block keeps, with slices of `size` bytes, and how many such parts: 2 where not all are kept at once."""
    entries = _WARPS * size // 2 // tile_of(product)  # of a round: a slice of each warp
    rounds = -(-product.inner // (_PAIR * entries))
    whole = 2 * product.rows * rounds * entries
    return (rounds * entries, 1) if whole <= _KEPT else (_KEPT // 2 // (2 * product.rows * entries) * entries, 2)


def _is_kept(product: ProductPhase, size: int) -> bool:
    """Whether all that a block needs of x is kept at once."""
    return _held(product, size)[1] == 1


def _weight_bytes(row: Row) -> int:
    return sum(2 * p.inner * sum(p.columns) * (2 if p.gated else 1) for p in _products(row).values())


def slice_of(row: Row) -> int:
    """Bytes of a slice."""
    return _LARGE_SLICE if _weight_bytes(row) < _SMALL_LAYER else _SLICE


def blocks_of_a_head(row: Row) -> int:
    """Blocks that share the keys of a head: each warp has two slices of them at least."""
    attention = row.attention
    jobs = attention.rows * attention.heads // attention.group
    lanes = 1 << max(0, -(-attention.size // 8) - 1).bit_length()  # that share a key
    keys = 2 * _WARPS * slice_of(row) // 2 // (16 * lanes)
    return max((s for s in _SHARES if jobs * s <= BLOCKS and s * keys <= attention.past), default=1)


def scratch_bytes(row: Row, layers: int) -> dict[str, int]:
    """Bytes of what blocks make for each other, by name. `next`: x of the layers but the first of a launch; `statistics`: for norms, of
    more than one text (statistics.cuh).

    For one text each two entries, and each float that the parts of an attention leave, are a word of 8 bytes (exchange.cuh); for more
    they lie as they are.
    """
    rows, flagged = row.qkv.rows, is_flagged(row)
    entries = {"qkv": sum(row.qkv.columns), "between": row.qkv.inner, "hidden": row.down.inner}
    sizes = {name: rows * n * (4 if flagged else 2) for name, n in entries.items()}
    parts = row.attention.rows * row.attention.heads * blocks_of_a_head(row)
    if blocks_of_a_head(row) > 1:
        sizes["attended"] = (-(-2 * parts // 4) * 4 + parts * row.attention.size) * (8 if flagged else 4)
    else:  # what was attended to, in the row's dtype
        sizes["attended"] = rows * row.out.inner * (4 if flagged else 2)
    if flagged and layers > 1:
        sizes["next"] = rows * row.qkv.inner * 4
    if not flagged:  # two floats of each piece of x, and of what is between
        sizes["statistics"] = 8 * rows * _PAIR * sum(_tiles(p, tile_of(p)) for p in (row.down, row.out))
    return sizes | {"counter": 4}


def is_flagged(row: Row) -> bool:
    """Whether blocks wait for what others have made, rather than for each other."""
    return row.qkv.rows == 1


def _rows_bytes(row: Row) -> int:
    attention = row.attention
    block = 4 * attention.group * ((_WARPS + 1) * attention.size + 2 * _WARPS) + 4 * attention.size + 64
    held = (_held(p, slice_of(row)) for p in _products(row).values())
    return max(*(2 * row.qkv.rows * parts * (entries + 8) for entries, parts in held), -(-block // 16) * 16)


def _products(row: Row) -> dict[str, ProductPhase]:
    return {"QKV": row.qkv, "OUT": row.out, "UP": row.up, "DOWN": row.down}


def _beside(row: Row) -> int:
    """Bytes of shared memory outside the ring."""
    tile = max(map(tile_of, _products(row).values()))
    normed = max(
        (_held(p, slice_of(row))[0] for p, norm in zip((row.qkv, row.up), row.norms, strict=True) if norm), default=0
    )
    sums = _WARPS // 2 if row.qkv.rows > 4 else 2 * _WARPS  # of a warp, at a time
    return (
        -(-_rows_bytes(row) // 16) * 16
        + max(
            4 * sums * row.qkv.rows * (tile + 4),
            4 * row.qkv.rows * row.attention.heads * blocks_of_a_head(row) + 64,
        )
        + (0 if is_flagged(row) else 2 * normed * (2 if row.parameters else 4))
        + 8 * row.qkv.rows * tile // 2
        + 128
        + 16 * row.qkv.rows
        + 16 * _WARPS * (_RING[1] // slice_of(row))
    )


def depth_of(row: Row) -> int:
    """Slices of a warp's ring that there is room for."""
    return min(_RING[1], (_SHARED - _beside(row)) // _WARPS) // slice_of(row)


def takes(row: Row) -> bool:
    """Whether the kernel is for such layers: norms before the products, and room in shared memory for x and a ring of some depth."""
    whole = [row.out, *(p for p, norm in zip((row.qkv, row.up), row.norms, strict=True) if norm)]
    fits = all(_is_kept(p, slice_of(row)) for p in whole)
    return row.pre_norm and fits and depth_of(row) * slice_of(row) >= _RING[0]


def pays(row: Row, device: Device) -> bool:
    """Whether it is taken for layers that it `takes`: where the device has a multiprocessor for each block, and a layer's weights are no
    fewer than were tried. Trials on an H200 had it ahead of the five kernels of decode.cu at 1024 and at 4096 features, for 1, 4 and 16
    texts; the record has its own times alone.
    """
    return device.arch in SOURCE.archs and (device.units or 0) >= BLOCKS and _weight_bytes(row) >= _LEAST_BYTES


def persistent_plan(row: Row, layers: Sequence[Places], scratch: Mapping[str, Param]) -> KernelPlan:
    """All layers as one launch, or as several of no more than `MOST_LAYERS`.

    Args:
      scratch: what has a name in `scratch_bytes`, in as many bytes.
    """
    # All launches are of as many layers, as they are one kernel.
    count = next(n for n in range(1, len(layers) + 1) if len(layers) % n == 0 and len(layers) // n <= MOST_LAYERS)
    most = len(layers) // count
    chunks = [layers[i : i + most] for i in range(0, len(layers), most)]
    told: dict[str, object] = {
        "T": CODES[row.dtype],
        "P": int(row.parameters),
        "ROWS": row.qkv.rows,
        "ACT": KERNEL_ACTIVATIONS.index(row.activation),
        "BLOCKS": blocks_of(row),
        "LAYERS": most,
        "SLICE": slice_of(row),
        "KEPT": _KEPT,
        "DEPTH": depth_of(row),
        "FLIGHT": (_LARGE_FLIGHT if slice_of(row) == _LARGE_SLICE else _FLIGHT) // slice_of(row),
    }
    told |= {f"EPSILON{i}": float_literal(epsilon) for i, epsilon in enumerate(row.epsilons, 1)}
    norms = {"QKV": row.norms[0], "UP": row.norms[1]}
    for name, product in _products(row).items():
        columns = (*product.columns, 0, 0)[:3]
        flags = int(product.turned), int(product.gated), NORMS[norms.get(name)]
        told[name] = ",".join(map(str, (product.inner, *columns, tile_of(product), *flags)))
    told |= row.attention.options() | {"PARTS": blocks_of_a_head(row)}
    shared = _WARPS * depth_of(row) * slice_of(row) + _beside(row)
    launches = []
    for chunk in chunks:
        places = [scratch.get(name, NOTHING) for name in _SCRATCH]
        params = _params(row, chunk, places)
        launches.append(Launch("decode_begin", (32, 1, 1), (256, 1, 1), 0, (chunk[0].x, *places)))
        # Blocks wait for each other: a cooperative launch fails unless all are resident (CUDA C++ Programming Guide, cooperative groups).
        launches.append(
            Launch("decode_layers", (blocks_of(row), 1, 1), (_THREADS, 1, 1), shared, params, cooperative=True)
        )
    return KernelPlan(SOURCE.path, options(told), tuple(launches))


def _params(row: Row, layers: Sequence[Places], scratch: Sequence[Param]) -> tuple[Param, ...]:
    """As `Shared` and `Own` of stream.cuh have them."""
    first, last = layers[0], layers[-1]
    shared = ("cos", "sin", "step", "lengths", "mask")
    following = _SCRATCH.index("next")
    # x lies where a product between layers would: it is read and written in turns.
    if not is_flagged(row) and len(layers) > 1:
        scratch = [*scratch[:following], last.x, *scratch[following + 1 :]]
    found = [first.x, *(first.at(s) for s in shared), *scratch, last.y]
    threes = ("q", "k", "v") if "q" in first.slots else ("qkv", "", "")
    pair = ("gate", "up") if row.up.gated else ("up", "")
    for at in layers:
        slots = ["norm1_scale", "norm1_bias", *threes, *(f"{s}_bias" for s in threes), "cache_k", "cache_v", "out"]
        slots += ["out_bias", "norm2_scale", "norm2_bias", *pair, *(f"{s}_bias" for s in pair), "down", "down_bias"]
        found += [at.at(s) for s in slots]
    return tuple(found)
