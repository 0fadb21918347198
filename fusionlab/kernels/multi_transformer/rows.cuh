// Statistics of rows and what a norm makes of their entries. A row is read once: mean and sum of squares of what each thread holds, merged by
// the formula of Chan, Golub and LeVeque (1979, "Updating formulae and a pairwise algorithm for computing sample variances"), which
// subtracts no large numbers of one another.
#pragma once

constexpr int kNoNorm = 0, kLayerNorm = 1, kRmsNorm = 2;

struct Moments {
  float count, mean, squares; // squares: the sum of (entry - mean)^2; of an RMSNorm the mean stays 0
};

__device__ __forceinline__ Moments merged(Moments a, Moments b) {
  const float count = a.count + b.count;
  const float part = count > 0.0f ? b.count / count : 0.0f;
  const float apart = b.mean - a.mean;
  return {count, a.mean + apart * part, a.squares + b.squares + apart * apart * (a.count * part)};
}

// Of the words [first, last) of a row, of 8 entries each: the warp's together.
template <int kNorm, int kHeld> __device__ __forceinline__ Moments moments_of(const T* row, int first, int last) {
  const int lane = threadIdx.x % 32;
  Moments all = {0.0f, 0.0f, 0.0f};
  for (int start = first + lane; start < last; start += 32 * kHeld) {
    uint4 held[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if (start + 32 * i < last) held[i] = __ldcg(reinterpret_cast<const uint4*>(row) + start + 32 * i);
    Moments mine = {0.0f, 0.0f, 0.0f};
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (start + 32 * i >= last) continue;
      mine.count += 8.0f;
      if (kNorm == kLayerNorm) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 two = floats_of(word_of(held[i], j));
          sum += two.x + two.y;
        }
      }
    }
    if (kNorm == kLayerNorm) mine.mean = sum / mine.count;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (start + 32 * i >= last) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 two = floats_of(word_of(held[i], j));
        const float x = two.x - mine.mean, y = two.y - mine.mean;
        mine.squares += x * x + y * y;
      }
    }
    all = merged(all, mine);
  }
#pragma unroll
  for (int other = 1; other < 32; other *= 2) {
    const Moments its = {from_lane(all.count, other), from_lane(all.mean, other), from_lane(all.squares, other)};
    all = lane & other ? merged(its, all) : merged(all, its); // in one order, so that all lanes have the same
  }
  return all;
}

// Mean and reciprocal deviation of each of kCount rows, in shared memory, by the whole block. `pieces` is scratch memory of kPieces each.
template <int kCount> struct Statistics {
  static constexpr int kPieces = kCount == 1 ? 8 : kCount == 2 ? 4 : kCount <= 4 ? 2 : 1;
  Moments pieces[kCount * kPieces];
  float2 rows[kCount];
};

template <int kNorm, int kCount, int kLength>
__device__ __forceinline__ void find_statistics(Statistics<kCount>& found, const T* rows, float epsilon) {
  constexpr int kPieces = Statistics<kCount>::kPieces, kWords = kLength / 8, kPiece = (kWords + kPieces - 1) / kPieces;
  constexpr int kEach = (kPiece + 31) / 32, kHeld = kEach < 8 ? kEach : 8;
  for (int i = threadIdx.x / 32; i < kCount * kPieces; i += kThreads / 32) {
    const int first = i % kPieces * kPiece, last = first + kPiece < kWords ? first + kPiece : kWords;
    const Moments one = moments_of<kNorm, kHeld>(rows + static_cast<Index>(i / kPieces) * kLength, first, last);
    if (threadIdx.x % 32 == 0) found.pieces[i] = one;
  }
  __syncthreads();
  if (threadIdx.x < kCount) {
    Moments all = found.pieces[threadIdx.x * kPieces];
#pragma unroll
    for (int i = 1; i < kPieces; ++i) all = merged(all, found.pieces[threadIdx.x * kPieces + i]);
    found.rows[threadIdx.x] = {all.mean, 1.0f / sqrtf(all.squares / kLength + epsilon)};
  }
  __syncthreads();
}

// An entry after its norm, in float.
__device__ __forceinline__ float normed(float entry, float2 row, float scale, float bias) {
  return (entry - row.x) * row.y * scale + bias;
}
