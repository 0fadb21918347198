// The barriers of grid.cuh on a CPU.
#pragma once
#include "cluster_emulated.h"

#define FL_CONSTANT

inline const unsigned kWorking = kThreads;
inline Barrier computing[kMostBlocks];
inline void block_meets() { computing[block_in_cluster].wait(kWorking); }

struct Gate {
  std::uint16_t expected, pending;
  unsigned phase;
};
inline void gate_opens_after(Gate* gate, int arrivals) {
  *gate = {static_cast<std::uint16_t>(arrivals), static_cast<std::uint16_t>(arrivals), 0};
}
inline void gates_are_there() {}
inline void gate_arrives(Gate* gate) {
  if (--gate->pending == 0) gate->pending = gate->expected, ++gate->phase;
}
inline void gate_waits(Gate* gate, unsigned parity) {
  while ((*static_cast<volatile unsigned*>(&gate->phase) & 1) == parity) hand_over();
}
template <class Value> Value* in_partner(Value* at) {
  const auto place = reinterpret_cast<unsigned char*>(at) - shared_memory;
  if (place < 0 || place >= static_cast<long>(sizeof(shared_memory)) || !alive[block_in_cluster ^ 1]) std::abort();
  return reinterpret_cast<Value*>(shared_memories[block_in_cluster ^ 1] + place);
}
inline void give_partner(float* at, float value) { *in_partner(at) = value; }
inline void gate_of_partner_arrives(Gate* gate) { gate_arrives(in_partner(gate)); }

inline void blocks_meet(unsigned* counter, unsigned count) {
  ++*counter;
  while (*counter < count) hand_over();
}
