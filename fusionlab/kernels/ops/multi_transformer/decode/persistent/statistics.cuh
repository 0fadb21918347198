// Statistics of rows for the norm behind a product of persistent.cu: who makes a piece of a row leaves its mean and its sum of squared
// distances from that, so that who norms the row need not read all of it. (For more than one text: of one, each block reads the row anyway.)
//
// Pieces are put together as in T. F. Chan, G. H. Golub and R. J. LeVeque, "Updating formulae and a pairwise algorithm for computing sample
// variances" (1979). An RMS norm takes distances from 0.
#pragma once

// Of a piece of which each of kPiece lanes, one behind another, has an entry, or none. `count`: how many there are. All lanes come here.
template <int kNorm, int kPiece> __device__ __forceinline__ float2 statistics_of_piece(float entry, bool there, int count) {
  const auto over_piece = [](float value) {
#pragma unroll
    for (int other = 1; other < kPiece; other *= 2) value += from_lane(value, other);
    return value;
  };
  const float mean = kNorm == kLayerNorm ? over_piece(there ? entry : 0.0f) / count : 0.0f;
  const float distance = there ? entry - mean : 0.0f;
  return {mean, over_piece(distance * distance)};
}

// Rows that a product S makes, for a norm of the kind kNorm.
template <class S, int kNorm> struct Pieces {
  static constexpr int kPiece = S::kMade / kPair, kCount = S::kTiles * kPair, kAll = kRows * kCount;
  static_assert(32 % kPiece == 0);
  static __device__ __forceinline__ int size_of(int piece) {
    const int left = S::kPitch - piece * kPiece;
    return left < 0 ? 0 : left < kPiece ? left : kPiece;
  }

  // Of an array that no product of this launch made, by all blocks of a launch.
  static __device__ __forceinline__ void keep_of(float2* to, const T* rows) {
    constexpr int kLanes = (kAll * kPiece + 31) / 32 * 32;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < kLanes; i += gridDim.x * blockDim.x) {
      const int number = i / kPiece, piece = number % kCount, column = piece * kPiece + i % kPiece;
      const bool there = number < kAll && column < S::kPitch;
      const float entry = there ? static_cast<float>(rows[static_cast<Index>(number / kCount) * S::kPitch + column]) : 0.0f;
      const float2 found = statistics_of_piece<kNorm, kPiece>(entry, there, size_of(piece));
      if (number < kAll && i % kPiece == 0) to[number] = found;
    }
  }

  // What a lane reads of the rows of its warp.
  struct Row {
    static constexpr int kHeld = (kCount + 31) / 32, kOfWarp = (kRows + kWarps - 1) / kWarps;
    float2 held[kOfWarp][kHeld];

    explicit __device__ __forceinline__ Row(const float2* pieces) {
#pragma unroll
      for (int r = 0; r < kOfWarp; ++r)
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
          const int row = threadIdx.x / 32 + r * kWarps, piece = threadIdx.x % 32 + 32 * i;
          held[r][i] = {0.0f, 0.0f};
          if (row < kRows && size_of(piece) > 0) held[r][i] = __ldcg(pieces + row * kCount + piece);
        }
    }

    // The mean of each row and 1 / its standard deviation, to `to` in shared memory.
    __device__ __forceinline__ void put_together(float2* to, float epsilon) const {
      const auto over_warp = [](float value) {
#pragma unroll
        for (int other = 1; other < 32; other *= 2) value += from_lane(value, other);
        return value;
      };
#pragma unroll
      for (int r = 0; r < kOfWarp; ++r) {
        const int row = threadIdx.x / 32 + r * kWarps;
        float sum = 0.0f, squares = 0.0f;
        if (kNorm == kLayerNorm) {
#pragma unroll
          for (int i = 0; i < kHeld; ++i) sum += held[r][i].x * size_of(threadIdx.x % 32 + 32 * i);
          sum = over_warp(sum);
        }
        const float mean = sum * (1.0f / S::kPitch);
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
          const float off = held[r][i].x - mean;
          squares += held[r][i].y + size_of(threadIdx.x % 32 + 32 * i) * off * off;
        }
        squares = over_warp(squares);
        if (threadIdx.x % 32 == 0 && row < kRows) to[row] = {mean, 1.0f / sqrtf(squares * (1.0f / S::kPitch) + epsilon)};
      }
    }
  };
};
