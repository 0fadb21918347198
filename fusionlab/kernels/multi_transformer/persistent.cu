// One token a text through transformer layers over caches of keys and values, all of them in one kernel: a block of each multiprocessor,
// which goes with the others through five phases a layer.
//
//   qkv = norm(x) Wqkv + b
//   attention over parts of the keys, after rotary turn and cache write
//   a = x + (attended Wout + b)
//   hidden = act(norm(a) Wup + b), or gated
//   x = a + (hidden Wdown + b)
//
// A block makes whole columns of a product, and between phases blocks wait for what others have made (exchange.cuh). What is read of weights
// and caches does not hang on that: it is one stream (stream.cuh), of which a ring of slices in shared memory is always on its way.
//
// All blocks must be resident at once: a cooperative launch sees to that. `decode_begin` makes the memory ready in which they wait.
//
// Macros: FL_T (1 bfloat16, 2 half), FL_P (norms' parameters: 0 float, 1 as FL_T), FL_ROWS, FL_ACT (activation.cuh), FL_EPSILON1 and
// FL_EPSILON2, FL_BLOCKS, FL_LAYERS, FL_SLICE, FL_DEPTH, FL_FLIGHT, FL_KEPT (stream.cuh), the template arguments of each product (FL_QKV, FL_OUT,
// FL_UP, FL_DOWN, of Product) and the sizes of the attention, as persistent.py has them.
#include "numbers.cuh"

#include "grid.cuh"
#include "exchange.cuh"
#include "rows.cuh"
#include "keys.cuh"
#include "stream.cuh"

__device__ constexpr int most(int a, int b) { return a > b ? a : b; }
constexpr int kMostTile = most(most(Qkv::kTile, Out::kTile), most(Up::kTile, Down::kTile));
constexpr int kSumsBuffers = kRows > 4 ? 1 : 2; // a second one saves a wait for each tile
constexpr int kKeepers = kRows > 4 ? kWarps / 2 : kWarps; // places for warps' sums: of many rows each is for two warps, as room is short
constexpr int kSumsCount = most(kKeepers * kRows * (kMostTile + 4), (kRows * kHeads * kParts + 4) / kSumsBuffers / 2 * 2); // floats

struct Block { // of the attention
  float queries[kGroup][kSize];
  float largest[kWarps][kGroup], total[kWarps][kGroup];
  float values[kWarps][kGroup][kSize];
  __align__(16) T key[kSize]; // of the new token
  __align__(16) T value[kSize];
};
constexpr int kRingBytes = kWarps * kDepth * kSlice;
template <class S> constexpr int kRowsOf = 2 * S::kKeptRows * S::kRowPitch;
constexpr int kMostRows = most(most(kRowsOf<Qkv>, kRowsOf<Out>), most(kRowsOf<Up>, kRowsOf<Down>));
constexpr int kRowsBytes = (most(kMostRows, sizeof(Block)) + 15) / 16 * 16; // x of a phase, or what an attention shares

__device__ __forceinline__ T* rows_in() { return reinterpret_cast<T*>(shared_memory + kRingBytes); }
__device__ __forceinline__ float* sums_in(int which) {
  return reinterpret_cast<float*>(shared_memory + kRingBytes + kRowsBytes) + which % kSumsBuffers * kSumsCount;
}
constexpr int kTakenCount = kRows * kMostTile / 2; // floats that a block takes from its partner
__device__ __forceinline__ float* taken_in(int which) { return sums_in(0) + kSumsBuffers * kSumsCount + which * kTakenCount; }
__device__ __forceinline__ float* place_in() { return taken_in(2); } // 16 floats
__device__ __forceinline__ float2* statistics_in() { return reinterpret_cast<float2*>(place_in() + 16); } // of each row
__device__ __forceinline__ Gate* gates_in() { return reinterpret_cast<Gate*>(statistics_in() + kRows); }
__device__ __forceinline__ Gate* taken_gates() { return gates_in() + 2 * kWarps * kDepth; } // of either of `taken_in`

