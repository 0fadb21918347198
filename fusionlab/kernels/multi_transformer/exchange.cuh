// What blocks of persistent.cu make for each other between phases: entries of T, or floats.
//
// For one text (kFlagged) they go in words of 8 bytes, half of which says of which layer they are: who reads them waits for just these, and
// no block waits for all others. A word is written and read at once, so nothing else has to be ordered. (The protocol called LL in NCCL.)
// A word is written again a layer later, when all that read it are done: what a block writes of a layer it has made of all that was made of
// the layer before. For more texts the words would be too many; there blocks meet between phases, and entries lie one behind another.
#pragma once

constexpr bool kFlagged = kRows == 1;

// `flag`: of the layer, from 1 on; 0 where the entries are an array of T, all there already.
struct Given {
  void* at;
  unsigned flag;
};

// Two words of 8 bytes each, which the thread keeps asking for until they are of the layer.
struct Words {
  unsigned long long first, second;
  __device__ __forceinline__ bool are_of(unsigned flag) const {
    return static_cast<unsigned>(first >> 32) == flag && static_cast<unsigned>(second >> 32) == flag;
  }
};
__device__ __forceinline__ const unsigned long long* words_at(const Given& given, Index word) {
  return static_cast<const unsigned long long*>(given.at) + word;
}
__device__ __forceinline__ void await(Words& words, const unsigned long long* at, unsigned flag) {
  while (!words.are_of(flag)) {
    others_go_on();
    read_words(at, words.first, words.second);
  }
}

// Eight entries each from `entry_of(i)` on, a multiple of 8, as words of T; those for which `is_read(i)`. All are asked for before the first
// is waited for.
template <int kCount, class EntryOf, class IsRead>
__device__ __forceinline__ void take_entries(uint4 (&to)[kCount], const Given& given, const EntryOf& entry_of, const IsRead& is_read) {
  if (!kFlagged || given.flag == 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (is_read(i)) to[i] = __ldcg(reinterpret_cast<const uint4*>(static_cast<const T*>(given.at) + entry_of(i)));
    return;
  }
  Words words[kCount][2];
#pragma unroll
  for (int i = 0; i < kCount; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (is_read(i)) read_words(words_at(given, entry_of(i) / 2 + 2 * half), words[i][half].first, words[i][half].second);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (!is_read(i)) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) await(words[i][half], words_at(given, entry_of(i) / 2 + 2 * half), given.flag);
    to[i] = {static_cast<unsigned>(words[i][0].first), static_cast<unsigned>(words[i][0].second), static_cast<unsigned>(words[i][1].first),
             static_cast<unsigned>(words[i][1].second)};
  }
}

__device__ __forceinline__ T take_entry(const Given& given, Index entry) {
  if (!kFlagged || given.flag == 0) return fresh(static_cast<const T*>(given.at) + entry);
  unsigned long long word;
  while (read_word(words_at(given, entry / 2), word), static_cast<unsigned>(word >> 32) != given.flag) others_go_on();
  const unsigned short bits = static_cast<unsigned short>(static_cast<unsigned>(word) >> entry % 2 * 16);
  return reinterpret_cast<const T&>(bits);
}

// Two floats, the first of an even number.
__device__ __forceinline__ float2 take_floats(const Given& given, Index number) {
  if (!kFlagged) return __ldcg(reinterpret_cast<const float2*>(static_cast<const float*>(given.at) + number));
  Words words;
  read_words(words_at(given, number), words.first, words.second);
  await(words, words_at(given, number), given.flag);
  return {__uint_as_float(static_cast<unsigned>(words.first)), __uint_as_float(static_cast<unsigned>(words.second))};
}

// Four, the first of a multiple of four.
__device__ __forceinline__ float4 take_four(const Given& given, Index number) {
  if (!kFlagged) return __ldcg(reinterpret_cast<const float4*>(static_cast<const float*>(given.at) + number));
  const float2 left = take_floats(given, number), right = take_floats(given, number + 2);
  return {left.x, left.y, right.x, right.y};
}

__device__ __forceinline__ unsigned long long flagged(unsigned content, unsigned flag) {
  return static_cast<unsigned long long>(flag) << 32 | content;
}

// Two entries, the first of an even number.
__device__ __forceinline__ void give_entries(const Given& given, Index entry, float first, float second) {
  const unsigned two = rounded(first, second);
  if (!kFlagged || given.flag == 0)
    *reinterpret_cast<unsigned*>(static_cast<T*>(given.at) + entry) = two;
  else
    write_word(static_cast<unsigned long long*>(given.at) + entry / 2, flagged(two, given.flag));
}

// Two floats, the first of an even number.
__device__ __forceinline__ void give_floats(const Given& given, Index number, float first, float second) {
  if (!kFlagged) {
    *reinterpret_cast<float2*>(static_cast<float*>(given.at) + number) = {first, second};
    return;
  }
  write_words(static_cast<unsigned long long*>(given.at) + number, flagged(__float_as_uint(first), given.flag),
              flagged(__float_as_uint(second), given.flag));
}
