// Attention of one query a text over a cache of keys and values, after the rotary turn of query and key and with the new key and value
// written to the cache.
//
// A block takes a text, some query heads of one key head and, of a cluster of kParts blocks, one part of the keys that are seen. A warp takes
// some keys at a time, kLanes lanes with 8 features each for one key, and keeps a running maximum, sum and weighted values (the online
// softmax of Milakov and Gimelshein 2018, arXiv:1805.02867); these are merged over warps and blocks, always in the same order. The first
// keys and values, which are there since before the launch plan began, are asked for before the kernel waits for the one ahead of it.
#pragma once
#include "../keys.cuh"

constexpr int kUnroll = FL_UNROLL;

struct Cached {
  const int *step, *lengths;
  const unsigned char* mask;
  T *keys, *values;
  Index base; // of the block's text and head
};

struct Block {
  float queries[kGroup][kSize];
  float largest[kWarps + 1][kGroup], total[kWarps + 1][kGroup]; // of the warps, and of the block
  float values[kWarps + 1][kGroup][kSize];
  __align__(16) T key[kSize]; // of the new token
  __align__(16) T value[kSize];
};

// Keys and values of kAtOnce x kUnroll positions from `start` on; those that are not seen are left out.
struct Chunk {
  uint4 keys[kUnroll], values[kUnroll];
  bool seen[kUnroll];
};

__device__ __forceinline__ void fetch(Chunk& to, const Cached& cached, int start, int end, int fresh_one) {
  const int lane = threadIdx.x % 32, feature = lane % kLanes * 8;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int position = start + u * kAtOnce + lane / kLanes;
    to.seen[u] = position < end && position != fresh_one && (!cached.mask || cached.mask[position]);
    to.keys[u] = to.values[u] = {0, 0, 0, 0};
    if (to.seen[u] && feature < kSize) {
      const Index at = cached.base + static_cast<Index>(position) * kKeyStride + feature;
      to.keys[u] = __ldcg(reinterpret_cast<const uint4*>(cached.keys + at));
      to.values[u] = __ldcg(reinterpret_cast<const uint4*>(cached.values + at));
    }
  }
}

// The mean of all values: what is left of a softmax whose scores are all the same finite number.
__device__ __forceinline__ float mean_value(const Cached& cached, int f, int fresh_one, float value) {
  float sum = value;
  for (int i = 0; i < kPast; ++i)
    if (i != fresh_one) sum += static_cast<float>(fresh(cached.values + cached.base + static_cast<Index>(i) * kKeyStride + f));
  return sum / kPast;
}

