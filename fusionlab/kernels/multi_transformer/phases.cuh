// The phases of persistent.cu. `ring` is the warp's part of the stream of weights and caches, in the order in which it is used here.
#pragma once

// What of x is beyond the inner axis is 0.
template <class S> __device__ __forceinline__ void keep_nothing() {
  constexpr int kWords = S::kHeld * S::kRound / 8;
  if (S::kRounds * S::kShare * S::kStep != S::kInner)
    for (int i = threadIdx.x; i < kRows * kWords; i += kThreads)
      if (S::entry_of(i % kWords * 8) >= S::kInner) *reinterpret_cast<uint4*>(rows_in() + i / kWords * S::kRowPitch + i % kWords * 8) = {0, 0, 0, 0};
}

// What the block's slices need of x, as it is, on its way to shared memory: one part of it, whose rounds begin at `round`, to the part's buffer.
template <class S> __device__ __forceinline__ void ask_rows(const Given& x, int buffer, int round) {
  constexpr int kWords = S::kHeld * S::kRound / 8;
  T* const to = rows_in() + buffer * kRows * S::kRowPitch;
  if (kFlagged && x.flag) {
    constexpr int kCount = kWords >= 2 * kThreads ? 2 : 1;
    const auto kept_at = [&](int start, int i) { return (start + i * kThreads) * 8; };
#pragma unroll 1
    for (int start = threadIdx.x; start < kWords; start += kCount * kThreads) {
      uint4 words[kCount];
      const auto entry = [&](int i) { return S::entry_of(round * S::kRound + kept_at(start, i)); };
      const auto is_there = [&](int i) { return start + i * kThreads < kWords && entry(i) < S::kInner; };
      take_entries(words, x, entry, is_there);
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (start + i * kThreads < kWords) *reinterpret_cast<uint4*>(to + kept_at(start, i)) = is_there(i) ? words[i] : uint4{0, 0, 0, 0};
    }
    return;
  }
  const T* const from = static_cast<const T*>(x.at);
#pragma unroll 2
  for (int i = threadIdx.x; i < kRows * kWords; i += kThreads) {
    const int row = i / kWords, entry = S::entry_of(round * S::kRound + i % kWords * 8);
    copy_16(to + row * S::kRowPitch + i % kWords * 8, from + static_cast<Index>(row) * S::kInner + (entry < S::kInner ? entry : 0), entry < S::kInner);
  }
}

// The norm ahead of a product. `pieces`: statistics of x, as `Made`, of the product that made it, has them, for more than one text.
template <class Made_> struct Norm {
  using Made = Made_;
  const float2* pieces;
  const P *scale, *bias;
  float epsilon;
};
constexpr Norm<void> kWithout = {nullptr, nullptr, nullptr, 0.0f};
template <class S> constexpr bool kNormsSlices = kRows > 1 && S::kNorm != kNoNorm; // rather than all of x ahead of the product

// One text: x of a phase to shared memory after its norm. Gives what is left to be read as it is: x, if it has no norm.
template <class S, class Normed> __device__ __forceinline__ Given keep_normed(const Given& x, const Normed& norm) {
  if (kRows > 1 || S::kNorm == kNoNorm) return x;
  T* const to = rows_in();
  using Team = Teams<kRows, S::kInner>;
  const auto take = [&](uint4(&held)[Team::kHeld], int row) {
    const int mine = threadIdx.x % Team::kThreadsOfOne;
    const auto number = [&](int i) { return mine + i * Team::kThreadsOfOne; };
    take_entries(held, x, [&](int i) { return static_cast<Index>(row) * S::kInner + number(i) * 8; }, [&](int i) { return number(i) < Team::kWords; });
  };
  norm_rows<S::kNorm, kRows, S::kInner>(take, norm.scale, norm.bias, norm.epsilon, place_in(), [&](int row, int number, uint4 word) {
    if (S::is_kept(number * 8)) *reinterpret_cast<uint4*>(to + row * S::kRowPitch + S::kept_at(number * 8)) = word;
  });
  keep_nothing<S>();
  return {nullptr, 0};
}