#include "phases.cuh"

// Entries, or floats, of what is given.
constexpr int kQkvCount = kRows * Qkv::kPitch, kXCount = kRows * Qkv::kInner, kHiddenCount = kRows * Down::kInner;
constexpr int kAttendedCount = kParts == 1 ? kRows * Out::kInner / 2 : kPartValuesAt + kPartCount * kSize; // of words

// Nothing is of any layer yet.
__device__ __forceinline__ void forget(void* words, int count) {
  if (!words) return;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) static_cast<unsigned long long*>(words)[i] = 0;
}

extern "C" __global__ void decode_begin(unsigned* counter, void* qkv, void* attended, void* between, void* hidden, void* next) {
  if (kFlagged) {
    forget(qkv, kQkvCount / 2), forget(attended, kAttendedCount), forget(between, kXCount / 2);
    forget(hidden, kHiddenCount / 2), forget(next, kXCount / 2);
  } else if (blockIdx.x == 0 && threadIdx.x == 0) {
    *counter = 0;
  }
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(2 * kThreads, 1) decode_layers(const FL_CONSTANT Places places) {
  const int warp = threadIdx.x / 32;
  if (threadIdx.x < 2 * kWarps * kDepth + 2) gate_opens_after(gates_in() + threadIdx.x, 1);
  gates_are_there();
  cluster_arrives();
  cluster_waits();
  const int number = warp % kWarps;
  Ring ring = {shared_memory + number * kDepth * kSlice, gates_in() + number * kDepth, gates_in() + (kWarps + number) * kDepth, 0, 0};
  if (warp >= kWarps) {
    fill(ring, places);
    return;
  }
  unsigned met = 0; // how often blocks were to arrive
  int given = 0; // of sums to the other block of the pair
#pragma unroll 1
  for (int layer = 0; layer < kLayers; ++layer) {
    const unsigned flag = kFlagged ? layer + 1 : 0;
    const auto given_at = [&](int which) { return Given{places.at[which], flag}; };
    const Given x = {places.at[layer ? kNext : kX], kFlagged ? static_cast<unsigned>(layer) : 0}; // of the layer before
    const Given qkv = given_at(kQkvMade), attended = given_at(kPartsMade), between = given_at(kBetween), hidden = given_at(kHidden), none = {nullptr, 0};
    const auto own = [&](int which) { return own_at<const T>(places, layer, which); };
    const auto meet = [&] {
      if (kFlagged) return;
      block_meets();
      met += kBlocks;
      if (threadIdx.x == 0) blocks_meet(shared_at<unsigned>(places, kCounter), met);
      block_meets();
    };
    if (blockIdx.x / kPair < Qkv::kTiles) {
      const Given from = keep_normed<Qkv>(x, own_at<const P>(places, layer, kScale1), own_at<const P>(places, layer, kBias1), FL_EPSILON1);
      project<Qkv, false>(ring, given, from, own(kQBias), own(kKBias), own(kVBias), none, qkv);
    }
    meet();
    attend(ring, places, layer, qkv, attended);
    meet();
    if (blockIdx.x / kPair < Out::kTiles) {
      const Given from = keep_attended(places, layer, attended);
      project<Out, false>(ring, given, from, own(kOutBias), nullptr, nullptr, x, between);
    }
    meet();
    if (blockIdx.x / kPair < Up::kTiles) {
      const Given from = keep_normed<Up>(between, own_at<const P>(places, layer, kScale2), own_at<const P>(places, layer, kBias2), FL_EPSILON2);
      project<Up, true>(ring, given, from, own(kUp0Bias), own(kUp1Bias), nullptr, none, hidden);
    }
    meet();
    if (blockIdx.x / kPair < Down::kTiles) {
      const Given out = layer + 1 < kLayers ? given_at(kNext) : Given{places.at[kY], 0};
      project<Down, false>(ring, given, hidden, own(kDownBias), nullptr, nullptr, between, out);
    }
    if (layer + 1 < kLayers) meet();
  }
}
