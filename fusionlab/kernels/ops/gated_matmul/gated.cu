// out = act(x w) * (x v), both products over one pass of x: a block takes kRows rows and kColumns columns of the result and goes over the
// inner axis by kInner. Tiles of x, w and v are double-buffered in shared memory; the sums stay in registers, where the gate is applied,
// and only the result is written (with FL_SAVES both products too, for the backward), through shared memory so that rows are written in
// whole 16-byte words.
//
// Products are mma.sync with sums in float; activation and product are in float and rounded once.
//
// One variant is compiled at a time, chosen by macros:
//   FL_T       of all operands and results: 1 bfloat16, 2 half
//   FL_ACT     the activation: activation.cuh
//   FL_WARPS   warps along the rows, of 32 rows each; there are two along the columns, of 32 columns each
//   FL_NK      1: the weights are columns x inner, as they are in x @ w.T; 0: inner x columns
//   FL_VEC_X, FL_VEC_W, FL_VEC_OUT   1: rows of x, of the weights, of the results begin at multiples of 16 bytes; 0: element by element
//   FL_SAVES   1: x w and x v are written as well
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../warp.cuh"
#include "../early.cuh"

#define FL_16BIT 1
#define FL_HAS_EXP2
using C = float;
#include "../activation.cuh"

using Index = long long;
#if FL_T == 1
using T = __nv_bfloat16;
#else
using T = __half;
#endif

constexpr int kThreads = 64 * FL_WARPS;
constexpr int kRows = 32 * FL_WARPS;
constexpr int kColumns = 64;
constexpr int kInner = 64;
constexpr int kWord = 8;                // elements of 16 bytes
constexpr int kWords = 64 / kWord;      // of a row of any tile: all are 64 elements wide
constexpr int kWeights = kColumns * 64; // elements of a tile of w or v
constexpr int kStage = kRows * kInner + 2 * kWeights;

// A tile whose rows are 64 elements; words of a row are exchanged by the row's number, so that eight rows at one column lie in
// different banks.
__device__ __forceinline__ T* word_of(T* tile, int row, int number) {
  return tile + (row * kWords + (number ^ (row & 7))) * kWord;
}

// Brings rows of 64 elements of a row-major matrix of `height` x `width`, from (row, column) on; what is outside is 0.
template <bool kVector>
__device__ __forceinline__ void bring(T* tile, const T* from, int rows, Index row, Index column, Index height, Index width) {
  for (int i = threadIdx.x; i < rows * kWords; i += kThreads) {
    const int r = i / kWords, number = i % kWords;
    T* to = word_of(tile, r, number);
    const Index at = column + number * kWord;
    const bool inside = row + r < height;
    const T* source = from + (row + r) * width + at;
    if (kVector) {
      const bool whole = inside && at < width;
      copy_16(to, whole ? source : from, whole);
    } else {
#pragma unroll
      for (int j = 0; j < kWord; ++j) to[j] = inside && at + j < width ? source[j] : static_cast<T>(0.0f);
    }
  }
}

__device__ __forceinline__ void bring_weights(T* tile, const T* from, Index column, Index k, Index columns, Index inner) {
#if FL_NK
  bring<FL_VEC_W>(tile, from, kColumns, column, k, columns, inner);
#else
  bring<FL_VEC_W>(tile, from, kInner, k, column, inner, columns);
#endif
}

__device__ __forceinline__ void multiply(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#if FL_T == 1
  multiply_bf16(sum, a, b);
#else
  multiply_half(sum, a, b);
#endif
}

// Two fragments of 16 x 8 of the weights: columns n ... n + 7 and n + 8 ... n + 15, inner k ... k + 15.
__device__ __forceinline__ void load_weights(unsigned (&first)[2], unsigned (&second)[2], T* tile, int n, int k) {
  const int lane = threadIdx.x % 32;
  unsigned four[4];
#if FL_NK
  load_matrices(four, word_of(tile, n + lane % 8 + lane / 16 * 8, k / kWord + lane / 8 % 2));
#else
  load_transposed(four, word_of(tile, k + lane % 16, n / kWord + lane / 16));
#endif
  first[0] = four[0], first[1] = four[1], second[0] = four[2], second[1] = four[3];
}

