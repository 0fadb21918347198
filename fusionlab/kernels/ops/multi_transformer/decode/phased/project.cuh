// Products of a few rows (kRows, up to 16) with a matrix, at the speed at which the matrix comes from memory.
//
// A block takes kTile columns and, of a cluster of kSplit blocks, one part of the inner axis. Its warps go over slices of kStep of it by
// themselves: each has a ring of kDepth slices in shared memory, which are on their way while others are multiplied, and no barrier with
// other warps. The first slices of the matrix, which no kernel writes, are asked for before the kernel waits for the one ahead of it.
// The block's part of x stands in shared memory as a whole, after its norm, or comes with the slices where it is large. Results
// that only a product reads lie in strips of 16 entries of every row (`in_strips`), so that a slice of them is in one piece.
// Then sums are added over warps and over the cluster, always in the same order.
//
// Products are mma.sync with the matrix as the left operand: 16 columns x 16 of the inner axis, by 8 rows of x.
#pragma once

template <int kInner_, int kFirst, int kSecond, int kThird, int kTile_, int kSplit_, int kStep_, int kDepth_, bool kTurned_, bool kGated_, int kNorm_,
          bool kResident_, bool kStrips_>
struct Shape {
  static constexpr int kInner = kInner_, kTile = kTile_, kSplit = kSplit_, kStep = kStep_, kDepth = kDepth_, kNorm = kNorm_;
  static constexpr bool kTurned = kTurned_;     // the matrix is columns x inner
  static constexpr bool kGated = kGated_;       // there are two matrices alike: a tile is as many columns of either
  static constexpr bool kResident = kResident_; // x does not come with the slices
  static constexpr bool kStrips = kStrips_;     // x lies in strips
  static constexpr int kMade = kGated ? kTile / 2 : kTile; // columns of the result that a tile makes
  static constexpr int kPitch = kFirst + kSecond + kThird; // of a row of the result; up to three matrices side by side
  static constexpr int kOwn = ((kInner + kSplit - 1) / kSplit + kStep - 1) / kStep * kStep; // of the inner axis, a block's
  static constexpr bool kWholeInner = kInner % kStep == 0;
  static constexpr bool kWholeColumns = kFirst % kMade == 0 && kSecond % kMade == 0 && kThird % kMade == 0;
  static constexpr int kMatrixPitch = (kTurned ? kStep : kTile) + 8; // in shared memory: an odd number of 16-byte words
  static constexpr int kMatrixRows = kTurned ? kTile : kStep;
  static constexpr int kMatrixBytes = kMatrixRows * kMatrixPitch * 2;
  static constexpr int kRowPitch = (kResident ? kOwn : kStep) + 8, kRowBytes = kRows * kRowPitch * 2;
  static constexpr int kSlice = kMatrixBytes + (kResident ? 0 : kRowBytes);
  static constexpr int kRing = kWarps * kDepth * kSlice;
  static constexpr int kSumPitch = kTile + 4;
  static constexpr int kSums = kWarps * kRows * kSumPitch * 4, kPart = kRows * kTile * 4;
  static constexpr int kBody = kRing > kSums + kPart ? kRing : kSums + kPart; // the sums take the place of the ring
  static constexpr int kShare = kRows * kMade / kSplit; // of the tile's results, those that this block finishes
  static constexpr int kEach = (kShare + kThreads - 1) / kThreads;
  // Which of the matrices a tile is of, and where it is.
  static constexpr int kTiles0 = (kFirst + kMade - 1) / kMade, kTiles1 = (kSecond + kMade - 1) / kMade;
  static constexpr int kMatrices = kThird ? 3 : kSecond ? 2 : 1;
  static __device__ __forceinline__ int columns_of(int matrix) { return kGated || matrix == 0 ? kFirst : matrix == 1 ? kSecond : kThird; }
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
  const T* x; // kRows x kInner, in rows or in strips
  const P *scale, *bias; // of the norm of x
  const T *matrix0, *matrix1, *matrix2, *bias0, *bias1, *bias2; // up to three matrices; gated, of the gate and of the other
  const T* residual; // kRows x the result's columns, added to it
  T* out;            // as the residual, or in strips
};

// What of the matrices a block reads: columns from `column` on of one, or of two alike.
struct Source {
  const T *matrix, *second;
  int column, columns;
};

template <class S> __device__ __forceinline__ void fetch_matrix(T* to, const Source& from, int k) {
  constexpr int kRowWords = (S::kTurned ? S::kStep : S::kTile) / 8, kWords = S::kMatrixRows * kRowWords;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int t = 0; t < (kWords + 31) / 32; ++t) {
    const int i = lane + 32 * t, row = i / kRowWords, word = i % kRowWords;
    if (kWords % 32 != 0 && i >= kWords) break;
    const int across = S::kTurned ? row : word * 8; // in the tile
    const bool second = S::kGated && across >= S::kMade;
    const T* const matrix = second ? from.second : from.matrix;
    const int column = from.column + across - (second ? S::kMade : 0), inner = k + (S::kTurned ? word * 8 : row);
    const bool inside = (S::kWholeInner || inner < S::kInner) && (S::kWholeColumns || column < from.columns);
    const Index at = S::kTurned ? static_cast<Index>(column) * S::kInner + inner : static_cast<Index>(inner) * from.columns + column;
    copy_16(to + row * S::kMatrixPitch + word * 8, inside ? matrix + at : matrix, inside);
  }
}