// More texts: the norm's parameters of what the block keeps of x to shared memory. They may be asked for before x is there.
template <class S, class Normed> __device__ __forceinline__ void ask_parameters(const Normed& norm) {
  if (!kNormsSlices<S>) return;
  constexpr int kEach = 16 / sizeof(P); // of a copy
#pragma unroll 1
  for (int i = threadIdx.x * kEach; i < S::kHeld * S::kRound; i += kThreads * kEach) {
    const int entry = S::entry_of(i), place = entry < S::kInner ? entry : 0;
    if (norm.scale) copy_16(scales_in() + i, norm.scale + place, entry < S::kInner);
    if (norm.bias) copy_16(biases_in() + i, norm.bias + place, entry < S::kInner);
  }
}

// x of a slice, of a warp that keeps it to itself, to what it is after its norm, where it lies: `rows` is where it begins in the first row.
template <class S> struct SliceNorm {
  static constexpr int kWords = S::kStep / 8, kAtOnce = 32 / kWords, kTimes = (kRows + kAtOnce - 1) / kAtOnce;
  static_assert(32 % kWords == 0);
  const bool scales, biases; // whether there are any
  float2 found[kTimes];      // of the lane's rows

  template <class Normed> explicit __device__ __forceinline__ SliceNorm(const Normed& norm) : scales(norm.scale), biases(norm.bias) {
#pragma unroll
    for (int t = 0; t < kTimes; ++t) found[t] = statistics_in()[row_of(t) < kRows ? row_of(t) : 0];
  }
  static __device__ __forceinline__ int row_of(int t) { return static_cast<int>(threadIdx.x) % 32 / kWords + t * kAtOnce; }

  __device__ __forceinline__ void operator()(T* rows) const {
    const int kept = static_cast<int>(rows - rows_in()) + threadIdx.x % kWords * 8;
    if (S::kRounds * S::kShare * S::kStep == S::kInner || S::entry_of(kept) < S::kInner) {
      const Parameters scale = parameters_at(scales ? scales_in() : nullptr, kept / 8, 1.0f);
      const Parameters bias = parameters_at(biases ? biases_in() : nullptr, kept / 8, 0.0f);
#pragma unroll
      for (int t = 0; t < kTimes; ++t) {
        if (row_of(t) >= kRows) break;
        uint4* const word = reinterpret_cast<uint4*>(rows_in() + row_of(t) * S::kRowPitch + kept);
        *word = normed_word(*word, found[t].x, found[t].y, scale, bias);
      }
    }
    warp_meets();
  }
};

template <class S> using Sums = float[S::kTile / 16][kRowTiles][4];

// `rows` is where the slice's part of x begins.
template <class S> __device__ __forceinline__ void multiply_slice(Sums<S>& sums, const unsigned char* slice, const T* rows) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < S::kStep; k += 16) {
    unsigned right[kRowTiles][2];
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      const int row = lane / 4 + 8 * j;
      const T* const from = rows + (row < kRows ? row : 0) * S::kRowPitch + k + lane % 4 * 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) right[j][half] = row < kRows ? *reinterpret_cast<const unsigned*>(from + 8 * half) : 0;
    }
#pragma unroll
    for (int m = 0; m < S::kTile / 16; ++m) {
      unsigned left[4];
      if (S::kTurned)
        load_matrices(left, slice + S::word_at(16 * m + lane % 16, k / 8 + lane / 16) * 16);
      else
        load_transposed(left, slice + S::word_at(k + lane % 8 + lane / 16 * 8, 2 * m + lane / 8 % 2) * 16);
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) multiply(sums[m][j], left, right[j]);
    }
  }
}

struct Unchanged {
  __device__ __forceinline__ void operator()(T*) const {}
};

// A warp's slices from `number` on, with x of each as `prepare` leaves it.
template <class S, class Prepare>
__device__ __forceinline__ void multiply_slices(Ring& ring, Sums<S>& sums, T* rows, int number, int end, const Prepare& prepare) {
#pragma unroll 1
  for (; number < end; number += S::kShare, rows += S::kRound) {
    prepare(rows);
    ring.filled();
    multiply_slice<S>(sums, ring.now(), rows);
    ring.used();
  }
}