using Sums = float[2][4][4]; // of a warp: 2 x 16 rows, 4 x 8 columns, four of each fragment a thread

// One step: sums += x[kRows x kInner] weights[kInner x kColumns], for both weights.
__device__ __forceinline__ void step(Sums& gate, Sums& up, T* stage, int row, int column) {
  const int lane = threadIdx.x % 32;
  T* x = stage;
  T* w = stage + kRows * kInner;
  T* v = w + kWeights;
#pragma unroll 2 // all four steps at once would take more registers than two blocks of a multiprocessor have
  for (int k = 0; k < kInner; k += 16) {
    unsigned left[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) load_matrices(left[i], word_of(x, row + 16 * i + lane % 16, k / kWord + lane / 16));
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      unsigned right[2][2];
      load_weights(right[0], right[1], w, column + 8 * j, k);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        multiply(gate[i][j], left[i], right[0]);
        multiply(gate[i][j + 1], left[i], right[1]);
      }
      load_weights(right[0], right[1], v, column + 8 * j, k);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        multiply(up[i][j], left[i], right[0]);
        multiply(up[i][j + 1], left[i], right[1]);
      }
    }
  }
}

// The block's tile of a result, from the registers through shared memory to where it belongs.
__device__ __forceinline__ void write_out(
    T* to, const Sums& values, T* tile, int row, int column, Index first_row, Index first_column, Index rows, Index columns) {
  const int lane = threadIdx.x % 32;
  __syncthreads(); // what the tile held is read
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        T* at = word_of(tile, row + 16 * i + 8 * half + lane / 4, column / kWord + j) + lane % 4 * 2;
        at[0] = static_cast<T>(values[i][j][2 * half]);
        at[1] = static_cast<T>(values[i][j][2 * half + 1]);
      }
  __syncthreads();
  for (int i = threadIdx.x; i < kRows * kWords; i += kThreads) {
    const int r = i / kWords, number = i % kWords;
    const Index c = first_column + number * kWord;
    if (first_row + r >= rows || c >= columns) continue;
    const T* from = word_of(tile, r, number);
    T* place = to + (first_row + r) * columns + c;
#if FL_VEC_OUT
    *reinterpret_cast<uint4*>(place) = *reinterpret_cast<const uint4*>(from);
#else
#pragma unroll
    for (int j = 0; j < kWord; ++j)
      if (c + j < columns) place[j] = from[j];
#endif
  }
}

// Blocks along x take rows, so that those that run at one time share columns of the weights.
extern "C" __global__ void __launch_bounds__(kThreads, 2) gated_forward(
    const T* x, const T* w, const T* v, T* out, T* saved_gate, T* saved_up, Index rows, Index columns, Index inner) {
  fl_wait();
  T* const shared = reinterpret_cast<T*>(shared_memory);
  const Index first_row = static_cast<Index>(blockIdx.x) * kRows;
  const Index first_column = static_cast<Index>(blockIdx.y) * kColumns;
  const int warp = threadIdx.x / 32;
  const int row = warp / 2 * 32, column = warp % 2 * 32;

  const auto bring_all = [&](int stage, Index k) {
    T* const to = shared + stage * kStage;
    bring<FL_VEC_X>(to, x, kRows, first_row, k, rows, inner);
    bring_weights(to + kRows * kInner, w, first_column, k, columns, inner);
    bring_weights(to + kRows * kInner + kWeights, v, first_column, k, columns, inner);
  };

  Sums gate = {}, up = {};
  bring_all(0, 0);
  int stage = 0;
  for (Index k = 0; k < inner; k += kInner, stage ^= 1) {
    copies_done();
    __syncthreads(); // this stage is there for all, and the other one is read
    if (k + kInner < inner) bring_all(stage ^ 1, k + kInner);
    step(gate, up, shared + stage * kStage, row, column);
  }

#if FL_SAVES
  write_out(saved_gate, gate, shared, row, column, first_row, first_column, rows, columns);
  write_out(saved_up, up, shared, row, column, first_row, first_column, rows, columns);
#endif
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) gate[i][j][e] = activation(gate[i][j][e]) * up[i][j][e];
  write_out(out, gate, shared, row, column, first_row, first_column, rows, columns);
}