// Where an entry is in memory that holds strips: of 16 entries of a row, all rows, then the next 16.
__device__ __forceinline__ int in_strips(int row, int entry) { return (entry / 16 * kRows + row) * 16 + entry % 16; }

template <class S> __device__ __forceinline__ const T* row_at(const T* x, int row, int k) {
  return x + (S::kStrips ? in_strips(row, k) : row * S::kInner + k);
}

template <class S> __device__ __forceinline__ void fetch_rows(T* to, const T* x, int k) {
  constexpr int kWords = kRows * S::kStep / 8;
#pragma unroll
  for (int t = 0; t < (kWords + 31) / 32; ++t) {
    const int i = threadIdx.x % 32 + 32 * t, row = i / 2 % kRows, word = i / (2 * kRows) * 2 + i % 2;
    if (kWords % 32 != 0 && i >= kWords) break;
    const bool inside = S::kWholeInner || k + word * 8 < S::kInner;
    copy_16(to + row * S::kRowPitch + word * 8, inside ? row_at<S>(x, row, k + word * 8) : x, inside);
  }
}

// The block's part of x, from entry `first` on, to shared memory; what is beyond the inner axis is 0.
template <class S> __device__ __forceinline__ void keep_rows(T* to, const Given& given, int first, float epsilon, float* place) {
  constexpr int kWords = S::kOwn / 8;
  const auto word_at = [&](int row, int word) { return reinterpret_cast<uint4*>(to + row * S::kRowPitch + word * 8); };
  if (S::kNorm != kNoNorm) {
    norm_rows<S::kNorm, kRows, S::kInner>(WordsOf<Teams<kRows, S::kInner>, S::kInner>{given.x}, given.scale, given.bias, epsilon, place, [&](int row, int number, uint4 word) {
      const int own = number - first / 8;
      if (own >= 0 && own < kWords) *word_at(row, own) = word;
    });
  } else {
    constexpr int kEach = (kRows * kWords + kThreads - 1) / kThreads;
    uint4 held[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = threadIdx.x + i * kThreads, word = at / (2 * kRows) * 2 + at % 2;
      held[i] = {0, 0, 0, 0};
      if (word < kWords && first + word * 8 < S::kInner)
        held[i] = __ldcg(reinterpret_cast<const uint4*>(row_at<S>(given.x, at / 2 % kRows, first + word * 8)));
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int at = threadIdx.x + i * kThreads, word = at / (2 * kRows) * 2 + at % 2;
      if (word < kWords) *word_at(at / 2 % kRows, word) = held[i];
    }
  }
  if (S::kNorm != kNoNorm && S::kOwn * S::kSplit > S::kInner) // the words behind the end
    for (int i = threadIdx.x; i < kRows * kWords; i += kThreads)
      if (first + i % kWords * 8 >= S::kInner) *word_at(i / kWords, i % kWords) = {0, 0, 0, 0};
}

template <class S> using Sums = float[S::kTile / 16][kRowTiles][4];

// `rows` is where the slice's part of x begins.
template <class S> __device__ __forceinline__ void multiply_slice(Sums<S>& sums, const T* matrix, const T* rows) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < S::kStep; k += 16) {
    unsigned right[kRowTiles][2];
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      const int row = lane / 4 + 8 * j;
      const T* const from = rows + (row < kRows ? row : 0) * S::kRowPitch + k + lane % 4 * 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) right[j][half] = row < kRows ? *reinterpret_cast<const unsigned*>(from + 8 * half) : 0;
    }
    unsigned left[S::kTile / 16][4];
#pragma unroll
    for (int m = 0; m < S::kTile / 16; ++m) {
      if (S::kTurned)
        load_matrices(left[m], matrix + (16 * m + lane % 16) * S::kMatrixPitch + k + lane / 16 * 8);
      else
        load_transposed(left[m], matrix + (k + lane % 8 + lane / 16 * 8) * S::kMatrixPitch + 16 * m + lane / 8 % 2 * 8);
      if (m % 4 == 3 || m == S::kTile / 16 - 1) // four at a time are on their way together
#pragma unroll
        for (int n = m / 4 * 4; n <= m; ++n)
#pragma unroll
          for (int j = 0; j < kRowTiles; ++j) multiply(sums[n][j], left[n], right[j]);
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
  float each[S::kSplit], total = 0.0f;
#pragma unroll
  for (int r = 0; r < S::kSplit; ++r) each[r] = of_block(part + row * S::kTile + column, r);
#pragma unroll
  for (int r = 0; r < S::kSplit; ++r) total += each[r];
  return total;
}