// The sums of all warps to shared memory.
template <class S> __device__ __forceinline__ void keep_sums_of_warp(float* to, const Sums<S>& sums, bool more) {
  const int lane = threadIdx.x % 32;
  float* const mine = to + threadIdx.x / 32 % kKeepers * kRows * (S::kTile + 4);
#pragma unroll
  for (int m = 0; m < S::kTile / 16; ++m)
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = 8 * j + lane % 4 * 2 + e % 2, column = 16 * m + lane / 4 + e / 2 * 8;
        float* const at = mine + row * (S::kTile + 4) + column;
        if (row < kRows) *at = more ? sums[m][j][e] + *at : sums[m][j][e];
      }
}
template <class S> __device__ __forceinline__ void keep_sums(float* to, const Sums<S>& sums) {
  const bool first = static_cast<int>(threadIdx.x) / 32 >= kWarps - kKeepers;
  if (first) keep_sums_of_warp<S>(to, sums, false);
  if (kKeepers == kWarps) return;
  block_meets();
  if (!first) keep_sums_of_warp<S>(to, sums, true);
}

template <class S> __device__ __forceinline__ float over_warps(const float* sums, int row, int column) {
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kKeepers; ++w) total += sums[(w * kRows + row) * (S::kTile + 4) + column];
  return total;
}

// out = act(x matrix + bias) [+ residual] with x in shared memory, each step rounded to T as if it were done alone. Each block of a pair
// goes over its slices of the inner axis and finishes half of the tile's columns, with what the other one gives it. `x`: null where the block
// keeps all of it already; else it is read here, each part while the one before is used. `pieces`: for the statistics of what is made, if a
// norm (kNext) is behind it.
template <class S, bool kActive, int kNext, class Normed>
__device__ __forceinline__ void project(Ring& ring, int& given, const Given& x, const Normed& norm, const T* bias0, const T* bias1, const T* bias2,
                                        const Given& residual, const Given& out, float2* pieces) {
  constexpr bool kNorms = kNormsSlices<S>;
  static_assert(S::kWhole || !kNorms);
  const int number = blockIdx.x % kPair * kWarps + threadIdx.x / 32;
  constexpr int kHalf = S::kMade / 2, kResults = kRows * kHalf, kEach = (kResults + kThreads - 1) / kThreads;
  if constexpr (kNorms) {
    const typename Normed::Made::Row own(norm.pieces); // ahead of x, which is more
    ask_rows<S>(x, 0, 0);
    own.put_together(statistics_in(), norm.epsilon);
  } else if (x.at) {
    ask_rows<S>(x, 0, 0);
  }
  int buffer = 0; // of the part in use
#pragma unroll 1
  for (int tile = blockIdx.x / kPair; tile < S::kTiles; tile += kPairs, ++given) {
    const auto place = S::place(tile);
    const T* const bias = place.matrix == 0 ? bias0 : place.matrix == 1 ? bias1 : bias2;
    const int first = (threadIdx.x + 32 * given) % kThreads; // the warps take turns at what is to do at the end
    T added[kEach], second[kEach], before[kEach];
    const auto row_of = [&](int t) { return (first + t * kThreads) / kHalf; };
    const auto in_tile = [&](int t, int rank) { return rank * kHalf + (first + t * kThreads) % kHalf; };
    const auto column_of = [&](int t) { return place.column + in_tile(t, blockIdx.x % kPair); };
    const auto is_mine = [&](int t) { return first + t * kThreads < kResults && column_of(t) < place.columns; };
#pragma unroll
    for (int t = 0; t < kEach; ++t) {
      added[t] = second[t] = before[t] = static_cast<T>(0.0f);
      if (is_mine(t) && bias) added[t] = fresh(bias + column_of(t));
      if (S::kGated && is_mine(t) && bias1) second[t] = fresh(bias1 + column_of(t));
      if (is_mine(t) && residual.at) before[t] = take_entry(residual, static_cast<Index>(row_of(t)) * S::kPitch + column_of(t));
    }
    Sums<S> sums = {};
#pragma unroll 1
    for (int part = 0; part < S::kParts; ++part) {
      if (!S::kWhole || tile == static_cast<int>(blockIdx.x) / kPair) {
        copies_done();
        block_meets(); // x is there, and nobody reads the part before
        const bool last = part + 1 == S::kParts;
        if (!S::kWhole && (!last || tile + kPairs < S::kTiles)) ask_rows<S>(x, 1 - buffer, last ? 0 : (part + 1) * S::kHeld);
      }
      T* rows = rows_in() + buffer * kRows * S::kRowPitch + threadIdx.x / 32 * S::kStep;
      const int end = part + 1 == S::kParts ? S::kSlices : (part + 1) * S::kHeld * S::kShare;
      const int begin = part * S::kHeld * S::kShare + number;
      if constexpr (kNorms) {
        if (tile == static_cast<int>(blockIdx.x) / kPair) {
          multiply_slices<S>(ring, sums, rows, begin, end, SliceNorm<S>(norm));
          continue;
        }
      }
      multiply_slices<S>(ring, sums, rows, begin, end, Unchanged());
      if (!S::kWhole) buffer = 1 - buffer;
    }
    if (kSumsBuffers == 1) block_meets(); // nobody reads the sums of the tile before
    float* const all = sums_in(given % 2); // the other one, if there is one, may still be read
    float* const taken = taken_in(given % 2);
    keep_sums<S>(all, sums);
    Gate* const gate = taken_gates() + given % 2;
    if (threadIdx.x == 0) gate_expects(gate, kResults * (S::kGated ? 2 : 1) * sizeof(float));
    block_meets();
#pragma unroll
    for (int t = 0; t < kEach; ++t) {
      if (first + t * kThreads >= kResults) continue;
      const int its = in_tile(t, 1 - blockIdx.x % kPair);
      give_partner(taken + first + t * kThreads, over_warps<S>(all, row_of(t), its), gate);
      if (S::kGated) give_partner(taken + kResults + first + t * kThreads, over_warps<S>(all, row_of(t), S::kMade + its), gate);
    }
    const auto sum_of = [&](int t, int which) {
      const float own = over_warps<S>(all, row_of(t), which * S::kMade + in_tile(t, blockIdx.x % kPair));
      const float other = taken[which * kResults + first + t * kThreads];
      return blockIdx.x % kPair == 0 ? own + other : other + own;
    };
    gate_waits_for_partner(gate, given / 2 % 2);
#pragma unroll
    for (int t = 0; t < kEach; ++t) {
      float value = 0.0f;
      if (is_mine(t)) {
        value = sum_of(t, 0) + static_cast<float>(added[t]);
        if (kActive) value = activation(value);
        if (S::kGated) {
          const bool alone = !bias && !bias1; // then the op is one step, rounded once
          const float other = sum_of(t, 1) + static_cast<float>(second[t]);
          value = alone ? value * other : once(value) * once(other);
        }
        if (residual.at) value = static_cast<float>(before[t]) + once(value);
      }
      const float next = from_lane(value, 1); // of the column beside
      if (is_mine(t) && threadIdx.x % 2 == 0)
        give_entries(out, static_cast<Index>(row_of(t)) * S::kPitch + place.before + column_of(t), value, next);
      if (kRows > 1 && kNext != kNoNorm) {
        using Made = Pieces<S, kNext>;
        const int piece = tile * kPair + blockIdx.x % kPair;
        const float2 found = statistics_of_piece<kNext, kHalf>(once(value), is_mine(t), Made::size_of(piece));
        if (first + t * kThreads < kResults && (first + t * kThreads) % kHalf == 0) pieces[row_of(t) * Made::kCount + piece] = found;
      }
    }
  }
}

