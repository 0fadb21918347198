// The instructions of cluster.cuh on a CPU: copies arrive with their group, and the blocks of a cluster run in turns.
#pragma once
#include "warp_emulated.h"

inline void copies_closed() { ++closed_groups[of_cluster_thread()]; }

template <int kLeft> void copies_left() {
  const unsigned thread = of_cluster_thread();
  auto& mine = copies[thread];
  std::size_t kept = 0;
  for (const Copy& copy : mine) {
    if (copy.group + kLeft < closed_groups[thread])
      std::memcpy(copy.to, copy.content, copy.bytes);
    else
      mine[kept++] = copy;
  }
  mine.erase(mine.begin() + static_cast<std::ptrdiff_t>(kept), mine.end());
}

inline void copy_16_once(void* to, const void* from, bool inside) { copy_16(to, from, inside); }

inline void warp_meets() { show({0u}); }

// Of the threads of the cluster that have not returned; one that has cannot be waited for, nor its block's memory be read.
inline void cluster_arrives() {}
inline void cluster_waits() { of_cluster.wait(alive_in_cluster); }

inline float of_block(const float* at, int block) {
  const auto place = reinterpret_cast<const unsigned char*>(at) - shared_memory;
  if (place < 0 || place >= static_cast<long>(shared_bytes) || !alive[block]) std::abort();
  float value;
  std::memcpy(&value, shared_memories[block] + place, 4);
  return value;
}

inline void prefetch_to_l2(const void* from, unsigned bytes) { // it has to be there to be read
  if (reinterpret_cast<std::uintptr_t>(from) % 16 || bytes % 16) std::abort();
  static std::vector<unsigned char> seen;
  seen.assign(static_cast<const unsigned char*>(from), static_cast<const unsigned char*>(from) + bytes);
}
