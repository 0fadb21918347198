// Numbers of 16 bits as the kernels for one token a text read, round and multiply them; how many rows and warps there are.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../../warp.cuh"
#include "cluster.cuh"

#define FL_16BIT 1
#define FL_HAS_EXP2
using C = float;
#include "../../activation.cuh"

using Index = long long;
#if FL_T == 1
using T = __nv_bfloat16;
using Two = __nv_bfloat162;
#else
using T = __half;
using Two = __half2;
#endif
#if FL_P
using P = T;
#else
using P = float;
#endif

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kRows = FL_ROWS, kRowTiles = (kRows + 7) / 8;

__device__ __forceinline__ float2 floats_of(unsigned word) {
#if FL_T == 1
  return __bfloat1622float2(reinterpret_cast<const Two&>(word));
#else
  return __half22float2(reinterpret_cast<const Two&>(word));
#endif
}

__device__ __forceinline__ unsigned rounded(float x, float y) {
#if FL_T == 1
  const Two two = __floats2bfloat162_rn(x, y);
#else
  const Two two = __floats2half2_rn(x, y);
#endif
  return reinterpret_cast<const unsigned&>(two);
}

__device__ __forceinline__ float once(float x) { return static_cast<float>(static_cast<T>(x)); } // rounded to T

__device__ __forceinline__ float2 parameters_of(const P* two) { return {static_cast<float>(two[0]), static_cast<float>(two[1])}; }

__device__ __forceinline__ unsigned word_of(const uint4& four, int i) { return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w; }

// From memory rather than from a cache of this multiprocessor: what other blocks wrote while this one waited.
__device__ __forceinline__ T fresh(const T* from) {
  const unsigned short bits = __ldcg(reinterpret_cast<const unsigned short*>(from));
  return reinterpret_cast<const T&>(bits);
}

__device__ __forceinline__ void multiply(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#if FL_T == 1
  multiply_bf16(sum, a, b);
#else
  multiply_half(sum, a, b);
#endif
}
