// What the blocks of persistent.cu read of weights and caches, as one stream for each warp: slices of kSlice bytes, in the order in which
// they are used, over products, attentions and layers alike. None of it is written by the kernel (but for the new token's place in the
// caches, which is left out), so the stream runs on while the blocks wait for each other.
#pragma once

constexpr int kBlocks = FL_BLOCKS, kLayers = FL_LAYERS, kSlice = FL_SLICE, kDepth = FL_DEPTH, kFlight = FL_FLIGHT, kKept = FL_KEPT;
// kSlice: bytes of a slice; kDepth: slices of a warp's ring; kFlight: of them, on their way at a time; kKept: bytes of x in shared memory
constexpr int kCopies = kSlice / 512, kHalf = kCopies / 2; // of 16 bytes for each lane; of either half of a slice
constexpr int kPhases = 5;
constexpr int kPair = 2, kPairs = kBlocks / kPair; // blocks that share the inner axis of a product: a cluster

enum Shared { kX, kCos, kSin, kStepAt, kLengths, kMask, kCounter, kQkvMade, kPartsMade, kBetween, kHidden, kNext, kStatistics, kY, kSharedCount };
enum Own { kScale1, kBias1, kQ, kK, kV, kQBias, kKBias, kVBias, kCacheK, kCacheV, kOut, kOutBias, kScale2, kBias2, kUp0, kUp1, kUp0Bias,
           kUp1Bias, kDown, kDownBias, kOwnCount };

// Addresses of all that the kernel reads and writes; null where there is nothing of the kind.
struct Places {
  void* at[kSharedCount + kLayers * kOwnCount];
};

template <class Value> __device__ __forceinline__ Value* shared_at(const Places& places, int which) {
  return static_cast<Value*>(places.at[which]);
}
template <class Value> __device__ __forceinline__ Value* own_at(const Places& places, int layer, int which) {
  return static_cast<Value*>(places.at[kSharedCount + layer * kOwnCount + which]);
}

