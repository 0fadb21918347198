// One token a text through transformer layers over caches of keys and values: five kernels a layer, each of which starts while the one
// ahead of it runs (early.cuh) and asks for what it reads of weights and caches before it waits.
//
//   decode_qkv     qkv = norm(x) Wqkv + b                      project.cuh
//   decode_attend  rotary turn, cache write, attention         attend.cuh
//   decode_out     a = x + (attended Wout + b)                 project.cuh
//   decode_up      hidden = act(norm(a) Wup + b), or gated     project.cuh
//   decode_down    x = a + (hidden Wdown + b)                  project.cuh
//   decode_norm1, decode_norm2   norms that are kernels of their own: of many rows, or behind the sums
//
// The first kernel of a launch plan is started after all before it has ended; so nothing that it or a later one reads of weights, caches
// and other operands before it waits is still being written. Every kernel waits before it writes or ends, so that all ahead of it have
// ended then.
//
// Macros: FL_T (1 bfloat16, 2 half), FL_P (norms' parameters: 0 float, 1 as FL_T), FL_ROWS, FL_ACT (activation.cuh), FL_NORM1 and FL_NORM2
// (rows.cuh; 0 where there is none), FL_EPSILON1 and FL_EPSILON2, FL_STRIPS (1: norms of their own
// give strips), FL_AHEAD, the template arguments of each product (FL_QKV, FL_OUT, FL_UP, FL_DOWN, of
// Shape) and the sizes of the attention, as decode.py has them. FL_..._CLUSTER: how many blocks work together.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../dot_product_attention/warp.cuh"
#include "../early.cuh"
#include "cluster.cuh"

#define FL_16BIT 1
#define FL_HAS_EXP2
using C = float;
#include "../gemm_epilogue/activation.cuh"

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

#include "rows.cuh"
constexpr int kAheadBytes = FL_AHEAD, kAheadBlocks = 128; // of memory that each of so many blocks asks for ahead
#include "project.cuh"
using Qkv = Shape<FL_QKV>;
using Out = Shape<FL_OUT>;
using Up = Shape<FL_UP>;
using Down = Shape<FL_DOWN>;

constexpr int kHeads = FL_HEADS, kKeyHeads = FL_KEY_HEADS, kSize = FL_SIZE; // of the attention; kSize: features of a head
constexpr int kGroup = FL_GROUP;                                           // query heads of a block
constexpr int kPast = FL_PAST, kParts = FL_PARTS, kUnroll = FL_UNROLL;
constexpr Index kKeyStride = FL_KEY_STRIDE, kHeadStride = FL_HEAD_STRIDE, kTextStride = static_cast<Index>(kPast) * kKeyHeads * kSize;
constexpr int kLanes = kSize <= 8 ? 1 : kSize <= 16 ? 2 : kSize <= 32 ? 4 : kSize <= 64 ? 8 : kSize <= 128 ? 16 : 32;
constexpr int kAtOnce = 32 / kLanes;
constexpr int kKeysAt = FL_KEYS_AT, kValuesAt = FL_VALUES_AT, kQueryStride = FL_QUERY_STRIDE, kKeyRowStride = FL_KEY_ROW_STRIDE;
constexpr bool kCausal = FL_CAUSAL, kStepOfEach = FL_STEP_OF_EACH, kMaskOfEach = FL_MASK_OF_EACH, kTurnOfEach = FL_TURN_OF_EACH;
constexpr bool kMaskIsFinite = FL_MASK_IS_FINITE;
constexpr float kScale = FL_SCALE; // times log2(e)
#include "attend.cuh"

#define FL_CLUSTER_1
#define FL_CLUSTER_2 __cluster_dims__(2, 1, 1)
#define FL_CLUSTER_4 __cluster_dims__(4, 1, 1)
#define FL_CLUSTER_8 __cluster_dims__(8, 1, 1)
#define FL_CLUSTER_OF(number) FL_CLUSTER_##number
#define FL_CLUSTER(number) FL_CLUSTER_OF(number)

#define FL_PROJECT(entry, cluster, Shape, Next, active, strips, epsilon)                                                        \
  extern "C" __global__ void FL_CLUSTER(cluster) __launch_bounds__(kThreads, 2)                                                 \
      entry(const T* x, const P* scale, const P* bias, const T* w0, const T* w1, const T* w2, const T* b0, const T* b1,         \
            const T* b2, const T* residual, T* out, const T* next0, const T* next1, const T* next2) {                           \
    project<Shape, Next, active, strips>({x, scale, bias, w0, w1, w2, b0, b1, b2, residual, out}, {next0, next1, next2},        \
                                         epsilon);                                                                              \
  }

FL_PROJECT(decode_qkv, FL_QKV_CLUSTER, Qkv, Out, false, false, FL_EPSILON1)
FL_PROJECT(decode_out, FL_OUT_CLUSTER, Out, Up, false, false, 0.0f)
FL_PROJECT(decode_up, FL_UP_CLUSTER, Up, Down, true, true, FL_EPSILON2)
FL_PROJECT(decode_down, FL_DOWN_CLUSTER, Down, Qkv, false, false, 0.0f)

#define FL_NORM(entry, norm, epsilon)                                                                                           \
  extern "C" __global__ void __launch_bounds__(kThreads) entry(const T* x, const P* scale, const P* bias, T* out) {             \
    fl_next();                                                                                                                  \
    fl_wait();                                                                                                                  \
    const Index row = static_cast<Index>(blockIdx.x) * Up::kInner;                                                              \
    norm_rows<norm, 1, Up::kInner>(x + row, scale, bias, epsilon, reinterpret_cast<float*>(&shared_memory[0]),                  \
                                   [&](int, int word, uint4 entries) {                                                        \
                                     *reinterpret_cast<uint4*>(out + (FL_STRIPS ? in_strips(blockIdx.x, word * 8) : row + word * 8)) = \
                                         entries;                                                                              \
                                   });                                                                                         \
  }

#if FL_NORM1
FL_NORM(decode_norm1, FL_NORM1, FL_EPSILON1)
#endif
#if FL_NORM2
FL_NORM(decode_norm2, FL_NORM2, FL_EPSILON2)
#endif

extern "C" __global__ void FL_CLUSTER(FL_PARTS) __launch_bounds__(kThreads, kGroup <= 2 ? 2 : 1)
    decode_attend(const T* qkv, const float* cosines, const float* sines, const int* step, const int* lengths, const unsigned char* mask,
                  T* keys, T* values, T* out, const T* next) {
  attend(qkv, cosines, sines, {step, lengths, mask, keys, values, 0}, out, {next, nullptr, nullptr});
}
