// CUDA's headers for C++: what fusionlab's kernels use of the language and of cuda_bf16.h and cuda_fp16.h, so that they run on a CPU.
// A block's threads are fibers that run in turns; __syncthreads and the shuffles hand over to the next one.
#pragma once
#include "standard.h"

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static // one block runs at a time
#define __restrict__
#define __align__(bytes) alignas(bytes)
#define __cluster_dims__(...)

struct alignas(8) int2 {
  int x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct Dim {
  unsigned x, y, z;
};
inline Dim threadIdx, blockIdx, blockDim, gridDim;
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }

struct __nv_bfloat16 {
  std::uint16_t bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float value) { // to the nearest, ties to even
    const auto word = std::bit_cast<std::uint32_t>(value);
    bits = value != value ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16;
  }
  explicit operator float() const { return std::bit_cast<float>(std::uint32_t{bits} << 16); }
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {static_cast<float>(v.x), static_cast<float>(v.y)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }

using __half = _Float16;
struct __half2 {
  __half x, y;
};
inline float2 __half22float2(__half2 v) { return {static_cast<float>(v.x), static_cast<float>(v.y)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {static_cast<__half>(x), static_cast<__half>(y)}; }

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 16);
  bool done = false;
};
inline ucontext_t scheduler;
inline Fiber* running = nullptr;
inline void (*body)(void* const*) = nullptr;
inline void* const* body_arguments = nullptr;
constexpr unsigned kMostBlocks = 8;          // of a cluster, whose blocks run in turns as well
inline unsigned blocks_in_cluster = 1;
inline unsigned block_in_cluster = 0;        // of the thread that runs
inline unsigned alive[kMostBlocks] = {};     // threads of each block that have not returned
inline unsigned alive_in_cluster = 0;        // of all of them

inline void run_body() {
  body(body_arguments);
  running->done = true;
  --alive[block_in_cluster];
  --alive_in_cluster;
  swapcontext(&running->context, &scheduler);
}

inline void hand_over() { swapcontext(&running->context, &scheduler); }

inline unsigned thread_number() { return threadIdx.y * blockDim.x + threadIdx.x; }
inline unsigned of_cluster_thread() { return block_in_cluster * 32 * 32 + thread_number(); }

struct Barrier {
  unsigned arrived = 0, generation = 0;
  void wait(const unsigned& count) { // it may fall while threads wait: those that have returned are not waited for
    const unsigned mine = generation;
    ++arrived;
    while (generation == mine) {
      if (arrived >= count) {
        arrived = 0;
        ++generation;
      } else {
        hand_over();
      }
    }
  }
};
inline Barrier block_barriers[kMostBlocks], of_cluster;
inline void __syncthreads() { block_barriers[block_in_cluster].wait(alive[block_in_cluster]); }

// What the threads of a warp show each other. Two places in turns: nobody writes one again before all have read it.
constexpr unsigned kShown = 8;
struct Warp {
  Barrier barrier;
  unsigned shown[2][32][kShown];
  unsigned turn[32] = {};
};
inline Warp warps[32 * kMostBlocks];
inline const unsigned kWarp = 32;

template <std::size_t kCount> const unsigned (*show(const unsigned (&mine)[kCount]))[kShown] {
  static_assert(kCount <= kShown);
  const unsigned thread = thread_number(), lane = thread % 32;
  Warp& warp = warps[block_in_cluster * 32 + thread / 32];
  const unsigned turn = warp.turn[lane]++ % 2;
  for (std::size_t i = 0; i < kCount; ++i) warp.shown[turn][lane][i] = mine[i];
  warp.barrier.wait(kWarp);
  return warp.shown[turn];
}

inline unsigned __shfl_down_sync(unsigned mask, unsigned value, unsigned delta) {
  if (mask != ~0u) std::abort();
  const unsigned lane = thread_number() % 32;
  const auto all = show({value});
  return lane + delta < 32 ? all[lane + delta][0] : value;
}

template <typename Value> Value __ldcs(const Value* from) { return *from; }
template <typename Value> Value __ldcg(const Value* from) { return *from; }
template <typename Value> void __stcs(Value* to, Value value) { *to = value; }

template <typename Value> Value __shfl_xor_sync(unsigned mask, Value value, int other) {
  if (mask != ~0u) std::abort();
  unsigned words[sizeof(Value) / 4];
  std::memcpy(words, &value, sizeof(Value));
  std::memcpy(&value, show(words)[thread_number() % 32 ^ other], sizeof(Value));
  return value;
}

inline void block_starts(); // what a header beside this one prepares
inline void block_ends();   // and what it looks at when all threads have returned

// Whose turn it is: the threads one after another, or from the last to the first. What hangs on it lacks a barrier.
// And how many bytes of dynamic shared memory a block of this launch asked for.
extern "C" {
inline int last_thread_first = 0;
[[gnu::used]] inline unsigned shared_bytes = 0; // not every kernel looks at it
}

// Runs a kernel; `arguments` holds a pointer to each parameter, as for cuLaunchKernel. Blocks of a cluster lie along x.
inline void launch(
    void (*kernel)(void* const*), const unsigned* grid, const unsigned* block, void* const* arguments, unsigned cluster = 1) {
  body = kernel;
  body_arguments = arguments;
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {block[0], block[1], block[2]};
  static std::vector<Fiber> fibers;
  const unsigned threads = block[0] * block[1];
  if (grid[0] % cluster || cluster > kMostBlocks) std::abort();
  blocks_in_cluster = cluster;
  if (fibers.size() < threads * cluster) fibers = std::vector<Fiber>(threads * cluster);
  for (unsigned number = 0; number < grid[0] * grid[1] * grid[2]; number += cluster) {
    block_starts();
    of_cluster = {};
    for (Barrier& one : block_barriers) one = {};
    for (Warp& warp : warps) warp = {};
    for (unsigned i = 0; i < cluster; ++i) alive[i] = threads;
    alive_in_cluster = threads * cluster;
    for (unsigned i = 0; i < threads * cluster; ++i) {
      Fiber& fiber = fibers[i];
      fiber.done = false;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data();
      fiber.context.uc_stack.ss_size = fiber.stack.size();
      makecontext(&fiber.context, run_body, 0);
    }
    for (bool any = true; any;) {
      any = false;
      for (unsigned turn = 0; turn < threads * cluster; ++turn) {
        const unsigned i = last_thread_first ? threads * cluster - 1 - turn : turn;
        if (fibers[i].done) continue;
        block_in_cluster = i / threads;
        const unsigned of_block = i % threads, at = number + block_in_cluster;
        blockIdx = {at % grid[0], at / grid[0] % grid[1], at / grid[0] / grid[1]};
        threadIdx = {of_block % block[0], of_block / block[0], 0};
        running = &fibers[i];
        swapcontext(&scheduler, &fibers[i].context);
        any = true;
      }
    }
    block_ends();
  }
  block_in_cluster = 0;
}

#ifndef FL_BLOCK_STARTS // warp_emulated.h has its own
inline void block_starts() {}
inline void block_ends() {}
#endif