// A product: up to three matrices side by side, or two alike (gated). A tile is kTile columns, a slice kStep of the inner axis by a tile.
template <int kInner_, int kFirst, int kSecond, int kThird, int kTile_, bool kTurned_, bool kGated_, int kNorm_> struct Product {
  static constexpr int kInner = kInner_, kTile = kTile_, kNorm = kNorm_, kStep = kSlice / 2 / kTile;
  static constexpr bool kTurned = kTurned_; // the matrix is columns x inner
  static constexpr bool kGated = kGated_;   // a tile is half of either matrix
  static constexpr int kMade = kGated ? kTile / 2 : kTile, kPitch = kFirst + kSecond + kThird;
  static constexpr int kTiles0 = (kFirst + kMade - 1) / kMade, kTiles1 = (kSecond + kMade - 1) / kMade;
  static constexpr int kTiles = kTiles0 + kTiles1 + (kThird + kMade - 1) / kMade;
  static constexpr int kSlices = (kInner + kStep - 1) / kStep;
  static constexpr int kRowWords = (kTurned ? kStep : kTile) / 8; // of a slice in shared memory, 16 bytes each
  static constexpr int kShare = kPair * kWarps; // warps of a pair of blocks, between which slices are dealt out
  static constexpr int kRound = kWarps * kStep, kRounds = (kSlices + kShare - 1) / kShare; // a round is a slice of each warp of a block
  // Entries of the inner axis from a warp's first slice to the next warp's, and from a slice of a warp to its next: each has a run of slices,
  // so that it can read what it needs of x in whole lines. Slices of a turned matrix are short pieces of its rows: there the warps take turns,
  // and what they ask for at a time lies side by side.
  static constexpr int kNextWarp = kTurned ? kStep : kRounds * kStep, kNextSlice = kTurned ? kShare * kStep : kStep;
  // What a block's slices need of x, in shared memory, warp by warp: all of it, or one part after the other, of kHeld slices of each warp.
  static constexpr bool kWhole = 2 * kRows * kRounds * kRound <= kKept;
  static constexpr int kHeld = kWhole ? kRounds : kKept / 2 / (2 * kRows * kRound), kParts = (kRounds + kHeld - 1) / kHeld;
  static constexpr int kRowPitch = kHeld * kRound + 8, kKeptRows = kRows * (kWhole ? 1 : 2);
  static_assert(kHeld > 0);
  static_assert(kRowWords == 2 || kRowWords == 4 || kRowWords == 8);
  static constexpr int kColumns0 = kFirst, kColumns1 = kSecond, kColumns2 = kThird; // of the matrices
  static __device__ __forceinline__ int columns_of(int matrix) { return matrix == 0 ? kFirst : matrix == 1 ? kSecond : kThird; }
  struct Place {
    int matrix, column, columns, before; // columns of the matrix, and of those before it
  };
  static __device__ __forceinline__ Place place(int tile) {
    if (kSecond == 0 || tile < kTiles0) return {0, tile * kMade, kFirst, 0};
    if (tile < kTiles0 + kTiles1) return {1, (tile - kTiles0) * kMade, kSecond, kFirst};
    return {2, (tile - kTiles0 - kTiles1) * kMade, kThird, kFirst + kSecond};
  }
  // How many slices are a warp's, of the pair's kShare warps.
  static __device__ __forceinline__ int slices_of(int number) {
    const int left = kTurned ? (kSlices - number + kShare - 1) / kShare : kSlices - number * kRounds;
    return left < 0 ? 0 : left < kRounds ? left : kRounds;
  }
  // The place in `inner` of what stands at a place in a part of what the block keeps of x, and, where that is all of it, the other way round,
  // if it is there.
  static __device__ __forceinline__ int entry_of(int kept, int part = 0) {
    const int number = blockIdx.x % kPair * kWarps + kept / (kHeld * kStep);
    return number * kNextWarp + (part * kHeld + kept / kStep % kHeld) * kNextSlice + kept % kStep;
  }
  static __device__ __forceinline__ int warp_of(int entry) { return kTurned ? entry / kStep % kShare : entry / (kRounds * kStep); }
  static __device__ __forceinline__ bool is_kept(int entry) { return warp_of(entry) / kWarps == static_cast<int>(blockIdx.x) % kPair; }
  static __device__ __forceinline__ int kept_at(int entry) {
    const int slice = kTurned ? entry / kStep / kShare : entry / kStep % kRounds;
    return (warp_of(entry) % kWarps * kHeld + slice) * kStep + entry % kStep;
  }
  // Where a word stands: so that eight rows of one word, which a warp reads at a time, are in different banks.
  static __device__ __forceinline__ int word_at(int row, int word) {
    return row * kRowWords + (word ^ (kRowWords == 8 ? row % 8 : kRowWords == 4 ? row / 2 % 4 : row / 4 % 2));
  }
};
using Qkv = Product<FL_QKV>;
using Out = Product<FL_OUT>;
using Up = Product<FL_UP>;
using Down = Product<FL_DOWN>;

// What a block attends to at a time: query heads of one key head, and a part of the keys that are seen.
struct Job {
  int part, head, key_head, text, set;
  int at, seen, first, last; // where the new token goes; how many positions are seen; those of this part
};
constexpr int kSets = kHeads / kKeyHeads / kGroup, kJobs = kRows * kKeyHeads * kSets * kParts;
constexpr int kChunk = kHalf * kAtOnce; // positions of a slice: its first half keys, its second half values

__device__ __forceinline__ int2* seen_in(); // of each text, in shared memory: where the new token goes, and how many positions are seen

__device__ __forceinline__ int2 seen_of(const Places& places, int text) {
  const int step = shared_at<const int>(places, kStepAt)[kStepOfEach ? text : 0];
  const int* const lengths = shared_at<const int>(places, kLengths);
  int seen = kCausal ? step + 1 : kPast;
  if (lengths && step + lengths[text] < seen) seen = step + lengths[text];
  return {step < 0 ? 0 : step < kPast ? step : kPast - 1, seen < 0 ? 0 : seen < kPast ? seen : kPast};
}

