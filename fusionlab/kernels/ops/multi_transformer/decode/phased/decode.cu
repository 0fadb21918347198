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
// give strips), the template arguments of each product (FL_QKV, FL_OUT, FL_UP, FL_DOWN, of
// Shape) and the sizes of the attention, as decode.py has them. FL_..._CLUSTER: how many blocks work together.
#include "../numbers.cuh"

#include "../../../early.cuh"
__device__ __forceinline__ void block_meets() { __syncthreads(); }

#include "../rows.cuh"
#include "project.cuh"
using Qkv = Shape<FL_QKV>;
using Out = Shape<FL_OUT>;
using Up = Shape<FL_UP>;
using Down = Shape<FL_DOWN>;

#include "attend.cuh"

#define FL_CLUSTER_1
#define FL_CLUSTER_2 __cluster_dims__(2, 1, 1)
#define FL_CLUSTER_4 __cluster_dims__(4, 1, 1)
#define FL_CLUSTER_8 __cluster_dims__(8, 1, 1)
#define FL_CLUSTER_OF(number) FL_CLUSTER_##number
#define FL_CLUSTER(number) FL_CLUSTER_OF(number)

#define FL_PROJECT(entry, cluster, Shape, active, strips, epsilon)                                                              \
  extern "C" __global__ void FL_CLUSTER(cluster) __launch_bounds__(kThreads, 2)                                                 \
      entry(const T* x, const P* scale, const P* bias, const T* w0, const T* w1, const T* w2, const T* b0, const T* b1,         \
            const T* b2, const T* residual, T* out) {                                                                          \
    project<Shape, active, strips>({x, scale, bias, w0, w1, w2, b0, b1, b2, residual, out}, epsilon);                           \
  }

FL_PROJECT(decode_qkv, FL_QKV_CLUSTER, Qkv, false, false, FL_EPSILON1)
FL_PROJECT(decode_out, FL_OUT_CLUSTER, Out, false, false, 0.0f)
FL_PROJECT(decode_up, FL_UP_CLUSTER, Up, true, true, FL_EPSILON2)
FL_PROJECT(decode_down, FL_DOWN_CLUSTER, Down, false, false, 0.0f)

#define FL_NORM(entry, norm, epsilon)                                                                                           \
  extern "C" __global__ void __launch_bounds__(kThreads) entry(const T* x, const P* scale, const P* bias, T* out) {             \
    fl_next();                                                                                                                  \
    fl_wait();                                                                                                                  \
    const Index row = static_cast<Index>(blockIdx.x) * Up::kInner;                                                              \
    norm_rows<norm, 1, Up::kInner>(WordsOf<Teams<1, Up::kInner>, Up::kInner>{x + row}, scale, bias, epsilon, reinterpret_cast<float*>(&shared_memory[0]),                  \
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
                  T* keys, T* values, T* out) {
  attend(qkv, cosines, sines, {step, lengths, mask, keys, values, 0}, out);
}
