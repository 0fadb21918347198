// probe.cu as a C++ library: run_<entry>(grid, block, arguments).
#include "cuda_bf16.h"

#include "probe.cu"

#include "runner.h"

FL_RUN(mask_probe)