__device__ __forceinline__ Job job_of(int number) {
  Job job;
  job.part = number % kParts;
  const int of = number / kParts;
  job.set = of % kSets, job.key_head = of / kSets % kKeyHeads, job.text = of / kSets / kKeyHeads;
  job.at = seen_in()[job.text].x, job.seen = seen_in()[job.text].y;
  job.head = job.key_head * (kHeads / kKeyHeads) + job.set * kGroup;
  const int each = (job.seen + kParts - 1) / kParts;
  job.first = job.part * each;
  job.last = job.first + each < job.seen ? job.first + each : job.seen;
  return job;
}

__device__ __forceinline__ Index cache_base(const Job& job) {
  return static_cast<Index>(job.text) * kTextStride + static_cast<Index>(job.key_head) * kHeadStride;
}

// How many slices of a job are the warp's.
__device__ __forceinline__ int slices_of(const Job& job, int warp) {
  const int keys = job.last - job.first - warp * kChunk;
  return keys <= 0 ? 0 : (keys + kWarps * kChunk - 1) / (kWarps * kChunk);
}

// Where a warp's stream stands. The first half of a slice's copies is of `low`, the second of `high`, each of them `apart` bytes on.
struct Stream {
  const unsigned char *low, *high;
  int apart, further; // bytes; from a slice to the next
  int index, index_apart, index_high, index_further, limit, except; // a copy is made where its index is below the limit and not `except`
  int columns;                                                      // bit t: copy t is within the matrix's columns
  int to, flip;                                                     // where in the slot; odd copies with these bits turned over
  int left;                                                         // slices of this unit; -1 behind the last of all
  int phase, unit;                                                  // of all layers' phases; a tile or a job
};

// A phase of which a stream is a part, as a table has it: one piece of code for all products stays in the instruction cache, and takes a third
// of the time that one for each of them took on an H200.
struct Pattern {
  int units;                                // tiles or jobs
  int which;                                // of `Own`: the first matrix
  int columns[3], tiles0, tiles1;           // as in Product, as is what follows
  int made, inner, slices, rounds, next_warp, next_slice;
  int shift, down; // a slice has 1 << shift words in a row; from a copy to the next there are so many rows
  bool turned, gated;
};
__device__ constexpr int log2_of(int n) { return n <= 1 ? 0 : 1 + log2_of(n / 2); }
template <class S, int kWhich>
constexpr Pattern kPatternOf = {S::kTiles,  kWhich,     {S::kColumns0, S::kColumns1, S::kColumns2}, S::kColumns1 ? S::kTiles0 : S::kTiles, S::kTiles1,
                                S::kMade,   S::kInner,  S::kSlices, S::kRounds, S::kNextWarp, S::kNextSlice, log2_of(S::kRowWords),
                                32 / S::kRowWords, S::kTurned, S::kGated};
FL_TABLE const Pattern kPatterns[kPhases] = {kPatternOf<Qkv, kQ>, {kJobs, kCacheK}, kPatternOf<Out, kOut>, kPatternOf<Up, kUp0>, kPatternOf<Down, kDown>};

