// The barriers of grid.cuh on a CPU.
#pragma once
#include "cluster_emulated.h"

#define FL_CONSTANT
#define FL_TABLE static

inline const unsigned kWorking = kThreads;
inline Barrier computing[kMostBlocks];
inline void block_meets() { computing[block_in_cluster].wait(kWorking); }

using Word = unsigned long long;
inline void whole(const void* at, std::size_t bytes) { // an address of such words
  if (reinterpret_cast<std::uintptr_t>(at) % bytes) std::abort();
}
inline void read_word(const Word* from, Word& word) {
  whole(from, 8);
  word = *static_cast<const volatile Word*>(from);
}
inline void read_words(const Word* from, Word& first, Word& second) {
  whole(from, 16);
  read_word(from, first);
  read_word(from + 1, second);
}
inline void write_word(Word* to, Word word) {
  whole(to, 8);
  *to = word;
}
inline void write_words(Word* to, Word first, Word second) {
  whole(to, 16);
  write_word(to, first);
  write_word(to + 1, second);
}
inline void others_go_on() { hand_over(); }

struct Gate {
  std::uint8_t expected, pending;
  std::uint16_t phase;
  int bytes; // still to come in this phase
};
inline void gate_opens_after(Gate* gate, int arrivals) {
  *gate = {static_cast<std::uint8_t>(arrivals), static_cast<std::uint8_t>(arrivals), 0, 0};
}
inline void gates_are_there() {}
inline void gate_may_open(Gate* gate) {
  if (gate->pending == 0 && gate->bytes == 0) gate->pending = gate->expected, ++gate->phase;
}
inline void gate_arrives(Gate* gate) {
  if (gate->pending-- == 0) std::abort();
  gate_may_open(gate);
}
inline void gate_expects(Gate* gate, unsigned bytes) {
  gate->bytes += static_cast<int>(bytes);
  gate_arrives(gate);
}
inline void gate_waits(Gate* gate, unsigned parity) {
  while ((*static_cast<volatile std::uint16_t*>(&gate->phase) & 1) == parity) hand_over();
}
inline void gate_waits_for_partner(Gate* gate, unsigned parity) { gate_waits(gate, parity); }
template <class Value> Value* in_partner(Value* at) {
  const auto place = reinterpret_cast<unsigned char*>(at) - shared_memory;
  if (place < 0 || place >= static_cast<long>(shared_bytes) || !alive[block_in_cluster ^ 1]) std::abort();
  return reinterpret_cast<Value*>(shared_memories[block_in_cluster ^ 1] + place);
}
inline void give_partner(float* at, float value, Gate* gate) {
  *in_partner(at) = value;
  Gate* const its = in_partner(gate);
  its->bytes -= static_cast<int>(sizeof(float));
  gate_may_open(its);
}

inline void blocks_meet(unsigned* counter, unsigned count) {
  ++*counter;
  while (*counter < count) hand_over();
}
