// Copies in groups, warps and clusters of blocks: what decode.cu needs beside warp.cuh. Compiled as C++ they come from
// cluster_emulated.h, which the tests hold.
//
// Sources: PTX ISA, "cp.async.commit_group", "cp.async.wait_group", "barrier.cluster", "mapa",
// "cp.async.bulk.prefetch", "createpolicy"; compute capability 9.0 and later.
#pragma once

#ifdef __CUDACC__

// What this thread has asked for since the last group is a group of its own, maybe an empty one.
__device__ __forceinline__ void copies_closed() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until no more than the last kLeft groups of this thread are on their way.
template <int kLeft> __device__ __forceinline__ void copies_left() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// copy_16 of what is read this once: the L2 cache gives it up first, and keeps what blocks make for each other.
__device__ __forceinline__ void copy_16_once(void* to, const void* from, bool inside) {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared_address(to)), "l"(from),
               "r"(inside ? 16 : 0), "l"(policy));
}

__device__ __forceinline__ void warp_meets() { __syncwarp(); }

// All threads of all blocks of the cluster have been here, and see what the others wrote to shared memory before.
__device__ __forceinline__ void cluster_arrives() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_waits() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// What a block of the cluster has at the place of its shared memory where this block has `at`.
__device__ __forceinline__ float of_block(const float* at, int block) {
  unsigned place;
  float value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(place) : "r"(shared_address(at)), "r"(block));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(place) : "memory");
  return value;
}

// Brings memory into the L2 cache: `bytes`, a multiple of 16, from an address that is one.
__device__ __forceinline__ void prefetch_to_l2(const void* from, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

#else
#include <cluster_emulated.h>
#endif
