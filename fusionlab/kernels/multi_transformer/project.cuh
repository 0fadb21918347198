// Products of a few rows (kRows, up to 16) with a matrix, at the speed at which the matrix comes from memory.
//
// A block takes kTile columns and, of a cluster of kSplit blocks, one part of the inner axis. Its warps go over slices of kStep of it by
// themselves: each has a ring of kDepth slices in shared memory, which are on their way while others are multiplied, and no barrier with
// other warps. The first slices of the matrix, which no kernel writes, are asked for before the kernel waits for the one ahead of it.
// Then sums are added over warps and over the cluster, always in the same order.
//
// Products are mma.sync with the matrix as the left operand: 16 columns x 16 of the inner axis, by 8 rows of x.
#pragma once

template <int kInner_, int kFirst, int kSecond, int kThird, int kTile_, int kSplit_, int kStep_, int kDepth_, bool kTurned_, bool kGated_>
struct Shape {
  static constexpr int kInner = kInner_, kTile = kTile_, kSplit = kSplit_, kStep = kStep_, kDepth = kDepth_;
  static constexpr bool kTurned = kTurned_; // the matrix is columns x inner
  static constexpr bool kGated = kGated_;   // there are two matrices alike: a tile is as many columns of either
  static constexpr int kMade = kGated ? kTile / 2 : kTile; // columns of the result that a tile makes
  static constexpr int kPitch = kFirst + kSecond + kThird; // of a row of the result; up to three matrices side by side
  static constexpr int kOwn = ((kInner + kSplit - 1) / kSplit + kStep - 1) / kStep * kStep; // of the inner axis, a block's
  static constexpr int kMatrixPitch = (kTurned ? kStep : kTile) + 8; // in shared memory: an odd number of 16-byte words
  static constexpr int kMatrixRows = kTurned ? kTile : kStep;
  static constexpr int kRowPitch = kStep + 8;
  static constexpr int kMatrixBytes = kMatrixRows * kMatrixPitch * 2, kRowBytes = kRows * kRowPitch * 2;
  static constexpr int kParameterBytes = kStep * static_cast<int>(sizeof(P));
  static constexpr int kSlice = kMatrixBytes + kRowBytes + 2 * kParameterBytes;
  static constexpr int kRing = kWarps * kDepth * kSlice;
  static constexpr int kSumPitch = kTile + 4;
  static constexpr int kSums = kWarps * kRows * kSumPitch * 4, kPart = kRows * kTile * 4;
  static constexpr int kBody = kRing > kSums + kPart ? kRing : kSums + kPart; // the sums take the place of the ring
  static constexpr int kShare = kRows * kMade / kSplit; // of the tile's results, those that this block finishes
  static constexpr int kEach = (kShare + kThreads - 1) / kThreads;

  // Which of the matrices a tile is of, and where it is.
  static constexpr int kTiles0 = (kFirst + kMade - 1) / kMade, kTiles1 = (kSecond + kMade - 1) / kMade;
  struct Place {
    int matrix, column, columns, before; // columns of the matrix, and of those before it
  };
  static __device__ __forceinline__ Place place(int tile) {
    if (kSecond == 0 || tile < kTiles0) return {0, tile * kMade, kFirst, 0};
    if (tile < kTiles0 + kTiles1) return {1, (tile - kTiles0) * kMade, kSecond, kFirst};
    return {2, (tile - kTiles0 - kTiles1) * kMade, kThird, kFirst + kSecond};
  }
};

// What a product reads and writes; addresses may be null where there is nothing of the kind.
struct Given {
  const T* x; // kRows x kInner
  const P *scale, *bias; // of the norm of x
  const T *matrix[3], *added[3]; // up to three matrices and their biases; gated, those of the gate and of the other
  const T* residual; // kRows x the result's columns, added to it
  const P *residual_scale, *residual_bias; // of the norm of the residual
  T* out;
};

