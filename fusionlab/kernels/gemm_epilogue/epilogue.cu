// What follows or precedes the product of gemm_epilogue, as passes over a rows x columns row-major matrix that run at the speed of
// memory: bias, activation and what backward needs (epilogue_forward); its derivative and the bias gradient (epilogue_backward, and
// epilogue_sum for the second stage of the sum). One variant is compiled at a time, chosen by macros:
//
//   FL_T      storage: 0 float, 1 bfloat16, 2 half, 3 double. Arithmetic is in float, for double in double.
//   FL_ACT    0 none, 1 relu, 2 relu_tie, 3 relu_where, 4 gelu_tanh, 5 gelu_erf, 6 silu, 7 sigmoid, 8 tanh
//   FL_VEC    elements a thread takes of a row at once: 16 bytes of them, or 1. Columns must be a multiple of it, and every array
//             aligned to 16 bytes where it is not 1.
//   FL_BIAS   1: forward adds a bias, one entry for each column
//   FL_SAVES  what forward saves and backward reads: 0 nothing, 1 a bit for each element (h > 0; rows of `pitch` bytes, lowest bit
//             first: the layout of the mask of cuBLASLt's RELU_AUX epilogue), 2 a byte for each (relu_tie: twice the derivative;
//             relu and relu_where: h > 0, as a bool array has it), 3 h itself
//   FL_DBIAS  1: backward also sums over rows
//
// The meanings are those of activations.py, NaN, infinities and ties included. The formulas of the derivatives use what is small where
// the textbook's difference cancels: sigma(-|h|) = e/(1+e) with e = exp(-|h|), so that sigma (1 - sigma) = e/(1+e)^2.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../early.cuh"

#if !defined(FL_T) || !defined(FL_ACT) || !defined(FL_VEC) || !defined(FL_BIAS) || !defined(FL_SAVES) || !defined(FL_DBIAS)
#error "FL_T, FL_ACT, FL_VEC, FL_BIAS, FL_SAVES and FL_DBIAS must be defined"
#endif
#define FL_NONE 0
#define FL_RELU 1
#define FL_RELU_TIE 2
#define FL_RELU_WHERE 3
#define FL_GELU_TANH 4
#define FL_GELU_ERF 5
#define FL_SILU 6
#define FL_SIGMOID 7
#define FL_TANH 8
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

// The functions of the activations. With 16-bit storage exponential and reciprocal are the special function unit's (relative error
// below 2^-22), else the accurate ones.
#if FL_16BIT
constexpr double kLog2E = 1.4426950408889634;

// 2^x and 1/x; the host path is for tests that compile this file as C++.
__device__ __forceinline__ float exp2_of(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return exp2f(x);
#endif
}

__device__ __forceinline__ C inverse(C x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / x;
#endif
}

constexpr float kExp = static_cast<float>(kLog2E); // exp(x) is exp_of(kExp x): the factor goes into another constant
__device__ __forceinline__ C exp_of(C x) { return exp2_of(x); }
#else
constexpr C kExp = 1;
#if FL_T == 3
__device__ __forceinline__ C inverse(C x) { return 1.0 / x; }
__device__ __forceinline__ C exp_of(C x) { return exp(x); }
__device__ __forceinline__ C erfc_of(C x) { return erfc(x); }
__device__ __forceinline__ C tanh_of(C x) { return tanh(x); }
#else
__device__ __forceinline__ C inverse(C x) { return 1.0f / x; }
__device__ __forceinline__ C exp_of(C x) { return expf(x); }
__device__ __forceinline__ C erfc_of(C x) { return erfcf(x); }
__device__ __forceinline__ C tanh_of(C x) { return tanhf(x); }
#endif
#endif

// f(h) of f(-|h|), for an f with f(h) + f(-h) = 1.
__device__ __forceinline__ C of_tail(C h, C tail) { return fabs((h > C(0) ? C(1) : C(0)) - tail); }

// f(-|h|) of a sigmoid f = 1 / (1 + exp(-w)), and 1 - f(-|h|).
struct Sigmoid {
  C tail, rest;
};
__device__ __forceinline__ Sigmoid sigmoid_of(C scaled) { // scaled: kExp w
  const C e = exp_of(-fabs(scaled));
  const C rest = inverse(C(1) + e);
  return {e * rest, rest};
}

