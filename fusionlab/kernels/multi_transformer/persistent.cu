// One token a text through transformer layers over caches of keys and values, all of them in one kernel: a block of each multiprocessor,
// which goes with the others through five phases a layer.
//
//   qkv = norm(x) Wqkv + b
//   attention over parts of the keys, after rotary turn and cache write
//   a = x + (attended Wout + b)
//   hidden = act(norm(a) Wup + b), or gated
//   x = a + (hidden Wdown + b)
//
// A block makes whole columns of a product, and between phases all blocks meet. What is read of weights and caches does not hang on
// that: it is one stream (stream.cuh), of which a ring of slices in shared memory is always on its way.
//
// All blocks must be resident at once: a cooperative launch sees to that. `decode_begin` sets the counter of their meetings to 0.
//
// Macros: FL_T (1 bfloat16, 2 half), FL_P (norms' parameters: 0 float, 1 as FL_T), FL_ROWS, FL_ACT (activation.cuh), FL_EPSILON1 and
// FL_EPSILON2, FL_BLOCKS, FL_LAYERS, FL_DEPTH, the template arguments of each product (FL_QKV, FL_OUT, FL_UP, FL_DOWN, of Product) and the
// sizes of the attention, as persistent.py has them.
#include "numbers.cuh"

#include "grid.cuh"
#include "rows.cuh"
#include "keys.cuh"
#include "stream.cuh"

__device__ constexpr int most(int a, int b) { return a > b ? a : b; }
constexpr int kMostTile = most(most(Qkv::kTile, Out::kTile), most(Up::kTile, Down::kTile));
constexpr int kSumsCount = kWarps * kRows * (kMostTile + 4); // floats

struct Block { // of the attention
  float queries[kGroup][kSize];
  float largest[kWarps][kGroup], total[kWarps][kGroup];
  float values[kWarps][kGroup][kSize];
  __align__(16) T key[kSize]; // of the new token
  __align__(16) T value[kSize];
};
constexpr int kRingBytes = kWarps * kDepth * kSlice;
constexpr int kMostPitch = most(most(Qkv::kRowPitch, Out::kRowPitch), most(Up::kRowPitch, Down::kRowPitch));
constexpr int kRowsBytes = (most(2 * kRows * kMostPitch, sizeof(Block)) + 15) / 16 * 16; // x of a phase, or what an attention shares

__device__ __forceinline__ T* rows_in() { return reinterpret_cast<T*>(shared_memory + kRingBytes); }
__device__ __forceinline__ float* sums_in(int which) {
  return reinterpret_cast<float*>(shared_memory + kRingBytes + kRowsBytes) + which * kSumsCount;
}
constexpr int kTakenCount = kRows * kMostTile / 2; // floats that a block takes from its partner
__device__ __forceinline__ float* taken_in(int which) { return sums_in(2) + which * kTakenCount; }
__device__ __forceinline__ float* place_in() { return taken_in(2); } // 16 floats
__device__ __forceinline__ Gate* gates_in() { return reinterpret_cast<Gate*>(place_in() + 16); }
__device__ __forceinline__ Gate* taken_gate() { return gates_in() + 2 * kWarps * kDepth; }

#ifdef FL_TRACED
extern "C" __device__ int printf(const char*, ...);
__device__ __forceinline__ unsigned now_ns() { unsigned t; asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(t)); return t; }
__device__ __forceinline__ unsigned now_clock() { unsigned t; asm volatile("mov.u32 %0, %%clock;" : "=r"(t)); return t; }
__shared__ unsigned stamps[64];
__device__ int phase_now;
#define FL_STAMP(i) if (threadIdx.x == 0) stamps[stamps[63] * 5 + i] = now_clock();
#define FL_PHASE(n) if (threadIdx.x == 0) stamps[63] = n;
#else
#define FL_STAMP(i)
#define FL_PHASE(n)
#endif
#include "phases.cuh"

