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
#include "../numbers.cuh"

#include "grid.cuh"
#include "exchange.cuh"
#include "../rows.cuh"
#include "../keys.cuh"
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

template <class S> constexpr int kParametersOf = kRows > 1 && S::kNorm != kNoNorm ? S::kHeld * S::kRound : 0;
constexpr int kParameters = most(kParametersOf<Qkv>, kParametersOf<Up>); // of a norm, in shared memory

__device__ __forceinline__ T* rows_in() { return reinterpret_cast<T*>(shared_memory + kRingBytes); }
__device__ __forceinline__ P* scales_in() { return reinterpret_cast<P*>(shared_memory + kRingBytes + kRowsBytes); }
__device__ __forceinline__ P* biases_in() { return scales_in() + kParameters; }
__device__ __forceinline__ float* sums_in(int which) {
  return reinterpret_cast<float*>(biases_in() + kParameters) + which % kSumsBuffers * kSumsCount;
}
constexpr int kTakenCount = kRows * kMostTile / 2; // floats that a block takes from its partner
__device__ __forceinline__ float* taken_in(int which) { return sums_in(0) + kSumsBuffers * kSumsCount + which * kTakenCount; }
__device__ __forceinline__ float* place_in() { return taken_in(2); } // 16 floats
__device__ __forceinline__ float2* statistics_in() { return reinterpret_cast<float2*>(place_in() + 16); } // of each row
__device__ __forceinline__ int2* seen_in() { return reinterpret_cast<int2*>(statistics_in() + kRows); }
__device__ __forceinline__ Gate* gates_in() { return reinterpret_cast<Gate*>(seen_in() + kRows); }
__device__ __forceinline__ Gate* taken_gates() { return gates_in() + 2 * kWarps * kDepth; } // of either of `taken_in`

#include "statistics.cuh"
#include "phases.cuh"
#include "attention_phase.cuh"

// Entries, or floats, of what is given.
constexpr int kQkvCount = kRows * Qkv::kPitch, kXCount = kRows * Qkv::kInner, kHiddenCount = kRows * Down::kInner;
constexpr int kAttendedCount = kParts == 1 ? kRows * Out::kInner / 2 : kPartValuesAt + kPartCount * kSize; // of words

// Statistics of x, which the last product of a layer makes, then those of what is between.
using PiecesOfX = Pieces<Down, Qkv::kNorm>;
using PiecesBetween = Pieces<Out, Up::kNorm>;

// Nothing is of any layer yet.
__device__ __forceinline__ void forget(void* words, int count) {
  if (!words) return;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) static_cast<unsigned long long*>(words)[i] = 0;
}

extern "C" __global__ void decode_begin(const T* x, unsigned* counter, void* qkv, void* attended, void* between, void* hidden, void* next,
                                        float2* statistics) {
  if (kFlagged) {
    forget(qkv, kQkvCount / 2), forget(attended, kAttendedCount), forget(between, kXCount / 2);
    forget(hidden, kHiddenCount / 2), forget(next, kXCount / 2);
    return;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *counter = 0;
  if (Qkv::kNorm != kNoNorm) PiecesOfX::keep_of(statistics, x);
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(2 * kThreads, 1) decode_layers(const FL_CONSTANT Places places) {
  const int warp = threadIdx.x / 32;
  if (threadIdx.x < 2 * kWarps * kDepth + 2) gate_opens_after(gates_in() + threadIdx.x, threadIdx.x < 2 * kWarps * kDepth ? kSpeakers : 1);
  if (threadIdx.x < kRows) seen_in()[threadIdx.x] = seen_of(places, threadIdx.x);
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
  float2* const of_x = shared_at<float2>(places, kStatistics);
  float2* const of_between = of_x + PiecesOfX::kAll;
  const auto norm1 = [&](int layer) {
    return Norm<PiecesOfX>{of_x, own_at<const P>(places, layer, kScale1), own_at<const P>(places, layer, kBias1), FL_EPSILON1};
  };
  const auto norm2 = [&](int layer) {
    return Norm<PiecesBetween>{of_between, own_at<const P>(places, layer, kScale2), own_at<const P>(places, layer, kBias2), FL_EPSILON2};
  };
  ask_parameters<Qkv>(norm1(0));
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
      const Given from = keep_normed<Qkv>(x, norm1(layer));
      project<Qkv, false, kNoNorm>(ring, given, from, norm1(layer), own(kQBias), own(kKBias), own(kVBias), none, qkv, nullptr);
    }
    meet();
    attend(ring, places, layer, qkv, attended);
    meet();
    if (blockIdx.x / kPair < Out::kTiles) {
      const Given from = keep_attended(places, layer, qkv, attended);
      project<Out, false, Up::kNorm>(ring, given, from, kWithout, own(kOutBias), nullptr, nullptr, x, between, of_between);
    }
    ask_parameters<Up>(norm2(layer));
    meet();
    if (blockIdx.x / kPair < Up::kTiles) {
      const Given from = keep_normed<Up>(between, norm2(layer));
      project<Up, true, kNoNorm>(ring, given, from, norm2(layer), own(kUp0Bias), own(kUp1Bias), nullptr, none, hidden, nullptr);
    }
    meet();
    if (blockIdx.x / kPair < Down::kTiles) {
      const Given out = layer + 1 < kLayers ? given_at(kNext) : Given{places.at[kY], 0};
      project<Down, false, Qkv::kNorm>(ring, given, hidden, kWithout, own(kDownBias), nullptr, nullptr, between, out, of_x);
    }
    if (layer + 1 == kLayers) return;
    ask_parameters<Qkv>(norm1(layer + 1));
    meet();
  }
}
