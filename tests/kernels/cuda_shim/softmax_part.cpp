// softmax_part.cu as a C++ library: run_<entry>(grid, block, arguments).
#define FL_BLOCK_STARTS
#include "softmax_part.cu"

#include "runner.h"

FL_RUN(softmax_part)
