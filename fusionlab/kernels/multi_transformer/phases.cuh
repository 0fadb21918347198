// The phases of persistent.cu. `ring` is the warp's part of the stream of weights and caches, in the order in which it is used here.
#pragma once

// What of x is beyond the inner axis is 0.
template <class S> __device__ __forceinline__ void keep_nothing() {
  constexpr int kBeyond = S::kRowPitch - 8 - S::kInner;
  if (kBeyond)
    for (int i = threadIdx.x; i < kRows * kBeyond; i += kThreads) rows_in()[i % kRows * S::kRowPitch + S::kInner + i / kRows] = static_cast<T>(0.0f);
  block_meets();
}

// x of a phase to shared memory, as it is: of the inner axis what the block's slices are of: every other kWarps x `step` entries.
template <class S> __device__ __forceinline__ void keep_rows(const T* x) {
  T* const to = rows_in();
  constexpr int kStep = S::kStep, kWords = kWarps * kStep / 8, kRounds = (S::kInner + 2 * kWarps * kStep - 1) / (2 * kWarps * kStep);
  constexpr int kCount = kRows * kRounds * kWords;
#pragma unroll 2
  for (int i = threadIdx.x; i < kCount; i += kThreads) {
    const int row = i / (kRounds * kWords), entry = (i / kWords % kRounds * kPair + blockIdx.x % kPair) * kWarps * kStep + i % kWords * 8;
    if (entry < S::kInner) copy_16(to + row * S::kRowPitch + entry, x + row * S::kInner + entry, true);
  }
  copies_done();
  keep_nothing<S>();
}

// The same after its norm, if it has one; all of it.
template <class S> __device__ __forceinline__ void keep_normed(const T* x, const P* scale, const P* bias, float epsilon) {
  if (S::kNorm == kNoNorm) {
    keep_rows<S>(x);
    return;
  }
  T* const to = rows_in();
  norm_rows<S::kNorm, kRows, S::kInner>(x, scale, bias, epsilon, place_in(), [&](int row, int number, uint4 word) {
    *reinterpret_cast<uint4*>(to + row * S::kRowPitch + number * 8) = word;
  });
  keep_nothing<S>();
}

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

template <class S> __device__ __forceinline__ void keep_sums(float* to, const Sums<S>& sums) {
  const int lane = threadIdx.x % 32;
  float* const mine = to + threadIdx.x / 32 * kRows * (S::kTile + 4);
#pragma unroll
  for (int m = 0; m < S::kTile / 16; ++m)
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = 8 * j + lane % 4 * 2 + e % 2, column = 16 * m + lane / 4 + e / 2 * 8;
        if (row < kRows) mine[row * (S::kTile + 4) + column] = sums[m][j][e];
      }
}

template <class S> __device__ __forceinline__ float over_warps(const float* sums, int row, int column) {
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += sums[(w * kRows + row) * (S::kTile + 4) + column];
  return total;
}

// out = act(x matrix + bias) [+ residual] with x in shared memory, each step rounded to T as if it were done alone. Each block of a pair
// goes over its slices of the inner axis and finishes half of the tile's columns, with what the other one gives it.
template <class S, bool kActive>
__device__ __forceinline__ void project(Ring& ring, int& given, const T* bias0, const T* bias1, const T* bias2, const T* residual, T* out) {
  const int number = blockIdx.x % kPair * kWarps + threadIdx.x / 32;
  constexpr int kHalf = S::kMade / 2, kResults = kRows * kHalf, kEach = (kResults + kThreads - 1) / kThreads;
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
      if (is_mine(t) && residual) before[t] = fresh(residual + static_cast<Index>(row_of(t)) * S::kPitch + column_of(t));
    }
    Sums<S> sums = {};
#pragma unroll 1
    for (int i = number; i < S::kSlices; i += S::kShare) {
      ring.filled();
      multiply_slice<S>(sums, ring.now(), rows_in() + i * S::kStep);
      ring.used();
    }
    float* const all = sums_in(given % 2); // the other one may still be read
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
      if (!is_mine(t)) continue;
      float value = sum_of(t, 0) + static_cast<float>(added[t]);
      if (kActive) value = activation(value);
      if (S::kGated) {
        const bool alone = !bias && !bias1; // then the op is one step, rounded once
        const float other = sum_of(t, 1) + static_cast<float>(second[t]);
        value = alone ? value * other : once(value) * once(other);
      }
      if (residual) value = static_cast<float>(before[t]) + once(value);
      out[static_cast<Index>(row_of(t)) * S::kPitch + place.before + column_of(t)] = static_cast<T>(value);
    }
  }
}

// Of each head of each text and each part of its keys: the largest score and the sum of weights, then behind all of these the values, which
// are read four at a time.
constexpr int kPartCount = kRows * kHeads * kParts, kPartValuesAt = (2 * kPartCount + 3) / 4 * 4;
__device__ __forceinline__ int part_of(int text, int head, int part) { return (text * kHeads + head) * kParts + part; }

