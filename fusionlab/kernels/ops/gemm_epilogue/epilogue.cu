// What follows or precedes the product of gemm_epilogue, as passes over a rows x columns row-major matrix that run at the speed of
// memory: bias, activation and what backward needs (epilogue_forward); its derivative and the bias gradient (epilogue_backward, and
// epilogue_sum for the second stage of the sum). One variant is compiled at a time, chosen by macros:
//
//   FL_T      storage: 0 float, 1 bfloat16, 2 half, 3 double. Arithmetic is in float, for double in double.
//   FL_ACT    the activation: activation.cuh
//   FL_VEC    elements a thread takes of a row at once: 16 bytes of them, or 1. Columns must be a multiple of it, and every array
//             aligned to 16 bytes where it is not 1.
//   FL_BIAS   1: forward adds a bias, one entry for each column
//   FL_SAVES  what forward saves and backward reads: 0 nothing, 1 a bit for each element (h > 0; rows of `pitch` bytes, lowest bit
//             first: the layout of the mask of cuBLASLt's RELU_AUX epilogue), 2 a byte for each (relu_tie: twice the derivative;
//             relu and relu_where: h > 0, as a bool array has it), 3 h itself
//   FL_DBIAS  1: backward also sums over rows
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../early.cuh"

#if !defined(FL_T) || !defined(FL_ACT) || !defined(FL_VEC) || !defined(FL_BIAS) || !defined(FL_SAVES) || !defined(FL_DBIAS)
#error "FL_T, FL_ACT, FL_VEC, FL_BIAS, FL_SAVES and FL_DBIAS must be defined"
#endif
#define FL_16BIT (FL_T == 1 || FL_T == 2)

using Index = long long;
constexpr int kRows = 4;      // rows a thread has in flight
constexpr int kThreads = 256; // of a block, at most

#if FL_T == 0
using T = float;
#elif FL_T == 1
using T = __nv_bfloat16;
using Pair = __nv_bfloat162;
#elif FL_T == 2
using T = __half;
using Pair = __half2;
#else
using T = double;
#endif
#if FL_T == 3
using C = double; // of the arithmetic, and of the sums
#else
using C = float;
#endif

template <int kBytes> struct RawOf;
template <> struct RawOf<1> { using Type = unsigned char; };
template <> struct RawOf<2> { using Type = unsigned short; };
template <> struct RawOf<4> { using Type = unsigned int; };
template <> struct RawOf<8> { using Type = uint2; };
template <> struct RawOf<16> { using Type = uint4; };

// FL_VEC neighbours of a row, moved by one instruction.
template <typename E> struct Pack {
  typename RawOf<sizeof(E) * FL_VEC>::Type raw;
  template <typename F = E> __device__ __forceinline__ F& at(int i) { return reinterpret_cast<F*>(&raw)[i]; }
  template <typename F = E> __device__ __forceinline__ const F& at(int i) const {
    return reinterpret_cast<const F*>(&raw)[i];
  }
};

template <typename E> __device__ __forceinline__ Pack<E> load(const E* from) {
  Pack<E> pack;
  pack.raw = *reinterpret_cast<const decltype(pack.raw)*>(from);
  return pack;
}

template <typename E> __device__ __forceinline__ void store(E* to, const Pack<E>& pack) {
  *reinterpret_cast<decltype(Pack<E>::raw)*>(to) = pack.raw;
}

__device__ __forceinline__ void unpack(const Pack<T>& pack, C (&to)[FL_VEC]) {
#if FL_16BIT && FL_VEC > 1
#pragma unroll
  for (int i = 0; i < FL_VEC / 2; ++i) {
#if FL_T == 1
    const float2 both = __bfloat1622float2(pack.at<Pair>(i));
#else
    const float2 both = __half22float2(pack.at<Pair>(i));
#endif
    to[2 * i] = both.x;
    to[2 * i + 1] = both.y;
  }
#else
#pragma unroll
  for (int i = 0; i < FL_VEC; ++i) to[i] = static_cast<C>(pack.at(i));
#endif
}

__device__ __forceinline__ Pack<T> packed(const C (&from)[FL_VEC]) {
  Pack<T> pack;
#if FL_16BIT && FL_VEC > 1
#pragma unroll
  for (int i = 0; i < FL_VEC / 2; ++i) {
#if FL_T == 1
    pack.at<Pair>(i) = __floats2bfloat162_rn(from[2 * i], from[2 * i + 1]);
#else
    pack.at<Pair>(i) = __floats2half2_rn(from[2 * i], from[2 * i + 1]);
#endif
  }
#else
#pragma unroll
  for (int i = 0; i < FL_VEC; ++i) pack.at(i) = static_cast<T>(from[i]);
#endif
  return pack;
}

