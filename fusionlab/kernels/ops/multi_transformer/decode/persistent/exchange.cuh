// What blocks of persistent.cu make for each other between phases: entries of T, or floats.
//
// For one text (kFlagged) they go in words of 8 bytes, half of which says of which layer they are: who reads them waits for just these, and
// no block waits for all others. A word is written and read at once, so nothing else has to be ordered. (The protocol called LL in NCCL.)
// A word is written again a layer later, when all that read it are done: what a block writes of a layer it has made of all that was made of
// the layer before. For more texts the words would be too many; there blocks meet between phases, and entries lie one behind another. (That
// a block says what it has done, and warps wait for what they read alone, was slower on an H200.)
#pragma once

constexpr bool kFlagged = kRows == 1;

// `flag`: of the layer, from 1 on; 0 where the entries are an array of T, all there already.
struct Given {
  void* at;
  unsigned flag;
};

__device__ __forceinline__ const unsigned long long* words_at(const Given& given, Index word) {
  return static_cast<const unsigned long long*>(given.at) + word;
}

struct Words { // two, side by side
  unsigned long long first, second;
};

// Pairs of words from `word_of(i)` on, an even number; those for which `is_read(i)`. All that the thread needs are asked for at a time, again
// and again until they are of the layer: one after the other would be a way to memory for each.
template <int kCount, class WordOf, class IsRead>
__device__ __forceinline__ void take_words(Words (&to)[kCount], const Given& given, const WordOf& word_of, const IsRead& is_read) {
  while (true) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (is_read(i)) read_words(words_at(given, word_of(i)), to[i].first, to[i].second);
    bool there = true;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (is_read(i)) there &= static_cast<unsigned>(to[i].first >> 32) == given.flag && static_cast<unsigned>(to[i].second >> 32) == given.flag;
    if (there) return;
    others_go_on();
  }
}

// Eight entries each from `entry_of(i)` on, a multiple of 8, as words of T; those for which `is_read(i)`.
template <int kCount, class EntryOf, class IsRead>
__device__ __forceinline__ void take_entries(uint4 (&to)[kCount], const Given& given, const EntryOf& entry_of, const IsRead& is_read) {
  if (!kFlagged || given.flag == 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (is_read(i)) to[i] = __ldcg(reinterpret_cast<const uint4*>(static_cast<const T*>(given.at) + entry_of(i)));
    return;
  }
  Words words[2 * kCount];
  take_words(words, given, [&](int i) { return entry_of(i / 2) / 2 + 2 * (i % 2); }, [&](int i) { return is_read(i / 2); });
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const Words &left = words[2 * i], &right = words[2 * i + 1];
    to[i] = {static_cast<unsigned>(left.first), static_cast<unsigned>(left.second), static_cast<unsigned>(right.first),
             static_cast<unsigned>(right.second)};
  }
}

__device__ __forceinline__ T take_entry(const Given& given, Index entry) {
  if (!kFlagged || given.flag == 0) return fresh(static_cast<const T*>(given.at) + entry);
  unsigned long long word;
  while (read_word(words_at(given, entry / 2), word), static_cast<unsigned>(word >> 32) != given.flag) others_go_on();
  const unsigned short bits = static_cast<unsigned short>(static_cast<unsigned>(word) >> entry % 2 * 16);
  return reinterpret_cast<const T&>(bits);
}

// Two floats each, from `number_of(i)` on, an even number.
template <int kCount, class NumberOf>
__device__ __forceinline__ void take_floats(float2 (&to)[kCount], const Given& given, const NumberOf& number_of) {
  if (!kFlagged) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = __ldcg(reinterpret_cast<const float2*>(static_cast<const float*>(given.at) + number_of(i)));
    return;
  }
  Words words[kCount];
  take_words(words, given, number_of, [](int) { return true; });
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    to[i] = {__uint_as_float(static_cast<unsigned>(words[i].first)), __uint_as_float(static_cast<unsigned>(words[i].second))};
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
