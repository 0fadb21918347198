"""How threads and blocks are dealt out in the kernels of `group_norm.cu`: plain arithmetic, no GPU."""

from __future__ import annotations

from dataclasses import dataclass

from ..geometry import GRID_Y, ITEM_BYTES, WARP, ceil_div, vector
from ..layer_norm.tiling import MULTIPROCESSORS

MAX_CHANNELS = 4096  # what is merged of them lies in 32 KiB of shared memory
MAX_BATCH = GRID_Y
THREADS = 256  # of a block, where a position has no more vectors
MOST_LANES = 512
RESIDENT_THREADS = 768  # of a multiprocessor: 80 registers for each
RESIDENT_OF_SEVERAL = 680  # where each has several vectors: 96 registers
MOST_SPLITS = MULTIPROCESSORS  # of an image: each of its blocks reads what all of them have left
LEAST_BYTES = 1 << 15  # of a chunk


@dataclass(frozen=True)
class GroupTile:
    """A block.

    Attributes:
      vec: neighbours that a thread takes at once.
      lanes: threads along the channels of a position.
      vecs: vectors of a thread in a position.
      height: threads along positions.
      team: threads that share the merges of a group, a power of 2.
    """

    vec: int
    lanes: int
    vecs: int
    height: int
    team: int

    @property
    def threads(self) -> int:
        return self.lanes * self.height

    @property
    def blocks(self) -> int:
        """That a multiprocessor has room for."""
        return (RESIDENT_THREADS if self.vecs == 1 else RESIDENT_OF_SEVERAL) // self.threads


def tile_of(channels: int, groups: int, dtype: str) -> GroupTile:
    vec = vector(channels, dtype)
    units = channels // vec
    vecs = ceil_div(units, MOST_LANES)
    lanes = ceil_div(units, vecs)
    height = max(1, THREADS // lanes)
    team = 1
    while team < WARP and 2 * team * groups <= lanes * height:
        team *= 2
    return GroupTile(vec, lanes, vecs, height, team)


def splits_of(batch: int, positions: int, channels: int, dtype: str, blocks: int) -> int:
    """Chunks of an image, none of them empty: together as many as there is room for, at `blocks` a multiprocessor."""
    least = ceil_div(LEAST_BYTES, channels * ITEM_BYTES[dtype])
    splits = min(MULTIPROCESSORS * blocks // batch, MOST_SPLITS, ceil_div(positions, least))
    return ceil_div(positions, ceil_div(positions, max(1, splits)))