template <class S> struct Slice {
  unsigned char* at;
  __device__ __forceinline__ T* matrix() const { return reinterpret_cast<T*>(at); }
  __device__ __forceinline__ T* rows() const { return reinterpret_cast<T*>(at + S::kMatrixBytes); }
  __device__ __forceinline__ P* scale() const { return reinterpret_cast<P*>(at + S::kMatrixBytes + S::kRowBytes); }
  __device__ __forceinline__ P* bias() const { return scale() + S::kStep; }
};

// Words of 16 bytes from a vector, beginning with entry k, as far as it has them.
template <int kLength, int kCount, class V> __device__ __forceinline__ void fetch_vector(V* to, const V* from, int k, int first) {
  constexpr int kWord = 16 / sizeof(V);
  const int i = static_cast<int>(threadIdx.x % 32) - first;
  if (i < 0 || i >= kCount / kWord) return;
  const bool inside = k + i * kWord < kLength;
  copy_16(to + i * kWord, inside ? from + k + i * kWord : from, inside);
}

// What does not hang on the kernel ahead: the matrix, and the norm's parameters.
template <class S, int kNorm>
__device__ __forceinline__ void fetch_matrix(Slice<S> to, const Given& given, const typename S::Place& place, int k) {
  constexpr int kRowWords = (S::kTurned ? S::kStep : S::kTile) / 8, kWords = S::kMatrixRows * kRowWords;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int t = 0; t < (kWords + 31) / 32; ++t) {
    const int i = lane + 32 * t, row = i / kRowWords, word = i % kRowWords;
    if (kWords % 32 != 0 && i >= kWords) break;
    const int across = S::kTurned ? row : word * 8; // in the tile
    const bool second = S::kGated && across >= S::kMade;
    const T* matrix = S::kGated ? given.matrix[second ? 1 : 0] : given.matrix[place.matrix];
    const int column = place.column + across - (second ? S::kMade : 0), inner = k + (S::kTurned ? word * 8 : row);
    const bool inside = inner < S::kInner && column < place.columns;
    const Index at = S::kTurned ? static_cast<Index>(column) * S::kInner + inner : static_cast<Index>(inner) * place.columns + column;
    copy_16(to.matrix() + row * S::kMatrixPitch + word * 8, inside ? matrix + at : matrix, inside);
  }
  if (kNorm != kNoNorm) {
    constexpr int kHalf = S::kStep * static_cast<int>(sizeof(P)) / 16;
    if (given.scale) fetch_vector<S::kInner, S::kStep>(to.scale(), given.scale, k, 0);
    if (given.bias) fetch_vector<S::kInner, S::kStep>(to.bias(), given.bias, k, kHalf);
  }
}

template <class S> __device__ __forceinline__ void fetch_rows(Slice<S> to, const T* x, int k) {
  constexpr int kRowWords = S::kStep / 8, kWords = kRows * kRowWords;
#pragma unroll
  for (int t = 0; t < (kWords + 31) / 32; ++t) {
    const int i = threadIdx.x % 32 + 32 * t, row = i / kRowWords, word = i % kRowWords;
    if (kWords % 32 != 0 && i >= kWords) break;
    const bool inside = k + word * 8 < S::kInner;
    copy_16(to.rows() + row * S::kRowPitch + word * 8, inside ? x + static_cast<Index>(row) * S::kInner + k + word * 8 : x, inside);
  }
}

// Two entries of x after the norm, rounded as the norm alone would.
__device__ __forceinline__ unsigned normed_two(unsigned two, float2 row, const P* scale, const P* bias) {
  const float2 x = floats_of(two);
  const float2 s = scale ? parameters_of(scale) : float2{1.0f, 1.0f}, b = bias ? parameters_of(bias) : float2{0.0f, 0.0f};
  return rounded(normed(x.x, row, s.x, b.x), normed(x.y, row, s.y, b.y));
}

template <class S> using Sums = float[S::kTile / 16][kRowTiles][4];