__device__ __forceinline__ void open_product(Stream& s, const Places& places, int layer, const Pattern& p, int tile) {
  const int lane = threadIdx.x % 32, number = blockIdx.x % kPair * kWarps + threadIdx.x / 32 % kWarps; // of the pair's warps
  const int matrix = tile < p.tiles0 ? 0 : tile < p.tiles0 + p.tiles1 ? 1 : 2;
  const int column = (tile - (matrix > 0 ? p.tiles0 : 0) - (matrix > 1 ? p.tiles1 : 0)) * p.made, columns = p.columns[matrix];
  const int words = 1 << p.shift, row = lane >> p.shift, word = lane & (words - 1);
  const unsigned char* const w0 = own_at<const unsigned char>(places, layer, p.which + matrix);
  const unsigned char* const w1 = p.gated ? own_at<const unsigned char>(places, layer, p.which + 1) : w0;
  const int pitch = 2 * (p.turned ? p.inner : columns); // bytes of a row
  s.apart = p.down * pitch;
  if (p.turned) {
    s.index = number * p.next_warp + word * 8;
    s.index_apart = s.index_high = 0;
    const Index at = static_cast<Index>(column + row) * pitch + 2 * s.index;
    s.low = w0 + at, s.high = p.gated ? w1 + at : s.low + kHalf * s.apart;
    s.further = p.next_slice * 2;
    s.columns = 0;
#pragma unroll
    for (int t = 0; t < kCopies; ++t) s.columns |= (column + ((row + p.down * t) & (p.made - 1)) < columns) << t;
  } else {
    const bool second = p.gated && word * 8 >= p.made;
    const int own = column + word * 8 - (second ? p.made : 0);
    s.index = number * p.next_warp + row;
    s.index_apart = p.down, s.index_high = kHalf * p.down;
    s.low = (second ? w1 : w0) + static_cast<Index>(s.index) * pitch + 2 * own, s.high = s.low + kHalf * s.apart;
    s.further = p.next_slice * pitch;
    s.columns = own < columns ? -1 : 0;
  }
  s.index_further = p.next_slice, s.limit = p.inner, s.except = -1;
  s.to = (row << p.shift | (word ^ (row >> (3 - p.shift) & (words - 1)))) * 16, s.flip = p.shift == 3 ? 64 : 0; // as Product::word_at
  const int left = p.turned ? (p.slices - number + kPair * kWarps - 1) / (kPair * kWarps) : p.slices - number * p.rounds;
  s.left = left < 0 ? 0 : left < p.rounds ? left : p.rounds;
}

__device__ __forceinline__ void open_keys(Stream& s, const Places& places, int layer, int number) {
  const Job job = job_of(number);
  const int warp = threadIdx.x / 32 % kWarps, lane = threadIdx.x % 32, feature = lane % kLanes * 8;
  s.index = job.first + warp * kChunk + lane / kLanes;
  const Index at = cache_base(job) + static_cast<Index>(s.index) * kKeyStride + feature;
  s.low = reinterpret_cast<const unsigned char*>(own_at<const T>(places, layer, kCacheK) + at);
  s.high = reinterpret_cast<const unsigned char*>(own_at<const T>(places, layer, kCacheV) + at);
  s.apart = kAtOnce * static_cast<int>(kKeyStride) * 2, s.further = kWarps * kChunk * static_cast<int>(kKeyStride) * 2;
  s.index_apart = kAtOnce, s.index_high = 0, s.index_further = kWarps * kChunk, s.limit = job.last, s.except = job.at;
  s.columns = feature < kSize ? -1 : 0;
  s.to = lane * 16, s.flip = 0;
  s.left = slices_of(job, warp);
}

// Norms' parameters and biases of a phase to the L2 cache, long before they are read: by one block, as the rest is asked for there too.
template <class Value> __device__ __forceinline__ void prefetch(const Value* from, int count) {
  if (from && count * sizeof(Value) % 16 == 0 && reinterpret_cast<unsigned long long>(from) % 16 == 0)
    prefetch_to_l2(from, count * static_cast<int>(sizeof(Value)));
}
__device__ __forceinline__ void prefetch_small(const Places& places, int layer, int phase) {
  const auto bias = [&](int which, int count) { prefetch(own_at<const T>(places, layer, which), count); };
  const auto norm = [&](int which, int count) { prefetch(own_at<const P>(places, layer, which), count); };
  if (phase == 0) {
    norm(kScale1, Qkv::kInner), norm(kBias1, Qkv::kInner);
    bias(kQBias, Qkv::columns_of(0)), bias(kKBias, Qkv::columns_of(1)), bias(kVBias, Qkv::columns_of(2));
  }
  if (phase == 2) bias(kOutBias, Out::kPitch);
  if (phase == 3) norm(kScale2, Up::kInner), norm(kBias2, Up::kInner), bias(kUp0Bias, Up::kPitch), bias(kUp1Bias, Up::kPitch);
  if (phase == 4) bias(kDownBias, Down::kPitch);
}

