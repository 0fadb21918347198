// How the threads and blocks of persistent.cu wait for each other. Compiled as C++ it comes from grid_emulated.h, which the tests hold.
//
// Sources: PTX ISA, "bar", "red", "ld" and "Memory Consistency Model" (release and acquire patterns, causality order).
#pragma once

#ifdef __CUDACC__

#define FL_CONSTANT __grid_constant__ // a parameter that is only read: it has an address in constant memory

// The warps that compute.
__device__ __forceinline__ void block_meets() { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); }

// All warps of the block.
__device__ __forceinline__ void block_ends_phase() { asm volatile("bar.sync 0, %0;" ::"n"(kThreads + 32) : "memory"); }

// Waits until `count` blocks have been here, and sees what their threads wrote before they ended their phase.
__device__ __forceinline__ void blocks_meet(unsigned* counter, unsigned count) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
  unsigned found;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
  } while (found < count);
}

#else
#include <grid_emulated.h>
#endif