__device__ __forceinline__ void attend(Ring& ring, const Places& places, int layer) {
  Block& shared = *reinterpret_cast<Block*>(rows_in());
  const T* const qkv = shared_at<const T>(places, kQkvMade);
  const unsigned char* const masks = shared_at<const unsigned char>(places, kMask);
  float* const made = shared_at<float>(places, kPartsMade);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, feature = lane % kLanes * 8;
#pragma unroll 1
  for (int number = blockIdx.x; number < kJobs; number += kBlocks) {
    const Job job = job_of(places, number);
    const unsigned char* const mask = masks ? masks + (kMaskOfEach ? static_cast<Index>(job.text) * kPast : 0) : nullptr;
    const T* const mine = qkv + static_cast<Index>(job.text) * (kHeads + 2 * kKeyHeads) * kSize;
    const int angle = kTurnOfEach ? job.text * FL_ROTARY_WIDTH : 0;
    const float* const cosines = shared_at<const float>(places, kCos) + angle;
    const float* const sines = shared_at<const float>(places, kSin) + angle;
    for (int i = threadIdx.x; i < kGroup * kSize; i += kThreads) {
      const T* const row = mine + (job.head + i / kSize) * kQueryStride;
      shared.queries[i / kSize][i % kSize] = turned([&](int f) { return static_cast<float>(fresh(row + f)); }, i % kSize, cosines, sines);
    }
    if (job.part == 0) {
      const T* const row = mine + kKeysAt + job.key_head * kKeyRowStride;
      for (int i = threadIdx.x; i < 2 * kSize; i += kThreads) {
        const int f = i % kSize;
        const bool is_key = i < kSize;
        const T entry = is_key ? static_cast<T>(turned([&](int g) { return static_cast<float>(fresh(row + g)); }, f, cosines, sines))
                               : fresh(row + kValuesAt - kKeysAt + f);
        (is_key ? shared.key : shared.value)[f] = entry;
        if (job.set == 0)
          own_at<T>(places, layer, is_key ? kCacheK : kCacheV)[cache_base(job) + static_cast<Index>(job.at) * kKeyStride + f] = entry;
      }
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
    for (int i = threadIdx.x; i < kGroup * kSize; i += kThreads) {
      const int h = i / kSize, f = i % kSize, part = part_of(job.text, job.head + h, job.part);
      float largest = nothing(), total = 0.0f, value = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, shared.largest[w][h]);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float weight = weight_of(shared.largest[w][h], largest);
        total += weight * shared.total[w][h];
        value += weight * shared.values[w][h][f];
      }
      made[kPartValuesAt + part * kSize + f] = value;
      if (f == 0) made[2 * part] = largest, made[2 * part + 1] = total;
    }
    block_meets(); // the next job writes there
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

// What the attention's parts make together, to shared memory as x of the product behind it: as in keep_rows what the block needs.
__device__ __forceinline__ void keep_attended(const Places& places, int layer) {
  const float* const made = shared_at<const float>(places, kPartsMade);
  float* const weights = sums_in(0); // of a part of a head; nobody needs the sums now
  T* const to = rows_in();
  constexpr int kHeadsOfAll = kRows * kHeads;
  const auto share = [&](int head) { // of all texts' heads; gives the sum of weights
    float2 of[kParts];
#pragma unroll
    for (int p = 0; p < kParts; ++p) of[p] = __ldcg(reinterpret_cast<const float2*>(made) + head * kParts + p);
    float largest = nothing(), total = 0.0f;
#pragma unroll
    for (int p = 0; p < kParts; ++p) largest = fmaxf(largest, of[p].x);
#pragma unroll
    for (int p = 0; p < kParts; ++p) of[p].x = weight_of(of[p].x, largest), total += of[p].x * of[p].y;
    const bool any = total > 0.0f || total != total;
#pragma unroll
    for (int p = 0; p < kParts; ++p) weights[head * kParts + p] = any ? of[p].x / total : -1.0f;
  };
  const auto entries_of = [&](int i, int& text, int& entry) {
    constexpr int kStep = Out::kStep, kEach = kWarps * kStep / 4, kRounds = (Out::kInner + 2 * kWarps * kStep - 1) / (2 * kWarps * kStep);
    text = i / (kRounds * kEach), entry = (i / kEach % kRounds * kPair + blockIdx.x % kPair) * kWarps * kStep + i % kEach * 4;
    return text < kRows && entry < Out::kInner;
  };
  constexpr int kStep = Out::kStep;
  constexpr int kCount = kRows * ((Out::kInner + 2 * kWarps * kStep - 1) / (2 * kWarps * kStep)) * (kWarps * kStep / 4);
  constexpr int kAtATime = kCount > kThreads && kParts <= 4 ? 2 : 1;
#pragma unroll 1
  for (int start = threadIdx.x; start < (kCount + kThreads - 1) / kThreads * kThreads; start += kAtATime * kThreads) {
    float4 values[kAtATime][kParts];
    int text, entry;
#pragma unroll
    for (int u = 0; u < kAtATime; ++u)
      if (entries_of(start + u * kThreads, text, entry))
#pragma unroll
        for (int p = 0; p < kParts; ++p)
          values[u][p] = __ldcg(reinterpret_cast<const float4*>(made + kPartValuesAt + part_of(text, entry / kSize, p) * kSize + entry % kSize));
    if (start == static_cast<int>(threadIdx.x)) {
#pragma unroll 1
      for (int head = threadIdx.x; head < kHeadsOfAll; head += kThreads) share(head);
      block_meets();
    }
#pragma unroll
    for (int u = 0; u < kAtATime; ++u) {
      if (!entries_of(start + u * kThreads, text, entry)) continue;
      const float* const weight = weights + part_of(text, entry / kSize, 0);
      float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (weight[0] != -1.0f) {
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
          sum[0] += weight[p] * values[u][p].x, sum[1] += weight[p] * values[u][p].y;
          sum[2] += weight[p] * values[u][p].z, sum[3] += weight[p] * values[u][p].w;
        }
      } else if (kMaskIsFinite) {
#pragma unroll 1
        for (int j = 0; j < 4; ++j)
          sum[j] = mean_value(own_at<const T>(places, layer, kCacheV), text, entry / kSize / (kHeads / kKeyHeads), (entry + j) % kSize);
      }
      *reinterpret_cast<uint2*>(to + text * Out::kRowPitch + entry) = {rounded(sum[0], sum[1]), rounded(sum[2], sum[3])};
    }
  }
  keep_nothing<Out>();
}