template <class S, int kNorm>
__device__ __forceinline__ void multiply_slice(Sums<S>& sums, Slice<S> slice, const Given& given, const float2 (&rows)[kRowTiles]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < S::kStep; k += 16) {
    unsigned right[kRowTiles][2];
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      const int row = lane / 4 + 8 * j;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = k + 8 * half + lane % 4 * 2;
        right[j][half] = 0;
        if (row < kRows) {
          right[j][half] = *reinterpret_cast<const unsigned*>(slice.rows() + row * S::kRowPitch + at);
          if (kNorm != kNoNorm)
            right[j][half] =
                normed_two(right[j][half], rows[j], given.scale ? slice.scale() + at : nullptr, given.bias ? slice.bias() + at : nullptr);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < S::kTile / 16; ++m) {
      unsigned left[4];
      if (S::kTurned)
        load_matrices(left, slice.matrix() + (16 * m + lane % 16) * S::kMatrixPitch + k + lane / 16 * 8);
      else
        load_transposed(left, slice.matrix() + (k + lane % 8 + lane / 16 * 8) * S::kMatrixPitch + 16 * m + lane / 8 % 2 * 8);
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) multiply(sums[m][j], left, right[j]);
    }
  }
}

template <class S> __device__ __forceinline__ void keep_sums(float* to, const Sums<S>& sums) {
  const int lane = threadIdx.x % 32;
  float* const mine = to + threadIdx.x / 32 * kRows * S::kSumPitch;
#pragma unroll
  for (int m = 0; m < S::kTile / 16; ++m)
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = 8 * j + lane % 4 * 2 + e % 2, column = 16 * m + lane / 4 + e / 2 * 8;
        if (row < kRows) mine[row * S::kSumPitch + column] = sums[m][j][e];
      }
}

// The sum of the warps' sums of this block.
template <class S> __device__ __forceinline__ float over_warps(const float* sums, int row, int column) {
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += sums[(w * kRows + row) * S::kSumPitch + column];
  return total;
}

template <class S> __device__ __forceinline__ float over_cluster(const float* sums, const float* part, int row, int column) {
  if (S::kSplit == 1) return over_warps<S>(sums, row, column);
  float total = 0.0f;
#pragma unroll
  for (int r = 0; r < S::kSplit; ++r) total += of_block(part + row * S::kTile + column, r);
  return total;
}

