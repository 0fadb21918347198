// How blocks of persistent.cu wait for each other where there is more than one text (for one see exchange.cuh).
//
// A block does units one after the other: in each layer tiles of the first product, jobs of the attention, tiles of the other products. It
// says how many it has done, in a word of its own. Which block does what is known, so that a warp waits for the units that make what it reads,
// and for no more: of the second half of a feed-forward, most warps begin while the last tiles of the first half are still being made.
//
// A wait is for units ahead of the waiting block's own in the order of layers and phases, so there is always a block that can go on. What is
// read of one phase is written again a layer later: in between each block has waited for all others.
#pragma once

// Units of a block ahead of a phase in a layer; of phase kPhases: all of the layer.
__device__ __forceinline__ int units_before(int phase, int block) {
  const int pair = block / kPair;
  int count = 0;
  if (phase > 0) count += Qkv::tiles_of_pair(pair);
  if (phase > 1) count += block < kJobs ? (kJobs - 1 - block) / kBlocks + 1 : 0;
  if (phase > 2) count += Out::tiles_of_pair(pair);
  if (phase > 3) count += Up::tiles_of_pair(pair);
  if (phase > 4) count += Down::tiles_of_pair(pair);
  return count;
}
__device__ __forceinline__ int units_done(int layer, int phase, int block) { return layer * units_before(kPhases, block) + units_before(phase, block); }

struct Unit { // the first `count` of a block's
  int block, count;
};

__device__ __forceinline__ void wait_for(const unsigned* done, const Unit& unit) {
  while (told(done + unit.block) < static_cast<unsigned>(unit.count)) others_go_on();
}

// A warp waits for `count` units, each lane for some of them: one, as a rule, since each takes a way to the L2 cache and back.
template <class UnitOf> __device__ __forceinline__ void warp_waits(const unsigned* done, int count, const UnitOf& unit_of) {
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < count; i += 32) wait_for(done, unit_of(i));
  warp_meets();
}

// The block waits for all blocks to be at the end of a phase.
__device__ __forceinline__ void block_waits_for_phase(const unsigned* done, int layer, int phase) {
#pragma unroll 1
  for (int block = threadIdx.x; block < kBlocks; block += kThreads) wait_for(done, {block, units_done(layer, phase + 1, block)});
  block_meets();
}

// The block of a pair that makes half of a tile.
template <class S> __device__ __forceinline__ Unit unit_of_tile(int layer, int phase, int tile, int half) {
  const int block = tile % kPairs * kPair + half;
  return {block, units_done(layer, phase, block) + tile / kPairs + 1};
}
__device__ __forceinline__ Unit unit_of_job(int layer, int number) {
  const int block = number % kBlocks;
  return {block, units_done(layer, 1, block) + number / kBlocks + 1};
}

// What the warp's slices of a product read of x: the first entry and the last.
template <class S> __device__ __forceinline__ int2 entries_of_warp() {
  const int number = blockIdx.x % kPair * kWarps + threadIdx.x / 32, slices = S::slices_of(number);
  if (slices == 0) return {0, -1};
  const int first = number * S::kNextWarp, last = first + (slices - 1) * S::kNextSlice + S::kStep - 1;
  return {first, last < S::kInner ? last : S::kInner - 1};
}

// For what the warp reads of an attention, and of the first half of a feed-forward.
__device__ __forceinline__ void warp_waits_for_heads(const unsigned* done, int layer) {
  const int2 entries = entries_of_warp<Out>();
  constexpr int kOfGroup = kRows * kParts; // jobs of the heads that one block attends to at a time
  const int first = entries.x / kSize / kGroup, groups = entries.y < 0 ? 0 : entries.y / kSize / kGroup - first + 1;
  warp_waits(done, groups * kOfGroup, [&](int i) { return unit_of_job(layer, first * kOfGroup + i); });
}
__device__ __forceinline__ void warp_waits_for_hidden(const unsigned* done, int layer) {
  const int2 entries = entries_of_warp<Down>();
  const int first = Up::tile_of(entries.x), tiles = entries.y < 0 ? 0 : Up::tile_of(entries.y) - first + 1;
  warp_waits(done, tiles * kPair, [&](int i) { return unit_of_tile<Up>(layer, 3, first + i / kPair, i % kPair); });
}

// For the queries, the key and the value of a job.
__device__ __forceinline__ void warp_waits_for_job(const unsigned* done, int layer, const Job& job) {
  const int key = kKeysAt + job.key_head * kKeyRowStride, value = kValuesAt + job.key_head * kKeyRowStride;
  const int from[3] = {job.head * kQueryStride, key, value}, count[3] = {(kGroup - 1) * kQueryStride + kSize, kSize, kSize};
  int first[3], tiles[3];
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    first[j] = Qkv::tile_of(from[j]);
    tiles[j] = j > 0 && job.part > 0 ? 0 : Qkv::tile_of(from[j] + count[j] - 1) - first[j] + 1;
  }
  warp_waits(done, (tiles[0] + tiles[1] + tiles[2]) * kPair, [&](int i) {
    int tile = i / kPair;
    tile = tile < tiles[0] ? first[0] + tile : tile < tiles[0] + tiles[1] ? first[1] + tile - tiles[0] : first[2] + tile - tiles[0] - tiles[1];
    return unit_of_tile<Qkv>(layer, 0, tile, i % kPair);
  });
}