// The mean of all values: what is left of a softmax whose scores are all the same finite number.
__device__ __forceinline__ float mean_value(const T* values, int text, int key_head, int f) {
  float sum = 0.0f;
  for (int i = 0; i < kPast; ++i)
    sum += static_cast<float>(fresh(values + static_cast<Index>(text) * kTextStride + static_cast<Index>(key_head) * kHeadStride +
                                    static_cast<Index>(i) * kKeyStride + f));
  return sum / kPast;
}

// Of each head of each text and each part of its keys: the largest score and the sum of weights, then behind all of these the values, which
// are read four at a time. Where there is one part: what was attended to, x of the product behind it, as it is.
constexpr int kPartCount = kRows * kHeads * kParts, kPartValuesAt = (2 * kPartCount + 3) / 4 * 4;
__device__ __forceinline__ int part_of(int text, int head, int part) { return (text * kHeads + head) * kParts + part; }

__device__ __forceinline__ void attend(Ring& ring, const Places& places, int layer, const Given& qkv, const Given& made) {
  Block& shared = *reinterpret_cast<Block*>(rows_in());
  const unsigned char* const masks = shared_at<const unsigned char>(places, kMask);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, feature = lane % kLanes * 8;
#pragma unroll 1
  for (int number = blockIdx.x; number < kJobs; number += kBlocks) {
    const Job job = job_of(number);
    const unsigned char* const mask = masks ? masks + (kMaskOfEach ? static_cast<Index>(job.text) * kPast : 0) : nullptr;
    const Index mine = static_cast<Index>(job.text) * (kHeads + 2 * kKeyHeads) * kSize;
    const auto entry_at = [&](Index entry) { return static_cast<float>(take_entry(qkv, entry)); };
    const int angle = kTurnOfEach ? job.text * FL_ROTARY_WIDTH : 0;
    const float* const cosines = shared_at<const float>(places, kCos) + angle;
    const float* const sines = shared_at<const float>(places, kSin) + angle;
    const Index keys = mine + kKeysAt + job.key_head * kKeyRowStride;
#pragma unroll 1
    for (int i = threadIdx.x; i < (kGroup + (job.part == 0 ? 2 : 0)) * kSize; i += kThreads) { // queries, the new key, the new value
      const int h = i / kSize, f = i % kSize;
      const bool is_value = h == kGroup + 1;
      const Index row = h < kGroup ? mine + (job.head + h) * kQueryStride : keys;
      const float entry = is_value ? entry_at(keys + kValuesAt - kKeysAt + f) : turned([&](int g) { return entry_at(row + g); }, f, cosines, sines);
      if (h < kGroup) {
        shared.queries[h][f] = entry;
        continue;
      }
      const T kept = static_cast<T>(entry);
      (is_value ? shared.value : shared.key)[f] = kept;
      if (job.set == 0) own_at<T>(places, layer, is_value ? kCacheV : kCacheK)[cache_base(job) + static_cast<Index>(job.at) * kKeyStride + f] = kept;
    }
    block_meets();
    float query[kGroup][8];
    Running running[kGroup];
#pragma unroll
    for (int h = 0; h < kGroup; ++h) {
#pragma unroll
      for (int i = 0; i < 8; ++i) query[h][i] = feature < kSize ? shared.queries[h][feature + i] : 0.0f;
      running[h] = {nothing(), 0.0f, {}};
    }
    if (job.part == 0 && warp == 0) {
      const bool one = lane < kLanes && job.at < job.seen && (!mask || mask[job.at]);
      uint4 key = {0, 0, 0, 0}, value = {0, 0, 0, 0};
      if (feature < kSize) {
        key = *reinterpret_cast<const uint4*>(shared.key + feature);
        value = *reinterpret_cast<const uint4*>(shared.value + feature);
      }
#pragma unroll
      for (int h = 0; h < kGroup; ++h) take<1>(running[h], query[h], &key, &value, &one);
    }
    int position = job.first + warp * kChunk + lane / kLanes;
#pragma unroll 1
    for (int left = slices_of(job, warp); left > 0; --left, position += kWarps * kChunk) {
      bool seen[kHalf];
#pragma unroll
      for (int u = 0; u < kHalf; ++u) {
        const int at = position + u * kAtOnce;
        seen[u] = at < job.last && at != job.at && (!mask || mask[at]);
      }
      ring.filled();
      const uint4* const words = reinterpret_cast<const uint4*>(ring.now()) + lane; // those that this lane asked for
      uint4 keys[kHalf], values[kHalf];
#pragma unroll
      for (int u = 0; u < kHalf; ++u) keys[u] = words[32 * u], values[u] = words[32 * (kHalf + u)];
#pragma unroll
      for (int h = 0; h < kGroup; ++h) take<kHalf>(running[h], query[h], keys, values, seen);
      ring.used();
    }
#pragma unroll
    for (int h = 0; h < kGroup; ++h) {
      const float total = between_keys(running[h].total, false);
      if (lane == 0) shared.largest[warp][h] = running[h].largest, shared.total[warp][h] = total;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float value = between_keys(running[h].values[i], false);
        if (lane < kLanes && feature < kSize) shared.values[warp][h][feature + i] = value;
      }
    }
    block_meets();
    for (int i = 2 * threadIdx.x; i < kGroup * kSize; i += 2 * kThreads) {
      const int h = i / kSize, f = i % kSize, part = part_of(job.text, job.head + h, job.part);
      float largest = nothing(), total = 0.0f, values[2] = {0.0f, 0.0f};
#pragma unroll
      for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, shared.largest[w][h]);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float weight = weight_of(shared.largest[w][h], largest);
        total += weight * shared.total[w][h];
        values[0] += weight * shared.values[w][h][f], values[1] += weight * shared.values[w][h][f + 1];
      }
      if (kParts == 1) {
        const bool any = total > 0.0f || total != total;
#pragma unroll 1
        for (int j = 0; j < 2; ++j)
          values[j] = any             ? values[j] / total
                      : kMaskIsFinite ? mean_value(own_at<const T>(places, layer, kCacheV), job.text, job.key_head, f + j)
                                      : 0.0f;
        give_entries(made, static_cast<Index>(job.text) * Out::kInner + (job.head + h) * kSize + f, values[0], values[1]);
      } else {
        give_floats(made, kPartValuesAt + part * kSize + f, values[0], values[1]);
        if (f == 0) give_floats(made, 2 * part, largest, total);
      }
    }
    block_meets(); // the next job writes there
  }
}