#include "../activation.cuh"

#if FL_SAVES == 1
using Saved = unsigned char;
#elif FL_SAVES == 2
using Saved = signed char;
#if FL_ACT == FL_RELU_TIE
constexpr int kByteScale = 2;
#else
constexpr int kByteScale = 1;
#endif
#else
using Saved = T;
#endif

#if FL_SAVES == 1
// Every thread of the warp takes part; lanes of one row, their bits 0 outside of the matrix.
__device__ __forceinline__ void store_bits(Saved* row_of_bits, unsigned bits, Index column, Index pitch) {
#pragma unroll
  for (int width = FL_VEC; width < 8; width *= 2) bits |= __shfl_down_sync(~0u, bits, width / FL_VEC) << width;
  if (column % 8 == 0 && column < 8 * pitch) row_of_bits[column / 8] = static_cast<Saved>(bits);
}
#endif

#if FL_SAVES == 1
using Held = unsigned char; // what a thread reads of the saved array for one row
#else
using Held = Pack<Saved>;
#endif

__device__ __forceinline__ Held load_saved(const void* saved, Index row, Index columns, Index column, Index pitch) {
#if FL_SAVES == 1
  return static_cast<const Saved*>(saved)[row * pitch + column / 8];
#else
  return load(static_cast<const Saved*>(saved) + row * columns + column);
#endif
}

// values *= derivative.
__device__ __forceinline__ void scale(C (&values)[FL_VEC], const Held& held, Index column) {
#if FL_SAVES == 1
  const unsigned bits = static_cast<unsigned>(held) >> (column % 8);
#pragma unroll
  for (int i = 0; i < FL_VEC; ++i) values[i] = bits >> i & 1 ? values[i] : C(0); // a choice: 0 times inf is no 0
#elif FL_SAVES == 2
#pragma unroll
  for (int i = 0; i < FL_VEC; ++i) {
#if FL_ACT == FL_RELU_TIE
    values[i] *= static_cast<C>(held.at(i)) * C(0.5);
#else
    values[i] = held.at(i) ? values[i] : C(0);
#endif
  }
#elif FL_SAVES == 3
  C h[FL_VEC];
  unpack(held, h);
#pragma unroll
  for (int i = 0; i < FL_VEC; ++i) {
#if FL_ACT == FL_RELU || FL_ACT == FL_RELU_WHERE
    values[i] = h[i] > C(0) ? values[i] : C(0);
#else
    values[i] *= slope(h[i]);
#endif
  }
#endif
}

// Blocks take the rows from the last to the first: a product that has just been written is still in the L2 cache with its last rows, and
// the product that comes next begins with the first ones.
__device__ __forceinline__ Index from_the_end() { return gridDim.y - 1 - blockIdx.y; }

// out = act(h + bias), and what backward needs into `saved`. h may be out, and saved as well where that is h itself: a thread reads its
// elements before it writes them, hence no __restrict__. (Nor elsewhere: a load of what is never written may be moved above fl_wait().) A block takes kRows * blockDim.y rows, then those gridDim.y blocks further on; a
// thread FL_VEC columns of every blockDim.y-th of these. With FL_SAVES 1 the grid covers the padding too, and if FL_VEC is below 8 a warp
// lies in one row: blockDim.x is a multiple of 32.
extern "C" __global__ void __launch_bounds__(kThreads) epilogue_forward(
    const T* h, const T* bias, T* out, void* saved, Index rows, Index columns, Index pitch) {
  fl_wait();
  const Index column = (static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x) * FL_VEC;
  const bool inside = column < columns;
#if FL_SAVES != 1
  if (!inside) return;
#endif
#if FL_BIAS
  C shift[FL_VEC] = {};
  if (inside) unpack(load(bias + column), shift);
#endif
  const Index stride = blockDim.y;
  const Index tile = kRows * stride;
  for (Index first = from_the_end() * tile + threadIdx.y; first < rows; first += gridDim.y * tile) {
    Pack<T> given[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Index row = first + i * stride;
      if (inside && row < rows) given[i] = load(h + row * columns + column);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Index row = first + i * stride;
      if (row >= rows) break;
#if FL_SAVES == 1
      unsigned bits = 0;
#endif
      if (inside) {
        C x[FL_VEC];
        unpack(given[i], x);
#if FL_BIAS
#pragma unroll
        for (int j = 0; j < FL_VEC; ++j) x[j] += shift[j];
#endif
#if FL_SAVES == 1
#pragma unroll
        for (int j = 0; j < FL_VEC; ++j) bits |= static_cast<unsigned>(x[j] > C(0)) << j;
#elif FL_SAVES == 2
        Pack<Saved> twice;
#pragma unroll
        for (int j = 0; j < FL_VEC; ++j) twice.at(j) = static_cast<Saved>(C(kByteScale) * slope(x[j]));
        store(static_cast<Saved*>(saved) + row * columns + column, twice);
#elif FL_SAVES == 3
        store(static_cast<Saved*>(saved) + row * columns + column, packed(x));
#endif
#pragma unroll
        for (int j = 0; j < FL_VEC; ++j) x[j] = activation(x[j]);
        store(out + row * columns + column, packed(x));
      }
#if FL_SAVES == 1
      store_bits(static_cast<Saved*>(saved) + row * pitch, bits, column, pitch);
#endif
    }
  }
}

