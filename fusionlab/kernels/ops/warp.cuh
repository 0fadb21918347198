// Instructions of a warp that attention.cu is made of. Compiled as C++ (no __CUDACC__) they come from warp_emulated.h, which the tests hold:
// there every one of them exchanges its operands between the 32 threads as PTX describes it.
//
// Layouts of fragments: PTX ISA, "Matrix Fragments for mma.m16n8k16" and "... mma.m16n8k8", docs.nvidia.com/cuda/parallel-thread-execution.
#pragma once

#ifdef __CUDACC__

extern __shared__ __align__(128) unsigned char shared_memory[];

__device__ __forceinline__ unsigned shared_address(const void* at) {
  return static_cast<unsigned>(__cvta_generic_to_shared(at));
}

// Four 8 x 8 matrices of 16-bit elements (or 8 x 4 of 32 bits); lane i holds the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row)));
}

// The same, each of them transposed.
__device__ __forceinline__ void load_transposed(unsigned (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row)));
}

#define FL_MMA(name, shape_and_types)                                                                             \
  __device__ __forceinline__ void name(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {          \
    asm volatile("mma.sync.aligned." shape_and_types " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                                \
  }
FL_MMA(multiply_bf16, "m16n8k16.row.col.f32.bf16.bf16.f32")
FL_MMA(multiply_half, "m16n8k16.row.col.f32.f16.f16.f32")
FL_MMA(multiply_tf32, "m16n8k8.row.col.f32.tf32.tf32.f32")
#undef FL_MMA

// The nearest TF32 (10 bits of mantissa), as the bits of a float.
__device__ __forceinline__ unsigned round_tf32(float x) {
  unsigned y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

// 16 bytes of global memory to shared memory, beside the threads' work; zeros where it is not `inside`.
__device__ __forceinline__ void copy_16(void* to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(inside ? 16 : 0));
}

__device__ __forceinline__ void copy_4(void* to, const void* from, bool inside) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(inside ? 4 : 0));
}

__device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Of the lane whose number differs in the bits of `other`.
__device__ __forceinline__ float from_lane(float x, int other) { return __shfl_xor_sync(~0u, x, other); }

#else
#include <warp_emulated.h>
#endif