// Goes on to the next unit of the block of which the warp has slices.
__device__ __forceinline__ void open(Stream& s, const Places& places) {
  int phase = s.phase % kPhases;
  do {
    s.unit += phase == 1 ? kBlocks : kPairs;
    while (s.unit >= kPatterns[phase].units) {
      if (++s.phase == kLayers * kPhases) {
        s.left = -1;
        return;
      }
      phase = s.phase % kPhases;
      s.unit = phase == 1 ? blockIdx.x : blockIdx.x / kPair;
    }
    const int layer = s.phase / kPhases;
    if (blockIdx.x == 0 && threadIdx.x == kThreads && s.unit == 0) prefetch_small(places, layer, phase);
    if (phase == 1)
      open_keys(s, places, layer, s.unit);
    else
      open_product(s, places, layer, kPatterns[phase], s.unit);
  } while (s.left == 0);
}

// A warp's ring, as the warp that fills it and the one that uses it have it. Each lane says for itself that it is done with a slot: one lane
// for all was no faster on an H200, and compute-sanitizer does not see that the others have met it first.
constexpr int kSpeakers = 32; // of a slot's gates
struct Ring {
  unsigned char* slots;
  Gate *full, *empty; // of each slot
  int slot;
  unsigned parity;
  __device__ __forceinline__ unsigned char* now() const { return slots + slot * kSlice; }
  __device__ __forceinline__ void next() {
    if (++slot == kDepth) slot = 0, parity ^= 1;
  }
  __device__ __forceinline__ void filled() { gate_waits(full + slot, parity); }
  __device__ __forceinline__ void used() {
    warp_meets();
    gate_arrives(empty + slot);
    next();
  }
};

__device__ __forceinline__ void ask(Stream& s, unsigned char* slot) {
#pragma unroll
  for (int t = 0; t < kCopies; ++t) {
    const int index = s.index + t % kHalf * s.index_apart + t / kHalf * s.index_high;
    const bool inside = (s.columns >> t & 1) && index < s.limit && index != s.except;
    copy_16_once(slot + ((s.to ^ (t % 2 ? s.flip : 0)) + t * 512), (t / kHalf ? s.high : s.low) + t % kHalf * s.apart, inside);
  }
  s.low += s.further, s.high += s.further, s.index += s.index_further;
  --s.left;
  copies_closed();
}

// The whole work of a warp that fills a ring: no more than kFlight slices are on their way, so that what others ask for meanwhile does not
// wait behind a long row of them. (To let the stream go on into the L2 cache when the ring is full was no faster.)
__device__ __forceinline__ void fill(Ring ring, const Places& places) {
  Stream s = {};
  s.unit = static_cast<int>(blockIdx.x) / kPair - kPairs;
  int done = 0, asked = 0; // `done`: the slot that is announced next
  const auto announce = [&] {
    warp_meets();
    gate_arrives(ring.full + done);
    done = done + 1 == kDepth ? 0 : done + 1;
  };
  do {
    if (s.left > 0) {
      gate_waits(ring.empty + ring.slot, ring.parity ^ 1); // it is so before the first round
      ask(s, ring.now());
      ring.next();
      ++asked;
    }
    if (s.left == 0) open(s, places); // while as much as may be is on its way
    if (asked == kFlight) {
      copies_left<kFlight - 1>();
      announce();
      --asked;
    }
  } while (s.left > 0);
  copies_left<0>();
  for (; asked > 0; --asked) announce();
}