// dh = act'(saved) ct; with FL_DBIAS also partial[block][column], the sum of dh over the block's rows, before dh is rounded.
// dh may be ct. Without anything saved (act none) dh is ct: it is then null, and only the sum is made. A block takes
// `rows_per_block` rows; a thread FL_VEC columns of every blockDim.y-th of these. blockDim.y must be a power of 2.
extern "C" __global__ void __launch_bounds__(kThreads) epilogue_backward(
    const T* ct, const void* saved, T* dh, C* partial, Index rows, Index columns, Index pitch, Index rows_per_block) {
  fl_wait();
  const Index column = (static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x) * FL_VEC;
  const bool inside = column < columns;
  const Index block = from_the_end();
  const Index start = block * rows_per_block;
  const Index end = start + rows_per_block < rows ? start + rows_per_block : rows;
#if FL_DBIAS
  C sum[FL_VEC] = {};
#endif
  const Index stride = blockDim.y;
  for (Index first = inside ? start + threadIdx.y : end; first < end; first += kRows * stride) {
    Pack<T> given[kRows];
#if FL_SAVES
    Held held[kRows];
#endif
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Index row = first + i * stride;
      if (row >= end) continue;
      given[i] = load(ct + row * columns + column);
#if FL_SAVES
      held[i] = load_saved(saved, row, columns, column, pitch);
#endif
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const Index row = first + i * stride;
      if (row >= end) continue;
      C x[FL_VEC];
      unpack(given[i], x);
#if FL_SAVES
      scale(x, held[i], column);
      store(dh + row * columns + column, packed(x));
#endif
#if FL_DBIAS
#pragma unroll
      for (int j = 0; j < FL_VEC; ++j) sum[j] += x[j];
#endif
    }
  }
#if FL_DBIAS
  __shared__ C sums[FL_VEC][kThreads];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
  for (int j = 0; j < FL_VEC; ++j) sums[j][thread] = sum[j];
  for (int half = blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half) {
#pragma unroll
      for (int j = 0; j < FL_VEC; ++j) sums[j][thread] += sums[j][thread + half * blockDim.x];
    }
  }
  if (threadIdx.y == 0 && inside) {
#pragma unroll
    for (int j = 0; j < FL_VEC; ++j) partial[block * columns + column + j] = sums[j][thread];
  }
#endif
}

#if FL_DBIAS
// dbias[column] = the sum of partial[blocks][column] in a fixed order: each of the kSumRows threads of a column adds every
// kSumRows-th entry, then a tree.
constexpr int kSumColumns = 32, kSumRows = 32;
extern "C" __global__ void __launch_bounds__(kSumColumns * kSumRows) epilogue_sum(
    const C* partial, T* dbias, Index blocks, Index columns) {
  fl_wait();
  const Index column = static_cast<Index>(blockIdx.x) * kSumColumns + threadIdx.x;
  C sum = 0;
  if (column < columns) {
#pragma unroll 8
    for (Index i = threadIdx.y; i < blocks; i += kSumRows) sum += partial[i * columns + column];
  }
  __shared__ C sums[kSumRows][kSumColumns];
  sums[threadIdx.y][threadIdx.x] = sum;
  for (int half = kSumRows / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half) sums[threadIdx.y][threadIdx.x] += sums[threadIdx.y + half][threadIdx.x];
  }
  if (threadIdx.y == 0 && column < columns) dbias[column] = static_cast<T>(sums[0][threadIdx.x]);
}
#endif
