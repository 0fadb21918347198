// The barriers of grid.cuh on a CPU.
#pragma once
#include "cluster_emulated.h"

#define FL_CONSTANT

inline Barrier computing[kMostBlocks];
inline void block_meets() { computing[block_in_cluster].wait(kThreads); }
inline void block_ends_phase() { __syncthreads(); }

inline void blocks_meet(unsigned* counter, unsigned count) {
  ++*counter;
  while (*counter < count) hand_over();
}