// tanh-GELU is h sigmoid(w) with w = 2 sqrt(2/pi) (h + 0.044715 h^3) = h (kTanh1 + kTanh3 h^2).
constexpr double kTanh1 = 1.5957691216057308;
constexpr double kTanh3 = 0.044715 * kTanh1;
__device__ __forceinline__ C gelu_w(C h) { // kExp w
  return h * (C(kTanh1 * kExp) + C(kTanh3 * kExp) * (h * h));
}

// The distribution function of the normal distribution, Phi(h), and exp(-h^2/2).
struct Normal {
  C phi, bell;
};
#if FL_16BIT
// Phi(-a) = exp(-a^2/2) t P(t) with t = 1 / (1 + kMillsScale a): the form of Abramowitz and Stegun 7.1.26, here fitted to the relative
// error (Lawson's iteration; tests/kernels/test_epilogue_math.py fits it again): below 4.1e-6 for a up to 13.5, where Phi(-a)
// leaves the range of float. So gelu keeps its relative error in the negative tail too.
constexpr float kMillsScale = 0.30852174f;
constexpr float kMills[6] = {0.12331635f, 0.11927338f, 0.13579474f, 0.0093281f, 0.18739235f, -0.07510692f};
__device__ __forceinline__ Normal normal_of(C h) {
  const float bell = exp2_of(h * h * static_cast<float>(-0.5 * kLog2E));
  const float t = inverse(1.0f + kMillsScale * fabsf(h));
  float p = kMills[5];
#pragma unroll
  for (int i = 4; i >= 0; --i) p = p * t + kMills[i];
  return {of_tail(h, p * t * bell), bell};
}
#else
__device__ __forceinline__ Normal normal_of(C h) {
  return {C(0.5) * erfc_of(h * C(-0.7071067811865476)), exp_of(C(-0.5) * h * h)};
}
#endif

#if FL_16BIT
// (1 - e) / (1 + e) loses its leading digits near 0; h - h^3/3 is within 2e-6 there.
__device__ __forceinline__ C tanh_of(C h) {
  const float e = exp2_of(static_cast<float>(-2 * kLog2E) * fabsf(h));
  const float far = copysignf((1.0f - e) * inverse(1.0f + e), h);
  const float near = h + h * (h * h * (-1.0f / 3.0f));
  return fabsf(h) < 0.0625f ? near : far;
}
#endif

__device__ __forceinline__ C activation(C h) {
#if FL_ACT == FL_NONE
  return h;
#elif FL_ACT == FL_RELU || FL_ACT == FL_RELU_TIE
  return h <= C(0) ? C(0) : h; // NaN stays NaN
#elif FL_ACT == FL_RELU_WHERE
  return h > C(0) ? h : C(0);
#elif FL_ACT == FL_GELU_TANH
  return h * inverse(C(1) + exp_of(-gelu_w(h)));
#elif FL_ACT == FL_GELU_ERF
  return h * normal_of(h).phi;
#elif FL_ACT == FL_SILU
  return h * inverse(C(1) + exp_of(-kExp * h));
#elif FL_ACT == FL_SIGMOID
  return inverse(C(1) + exp_of(-kExp * h));
#elif FL_ACT == FL_TANH
  return tanh_of(h);
#endif
}

__device__ __forceinline__ C slope(C h) {
#if FL_ACT == FL_NONE
  return C(1);
#elif FL_ACT == FL_RELU || FL_ACT == FL_RELU_WHERE
  return h > C(0) ? C(1) : C(0);
#elif FL_ACT == FL_RELU_TIE
  return h > C(0) ? C(1) : h == C(0) ? C(0.5) : C(0);
#elif FL_ACT == FL_GELU_TANH
  const Sigmoid s = sigmoid_of(gelu_w(h));
  // As jnp's, NaN where h^2 overflows.
  return of_tail(h, s.tail) + h * (s.tail * s.rest * (C(kTanh1) + C(3 * kTanh3) * (h * h)));
#elif FL_ACT == FL_GELU_ERF
  const Normal n = normal_of(h);
  return n.phi + h * (n.bell * C(0.3989422804014327)); // 1 / sqrt(2 pi)
#elif FL_ACT == FL_SILU
  const Sigmoid s = sigmoid_of(kExp * h);
  return of_tail(h, s.tail) + h * (s.tail * s.rest);
#elif FL_ACT == FL_SIGMOID
  const Sigmoid s = sigmoid_of(kExp * h);
  return s.tail * s.rest;
#elif FL_ACT == FL_TANH
  const Sigmoid s = sigmoid_of(C(2) * kExp * h);
  return C(4) * (s.tail * s.rest);
#endif
}

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
