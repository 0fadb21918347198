// What kernels that attend with one query a text over a cache are made of: the rotary turn, and keys of a warp under an online softmax.
#pragma once

constexpr int kHeads = FL_HEADS, kKeyHeads = FL_KEY_HEADS, kSize = FL_SIZE; // of the attention; kSize: features of a head
constexpr int kGroup = FL_GROUP;                                           // query heads of a block
constexpr int kPast = FL_PAST, kParts = FL_PARTS;
constexpr Index kKeyStride = FL_KEY_STRIDE, kHeadStride = FL_HEAD_STRIDE, kTextStride = static_cast<Index>(kPast) * kKeyHeads * kSize;
constexpr int kLanes = kSize <= 8 ? 1 : kSize <= 16 ? 2 : kSize <= 32 ? 4 : kSize <= 64 ? 8 : kSize <= 128 ? 16 : 32;
constexpr int kAtOnce = 32 / kLanes;
constexpr int kKeysAt = FL_KEYS_AT, kValuesAt = FL_VALUES_AT, kQueryStride = FL_QUERY_STRIDE, kKeyRowStride = FL_KEY_ROW_STRIDE;
constexpr bool kCausal = FL_CAUSAL, kStepOfEach = FL_STEP_OF_EACH, kMaskOfEach = FL_MASK_OF_EACH, kTurnOfEach = FL_TURN_OF_EACH;
constexpr bool kMaskIsFinite = FL_MASK_IS_FINITE;
constexpr float kScale = FL_SCALE; // times log2(e)

__device__ __forceinline__ float nothing() { return __uint_as_float(0xff800000u); } // -infinity: the largest score of no keys

struct Running {
  float largest, total, values[8];
};

// A feature after the turn: feature f of a row that `at(f)` gives; see `rotated` in layer.py.
template <class Row> __device__ __forceinline__ float turned(const Row& at, int f, const float* cosines, const float* sines) {
#if FL_ROTARY
  constexpr int kPiece = FL_ROTARY_WIDTH / FL_ROTARY, kHalf = kPiece / 2;
  if (f < FL_ROTARY_WIDTH) {
    const bool left = f % kPiece < kHalf;
    const float other = left ? -at(f + kHalf) : at(f - kHalf);
    return once(at(f) * cosines[f] + other * sines[f]);
  }
#endif
  return at(f);
}

__device__ __forceinline__ float between_keys(float x, bool largest) { // over the keys that a warp has side by side
#pragma unroll
  for (int other = kLanes; other < 32; other *= 2) {
    const float its = from_lane(x, other);
    x = largest ? fmaxf(x, its) : x + its;
  }
  return x;
}

template <int kCount> __device__ __forceinline__ void take(Running& to, const float (&query)[8], const uint4* keys, const uint4* values, const bool* seen) {
  float score[kCount], largest = to.largest;
#pragma unroll
  for (int u = 0; u < kCount; ++u) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 two = floats_of(word_of(keys[u], j));
      sum += query[2 * j] * two.x + query[2 * j + 1] * two.y;
    }
#pragma unroll
    for (int other = 1; other < kLanes; other *= 2) sum += from_lane(sum, other);
    score[u] = seen[u] ? sum * kScale : nothing();
  }
#pragma unroll
  for (int u = 0; u < kCount; ++u) largest = fmaxf(largest, score[u]);
  largest = between_keys(largest, true);
  if (largest == nothing()) return; // none is seen yet
  const float before = exp2_of(to.largest - largest);
  to.largest = largest;
  to.total *= before;
#pragma unroll
  for (int i = 0; i < 8; ++i) to.values[i] *= before;
#pragma unroll
  for (int u = 0; u < kCount; ++u) {
    const float weight = exp2_of(score[u] - largest);
    to.total += weight;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 two = floats_of(word_of(values[u], j));
      to.values[2 * j] += weight * two.x;
      to.values[2 * j + 1] += weight * two.y;
    }
  }
}

__device__ __forceinline__ float weight_of(float largest, float of_all) { return largest == nothing() ? 0.0f : exp2_of(largest - of_all); }
