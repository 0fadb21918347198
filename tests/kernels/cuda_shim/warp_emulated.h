// The instructions of warp.cuh on a CPU: lanes show each other their operands. Copies to shared memory arrive when they are waited for, and
// shared memory is full of NaN when a block starts, and has as many bytes as the launch asked for.
#pragma once
#include "cuda_bf16.h"

#include <cstring>

alignas(128) inline unsigned char shared_memories[kMostBlocks][232448]; // of the blocks of a cluster
#define shared_memory (shared_memories[block_in_cluster])

struct Copy {
  void* to;
  unsigned char content[16];
  int bytes;
  unsigned group;
};
inline std::vector<Copy> copies[kMostBlocks * 32 * 32]; // of each thread, on their way
inline unsigned closed_groups[kMostBlocks * 32 * 32];    // of them

inline void block_starts() {
  std::memset(shared_memories, 0xff, blocks_in_cluster * sizeof(shared_memories[0]));
  for (unsigned i = 0; i < blocks_in_cluster * 32 * 32; ++i) copies[i].clear(), closed_groups[i] = 0;
}

// A block that wrote behind the shared memory that it asked for would write into another's on a GPU, or fault.
inline void block_ends() {
  const std::size_t most = sizeof(shared_memories[0]), seen = most - shared_bytes < 4096 ? most - shared_bytes : 4096;
  for (unsigned block = 0; block < blocks_in_cluster; ++block)
    for (std::size_t i = 0; i < seen; ++i)
      if (shared_memories[block][shared_bytes + i] != 0xff) std::abort();
}

inline void copy_of(void* to, const void* from, bool inside, int bytes) {
  const auto at = static_cast<unsigned char*>(to) - shared_memory;
  if (at < 0 || at + bytes > static_cast<long>(shared_bytes) || at % bytes) std::abort();
  if (inside && reinterpret_cast<std::uintptr_t>(from) % bytes) std::abort();
  Copy copy{to, {}, bytes, closed_groups[of_cluster_thread()]};
  if (inside) std::memcpy(copy.content, from, bytes);
  copies[of_cluster_thread()].push_back(copy);
}
inline void copy_16(void* to, const void* from, bool inside) { copy_of(to, from, inside, 16); }
inline void copy_4(void* to, const void* from, bool inside) { copy_of(to, from, inside, 4); }
inline void copies_done() {
  auto& mine = copies[of_cluster_thread()];
  for (const Copy& copy : mine) std::memcpy(copy.to, copy.content, copy.bytes);
  mine.clear();
}

inline float exp2_of(float x) { return exp2f(x); }

inline float from_lane(float x, int other) {
  const auto all = show({std::bit_cast<unsigned>(x)});
  return std::bit_cast<float>(all[thread_number() % 32 ^ other][0]);
}

inline const unsigned char* row_of(const unsigned (*all)[kShown], unsigned lane) {
  return shared_memory + all[lane][0];
}
inline unsigned offset_of(const void* row) {
  return static_cast<unsigned>(static_cast<const unsigned char*>(row) - shared_memory);
}

inline void load_matrices(unsigned (&to)[4], const void* row) {
  const auto all = show({offset_of(row)});
  const unsigned lane = thread_number() % 32;
  for (unsigned i = 0; i < 4; ++i) std::memcpy(&to[i], row_of(all, 8 * i + lane / 4) + lane % 4 * 4, 4);
}

inline void load_transposed(unsigned (&to)[4], const void* row) {
  const auto all = show({offset_of(row)});
  const unsigned lane = thread_number() % 32;
  for (unsigned i = 0; i < 4; ++i) {
    std::uint16_t both[2];
    for (unsigned j = 0; j < 2; ++j) std::memcpy(&both[j], row_of(all, 8 * i + lane % 4 * 2 + j) + lane / 4 * 2, 2);
    std::memcpy(&to[i], both, 4);
  }
}

template <typename Value> Value half_of(unsigned word, unsigned half) {
  const std::uint16_t bits = static_cast<std::uint16_t>(word >> (16 * half));
  Value value;
  std::memcpy(static_cast<void*>(&value), &bits, 2);
  return value;
}

template <typename Value> void multiply_16(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  const auto all = show({a[0], a[1], a[2], a[3], b[0], b[1]});
  const unsigned lane = thread_number() % 32;
  for (unsigned e = 0; e < 4; ++e) {
    const unsigned i = lane / 4 + 8 * (e / 2), j = lane % 4 * 2 + e % 2;
    double total = sum[e];
    for (unsigned k = 0; k < 16; ++k) {
      const Value x = half_of<Value>(all[i % 8 * 4 + k % 8 / 2][i / 8 + 2 * (k / 8)], k % 2);
      const Value y = half_of<Value>(all[j * 4 + k % 8 / 2][4 + k / 8], k % 2);
      total += static_cast<double>(static_cast<float>(x)) * static_cast<float>(y);
    }
    sum[e] = static_cast<float>(total);
  }
}
inline void multiply_bf16(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  multiply_16<__nv_bfloat16>(sum, a, b);
}
inline void multiply_half(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  multiply_16<__half>(sum, a, b);
}

inline unsigned round_tf32(float x) {
  const unsigned bits = std::bit_cast<unsigned>(x);
  return std::isfinite(x) ? (bits + 0x1000) & 0xffffe000 : bits;
}

inline void multiply_tf32(float (&sum)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  const auto all = show({a[0], a[1], a[2], a[3], b[0], b[1]});
  const unsigned lane = thread_number() % 32;
  for (unsigned e = 0; e < 4; ++e) {
    const unsigned i = lane / 4 + 8 * (e / 2), j = lane % 4 * 2 + e % 2;
    double total = sum[e];
    for (unsigned k = 0; k < 8; ++k) {
      const float x = std::bit_cast<float>(all[i % 8 * 4 + k % 4][i / 8 + 2 * (k / 4)] & 0xffffe000);
      const float y = std::bit_cast<float>(all[j * 4 + k % 4][4 + k / 4] & 0xffffe000);
      total += static_cast<double>(x) * y;
    }
    sum[e] = static_cast<float>(total);
  }
}
