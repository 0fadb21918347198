// How the threads and blocks of persistent.cu wait for each other. Compiled as C++ it comes from grid_emulated.h, which the tests hold.
//
// Sources: PTX ISA, "bar", "red", "ld", "st" and "Memory Consistency Model" (release and acquire patterns, causality order).
#pragma once

#ifdef __CUDACC__

#define FL_CONSTANT __grid_constant__ // a parameter that is only read: it has an address in constant memory
#define FL_TABLE __constant__

// The warps that compute.
__device__ __forceinline__ void block_meets() { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); }

// Waits until `count` blocks have been here, and sees what their threads wrote before they ended their phase.
__device__ __forceinline__ void blocks_meet(unsigned* counter, unsigned count) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
  unsigned found;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
  } while (found < count);
}

// Words of 8 bytes that other blocks write: each is read and written at once, in no order with anything else. Of two side by side, at a
// multiple of 16 bytes, each is whole.
__device__ __forceinline__ void read_word(const unsigned long long* from, unsigned long long& word) {
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
}
__device__ __forceinline__ void read_words(const unsigned long long* from, unsigned long long& first, unsigned long long& second) {
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(from) : "memory");
}
__device__ __forceinline__ void write_word(unsigned long long* to, unsigned long long word) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}
__device__ __forceinline__ void write_words(unsigned long long* to, unsigned long long first, unsigned long long second) {
  asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(to), "l"(first), "l"(second) : "memory");
}
__device__ __forceinline__ void others_go_on() {} // on a CPU blocks take turns

// A barrier of threads that arrive and others that wait, in shared memory (PTX ISA, "mbarrier"): a phase of it ends with the last arrival.
using Gate = unsigned long long;

__device__ __forceinline__ void gate_opens_after(Gate* gate, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(gate)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void gates_are_there() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void gate_arrives(Gate* gate) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(gate)) : "memory");
}

// Waits for the end of a phase: the first is of parity 0, the next of 1, and so on. What threads of this block wrote, or copied, before they
// arrived is seen then: no more than that, since a wider scope empties the L1 cache every time.
__device__ __forceinline__ void gate_waits(Gate* gate, unsigned parity) {
  asm volatile("{\n.reg .pred open;\nagain%=:\nmbarrier.try_wait.parity.shared::cta.b64 open, [%0], %1;\n@!open bra again%=;\n}" ::"r"(
                   shared_address(gate)),
               "r"(parity)
               : "memory");
}

// The same where the other block of a pair wrote.
__device__ __forceinline__ void gate_waits_for_partner(Gate* gate, unsigned parity) {
  asm volatile("{\n.reg .pred open;\nagain%=:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 open, [%0], %1;\n@!open bra again%=;\n}" ::"r"(
                   shared_address(gate)),
               "r"(parity)
               : "memory");
}

// Arrives, and keeps the phase from ending before so many bytes are written by `give_partner`.
__device__ __forceinline__ void gate_expects(Gate* gate, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(gate)), "r"(bytes) : "memory");
}

// The same place of shared memory in the other block of a pair.
__device__ __forceinline__ unsigned in_partner(const void* at) {
  unsigned place;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(place) : "r"(shared_address(at)), "r"(1 - blockIdx.x % 2));
  return place;
}

// Writes into the other block's shared memory; its gate counts the bytes, so no fence is needed (PTX ISA, "st.async").
__device__ __forceinline__ void give_partner(float* at, float value, Gate* gate) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(in_partner(at)), "f"(value),
               "r"(in_partner(gate))
               : "memory");
}

#else
#include <grid_emulated.h>
#endif
