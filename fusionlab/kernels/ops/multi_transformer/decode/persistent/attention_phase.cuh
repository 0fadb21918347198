// The attention as a phase of persistent.cu, and what the product behind it reads of it.
#pragma once

// The mean of all values: what is left of a softmax whose scores are all the same finite number. `value`: of the new token, at `at`, which
// another block may still be writing there.
__device__ __forceinline__ float mean_value(const T* values, int text, int key_head, int f, int at, float value) {
  float sum = value;
  for (int i = 0; i < kPast; ++i)
    if (i != at)
      sum += static_cast<float>(fresh(values + static_cast<Index>(text) * kTextStride + static_cast<Index>(key_head) * kHeadStride +
                                      static_cast<Index>(i) * kKeyStride + f));
  return sum / kPast;
}

// Of each head of each text and each part of its keys: the largest score and the sum of weights, then behind all of these the values, which
// are read four at a time. Where there is one part: what was attended to, x of the product behind it, as it is.
constexpr int kPartCount = kRows * kHeads * kParts, kPartValuesAt = (2 * kPartCount + 3) / 4 * 4;
__device__ __forceinline__ int part_of(int text, int head, int part) { return (text * kHeads + head) * kParts + part; }

// Where the new token's value of a head begins in what the product made.
__device__ __forceinline__ Index value_entry(int text, int key_head) {
  return static_cast<Index>(text) * (kHeads + 2 * kKeyHeads) * kSize + kValuesAt + key_head * kKeyRowStride;
}

// What a job attends with, entry by entry: its queries after their turn and, of the first part, the new token's key and value.
struct Asked {
  static constexpr int kTurns = ((kGroup + 2) * kSize + kThreads - 1) / kThreads; // in which the threads take all entries
  const Places& places;
  Job job;
  int layer;

  __device__ __forceinline__ int count() const { return (kGroup + (job.part == 0 ? 2 : 0)) * kSize; }

  __device__ __forceinline__ float read(const Given& qkv, int i) const {
    const int h = i / kSize, f = i % kSize, angle = kTurnOfEach ? job.text * FL_ROTARY_WIDTH : 0;
    const Index mine = static_cast<Index>(job.text) * (kHeads + 2 * kKeyHeads) * kSize, keys = mine + kKeysAt + job.key_head * kKeyRowStride;
    const Index row = h < kGroup ? mine + (job.head + h) * kQueryStride : keys;
    const auto entry_at = [&](Index entry) { return static_cast<float>(take_entry(qkv, entry)); };
    if (h > kGroup) return entry_at(value_entry(job.text, job.key_head) + f);
    return turned([&](int g) { return entry_at(row + g); }, f, shared_at<const float>(places, kCos) + angle, shared_at<const float>(places, kSin) + angle);
  }

  // To where the block's warps find it, and what is of the new token to the caches.
  __device__ __forceinline__ void keep(Block& shared, int i, float entry) const {
    const int h = i / kSize, f = i % kSize;
    if (h < kGroup) {
      shared.queries[h][f] = entry;
      return;
    }
    const bool is_value = h > kGroup;
    const T kept = static_cast<T>(entry);
    (is_value ? shared.value : shared.key)[f] = kept;
    if (job.set == 0) own_at<T>(places, layer, is_value ? kCacheV : kCacheK)[cache_base(job) + static_cast<Index>(job.at) * kKeyStride + f] = kept;
  }
};

__device__ __forceinline__ void attend(Ring& ring, const Places& places, int layer, const Given& qkv, const Given& made) {
  Block& shared = *reinterpret_cast<Block*>(rows_in());
  const unsigned char* const masks = shared_at<const unsigned char>(places, kMask);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, feature = lane % kLanes * 8;
  // Of the next job they are on their way while the block attends, where that takes few registers.
  constexpr bool kAhead = kJobs > kBlocks && Asked::kTurns <= 4;
  constexpr int kHeld = kAhead ? Asked::kTurns : 1;
  float held[kHeld];
  const auto hold = [&](int number) {
    if (!kAhead || number >= kJobs) return;
    const Asked asked = {places, job_of(number), layer};
#pragma unroll
    for (int t = 0; t < kHeld; ++t)
      if (static_cast<int>(threadIdx.x) + t * kThreads < asked.count()) held[t] = asked.read(qkv, threadIdx.x + t * kThreads);
  };
  hold(blockIdx.x);
#pragma unroll 1
  for (int number = blockIdx.x; number < kJobs; number += kBlocks) {
    const Job job = job_of(number);
    const unsigned char* const mask = masks ? masks + (kMaskOfEach ? static_cast<Index>(job.text) * kPast : 0) : nullptr;
    const Asked asked = {places, job, layer};
    if constexpr (kAhead) {
#pragma unroll
      for (int t = 0; t < kHeld; ++t)
        if (static_cast<int>(threadIdx.x) + t * kThreads < asked.count()) asked.keep(shared, threadIdx.x + t * kThreads, held[t]);
    } else {
#pragma unroll 1
      for (int i = threadIdx.x; i < asked.count(); i += kThreads) asked.keep(shared, i, asked.read(qkv, i));
    }
    hold(number + kBlocks);
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
                      : kMaskIsFinite ? mean_value(own_at<const T>(places, layer, kCacheV), job.text, job.key_head, f + j, job.at,
                                                   static_cast<float>(shared.value[f + j]))
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
__device__ __forceinline__ Given keep_attended(const Places& places, int layer, const Given& qkv, const Given& made) {
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
        for (int j = 0; j < 4; ++j) {
          const int key_head = entry / kSize / (kHeads / kKeyHeads), f = (entry + j) % kSize;
          sum[j] = mean_value(own_at<const T>(places, layer, kCacheV), text, key_head, f, seen_in()[text].x,
                              static_cast<float>(take_entry(qkv, value_entry(text, key_head) + f)));
        }
      }
      *reinterpret_cast<uint2*>(to + text * Out::kRowPitch + kept) = {rounded(sum[0], sum[1]), rounded(sum[2], sum[3])};
    }
  }
  keep_nothing<Out>();
  return {nullptr, 0};
}