__device__ __forceinline__ void attend(const T* qkv, const float* cosines, const float* sines, Cached cached, T* out) {
  fl_next();
  Block& shared = *reinterpret_cast<Block*>(shared_memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int part = kParts == 1 ? 0 : blockIdx.x % kParts, job = blockIdx.x / kParts;
  constexpr int kSets = kHeads / kKeyHeads / kGroup; // of the query heads of a key head
  const int set = job % kSets, key_head = job / kSets % kKeyHeads, text = job / kSets / kKeyHeads;
  const int head = key_head * (kHeads / kKeyHeads) + set * kGroup;

  const int step = cached.step[kStepOfEach ? text : 0];
  const int at = step < 0 ? 0 : step < kPast ? step : kPast - 1; // where the new token goes
  int seen = kCausal ? step + 1 : kPast;
  if (cached.lengths && step + cached.lengths[text] < seen) seen = step + cached.lengths[text];
  seen = seen < 0 ? 0 : seen < kPast ? seen : kPast;
  const int each = (seen + kParts - 1) / kParts, first = part * each, last = first + each < seen ? first + each : seen;
  if (cached.mask) cached.mask += kMaskOfEach ? static_cast<Index>(text) * kPast : 0;
  cached.base = static_cast<Index>(text) * kTextStride + static_cast<Index>(key_head) * kHeadStride;
  constexpr int kChunk = kUnroll * kAtOnce;
  int start = first + warp * kChunk;
  Chunk now;
  fetch(now, cached, start, last, at);
  fl_wait();

  const T* const mine = qkv + static_cast<Index>(text) * (kHeads + 2 * kKeyHeads) * kSize;
  const int turn = kTurnOfEach ? text * FL_ROTARY_WIDTH : 0;
  for (int i = threadIdx.x; i < kGroup * kSize; i += kThreads) {
    const T* const row = mine + (head + i / kSize) * kQueryStride;
    shared.queries[i / kSize][i % kSize] =
        turned([&](int f) { return static_cast<float>(fresh(row + f)); }, i % kSize, cosines + turn, sines + turn);
  }
  if (part == 0) {
    const T* const row = mine + kKeysAt + key_head * kKeyRowStride;
    for (int f = threadIdx.x; f < kSize; f += kThreads) {
      const T key = static_cast<T>(turned([&](int g) { return static_cast<float>(fresh(row + g)); }, f, cosines + turn, sines + turn));
      const T value = fresh(row + kValuesAt - kKeysAt + f);
      shared.key[f] = key;
      shared.value[f] = value;
      if (set == 0) {
        const Index place = cached.base + static_cast<Index>(at) * kKeyStride + f;
        cached.keys[place] = key;
        cached.values[place] = value;
      }
    }
  }
  __syncthreads();

  const int feature = lane % kLanes * 8;
  float query[kGroup][8];
  Running running[kGroup];
#pragma unroll
  for (int h = 0; h < kGroup; ++h) {
#pragma unroll
    for (int i = 0; i < 8; ++i) query[h][i] = feature < kSize ? shared.queries[h][feature + i] : 0.0f;
    running[h] = {nothing(), 0.0f, {}};
  }
  if (part == 0 && warp == 0) {
    const bool one = lane < kLanes && at < seen && (!cached.mask || cached.mask[at]);
    uint4 key = {0, 0, 0, 0}, value = {0, 0, 0, 0};
    if (feature < kSize) {
      key = *reinterpret_cast<const uint4*>(shared.key + feature);
      value = *reinterpret_cast<const uint4*>(shared.value + feature);
    }
#pragma unroll
    for (int h = 0; h < kGroup; ++h) take<1>(running[h], query[h], &key, &value, &one);
  }
  while (start < last) {
    const int next = start + kWarps * kChunk;
    Chunk then;
    fetch(then, cached, next, last, at);
#pragma unroll
    for (int h = 0; h < kGroup; ++h) take<kUnroll>(running[h], query[h], now.keys, now.values, now.seen);
    now = then;
    start = next;
  }

#pragma unroll
  for (int h = 0; h < kGroup; ++h) {
    const float total = between_keys(running[h].total, false);
    if (lane == 0) shared.largest[warp][h] = running[h].largest, shared.total[warp][h] = total;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float value = between_keys(running[h].values[i], false);
      if (lane < kLanes && feature < kSize) shared.values[warp][h][feature + i] = value;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kGroup * kSize; i += kThreads) {
    const int h = i / kSize, f = i % kSize;
    float largest = nothing(), total = 0.0f, value = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, shared.largest[w][h]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float weight = weight_of(shared.largest[w][h], largest);
      total += weight * shared.total[w][h];
      value += weight * shared.values[w][h][f];
    }
    shared.values[kWarps][h][f] = value;
    if (f == 0) shared.largest[kWarps][h] = largest, shared.total[kWarps][h] = total;
  }
  if (kParts > 1) {
    cluster_arrives();
    cluster_waits();
  } else {
    __syncthreads();
  }
  for (int i = part * kThreads + threadIdx.x; i < kGroup * kSize; i += kParts * kThreads) {
    const int h = i / kSize, f = i % kSize;
    float largest = nothing(), total = 0.0f, value = 0.0f;
    const auto of = [&](const float& place, int block) { return kParts == 1 ? place : of_block(&place, block); };
#pragma unroll
    for (int p = 0; p < kParts; ++p) largest = fmaxf(largest, of(shared.largest[kWarps][h], p));
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      const float weight = weight_of(of(shared.largest[kWarps][h], p), largest);
      total += weight * of(shared.total[kWarps][h], p);
      value += weight * of(shared.values[kWarps][h][f], p);
    }
    float mixed = 0.0f;
    if (total > 0.0f || total != total)
      mixed = value / total;
    else if (kMaskIsFinite)
      mixed = mean_value(cached, f, at, static_cast<float>(fresh(mine + kValuesAt + key_head * kKeyRowStride + f)));
    out[in_strips(text, (head + h) * kSize + f)] = static_cast<T>(mixed);
  }
  if (kParts > 1) {
    cluster_arrives();
    cluster_waits();
  }
}