// out = act(norm(x) matrix + bias) [+ residual], each step rounded to T as if it were done alone.
template <class S, bool kActive, bool kStrips> __device__ __forceinline__ void project(const Given& given, float epsilon) {
  fl_next();
  unsigned char* const shared = shared_memory;
  const int warp = threadIdx.x / 32;
  const int rank = S::kSplit == 1 ? 0 : blockIdx.x % S::kSplit;
  const auto place = S::place(blockIdx.x / S::kSplit);
  const Source source = {place.matrix == 0 ? given.matrix0 : place.matrix == 1 ? given.matrix1 : given.matrix2, given.matrix1, place.column,
                         place.columns};
  const T* const bias = place.matrix == 0 ? given.bias0 : place.matrix == 1 ? given.bias1 : given.bias2;
  const int first = rank * S::kOwn, last = first + S::kOwn < S::kInner ? first + S::kOwn : S::kInner;
  const auto matrix_in = [&](int slot) { return reinterpret_cast<T*>(shared + (warp * S::kDepth + slot) * S::kSlice); };
  const auto rows_in = [&](int slot) { return matrix_in(slot) + S::kMatrixBytes / 2; };
  constexpr int kStride = kWarps * S::kStep; // from a slice of this warp to its next one

  int k = first + warp * S::kStep;
#pragma unroll
  for (int d = 0; d < S::kDepth; ++d) {
    if (k + d * kStride < last) fetch_matrix<S>(matrix_in(d), source, k + d * kStride);
    if (S::kResident) copies_closed();
  }
  // What the end needs, on its way meanwhile.
  T added[S::kEach], second[S::kEach], residual[S::kEach];
  const auto result = [&](int t) { return rank * S::kShare + t * kThreads + static_cast<int>(threadIdx.x); };
  const auto is_mine = [&](int t) {
    return t * kThreads + static_cast<int>(threadIdx.x) < S::kShare &&
           (S::kWholeColumns || place.column + result(t) % S::kMade < place.columns);
  };
#pragma unroll
  for (int t = 0; t < S::kEach; ++t) {
    const int column = place.column + result(t) % S::kMade;
    added[t] = second[t] = residual[t] = static_cast<T>(0.0f);
    if (is_mine(t) && bias) added[t] = fresh(bias + column);
    if (S::kGated && is_mine(t) && given.bias1) second[t] = fresh(given.bias1 + column);
  }
  fl_wait();
  T* const resident = reinterpret_cast<T*>(shared + S::kBody);
  if (S::kResident) {
    keep_rows<S>(resident, given, first, epsilon, reinterpret_cast<float*>(shared + S::kBody + S::kRowBytes));
  } else {
#pragma unroll
    for (int d = 0; d < S::kDepth; ++d) {
      if (k + d * kStride < last) fetch_rows<S>(rows_in(d), given.x, k + d * kStride);
      copies_closed();
    }
  }
#pragma unroll
  for (int t = 0; t < S::kEach; ++t)
    if (is_mine(t) && given.residual)
      residual[t] = fresh(given.residual + static_cast<Index>(result(t) / S::kMade) * S::kPitch + place.column + result(t) % S::kMade);
  if (S::kResident) __syncthreads();

  Sums<S> sums = {};
  for (int slot = 0; k < last; k += kStride) {
    copies_left<S::kDepth - 1>();
    warp_meets(); // what the other lanes asked for is there too
    multiply_slice<S>(sums, matrix_in(slot), S::kResident ? resident + (k - first) : rows_in(slot));
    warp_meets(); // all lanes have read it
    const int next = k + S::kDepth * kStride;
    if (next < last) {
      fetch_matrix<S>(matrix_in(slot), source, next);
      if (!S::kResident) fetch_rows<S>(rows_in(slot), given.x, next);
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
  float values[S::kEach], others[S::kEach];
#pragma unroll
  for (int t = 0; t < S::kEach; ++t) {
    if (!is_mine(t)) continue;
    values[t] = over_cluster<S>(all, part, result(t) / S::kMade, result(t) % S::kMade);
    if (S::kGated) others[t] = over_cluster<S>(all, part, result(t) / S::kMade, S::kMade + result(t) % S::kMade);
  }
  if (S::kSplit > 1) cluster_arrives(); // no block ends while another one may read its sums
#pragma unroll
  for (int t = 0; t < S::kEach; ++t) {
    if (!is_mine(t)) continue;
    float value = values[t] + static_cast<float>(added[t]);
    if (kActive) value = activation(value);
    if (S::kGated) {
      const bool alone = !bias && !given.bias1; // then the op is one step, rounded once
      const float other = others[t] + static_cast<float>(second[t]);
      value = alone ? value * other : once(value) * once(other);
    }
    if (given.residual) value = static_cast<float>(residual[t]) + once(value);
    const int row = result(t) / S::kMade, column = place.before + place.column + result(t) % S::kMade;
    given.out[kStrips ? in_strips(row, column) : row * S::kPitch + column] = static_cast<T>(value);
  }
  if (S::kSplit > 1) cluster_waits();
}