// What the attention's parts make together, to shared memory as x of the product behind it: what the block needs of it.
// Gives what is left to be read as it is, as keep_normed does.
__device__ __forceinline__ Given keep_attended(const Places& places, int layer, const Given& made) {
  if (kParts == 1) return made;
  if (kFlagged) block_meets(); // nobody reads the sums that lie where the weights go
  float* const weights = sums_in(0); // of a part of a head; nobody needs the sums now
  T* const to = rows_in();
  constexpr int kHeadsOfAll = kRows * kHeads;
  const auto share = [&](int head) { // of all texts' heads; gives the sum of weights
    float2 of[kParts];
    take_floats(of, made, [&](int p) { return 2 * (head * kParts + p); });
    float largest = nothing(), total = 0.0f;
#pragma unroll
    for (int p = 0; p < kParts; ++p) largest = fmaxf(largest, of[p].x);
#pragma unroll
    for (int p = 0; p < kParts; ++p) of[p].x = weight_of(of[p].x, largest), total += of[p].x * of[p].y;
    const bool any = total > 0.0f || total != total;
#pragma unroll
    for (int p = 0; p < kParts; ++p) weights[head * kParts + p] = any ? of[p].x / total : -1.0f;
  };
  constexpr int kEach = Out::kHeld * Out::kRound / 4, kCount = kRows * kEach; // of four entries
  const auto entries_of = [&](int i, int& text, int& kept, int& entry) {
    text = i / kEach, kept = i % kEach * 4, entry = Out::entry_of(kept);
    return text < kRows && entry < Out::kInner;
  };
  constexpr int kAtATime = kCount > kThreads && kParts <= 4 && !kFlagged ? 2 : 1;
  static_assert(kParts == 1 || Out::kWhole);
#pragma unroll 1
  for (int start = threadIdx.x; start < (kCount + kThreads - 1) / kThreads * kThreads; start += kAtATime * kThreads) {
    float2 values[kAtATime][2 * kParts];
    int text, kept, entry;
#pragma unroll
    for (int u = 0; u < kAtATime; ++u)
      if (entries_of(start + u * kThreads, text, kept, entry))
        take_floats(values[u], made, [&](int i) { return kPartValuesAt + part_of(text, entry / kSize, i / 2) * kSize + entry % kSize + 2 * (i % 2); });
    if (start == static_cast<int>(threadIdx.x)) {
#pragma unroll 1
      for (int head = threadIdx.x; head < kHeadsOfAll; head += kThreads) share(head);
      block_meets();
    }
#pragma unroll
    for (int u = 0; u < kAtATime; ++u) {
      if (!entries_of(start + u * kThreads, text, kept, entry)) continue;
      const float* const weight = weights + part_of(text, entry / kSize, 0);
      float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (weight[0] != -1.0f) {
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
          const float2 left = values[u][2 * p], right = values[u][2 * p + 1];
          sum[0] += weight[p] * left.x, sum[1] += weight[p] * left.y, sum[2] += weight[p] * right.x, sum[3] += weight[p] * right.y;
        }
      } else if (kMaskIsFinite) {
#pragma unroll 1
        for (int j = 0; j < 4; ++j)
          sum[j] = mean_value(own_at<const T>(places, layer, kCacheV), text, entry / kSize / (kHeads / kKeyHeads), (entry + j) % kSize);
      }
      *reinterpret_cast<uint2*>(to + text * Out::kRowPitch + kept) = {rounded(sum[0], sum[1]), rounded(sum[2], sum[3])};
    }
  }
  keep_nothing<Out>();
  return {nullptr, 0};
}