// out = act(norm(x) matrix + bias) [+ norm(residual)], each step rounded to T as if it were done alone.
template <class S, int kNorm, int kResidualNorm, bool kActive>
__device__ __forceinline__ void project(const Given& given, float epsilon, float residual_epsilon) {
  fl_next();
  unsigned char* const shared = shared_memory;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = S::kSplit == 1 ? 0 : blockIdx.x % S::kSplit;
  const auto place = S::place(blockIdx.x / S::kSplit);
  const int first = rank * S::kOwn, last = first + S::kOwn < S::kInner ? first + S::kOwn : S::kInner;
  const auto ring = [&](int slot) { return Slice<S>{shared + (warp * S::kDepth + slot) * S::kSlice}; };
  constexpr int kStride = kWarps * S::kStep; // from a slice of this warp to its next one

  int k = first + warp * S::kStep;
#pragma unroll
  for (int d = 0; d < S::kDepth; ++d)
    if (k + d * kStride < last) fetch_matrix<S, kNorm>(ring(d), given, place, k + d * kStride);
  copies_closed();
  fl_wait();
#pragma unroll
  for (int d = 0; d < S::kDepth; ++d) {
    if (k + d * kStride < last) fetch_rows<S>(ring(d), given.x, k + d * kStride);
    copies_closed();
  }

  // What the end needs, on its way meanwhile.
  T added[S::kEach], second[S::kEach], residual[S::kEach];
  const auto result = [&](int t) { return rank * S::kShare + t * kThreads + static_cast<int>(threadIdx.x); };
  const auto is_mine = [&](int t) {
    return t * kThreads + static_cast<int>(threadIdx.x) < S::kShare && place.column + result(t) % S::kMade < place.columns;
  };
#pragma unroll
  for (int t = 0; t < S::kEach; ++t) {
    const int column = place.column + result(t) % S::kMade;
    if (!is_mine(t)) continue;
    const T* const mine = given.added[place.matrix];
    if (mine) added[t] = mine[column];
    if (S::kGated && given.added[1]) second[t] = given.added[1][column];
    if (given.residual) residual[t] = fresh(given.residual + static_cast<Index>(result(t) / S::kMade) * S::kPitch + column);
  }
  auto& found = *reinterpret_cast<Statistics<kRows>*>(shared + S::kBody);
  auto& of_residual = *reinterpret_cast<Statistics<kRows>*>(shared + S::kBody + sizeof(Statistics<kRows>));
  if (kNorm != kNoNorm) find_statistics<kNorm, kRows, S::kInner>(found, given.x, epsilon);
  if (kResidualNorm != kNoNorm) find_statistics<kResidualNorm, kRows, S::kPitch>(of_residual, given.residual, residual_epsilon);
  float2 rows[kRowTiles];
#pragma unroll
  for (int j = 0; j < kRowTiles; ++j)
    rows[j] = kNorm != kNoNorm && lane / 4 + 8 * j < kRows ? found.rows[lane / 4 + 8 * j] : float2{0.0f, 0.0f};

  Sums<S> sums = {};
  for (int slot = 0; k < last; k += kStride) {
    copies_left<S::kDepth - 1>();
    warp_meets(); // what the other lanes asked for is there too
    multiply_slice<S, kNorm>(sums, ring(slot), given, rows);
    warp_meets(); // all lanes have read it
    const int next = k + S::kDepth * kStride;
    if (next < last) {
      fetch_matrix<S, kNorm>(ring(slot), given, place, next);
      fetch_rows<S>(ring(slot), given.x, next);
    }
    copies_closed();
    slot = slot + 1 == S::kDepth ? 0 : slot + 1;
  }

  float* const all = reinterpret_cast<float*>(shared);
  float* const part = reinterpret_cast<float*>(shared + S::kSums);
  __syncthreads(); // the ring is read
  keep_sums<S>(all, sums);
  __syncthreads();
  if (S::kSplit > 1) {
    for (int i = threadIdx.x; i < kRows * S::kTile; i += kThreads) part[i] = over_warps<S>(all, i / S::kTile, i % S::kTile);
    cluster_arrives();
    cluster_waits();
  }
#pragma unroll
  for (int t = 0; t < S::kEach; ++t) {
    if (!is_mine(t)) continue;
    const int row = result(t) / S::kMade, in_tile = result(t) % S::kMade, column = place.column + in_tile;
    const bool plain = !given.added[place.matrix];
    float value = over_cluster<S>(all, part, row, in_tile) + (plain ? 0.0f : static_cast<float>(added[t]));
    if (kActive) value = activation(value);
    if (S::kGated) {
      const float up = over_cluster<S>(all, part, row, S::kMade + in_tile);
      const bool alone = plain && !given.added[1]; // then the op is one step, rounded once
      const float other = given.added[1] ? up + static_cast<float>(second[t]) : up;
      value = alone ? value * other : once(value) * once(other);
    }
    if (given.residual) {
      float before = static_cast<float>(residual[t]);
      if (kResidualNorm != kNoNorm)
        before = once(normed(before, of_residual.rows[row], given.residual_scale ? static_cast<float>(given.residual_scale[column]) : 1.0f,
                             given.residual_bias ? static_cast<float>(given.residual_bias[column]) : 0.0f));
      value = before + once(value);
    }
    given.out[static_cast<Index>(row) * S::kPitch + place.before + column] = static_cast<T>(value);
  }
  if (S::kSplit > 1) { // no block ends while another one may read its sums
    cluster_arrives();
    cluster_waits();
  }
}
