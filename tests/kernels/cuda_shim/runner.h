// Calls a kernel with the parameters that pointers lead to, as cuLaunchKernel takes them.
#pragma once
#include "standard.h"

template <auto kKernel> struct Runner;
template <typename... P, void (*kKernel)(P...)> struct Runner<kKernel> {
  template <std::size_t... I> static void call(void* const* arguments, std::index_sequence<I...>) {
    kKernel(*static_cast<P*>(arguments[I])...);
  }
  static void body(void* const* arguments) { call(arguments, std::index_sequence_for<P...>{}); }
};

#define FL_RUN(entry)                                                                                             \
  extern "C" void run_##entry(const unsigned* grid, const unsigned* block, void* const* arguments) {              \
    launch(Runner<entry>::body, grid, block, arguments);                                                          \
  }

#define FL_RUN_CLUSTER(entry, blocks)                                                                             \
  extern "C" void run_##entry(const unsigned* grid, const unsigned* block, void* const* arguments) {              \
    launch(Runner<entry>::body, grid, block, arguments, blocks);                                                  \
  }
