// epilogue.cu as a C++ library: run_<entry>(grid, block, arguments).
#include "epilogue.cu"

#include <tuple>
#include <utility>

template <auto kKernel> struct Runner;
template <typename... P, void (*kKernel)(P...)> struct Runner<kKernel> {
  template <std::size_t... I> static void call(void* const* arguments, std::index_sequence<I...>) {
    kKernel(*static_cast<P*>(arguments[I])...);
  }
  static void body(void* const* arguments) { call(arguments, std::index_sequence_for<P...>{}); }
};

extern "C" void run_epilogue_forward(const unsigned* grid, const unsigned* block, void* const* arguments) {
  launch(Runner<epilogue_forward>::body, grid, block, arguments);
}
extern "C" void run_epilogue_backward(const unsigned* grid, const unsigned* block, void* const* arguments) {
  launch(Runner<epilogue_backward>::body, grid, block, arguments);
}
#if FL_DBIAS
extern "C" void run_epilogue_sum(const unsigned* grid, const unsigned* block, void* const* arguments) {
  launch(Runner<epilogue_sum>::body, grid, block, arguments);
}
#endif