extern "C" __global__ void decode_begin(unsigned* counter) {
  if (threadIdx.x == 0) *counter = 0;
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(2 * kThreads + 32, 1) decode_layers(const FL_CONSTANT Places places) {
  const int warp = threadIdx.x / 32;
  if (threadIdx.x < 2 * kWarps * kDepth + 1) gate_opens_after(gates_in() + threadIdx.x, threadIdx.x < 2 * kWarps * kDepth ? 1 : kWarps);
  gates_are_there();
  cluster_arrives();
  cluster_waits();
  if (warp == 2 * kWarps) { // the last one: what it waits for is no copy
    unsigned count = 0;
    for (int phase = 1; phase < kLayers * kPhases; ++phase) {
      count += kBlocks;
      block_ends_phase();
      if (threadIdx.x % 32 == 0) blocks_meet(shared_at<unsigned>(places, kCounter), count);
      block_ends_phase();
    }
    return;
  }
  const int number = warp % kWarps;
  Ring ring = {shared_memory + number * kDepth * kSlice, gates_in() + number * kDepth, gates_in() + (kWarps + number) * kDepth, 0, 0};
  if (warp >= kWarps) {
    fill(ring, places);
    return;
  }
  int given = 0; // of sums to the other block of the pair
#pragma unroll 1
  for (int layer = 0; layer < kLayers; ++layer) {
    const T* const x = shared_at<const T>(places, layer ? kNext : kX);
    T* const between = shared_at<T>(places, kBetween);
    T* const hidden = shared_at<T>(places, kHidden);
    const auto own = [&](int which) { return own_at<const T>(places, layer, which); };
    const auto meet = [] { FL_STAMP(3) block_ends_phase(), block_ends_phase(); FL_STAMP(4) };
    FL_PHASE(0) FL_STAMP(0)
    if (blockIdx.x / kPair < Qkv::kTiles) {
      keep_normed<Qkv>(x, own_at<const P>(places, layer, kScale1), own_at<const P>(places, layer, kBias1), FL_EPSILON1); FL_STAMP(1)
      project<Qkv, false>(ring, given, own(kQBias), own(kKBias), own(kVBias), nullptr, shared_at<T>(places, kQkvMade));
    }
    meet();
    FL_PHASE(1) FL_STAMP(0)
    attend(ring, places, layer);
    meet();
    FL_PHASE(2) FL_STAMP(0)
    if (blockIdx.x / kPair < Out::kTiles) {
      keep_attended(places, layer); FL_STAMP(1)
      project<Out, false>(ring, given, own(kOutBias), nullptr, nullptr, x, between);
    }
    meet();
    FL_PHASE(3) FL_STAMP(0)
    if (blockIdx.x / kPair < Up::kTiles) {
      keep_normed<Up>(between, own_at<const P>(places, layer, kScale2), own_at<const P>(places, layer, kBias2), FL_EPSILON2); FL_STAMP(1)
      project<Up, true>(ring, given, own(kUp0Bias), own(kUp1Bias), nullptr, nullptr, hidden);
    }
    meet();
    FL_PHASE(4) FL_STAMP(0)
    if (blockIdx.x / kPair < Down::kTiles) {
      keep_normed<Down>(hidden, nullptr, nullptr, 0.0f); FL_STAMP(1)
      project<Down, false>(ring, given, own(kDownBias), nullptr, nullptr, between, shared_at<T>(places, layer + 1 < kLayers ? kNext : kY));
    }
    if (layer + 1 < kLayers) meet();
#ifdef FL_TRACED
    if (layer == 4 && threadIdx.x == 0 && (blockIdx.x == 10 || blockIdx.x == 61))
      for (int f = 0; f < 5; ++f)
        printf("block %d phase %d: x %d main %d end %d meet %d clocks\n", blockIdx.x, f, stamps[5 * f + 1] - stamps[5 * f], stamps[5 * f + 2] - stamps[5 * f + 1],
               stamps[5 * f + 3] - stamps[5 * f + 2], stamps[5 * f + 4] - stamps[5 * f + 3]);
#endif
  }
}
