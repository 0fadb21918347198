// What kernels that go over rows of columns share: storage, FL_VEC neighbours that are moved at once, and the sums of what blocks have summed.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

using Index = long long;

template <int kCode> struct Storage { using Type = float; };
template <> struct Storage<1> { using Type = __nv_bfloat16; };
template <> struct Storage<2> { using Type = __half; };

template <int kBytes> struct RawOf { using Type = uint4; };
template <> struct RawOf<2> { using Type = unsigned short; };
template <> struct RawOf<4> { using Type = unsigned int; };
template <> struct RawOf<8> { using Type = uint2; };

// FL_VEC neighbours, moved by as few instructions as their alignment allows.
template <typename E> struct Pack {
  static constexpr int kBytes = sizeof(E) * FL_VEC, kWords = kBytes > 16 ? kBytes / 16 : 1;
  using Raw = typename RawOf<kBytes>::Type;
  Raw raw[kWords];

  __device__ __forceinline__ void load(const E* from) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) raw[i] = reinterpret_cast<const Raw*>(from)[i];
  }
  // Of what nothing reads again.
  __device__ __forceinline__ void load_last(const E* from) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) raw[i] = __ldcs(reinterpret_cast<const Raw*>(from) + i);
  }
  __device__ __forceinline__ void store(E* to) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) reinterpret_cast<Raw*>(to)[i] = raw[i];
  }
  // Where what is in the cache already is to stay there.
  __device__ __forceinline__ void store_past(E* to) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) __stcs(reinterpret_cast<Raw*>(to) + i, raw[i]);
  }
};

__device__ __forceinline__ float2 two_of(unsigned word, const __nv_bfloat16*) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&word));
}
__device__ __forceinline__ float2 two_of(unsigned word, const __half*) {
  return __half22float2(*reinterpret_cast<const __half2*>(&word));
}
__device__ __forceinline__ unsigned word_of(float x, float y, const __nv_bfloat16*) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<const unsigned*>(&both);
}
__device__ __forceinline__ unsigned word_of(float x, float y, const __half*) {
  const __half2 both = __floats2half2_rn(x, y);
  return *reinterpret_cast<const unsigned*>(&both);
}

template <typename E> __device__ __forceinline__ void unpack(const Pack<E>& pack, float (&to)[FL_VEC]) {
  if constexpr (sizeof(E) == 2 && FL_VEC > 1) {
    const unsigned* const words = reinterpret_cast<const unsigned*>(pack.raw);
#pragma unroll
    for (int i = 0; i < FL_VEC / 2; ++i) {
      const float2 both = two_of(words[i], static_cast<const E*>(nullptr));
      to[2 * i] = both.x;
      to[2 * i + 1] = both.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < FL_VEC; ++i) to[i] = static_cast<float>(reinterpret_cast<const E*>(pack.raw)[i]);
  }
}

template <typename E> __device__ __forceinline__ void pack_into(Pack<E>& pack, const float (&from)[FL_VEC]) {
  if constexpr (sizeof(E) == 2 && FL_VEC > 1) {
    unsigned* const words = reinterpret_cast<unsigned*>(pack.raw);
#pragma unroll
    for (int i = 0; i < FL_VEC / 2; ++i)
      words[i] = word_of(from[2 * i], from[2 * i + 1], static_cast<const E*>(nullptr));
  } else {
#pragma unroll
    for (int i = 0; i < FL_VEC; ++i) reinterpret_cast<E*>(pack.raw)[i] = static_cast<E>(from[i]);
  }
}

// Of an operand with one entry for each column.
template <typename E> __device__ __forceinline__ void values_at(const E* from, Index column, float (&to)[FL_VEC]) {
  Pack<E> pack;
  pack.load(from + column);
  unpack(pack, to);
}

// The sums of partial[parts][kColumns] over parts, of up to three gradients, one for each blockIdx.y: each of a column's kHeight threads adds
// every so manieth part, then one adds those up.
template <int kColumns, int kHeight, typename To>
__device__ __forceinline__ void sum_parts(const float* partial, To* to, int parts) {
  __shared__ float shared[kHeight][32];
  const int column = blockIdx.x * 32 + threadIdx.x;
  float sum = 0;
  if (column < kColumns) {
#pragma unroll 8
    for (int i = threadIdx.y; i < parts; i += kHeight) sum += partial[static_cast<Index>(i) * kColumns + column];
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && column < kColumns) {
    float total = 0;
#pragma unroll
    for (int i = 0; i < kHeight; ++i) total += shared[i][threadIdx.x];
    to[column] = static_cast<To>(total);
  }
}
