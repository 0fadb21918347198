// gated.cu as a C++ library: run_<entry>(grid, block, arguments).
#define FL_BLOCK_STARTS
#include "gated.cu"

#include "runner.h"

FL_RUN(gated_forward)
